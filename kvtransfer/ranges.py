"""Which bytes of a region a grant opens. Pure.

Shape suffixes: B = blocks of the grant, rising; S = segments of a write;
R = those that run over several records.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

import numpy as np

from baton.ids import BlockId
from cachestore.layout import Layout

LOOPED_SEGMENTS_MAX = 32
"""So many are looked at one by one: less work than the array operations cost whatever they work on."""


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
