"""What can be seen of blocks while another node writes them into this one's region, by whatever transport.

Before a writer may write, a few places of its blocks are marked, and what is written there wipes the marks out. So the
receiver tells a writer that works slowly from one that has stopped, without a message and without the transport's help.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Final

import numpy as np

from cachestore.layout import Layout
from kvtransfer.region import Region

MARKS_MAX: Final = 32
"""Of one grant: a look at them takes some 20 us. A transfer that takes as long as computing passes one after each
thirtieth of that."""
MARK_BYTES_MAX: Final = 8
"""Random ones: what is written is not the same but by a chance of one in 2^64, where records are as long."""


class Marks:
    """In the last bytes of records that lie evenly among all of a grant's, layer by layer."""

    def __init__(self, region: Region, layout: Layout, blocks: Sequence[int], *, num_blocks: int) -> None:
        """Writes them, so nobody else may write there yet. `blocks` are listed position after position, `num_blocks`
        is the region's."""
        groups = layout.num_groups
        positions = len(blocks) // groups
        records = layout.num_layers * positions
        nbytes = min(MARK_BYTES_MAX, *layout.bytes_by_layer)
        ends = []
        self.count = min(MARKS_MAX, records)
        for number in range(self.count):
            layer, position = divmod((number + 1) * records // self.count - 1, positions)
            block = blocks[position * groups + layout.places[layer][0]]
            ends.append(layout.offset(layer, block, num_blocks) + layout.bytes_by_layer[layer])
        self._region = region
        self._at = np.array(ends, dtype=np.int64)[:, None] - np.arange(nbytes, 0, -1)
        self._mark = np.frombuffer(secrets.token_bytes(nbytes), dtype=np.uint8)
        region.array_U8[self._at] = self._mark

    def gone(self) -> int:
        """How many have been written over. Never fewer than before."""
        return int((self._region.array_U8[self._at] != self._mark).any(axis=1).sum())
