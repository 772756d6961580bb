"""The embedded directory's state: who is in the cluster, by name, each record for a time. Pure; hints only.

Records are kept as the messages they came in, so that fields of a later version pass through.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from batonpb.directory_pb2 import NodeRecord

from baton.errors import BatonError, InvalidField, Reason, bad_field, check_positive
from baton.wire import check_record


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLimits:
    """Fixed; tests pass others."""

    records_max: int = 4096
    """Nodes that it keeps records of."""
    ttl_ms_min: int = 200
    """Shortest time to live that a node may ask for."""
    ttl_ms_max: int = 60_000
    """Longest time to live that a node may ask for."""
    removals_kept_max: int = 1024
    """Removals remembered; a watcher that missed more gets a new snapshot."""
    gone_kept_max: int = 4096
    """Incarnations that left or were replaced, remembered for `ttl_ms_max` against late pushes."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)
        if self.ttl_ms_min > self.ttl_ms_max:
            raise InvalidField("ttl_ms_min", "must not exceed ttl_ms_max")


class PushOutcome(Enum):
    ADDED = "added"
    CHANGED = "changed"
    RENEWED = "renewed"  # nothing new but the time: watchers get no event
    REPLACED = "replaced"  # another incarnation at the same endpoint took over
    STALE = "stale"  # overtaken by a later push of the same incarnation; ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a watcher at some version lacks. The records are shared: read only.

    With `snapshot`, what is not in it is gone; `removals` are then the last that the directory remembers of nodes that
    said goodbye, for a watcher that knows nodes from before. Of a node whose record ran out they say nothing: that the
    directory has not heard of it may be the fault of the directory, which may have been out of reach of everybody.
    """

    version: int
    snapshot: bool
    upserts: tuple[NodeRecord, ...]
    removals: tuple[Removal, ...]


@dataclass(slots=True, kw_only=True)
class _Entry:
    record: NodeRecord
    expires_s: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    removal: Removal
    version: int
    ran_out: bool
    """The node did not say goodbye."""


class Standstill:
    """Notices that this process itself stood still: it looks often, and once did not for longer than `ms_min`.

    Stopped, on a machine that was paused, or without a processor: whoever stands still hears of nobody.
    """

    def __init__(self, *, ms_min: int, now_s: float) -> None:
        self._ms_min = ms_min
        self._looked_s = now_s

    def look(self, *, now_s: float) -> float:
        """For how many seconds beyond `ms_min` it has stood still since the last look; 0 where it has not.

        Only what is beyond: a loop that is always slow must not keep the dead for good.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        return max(0.0, gap_s - self._ms_min / 1e3)


class DirectoryState:
    """Times are seconds of one monotonic clock, passed in. Every method first lets overdue records expire."""

    def __init__(self, *, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._entries: dict[str, _Entry] = {}
        self._version = 0
        self._left: OrderedDict[str, _Left] = OrderedDict()
        """The last removal of each name that is not held; oldest first."""
        self._complete_since = 0
        """Versions from here on can be brought up to date without a snapshot."""
        self._gone: OrderedDict[int, float] = OrderedDict()

    @property
    def version(self) -> int:
        """Rises with every change that watchers should see."""
        return self._version

    def push(self, record: NodeRecord, *, ttl_ms: int, now_s: float) -> PushOutcome:
        """Register or renew. Takes ownership of `record`.

        A port cannot be held by two living processes, so another incarnation at the same endpoint takes the name over
        at once; elsewhere it waits until the holder's record has run out.

        Raises BatonError: NAME_IN_USE, INCARNATION_MISMATCH (this incarnation has been replaced or removed),
        DIRECTORY_FULL, or what `check_record` raises; nothing has changed then.
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
        if _same_but_sequence(holder.record, record):
            holder.record.sequence = record.sequence
            return PushOutcome.RENEWED
        self._put(record, expires_s)
        return PushOutcome.CHANGED

    def remove(self, *, name: str, incarnation: int, now_s: float) -> bool:
        """The node leaves. False where the name is not held, or is held by another incarnation.

        Watchers get an event for a name that is not held too: they may know the node from before a restart.
        """
        self.expire(now_s=now_s)
        # Remembered in any case: the Remove may have overtaken the Push.
        self._forget(incarnation, now_s)
        holder = self._entries.get(name)
        if holder is not None and holder.record.incarnation != incarnation:
            return False
        self._entries.pop(name, None)
        self._note_removal(name, incarnation, ran_out=False)
        return holder is not None

    def expire(self, *, now_s: float) -> tuple[NodeRecord, ...]:
        """Drop overdue records and return them. A process that was only stopped may push again."""
        overdue = tuple(entry.record for entry in self._entries.values() if entry.expires_s <= now_s)
        for record in overdue:
            del self._entries[record.name]
            self._note_removal(record.name, record.incarnation, ran_out=True)
        while self._gone and next(iter(self._gone.values())) <= now_s:
            self._gone.popitem(last=False)
        return overdue

    def stood_still(self, *, gap_s: float) -> None:
        """Nobody could be heard for so long. To be told before anything else is asked at the new time: whatever lasts
        for a time lasts so much longer."""
        for entry in self._entries.values():
            entry.expires_s += gap_s
        for incarnation in self._gone:
            self._gone[incarnation] += gap_s

    def list(self, *, now_s: float) -> tuple[NodeRecord, ...]:
        """All live records by name. Shared: read only."""
        self.expire(now_s=now_s)
        return tuple(self._entries[name].record for name in sorted(self._entries))

    def changes_since(self, version: int | None, *, now_s: float) -> Changes:
        """What a watcher at `version` lacks; None, or a version too far back, gets a snapshot.

        However slow the watcher: a record that changed often comes once, as it is now, and nothing queues up for it.
        """
        self.expire(now_s=now_s)
        snapshot = version is None or version < self._complete_since
        after = -1 if version is None or snapshot else version
        changed = sorted(name for name, entry in self._entries.items() if entry.version > after)
        return Changes(
            version=self._version,
            snapshot=snapshot,
            upserts=tuple(self._entries[name].record for name in changed),
            removals=tuple(
                left.removal for left in self._left.values() if left.version > after and not (snapshot and left.ran_out)
            ),
        )

    def _put(self, record: NodeRecord, expires_s: float) -> None:
        self._version += 1
        self._entries[record.name] = _Entry(record=record, expires_s=expires_s, version=self._version)
        self._left.pop(record.name, None)

    def _note_removal(self, name: str, incarnation: int, *, ran_out: bool) -> None:
        self._version += 1
        self._left.pop(name, None)
        removal = Removal(name=name, incarnation=incarnation)
        self._left[name] = _Left(removal=removal, version=self._version, ran_out=ran_out)
        if len(self._left) > self._limits.removals_kept_max:
            self._complete_since = self._left.popitem(last=False)[1].version

    def _forget(self, incarnation: int, now_s: float) -> None:
        self._gone.pop(incarnation, None)
        self._gone[incarnation] = now_s + self._limits.ttl_ms_max / 1e3
        if len(self._gone) > self._limits.gone_kept_max:
            self._gone.popitem(last=False)


def _same_but_sequence(old: NodeRecord, new: NodeRecord) -> bool:
    compared = NodeRecord()
    compared.CopyFrom(old)
    compared.sequence = new.sequence
    return compared == new


def check_push(record: NodeRecord, ttl_ms: int, limits: DirectoryLimits) -> None:
    """Refuse what no directory takes. Raises BatonError BAD_FIELD, or what `check_record` raises."""
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
    """`endpoint` and `incarnation` are the holder's, whose record runs out in `left_ms`."""
    left_ms = max(1, left_ms)
    return BatonError(
        Reason.NAME_IN_USE,
        f"The name {name} is held by the node at {endpoint} (incarnation {incarnation:016x}) for "
        f"another {left_ms} ms unless it renews. Stop that node, or start this one under another name.",
        field="name",
        retry_after_ms=left_ms,
        metadata={"endpoint": endpoint, "incarnation": f"{incarnation:016x}"},
    )
