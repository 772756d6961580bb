"""A driver whose device memory is a memfd: "IPC handles" open it through /proc, streams copy when they are asked."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtransfer.device.driver import IPC_HANDLE_BYTES, DmaBuf, GpuDirect, PinnedMemory
from kvtransfer.transport import DeviceError, WriteOps

_HANDLE = struct.Struct("<iiQ")


class FakeEvent:
    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        """Not at the first look: the poller has to come back."""
        self.looks += 1
        return self.looks > 2


class FakeStream:
    def record(self) -> FakeEvent:
        return FakeEvent()

    def wait(self, event: FakeEvent) -> None:
        pass


class FakeStreams:
    def current(self) -> FakeStream:
        return FakeStream()

    def side(self) -> FakeStream:
        return FakeStream()

    def copy(self, stream: FakeStream, dst: np.ndarray, src: np.ndarray, ops: WriteOps) -> None:
        for a, b, n in zip(ops.src.tolist(), ops.dst.tolist(), ops.nbytes.tolist(), strict=True):
            dst[b : b + n] = src[a : a + n]


class LateEvent(FakeEvent):
    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream
        self._number = stream.queued

    def done(self) -> bool:
        with self._stream.lock:
            if not super().done():
                return False
            self._stream.run_until(self._number)
            return True


class LateStream(FakeStream):
    """Copies as late as it may: when somebody sees that it has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queued = 0
        self._done = 0
        self._work: deque[Callable[[], None]] = deque()

    def record(self) -> LateEvent:
        with self.lock:
            return LateEvent(self)

    def queue(self, work: Callable[[], None]) -> None:
        with self.lock:
            self._work.append(work)
            self.queued += 1

    def run_until(self, number: int) -> None:
        while self._done < number:
            self._work.popleft()()
            self._done += 1


class LateStreams(FakeStreams):
    def current(self) -> LateStream:
        return LateStream()

    def side(self) -> LateStream:
        return LateStream()

    def copy(self, stream: FakeStream, dst: np.ndarray, src: np.ndarray, ops: WriteOps) -> None:
        assert isinstance(stream, LateStream)
        taken = WriteOps(src=ops.src.copy(), dst=ops.dst.copy(), nbytes=ops.nbytes.copy())
        stream.queue(lambda: FakeStreams.copy(self, stream, dst, src, taken))


class FakeDriver:
    """To a network card its memory is peer memory."""

    def __init__(self, refusal: str | None = None, streams: FakeStreams | None = None) -> None:
        self.streams = streams or FakeStreams()
        self._refusal = refusal
        self.allowed = GpuDirect(peer_memory=True, dma_buf=False, ordered=False, host_flushes=True)
        self._files: dict[int, int] = {}
        self._mappings: dict[int, mmap.mmap] = {}

    @property
    def open_memories(self) -> int:
        return len(self._mappings)

    def allocate(self, nbytes: int) -> int:
        fd = os.memfd_create("fake-device", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        address = self._map(fd, nbytes)
        self._files[address] = fd
        return address

    def free(self, address: int) -> None:
        os.close(self._files.pop(address))
        self.close(address)

    def export(self, address: int) -> bytes:
        handle = _HANDLE.pack(os.getpid(), self._files[address], len(self._mappings[address]))
        return handle.ljust(IPC_HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        pid, fd, nbytes = _HANDLE.unpack(handle[: _HANDLE.size])
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DeviceError(f"cudaIpcOpenMemHandle: {error}") from error
        try:
            return self._map(own, nbytes)
        finally:
            os.close(own)

    def close(self, address: int) -> None:
        self._mappings.pop(address).close()

    def memory(self, address: int, nbytes: int) -> Any:
        mapping = self._mappings[address]
        assert nbytes == len(mapping)
        return np.frombuffer(mapping, dtype=np.uint8)

    def pin(self, nbytes: int) -> PinnedMemory:
        return self.register(np.zeros(nbytes, np.uint8))

    def register(self, memory_U8: np.ndarray) -> PinnedMemory:
        return PinnedMemory(memory_U8, memory_U8)

    def refusal(self) -> str | None:
        return self._refusal

    def gpudirect(self) -> GpuDirect:
        return self.allowed

    def dma_buf(self, address: int, nbytes: int) -> DmaBuf:
        raise DeviceError("cuMemGetHandleForAddressRange: operation not supported")

    def flush_remote_writes(self) -> None:
        pass

    def _map(self, fd: int, nbytes: int) -> int:
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        address = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self._mappings[address] = mapping
        return address
