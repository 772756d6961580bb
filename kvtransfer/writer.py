"""The writer's shell: carries out what `WriterGrants` instructs, for one receiver process.

Its calls are in `writer_calls` and `writer_errands`, its data connection in `writer_link`, what it hands out in
`handoff` and `step_writes`, what it has handed out and is not over in `open_handoffs`. Everything runs on the node's
control thread, but `StepWrites.layer_done`, which the engine thread calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from batonpb import transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import GrantId, Pair, RequestKey, ReserveNumber
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc_client import Channels
from baton.tasks import Tasks
from cachestore.layout import Layout
from kvtransfer.checksums import ChecksumThread, SourceSample
from kvtransfer.handoff import Handoff, Metadata, WriterConfig
from kvtransfer.negotiation import Offers
from kvtransfer.observer import HandoffObserver
from kvtransfer.open_handoffs import OpenHandoffs
from kvtransfer.transport import Seal
from kvtransfer.writer_calls import PeerAddress, ReceiverCalls
from kvtransfer.writer_errands import Errands
from kvtransfer.writer_grants import WriterGrants, WriterState
from kvtransfer.writer_link import LinkMaker, PairLink
from kvtransfer.writer_messages import (
    AbandonWrites,
    AnswerRevoke,
    HandoffAsked,
    HandoffEnd,
    LinkLost,
    PeerGone,
    ReleaseSources,
    ReportEnd,
    RevokeAsked,
    SendCommit,
    SendLetGo,
    SendReserve,
    SendSeal,
    StartWriting,
    WriterEvent,
    WritesAdrift,
    WritesCompleted,
    WritesDropped,
    WritesPosted,
)

log = get_log("writer")

_OF_SEVERAL = (HandoffAsked, LinkLost, PeerGone)
"""Events that are not about one number; all others are."""


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
        checksums: ChecksumThread | None = None,
        observer: HandoffObserver | None = None,
    ) -> None:
        """`checksums` reads the source region, where records are sampled; the caller closes it after this."""
        self.address = address
        self.observer = observer
        self.machine = machine
        self.layout = layout
        self.src_num_blocks = src_num_blocks
        self.bytes_moved = 0
        self.handoffs_corrupt = 0
        self.records_checksummed = 0
        self._checksums = checksums
        self._loop = loop
        self._config = config
        calls = ReceiverCalls(
            address=address,
            channels=channels,
            reserve_ms_max=config.reserve_ms_max,
            call_ms_max=config.call_ms_max,
        )
        self.link = PairLink(
            address=address,
            calls=calls,
            request=connect_request,
            make_link=make_link,
            offers=offers,
            events=self,
            replaced=self.peer_gone,
            idle=lambda: not self._handoffs,
            loop=loop,
        )
        self._repeats = RepeatLog(log, loop.time)
        self._errands = Errands(
            address=address, calls=calls, host=self, loop=loop, config=config, repeats=self._repeats
        )
        self._handoffs = OpenHandoffs()
        self._requests: dict[ReserveNumber, transfer_pb2.ReserveRequest] = {}
        self._tasks = Tasks(loop, log, peer=address.name)
        self._gone = False
        self._actions: dict[type, Callable[..., None]] = {
            SendReserve: lambda i: self._tasks.spawn(self._errands.reserve(i, self._requests.pop(i.number))),
            StartWriting: self._start_writing,
            SendSeal: self._send_seal,
            SendCommit: lambda i: self._tasks.spawn(self._errands.commit(i)),
            AbandonWrites: self._abandon,
            ReleaseSources: self._release_sources,
            SendLetGo: lambda i: self._tasks.spawn(self._errands.let_go(i)),
            AnswerRevoke: self._answer_revoke,
            ReportEnd: self._report_end,
        }

    # What the prefill node asks.

    async def settle(self, timeout_ms: int) -> None:
        """Wait until every handoff is over and the receiver has been told, at most this long."""
        await self._handoffs.wait_until_over(timeout_ms)

    @property
    def gone(self) -> bool:
        """The receiver process has ended; this peer is of no more use."""
        return self._gone

    def has_room(self) -> bool:
        """Within the limits of unacknowledged bytes and pinned blocks; beyond them nothing new is placed here."""
        return (
            self.machine.can_ask
            and self._handoffs.bytes_outstanding < self._config.unacked_bytes_max
            and self._handoffs.pinned_blocks < self._config.pinned_blocks_max
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
        self._check_here()
        await self.link.ensure()
        self._check_here()
        number = self.machine.next_number
        handoff = Handoff(
            peer=self,
            number=number,
            key=key,
            granted=self._loop.create_future(),
            ended=self._loop.create_future(),
            metadata=metadata,
            sources_released=sources_released,
        )
        self._handoffs.enter(handoff)
        self._requests[number] = request
        self.handle(HandoffAsked(key=key))
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

    def _check_here(self) -> None:
        if self._gone:
            raise BatonError(Reason.PEER_UNREACHABLE, f"{self.address.name} is gone.")

    async def revoked(self, number: ReserveNumber) -> bool:
        """The receiver takes a grant back: returns when nothing is written under this number any more.

        True: what was under way when the link ended may still land (see WriterLetGo).

        Raises BatonError UNKNOWN_GRANT for a number that was never asked for.
        """
        if number >= self.machine.next_number:
            raise BatonError(Reason.UNKNOWN_GRANT, f"No Reserve has had the number {number} yet.")
        handoff = self._handoffs.get(number)
        if handoff is None:
            return self.machine.is_adrift(number)
        waiter: asyncio.Future[bool] = self._loop.create_future()
        handoff.revoke_waiters.append(waiter)
        self.handle(RevokeAsked(number=number))
        return await waiter

    def peer_gone(self) -> None:
        """The receiver process is known to have ended: give everything up, tell nobody."""
        if not self._gone:
            self._gone = True
            self._repeats.over(self.address.name, "nothing more is asked of it")
            self.handle(PeerGone())

    def receiver_lost(self) -> None:
        """The receiver is out of reach, and may come back: handoffs end as when the link is lost."""
        for handoff in self._handoffs:
            self.handle(WritesDropped(number=handoff.number))

    def upkeep(self) -> None:
        """Give up handoffs that stand still. Called every second by the node's reaper."""
        for handoff in self._handoffs.stalled(self._loop.time(), self._config.stall_ms_max):
            self._repeats.warning("handoff stalled", peer=self.address.name, request=handoff.key.request)
            handoff.cancel()
        self._repeats.upkeep()

    async def close(self) -> None:
        """Stop calls, unmap the receiver's region. Handoffs still open end as PEER_GONE."""
        self.peer_gone()
        self.link.stop_connecting()
        await self._tasks.cancel()
        await self.link.close()
        self._repeats.close()

    # What the link tells (kvtransfer.transport.WriterEvents).

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        handoff = self._handoffs.of_grant(grant)
        self.link.completed(bytes_written, copied=copied)
        if copied:
            self.bytes_moved += bytes_written
        else:
            # Before the last completion is counted, or a seal would vouch for bytes that were never copied.
            self.handle(WritesDropped(number=handoff.number))
        self.completed(handoff, writes, bytes_written)

    def writes_adrift(self, grant: GrantId) -> None:
        self.handle(WritesAdrift(number=self._handoffs.of_grant(grant).number))

    def link_lost(self, pair: Pair, reason: str) -> None:
        assert pair == self.address.pair, (pair, self.address)
        log.info("data link lost", peer=self.address.name, reason=reason)
        epoch = self.link.lost(reason)
        if epoch is not None:
            self.handle(LinkLost(epoch=epoch))
            for handoff in self._handoffs:
                if self.machine.state_of(handoff.number) is WriterState.COMMITTING:
                    self._tasks.spawn(self._errands.await_commit(handoff))

    def cancel_request(self, key: RequestKey) -> None:
        """See to it that the receiver does not run this attempt, whatever became of its Commit. One call, at best."""
        if not self._gone:
            self._tasks.spawn(self._errands.cancel(key))

    def planned(self, handoff: Handoff, writes: int, nbytes: int) -> None:
        """They are about to be posted. What never will be is told as `completed`, like all that was."""
        self.handle(WritesPosted(number=handoff.number, writes=writes, bytes_written=nbytes))
        handoff.writes += writes
        handoff.bytes_written += nbytes
        handoff.writes_outstanding += writes
        handoff.bytes_outstanding += nbytes
        handoff.progress_s = self._loop.time()

    def completed(self, handoff: Handoff, writes: int, nbytes: int) -> None:
        handoff.writes_outstanding -= writes
        handoff.bytes_outstanding -= nbytes
        handoff.progress_s = self._loop.time()
        if self.observer is not None:
            self.observer.completed(handoff.key, writes=writes)
        if handoff.writes_outstanding == 0 and handoff.seal is not None:
            self._seal_now(handoff)
        self.handle(WritesCompleted(number=handoff.number, writes=writes))

    def handoff(self, number: ReserveNumber) -> Handoff | None:
        return self._handoffs.get(number)

    # Carrying out.

    def handle(self, event: WriterEvent) -> None:
        for instruction in self.machine.handle(event):
            self._actions[type(instruction)](instruction)
        if isinstance(event, _OF_SEVERAL):
            for handoff in self._handoffs:
                self._forget_if_over(handoff.number)
        else:
            self._forget_if_over(event.number)

    def _forget_if_over(self, number: ReserveNumber) -> None:
        handoff = self._handoffs.get(number)
        if handoff is None or handoff.writes_outstanding or self.machine.state_of(number) is not WriterState.DONE:
            return
        self._handoffs.strike_out(handoff)

    def _start_writing(self, instruction: StartWriting) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.epoch = instruction.epoch
        handoff.progress_s = self._loop.time()
        self._handoffs.granted(handoff)
        link = self.link.now
        if link is None or link.epoch != instruction.epoch:
            # The pair was fenced between Connect and Reserve: the next request reconnects.
            self.handle(LinkLost(epoch=instruction.epoch))
            return
        handoff.link = link
        if self._checksums is not None:
            handoff.sample = SourceSample(
                self._checksums,
                handoff.grant,
                fraction=self._config.checksum_fraction,
                records=self.layout.num_layers * len(handoff.dst_blocks),
            )
        if self.observer is not None:
            self.observer.granted(handoff.key, prefix_skip=handoff.prefix_skip)
        # Most handoffs are over before it is time to renew: those that are not get a task then.
        handoff.renewal = self._loop.call_later(handoff.lease_ms / 3000, self._keep_lease, handoff)
        if not handoff.granted.done():
            handoff.granted.set_result(None)

    def _keep_lease(self, handoff: Handoff) -> None:
        self._tasks.spawn(self._errands.keep_lease(handoff))

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
        if handoff.link is self.link.now:
            handoff.link.seal(seal)
            if self.observer is not None:
                self.observer.sealed(handoff.key)
        else:
            self.handle(WritesDropped(number=handoff.number))

    def _abandon(self, instruction: AbandonWrites) -> None:
        handoff = self._handoffs[instruction.number]
        handoff.seal = None
        if handoff.link is not None:
            handoff.link.abandon(instruction.grant)
        for step in handoff.steps:
            # What an engine step has not posted yet it never will: the writer's word need not wait for its end.
            self._loop.call_soon(step.finish)

    def _release_sources(self, instruction: ReleaseSources) -> None:
        handoff = self._handoffs[instruction.number]
        if handoff.link is not None:
            handoff.link.forget(handoff.grant)

        def released() -> None:
            tell, handoff.sources_released = handoff.sources_released, None
            assert tell is not None, handoff
            handoff.pinned_blocks = 0
            tell()

        if handoff.sample is None:
            released()
        else:
            handoff.sample.settled(self._loop, released)

    def _answer_revoke(self, instruction: AnswerRevoke) -> None:
        handoff = self._handoffs.get(instruction.number)
        for waiter in handoff.revoke_waiters if handoff is not None else ():
            if not waiter.done():
                waiter.set_result(instruction.adrift)

    def _report_end(self, instruction: ReportEnd) -> None:
        handoff = self._handoffs[instruction.number]
        if handoff.sample is not None and instruction.end in (HandoffEnd.COMMITTED, HandoffEnd.CORRUPT):
            self.records_checksummed += handoff.sample.records
        self.handoffs_corrupt += instruction.end is HandoffEnd.CORRUPT
        if not handoff.granted.done():
            text = f"{self.address.name}: the handoff ended before it began ({instruction.end.value})."
            handoff.granted.set_result(BatonError(Reason.HANDOFF_FAILED, text))
        handoff.ended.set_result(instruction.end)
        if handoff.renewal is not None:
            handoff.renewal.cancel()
        if self.observer is not None:
            self.observer.ended(handoff.key, committed=instruction.end is HandoffEnd.COMMITTED)


__all__ = ["Handoff", "LinkMaker", "Metadata", "PeerAddress", "WriterConfig", "WriterPeer"]
