"""What a node reports and measures of its handoffs. Pure: the caller passes the time in and holds the locks.

How fast the bytes of a pair move; what each writer process holds of a receiver's region; the region's blocks by class;
and the trace points of a handoff, for whoever measures one. Nothing here changes what it watches. Times are seconds of
a clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from baton.ids import GrantId, Pair, RequestKey
from baton.log import get_log
from baton.wire import BlockLoad
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import (
    CommitAsked,
    GrantState,
    GrantTimerFired,
    PairFenced,
    ReceiverEvent,
    ReceiverInstruction,
    ReceiverMachine,
    RecordsChecked,
    RequestCancelled,
    ReserveAsked,
    ResolveAsked,
    SealLanded,
    StartGrantTimer,
    StopGrantTimers,
    TimerKind,
    WriterReleased,
    WriterSuspected,
)
from kvtransfer.transport import TransportName

log = get_log("receiver")

RECENT_S: Final = 10
"""What counts as recent: this second of the clock and those before it, so many in all."""

LEASE_RAN_OUT: Final = "its lease ran out"
_TAKEN_BACK_BY: Final[Mapping[type, str]] = {
    RequestCancelled: "its request was cancelled",
    ResolveAsked: "its router asked whether it had committed, and it had not",
    ReserveAsked: "a newer attempt of its request came",
    WriterSuspected: "its writer was lost",
    WriterReleased: "its writer released another grant with writes in doubt",
    GrantTimerFired: "another grant of its writer was not given back",
}
_EVIDENCE: Final[Mapping[type, str]] = {
    PairFenced: "a fence",
    WriterReleased: "the writer's release",
    ReserveAsked: "the writer's release",
    SealLanded: "seals and commit",
    CommitAsked: "seals and commit",
    RecordsChecked: "seals and commit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes, and how long it took to move them."""

    nbytes: int
    moving_s: float

    @property
    def bytes_per_s(self) -> float:
        """0 where nothing has moved."""
        return self.nbytes / self.moving_s if self.moving_s > 0 else 0.0


@dataclass(slots=True, kw_only=True)
class _Second:
    number: int
    nbytes: int = 0
    moving_s: float = 0.0


class RecentSums:
    """Bytes and times of the last RECENT_S seconds, at most one entry for each."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=RECENT_S)

    def add(self, now_s: float, nbytes: int, moving_s: float = 0.0) -> None:
        number = int(now_s // 1)
        if not self._seconds or self._seconds[-1].number < number:
            self._seconds.append(_Second(number=number))
        newest = self._seconds[-1]
        newest.nbytes += nbytes
        newest.moving_s += moving_s

    def sums(self, now_s: float) -> Moved:
        oldest = now_s // 1 - RECENT_S
        recent = [second for second in self._seconds if second.number > oldest]
        return Moved(nbytes=sum(s.nbytes for s in recent), moving_s=sum(s.moving_s for s in recent))


class PairSpeed:
    """Bytes that were copied, over the time with a posted batch outstanding: what the path does while it has work.

    A batch counts with its completion, and the time since the last event with it, so that both are always of the same
    batches. Where nothing completes the time goes on, and the rate falls.
    """

    def __init__(self) -> None:
        self._outstanding_bytes = 0
        self._counted_to_s = 0.0
        """Of the time with something outstanding; without meaning while there is nothing."""
        self.restart(0.0)

    def posted(self, nbytes: int, now_s: float) -> None:
        """They are about to be posted: a completion may come at once."""
        if self._outstanding_bytes == 0:
            self._counted_to_s = now_s
        self._outstanding_bytes += nbytes

    def completed(self, nbytes: int, now_s: float, *, copied: bool) -> None:
        """So many of the posted bytes are outstanding no more; not `copied`: they have not moved."""
        moving_s = self._uncounted_s(now_s)
        # A surplus completion must not end the node over a statistic.
        self._outstanding_bytes = max(0, self._outstanding_bytes - nbytes)
        self._counted_to_s = now_s
        moved_bytes = nbytes if copied else 0
        self._bytes += moved_bytes
        self._moving_s += moving_s
        self._recent.add(now_s, moved_bytes, moving_s)

    def restart(self, now_s: float) -> None:
        """From here on another path is measured. What is outstanding completes all the same."""
        self._bytes = 0
        self._moving_s = 0.0
        self._counted_to_s = now_s
        self._recent = RecentSums()

    def in_all(self, now_s: float) -> Moved:
        """Since the path was last changed."""
        return Moved(nbytes=self._bytes, moving_s=self._moving_s + self._uncounted_s(now_s))

    def recent(self, now_s: float) -> Moved:
        """Of the last RECENT_S seconds, and the whole time that what is outstanding has taken so far."""
        sums = self._recent.sums(now_s)
        return Moved(nbytes=sums.nbytes, moving_s=sums.moving_s + self._uncounted_s(now_s))

    def _uncounted_s(self, now_s: float) -> float:
        return now_s - self._counted_to_s if self._outstanding_bytes else 0.0


class LandedBytes:
    """What seals vouch for at a receiver. It sees no single write, so the rate is one of the clock's time."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._recent = RecentSums()

    def add(self, nbytes: int, now_s: float) -> None:
        self.nbytes += nbytes
        self._recent.add(now_s, nbytes)

    def per_s(self, now_s: float) -> float:
        """Over the last RECENT_S seconds, pauses included."""
        return self._recent.sums(now_s).nbytes / (RECENT_S - 1 + now_s % 1) if self.nbytes else 0.0


def block_load(ledger: Ledger) -> BlockLoad:
    """The region's blocks by class, from the running books."""
    counts = ledger.books()
    return BlockLoad(
        quarantined=counts.quarantined,
        writer_owned=counts.writer_owned,
        held=counts.held,
        cached=counts.cached,
        free=counts.free,
        promised=counts.promised,
        pinned=counts.pinned,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterPlace:
    """A writer process, for people. `transport` is that of its newest connection."""

    name: str
    host: str
    transport: TransportName


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterHolding:
    """One writer process."""

    pair: Pair
    place: WriterPlace
    grants: int
    """Those under which it may still write."""
    blocks_granted: int
    """Under these grants, the quarantined ones left out."""
    blocks_quarantined: int
    taken_back_s: float | None
    """How long ago the oldest of what is being taken back was begun to be; None: nothing is."""
    quarantined_s: float | None
    """How long its quarantine has lasted; None: it is not quarantined."""
    why: str
    """That the oldest of these is being taken back."""
    bytes_landed: int
    """Of handoffs whose seals have come, since the writer was first met."""
    landed_per_s: float
    """The same for each of the last seconds (`pair_speed.RECENT_S`), pauses included."""


@dataclass(slots=True, kw_only=True)
class _TakenBack:
    pair: Pair
    blocks: int
    since_s: float
    why: str
    quarantined: bool = False


@dataclass(slots=True, kw_only=True)
class _Quarantine:
    """Of one writer, from its first grant in quarantine to the last."""

    since_s: float
    grants: int = 0
    """In it now."""
    blocks: int = 0
    """In it so far."""


class WriterHoldings:
    """For people: an operator who sees quarantined blocks wants to know whose they are, since when they are being taken
    back, and why.

    It watches the receiver's machine from outside, by its events and instructions. `follow` is called after the machine
    has handled an event, before the instructions are carried out. Control thread only.
    """

    def __init__(
        self, grants: ReceiverMachine, *, places: Mapping[Pair, WriterPlace], now_s: Callable[[], float]
    ) -> None:
        """`places` has the known writers. It is read here, not changed."""
        self._grants = grants
        self._places = places
        self._now_s = now_s
        self._taken_back: dict[GrantId, _TakenBack] = {}
        self._quarantines: dict[Pair, _Quarantine] = {}
        self._landed: dict[Pair, LandedBytes] = {}

    def follow(self, event: ReceiverEvent, instructions: Sequence[ReceiverInstruction]) -> None:
        """A revocation timer starts when a grant begins to be taken back, and again with each round; all timers of a
        grant stop when its writer's right is over. What a seal vouches for has landed."""
        for instruction in instructions:
            if isinstance(instruction, StartGrantTimer):
                if instruction.kind is TimerKind.REVOKE:
                    self._going_back(instruction.grant, event)
            elif isinstance(instruction, StopGrantTimers) and instruction.grant in self._taken_back:
                self._back(self._taken_back.pop(instruction.grant), event)
        if isinstance(event, SealLanded) and event.pair in self._places:
            self._landed.setdefault(event.pair, LandedBytes()).add(event.bytes_written, self._now_s())

    def forget(self, pair: Pair) -> None:
        """The writer is not known any more."""
        self._landed.pop(pair, None)

    def of_writers(self) -> list[WriterHolding]:
        """Every writer that is known, those that hold nothing included."""
        now_s = self._now_s()
        grants: dict[Pair, int] = {}
        blocks: dict[Pair, list[int]] = {}
        for pair, state, count in self._grants.owned():
            grants[pair] = grants.get(pair, 0) + 1
            blocks.setdefault(pair, [0, 0])[state is GrantState.QUARANTINED] += count
        oldest: dict[Pair, _TakenBack] = {}
        for taken in self._taken_back.values():  # in the order in which they began
            oldest.setdefault(taken.pair, taken)
        found = []
        for pair, place in self._places.items():
            taken_back, quarantine = oldest.get(pair), self._quarantines.get(pair)
            granted, quarantined = blocks.get(pair, (0, 0))
            landed = self._landed.get(pair) or LandedBytes()
            found.append(
                WriterHolding(
                    pair=pair,
                    place=place,
                    grants=grants.get(pair, 0),
                    blocks_granted=granted,
                    blocks_quarantined=quarantined,
                    taken_back_s=None if taken_back is None else now_s - taken_back.since_s,
                    quarantined_s=None if quarantine is None else now_s - quarantine.since_s,
                    why="" if taken_back is None else taken_back.why,
                    bytes_landed=landed.nbytes,
                    landed_per_s=landed.per_s(now_s),
                )
            )
        return found

    def name_of(self, pair: Pair) -> str:
        """A writer process as the log names it: name and incarnation."""
        place = self._places.get(pair)
        return f"{place.name if place is not None and place.name else 'unknown'}/{pair.writer:016x}"

    def _going_back(self, grant: GrantId, event: ReceiverEvent) -> None:
        taken = self._taken_back.get(grant)
        if taken is None:
            owner = self._grants.owner(grant)
            assert owner is not None, grant
            pair, blocks = owner
            taken = _TakenBack(pair=pair, blocks=blocks, since_s=self._now_s(), why=_why(event))
            self._taken_back[grant] = taken
        if not taken.quarantined and self._grants.state_of(grant) is GrantState.QUARANTINED:
            taken.quarantined = True
            self._quarantined(taken)

    def _quarantined(self, taken: _TakenBack) -> None:
        now_s = self._now_s()
        quarantine = self._quarantines.get(taken.pair)
        if quarantine is None:
            quarantine = self._quarantines[taken.pair] = _Quarantine(since_s=now_s)
            place = self._places.get(taken.pair)
            log.warning(
                "quarantine begins: no evidence that the writer has stopped writing",
                writer=self.name_of(taken.pair),
                host=place.host if place is not None else "",
                transport=place.transport.value if place is not None else "",
                blocks=taken.blocks,
                blocks_to_come=sum(
                    other.blocks
                    for other in self._taken_back.values()
                    if other.pair == taken.pair and not other.quarantined
                ),
                why=taken.why,
                asked_back_s=round(now_s - taken.since_s, 1),
            )
        quarantine.grants += 1
        quarantine.blocks += taken.blocks

    def _back(self, taken: _TakenBack, event: ReceiverEvent) -> None:
        if not taken.quarantined:
            return
        quarantine = self._quarantines[taken.pair]
        quarantine.grants -= 1
        if quarantine.grants == 0:
            del self._quarantines[taken.pair]
            log.warning(
                "quarantine ends",
                writer=self.name_of(taken.pair),
                blocks=quarantine.blocks,
                seconds=round(self._now_s() - quarantine.since_s, 1),
                evidence=_EVIDENCE[type(event)],
            )


def _why(event: ReceiverEvent) -> str:
    if isinstance(event, GrantTimerFired) and event.kind is TimerKind.LEASE:
        return LEASE_RAN_OUT
    return _TAKEN_BACK_BY[type(event)]


class HandoffObserver:
    """Trace points of the handoffs of a process, each called as it happens. These do nothing: whoever measures passes a
    subclass to the writer (`WriterPeer`).

    An observer is called in the middle of things: it must return at once and not raise. No time is passed: it takes its
    own. On the control thread, except `layer_posted`, which the engine thread calls after each layer, and the control
    thread for records that were cached.
    """

    def granted(self, key: RequestKey, *, prefix_skip: int) -> None:
        """The receiver has so many blocks already."""

    def planned(self, key: RequestKey, *, layers: int, writes: int) -> None:
        """A step begins that will post so many records."""

    def layer_posted(self, key: RequestKey, layer: int, *, writes: int, nbytes: int) -> None:
        """A layer of a step is computed, and its finished records are with the transport."""

    def completed(self, key: RequestKey, *, writes: int) -> None:
        """The transport has let go of so many records, in the order in which they were posted."""

    def all_posted(self, key: RequestKey) -> None:
        """The first token is drawn; seal and Commit are on their way as soon as may be."""

    def sealed(self, key: RequestKey) -> None:
        """The last write is completed and the seal is behind it."""

    def ended(self, key: RequestKey, *, committed: bool) -> None:
        """It is over."""
