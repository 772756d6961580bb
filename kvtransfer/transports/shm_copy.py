"""Copies records between two mapped regions, on a small pool of threads.

A batch is cut into chunks, which the threads take in turn: a large batch is copied by all of them, and a thread looks
whether to go on after each chunk.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per record.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from baton.tasks import call_loop
from kvtransfer.native.copy import contiguous, copy_checked
from kvtransfer.transport import WriteOps
from kvtransfer.transports.post_queue import Batch, Completed, OpsPart, PostQueue, parts_left

CHUNK_BYTES_MIN = 1 << 18
"""A batch is not cut into smaller chunks for the sake of having one for each thread: waking one costs too much."""
LAST_CHUNK_BYTES = 1 << 20
"""Chunks shrink down to this towards the end of a large batch, or one thread would copy for a millisecond after another
has found none left. Taking a chunk costs some ten microseconds, copying a mebibyte a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLimits:
    """`threads` of one link; its batches are cut into chunks of `chunk_ops_max` ops and about `chunk_bytes_max`."""

    threads: int
    chunk_ops_max: int
    chunk_bytes_max: int
    abandoned_grants_max: int


def chunk_borders(nbytes_B: np.ndarray, limits: CopyLimits) -> list[int]:
    """Where to cut a batch: chunk i is the ops from border i up to border i + 1. Always at least one chunk.

    A chunk ends with the op that fills it, so it may be larger than `chunk_bytes_max` by less than one op.
    """
    count, total_bytes = len(nbytes_B), int(nbytes_B.sum())
    ends = _byte_borders(total_bytes, limits)
    if not ends and count <= limits.chunk_ops_max:
        return [0, count]
    by_bytes = np.searchsorted(np.cumsum(nbytes_B), np.array(ends, np.int64)) + 1
    by_ops = np.arange(0, count, limits.chunk_ops_max)
    borders: list[int] = np.unique(np.concatenate(([0, count], by_bytes, by_ops))).tolist()
    return borders


def _byte_borders(total_bytes: int, limits: CopyLimits) -> list[int]:
    """Where chunks would end, but for the last, if ops could be cut: equal shares for the threads of a small batch; of
    a large one, again and again, a thread's share of what is left."""
    if total_bytes <= limits.threads * LAST_CHUNK_BYTES:
        chunk_bytes = min(max(CHUNK_BYTES_MIN, -(-total_bytes // limits.threads)), limits.chunk_bytes_max)
        return list(range(chunk_bytes, total_bytes, chunk_bytes))
    ends: list[int] = []
    end = 0
    while True:
        share_bytes = max(LAST_CHUNK_BYTES, -(-(total_bytes - end) // limits.threads))
        end += min(share_bytes, limits.chunk_bytes_max)
        if end >= total_bytes:
            return ends
        ends.append(end)


def cut_chunks(ops: WriteOps, limits: CopyLimits) -> list[OpsPart]:
    """All copies of a batch, in chunks: see `chunk_borders`."""
    ops = contiguous(ops)
    borders = chunk_borders(ops.nbytes, limits)
    if len(borders) == 2:
        return [OpsPart(ops=ops, nbytes=ops.total_bytes)]
    chunks = []
    for start, end in itertools.pairwise(borders):
        chunk = WriteOps(src=ops.src[start:end], dst=ops.dst[start:end], nbytes=ops.nbytes[start:end])
        chunks.append(OpsPart(ops=chunk, nbytes=chunk.total_bytes))
    return chunks


def _step(work: Iterator[object]) -> bool:
    """False: that was the last."""
    try:
        next(work)
    except (StopIteration, OSError):
        return False
    return True


class CopyLanes:
    """Threads that copy from one mapped region into another, and the queue of what they copy.

    When all has been stopped, or copying failed, and no thread will touch the regions again, `drained` is called on the
    loop's thread, once, after the last completion. If the loop is closed by then, neither is.
    """

    def __init__(
        self,
        *,
        dst_U8: np.ndarray,
        src_U8: np.ndarray,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        drained: Callable[[], None],
        limits: CopyLimits,
        turns: AbstractContextManager[object],
        name: str,
        idle_work: Iterator[object] | None = None,
    ) -> None:
        """Starts the threads, all or none. Each chunk is copied within `turns`, a semaphore that bounds the copying
        threads of a process.

        `idle_work` is gone through, one step at a time, while there is nothing to copy; its OSError ends it.

        Raises RuntimeError: a thread cannot be started.
        """
        self.queue: PostQueue[OpsPart, None] = PostQueue(
            lambda ops: cut_chunks(ops, limits),
            self,
            src_nbytes=len(src_U8),
            dst_nbytes=len(dst_U8),
            loop=loop,
            completed=completed,
            abandoned_grants_max=limits.abandoned_grants_max,
        )
        self._loop = loop
        self._drained = drained
        self._dst_U8: np.ndarray | None = dst_U8
        self._src_U8: np.ndarray | None = src_U8
        self._turns = turns
        self._idle_work: Iterator[object] | None = idle_work
        self._threads_left = limits.threads
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(limits.threads)
        ]
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:
                self._threads = self._threads[:i]
                self.queue.stop()
                self.join()
                raise

    def offer(self, batch: Batch[OpsPart]) -> None:
        """See `Lanes.offer`: wakes as many threads as it has chunks."""
        self.queue.lock.notify(parts_left(batch))

    def stop(self) -> None:
        """See `Lanes.stop`."""
        self.queue.lock.notify_all()

    def join(self) -> None:
        """Let go of both regions and of the threads. Called after `drained`: the threads are at their very end."""
        assert self.queue.stopped
        for thread in self._threads:
            thread.join()
        self._dst_U8 = self._src_U8 = self._idle_work = None

    # Copying threads.

    def _run(self, lane: int) -> None:
        try:
            while self._wait():
                with self._turns:
                    self._copy_next(lane)
        finally:
            # Also on an unforeseen error: the error goes to threading.excepthook, and nobody waits for ever.
            self._leave()

    def _wait(self) -> bool:
        """Until there is a chunk to copy; False: stopped."""
        lock = self.queue.lock
        with lock:
            while not self.queue.waits and not self.queue.stopped:
                work, self._idle_work = self._idle_work, None  # one thread at a time
                if work is None:
                    lock.wait()
                    continue
                lock.release()
                try:
                    more = _step(work)
                finally:
                    lock.acquire()
                self._idle_work = work if more else None
            return not self.queue.stopped

    def _copy_next(self, lane: int) -> None:
        """Copy the next chunk, unless there is none any more."""
        with self.queue.lock:
            taken = self.queue.take(lane)
            if taken is None:
                return
            if self.queue.waits:
                self.queue.lock.notify()
        copied = False
        try:
            assert self._dst_U8 is not None
            assert self._src_U8 is not None
            copy_checked(self._dst_U8, self._src_U8, taken.part.ops)
            copied = True
        finally:
            self.queue.finished(taken, copied=copied)

    def _leave(self) -> None:
        self.queue.stop()
        with self.queue.lock:
            self._threads_left -= 1
            if self._threads_left == 0:
                call_loop(self._loop, self._drained)
