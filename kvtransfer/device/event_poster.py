"""Posting what a device is still computing, over a transport that no stream can order: when it has been computed.

An RDMA card reads memory when it is told to, whatever a stream has queued. So a post waits for an event, and a thread
polls for that: neither the compute stream nor the engine waits for a transfer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, Self

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from baton.tasks import call_loop
from kvtransfer.device.driver import DeviceError
from kvtransfer.device.streams import POLL_INTERVAL_S, DeviceEvent, DeviceStreams
from kvtransfer.transport import Seal, WriteOps, WriterEvents, WriterLink, check_ops

log = get_log("device")


class EventPoster:
    """One thread that waits for points in a device's streams. A node has one for all its links, and closes it last."""

    def __init__(self, *, streams: DeviceStreams, name: str, poll_interval_s: float = POLL_INTERVAL_S) -> None:
        """Starts the thread."""
        self._streams = streams
        self._poll_interval_s = poll_interval_s
        self._wake = threading.Condition()
        self._waiting: deque[tuple[DeviceEvent, Callable[[bool], None]]] = deque()
        self._stopped = False
        self._thread = threading.Thread(target=self._poll, name=name, daemon=True)
        self._thread.start()

    def after(self, then: Callable[[bool], None]) -> None:
        """Call `then` once the device has passed what the calling thread's stream has queued so far. Any thread;
        returns at once, and how many wait is for the caller to bound.

        In the order of these calls, on the poster's thread: with True; with False, at any place in that order and on
        any thread, if the device has failed or the poster is closed. `then` neither waits nor raises.

        Raises DeviceError.
        """
        event = self._streams.current().record()
        with self._wake:
            if not self._stopped:
                self._waiting.append((event, then))
                self._wake.notify()
                return
        then(False)

    def close(self) -> None:
        """Wait for nothing any more; the thread has ended when this returns. Idempotent."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join()

    def _poll(self) -> None:
        try:
            while (oldest := self._oldest()) is not None:
                event, then = oldest
                while not event.done():
                    with self._wake:
                        if self._stopped:
                            return
                        self._wake.wait(self._poll_interval_s)
                with self._wake:
                    self._waiting.popleft()
                then(True)
        except DeviceError as error:
            log.error("the device failed: nothing that it computes is sent any more", reason=str(error))
        finally:
            with self._wake:
                self._stopped = True
                left, self._waiting = self._waiting, deque()
            for _, then in left:
                then(False)

    def _oldest(self) -> tuple[DeviceEvent, Callable[[bool], None]] | None:
        with self._wake:
            while not self._waiting and not self._stopped:
                self._wake.wait()
            return None if self._stopped else self._waiting[0]


class MeasuredLink(WriterLink, Protocol):
    """A link that tells how large the receiver's region is."""

    @property
    def region_nbytes(self) -> int: ...

    def describe(self) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Post:
    grant: GrantId
    ops: WriteOps


class EventPostedLink:
    """A link whose posts reach the one below when the device has computed their sources. See `WriterLink`.

    At the end of the link below, and for an abandoned grant, what waits here is posted there at once: it completes
    uncopied.
    """

    def __init__(
        self, *, events: WriterEvents, src_nbytes: int, poster: EventPoster, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Use `over`."""
        self._link: MeasuredLink
        self._events = events
        self._src_nbytes = src_nbytes
        self._poster = poster
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: deque[_Post] = deque()

    @classmethod
    async def over(
        cls,
        connect: Callable[[WriterEvents], Awaitable[MeasuredLink]],
        events: WriterEvents,
        *,
        src_nbytes: int,
        poster: EventPoster,
        loop: asyncio.AbstractEventLoop,
    ) -> Self:
        """Make the link below by `connect`, and take it over; raises what that raises.

        `src_nbytes` are the source region's. The poster is the caller's and outlives this.
        """
        made = cls(events=events, src_nbytes=src_nbytes, poster=poster, loop=loop)
        made._link = await connect(made)
        return made

    @property
    def epoch(self) -> Epoch:
        return self._link.epoch

    @property
    def fenced(self) -> bool:
        """See `WriterLink.fenced`."""
        return self._link.fenced

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """See `WriterLink.post`: behind what the calling thread's stream has queued.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
            DeviceError: the device has failed; neither. Not raised for a batch that has gone below for its grant's, or
                the link's, end.
        """
        check_ops(ops, self._src_nbytes, self._link.region_nbytes)
        post = _Post(grant=grant, ops=ops)
        with self._lock:
            self._waiting.append(post)
        try:
            self._poster.after(lambda computed: self._computed(post, computed))
        except BaseException as error:
            # An abandon or the end of the link may have posted it below meanwhile: then it was taken, and completes.
            if self._take_back(post) or not isinstance(error, DeviceError):
                raise

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`."""
        self._link.seal(seal)

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`."""
        self._link.abandon(grant)
        self._post_waiting(lambda post: post.grant == grant)

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this grant, and has seen its completions."""
        self._link.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`."""
        await self._link.close()
        self._post_waiting(lambda _: True)
        await asyncio.sleep(0)  # the loop has their completions by now

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        with self._lock:
            return {**self._link.describe(), "batches_uncomputed": len(self._waiting)}

    # What the link below tells (kvtransfer.transport.WriterEvents).

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        self._events.writes_completed(grant, writes, bytes_written, copied)

    def writes_in_doubt(self, grant: GrantId) -> None:
        self._events.writes_in_doubt(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        """Told behind the completions of what still waits here."""
        self._post_waiting(lambda _: True)
        self._loop.call_soon(self._events.link_lost, pair, reason)

    def _take_back(self, post: _Post) -> bool:
        """False: it does not wait here any more."""
        with self._lock:
            waits = post in self._waiting
            if waits:
                self._waiting.remove(post)
            return waits

    def _computed(self, post: _Post, computed: bool) -> None:
        """On the poster's thread, or, if not computed, on any."""
        if computed:
            self._post_waiting(lambda waiting: waiting is post)
        else:
            call_loop(self._loop, self.abandon, post.grant)

    def _post_waiting(self, which: Callable[[_Post], bool]) -> None:
        """With the lock held throughout: a later post of the same grant comes after."""
        with self._lock:
            kept: deque[_Post] = deque()
            for post in self._waiting:
                if which(post):
                    self._link.post(post.grant, post.ops)
                else:
                    kept.append(post)
            self._waiting = kept
