"""What a router knows of who has which blocks, against a dict."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import Incarnation
from cachestore import holder_index
from cachestore.holder_index import HOLDERS_MAX, SAVED, HolderIndex

BYTES_MAX = 24
"""Of memory for each block of each holder."""


def digest(number: int) -> bytes:
    return random.Random(number).randbytes(16)


DIGESTS = [digest(number) for number in range(6)]
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3), st.lists(st.integers(1, 3), max_size=6).map(sorted)),
        st.tuples(st.integers(0, 3), st.none()),
        st.just("sweep"),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(CHANGES, st.integers(0, 6).map(lambda end: DIGESTS[:end]), st.integers(1, 3))
def test_the_index_agrees_with_a_dict(changes: list[object], chain: list[bytes], merged: int) -> None:
    """Blocks come to holders, change their tier and go, the last of a chain first; holders are forgotten and come
    again. With levels of two entries there are many of them, and merges take their time. The leading blocks of each
    holder, and what they save, are right."""
    index = HolderIndex()
    model: dict[Incarnation, dict[bytes, int]] = {}
    with patch.multiple(holder_index, _LEVEL_MIN=2, _LEVEL_RATIO=2, _SLICE=1, _MERGED_OF_PUT=merged):
        for change in changes:
            if change == "sweep":
                sweep(index)
                continue
            holder, tiers = Incarnation(change[0] + 1), change[1]  # type: ignore[index]
            if tiers is None:
                index.forget(holder)
                model.pop(holder, None)
                continue
            if holder not in model:
                number = index.begin()
                assert number is not None
                index.publish(holder, number)
                model[holder] = {}
            has = dict(zip(DIGESTS, tiers, strict=False))
            changed = {key: has.get(key, 0) for key in DIGESTS if has.get(key) != model[holder].get(key)}
            index.put(index.holders[holder], b"".join(changed), bytes(changed.values()))
            model[holder] = has
            check(index, model, chain)
        check(index, model, chain)
        sweep(index)
        check(index, model, chain)


def sweep(index: HolderIndex) -> None:
    while index.sweep():
        pass


def blocks(index: HolderIndex, chain: list[bytes]) -> npt.NDArray[np.uint32]:
    return (index.lookup(chain) or index.nothing()).blocks


def check(index: HolderIndex, model: dict[Incarnation, dict[bytes, int]], chain: list[bytes]) -> None:
    found = index.lookup(chain) or index.nothing()
    assert found.blocks[-1] == found.saved[-1] == 0
    assert index.holders.keys() == model.keys()
    others = np.ones(found.blocks.size, dtype=np.bool_)
    others[list(index.holders.values())] = False
    assert not found.blocks[others].any(), "nobody else has anything"
    for holder, number in index.holders.items():
        assert index.incarnation(number) == holder
        blocks = saved = 0
        least = int(SAVED.max())
        for key in chain:
            if key not in model[holder]:
                break
            least = min(least, int(SAVED[model[holder][key]]))
            blocks, saved = blocks + 1, saved + least
        assert (int(found.blocks[number]), int(found.saved[number])) == (blocks, saved)


def test_a_holder_is_known_by_its_new_number_only_once_that_is_complete() -> None:
    """A router resyncs: until the snapshot is whole it goes on with what it knew, and then knows that alone."""
    index, node = HolderIndex(), Incarnation(1)
    first = index.begin()
    assert first is not None
    index.put(first, DIGESTS[0] + DIGESTS[1], b"\1\1")
    index.publish(node, first)
    second = index.begin()
    assert second is not None
    index.put(second, DIGESTS[0], b"\1")
    assert blocks(index, DIGESTS[:2])[index.holders[node]] == 2
    index.publish(node, second)
    assert blocks(index, DIGESTS[:2])[index.holders[node]] == 1
    sweep(index)
    assert index.entries == 1
    dropped = index.begin()
    assert dropped == first, "its number is free again"
    index.discard(dropped)


def test_numbers_are_used_again_and_there_are_so_many() -> None:
    """More restarts than numbers: those of the dead are swept when they are needed. With all in use there is none."""
    index = HolderIndex()
    for start in range(HOLDERS_MAX + 10):
        number = index.begin()
        assert number is not None
        index.publish(Incarnation(1 + start % 3), number)
    for other in range(HOLDERS_MAX - 3):
        number = index.begin()
        assert number is not None
        index.publish(Incarnation(10 + other), number)
    assert index.begin() is None
    index.forget(Incarnation(10))
    assert index.begin() is not None


def test_a_million_blocks_take_little_memory() -> None:
    """A hundred nodes with ten thousand blocks each, then a third of them evicted and replaced by others."""
    index, rng = HolderIndex(), np.random.default_rng(1)
    had = {}
    for node in range(100):
        number = index.begin()
        assert number is not None
        had[number] = rng.bytes(16 * 10_000)
        index.put(number, had[number], b"\1" * 10_000)
        index.publish(Incarnation(node + 1), number)
    for number, digests in had.items():
        for start in range(0, 3_300, 330):
            index.put(number, digests[16 * start : 16 * (start + 330)], bytes(330))
            index.put(number, rng.bytes(16 * 330), b"\1" * 330)
    assert index.nbytes <= BYTES_MAX * 1_000_000
    kept = blocks(index, [had[7][16 * i : 16 * (i + 1)] for i in range(3_300, 3_324)])
    assert kept[7] == 24 and kept.sum() == 24
    assert index.lookup([had[7][:16]]) is None


def test_no_change_merges_much() -> None:
    """Messages of 256 blocks from a hundred nodes, some of which are forgotten and come again: the largest array is
    never rewritten at once. Each message, and each slice of a sweep, merges a few thousand entries at most."""
    index, rng, merged = HolderIndex(), np.random.default_rng(3), [0]
    real = holder_index._merged

    def counted(old: Any, new: Any, *, last: bool) -> Any:
        merged[0] += old.size + new.size
        return real(old, new, last=last)

    most, has = 0, {}
    for node in range(100):
        number = index.begin()
        assert number is not None
        index.publish(Incarnation(node + 1), number)
    with patch.multiple(holder_index, _merged=counted, _LEVEL_MIN=256, _SLICE=2_048):
        for turn in range(3_000):
            node = Incarnation(1 + turn % 100)
            has[node] = rng.bytes(16 * 256)
            for change in (
                lambda at=index.holders[node], what=has[node]: index.put(at, what, b"\1" * 256),
                lambda: index.sweep(),
            ):
                merged[0] = 0
                change()
                most = max(most, merged[0])
            if turn % 50 == 49:
                index.forget(node)
                number = index.begin()
                assert number is not None
                index.publish(node, number)
                del has[node]
    assert index.entries > 600_000
    assert most <= 5 * 2 * 36 * 256, "a tenth of them, in five arrays"
    for node, digests in has.items():
        assert blocks(index, [digests[:16], digests[16 * 255 :]])[index.holders[node]] == 2


def test_a_prompt_of_very_many_blocks() -> None:
    """A holder has 70,000 of them, more than 16 bits count."""
    index, number = HolderIndex(), 0
    assert index.begin() == number
    index.publish(Incarnation(1), number)
    chain = [i.to_bytes(8, "big") * 2 for i in range(70_000)]
    keys = [each[::-1] for each in chain]
    index.put(number, b"".join(keys), bytes([1]) * len(keys))
    found = index.lookup(keys)
    assert found is not None
    assert (int(found.blocks[number]), int(found.saved[number])) == (70_000, 8 * 70_000)


def test_a_block_that_a_message_names_twice_is_kept_once() -> None:
    """However often a broken node says it: the index does not grow."""
    index, digests = HolderIndex(), b"".join(DIGESTS)
    number = index.begin()
    assert number is not None
    index.publish(Incarnation(1), number)
    for _ in range(5):
        index.put(number, digests * 3, bytes([1, 2, 3, 1, 2, 3, 0, 0, 0] * 2))
    assert (index.entries, index.count(number), index.count(number + 1)) == (6, 6, 0)
