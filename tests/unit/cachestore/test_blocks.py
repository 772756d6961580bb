"""Admission, growth and release of blocks over the real ledger."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.ids import BlockId
from cachestore.block_manager import BlockManager, growth_blocks, prefix_blocks_max
from cachestore.ledger import Ledger
from cachestore.prefix_cache import IndexCursor


def make(num_blocks: int, block_size: int = 2, groups: int = 1) -> tuple[Ledger, BlockManager]:
    ledger = Ledger(num_blocks)
    return ledger, BlockManager(ledger, block_size, b"model", groups=groups)


def test_blocks_for_rounds_up() -> None:
    """Around the block boundary."""
    _, blocks = make(4, block_size=4)
    assert [blocks.blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_position_has_a_block_of_each_group() -> None:
    """Three groups of layers: every count of blocks is three times that of positions, and back."""
    _, blocks = make(12, block_size=4, groups=3)
    assert [blocks.blocks_for(n) for n in (0, 1, 4, 5)] == [0, 3, 3, 6]
    assert [blocks.full_blocks(n) for n in (0, 3, 4, 7, 8)] == [0, 0, 3, 3, 6]
    assert [blocks.tokens_in(n) for n in (0, 3, 6)] == [0, 4, 8]
    table = blocks.admit([], 6)
    blocks.prefix_cache.index(list(range(8)), table, 8, b"", IndexCursor())
    assert blocks.match_prompt(range(8), b"") == table[:3]
    assert blocks.match_prompt(range(9), b"") == table
    growth = growth_blocks(
        prompt_len=4, known_len=4, max_tokens=6, context_len_max=32, block_size=4, blocks_held=3, groups=3
    )
    assert growth == 6


def test_pins_count_the_blocks_of_every_group() -> None:
    """A pinned position of two blocks leaves both in the cache, and `available` without them; one that could be pinned
    only in part is not."""
    ledger, blocks = make(7, groups=2)
    cache = blocks.prefix_cache
    table = blocks.admit([], 4)
    cache.index([1, 2, 3, 4], table, 4, b"", IndexCursor())
    chain = cache.chain([1, 2, 3, 4], b"")
    assert cache.pinned_blocks_with(chain) == 4
    blocks.release(table)
    ledger.promise("others", 4)
    cache.pin(chain)
    assert (cache.pinned_blocks, cache.pinned_blocks_wanted, ledger.available) == (2, 4, 1)
    assert [ledger.is_pinned(block) for block in table] == [True, True, False, False]
    ledger.unpromise("others")
    cache.settle(chain)
    assert (cache.pinned_of(chain), ledger.check().pinned, ledger.available) == (4, 4, 3)
    assert not cache.evict_until(4)
    cache.unpin(chain)
    assert cache.evict_until(7)


@pytest.mark.parametrize(("prompt_len", "blocks"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_the_last_prompt_token_is_never_taken_from_the_cache(prompt_len: int, blocks: int) -> None:
    """A prompt that ends at a block boundary does without its last block."""
    assert prefix_blocks_max(prompt_len, 16) == blocks


@pytest.mark.parametrize(
    ("prompt_len", "known_len", "max_tokens", "held", "blocks"),
    [
        (4, 4, 1, 1, 0),  # the one token drawn is never written
        (4, 4, 2, 1, 1),
        (4, 4, 5, 1, 1),  # positions 4..7
        (4, 4, 6, 1, 2),
        (4, 7, 6, 2, 1),  # a retry with three output tokens; end at 9
        (4, 5, 6, 1, 2),  # resumed: five tokens known, four in the region
        (4, 4, 1000, 1, 7),  # the context of 32 ends first
        (31, 31, 1, 8, 0),
        (4, 4, 1, 3, 0),  # holds more than it needs
    ],
)
def test_growth_covers_what_may_be_written(
    prompt_len: int, known_len: int, max_tokens: int, held: int, blocks: int
) -> None:
    """Blocks of four, context of 32."""
    need = growth_blocks(
        prompt_len=prompt_len,
        known_len=known_len,
        max_tokens=max_tokens,
        context_len_max=32,
        block_size=4,
        blocks_held=held,
    )
    assert need == blocks


def test_a_prefix_that_nobody_holds_counts_as_need() -> None:
    """Four blocks: two cached and idle, two free. Holding the cached ones takes them from everybody else's room."""
    ledger, blocks = make(4)
    tokens = [1, 2, 3, 4]
    table = blocks.admit([], 2)
    blocks.prefix_cache.index(tokens, table, 4, b"", IndexCursor())
    prefix = blocks.prefix_cache.match(tokens, b"", 2)
    assert blocks.ledger.idle_cached(prefix) == 0  # held by the first sequence still
    blocks.release(table)
    assert blocks.ledger.idle_cached(prefix) == 2
    assert not blocks.can_admit(prefix, 2, 1)
    assert blocks.can_admit(prefix, 2, 0)
    assert blocks.admit(prefix, 1, promise_key="s", promise=1)[:2] == prefix
    assert ledger.available == 0
    assert ledger.check().held == 3


def test_a_promise_is_kept_by_evicting() -> None:
    """All free blocks are cached ones; growth under a promise gets them, others get nothing."""
    ledger, blocks = make(4)
    table = blocks.admit([], 3)
    blocks.prefix_cache.index([1, 2, 3, 4, 5, 6], table, 6, b"", IndexCursor())
    blocks.release(table)
    own = blocks.admit([], 1, promise_key="s", promise=3)
    assert (ledger.free, ledger.available) == (0, 0)
    assert not blocks.can_admit([], 1, 0)
    for _ in range(3):
        own += blocks.allocate(1, promise="s")
    assert sorted(own) == [0, 1, 2, 3]
    assert ledger.promise_left("s") == 0
    with pytest.raises(AssertionError):
        blocks.allocate(1, promise="s")


def test_release_counts_as_a_use() -> None:
    """Two prompts enter one after the other and leave in the other order: the one that left first goes first."""
    _, blocks = make(2)
    tables = {}
    for token in (1, 2):
        tables[token] = blocks.admit([], 1)
        blocks.prefix_cache.index([token, token], tables[token], 2, b"", IndexCursor())
    for token in (2, 1):
        blocks.release(tables[token])
    assert blocks.prefix_cache.evict_until(1)
    assert [blocks.prefix_cache.match([token, token], b"", 1) for token in (1, 2)] == [tables[1], []]


def test_making_room_beyond_what_is_there_changes_nothing() -> None:
    """Two of four blocks are held."""
    ledger, blocks = make(4)
    blocks.admit([], 2)
    assert blocks.prefix_cache.evict_until(2)
    assert not blocks.prefix_cache.evict_until(3)
    assert ledger.check().held == 2


@dataclass
class Running:
    """A sequence as this test sees it."""

    name: int
    tokens: list[int]
    table: list[BlockId]
    salt: bytes
    cursor: IndexCursor = field(default_factory=IndexCursor)
    growth: int = 0


class BlockLife(RuleBasedStateMachine):
    """Random sequences are admitted, grow, finish or are aborted; whatever was admitted can always grow to its end."""

    TOTAL = 12
    SIZE = 2
    GROUPS = 1

    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.blocks = make(self.TOTAL, self.SIZE, self.GROUPS)
        self.live: list[Running] = []
        self.names = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        growth=st.integers(0, 6),
        salt=st.sampled_from([b"", b"t"]),
        share=st.booleans(),
    )
    def admit(self, prompt: list[int], growth: int, salt: bytes, share: bool) -> None:
        growth *= self.GROUPS
        prefix = self.blocks.match_prompt(prompt, salt) if share else []
        new = self.blocks.blocks_for(len(prompt)) - len(prefix)
        room = self.ledger.available
        need = self.ledger.idle_cached(prefix) + new + growth
        assert self.blocks.can_admit(prefix, new, growth) == (need <= room)
        if need > room:
            return
        self.names += 1
        table = self.blocks.admit(prefix, new, promise_key=self.names, promise=growth)
        assert self.ledger.available == room - need
        seq = Running(self.names, prompt, table, salt, growth=growth)
        self.blocks.prefix_cache.index(seq.tokens, table, len(prompt), salt, seq.cursor)
        self.live.append(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), token=st.integers(0, 1))
    def grow(self, which: int, token: int) -> None:
        seq = self.live[which % len(self.live)]
        if len(seq.tokens) == self.blocks.tokens_in(len(seq.table)):
            if seq.growth == 0:
                return
            room = self.ledger.available
            seq.table += self.blocks.allocate(self.GROUPS, promise=seq.name)
            seq.growth -= self.GROUPS
            assert self.ledger.available == room
        seq.tokens.append(token)
        self.blocks.prefix_cache.index(seq.tokens, seq.table, len(seq.tokens), seq.salt, seq.cursor)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), block_by_block=st.booleans())
    def leave(self, which: int, block_by_block: bool) -> None:
        seq = self.live.pop(which % len(self.live))
        self.ledger.unpromise(seq.name)
        for part in [[b] for b in seq.table] if block_by_block else [seq.table]:
            self.blocks.release(part)

    @rule(count=st.integers(1, 25))
    def make_room(self, count: int) -> None:
        count = min(count, self.TOTAL)
        could = self.ledger.reclaimable >= count
        assert self.blocks.prefix_cache.evict_until(count) == could
        assert not could or self.ledger.free >= count

    @invariant()
    def books_are_right(self) -> None:
        counts = self.ledger.check()
        assert counts.held == len({block for seq in self.live for block in seq.table})
        assert counts.promised == sum(seq.growth for seq in self.live)
        cached = {b for b in range(self.TOTAL) if BlockId(b) in self.blocks.prefix_cache}
        assert counts.cached == len(cached - {block for seq in self.live for block in seq.table})

    def teardown(self) -> None:
        for seq in self.live:
            while seq.growth:  # the promise holds to the last block
                seq.table += self.blocks.allocate(1, promise=seq.name)
                seq.growth -= 1
        while self.live:
            self.leave(0, False)
        counts = self.ledger.check()
        assert counts.free + counts.cached == self.TOTAL
        self.blocks.prefix_cache.forget(map(BlockId, range(self.TOTAL)))
        assert self.ledger.check().free == self.TOTAL


class GroupedBlockLife(BlockLife):
    """The same with two blocks for every position, and one block too many. Half a position may be let go of first."""

    TOTAL = 25
    GROUPS = 2


BlockLife.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
GroupedBlockLife.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestBlockLife = BlockLife.TestCase
TestGroupedBlockLife = GroupedBlockLife.TestCase
