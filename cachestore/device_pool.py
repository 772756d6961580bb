"""The device pool: one region, its layout and ledger, the prefix cache over it, the runner bound to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.errors import BatonError, Reason
from baton.ids import BlockId
from baton.runtime import Progress
from baton.wire import ModelInfo
from cachestore.host_tier import RegionCopier, SpillConfig, ThreadCopier
from cachestore.spill import Spill
from engine.block_manager import BlockManager
from engine.build import BuiltEngine, EngineConfig, build_runner
from engine.core import Engine
from engine.pins import PinTable
from engine.types import KvSpec, Runner
from kvtransfer import native
from kvtransfer.compatibility import PROTOCOL_MAX, PROTOCOL_MIN
from kvtransfer.layout import Layout, kv_layout
from kvtransfer.ledger import Ledger
from kvtransfer.region import Region, RegionTooLarge

# NumPy has no bfloat16; a transfer needs its size only.
_DTYPE_BYTES = {"bfloat16": 2}
POISON = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """What a node computes with. `close` frees the region; nothing may use it then."""

    runner: Runner
    engine: Engine
    blocks: BlockManager
    pins: PinTable
    ledger: Ledger
    region: Region
    layout: Layout
    model: ModelInfo
    host: HostMemory | None = None
    """None without overcommit."""

    def close(self) -> None:
        if self.host is not None:
            self.host.copier.close()
            self.host.region.close()
        self.runner.unbind()
        self.region.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The tier below the pool, and who moves blocks there and back."""

    region: Region
    copier: ThreadCopier
    spill: Spill


def layout_of(spec: KvSpec) -> Layout:
    return kv_layout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=spec.dtype,
        dtype_bytes=_DTYPE_BYTES.get(spec.dtype) or np.dtype(spec.dtype).itemsize,
    )


async def open_device_pool(
    config: EngineConfig, *, name: str, progress: Progress, spill: SpillConfig | None = None
) -> DevicePool:
    """Load the model and prefault the region, both on a thread of their own, with progress.

    With `spill.host_blocks` the same is done for host memory below it, and the engine runs under overcommit.

    Raises BatonError: MODEL_MISSING, MODEL_BROKEN, MODEL_UNSUPPORTED, BAD_CONFIG (the region does not fit in memory).
    """
    built = await asyncio.to_thread(build_runner, config, lambda done, total: progress("loading", done, total))
    layout = layout_of(built.runner.kv_spec)
    region = await _open_region(layout, config.num_blocks, f"baton-{name}", "engine.num_blocks", progress)
    _bind(built, region, config)
    ledger = Ledger(config.num_blocks, on_free=_on_free(built, region, layout, config))
    blocks = BlockManager(ledger, config.block_size, built.fingerprint.encode())
    engine = Engine(built.runner, blocks, config.scheduler())
    host = None
    if spill is not None and spill.host_blocks:
        try:
            memory = await _open_region(layout, spill.host_blocks, f"baton-{name}-host", "spill.host_blocks", progress)
        except BaseException:
            built.runner.unbind()
            region.close()
            raise
        copier = ThreadCopier(
            RegionCopier(
                layout=layout,
                device=region,
                device_blocks=config.num_blocks,
                host=memory,
                host_blocks=spill.host_blocks,
            ),
            name=name,
        )
        host = HostMemory(
            region=memory,
            copier=copier,
            spill=Spill(config=spill, engine=engine, blocks=blocks, ledger=ledger, copier=copier),
        )
    return DevicePool(
        runner=built.runner,
        engine=engine,
        blocks=blocks,
        pins=PinTable(
            blocks.prefix_cache, num_blocks=config.num_blocks, block_size=config.block_size, limits=config.pins
        ),
        ledger=ledger,
        region=region,
        layout=layout,
        model=_model_info(built, layout),
        host=host,
    )


async def _open_region(layout: Layout, num_blocks: int, name: str, field: str, progress: Progress) -> Region:
    await asyncio.to_thread(native.preload)
    try:
        return await asyncio.to_thread(
            Region.create,
            layout.region_bytes(num_blocks),
            name,
            lambda done, total: progress("prefaulting", done, total),
        )
    except RegionTooLarge as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"{error} {num_blocks} blocks of {layout.num_layers} x {layout.record_bytes} bytes were asked for: "
            f"set a smaller {field}.",
            field=field,
        ) from error


def _bind(built: BuiltEngine, region: Region, config: EngineConfig) -> None:
    """Raises BatonError BAD_CONFIG: the device has not the room. The region is closed then."""
    try:
        built.runner.bind(region.array_U8, config.num_blocks)
    except RuntimeError as error:
        # torch's error for this, whose type cannot be named without importing torch.
        if type(error).__name__ != "OutOfMemoryError":
            raise
        built.runner.unbind()
        region.close()
        raise BatonError(
            Reason.BAD_CONFIG,
            f"The device has no room for {config.num_blocks} blocks ({region.nbytes:,} bytes): {error} Set a smaller "
            "engine.num_blocks.",
            field="engine.num_blocks",
        ) from error


def _on_free(
    built: BuiltEngine, region: Region, layout: Layout, config: EngineConfig
) -> Callable[[BlockId], None] | None:
    poison, freed = _poisoner(region, layout, config) if config.poison_freed else None, built.block_freed
    if poison is None or freed is None:
        return poison or freed

    def both(block: BlockId) -> None:
        poison(block)
        freed(block)

    return both


def _poisoner(region: Region, layout: Layout, config: EngineConfig) -> Callable[[BlockId], None]:
    """Overwrites a freed block in every layer. 0xff bytes are NaN in every float type."""
    nbytes, shape = layout.region_bytes(config.num_blocks), (layout.num_layers, config.num_blocks, layout.record_bytes)

    def poison(block: BlockId) -> None:
        # No view is kept: the region could not be closed then.
        region.array_U8[:nbytes].reshape(shape)[:, block] = POISON

    return poison


def _model_info(built: BuiltEngine, layout: Layout) -> ModelInfo:
    return ModelInfo(
        name=built.model_name,
        fingerprint=built.fingerprint,
        vocab_size=built.runner.vocab_size,
        context_len_max=built.runner.context_len_max,
        eos_token_ids=tuple(sorted(built.runner.eos_token_ids)),
        layout_hash=layout.compatibility_hash(),
        block_size=layout.block_size,
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        quantisation=built.quantisation,
        quantisation_must_agree=built.quantisation_must_agree,
    )
