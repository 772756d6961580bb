"""The region seen as tensors, and a device's own copy of a region that lies in host memory.

Before a step, blocks that something else has filled are copied to the device. After each layer, the records that the
step has written are copied back, and then the layer is reported. The copies are synchronous, and so slow; they serve
devices that no transport writes to.

Shape suffixes as in engine/types.py; "2" is K then V   R bytes of a record   n some blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from baton.ids import BlockId
from engine.types import Batch, KvSink, KvSpec, NullSink


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on `device`, queued behind earlier work there; on the CPU the array itself.

    Copies through pinned memory, or the host would wait for all queued work. PyTorch keeps the pinned copy until it has
    been read; the array may change at once where the device is not the CPU.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def record_bytes(spec: KvSpec) -> int:
    """Bytes of one layer of one block."""
    return 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * int(getattr(torch, spec.dtype).itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMapping:
    """Each new token's position in its sequence, block and slot: int64 [T], on the pool's device."""

    positions_T: torch.Tensor
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
        num_bytes = spec.num_layers * num_blocks * record_bytes(spec)
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
        """Where the new tokens of a batch are stored; once per step, for all layers."""
        block_size = self.spec.block_size
        positions = [np.arange(s.start, s.stop, dtype=np.int64) for s in batch.slices]
        blocks = [
            np.asarray(s.block_table, dtype=np.int64)[at // block_size]
            for s, at in zip(batch.slices, positions, strict=True)
        ]
        blocks_T, positions_T = np.concatenate(blocks), np.concatenate(positions)
        assert blocks_T.min() >= 0 and blocks_T.max() < self.num_blocks, "block id outside the region"
        return SlotMapping(
            positions_T=to_device(positions_T, self.device),
            blocks_T=to_device(blocks_T, self.device),
            slots_T=to_device(positions_T % block_size, self.device),
        )

    def store(self, layer: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor, where: SlotMapping) -> None:
        """Write the K and V of one layer's new tokens into their slots, in the pool's type, and no other byte."""
        kv_N2KSD = self.kv_LN2KSD[layer]
        kv_N2KSD[where.blocks_T, 0, :, where.slots_T] = k_TKD.to(self.dtype)
        kv_N2KSD[where.blocks_T, 1, :, where.slots_T] = v_TKD.to(self.dtype)


class DeviceMirror:
    """One region's copy on one device. The control thread calls `forget`, the engine thread everything else.

    A block is *current* when all its computed records are on the device. That holds from its first step until it is
    free: transports and copies from other tiers write only to blocks that no step has used since they were free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_current_N = np.zeros(0, dtype=bool)
        self._host_LNR: np.ndarray | None = None
        self._device_LNR = torch.empty(0, dtype=torch.uint8, device=device)
        self._block_size = 1
        self._written_n = np.zeros(0, dtype=np.int64)
        self._sink: KvSink = NullSink()
        self.brought = 0
        """Blocks copied to the device, since the start."""

    def open(self, region_U8: np.ndarray, num_blocks: int, spec: KvSpec) -> torch.Tensor:
        """Allocate the copy -> uint8, one dimension, zeroed. The region is the caller's until `close`.

        Raises torch.OutOfMemoryError: the device has not the room.
        """
        shape = (spec.num_layers, num_blocks, record_bytes(spec))
        copy_U8 = torch.zeros(math.prod(shape), dtype=torch.uint8, device=self.device)
        self._host_LNR = region_U8[: copy_U8.numel()].reshape(shape)
        self._device_LNR = copy_U8.view(shape)
        self._is_current_N = np.zeros(num_blocks, dtype=bool)
        self._block_size = spec.block_size
        return copy_U8

    def close(self) -> None:
        """Drop both. Idempotent."""
        self._host_LNR = None
        self._device_LNR = torch.empty(0, dtype=torch.uint8, device=self.device)

    def forget(self, block: BlockId) -> None:
        """The block is free, so the device's copy of it is void. No step in flight has it."""
        self._is_current_N[block] = False

    def begin(self, batch: Batch, sink: KvSink) -> KvSink:
        """Copy the blocks that the batch reads and the device lacks -> the sink of the step: this mirror, which copies
        each layer back and calls `sink`."""
        host_LNR = self._host_LNR
        assert host_LNR is not None, "open comes before a step"
        size = self._block_size
        read = [s.block_table[: -(-s.start // size)] for s in batch.slices]
        written = [s.block_table[s.start // size : -(-s.stop // size)] for s in batch.slices]
        read_n, written_n = _distinct(read), _distinct(written)
        missing_n = read_n[~self._is_current_N[read_n]]
        if len(missing_n):
            where_n = torch.from_numpy(missing_n).to(self.device)
            for device_NR, host_NR in zip(self._device_LNR, host_LNR, strict=True):
                device_NR[where_n] = torch.from_numpy(host_NR[missing_n]).to(self.device)
            self.brought += len(missing_n)
        self._is_current_N[read_n] = True
        self._is_current_N[written_n] = True
        self._written_n, self._sink = written_n, sink
        return self

    def layer_done(self, layer: int) -> None:
        """Wait for the layer's K and V, and copy the blocks that the step writes to the region."""
        assert self._host_LNR is not None, "a step is running, and the region is there"
        where_n = torch.from_numpy(self._written_n).to(self.device)
        self._host_LNR[layer][self._written_n] = self._device_LNR[layer][where_n].cpu().numpy()
        self._sink.layer_done(layer)


def _distinct(tables: Sequence[Sequence[BlockId]]) -> np.ndarray:
    return np.unique(np.concatenate([np.asarray(table, dtype=np.int64) for table in tables]))
