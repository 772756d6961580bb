"""Layout and plan: offsets against a NumPy array of the same shape, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import BlockId
from cachestore.layout import Component, LayerGroup, Layout, kv_layout
from kvtransfer.transport import RecordPlan, WriteOps, WriteRanges
from tests.support.write_ops import HeadRange, head_ranges, whole_records

KV = (Component(name="k", num_heads=2, slot_bytes=2), Component(name="v", num_heads=2, slot_bytes=2))


def apply(ops: WriteOps, src_U8: np.ndarray, dst_U8: np.ndarray) -> None:
    for src, dst, nbytes in zip(ops.src, ops.dst, ops.nbytes, strict=True):
        dst_U8[dst : dst + nbytes] = src_U8[src : src + nbytes]


def layout_of(heads: int, *, layers: int = 3, block_size: int = 4, head_dim: int = 2) -> Layout:
    return kv_layout(
        num_layers=layers, num_kv_heads=heads, head_dim=head_dim, block_size=block_size, dtype="uint8", dtype_bytes=1
    )


@given(data=st.data())
def test_whole_records_copy_exactly_the_named_blocks_of_one_layer(data: st.DataObject) -> None:
    """Random block tables on two regions of different size: the named records arrive, nothing else changes."""
    layout = layout_of(heads=data.draw(st.integers(1, 3)))
    n_src, n_dst = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    count = data.draw(st.integers(0, min(n_src, n_dst)))
    src_blocks = np.array(data.draw(st.permutations(range(n_src)))[:count], dtype=np.int64)
    dst_blocks = np.array(data.draw(st.permutations(range(n_dst)))[:count], dtype=np.int64)
    layer = data.draw(st.integers(0, layout.num_layers - 1))
    rng = np.random.default_rng(1)
    src_U8 = rng.integers(1, 255, layout.region_bytes(n_src), dtype=np.uint8)
    dst_U8 = np.zeros(layout.region_bytes(n_dst), dtype=np.uint8)
    ops = whole_records(layout, layer, src_blocks, dst_blocks, src_num_blocks=n_src, dst_num_blocks=n_dst)
    apply(ops, src_U8, dst_U8)
    src_LNR = src_U8.reshape(layout.num_layers, n_src, layout.record_bytes)
    expected_LNR = np.zeros((layout.num_layers, n_dst, layout.record_bytes), dtype=np.uint8)
    expected_LNR[layer, dst_blocks] = src_LNR[layer, src_blocks]
    assert np.array_equal(dst_U8, expected_LNR.reshape(-1))
    assert ops.total_bytes == count * layout.record_bytes


@given(data=st.data())
def test_two_half_size_receivers_get_their_heads_of_each_record(data: st.DataObject) -> None:
    """One writer with 4 heads, two receivers with 2 heads each: each gets its head range of K and of V."""
    src, dst = layout_of(heads=4), layout_of(heads=2)
    n_src, n_dst = 5, 6
    count = data.draw(st.integers(1, 5))
    src_blocks = np.array(data.draw(st.permutations(range(n_src)))[:count], dtype=np.int64)
    dst_blocks = np.array(data.draw(st.permutations(range(n_dst)))[:count], dtype=np.int64)
    rank, layer = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 2))
    src_U8 = np.random.default_rng(2).integers(1, 255, src.region_bytes(n_src), dtype=np.uint8)
    dst_U8 = np.zeros(dst.region_bytes(n_dst), dtype=np.uint8)
    ops = head_ranges(
        src,
        dst,
        layer,
        src_blocks,
        dst_blocks,
        src_num_blocks=n_src,
        dst_num_blocks=n_dst,
        src_heads=HeadRange(first=2 * rank, count=2),
        dst_heads=HeadRange(first=0, count=2),
    )
    apply(ops, src_U8, dst_U8)
    src_LNCKSD = src_U8.reshape(3, n_src, 2, 4, 4, 2)
    expected = np.zeros((3, n_dst, 2, 2, 4, 2), dtype=np.uint8)
    expected[layer, dst_blocks] = src_LNCKSD[layer, src_blocks][:, :, 2 * rank : 2 * rank + 2]
    assert np.array_equal(dst_U8, expected.reshape(-1))


def test_whole_head_range_equals_whole_records() -> None:
    """With all heads on both sides the two plans move the same bytes to the same places."""
    layout = layout_of(heads=3)
    blocks = np.array([4, 0, 2], dtype=np.int64)
    src_U8 = np.random.default_rng(3).integers(0, 255, layout.region_bytes(5), dtype=np.uint8)
    whole_U8, ranged_U8 = np.zeros_like(src_U8), np.zeros_like(src_U8)
    apply(whole_records(layout, 1, blocks, blocks[::-1].copy(), src_num_blocks=5, dst_num_blocks=5), src_U8, whole_U8)
    everything = HeadRange(first=0, count=3)
    ops = head_ranges(
        layout,
        layout,
        1,
        blocks,
        blocks[::-1].copy(),
        src_num_blocks=5,
        dst_num_blocks=5,
        src_heads=everything,
        dst_heads=everything,
    )
    apply(ops, src_U8, ranged_U8)
    assert np.array_equal(whole_U8, ranged_U8)


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (LayerGroup(layers=(0, 1, 2, 3), components=KV),)},
        {"block_size": 8},
        {"dtype": "float16"},
        {"groups": (LayerGroup(layers=(0, 1, 2), components=KV[:1]),)},
        {"groups": (LayerGroup(layers=(0, 2), components=KV), LayerGroup(layers=(1,), components=KV))},
        {"groups": (LayerGroup(layers=(0, 1), components=KV), LayerGroup(layers=(2,), components=KV))},
    ],
)
def test_every_field_of_a_layout_changes_its_hash(change: dict[str, object]) -> None:
    """Two nodes that differ in any one field never hand over."""
    base = layout_of(heads=2)
    fields = {name: getattr(base, name) for name in ("groups", "block_size", "dtype")}
    other = Layout(**{**fields, **change})
    assert other.compatibility_hash() != base.compatibility_hash()
    assert Layout(**fields).compatibility_hash() == base.compatibility_hash()


def test_layout_hash_is_stable_across_processes_and_versions() -> None:
    """A rolling update must not change the hash of an unchanged layout: the value is written down here."""
    assert layout_of(heads=2).compatibility_hash() == "28f96b046766eda7a97d110d4906cc58"


@st.composite
def grouped(draw: st.DrawFn) -> Layout:
    """One to three groups of layers in any order, records of any size."""
    num_layers = draw(st.integers(1, 6))
    group_of = draw(st.lists(st.integers(0, 2), min_size=num_layers, max_size=num_layers))
    members = [[layer for layer in range(num_layers) if group_of[layer] == group] for group in range(3)]
    groups = tuple(
        LayerGroup(
            layers=tuple(layers),
            components=tuple(
                Component(name=f"c{number}", num_heads=draw(st.integers(1, 2)), slot_bytes=draw(st.integers(1, 5)))
                for number in range(draw(st.integers(1, 3)))
            ),
        )
        for layers in members
        if layers
    )
    return Layout(groups=groups, block_size=draw(st.integers(1, 3)), dtype="uint8")


def own_records(layout: Layout, table: list[int], num_blocks: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(layer, position) -> where its record begins, and its length: by the definition alone."""
    size = max(sum(c.num_heads * c.slot_bytes for c in group.components) * layout.block_size for group in layout.groups)
    found = {}
    for number, group in enumerate(layout.groups):
        nbytes = sum(c.num_heads * c.slot_bytes for c in group.components) * layout.block_size
        for row, layer in enumerate(group.layers):
            for position, block in enumerate(table[number :: len(layout.groups)]):
                found[layer, position] = ((row * num_blocks + block) * size, nbytes)
    return found


@given(layout=grouped(), data=st.data())
def test_groups_of_layers_share_a_region_and_every_record_arrives(layout: Layout, data: st.DataObject) -> None:
    """A table with a block of each group for each position: no two records overlap or leave the region, a plan moves
    all bytes of all layers and no other, and what the layout says of places and sizes agrees."""
    positions, num_groups = data.draw(st.integers(0, 3)), layout.num_groups
    n_src, n_dst = (positions * num_groups + data.draw(st.integers(1, 3)) for _ in range(2))
    src, dst = (data.draw(st.permutations(range(n)))[: positions * num_groups] for n in (n_src, n_dst))
    src_U8 = np.random.default_rng(1).integers(1, 255, layout.region_bytes(n_src), dtype=np.uint8)
    dst_U8, expected_U8 = (np.zeros(layout.region_bytes(n_dst), dtype=np.uint8) for _ in range(2))
    at_src, at_dst = own_records(layout, src, n_src), own_records(layout, dst, n_dst)
    for record, (begin, nbytes) in at_src.items():
        to, _ = at_dst[record]
        assert not expected_U8[to : to + nbytes].any() and to + nbytes <= len(expected_U8), "records overlap"
        expected_U8[to : to + nbytes] = src_U8[begin : begin + nbytes]
    plan = RecordPlan(
        layout, np.array(src, np.int64), np.array(dst, np.int64), src_num_blocks=n_src, dst_num_blocks=n_dst
    )
    ranges = WriteRanges(layout, n_dst, [BlockId(block) for block in dst])
    for layer in range(layout.num_layers):
        ops = plan.of_layer(layer)
        assert (len(ops.src), ops.total_bytes) == (plan.writes_per_layer, plan.layer_nbytes(layer))
        assert ranges.cover(ops.dst, ops.nbytes)
        wanted = [at_dst[layer, position][0] for position in range(positions)]
        blocks = plan.dst_blocks(layer).tolist()
        assert ops.dst.tolist() == wanted == [layout.offset(layer, block, n_dst) for block in blocks]
        apply(ops, src_U8, dst_U8)
    assert np.array_equal(dst_U8, expected_U8)
    assert plan.nbytes == positions * layout.position_bytes == sum(nbytes for _, nbytes in at_dst.values())
    for group in range(num_groups):
        table = dst[group::num_groups]
        wanted = [at_dst[layer, at][0] for layer in layout.groups[group].layers for at in range(positions)]
        assert layout.block_offsets(group, table, n_dst).tolist() == wanted
        assert len(table) * layout.block_bytes(group) == len(wanted) * layout.record_bytes_of(group)


def test_block_outside_the_region_is_refused() -> None:
    """A block number past the receiver's region never becomes an offset."""
    layout = layout_of(heads=1)
    with pytest.raises(AssertionError):
        whole_records(layout, 0, np.array([0]), np.array([7]), src_num_blocks=3, dst_num_blocks=7)


def test_several_layers_in_one_post_are_those_layers_one_after_another() -> None:
    """Three of four layers of two blocks: six operations, as of each layer by itself."""
    layout = kv_layout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=4, dtype="uint8", dtype_bytes=1)
    blocks_B = np.array([3, 1], dtype=np.int64)
    plan = RecordPlan(layout, blocks_B, blocks_B[::-1], src_num_blocks=4, dst_num_blocks=5)
    several, each = plan.of_layers(1, 4), [plan.of_layer(layer) for layer in (1, 2, 3)]
    for what in ("src", "dst", "nbytes"):
        assert getattr(several, what).tolist() == [n for ops in each for n in getattr(ops, what).tolist()]
