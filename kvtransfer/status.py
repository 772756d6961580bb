"""What a node reports of its handoffs: how many bytes have moved, what each writer holds of a receiver's region.

Pure: the caller passes the time in, in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from batonpb import node_pb2

from baton.ids import GrantId, Pair
from baton.log import get_log
from kvtransfer.protocol import receiver as protocol
from kvtransfer.protocol.receiver import ReceiverMachine
from kvtransfer.transport import TransportName

log = get_log("receiver")

RECENT_S: Final = 10
"""What counts as recent: this second of the clock and those before it, so many in all."""

LEASE_RAN_OUT: Final = "its lease ran out"
_TAKEN_BACK_BY: Final[Mapping[type, str]] = {
    protocol.RequestCancelled: "its request was cancelled",
    protocol.ResolveAsked: "its router asked whether it had committed, and it had not",
    protocol.ReserveAsked: "a newer attempt of its request came",
    protocol.WriterSuspected: "its writer was lost",
    protocol.WriterReleased: "its writer released another grant with writes in doubt",
    protocol.GrantTimerFired: "another grant of its writer was not given back",
}
_EVIDENCE: Final[Mapping[type, str]] = {
    protocol.PairFenced: "a fence",
    protocol.WriterReleased: "the writer's release",
    protocol.ReserveAsked: "the writer's release",
    protocol.SealLanded: "seals and commit",
    protocol.CommitAsked: "seals and commit",
    protocol.RecordsChecked: "seals and commit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes, and how long it took to move them."""

    nbytes: int = 0
    moving_s: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(nbytes=self.nbytes + other.nbytes, moving_s=self.moving_s + other.moving_s)

    @property
    def bytes_per_s(self) -> float:
        """0 where nothing has moved."""
        return self.nbytes / self.moving_s if self.moving_s > 0 else 0.0


class MovedSums:
    """What has moved in all and in the last RECENT_S seconds."""

    def __init__(self) -> None:
        self._nbytes, self._moving_s = 0, 0.0
        self._seconds: deque[tuple[int, int, float]] = deque(maxlen=RECENT_S)
        """The second's number, bytes and time."""

    @property
    def in_all(self) -> Moved:
        return Moved(nbytes=self._nbytes, moving_s=self._moving_s)

    def add(self, nbytes: int, moving_s: float, now_s: float) -> None:
        self._nbytes += nbytes
        self._moving_s += moving_s
        number = int(now_s // 1)
        if self._seconds and self._seconds[-1][0] >= number:
            number, nbytes_before, moving_before_s = self._seconds.pop()
            nbytes, moving_s = nbytes + nbytes_before, moving_s + moving_before_s
        self._seconds.append((number, nbytes, moving_s))

    def recent(self, now_s: float) -> Moved:
        recent = [(nbytes, moving_s) for number, nbytes, moving_s in self._seconds if number > now_s // 1 - RECENT_S]
        return Moved(nbytes=sum(nbytes for nbytes, _ in recent), moving_s=sum(moving_s for _, moving_s in recent))

    def per_s(self, now_s: float) -> float:
        """Bytes in each of the last RECENT_S seconds, pauses included: for who sees no single write."""
        return self.recent(now_s).nbytes / (RECENT_S - 1 + now_s % 1) if self.in_all.nbytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterPlace:
    """A writer process, by its own word. `transport` is that of its newest connection."""

    endpoint: str
    name: str
    host: str
    transport: TransportName


@dataclass(slots=True, kw_only=True)
class _TakenBack:
    pair: Pair
    blocks: int
    since_s: float
    why: str


@dataclass(slots=True, kw_only=True)
class _Quarantine:
    """Of one writer, from its first grant in quarantine to the last."""

    since_s: float
    grants: set[GrantId] = field(default_factory=set)
    """In it now."""
    blocks: int = 0
    """In it so far."""


class WriterHoldings:
    """What an operator who sees quarantined blocks wants to know: whose they are, since when and why they go back.

    `follow` is called after the machine has handled an event, before the instructions are carried out.
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
        self._landed: dict[Pair, MovedSums] = {}
        """What seals vouch for: a receiver sees no single write."""

    def follow(self, event: protocol.ReceiverEvent, instructions: Sequence[protocol.ReceiverInstruction]) -> None:
        """A revocation timer starts when a grant begins to be taken back, and with each round; all timers of a grant
        stop when its writer's right is over."""
        for instruction in instructions:
            if isinstance(instruction, protocol.StartGrantTimer):
                if instruction.kind is protocol.TimerKind.REVOKE:
                    self._going_back(instruction.grant, event)
            elif isinstance(instruction, protocol.CloseGrant) and instruction.grant in self._taken_back:
                self._back(instruction.grant, event)
        if isinstance(event, protocol.SealLanded) and event.pair in self._places:
            self._landed.setdefault(event.pair, MovedSums()).add(event.seal.bytes_written, 0.0, self._now_s())

    def forget(self, pair: Pair) -> None:
        """The writer is not known any more."""
        self._landed.pop(pair, None)

    def of_writers(self) -> list[node_pb2.WriterStatus]:
        """Every writer that is known, those that hold nothing included."""
        now_s = self._now_s()
        found: dict[Pair, node_pb2.WriterStatus] = {}
        for pair, place in self._places.items():
            landed, quarantine = self._landed.get(pair) or MovedSums(), self._quarantines.get(pair)
            found[pair] = node_pb2.WriterStatus(
                writer=place.name,
                writer_incarnation=pair.writer,
                host=place.host,
                transport=place.transport.value,
                quarantined_ms=0 if quarantine is None else _age_ms(quarantine.since_s, now_s),
                bytes_landed=landed.in_all.nbytes,
                landed_per_s=landed.per_s(now_s),
            )
        for grant in self._grants.entries.values():
            if grant.state in protocol.UNCOMMITTED:
                found[grant.pair].grants += 1
                if grant.state is protocol.GrantState.QUARANTINED:
                    found[grant.pair].blocks_quarantined += len(grant.blocks)
                else:
                    found[grant.pair].blocks_granted += len(grant.blocks)
        for taken in reversed(self._taken_back.values()):  # they are in the order in which they began
            found[taken.pair].taken_back_ms, found[taken.pair].why = _age_ms(taken.since_s, now_s), taken.why
        return list(found.values())

    def name_of(self, pair: Pair) -> str:
        """A writer process as the log names it: name and incarnation."""
        place = self._places.get(pair)
        return f"{place.name if place is not None and place.name else 'unknown'}/{pair.writer:016x}"

    def _going_back(self, grant: GrantId, event: protocol.ReceiverEvent) -> None:
        taken = self._taken_back.get(grant)
        if taken is None:
            entry = self._grants.entries[grant]
            lapsed = isinstance(event, protocol.GrantTimerFired) and event.kind is protocol.TimerKind.LEASE
            why = LEASE_RAN_OUT if lapsed else _TAKEN_BACK_BY[type(event)]
            taken = _TakenBack(pair=entry.pair, blocks=len(entry.blocks), since_s=self._now_s(), why=why)
            self._taken_back[grant] = taken
        if self._grants.state_of(grant) is protocol.GrantState.QUARANTINED:
            self._quarantined(grant, taken)

    def _quarantined(self, grant: GrantId, taken: _TakenBack) -> None:
        now_s = self._now_s()
        quarantine = self._quarantines.get(taken.pair)
        if quarantine is None:
            quarantine = self._quarantines[taken.pair] = _Quarantine(since_s=now_s)
            place = self._places[taken.pair]
            others = [t for g, t in self._taken_back.items() if t.pair == taken.pair and g != grant]
            log.warning(
                "quarantine begins: no evidence that the writer has stopped writing",
                writer=self.name_of(taken.pair),
                host=place.host,
                transport=place.transport.value,
                blocks=taken.blocks,
                blocks_to_come=sum(other.blocks for other in others),
                why=taken.why,
                asked_back_s=round(now_s - taken.since_s, 1),
            )
        if grant not in quarantine.grants:
            quarantine.grants.add(grant)
            quarantine.blocks += taken.blocks

    def _back(self, grant: GrantId, event: protocol.ReceiverEvent) -> None:
        taken = self._taken_back.pop(grant)
        quarantine = self._quarantines.get(taken.pair)
        if quarantine is None or grant not in quarantine.grants:
            return
        quarantine.grants.remove(grant)
        if not quarantine.grants:
            del self._quarantines[taken.pair]
            log.warning(
                "quarantine ends",
                writer=self.name_of(taken.pair),
                blocks=quarantine.blocks,
                seconds=round(self._now_s() - quarantine.since_s, 1),
                evidence=_EVIDENCE[type(event)],
            )


def _age_ms(since_s: float, now_s: float) -> int:
    """At least 1: 0 stands for no age at all."""
    return max(1, round((now_s - since_s) * 1000))
