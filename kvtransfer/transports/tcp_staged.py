"""The writing side of tcp from a region on a device: a tcp link whose source is pinned memory, and who fills that.

A posted batch is cut into pieces of a chunk. A piece is copied into its chunk on a side stream, behind what the posting
thread's stream had queued; a thread polls for the end of that copy and only then posts the piece on the tcp link. The
compute stream waits for nothing. A chunk is used again when its piece has completed there. Until then what was
posted waits on the device, without a limit here: whoever posts bounds what is not completed.

A batch completes with its last piece, so when the receiver has acknowledged all of it, on which the seal relies.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.ids import GrantId
from baton.tasks import call_loop
from kvtransfer.device.driver import POLL_INTERVAL_S, DeviceEvent
from kvtransfer.device.staging import StagedRegion, StagingFull, StagingShare, places
from kvtransfer.transport import ConnectError, DeviceError, Seal, WriteOps
from kvtransfer.transports.control_channel import connect_errors
from kvtransfer.transports.post_queue import Batch, Completed, Part, PostQueue, Taken
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import Frame, TcpWelcome, TcpWriterLink, connect_streams, cut_frames, leave_streams
from kvtransfer.transports.writer_link import LINK_LIMITS, LinkLimits, LinkParts


@dataclass(slots=True, kw_only=True, eq=False)
class StagedPart(Part):
    """A frame that fits a chunk. `computed`: its sources have been."""

    frame: Frame
    computed: DeviceEvent


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    taken: Taken[StagedPart]
    start: int
    """Of its chunk."""


class Stager:
    """The queue of what waits on the device, and the thread that copies it to pinned memory and posts it from there."""

    def __init__(
        self,
        parts: LinkParts,
        *,
        source: StagedRegion,
        share: StagingShare[_Piece],
        dst_nbytes: int,
        post: Callable[[GrantId, WriteOps, Completed], None],
        over: Callable[[str], None],
    ) -> None:
        """Starts the thread, which calls `post` with what has been copied; `over` is called on the loop's when it is at
        its end, with the reason if it failed. Raises ConnectError: there can be no more threads."""
        self.queue: PostQueue[StagedPart, None] = PostQueue(
            self._cut,
            self,
            src_nbytes=source.nbytes,
            dst_nbytes=dst_nbytes,
            loop=parts.loop,
            completed=parts.events.writes_completed,
        )
        self._source, self._share, self._loop = source, share, parts.loop
        self._post, self._over = post, over
        self._copying: deque[_Piece] = deque()
        name = f"tcp-stage-{parts.pair.receiver:x}"
        self._thread = threading.Thread(target=self._stage_all, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConnectError(f"{parts.endpoint.address}: no thread to copy with: {error}") from error

    def close(self) -> None:
        """Let go of the thread and the share: after `over`, when all that was posted has completed."""
        self._thread.join()
        self._share.give_back()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        limits = self._source.limits
        return {
            **self.queue.describe(),
            "batches_unstaged": self.queue.batches_waiting,
            "staged_by": f"{limits.link_chunks} chunks of {limits.chunk_bytes} bytes",
        }

    # The lane of the queue: called with its lock held.

    def offer(self, batch: Batch[StagedPart]) -> None:
        """See `Lanes.offer`."""
        del batch
        self.queue.lock.notify()

    def stop(self) -> None:
        """See `Lanes.stop`."""
        self.queue.lock.notify_all()

    def _cut(self, ops: WriteOps) -> Iterator[StagedPart]:
        """By whoever posts: it is behind what their stream has queued so far."""
        computed, chunk_bytes = self._source.here(), self._source.limits.chunk_bytes
        return (
            StagedPart(frame=frame, nbytes=frame.nbytes, computed=computed)
            for frame in cut_frames(ops, chunk_bytes, chunk_bytes)
        )

    # The thread.

    def _stage_all(self) -> None:
        failure = "a staging thread failed"
        try:
            while self._has_work():
                while (piece := self._share.finished()) is not None:
                    self._send(piece)
                while (piece := self._next_piece()) is not None:
                    frame = piece.taken.part.frame
                    behind = piece.taken.part.computed
                    self._share.to_host(piece.start, frame.src_S, frame.nbytes_S, behind=behind, tag=piece)
            failure = ""
        except DeviceError as error:
            failure = f"the device failed: {error}"
        finally:
            self.queue.stop()
            try:
                with contextlib.suppress(DeviceError):
                    self._share.settle()
            finally:
                with self.queue.lock:
                    while self._copying:
                        self._drop(self._copying.popleft())
                call_loop(self._loop, self._over, failure)

    def _has_work(self) -> bool:
        """Wait until there may be something to do. False: stopped, and no copy is on its way."""
        lock = self.queue.lock
        with lock:
            while not self._copying:
                if self.queue.stopped:
                    return False
                if self.queue.waits and self._share.has_room:
                    return True
                lock.wait()
            if not (self.queue.waits and self._share.has_room):
                lock.wait(POLL_INTERVAL_S)
            return True

    def _next_piece(self) -> _Piece | None:
        """Take the next one, and count it as being copied. None: nothing waits, or no chunk is free."""
        with self.queue.lock:
            start = self._share.take() if self.queue.waits else None
            if start is None:
                return None
            taken = self.queue.take(0)
            assert taken is not None
            piece = _Piece(taken=taken, start=start)
            self._copying.append(piece)
            return piece

    def _send(self, piece: _Piece) -> None:
        """Its bytes are in pinned memory. It counts as being copied until it is posted: a post that fails drops it."""
        assert self._copying[0] is piece
        grant, frame = piece.taken.batch.grant, piece.taken.part.frame
        if self.queue.gives_up(grant):
            self._drop(piece)
        else:
            src = places(piece.start, frame.nbytes_S)
            ops = WriteOps(src=src, dst=frame.table_S2[:, 0].copy(), nbytes=frame.nbytes_S)
            self._post(grant, ops, partial(self._sent, piece))
        self._copying.popleft()

    def _drop(self, piece: _Piece) -> None:
        self._share.give(piece.start)
        self.queue.finished(piece.taken, copied=False)

    # The loop's thread.

    def _sent(self, piece: _Piece, _grant: GrantId, _writes: int, _nbytes: int, copied: bool) -> None:
        """The tcp link has completed a piece."""
        with self.queue.lock:
            self._share.give(piece.start)
            self.queue.lock.notify()
        self.queue.finished_here([piece.taken], copied=copied)


class StagedTcpLink(TcpWriterLink):
    """See `TcpWriterLink`, from a region on a device. Made by `connect_staged`.

    What is posted goes through a `Stager`, whose pieces are the batches of the link itself. After an error of the
    device the link is lost: nobody knows what was copied.
    """

    def __init__(
        self,
        parts: LinkParts,
        limits: LinkLimits,
        *,
        socks: list[socket.socket],
        welcome: TcpWelcome,
        source: StagedRegion,
        share: StagingShare[Any],
    ) -> None:
        """As `TcpWriterLink`. Raises ConnectError: as `Stager`; share and sockets are the caller's then."""
        super().__init__(parts, limits, socks=socks, welcome=welcome, source_region_U8=source.host_U8)
        self._staging = True
        """The stager's thread has not reported its end."""
        self._stager = Stager(
            parts,
            source=source,
            share=share,
            dst_nbytes=welcome.region_nbytes,
            post=super().post,
            over=self._staging_over,
        )

    @classmethod
    async def connect_staged(
        cls,
        parts: LinkParts,
        source: StagedRegion,
        config: TcpConfig | None = None,
        limits: LinkLimits = LINK_LIMITS,
    ) -> StagedTcpLink:
        """As `TcpWriterLink.connect`. `source` is the caller's, and outlives the link.

        Raises:
            ConnectError: as there, or there is no pinned memory left for another link.
        """
        endpoint = parts.endpoint
        with connect_errors(endpoint.address, limits.connect_ms_max, StagingFull), contextlib.ExitStack() as undo:
            share = source.share(source.limits.link_chunks)
            undo.callback(share.give_back)
            socks, welcome = await connect_streams(parts, config or TcpConfig(), limits)
            undo.callback(leave_streams, socks, endpoint.epoch)
            made = cls(parts, limits, socks=socks, welcome=welcome, source=source, share=share)
            undo.pop_all()
        await made._start()
        return made

    def post(self, grant: GrantId, ops: WriteOps, completed: Completed | None = None) -> None:
        """See `TcpWriterLink.post`: behind what the calling thread's stream has queued.

        Raises:
            WriteOutOfBounds: an op leaves one of the regions; the batch is not taken.
            DeviceError: the device has failed; neither.
        """
        self._stager.queue.post(grant, ops, completed)

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`. Dropped when the link is ending: `link_lost` follows."""
        assert self._stager.queue.uncompleted(seal.grant) == 0, "a seal before the grant's writes have completed"
        self._stager.queue.lanes_to_seal(seal.grant)
        super().seal(seal)

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. What is being copied into pinned memory completes when that is over."""
        self._stager.queue.abandon(grant)  # too many end the link: its own queue counts the same grants
        super().abandon(grant)

    def forget(self, grant: GrantId) -> None:
        """See `WriterLink.forget`."""
        self._stager.queue.forget(grant)
        super().forget(grant)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {**super().describe(), **self._stager.describe()}

    def _end(self, reason: str, *, orderly: bool = False) -> None:
        self._stager.queue.stop()
        super()._end(reason, orderly=orderly)

    def _staging_over(self, failure: str) -> None:
        self._staging = False
        if failure:
            self._end(failure, orderly=True)
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if not self._staging:
            super()._finish_if_over()

    def _finish(self) -> None:
        self._stager.close()
        super()._finish()
