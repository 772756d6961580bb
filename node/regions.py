"""A node's region: opened in host memory or on the device, and which transports then serve it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from baton.errors import BatonError, InvalidField, Reason
from baton.log import get_log
from baton.runtime import Progress
from cachestore.layout import Layout
from engine.build import EngineConfig
from kvtransfer import native
from kvtransfer.checksums import ChecksumThread
from kvtransfer.device.driver import CudaDriver, DeviceDriver
from kvtransfer.device.host_driver import HostDriver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.device.staging import STAGING_LIMITS, StagedRegion, StagingConfig
from kvtransfer.link import serving
from kvtransfer.region import Region, RegionTooLarge
from kvtransfer.transport import DeviceError, RegionKind, TransportName
from kvtransfer.transports.rdma import DeviceBytes, HostBytes, RdmaRegion

log = get_log("region")

PoolRegion = Region | DeviceRegion


def region_kind(engine: EngineConfig) -> RegionKind:
    """Where the region of such an engine lies."""
    return RegionKind.DEVICE if engine.device.has_region else RegionKind.HOST


def offered(transports: Sequence[TransportName], region: PoolRegion) -> tuple[TransportName, ...]:
    """Those of `transports` that can serve this region, in their order.

    Raises:
        InvalidField: none of them can here; the text says why.
    """
    found = serving(transports, region.kind)
    if TransportName.CUDA_IPC in found and isinstance(region, DeviceRegion) and not region.shared:
        refusal = region.driver.refusal()
        log.warning("cuda_ipc is not offered", reason=refusal)
        found = tuple(transport for transport in found if transport is not TransportName.CUDA_IPC)
        if not found:
            raise InvalidField("transports", f"names none that serves this node's region here; cuda_ipc: {refusal}")
    return found


def checksum_thread(region: PoolRegion, *, name: str) -> ChecksumThread:
    """Reads the region's bytes, wherever they are. Closed before the region is."""
    return ChecksumThread(region if isinstance(region, DeviceRegion) else region.array_U8, name=name)


def rdma_region(region: PoolRegion) -> RdmaRegion:
    """The region as rdma registers it, which ends before the region does."""
    return DeviceBytes(region) if isinstance(region, DeviceRegion) else HostBytes(lambda: region.array_U8)


async def open_host_region(layout: Layout, num_blocks: int, name: str, field: str, progress: Progress) -> Region:
    """Prefaulted, on a thread. Raises BatonError BAD_CONFIG for `field`: there is not the memory."""
    what = f"{num_blocks:,} blocks of {layout.num_rows} x {layout.page_bytes:,} bytes"
    return await open_host_memory(layout.region_bytes(num_blocks), name, field, what, progress)


async def open_host_memory(nbytes: int, name: str, field: str, what: str, progress: Progress) -> Region:
    """As `open_host_region`, of as many bytes; `what` they are, for people."""
    await asyncio.to_thread(native.preload)
    try:
        return await asyncio.to_thread(
            Region.create, nbytes, name, lambda done, total: progress("prefaulting", done, total)
        )
    except RegionTooLarge as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"Not enough memory: {error}. These are {what}: set a smaller {field}.",
            field=field,
        ) from error


async def open_pool_region(
    config: EngineConfig,
    layout: Layout,
    num_blocks: int,
    name: str,
    progress: Progress,
    transports: Sequence[TransportName],
) -> PoolRegion:
    """The region of this engine; one on a device has been copied in once, and can be given to other processes where
    `transports` has cuda_ipc and the device allows it. Raises BatonError BAD_CONFIG."""
    if region_kind(config) is RegionKind.HOST:
        return await open_host_region(layout, num_blocks, name, "engine.num_blocks", progress)
    asked_to_share = TransportName.CUDA_IPC in transports
    return await asyncio.to_thread(_open_device_region, config, layout, num_blocks, name, asked_to_share)


def pin_staging(region: PoolRegion, transports: Sequence[TransportName], config: StagingConfig) -> StagedRegion | None:
    """Pinned memory through which tcp reaches a region on a device; None: it needs none here. Blocks.

    It is closed before the region, and after all ports and links. Raises BatonError BAD_CONFIG.
    """
    if not isinstance(region, DeviceRegion) or TransportName.TCP not in transports:
        return None
    try:
        return StagedRegion(driver=region.driver, region=region, config=config, limits=STAGING_LIMITS)
    except DeviceError as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"tcp moves what lies on the device through {config.bytes_max:,} bytes of pinned memory: {error}. Set a "
            "smaller staging.bytes_max, or leave tcp out of the transports.",
            field="staging.bytes_max",
        ) from error


def _open_device_region(
    config: EngineConfig, layout: Layout, num_blocks: int, name: str, asked_to_share: bool
) -> DeviceRegion:
    try:
        driver: DeviceDriver = CudaDriver() if config.device.on_gpu else HostDriver()
    except DeviceError as error:
        raise BatonError(
            Reason.BAD_CONFIG, f"engine.device is {config.device.value}: {error}.", field="engine.device"
        ) from error
    nbytes = layout.region_bytes(num_blocks)
    try:
        region = DeviceRegion(driver, nbytes, name, shared=asked_to_share and driver.refusal() is None)
    except DeviceError as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"The device cannot hold a region of {num_blocks} blocks ({nbytes:,} bytes): {error}. Set a smaller "
            "engine.num_blocks.",
            field="engine.num_blocks",
        ) from error
    try:
        region.rehearse_copy(layout.page_bytes)
    except BaseException:
        region.close()
        raise
    return region


T = TypeVar("T")


async def on_thread(work: Callable[..., T], *arguments: Any) -> T:
    """Run it to its end, also where the caller is cancelled: it uses the region, which is closed next. What it made is
    dropped then."""
    # A future of the thread, no task: what cancels every task does not cancel it. Whoever cancels again waits as well.
    thread = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    cancelled: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait([thread])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        thread.exception()  # read, so that asyncio does not log it: whoever asked has been cancelled
        raise cancelled
    return thread.result()


def clear_frames_of(error: BaseException | None) -> None:
    """The frames that an error came through may still look into memory, which then could not be given back."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
