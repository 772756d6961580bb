"""The ledger against a naive model of it: sets of blocks, and classes worked out from scratch each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.ids import BlockId, GrantId
from baton.wire import BlockLoad
from cachestore.ledger import ConservationError, Ledger

NUM_BLOCKS = 6


@dataclass
class ModelBlock:
    """What a block is, in the plainest words."""

    holds: int = 0
    writer: int | None = None
    quarantined: bool = False
    cached: bool = False
    pinned: bool = False

    def name(self) -> str:
        if self.quarantined:
            return "quarantined"
        if self.writer is not None:
            return "writer_owned"
        if self.holds:
            return "held"
        return "cached" if self.cached else "free"


@dataclass
class Model:
    blocks: list[ModelBlock] = field(default_factory=lambda: [ModelBlock() for _ in range(NUM_BLOCKS)])
    promises: dict[int, int] = field(default_factory=dict)
    host_backed: set[int] = field(default_factory=set)
    host_room: int = 0
    grants: dict[int, list[int]] = field(default_factory=dict)

    def named(self, *names: str) -> list[int]:
        return [i for i, block in enumerate(self.blocks) if block.name() in names]

    def available(self) -> int:
        return min(self.growable(), self.available_with_host())

    def available_with_host(self) -> int:
        return self.reclaimable() + self.host_room - sum(self.promises.values())

    def growable(self) -> int:
        device_backed = [count for key, count in self.promises.items() if key not in self.host_backed]
        return self.reclaimable() - sum(device_backed)

    def reclaimable(self) -> int:
        return len(self.named("free", "cached")) - self.pinned_idle()

    def pinned_idle(self) -> int:
        return sum(block.pinned and block.name() == "cached" for block in self.blocks)

    def counts(self) -> BlockLoad:
        names = [block.name() for block in self.blocks]
        return BlockLoad(
            quarantined=names.count("quarantined"),
            writer_owned=names.count("writer_owned"),
            held=names.count("held"),
            cached=names.count("cached"),
            free=names.count("free"),
            promised=sum(self.promises.values()),
            pinned=self.pinned_idle(),
        )


class LedgerAgainstModel(RuleBasedStateMachine):
    """Every legal call in every order; each rule picks its blocks from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.ledger = Ledger(NUM_BLOCKS, on_free=self.freed.append)
        self.model = Model()
        self.grants_made = 0
        self.was_free = set(range(NUM_BLOCKS))

    def _grant_id(self, grant: int) -> GrantId:
        return GrantId(bytes((grant % 256, grant // 256)))

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        """Free blocks, as many as nobody was promised."""
        count = max(0, min(count, len(self.model.named("free")), self.model.available()))
        taken = self.ledger.take(count)
        assert len(set(taken)) == count
        for block in taken:
            assert self.model.blocks[block] == ModelBlock()
            self.model.blocks[block].holds = 1

    @precondition(lambda self: self.model.promises)
    @rule(data=st.data(), count=st.integers(0, NUM_BLOCKS))
    def take_promised(self, data: st.DataObject, count: int) -> None:
        """Promised blocks are drawn though nothing else is available."""
        key = data.draw(st.sampled_from(sorted(self.model.promises)))
        count = min(count, self.model.promises[key], len(self.model.named("free")))
        if key in self.model.host_backed:
            count = min(count, self.model.growable())
        for block in self.ledger.take(count, promise=key):
            assert self.model.blocks[block] == ModelBlock()
            self.model.blocks[block].holds = 1
        self.model.promises[key] -= count

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """One more request wants a held or cached block; reviving a cached one needs room."""
        candidates = [i for i, b in enumerate(self.model.blocks) if b.holds or b.cached]
        if self.model.available() == 0:
            blocks = self.model.blocks
            candidates = [i for i in candidates if blocks[i].name() != "cached" or blocks[i].pinned]
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.ledger.hold([BlockId(block)])
            self.model.blocks[block].holds += 1

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        held = [i for i, b in enumerate(self.model.blocks) if b.holds]
        if held:
            block = data.draw(st.sampled_from(held))
            self.ledger.drop([BlockId(block)])
            self.model.blocks[block].holds -= 1

    @rule(data=st.data())
    def give_writer(self, data: st.DataObject) -> None:
        """Private blocks get a writer as their second owner."""
        private = [i for i, b in enumerate(self.model.blocks) if b.holds == 1 and not b.cached and b.writer is None]
        if private:
            blocks = data.draw(st.lists(st.sampled_from(private), min_size=1, unique=True))
            self.grants_made += 1
            self.ledger.give_writer([BlockId(b) for b in blocks], self._grant_id(self.grants_made))
            self.model.grants[self.grants_made] = blocks
            for block in blocks:
                self.model.blocks[block].writer = self.grants_made

    @precondition(lambda self: self.model.grants)
    @rule(data=st.data())
    def writer_gone(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(sorted(self.model.grants)))
        blocks = self.model.grants.pop(grant)
        self.ledger.writer_gone([BlockId(b) for b in blocks], self._grant_id(grant))
        for block in blocks:
            self.model.blocks[block].writer = None
            self.model.blocks[block].quarantined = False

    @precondition(lambda self: self.model.grants)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(sorted(self.model.grants)))
        blocks = self.model.grants[grant]
        self.ledger.quarantine([BlockId(b) for b in blocks], self._grant_id(grant))
        for block in blocks:
            self.model.blocks[block].quarantined = True

    @rule(data=st.data())
    def mark_cached(self, data: st.DataObject) -> None:
        candidates = [i for i, b in enumerate(self.model.blocks) if b.holds and b.writer is None and not b.cached]
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.ledger.mark_cached(BlockId(block))
            self.model.blocks[block].cached = True

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        candidates = [i for i, b in enumerate(self.model.blocks) if b.cached and not b.pinned]
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.ledger.evict(BlockId(block))
            self.model.blocks[block].cached = False

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """A cached block; an idle one only while it is not promised to somebody."""
        cached = [i for i, b in enumerate(self.model.blocks) if b.cached and not b.pinned]
        candidates = [i for i in cached if self.model.blocks[i].holds or self.model.available() > 0]
        if candidates:
            block = data.draw(st.sampled_from(candidates))
            self.ledger.pin(BlockId(block))
            self.model.blocks[block].pinned = True

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pinned = [i for i, b in enumerate(self.model.blocks) if b.pinned]
        if pinned:
            block = data.draw(st.sampled_from(pinned))
            self.ledger.unpin(BlockId(block))
            self.model.blocks[block].pinned = False

    @rule(key=st.integers(0, 3), count=st.integers(0, NUM_BLOCKS), host_backed=st.booleans())
    def promise(self, key: int, count: int, host_backed: bool) -> None:
        room = self.model.available_with_host() if host_backed else self.model.available()
        if key not in self.model.promises and count <= room:
            self.ledger.promise(key, count, host_backed=host_backed)
            self.model.promises[key] = count
            if host_backed:
                self.model.host_backed.add(key)

    @rule(key=st.integers(0, 3))
    def unpromise(self, key: int) -> None:
        """Idempotent."""
        self.ledger.unpromise(key)
        self.model.promises.pop(key, None)
        self.model.host_backed.discard(key)

    @rule(room=st.integers(-2, NUM_BLOCKS))
    def host_memory(self, room: int) -> None:
        """Host memory has got room, or lost some that no promise needs."""
        needed = sum(self.model.promises.values()) - self.model.reclaimable()
        self.model.host_room = self.ledger.host_room = max(room, needed)

    @invariant()
    def same_classes(self) -> None:
        """Counted anew, from the books, and in the model: the same."""
        expected = self.model.counts()
        assert self.ledger.check() == expected
        assert self.ledger.books() == expected
        assert expected.total == NUM_BLOCKS
        assert self.ledger.free == expected.free
        assert self.ledger.reclaimable == expected.free + expected.cached - expected.pinned
        assert self.ledger.available == self.model.available() >= 0

    @invariant()
    def same_blocks(self) -> None:
        for number, block in enumerate(self.model.blocks):
            known = BlockId(number)
            expected = None if block.writer is None else self._grant_id(block.writer)
            assert self.ledger._writer[known] == expected
            assert self.ledger.is_held(known) == (block.holds > 0)
        every = [BlockId(b) for b in range(NUM_BLOCKS)]
        assert self.ledger.idle_cached(every) == len(self.model.named("cached")) - self.model.pinned_idle()
        assert {key: self.ledger.promise_left(key) for key in range(4)} == {
            key: self.model.promises.get(key) for key in range(4)
        }
        ledger, model = self.ledger, self.model
        assert (ledger.available, ledger.growable) == (model.available(), model.growable())
        assert ledger.available_with_host == model.available_with_host()
        for key in self.model.promises:
            assert self.ledger.can_draw(key) == (key not in self.model.host_backed or self.model.growable() > 0)

    @invariant()
    def told_of_each_block_that_becomes_free(self) -> None:
        """Once for each, and for no other."""
        free = set(self.model.named("free"))
        assert sorted(self.freed) == sorted(free - self.was_free)
        self.freed.clear()
        self.was_free = free


LedgerAgainstModel.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLedgerAgainstModel = LedgerAgainstModel.TestCase


GRANT, OTHER = GrantId(b"g"), GrantId(b"o")


def test_a_block_is_free_only_when_request_and_writer_have_let_go() -> None:
    """Either may go first."""
    ledger = Ledger(2)
    blocks = ledger.take(2)
    ledger.give_writer(blocks, GRANT)
    ledger.drop(blocks[:1])
    assert ledger.free == 0
    ledger.writer_gone(blocks, GRANT)
    assert ledger.free == 1
    ledger.drop(blocks[1:])
    assert ledger.free == 2


def test_misuse_is_asserted() -> None:
    """Two writers, a writer for a shared block, evidence about another grant, more than there is, a drop too many."""
    ledger = Ledger(3)
    blocks = ledger.take(1)
    with pytest.raises(AssertionError, match="not held"):
        ledger.drop([BlockId(1)])
    with pytest.raises(AssertionError, match="nobody keeps"):
        ledger.hold([BlockId(1)])
    with pytest.raises(AssertionError):
        ledger.take(3)
    ledger.hold(blocks)
    with pytest.raises(AssertionError, match="not private"):
        ledger.give_writer(blocks, GRANT)
    ledger.drop(blocks)
    ledger.give_writer(blocks, GRANT)
    with pytest.raises(AssertionError, match="two writers"):
        ledger.give_writer(blocks, OTHER)
    for call in (ledger.writer_gone, ledger.quarantine):
        with pytest.raises(AssertionError):
            call(blocks, OTHER)
    with pytest.raises(AssertionError):
        ledger.mark_cached(blocks[0])
    ledger.promise("a", 2)
    with pytest.raises(AssertionError):
        ledger.promise("b", 1)
    with pytest.raises(AssertionError):
        ledger.take(1)
    with pytest.raises(AssertionError):
        ledger.take(3, promise="a")


def test_a_host_backed_promise_is_drawn_from_what_device_backed_ones_leave() -> None:
    """Three blocks, one of them promised for sure: seven more may be promised with host memory for five behind them.
    Two can be drawn at once, the third when a block has gone to host memory."""
    ledger = Ledger(3)
    ledger.host_room = 5
    ledger.promise("sure", 1)
    with pytest.raises(AssertionError):
        ledger.promise("too much", 8, host_backed=True)
    ledger.promise("grows", 7, host_backed=True)
    assert (ledger.available, ledger.growable, ledger.available_with_host) == (0, 2, 0)
    blocks = [*ledger.take(1, promise="grows"), *ledger.take(1, promise="grows")]
    assert not ledger.can_draw("grows")
    assert ledger.can_draw("sure")
    with pytest.raises(AssertionError):
        ledger.take(1, promise="grows")
    ledger.check()
    ledger.drop(blocks[:1])
    ledger.host_room -= 1
    assert ledger.can_draw("grows")
    assert ledger.check().promised == 6
    ledger.host_room -= 1
    with pytest.raises(ConservationError, match="promised 6 of 2 reclaimable blocks and 3 of host memory"):
        ledger.check()
    ledger._promised_host_backed += 1
    with pytest.raises(ConservationError, match="6 promised against host memory, not 5"):
        ledger.check()


def test_misuse_of_pins_is_asserted() -> None:
    """A pin of a block that is not cached, or pinned, or promised to somebody; an unpin, and an eviction, of others."""
    ledger = Ledger(2)
    (block,) = ledger.take(1)
    with pytest.raises(AssertionError):
        ledger.pin(block)
    ledger.mark_cached(block)
    ledger.drop([block])
    ledger.promise("a", 2)
    with pytest.raises(AssertionError, match="promised"):
        ledger.pin(block)
    ledger.unpromise("a")
    ledger.pin(block)
    with pytest.raises(AssertionError):
        ledger.pin(block)
    with pytest.raises(AssertionError):
        ledger.evict(block)
    ledger.unpin(block)
    with pytest.raises(AssertionError):
        ledger.unpin(block)


def _promise_too_much(ledger: Ledger) -> None:
    ledger._promises["x"] = ledger._promised = 5


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda ledger: ledger._free.append(BlockId(0)), "the books say"),
        (lambda ledger: ledger._free.__setitem__(0, ledger._free[1]), "names a block twice"),
        (lambda ledger: ledger._free.__setitem__(0, 1), "block 1 is free or in the free list, not both"),
        (lambda ledger: ledger._free.__setitem__(0, 7), "names block 7 of 4"),
        (lambda ledger: setattr(ledger, "_cached_count", 1), "the books say"),
        (lambda ledger: setattr(ledger, "_promised", 1), "promised 1, promises sum to 0"),
        (_promise_too_much, "promised 5 of 2"),
        (lambda ledger: setattr(ledger, "_pinned_idle", 1), "the books say"),
        (lambda ledger: ledger._pinned.__setitem__(1, True), "pinned that the prefix index does not know"),
        (lambda ledger: ledger._quarantined.__setitem__(1, True), "the books say"),
    ],
    ids=[
        "freed twice",
        "listed twice",
        "listed and held",
        "listed from beyond the region",
        "cached",
        "promised",
        "promised too much",
        "pinned",
        "pinned and unknown",
        "quarantined without a writer",
    ],
)
def test_check_names_the_contradiction(damage: Callable[[Ledger], None], says: str) -> None:
    """Books that were tampered with; block 0 is held and a writer's, block 1 held, two are free."""
    ledger = Ledger(4)
    ledger.give_writer(ledger.take(1), GRANT)
    assert ledger.take(1) == [BlockId(1)]
    ledger.check()
    damage(ledger)
    with pytest.raises(ConservationError, match=says):
        ledger.check()
