"""The prefix index against a naive model, and the situations in which a wrong or a costly answer would be likely."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import BlockId
from cachestore.ledger import Ledger
from cachestore.prefix_cache import (
    Draft,
    IndexCursor,
    PrefixCache,
    block_digest,
    chain_digests,
    kv_root,
    pack_tokens,
    root_digest,
)

SIZE = 2


class CountingLedger(Ledger):
    """Counts the questions asked of it."""

    questions = 0

    def is_held(self, block: BlockId) -> bool:
        self.questions += 1
        return super().is_held(block)


def make(num_blocks: int, ledger: Ledger | None = None) -> tuple[Ledger, PrefixCache]:
    ledger = ledger or Ledger(num_blocks)
    return ledger, PrefixCache(ledger, block_size=SIZE, kv_root=b"model")


def enter(ledger: Ledger, cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> list[BlockId]:
    """A sequence computes all of `tokens` in blocks of its own; the blocks, held."""
    table = ledger.take(-(-len(tokens) // SIZE))
    cache.index(tokens, table, len(tokens), salt, IndexCursor())
    return table


def leave(ledger: Ledger, cache: PrefixCache, table: Iterable[BlockId]) -> None:
    table = list(table)
    ledger.drop(table)
    cache.released(table)


def test_only_full_blocks_match_and_the_caller_limits_how_many() -> None:
    """Five tokens fill two blocks of two; another prompt shares four, three or no tokens."""
    ledger, cache = make(8)
    table = enter(ledger, cache, [1, 2, 3, 4, 5])
    assert cache.match([1, 2, 3, 4, 5, 6], b"", 3) == table[:2]
    assert cache.match([1, 2, 3, 4], b"", 1) == table[:1]
    assert cache.match([1, 2, 3, 9], b"", 2) == table[:1]
    assert cache.match([9, 2, 3, 4], b"", 2) == []
    assert cache.match([3, 4], b"", 1) == []  # the same tokens elsewhere in a prompt are other KV


def test_tenants_and_models_never_share() -> None:
    """The chain starts from the root and the salt, and the boundary between the two cannot be shifted."""
    ledger, cache = make(8)
    table = enter(ledger, cache, [1, 2], salt=b"a")
    assert cache.match([1, 2], b"a", 1) == table
    assert cache.match([1, 2], b"b", 1) == []
    assert len({root_digest(b"m", b""), root_digest(b"", b"m"), root_digest(b"m", b"m"), root_digest(b"mm", b"")}) == 4


def test_the_root_covers_all_that_makes_kv() -> None:
    """Checkpoint, rounding of the weights and layout each make another root, and boundaries cannot be shifted."""

    def root(*parts: str) -> bytes:
        fingerprint, quantisation, layout_hash = parts
        return kv_root(fingerprint=fingerprint, quantisation=quantisation, layout_hash=layout_hash)

    parts = [("a", "", "l"), ("a", "int8", "l"), ("a", "int4", "l"), ("b", "", "l"), ("a", "", "k"), ("", "a", "l")]
    assert len({root(*each) for each in parts}) == len(parts)
    assert root("a", "", "l").hex() == "b5e60d55e8acc781e81beb34e213c700"


def test_digests_are_fixed() -> None:
    """Other processes and later versions compute the same chain, so its values are part of the contract."""
    root = root_digest(b"model", b"salt")
    assert pack_tokens([1, -1]) == bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"\xff" * 8
    assert root.hex() == "8d9f8aa2b3d26b9f7695057ad8e46d1a"
    assert block_digest(root, pack_tokens([1, 2])).hex() == "0b0a56a595e3db35c4e98b6e2cf37718"


def test_a_hash_collision_is_a_miss() -> None:
    """With a digest that is the same for everything, only the first block gets in, and nothing wrong ever matches."""
    ledger = Ledger(8)
    cache = PrefixCache(ledger, block_size=SIZE, kv_root=b"", digest=lambda parent, packed: b"same")
    first = enter(ledger, cache, [1, 2, 3, 4])
    enter(ledger, cache, [5, 6])
    enter(ledger, cache, [1, 2], salt=b"other")
    assert len(cache) == 1
    assert cache.match([1, 2, 3, 4], b"", 2) == first[:1]
    assert cache.match([1, 2, 1, 2], b"", 2) == first[:1]
    assert cache.match([5, 6], b"", 1) == []
    assert cache.match([1, 2], b"other", 1) == []


def test_a_duplicate_is_not_indexed_but_what_follows_it_is() -> None:
    """Two sequences compute the same first block at the same time; the second one's next block is found behind it."""
    ledger, cache = make(8)
    one = enter(ledger, cache, [1, 2])
    two = enter(ledger, cache, [1, 2, 3, 4])
    assert two[0] not in cache
    assert cache.match([1, 2, 3, 4], b"", 2) == [one[0], two[1]]


def test_an_idle_parent_of_a_held_duplicate_chain_can_be_evicted() -> None:
    """The ledger counts the idle block as available, so a promise may need it: the block behind is forgotten too, stays
    with its holder, and comes back into the index with the holder's own blocks."""
    ledger, cache = make(4)
    one = enter(ledger, cache, [1, 2])
    tokens, cursor = [1, 2, 3, 4, 5, 6], IndexCursor()
    two = ledger.take(3)
    cache.index(tokens, two, 4, b"", cursor)
    leave(ledger, cache, one)
    assert cache.evict_until(1)
    assert (ledger.free, len(cache)) == (1, 0)
    cache.index(tokens, two, 6, b"", cursor)
    assert cache.match(tokens, b"", 3) == two
    assert ledger.check().held == 3


def test_leaves_go_first_and_oldest_first() -> None:
    """Two chains; the older is used again, so the other goes, from its end."""
    ledger, cache = make(4)
    old = enter(ledger, cache, [1, 2, 3, 4])
    young = enter(ledger, cache, [5, 6, 7, 8])
    leave(ledger, cache, old)
    leave(ledger, cache, young)
    assert cache.match([1, 2, 3, 4], b"", 2) == old
    gone = []
    for free in range(1, 5):
        assert cache.evict_until(free)
        gone.append(next(b for b in [*old, *young] if b not in cache and b not in gone))
    assert gone == [young[1], young[0], old[1], old[0]]


def test_nothing_is_evicted_when_it_would_not_be_enough() -> None:
    """Three blocks are asked for, two of four are held: the cached ones stay."""
    ledger, cache = make(4)
    enter(ledger, cache, [1, 2, 3, 4])
    leave(ledger, cache, enter(ledger, cache, [5, 6, 7, 8]))
    assert not cache.evict_until(3)
    assert len(cache) == 4
    assert cache.evict_until(2)


def test_references_dropped_in_the_ledger_itself_are_found() -> None:
    """Someone drops references without telling the index; the blocks can be evicted all the same, the last one first
    although it was indexed long after the first."""
    ledger, cache = make(3)
    table, cursor = ledger.take(2), IndexCursor()
    cache.index([1, 2], table, 2, b"", cursor)
    enter(ledger, cache, [5, 6])
    cache.index([1, 2, 3, 4], table, 4, b"", cursor)
    ledger.drop(table)
    assert cache.evict_until(1)
    assert cache.match([1, 2, 3, 4], b"", 2) == table[:1]
    assert cache.evict_until(2)
    assert ledger.check().free == 2


def test_held_blocks_cost_eviction_nothing() -> None:
    """1,000 held and 1,000 idle blocks: 1,000 evictions one by one ask the ledger about 1,000 blocks, not a million."""
    ledger = CountingLedger(2_000)
    _, cache = make(2_000, ledger)
    tables = [enter(ledger, cache, [n, n]) for n in range(2_000)]
    for table in tables[::2]:
        leave(ledger, cache, table)
    ledger.questions = 0
    for free in range(1, 1_001):
        assert cache.evict_until(free)
    assert ledger.questions == 1_000
    assert ledger.check().held == 1_000


def test_everything_is_forgotten_and_holders_keep_theirs() -> None:
    """As when the weights change: one chain is held, one idle."""
    ledger, cache = make(4)
    held = enter(ledger, cache, [1, 2, 3, 4])
    leave(ledger, cache, enter(ledger, cache, [5, 6]))
    cache.forget(map(BlockId, range(4)))
    assert (len(cache), ledger.check().free, ledger.check().held) == (0, 2, 2)
    ledger.drop(held)
    assert ledger.check().free == 4


def test_holders_of_forgotten_blocks_do_not_index_them_again() -> None:
    """Two sequences share a chain that is forgotten. One goes on; one of the next two comes to the index only then, one
    has been to host memory and is back in other blocks. None of it is found again. The blocks are as good as any once
    they have been free."""
    ledger, cache = make(8)
    tokens, on, cursor = [1, 2, 3, 4, 5, 6], IndexCursor(), IndexCursor()
    table = ledger.take(3)
    cache.index(tokens[:4], table, 4, b"", on)
    ledger.hold(table[:2])
    back = ledger.take(3)
    cache.index(tokens[:4], back, 4, b"", cursor)
    cache.forget(table[1:2])
    assert cache.match(tokens, b"", 9) == table[:1]
    cache.index(tokens, table, 6, b"", on)
    cache.index(tokens, table, 6, b"", IndexCursor())
    cache.index(tokens, back, 6, b"", cursor)
    assert cache.match(tokens, b"", 9) == table[:1]
    leave(ledger, cache, [*table, *table[:2], *back])
    assert cache.evict_until(8)
    again = enter(ledger, cache, tokens)
    assert cache.match(tokens, b"", 9) == again
    leave(ledger, cache, again)
    assert ledger.check().cached == 3


Key = tuple[bytes, tuple[tuple[int, ...], ...]]


@dataclass
class NaiveCache:
    """The same index as a flat dict searched from end to end. Chains are written out as keys."""

    entries: dict[Key, list[int]] = field(default_factory=dict)
    """Chain -> [block, stamp, serial]."""
    now: int = 0
    serial: int = 0

    def touch(self, key: Key) -> None:
        for length in range(1, len(key[1]) + 1):
            self.entries[key[0], key[1][:length]][1] = self.now

    def match(self, salt: bytes, chain: tuple[tuple[int, ...], ...]) -> list[int]:
        self.now += 1
        length = 0
        while length < len(chain) and (salt, chain[: length + 1]) in self.entries:
            length += 1
        self.touch((salt, chain[:length]))
        return [self.entries[salt, chain[: n + 1]][0] for n in range(length)]

    def index(self, salt: bytes, chain: tuple[tuple[int, ...], ...], table: list[BlockId]) -> None:
        for n in range(len(chain)):
            key = (salt, chain[: n + 1])
            if key in self.entries:
                continue
            self.now += n == 0
            self.serial += 1
            stamp = self.entries[salt, chain[:n]][1] if n else self.now
            self.entries[key] = [table[n], stamp, self.serial]

    def released(self, table: list[BlockId]) -> None:
        self.now += 1
        for key in [k for k, e in self.entries.items() if e[0] in table]:
            self.touch(key)

    def evict_until(self, free: int, ledger: Ledger, free_now: int, held: set[int]) -> None:
        while free_now < free:
            idle = [k for k, e in self.entries.items() if e[0] not in held]
            victim = min(idle, key=lambda k: (self.entries[k][1], -len(k[1]), self.entries[k][2]))
            for key in list(self.entries):
                if key[0] == victim[0] and key[1][: len(victim[1])] == victim[1]:
                    free_now += self.entries.pop(key)[0] not in held


def chain_of(tokens: list[int]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokens[n : n + SIZE]) for n in range(0, len(tokens) // SIZE * SIZE, SIZE))


salts = st.sampled_from([b"", b"t"])
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
steps = st.one_of(
    st.tuples(st.just("enter"), prompts, salts),
    st.tuples(st.just("match"), prompts, salts),
    st.tuples(st.just("leave"), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("evict"), st.integers(1, 24), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(steps, max_size=40))
def test_equals_a_naive_model(script: list[tuple[str, object, object]]) -> None:
    """Random sequences enter (on top of what matches, or computing it again), leave in one piece or block by block, and
    blocks are evicted: after each step the index holds the same chains in the same blocks as the naive one."""
    ledger, cache = make(24)
    naive = NaiveCache()
    live: list[list[BlockId]] = []
    for word, first, second in script:
        if word in ("enter", "match"):
            assert isinstance(first, list)
            assert isinstance(second, bytes)
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
            if first <= ledger.reclaimable:
                naive.evict_until(first, ledger, ledger.free, held)
            assert cache.evict_until(first) == (first <= 24 - len(held))
        assert {b for b in range(24) if BlockId(b) in cache} == {e[0] for e in naive.entries.values()}
        ledger.check()
    for key, entry in naive.entries.items():
        flat = [token for block in key[1] for token in block]
        assert cache.match(flat, key[0], 99)[-1] == entry[0]
    for table in live:
        leave(ledger, cache, table)
    assert cache.evict_until(24)
    assert ledger.check().free == 24


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=40))
def test_two_groups_behave_as_one_with_two_blocks_for_one(script: list[tuple[str, object, object]]) -> None:
    """The same random life of a region of 12 blocks, and of one of 24 with two blocks for every position: the same
    positions are found and evicted at every step."""
    ledger, cache = make(12)
    twice = Ledger(24)
    grouped = PrefixCache(twice, block_size=SIZE, kv_root=b"model", groups=2)
    pair_of: dict[BlockId, tuple[BlockId, ...]] = {}
    live: list[tuple[list[BlockId], list[BlockId]]] = []
    for word, first, second in script:
        if word in ("enter", "match"):
            assert isinstance(first, list)
            assert isinstance(second, bytes)
            positions_max = (len(first) - 1) // SIZE if word == "match" else 0
            found, pairs = cache.match(first, second, positions_max), grouped.match(first, second, 2 * positions_max)
            assert pairs == [block for one in found for block in pair_of[one]]
            new = -(-len(first) // SIZE) - len(found)
            if ledger.free < new:
                continue
            ledger.hold(found)
            twice.hold(pairs)
            one, two = [*found, *ledger.take(new)], [*pairs, *twice.take(2 * new)]
            pair_of |= {block: tuple(two[2 * at : 2 * at + 2]) for at, block in enumerate(one)}
            cache.index(first, one, len(first), second, IndexCursor())
            grouped.index(first, two, len(first), second, IndexCursor())
            live.append((one, two))
        elif word == "leave" and live:
            assert isinstance(first, int)
            one, two = live.pop(first % len(live))
            leave(ledger, cache, one)
            leave(twice, grouped, two)
        elif word == "evict":
            assert isinstance(first, int)
            assert cache.evict_until(first) == grouped.evict_until(2 * first)
        assert len(cache) == len(grouped)
        for one_block, pair in pair_of.items():
            if one_block in cache:
                assert all(block in grouped for block in pair)
        assert twice.check().cached == 2 * ledger.check().cached


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 20), max_size=8))
def test_indexing_in_pieces_equals_indexing_at_once(tokens: list[int], cuts: list[int]) -> None:
    """A sequence is indexed as it grows, at arbitrary lengths."""
    ledger, cache = make(10)
    table, cursor = ledger.take(10), IndexCursor()
    for computed in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        cache.index(tokens[:computed], table, computed, b"", cursor)
    assert cache.match(tokens, b"", 10) == table[: len(tokens) // SIZE]
    assert len(cache) == len(tokens) // SIZE


def test_what_is_evicted_is_counted_and_what_no_prompt_found() -> None:
    """Of three blocks a second prompt finds the first; all are evicted. What is forgotten as broken does not count."""
    ledger = Ledger(4)
    cache = PrefixCache(ledger, block_size=SIZE, kv_root=b"model")
    table = ledger.take(3)
    cache.index([1, 2, 3, 4, 5, 6], table, 6, b"", IndexCursor())
    leave(ledger, cache, table)
    assert cache.match([1, 2, 9], b"", 4) == table[:1]
    assert cache.evict_until(4)
    assert (cache.evicted, cache.evicted_unused) == (3, 2)
    table = ledger.take(1)
    cache.index([1, 2], table, 2, b"", IndexCursor())
    cache.forget(table)
    assert (cache.evicted, cache.evicted_unused) == (3, 2)


def test_a_position_of_two_groups_is_used_once_by_a_request() -> None:
    """It is idle when both of its blocks have been let go of, together or one by one, and that is said once."""
    ledger = Ledger(8)
    cache = PrefixCache(ledger, block_size=SIZE, kv_root=b"model", groups=2)
    idle: list[tuple[BlockId, ...]] = []
    cache.on_idle = lambda entries, used: idle.extend(entry.blocks for entry in entries)
    table = ledger.take(4)
    cache.index([1, 2, 3, 4], table, 4, b"", IndexCursor())
    first, second = (table[0], table[1]), (table[2], table[3])
    leave(ledger, cache, table[3:])
    leave(ledger, cache, table[:3])
    assert idle == [first, second]
    ledger.hold(table)
    leave(ledger, cache, table)
    assert idle == [first, second] * 2


def test_statistics_count_admitted_prompts_only() -> None:
    """Two prompts admitted, one with a hit; the matches in between count nothing."""
    ledger, cache = make(4)
    enter(ledger, cache, [1, 2])
    cache.match([1, 2, 3], b"", 1)
    cache.count_prompt(3, 2)
    cache.count_prompt(5, 0)
    assert (cache.prompt_tokens, cache.hit_tokens) == (8, 2)


def test_digests_cover_full_blocks_and_all_before_them() -> None:
    """11 tokens are two full blocks; another first token, or another salt, changes every digest."""

    def digests(prompt: list[int], salt: bytes = b"") -> list[bytes]:
        return chain_digests(root_digest(b"model", salt), prompt, 4)

    prompt = list(range(11))
    both = digests(prompt)
    assert len(both) == 2
    assert digests(prompt[:8]) == both
    assert digests(prompt[:3]) == []
    assert not set(digests([99, *prompt[1:]])) & set(both)
    assert not set(digests(prompt, b"tenant")) & set(both)


def drafted(
    ledger: Ledger, cache: PrefixCache, tokens: list[int], have: int, cuts: list[int]
) -> tuple[Draft, list[BlockId]]:
    """Entries of the positions behind the first `have`, made in pieces, and the whole table, held."""
    chain, size = cache.chain(tokens, b""), len(tokens) // SIZE
    prefix = cache.match(tokens, b"", have)
    assert len(prefix) == have
    ledger.hold(prefix)
    table = [*prefix, *ledger.take(size - have)]
    draft = cache.begin_draft(chain[have - 1] if have else None)
    assert draft is not None
    for first, end in pairwise([have, *sorted(cuts), size]):
        cache.draft(draft, tokens, table, range(first, end), b"", chain)
    return draft, table


@given(tokens=st.lists(st.integers(0, 3), min_size=8, max_size=8), have=st.integers(0, 2))
def test_a_draft_enters_what_index_would(tokens: list[int], have: int) -> None:
    """The first positions are there. The others' entries are made in two pieces; nothing is found by them until they
    are entered, and then all is, is told to followers, and is evicted as any other, the deepest first."""
    ledger, cache = make(8)
    leave(ledger, cache, enter(ledger, cache, tokens[: have * SIZE]))
    draft, table = drafted(ledger, cache, tokens, have, [3])
    before = cache.holdings.number
    assert cache.match(tokens, b"", 4) == table[:have]
    assert cache.enter(draft)
    assert cache.match(tokens, b"", 4) == table
    part = cache.holdings.since(before)
    assert part is not None and part.digests == b"".join(cache.chain(tokens, b"")[have:])
    packed, digests = pack_tokens(tokens), b"".join(cache.chain(tokens, b""))
    assert cache.match_known(packed, digests, b"") == table and cache.match_known(packed, digests, b"other") == []
    leave(ledger, cache, table)
    ledger.check()
    for left in (3, 2, 1, 0):
        assert cache.evict_until(8 - left)
        assert cache.match(tokens, b"", 4) == table[:left]


def test_a_draft_is_refused_where_things_have_changed() -> None:
    """Meanwhile another sequence has entered a part of it; what it goes on from was evicted; its last block may be
    broken; a part of it is pinned. Nothing is entered by it, and `index` does what is right."""
    tokens = [1, 2, 3, 4, 5, 6]

    def entered(meanwhile: Callable[[Ledger, PrefixCache, list[BlockId]], None]) -> list[BlockId]:
        ledger, cache = make(16)
        leave(ledger, cache, enter(ledger, cache, tokens[:SIZE]))
        draft, table = drafted(ledger, cache, tokens, 1, [])
        meanwhile(ledger, cache, table)
        there = len(cache)
        assert not cache.enter(draft) and len(cache) == there
        cache.index(tokens, table, len(tokens), b"", IndexCursor())
        found = cache.match(tokens, b"", 3)
        leave(ledger, cache, table)
        ledger.check()
        return [BlockId(table.index(block)) if block in table else BlockId(-1) for block in found]

    def gone(ledger: Ledger, cache: PrefixCache, table: list[BlockId]) -> None:
        leave(ledger, cache, table[:1])
        assert cache.evict_until(ledger.free + 1)
        table[:1] = ledger.take(1)

    assert entered(lambda ledger, cache, table: leave(ledger, cache, enter(ledger, cache, tokens[:4]))) == [0, -1, 2]
    assert entered(gone) == [0, 1, 2]
    assert entered(lambda ledger, cache, table: ledger.spoil(table[2])) == [0, 1]
    assert entered(lambda ledger, cache, table: cache.pin(cache.chain(tokens, b""))) == [0, 1, 2]


def test_no_draft_goes_on_from_what_is_not_there() -> None:
    """The first position's content may be broken, so it is forgotten while a sequence still has its block: entries
    behind it would be found by nobody, and keep others from entering theirs."""
    tokens = [1, 2, 3, 4]
    ledger, cache = make(8)
    table = enter(ledger, cache, tokens[:SIZE])
    chain = cache.chain(tokens, b"")
    cache.forget(table)
    assert cache.begin_draft(chain[0]) is None
    draft = cache.begin_draft(None)
    assert draft is not None
    with pytest.raises(AssertionError):
        cache.draft(draft, tokens, [*table, *ledger.take(1)], range(1, 2), b"", chain)


def test_digests_that_are_wrong_find_nothing_wrong() -> None:
    """The digests of one prompt beside the tokens of another, too few of them, and those of a later position."""
    ledger, cache = make(8)
    table = enter(ledger, cache, [1, 2, 3, 4])
    digests = b"".join(cache.chain([1, 2, 3, 4], b""))
    assert cache.match_known(pack_tokens([1, 2, 9, 9]), digests, b"") == table[:1]
    assert cache.match_known(pack_tokens([1, 2, 3, 4]), digests[:16], b"") == table[:1]
    assert cache.match_known(pack_tokens([3, 4]), digests[16:], b"") == []
