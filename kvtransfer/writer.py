"""The writer's shell, for one receiver process: carries out what `WriterMachine` instructs.

Everything runs on the node's control thread, but for `StepWrites.layer_done`, which the engine thread calls too.

Shape suffix: B = one entry per block.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2, transfer_pb2, transfer_pb2_grpc

from baton.config import fixed, setting
from baton.errors import BatonError, InvalidField, Reason, bad_field, check_positive
from baton.ids import BlockId, Epoch, GrantId, Pair, RequestKey, ReserveNumber
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import Channels, rpc_errors
from baton.tasks import PendingCalls, Tasks
from cachestore.layout import Int64Array, Layout
from kvtransfer.checksums import ChecksumThread, SourceSample
from kvtransfer.link import LinkMaker, Offers, PairLink, PeerAddress
from kvtransfer.protocol import writer as protocol
from kvtransfer.protocol.receiver import Refusal
from kvtransfer.protocol.writer import GiveUp, HandoffEnd, WriterMachine, WriterState
from kvtransfer.status import Moved
from kvtransfer.transport import RecordPlan, Seal, WriterLink, check_granted

log = get_log("writer")

COMMIT_FAILED: Final = "commit call failed"
RELEASE_FAILED: Final = "release call failed"
POST_BYTES_MAX: Final = 128 << 20
"""Of several layers in one post. Copying threads wait for the one that posts, and tcp ends each post with small frames;
but what stands still is noticed between posts only."""

Metadata = tuple[tuple[str, str], ...]

_GRANT_REFUSALS: Final = frozenset(refusal.value for refusal in Refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterConfig:
    """Times and limits of the writer's side of a handoff, for each receiver."""

    reserve_ms_max: int = setting(
        1_000,
        "how long a Reserve may go unanswered; a healthy node answers at once",
        "The network or the decode nodes stand still for longer without being dead.",
    )
    call_ms_max: int = setting(2_000, "how long any other call to a receiver may go unanswered", "As reserve_ms_max.")
    stall_ms_max: int = setting(
        10_000,
        "a handoff whose posted writes make no progress for this long is given up",
        "The network stands still for longer, or other decode nodes should be tried sooner.",
    )
    checksum_fraction: float = setting(
        0.0,
        "share of the records, 0 to 1, that the decode node compares with a checksum before it takes a handoff; "
        "0 compares none",
        "Bad hardware is suspected. It costs compute on both sides.",
    )
    retry_ms_min: int = fixed(20)
    """First pause before an unanswered call is repeated."""
    retry_ms_max: int = fixed(1_000)
    """Longest such pause."""
    drift_per_mille: int = fixed(20)
    """Margin taken off a lease because two clocks run at different rates."""
    unacked_bytes_max: int = fixed(1 << 30)
    """Posted bytes to one receiver without an acknowledgement, beyond which nothing new goes there."""
    pinned_blocks_max: int = fixed(65_536)
    """Source blocks pinned for one receiver, beyond which nothing new goes there."""

    def __post_init__(self) -> None:
        if not 0 <= self.checksum_fraction <= 1:
            raise InvalidField("checksum_fraction", f"is {self.checksum_fraction}; must be between 0 and 1")
        check_positive(self, *(name for name in self.__slots__ if name != "checksum_fraction"))


@dataclass(slots=True, eq=False, kw_only=True)
class Handoff:
    """One handoff as the prefill node holds it, from Reserve to its end.

    `granted` is set when writing may start (None), or to what says why not. `sources_released` is called once if it was
    granted: the transport has let go of the source blocks.
    """

    peer: WriterPeer
    number: ReserveNumber
    key: RequestKey
    granted: asyncio.Future[BatonError | None]
    ended: asyncio.Future[HandoffEnd]
    metadata: Metadata
    """Request id and trace context, sent along with the calls of this handoff."""
    sources_released: Callable[[], None] | None
    """None once it has been called, which breaks a cycle of references."""
    request: transfer_pb2.ReserveRequest | None
    """None once it is sent, so that the prompt is freed."""
    first_token: int = -1
    first_logprobs: common_pb2.TokenLogprobs | None = None
    blocks_filled: int | None = None
    """Of a fetch, instead of a first token."""
    is_fetch: bool = False
    grant: GrantId = GrantId(b"")
    dst_blocks: list[BlockId] = field(default_factory=list)
    prefix_skip: int = 0
    lease_ends_s: float = 0.0
    lease_ms: int = 0
    renewal: asyncio.TimerHandle | None = None
    """When the lease is first renewed."""
    link: WriterLink | None = None
    pinned_blocks: int = 0
    """Source blocks that are held for it until `sources_released`."""
    writes: int = 0
    bytes_written: int = 0
    progress_s: float = 0.0
    seal: Seal | None = None
    steps: set[StepWrites] = field(default_factory=set)
    """Planned and not finished: an engine step may be posting them right now."""
    retries: int = 0
    sample: SourceSample | None = None
    """What goes along with the Commit; None where nothing is sampled."""

    def may_post(self) -> bool:
        return self.peer.machine.state_of(self.number) is WriterState.WRITING

    def plan_step(self, src_blocks_B: Int64Array, dst_blocks_B: Int64Array) -> StepWrites:
        """What it writes in one engine step: all records of these blocks, listed position after position. From here on
        the writes are outstanding; `StepWrites.finish` completes those that were not posted. Raises WriteOutOfBounds: a
        block that the grant does not open."""
        assert self.link is not None, self
        peer = self.peer
        check_granted(dst_blocks_B, self.dst_blocks)
        plan = RecordPlan(
            peer.layout,
            src_blocks_B,
            dst_blocks_B,
            src_num_blocks=peer.src_num_blocks,
            dst_num_blocks=peer.link.num_blocks,
        )
        writes, nbytes = plan.num_layers * plan.writes_per_layer, plan.nbytes
        peer.handle(protocol.WritesPosted(number=self.number, writes=writes, bytes_written=nbytes))
        self.writes += writes
        self.bytes_written += nbytes
        self.progress_s = peer.loop.time()
        step = StepWrites(handoff=self, link=self.link, plan=plan)
        self.steps.add(step)
        return step

    def all_posted(self, first_token: int, first_logprobs: common_pb2.TokenLogprobs | None = None) -> None:
        """Seal and commit. Nothing is posted afterwards."""
        self.first_token, self.first_logprobs = first_token, first_logprobs
        self.peer.handle(protocol.AllPosted(number=self.number))

    def all_filled(self, blocks: int) -> None:
        """The same of a fetch: so many leading blocks of the grant are written."""
        self.blocks_filled = blocks
        self.peer.handle(protocol.AllPosted(number=self.number))

    def cancel(self) -> None:
        """Give it up: drain, then tell the receiver. Idempotent; nothing happens once it has ended."""
        self.peer.handle(GiveUp(number=self.number, end=HandoffEnd.CANCELLED))


@dataclass(slots=True, eq=False, kw_only=True)
class StepWrites:
    """The writes of one handoff in one engine step: the same positions, layer after layer."""

    handoff: Handoff
    link: WriterLink
    plan: RecordPlan
    posted: int = 0
    """Layers."""
    _closed: bool = False
    _posting: threading.Lock = field(default_factory=threading.Lock)
    """Held for a post; once `finish` has had it, nothing is posted any more."""

    def layer_done(self, layer: int) -> None:
        """Post one layer's records, unless the step was finished meanwhile. On the engine thread; returns at once."""
        self.layers_done(layer, layer + 1)

    def layers_done(self, first: int, end: int) -> None:
        """The same of several layers, in one post."""
        peer, layers = self.handoff.peer, range(first, end)
        nbytes = sum(map(self.plan.layer_nbytes, layers))
        with self._posting:
            if self._closed:
                return
            ops = self.plan.of_layers(first, end)
            peer.link.speed.posted(nbytes, peer.loop.time())
            try:
                self.link.post(self.handoff.grant, ops)
            except BaseException:
                peer.link.speed.completed(nbytes, peer.loop.time(), copied=False)
                raise
            self.posted += len(layers)  # at once: the transport has them, whatever goes wrong from here on
            if self.handoff.sample is not None:
                for layer in layers:
                    self.handoff.sample.take(layer, self.plan.dst_blocks(layer), self.plan.of_layer(layer))

    def all_layers_done(self) -> None:
        """Post every layer, and finish: for blocks that have been computed before. In few posts: copying threads must
        not wait for this one. The first layer goes ahead, so that they have something to copy meanwhile."""
        count = self.plan.num_layers
        layers_each = max(1, POST_BYTES_MAX * count // max(1, self.plan.nbytes))
        firsts = [0, *range(1, count, layers_each)]
        for first, end in pairwise([*firsts, count]):
            self.layers_done(first, end)
        self.finish()

    def finish(self) -> None:
        """On the control thread, after the step, or within it when the handoff was given up: no layer is posted from
        now on. Idempotent."""
        with self._posting:
            self._closed = True
        missing = (self.plan.num_layers - self.posted) * self.plan.writes_per_layer
        self.posted = self.plan.num_layers
        self.handoff.steps.discard(self)
        if missing:
            self.handoff.peer.completed(self.handoff, missing)


class WriterPeer:
    """This process as writer towards one receiver process. Is its link's `kvtransfer.transport.WriterEvents`."""

    def __init__(
        self,
        *,
        address: PeerAddress,
        connect_request: transfer_pb2.ConnectRequest,
        layout: Layout,
        src_num_blocks: int,
        machine: WriterMachine,
        channels: Channels,
        make_link: LinkMaker,
        offers: Offers,
        loop: asyncio.AbstractEventLoop,
        config: WriterConfig,
        checksums: ChecksumThread | None = None,
    ) -> None:
        """`checksums` reads the source region, where records are sampled; the caller closes it after this."""
        self.address = address
        self.machine = machine
        self.layout = layout
        self.src_num_blocks = src_num_blocks
        self.bytes_moved = self.bytes_fetched = self.handoffs_corrupt = self.records_checksummed = 0
        self.used_s = loop.time()
        """When something was last asked of it."""
        self._checksums, self.loop, self._config = checksums, loop, config
        self._channels = channels
        self.stub = transfer_pb2_grpc.TransferStub(channels.get(address.endpoint))
        self._header = common_pb2.Header(sender=address.pair.writer, receiver=address.pair.receiver)
        self.link = PairLink(
            address=address,
            stub=self.stub,
            call_ms_max=config.call_ms_max,
            request=connect_request,
            make_link=make_link,
            offers=offers,
            events=self,
            replaced=self.peer_gone,
            loop=loop,
        )
        self._repeats = RepeatLog(log, loop.time)
        self._handoffs: dict[ReserveNumber, Handoff] = {}
        """Those that are not over; `_granted` has those of them that have a grant."""
        self._granted: dict[GrantId, Handoff] = {}
        self._fewer = asyncio.Event()
        self._revokes: PendingCalls[ReserveNumber, bool] = PendingCalls(loop)
        self._tasks = Tasks(loop, log, peer=address.name)
        self.gone = False
        """The receiver process has ended; this peer is of no more use."""
        self._actions: dict[type, Callable[..., Coroutine[Any, Any, None] | None]] = {
            protocol.SendReserve: self._reserve,
            protocol.StartWriting: self._start_writing,
            protocol.SendSeal: self._send_seal,
            protocol.SendCommit: self._commit,
            protocol.AbandonWrites: self._abandon,
            protocol.ReleaseSources: self._release_sources,
            protocol.SendRelease: self._release,
            protocol.AnswerRevoke: lambda i: self._revokes.answer(i.number, i.in_doubt),
            protocol.ReportEnd: self._report_end,
        }

    # What the prefill node asks.

    async def settle(self, timeout_ms: int) -> None:
        """Wait until every handoff is over and the receiver has been told, at most this long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while self._handoffs:
                    self._fewer.clear()
                    await self._fewer.wait()

    def has_room(self) -> bool:
        """Within the limits of unacknowledged bytes and pinned blocks; beyond them nothing new is placed here."""
        return (
            self.machine.can_ask
            and self.machine.outstanding * self.layout.page_bytes < self._config.unacked_bytes_max
            and sum(handoff.pinned_blocks for handoff in self._handoffs.values()) < self._config.pinned_blocks_max
        )

    def status(self) -> node_pb2.PairStatus:
        """What the node reports of this pair: its path, whether that is open, how fast it is, what it does not use."""
        link, now_s = self.link, self.loop.time()
        given_up = link.offers.given_up
        return node_pb2.PairStatus(
            peer=self.address.name,
            peer_incarnation=self.address.pair.receiver,
            epoch=link.epoch,
            transport=link.transport.value if link.transport is not None else "",
            bytes_moved=self.bytes_moved,
            transports_given_up=[transport.value for transport in given_up],
            bytes_fetched=self.bytes_fetched,
            given_up_left_ms=[max(0, round((retry_s - now_s) * 1e3)) for retry_s in given_up.values()],
            link_failures=link.failures,
            handoffs_corrupt=self.handoffs_corrupt,
            records_checksummed=self.records_checksummed,
            link_open=link.now is not None,
            moved=_moved(link.speed.in_all(now_s)),
            moved_recently=_moved(link.speed.recent(now_s)),
            rejected_transports=link.rejected_transports,
        )

    async def reserve(
        self,
        key: RequestKey,
        request: transfer_pb2.ReserveRequest,
        *,
        metadata: Metadata,
        sources_released: Callable[[], None],
    ) -> Handoff:
        """Ask for a grant and wait for it. Cancelling the caller gives the handoff up. Raises BatonError: DECODE_FULL
        with a retry time, PEER_UNREACHABLE, INCARNATION_MISMATCH, INCOMPATIBLE_NODE, or why the receiver refused."""
        await self.connect()
        number = self.machine.next_number
        handoff = Handoff(
            peer=self,
            number=number,
            key=key,
            granted=self.loop.create_future(),
            ended=self.loop.create_future(),
            metadata=metadata,
            sources_released=sources_released,
            request=request,
            is_fetch=request.HasField("fetch_blocks"),
        )
        self._handoffs[number] = handoff
        self.handle(protocol.HandoffAsked(key=key))
        try:
            refusal = await handoff.granted
        except BaseException:
            handoff.cancel()
            raise
        if refusal is None:
            return handoff
        try:
            raise refusal
        finally:
            del refusal, handoff  # or the error would refer to itself, by this frame in its traceback

    async def connect(self) -> None:
        """Make the link, if there is none. Raises BatonError, as `reserve` does."""
        self.used_s = self.loop.time()
        self._check_here()
        await self.link.ensure(idle=not self._handoffs)
        self._check_here()

    def _check_here(self) -> None:
        if self.gone:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{self.address.name} is gone.")

    def cancel_request(self, key: RequestKey) -> None:
        """Have the receiver not run this attempt, whatever became of its Commit. One call, best effort."""
        if not self.gone:
            self._tasks.spawn(self._cancel(key))

    async def revoked(self, number: ReserveNumber) -> bool:
        """The receiver takes a grant back: returns when nothing is written under this number any more. True: what was
        under way when the link ended may still land. Raises BatonError UNKNOWN_GRANT: it was never asked for."""
        if number >= self.machine.next_number:
            raise BatonError(Reason.UNKNOWN_GRANT, f"No Reserve has had the number {number} yet.")
        return await self._revokes.ask(number, lambda: self.handle(protocol.RevokeAsked(number=number)))

    def peer_gone(self) -> None:
        """The receiver process is known to have ended: give everything up, and call nobody."""
        if not self.gone:
            self.gone = True
            self._repeats.over(self.address.name, "nothing more is asked of it")
            self.handle(protocol.PeerGone())

    def receiver_lost(self) -> None:
        """The receiver is out of reach, and may come back: handoffs end as when the link is lost."""
        for number in list(self._handoffs):
            self.handle(GiveUp(number=number, end=HandoffEnd.LINK_LOST))

    def upkeep(self) -> None:
        """Give up handoffs that stand still. Called every second by the node's reaper."""
        latest_s = self.loop.time() - self._config.stall_ms_max / 1000
        for handoff in list(self._handoffs.values()):
            if self.machine.outstanding_of(handoff.number) and handoff.progress_s < latest_s:
                self._repeats.warning("handoff stalled", peer=self.address.name, request=handoff.key.request)
                handoff.cancel()
        self._repeats.upkeep()

    async def close(self) -> None:
        """Stop calls, unmap the receiver's region. Handoffs still open end as PEER_GONE."""
        self.peer_gone()
        await self.link.close()
        await self._tasks.cancel()
        self._repeats.close()

    # What the link reports (kvtransfer.transport.WriterEvents).

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        handoff = self._granted[grant]
        self.link.completed(bytes_written, copied=copied)
        if copied:
            self.bytes_moved += bytes_written
            self.bytes_fetched += bytes_written if handoff.is_fetch else 0
        else:
            # Before the last completion is counted, or a seal would vouch for bytes that were never copied.
            self.handle(GiveUp(number=handoff.number, end=HandoffEnd.LINK_LOST))
        self.completed(handoff, writes)

    def writes_in_doubt(self, grant: GrantId) -> None:
        self.handle(protocol.WritesInDoubt(number=self._granted[grant].number))

    def link_lost(self, pair: Pair, reason: str) -> None:
        assert pair == self.address.pair, (pair, self.address)
        log.info("data link lost", peer=self.address.name, reason=reason)
        epoch = self.link.lost(reason)
        if epoch is not None:
            self.handle(protocol.LinkLost(epoch=epoch))
            for handoff in self._handoffs.values():
                if self.machine.state_of(handoff.number) is WriterState.COMMITTING:
                    self._tasks.spawn(self._await_commit(handoff))

    def completed(self, handoff: Handoff, writes: int) -> None:
        """So many of its writes are outstanding no more."""
        handoff.progress_s = self.loop.time()
        self.handle(protocol.WritesCompleted(number=handoff.number, writes=writes))
        if handoff.seal is not None and self.machine.outstanding_of(handoff.number) == 0:
            self._seal_now(handoff)

    # Carrying out.

    def handle(self, event: protocol.WriterEvent) -> None:
        for instruction in self.machine.handle(event):
            call = self._actions[type(instruction)](instruction)
            if call is not None:
                self._tasks.spawn(call)
        for number in [event.number] if isinstance(event, protocol.HandoffEvent) else list(self._handoffs):
            if number in self._handoffs and not self.machine.knows(number):
                self._granted.pop(self._handoffs.pop(number).grant, None)
                self._fewer.set()

    def _start_writing(self, instruction: protocol.StartWriting) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.progress_s = self.loop.time()
        self._granted[handoff.grant] = handoff
        link = self.link.now
        if link is None or link.epoch != instruction.epoch:
            # The pair was fenced between Connect and Reserve: the next request reconnects.
            self.handle(protocol.LinkLost(epoch=instruction.epoch))
            return
        handoff.link = link
        if self._checksums is not None:
            records = self.layout.num_layers * len(handoff.dst_blocks) // self.layout.num_groups
            fraction = self._config.checksum_fraction
            handoff.sample = SourceSample(self._checksums, handoff.grant, fraction=fraction, records=records)
        # Most handoffs are over before it is time to renew: those that are not get a task then.
        handoff.renewal = self.loop.call_later(
            handoff.lease_ms / 3000, lambda: self._tasks.spawn(self._keep_lease(handoff))
        )
        if not handoff.granted.done():
            handoff.granted.set_result(None)

    def _send_seal(self, instruction: protocol.SendSeal) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.seal = instruction.seal
        if self.machine.outstanding_of(handoff.number) == 0:
            self._seal_now(handoff)

    def _seal_now(self, handoff: Handoff) -> None:
        """The seal goes behind all writes of the grant, so it waits for their completions (the Commit does not)."""
        assert handoff.seal is not None and handoff.link is not None, handoff
        seal, handoff.seal = handoff.seal, None
        if handoff.link is self.link.now:
            handoff.link.seal(seal)
        else:
            self.handle(GiveUp(number=handoff.number, end=HandoffEnd.LINK_LOST))

    def _abandon(self, instruction: protocol.AbandonWrites) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.seal = None
        if handoff.link is not None:
            handoff.link.abandon(instruction.grant)
        for step in handoff.steps:
            # The step posts nothing more, so the answer to the receiver need not wait for its end.
            self.loop.call_soon(step.finish)

    def _release_sources(self, instruction: protocol.ReleaseSources) -> None:
        handoff = self._handoffs[instruction.number]
        if handoff.link is not None:
            handoff.link.forget(handoff.grant)

        def released() -> None:
            handoff.pinned_blocks = 0
            sources_released, handoff.sources_released = handoff.sources_released, None
            assert sources_released is not None, handoff
            sources_released()

        if handoff.sample is None:
            released()
        else:
            handoff.sample.settled(self.loop, released)

    def _report_end(self, instruction: protocol.ReportEnd) -> None:
        handoff = self._handoffs[instruction.number]
        if handoff.sample is not None and instruction.end in (HandoffEnd.COMMITTED, HandoffEnd.CORRUPT):
            self.records_checksummed += handoff.sample.records
        self.handoffs_corrupt += instruction.end is HandoffEnd.CORRUPT
        text = f"{self.address.name}: the handoff ended before it began ({instruction.end.value})."
        _fail_grant(handoff, BatonError(Reason.HANDOFF_FAILED, text))
        handoff.ended.set_result(instruction.end)
        if handoff.renewal is not None:
            handoff.renewal.cancel()

    # Calls to the receiver: each a task, whose outcome becomes an event. None raises, all have their deadlines.

    async def _cancel(self, key: RequestKey) -> None:
        request = decode_pb2.CancelRequest(header=self._header, reason="the prefill node gave the request up")
        request.key.request, request.key.attempt = key.request, key.attempt
        try:
            with rpc_errors(self.address.endpoint):
                stub = decode_pb2_grpc.DecodeStub(self._channels.get(self.address.endpoint))
                await stub.Cancel(request, timeout=self._config.call_ms_max / 1000)
        except BatonError as error:
            self._repeats.info("cancel unanswered", peer=self.address.name, request=key.request, error=error.message)

    async def _await_commit(self, handoff: Handoff) -> None:
        """The link ended behind a Commit: if the seal still arrived, the Commit is answered within one call's time."""
        await asyncio.wait([handoff.ended], timeout=self._config.call_ms_max / 1000)
        if not handoff.ended.done():
            self.handle(GiveUp(number=handoff.number, end=HandoffEnd.LINK_LOST))

    async def _reserve(self, instruction: protocol.SendReserve) -> None:
        """Ask once, and resolve `granted` with what came of it."""
        number = instruction.number
        handoff = self._handoffs.get(number)
        if handoff is None:
            return  # given up before it was sent
        request, handoff.request = handoff.request, None
        assert request is not None
        request.number, request.lowest_live = number, instruction.lowest_live
        request.header.CopyFrom(self._header)
        sent_s = self.loop.time()
        try:
            with rpc_errors(self.address.endpoint):
                reply: transfer_pb2.ReserveReply = await self.stub.Reserve(
                    request, timeout=self._config.reserve_ms_max / 1000, metadata=handoff.metadata
                )
        except BatonError as error:
            _fail_grant(handoff, error)
            if error.reason is Reason.INCARNATION_MISMATCH:
                self.peer_gone()
            self.handle(protocol.ReserveUnanswered(number=number))
            return
        if reply.WhichOneof("answer") != "granted":
            _fail_grant(handoff, _refusal_error(reply, self.address.name))
            self.handle(protocol.ReserveRefused(number=number))
        elif number in self._handoffs:
            grant = reply.granted
            handoff.grant = GrantId(grant.grant)
            handoff.dst_blocks = [BlockId(b) for b in grant.blocks]
            handoff.prefix_skip = grant.prefix_skip
            self._set_lease(handoff, sent_s, grant.lease_ms)
            self.handle(protocol.ReserveGranted(number=number, grant=handoff.grant, epoch=Epoch(grant.epoch)))

    async def _keep_lease(self, handoff: Handoff) -> None:
        """Renew, the first time at once, until the handoff has ended; report the lease lapsed when no renewal was
        answered in time."""
        while not handoff.ended.done():
            sent_s = self.loop.time()
            left_s = max(handoff.lease_ends_s - sent_s, 0.001)
            request = transfer_pb2.RenewRequest(header=self._header, grant=handoff.grant)
            try:
                with rpc_errors(self.address.endpoint):
                    reply: transfer_pb2.RenewReply = await self.stub.Renew(
                        request, timeout=min(left_s, handoff.lease_ms / 3000)
                    )
            except BatonError as error:
                if error.reason is Reason.INCARNATION_MISMATCH:
                    self.peer_gone()
                elif self.loop.time() >= handoff.lease_ends_s:
                    self.handle(GiveUp(number=handoff.number, end=HandoffEnd.LEASE_LAPSED))
            else:
                if reply.renewed:
                    self._set_lease(handoff, sent_s, reply.lease_ms)
                else:
                    self.handle(GiveUp(number=handoff.number, end=HandoffEnd.REVOKED))
            if not handoff.ended.done():
                await asyncio.wait([handoff.ended], timeout=handoff.lease_ms / 3000)

    async def _commit(self, instruction: protocol.SendCommit) -> None:
        """Ask once; the machine asks again where there was no answer, after a pause. So with `_release`."""
        number = instruction.number
        handoff = self._handoffs.get(number)
        if handoff is None:
            return  # given up before it was sent
        request = transfer_pb2.CommitRequest(
            header=self._header,
            grant=instruction.seal.grant,
            writes=instruction.seal.writes,
            bytes_written=instruction.seal.bytes_written,
        )
        if handoff.blocks_filled is not None:
            request.blocks_filled = handoff.blocks_filled
        else:
            request.first_token = handoff.first_token
            if handoff.first_logprobs is not None:
                request.first_logprobs.CopyFrom(handoff.first_logprobs)
        if handoff.sample is not None:
            try:
                checksums = await handoff.sample.checksums()
            except Exception as error:
                log.error("reading a handoff's sample failed", request=handoff.key.request, exc_info=error)
                self.handle(GiveUp(number=number, end=HandoffEnd.LINK_LOST))
                return
            request.checksum_layers.extend(checksums.layers_R.tolist())
            request.checksum_blocks.extend(checksums.blocks_R.tolist())
            request.checksums.extend(checksums.crcs_R.tolist())
        if handoff.ended.done():
            return  # given up meanwhile
        try:
            with rpc_errors(self.address.endpoint):
                reply: transfer_pb2.CommitReply = await self.stub.Commit(
                    request, timeout=self._config.call_ms_max / 1000, metadata=handoff.metadata
                )
        except BatonError as error:
            if error.reason in (Reason.DATA_CORRUPT, Reason.HANDOFF_FAILED):
                corrupt = error.reason is Reason.DATA_CORRUPT
                if corrupt:
                    self._log_corrupt(handoff, error)
                self.handle(protocol.CommitAnswered(number=number, committed=False, corrupt=corrupt))
                return
            await self._after_failed_call(COMMIT_FAILED, error, number)
            self.handle(protocol.CommitUnanswered(number=number))
            return
        self._repeats.over(self.address.name, "it has answered", what=COMMIT_FAILED)
        self.handle(protocol.CommitAnswered(number=number, committed=reply.committed))

    def _log_corrupt(self, handoff: Handoff, error: BatonError) -> None:
        """As loud as at the receiver: either machine may be the one that is failing."""
        transport = self.link.transport
        log.error(
            "CORRUPT RECORDS",
            request=handoff.key.request,
            attempt=handoff.key.attempt,
            peer=self.address.name,
            peer_host=error.metadata.get("host", ""),
            host=socket.gethostname(),
            pair=f"{self.address.pair.writer:x}>{self.address.pair.receiver:x}",
            transport=transport.value if transport is not None else "",
            corrupt=error.metadata.get("corrupt", ""),
            layer_block=error.metadata.get("layer_block", ""),
        )

    async def _release(self, instruction: protocol.SendRelease) -> None:
        request = transfer_pb2.ReleaseRequest(
            header=self._header,
            number=instruction.number,
            lowest_live=instruction.lowest_live,
            writes_in_doubt=instruction.in_doubt,
        )
        try:
            with rpc_errors(self.address.endpoint):
                await self.stub.Release(request, timeout=self._config.call_ms_max / 1000)
        except BatonError as error:
            await self._after_failed_call(RELEASE_FAILED, error, instruction.number)
            self.handle(protocol.ReleaseUnanswered(number=instruction.number))
            return
        self._repeats.over(self.address.name, "it has answered", what=RELEASE_FAILED)
        self.handle(protocol.ReleaseAnswered(number=instruction.number))

    async def _after_failed_call(self, what: str, error: BatonError, number: ReserveNumber) -> None:
        """Notice a receiver that is another process by now; otherwise pause before the machine asks again."""
        if error.reason is Reason.INCARNATION_MISMATCH:
            self.peer_gone()
        handoff = self._handoffs.get(number)
        if handoff is None:
            return
        self._repeats.warning(what, peer=self.address.name, request=handoff.key.request, error=error.message)
        pause_ms = min(self._config.retry_ms_max, self._config.retry_ms_min << min(handoff.retries, 16))
        handoff.retries += 1
        await asyncio.sleep(pause_ms / 1000)

    def _set_lease(self, handoff: Handoff, sent_s: float, lease_ms: int) -> None:
        handoff.lease_ms = lease_ms
        handoff.lease_ends_s = sent_s + lease_ms / 1000 * (1 - self._config.drift_per_mille / 1000)


def _fail_grant(handoff: Handoff, error: BatonError) -> None:
    if not handoff.granted.done():
        handoff.granted.set_result(error)


def _refusal_error(reply: transfer_pb2.ReserveReply, name: str) -> BatonError:
    """What an answer to Reserve other than a grant means to whoever asked."""
    if reply.WhichOneof("answer") == "busy":
        text = f"{name} has no room: {reply.busy.reason}."
        return BatonError(Reason.DECODE_FULL, text, retry_after_ms=reply.busy.retry_after_ms)
    if reply.reject.reason in _GRANT_REFUSALS:
        return BatonError(Reason.INCOMPATIBLE_NODE, f"{name} refused: {reply.reject.reason}.")
    return bad_field("prompt", f"{name} refused: {reply.reject.reason}.", reason=Reason.PROMPT_TOO_LONG)


def _moved(moved: Moved) -> node_pb2.MovedBytes:
    return node_pb2.MovedBytes(
        nbytes=moved.nbytes, moving_us=round(moved.moving_s * 1e6), bytes_per_s=moved.bytes_per_s
    )
