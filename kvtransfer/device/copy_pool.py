"""Copies of records on a side stream of the device, behind the layer that computed them.

The compute stream never waits for a copy: each posted batch is queued on the side stream behind an event of the compute
stream, and a thread polls for its end. So sources must not be overwritten before the batch's completion, which is what
holds their blocks anyway (DESIGN I1).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.ids import GrantId
from kvtransfer.device.streams import POLL_INTERVAL_S, DeviceEvent, DeviceStreams
from kvtransfer.transport import WriteOps
from kvtransfer.transports.copier import Copier, CopyBatch
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.posted_writes import Completed, check_ops

BATCHES_IN_FLIGHT_MAX = 64
"""Queued on the device at a time: what is queued there can no longer be abandoned."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Batch(CopyBatch):
    ready: DeviceEvent
    """The sources have been computed."""
    done: DeviceEvent | None = None


class DeviceCopyPool(Copier[_Batch]):
    """Copies by a device's side stream, and a thread that looks for their end.

    What is queued on the device cannot be called back: it completes as copied after `abandon` and `stop` too. `post`
    may be called from any thread, whose current stream has computed the sources; the rest from the loop's thread.
    """

    def __init__(
        self,
        *,
        streams: DeviceStreams,
        dst: Any,
        src: Any,
        dst_nbytes: int,
        src_nbytes: int,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        drained: Callable[[], None],
        abandoned_grants_max: int,
        name: str,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Starts the polling thread. `dst` and `src` are memories as `streams.copy` takes them."""
        super().__init__(
            src_nbytes=src_nbytes,
            dst_nbytes=dst_nbytes,
            loop=loop,
            completed=completed,
            drained=drained,
            abandoned_grants_max=abandoned_grants_max,
        )
        self._streams = streams
        self._dst: Any = dst
        self._src: Any = src
        self._poll_interval_s = poll_interval_s
        self._side = streams.side()
        self._flying: deque[_Batch] = deque()
        self._thread = threading.Thread(target=self._poll, name=name, daemon=True)
        self._thread.start()

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue one batch behind what the calling thread's stream has queued so far; returns at once.

        Raises:
            WriteOutOfBounds: the batch is not taken, and not completed either.
        """
        check_ops(ops, self._src_nbytes, self._dst_nbytes)
        ready = self._streams.current().record()
        batch = _Batch(grant=grant, ops=ops, total_bytes=ops.total_bytes, ready=ready)
        with self._wake:
            if self._stopped or grant in self._abandoned or len(ops.src) == 0:
                self._uncompleted[grant] += 1
                self._complete(batch, copied=len(ops.src) == 0)
                return
            if self._waiting or len(self._flying) >= BATCHES_IN_FLIGHT_MAX:
                self._waiting.append(batch)
            else:
                self._launch(batch)
            self._uncompleted[grant] += 1
            self._wake.notify()

    def join(self) -> None:
        """See `Copier.join`."""
        assert self._stopped
        self._thread.join()
        self._dst = self._src = None

    def _poll(self) -> None:
        try:
            while (batch := self._oldest()) is not None:
                self._land(batch)
                with self._wake:
                    while self._waiting and len(self._flying) < BATCHES_IN_FLIGHT_MAX:
                        self._launch(self._waiting[0])
                        self._waiting.popleft()
        finally:
            self.stop()
            try:
                # A batch that could not be queued ends the pool, and not the copies that were queued before it.
                while (batch := self._oldest()) is not None:
                    self._land(batch)
            finally:
                with self._wake:
                    # After an error of the device nobody knows what was copied; the device can no longer write either.
                    while self._flying:
                        self._complete(self._flying.popleft(), copied=False)
                    call_loop(self._loop, self._drained)

    def _land(self, batch: _Batch) -> None:
        """Wait for the end of the oldest copy on the device, and complete it."""
        assert batch.done is not None
        pause = threading.Event()
        while not batch.done.done():
            pause.wait(self._poll_interval_s)
        with self._wake:
            self._flying.popleft()
            self._complete(batch, copied=True)

    def _oldest(self) -> _Batch | None:
        with self._wake:
            while not self._flying and not self._stopped:
                self._wake.wait()
            return self._flying[0] if self._flying else None

    def _launch(self, batch: _Batch) -> None:
        """With the lock held, so that batches are in the side stream in the order of the queue."""
        self._side.wait(batch.ready)
        self._streams.copy(self._side, self._dst, self._src, batch.ops)
        batch.done = self._side.record()
        self._flying.append(batch)

    def _drop(self, batch: _Batch) -> None:
        self._complete(batch, copied=False)
