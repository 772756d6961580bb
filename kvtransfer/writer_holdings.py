"""What each writer process holds of this receiver's region: since when that is being taken back, why, and how it ended.

For people: an operator who sees quarantined blocks wants to know whose they are. It watches the receiver's machine from
outside (its events and instructions), changes nothing, and costs a look at each instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from baton.ids import GrantId, Pair
from baton.log import get_log
from kvtransfer.checksums import WriterPlace
from kvtransfer.grant_book import GrantBook
from kvtransfer.pair_speed import LandedBytes
from kvtransfer.receiver_messages import (
    CommitAsked,
    GrantTimerFired,
    PairFenced,
    ReceiverEvent,
    ReceiverInstruction,
    RecordsChecked,
    RequestCancelled,
    ReserveAsked,
    ResolveAsked,
    SealLanded,
    StartGrantTimer,
    StopGrantTimers,
    TimerKind,
    WriterLetGo,
    WriterSuspected,
)
from kvtransfer.receiver_states import GrantState

log = get_log("receiver")

LEASE_RAN_OUT: Final = "its lease ran out"
_TAKEN_BACK_BY: Final[Mapping[type, str]] = {
    RequestCancelled: "its request was cancelled",
    ResolveAsked: "its router asked whether it had committed, and it had not",
    ReserveAsked: "a newer attempt of its request came",
    WriterSuspected: "its writer was lost",
    WriterLetGo: "its writer let go of another grant with writes on their way",
    GrantTimerFired: "another grant of its writer was not given back",
}
_EVIDENCE: Final[Mapping[type, str]] = {
    PairFenced: "a fence",
    WriterLetGo: "the writer's word",
    ReserveAsked: "the writer's word",
    SealLanded: "seals and commit",
    CommitAsked: "seals and commit",
    RecordsChecked: "seals and commit",
}


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
    """How long its quarantine has lasted; None: there is none."""
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
    """Control thread only. `follow` is called with each event behind the machine, before the instructions are carried
    out."""

    def __init__(self, grants: GrantBook, *, places: Mapping[Pair, WriterPlace], now_s: Callable[[], float]) -> None:
        """`places` are the writers that are known; it is looked at, never changed."""
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

    def told(self, pair: Pair) -> str:
        """A writer process as it is called in the log: name and incarnation."""
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
                writer=self.told(taken.pair),
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
                writer=self.told(taken.pair),
                blocks=quarantine.blocks,
                seconds=round(self._now_s() - quarantine.since_s, 1),
                evidence=_EVIDENCE[type(event)],
            )


def _why(event: ReceiverEvent) -> str:
    if isinstance(event, GrantTimerFired) and event.kind is TimerKind.LEASE:
        return LEASE_RAN_OUT
    return _TAKEN_BACK_BY[type(event)]
