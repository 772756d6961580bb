"""The writing side of rdma: RDMA WRITEs from the registered source region, posted by a thread of the link's own.

The thread posts chains as the queue pairs have room and takes their completions, in native calls; the control thread
has the connection for words. A batch is complete when the device has completed all its chains, or when the link is over
and its queue pairs are destroyed: then the device reads nothing of the source any more (DESIGN I1). That says nothing
of what had left it: such writes are `writes_adrift`, and the receiver fences before it reuses their blocks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from typing import ClassVar

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import rdma_wire as wire
from kvtransfer.transports.link_end import LinkEnd
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import TooManyAbandonedGrants
from kvtransfer.transports.rdma_connect import (
    Connected,
    RdmaConnectError,
    RdmaWriterConfig,
    connect,
    take_leave,
)
from kvtransfer.transports.rdma_device import QueuePairFailed
from kvtransfer.transports.rdma_memory import Hold, RdmaMemory
from kvtransfer.transports.rdma_poster import DeviceBroken, Poster
from kvtransfer.transports.rdma_queue import ChainQueue, QueueLimits, SealPart
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.tcp_socket import RECV_BYTES

log = get_log("rdma")

SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""
DESTROY_RETRY_MS = 1000
DESTROY_TRIES_MAX = 3
"""Once the link is to be closed; before, it is tried for as long as it takes."""


class Waker:
    """A descriptor that a thread sleeps on; any number of calls wake it once."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._woken = False

    def wake(self) -> None:
        """From any thread."""
        with self._lock:
            if not self._woken:
                self._woken = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """The thread is awake: calls from now on wake it again."""
        with self._lock:
            if self._woken:
                self._woken = False
                os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class RdmaWriterLink:
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    `post` may be called from any thread, the rest from the loop's. The end comes once: from `close`, which lets what is
    on its way arrive, or from a FENCE, EOF, an error of a queue pair or the loss of the device, which destroys the
    queue pairs. `link_lost` is called last, after every completion, and not for an end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.RDMA

    def __init__(
        self,
        *,
        connected: Connected,
        hold: Hold,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: RdmaWriterConfig,
    ) -> None:
        """Takes over what is connected, and the hold. Use `connect`."""
        device = hold.device
        self._sock, self._qps = connected.sock, connected.qps
        self._hold = hold
        self._address, self._epoch = endpoint.address, endpoint.epoch
        self.region_nbytes = connected.region_nbytes
        """Of the receiver's region."""
        self._loop, self._config = loop, config
        self._poster: Poster = self._qps.poster(dst_base=connected.region.base, rkey=connected.region.rkey)
        self._waker = Waker()
        self._queue = ChainQueue(
            limits=QueueLimits(
                qps=len(self._qps.ends.qps),
                send_wrs_max=device.send_wrs_max,
                chain_wrs_max=min(config.chain_wrs_max, self._poster.chain_wrs_max),
                chain_bytes_max=config.chain_bytes_max,
                wr_bytes_max=config.wr_bytes_max,
                on_the_way_bytes_max=config.on_the_way_bytes_max,
                abandoned_grants_max=config.abandoned_grants_max,
            ),
            src_nbytes=device.nbytes,
            dst_nbytes=connected.region_nbytes,
            loop=loop,
            completed=events.writes_completed,
            adrift=events.writes_adrift,
            wake=self._waker.wake,
        )
        self._seals_max = min(self._qps.ends.seals_max, connected.peer.seals_max)
        self._seals_waiting: deque[Seal] = deque()
        self._seals_out = 0
        self._seals_made = 0
        self._inbox = wire.Inbox()
        self._outbox = bytearray()
        self._ending = LinkEnd(pair=pair, events=events, loop=loop)
        self._closing_timer: asyncio.TimerHandle | None = None
        self._tries_left: int | None = None
        self._draining = False
        self._cut = False
        self._thread = threading.Thread(target=self._post_all, name=f"rdma-post-{pair.receiver:x}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._waker.close()
            raise
        loop.add_reader(self._sock, self._read)

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        memory: RdmaMemory,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: RdmaWriterConfig | None = None,
    ) -> RdmaWriterLink:
        """Connect the queue pairs and prove the pair's secret. `memory` has the source region, and outlives the link.

        Raises:
            RdmaConnectError: refused, unreachable, not the receiver, no device, or not done within `connect_ms_max`.
        """
        config = config or RdmaWriterConfig()
        try:
            hold = memory.acquire()
        except RdmaUnavailable as error:
            raise RdmaConnectError(str(error)) from error
        try:
            async with asyncio.timeout(config.connect_ms_max / 1000):
                connected = await connect(endpoint, pair, hold.device, loop, config)
        except BaseException as error:
            hold.release()
            if isinstance(error, TimeoutError):
                raise RdmaConnectError(f"{endpoint.address}: no link within {config.connect_ms_max} ms") from error
            raise
        try:
            link = cls(
                connected=connected,
                hold=hold,
                endpoint=endpoint,
                pair=pair,
                events=events,
                loop=loop,
                config=config,
            )
        except BaseException as error:
            connected.qps.destroy()
            take_leave(connected.sock, endpoint)
            hold.release()
            if isinstance(error, (OSError, RuntimeError)):
                raise RdmaConnectError(f"{endpoint.address}: no thread to post with: {error}") from error
            raise
        hold.on_lost(link._device_lost)
        return link

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def fenced(self) -> bool:
        """See `WriterLink.fenced`."""
        return self._ending.by_fence

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """See `WriterLink.post`. Figures of a completion are those of the batch as posted, copied or not.

        Raises:
            WriteOutOfBounds: an op leaves one of the regions; the batch is not taken.
        """
        self._queue.post(grant, ops)

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`. Dropped when the link is ending: `link_lost` tells."""
        assert seal.epoch == self._epoch, (seal.epoch, self._epoch)
        if self._ending.begun:
            return
        if self._seals_out < self._seals_max:
            self._send_seal(seal)
        elif len(self._seals_waiting) < self._config.seals_waiting_max:
            self._seals_waiting.append(seal)
        else:
            self._end(f"the receiver takes no seals: {len(self._seals_waiting)} wait")

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. What is on its way completes when the device has let go of it."""
        try:
            self._queue.abandon(grant)
        except TooManyAbandonedGrants as error:
            self._end(str(error))

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this abandoned grant."""
        self._queue.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when the thread has ended, the queue pairs are destroyed, all is done.

        Queue pairs that cannot be destroyed are tried again a few times, then logged and left to the process's end;
        what was posted on them never completes, for the device may still read it.
        """
        if self._tries_left is None:
            self._tries_left = DESTROY_TRIES_MAX
        self._ending.ask()
        self._end("closed", orderly=True)
        await self._ending.wait()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        progress = self._queue.progress
        return {
            "transport": self.transport.value,
            "address": self._address,
            "device": self._hold.device.port.device,
            "posts_by": self._poster.name,
            "epoch": self._epoch,
            "state": self._ending.reason or "open",
            "queue_pairs": len(self._qps.ends.qps),
            "writes": progress.writes_copied,
            "bytes": progress.bytes_copied,
            "requests": progress.requests,
            "doorbells": progress.chains,
            "batches_abandoned": progress.batches_abandoned,
            "seals": progress.seals,
            "seals_waiting": len(self._seals_waiting),
        }

    # Posting thread.

    def _post_all(self) -> None:
        failure = "the posting thread failed"
        spin_us = 0
        try:
            while not self._cut and not (self._draining and self._queue.drained):
                self._post_what_fits()
                busy = self._queue.on_the_way
                completions, waited_us = self._poster.wait(self._waker.fd, spin_us if busy else 0, SLEEP_MS_MAX)
                self._waker.clear()
                for number, status in completions:
                    if status:
                        raise QueuePairFailed(f"a write completed with status {status}")
                    self._queue.completed(number)
                # Polling pays only where the last wait was so short that it would have caught it.
                spin_us = self._config.spin_us_max if waited_us <= self._config.spin_us_max else 0
            failure = ""
        except (DeviceBroken, QueuePairFailed) as error:
            failure = str(error)
        finally:
            call_loop(self._loop, self._thread_left, failure)

    def _post_what_fits(self) -> None:
        while not self._cut and (taken := self._queue.take()) is not None:
            if isinstance(taken, SealPart):
                self._poster.post_seal(taken.qp, taken.seal, taken.number)
            else:
                ops = taken.ops
                self._poster.post_writes(taken.qp, ops.src, ops.dst, ops.nbytes, taken.number)

    # Control thread.

    def _device_lost(self, reason: str) -> None:
        self._end(f"RDMA device lost: {reason}")

    def _send_seal(self, seal: Seal) -> None:
        self._seals_made += 1
        self._seals_out += 1
        mask = self._queue.seal(self._seals_made, seal.grant)
        self._send(wire.SealSent(number=self._seals_made, seal=seal, qps_mask=mask))

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"connection lost: {error}")
            return
        if not data:
            self._end("the receiver closed the connection or died")
            return
        try:
            for message in self._inbox.feed(data):
                self._handle(message)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Sealed():
                self._seals_out -= 1
                if self._seals_waiting and not self._ending.begun:
                    self._send_seal(self._seals_waiting.popleft())
            case wire.Fence(epoch=epoch):
                self._ending.by_fence |= not self._ending.begun
                self._end(f"fenced by the receiver up to epoch {epoch}")
            case wire.Refused(reason=reason):
                self._end(f"refused by the receiver: {reason.name}")
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _send(self, message: wire.Message) -> None:
        self._outbox += wire.encode(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._sock.send(self._outbox)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as error:
            self._outbox.clear()
            self._loop.remove_writer(self._sock)
            self._end(f"connection lost: {error}")
            return
        self._loop.remove_writer(self._sock)

    def _end(self, reason: str, *, orderly: bool = False) -> None:
        """Begin the end, once. It goes on in `_thread_left`."""
        if not self._ending.begin(reason):
            return
        self._draining = True
        if orderly:
            self._closing_timer = self._loop.call_later(self._config.bye_ms_max / 1000, self._cut_off)
        self._queue.stop()
        if not orderly:
            self._cut_off()

    def _cut_off(self) -> None:
        """Nothing is waited for any more."""
        self._cut = True
        self._waker.wake()

    def _thread_left(self, failure: str) -> None:
        if failure and not self._ending.begun:
            # The receiver's word, if it left one, says more than the error of a write.
            self._read()
            self._end(failure)
        self._thread.join()
        self._loop.remove_reader(self._sock)
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._destroy(say_bye=not failure and not self._cut)

    def _destroy(self, *, say_bye: bool) -> None:
        """Only when no queue pair is left has the device let go of the source: until then nothing completes."""
        try:
            self._qps.destroy()
        except QueuePairFailed as error:
            log.error("RDMA link keeps its source blocks", peer=self._address, reason=str(error))
            if self._tries_left is not None:
                if not self._tries_left:
                    self._leave_behind()
                    return
                self._tries_left -= 1
            self._loop.call_later(DESTROY_RETRY_MS / 1000, lambda: self._destroy(say_bye=say_bye))
            return
        self._queue.lose_all()
        if say_bye:
            self._send(wire.Bye(epoch=self._epoch))
        self._hold.release()
        self._let_go()

    def _leave_behind(self) -> None:
        log.error(
            "queue pairs are left to the end of the process: they cannot be destroyed",
            peer=self._address,
            tries=DESTROY_TRIES_MAX,
        )
        self._hold.leave_behind()
        self._let_go()

    def _let_go(self) -> None:
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._waker.close()
        # Behind the completions, which the queue has just handed to the loop.
        self._loop.call_soon(self._ending.finish)


__all__ = ["RdmaConnectError", "RdmaWriterConfig", "RdmaWriterLink"]
