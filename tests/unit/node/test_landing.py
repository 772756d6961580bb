"""Marks in blocks that another node is to write: what is seen of what comes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cachestore.layout import Component, LayerGroup, Layout
from kvtransfer.region import Region
from node.landing import MARKS_MAX, Marks

BLOCKS = 40
LAYOUT = Layout(
    groups=(
        LayerGroup(layers=(0, 2, 3), components=(Component(name="k", num_heads=2, slot_bytes=8),)),
        LayerGroup(layers=(1,), components=(Component(name="latent", num_heads=1, slot_bytes=1),)),
    ),
    block_size=4,
    dtype="float32",
)
"""Records of 64 bytes in the first group, of 4 in the second."""


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(LAYOUT.region_bytes(BLOCKS), "marks")
    yield made
    made.close()


def write(region: Region, layer: int, blocks: list[int]) -> None:
    """The records of one layer, in these blocks of its group."""
    for block in blocks:
        first = LAYOUT.offset(layer, block, BLOCKS)
        region.array_U8[first : first + LAYOUT.bytes_by_layer[layer]] += 1


@pytest.mark.parametrize("positions", [1, 3, 16])
def test_each_layer_that_comes_is_seen(region: Region, positions: int) -> None:
    """Of two groups, whose blocks take turns in the table. The marks lie evenly, and no record of another block, nor
    a byte of one, has any."""
    table = list(range(BLOCKS - 1, BLOCKS - 1 - 2 * positions, -1))
    marks = Marks(region, LAYOUT, table, num_blocks=BLOCKS)
    assert marks.count == min(MARKS_MAX, 4 * positions) and marks.gone() == 0
    for layer in range(4):
        write(region, layer, table[LAYOUT.places[layer][0] :: 2])
        assert marks.gone() == (layer + 1) * marks.count // 4


def test_only_blocks_of_the_grant_are_marked(region: Region) -> None:
    Marks(region, LAYOUT, [7, 9, 8, 3], num_blocks=BLOCKS)
    pages = region.array_U8.reshape(LAYOUT.num_rows, BLOCKS, LAYOUT.page_bytes)
    assert np.flatnonzero(pages.any(axis=(0, 2))).tolist() == [3, 7, 8, 9]


def test_what_is_written_twice_is_seen_once(region: Region) -> None:
    marks = Marks(region, LAYOUT, [0, 1], num_blocks=BLOCKS)
    for _ in range(2):
        write(region, 3, [0])
        assert marks.gone() == 1
