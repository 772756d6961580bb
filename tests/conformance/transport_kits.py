"""How to make the two sides of each transport, for the conformance suite and its child processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from baton.ids import Epoch, Pair
from kvtransfer.device.driver import DeviceDriver, EventPoster
from kvtransfer.device.host_driver import HostDriver, HostStream
from kvtransfer.device.region import DeviceRegion
from kvtransfer.device.staging import StagedRegion, StagingConfig, StagingLimits
from kvtransfer.region import Region
from kvtransfer.transport import (
    ConnectError,
    DataEndpoint,
    ReceiverEvents,
    ReceiverPort,
    TransportName,
    WriteOps,
    WriteRanges,
    WriterEvents,
    WriterLink,
)
from kvtransfer.transports.cuda_ipc import CudaIpcReceiverPort, CudaIpcWriterLink
from kvtransfer.transports.rdma import (
    DeviceBytes,
    HostBytes,
    RdmaLinkLimits,
    RdmaMemory,
    RdmaReceiverPort,
    RdmaWriterLink,
)
from kvtransfer.transports.settings import RdmaConfig, TcpConfig, UcxConfig
from kvtransfer.transports.shm import ShmLinkLimits, ShmReceiverPort, ShmWriterLink
from kvtransfer.transports.tcp import TcpReceiverPort, TcpWriterLink
from kvtransfer.transports.tcp_staged import StagedTcpLink
from kvtransfer.transports.ucx import UCX_LINK_LIMITS, UcxReceiverPort, UcxWriterLink, destruction_fences
from kvtransfer.transports.writer_link import LinkLimits, LinkParts
from tests.support.fake_device import FakeDriver, FakeStreams, LateStreams

ConnectErrors = (ConnectError, ConnectError, ConnectError, ConnectError)


class OwningPort(RdmaReceiverPort):
    """With a registration of its own."""

    async def close(self) -> None:
        await super().close()
        await self._memory.close()


class OwningLink(RdmaWriterLink):
    """With a registration of its own."""

    memory: RdmaMemory

    async def close(self) -> None:
        await super().close()
        await self.memory.close()


class OwningTcpPort(TcpReceiverPort):
    """With pinned memory of its own."""

    async def close(self) -> None:
        await super().close()
        assert isinstance(self._region, StagedRegion)
        self._region.close()


class OwningStagedLink(StagedTcpLink):
    """With pinned memory of its own."""

    async def close(self) -> None:
        await super().close()
        self._stager._source.close()


class OwningPostedLink(TcpWriterLink):
    """With a poster of its own."""

    poster: EventPoster

    async def close(self) -> None:
        await super().close()
        self.poster.close()


def staged(region: Any) -> StagedRegion:
    """With little pinned memory: everything here has to wait for it."""
    return StagedRegion(
        driver=FakeDriver(streams=LateStreams()),
        region=region,
        config=StagingConfig(bytes_max=1 << 22),
        limits=StagingLimits(chunk_bytes=1 << 16, link_chunks=3, stream_chunks=2),
    )


class FakeDeviceRegion(DeviceRegion):
    """Device memory that the suite can look into."""

    def __init__(self, nbytes: int, driver: DeviceDriver | None = None) -> None:
        super().__init__(driver or FakeDriver(), nbytes, "test-region")

    @property
    def array_U8(self) -> np.ndarray:
        array_U8: np.ndarray = self.memory
        return array_U8


class ComputedSource(FakeDeviceRegion):
    """Device memory whose bytes are computed late: they are there when somebody has looked twice at an event behind
    them, and zeros before."""

    def __init__(self, source_U8: np.ndarray) -> None:
        super().__init__(len(source_U8), HostDriver())
        streams = self.driver.streams
        compute = streams.current()
        assert isinstance(compute, HostStream)
        self._compute = compute
        start, whole = np.zeros(1, np.int64), np.array([len(source_U8)], np.int64)
        streams.copy(compute, self.memory, source_U8, WriteOps(src=start, dst=start, nbytes=whole))

    def close(self) -> None:
        self._compute.record().reach()  # what has not run holds on to the memory
        super().close()


class OwningPostedRdmaLink(OwningLink):
    """With a poster, a registration and a source of its own."""

    poster: EventPoster
    source: ComputedSource

    async def close(self) -> None:
        await RdmaWriterLink.close(self)
        self.poster.close()
        await self.memory.close()
        self.source.close()


class FakeSource(DeviceRegion):
    """Any bytes as the source of copies between devices."""

    def __init__(self, memory: Any, nbytes: int, driver: Any = None) -> None:
        self._memory, self.nbytes, self.driver = memory, nbytes, driver

    @property
    def memory(self) -> Any:
        return self._memory


AnyRegion = Region | FakeDeviceRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    name: str
    transport: TransportName
    streams: int = 1
    tls: str = ""
    """Of ucx."""
    from_device: bool = False
    to_device: bool = False
    """Of tcp, through pinned memory; of rdma, by the stand-in driver."""
    behind_events: bool = False
    connect_ms_max: int = 20_000

    @property
    def receiver_moves_the_bytes(self) -> bool:
        """Nothing is complete that the receiver's process has not taken in."""
        return self.transport is TransportName.TCP or (self.transport is TransportName.UCX and self.tls == "tcp")

    @property
    def fences_without_the_writer(self) -> bool:
        """The receiver can take the right to write back from a writer that stands still."""
        if self.transport is TransportName.UCX:
            return destruction_fences(self.tls)
        return self.transport in (TransportName.TCP, TransportName.RDMA)

    def region(self, nbytes: int) -> AnyRegion:
        if self.transport is TransportName.RDMA and self.to_device:
            return FakeDeviceRegion(nbytes, HostDriver())
        if self.transport is TransportName.CUDA_IPC or self.to_device:
            return FakeDeviceRegion(nbytes)
        return Region.create(nbytes, "test-region")

    def port(self, region: Any, events: ReceiverEvents) -> ReceiverPort:
        if self.transport is TransportName.CUDA_IPC:
            return CudaIpcReceiverPort(region=region, events=events)
        if self.transport is TransportName.SHM:
            return ShmReceiverPort(region=region, events=events)
        if self.transport is TransportName.RDMA:
            registered = DeviceBytes(region) if self.to_device else HostBytes(lambda: region.array_U8)
            memory = RdmaMemory(region=registered, config=RdmaConfig(), remote_writes=True)
            return OwningPort(memory=memory, events=events)
        if self.transport is TransportName.UCX:
            ucx = UcxConfig(tls=self.tls)
            return UcxReceiverPort(region=region, events=events, config=ucx)
        if self.to_device:
            return OwningTcpPort(region=staged(region), events=events)
        return TcpReceiverPort(region=region, events=events)

    async def link(self, endpoint: DataEndpoint, pair: Pair, source_U8: np.ndarray, events: WriterEvents) -> WriterLink:
        """Deadlines are short, so that a test of them is: nothing here is slow on a healthy machine."""
        loop = asyncio.get_running_loop()
        if self.transport is TransportName.CUDA_IPC:
            source = FakeSource(memory=source_U8, nbytes=len(source_U8), driver=FakeDriver())
            device = ShmLinkLimits(bye_ms_max=300, connect_ms_max=self.connect_ms_max)
            return await CudaIpcWriterLink.connect(LinkParts(endpoint, pair, events, loop), source, limits=device)
        if self.transport is TransportName.SHM:
            shm = ShmLinkLimits(copy_chunk_ops_max=4, bye_ms_max=300, connect_ms_max=self.connect_ms_max)
            return await ShmWriterLink.connect(LinkParts(endpoint, pair, events, loop), source_U8, limits=shm)
        if self.transport is TransportName.RDMA:
            rdma = RdmaConfig(qps=self.streams)
            limits = RdmaLinkLimits(bye_ms_max=5_000, connect_ms_max=self.connect_ms_max)
            if self.from_device:
                return await rdma_from_device(endpoint, pair, source_U8, events, rdma, limits)
            memory = RdmaMemory(region=HostBytes(lambda: source_U8), config=rdma, remote_writes=False)
            try:
                link = await OwningLink.connect(LinkParts(endpoint, pair, events, loop), memory, limits)
            except BaseException:
                await memory.close()
                raise
            assert isinstance(link, OwningLink)
            link.memory = memory
            return link
        if self.transport is TransportName.UCX:
            drains = replace(UCX_LINK_LIMITS, connect_ms_max=self.connect_ms_max, drain_ms_max=3_000)
            return await UcxWriterLink.connect(
                LinkParts(endpoint, pair, events, loop), source_U8, UcxConfig(tls=self.tls), drains
            )
        tcp = TcpConfig(streams=self.streams)
        short = LinkLimits(connect_ms_max=self.connect_ms_max, drain_ms_max=300, bye_ms_max=300)
        if self.from_device:
            memory_on_device = staged(FakeSource(memory=source_U8, nbytes=len(source_U8), driver=FakeDriver()))
            try:
                return await OwningStagedLink.connect_staged(
                    LinkParts(endpoint, pair, events, loop), memory_on_device, tcp, short
                )
            except BaseException:
                memory_on_device.close()
                raise
        if self.behind_events:
            poster = EventPoster(streams=FakeStreams(), name="event-poster")
            try:
                posted = await OwningPostedLink.connect(LinkParts(endpoint, pair, events, loop), source_U8, tcp, short)
            except BaseException:
                poster.close()
                raise
            assert isinstance(posted, OwningPostedLink)
            posted.post_behind(poster)
            posted.poster = poster
            return posted
        return await TcpWriterLink.connect(LinkParts(endpoint, pair, events, loop), source_U8, tcp, short)


async def rdma_from_device(
    endpoint: DataEndpoint,
    pair: Pair,
    source_U8: np.ndarray,
    events: WriterEvents,
    config: RdmaConfig,
    limits: RdmaLinkLimits,
) -> OwningPostedRdmaLink:
    """From a source that is computed late."""
    loop, source = asyncio.get_running_loop(), ComputedSource(source_U8)
    memory = RdmaMemory(region=DeviceBytes(source), config=config, remote_writes=False)
    poster = EventPoster(streams=source.driver.streams, name="event-poster")
    try:
        link = await OwningPostedRdmaLink.connect(LinkParts(endpoint, pair, events, loop), memory, limits)
    except BaseException:
        poster.close()
        await memory.close()
        source.close()
        raise
    assert isinstance(link, OwningPostedRdmaLink)
    link.post_behind(poster)
    link.memory, link.source, link.poster = memory, source, poster
    return link


KITS = (
    Kit(name="cuda-ipc", transport=TransportName.CUDA_IPC),
    Kit(name="shm", transport=TransportName.SHM),
    Kit(name="tcp", transport=TransportName.TCP),
    Kit(name="tcp-3-streams", transport=TransportName.TCP, streams=3),
    Kit(name="tcp-device-to-device", transport=TransportName.TCP, streams=2, from_device=True, to_device=True),
    Kit(name="tcp-device-to-host", transport=TransportName.TCP, from_device=True),
    Kit(name="tcp-host-to-device", transport=TransportName.TCP, streams=2, to_device=True),
    Kit(name="tcp-behind-events", transport=TransportName.TCP, behind_events=True),
)
RDMA_KITS = (
    Kit(name="rdma", transport=TransportName.RDMA, streams=2),
    Kit(name="rdma-device-to-device", transport=TransportName.RDMA, streams=2, from_device=True, to_device=True),
)
"""Where there is a device: `make test-rdma` runs them."""


UCX_KITS = (
    Kit(name="ucx-tcp", transport=TransportName.UCX, tls="tcp"),
    Kit(name="ucx-all", transport=TransportName.UCX, tls="all"),
)
"""Where NIXL is installed: `make test-ucx` runs them. Of all that UCX has it takes cma on one host."""


class Everything(WriteRanges):
    """Ranges of a grant that may write anywhere."""

    def __init__(self) -> None:
        pass

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        return True


def endpoint_to_json(endpoint: DataEndpoint) -> dict[str, Any]:
    return {
        "transport": endpoint.transport.value,
        "address": endpoint.address,
        "secret": endpoint.secret.hex(),
        "epoch": endpoint.epoch,
    }


def endpoint_from_json(fields: dict[str, Any]) -> DataEndpoint:
    return DataEndpoint(
        transport=TransportName(fields["transport"]),
        address=fields["address"],
        secret=bytes.fromhex(fields["secret"]),
        epoch=Epoch(fields["epoch"]),
    )
