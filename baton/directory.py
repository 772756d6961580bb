"""The embedded directory's state: the record of each node, by name and for a limited time. Pure; hints only.

Records stay the messages that they arrived in, so that fields of a later version pass through.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from batonpb.directory_pb2 import NodeRecord, RemoveRequest, WatchEvent

from baton.errors import BatonError, InvalidField, Reason, bad_field, check_positive
from baton.wire import check_record


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLimits:
    """Fixed; tests pass others."""

    records_max: int = 4096
    ttl_ms_min: int = 200
    """Shortest time to live that a node may ask for."""
    ttl_ms_max: int = 60_000
    removals_kept_max: int = 1024
    """A watcher that missed more removals gets a new snapshot."""
    gone_kept_max: int = 4096
    """Incarnations that left or were replaced; a late push of one is refused for `ttl_ms_max`."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)
        if self.ttl_ms_min > self.ttl_ms_max:
            raise InvalidField("ttl_ms_min", "must not exceed ttl_ms_max")


class PushOutcome(Enum):
    ADDED = "added"
    CHANGED = "changed"
    RENEWED = "renewed"  # only its time changed: watchers get no event
    REPLACED = "replaced"  # another incarnation at the same endpoint took over
    STALE = "stale"  # a later push of the same incarnation came first; ignored


@dataclass(slots=True, kw_only=True)
class _Entry:
    record: NodeRecord
    expires_s: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    removal: RemoveRequest
    version: int
    expired: bool
    """The node did not remove itself."""


class DirectoryState:
    """Times are seconds of one monotonic clock, passed in. Every method first lets overdue records expire."""

    def __init__(self, *, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._version = 0
        self._left: OrderedDict[str, _Left] = OrderedDict()
        """The last removal of each name that nobody holds; oldest first."""
        self._complete_since = 0
        """A watcher at this version or a later one needs no snapshot."""
        self._gone: OrderedDict[int, float] = OrderedDict()
        """Incarnation to the end of its refusal; oldest first."""

    @property
    def version(self) -> int:
        """Rises with every change that watchers must see."""
        return self._version

    def push(self, record: NodeRecord, *, ttl_ms: int, now_s: float) -> PushOutcome:
        """Register or renew. Takes ownership of `record`.

        Two living processes cannot hold one port, so another incarnation at the same endpoint takes the name over at
        once. At another endpoint it has to wait until the holder's record has expired.

        Raises BatonError with nothing changed: NAME_IN_USE, INCARNATION_MISMATCH (this incarnation was replaced or
        removed), DIRECTORY_FULL, or what `check_record` raises.
        """
        check_push(record, ttl_ms, self._limits)
        self.expire(now_s=now_s)
        expires_s = now_s + ttl_ms / 1e3
        holder = self._entries.get(record.name)
        if record.incarnation in self._gone:
            raise incarnation_gone(record)
        if holder is None:
            if len(self._entries) >= self._limits.records_max:
                raise directory_full(len(self._entries), ttl_ms)
            self._put(record, expires_s)
            return PushOutcome.ADDED
        if holder.record.incarnation != record.incarnation:
            if holder.record.endpoint != record.endpoint:
                left_ms = round((holder.expires_s - now_s) * 1e3)
                raise name_in_use(record.name, holder.record.endpoint, holder.record.incarnation, left_ms)
            self._forget(holder.record.incarnation, now_s)
            self._put(record, expires_s)
            return PushOutcome.REPLACED
        if record.sequence <= holder.record.sequence:
            return PushOutcome.STALE
        holder.expires_s = expires_s
        holder.record.sequence = record.sequence
        if holder.record == record:
            return PushOutcome.RENEWED
        self._put(record, expires_s)
        return PushOutcome.CHANGED

    def remove(self, *, name: str, incarnation: int, now_s: float) -> bool:
        """The node leaves. False if nobody or another incarnation holds the name.

        Watchers also get an event for a name that nobody holds: they may know the node from before a restart.
        """
        self.expire(now_s=now_s)
        # In any case: the Remove may have overtaken the Push.
        self._forget(incarnation, now_s)
        holder = self._entries.get(name)
        if holder is not None and holder.record.incarnation != incarnation:
            return False
        self._entries.pop(name, None)
        self._note_removal(name, incarnation, expired=False)
        return holder is not None

    def expire(self, *, now_s: float) -> tuple[NodeRecord, ...]:
        """Drop expired records and return them. A process that was only stopped may push again."""
        overdue = tuple(entry.record for entry in self._entries.values() if entry.expires_s <= now_s)
        for record in overdue:
            del self._entries[record.name]
            self._note_removal(record.name, record.incarnation, expired=True)
        while self._gone and next(iter(self._gone.values())) <= now_s:
            self._gone.popitem(last=False)
        return overdue

    def stood_still(self, *, gap_s: float) -> None:
        """Extend every expiry by `gap_s`, in which no node could be heard. The first call at the new time."""
        for entry in self._entries.values():
            entry.expires_s += gap_s
        for incarnation in self._gone:
            self._gone[incarnation] += gap_s

    def list(self, *, now_s: float) -> tuple[NodeRecord, ...]:
        """All live records by name. Shared: read only."""
        self.expire(now_s=now_s)
        return tuple(self._entries[name].record for name in sorted(self._entries))

    def changes_since(self, version: int | None, *, now_s: float) -> WatchEvent:
        """What brings a watcher at `version` to the present one; a snapshot for None or a version too far back.

        A record that changed often comes once, as it is now, so nothing queues up for a slow watcher. The removals of a
        snapshot are for watchers that know nodes from before. They leave out nodes whose record expired: the directory
        may be at fault, if no node could reach it.
        """
        self.expire(now_s=now_s)
        snapshot = version is None or version < self._complete_since
        after = -1 if version is None or snapshot else version
        changed = sorted(name for name, entry in self._entries.items() if entry.version > after)
        left = [left for left in self._left.values() if left.version > after and not (snapshot and left.expired)]
        return WatchEvent(
            snapshot=snapshot,
            upserts=[self._entries[name].record for name in changed],
            removals=[each.removal for each in left],
        )

    def _put(self, record: NodeRecord, expires_s: float) -> None:
        self._version += 1
        self._entries[record.name] = _Entry(record=record, expires_s=expires_s, version=self._version)
        self._left.pop(record.name, None)

    def _note_removal(self, name: str, incarnation: int, *, expired: bool) -> None:
        self._version += 1
        self._left.pop(name, None)
        removal = RemoveRequest(name=name, incarnation=incarnation)
        self._left[name] = _Left(removal=removal, version=self._version, expired=expired)
        if len(self._left) > self._limits.removals_kept_max:
            self._complete_since = self._left.popitem(last=False)[1].version

    def _forget(self, incarnation: int, now_s: float) -> None:
        self._gone.pop(incarnation, None)
        self._gone[incarnation] = now_s + self._limits.ttl_ms_max / 1e3
        if len(self._gone) > self._limits.gone_kept_max:
            self._gone.popitem(last=False)


def check_push(record: NodeRecord, ttl_ms: int, limits: DirectoryLimits) -> None:
    """Raises BatonError BAD_FIELD, or what `check_record` raises, for a push that no directory takes."""
    check_record(record)
    if not limits.ttl_ms_min <= ttl_ms <= limits.ttl_ms_max:
        raise bad_field("ttl_ms", f"ttl_ms must be {limits.ttl_ms_min} to {limits.ttl_ms_max}, not {ttl_ms}.")


def incarnation_gone(record: NodeRecord) -> BatonError:
    return BatonError(
        Reason.INCARNATION_MISMATCH,
        f"Incarnation {record.incarnation:016x} of {record.name} was removed or replaced by a later one.",
    )


def directory_full(count: int, ttl_ms: int) -> BatonError:
    return BatonError(
        Reason.DIRECTORY_FULL,
        f"The directory holds {count} records, its limit (records_max).",
        retry_after_ms=ttl_ms,
    )


def name_in_use(name: str, endpoint: str, incarnation: int, left_ms: int) -> BatonError:
    """`endpoint` and `incarnation` are the holder's, whose record expires in `left_ms`."""
    left_ms = max(1, left_ms)
    return BatonError(
        Reason.NAME_IN_USE,
        f"The name {name} is held by the node at {endpoint} (incarnation {incarnation:016x}) for "
        f"another {left_ms} ms unless it renews. Stop that node, or start this one under another name.",
        field="name",
        retry_after_ms=left_ms,
        metadata={"endpoint": endpoint, "incarnation": f"{incarnation:016x}"},
    )
