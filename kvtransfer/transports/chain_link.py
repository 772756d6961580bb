"""What the writers' links of rdma and ucx have in common: a queue of chains that a thread of the link's own posts,
seals of which only so many may be on their way, and a connection for words."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from baton.ids import GrantId, Pair
from kvtransfer.transport import DataEndpoint, Seal, WriterEvents
from kvtransfer.transports.control_channel import (
    RECV_BYTES,
    Codec,
    Inbox,
    MalformedMessage,
    Message,
    Outbox,
    close_politely,
)
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.post_queue import OpsPart, PostQueue
from kvtransfer.transports.rdma_queue import ChainLanes, QueueLimits
from kvtransfer.transports.writer_link import BaseWriterLink, Mark


class ChainLink(BaseWriterLink):
    """A writer's link (see `kvtransfer.transport.WriterLink`) but for its thread, its words, and what it posts with.

    `post` may be called from any thread, the rest from the loop's. A subclass starts the thread, which posts what the
    queue has until `_cut`, or until nothing is left while `_ending`; it reads the socket, and calls `_finish`.
    """

    _queue: PostQueue[OpsPart, None]

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
        super().__init__(endpoint=endpoint, pair=pair, events=events, loop=loop, limits=limits)
        self._sock, self._codec, self._inbox = sock, codec, Inbox(codec)
        self._seals_max = seals_max
        self._wake = wake
        self._lanes = ChainLanes(
            limits=queue,
            src_nbytes=src_nbytes,
            dst_nbytes=dst_nbytes,
            loop=loop,
            completed=events.writes_completed,
            in_doubt=events.writes_in_doubt,
            wake=wake,
        )
        self._queue = self._lanes.queue
        self._outbox = Outbox(sock, loop, self._connection_lost)
        self._seals_held: deque[Seal] = deque()
        self._seals_out: set[int] = set()
        self._seals_made = 0

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            **super().describe(),
            "requests": self._lanes.requests,
            "chains": self._lanes.chains,
        }

    # The subclass's own.

    @abstractmethod
    def _send_numbered(self, number: int, seal: Seal) -> None:
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
        if self._seals_held and not self._ending:
            self._send_next(self._seals_held.popleft())
        if self._ending:
            self._wake()

    def _send_seal(self, seal: Seal) -> None:
        if len(self._seals_out) < self._seals_max:
            self._send_next(seal)
        else:
            self._seals_held.append(seal)

    def _seals_waiting(self) -> int:
        return len(self._seals_held)

    def _mark(self, grant: GrantId) -> Mark | None:
        return self._queue.mark(grant)

    def _stopped(self) -> None:
        """The stop of the queue has woken the thread."""

    def _cut_off(self) -> None:
        super()._cut_off()
        self._wake()

    def _stop_watching(self) -> None:
        """The thread has left: no timer and no word any more. The socket is still open."""
        if self._closing_timer is not None:
            self._closing_timer.cancel()
        self._loop.remove_reader(self._sock)

    def _send_message(self, message: Message) -> None:
        self._outbox.send(self._codec.encode(message))

    def _hang_up(self, last: Message | None) -> None:
        """Close the connection, behind the last message, if there is one and the connection takes it."""
        if last is not None:
            self._send_message(last)
        self._outbox.close()
        close_politely(self._sock)

    def _send_next(self, seal: Seal) -> None:
        self._seals_made += 1
        self._seals_out.add(self._seals_made)
        self._send_numbered(self._seals_made, seal)
