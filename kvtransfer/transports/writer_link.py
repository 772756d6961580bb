"""A writer's link, but for what its transport has for itself: its epoch, its posts and seals, and its one end.

rdma and ucx share more: chains of work requests that a thread of their own posts, as queue pairs have room for them,
and seals of which only so many may be on their way. Nothing here knows a device: the thread takes chains, and reports
what the device has completed.

Shape suffixes: W = work requests; Q = queue pairs.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from baton.ids import Epoch, GrantId, Pair
from baton.tasks import call_loop
from kvtransfer.device.driver import EventPoster
from kvtransfer.native.copy import contiguous
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import Message, Sealed, SealSent, WriterChannel, close_politely
from kvtransfer.transports.post_queue import Batch, Completed, OpsPart, PostQueue, Taken

Mark = object
"""Of how far a link has come: an equal one means that nothing has moved since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Limits of one writer's link."""

    connect_ms_max: int = 5000
    """How long connecting and the handshake may take."""
    seals_waiting_max: int = 4096
    """Seals that wait for a receiver that does not take them."""
    drain_ms_max: int = 2000
    """How long writes of an abandoned grant may make no progress before the link ends."""
    bye_ms_max: int = 2000
    """How long closing waits for the receiver to take what is on its way. On shm: how long it tries to say BYE."""


LINK_LIMITS: Final = LinkLimits()


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What every link is made of."""

    endpoint: DataEndpoint
    pair: Pair
    events: WriterEvents
    loop: asyncio.AbstractEventLoop


class BaseWriterLink(ABC):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`).

    `post` may be called from any thread, the rest from the loop's. A subclass sets `_queue` when it is made. The end
    comes once, for one reason: from `close`, a fence, a lost connection or a failure of ours, whichever is first.
    `link_lost` is called last, after every completion, and not for an end that `close` began.
    """

    transport: ClassVar[TransportName]
    ends_in_order: ClassVar[bool] = False
    """After a FENCE or REFUSED what is on its way may arrive."""
    _queue: PostQueue[Any, Any]

    def __init__(self, parts: LinkParts, limits: LinkLimits) -> None:
        self._address, self._epoch = parts.endpoint.address, parts.endpoint.epoch
        self._pair, self._events, self._loop = parts.pair, parts.events, parts.loop
        self._limits = limits
        self._drain_timers: dict[GrantId, asyncio.TimerHandle] = {}
        """Of abandoned grants of which writes are still on their way."""
        self._seals = 0
        self._reason: str | None = None
        """Why the end has begun."""
        self._by_fence = False
        self._cut = False
        """Nothing is waited for any more."""
        self._closed_by_caller = False
        self._closing_timer: asyncio.TimerHandle | None = None
        self._over = self._loop.create_future()

    @property
    def epoch(self) -> Epoch:
        """See `WriterLink.epoch`."""
        return self._epoch

    @property
    def fenced(self) -> bool:
        """See `WriterLink.fenced`."""
        return self._by_fence

    def post_behind(self, poster: EventPoster) -> None:
        """From now on post what a device computes only when it has: behind what the posting thread's stream has queued.

        Once, before the first post. The poster is the caller's and outlives the link.
        """
        self._queue.post_behind(poster.after, self.abandon)

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """See `WriterLink.post`. Figures of a completion are those of the batch as posted, copied or not.

        Raises:
            WriteOutOfBounds: an op leaves one of the regions; the batch is not taken.
            DeviceError: the device that computes the sources has failed; the batch is not taken.
        """
        self._queue.post(grant, ops)

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`. Dropped when the link is ending: `link_lost` follows."""
        assert seal.epoch == self._epoch, (seal.epoch, self._epoch)
        assert self._queue.uncompleted(seal.grant) == 0, "a seal before the grant's writes have completed"
        if self._ending:
            return
        if (waiting := self._seals_waiting()) >= self._limits.seals_waiting_max:
            self._end(f"the receiver does not read: {waiting} seals wait")
            return
        self._seals += 1
        self._send_seal(seal)

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. Remembered until `forget(grant)` or the end of the link. What is on its way may
        arrive; where nothing moves for `drain_ms_max` the link ends."""
        if not self._queue.abandon(grant):
            self._end("too many abandoned grants are remembered, none may be forgotten")
            return
        if not self._ending and grant not in self._drain_timers:
            self._look_later(grant, self._mark(grant))

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this abandoned grant."""
        self._queue.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when every batch is complete, the threads have ended, the region and the
        sockets are released. Cancelling the caller cancels nothing else."""
        if not self._ending:
            self._closed_by_caller = True
        self._end("closed", orderly=True)
        await asyncio.shield(self._over)
        # Where the end lies behind already: a batch posted since then completes by a call that the loop still has.
        await asyncio.sleep(0)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            "transport": self.transport.value,
            "address": self._address,
            "epoch": self._epoch,
            "state": self._reason or "open",
            **self._queue.describe(),
            "seals": self._seals,
            "seals_waiting": self._seals_waiting(),
        }

    # The transport's own.

    @abstractmethod
    def _send_seal(self, seal: Seal) -> None:
        """Send it behind the grant's data, now or when the connection takes it."""

    @abstractmethod
    def _seals_waiting(self) -> int:
        """Seals that the connection has not taken."""

    def _mark(self, grant: GrantId) -> Mark | None:
        """How far the link has come; None: nothing of this grant is on its way that others than this process move."""
        del grant
        return None

    def _stopped(self) -> None:  # noqa: B027 - the stop of the queue has woken its threads, which may be enough
        """An orderly end has begun: the queue is stopped, and what is on its way may arrive."""

    def _cut_off(self) -> None:
        """Nothing is waited for any more: not orderly from the start, or no longer. May come again."""
        self._cut = True

    # Abandoned grants: a slow link may send what it has begun, and one that makes no progress is found out after one to
    # two times `drain_ms_max`.

    def _look_later(self, grant: GrantId, mark: Mark | None) -> None:
        if mark is not None:
            timer = self._loop.call_later(self._limits.drain_ms_max / 1000, self._look, grant, mark)
            self._drain_timers[grant] = timer

    def _look(self, grant: GrantId, before: Mark) -> None:
        del self._drain_timers[grant]
        mark = self._mark(grant)
        if mark == before:
            self._end(f"writes of an abandoned grant have not moved for {self._limits.drain_ms_max} ms")
        else:
            self._look_later(grant, mark)

    # For the transport to call.

    @property
    def _ending(self) -> bool:
        return self._reason is not None

    def _end(self, reason: str, *, orderly: bool = False) -> None:
        """Begin the end, once; it goes on up to `_finish`. `orderly`: what is on its way may arrive, for a while."""
        if self._ending:
            return
        self._reason = reason
        for timer in self._drain_timers.values():
            timer.cancel()
        self._drain_timers.clear()
        self._cut = not orderly
        if orderly:
            self._closing_timer = self._loop.call_later(self._limits.bye_ms_max / 1000, self._cut_off)
        self._queue.stop()
        if orderly:
            self._stopped()
        else:
            self._cut_off()

    def _handle(self, message: wire.Message) -> None:
        """From the receiver."""
        match message:
            case wire.Fence(epoch=epoch):
                if epoch >= self._epoch and not self._ending:
                    self._by_fence = True
                    self._end(f"fenced by the receiver up to epoch {epoch}", orderly=self.ends_in_order)
            case wire.Refused(reason=reason):
                self._end(f"refused by the receiver: {reason.name}", orderly=self.ends_in_order)
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _finish_soon(self) -> None:
        """Behind the completions, which the queue has just handed to the loop."""
        self._loop.call_soon(self._finish)

    def _finish(self) -> None:
        """Nothing of the link is left. Once."""
        assert self._reason is not None
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._over.set_result(None)
        if not self._closed_by_caller:
            self._events.link_lost(self._pair, self._reason)


class ChannelLink(BaseWriterLink):
    """A link with one control channel beside its data: every transport's but tcp's."""

    codec: ClassVar[wire.Codec]

    def __init__(self, channel: wire.WriterChannel, parts: LinkParts, limits: LinkLimits) -> None:
        """Takes the welcomed connection over. The subclass has the loop call `_read`, once all of it is there."""
        super().__init__(parts, limits)
        self._sock, self._inbox = channel.sock, wire.Inbox(self.codec)
        self._outbox: deque[bytes] = deque()
        """Messages that wait for the socket to take them."""

    def _send_message(self, message: wire.Message) -> None:
        self._outbox.append(self.codec.encode(message))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                sent = self._sock.send(self._outbox[0])
                packet = self._outbox.popleft()
                if sent < len(packet):
                    self._outbox.appendleft(packet[sent:])
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
        except OSError as error:
            self._drop_unsent()
            self._connection_lost(f"connection lost: {error}")
        else:
            self._loop.remove_writer(self._sock)
            self._all_sent()

    def _drop_unsent(self) -> None:
        """Before the socket is closed."""
        self._outbox.clear()
        self._loop.remove_writer(self._sock)

    def _all_sent(self) -> None:
        """No message waits for the socket."""

    def _connection_lost(self, reason: str) -> None:
        """The receiver reads nothing more: nothing is waited for, in an orderly end neither."""
        self._loop.remove_reader(self._sock)
        self._end(reason)
        self._cut_off()

    def _read(self) -> None:
        try:
            data = self._sock.recv(wire.RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._connection_lost(f"connection lost: {error}")
            return
        if not data:
            self._connection_lost("the receiver closed the connection or died")
            return
        try:
            for message in self._inbox.feed(data):
                self._handle(message)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")


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
        parts: LinkParts,
        limits: ChainLimits,
        *,
        src_nbytes: int,
        dst_nbytes: int,
        qps: int,
        send_wrs_max: int,
        seals_max: int,
    ) -> None:
        """At most `seals_max` seals are on their way. Starts the thread. Raises ConnectError: there can be no more."""
        super().__init__(channel, parts, limits)
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
        self._drop_unsent()
        close_politely(self._sock)
