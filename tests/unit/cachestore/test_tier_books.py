"""The books of a tier against a naive model, and what a restarted tier enters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachestore.ledger import ConservationError
from cachestore.prefix_cache import chain_digests, root_digest
from cachestore.tier_books import RECOUNTED_SLOTS_MAX, BlockKey, TierBooks, TierSlot, block_keys

SLOTS = 5
BYTES = 1_000
ROOT = b"root"

chains = st.lists(st.integers(0, 1), min_size=1, max_size=4)
"""Few tokens, blocks of one: chains share their beginnings."""
salts = st.sampled_from([b"", b"tenant"])


def keys_of(tokens: list[int], salt: bytes = b"") -> list[BlockKey]:
    return block_keys(ROOT, salt, tokens, 1)


@dataclass
class Naive:
    """All of it by looking at everything. A key is a block; its beginnings are those of `before`."""

    stamps: dict[bytes, int] = field(default_factory=dict)
    keys: dict[bytes, BlockKey] = field(default_factory=dict)
    stored: set[bytes] = field(default_factory=set)
    loads: Counter[bytes] = field(default_factory=Counter)
    doomed: Counter[bytes] = field(default_factory=Counter)
    """Loads of forgotten blocks: each keeps its slot."""
    broken: int = 0
    """Forgotten while they were being stored."""
    used: set[bytes] = field(default_factory=set)
    wanted: Counter[bytes] = field(default_factory=Counter)
    evicted: int = 0
    unused: int = 0
    now: int = 0

    def touch(self, key: BlockKey) -> None:
        digest = key.digest
        while digest in self.keys:
            self.stamps[digest] = self.now
            digest = self.keys[digest].parent

    def match(self, keys: list[BlockKey]) -> list[bytes]:
        found = []
        for key in keys:
            if key.digest not in self.stored:
                break
            found.append(key.digest)
        self.now += 1
        if found:
            self.touch(self.keys[found[-1]])
        return found

    def begin_store(self, key: BlockKey) -> bool:
        if key.digest in self.keys:
            return False
        self.now += 1
        chain = {key.parent}
        while (
            parent := next((k for d, k in self.keys.items() if d in chain and k.parent not in chain), None)
        ) is not None:
            chain.add(parent.parent)
        if key.parent in self.keys:
            self.touch(self.keys[key.parent])
        if len(self.keys) + len(self.doomed) + self.broken == SLOTS:
            idle = [d for d in self.stored if not self.loads[d] and not self.wanted[d] and d not in chain]
            if not idle:
                return False
            victim = min(idle, key=lambda d: (self.stamps[d], -self.keys[d].depth))
            self.evicted += 1
            self.unused += victim not in self.used
            self.gone(victim)
        self.keys[key.digest] = key
        self.stamps[key.digest] = self.now
        return True

    def gone(self, digest: bytes) -> None:
        if self.loads[digest]:
            self.doomed[digest] += self.loads.pop(digest)
        del self.keys[digest], self.stamps[digest]
        self.stored.discard(digest)
        self.used.discard(digest)


steps = st.one_of(
    st.tuples(st.just("keep"), chains, salts),
    st.tuples(st.just("keep"), chains, salts),
    st.tuples(st.just("store"), chains, salts),
    st.tuples(st.just("stored"), st.integers(0, 9), st.none()),
    st.tuples(st.just("dropped"), st.integers(0, 9), st.none()),
    st.tuples(st.just("load"), chains, salts),
    st.tuples(st.just("loaded"), st.integers(0, 9), st.none()),
    st.tuples(st.just("broken"), st.integers(0, 9), st.none()),
    st.tuples(st.just("forget"), st.integers(0, 9), st.none()),
    st.tuples(st.just("pin"), chains, salts),
    st.tuples(st.just("unpin"), st.integers(0, 9), st.none()),
    st.tuples(st.just("clear"), st.none(), st.none()),
)


class Play:
    """The books and the model side by side."""

    def __init__(self) -> None:
        self.readable: set[bytes] = set()
        self.books = TierBooks(SLOTS, BYTES, on_added=self.readable.add, on_removed=self.readable.remove)
        self.naive = Naive()
        self.storing: list[tuple[TierSlot, bytes]] = []
        self.loading: list[tuple[list[TierSlot], list[bytes]]] = []
        self.pins: list[list[bytes]] = []

    def step(self, word: str, first: object, salt: bytes | None) -> None:
        if isinstance(first, list) and salt is not None:
            {"keep": self.keep, "store": self.store, "load": self.load, "pin": self.pin}[word](keys_of(first, salt))
        elif isinstance(first, int):
            getattr(self, word)(first)
        else:
            doomed = [d for d in self.naive.keys if not self.naive.wanted[d]]
            slots = {self.books.find(digest) for digest in doomed} - {None}
            assert {slot for gone in self.books.clear(2) for slot in gone} == slots
            self.gone(doomed)
        self.same()

    def store(self, keys: list[BlockKey]) -> None:
        for key in keys:
            expected = self.naive.begin_store(key)
            slot = self.books.begin_store(key)
            assert (slot is not None) == expected
            if slot is not None:
                assert self.books.key_of(slot) == key
                self.storing.append((slot, key.digest))

    def keep(self, keys: list[BlockKey]) -> None:
        for key in keys:
            under_way = len(self.storing)
            self.store([key])
            if len(self.storing) > under_way:
                self.stored(under_way)

    def stored(self, index: int) -> None:
        if self.storing:
            slot, digest = self.storing.pop(index % len(self.storing))
            self.books.stored(slot)
            if digest:
                self.naive.stored.add(digest)
            else:
                self.naive.broken -= 1

    def dropped(self, index: int) -> None:
        if self.storing:
            slot, digest = self.storing.pop(index % len(self.storing))
            self.books.dropped(slot)
            if digest:
                self.naive.gone(digest)
            else:
                self.naive.broken -= 1

    def load(self, keys: list[BlockKey]) -> None:
        slots, expected = self.books.match(keys), self.naive.match(keys)
        assert [self.books.key_of(slot).digest for slot in slots] == expected
        self.books.begin_load(slots)
        self.naive.loads.update(expected)
        self.naive.used.update(expected)
        self.loading.append((slots, expected))

    def loaded(self, index: int) -> None:
        if self.loading:
            slots, digests = self.loading.pop(index % len(self.loading))
            self.books.end_load(slots)
            for digest in digests:
                loads = self.naive.doomed if self.naive.doomed[digest] else self.naive.loads
                loads[digest] -= 1
            self.naive.doomed += Counter()  # drops zeros

    def broken(self, index: int) -> None:
        """What a load has read of its first block is not what was stored."""
        live = [(s[0], d[0]) for s, d in self.loading if s and d[0] in self.naive.keys]
        if live and not self.naive.doomed:  # the model knows doomed slots by their digests
            slot, digest = live[index % len(live)]
            self.books.dropped(slot)
            self.naive.gone(digest)

    def forget(self, index: int) -> None:
        if self.naive.keys and not self.naive.doomed:
            first = {sorted(self.naive.keys)[index % len(self.naive.keys)]}
            doomed = set(first)
            for digest, key in sorted(self.naive.keys.items(), key=lambda item: item[1].depth):
                if key.parent in doomed:
                    doomed.add(digest)
            slots = {self.books.find(digest) for digest in doomed} - {None}
            self.books.forget_with_descendants(first)
            assert all(self.books.find(digest) is None for digest in self.naive.keys)
            swept = self.books.sweep(1)
            while self.books.sweep_due:
                swept += self.books.sweep(1)
            assert len(swept) == len(slots) and set(swept) == slots
            self.gone(doomed)

    def gone(self, doomed: Iterable[bytes]) -> None:
        for digest in doomed:
            self.naive.broken += digest not in self.naive.stored
            self.storing = [(s, b"" if d == digest else d) for s, d in self.storing]
            self.naive.gone(digest)

    def pin(self, keys: list[BlockKey]) -> None:
        self.pins.append([key.digest for key in keys])
        self.books.pin(self.pins[-1])
        self.naive.wanted.update(self.pins[-1])

    def unpin(self, index: int) -> None:
        if self.pins:
            digests = self.pins.pop(index % len(self.pins))
            self.books.unpin(digests)
            self.naive.wanted.subtract(digests)

    def same(self) -> None:
        books, naive = self.books, self.naive
        books.check()
        assert self.readable == naive.stored == {key.digest for key in books.stored_keys()}
        assert books.blocks == len(naive.stored) and books.nbytes == len(naive.stored) * BYTES
        assert books.free == SLOTS - len(naive.keys) - len(naive.doomed) - naive.broken
        assert (books.evicted, books.evicted_unused) == (naive.evicted, naive.unused)
        assert books.pinned_blocks == sum(naive.wanted[digest] > 0 for digest in naive.stored)


@settings(max_examples=250, deadline=None)
@given(st.lists(steps, max_size=60))
def test_a_tier_equals_a_naive_model(script: list[tuple[str, object, bytes | None]]) -> None:
    """Chains with common beginnings are stored, loaded, pinned, found broken and forgotten in any order: the same
    blocks are readable, the same ones are evicted, and no slot is lost."""
    play = Play()
    for step in script:
        play.step(*step)
    while play.storing:
        play.stored(0)
    while play.loading:
        play.loaded(0)
    while play.pins:
        play.unpin(0)
    list(play.books.clear())
    assert play.books.free == SLOTS and not play.readable


def fill(books: TierBooks, keys: list[BlockKey]) -> None:
    for key in keys:
        slot = books.begin_store(key)
        assert slot is not None
        books.stored(slot)


def test_keys_are_those_of_the_prefix_cache() -> None:
    """A tier's digests are the ones that the node's prefix cache pins and publishes, under each salt."""
    tokens = list(range(10))
    for salt in (b"", b"tenant"):
        keys = block_keys(ROOT, salt, tokens, 4)
        assert [key.digest for key in keys] == chain_digests(root_digest(ROOT, salt), tokens, 4)
        assert [key.parent for key in keys] == [root_digest(ROOT, salt), keys[0].digest]
        assert [key.depth for key in keys] == [0, 1]


@pytest.mark.parametrize(
    "change", [{"packed": b"other"}, {"parent": b"other"}, {"salt": b"other"}], ids=["tokens", "parent", "salt"]
)
def test_a_collision_is_a_miss(change: dict[str, bytes]) -> None:
    """Another block with the same digest is not found, and does not take the first one's place."""
    books = TierBooks(SLOTS, BYTES)
    (key,) = keys_of([1])
    fill(books, [key])
    other = key._replace(**change)  # type: ignore[arg-type]
    assert books.match([other]) == []
    assert books.begin_store(other) is None
    assert len(books.match([key])) == 1


def test_a_block_that_is_being_stored_is_not_read() -> None:
    """A match between begin and end of a store misses; what failed is forgotten and its slot is free."""
    books = TierBooks(1, BYTES)
    (key,) = keys_of([1])
    slot = books.begin_store(key)
    assert slot is not None
    assert books.match([key]) == [] and books.known(key.digest)
    books.dropped(slot)
    assert not books.known(key.digest) and books.free == 1


def test_a_chain_longer_than_the_tier_keeps_its_beginning() -> None:
    """Its end finds no room, rather than taking the slots of what it is the end of."""
    books = TierBooks(3, BYTES)
    keys = keys_of([1, 2, 3, 4, 5])
    slots = [books.begin_store(key) for key in keys]
    assert [slot is not None for slot in slots] == [True, True, True, False, False]


def test_what_is_behind_a_block_that_is_not_here_is_forgotten() -> None:
    """Two blocks are stored behind one that is dropped, before and after that; one stands alone. Those two go, and what
    comes back in the dropped one's place is no worse for it."""
    books = TierBooks(SLOTS, BYTES)
    chain, (alone,) = keys_of([1, 2, 3]), keys_of([4])
    fill(books, [*chain[:2], alone])
    (slot,) = books.match(chain[:1])
    books.dropped(slot)
    fill(books, [chain[2]])
    assert not books.forget_behind(alone.digest)
    assert books.forget_behind(chain[0].digest)
    assert books.count([alone.digest]) == 1
    assert len(books.sweep()) == 2
    books.check()
    assert [books.known(key.digest) for key in (*chain, alone)] == [False, False, False, True]
    fill(books, chain)
    assert books.count(key.digest for key in chain) == 3


def test_a_restart_leaves_out_what_is_behind_a_missing_block() -> None:
    """The first and third block of a chain are found on disk, and the fourth: no prompt could use the latter two."""
    books = TierBooks(SLOTS, BYTES)
    chain = keys_of([1, 2, 3, 4])
    for slot, key in ((3, chain[3]), (0, chain[0]), (2, chain[2])):
        assert books.restore(TierSlot(slot), key)
    books.end_restore()
    books.check()
    assert (books.blocks, books.free) == (1, SLOTS - 1)
    assert books.match(chain) == [0]


def test_a_restarted_tier_is_warm() -> None:
    """What was stored is entered again in its old slots, oldest first: found, evicted in order, parents after children,
    and of two blocks by one digest the first stays."""
    books = TierBooks(4, BYTES)
    chain, (alone,) = keys_of([1, 2]), keys_of([3])
    assert books.restore(TierSlot(3), chain[0])
    assert books.restore(TierSlot(1), alone)
    assert books.restore(TierSlot(0), chain[1])
    assert not books.restore(TierSlot(2), alone)
    books.end_restore()
    books.check()
    assert books.match(chain) == [3, 0]
    fill(books, keys_of([4]))
    assert books.free == 0 and books.evicted == 0
    fill(books, keys_of([5]))
    assert not books.known(alone.digest) and (books.evicted, books.evicted_unused) == (1, 1)
    fill(books, keys_of([6]))
    assert [books.known(key.digest) for key in chain] == [True, False]


def test_candidates_do_not_pile_up() -> None:
    """Blocks that are dropped leave the list of candidates, even where nothing is ever evicted."""
    books = TierBooks(4, BYTES)
    (key,) = keys_of([1])
    for _ in range(100):
        fill(books, [key])
        list(books.clear())
    assert len(books._heap) <= 2 * 4 + 1


def test_books_that_contradict_themselves_are_found() -> None:
    """A slot that nobody has."""
    books = TierBooks(2, BYTES)
    books._untouched = 1
    with pytest.raises(ConservationError):
        books.check()


def test_books_of_a_large_tier_are_compared_by_their_counts() -> None:
    """A slot is lost: the check, which does not look at each slot of so many, finds it all the same."""
    books = TierBooks(RECOUNTED_SLOTS_MAX + 1, BYTES)
    fill(books, keys_of([1, 2, 3], b""))
    list(books.clear())
    books.check()
    books._freed.pop()
    with pytest.raises(ConservationError, match="2 freed"):
        books.check()
