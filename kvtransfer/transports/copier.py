"""What copies for a link of shm or cuda_ipc, by threads or by a device: its batches that are not complete."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from baton.ids import GrantId
from kvtransfer.transport import WriteOps
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import AbandonedGrants, Completed


@dataclass(slots=True, kw_only=True, eq=False)
class CopyBatch:
    grant: GrantId
    ops: WriteOps
    total_bytes: int


BatchT = TypeVar("BatchT", bound=CopyBatch)


class Copier(ABC, Generic[BatchT]):
    """Batches, begun first in first out. `post` may be called from any thread, the rest from the loop's.

    Every posted batch ends in one `completed`. The queue has no limit of its own: whoever posts bounds the bytes that
    are not yet completed. When `stop` was called, or copying failed, and nothing will touch the regions again,
    `drained` is called on the loop's thread, once, after the last `completed`. If the loop is closed by then, both are
    dropped.
    """

    def __init__(
        self,
        *,
        src_nbytes: int,
        dst_nbytes: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        drained: Callable[[], None],
        abandoned_grants_max: int,
    ) -> None:
        self._src_nbytes, self._dst_nbytes = src_nbytes, dst_nbytes
        self._loop = loop
        self._completed = completed
        self._drained = drained
        self._wake = threading.Condition()
        self._waiting: deque[BatchT] = deque()
        self._abandoned = AbandonedGrants(abandoned_grants_max)
        self._uncompleted: Counter[GrantId] = Counter()
        self._stopped = False
        self.writes_copied = 0
        self.bytes_copied = 0
        self.batches_abandoned = 0

    @abstractmethod
    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue one batch; returns at once. The arrays belong to this until it is completed.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
        """

    @abstractmethod
    def join(self) -> None:
        """Let go of both regions and of the threads. Called after `drained`: the threads are at their very end."""

    def uncompleted(self, grant: GrantId) -> int:
        """Batches of this grant whose `completed` has not been called yet."""
        with self._wake:
            return self._uncompleted[grant]

    def abandon(self, grant: GrantId) -> None:
        """Begin no more copies for this grant: what waits completes now, what is under way when it is over.

        Raises:
            TooManyAbandonedGrants: all has been stopped instead, which abandons everything.
        """
        with self._wake:
            too_many = self._abandoned.add(grant)
            self._drop_waiting(lambda batch: batch.grant == grant)
        if too_many is not None:
            self.stop()
            raise too_many

    def forget(self, grant: GrantId) -> None:
        """Nothing will be posted for this grant any more: it need not be remembered as abandoned."""
        with self._wake:
            self._abandoned.forget(grant)

    def stop(self) -> None:
        """As `abandon`, for every grant. `drained` follows. Idempotent; does not wait."""
        with self._wake:
            self._stopped = True
            self._drop_waiting(lambda _: True)
            self._wake.notify_all()

    # With the lock held.

    @abstractmethod
    def _drop(self, batch: BatchT) -> None:
        """Copy no more of it, and complete it, now or with what is under way."""

    def _drop_waiting(self, which: Callable[[BatchT], bool]) -> None:
        kept: deque[BatchT] = deque()
        for batch in self._waiting:
            if which(batch):
                self._drop(batch)
            else:
                kept.append(batch)
        self._waiting = kept

    def _complete(self, batch: BatchT, *, copied: bool) -> None:
        """So that `drained` is scheduled after every `completed`."""
        if copied:
            self.writes_copied += len(batch.ops.src)
            self.bytes_copied += batch.total_bytes
        else:
            self.batches_abandoned += 1
        call_loop(self._loop, self._deliver, batch, copied)

    # Without it, on the loop's thread.

    def _deliver(self, batch: BatchT, copied: bool) -> None:
        with self._wake:
            self._uncompleted[batch.grant] -= 1
            if self._uncompleted[batch.grant] == 0:
                del self._uncompleted[batch.grant]
        self._completed(batch.grant, len(batch.ops.src), batch.total_bytes, copied)
