"""Short words for what happens to a grant machine, and for what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.ids import Attempt, BlockId, Epoch, GrantId, Incarnation, Pair, RequestId, RequestKey, ReserveNumber
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import (
    UNCOMMITTED,
    AnswerCommit,
    AnswerGranted,
    AnswerRefused,
    CloseGrant,
    CommitAsked,
    GrantState,
    GrantTimerFired,
    PairFenced,
    ReceiverInstruction,
    ReceiverLimits,
    ReceiverMachine,
    RecordsChecked,
    Refusal,
    ReserveAsked,
    ScheduleRequest,
    SealLanded,
    SendRevoke,
    StartGrantTimer,
    TimerKind,
    WriterReleased,
)
from kvtransfer.protocol.writer import (
    AbandonWrites,
    AllPosted,
    HandoffAsked,
    HandoffEnd,
    ReleaseSources,
    ReportEnd,
    ReserveGranted,
    RevokeAsked,
    SendCommit,
    SendRelease,
    SendReserve,
    WriterInstruction,
    WriterMachine,
    WriterState,
    WritesCompleted,
    WritesPosted,
)
from kvtransfer.transport import Seal

PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(2))
OTHER_PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(3))
LIMITS = ReceiverLimits(live_span_max=4, revoke_rounds_before_fence=1, revoke_rounds_before_quarantine=2)
EPOCH_0, EPOCH_1 = Epoch(0), Epoch(1)


def key_of(request: str = "r", attempt: int = 1) -> RequestKey:
    return RequestKey(request=RequestId(request), attempt=Attempt(attempt))


def grant_of(number: int, pair: Pair = PAIR) -> GrantId:
    return GrantId(bytes((pair.writer, number)))


def seal_of(grant: GrantId, *, writes: int, epoch: Epoch = EPOCH_0) -> Seal:
    return Seal(grant=grant, epoch=epoch, writes=writes, bytes_written=writes * 10)


def nth(n: int) -> ReserveNumber:
    return ReserveNumber(n)


class AdmittingReceiver(ReceiverMachine):
    """A receiver machine that a port asks about each write. Real ports are told of each grant."""

    def admits_write(self, pair: Pair, epoch: Epoch, grant: GrantId) -> bool:
        """May bytes of this grant, on a connection of this epoch, land?

        The epoch alone is not enough. After a connection broke, its writer releases the grant while bytes may still be
        on their way here, in an epoch that nobody had a reason to raise.
        """
        known = self._grant(grant, pair)
        return known is not None and known.state in UNCOMMITTED and known.epoch == epoch == self.epoch(pair)


@dataclass
class Receiver:
    """A receiver machine over a region of four blocks, and short words for what is done to it."""

    blocks: int = 4
    limits: ReceiverLimits = LIMITS
    machine: AdmittingReceiver = field(init=False)

    def __post_init__(self) -> None:
        self.machine = AdmittingReceiver(Ledger(self.blocks), self.limits)

    def reserve(
        self,
        number: int = 0,
        *,
        key: RequestKey | None = None,
        blocks: int = 2,
        lowest_live: int = 0,
        pair: Pair = PAIR,
        prefix: tuple[BlockId, ...] = (),
        promise: int = 0,
        host_backed: bool = False,
        room: bool = True,
    ) -> list[ReceiverInstruction]:
        return self.machine.handle(
            ReserveAsked(
                pair=pair,
                number=nth(number),
                lowest_live=nth(lowest_live),
                key=key or key_of(),
                grant=grant_of(number, pair),
                blocks_new=blocks,
                prefix=prefix,
                promise=promise,
                host_backed=host_backed,
                room=room,
            )
        )

    def seal(self, number: int = 0, *, epoch: int = 0, writes: int = 3, pair: Pair = PAIR) -> list[ReceiverInstruction]:
        return self.machine.handle(
            SealLanded(pair=pair, seal=seal_of(grant_of(number, pair), epoch=Epoch(epoch), writes=writes))
        )

    def commit(self, number: int = 0, *, writes: int = 3, sampled: bool = False) -> list[ReceiverInstruction]:
        return self.machine.handle(
            CommitAsked(
                pair=PAIR,
                grant=grant_of(number),
                writes=writes,
                bytes_written=writes * 10,
                sampled=sampled,
            )
        )

    def checked(self, number: int = 0, *, intact: bool) -> list[ReceiverInstruction]:
        return self.machine.handle(RecordsChecked(grant=grant_of(number), intact=intact))

    def release(self, number: int = 0, lowest_live: int = 0, *, in_doubt: bool = False) -> list[ReceiverInstruction]:
        return self.machine.handle(
            WriterReleased(pair=PAIR, number=nth(number), lowest_live=nth(lowest_live), in_doubt=in_doubt)
        )

    def fire(self, kind: TimerKind, number: int = 0) -> list[ReceiverInstruction]:
        return self.machine.handle(GrantTimerFired(grant=grant_of(number), kind=kind))

    def fenced(self, epoch: int = 0) -> list[ReceiverInstruction]:
        return self.machine.handle(PairFenced(pair=PAIR, epoch=Epoch(epoch)))

    def state(self, number: int = 0) -> GrantState | None:
        return self.machine.state_of(grant_of(number))

    def classes(self) -> tuple[int, int, int, int, int]:
        """quarantined, writer-owned, held, cached, free."""
        c = self.machine.ledger.check()
        return c.quarantined, c.writer_owned, c.held, c.cached, c.free


def granted(
    number: int = 0, *, blocks: tuple[int, ...] = (0, 1), prefix: tuple[int, ...] = (), epoch: Epoch = EPOCH_0
) -> AnswerGranted:
    return AnswerGranted(
        pair=PAIR,
        number=nth(number),
        grant=grant_of(number),
        epoch=epoch,
        blocks=tuple(map(BlockId, blocks)),
        prefix=tuple(map(BlockId, prefix)),
    )


def refused(number: int, refusal: Refusal) -> list[ReceiverInstruction]:
    return [AnswerRefused(pair=PAIR, number=nth(number), refusal=refusal)]


def committed(number: int = 0, *, answered: bool = True) -> list[ReceiverInstruction]:
    schedule: list[ReceiverInstruction] = [
        CloseGrant(grant=grant_of(number)),
        ScheduleRequest(key=key_of(), grant=grant_of(number)),
    ]
    return [*schedule, AnswerCommit(pair=PAIR, grant=grant_of(number), committed=True)] if answered else schedule


def revoking(number: int = 0, *, commit_waits: bool = False) -> list[ReceiverInstruction]:
    answer = [AnswerCommit(pair=PAIR, grant=grant_of(number), committed=False)] if commit_waits else []
    return [
        *answer,
        CloseGrant(grant=grant_of(number)),
        SendRevoke(pair=PAIR, number=nth(number)),
        StartGrantTimer(grant=grant_of(number), kind=TimerKind.REVOKE),
    ]


def revoke_again(number: int = 0) -> list[ReceiverInstruction]:
    return revoking(number)[1:]


LEASE = StartGrantTimer(grant=grant_of(0), kind=TimerKind.LEASE)


@dataclass
class Writer:
    """A writer machine, and short words for what is done to it."""

    machine: WriterMachine = field(default_factory=lambda: WriterMachine(live_span_max=2))

    def ask(self) -> list[WriterInstruction]:
        return self.machine.handle(HandoffAsked(key=key_of()))

    def granted(self, number: int = 0, *, epoch: int = 0) -> list[WriterInstruction]:
        return self.machine.handle(ReserveGranted(number=nth(number), grant=grant_of(number), epoch=Epoch(epoch)))

    def posted(self, number: int = 0, writes: int = 2) -> list[WriterInstruction]:
        return self.machine.handle(WritesPosted(number=nth(number), writes=writes, bytes_written=writes * 10))

    def completed(self, number: int = 0, writes: int = 1) -> list[WriterInstruction]:
        return self.machine.handle(WritesCompleted(number=nth(number), writes=writes))

    def all_posted(self, number: int = 0) -> list[WriterInstruction]:
        return self.machine.handle(AllPosted(number=nth(number)))

    def revoke(self, number: int = 0) -> list[WriterInstruction]:
        return self.machine.handle(RevokeAsked(number=nth(number)))

    def state(self, number: int = 0) -> WriterState:
        return self.machine.state_of(nth(number))


def reserve_sent(number: int, lowest_live: int = 0) -> SendReserve:
    return SendReserve(number=nth(number), lowest_live=nth(lowest_live), key=key_of())


def release_sent(number: int = 0, lowest_live: int = 0, *, in_doubt: bool = False) -> SendRelease:
    return SendRelease(number=nth(number), lowest_live=nth(lowest_live), in_doubt=in_doubt)


def ended(end: HandoffEnd, number: int = 0) -> ReportEnd:
    return ReportEnd(number=nth(number), end=end)


ABANDON = AbandonWrites(number=nth(0), grant=grant_of(0))
RELEASE = ReleaseSources(number=nth(0))
COMMIT = SendCommit(number=nth(0), seal=seal_of(grant_of(0), writes=2))
