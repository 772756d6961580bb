"""Transport between processes of one machine whose regions are on a GPU: the writer opens the receiver's region by
its CUDA IPC handle and copies into it on a side stream.

Handshake, fence and evidence are those of shm (`shm_wire`): the descriptor that comes with the welcome holds the handle
in the place of the memory, and a BYE says that the memory has been closed. The evidence of a writer's death is its
pidfd: the driver ends a process's kernels and copies before the process is gone.

Visibility: a completion is told when the side stream's event has passed; the receiver's kernels are launched after it
has heard of that through sockets, and see what was written to device memory before.

Nothing is ever `writes_in_doubt` here: a batch completes when the device has passed its event, and after an error of
the device its context is lost and writes nothing any more.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from baton.ids import Pair
from kvtransfer.device.copy_pool import DeviceCopyPool
from kvtransfer.device.driver import DeviceDriver, DeviceError
from kvtransfer.device.region import DeviceMemory, OpenedRegion
from kvtransfer.transport import DataEndpoint, TransportName, WriterEvents
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm_connect import Handshake, ShmConnectError
from kvtransfer.transports.shm_receiver import ShmReceiverPort
from kvtransfer.transports.shm_writer import SHM_LINK_LIMITS, ShmLinkLimits, ShmWriterLink


class CudaIpcReceiverPort(ShmReceiverPort):
    """See `ShmReceiverPort`; `region` is a `DeviceRegion`."""

    transport: ClassVar[TransportName] = TransportName.CUDA_IPC


class CudaIpcWriterLink(ShmWriterLink):
    """See `ShmWriterLink`. What is on the device by the time of `abandon` or the end is copied all the same."""

    transport: ClassVar[TransportName] = TransportName.CUDA_IPC

    @classmethod
    async def connect_device(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source: DeviceMemory,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        driver: DeviceDriver,
        limits: ShmLinkLimits = SHM_LINK_LIMITS,
    ) -> CudaIpcWriterLink:
        """As `ShmWriterLink.connect`, from a region on the device.

        Raises:
            ShmConnectError: refused, unreachable, too late, or the memory cannot be opened here.
        """
        refusal = driver.refusal()
        if refusal is not None:
            raise ShmConnectError(f"{endpoint.address}: cuda_ipc: {refusal}")

        def open_region(fd: int, nbytes: int, address: str) -> OpenedRegion:
            try:
                return OpenedRegion(driver, fd, nbytes)
            except DeviceError as error:
                raise ShmConnectError(f"{address}: {error}") from error

        link = await cls.connect(
            endpoint, pair, source, events, loop, limits=limits, handshake=Handshake(open_region=open_region)
        )
        assert isinstance(link, CudaIpcWriterLink)
        return link

    def _make_pool(
        self,
        mapping: Any,
        region_nbytes: int,
        source: Any,
        *,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmConfig,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
    ) -> DeviceCopyPool:
        del config, turns  # a device orders its own copies
        assert isinstance(mapping, OpenedRegion)
        assert mapping.nbytes == region_nbytes, (mapping.nbytes, region_nbytes)
        return DeviceCopyPool(
            streams=mapping.driver.streams,
            dst=mapping.memory,
            src=source.memory,
            dst_nbytes=mapping.nbytes,
            src_nbytes=source.nbytes,
            loop=loop,
            completed=events.writes_completed,
            drained=self._drained,
            abandoned_grants_max=limits.abandoned_grants_max,
            name=f"cuda-copy-{pair.receiver:x}",
        )
