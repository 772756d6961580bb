"""Copies records between two mapped regions, on a small pool of threads.

Shape suffixes: U8 = one-dimensional array of bytes; RN = records of N bytes, one in each row; B = one entry per record.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.ids import GrantId
from kvtransfer.transport import WriteOps
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import Completed, TooManyAbandonedGrants, check_ops

COPY_SLICE_BYTES = 1 << 20
"""Bound of the temporary that a copy of equal records makes: near the size of a second-level cache."""


def copy_records(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """Copy every op. Blocks until done; no byte is touched when an op is out of bounds. The regions do not overlap.

    Raises:
        WriteOutOfBounds: see `check_ops`.
    """
    check_ops(ops, len(src_U8), len(dst_U8))
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch:
    grant: GrantId
    ops: WriteOps
    total_bytes: int


class CopyPool:
    """Threads that copy posted batches from one region into another, first in first out.

    `post` may be called from any thread, the rest from the loop's. Every posted batch ends in one `completed`. The
    queue has no limit of its own: whoever posts bounds the bytes that are not yet completed.

    When `stop` was called, or a thread failed, and no thread will touch the regions again, `drained` is called on the
    loop's thread, once, after the last `completed`. If the loop is closed by then, both are dropped.
    """

    def __init__(
        self,
        *,
        dst_U8: np.ndarray,
        src_U8: np.ndarray,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        drained: Callable[[], None],
        threads: int,
        chunk_ops_max: int,
        abandoned_grants_max: int,
        name: str,
    ) -> None:
        """Starts the threads. Between two chunks of `chunk_ops_max` ops, `stop` and `abandon` are looked at."""
        self._dst_U8: np.ndarray | None = dst_U8
        self._src_U8: np.ndarray | None = src_U8
        self._src_nbytes, self._dst_nbytes = len(src_U8), len(dst_U8)
        self._loop = loop
        self._completed = completed
        self._drained = drained
        self._chunk_ops_max = chunk_ops_max
        self._abandoned_grants_max = abandoned_grants_max
        self._wake = threading.Condition()
        self._queue: deque[_Batch] = deque()
        self._abandoned: set[GrantId] = set()
        self._uncompleted: Counter[GrantId] = Counter()
        self._stopped = False
        self._threads_left = threads
        self.writes_copied = 0
        self.bytes_copied = 0
        self.batches_abandoned = 0
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue one batch; returns at once. The arrays belong to the pool until it is completed.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
        """
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        batch = _Batch(grant=grant, ops=ops, total_bytes=ops.total_bytes)
        with self._wake:
            self._uncompleted[grant] += 1
            if self._stopped or grant in self._abandoned:
                self._complete(batch, copied=False)
            else:
                self._queue.append(batch)
                self._wake.notify()

    def uncompleted(self, grant: GrantId) -> int:
        """Batches of this grant whose `completed` has not been called yet."""
        with self._wake:
            return self._uncompleted[grant]

    def abandon(self, grant: GrantId) -> None:
        """Copy no more for this grant: what is queued completes now, the chunk under way is the last.

        Raises:
            TooManyAbandonedGrants: the pool has stopped instead, which abandons everything.
        """
        with self._wake:
            self._abandoned.add(grant)
            self._complete_queued(lambda batch: batch.grant == grant)
            too_many = len(self._abandoned) > self._abandoned_grants_max
        if too_many:
            self.stop()
            raise TooManyAbandonedGrants(
                f"{self._abandoned_grants_max} abandoned grants remembered, none may be forgotten"
            )

    def forget(self, grant: GrantId) -> None:
        """Nothing will be posted for this grant any more: it need not be remembered as abandoned."""
        with self._wake:
            self._abandoned.discard(grant)

    def stop(self) -> None:
        """Copy no more: what is queued completes now, the chunks under way are the last. Idempotent; does not wait."""
        with self._wake:
            self._stopped = True
            self._complete_queued(lambda _: True)
            self._wake.notify_all()

    def join(self) -> None:
        """Let go of both regions and of the threads. Called after `drained`: the threads are at their very end."""
        assert self._stopped
        for thread in self._threads:
            thread.join()
        self._dst_U8 = self._src_U8 = None

    def _run(self) -> None:
        try:
            while (batch := self._take()) is not None:
                copied = False
                try:
                    copied = self._copy(batch)
                finally:
                    with self._wake:
                        self._complete(batch, copied=copied)
        finally:
            # Also on an unforeseen error: the error goes to threading.excepthook, and nobody waits for ever.
            self._leave()

    def _take(self) -> _Batch | None:
        with self._wake:
            while not self._queue and not self._stopped:
                self._wake.wait()
            return None if self._stopped else self._queue.popleft()

    def _copy(self, batch: _Batch) -> bool:
        assert self._dst_U8 is not None
        assert self._src_U8 is not None
        ops = batch.ops
        for start in range(0, len(ops.src), self._chunk_ops_max):
            with self._wake:
                if self._stopped or batch.grant in self._abandoned:
                    return False
            end = start + self._chunk_ops_max
            chunk = WriteOps(src=ops.src[start:end], dst=ops.dst[start:end], nbytes=ops.nbytes[start:end])
            copy_records(self._dst_U8, self._src_U8, chunk)
        return True

    def _leave(self) -> None:
        self.stop()
        with self._wake:
            self._threads_left -= 1
            if self._threads_left == 0:
                call_loop(self._loop, self._drained)

    def _complete_queued(self, which: Callable[[_Batch], bool]) -> None:
        """With the lock held."""
        kept: deque[_Batch] = deque()
        for batch in self._queue:
            if which(batch):
                self._complete(batch, copied=False)
            else:
                kept.append(batch)
        self._queue = kept

    def _complete(self, batch: _Batch, *, copied: bool) -> None:
        """With the lock held, so that `drained` is scheduled after every `completed`."""
        if copied:
            self.writes_copied += len(batch.ops.src)
            self.bytes_copied += batch.total_bytes
        else:
            self.batches_abandoned += 1
        call_loop(self._loop, self._deliver, batch, copied)

    def _deliver(self, batch: _Batch, copied: bool) -> None:
        with self._wake:
            self._uncompleted[batch.grant] -= 1
            if self._uncompleted[batch.grant] == 0:
                del self._uncompleted[batch.grant]
        self._completed(batch.grant, len(batch.ops.src), batch.total_bytes, copied)
