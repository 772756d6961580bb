"""From layers, blocks and heads to write operations, and which bytes of a region a grant opens. Pure.

Write operations are arrays of offsets: no Python object per operation.

Shape suffixes: B blocks of one handoff step, or of a grant, rising   W write operations
S segments of a write   R those that run over several records
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from baton.ids import BlockId
from cachestore.layout import Layout
from kvtransfer.transport import WriteOps

Int64Array = npt.NDArray[np.int64]

LOOPED_SEGMENTS_MAX: Final = 32
"""Up to so many are checked one by one: less work than the array operations cost whatever they work on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRange:
    """Heads `first .. first+count-1` of every component, counted within the region they are in."""

    first: int
    count: int

    def __post_init__(self) -> None:
        assert self.first >= 0 and self.count > 0, self


def record_offsets(layout: Layout, num_blocks: int, layer: int, blocks_B: Int64Array) -> Int64Array:
    """Byte offset of each block's record of one layer in a region of `num_blocks` blocks."""
    assert 0 <= layer < layout.num_layers, (layer, layout.num_layers)
    assert (blocks_B.astype(np.uint64) < num_blocks).all(), (blocks_B, num_blocks)  # as these, negative ones are large
    return (layer * num_blocks + blocks_B.astype(np.int64)) * layout.record_bytes


class RecordPlan:
    """Whole records of some blocks, the same ones in each layer: what depends on the layer is one addition.

    Both regions have the same layout. Immutable; read from any thread.
    """

    def __init__(
        self,
        layout: Layout,
        src_blocks_B: Int64Array,
        dst_blocks_B: Int64Array,
        *,
        src_num_blocks: int,
        dst_num_blocks: int,
    ) -> None:
        assert src_blocks_B.shape == dst_blocks_B.shape, (src_blocks_B.shape, dst_blocks_B.shape)
        self._num_layers = layout.num_layers
        self._src_layer_bytes = src_num_blocks * layout.record_bytes
        self._dst_layer_bytes = dst_num_blocks * layout.record_bytes
        self._src_W = record_offsets(layout, src_num_blocks, 0, src_blocks_B)
        self._dst_W = record_offsets(layout, dst_num_blocks, 0, dst_blocks_B)
        self._nbytes_W = np.full(self._src_W.shape, layout.record_bytes, dtype=np.int64)

    def of_layer(self, layer: int) -> WriteOps:
        """One operation for each block: its whole record of this layer."""
        assert 0 <= layer < self._num_layers, (layer, self._num_layers)
        return WriteOps(
            src=self._src_W + layer * self._src_layer_bytes,
            dst=self._dst_W + layer * self._dst_layer_bytes,
            nbytes=self._nbytes_W,
        )


def whole_records(
    layout: Layout,
    layer: int,
    src_blocks_B: Int64Array,
    dst_blocks_B: Int64Array,
    *,
    src_num_blocks: int,
    dst_num_blocks: int,
) -> WriteOps:
    """One operation for each block: its whole record of one layer. Both regions have the same layout."""
    plan = RecordPlan(layout, src_blocks_B, dst_blocks_B, src_num_blocks=src_num_blocks, dst_num_blocks=dst_num_blocks)
    return plan.of_layer(layer)


def head_ranges(
    src_layout: Layout,
    dst_layout: Layout,
    layer: int,
    src_blocks_B: Int64Array,
    dst_blocks_B: Int64Array,
    *,
    src_num_blocks: int,
    dst_num_blocks: int,
    src_heads: HeadRange,
    dst_heads: HeadRange,
) -> WriteOps:
    """One operation for each block and component: a range of heads, for two sides of different tensor parallelism.

    The layouts agree in everything but the number of heads of each component. W = components x B, component-major.
    """
    assert src_heads.count == dst_heads.count, (src_heads, dst_heads)
    assert src_layout.block_size == dst_layout.block_size and src_layout.dtype == dst_layout.dtype
    assert len(src_layout.components) == len(dst_layout.components)
    src_record_B = record_offsets(src_layout, src_num_blocks, layer, src_blocks_B)
    dst_record_B = record_offsets(dst_layout, dst_num_blocks, layer, dst_blocks_B)
    src_W, dst_W, nbytes_W = [], [], []
    src_start = dst_start = 0
    for src, dst in zip(src_layout.components, dst_layout.components, strict=True):
        assert (src.name, src.slot_bytes) == (dst.name, dst.slot_bytes), (src, dst)
        assert src_heads.first + src_heads.count <= src.num_heads, (src_heads, src)
        assert dst_heads.first + dst_heads.count <= dst.num_heads, (dst_heads, dst)
        head_bytes = src_layout.block_size * src.slot_bytes
        src_W.append(src_record_B + src_start + src_heads.first * head_bytes)
        dst_W.append(dst_record_B + dst_start + dst_heads.first * head_bytes)
        nbytes_W.append(np.full(src_record_B.shape, src_heads.count * head_bytes, dtype=np.int64))
        src_start += src.num_heads * head_bytes
        dst_start += dst.num_heads * head_bytes
    return WriteOps(src=np.concatenate(src_W), dst=np.concatenate(dst_W), nbytes=np.concatenate(nbytes_W))


class RecordRanges:
    """All layers' records of some blocks (see `kvtransfer.transport.WriteRanges`). Keeps the blocks alone."""

    def __init__(self, layout: Layout, num_blocks: int, blocks: Iterable[BlockId]) -> None:
        """`num_blocks` is the region's; `blocks` are distinct."""
        self._record_bytes = layout.record_bytes
        self._num_records = layout.num_layers * num_blocks
        self._num_blocks = num_blocks
        named = sorted(blocks)
        assert not named or (named[0] >= 0 and named[-1] < num_blocks), num_blocks
        assert len(set(named)) == len(named), "a block was named twice"
        self._blocks = named
        self._blocks_B = np.array(named, np.int64)

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        """See `WriteRanges.cover`. A segment may run through neighbouring records, if all of them are open."""
        total_bytes = self._num_records * self._record_bytes
        if len(dst_S) <= LOOPED_SEGMENTS_MAX:
            return all(map(self._covers, dst_S.tolist(), nbytes_S.tolist()))
        if ((nbytes_S <= 0) | (nbytes_S > total_bytes) | (dst_S < 0) | (dst_S > total_bytes - nbytes_S)).any():
            return False
        first_S, last_S = dst_S // self._record_bytes, (dst_S + nbytes_S - 1) // self._record_bytes
        block_S = first_S % self._num_blocks
        at_S = np.searchsorted(self._blocks_B, block_S)
        if len(self._blocks_B) == 0 or (self._blocks_B.take(at_S, mode="clip") != block_S).any():
            return False
        run_S = last_S > first_S
        end_R, first_R = last_S[run_S] + 1, first_S[run_S]
        return bool((self._open_below(end_R) - self._open_below(first_R) == end_R - first_R).all())

    def _covers(self, dst: int, nbytes: int) -> bool:
        if nbytes <= 0 or dst < 0 or dst + nbytes > self._num_records * self._record_bytes:
            return False
        first, end = dst // self._record_bytes, (dst + nbytes - 1) // self._record_bytes + 1
        return self._open_below_one(end) - self._open_below_one(first) == end - first

    def _open_below_one(self, record: int) -> int:
        layer, block = divmod(record, self._num_blocks)
        return layer * len(self._blocks) + bisect.bisect_left(self._blocks, block)

    def _open_below(self, record_S: np.ndarray) -> np.ndarray:
        """How many open records have a smaller index."""
        layer_S, block_S = record_S // self._num_blocks, record_S % self._num_blocks
        counts: np.ndarray = layer_S * len(self._blocks_B) + np.searchsorted(self._blocks_B, block_S)
        return counts
