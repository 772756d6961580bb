"""A device's own copy of a region that lies in host memory, kept equal where it matters.

The region that transports write to and read from stays where it is on a CPU. Before a step, blocks that something else
has filled are copied to the device; after each layer, the records that the step has written are copied back, and only
then is the layer told of. Every copy is waited for: plain, exact and slow, for devices that no transport writes to.

Shape suffixes as in engine/types.py; R bytes of a record   n some blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from baton.ids import BlockId
from engine.types import Batch, KvSink, KvSpec


class DeviceMirror:
    """One region's copy on one device. `forget` is the control thread's, all else the engine thread's.

    A block is *current* when its records are on the device as far as they were ever computed. It is so from its first
    step until it is freed: what a transport, or a copy from another tier, writes to is a block that no step has used
    since it was free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_current_N = np.zeros(0, dtype=bool)
        self._host_LNR: np.ndarray | None = None
        self._device_LNR = torch.empty(0, dtype=torch.uint8, device=device)
        self._block_size = 1
        self.brought = 0
        """Blocks copied to the device, since the start."""

    def open(self, region_U8: np.ndarray, num_blocks: int, spec: KvSpec) -> torch.Tensor:
        """Allocate the copy -> uint8, one dimension, zeroed. The region is the caller's until `close`.

        Raises:
            torch.OutOfMemoryError: the device has not the room.
        """
        itemsize = getattr(torch, spec.dtype).itemsize
        shape = (
            spec.num_layers, num_blocks, 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * itemsize
        )  # fmt: skip
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
        """The block is free: what the device has of it is worth nothing. It is not part of a step in flight."""
        self._is_current_N[block] = False

    def begin(self, batch: Batch, sink: KvSink) -> KvSink:
        """Bring what the batch reads and the device lacks -> the sink for the forward pass, which copies back."""
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
        return _CopyingSink(self._device_LNR, host_LNR, written_n, sink)


class _CopyingSink:
    def __init__(self, device_LNR: torch.Tensor, host_LNR: np.ndarray, written_n: np.ndarray, inner: KvSink) -> None:
        self._device_LNR = device_LNR
        self._host_LNR = host_LNR
        self._written_n = written_n
        self._where_n = torch.from_numpy(written_n).to(device_LNR.device)
        self._inner = inner

    def layer_done(self, layer: int) -> None:
        """Waits for the layer's K and V to be computed, copies them, passes the word on."""
        self._host_LNR[layer][self._written_n] = self._device_LNR[layer][self._where_n].cpu().numpy()
        self._inner.layer_done(layer)


def _distinct(tables: Sequence[Sequence[BlockId]]) -> np.ndarray:
    return np.unique(np.concatenate([np.asarray(table, dtype=np.int64) for table in tables]))
