"""Write operations for tests: a layer's whole records, and ranges of heads, which cut records into uneven parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cachestore.layout import Int64Array, Layout
from kvtransfer.transport import RecordPlan, WriteOps


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRange:
    """Heads `first .. first+count-1` of every component, counted within the region they are in."""

    first: int
    count: int

    def __post_init__(self) -> None:
        assert self.first >= 0 and self.count > 0, self


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
    (src_group,), (dst_group,) = src_layout.groups, dst_layout.groups
    assert len(src_group.components) == len(dst_group.components)
    src_record_B = (layer * src_num_blocks + src_blocks_B) * src_layout.record_bytes
    dst_record_B = (layer * dst_num_blocks + dst_blocks_B) * dst_layout.record_bytes
    src_W, dst_W, nbytes_W = [], [], []
    src_start = dst_start = 0
    for src, dst in zip(src_group.components, dst_group.components, strict=True):
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
