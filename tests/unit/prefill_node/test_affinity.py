"""Which decode node is asked first: the one that has the prefix, while it has about as much room."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Incarnation
from baton.wire import BlockLoad, NodeLoad, NodeRecord
from prefill_node.decode_nodes import ROOM_SHARE_MIN, DecodeAffinity, order_decode_nodes
from tests.unit.prefill_node.test_placement import MODEL, node

CHAIN = [b"a", b"b", b"c"]


def with_room(index: int, free: int, *, sequence: int = 1) -> NodeRecord:
    return replace(node(index), load=NodeLoad(blocks=BlockLoad(free=free)), sequence=sequence)


def first(affinity: DecodeAffinity, records: list[NodeRecord], chain: list[bytes], seed: int = 0) -> str:
    order = order_decode_nodes(
        records,
        own=MODEL,
        may_place=lambda _: True,
        rng=random.Random(seed),
        tries_max=3,
        affinity=affinity,
        chain=chain,
    )
    assert len({record.name for record in order}) == len(order)
    return order[0].name


def test_the_node_that_has_the_prefix_goes_first() -> None:
    """Eight equal nodes: a prompt that begins as one sent to decode-5 goes there, always; others are spread."""
    affinity = DecodeAffinity(blocks_max=100)
    records = [with_room(i, 1_000) for i in range(8)]
    affinity.granted(records[5], CHAIN, 0)
    assert {first(affinity, records, [*CHAIN, b"d"], seed) for seed in range(50)} == {"decode-5"}
    assert {first(affinity, records, [b"a"], seed) for seed in range(50)} == {"decode-5"}
    assert len(Counter(first(affinity, records, [b"x"], seed) for seed in range(200))) == 8
    assert len(Counter(first(affinity, records, [], seed) for seed in range(200))) == 8


def test_of_two_that_have_some_the_longer_prefix_wins() -> None:
    affinity = DecodeAffinity(blocks_max=100)
    records = [with_room(i, 100 + i) for i in range(3)]
    affinity.granted(records[0], CHAIN, 0)
    affinity.granted(records[1], CHAIN[:2], 0)
    assert first(affinity, records, CHAIN) == "decode-0"
    assert first(affinity, records, CHAIN[:2]) in ("decode-0", "decode-1")


@pytest.mark.parametrize(("free", "wins"), [(90, True), (89, False)])
def test_room_goes_before_the_prefix(free: int, wins: bool) -> None:
    """Down to the stated share of the best one's room, and no further."""
    assert ROOM_SHARE_MIN == 0.9
    affinity = DecodeAffinity(blocks_max=100)
    records = [with_room(0, 100), with_room(1, free)]
    affinity.granted(records[1], CHAIN, 0)
    assert (first(affinity, records, CHAIN) == "decode-1") == wins


def test_what_was_granted_since_the_last_report_counts_at_once() -> None:
    """A burst of one prefix does not all go to the node that has it: what it granted is off its room until it reports
    again."""
    affinity = DecodeAffinity(blocks_max=100)
    records = [with_room(0, 1_000), with_room(1, 1_000)]
    affinity.granted(records[1], CHAIN, 60)
    assert first(affinity, records, CHAIN) == "decode-1"
    affinity.granted(records[1], CHAIN, 60)
    assert first(affinity, records, CHAIN) == "decode-0"
    records[1] = with_room(1, 950, sequence=2)
    assert first(affinity, records, CHAIN) == "decode-1"


def test_another_process_at_the_same_place_has_nothing() -> None:
    """What was sent to the predecessor of a restarted node says nothing about it."""
    affinity = DecodeAffinity(blocks_max=100)
    record = with_room(0, 100)
    affinity.granted(record, CHAIN, 50)
    assert affinity.cached(record.incarnation, CHAIN) == 3
    assert affinity.cached(Incarnation(record.incarnation + 1_000), CHAIN) == 0
    affinity.keep_only(set())
    affinity.granted(replace(record, sequence=9), CHAIN, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4, unique=True))
    ),
    st.integers(1, 6),
)
def test_what_is_remembered_is_bounded_and_true(grants: list[tuple[int, list[bytes]]], blocks_max: int) -> None:
    """Never more than was sent there, and never more than the limit; the last one granted is known if it fits."""
    affinity = DecodeAffinity(blocks_max=blocks_max)
    sent: set[tuple[int, bytes]] = set()
    for index, chain in grants:
        record = with_room(index, 10)
        affinity.granted(record, chain, 1)
        sent |= {(index, digest) for digest in chain}
        assert affinity.cached(record.incarnation, chain) == min(len(chain), blocks_max)
        known = [
            (i, d) for i in range(3) for d in (b"a", b"b", b"c", b"d") if affinity.cached(node(i).incarnation, [d])
        ]
        assert len(known) <= blocks_max
        assert set(known) <= sent
