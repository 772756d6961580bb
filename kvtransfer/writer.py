"""The writer's shell: carries out what `WriterGrants` instructs, for one receiver process. Calls, leases, data link.

Everything runs on the node's control thread, but `StepWrites.layer_done`, which the engine thread calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, transfer_pb2, transfer_pb2_grpc

from baton.errors import BatonError, Reason, bad_field
from baton.ids import BlockId, Epoch, GrantId, Pair, RequestKey, ReserveNumber
from baton.log import get_log
from baton.rpc_client import Channels, rpc_errors
from kvtransfer.grant_messages import (
    AbandonWrites,
    AllPosted,
    AnswerRevoke,
    CommitAnswered,
    CommitUnanswered,
    HandoffAsked,
    HandoffCancelled,
    HandoffEnd,
    LeaseLapsed,
    LetGoAnswered,
    LetGoUnanswered,
    LinkLost,
    PeerGone,
    Refusal,
    ReleaseSources,
    RenewRefused,
    ReportEnd,
    ReserveGranted,
    ReserveRefused,
    ReserveUnanswered,
    RevokeAsked,
    SendCommit,
    SendLetGo,
    SendReserve,
    SendSeal,
    StartWriting,
    WriterEvent,
    WritesCompleted,
    WritesDropped,
    WritesPosted,
)
from kvtransfer.layout import Layout
from kvtransfer.negotiation import Offers
from kvtransfer.plan import Int64Array, whole_records
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriterEvents, WriterLink
from kvtransfer.writer_grants import WriterGrants, WriterState

log = get_log("writer")

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """Times and limits of the writer's side of a handoff, for each receiver."""

    reserve_ms_max: int = 1_000
    """How long a Reserve may go unanswered; the answer comes at once from a healthy node."""
    call_ms_max: int = 2_000
    retry_ms_min: int = 20
    retry_ms_max: int = 1_000
    drift_per_mille: int = 20
    """Margin taken off a lease because two clocks run at different rates."""
    unacked_bytes_max: int = 1 << 30
    pinned_blocks_max: int = 65_536
    stall_ms_max: int = 10_000
    """A handoff whose posted writes make no progress for this long is given up."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.drift_per_mille >= 1000:
            raise ValueError("drift_per_mille must be under 1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A receiver process, from the directory."""

    name: str
    endpoint: str
    pair: Pair


class LinkMaker(Protocol):
    """Opens a data connection of the transport that the endpoint names."""

    def __call__(self, endpoint: DataEndpoint, pair: Pair, events: WriterEvents) -> Awaitable[WriterLink]: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Handoff:
    """One handoff, from Reserve to its end. Changed by its `WriterPeer` only.

    `granted` is set when writing may start (None), or to what says why not. `ended` is set once, with how it ended.
    `sources_released` is called once if it was ever granted: the transport has let go of the source blocks.
    """

    peer: WriterPeer
    number: ReserveNumber
    key: RequestKey
    granted: asyncio.Future[BatonError | None]
    ended: asyncio.Future[HandoffEnd]
    metadata: Metadata
    """Request id and trace context, sent along with the calls of this handoff."""
    sources_released: Callable[[], None]
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None
    grant: GrantId = GrantId(b"")
    epoch: Epoch = Epoch(0)
    dst_blocks: list[BlockId]
    prefix_skip: int = 0
    lease_ends_s: float = 0.0
    lease_ms: int = 0
    link: WriterLink | None = None
    pinned_blocks: int = 0
    writes_outstanding: int = 0
    bytes_outstanding: int = 0
    writes: int = 0
    bytes_written: int = 0
    progress_s: float = 0.0
    seal: Seal | None = None
    retries: int = 0
    revoke_waiters: list[asyncio.Future[None]]

    def may_post(self) -> bool:
        return self.peer.machine.may_post(self.number)

    def plan_step(self, src_blocks_B: Int64Array, dst_blocks_B: Int64Array, layers: range) -> StepWrites:
        return self.peer.plan_step(self, src_blocks_B, dst_blocks_B, layers)

    def all_posted(self, first_token: int, first_logprobs: common_pb2.TokenLogprobs | None = None) -> None:
        """Seal and commit. Nothing is posted afterwards."""
        self.first_token, self.first_logprobs = first_token, first_logprobs
        self.peer.handle(AllPosted(number=self.number))

    def cancel(self) -> None:
        """Give it up: drain, then tell the receiver. Idempotent; nothing happens once it has ended."""
        self.peer.handle(HandoffCancelled(number=self.number))


@dataclass(slots=True, eq=False, kw_only=True)
class StepWrites:
    """The writes of one handoff in one engine step: the same blocks, layer after layer. Accounted for when made."""

    peer: WriterPeer
    handoff: Handoff
    link: WriterLink
    src_blocks_B: Int64Array
    dst_blocks_B: Int64Array
    layers: range
    posted: int = 0

    def layer_done(self, layer: int) -> None:
        """Post one layer's records. On the engine thread; returns at once."""
        peer = self.peer
        ops = whole_records(
            peer.layout,
            layer,
            self.src_blocks_B,
            self.dst_blocks_B,
            src_num_blocks=peer.src_num_blocks,
            dst_num_blocks=peer.dst_num_blocks,
        )
        self.link.post(self.handoff.grant, ops)
        self.posted += 1

    def finish(self) -> None:
        """After the step, on the control thread: layers that were never posted (the step failed) count as dropped."""
        missing = (len(self.layers) - self.posted) * len(self.src_blocks_B)
        self.posted = len(self.layers)
        if missing:
            self.peer.completed(self.handoff, missing, missing * self.peer.layout.record_bytes)


class WriterPeer:
    """This process as writer towards one receiver process."""

    def __init__(
        self,
        *,
        address: PeerAddress,
        connect_request: transfer_pb2.ConnectRequest,
        layout: Layout,
        src_num_blocks: int,
        machine: WriterGrants,
        channels: Channels,
        make_link: LinkMaker,
        offers: Offers,
        loop: asyncio.AbstractEventLoop,
        config: WriterConfig,
    ) -> None:
        self.address = address
        self.machine = machine
        self.layout = layout
        self.src_num_blocks = src_num_blocks
        self.dst_num_blocks = 0
        self.bytes_moved = 0
        self.transport: TransportName | None = None
        self._connect_request = connect_request
        self._stub = transfer_pb2_grpc.TransferStub(channels.get(address.endpoint))
        self._channels = channels
        self._make_link = make_link
        self.offers = offers
        self.link_failures = 0
        self._loop = loop
        self._config = config
        self._link: WriterLink | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._handoffs: dict[ReserveNumber, Handoff] = {}
        self._by_grant: dict[GrantId, Handoff] = {}
        self._requests: dict[ReserveNumber, transfer_pb2.ReserveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = False
        self._changed = asyncio.Event()
        self._actions: dict[type, Callable[..., None]] = {
            SendReserve: lambda i: self._spawn(self._call_reserve(i)),
            StartWriting: self._start_writing,
            SendSeal: self._send_seal,
            SendCommit: lambda i: self._spawn(self._call_commit(i)),
            AbandonWrites: self._abandon,
            ReleaseSources: self._release_sources,
            SendLetGo: lambda i: self._spawn(self._call_let_go(i)),
            AnswerRevoke: self._answer_revoke,
            ReportEnd: self._report_end,
        }

    # What the prefill node asks.

    @property
    def linked(self) -> bool:
        """There is a data connection; the receiver's death would have ended it."""
        return self._link is not None

    async def settle(self, timeout_ms: int) -> None:
        """Wait until every handoff is over and the receiver has been told, at most this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while self._handoffs:
                    self._changed.clear()
                    await self._changed.wait()

    @property
    def gone(self) -> bool:
        """The receiver process has ended; this peer is of no more use."""
        return self._gone

    def has_room(self) -> bool:
        """Within the limits of unacknowledged bytes and pinned blocks; beyond them nothing new is placed here."""
        handoffs = self._handoffs.values()
        return (
            self.machine.can_ask
            and sum(h.bytes_outstanding for h in handoffs) < self._config.unacked_bytes_max
            and sum(h.pinned_blocks for h in handoffs) < self._config.pinned_blocks_max
        )

    async def reserve(
        self,
        key: RequestKey,
        request: transfer_pb2.ReserveRequest,
        *,
        metadata: Metadata,
        sources_released: Callable[[], None],
    ) -> Handoff:
        """Ask for a grant and wait for it. Cancelling the caller gives the handoff up.

        Raises BatonError: DECODE_FULL with a retry time, PEER_UNREACHABLE, INCARNATION_MISMATCH, INCOMPATIBLE_NODE,
        or what the receiver refused with.
        """
        await self._ensure_link()
        number = self.machine.next_number
        handoff = Handoff(
            peer=self,
            number=number,
            key=key,
            granted=self._loop.create_future(),
            ended=self._loop.create_future(),
            metadata=metadata,
            sources_released=sources_released,
            dst_blocks=[],
            revoke_waiters=[],
        )
        self._handoffs[number] = handoff
        self._requests[number] = request
        self.handle(HandoffAsked(key=key))
        try:
            refusal = await handoff.granted
        except BaseException:
            handoff.cancel()
            raise
        if refusal is not None:
            raise refusal
        return handoff

    def plan_step(
        self, handoff: Handoff, src_blocks_B: Int64Array, dst_blocks_B: Int64Array, layers: range
    ) -> StepWrites:
        assert handoff.link is not None, handoff
        writes = len(layers) * len(src_blocks_B)
        nbytes = writes * self.layout.record_bytes
        self.handle(WritesPosted(number=handoff.number, writes=writes, bytes_written=nbytes))
        handoff.writes += writes
        handoff.bytes_written += nbytes
        handoff.writes_outstanding += writes
        handoff.bytes_outstanding += nbytes
        handoff.progress_s = self._loop.time()
        return StepWrites(
            peer=self,
            handoff=handoff,
            link=handoff.link,
            src_blocks_B=src_blocks_B,
            dst_blocks_B=dst_blocks_B,
            layers=layers,
        )

    async def revoked(self, number: ReserveNumber) -> None:
        """The receiver takes a grant back: returns when nothing is written under this number any more.

        Raises BatonError UNKNOWN_GRANT for a number that was never asked for.
        """
        if number >= self.machine.next_number:
            raise BatonError(Reason.UNKNOWN_GRANT, f"No Reserve has had the number {number} yet.")
        waiter: asyncio.Future[None] = self._loop.create_future()
        handoff = self._handoffs.get(number)
        if handoff is not None:
            handoff.revoke_waiters.append(waiter)
            self.handle(RevokeAsked(number=number))
            await waiter

    def peer_gone(self) -> None:
        """The receiver process is known to have ended: give everything up, tell nobody."""
        if not self._gone:
            self._gone = True
            self.handle(PeerGone())

    def receiver_lost(self) -> None:
        """The receiver is out of reach, and may come back: handoffs end as when the link is lost."""
        for number in list(self._handoffs):
            self.handle(WritesDropped(number=number))

    def give_up_stalled(self) -> None:
        """Give up handoffs whose posted writes make no progress (called by the node's reaper)."""
        now = self._loop.time()
        for handoff in list(self._handoffs.values()):
            stalled_s = now - handoff.progress_s
            if handoff.writes_outstanding and stalled_s * 1000 > self._config.stall_ms_max:
                log.warning("handoff stalled", request=handoff.key.request, peer=self.address.name)
                handoff.cancel()

    async def close(self) -> None:
        """Stop calls, unmap the receiver's region. Handoffs still open end as PEER_GONE."""
        self.peer_gone()
        tasks = [*self._tasks, *([self._connecting] if self._connecting is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    # What the link tells (kvtransfer.transport.WriterEvents).

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        handoff = self._by_grant[grant]
        if copied:
            self.bytes_moved += bytes_written
        else:
            # Before the last completion is counted, or a seal would vouch for bytes that were never copied.
            self.handle(WritesDropped(number=handoff.number))
        self.completed(handoff, writes, bytes_written)

    def link_lost(self, pair: Pair, reason: str) -> None:
        assert pair == self.address.pair, (pair, self.address)
        log.info("data link lost", peer=self.address.name, reason=reason)
        if self._link is not None:
            epoch = self._link.epoch
            if not self._link.fenced:
                assert self.transport is not None
                self._count_failure(self.transport, reason)
            self._link = None
            self.handle(LinkLost(epoch=epoch))
            for handoff in self._handoffs.values():
                if self.machine.state_of(handoff.number) is WriterState.COMMITTING:
                    self._spawn(self._await_commit(handoff))

    def cancel_request(self, key: RequestKey) -> None:
        """See to it that the receiver does not run this attempt, whatever became of its Commit. One call, at best."""
        if not self._gone:
            self._spawn(self._call_cancel(key))

    async def _call_cancel(self, key: RequestKey) -> None:
        request = decode_pb2.CancelRequest(header=self._header(), reason="the prefill node gave the request up")
        request.key.request, request.key.attempt = key.request, key.attempt
        try:
            with rpc_errors(self.address.endpoint):
                stub = decode_pb2_grpc.DecodeStub(self._channels.get(self.address.endpoint))
                await stub.Cancel(request, timeout=self._config.call_ms_max / 1000)
        except BatonError as error:
            log.info("cancel unanswered", peer=self.address.name, request=key.request, error=error.message)

    async def _await_commit(self, handoff: Handoff) -> None:
        """The link ended behind a Commit: if the seal still arrived, the Commit is answered within one call's time."""
        await asyncio.wait([handoff.ended], timeout=self._config.call_ms_max / 1000)
        if not handoff.ended.done():
            self.handle(WritesDropped(number=handoff.number))

    def completed(self, handoff: Handoff, writes: int, nbytes: int) -> None:
        handoff.writes_outstanding -= writes
        handoff.bytes_outstanding -= nbytes
        handoff.progress_s = self._loop.time()
        if handoff.writes_outstanding == 0 and handoff.seal is not None:
            self._seal_now(handoff)
        self.handle(WritesCompleted(number=handoff.number, writes=writes))

    # Carrying out.

    def handle(self, event: WriterEvent) -> None:
        for instruction in self.machine.handle(event):
            self._actions[type(instruction)](instruction)
        if isinstance(event, HandoffAsked | LinkLost | PeerGone):
            for number in list(self._handoffs):
                self._forget_if_over(number)
        else:
            self._forget_if_over(event.number)

    def _forget_if_over(self, number: ReserveNumber) -> None:
        handoff = self._handoffs.get(number)
        if handoff is None or handoff.writes_outstanding or self.machine.state_of(number) is not WriterState.DONE:
            return
        del self._handoffs[number]
        self._by_grant.pop(handoff.grant, None)
        self._changed.set()

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._task_over)

    def _task_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task broke off", peer=self.address.name, exc_info=task.exception())

    def _count_failure(self, transport: TransportName, reason: str) -> None:
        """A link broke by itself or could not be made: at some point the next best transport is used instead."""
        self.link_failures += 1
        if self.offers.failed(transport, self._loop.time()):
            log.warning(
                "transport given up",
                peer=self.address.name,
                transport=transport.value,
                reason=reason,
                left=",".join(self.offers.names),
            )

    async def _ensure_link(self) -> None:
        """Connect the data link if there is none. All who wait share one try. Raises BatonError."""
        if self._gone:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{self.address.name} is gone.")
        if self._link is not None:
            return
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(self._connect_over)
        connecting = self._connecting
        await asyncio.wait([connecting])  # whoever waits may be cancelled without ending the others' try
        if not connecting.cancelled():
            connecting.result()
        if self._gone:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{self.address.name} is gone.")

    def _connect_over(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # taken here too: those who waited may have gone away

    async def _connect(self) -> None:
        del self._connect_request.transports[:]
        self._connect_request.transports.extend(self.offers.names)
        try:
            with rpc_errors(self.address.endpoint):
                reply = await self._stub.Connect(self._connect_request, timeout=self._config.call_ms_max / 1000)
        except BatonError as error:
            if error.reason is Reason.INCARNATION_MISMATCH:
                self.peer_gone()
            raise
        endpoint = DataEndpoint(
            transport=TransportName(reply.transport),
            address=reply.address,
            secret=reply.secret,
            epoch=Epoch(reply.epoch),
        )
        self.dst_num_blocks = reply.num_blocks
        try:
            self._link = await self._make_link(endpoint, self.address.pair, self)
        except BatonError as error:
            self._count_failure(endpoint.transport, error.message)
            raise
        self.transport = endpoint.transport
        log.info("data link", peer=self.address.name, transport=reply.transport, epoch=reply.epoch)

    async def _call_reserve(self, instruction: SendReserve) -> None:
        number = instruction.number
        request, handoff = self._requests.pop(number), self._handoffs.get(number)
        if handoff is None:
            return  # given up before it was sent
        request.number, request.lowest_live = number, instruction.lowest_live
        request.header.CopyFrom(self._header())
        sent_s = self._loop.time()
        try:
            with rpc_errors(self.address.endpoint):
                reply = await self._stub.Reserve(
                    request, timeout=self._config.reserve_ms_max / 1000, metadata=handoff.metadata
                )
        except BatonError as error:
            _fail_grant(handoff, error)
            if error.reason is Reason.INCARNATION_MISMATCH:
                self.peer_gone()
            self.handle(ReserveUnanswered(number=number))
            return
        if reply.WhichOneof("answer") != "granted":
            _fail_grant(handoff, _refusal(reply, self.address.name))
            self.handle(ReserveRefused(number=number, refusal=Refusal.BUSY))
        elif number in self._handoffs:
            grant = reply.granted
            handoff.grant = GrantId(grant.grant)
            handoff.dst_blocks = [BlockId(b) for b in grant.blocks]
            handoff.prefix_skip = grant.prefix_skip
            self._set_lease(handoff, sent_s, grant.lease_ms)
            self.handle(ReserveGranted(number=number, grant=handoff.grant, epoch=Epoch(grant.epoch)))

    def _set_lease(self, handoff: Handoff, sent_s: float, lease_ms: int) -> None:
        handoff.lease_ms = lease_ms
        handoff.lease_ends_s = sent_s + lease_ms / 1000 * (1 - self._config.drift_per_mille / 1000)

    def _start_writing(self, instruction: StartWriting) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.epoch = instruction.epoch
        handoff.progress_s = self._loop.time()
        self._by_grant[handoff.grant] = handoff
        if self._link is None or self._link.epoch != instruction.epoch:
            # The pair was fenced between Connect and Reserve: the next request reconnects.
            self.handle(LinkLost(epoch=instruction.epoch))
            return
        handoff.link = self._link
        self._spawn(self._keep_lease(handoff))
        if not handoff.granted.done():
            handoff.granted.set_result(None)

    async def _keep_lease(self, handoff: Handoff) -> None:
        """Renew until the handoff has ended; report the lease lapsed when no renewal was answered in time."""
        request = transfer_pb2.RenewRequest(header=self._header(), grant=handoff.grant)
        while not handoff.ended.done():
            wait_s = handoff.lease_ms / 3000
            await asyncio.wait([handoff.ended], timeout=wait_s)
            if handoff.ended.done():
                return
            sent_s = self._loop.time()
            try:
                left_s = max(handoff.lease_ends_s - sent_s, 0.001)
                with rpc_errors(self.address.endpoint):
                    reply = await self._stub.Renew(request, timeout=min(left_s, wait_s))
            except BatonError as error:
                if error.reason is Reason.INCARNATION_MISMATCH:
                    self.peer_gone()
                elif self._loop.time() >= handoff.lease_ends_s:
                    self.handle(LeaseLapsed(number=handoff.number))
                continue
            if reply.renewed:
                self._set_lease(handoff, sent_s, reply.lease_ms)
            else:
                self.handle(RenewRefused(number=handoff.number))

    def _send_seal(self, instruction: SendSeal) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.seal = Seal(
            grant=instruction.grant,
            epoch=instruction.epoch,
            writes=instruction.writes,
            bytes_written=instruction.bytes_written,
        )
        if handoff.writes_outstanding == 0:
            self._seal_now(handoff)

    def _seal_now(self, handoff: Handoff) -> None:
        """The seal goes behind all writes of the grant, so it waits for their completions (the Commit does not)."""
        assert handoff.seal is not None and handoff.link is not None, handoff
        seal, handoff.seal = handoff.seal, None
        if handoff.link is self._link:
            handoff.link.seal(seal)
        else:
            self.handle(WritesDropped(number=handoff.number))

    async def _call_commit(self, instruction: SendCommit) -> None:
        number = instruction.number
        handoff = self._handoffs.get(number)
        if handoff is None:
            return  # given up before it was sent
        request = transfer_pb2.CommitRequest(
            header=self._header(),
            grant=instruction.grant,
            writes=instruction.writes,
            bytes_written=instruction.bytes_written,
            first_token=handoff.first_token,
            first_logprobs=handoff.first_logprobs,
        )
        try:
            with rpc_errors(self.address.endpoint):
                reply = await self._stub.Commit(
                    request, timeout=self._config.call_ms_max / 1000, metadata=handoff.metadata
                )
        except BatonError as error:
            await self._after_failed_call(error, number)
            self.handle(CommitUnanswered(number=number))
            return
        self.handle(CommitAnswered(number=number, committed=reply.committed))

    async def _call_let_go(self, instruction: SendLetGo) -> None:
        request = transfer_pb2.LetGoRequest(
            header=self._header(), number=instruction.number, lowest_live=instruction.lowest_live
        )
        try:
            with rpc_errors(self.address.endpoint):
                await self._stub.LetGo(request, timeout=self._config.call_ms_max / 1000)
        except BatonError as error:
            await self._after_failed_call(error, instruction.number)
            self.handle(LetGoUnanswered(number=instruction.number))
            return
        self.handle(LetGoAnswered(number=instruction.number))

    async def _after_failed_call(self, error: BatonError, number: ReserveNumber) -> None:
        """Notice a receiver that is another process by now; otherwise pause before the machine asks again."""
        if error.reason is Reason.INCARNATION_MISMATCH:
            self.peer_gone()
        handoff = self._handoffs.get(number)
        if handoff is None:
            return
        log.warning("call failed", peer=self.address.name, request=handoff.key.request, error=error.message)
        pause_ms = min(self._config.retry_ms_max, self._config.retry_ms_min << min(handoff.retries, 16))
        handoff.retries += 1
        await asyncio.sleep(pause_ms / 1000)

    def _abandon(self, instruction: AbandonWrites) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.seal = None
        if handoff.link is not None:
            handoff.link.abandon(instruction.grant)

    def _release_sources(self, instruction: ReleaseSources) -> None:
        handoff = self._handoffs[instruction.number]
        if handoff.link is not None:
            handoff.link.forget(handoff.grant)
        handoff.pinned_blocks = 0
        handoff.sources_released()

    def _answer_revoke(self, instruction: AnswerRevoke) -> None:
        handoff = self._handoffs.get(instruction.number)
        for waiter in handoff.revoke_waiters if handoff is not None else ():
            if not waiter.done():
                waiter.set_result(None)

    def _report_end(self, instruction: ReportEnd) -> None:
        handoff = self._handoffs[instruction.number]
        if not handoff.granted.done():
            text = f"{self.address.name}: the handoff ended before it began ({instruction.end.value})."
            handoff.granted.set_result(BatonError(Reason.HANDOFF_FAILED, text))
        handoff.ended.set_result(instruction.end)

    def _header(self) -> common_pb2.Header:
        return common_pb2.Header(sender=self.address.pair.writer, receiver=self.address.pair.receiver)


def _fail_grant(handoff: Handoff, error: BatonError) -> None:
    if not handoff.granted.done():
        handoff.granted.set_result(error)


_GRANT_REFUSALS = frozenset(refusal.value for refusal in Refusal)


def _refusal(reply: transfer_pb2.ReserveReply, name: str) -> BatonError:
    if reply.WhichOneof("answer") == "busy":
        return BatonError(
            Reason.DECODE_FULL,
            f"{name} has no room: {reply.busy.reason}.",
            retry_after_ms=reply.busy.retry_after_ms,
        )
    if reply.reject.reason in _GRANT_REFUSALS:
        return BatonError(Reason.INCOMPATIBLE_NODE, f"{name} refused: {reply.reject.reason}.")
    return bad_field("prompt", f"{name} refused: {reply.reject.reason}.", reason=Reason.PROMPT_TOO_LONG)
