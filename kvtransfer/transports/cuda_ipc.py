"""Transport between processes of one machine whose regions are on a GPU: the writer opens the receiver's region by its
CUDA IPC handle and copies into it on a side stream.

Handshake, fence and evidence are those of shm: the descriptor that comes with the WELCOME holds the handle instead of
the memory, and a BYE says that the memory has been closed. A writer's death is proved by its pidfd: the driver ends a
process's kernels and copies before the process is gone.

The compute stream never waits for a copy. Each batch is queued on the side stream behind an event of the compute
stream, and a thread polls for its end. Until then its sources must not be overwritten: their blocks are held (I1).

A completion is reported when the side stream's event has passed. The receiver launches its kernels after it has learned
of that through sockets, so they see what was written to device memory before.

Nothing is ever `writes_in_doubt` here: a batch completes when the device has passed its event. After an error of the
device its context is lost and writes nothing more.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import ClassVar, Final

from kvtransfer.device.driver import POLL_INTERVAL_S, DeviceEvent, DeviceStreams
from kvtransfer.device.region import DeviceRegion, OpenedRegion
from kvtransfer.transport import ConnectError, DeviceError, TransportName, WriteOps
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.post_queue import Batch, OpsPart, Taken
from kvtransfer.transports.shm import CopyingLanes, CopyParts, ShmReceiverPort, ShmWriterLink, codec_of

CODEC: Final = codec_of(TransportName.CUDA_IPC)
BATCHES_IN_FLIGHT_MAX = 64
"""Queued on the device at a time: what is queued there can no longer be abandoned."""


class CudaIpcReceiverPort(ShmReceiverPort):
    """See `ShmReceiverPort`; `region` is a `DeviceRegion`."""

    codec: ClassVar[wire.Codec] = CODEC


class CudaIpcWriterLink(ShmWriterLink):
    """See `ShmWriterLink`; `source` is a `DeviceRegion`. What is on the device by the time of `abandon` or the end is
    copied all the same."""

    transport: ClassVar[TransportName] = TransportName.CUDA_IPC
    codec: ClassVar[wire.Codec] = CODEC

    @staticmethod
    def _open_region(source: DeviceRegion, fd: int, nbytes: int, address: str) -> OpenedRegion:
        refusal = source.driver.refusal()
        if refusal is not None:
            raise ConnectError(f"cuda_ipc: {refusal}")
        try:
            return OpenedRegion(source.driver, fd, nbytes)
        except DeviceError as error:
            raise ConnectError(f"{address}: {error}") from error

    def _make_lanes(self, mapping: OpenedRegion, region_nbytes: int, source: DeviceRegion) -> DeviceLanes:
        assert mapping.nbytes == region_nbytes, (mapping.nbytes, region_nbytes)
        parts = CopyParts(
            dst=mapping.memory,
            src=source.memory,
            dst_nbytes=mapping.nbytes,
            src_nbytes=source.nbytes,
            loop=self._loop,
            completed=self._events.writes_completed,
            drained=self._drained,
            name=f"cuda-copy-{self._pair.receiver:x}",
        )
        return DeviceLanes(parts, mapping.driver.streams)


@dataclass(slots=True, kw_only=True, eq=False)
class DevicePart(OpsPart):
    """A whole batch. `ready`: its sources have been computed."""

    ready: DeviceEvent


class DeviceLanes(CopyingLanes):
    """A side stream of a device that copies, and a thread that looks for the end of each copy.

    What is queued on the device cannot be called back: it completes as copied after `abandon` and `stop` too.
    """

    def __init__(self, parts: CopyParts, streams: DeviceStreams) -> None:
        """The regions are memories as `streams.copy` takes them."""
        super().__init__(parts, self._cut)
        self._streams = streams
        self._side = streams.side()
        self._flying: deque[tuple[Taken[DevicePart], DeviceEvent]] = deque()

    def _cut(self, ops: WriteOps) -> tuple[DevicePart]:
        """By whoever posts: it is behind what their stream has queued so far."""
        return (DevicePart(ops=ops, nbytes=ops.total_bytes, ready=self._streams.current().record()),)

    def offer(self, batch: Batch[DevicePart]) -> None:
        """See `Lanes.offer`: it is queued on the device at once, if there is room."""
        if self.queue.waits_alone(batch) and len(self._flying) < BATCHES_IN_FLIGHT_MAX:
            self._launch()
        self.queue.lock.notify()

    # The polling thread.

    def _carry_all(self, lane: int) -> None:
        del lane  # there is one
        try:
            while self._land_oldest():
                with self.queue.lock:
                    while self.queue.waits and len(self._flying) < BATCHES_IN_FLIGHT_MAX:
                        self._launch()
        finally:
            self.queue.stop()
            try:
                # A batch that could not be queued ends the pool, and not the copies that were queued before it.
                while self._land_oldest():
                    pass
            finally:
                # After an error of the device nobody knows what was copied; the device can no longer write either.
                self.queue.lose()

    def _land_oldest(self) -> bool:
        """Wait for the end of the oldest copy on the device, and complete it. False: stopped, and there is none."""
        lock = self.queue.lock
        with lock:
            while not self._flying and not self.queue.stopped:
                lock.wait()
            if not self._flying:
                return False
            taken, done = self._flying[0]
        pause = threading.Event()
        while not done.done():
            pause.wait(POLL_INTERVAL_S)
        with lock:
            self._flying.popleft()
            self.queue.finished(taken, copied=True)
        return True

    # With the queue's lock held, so that batches are in the side stream in the order of the queue.

    def _launch(self) -> None:
        taken = self.queue.take(0)
        assert taken is not None
        self._side.wait(taken.part.ready)
        self._streams.copy(self._side, self._dst, self._src, taken.part.ops)
        self._flying.append((taken, self._side.record()))
