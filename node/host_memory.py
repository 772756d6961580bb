"""Host memory below a node's region, as it is opened: the tier, who copies, and what they are to the engine.

Below a region on a device the tier is pinned, all of it and for as long as the node lives, so that the device copies by
itself. The other way, a few pinned chunks with ordinary memory behind them, would put a second copy of every byte on
the host's threads and its memory bandwidth, just when answers wait for their blocks, and have them wait for chunks.
What it would save is the pinning of memory that is prefaulted anyway: such a node has set it apart. The price is a
longer start, and that the machine has so much less to page; `spill.pinned_bytes_max` bounds it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from baton.errors import BatonError, Reason
from baton.runtime import Progress
from cachestore.block_manager import BlockManager
from cachestore.layout import Layout
from cachestore.ledger import Ledger
from engine.core import Engine
from kvtransfer.device.driver import DeviceError, PinnedMemory
from kvtransfer.device.region import DeviceRegion
from kvtransfer.region import Region
from node.host_tier import BlockPlaces, RegionCopier, SpillConfig, ThreadCopier
from node.opening import let_go, on_thread
from node.regions import PoolRegion, open_host_region
from node.spill import Spill
from node.stream_copier import StreamCopier


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The tier below the pool, and who moves blocks there and back. `close` comes before that of the pool's region."""

    region: Region
    pinned: PinnedMemory | None
    """The same memory as the device's copies reach it; None where the pool's region is no device's."""
    copier: ThreadCopier | StreamCopier
    spill: Spill

    def describe(self) -> str:
        """For people: how large it is."""
        return f"{self.region.nbytes:,} bytes of {'host' if self.pinned is None else 'pinned'} memory"

    def close(self) -> None:
        """Waits for the copies under way."""
        self.copier.close()
        if self.pinned is not None:
            self.pinned.close()
        self.region.close()


async def open_host_memory(
    config: SpillConfig,
    *,
    below: PoolRegion,
    layout: Layout,
    engine: Engine,
    blocks: BlockManager,
    ledger: Ledger,
    name: str,
    progress: Progress,
) -> HostMemory:
    """Make the tier, and put the engine under overcommit. `below` is the pool's region, of the ledger's blocks.

    Raises BatonError BAD_CONFIG: there is not the memory, or it cannot be pinned.
    """
    if isinstance(below, DeviceRegion):
        _check_pinned_bytes(config, layout.region_bytes(config.host_blocks))
    region = await open_host_region(layout, config.host_blocks, f"baton-{name}-host", "spill.host_blocks", progress)
    places = BlockPlaces(layout=layout, device_blocks=ledger.num_blocks, host_blocks=config.host_blocks)
    pinned = None
    copier: ThreadCopier | StreamCopier
    with ExitStack() as opened:
        opened.callback(region.close)
        if isinstance(below, DeviceRegion):
            progress("pinning", 0, region.nbytes)
            try:
                pinned, copier = await on_thread(_pin, below, region, places, name, opened)
            except BaseException as error:
                let_go(error)
                raise
            progress("pinning", region.nbytes, region.nbytes)
        else:
            copier = ThreadCopier(RegionCopier(places, device=below, host=region), name=name)
        opened.pop_all()
    return HostMemory(
        region=region,
        pinned=pinned,
        copier=copier,
        spill=Spill(config=config, engine=engine, blocks=blocks, ledger=ledger, copier=copier),
    )


def _check_pinned_bytes(config: SpillConfig, nbytes: int) -> None:
    if nbytes > config.pinned_bytes_max:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"spill.host_blocks is {config.host_blocks}, or {nbytes:,} bytes, all of them pinned since the region "
            f"is on a device; spill.pinned_bytes_max is {config.pinned_bytes_max:,}. Set fewer blocks, or allow more "
            "bytes if the machine can do without them.",
            field="spill.host_blocks",
        )


def _pin(
    below: DeviceRegion, region: Region, places: BlockPlaces, name: str, opened: ExitStack
) -> tuple[PinnedMemory, StreamCopier]:
    """Blocks. What it has made is in `opened` too, whoever still waits for it."""
    try:
        pinned = below.driver.register(region.array_U8)
        opened.callback(pinned.close)
        copier = StreamCopier(streams=below.driver.streams, places=places, device=below, host=pinned, name=name)
        opened.callback(copier.close)
        copier.rehearse()
    except DeviceError as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"{region.nbytes:,} bytes of host memory below a region on a device are pinned: {error}. Set a smaller "
            "spill.host_blocks.",
            field="spill.host_blocks",
        ) from error
    return pinned, copier
