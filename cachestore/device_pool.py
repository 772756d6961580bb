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
from engine.block_manager import BlockManager
from engine.build import BuiltEngine, EngineConfig, build_runner
from engine.core import Engine
from engine.pins import PinTable
from engine.types import KvSpec, Runner
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

    def close(self) -> None:
        self.runner.unbind()
        self.region.close()


def layout_of(spec: KvSpec) -> Layout:
    return kv_layout(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=spec.dtype,
        dtype_bytes=_DTYPE_BYTES.get(spec.dtype) or np.dtype(spec.dtype).itemsize,
    )


async def open_device_pool(config: EngineConfig, *, name: str, progress: Progress) -> DevicePool:
    """Load the model and prefault the region, both on a thread of their own, with progress.

    Raises BatonError: MODEL_MISSING, MODEL_BROKEN, MODEL_UNSUPPORTED, BAD_CONFIG (the region does not fit in memory).
    """
    built = await asyncio.to_thread(build_runner, config, lambda done, total: progress("loading", done, total))
    layout = layout_of(built.runner.kv_spec)
    try:
        region = await asyncio.to_thread(
            Region.create,
            layout.region_bytes(config.num_blocks),
            f"baton-{name}",
            lambda done, total: progress("prefaulting", done, total),
        )
    except RegionTooLarge as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"{error} {config.num_blocks} blocks of {layout.num_layers} x {layout.record_bytes} bytes were asked for: "
            "set a smaller engine.num_blocks.",
            field="engine.num_blocks",
        ) from error
    built.runner.bind(region.array_U8, config.num_blocks)
    ledger = Ledger(config.num_blocks, on_free=_poisoner(region, layout, config) if config.poison_freed else None)
    blocks = BlockManager(ledger, config.block_size, built.fingerprint.encode())
    return DevicePool(
        runner=built.runner,
        engine=Engine(built.runner, blocks, config.scheduler()),
        blocks=blocks,
        pins=PinTable(
            blocks.prefix_cache, num_blocks=config.num_blocks, block_size=config.block_size, limits=config.pins
        ),
        ledger=ledger,
        region=region,
        layout=layout,
        model=_model_info(built, layout),
    )


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
    )
