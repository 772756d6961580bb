"""The part of `benchmarks/gpu.py` about blocks that go to pinned host memory and come back."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from baton.ids import BlockId
from benchmarks.gpu_receiver import make_driver
from cachestore.host_blocks import HostBlockId
from cachestore.layout import kv_layout
from kvtransfer.device.region import DeviceRegion
from kvtransfer.region import Region
from node.copiers import BlockCopier, BlockCopy, BlockPlaces
from node.spill import SpillConfig

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench
    from benchmarks.gpu_children import Figures

BLOCK_SIZE = 16


def measure(bench: Bench, figures: Figures) -> None:
    """Copies of as many blocks as a node makes at a time, of the 8B shape: their rate either way, from asking to being
    told of the last; and what a chain of matrix products takes alone and beside them, in time of the compute stream."""
    asyncio.run(_move(bench, figures))


async def _move(bench: Bench, figures: Figures) -> None:
    layers, heads, head_dim, blocks, side, products = (
        (2, 2, 16, 8, 64, 4) if bench.tiny else (36, 8, 128, 256, 4096, 100)
    )
    layout = kv_layout(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, block_size=BLOCK_SIZE, dtype="bfloat16", dtype_bytes=2
    )
    driver = make_driver(bench.device.type)
    nbytes = layout.region_bytes(blocks)
    region = DeviceRegion(driver, nbytes, "bench-region", shared=False)
    host = Region.create(nbytes, "bench-host")
    begin = time.perf_counter()
    pinned = driver.register(host.array_U8)
    pinned_s = time.perf_counter() - begin
    copier = BlockCopier(
        streams=driver.streams,
        places=BlockPlaces(layout=layout, device_blocks=blocks, host_blocks=blocks),
        device=region,
        host=pinned,
        name="bench",
    )
    copier.rehearse()

    async def copies(*, out: bool) -> float:
        """-> seconds from the first one's start to the last one's end."""
        begin, most = time.perf_counter(), SpillConfig().copy_blocks_max
        ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        pieces = [range(first, min(first + most, blocks)) for first in range(0, blocks, most)]
        for piece in pieces:
            where = tuple(map(BlockId, piece)), tuple(map(HostBlockId, piece))
            copier.start(BlockCopy(out=out, device=where[0], host=where[1]), ended.put_nowait)
        for _ in pieces:
            error = await ended.get()
            if error is not None:
                raise error
        return time.perf_counter() - begin

    compute = _products(bench, side, products)
    compute()
    figures.add(mbytes=nbytes / 1e6, pin_s_per_gbyte=pinned_s / nbytes * 1e9)
    for name, out in (("out", True), ("back", False)):
        alone_s, moved_s, beside_s = [], [], []
        for _ in range(bench.repeats):
            alone_s.append(await asyncio.to_thread(compute))
            moved_s.append(await copies(out=out))
            bench.synchronize()
            computing = asyncio.create_task(asyncio.to_thread(compute))
            await copies(out=out)
            beside_s.append(await computing)
        found = {
            f"{name}_gbytes_s": nbytes / statistics.median(moved_s) / 1e9,
            f"{name}_products_alone_ms": 1e3 * statistics.median(alone_s),
            f"{name}_products_beside_ms": 1e3 * statistics.median(beside_s),
        }
        figures.add(**found)
    copier.close()
    pinned.close()
    host.close()
    region.close()


def _products(bench: Bench, side: int, products: int) -> Callable[[], float]:
    """A chain of so many products of matrices with this side. -> seconds that the compute stream took."""
    a = torch.randn(side, side, device=bench.device, dtype=torch.float32 if bench.tiny else torch.bfloat16)
    on_device = bench.device.type == "cuda"

    def compute() -> float:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_device else []
        begin = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        for _ in range(products):
            torch.mm(a, a)
        for mark in marks[1:]:
            mark.record()
            mark.synchronize()
        return marks[0].elapsed_time(marks[1]) / 1e3 if marks else time.perf_counter() - begin

    return compute
