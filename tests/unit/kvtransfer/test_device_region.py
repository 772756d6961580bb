"""Device memory and its export, over a driver without a device; the copy kernel in Triton's interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import random
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.support.triton_interpreter  # noqa: F401  # before the kernel, and before anything of Triton's

# isort: split
from triton.runtime.errors import OutOfResources

from baton.errors import InvalidField
from kvtransfer.device.cuda_streams import CudaStreams, copy_records
from kvtransfer.device.driver import CudaDriver, mps_in_use
from kvtransfer.device.region import DeviceRegion, OpenedRegion
from kvtransfer.link import DEFAULT_TRANSPORTS, check_transports, choose, serving
from kvtransfer.transport import ConnectError, DataEndpoint, DeviceError, RegionKind, TransportName
from kvtransfer.transports.cuda_ipc import CudaIpcReceiverPort, CudaIpcWriterLink
from kvtransfer.transports.writer_link import LinkParts
from node.regions import offered
from tests.conformance.transport_kits import FakeSource
from tests.support.fake_device import FakeDriver, FakeStream, FakeStreams
from tests.support.shm_harness import LINK_EPOCH, LINK_PAIR, Recorder, ops_of, run


def test_a_region_is_opened_by_what_its_file_holds() -> None:
    """Written on one side, read on the other; both let go of everything."""
    driver = FakeDriver()
    region = DeviceRegion(driver, 4096, "region")
    opened = OpenedRegion(driver, region.fd, 4096)
    opened.memory[7] = 9
    assert region.memory[7] == 9
    with pytest.raises(OSError, match="not permitted"):
        os.write(region.fd, b"x")
    opened.close()
    opened.close()
    region.close()
    region.close()
    assert driver.open_memories == 0


def test_a_file_that_is_no_export_is_refused() -> None:
    """Of another kind, or of a region of another size: nothing is opened."""
    driver = FakeDriver()
    region = DeviceRegion(driver, 4096, "region")
    with pytest.raises(DeviceError, match="exports 4096 bytes for a region of 8192"):
        OpenedRegion(driver, region.fd, 8192)
    fd = os.memfd_create("other", os.MFD_CLOEXEC)
    os.write(fd, b"not ours")
    with pytest.raises(DeviceError, match="no exported region"):
        OpenedRegion(driver, fd, 4096)
    os.close(fd)
    region.close()
    assert driver.open_memories == 0


def test_under_mps_neither_side_begins() -> None:
    """A region to share is not made and a link is not tried; both say what to do. One for its own process is made."""
    driver = FakeDriver(refusal="the Multi-Process Service runs here; stop MPS")
    with pytest.raises(DeviceError, match="cuda_ipc: the Multi-Process Service runs here"):
        DeviceRegion(driver, 4096, "region")
    assert driver.open_memories == 0
    own = DeviceRegion(driver, 4096, "region", shared=False)
    assert not own.shared
    assert offered(DEFAULT_TRANSPORTS, own) == (TransportName.RDMA, TransportName.TCP)
    with pytest.raises(InvalidField, match=r"none that serves this node's region here; cuda_ipc: .* stop MPS"):
        offered([TransportName.CUDA_IPC, TransportName.SHM], own)
    own.close()
    assert driver.open_memories == 0

    async def connect() -> None:
        endpoint = DataEndpoint(
            transport=TransportName.CUDA_IPC, address="@baton-shm-x", secret=bytes(16), epoch=LINK_EPOCH
        )
        source = FakeSource(memory=np.zeros(8, np.uint8), nbytes=8, driver=driver)
        loop = asyncio.get_running_loop()
        with pytest.raises(ConnectError, match="stop MPS"):
            await CudaIpcWriterLink.connect(LinkParts(endpoint, LINK_PAIR, Recorder(), loop), source)

    run(connect())


@pytest.mark.parametrize("error", [DeviceError("no stream"), RuntimeError("no stream")], ids=repr)
def test_a_device_without_a_stream_to_copy_on_leaves_with_bye(error: Exception) -> None:
    """The receiver's region is closed before that: so the word is true, and the next fence of the pair ends."""

    class Streams(FakeStreams):
        def side(self) -> FakeStream:
            raise error

    async def connect() -> None:
        events, driver = Recorder(), FakeDriver(streams=Streams())
        region = DeviceRegion(FakeDriver(), 8, "region")
        port = CudaIpcReceiverPort(region=region, events=events)
        source = FakeSource(memory=np.zeros(8, np.uint8), nbytes=8, driver=driver)
        endpoint = port.expect(LINK_PAIR, LINK_EPOCH)
        with pytest.raises(ConnectError, match="no stream"):
            await CudaIpcWriterLink.connect(
                LinkParts(endpoint, LINK_PAIR, Recorder(), asyncio.get_running_loop()), source
            )
        assert driver.open_memories == 0
        port.fence(LINK_PAIR, LINK_EPOCH)
        await events.until(lambda e: bool(e.gone))
        await port.close()
        region.close()

    run(connect())


def test_mps_is_seen_by_its_control_pipe(tmp_path: Path) -> None:
    """The directory is MPS's own setting, or its default."""
    assert not mps_in_use({}, str(tmp_path))
    (tmp_path / "control").touch()
    assert mps_in_use({}, str(tmp_path))
    assert mps_in_use({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}, "/nonexistent")
    assert not mps_in_use({"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}, str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_driver_says_what_is_missing() -> None:
    """One typed error, whatever part of CUDA it is that is not there."""
    with pytest.raises(DeviceError, match=r"install cuda-bindings|there is no CUDA device 0"):
        CudaDriver()


class IpcRuntime:
    """As much of cuda-bindings as the test below calls. A handle has nothing but the address of its 64 bytes."""

    cudaIpcMemLazyEnablePeerAccess = 1

    class cudaIpcMemHandle_t:
        def __init__(self, content: bytes = bytes(64)) -> None:
            self.buffer = ctypes.create_string_buffer(content, 64)

        def getPtr(self) -> int:
            return ctypes.addressof(self.buffer)

    def __init__(self) -> None:
        self.opened: list[bytes] = []

    def cudaIpcGetMemHandle(self, address: int) -> tuple[int, Any]:
        return 0, self.cudaIpcMemHandle_t(struct.pack("<Q56s", address, b"\xff\0\x01" * 18))

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[int, int]:
        self.opened.append(handle.buffer.raw)
        return 0, 4096


def driver_over(runtime: Any) -> Any:
    """CUDA's driver without CUDA."""
    driver: Any = object.__new__(CudaDriver)
    driver._runtime, driver._ordinal, driver._exported = runtime, 0, set()
    driver.calls = []
    cuda = SimpleNamespace(set_device=lambda _: None, empty_cache=lambda: driver.calls.append("empty_cache"))
    driver._torch = SimpleNamespace(cuda=cuda, from_numpy=torch.from_numpy)
    return driver


def test_a_handle_is_taken_by_its_address() -> None:
    """All its 64 bytes go to another process and come back, by what every version of cuda-bindings has."""
    runtime = IpcRuntime()
    driver = driver_over(runtime)
    handle = driver.export(0x7F00_0000_0000)
    assert handle == struct.pack("<Q56s", 0x7F00_0000_0000, b"\xff\0\x01" * 18)
    assert driver.open(handle) == 4096
    assert runtime.opened == [handle]


def test_a_region_gets_what_torch_has_let_go_of() -> None:
    """Weights that were packed leave memory in torch's hands, which is given back before the region is asked for."""

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: int) -> tuple[int, ...]:
                driver.calls.append(name)
                return (0, 4096) if name == "cudaMalloc" else (0,)

            return call

    driver = driver_over(Runtime())
    assert driver.allocate(64) == 4096
    assert driver.calls == ["empty_cache", "cudaMalloc", "cudaMemset", "cudaDeviceSynchronize"]


def test_memory_is_pinned_where_it_is_and_let_go_of_once() -> None:
    """The driver is told of the address and the length, and of its end; what it refuses is typed."""
    calls: list[tuple[str, tuple[int, ...]]] = []

    class Runtime:
        cudaHostRegisterDefault = 0
        status = 0

        def cudaHostRegister(self, *arguments: int) -> tuple[int]:
            calls.append(("register", arguments))
            return (self.status,)

        def cudaHostUnregister(self, *arguments: int) -> tuple[int]:
            calls.append(("unregister", arguments))
            return (0,)

        def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:
            return 0, b"out of memory"

    runtime: Any = Runtime()
    driver = driver_over(runtime)
    memory_U8 = np.arange(24, dtype=np.uint8)
    address = memory_U8.ctypes.data
    pinned = driver.register(memory_U8)
    assert pinned.memory.data_ptr() == pinned.array_U8.ctypes.data == address
    pinned.close()
    pinned.close()
    assert calls == [("register", (address, 24, 0)), ("unregister", (address,))]
    runtime.status = 2
    with pytest.raises(DeviceError, match=r"cudaHostRegister.*out of memory"):
        driver.register(memory_U8)


def test_what_is_posted_from_another_stream_than_the_default_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached blocks are posted by a thread that knows of the default stream only, and would be behind nothing there."""
    of_thread = ["default"]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: "default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: of_thread[0])
    streams = CudaStreams(torch.device("cuda", 0))
    current: Any = streams.current().stream
    assert current == "default"
    of_thread[0] = "side"
    with pytest.raises(AssertionError, match="posted from the device's default stream"):
        streams.current()


@pytest.mark.parametrize(
    "error", [RuntimeError("an illegal memory access"), OutOfResources(300_000, 232_448, "shared memory")], ids=repr
)
def test_what_torch_and_triton_raise_is_an_error_of_the_device(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that cannot be compiled or launched: the link is lost, and the node goes on."""

    def raising(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("kvtransfer.device.cuda_streams.copy_records", raising)
    stream: Any = SimpleNamespace(stream=None)
    with pytest.raises(DeviceError, match=r"illegal memory access|out of resource: shared memory"):
        CudaStreams(torch.device("cuda", 0)).copy(stream, torch.zeros(8), torch.zeros(8), ops_of([0], [0], [8]))


def test_cuda_ipc_is_chosen_on_one_host_only_and_serves_a_region_on_a_gpu() -> None:
    """Best of all between two processes of a host, never between hosts. Of a list each node takes what serves its own
    region; a list in which nothing does is refused."""
    both = [TransportName.CUDA_IPC, TransportName.TCP]
    assert choose(["cuda_ipc", "tcp"], both, same_host=True) is TransportName.CUDA_IPC
    assert choose(["cuda_ipc", "tcp"], both, same_host=False) is TransportName.TCP
    assert serving(both, RegionKind.DEVICE) == (TransportName.CUDA_IPC, TransportName.TCP)
    assert serving(both, RegionKind.HOST) == (TransportName.TCP,)
    for region in RegionKind:
        check_transports(both, region)
    by_default = [TransportName.SHM, TransportName.RDMA, TransportName.TCP]
    assert list(serving(DEFAULT_TRANSPORTS, RegionKind.HOST)) == by_default
    assert list(serving(DEFAULT_TRANSPORTS, RegionKind.DEVICE)) == [TransportName.CUDA_IPC, *by_default[1:]]
    with pytest.raises(InvalidField, match="region, which is in host memory: shm, rdma, ucx, tcp"):
        check_transports([TransportName.CUDA_IPC], RegionKind.HOST)
    with pytest.raises(InvalidField, match="region, which is in device memory: cuda_ipc, rdma, tcp"):
        check_transports([TransportName.SHM, TransportName.UCX], RegionKind.DEVICE)


def test_between_hosts_devices_take_the_card_before_the_sockets() -> None:
    """What two nodes with regions on devices offer by default: cuda_ipc on one host, rdma between two, tcp where one of
    them has no card that works."""
    offered = list(serving(DEFAULT_TRANSPORTS, RegionKind.DEVICE))
    names = [transport.value for transport in offered]
    assert choose(names, offered, same_host=True) is TransportName.CUDA_IPC
    assert choose(names, offered, same_host=False) is TransportName.RDMA
    assert choose(names, [TransportName.CUDA_IPC, TransportName.TCP], same_host=False) is TransportName.TCP


@pytest.mark.parametrize("seed", range(6))
def test_the_copy_kernel_copies_what_the_writes_say(seed: int) -> None:
    """Equal records, odd lengths, empty and large writes, at any offset: those bytes and no others."""
    chance = random.Random(seed)
    step = chance.choice((1, 8, 64))
    src_U8 = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 40_000, dtype=np.uint8))
    dst_U8 = torch.zeros(40_000, dtype=torch.uint8)
    cuts = sorted(chance.sample(range(0, 40_000, step), 6))
    lengths = [(b - a) // step * step for a, b in itertools.pairwise(cuts)]
    sources = [chance.randrange(0, 40_000 - n + 1, step) for n in lengths]
    ops = ops_of([*sources, 0], [*cuts[:-1], 0], [*lengths, 0])
    wanted_U8 = dst_U8.clone()
    for a, b, n in zip(sources, cuts, lengths, strict=False):
        wanted_U8[b : b + n] = src_U8[a : a + n]
    copy_records(dst_U8, src_U8, ops)
    assert torch.equal(dst_U8, wanted_U8)


def test_nothing_to_copy_is_nothing() -> None:
    """No write, or writes of no bytes: no kernel is launched on an empty grid."""
    memory_U8 = torch.zeros(8, dtype=torch.uint8)
    copy_records(memory_U8, memory_U8, ops_of([], [], []))
    copy_records(memory_U8, memory_U8, ops_of([0], [3], [0]))
