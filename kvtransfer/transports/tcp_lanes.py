"""What a batch is cut into to travel over a tcp link, and the streams that carry it: frames, seals, their numbers, and
what is not acknowledged.

Shape suffixes: W = write operations of a batch; S = segments of its frames; S2 = (destination, length) of each; F =
frames.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.post_queue import ABANDONED_GRANTS_MAX, Batch, Completed, PostQueue, Taken

SHARED_BYTES_MIN = 1 << 20
"""A batch of more is shared between the streams: no frame of less is cut for that."""
SHARES_OF_A_STREAM = 1.25
"""Frames are cut so that at least so many for each stream are left, for the streams to end at about the same time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """`nbytes` of payload. `table_S2` has (destination, length) of each segment, as it travels; all arrays are
    contiguous."""

    src_S: np.ndarray
    nbytes_S: np.ndarray
    table_S2: np.ndarray
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealToSend:
    seal: Seal
    streams_mask: int


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


def frame_starts(total_bytes: int, bytes_max: int, streams: int) -> list[int]:
    """At which byte of a batch each frame begins: large ones first, smaller ones towards the end.

    After the guided self-scheduling of loops (Polychronopoulos and Kuck, 1987).
    """
    starts, at = [], 0
    shared_bytes_min = min(SHARED_BYTES_MIN, bytes_max)
    while at < total_bytes:
        starts.append(at)
        at += min(bytes_max, max(shared_bytes_min, int((total_bytes - at) / (SHARES_OF_A_STREAM * streams))))
    return starts


def cut_frames(ops: WriteOps, bytes_max: int, segments_max: int, streams: int = 1) -> Iterator[Frame]:
    """All copies of a batch, in frames of at most `bytes_max` bytes and `segments_max` segments; long ones split."""
    merged = merge_runs(ops)
    if len(merged.src) == 0:
        return
    if len(merged.src) == 1 and merged.nbytes[0] <= min(bytes_max, SHARED_BYTES_MIN):
        # What follows costs as much as sending a single record takes.
        table_S2 = np.array([[merged.dst[0], merged.nbytes[0]]], dtype="<i8")
        nbytes = int(merged.nbytes[0])
        yield Frame(src_S=merged.src, nbytes_S=merged.nbytes, table_S2=table_S2, nbytes=nbytes)
        return
    ends_W = np.cumsum(merged.nbytes)
    total_bytes = int(ends_W[-1])
    starts_F = np.array(frame_starts(total_bytes, bytes_max, streams), np.int64)
    # Segments that run across the border of two frames are split there.
    begins_W = ends_W - merged.nbytes
    whole_F = np.searchsorted(ends_W, starts_F, side="right")
    splits = starts_F > begins_W[whole_F]
    whole_X, at_X = whole_F[splits], starts_F[splits]
    within_X = at_X - begins_W[whole_X]
    at_S = np.insert(begins_W, whole_X + 1, at_X)
    src_S = np.insert(merged.src, whole_X + 1, merged.src[whole_X] + within_X)
    dst_S = np.insert(merged.dst, whole_X + 1, merged.dst[whole_X] + within_X)
    nbytes_S = np.diff(at_S, append=total_bytes)
    table_S2 = np.stack([dst_S, nbytes_S], axis=1).astype("<i8")
    borders = [*np.searchsorted(at_S, starts_F).tolist(), len(at_S)]
    for first, end in itertools.pairwise(borders):
        for start in range(first, end, segments_max):
            part = slice(start, min(start + segments_max, end))
            yield Frame(
                src_S=src_S[part],
                nbytes_S=nbytes_S[part],
                table_S2=table_S2[part],
                nbytes=int(nbytes_S[part].sum()),
            )


AT_ONCE_OPS_MAX = 64
"""A batch of more copies is left to a sending thread: cutting it costs more than waking the thread."""


@dataclass(slots=True, kw_only=True)
class ToSend:
    """What is sent next on a stream, from its byte `sent_nbytes` on. Nobody else sends there meanwhile."""

    index: int
    sequence: int
    item: Taken[Frame] | SealToSend
    sent_nbytes: int = 0

    @property
    def frame(self) -> Frame | None:
        """None: it is a seal."""
        return self.item.part if isinstance(self.item, Taken) else None

    def after(self, head_nbytes: int, sent_nbytes: int) -> ToSend | None:
        """What is left when so many bytes have been sent; its first message has `head_nbytes`."""
        frame = self.frame
        total_nbytes = head_nbytes + (frame.table_S2.nbytes + frame.nbytes if frame is not None else 0)
        assert sent_nbytes <= total_nbytes
        if sent_nbytes == total_nbytes:
            return None
        return ToSend(index=self.index, sequence=self.sequence, item=self.item, sent_nbytes=sent_nbytes)


@dataclass(slots=True, kw_only=True, eq=False)
class _StreamState:
    next_sequence: int = 0
    unacked: deque[tuple[int, Taken[Frame] | None]] = field(default_factory=deque)
    seals: deque[SealToSend] = field(default_factory=deque)
    waits: bool = False
    """Its thread waits for something to send."""
    lent: bool = False
    """Somebody else sends on it."""
    rest: ToSend | None = None
    """What they have left to its thread."""

    @property
    def idle(self) -> bool:
        return self.waits and not self.lent and self.rest is None and not self.seals


class StreamLanes:
    """The streams that carry the frames of one link's queue, and its seals.

    `queue.post` may be called from any thread, `take` from the sending threads, the rest from the loop's. What is
    small, and finds an idle stream, is lent to whoever posts it: they send it without waiting and give the stream back.
    So no thread has to be woken.
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
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        abandoned_grants_max: int = ABANDONED_GRANTS_MAX,
    ) -> None:
        self.queue: PostQueue[Frame, ToSend] = PostQueue(
            lambda ops: cut_frames(ops, frame_bytes_max, frame_segments_max, streams),
            self,
            src_nbytes=src_nbytes,
            dst_nbytes=dst_nbytes,
            loop=loop,
            completed=completed,
            abandoned_grants_max=abandoned_grants_max,
        )
        self._lock: threading.Condition = self.queue.lock
        self._at_once_bytes_max = at_once_bytes_max
        self._streams = [_StreamState() for _ in range(streams)]

    def offer(self, batch: Batch[Frame]) -> ToSend | None:
        """See `Lanes.offer`: whoever posts sends it, if it is small and alone; else a thread is woken.

        What is returned they send, as far as that goes without waiting, and then call `give_back`.
        """
        if (
            not batch.late
            and batch.total_bytes <= self._at_once_bytes_max
            and len(batch.ops.src) <= AT_ONCE_OPS_MAX
            and self.queue.waits_alone(batch)
        ):
            best: int | None = None
            for index, stream in enumerate(self._streams):
                if stream.idle and (best is None or len(stream.unacked) < len(self._streams[best].unacked)):
                    best = index
            if best is not None:
                taken = self._take_frame(best)
                self._streams[best].lent = taken is not None
                return taken
        self._notify()
        return None

    def stop(self) -> None:
        """See `Lanes.stop`: seals are sent no more either."""
        for stream in self._streams:
            stream.seals.clear()
        self._lock.notify_all()

    def seal(self, seal: Seal) -> list[ToSend]:
        """Queue a seal on every stream that the grant's data took, or on the first. What is returned: see `offer`."""
        lent = []
        with self._lock:
            mask = self.queue.lanes_to_seal(seal.grant)
            to_send = SealToSend(seal=seal, streams_mask=mask)
            for index, stream in enumerate(self._streams):
                if not mask >> index & 1:
                    continue
                if stream.idle and not self.queue.stopped:
                    stream.lent = True
                    lent.append(self._number(index, to_send))
                else:
                    stream.seals.append(to_send)
            if len(lent) < mask.bit_count():
                self._lock.notify_all()
        return lent

    def give_back(self, index: int, rest: ToSend | None) -> None:
        """The stream that was lent is free again; what of it has not been sent is left to the stream's thread."""
        stream = self._streams[index]
        with self._lock:
            assert stream.lent
            stream.lent = False
            stream.rest = rest
            if self.queue.stopped or self.queue.waits or not stream.idle:
                self._lock.notify_all()

    @property
    def seals_waiting(self) -> int:
        with self._lock:
            return max(len(stream.seals) for stream in self._streams)

    def take(self, index: int) -> ToSend | None:
        """Wait for the next thing to send on a stream; None: stopped, and nobody else sends there any more."""
        stream = self._streams[index]
        with self._lock:
            while True:
                if not stream.lent:
                    if stream.rest is not None:
                        rest, stream.rest = stream.rest, None
                        return rest
                    if self.queue.stopped:
                        return None
                    if stream.seals:
                        return self._number(index, stream.seals.popleft())
                    if (taken := self._take_frame(index)) is not None:
                        return taken
                stream.waits = True
                self._lock.wait()
                stream.waits = False

    def bye_sequence(self, index: int) -> int:
        """The number for a stream's BYE. After `take` has returned None there."""
        return self._streams[index].next_sequence

    def acknowledged(self, index: int, sequence: int, *, landed: bool) -> None:
        """The receiver has taken in all up to `sequence` on this stream. Reports batches that this completes."""
        unacked = self._streams[index].unacked
        arrived = []
        # Without the lock: nobody else removes anything here.
        while unacked and unacked[0][0] <= sequence:
            _, taken = unacked.popleft()
            if taken is not None:
                arrived.append(taken)
        self.queue.finished_here(arrived, copied=landed)

    # With the lock held.

    def _notify(self) -> None:
        """Something can be taken by any thread. One whose stream is lent cannot, and might be the one that is woken."""
        if any(stream.lent for stream in self._streams):
            self._lock.notify_all()
        else:
            self._lock.notify()

    def _take_frame(self, index: int) -> ToSend | None:
        taken = self.queue.take(index)
        if taken is None:
            return None
        if self.queue.waits:
            self._notify()
        return self._number(index, taken)

    def _number(self, index: int, item: Taken[Frame] | SealToSend) -> ToSend:
        stream = self._streams[index]
        sequence = stream.next_sequence
        stream.next_sequence += 1
        stream.unacked.append((sequence, item if isinstance(item, Taken) else None))
        return ToSend(index=index, sequence=sequence, item=item)
