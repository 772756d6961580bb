"""The region seen as tensors. Shape suffixes as in engine/types.py; "2" is K then V."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.staging import to_device
from engine.types import Batch, KvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMapping:
    """Where the K and V of each new token go: block id and slot in it, int64 [T] each, on the pool's device."""

    blocks_T: torch.Tensor
    slots_T: torch.Tensor


class KvPool:
    """A view of the region; owns no memory. Used by the engine thread only.

    Record `(layer, block)` is `kv_LN2KSD[layer, block]`, contiguous.
    """

    def __init__(self, region_U8: torch.Tensor, num_blocks: int, spec: KvSpec) -> None:
        """View `region_U8` (uint8, one dimension) as `num_blocks` blocks; bytes past them are left alone."""
        assert region_U8.dtype == torch.uint8, region_U8.dtype
        assert region_U8.dim() == 1, region_U8.shape
        dtype = getattr(torch, spec.dtype)
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        assert region_U8.numel() >= num_bytes, (region_U8.numel(), num_bytes)
        assert region_U8.data_ptr() % dtype.itemsize == 0, "region is not aligned to its element type"
        self.spec = spec
        self.num_blocks = num_blocks
        self.kv_LN2KSD = region_U8[:num_bytes].view(dtype).view(shape)

    @property
    def device(self) -> torch.device:
        return self.kv_LN2KSD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.kv_LN2KSD.dtype

    def map_slots(self, batch: Batch) -> SlotMapping:
        """Where the new tokens of a batch go; once per step, for all layers."""
        block_size = self.spec.block_size
        blocks, slots = [], []
        for s in batch.slices:
            positions = np.arange(s.start, s.stop, dtype=np.int64)
            blocks.append(np.asarray(s.block_table, dtype=np.int64)[positions // block_size])
            slots.append(positions % block_size)
        blocks_T = np.concatenate(blocks)
        assert blocks_T.min() >= 0 and blocks_T.max() < self.num_blocks, "block id outside the region"
        return SlotMapping(
            blocks_T=to_device(blocks_T, self.device),
            slots_T=to_device(np.concatenate(slots), self.device),
        )

    def store(self, layer: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor, where: SlotMapping) -> None:
        """Write the K and V of the new tokens of one layer into their slots; no other byte is touched."""
        kv_N2KSD = self.kv_LN2KSD[layer]
        kv_N2KSD[where.blocks_T, 0, :, where.slots_T] = k_TKD
        kv_N2KSD[where.blocks_T, 1, :, where.slots_T] = v_TKD

    def runs(self, layer: int) -> torch.Tensor:
        """One layer as rows of S*D elements, row `(block * 2 + k_or_v) * K + head`: what `attention` gathers."""
        return self.kv_LN2KSD[layer].view(self.num_blocks * 2 * self.spec.num_kv_heads, -1)
