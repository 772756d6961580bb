"""What the writers' links of rdma and ucx have in common: a queue of chains that a thread of the link's own posts,
seals of which only so many may be on their way, and a connection for words."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from baton.ids import GrantId, Pair
from kvtransfer.transport import DataEndpoint, Seal, WriteOps, WriterEvents
from kvtransfer.transports.base_link import BaseLink
from kvtransfer.transports.control_channel import (
    RECV_BYTES,
    Codec,
    Inbox,
    MalformedMessage,
    Message,
    Outbox,
    close_politely,
)
from kvtransfer.transports.drains import Drains
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.rdma_queue import ChainQueue, QueueLimits


class ChainLink(BaseLink):
    """A writer's link (see `kvtransfer.transport.WriterLink`) but for its thread, its words, and what it posts with.

    `post` may be called from any thread, the rest from the loop's. A subclass starts the thread, which posts what the
    queue has until `_cut`, or until nothing is left while `_draining`; it reads the socket, and finishes `_ending`.
    """

    _queue: ChainQueue
    _drains: Drains

    def __init__(
        self,
        *,
        sock: socket.socket,
        codec: Codec,
        src_nbytes: int,
        dst_nbytes: int,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        limits: LinkLimits,
        queue: QueueLimits,
        seals_max: int,
        wake: Callable[[], None],
    ) -> None:
        """At most `seals_max` seals are on their way. `wake` is for the thread, and called from any."""
        super().__init__(endpoint=endpoint, pair=pair, events=events, loop=loop)
        self._sock, self._codec, self._inbox = sock, codec, Inbox(codec)
        self._limits, self._seals_max = limits, seals_max
        self._wake = wake
        self._queue = ChainQueue(
            limits=queue,
            src_nbytes=src_nbytes,
            dst_nbytes=dst_nbytes,
            loop=loop,
            completed=events.writes_completed,
            adrift=events.writes_in_doubt,
            wake=wake,
        )
        self._drains = Drains(loop=loop, drain_ms_max=limits.drain_ms_max, mark=self._queue.mark, stuck=self._end)
        self._outbox = Outbox(sock, loop, self._connection_lost)
        self._seals_waiting: deque[Seal] = deque()
        self._seals_out: set[int] = set()
        self._seals_made = 0
        self._closing_timer: asyncio.TimerHandle | None = None
        self._draining = False
        self._cut = False

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
        if len(self._seals_out) < self._seals_max:
            self._seal_next(seal)
        elif len(self._seals_waiting) < self._limits.seals_waiting_max:
            self._seals_waiting.append(seal)
        else:
            self._end(f"the receiver takes no seals: {len(self._seals_waiting)} wait")

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        progress = self._queue.progress
        return {
            **super().describe(),
            "writes": progress.writes_copied,
            "bytes": progress.bytes_copied,
            "requests": progress.requests,
            "chains": progress.chains,
            "batches_abandoned": progress.batches_abandoned,
            "seals": progress.seals,
            "seals_waiting": len(self._seals_waiting),
        }

    # The subclass's own.

    @abstractmethod
    def _send_seal(self, number: int, seal: Seal) -> None:
        """Queue its parts, and send its message."""

    @abstractmethod
    def _handle(self, message: Message) -> None:
        """From the receiver."""

    def _connection_lost(self, reason: str) -> None:
        """Nobody hears us any more: nothing is waited for, in an orderly end neither."""
        self._loop.remove_reader(self._sock)
        self._end(reason)
        self._cut_off()

    # For the subclass to call.

    def _read(self) -> None:
        try:
            data = self._sock.recv(RECV_BYTES)
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
        except MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")

    def _sealed(self, number: int) -> None:
        """All of a seal has come; one that waits may follow."""
        self._seals_out.discard(number)
        if self._seals_waiting and not self._ending.begun:
            self._seal_next(self._seals_waiting.popleft())
        if self._draining:
            self._wake()

    def _end(self, reason: str, *, orderly: bool = False) -> None:
        """See `BaseLink`: it goes on when the thread has left."""
        if not self._ending.begin(reason):
            return
        self._drains.close()
        self._draining = True
        if orderly:
            self._closing_timer = self._loop.call_later(self._limits.bye_ms_max / 1000, self._cut_off)
        self._queue.stop()
        if not orderly:
            self._cut_off()

    def _cut_off(self) -> None:
        """Nothing is waited for any more."""
        self._cut = True
        self._wake()

    def _stop_watching(self) -> None:
        """The thread has left: no timer and no word any more. The socket is still open."""
        self._drains.close()
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._loop.remove_reader(self._sock)

    def _send(self, message: Message) -> None:
        self._outbox.send(self._codec.encode(message))

    def _hang_up(self, last: Message | None) -> None:
        """Close the connection, behind the last message, if there is one and the connection takes it."""
        if last is not None:
            self._send(last)
        self._outbox.close()
        close_politely(self._sock)

    def _seal_next(self, seal: Seal) -> None:
        self._seals_made += 1
        self._seals_out.add(self._seals_made)
        self._send_seal(self._seals_made, seal)
