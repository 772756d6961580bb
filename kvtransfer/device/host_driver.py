"""A driver of a device that is not there, for tests of whole nodes without a GPU: its memory is shared host memory.
Its streams alone also carry the copies to host memory of a decode node whose region is host memory itself.

Copies are late, as those of a device: they run when somebody looks whether they have ended, on the thread that looks.
"""

from __future__ import annotations

import gc
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvtransfer.device.driver import IPC_HANDLE_BYTES, DeviceStreams, DmaBuf, GpuDirect, PinnedMemory
from kvtransfer.native.copy import copy_records
from kvtransfer.region import Region, RegionTooLarge
from kvtransfer.transport import DeviceError, WriteOps

_HANDLE = struct.Struct("<iiQ")


class HostEvent:
    """A point in a `HostStream`. Never passed at the first look, so that whoever polls has to come back."""

    def __init__(self, reach: Callable[[], None]) -> None:
        """`reach` runs what lies before it."""
        self.reach = reach
        self._looked_at = False

    def done(self) -> bool:
        if not self._looked_at:
            self._looked_at = True
            return False
        self.reach()
        return True


class HostStream:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._launched = 0
        self._run = 0

    def launch(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            self._launched += 1

    def record(self) -> HostEvent:
        with self._lock:
            return HostEvent(partial(self.run_to, self._launched))

    def wait(self, event: HostEvent) -> None:
        self.launch(event.reach)

    def run_to(self, number: int) -> None:
        """Run the first `number` pieces of work, as far as they have not run. One that raises stays the next one:
        nothing behind it runs, and who looks again gets its error again."""
        with self._lock:
            while self._run < number:
                self._work[0]()
                self._work.popleft()
                self._run += 1


class HostStreams:
    """The compute stream is empty: what the CPU computes is there when the call that computes it returns."""

    def __init__(self) -> None:
        self._compute = HostStream()

    def current(self) -> HostStream:
        return self._compute

    def side(self) -> HostStream:
        return HostStream()

    def copy(self, stream: HostStream, dst: np.ndarray, src: np.ndarray, ops: WriteOps) -> None:
        own = WriteOps(src=ops.src.copy(), dst=ops.dst.copy(), nbytes=ops.nbytes.copy())
        stream.launch(lambda: copy_records(dst, src, own))


class HostDriver:
    """See `DeviceDriver`. Memory is not freed, nor closed, while an array looks into it."""

    def __init__(self) -> None:
        self.streams: DeviceStreams = HostStreams()
        self._own: dict[int, Region] = {}
        self._opened: dict[int, mmap.mmap] = {}

    def allocate(self, nbytes: int) -> int:
        try:
            region = Region.create(nbytes, "baton-host-device")
        except RegionTooLarge as error:
            raise DeviceError(str(error)) from error
        address = int(region.array_U8.ctypes.data)
        self._own[address] = region
        return address

    def free(self, address: int) -> None:
        """Raises RegionInUse."""
        gc.collect()  # Triton's interpreter leaves what it was called with behind in cycles
        self._own[address].close()
        del self._own[address]

    def export(self, address: int) -> bytes:
        region = self._own[address]
        return _HANDLE.pack(os.getpid(), region.fd, region.nbytes).ljust(IPC_HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        pid, number, _ = _HANDLE.unpack(handle[: _HANDLE.size])
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"the memory of process {pid} cannot be opened: {error}") from error
        try:
            # All of the file: of huge pages it may have more bytes than the region.
            mapping = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED)
        finally:
            os.close(fd)
        address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self._opened[address] = mapping
        return address

    def close(self, address: int) -> None:
        """Raises BufferError."""
        self._opened[address].close()
        del self._opened[address]

    def memory(self, address: int, nbytes: int) -> Any:
        """A uint8 array [nbytes]."""
        if address in self._own:
            return self._own[address].array_U8[:nbytes]
        return np.frombuffer(self._opened[address], dtype=np.uint8, count=nbytes)

    def pin(self, nbytes: int) -> PinnedMemory:
        memory_U8 = np.zeros(nbytes, np.uint8)
        return PinnedMemory(memory_U8, memory_U8)

    def register(self, memory_U8: np.ndarray) -> PinnedMemory:
        return PinnedMemory(memory_U8, memory_U8)

    def refusal(self) -> str | None:
        return None

    def gpudirect(self) -> GpuDirect:
        return GpuDirect(peer_memory=True, dma_buf=False, ordered=False, host_flushes=True)

    def dma_buf(self, address: int, nbytes: int) -> DmaBuf:  # noqa: ARG002 - of a device's
        """Raises DeviceError: a memfd is none."""
        raise DeviceError("host memory in the place of a device's is no dma-buf")

    def flush_remote_writes(self) -> None:
        """Nothing: a processor sees what a card has written before the card says so."""
