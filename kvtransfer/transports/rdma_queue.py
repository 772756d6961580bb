"""What is posted on an rdma or ucx link: batches, the chains of work requests that they are cut into, and the seals.

Nothing here knows a device. The link's posting thread takes chains as the queue pairs have room, and tells when the
device has completed one; completions of batches go to the loop.

Shape suffixes: W = work requests; Q = queue pairs.
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
from kvtransfer.transports.posted_writes import AbandonedGrants, Completed, check_ops


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch:
    """One post. `ops` are cut to the size of a work request; `taken` of them are in chains."""

    grant: GrantId
    writes: int
    total_bytes: int
    ops: WriteOps
    taken: int = 0
    chains_out: int = 0
    copied: bool = True

    @property
    def over(self) -> bool:
        return self.chains_out == 0 and self.taken == len(self.ops.src)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Work requests for one queue pair, to be posted at once."""

    number: int
    qp: int
    batch: _Batch
    ops: WriteOps
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealPart:
    """The immediate that goes down one queue pair for one seal."""

    number: int
    qp: int
    seal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """`send_wrs_max`: work requests on their way on each queue pair, one of them kept for a seal."""

    qps: int
    send_wrs_max: int
    chain_wrs_max: int
    chain_bytes_max: int
    wr_bytes_max: int
    on_the_way_bytes_max: int
    abandoned_grants_max: int


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters of one link."""

    writes_copied: int = 0
    bytes_copied: int = 0
    batches_abandoned: int = 0
    chains: int = 0
    requests: int = 0
    seals: int = 0
    completed: int = 0
    """Chains and immediates that the device has let go of."""


class ChainQueue:
    """First in, first out. `post` from any thread; `take` and `completed` from the posting thread; the rest from the
    loop's. Every posted batch ends in one `Completed`. The queue has no limit of its own: whoever posts bounds the
    bytes that are not yet completed."""

    def __init__(
        self,
        *,
        limits: QueueLimits,
        src_nbytes: int,
        dst_nbytes: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        adrift: Callable[[GrantId], None],
        wake: Callable[[], None],
    ) -> None:
        """`adrift` is called on the loop's thread for each grant with writes on their way as the queue pairs are lost,
        before these complete; `wake`, from any thread and under the queue's lock, when there is something to take."""
        assert limits.send_wrs_max > 1 and limits.chain_wrs_max > 0
        self._limits = limits
        self._src_nbytes, self._dst_nbytes = src_nbytes, dst_nbytes
        self._loop = loop
        self._completed = completed
        self._adrift = adrift
        self._wake = wake
        self._lock = threading.Lock()
        self._batches: deque[_Batch] = deque()
        self._seals: deque[SealPart] = deque()
        self._out: dict[int, Chain | SealPart] = {}
        self._wrs_out_Q = [0] * limits.qps
        self._bytes_out = 0
        self._next_number = 0
        self._abandoned = AbandonedGrants(limits.abandoned_grants_max)
        self._uncompleted: Counter[GrantId] = Counter()
        self._qps_used: dict[GrantId, int] = {}
        self._stopped = False
        self.progress = Progress()

    # Any thread.

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue one batch; returns at once. Raises WriteOutOfBounds: the batch is not taken, nor completed."""
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        batch = _Batch(
            grant=grant,
            writes=len(ops.src),
            total_bytes=ops.total_bytes,
            ops=cut_requests(ops, self._limits.wr_bytes_max),
        )
        with self._lock:
            self._uncompleted[grant] += 1
            if self._stopped or grant in self._abandoned:
                self._complete(batch, copied=False)
            elif batch.over:
                self._complete(batch, copied=True)
            else:
                self._batches.append(batch)
                self._wake()

    # Posting thread.

    def take(self) -> Chain | SealPart | None:
        """What to post next; None: nothing to do, or no room. Seals first, for what they seal has completed."""
        with self._lock:
            if self._seals and self._wrs_out_Q[self._seals[0].qp] < self._limits.send_wrs_max:
                part = self._seals.popleft()
                self._wrs_out_Q[part.qp] += 1
                self._out[part.number] = part
                return part
            if not self._batches or self._bytes_out >= self._limits.on_the_way_bytes_max:
                return None
            qp = min(range(self._limits.qps), key=self._wrs_out_Q.__getitem__)
            room = self._limits.send_wrs_max - 1 - self._wrs_out_Q[qp]
            # A doorbell for each free place would cost more than waiting for a few.
            if room < min(self._limits.chain_wrs_max, self._limits.send_wrs_max - 1) and self._wrs_out_Q[qp]:
                return None
            return self._cut(qp, room)

    @property
    def on_the_way(self) -> bool:
        """Something has been taken that the device has not completed."""
        with self._lock:
            return bool(self._out)

    def completed(self, number: int) -> None:
        """The device has let go of what was taken under this number: it has landed."""
        with self._lock:
            self.progress.completed += 1
            self._let_go(self._out.pop(number), landed=True)

    # Loop's thread.

    def seal(self, number: int, grant: GrantId) -> int:
        """Queue the immediates of a seal, whose batches have completed: the mask of the queue pairs that they take."""
        with self._lock:
            assert not self._uncompleted[grant], "a seal before the grant's writes have completed"
            mask = self._qps_used.pop(grant, 0) or 1
            for qp in range(self._limits.qps):
                if mask >> qp & 1:
                    self._seals.append(SealPart(number=self._number(), qp=qp, seal=number))
            self.progress.seals += 1
            self._wake()
            return mask

    def abandon(self, grant: GrantId) -> None:
        """Take nothing more of this grant. Raises TooManyAbandonedGrants: then all has been stopped."""
        with self._lock:
            too_many = self._abandoned.add(grant)
            self._drop(lambda batch: batch.grant == grant)
        if too_many is not None:
            self.stop()
            raise too_many

    def mark(self, grant: GrantId) -> int | None:
        """How far the link has come; None: nothing of this grant is left. See `Drains`."""
        with self._lock:
            return self.progress.completed if grant in self._uncompleted else None

    def forget(self, grant: GrantId) -> None:
        """Nothing will be posted for this grant any more."""
        with self._lock:
            self._abandoned.forget(grant)
            self._qps_used.pop(grant, None)

    def stop(self) -> None:
        """Take no batch any more; seals still go. Idempotent."""
        with self._lock:
            self._stopped = True
            self._drop(lambda _: True)
            self._wake()

    def lose_all(self) -> None:
        """The queue pairs are gone: what was on its way completes, uncopied; where it is, nobody knows.

        The device asks nobody before it writes what comes for a queue pair that is still open over there, and a switch
        may hold a packet back for longer than our end has lived. What was not taken has never left.
        """
        self.stop()
        with self._lock:
            self._seals.clear()
            for grant in {taken.batch.grant for taken in self._out.values() if isinstance(taken, Chain)}:
                call_loop(self._loop, self._adrift, grant)
            for taken in list(self._out.values()):
                self._let_go(taken, landed=False)
            self._out.clear()

    @property
    def writes_out(self) -> bool:
        """Something of a batch has been taken that the device has not completed: at the link's end it is adrift."""
        with self._lock:
            return any(isinstance(taken, Chain) for taken in self._out.values())

    @property
    def drained(self) -> bool:
        """Nothing waits, and nothing is on its way."""
        with self._lock:
            return not (self._out or self._batches or self._seals)

    # With the lock held.

    def _cut(self, qp: int, room: int) -> Chain:
        batch = self._batches[0]
        start = batch.taken
        nbytes_W = batch.ops.nbytes[start : start + min(room, self._limits.chain_wrs_max)]
        fit = int(np.searchsorted(np.cumsum(nbytes_W), self._limits.chain_bytes_max, side="right"))
        count = max(1, min(fit, len(nbytes_W)))
        end = start + count
        ops = WriteOps(src=batch.ops.src[start:end], dst=batch.ops.dst[start:end], nbytes=nbytes_W[:count])
        chain = Chain(number=self._number(), qp=qp, batch=batch, ops=ops, nbytes=ops.total_bytes)
        batch.taken = end
        batch.chains_out += 1
        if end == len(batch.ops.src):
            self._batches.popleft()
        self._wrs_out_Q[qp] += count
        self._bytes_out += chain.nbytes
        self._qps_used[batch.grant] = self._qps_used.get(batch.grant, 0) | 1 << qp
        self._out[chain.number] = chain
        self.progress.chains += 1
        self.progress.requests += count
        return chain

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _let_go(self, taken: Chain | SealPart, *, landed: bool) -> None:
        if isinstance(taken, SealPart):
            self._wrs_out_Q[taken.qp] -= 1
            return
        self._wrs_out_Q[taken.qp] -= len(taken.ops.src)
        self._bytes_out -= taken.nbytes
        batch = taken.batch
        batch.chains_out -= 1
        batch.copied &= landed
        if batch.over:
            self._complete(batch, copied=batch.copied)

    def _drop(self, which: Callable[[_Batch], bool]) -> None:
        """What is not taken of these batches is left out; they complete when what is taken has been let go of."""
        kept: deque[_Batch] = deque()
        for batch in self._batches:
            if not which(batch):
                kept.append(batch)
                continue
            batch.taken, batch.copied = len(batch.ops.src), False
            if batch.over:
                self._complete(batch, copied=False)
        self._batches = kept

    def _complete(self, batch: _Batch, *, copied: bool) -> None:
        if copied:
            self.progress.writes_copied += batch.writes
            self.progress.bytes_copied += batch.total_bytes
        else:
            self.progress.batches_abandoned += 1
        call_loop(self._loop, self._deliver, batch, copied)

    def _deliver(self, batch: _Batch, copied: bool) -> None:
        with self._lock:
            self._uncompleted[batch.grant] -= 1
            if not self._uncompleted[batch.grant]:
                del self._uncompleted[batch.grant]
        self._completed(batch.grant, batch.writes, batch.total_bytes, copied)


def cut_requests(ops: WriteOps, wr_bytes_max: int) -> WriteOps:
    """The same copies with none longer than `wr_bytes_max`, empty ones left out, each array contiguous."""
    some_W = ops.nbytes > 0
    src_W, dst_W, nbytes_W = ops.src, ops.dst, ops.nbytes
    if not some_W.all():
        src_W, dst_W, nbytes_W = src_W[some_W], dst_W[some_W], nbytes_W[some_W]
    if len(nbytes_W) and int(nbytes_W.max()) > wr_bytes_max:
        parts_W = -(-nbytes_W // wr_bytes_max)
        # How far into its write each part begins.
        first_W = np.repeat(np.cumsum(parts_W) - parts_W, parts_W)
        into_W = (np.arange(len(first_W), dtype=np.int64) - first_W) * wr_bytes_max
        src_W, dst_W = np.repeat(src_W, parts_W) + into_W, np.repeat(dst_W, parts_W) + into_W
        nbytes_W = np.minimum(np.repeat(nbytes_W, parts_W) - into_W, wr_bytes_max)
    return WriteOps(
        src=np.ascontiguousarray(src_W), dst=np.ascontiguousarray(dst_W), nbytes=np.ascontiguousarray(nbytes_W)
    )
