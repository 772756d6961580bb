"""The receiver's shell: carries out what `ReceiverMachine` instructs. Timers, revocation calls, waiting commits.

Everything runs on the node's control thread. The node calls the methods; the transport's port calls `seal_landed` and
`writer_gone`; the loop fires the timers. Each becomes one event, and each instruction one small action here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Epoch, GrantId, Incarnation, Pair, RequestKey, ReserveNumber
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc_client import Channels
from baton.tasks import Tasks
from cachestore.layout import Layout
from kvtransfer.checksums import RecordChecks, RecordChecksums
from kvtransfer.plan import RecordRanges
from kvtransfer.protocol.receiver import (
    AnswerCommit,
    AnswerGranted,
    AnswerRefused,
    AnswerRelease,
    AnswerRenew,
    AnswerResolve,
    CheckRecords,
    CommitAsked,
    CountRefused,
    FencePair,
    ForgetGrant,
    GrantState,
    GrantTimerFired,
    PairFenced,
    ReceiverEvent,
    ReceiverInstruction,
    ReceiverMachine,
    RecordsChecked,
    RenewAsked,
    ReportCorrupt,
    RequestCancelled,
    RequestEnded,
    ReserveAsked,
    ResolveAsked,
    ScheduleRequest,
    SealLanded,
    SendRevoke,
    StartGrantTimer,
    StopGrantTimers,
    StopRequest,
    TimerKind,
    WriterReleased,
    WriterSuspected,
)
from kvtransfer.receiver_ports import ReceiverPorts
from kvtransfer.revoke_calls import RevokeCalls
from kvtransfer.status import WriterHoldings, WriterPlace
from kvtransfer.transport import DataEndpoint, PairBeingFenced, Seal, TooManyPairs, TransportName
from kvtransfer.waiters import Waiters

log = get_log("receiver")

_OVERDUE = {TimerKind.LEASE: "lease ran out", TimerKind.REVOKE: "grant not given back"}
_ANSWERS = (AnswerGranted, AnswerRefused, AnswerRenew, AnswerResolve)
"""Instructions that are for the caller, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """Times of the receiver's side of a handoff."""

    lease_ms: int = field(
        default=10_000,
        metadata={
            "help": "a grant that is not renewed for this long is revoked (which ends with evidence, not with time)",
            "when": "Prefill nodes stand still for longer, or blocks of lost ones should come back sooner.",
        },
    )
    revoke_ms: int = field(
        default=1_000,
        metadata={
            "help": "how long one try to revoke a grant may go unanswered before the next, stronger one",
            "when": "As lease_ms.",
        },
    )
    connections_max: int = field(
        default=256,
        metadata={
            "help": "data connections that each transport keeps at the same time",
            "when": "More writers than this reach one node (tcp: times tcp.streams), or memory is short.",
        },
    )
    pairs_max: int = field(
        default=1024,
        metadata={
            "help": "writer processes known at the same time, those being fenced included",
            "when": "More prefill nodes than this write to one decode node.",
        },
    )

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


class ReceiverHost(Protocol):
    """The decode node, as the receiver sees it. Called on the control thread."""

    def committed(self, key: RequestKey, grant: GrantId) -> None:
        """The prompt's KV is in the region: run the request."""
        ...

    def cancelled(self, key: RequestKey, grant: GrantId) -> None:
        """Take the running request of this grant out of the engine."""
        ...

    def let_go(self, grant: GrantId) -> None:
        """The request owns nothing through this grant any more (the writer still may)."""
        ...


class Receiver:
    """Grants of this process, their timers and waiters. `ports` is set once, before the first call."""

    ports: ReceiverPorts

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        grants: ReceiverMachine,
        layout: Layout,
        host: ReceiverHost,
        channels: Channels,
        loop: asyncio.AbstractEventLoop,
        config: ReceiverConfig,
        checks: RecordChecks,
    ) -> None:
        """`checks` is taken over: `close` closes it."""
        self.incarnation = incarnation
        self.grants = grants
        self.config = config
        self.checks = checks
        self.refused: dict[str, int] = {}
        self._layout = layout
        self._host = host
        self._channels = channels
        self._loop = loop
        self._writers: dict[Pair, str] = {}
        self._places: dict[Pair, WriterPlace] = {}
        self.holdings = WriterHoldings(grants, places=self._places, now_s=loop.time)
        self._repeats = RepeatLog(log, loop.time)
        self._retiring: set[Pair] = set()
        self._timers: dict[tuple[GrantId, TimerKind], asyncio.TimerHandle] = {}
        self._commits: Waiters[GrantId, bool] = Waiters(loop)
        self._releases: Waiters[tuple[Pair, ReserveNumber], None] = Waiters(loop)
        self._tasks = Tasks(loop, log)
        self._revokes = RevokeCalls(
            channels=channels,
            tasks=self._tasks,
            repeats=self._repeats,
            revoke_ms=config.revoke_ms,
            endpoint_of=lambda pair: self._writers.get(pair, ""),
            told=self.holdings.name_of,
            let_go=self._handle_event,
        )
        self._actions: dict[type, Callable[..., None]] = {
            AnswerCommit: self._answer_commit,
            AnswerRelease: lambda i: self._releases.answer((i.pair, i.number), None),
            SendRevoke: self._revokes.send,
            FencePair: lambda i: self.ports.fence(i.pair, i.epoch),
            ScheduleRequest: lambda i: self._host.committed(i.key, i.grant),
            StopRequest: self._stop_request,
            StartGrantTimer: self._start_timer,
            StopGrantTimers: self._stop_timers,
            CountRefused: self._count_refused,
            ForgetGrant: self._forget,
            CheckRecords: lambda i: self._tasks.spawn(self.checks.run(i.grant, self._handle_event)),
            ReportCorrupt: lambda i: self.checks.report(i, self._places[i.pair]),
        }

    # What the node asks. Answers that the machine gives at once are returned.

    def connect(
        self, pair: Pair, writer_endpoint: str, transport: TransportName, *, name: str = "", host: str = ""
    ) -> DataEndpoint:
        """A writer introduces itself; name and host are for people.

        Raises BatonError TOO_MANY_PEERS, or PAIR_FENCING with a retry time.
        """
        if pair not in self._writers and len(self._writers) >= self.config.pairs_max:
            raise BatonError(
                Reason.TOO_MANY_PEERS,
                f"{len(self._writers)} writers are connected here already, the limit.",
                retry_after_ms=self.config.lease_ms,
            )
        self._writers[pair] = writer_endpoint
        self._places[pair] = WriterPlace(name=name, host=host, transport=transport)
        self._retiring.discard(pair)
        try:
            return self.ports.expect(pair, self.grants.epoch(pair), transport)
        except TooManyPairs as error:
            raise BatonError(Reason.TOO_MANY_PEERS, f"{error}.", retry_after_ms=self.config.lease_ms) from error
        except PairBeingFenced as error:
            raise BatonError(
                Reason.PAIR_FENCING,
                "The right to write of this writer's last connection is being taken back; connect again then.",
                retry_after_ms=self.config.revoke_ms,
            ) from error

    def reserve(self, event: ReserveAsked) -> AnswerGranted | AnswerRefused:
        """Raises BatonError PAIR_FENCING for a writer that has not connected, or whose books were closed since."""
        if event.pair not in self._writers:
            raise BatonError(Reason.PAIR_FENCING, "This writer is not connected here: connect, then reserve.")
        answer = self._handle(event)
        assert isinstance(answer, AnswerGranted | AnswerRefused), answer
        return answer

    def renew(self, pair: Pair, grant: GrantId) -> bool:
        answer = self._handle(RenewAsked(pair=pair, grant=grant))
        assert isinstance(answer, AnswerRenew), answer
        return answer.renewed

    async def commit(self, event: CommitAsked, checksums: RecordChecksums | None = None) -> bool:
        """True once seals and commit are here and agree; False when the grant has been revoked.

        Raises BatonError DATA_CORRUPT where sampled records are not what `checksums` says: the grant is over then;
        BAD_FIELD where they cannot be of this grant.
        """
        blocks = self.grants.blocks_uncommitted(event.grant, event.pair)
        if checksums is not None and blocks is not None:
            self.checks.keep(event.grant, checksums, blocks)
        return await self._commits.ask(event.grant, lambda: self._handle(event))

    async def release(
        self, pair: Pair, number: ReserveNumber, lowest_live: ReserveNumber, *, in_doubt: bool = False
    ) -> None:
        """The writer does not write under this number any more.

        With writes in doubt this returns when a fence of the pair has stopped them.
        """
        if pair not in self._writers:
            return  # nothing of this writer is here, and an unknown one gets no entry
        event = WriterReleased(pair=pair, number=number, lowest_live=lowest_live, in_doubt=in_doubt)
        await self._releases.ask((pair, number), lambda: self._handle(event))

    def cancel(self, key: RequestKey) -> None:
        self._handle(RequestCancelled(key=key))

    def supersede(self, key: RequestKey) -> None:
        """This attempt runs here without a grant: those before it let go, and get no grant any more."""
        if key.attempt > 0:
            self.cancel(RequestKey(request=key.request, attempt=Attempt(key.attempt - 1)))

    def ended(self, key: RequestKey) -> None:
        grant = self.grants.grant_of(key)
        self._handle(RequestEnded(key=key))
        if grant is not None:
            self._host.let_go(grant)

    def resolve(self, key: RequestKey) -> bool:
        answer = self._handle(ResolveAsked(key=key))
        assert isinstance(answer, AnswerResolve), answer
        return answer.committed

    def writers_seen(self, owners: Mapping[str, Incarnation]) -> None:
        """What the directory says: which incarnation is at which endpoint.

        A writer whose endpoint another incarnation has taken over has ended; one that is not listed has, probably.
        Both are fenced, the latter only when nothing of it is under way; their books go with the fence's evidence.
        """
        present = set(owners.values())
        for pair, endpoint in list(self._writers.items()):
            replaced = owners.get(endpoint, pair.writer) != pair.writer
            absent = pair.writer not in present and self.grants.is_quiet(pair)
            if (replaced or absent) and pair not in self._retiring:
                self._retiring.add(pair)
                self._handle(WriterSuspected(pair=pair))

    def writer_lost(self, pair: Pair) -> None:
        """The writer is out of reach, and may come back: what it has open here is taken back, with a fence."""
        if pair not in self._writers:  # its books are closed, so it has ended in order, or has never connected
            log.info("writer gone", writer=self.holdings.name_of(pair))
            return
        log.warning("writer lost", writer=self.holdings.name_of(pair))
        if not self.grants.is_quiet(pair):
            self._handle(WriterSuspected(pair=pair))

    def upkeep(self) -> None:
        """Called every second."""
        self._repeats.upkeep()

    async def close(self) -> None:
        """Stop timers and calls, answer waiting commits with an error. The machine is not used afterwards."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._commits.fail_all(_shutting_down)
        self._releases.fail_all(_shutting_down)
        await self._tasks.cancel()
        self.checks.close()
        self._repeats.close()

    # What the port tells (kvtransfer.transport.ReceiverEvents).

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self._handle(
            SealLanded(
                pair=pair, grant=seal.grant, epoch=seal.epoch, writes=seal.writes, bytes_written=seal.bytes_written
            )
        )

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        writer = self.holdings.name_of(pair)
        log.info("writer fenced", writer=writer, epoch=epoch, evidence=evidence)
        self._repeats.over(writer, "it is fenced")
        if pair not in self._writers:
            return
        self._handle(PairFenced(pair=pair, epoch=epoch))
        if pair in self._retiring:
            self._retiring.discard(pair)
            if self.grants.is_quiet(pair):
                self._carry_out(self.grants.forget_pair(pair))
                self._drop_channel(self._writers.pop(pair))
                del self._places[pair]
                self.holdings.forget(pair)
                self.ports.forget(pair)

    # Carrying out.

    def _handle(self, event: ReceiverEvent) -> ReceiverInstruction | None:
        if isinstance(event, ReserveAsked | WriterReleased):
            event = self._without_failed_copies(event)
        instructions = self.grants.handle(event)
        self.holdings.follow(event, instructions)
        return self._carry_out(instructions)

    def _without_failed_copies(self, event: ReserveAsked | WriterReleased) -> ReserveAsked | WriterReleased:
        """The event without what a port contradicts: the writer's word does not end its right to a grant while copies
        of that grant may still run on a device that has failed. Such a grant waits for a fence."""
        lowest_live = event.lowest_live
        for number, grant in self.grants.uncommitted(event.pair):
            named = isinstance(event, WriterReleased) and number == event.number
            if not (named or number < lowest_live) or self.ports.forbid(grant):
                continue
            event = replace(event, lowest_live=min(event.lowest_live, number))
            if isinstance(event, WriterReleased) and named:
                event = replace(event, in_doubt=True)
            else:
                failed = WriterReleased(pair=event.pair, number=number, lowest_live=ReserveNumber(0), in_doubt=True)
                self._carry_out(self.grants.handle(failed))
        return event

    def _handle_event(self, event: RecordsChecked | WriterReleased) -> None:
        """Of a task of ours: nobody waits for an answer."""
        self._handle(event)

    def _carry_out(self, instructions: list[ReceiverInstruction]) -> ReceiverInstruction | None:
        """Act on each instruction in order; the one that answers the caller at once is returned."""
        answer = None
        for instruction in instructions:
            if isinstance(instruction, AnswerGranted):
                ranges = RecordRanges(self._layout, self.grants.ledger.num_blocks, instruction.blocks)
                self.ports.allow(instruction.pair, instruction.epoch, instruction.grant, ranges)
            if isinstance(instruction, _ANSWERS):
                answer = instruction
            else:
                self._actions[type(instruction)](instruction)
        return answer

    def _answer_commit(self, instruction: AnswerCommit) -> None:
        if instruction.corrupt:
            self._commits.fail(instruction.grant, lambda: self.checks.error(instruction.grant))
        else:
            self._commits.answer(instruction.grant, instruction.committed)

    def _stop_request(self, instruction: StopRequest) -> None:
        self._host.cancelled(instruction.key, instruction.grant)
        self._host.let_go(instruction.grant)

    def _start_timer(self, instruction: StartGrantTimer) -> None:
        key = (instruction.grant, instruction.kind)
        self._cancel_timer(key)
        delay_ms = self.config.lease_ms if instruction.kind is TimerKind.LEASE else self.config.revoke_ms
        self._timers[key] = self._loop.call_later(delay_ms / 1000, self._fire, key)

    def _fire(self, key: tuple[GrantId, TimerKind]) -> None:
        del self._timers[key]
        grant, kind = key
        owner = self.grants.owner(grant)
        if owner is not None:
            self._repeats.warning(_OVERDUE[kind], peer=self.holdings.name_of(owner[0]), grant=grant.hex())
        self._handle(GrantTimerFired(grant=grant, kind=kind))

    def _stop_timers(self, instruction: StopGrantTimers) -> None:
        """Comes when a grant is no longer open, before anything else can be done with its blocks."""
        self.ports.forbid(instruction.grant)
        for kind in TimerKind:
            self._cancel_timer((instruction.grant, kind))
        if self.grants.state_of(instruction.grant) is not GrantState.COMMITTED:
            self._host.let_go(instruction.grant)

    def _forget(self, instruction: ForgetGrant) -> None:
        assert instruction.grant not in self._commits, instruction
        self.checks.forget(instruction.grant)

    def _cancel_timer(self, key: tuple[GrantId, TimerKind]) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _count_refused(self, instruction: CountRefused) -> None:
        self.refused[instruction.what] = self.refused.get(instruction.what, 0) + 1
        writer = self.holdings.name_of(instruction.pair)
        self._repeats.warning(f"refused: {instruction.what}", peer=writer, detail=instruction.detail)

    def _drop_channel(self, endpoint: str) -> None:
        if endpoint not in self._writers.values():
            self._tasks.spawn(self._channels.drop(endpoint))


def _shutting_down() -> BatonError:
    return BatonError(Reason.NODE_DRAINING, "This node is shutting down.")
