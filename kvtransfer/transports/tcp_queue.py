"""What is posted on a tcp link and not yet acknowledged: batches, their frames, the seals, and who is sending what."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from baton.ids import GrantId
from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import AbandonedGrants, Completed, check_ops
from kvtransfer.transports.tcp_frames import Batch, Frame, SealToSend, cut_frames

AT_ONCE_OPS_MAX = 64
"""A batch of more copies is left to a sending thread: cutting it costs more than waking the thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What is to be sent next on a stream, from its byte `sent_nbytes` on. Nobody else sends there meanwhile."""

    index: int
    sequence: int
    item: Frame | SealToSend
    sent_nbytes: int = 0

    @property
    def frame(self) -> Frame | None:
        """None: it is a seal."""
        return self.item if isinstance(self.item, Frame) else None

    def after(self, head_nbytes: int, sent_nbytes: int) -> Taken | None:
        """What is left when so many bytes have been sent; its first message has `head_nbytes`."""
        frame = self.frame
        total_nbytes = head_nbytes + (frame.table_S2.nbytes + frame.payload_nbytes if frame is not None else 0)
        assert sent_nbytes <= total_nbytes
        return replace(self, sent_nbytes=sent_nbytes) if sent_nbytes < total_nbytes else None


@dataclass(slots=True, kw_only=True, eq=False)
class _StreamState:
    next_sequence: int = 0
    unacked: deque[tuple[int, Frame | None]] = field(default_factory=deque)
    seals: deque[SealToSend] = field(default_factory=deque)
    waits: bool = False
    """Its thread waits for something to send."""
    lent: bool = False
    """Somebody else sends on it."""
    rest: Taken | None = None
    """What they have left to its thread."""

    @property
    def idle(self) -> bool:
        return self.waits and not self.lent and self.rest is None and not self.seals


class SendQueue:
    """Batches and seals of one link, first in first out, over its streams. Every batch ends in one `completed`.

    `post` may be called from any thread, `take` from the sending threads, the rest from the loop's. What is small, and
    finds a stream that stands idle, is lent to whoever posts it, who sends it without waiting and gives it back; so no
    thread has to be woken. The queue has no limit of its own: whoever posts bounds what is not yet completed.
    """

    def __init__(
        self,
        *,
        streams: int,
        src_nbytes: int,
        dst_nbytes: int,
        frame_bytes_max: int,
        frame_segments_max: int,
        at_once_bytes_max: int,
        abandoned_grants_max: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
    ) -> None:
        self._src_nbytes, self._dst_nbytes = src_nbytes, dst_nbytes
        self._frame_bytes_max, self._frame_segments_max = frame_bytes_max, frame_segments_max
        self._at_once_bytes_max = at_once_bytes_max
        self._loop = loop
        self._completed = completed
        self._wake = threading.Condition()
        self._posted: deque[Batch] = deque()
        self._frames: deque[Frame] = deque()
        self._streams = [_StreamState() for _ in range(streams)]
        self._used: dict[GrantId, int] = {}
        self._abandoned = AbandonedGrants(abandoned_grants_max)
        self._uncompleted: dict[GrantId, int] = {}
        self._stopped = False
        self.writes_copied = 0
        self.bytes_copied = 0
        self.batches_abandoned = 0

    def post(self, grant: GrantId, ops: WriteOps, completed: Completed | None = None) -> Taken | None:
        """Queue one batch; returns at once. The arrays belong to the queue until it is completed, which `completed` is
        told, if given, in the place of the queue's own.

        What is returned the caller sends, as far as that goes without waiting, and then calls `give_back`.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
        """
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        batch = Batch(grant=grant, ops=ops, total_bytes=ops.total_bytes, completed=completed)
        with self._wake:
            self._uncompleted[grant] = self._uncompleted.get(grant, 0) + 1
            if self._stopped or grant in self._abandoned:
                self._complete(batch, copied=False)
            elif batch.total_bytes == 0:
                self._complete(batch, copied=True)
            else:
                self._posted.append(batch)
                taken = self._lend_for(batch)
                if taken is None:
                    self._notify()
                return taken
        return None

    def seal(self, seal: Seal) -> list[Taken]:
        """Queue a seal on every stream that the grant's data took, or on the first. What is returned: see `post`."""
        lent = []
        with self._wake:
            mask = self._used.pop(seal.grant, 0) or 1
            to_send = SealToSend(seal=seal, streams_mask=mask)
            for index, stream in enumerate(self._streams):
                if not mask >> index & 1:
                    continue
                if stream.idle and not self._stopped:
                    stream.lent = True
                    lent.append(self._number(index, to_send))
                else:
                    stream.seals.append(to_send)
            if len(lent) < mask.bit_count():
                self._wake.notify_all()
        return lent

    def give_back(self, index: int, rest: Taken | None) -> None:
        """The stream that was lent stands free again; what of it has not been sent is left to the stream's thread."""
        stream = self._streams[index]
        with self._wake:
            assert stream.lent
            stream.lent = False
            stream.rest = rest
            if self._stopped or self._posted or self._frames or not stream.idle:
                self._wake.notify_all()

    def uncompleted(self, grant: GrantId) -> int:
        """Batches of this grant whose `completed` has not been called yet. On the loop's thread."""
        with self._wake:
            return self._uncompleted.get(grant, 0)

    @property
    def seals_waiting(self) -> int:
        with self._wake:
            return max(len(stream.seals) for stream in self._streams)

    def abandon(self, grant: GrantId) -> None:
        """Send no more for this grant: what has not begun completes now.

        Raises:
            TooManyAbandonedGrants: none may be forgotten; the caller ends the link.
        """
        with self._wake:
            too_many = self._abandoned.add(grant)
            self._drop_queued(lambda batch: batch.grant == grant)
            if too_many is not None:
                raise too_many

    def on_the_way(self, grant: GrantId) -> list[int]:
        """The streams on which something of this grant has been sent, or is being sent, and is not acknowledged."""
        with self._wake:
            return [
                index
                for index, stream in enumerate(self._streams)
                if any(frame is not None and frame.batch.grant == grant for _, frame in stream.unacked)
            ]

    def forget(self, grant: GrantId) -> None:
        """Nothing will be posted for this grant any more."""
        with self._wake:
            self._abandoned.forget(grant)
            self._used.pop(grant, None)

    def stop(self) -> None:
        """Send no more: what has not begun completes now, `take` returns None. Idempotent; does not wait."""
        with self._wake:
            self._stopped = True
            self._drop_queued(lambda _: True)
            for stream in self._streams:
                stream.seals.clear()
            self._wake.notify_all()

    def take(self, index: int) -> Taken | None:
        """Wait for the next thing to send on a stream; None: stopped, and nobody else sends there any more."""
        stream = self._streams[index]
        with self._wake:
            while True:
                if not stream.lent:
                    if stream.rest is not None:
                        rest, stream.rest = stream.rest, None
                        return rest
                    if self._stopped:
                        return None
                    if stream.seals:
                        return self._number(index, stream.seals.popleft())
                    if not self._frames and self._posted:
                        self._cut(self._posted.popleft())
                    if self._frames:
                        return self._take_frame(index)
                stream.waits = True
                self._wake.wait()
                stream.waits = False

    def bye_sequence(self, index: int) -> int:
        """The number for a stream's BYE. After `take` has returned None there."""
        return self._streams[index].next_sequence

    def acknowledged(self, index: int, sequence: int, *, landed: bool) -> None:
        """The receiver has taken in all up to `sequence` on this stream. Tells of batches that this completes."""
        unacked = self._streams[index].unacked
        over = []
        with self._wake:
            while unacked and unacked[0][0] <= sequence:
                _, frame = unacked.popleft()
                if frame is not None and self._was_last(frame, copied=landed):
                    self._count(frame.batch, copied=frame.batch.copied)
                    self._discount(frame.batch)
                    over.append(frame.batch)
        # Without a detour by way of the loop's queue, which would cost another turn of the loop.
        with contextlib.ExitStack() as every:  # each is told, whatever another's completion raises
            for batch in reversed(over):
                every.callback(self._tell, batch, batch.copied)

    def lose_unacknowledged(self) -> None:
        """The streams are closed and nothing is being sent: complete what was on its way, uncopied."""
        assert self._stopped
        with self._wake:
            for stream in self._streams:
                for _, frame in stream.unacked:
                    if frame is not None:
                        self._drop_frame(frame)
                stream.unacked.clear()

    # With the lock held.

    def _lend_for(self, batch: Batch) -> Taken | None:
        """What its poster may send itself: the first frame of the only batch there is, if it is small."""
        if batch.total_bytes > self._at_once_bytes_max or len(batch.ops.src) > AT_ONCE_OPS_MAX:
            return None
        if self._frames or len(self._posted) > 1:
            return None
        best: int | None = None
        for index, stream in enumerate(self._streams):
            if stream.idle and (best is None or len(stream.unacked) < len(self._streams[best].unacked)):
                best = index
        if best is None:
            return None
        self._streams[best].lent = True
        self._cut(self._posted.popleft())
        return self._take_frame(best)

    def _notify(self) -> None:
        """Something can be taken by any thread. One whose stream is lent cannot, and might be the one that is woken."""
        if any(stream.lent for stream in self._streams):
            self._wake.notify_all()
        else:
            self._wake.notify()

    def _cut(self, batch: Batch) -> None:
        """Short enough to do with the lock held: a few microseconds for each frame."""
        frames = list(cut_frames(batch, self._frame_bytes_max, self._frame_segments_max, len(self._streams)))
        batch.frames_left = len(frames)
        self._frames.extend(frames)
        if len(frames) > 1:
            self._wake.notify(len(frames) - 1)  # the caller takes one itself

    def _take_frame(self, index: int) -> Taken:
        frame = self._frames.popleft()
        grant = frame.batch.grant
        self._used[grant] = self._used.get(grant, 0) | 1 << index
        return self._number(index, frame)

    def _number(self, index: int, item: Frame | SealToSend) -> Taken:
        stream = self._streams[index]
        sequence = stream.next_sequence
        stream.next_sequence += 1
        stream.unacked.append((sequence, item if isinstance(item, Frame) else None))
        return Taken(index=index, sequence=sequence, item=item)

    def _drop_queued(self, which: Callable[[Batch], bool]) -> None:
        posted, self._posted = self._posted, deque()
        for batch in posted:
            if which(batch):
                self._complete(batch, copied=False)
            else:
                self._posted.append(batch)
        frames, self._frames = self._frames, deque()
        for frame in frames:
            if which(frame.batch):
                self._drop_frame(frame)
            else:
                self._frames.append(frame)

    def _was_last(self, frame: Frame, *, copied: bool) -> bool:
        """This frame's fate is known; True: so is its batch's."""
        batch = frame.batch
        assert batch.frames_left is not None, batch
        batch.frames_left -= 1
        batch.copied = batch.copied and copied
        return batch.frames_left == 0

    def _drop_frame(self, frame: Frame) -> None:
        if self._was_last(frame, copied=False):
            self._complete(frame.batch, copied=False)

    def _complete(self, batch: Batch, *, copied: bool) -> None:
        self._count(batch, copied=copied)
        call_loop(self._loop, self._deliver, batch, copied)

    def _count(self, batch: Batch, *, copied: bool) -> None:
        if copied:
            self.writes_copied += len(batch.ops.src)
            self.bytes_copied += batch.total_bytes
        else:
            self.batches_abandoned += 1

    def _discount(self, batch: Batch) -> None:
        left = self._uncompleted[batch.grant] - 1
        if left:
            self._uncompleted[batch.grant] = left
        else:
            del self._uncompleted[batch.grant]

    # Without it, on the loop's thread.

    def _deliver(self, batch: Batch, copied: bool) -> None:
        with self._wake:
            self._discount(batch)
        self._tell(batch, copied)

    def _tell(self, batch: Batch, copied: bool) -> None:
        (batch.completed or self._completed)(batch.grant, len(batch.ops.src), batch.total_bytes, copied)
