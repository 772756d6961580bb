"""Copies records between two mapped regions, on a small pool of threads.

A batch is cut into chunks, which the threads take in turn: a large batch is copied by all of them, and a thread looks
whether to go on after each chunk.

Shape suffixes: U8 = one-dimensional array of bytes; RN = records of N bytes, one in each row; B = one entry per record.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from baton.ids import GrantId
from kvtransfer.native.copy import native_copy
from kvtransfer.transport import WriteOps
from kvtransfer.transports.copier import Copier, CopyBatch
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import Completed, check_ops

COPY_SLICE_BYTES = 1 << 20
"""Bound of the temporary that NumPy's copy of equal records makes: near the size of a second-level cache."""
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


def copy_records(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """Copy every op. Blocks until done; no byte is touched when an op is out of bounds. The regions do not overlap.

    Raises:
        WriteOutOfBounds: see `check_ops`.
    """
    check_ops(ops, len(src_U8), len(dst_U8))
    copy_checked(dst_U8, src_U8, contiguous(ops))


def contiguous(ops: WriteOps) -> WriteOps:
    """The same ops, in arrays that C can walk through."""
    arrays = (np.ascontiguousarray(array) for array in (ops.src, ops.dst, ops.nbytes))
    return WriteOps(**dict(zip(("src", "dst", "nbytes"), arrays, strict=True)))


def copy_checked(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """Copy every op of contiguous arrays that `check_ops` has passed."""
    native = native_copy()
    if native is not None:
        native(dst_U8, src_U8, ops.dst, ops.src, ops.nbytes)
    else:
        copy_by_numpy(dst_U8, src_U8, ops)


def copy_by_numpy(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """What `copy_checked` does where there is no native library."""
    if len(ops.src) == 0:
        return
    row_nbytes = int(ops.nbytes[0])
    uniform = row_nbytes > 0 and bool((ops.nbytes == row_nbytes).all())
    if uniform and not (ops.src % row_nbytes).any() and not (ops.dst % row_nbytes).any():
        _copy_rows(dst_U8, src_U8, ops, row_nbytes)
        return
    for src, dst, nbytes in zip(ops.src.tolist(), ops.dst.tolist(), ops.nbytes.tolist(), strict=True):
        dst_U8[dst : dst + nbytes] = src_U8[src : src + nbytes]


def _copy_rows(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps, row_nbytes: int) -> None:
    """Equal records on a grid of their own size: NumPy gathers and scatters rows without holding the GIL."""
    src_RN = src_U8[: len(src_U8) // row_nbytes * row_nbytes].reshape(-1, row_nbytes)
    dst_RN = dst_U8[: len(dst_U8) // row_nbytes * row_nbytes].reshape(-1, row_nbytes)
    src_row_B, dst_row_B = ops.src // row_nbytes, ops.dst // row_nbytes
    step = max(1, COPY_SLICE_BYTES // row_nbytes)
    for start in range(0, len(src_row_B), step):
        dst_RN[dst_row_B[start : start + step]] = src_RN[src_row_B[start : start + step]]


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


def _step(work: Iterator[object]) -> bool:
    """False: that was the last."""
    try:
        next(work)
    except (StopIteration, OSError):
        return False
    return True


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch(CopyBatch):
    """`next_chunk`: the first that no thread has taken; `copied` turns False when one is left out."""

    borders: list[int] = field(default_factory=list)
    next_chunk: int = 0
    chunks_under_way: int = 0
    copied: bool = True

    @property
    def all_taken(self) -> bool:
        return self.next_chunk == len(self.borders) - 1


class CopyPool(Copier[_Batch]):
    """Threads that copy from one mapped region into another. A chunk under way is the last of what is given up."""

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
        """Starts the threads, all or none. Each chunk is copied within `turns`, a semaphore that bounds the pools of a
        process.

        `idle_work` is gone through, one step at a time, while there is nothing to copy; its OSError ends it.

        Raises RuntimeError: a thread cannot be started.
        """
        super().__init__(
            src_nbytes=len(src_U8),
            dst_nbytes=len(dst_U8),
            loop=loop,
            completed=completed,
            drained=drained,
            abandoned_grants_max=limits.abandoned_grants_max,
        )
        self._dst_U8: np.ndarray | None = dst_U8
        self._src_U8: np.ndarray | None = src_U8
        self._limits = limits
        self._turns = turns
        self._idle_work: Iterator[object] | None = idle_work
        self._threads_left = limits.threads
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(limits.threads)
        ]
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:
                self._threads = self._threads[:i]
                self.stop()
                self.join()
                raise

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """See `Copier.post`."""
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        batch = _Batch(grant=grant, ops=contiguous(ops), total_bytes=ops.total_bytes)
        batch.borders = chunk_borders(ops.nbytes, self._limits)
        with self._wake:
            self._uncompleted[grant] += 1
            if self._stopped or grant in self._abandoned:
                self._complete(batch, copied=False)
            else:
                self._waiting.append(batch)
                self._wake.notify(len(batch.borders) - 1)

    def join(self) -> None:
        """See `Copier.join`."""
        assert self._stopped
        for thread in self._threads:
            thread.join()
        self._dst_U8 = self._src_U8 = self._idle_work = None

    def _run(self) -> None:
        try:
            while self._wait():
                with self._turns:
                    self._copy_next()
        finally:
            # Also on an unforeseen error: the error goes to threading.excepthook, and nobody waits for ever.
            self._leave()

    def _wait(self) -> bool:
        """Until there is a chunk to copy; False: stopped."""
        with self._wake:
            while not self._waiting and not self._stopped:
                work, self._idle_work = self._idle_work, None  # one thread at a time
                if work is None:
                    self._wake.wait()
                    continue
                self._wake.release()
                try:
                    more = _step(work)
                finally:
                    self._wake.acquire()
                self._idle_work = work if more else None
            return not self._stopped

    def _copy_next(self) -> None:
        """Copy the next chunk, unless there is none any more."""
        with self._wake:
            if not self._waiting:
                return
            batch = self._waiting[0]
            start, end = batch.borders[batch.next_chunk : batch.next_chunk + 2]
            batch.next_chunk += 1
            batch.chunks_under_way += 1
            if batch.all_taken:
                self._waiting.popleft()
            if self._waiting:
                self._wake.notify()
        copied = False
        try:
            ops = batch.ops
            chunk = WriteOps(src=ops.src[start:end], dst=ops.dst[start:end], nbytes=ops.nbytes[start:end])
            assert self._dst_U8 is not None
            assert self._src_U8 is not None
            copy_checked(self._dst_U8, self._src_U8, chunk)
            copied = True
        finally:
            with self._wake:
                batch.chunks_under_way -= 1
                batch.copied = batch.copied and copied
                if batch.all_taken and batch.chunks_under_way == 0:
                    self._complete(batch, copied=batch.copied)

    def _leave(self) -> None:
        self.stop()
        with self._wake:
            self._threads_left -= 1
            if self._threads_left == 0:
                call_loop(self._loop, self._drained)

    def _drop(self, batch: _Batch) -> None:
        """The last of the chunks under way completes a batch that has begun."""
        batch.copied = False
        batch.next_chunk = len(batch.borders) - 1
        if batch.chunks_under_way == 0:
            self._complete(batch, copied=False)
