"""Copies of blocks between a region on a device and pinned host memory, on a side stream of the device.

What `host_tier.ThreadCopier` is where the region lies in host memory. The device copies; a thread of the copier's own
queues the copies and polls for their ends, so neither the control thread nor the engine's waits for anything.

A copy begins behind all that the control thread's stream, which is the one that computes, had been given when it was
asked for. It has ended when the thread has seen the device pass the event behind it, and only then is anybody told. So
what a copy out has read may be anybody's from then on, a writer's in another process too, whom no stream orders behind
ours; and what a copy back has written is read by steps that are launched later.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from baton.ids import BlockId
from baton.log import get_log
from cachestore.host_blocks import HostBlockId
from kvtransfer.device.driver import DeviceError, PinnedMemory
from kvtransfer.device.region import DeviceMemory
from kvtransfer.device.streams import POLL_INTERVAL_S, DeviceEvent, DeviceStreams
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import check_ops
from node.host_tier import BlockCopy, BlockPlaces
from node.opening import let_go

log = get_log("spill")

COPIES_IN_FLIGHT_MAX = 2
"""On the device at a time: one that it carries out, and the next. What waits here can still be dropped."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    copy: BlockCopy
    ready: DeviceEvent
    """What is to be copied has been computed, and what is to be written has been read."""
    tell: Callable[[BaseException | None], None]
    """On any thread."""


class StreamCopier:
    """A `BlockCopier`. Control thread only, but for its own."""

    def __init__(
        self,
        *,
        streams: DeviceStreams,
        places: BlockPlaces,
        device: DeviceMemory,
        host: PinnedMemory,
        name: str,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Starts the thread. Both memories are the caller's, and outlive this until `close`."""
        self._streams = streams
        self._places = places
        self._device: Any = device.memory
        self._host: Any = host.memory
        self._nbytes = (device.nbytes, host.array_U8.nbytes)
        self._poll_interval_s = poll_interval_s
        self._side = streams.side()
        self._wake = threading.Condition()
        self._waiting: deque[_Asked] = deque()
        self._flying: deque[tuple[DeviceEvent, _Asked]] = deque()
        """The thread's own."""
        self._closed = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=f"spill-{name}", daemon=True)
        self._thread.start()

    def rehearse(self) -> None:
        """Copy a block out and back, and wait: kernels are compiled now, and not when memory is short. The first block
        of either side; the one on the device is the same afterwards. Blocks; before the first `start`.

        Raises DeviceError.
        """
        out = BlockCopy(out=True, device=(BlockId(0),), host=(HostBlockId(0),))
        for copy in (out, replace(out, out=False)):
            ended = self._queue(copy, self._streams.current().record())
            while not ended.done():
                time.sleep(self._poll_interval_s)

    def start(self, copy: BlockCopy, done: Callable[[BaseException | None], None]) -> None:
        """See `BlockCopier.start`. The queue is bounded by the blocks of the tier: each is in one copy at most.

        `done` gets a DeviceError when the device has failed, or refuses a copy; every later copy's `done` gets it too.
        """
        loop = asyncio.get_running_loop()

        def tell(error: BaseException | None) -> None:
            if not self._closed:
                done(error)

        try:
            ready = self._streams.current().record()
        except DeviceError as error:
            loop.call_soon(tell, error)
            return
        asked = _Asked(copy=copy, ready=ready, tell=lambda error: call_loop(loop, tell, error))
        with self._wake:
            broken = self._broken
            if broken is None:
                self._waiting.append(asked)
                self._wake.notify()
        if broken is not None:
            asked.tell(broken)

    def close(self) -> None:
        """Wait for what is on the device, without a limit: it writes to both memories, and nothing else ends that.

        No `done` is called any more, and the memories may be given back. Idempotent.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._device = self._host = None

    # On the copier's thread.

    def _work(self) -> None:
        try:
            while (asked := self._next()) is not None or self._flying:
                if asked is not None:
                    self._launch(asked)
                else:
                    self._land()
        except Exception as error:
            log.exception("blocks cannot be copied to host memory or back any more")
            try:
                self._settle()
            finally:
                self._fail(error)

    def _next(self) -> _Asked | None:
        """What is to be queued on the device now, if there is anything; it stays in `_waiting`. Waits for work.

        None with nothing in flight: the copier is closed.
        """
        with self._wake:
            while not (self._waiting or self._flying or self._closed):
                self._wake.wait()
            if self._closed:
                self._waiting.clear()
            return self._waiting[0] if self._waiting and len(self._flying) < COPIES_IN_FLIGHT_MAX else None

    def _launch(self, asked: _Asked) -> None:
        ended = self._queue(asked.copy, asked.ready)
        with self._wake:
            self._waiting.popleft()
        self._flying.append((ended, asked))

    def _land(self) -> None:
        """Tell of the oldest copy on the device if it has ended; else wait for a moment."""
        ended, asked = self._flying[0]
        if ended.done():
            self._flying.popleft()
            asked.tell(None)
            return
        with self._wake:
            self._wake.wait(self._poll_interval_s)

    def _queue(self, copy: BlockCopy, ready: DeviceEvent) -> DeviceEvent:
        """-> the point behind it. Raises DeviceError; WriteOutOfBounds for a bug of ours."""
        src, dst = (self._device, self._host) if copy.out else (self._host, self._device)
        src_nbytes, dst_nbytes = self._nbytes if copy.out else self._nbytes[::-1]
        ops = self._places.ops(copy)
        check_ops(ops, src_nbytes, dst_nbytes)
        self._side.wait(ready)
        self._streams.copy(self._side, dst, src, ops)
        return self._side.record()

    def _settle(self) -> None:
        """Something went wrong with one copy: others may be on the device still. One that has failed writes no more."""
        with contextlib.suppress(DeviceError):
            end = self._side.record()
            while not end.done():
                time.sleep(self._poll_interval_s)

    def _fail(self, error: Exception) -> None:
        """Tell all whose copy has not been told of, those on the device too: nobody can go on."""
        let_go(error)
        with self._wake:
            self._broken = error
            untold = [*(asked for _, asked in self._flying), *self._waiting]
            self._flying.clear()
            self._waiting.clear()
        for asked in untold:
            asked.tell(error)
