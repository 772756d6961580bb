"""What the transfers need of a device: memory, streams and copies. CUDA's, and the interface that the tests implement.

Memory is plain cudaMalloc, exported by CUDA IPC: that of the stream-ordered and of the expandable allocators cannot be
exported, nor registered for GPUDirect. cuda-bindings and torch are imported when a `CudaDriver` is made.

Shape suffix: U8 = one-dimensional array of bytes (uint8).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from baton.log import get_log
from kvtransfer.transport import DeviceError, WriteOps

log = get_log("device")

IPC_HANDLE_BYTES = 64
POLL_INTERVAL_S = 50e-6
"""Between two looks at the oldest event: short beside a layer, long beside the look."""
_MPS_DIRECTORY = "/tmp/nvidia-mps"
# CUGPUDirectRDMAWritesOrdering and CUflushGPUDirectRDMAWritesOptions of the driver API.
_ORDERED_FOR_OWNER = 100
"""From here on the device itself sees what others write in order; less is no order, more is for other devices too."""
_FLUSH_BY_HOST = 1


class DeviceEvent(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether the stream has passed it. Any thread; never blocks. What was queued before is visible then.

        Raises DeviceError: the device has failed. That is no evidence that what was queued has stopped writing.
        """


class DeviceStream(Protocol):
    """Runs what is queued on it in order; two streams run in any order but for what `wait` adds. Nothing here blocks.
    Events and streams go back to the device that made them, and to no other: hence their types are open."""

    def record(self) -> DeviceEvent:
        """The point behind all that is queued now."""

    def wait(self, event: Any) -> None:
        """What is queued from now on runs after `event`; the caller does not wait."""


class DeviceStreams(Protocol):
    """The streams of one device: CUDA's are in `cuda_streams`, the tests have a simulator."""

    def current(self) -> DeviceStream:
        """The one that the calling thread computes on."""

    def side(self) -> DeviceStream:
        """A new one."""

    def copy(self, stream: Any, dst: Any, src: Any, ops: WriteOps) -> None:
        """Queue copies between two memories of the device, or one of them and pinned memory of the host; the arrays of
        `ops` may be reused at once. Raises DeviceError."""


def wait_for(event: DeviceEvent) -> None:
    """Block until the stream has passed it: for as long as the device takes. Raises DeviceError."""
    while not event.done():
        time.sleep(POLL_INTERVAL_S)


class EventPoster:
    """Posts what a device is still computing, over a transport that no stream can order: an RDMA card reads at once.

    One thread that waits for points in a device's streams. A node has one for all its links, and closes it last.
    """

    def __init__(self, *, streams: DeviceStreams, name: str) -> None:
        """Starts the thread."""
        self._streams = streams
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
                        self._wake.wait(POLL_INTERVAL_S)
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
            self._wake.wait_for(lambda: self._waiting or self._stopped)
            return None if self._stopped else self._waiting[0]


class PinnedMemory:
    """Host memory that stays where it is: copies of the device reach it, and so do sockets."""

    def __init__(self, memory: Any, array_U8: np.ndarray, unpin: Callable[[], object] = lambda: None) -> None:
        """`memory` is what `streams.copy` takes; `array_U8` has the same bytes."""
        self.memory, self.array_U8 = memory, array_U8
        self._unpin = unpin

    def close(self) -> None:
        """Let go of it: no copy is on its way. Idempotent."""
        if self.memory is not None:
            self.memory, self.array_U8 = None, np.zeros(0, np.uint8)
            self._unpin()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDirect:
    """What one device allows."""

    peer_memory: bool
    """A card's driver can get its pages by their addresses, where a module of the kernel provides them."""
    dma_buf: bool
    """Its driver makes dma-bufs of it."""
    ordered: bool
    """What a card has written before the host launches something is seen by that, without a flush."""
    host_flushes: bool
    """A call of the host makes it so."""

    def refusal(self, *, remote_writes: bool) -> str | None:
        """Why a card must not be given the memory; None: it may be."""
        if not (self.peer_memory or self.dma_buf):
            return "this device opens its memory to no card: neither as a dma-buf nor as peer memory"
        if remote_writes and not (self.ordered or self.host_flushes):
            return "what a card writes to this device may be seen late, and the host cannot flush it"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DmaBuf:
    """Device memory as a descriptor, which whoever asked for it closes. Whole pages; it begins `offset` bytes in."""

    fd: int
    offset: int


def page_span(address: int, nbytes: int, page_bytes: int) -> tuple[int, int, int]:
    """The fewest whole pages that hold these bytes: their address, their bytes, and where in them the bytes begin."""
    assert nbytes > 0 and page_bytes > 0, (nbytes, page_bytes)
    offset = address % page_bytes
    whole = -(-(offset + nbytes) // page_bytes) * page_bytes
    return address - offset, whole, offset


class DeviceDriver(Protocol):
    """Calls into one device. Any thread. Each raises DeviceError."""

    @property
    def streams(self) -> DeviceStreams: ...

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory -> its address, which is also the one to register with a card as peer memory."""

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> bytes:
        """A handle of IPC_HANDLE_BYTES that another process can open, of memory from `allocate`."""

    def open(self, handle: bytes) -> int:
        """Memory of another process -> its address here."""

    def close(self, address: int) -> None:
        """Undo `open`."""

    def memory(self, address: int, nbytes: int) -> Any:
        """The bytes as `streams.copy` takes them; a view, which keeps nothing alive."""

    def pin(self, nbytes: int) -> PinnedMemory:
        """Zeroed host memory."""

    def register(self, memory_U8: np.ndarray) -> PinnedMemory:
        """Pin host memory that is there already. It stays the caller's, who frees it after this has been closed."""

    def refusal(self) -> str | None:
        """Why memory cannot be shared between processes here; None: it can."""

    def gpudirect(self) -> GpuDirect:
        """What network cards may do with this device's memory."""

    def dma_buf(self, address: int, nbytes: int) -> DmaBuf:
        """These bytes, from `allocate`, as a dma-buf. The caller closes its descriptor."""

    def flush_remote_writes(self) -> None:
        """What cards have written up to now is seen by what is launched after this returns. Waits for no stream."""


def mps_in_use(environment: Mapping[str, str] = os.environ, default: str = _MPS_DIRECTORY) -> bool:
    """Whether processes of this machine reach the device through the Multi-Process Service."""
    return (Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", default)) / "control").exists()


class CudaDriver:
    """By cuda-bindings. Runs on a GPU only."""

    def __init__(self, ordinal: int = 0) -> None:
        """Raises DeviceError: no cuda-bindings, no torch with CUDA, or no such device."""
        try:
            import torch
            from cuda.bindings import driver, runtime
        except ImportError as error:
            raise DeviceError(f"{error}: install cuda-bindings, and torch with CUDA") from error
        if not torch.cuda.is_available() or ordinal >= torch.cuda.device_count():
            raise DeviceError(f"there is no CUDA device {ordinal} here; torch sees {torch.cuda.device_count()}")
        from kvtransfer.device.cuda_streams import CudaStreams

        self._torch = torch
        self._runtime, self._driver = runtime, driver
        self._ordinal = ordinal
        self._exported: set[int] = set()
        self.device = torch.device("cuda", ordinal)
        self.streams: DeviceStreams = CudaStreams(self.device)

    def allocate(self, nbytes: int) -> int:
        # torch keeps memory that it has freed, and a region is most of the memory.
        self._torch.cuda.empty_cache()
        # A dma-buf is whole pages of the host.
        _, page_nbytes, _ = page_span(0, nbytes, mmap.PAGESIZE)
        address = int(self._call("cudaMalloc", page_nbytes))
        self._call("cudaMemset", address, 0, nbytes)
        # Other processes' streams, and side streams here, are not behind the one that has zeroed it.
        self._call("cudaDeviceSynchronize")
        return address

    def free(self, address: int) -> None:
        """What was exported is freed with the process: freeing it while another has it open is undefined, by CUDA."""
        if address not in self._exported:
            self._call("cudaFree", address)

    def export(self, address: int) -> bytes:
        self._exported.add(address)
        # Not all versions of cuda-bindings have its attribute `reserved`.
        handle = self._call("cudaIpcGetMemHandle", address)
        return ctypes.string_at(int(handle.getPtr()), IPC_HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        assert len(handle) == IPC_HANDLE_BYTES, len(handle)
        mem_handle = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(int(mem_handle.getPtr()), handle, IPC_HANDLE_BYTES)
        return int(self._call("cudaIpcOpenMemHandle", mem_handle, self._runtime.cudaIpcMemLazyEnablePeerAccess))

    def close(self, address: int) -> None:
        self._call("cudaIpcCloseMemHandle", address)

    def memory(self, address: int, nbytes: int) -> Any:
        """A uint8 tensor [nbytes]."""
        array = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        return self._torch.as_tensor(SimpleNamespace(__cuda_array_interface__=array), device=self.device)

    def pin(self, nbytes: int) -> PinnedMemory:
        try:
            tensor_U8 = self._torch.zeros(nbytes, dtype=self._torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise DeviceError(f"{nbytes} bytes of host memory cannot be pinned: {error}") from error
        return PinnedMemory(tensor_U8, tensor_U8.numpy())

    def register(self, memory_U8: np.ndarray) -> PinnedMemory:
        # By default it is mapped, so that kernels reach it, wherever there are unified addresses: on all of ours.
        address = int(memory_U8.ctypes.data)
        self._call("cudaHostRegister", address, memory_U8.nbytes, self._runtime.cudaHostRegisterDefault)
        tensor_U8 = self._torch.from_numpy(memory_U8)
        return PinnedMemory(tensor_U8, memory_U8, lambda: self._call("cudaHostUnregister", address))

    def refusal(self) -> str | None:
        if mps_in_use():
            return (
                "the Multi-Process Service runs here: a process that it ends takes others' copies with it, and their "
                "end proves nothing; stop MPS, or leave cuda_ipc out of the transports"
            )
        return None

    def gpudirect(self) -> GpuDirect:
        device = self._call_driver("cuDeviceGet", self._ordinal)

        def asked(name: str) -> int:
            kind = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(self._call_driver("cuDeviceGetAttribute", kind, device))

        return GpuDirect(
            peer_memory=bool(asked("GPU_DIRECT_RDMA_SUPPORTED")),
            dma_buf=bool(asked("DMA_BUF_SUPPORTED")),
            ordered=asked("GPU_DIRECT_RDMA_WRITES_ORDERING") >= _ORDERED_FOR_OWNER,
            host_flushes=bool(asked("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS") & _FLUSH_BY_HOST),
        )

    def dma_buf(self, address: int, nbytes: int) -> DmaBuf:
        start, page_nbytes, offset = page_span(address, nbytes, mmap.PAGESIZE)
        kind = self._driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        pointer = self._driver.CUdeviceptr(start)
        fd = self._call_driver("cuMemGetHandleForAddressRange", pointer, page_nbytes, kind, 0)
        return DmaBuf(fd=int(fd), offset=offset)

    def flush_remote_writes(self) -> None:
        runtime = self._runtime
        self._call(
            "cudaDeviceFlushGPUDirectRDMAWrites",
            runtime.cudaFlushGPUDirectRDMAWritesTarget.cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
            runtime.cudaFlushGPUDirectRDMAWritesScope.cudaFlushGPUDirectRDMAWritesToOwner,
        )

    def _call_driver(self, name: str, *arguments: Any) -> Any:
        # It is the runtime that makes the device's context the calling thread's.
        self._call("cudaSetDevice", self._ordinal)
        return _checked(self._driver, "cuGetErrorString", name, arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        # Another thread may have chosen another device for itself.
        self._torch.cuda.set_device(self._ordinal)
        return _checked(self._runtime, "cudaGetErrorString", name, arguments)


def _checked(library: Any, explain: str, name: str, arguments: tuple[Any, ...]) -> Any:
    status, *results = getattr(library, name)(*arguments)
    if int(status) != 0:
        _, text = getattr(library, explain)(status)
        raise DeviceError(f"{name}{arguments!r:.80}: {text.decode() if isinstance(text, bytes) else text}")
    return results[0] if results else None
