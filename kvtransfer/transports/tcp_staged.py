"""The writing side of tcp from a region on a device: a tcp link whose source is pinned memory, and who fills that.

A posted batch is cut into pieces of a chunk. A piece is copied into its chunk on a side stream, behind what the posting
thread's stream had queued; the thread polls for the end of that copy and only then posts the piece on the tcp link. The
compute stream waits for nothing. A chunk is used again when its piece has completed there. Until then what was
posted waits on the device, without a limit here: whoever posts bounds what is not completed.

A batch completes with its last piece, so when the receiver has acknowledged all of it. The device is through with its
sources earlier; but a completion also says that the bytes have landed, on which the seal relies.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.device.driver import DeviceError
from kvtransfer.device.staging import StagedRegion, StagingFull, StagingShare, places
from kvtransfer.device.streams import POLL_INTERVAL_S, DeviceEvent
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports.limits import LINK_LIMITS, LinkLimits
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import AbandonedGrants, check_ops
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp_connect import TcpConnectError
from kvtransfer.transports.tcp_frames import Batch, Frame, cut_frames
from kvtransfer.transports.tcp_writer import TcpWriterLink


@dataclass(slots=True, kw_only=True, eq=False)
class _Posted:
    """`left_bytes`: of what no piece has been cut from yet. `pieces`: cut, and not over."""

    batch: Batch
    computed: DeviceEvent
    frames: Iterator[Frame]
    left_bytes: int
    pieces: int = 0
    copied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    posted: _Posted
    frame: Frame
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
        limits: LinkLimits,
    ) -> None:
        """Use `connect`."""
        self._source = source
        self._share = share
        self._pair = pair
        self._events = events
        self._loop = loop
        self._link: TcpWriterLink
        self._wake = threading.Condition()
        self._waiting: deque[_Posted] = deque()
        self._copying: deque[_Piece] = deque()
        self._abandoned = AbandonedGrants(limits.abandoned_grants_max)
        self._uncompleted: Counter[GrantId] = Counter()
        self._stopped = False
        self._writes_copied = self._bytes_copied = self._batches_abandoned = 0
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
            TcpConnectError: as there, or there is no pinned memory left for another link.
        """
        try:
            share = source.share(source.limits.link_chunks)
        except StagingFull as error:
            raise TcpConnectError(f"{endpoint.address}: {error}") from error
        try:
            made = cls(source=source, share=share, pair=pair, events=events, loop=loop, limits=limits)
            ends = _LinkEvents(made._link_lost)
            made._link = await TcpWriterLink.connect(endpoint, pair, source.host_U8, ends, loop, config, limits)
            try:
                made._thread.start()
            except RuntimeError as error:
                ends.told = None
                await made._link.close()
                raise TcpConnectError(f"{endpoint.address}: no thread to copy with: {error}") from error
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
        check_ops(ops, self._source.nbytes, self._link.region_nbytes)
        batch = Batch(grant=grant, ops=ops, total_bytes=ops.total_bytes)
        chunk_bytes = self._source.limits.chunk_bytes
        posted = _Posted(
            batch=batch,
            computed=self._source.here(),
            frames=cut_frames(batch, chunk_bytes, chunk_bytes),
            left_bytes=batch.total_bytes,
        )
        with self._wake:
            self._uncompleted[grant] += 1
            if self._stopped or grant in self._abandoned:
                self._drop(posted)
            elif not batch.total_bytes:
                call_loop(self._loop, self._complete, posted)
            else:
                self._waiting.append(posted)
                self._wake.notify()

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`. Dropped when the link is ending: `link_lost` tells."""
        assert self._uncompleted[seal.grant] == 0, "a seal before the grant's writes have completed"
        self._link.seal(seal)

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. What is being copied into pinned memory completes when that is over."""
        with self._wake:
            # One too many ends the link below, which counts the same grants.
            self._abandoned.add(grant)
            self._drop_waiting(lambda posted: posted.batch.grant == grant)
        self._link.abandon(grant)

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this grant, and has seen its completions."""
        with self._wake:
            self._abandoned.forget(grant)
        self._link.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when the threads have ended, the sockets are closed, all is completed."""
        self._stop()
        self._begin_close()
        await asyncio.shield(self._over)
        # Where the end lies behind already: a batch posted since then completes by a call that the loop still has.
        await asyncio.sleep(0)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        with self._wake:
            return {
                **self._link.describe(),
                "writes": self._writes_copied,
                "bytes": self._bytes_copied,
                "batches_abandoned": self._batches_abandoned,
                "batches_unstaged": len(self._waiting),
                "staged_by": f"{self._source.limits.link_chunks} chunks of {self._source.limits.chunk_bytes} bytes",
            }

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
            self._stop()
            try:
                with contextlib.suppress(DeviceError):
                    self._share.settle()
                    self._settled = True
            finally:
                with self._wake:
                    while self._copying:
                        self._drop_piece(self._copying.popleft())
                call_loop(self._loop, self._staging_over, failure)

    def _has_work(self) -> bool:
        """Wait until there may be something to do. False: stopped, and no copy is on its way."""
        with self._wake:
            while not self._copying:
                if self._stopped:
                    return False
                if self._waiting and self._share.has_room:
                    return True
                self._wake.wait()
            if not (self._waiting and self._share.has_room):
                self._wake.wait(POLL_INTERVAL_S)
            return True

    def _next_piece(self) -> _Piece | None:
        """Cut the next one, and count it as being copied. None: nothing waits, or no chunk is free."""
        with self._wake:
            start = self._share.take() if self._waiting else None
            if start is None:
                return None
            posted = self._waiting[0]
            piece = _Piece(posted=posted, frame=next(posted.frames), start=start)
            posted.left_bytes -= piece.frame.payload_nbytes
            posted.pieces += 1
            if not posted.left_bytes:
                self._waiting.popleft()
            self._copying.append(piece)
            return piece

    def _copy(self, piece: _Piece) -> None:
        frame = piece.frame
        self._share.to_host(piece.start, frame.src_S, frame.nbytes_S, behind=piece.posted.computed, tag=piece)

    def _send(self, piece: _Piece) -> None:
        """Its bytes are in pinned memory."""
        batch, frame = piece.posted.batch, piece.frame
        with self._wake:
            assert self._copying.popleft() is piece
            if self._stopped or batch.grant in self._abandoned:
                self._drop_piece(piece)
                return
        ops = WriteOps(src=places(piece.start, frame.nbytes_S), dst=frame.table_S2[:, 0].copy(), nbytes=frame.nbytes_S)
        self._link.post(batch.grant, ops, partial(self._sent, piece))

    # Any thread, with the lock held.

    def _drop_waiting(self, which: Callable[[_Posted], bool]) -> None:
        kept: deque[_Posted] = deque()
        for posted in self._waiting:
            if which(posted):
                self._drop(posted)
            else:
                kept.append(posted)
        self._waiting = kept

    def _drop(self, posted: _Posted) -> None:
        """Cut no more pieces of it. It completes with the last that there is, if there is one."""
        posted.left_bytes, posted.copied = 0, False
        if not posted.pieces:
            call_loop(self._loop, self._complete, posted)

    def _drop_piece(self, piece: _Piece) -> None:
        if self._was_last(piece, copied=False):
            call_loop(self._loop, self._complete, piece.posted)

    def _was_last(self, piece: _Piece, *, copied: bool) -> bool:
        """A piece is over; True: so is its batch."""
        posted = piece.posted
        self._share.give(piece.start)
        posted.copied = posted.copied and copied
        posted.pieces -= 1
        return not posted.pieces and not posted.left_bytes

    # Any thread.

    def _stop(self) -> None:
        """Take and copy no more. Idempotent; does not wait."""
        with self._wake:
            self._stopped = True
            self._drop_waiting(lambda _: True)
            self._wake.notify_all()

    # Control thread.

    def _sent(self, piece: _Piece, _grant: GrantId, _writes: int, _nbytes: int, copied: bool) -> None:
        """The tcp link has completed a piece."""
        with self._wake:
            last = self._was_last(piece, copied=copied)
            self._wake.notify()
        if last:
            self._complete(piece.posted)

    def _complete(self, posted: _Posted) -> None:
        batch = posted.batch
        writes = len(batch.ops.src)
        with self._wake:
            self._uncompleted[batch.grant] -= 1
            if not self._uncompleted[batch.grant]:
                del self._uncompleted[batch.grant]
            if posted.copied:
                self._writes_copied += writes
                self._bytes_copied += batch.total_bytes
            else:
                self._batches_abandoned += 1
        self._events.writes_completed(batch.grant, writes, batch.total_bytes, posted.copied)

    def _link_lost(self, reason: str) -> None:
        self._lost_reason = self._lost_reason or reason
        self._link_over = True
        self._stop()
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

    def __init__(self, told: Callable[[str], None]) -> None:
        self.told: Callable[[str], None] | None = told

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        raise AssertionError((grant, writes, bytes_written, copied))

    def writes_in_doubt(self, grant: GrantId) -> None:
        raise AssertionError(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        del pair
        if self.told is not None:
            self.told(reason)
