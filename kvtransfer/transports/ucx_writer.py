"""The writing side of ucx: writes handed to NIXL by a thread of the link's own, which looks for their completion.

A batch is complete when UCX has flushed all its writes, or when the link is over and its agent is destroyed: then
nothing reads the source any more (DESIGN I1). NIXL offers nothing to sleep on, hence the looking, with longer and
longer pauses.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import ClassVar

import numpy as np

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import ucx_wire as wire
from kvtransfer.transports.link_end import LinkEnd
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import TooManyAbandonedGrants
from kvtransfer.transports.rdma_queue import ChainQueue, QueueLimits, SealPart
from kvtransfer.transports.tcp_socket import RECV_BYTES
from kvtransfer.transports.ucx_connect import (
    Connected,
    UcxConnectError,
    UcxWriterConfig,
    connect,
    take_leave,
)
from kvtransfer.transports.ucx_nixl import UcxFailed, ucx_transports

log = get_log("ucx")

SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""


class UcxWriterLink:
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    `post` may be called from any thread, the rest from the loop's. The end comes once: from `close` or a FENCE, which
    let what is on its way arrive, or from EOF, a failed write or a deadline, which destroy the agent at once.
    `link_lost` is called last, after every completion, and not for an end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.UCX

    def __init__(
        self,
        *,
        connected: Connected,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: UcxWriterConfig,
    ) -> None:
        """Takes over what is connected. Use `connect`."""
        self._sock, self._agent = connected.sock, connected.agent
        self._address, self._epoch = endpoint.address, endpoint.epoch
        self._loop, self._config = loop, config
        self._wake = threading.Event()
        self._queue = ChainQueue(
            limits=QueueLimits(
                qps=1,
                send_wrs_max=1 << 30,
                chain_wrs_max=config.transfer_writes_max,
                chain_bytes_max=config.transfer_bytes_max,
                wr_bytes_max=1 << 30,
                on_the_way_bytes_max=config.on_the_way_bytes_max,
                abandoned_grants_max=config.abandoned_grants_max,
            ),
            src_nbytes=self._agent.nbytes,
            dst_nbytes=connected.region_nbytes,
            loop=loop,
            completed=events.writes_completed,
            adrift=events.writes_adrift,
            wake=self._wake.set,
        )
        self._seals_waiting: deque[Seal] = deque()
        self._seals_out: set[int] = set()
        self._seals_made = 0
        self._inbox = wire.Inbox()
        self._outbox = bytearray()
        self._ending = LinkEnd(pair=pair, events=events, loop=loop)
        self._timers: dict[GrantId | None, asyncio.TimerHandle] = {}
        self._draining = False
        self._cut = False
        self._thread = threading.Thread(target=self._post_all, name=f"ucx-post-{pair.receiver:x}", daemon=True)
        self._thread.start()
        loop.add_reader(self._sock, self._read)

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: UcxWriterConfig | None = None,
    ) -> UcxWriterLink:
        """Connect, prove the pair's secret, register the source for this link, which lets go of it at its end.

        Raises:
            UcxConnectError: refused, unreachable, not the receiver, no NIXL, or not done within `connect_ms_max`.
        """
        config = config or UcxWriterConfig()
        connected = await connect(endpoint, pair, source_region_U8, loop, config)
        try:
            return cls(connected=connected, endpoint=endpoint, pair=pair, events=events, loop=loop, config=config)
        except RuntimeError as error:
            connected.agent.destroy()
            take_leave(connected.sock, wire.Bye(epoch=endpoint.epoch, drained=True))
            raise UcxConnectError(f"{endpoint.address}: no thread to post with: {error}") from error

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
        if len(self._seals_out) < self._config.seals_max:
            self._send_seal(seal)
        elif len(self._seals_waiting) < self._config.seals_waiting_max:
            self._seals_waiting.append(seal)
        else:
            self._end(f"the receiver takes no seals: {len(self._seals_waiting)} wait")

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. What is on its way may arrive within `drain_ms_max`; then the link ends."""
        try:
            self._queue.abandon(grant)
        except TooManyAbandonedGrants as error:
            self._end(str(error))
            return
        if self._queue.uncompleted(grant) and grant not in self._timers and not self._ending.begun:
            self._timers[grant] = self._loop.call_later(self._config.drain_ms_max / 1000, self._drain_over, grant)

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this abandoned grant."""
        self._queue.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when the thread has ended and the agent is destroyed."""
        self._ending.ask()
        self._end("closed", orderly=True)
        await self._ending.wait()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        progress = self._queue.progress
        return {
            "transport": self.transport.value,
            "address": self._address,
            "ucx_transports": ucx_transports(self._config.tls),
            "epoch": self._epoch,
            "state": self._ending.reason or "open",
            "writes": progress.writes_copied,
            "bytes": progress.bytes_copied,
            "transfers": progress.chains,
            "batches_abandoned": progress.batches_abandoned,
            "seals": progress.seals,
            "seals_waiting": len(self._seals_waiting),
        }

    # Posting thread.

    def _post_all(self) -> None:
        failure, drained, destroyed = "the posting thread failed", False, False
        pause_us = self._config.poll_us_min
        try:
            while not self._cut and not (self._draining and self._queue.drained and not self._seals_out):
                self._wake.clear()
                moved = self._post_what_fits()
                for number in self._agent.completed():
                    self._queue.completed(number)
                    moved = True
                pause_us = self._config.poll_us_min if moved else min(2 * pause_us, self._config.poll_us_max)
                self._wake.wait(pause_us / 1e6 if self._queue.on_the_way else SLEEP_MS_MAX / 1000)
            failure, drained = "", self._queue.drained
        except UcxFailed as error:
            failure = str(error)
        finally:
            try:
                self._agent.destroy()
                destroyed = True
            finally:
                call_loop(self._loop, self._thread_left, failure, drained, destroyed)

    def _post_what_fits(self) -> bool:
        posted = False
        while not self._cut and (taken := self._queue.take()) is not None:
            posted = True
            if isinstance(taken, SealPart):
                self._agent.notify(taken.seal)
                self._queue.completed(taken.number)
            else:
                self._agent.post(taken.ops, taken.number)
        return posted

    # Control thread.

    def _drain_over(self, grant: GrantId) -> None:
        del self._timers[grant]
        if self._queue.uncompleted(grant):
            self._end(f"writes of an abandoned grant were not taken within {self._config.drain_ms_max} ms")

    def _send_seal(self, seal: Seal) -> None:
        self._seals_made += 1
        self._seals_out.add(self._seals_made)
        self._send(wire.SealSent(number=self._seals_made, seal=seal))
        self._queue.seal(self._seals_made, seal.grant)

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECV_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"connection lost: {error}")
            return
        if not data:
            self._lose("the receiver closed the connection or died")
            return
        try:
            for message in self._inbox.feed(data):
                self._handle(message)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Sealed(number=number) if number in self._seals_out:
                self._seals_out.discard(number)
                if self._seals_waiting and not self._ending.begun:
                    self._send_seal(self._seals_waiting.popleft())
                if self._draining:
                    self._wake.set()
            case wire.Fence(epoch=epoch):
                self._ending.by_fence |= not self._ending.begun
                # The receiver may need our word that all has arrived; where it does not it closes the connection.
                self._seals_out.clear()
                self._end(f"fenced by the receiver up to epoch {epoch}", orderly=True)
            case wire.Refused(reason=reason):
                self._seals_out.clear()
                self._end(f"refused by the receiver: {reason.name}", orderly=True)
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
            self._lose(f"connection lost: {error}")
            return
        self._loop.remove_writer(self._sock)

    def _lose(self, reason: str) -> None:
        """Nobody hears us any more: nothing is waited for, in an orderly end neither."""
        self._loop.remove_reader(self._sock)
        self._end(reason)
        self._cut_off()

    def _end(self, reason: str, *, orderly: bool = False) -> None:
        """Begin the end, once. It goes on in `_thread_left`."""
        if not self._ending.begin(reason):
            return
        self._draining = True
        if orderly:
            self._timers[None] = self._loop.call_later(self._config.bye_ms_max / 1000, self._cut_off)
        self._queue.stop()
        if not orderly:
            self._cut_off()

    def _cut_off(self) -> None:
        self._cut = True
        self._wake.set()

    def _thread_left(self, failure: str, drained: bool, destroyed: bool) -> None:
        if failure and not self._ending.begun:
            # The receiver's word, if it left one, says more than the error of a write.
            self._read()
            self._end(failure)
        self._thread.join()
        for timer in self._timers.values():
            timer.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        if not destroyed:
            # A bug of ours, raised in the thread. Its worker may still read the source: no completion, and no BYE.
            log.error("ucx link keeps its source blocks", peer=self._address)
            self._sock.close()
            self._ending.finish()
            return
        self._queue.lose_all()
        take_leave(self._sock, wire.Bye(epoch=self._epoch, drained=drained))
        # Behind the completions, which the queue has just handed to the loop.
        self._loop.call_soon(self._ending.finish)


__all__ = ["UcxConnectError", "UcxWriterConfig", "UcxWriterLink"]
