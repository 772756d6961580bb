"""A writer's link, but for what its transport has for itself: its epoch, its posts and seals, and its one end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, ClassVar

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.device.event_poster import EventPoster
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.post_queue import PostQueue, TooManyAbandonedGrants

Mark = object
"""Of how far a link has come: an equal one means that nothing has moved since."""


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

    def __init__(
        self,
        *,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        limits: LinkLimits,
    ) -> None:
        self._address, self._epoch = endpoint.address, endpoint.epoch
        self._pair, self._events = pair, events
        self._loop = loop
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
        self._over = loop.create_future()

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
        try:
            self._queue.abandon(grant)
        except TooManyAbandonedGrants as error:
            self._end(str(error))
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

    def __init__(
        self,
        channel: wire.WriterChannel,
        *,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        limits: LinkLimits,
    ) -> None:
        """Takes the welcomed connection over. The subclass has the loop call `_read`, once all of it is there."""
        super().__init__(endpoint=endpoint, pair=pair, events=events, loop=loop, limits=limits)
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
