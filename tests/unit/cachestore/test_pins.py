"""Pinned prefixes: the index against a naive model, and the table of names with its limits and leases."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId
from cachestore.ledger import Ledger
from cachestore.pins import PinLimits, PinTable
from cachestore.prefix_cache import IndexCursor, PrefixCache
from tests.unit.cachestore.test_prefix_cache import (
    SIZE,
    Key,
    NaiveCache,
    chain_of,
    enter,
    leave,
    make,
    prompts,
    salts,
)

BLOCKS = 24
ALL = 1_000


@dataclass
class NaivePinned(NaiveCache):
    """A chain is pinned when a pin begins with it; it is never evicted, and its own beginning neither."""

    wanted: Counter[Key] = field(default_factory=Counter)

    def evict_pinned_until(self, free: int, free_now: int, held: set[int]) -> None:
        while free_now < free:
            idle = [k for k, e in self.entries.items() if e[0] not in held and self.wanted[k] == 0]
            victim = min(idle, key=lambda k: (self.entries[k][1], -len(k[1]), self.entries[k][2]))
            for key in list(self.entries):
                if key[0] == victim[0] and key[1][: len(victim[1])] == victim[1]:
                    free_now += self.entries.pop(key)[0] not in held

    def pinned(self) -> set[int]:
        return {entry[0] for key, entry in self.entries.items() if self.wanted[key]}


def keys_of(tokens: list[int], salt: bytes) -> list[Key]:
    chain = chain_of(tokens)
    return [(salt, chain[: n + 1]) for n in range(len(chain))]


steps = st.one_of(
    st.tuples(st.just("enter"), prompts, salts),
    st.tuples(st.just("match"), prompts, salts),
    st.tuples(st.just("leave"), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("evict"), st.integers(1, BLOCKS), st.none()),
    st.tuples(st.just("pin"), prompts, salts),
    st.tuples(st.just("unpin"), st.integers(0, 7), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(steps, max_size=50))
def test_pins_equal_a_naive_model(script: list[tuple[str, object, object]]) -> None:
    """Sequences come and go, pins too (several of one chain, before and after its blocks), blocks are evicted: the
    index holds the same chains in the same blocks as the naive one, and the ledger keeps the same ones."""
    ledger, cache = make(BLOCKS)
    naive = NaivePinned()
    live: list[list[BlockId]] = []
    pins: list[tuple[list[int], bytes]] = []
    for word, first, second in script:
        if word in ("enter", "match"):
            assert isinstance(first, list) and isinstance(second, bytes)
            found: list[BlockId] = []
            if word == "match":
                found = cache.match(first, second, (len(first) - 1) // SIZE)
                assert found == naive.match(second, chain_of(first)[: (len(first) - 1) // SIZE])
            new = -(-len(first) // SIZE) - len(found)
            if ledger.free < new:
                continue
            ledger.hold(found)
            table = [*found, *ledger.take(new)]
            cache.index(first, table, len(first), second, IndexCursor())
            naive.index(second, chain_of(first), table)
            live.append(table)
        elif word == "leave" and live:
            assert isinstance(first, int)
            table = live.pop(first % len(live))
            for part in [[b] for b in table] if second else [table]:
                leave(ledger, cache, part)
                naive.released(part)
        elif word == "evict":
            assert isinstance(first, int)
            held = {int(b) for table in live for b in table}
            possible = first <= BLOCKS - len(held | naive.pinned())
            if possible:
                naive.evict_pinned_until(first, ledger.free, held)
            assert cache.evict_until(first) == possible
        elif word == "pin":
            assert isinstance(first, list) and isinstance(second, bytes)
            cache.pin(cache.chain(first, second))
            naive.wanted.update(keys_of(first, second))
            pins.append((first, second))
        elif word == "unpin" and pins:
            assert isinstance(first, int)
            tokens, salt = pins.pop(first % len(pins))
            cache.unpin(cache.chain(tokens, salt))
            naive.wanted.subtract(keys_of(tokens, salt))
        held = {int(b) for table in live for b in table}
        assert {b for b in range(BLOCKS) if BlockId(b) in cache} == {e[0] for e in naive.entries.values()}
        assert cache.pinned_blocks == len(naive.pinned())
        assert cache.pinned_blocks_wanted == sum(count > 0 for count in naive.wanted.values())
        assert ledger.check().pinned == len(naive.pinned() - held)
        assert ledger.available == BLOCKS - len(held | naive.pinned())
    for table in live:
        leave(ledger, cache, table)
    for tokens, salt in pins:
        cache.unpin(cache.chain(tokens, salt))
    assert cache.evict_until(BLOCKS)
    assert ledger.check().free == BLOCKS


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("enter"), prompts),
            st.tuples(st.just("leave"), st.integers(0, 7)),
            st.tuples(st.just("promise"), st.sampled_from([1, 3, 8, ALL])),
            st.tuples(st.just("grow"), st.integers(0, 7)),
            st.tuples(st.just("pin"), prompts),
            st.tuples(st.just("unpin"), st.integers(0, 7)),
        ),
        max_size=40,
    )
)
def test_pins_never_take_what_is_promised(script: list[tuple[str, object]]) -> None:
    """With promises about, a pin may have to wait for its block's next use; what is promised can always be drawn, and a
    block that is pinned stays where it is."""
    ledger, cache = make(BLOCKS)
    live: list[list[BlockId]] = []
    pins: list[list[int]] = []
    promises = 0
    for word, value in script:
        before = {tuple(t[: (n + 1) * SIZE]): n for t in pins for n in range(cache.pinned_of(cache.chain(t, b"")))}
        where = {chain: cache.match(list(chain), b"", BLOCKS)[-1] for chain in before}
        if word == "enter" and isinstance(value, list):
            need = -(-len(value) // SIZE)
            if need <= ledger.available and cache.evict_until(need):
                live.append(enter(ledger, cache, value))
        elif word == "leave" and live and isinstance(value, int):
            leave(ledger, cache, live.pop(value % len(live)))
        elif word == "promise" and isinstance(value, int):
            promises += 1
            ledger.promise(promises, min(value, ledger.available))
        elif word == "grow" and promises:
            left = ledger.promise_left(promises)
            assert left is not None
            assert cache.evict_until(left), "a promise that cannot be kept"
            live.append(ledger.take(left, promise=promises))
        elif word == "pin" and isinstance(value, list):
            cache.pin(cache.chain(value, b""))
            pins.append(value)
        elif word == "unpin" and pins and isinstance(value, int):
            tokens = pins.pop(value % len(pins))
            cache.unpin(cache.chain(tokens, b""))
            where = {}
        for chain, block in where.items():
            assert cache.match(list(chain), b"", BLOCKS)[-1] == block, (word, chain)
        ledger.check()
        assert ledger.available >= 0
    for key in range(1, promises + 1):
        ledger.unpromise(key)
    for tokens in pins:
        cache.settle(cache.chain(tokens, b""))
        here = len(cache.match(tokens, b"", BLOCKS))
        assert cache.pinned_of(cache.chain(tokens, b"")) == here  # nothing is promised now: all that is here stays


def test_a_pin_waits_for_a_block_that_is_promised() -> None:
    """The prefix is cached and idle, and all that is available is promised: the pin takes hold when the next request
    has used the prefix, and until then the block may be evicted like any other."""
    ledger, cache = make(4)
    leave(ledger, cache, enter(ledger, cache, [1, 2]))
    chain = cache.chain([1, 2], b"")
    ledger.promise("growth", ledger.available)
    cache.pin(chain)
    assert (cache.pinned_of(chain), cache.pinned_blocks_wanted) == (0, 1)
    found = cache.match([1, 2, 3], b"", 1)
    ledger.unpromise("growth")
    ledger.hold(found)
    ledger.promise("growth", ledger.available)
    cache.index([1, 2, 3], found, 2, b"", IndexCursor())
    leave(ledger, cache, found)
    assert cache.pinned_of(chain) == 1
    assert ledger.check().pinned == 1
    ledger.unpromise("growth")
    assert not cache.evict_until(4)
    assert cache.evict_until(3)


def test_no_block_is_pinned_behind_one_that_is_not() -> None:
    """Two sequences compute the same first block; the indexed copy is idle and promised away when the pin comes, so the
    second block, which its own sequence holds, is not pinned either: it would go with the first."""
    ledger, cache = make(4)
    first = enter(ledger, cache, [1, 2])
    table, cursor = ledger.take(2), IndexCursor()
    cache.index([1, 2], table, 2, b"", cursor)
    leave(ledger, cache, first)
    ledger.promise("growth", ledger.available)
    chain = cache.chain([1, 2, 3, 4], b"")
    cache.pin(chain)
    cache.index([1, 2, 3, 4], table, 4, b"", cursor)
    assert cache.pinned_of(chain) == 0
    ledger.unpromise("growth")
    assert cache.evict_until(2)
    assert len(cache) == 0
    leave(ledger, cache, table)
    assert ledger.check().free == 4


def table_of(count_max: int = 3, share: float = 0.5) -> tuple[Ledger, PrefixCache, PinTable]:
    ledger, cache = make(20)
    limits = PinLimits(count_max=count_max, region_share_max=share, lease_ms_max=10_000)
    return ledger, cache, PinTable(cache, num_blocks=20, limits=limits)


def hold(table: PinTable, name: str, tokens: list[int], **more: float) -> int | None:
    """Blocks of the pin, or None where a later one has the name."""
    version, lease_s, now_s = int(more.get("version", 1)), more.get("lease_s", 5.0), more.get("now_s", 0.0)
    state = table.hold(name, tokens, b"", version=version, lease_s=lease_s, now_s=now_s)
    return None if isinstance(state, int) else state.blocks


def test_a_lease_ends_unless_it_is_renewed() -> None:
    """Renewed at 4 s it lives at 8 s; nobody renews it then, and at 9 s it is over and its blocks may go."""
    ledger, cache, table = table_of()
    leave(ledger, cache, enter(ledger, cache, [1, 2, 3, 4]))
    assert hold(table, "a", [1, 2, 3, 4, 5]) == 2
    assert hold(table, "a", [1, 2, 3, 4, 5], now_s=4.0) == 2
    assert table.expire(8.0) == []
    assert [(s.name, s.blocks_pinned, s.lease_left_s) for s in table.states(8.0)] == [("a", 2, 1.0)]
    assert not cache.evict_until(20)
    assert table.expire(9.0) == ["a"]
    assert cache.evict_until(20)


def test_of_two_prefixes_of_one_name_the_later_one_stays() -> None:
    """Whichever comes first; a drop that is older than the pin changes nothing."""
    _, cache, table = table_of()
    assert hold(table, "a", [1, 2], version=5) == 1
    assert hold(table, "a", [3, 4, 5, 6], version=4) is None
    assert cache.pinned_blocks_wanted == 1
    assert hold(table, "a", [3, 4, 5, 6], version=6) == 2
    assert hold(table, "a", [3, 4, 5, 6], version=2) == 2  # the same prefix, from a router that pinned it before
    assert hold(table, "a", [1, 2], version=5) is None
    same = [hold(table, "a", tokens, version=6) for tokens in ([1, 2], [3, 4, 5, 6], [1, 2], [3, 4, 5, 6])]
    assert same in ([1, None, 1, None], [None, 2, None, 2])  # of equal versions always the same one
    assert not table.drop("a", version=5)
    assert table.drop("a", version=6)
    assert not table.drop("a", version=6)
    assert cache.pinned_blocks_wanted == 0


def test_limits_are_named_and_a_refusal_changes_nothing() -> None:
    """Too many names; more blocks than the share, counted once where prefixes agree; a replacement that is too long
    leaves the pin that it was to replace."""
    ledger, cache, table = table_of()
    held = enter(ledger, cache, [1, 2])
    hold(table, "a", [1, 2])
    hold(table, "b", [1, 2, *range(12)])
    assert cache.pinned_blocks_wanted == 7
    with pytest.raises(BatonError) as caught:
        hold(table, "c", list(range(50, 58)))
    assert caught.value.reason is Reason.PINS_FULL
    assert "11 blocks" in caught.value.message and "at most 10" in caught.value.message
    with pytest.raises(BatonError) as caught:
        hold(table, "a", list(range(50, 60)), version=2)
    assert caught.value.reason is Reason.PINS_FULL
    leave(ledger, cache, held)
    assert [(s.name, s.blocks, s.blocks_pinned) for s in table.states(0.0)] == [("a", 1, 1), ("b", 7, 1)]
    hold(table, "c", [50, 51])
    with pytest.raises(BatonError) as caught:
        hold(table, "d", [60, 61])
    assert caught.value.reason is Reason.PINS_FULL
    assert "3 prefixes" in caught.value.message


@pytest.mark.parametrize(
    ("tokens", "lease_s", "field"),
    [([1], 1.0, "tokens"), ([], 1.0, "tokens"), ([1, 2], 0.0, "lease_ms"), ([1, 2], 11.0, "lease_ms")],
)
def test_a_bad_pin_is_refused(tokens: list[int], lease_s: float, field: str) -> None:
    """Less than a block, and a lease that is none or too long."""
    *_, table = table_of()
    with pytest.raises(BatonError) as caught:
        hold(table, "a", tokens, lease_s=lease_s)
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_FIELD, field)
    assert len(table) == 0


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, 2.0])
def test_pins_can_never_have_the_whole_region(share: float) -> None:
    with pytest.raises(InvalidField):
        PinLimits(region_share_max=share)
