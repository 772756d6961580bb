"""The receiver's shell: carries out what `ReceiverMachine` instructs. Timers, Revoke calls, pending Commits, ports.

Everything runs on the node's control thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

import grpc.aio
from batonpb import common_pb2, transfer_pb2, transfer_pb2_grpc

from baton.config import setting
from baton.errors import BatonError, Reason, check_positive
from baton.ids import Attempt, Epoch, GrantId, Incarnation, Pair, RequestKey, ReserveNumber
from baton.liveness import LivenessConfig
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.tasks import PendingCalls, Tasks
from cachestore.layout import Layout
from kvtransfer.checksums import RecordChecks, RecordChecksums
from kvtransfer.protocol import receiver as protocol
from kvtransfer.protocol.receiver import GrantState, ReceiverMachine, ReserveAsked, TimerKind, WriterReleased
from kvtransfer.status import WriterHoldings, WriterPlace
from kvtransfer.transport import (
    DataEndpoint,
    PairBeingFenced,
    ReceiverEvents,
    ReceiverPort,
    Seal,
    TooManyPairs,
    TransportName,
    WriteRanges,
)

log = get_log("receiver")

PAIRS_IDLE_MAX: Final = 192
"""Writers without a grant that stay connected. Any node may fetch from any other: not all pairs stay open."""

_OVERDUE = {TimerKind.LEASE: "lease ran out", TimerKind.REVOKE: "grant not given back"}
_ANSWERS = (protocol.AnswerGranted, protocol.AnswerRefused, protocol.AnswerRenew, protocol.AnswerResolve)
"""Instructions that are for the caller, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverConfig:
    """Times of the receiver's side of a handoff."""

    lease_ms: int = setting(
        10_000,
        "a grant that is not renewed for this long is revoked (which ends with evidence, not with time)",
        "Prefill nodes stand still for longer, or blocks of lost ones should come back sooner.",
    )
    revoke_ms: int = setting(
        1_000, "how long one try to revoke a grant may go unanswered before the next, stronger one", "As lease_ms."
    )
    connections_max: int = setting(
        256,
        "data connections that each transport keeps at the same time",
        "More writers than this reach one node (tcp: times tcp.streams), or memory is short.",
    )
    pairs_max: int = setting(
        1024,
        "writer processes known at the same time, those being fenced included",
        "More prefill nodes than this write to one decode node.",
    )

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)


class ReceiverHost(Protocol):
    """The node, as the receiver sees it. Called on the control thread."""

    def committed(self, key: RequestKey, grant: GrantId) -> None:
        """The KV is in the region: run the request, or enter the blocks of a fetch into the prefix cache."""

    def cancelled(self, key: RequestKey, grant: GrantId) -> None:
        """Take the running request of this grant out of the engine."""

    def let_go(self, grant: GrantId) -> None:
        """The request owns nothing through this grant any more (the writer still may)."""


class Receiver:
    """Grants of this process, with their timers and pending calls. `ports` is set once, before the first call."""

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
        self._writers: dict[Pair, WriterPlace] = {}
        self.holdings = WriterHoldings(grants, places=self._writers, now_s=loop.time)
        self._repeats = RepeatLog(log, loop.time)
        self._retiring: set[Pair] = set()
        self._timers: dict[GrantId, asyncio.TimerHandle] = {}
        self._commits: PendingCalls[GrantId, bool] = PendingCalls(loop)
        self._releases: PendingCalls[tuple[Pair, ReserveNumber], None] = PendingCalls(loop)
        self._tasks = Tasks(loop, log)
        self._revoking: set[tuple[Pair, ReserveNumber]] = set()
        """Grants with a Revoke call under way."""
        self._actions: dict[type, Callable[..., object]] = {
            protocol.AnswerCommit: self._answer_commit,
            protocol.AnswerRelease: lambda i: self._releases.answer((i.pair, i.number), None),
            protocol.SendRevoke: self._send_revoke,
            protocol.FencePair: lambda i: self.ports.fence(i.pair, i.epoch),
            protocol.ScheduleRequest: lambda i: self._host.committed(i.key, i.grant),
            protocol.StopRequest: self._stop_request,
            protocol.StartGrantTimer: self._start_timer,
            protocol.CloseGrant: self._close_grant,
            protocol.CountRefused: self._count_refused,
            protocol.ForgetGrant: self._forget,
            protocol.CheckRecords: lambda i: self._tasks.spawn(self.checks.run(i.grant, self._handle)),
            protocol.ReportCorrupt: lambda i: self.checks.report(i, self._writers[i.pair]),
        }

    # What the node asks. Answers that the machine gives at once are returned.

    def connect(
        self, pair: Pair, writer_endpoint: str, transport: TransportName, *, name: str = "", host: str = ""
    ) -> DataEndpoint:
        """A writer introduces itself; name and host are for people. Raises BatonError TOO_MANY_PEERS, PAIR_FENCING."""
        if pair not in self._writers and len(self._writers) >= self.config.pairs_max:
            raise BatonError(
                Reason.TOO_MANY_PEERS,
                f"{len(self._writers)} writers are connected here already, the limit.",
                retry_after_ms=self.config.lease_ms,
            )
        self._writers.pop(pair, None)  # the most recently connected is the last
        self._writers[pair] = WriterPlace(endpoint=writer_endpoint, name=name, host=host, transport=transport)
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

    def is_connected(self, pair: Pair) -> bool:
        """Whether this writer has introduced itself, and its books are open."""
        return pair in self._writers and pair not in self._retiring

    def reserve(self, event: ReserveAsked) -> protocol.AnswerGranted | protocol.AnswerRefused:
        """Raises BatonError PAIR_FENCING for a writer that has not connected, or whose books were closed since."""
        if event.pair not in self._writers:
            raise BatonError(Reason.PAIR_FENCING, "This writer is not connected here: connect, then reserve.")
        self._writers[event.pair] = self._writers.pop(event.pair)
        answer = self._handle(event)
        assert isinstance(answer, protocol.AnswerGranted | protocol.AnswerRefused), answer
        return answer

    def renew(self, pair: Pair, grant: GrantId) -> bool:
        answer = self._handle(protocol.RenewAsked(pair=pair, grant=grant))
        assert isinstance(answer, protocol.AnswerRenew), answer
        return answer.renewed

    async def commit(self, event: protocol.CommitAsked, checksums: RecordChecksums | None = None) -> bool:
        """True once seal and commit are here and agree; False if the grant has been revoked.

        Raises BatonError DATA_CORRUPT: sampled records are not what `checksums` says; BAD_FIELD: it is of other ones.
        """
        blocks = self.grants.blocks_uncommitted(event.grant, event.pair)
        if checksums is not None and blocks is not None:
            self.checks.keep(event.grant, checksums, blocks)
        return await self._commits.ask(event.grant, lambda: self._handle(event))

    async def release(
        self, pair: Pair, number: ReserveNumber, lowest_live: ReserveNumber, *, in_doubt: bool = False
    ) -> None:
        """The writer does not write under this number any more. With writes in doubt this returns when a fence of the
        pair has stopped them."""
        if pair not in self._writers:
            return  # nothing of this writer is here, and an unknown one gets no entry
        event = WriterReleased(pair=pair, number=number, lowest_live=lowest_live, in_doubt=in_doubt)
        await self._releases.ask((pair, number), lambda: self._handle(event))

    def cancel(self, key: RequestKey) -> None:
        self._handle(protocol.RequestCancelled(key=key))

    def supersede(self, key: RequestKey) -> None:
        """This attempt runs here without a grant. Earlier attempts let go and get no more grants."""
        if key.attempt > 0:
            self.cancel(RequestKey(request=key.request, attempt=Attempt(key.attempt - 1)))

    def ended(self, key: RequestKey) -> None:
        """The request of a committed grant is over, and owns nothing any more."""
        self._handle(protocol.RequestEnded(key=key))

    def resolve(self, key: RequestKey) -> bool:
        answer = self._handle(protocol.ResolveAsked(key=key))
        assert isinstance(answer, protocol.AnswerResolve), answer
        return answer.committed

    def writers_seen(self, owners: Mapping[str, Incarnation]) -> None:
        """What the directory says: which incarnation is at which endpoint.

        A writer whose endpoint another has taken over is fenced; so is one that is not listed, once nothing of it is
        under way. With the evidence it is forgotten.
        """
        present = set(owners.values())
        for pair, writer in list(self._writers.items()):
            replaced = owners.get(writer.endpoint, pair.writer) != pair.writer
            absent = pair.writer not in present and self.grants.is_quiet(pair)
            if (replaced or absent) and pair not in self._retiring:
                self._retiring.add(pair)
                self._handle(protocol.WriterSuspected(pair=pair))

    def writer_lost(self, pair: Pair) -> None:
        """The writer is out of reach and may come back. Its open grants are revoked, with a fence."""
        if pair not in self._writers:  # it has ended in order and is forgotten, or has never connected
            log.info("writer gone", writer=self.holdings.name_of(pair))
            return
        log.warning("writer lost", writer=self.holdings.name_of(pair))
        if not self.grants.is_quiet(pair):
            self._handle(protocol.WriterSuspected(pair=pair))

    def upkeep(self) -> None:
        """Called every second. Fences idle pairs beyond the limit, the least recently used first."""
        self._repeats.upkeep()
        quiet = [pair for pair in self._writers if pair not in self._retiring and self.grants.is_quiet(pair)]
        for pair in quiet[: max(0, len(quiet) - PAIRS_IDLE_MAX)]:
            self._retiring.add(pair)
            self._handle(protocol.WriterSuspected(pair=pair))

    async def close(self) -> None:
        """Stop timers and calls, answer waiting commits with an error. The machine is not used afterwards."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for pending in (self._commits, self._releases):
            pending.fail_all(lambda: BatonError(Reason.NODE_DRAINING, "This node is shutting down."))
        await self._tasks.cancel()
        self.checks.close()
        self._repeats.close()

    # What the ports report (kvtransfer.transport.ReceiverEvents).

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self._handle(protocol.SealLanded(pair=pair, seal=seal))

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        writer = self.holdings.name_of(pair)
        log.info("writer fenced", writer=writer, epoch=epoch, evidence=evidence)
        self._repeats.over(writer, "it is fenced")
        if pair not in self._writers:
            return
        self._handle(protocol.PairFenced(pair=pair, epoch=epoch))
        if pair in self._retiring:
            self._retiring.discard(pair)
            if self.grants.is_quiet(pair):
                self._carry_out(self.grants.forget_pair(pair))
                endpoint = self._writers.pop(pair).endpoint
                if all(writer.endpoint != endpoint for writer in self._writers.values()):
                    self._tasks.spawn(self._channels.drop(endpoint))
                self.holdings.forget(pair)
                self.ports.forget(pair)

    # Carrying out.

    def _handle(self, event: protocol.ReceiverEvent) -> protocol.ReceiverInstruction | None:
        if isinstance(event, ReserveAsked | WriterReleased):
            event = self._without_failed_copies(event)
        return self._handle_as_it_is(event)

    def _handle_as_it_is(self, event: protocol.ReceiverEvent) -> protocol.ReceiverInstruction | None:
        instructions = self.grants.handle(event)
        self.holdings.follow(event, instructions)
        return self._carry_out(instructions)

    def _without_failed_copies(self, event: ReserveAsked | WriterReleased) -> ReserveAsked | WriterReleased:
        """The event without what a port contradicts: a Release does not end the right to a grant while copies of it may
        still run on a device that has failed. Such a grant waits for a fence."""
        lowest_live = event.lowest_live
        for grant in self.grants.uncommitted(event.pair):
            number = grant.number
            named = isinstance(event, WriterReleased) and number == event.number
            if not (named or number < lowest_live) or self.ports.forbid(grant.id):
                continue
            event = replace(event, lowest_live=min(event.lowest_live, number))
            if isinstance(event, WriterReleased) and named:
                event = replace(event, in_doubt=True)
            else:
                lowest = ReserveNumber(0)
                self._handle_as_it_is(WriterReleased(pair=event.pair, number=number, lowest_live=lowest, in_doubt=True))
        return event

    def _send_revoke(self, instruction: protocol.SendRevoke) -> None:
        which = (instruction.pair, instruction.number)
        if which in self._revoking:
            return  # that call ends within revoke_ms, and the timer comes again
        self._revoking.add(which)
        self._tasks.spawn(self._revoke(*which))

    async def _revoke(self, pair: Pair, number: ReserveNumber) -> None:
        """Ask the writer to release a grant. Its answer is a Release; no answer is no evidence."""
        writer, name = self._writers.get(pair), self.holdings.name_of(pair)
        endpoint = writer.endpoint if writer is not None else ""
        try:
            stub = transfer_pb2_grpc.TransferStub(self._channels.get(endpoint))
            header = common_pb2.Header(sender=pair.receiver, receiver=pair.writer)
            request = transfer_pb2.RevokeRequest(header=header, number=number)
            with rpc_errors(endpoint):
                reply = await stub.Revoke(request, timeout=self.config.revoke_ms / 1000)
        except BatonError as error:
            self._repeats.warning("revoke unanswered", peer=name, number=number, error=error.message)
            return
        except grpc.aio.UsageError:
            return  # the channel was closed under us: this node is stopping
        finally:
            self._revoking.discard((pair, number))
        self._repeats.over(name, "it has answered")
        in_doubt = reply.writes_in_doubt
        self._handle(WriterReleased(pair=pair, number=number, lowest_live=ReserveNumber(0), in_doubt=in_doubt))

    def _carry_out(self, instructions: list[protocol.ReceiverInstruction]) -> protocol.ReceiverInstruction | None:
        """Act on each instruction in order; the one that answers the caller at once is returned."""
        answer = None
        for instruction in instructions:
            if isinstance(instruction, protocol.AnswerGranted):
                ranges = WriteRanges(self._layout, self.grants.ledger.num_blocks, instruction.blocks)
                self.ports.allow(instruction.pair, instruction.epoch, instruction.grant, ranges)
            if isinstance(instruction, _ANSWERS):
                answer = instruction
            else:
                self._actions[type(instruction)](instruction)
        return answer

    def _answer_commit(self, instruction: protocol.AnswerCommit) -> None:
        if instruction.corrupt:
            self._commits.fail(instruction.grant, lambda: self.checks.error(instruction.grant))
        else:
            self._commits.answer(instruction.grant, instruction.committed)

    def _stop_request(self, instruction: protocol.StopRequest) -> None:
        self._host.cancelled(instruction.key, instruction.grant)
        self._host.let_go(instruction.grant)

    def _start_timer(self, instruction: protocol.StartGrantTimer) -> None:
        grant, kind = instruction.grant, instruction.kind
        self._cancel_timer(grant)
        delay_ms = self.config.lease_ms if kind is TimerKind.LEASE else self.config.revoke_ms
        self._timers[grant] = self._loop.call_later(delay_ms / 1000, self._fire, grant, kind)

    def _fire(self, grant: GrantId, kind: TimerKind) -> None:
        del self._timers[grant]
        writer = self.holdings.name_of(self.grants.entries[grant].pair)
        self._repeats.warning(_OVERDUE[kind], peer=writer, grant=grant.hex())
        self._handle(protocol.GrantTimerFired(grant=grant, kind=kind))

    def _close_grant(self, instruction: protocol.CloseGrant) -> None:
        """Comes when a grant is no longer open, before anything else can be done with its blocks."""
        self.ports.forbid(instruction.grant)
        self._cancel_timer(instruction.grant)
        if self.grants.state_of(instruction.grant) is not GrantState.COMMITTED:
            self._host.let_go(instruction.grant)

    def _forget(self, instruction: protocol.ForgetGrant) -> None:
        assert instruction.grant not in self._commits, instruction
        self.checks.forget(instruction.grant)

    def _cancel_timer(self, grant: GrantId) -> None:
        if timer := self._timers.pop(grant, None):
            timer.cancel()

    def _count_refused(self, instruction: protocol.CountRefused) -> None:
        self.refused[instruction.what] = self.refused.get(instruction.what, 0) + 1
        writer = self.holdings.name_of(instruction.pair)
        self._repeats.warning(f"refused: {instruction.what}", peer=writer, detail=instruction.detail)


class LivenessStreams:
    """The receiver's end of the liveness streams (`kvtransfer.link.LivenessStream`): which writers have theirs open.

    Lives on one event loop. `lost` is called for a pair whose stream has ended and was not opened again within
    `reconnect_ms_max`; its writer may come back.
    """

    def __init__(self, *, lost: Callable[[Pair], None], liveness: LivenessConfig) -> None:
        self._lost = lost
        self._wait_s = liveness.reconnect_ms_max / 1000
        self._calls: dict[Pair, int] = {}
        self._timers: dict[Pair, asyncio.TimerHandle] = {}
        self._closing = asyncio.Event()

    async def serve(self, pair: Pair) -> AsyncGenerator[transfer_pb2.LivenessReply, None]:
        """The handler of one stream. Ends with `close`, or by being cancelled when the connection does."""
        self._calls[pair] = self._calls.get(pair, 0) + 1
        if timer := self._timers.pop(pair, None):
            timer.cancel()
        try:
            yield transfer_pb2.LivenessReply()
            await self._closing.wait()
        finally:
            self._calls[pair] -= 1
            if self._calls[pair] == 0:
                del self._calls[pair]
                if not self._closing.is_set():
                    loop = asyncio.get_running_loop()
                    self._timers[pair] = loop.call_later(self._wait_s, self._overdue, pair)

    def close(self) -> None:
        """End all streams: this node is stopping. Idempotent."""
        self._closing.set()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _overdue(self, pair: Pair) -> None:
        del self._timers[pair]
        self._lost(pair)


class ReceiverPorts:
    """A node's receiving ports, one for each transport that it offers, seen as one (see `ReceiverPort`).

    A pair has one epoch over all transports, so evidence about the pair is evidence from every port that it used.
    Control thread only; every port is added before the first other call.
    """

    def __init__(self, events: ReceiverEvents) -> None:
        self.events = events
        self._ports: dict[TransportName, ReceiverPort] = {}
        self._withdrawn: set[TransportName] = set()
        self._used: dict[Pair, set[TransportName]] = {}
        self._fences: dict[tuple[Pair, Epoch], dict[TransportName, str | None]] = {}

    def add(self, port: ReceiverPort) -> None:
        """Takes the port over: `close` closes it."""
        assert port.transport not in self._ports, port.transport
        self._ports[port.transport] = port

    def offer(self, transport: TransportName, works: bool) -> None:
        """Whether new links may use this transport; one whose device is lost is withdrawn until it is back."""
        (self._withdrawn.discard if works else self._withdrawn.add)(transport)

    @property
    def transports(self) -> tuple[TransportName, ...]:
        """Those that work at the moment."""
        return tuple(name for name in self._ports if name not in self._withdrawn)

    @property
    def withdrawn(self) -> tuple[TransportName, ...]:
        """Those that do not work at the moment, and will again when their device is back."""
        return tuple(name for name in self._ports if name in self._withdrawn)

    def describe(self) -> dict[TransportName, dict[str, object]]:
        """Counters and gauges of each port."""
        return {name: port.describe() for name, port in self._ports.items()}

    def expect(self, pair: Pair, epoch: Epoch, transport: TransportName) -> DataEndpoint:
        """Raises PairBeingFenced: evidence about this epoch is still to come, from this port or another."""
        if any(fenced == pair and at >= epoch for fenced, at in self._fences):
            raise PairBeingFenced(f"epoch {epoch} of this pair is being fenced")
        endpoint = self._ports[transport].expect(pair, epoch)
        self._used.setdefault(pair, set()).add(transport)
        return endpoint

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        for port in self._ports.values():
            port.allow(pair, epoch, grant, ranges)

    def forbid(self, grant: GrantId) -> bool:
        """False if any port has no evidence."""
        proved = [port.forbid(grant) for port in self._ports.values()]
        return all(proved)

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """`writer_gone` comes once every port that the pair was expected on has evidence."""
        waits = self._fences.setdefault((pair, epoch), {})
        for transport in self._used.get(pair) or set(self._ports):
            if transport not in waits:
                waits[transport] = None
                self._ports[transport].fence(pair, epoch)

    def writer_gone_from(self, transport: TransportName, pair: Pair, epoch: Epoch, evidence: str) -> None:
        """One port's evidence. Unasked (a dead writer, a lost connection) it makes the other ports fence as well."""
        waits = self._fences.setdefault((pair, epoch), {})
        waits[transport] = evidence
        self.fence(pair, epoch)
        if all(found is not None for found in waits.values()):
            del self._fences[pair, epoch]
            if len(waits) > 1:
                evidence = "; ".join(f"{name.value}: {waits[name]}" for name in TransportName if name in waits)
            self.events.writer_gone(pair, epoch, evidence)

    def forget(self, pair: Pair) -> None:
        """The writer process is known to have ended and nothing of it is left."""
        self._used.pop(pair, None)

    async def close(self) -> None:
        """Close every port. No event is delivered any more."""
        for port in self._ports.values():
            await port.close()


@dataclass(frozen=True, slots=True)
class PortEvents:
    """The `events` to make the port of one transport with."""

    ports: ReceiverPorts
    transport: TransportName

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self.ports.events.seal_landed(pair, seal)

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        self.ports.writer_gone_from(self.transport, pair, epoch, evidence)
