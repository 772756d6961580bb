"""How many blocks a node's region has: as many as its configuration says, or a share of the memory that is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.errors import BatonError, Reason
from cachestore.layout import Layout
from engine.build import BLOCKS_MAX, ComputeDevice, EngineConfig, EngineKind, device_memory_bytes
from kvtransfer.region import memory_available_bytes
from node.spill import SpillConfig
from node.store import StoreConfig

HOST_SHARE_DEFAULT: Final = 0.5
"""The rest is for what the engine needs while it computes, for the page cache, and for other programs."""
DEVICE_SHARE_DEFAULT: Final = 0.8
"""The rest is for what kernels and graphs need, which are made after the region."""
HOST_BYTES_DEFAULT_MAX: Final = 4 << 30
"""Every page is made at the start, which takes a second or so for each GiB: more has to be asked for."""
MOCK_BLOCKS: Final = 1_024
TOKENS_MIN: Final = 4_096
"""A region whose size nobody has given holds one sequence of so many tokens, or of the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSize:
    num_blocks: int
    text: str
    """For people: tokens, blocks, bytes, and why so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    blocks: int
    why: str


def region_size(
    config: EngineConfig,
    layout: Layout,
    *,
    context_len_max: int,
    weights_bytes: int,
    spill: SpillConfig | None = None,
    store: StoreConfig | None = None,
) -> RegionSize:
    """Ask for it once the weights are loaded. `spill` and `store` get their memory after the region.

    Raises BatonError BAD_CONFIG: the share is too small for one sequence.
    """
    if config.num_blocks is not None:
        found = _Bound(blocks=config.num_blocks, why="engine.num_blocks")
    elif config.kind is EngineKind.MOCK:
        found = _Bound(blocks=MOCK_BLOCKS, why="the mock engine's")
    else:
        below_bytes = 0 if store is None else store.host_bytes
        if spill is not None:
            below_bytes += layout.region_bytes(spill.host_blocks)
        free_bytes = _free_bytes(config, weights_bytes=weights_bytes, below_bytes=below_bytes)
        found = _by_share(config, layout, context_len_max=context_len_max, free_bytes=free_bytes)
    tokens, nbytes = found.blocks // layout.num_groups * layout.block_size, layout.region_bytes(found.blocks)
    text = f"{tokens:,} tokens in {found.blocks:,} blocks, {bytes_text(nbytes)}: {found.why}"
    return RegionSize(num_blocks=found.blocks, text=text)


def _free_bytes(config: EngineConfig, *, weights_bytes: int, below_bytes: int) -> int:
    """What this node may reckon with. Nodes of one `baton up` reckon with equal parts, less weights that may not be
    loaded yet: what is free at the moment depends on which of them is first."""
    if config.memory_free_bytes is not None:
        host_bytes = config.memory_free_bytes // config.memory_nodes - weights_bytes - below_bytes
    else:
        host_bytes = memory_available_bytes() - below_bytes
    found = [] if config.device is ComputeDevice.CUDA else [host_bytes]
    if config.device.on_gpu:  # cuda-mirrored has a copy of the region there
        free_bytes, total_bytes = device_memory_bytes()
        found.append(free_bytes)
        if config.memory_nodes > 1:
            found.append(total_bytes // config.memory_nodes - weights_bytes)
    return max(0, min(found))


def _by_share(config: EngineConfig, layout: Layout, *, context_len_max: int, free_bytes: int) -> _Bound:
    """Raises BatonError BAD_CONFIG."""
    size, groups = layout.block_size, layout.num_groups
    on_device = config.device is ComputeDevice.CUDA
    default = DEVICE_SHARE_DEFAULT if on_device else HOST_SHARE_DEFAULT
    share = default if config.memory_share is None else config.memory_share
    free = f"{bytes_text(free_bytes)} free"
    if config.memory_nodes > 1:
        free += f" for each of {config.memory_nodes} nodes"

    def blocks_in(nbytes: float) -> int:
        return int(nbytes) // layout.region_bytes(groups) * groups

    def bound(blocks: int, why: str) -> _Bound:
        return _Bound(blocks=min(blocks, BLOCKS_MAX), why=why)

    tokens_min = min(context_len_max, TOKENS_MIN)
    blocks_min = -(-tokens_min // size) * groups
    by_share = bound(blocks_in(share * free_bytes), f"{share:.3g} of {free}")
    if by_share.blocks < blocks_min:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"Too little memory for KV: {by_share.why}, which is room for {by_share.blocks // groups * size:,} tokens. "
            f"A node has room for {tokens_min:,} at least ({bytes_text(layout.region_bytes(blocks_min))}). Free some "
            "memory, raise the memory limit or engine.memory_share, start fewer nodes, or say in engine.num_blocks how "
            "few blocks are enough.",
            field="engine.memory_share",
        )
    if config.memory_share is not None:
        return by_share
    sequences = config.sequences_max
    bounds = [
        by_share,
        bound(
            -(-sequences * context_len_max // size) * groups,
            f"what {sequences} sequences of {context_len_max:,} tokens fill; {free}",
        ),
    ]
    if not on_device:
        most = max(blocks_in(HOST_BYTES_DEFAULT_MAX), blocks_min)
        bounds.append(bound(most, f"the most without engine.memory_share or engine.num_blocks; {free}"))
    return min(bounds, key=lambda each: each.blocks)


def bytes_text(nbytes: int) -> str:
    """ "4.0 GiB", "1.5 MiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes / 1024:.1f} KiB"
