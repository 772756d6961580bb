"""What the writers' links of rdma and ucx have in common: chains of work requests that a thread of their own posts, as
queue pairs have room for them, seals of which only so many may be on their way, and a control channel.

Nothing here knows a device: the thread takes chains, and reports what the device has completed.

Shape suffixes: W = work requests; Q = queue pairs.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypedDict, Unpack

import numpy as np

from baton.ids import GrantId, Pair
from baton.tasks import call_loop
from kvtransfer.native.copy import contiguous
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, WriteOps, WriterEvents
from kvtransfer.transports.control_channel import Message, Sealed, SealSent, WriterChannel, close_politely
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.post_queue import Batch, Completed, OpsPart, PostQueue, Taken
from kvtransfer.transports.writer_link import ChannelLink, Mark

Chain = Taken[OpsPart]
"""Work requests for one queue pair (`lane`), to be posted at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SealPart:
    """The immediate that goes down one queue pair for one seal."""

    number: int
    lane: int
    seal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainLimits(LinkLimits):
    chain_wrs_max: int = 32
    """Writes posted at once."""
    chain_bytes_max: int = 4 << 20
    """Bytes of such a chain, unless one write is more."""
    wr_bytes_max: int = 1 << 20
    """Bytes of one write; longer ones are cut."""
    on_the_way_bytes_max: int = 32 << 20
    """Once this many bytes are posted and not completed, no more are posted."""


class LinkParts(TypedDict):
    """What every link is made of; see `BaseWriterLink`."""

    endpoint: DataEndpoint
    pair: Pair
    events: WriterEvents
    loop: asyncio.AbstractEventLoop


class ChainLanes:
    """`take` and `completed` from the posting thread; the rest from the loop's, but for `queue.post`: any thread."""

    def __init__(
        self,
        *,
        limits: ChainLimits,
        qps: int,
        send_wrs_max: int,
        src_nbytes: int,
        dst_nbytes: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        in_doubt: Callable[[GrantId], None],
        wake: Callable[[], None],
    ) -> None:
        """`send_wrs_max` work requests are on their way on each queue pair, one of them kept for a seal. `wake` is
        called, from any thread and under the queue's lock, when there is something to take."""
        assert send_wrs_max > 1
        self.queue: PostQueue[OpsPart, None] = PostQueue(
            self._cut,
            self,
            src_nbytes=src_nbytes,
            dst_nbytes=dst_nbytes,
            loop=loop,
            completed=completed,
            in_doubt=in_doubt,
        )
        self._limits, self._qps, self._send_wrs_max = limits, qps, send_wrs_max
        # A doorbell for each free place would cost more than waiting for a few.
        self._chain_wrs = min(limits.chain_wrs_max, send_wrs_max - 1)
        self._wake = wake
        self._out: dict[int, Chain | SealPart] = {}
        self._seals: deque[SealPart] = deque()
        self._seal_parts = 0
        self._wrs_out_Q = [0] * qps
        self._bytes_out = 0
        self.chains = self.requests = 0

    def offer(self, batch: Batch[OpsPart]) -> None:
        """See `Lanes.offer`."""
        del batch
        self._wake()

    def stop(self) -> None:
        """See `Lanes.stop`. Seals still go."""
        self._wake()

    # Posting thread.

    def take(self) -> Chain | SealPart | None:
        """What to post next; None: nothing to do, or no room. Seals first, for what they seal has completed."""
        with self.queue.lock:
            if self._seals and self._wrs_out_Q[self._seals[0].lane] < self._send_wrs_max:
                part = self._seals.popleft()
                self._wrs_out_Q[part.lane] += 1
                self._out[part.number] = part
                return part
            if self._bytes_out >= self._limits.on_the_way_bytes_max:
                return None
            qp = min(range(self._qps), key=self._wrs_out_Q.__getitem__)
            if self._send_wrs_max - 1 - self._wrs_out_Q[qp] < self._chain_wrs and self._wrs_out_Q[qp]:
                return None
            chain = self.queue.take(qp)
            if chain is None:
                return None
            wrs = len(chain.part.ops.src)
            self._wrs_out_Q[qp] += wrs
            self._bytes_out += chain.part.nbytes
            self._out[chain.number] = chain
            self.chains += 1
            self.requests += wrs
            return chain

    @property
    def on_the_way(self) -> bool:
        """Something has been taken that the device has not completed."""
        with self.queue.lock:
            return bool(self._out)

    def completed(self, number: int) -> None:
        """The device has completed what was taken under this number: it has landed."""
        with self.queue.lock:
            taken = self._out.pop(number)
            if isinstance(taken, SealPart):
                self._wrs_out_Q[taken.lane] -= 1
                self.queue.moved += 1
                return
            self._wrs_out_Q[taken.lane] -= len(taken.part.ops.src)
            self._bytes_out -= taken.part.nbytes
            self.queue.finished(taken, copied=True)

    # Loop's thread.

    def seal(self, number: int, grant: GrantId) -> int:
        """Queue the immediates of a seal, whose batches have completed: the mask of the queue pairs that they take."""
        with self.queue.lock:
            assert not self.queue.uncompleted(grant), "a seal before the grant's writes have completed"
            mask = self.queue.lanes_to_seal(grant)
            for qp in range(self._qps):
                if mask >> qp & 1:
                    self._seal_parts += 1
                    # Below 0: the chains have the numbers above.
                    self._seals.append(SealPart(number=-self._seal_parts, lane=qp, seal=number))
            self._wake()
            return mask

    def lose(self) -> None:
        """The queue pairs are gone: see `PostQueue.lose`.

        The device asks nobody before it writes what comes for a queue pair that is still open over there, and a switch
        may hold a packet back for longer than our end has lived. Hence such writes are in doubt.
        """
        with self.queue.lock:
            self._seals.clear()
            self._out.clear()
            self.queue.lose()

    @property
    def drained(self) -> bool:
        """Nothing waits, and nothing is on its way."""
        with self.queue.lock:
            return not (self.queue.batches_waiting or self._out or self._seals)

    def _cut(self, ops: WriteOps) -> Iterator[OpsPart]:
        return cut_chains(cut_requests(ops, self._limits.wr_bytes_max), self._chain_wrs, self._limits.chain_bytes_max)


def cut_chains(ops: WriteOps, wrs_max: int, bytes_max: int) -> Iterator[OpsPart]:
    """Work requests in order, in chains of at most so many, and of at most so many bytes unless one alone is more."""
    start, count = 0, len(ops.src)
    while start < count:
        nbytes_W = ops.nbytes[start : start + wrs_max]
        fit = int(np.searchsorted(np.cumsum(nbytes_W), bytes_max, side="right"))
        end = start + max(1, min(fit, len(nbytes_W)))
        chain = WriteOps(src=ops.src[start:end], dst=ops.dst[start:end], nbytes=ops.nbytes[start:end])
        yield OpsPart(ops=chain, nbytes=chain.total_bytes)
        start = end


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
    return contiguous(WriteOps(src=src_W, dst=dst_W, nbytes=nbytes_W))


class ChainLink(ChannelLink):
    """A writer's link (see `kvtransfer.transport.WriterLink`) but for what its thread posts with.

    `post` may be called from any thread, the rest from the loop's. A batch is complete when all its chains are, or when
    the link is over and nothing reads the source any more.
    """

    failed: ClassVar[type[Exception]]
    """What the thread may raise for a device or a library that fails."""
    _queue: PostQueue[OpsPart, None]

    def __init__(
        self,
        channel: WriterChannel,
        *,
        src_nbytes: int,
        dst_nbytes: int,
        limits: ChainLimits,
        qps: int,
        send_wrs_max: int,
        seals_max: int,
        **parts: Unpack[LinkParts],
    ) -> None:
        """At most `seals_max` seals are on their way. Starts the thread. Raises ConnectError: there can be no more."""
        super().__init__(channel, limits=limits, **parts)
        self.region_nbytes = dst_nbytes
        """Of the receiver's region."""
        self._seals_max = seals_max
        self._lanes = ChainLanes(
            limits=limits,
            qps=qps,
            send_wrs_max=send_wrs_max,
            src_nbytes=src_nbytes,
            dst_nbytes=dst_nbytes,
            loop=self._loop,
            completed=self._events.writes_completed,
            in_doubt=self._events.writes_in_doubt,
            wake=self._wake,
        )
        self._queue = self._lanes.queue
        self._seals_held: deque[Seal] = deque()
        self._seals_out: set[int] = set()
        self._seals_made = 0
        name = f"{self.transport.value}-post-{self._pair.receiver:x}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise ConnectError(f"{self._address}: no thread to post with: {error}") from error
        self._loop.add_reader(self._sock, self._read)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {**super().describe(), "requests": self._lanes.requests, "chains": self._lanes.chains}

    # The subclass's own.

    @abstractmethod
    def _wake(self) -> None:
        """Wake the thread. Any thread."""

    @abstractmethod
    def _post_all(self) -> None:
        """On the thread: post what the queue has until `_cut`, or until nothing is left while `_ending`. Raises
        `failed`."""

    @abstractmethod
    def _thread_over(self, failure: str) -> None:
        """The thread has ended, and the socket is still open. Release what is left; then `_hang_up` and `_finish`."""

    # The thread.

    def _run(self) -> None:
        failure = "the posting thread failed"
        try:
            self._post_all()
            failure = ""
        except self.failed as error:
            failure = str(error)
        finally:
            call_loop(self._loop, self._thread_left, failure)

    # Loop's thread.

    def _thread_left(self, failure: str) -> None:
        if failure and not self._ending:
            # The receiver's last message, if there is one, explains more than the error of a write.
            self._read()
            self._end(failure)
        self._thread.join()
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._thread_over(failure)

    def _handle(self, message: Message) -> None:
        if not isinstance(message, Sealed) or message.number not in self._seals_out:
            super()._handle(message)
            return
        self._seals_out.discard(message.number)
        if self._seals_held and not self._ending:
            self._send_next(self._seals_held.popleft())
        if self._ending:
            self._wake()

    def _send_seal(self, seal: Seal) -> None:
        if len(self._seals_out) < self._seals_max:
            self._send_next(seal)
        else:
            self._seals_held.append(seal)

    def _send_next(self, seal: Seal) -> None:
        self._seals_made += 1
        self._seals_out.add(self._seals_made)
        mask = self._lanes.seal(self._seals_made, seal.grant)
        self._send_message(SealSent(number=self._seals_made, seal=seal, ways_mask=mask))

    def _seals_waiting(self) -> int:
        return len(self._seals_held)

    def _mark(self, grant: GrantId) -> Mark | None:
        return self._queue.moved if self._queue.lanes_with(grant) else None

    def _cut_off(self) -> None:
        super()._cut_off()
        self._wake()

    def _hang_up(self, last: Message | None) -> None:
        """Close the connection, behind the last message, if there is one and the connection takes it."""
        if last is not None:
            self._send_message(last)
        self._outbox.close()
        close_politely(self._sock)
