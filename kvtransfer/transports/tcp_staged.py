"""The writing side of tcp from a region on a device: a tcp link whose source is pinned memory, and who fills that.

A posted batch is cut into pieces of a chunk. A piece is copied into its chunk on a side stream, behind what the posting
thread's stream had queued; the thread polls for the end of that copy and only then posts the piece on the tcp link. The
compute stream waits for nothing. A chunk is used again when its piece has completed there. Until then what was
posted waits on the device, without a limit here: whoever posts bounds what is not completed.

A batch completes with its last piece, so when the receiver has acknowledged all of it. The device is through with its
sources earlier; but a completion also means that the bytes have landed, on which the seal relies.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from baton.ids import Epoch, GrantId, Pair
from baton.tasks import call_loop
from kvtransfer.device.driver import DeviceError
from kvtransfer.device.staging import StagedRegion, StagingFull, StagingShare, places
from kvtransfer.device.streams import POLL_INTERVAL_S, DeviceEvent
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports.limits import LINK_LIMITS, LinkLimits
from kvtransfer.transports.post_queue import Batch, PostQueue, Taken, TooManyAbandonedGrants
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp_lanes import Frame, cut_frames
from kvtransfer.transports.tcp_writer import TcpWriterLink


@dataclass(slots=True, kw_only=True, eq=False)
class StagedPart:
    """A frame that fits a chunk. `computed`: its sources have been."""

    frame: Frame
    computed: DeviceEvent

    @property
    def nbytes(self) -> int:
        return self.frame.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    taken: Taken[StagedPart]
    start: int
    """Of its chunk."""


class StagedTcpLink:
    """See `TcpWriterLink`, from a region on a device. Made by `connect`.

    After an error of the device the link is lost: nobody knows what was copied.
    """

    transport: ClassVar[TransportName] = TransportName.TCP

    def __init__(
        self,
        *,
        source: StagedRegion,
        share: StagingShare[_Piece],
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Use `connect`."""
        self._source = source
        self._share = share
        self._pair = pair
        self._events = events
        self._loop = loop
        self._link: TcpWriterLink
        self._queue: PostQueue[StagedPart, None]
        self._copying: deque[_Piece] = deque()
        self._thread = threading.Thread(target=self._stage_all, name=f"tcp-stage-{pair.receiver:x}", daemon=True)
        self._thread_over = self._link_over = False
        self._settled = False
        """The device has finished every copy into the share."""
        self._lost_reason: str | None = None
        self._closing: asyncio.Task[None] | None = None
        self._over: asyncio.Future[None] = loop.create_future()

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source: StagedRegion,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: TcpConfig | None = None,
        limits: LinkLimits = LINK_LIMITS,
    ) -> StagedTcpLink:
        """As `TcpWriterLink.connect`. `source` is the caller's, and outlives the link.

        Raises:
            ConnectError: as there, or there is no pinned memory left for another link.
        """
        try:
            share = source.share(source.limits.link_chunks)
        except StagingFull as error:
            raise ConnectError(f"{endpoint.address}: {error}") from error
        try:
            made = cls(source=source, share=share, pair=pair, events=events, loop=loop)
            ends = _LinkEvents(made._link_lost)
            made._link = await TcpWriterLink.connect(endpoint, pair, source.host_U8, ends, loop, config, limits)
            made._queue = PostQueue(
                made._cut,
                made,
                src_nbytes=source.nbytes,
                dst_nbytes=made._link.region_nbytes,
                loop=loop,
                completed=events.writes_completed,
                abandoned_grants_max=limits.abandoned_grants_max,
            )
            try:
                made._thread.start()
            except RuntimeError as error:
                ends.lost = None
                await made._link.close()
                raise ConnectError(f"{endpoint.address}: no thread to copy with: {error}") from error
        except BaseException:
            share.give_back()
            raise
        return made

    @property
    def epoch(self) -> Epoch:
        return self._link.epoch

    @property
    def fenced(self) -> bool:
        """See `WriterLink.fenced`."""
        return self._link.fenced

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """See `WriterLink.post`: behind what the calling thread's stream has queued. Figures of a completion are those
        of the batch as posted, copied or not.

        Raises:
            WriteOutOfBounds: an op leaves one of the regions; the batch is not taken.
            DeviceError: the device has failed; neither.
        """
        self._queue.post(grant, ops)

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`. Dropped when the link is ending: `link_lost` follows."""
        assert self._queue.uncompleted(seal.grant) == 0, "a seal before the grant's writes have completed"
        self._queue.lanes_to_seal(seal.grant)
        self._link.seal(seal)

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. What is being copied into pinned memory completes when that is over."""
        with contextlib.suppress(TooManyAbandonedGrants):  # it ends the link below, which counts the same grants
            self._queue.abandon(grant)
        self._link.abandon(grant)

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this grant, and has seen its completions."""
        self._queue.forget(grant)
        self._link.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when the threads have ended, the sockets are closed, all is completed."""
        self._queue.stop()
        self._begin_close()
        await asyncio.shield(self._over)
        # Where the end lies behind already: a batch posted since then completes by a call that the loop still has.
        await asyncio.sleep(0)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            **self._link.describe(),
            **self._queue.describe(),
            "batches_unstaged": self._queue.batches_waiting,
            "staged_by": f"{self._source.limits.link_chunks} chunks of {self._source.limits.chunk_bytes} bytes",
        }

    # The lane of its queue: called with the queue's lock held.

    def offer(self, batch: Batch[StagedPart]) -> None:
        """See `Lanes.offer`."""
        del batch
        self._queue.lock.notify()

    def stop(self) -> None:
        """See `Lanes.stop`."""
        self._queue.lock.notify_all()

    def _cut(self, ops: WriteOps) -> Iterator[StagedPart]:
        """By whoever posts: it is behind what their stream has queued so far."""
        computed, chunk_bytes = self._source.here(), self._source.limits.chunk_bytes
        return (StagedPart(frame=frame, computed=computed) for frame in cut_frames(ops, chunk_bytes, chunk_bytes))

    # The staging thread.

    def _stage_all(self) -> None:
        failure = "a staging thread failed"
        try:
            while self._has_work():
                while (piece := self._share.finished()) is not None:
                    self._send(piece)
                while (piece := self._next_piece()) is not None:
                    self._copy(piece)
            failure = ""
        except DeviceError as error:
            failure = f"the device failed: {error}"
        finally:
            self._queue.stop()
            try:
                with contextlib.suppress(DeviceError):
                    self._share.settle()
                    self._settled = True
            finally:
                with self._queue.lock:
                    while self._copying:
                        self._drop(self._copying.popleft())
                call_loop(self._loop, self._staging_over, failure)

    def _has_work(self) -> bool:
        """Wait until there may be something to do. False: stopped, and no copy is on its way."""
        lock = self._queue.lock
        with lock:
            while not self._copying:
                if self._queue.stopped:
                    return False
                if self._queue.waits and self._share.has_room:
                    return True
                lock.wait()
            if not (self._queue.waits and self._share.has_room):
                lock.wait(POLL_INTERVAL_S)
            return True

    def _next_piece(self) -> _Piece | None:
        """Cut the next one, and count it as being copied. None: nothing waits, or no chunk is free."""
        with self._queue.lock:
            start = self._share.take() if self._queue.waits else None
            if start is None:
                return None
            taken = self._queue.take(0)
            assert taken is not None
            piece = _Piece(taken=taken, start=start)
            self._copying.append(piece)
            return piece

    def _copy(self, piece: _Piece) -> None:
        part = piece.taken.part
        frame = part.frame
        self._share.to_host(piece.start, frame.src_S, frame.nbytes_S, behind=part.computed, tag=piece)

    def _send(self, piece: _Piece) -> None:
        """Its bytes are in pinned memory."""
        grant, frame = piece.taken.batch.grant, piece.taken.part.frame
        with self._queue.lock:
            assert self._copying.popleft() is piece
            if self._queue.gives_up(grant):
                self._drop(piece)
                return
        ops = WriteOps(src=places(piece.start, frame.nbytes_S), dst=frame.table_S2[:, 0].copy(), nbytes=frame.nbytes_S)
        self._link.post(grant, ops, partial(self._sent, piece))

    def _drop(self, piece: _Piece) -> None:
        self._share.give(piece.start)
        self._queue.finished(piece.taken, copied=False)

    # Control thread.

    def _sent(self, piece: _Piece, _grant: GrantId, _writes: int, _nbytes: int, copied: bool) -> None:
        """The tcp link has completed a piece."""
        with self._queue.lock:
            self._share.give(piece.start)
            self._queue.lock.notify()
        self._queue.finished_here([piece.taken], copied=copied)

    def _link_lost(self, reason: str) -> None:
        self._lost_reason = self._lost_reason or reason
        self._link_over = True
        self._queue.stop()
        self._finish_if_over()

    def _staging_over(self, failure: str) -> None:
        self._thread.join()
        self._thread_over = True
        if failure and self._closing is None:
            self._lost_reason = self._lost_reason or failure
        if failure:
            self._begin_close()
        self._finish_if_over()

    def _begin_close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._close_link())

    async def _close_link(self) -> None:
        await self._link.close()
        self._link_over = True
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        """Behind every completion: those of the thread were handed to the loop before its end."""
        if not self._link_over or not self._thread_over or self._over.done():
            return
        if self._settled:
            self._share.give_back()
        else:
            self._share.leave_behind()  # the device may still copy there: nobody else may send from these chunks
        self._over.set_result(None)
        if self._lost_reason is not None:
            self._events.link_lost(self._pair, self._lost_reason)


class _LinkEvents:
    """Of the link below: its batches are pieces, which have their own way back."""

    def __init__(self, lost: Callable[[str], None]) -> None:
        self.lost: Callable[[str], None] | None = lost

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        raise AssertionError((grant, writes, bytes_written, copied))

    def writes_in_doubt(self, grant: GrantId) -> None:
        raise AssertionError(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        del pair
        if self.lost is not None:
            self.lost(reason)
