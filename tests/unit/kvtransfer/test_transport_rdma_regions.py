"""How a region is registered with a network card, wherever it lies: what is tried, in which order, and what is said
where nothing works. By hand-made drivers and cards; `tests/rdma` has a card that is real."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.device.driver import CudaDriver, DmaBuf, GpuDirect, page_span
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DeviceError
from kvtransfer.transports.rdma import (
    DeviceBytes,
    HostBytes,
    Keys,
    Registrar,
    RegistrationRefused,
)
from tests.support.fake_device import FakeDriver

NBYTES = 3 * 4096
PAGE = 4096


# Pages.


@given(
    address=st.integers(0, 1 << 60),
    nbytes=st.integers(1, 1 << 45),
    page=st.sampled_from([4096, 16384, 65536]),
)
def test_a_span_is_the_fewest_whole_pages(address: int, nbytes: int, page: int) -> None:
    start, page_nbytes, offset = page_span(address, nbytes, page)
    assert (start % page, page_nbytes % page) == (0, 0)
    assert start + offset == address and 0 <= offset < page
    end, spare = start + page_nbytes, page - 1
    assert address + nbytes <= end <= address + nbytes + spare


def test_pages_of_an_address_within_one() -> None:
    assert page_span(2 * PAGE, PAGE, PAGE) == (2 * PAGE, PAGE, 0)
    assert page_span(2 * PAGE + 256, PAGE, PAGE) == (2 * PAGE, 2 * PAGE, 256)
    assert page_span(0, PAGE + 1, PAGE) == (0, 2 * PAGE, 0)


# What a device allows.


def allowed(
    *, peer_memory: bool = True, dma_buf: bool = True, ordered: bool = False, host_flushes: bool = True
) -> GpuDirect:
    return GpuDirect(peer_memory=peer_memory, dma_buf=dma_buf, ordered=ordered, host_flushes=host_flushes)


def test_memory_that_cannot_be_flushed_is_not_written_to_and_may_be_read() -> None:
    """A receiver's region is refused, a writer's is not; a device in order needs no flush."""
    unflushed = allowed(host_flushes=False)
    assert unflushed.refusal(remote_writes=True) == (
        "what a card writes to this device may be seen late, and the host cannot flush it"
    )
    assert unflushed.refusal(remote_writes=False) is None
    assert allowed(host_flushes=False, ordered=True).refusal(remote_writes=True) is None
    closed = allowed(peer_memory=False, dma_buf=False)
    assert "opens its memory to no card" in str(closed.refusal(remote_writes=False))


# Registration.


class Driver(FakeDriver):
    """Whose dma-buf is a file, or an error."""

    def __init__(self, allowed: GpuDirect, failure: str = "") -> None:
        super().__init__()
        self.allowed = allowed
        self.failure = failure
        self.fds: list[int] = []
        self.flushed = 0

    def gpudirect(self) -> GpuDirect:
        if self.failure == "attributes":
            raise DeviceError("cuDeviceGetAttribute: no such device")
        return self.allowed

    def dma_buf(self, address: int, nbytes: int) -> DmaBuf:
        if self.failure:
            raise DeviceError(self.failure)
        self.fds.append(os.memfd_create("dma-buf"))
        return DmaBuf(fd=self.fds[-1], offset=256)

    def flush_remote_writes(self) -> None:
        self.flushed += 1


@dataclass(kw_only=True)
class Card(Registrar):
    """Takes what it does not refuse."""

    refuses_dma_buf: bool = False
    refuses_address: bool = False
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def by_address(self, address: int, nbytes: int) -> Keys:
        self.asked.append(("address", address, nbytes))
        if self.refuses_address:
            raise RegistrationRefused("Bad address")
        return Keys(address, 1, 2)

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        os.fstat(fd)
        self.asked.append(("dma-buf", offset, nbytes))
        if self.refuses_dma_buf:
            raise RegistrationRefused("Operation not supported")
        return Keys(offset, 3, 4)


def region_of(driver: Driver) -> DeviceRegion:
    return DeviceRegion(driver, NBYTES, "region", shared=False)


def test_a_dma_buf_is_taken_where_there_is_one() -> None:
    """Its offset goes along, the keys are the card's, and the descriptor is closed when this returns."""
    driver, card = Driver(allowed()), Card()
    region = region_of(driver)
    made = DeviceBytes(region).register(card, remote_writes=True)
    assert made == (Keys(256, 3, 4), "device memory as a dma-buf")
    assert card.asked == [("dma-buf", 256, NBYTES)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(driver.fds[0])
    region.close()


@pytest.mark.parametrize(
    ("driver", "card", "why"),
    [
        (Driver(allowed()), Card(refuses_dma_buf=True), "no dma-buf: Operation not supported"),
        (Driver(allowed(), "cuMemGetHandleForAddressRange: denied"), Card(), "no dma-buf: cuMemGetHandle.*: denied"),
        (Driver(allowed(dma_buf=False)), Card(), "no dma-buf: the device's driver makes none"),
    ],
    ids=["the card takes none", "the driver fails", "the driver makes none"],
)
def test_else_it_is_peer_memory_and_why_is_told(driver: Driver, card: Card, why: str) -> None:
    """By the address that the device has; no descriptor stays open."""
    region = region_of(driver)
    made = DeviceBytes(region).register(card, remote_writes=True)
    assert made[0] == Keys(region.address, 1, 2)
    assert card.asked[-1] == ("address", region.address, NBYTES)
    assert re.fullmatch(rf"device memory as peer memory \({why}\)", made[1])
    for fd in driver.fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    region.close()


def test_where_neither_works_the_error_says_both_and_what_to_do() -> None:
    region = region_of(Driver(allowed()))
    with pytest.raises(RegistrationRefused) as caught:
        DeviceBytes(region).register(Card(refuses_dma_buf=True, refuses_address=True), remote_writes=True)
    reported = str(caught.value)
    assert reported.startswith(
        "as a dma-buf: Operation not supported; as peer memory: Bad address; load the kernel's module"
    )
    assert "nvidia_peermem" in reported and "open kernel modules" in reported and "BAR1" in reported
    region.close()


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (Driver(allowed(peer_memory=False, dma_buf=False)), "opens its memory to no card"),
        (Driver(allowed(host_flushes=False)), "the host cannot flush it"),
        (Driver(allowed(), "attributes"), "cuDeviceGetAttribute: no such device"),
        (Driver(allowed(peer_memory=False), "denied"), "as peer memory: the device's driver does not report its pages"),
    ],
)
def test_a_card_is_not_asked_for_what_the_device_does_not_allow(driver: Driver, says: str) -> None:
    region, card = region_of(driver), Card()
    with pytest.raises(RegistrationRefused, match=says):
        DeviceBytes(region).register(card, remote_writes=True)
    assert card.asked == []
    region.close()


def test_a_device_is_flushed_where_it_has_no_order_of_its_own() -> None:
    """And only there; host memory never."""
    loose, ordered = Driver(allowed()), Driver(allowed(ordered=True))
    for driver, wanted in ((loose, True), (ordered, False)):
        region = region_of(driver)
        registered = DeviceBytes(region)
        registered.register(Card(), remote_writes=True)
        assert registered.flush() is wanted
        assert driver.flushed == wanted
        region.close()
    assert HostBytes(lambda: np.zeros(8, np.uint8)).flush() is False


def test_host_memory_is_registered_by_its_address_or_asks_for_more_locked_memory() -> None:
    region_U8, card = np.zeros(NBYTES, np.uint8), Card()
    registered = HostBytes(lambda: region_U8)
    made = registered.register(card, remote_writes=True)
    assert made == (Keys(region_U8.ctypes.data, 1, 2), "host memory")
    assert (registered.nbytes, card.asked) == (NBYTES, [("address", region_U8.ctypes.data, NBYTES)])
    with pytest.raises(RegistrationRefused, match=r"^Bad address; raise the limit of locked memory"):
        registered.register(Card(refuses_address=True), remote_writes=True)


# pyverbs.


class VerbsError(Exception):
    pass


class FakeMr:
    """What `pyverbs.mr` makes; `calls` has how."""

    calls: list[tuple[object, ...]]
    closed: list[int]

    def __init__(self, dma_bufs: type[Exception] | bool | None = None) -> None:
        self.calls, self.closed = [], []
        if dma_bufs is not False:
            self.DmaBufMR = self._dma_buf_mr
        self._failure = dma_bufs if isinstance(dma_bufs, type) else None

    def MR(self, domain: str, length: int, access: int, address: int) -> object:
        self.calls.append((domain, length, access, address))
        if address == 0xBAD:
            raise VerbsError("Errno: 14, Bad address")
        return self._made()

    def _dma_buf_mr(self, domain: str, length: int, access: int, dmabuf: int, offset: int) -> object:
        self.calls.append((domain, length, access, dmabuf, offset))
        if self._failure is not None:
            raise self._failure("Errno: 95, Operation not supported")
        return self._made()

    def _made(self) -> object:
        number = len(self.calls)
        return SimpleNamespace(lkey=number, rkey=100 + number, close=lambda: self.closed.append(number))


def registrar(mr: FakeMr, opened: ExitStack) -> Registrar:
    verbs: Any = SimpleNamespace(mr=mr, error=VerbsError)
    return Registrar(verbs, "domain", 5, opened)


def test_pyverbs_is_called_with_the_address_or_with_descriptor_and_offset() -> None:
    """A dma-buf is found at its offset by those who use its keys, which is what pyverbs makes its address. All is
    closed in the opposite order, once."""
    mr = FakeMr()
    opened = ExitStack()
    card = registrar(mr, opened)
    assert card.by_address(0x7000, NBYTES) == Keys(0x7000, 1, 101)
    assert card.by_dma_buf(9, 256, NBYTES) == Keys(256, 2, 102)
    assert mr.calls == [("domain", NBYTES, 5, 0x7000), ("domain", NBYTES, 5, 9, 256)]
    opened.close()
    opened.close()
    assert mr.closed == [2, 1]


@pytest.mark.parametrize(
    ("mr", "says"),
    [
        (FakeMr(False), "knows no dma-bufs; rdma-core 34 does"),
        (FakeMr(TypeError), "takes no dma-buf by its descriptor"),
        (FakeMr(VerbsError), "Operation not supported"),
    ],
    ids=["an old pyverbs", "one that takes no descriptors", "a card that takes none"],
)
def test_what_pyverbs_cannot_do_is_a_refusal(mr: FakeMr, says: str) -> None:
    card = registrar(mr, ExitStack())
    with pytest.raises(RegistrationRefused, match=says):
        card.by_dma_buf(9, 0, NBYTES)
    with pytest.raises(RegistrationRefused, match="Bad address"):
        card.by_address(0xBAD, NBYTES)
    assert mr.closed == []


# CUDA's calls.


class Enum(SimpleNamespace):
    """Any name is a value of its own."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeCuda:
    """Both of CUDA's APIs: notes the calls, and answers with what `answers` has."""

    CUdevice_attribute = CUmemRangeHandleType = Enum()
    cudaFlushGPUDirectRDMAWritesTarget = cudaFlushGPUDirectRDMAWritesScope = Enum()

    def __init__(self, **answers: Callable[..., tuple[Any, ...]]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._answers = answers

    @staticmethod
    def CUdeviceptr(address: int) -> str:
        return f"device pointer {address:#x}"

    @staticmethod
    def cuGetErrorString(status: int) -> tuple[int, bytes]:
        return 0, f"error {status}".encode()

    cudaGetErrorString = cuGetErrorString

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            answer = self._answers.get(name)
            return (0,) if answer is None else answer(*arguments)

        return call


def cuda(fake: FakeCuda) -> CudaDriver:
    driver: Any = object.__new__(CudaDriver)
    driver._torch = SimpleNamespace(cuda=SimpleNamespace(set_device=lambda _: None, empty_cache=lambda: None))
    driver._runtime = driver._driver = fake
    driver._ordinal = 0
    made: CudaDriver = driver
    return made


@pytest.mark.parametrize(
    ("ordering", "options", "ordered", "host_flushes"),
    [(0, 0, False, False), (0, 1, False, True), (0, 2, False, False), (100, 3, True, True), (200, 0, True, False)],
)
def test_the_attributes_of_a_device_are_read(ordering: int, options: int, ordered: bool, host_flushes: bool) -> None:
    """Ordered for its owner or for all: nothing to flush. Of the ways to flush only the host's call is used, and not
    that of a stream."""
    prefix = "CU_DEVICE_ATTRIBUTE_"
    attributes = {
        f"{prefix}GPU_DIRECT_RDMA_SUPPORTED": 1,
        f"{prefix}DMA_BUF_SUPPORTED": 0,
        f"{prefix}GPU_DIRECT_RDMA_WRITES_ORDERING": ordering,
        f"{prefix}GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": options,
    }
    fake = FakeCuda(
        cuDeviceGet=lambda ordinal: (0, f"device {ordinal}"),
        cuDeviceGetAttribute=lambda kind, device: (0, attributes[kind]) if device == "device 0" else (101,),
    )
    found = cuda(fake).gpudirect()
    assert found == GpuDirect(peer_memory=True, dma_buf=False, ordered=ordered, host_flushes=host_flushes)
    assert {call[1] for call in fake.calls if call[0] == "cuDeviceGetAttribute"} == set(attributes)


def test_cuda_makes_a_dma_buf_of_whole_pages() -> None:
    """From the page in which the memory begins to the end of the one in which it ends, behind a call of the runtime,
    without which the thread has no context."""
    fake = FakeCuda(cuMemGetHandleForAddressRange=lambda *_: (0, 77))
    driver = cuda(fake)
    page = os.sysconf("SC_PAGESIZE")
    assert driver.dma_buf(4 * page + 512, page) == DmaBuf(fd=77, offset=512)
    assert fake.calls == [
        ("cudaSetDevice", 0),
        (
            "cuMemGetHandleForAddressRange",
            f"device pointer {4 * page:#x}",
            2 * page,
            "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD",
            0,
        ),
    ]
    refused = cuda(FakeCuda(cuMemGetHandleForAddressRange=lambda *_: (801, 0)))
    with pytest.raises(DeviceError, match=r"^cuMemGetHandleForAddressRange.*: error 801$"):
        refused.dma_buf(0, page)


def test_cuda_flushes_for_the_device_that_owns_the_memory() -> None:
    fake = FakeCuda()
    cuda(fake).flush_remote_writes()
    assert fake.calls == [
        (
            "cudaDeviceFlushGPUDirectRDMAWrites",
            "cudaFlushGPUDirectRDMAWritesTargetCurrentDevice",
            "cudaFlushGPUDirectRDMAWritesToOwner",
        )
    ]
    broken = FakeCuda(cudaDeviceFlushGPUDirectRDMAWrites=lambda *_: (700,))
    with pytest.raises(DeviceError, match="error 700"):
        cuda(broken).flush_remote_writes()


def test_cuda_allocates_whole_pages() -> None:
    """So that a dma-buf of them holds nobody else's memory; what was asked for is zeroed."""
    fake = FakeCuda(cudaMalloc=lambda nbytes: (0, 0x10000))
    page = os.sysconf("SC_PAGESIZE")
    assert cuda(fake).allocate(page + 1) == 0x10000
    assert fake.calls[:2] == [("cudaMalloc", 2 * page), ("cudaMemset", 0x10000, 0, page + 1)]
