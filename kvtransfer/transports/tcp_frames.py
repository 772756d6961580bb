"""What is posted on a tcp link and not yet acknowledged: batches, the frames that they are cut into, and the seals.

Shape suffixes: W = write operations of a batch; S = segments of its frames; S2 = (destination, length) of each.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from baton.ids import GrantId
from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import AbandonedGrants, Completed, check_ops


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """One post. `frames_left`: frames not acknowledged or dropped yet; None until it has been cut."""

    grant: GrantId
    ops: WriteOps
    total_bytes: int
    frames_left: int | None = None
    copied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frame:
    """`table_S2` has (destination, length) of each segment, as it travels; all arrays are contiguous."""

    batch: Batch
    src_S: np.ndarray
    nbytes_S: np.ndarray
    table_S2: np.ndarray
    payload_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealToSend:
    seal: Seal
    streams_mask: int


@dataclass(slots=True, kw_only=True, eq=False)
class _StreamState:
    next_sequence: int = 0
    unacked: deque[tuple[int, Frame | None]] = field(default_factory=deque)
    seals: deque[SealToSend] = field(default_factory=deque)


def merge_runs(ops: WriteOps) -> WriteOps:
    """The same copies with neighbours joined where both source and destination run on; empty ones left out."""
    if len(ops.src) == 1 and ops.nbytes[0] > 0:
        return ops
    some_W = ops.nbytes > 0
    src_W, dst_W, nbytes_W = ops.src[some_W], ops.dst[some_W], ops.nbytes[some_W]
    if len(src_W) == 0:
        return WriteOps(src=src_W, dst=dst_W, nbytes=nbytes_W)
    runs_on = (src_W[1:] == src_W[:-1] + nbytes_W[:-1]) & (dst_W[1:] == dst_W[:-1] + nbytes_W[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~runs_on)))
    return WriteOps(src=src_W[starts], dst=dst_W[starts], nbytes=np.add.reduceat(nbytes_W, starts))


def cut_frames(batch: Batch, bytes_max: int, segments_max: int) -> Iterator[Frame]:
    """All copies of a batch, in frames of at most `bytes_max` bytes and `segments_max` segments; long ones split."""
    merged = merge_runs(batch.ops)
    if len(merged.src) == 0:
        return
    if len(merged.src) == 1 and merged.nbytes[0] <= bytes_max:
        # What follows costs as much as sending a single record takes.
        table_S2 = np.array([[merged.dst[0], merged.nbytes[0]]], dtype="<i8")
        nbytes = int(merged.nbytes[0])
        yield Frame(batch=batch, src_S=merged.src, nbytes_S=merged.nbytes, table_S2=table_S2, payload_nbytes=nbytes)
        return
    ends_W = np.cumsum(merged.nbytes)
    total_bytes = int(ends_W[-1])
    # Every frame but the last is to end after so many bytes of the batch: segments that run across are split there.
    at_S = np.union1d(ends_W - merged.nbytes, np.arange(0, total_bytes, bytes_max))
    whole_S = np.searchsorted(ends_W, at_S, side="right")
    within_S = at_S - (ends_W - merged.nbytes)[whole_S]
    src_S, dst_S = merged.src[whole_S] + within_S, merged.dst[whole_S] + within_S
    nbytes_S = np.diff(at_S, append=total_bytes)
    table_S2 = np.stack([dst_S, nbytes_S], axis=1).astype("<i8")
    borders = [*np.searchsorted(at_S, np.arange(0, total_bytes, bytes_max)).tolist(), len(at_S)]
    for first, end in itertools.pairwise(borders):
        for start in range(first, end, segments_max):
            part = slice(start, min(start + segments_max, end))
            yield Frame(
                batch=batch,
                src_S=src_S[part],
                nbytes_S=nbytes_S[part],
                table_S2=table_S2[part],
                payload_nbytes=int(nbytes_S[part].sum()),
            )


class SendQueue:
    """Batches and seals of one link, first in first out, over its streams. Every batch ends in one `completed`.

    `post` may be called from any thread, `take` from the sending threads, the rest from the loop's. The queue has no
    limit of its own: whoever posts bounds the bytes that are not yet completed.
    """

    def __init__(
        self,
        *,
        streams: int,
        src_nbytes: int,
        dst_nbytes: int,
        frame_bytes_max: int,
        frame_segments_max: int,
        abandoned_grants_max: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
    ) -> None:
        self._src_nbytes, self._dst_nbytes = src_nbytes, dst_nbytes
        self._frame_bytes_max, self._frame_segments_max = frame_bytes_max, frame_segments_max
        self._loop = loop
        self._completed = completed
        self._wake = threading.Condition()
        self._posted: deque[Batch] = deque()
        self._frames: deque[Frame] = deque()
        self._streams = [_StreamState() for _ in range(streams)]
        self._used: dict[GrantId, int] = {}
        self._abandoned = AbandonedGrants(abandoned_grants_max)
        self._uncompleted: Counter[GrantId] = Counter()
        self._stopped = False
        self.writes_copied = 0
        self.bytes_copied = 0
        self.batches_abandoned = 0

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue one batch; returns at once. The arrays belong to the queue until it is completed.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
        """
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        batch = Batch(grant=grant, ops=ops, total_bytes=ops.total_bytes)
        with self._wake:
            self._uncompleted[grant] += 1
            if self._stopped or grant in self._abandoned:
                self._complete(batch, copied=False)
            elif batch.total_bytes == 0:
                self._complete(batch, copied=True)
            else:
                self._posted.append(batch)
                self._wake.notify()

    def seal(self, seal: Seal) -> None:
        """Queue a seal on every stream that the grant's data took, or on the first."""
        with self._wake:
            mask = self._used.pop(seal.grant, 0) or 1
            for index, stream in enumerate(self._streams):
                if mask >> index & 1:
                    stream.seals.append(SealToSend(seal=seal, streams_mask=mask))
            self._wake.notify_all()

    def uncompleted(self, grant: GrantId) -> int:
        """Batches of this grant whose `completed` has not been called yet."""
        with self._wake:
            return self._uncompleted[grant]

    @property
    def seals_waiting(self) -> int:
        with self._wake:
            return max(len(stream.seals) for stream in self._streams)

    def abandon(self, grant: GrantId) -> bool:
        """Send no more for this grant: what has not begun completes now. True: some is on its way, unacknowledged.

        Raises:
            TooManyAbandonedGrants: none may be forgotten; the caller ends the link.
        """
        with self._wake:
            too_many = self._abandoned.add(grant)
            self._drop_queued(lambda batch: batch.grant == grant)
            if too_many is not None:
                raise too_many
            return self._on_the_way(grant)

    def on_the_way(self, grant: GrantId) -> bool:
        """Something of this grant has been sent, or is being sent, and is not acknowledged."""
        with self._wake:
            return self._on_the_way(grant)

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

    def take(self, index: int) -> tuple[int, Frame | SealToSend] | None:
        """Wait for the next thing to send on a stream, with its sequence number; None: stopped, no more is sent."""
        stream = self._streams[index]
        with self._wake:
            while not self._stopped:
                if stream.seals:
                    return self._number(stream, None), stream.seals.popleft()
                if self._frames:
                    frame = self._frames.popleft()
                    grant = frame.batch.grant
                    self._used[grant] = self._used.get(grant, 0) | 1 << index
                    return self._number(stream, frame), frame
                if self._posted:
                    self._cut(self._posted.popleft())
                else:
                    self._wake.wait()
            return None

    def bye_sequence(self, index: int) -> int:
        """The number for a stream's BYE. After `take` has returned None there."""
        return self._streams[index].next_sequence

    def acknowledged(self, index: int, sequence: int, *, landed: bool) -> None:
        """The receiver has taken in everything up to `sequence` on this stream."""
        unacked = self._streams[index].unacked
        with self._wake:
            while unacked and unacked[0][0] <= sequence:
                _, frame = unacked.popleft()
                if frame is not None:
                    self._frame_over(frame, copied=landed)

    def lose_unacknowledged(self) -> None:
        """The streams are closed and nothing is being sent: complete what was on its way, uncopied."""
        assert self._stopped
        with self._wake:
            for stream in self._streams:
                for _, frame in stream.unacked:
                    if frame is not None:
                        self._frame_over(frame, copied=False)
                stream.unacked.clear()

    # With the lock held.

    def _cut(self, batch: Batch) -> None:
        """Short enough to do with the lock held: a few microseconds for each frame."""
        frames = list(cut_frames(batch, self._frame_bytes_max, self._frame_segments_max))
        batch.frames_left = len(frames)
        self._frames.extend(frames)
        self._wake.notify(len(frames) - 1)  # the caller takes one itself

    def _number(self, stream: _StreamState, frame: Frame | None) -> int:
        sequence = stream.next_sequence
        stream.next_sequence += 1
        stream.unacked.append((sequence, frame))
        return sequence

    def _on_the_way(self, grant: GrantId) -> bool:
        return any(
            frame is not None and frame.batch.grant == grant for stream in self._streams for _, frame in stream.unacked
        )

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
                self._frame_over(frame, copied=False)
            else:
                self._frames.append(frame)

    def _frame_over(self, frame: Frame, *, copied: bool) -> None:
        batch = frame.batch
        assert batch.frames_left is not None, batch
        batch.frames_left -= 1
        batch.copied = batch.copied and copied
        if batch.frames_left == 0:
            self._complete(batch, copied=batch.copied)

    def _complete(self, batch: Batch, *, copied: bool) -> None:
        if copied:
            self.writes_copied += len(batch.ops.src)
            self.bytes_copied += batch.total_bytes
        else:
            self.batches_abandoned += 1
        call_loop(self._loop, self._deliver, batch, copied)

    def _deliver(self, batch: Batch, copied: bool) -> None:
        with self._wake:
            self._uncompleted[batch.grant] -= 1
            if self._uncompleted[batch.grant] == 0:
                del self._uncompleted[batch.grant]
        self._completed(batch.grant, len(batch.ops.src), batch.total_bytes, copied)
