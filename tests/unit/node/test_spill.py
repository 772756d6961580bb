"""The engine with less memory than it has promised: blocks go to host memory and come back, and nothing is lost,
computed twice or left behind. The mock model's tokens are hashes of the bytes read back, so a wrong byte shows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import BlockId
from cachestore.spill_policy import SpillState
from engine.mock import MockConfig
from engine.types import FinishReason, NullSink
from tests.support.engine_bench import GROUPED, SMALL, key_of, params_of
from tests.support.mock_reference import mock_reference
from tests.support.spill_bench import SpillNode

BLOCK = SMALL.block_size


def prompt_of(name: int, length: int) -> list[int]:
    return [1 + (name * 7 + i * 3) % 49 for i in range(length)]


def reference(prompt: list[int], count: int, config: MockConfig = SMALL) -> list[int]:
    return mock_reference(prompt, params_of(count), count, config=config)


def two_in_a_tight_place(*, copy_blocks_max: int = 3) -> SpillNode:
    """Ten blocks of device memory; "old" and "young" want nine and eight in the end."""
    node = SpillNode(num_blocks=10, host_blocks=12, copy_blocks_max=copy_blocks_max)
    assert node.enter("old", prompt_of(1, 9), params_of(28))
    assert node.enter("young", prompt_of(2, 9), params_of(24))
    return node


def check_two(node: SpillNode) -> None:
    assert node.tokens("old") == reference(prompt_of(1, 9), 28)
    assert node.tokens("young") == reference(prompt_of(2, 9), 24)
    assert node.engine.counters.tokens_computed == node.expected_tokens_computed == 9 + 27 + 9 + 23
    assert node.spill.counters.copied_out > 0
    node.assert_nothing_held()


@pytest.mark.parametrize("copy_blocks_max", [1, 2, 64])
def test_device_memory_runs_out_and_nothing_is_computed_twice(copy_blocks_max: int) -> None:
    """Two sequences outgrow the device together: the younger waits in host memory, both answers are right, and each
    token was computed once."""
    node = two_in_a_tight_place(copy_blocks_max=copy_blocks_max)
    node.run()
    check_two(node)
    spill = node.spill
    assert spill.counters.copied_back + spill.counters.merged == spill.counters.copied_out


def test_only_what_is_needed_leaves_tail_first() -> None:
    """The first block short, and one of headroom: two blocks of the younger one's tail go, its head stays."""
    node = two_in_a_tight_place()
    node.step_until("young", SpillState.SPILLING)
    owner = node.spill._swapped_out[key_of("young")]
    assert [unit.copying is not None for unit in owner.units] == [False, False, False, True, True]
    assert node.engine.scheduler.swapped_out == 1
    assert node.entered["young"].block_table == []
    while node.copier.waiting:
        node.copier.finish()
        node.check()
    assert node.state("young") is SpillState.SPILLED
    assert [unit.device is None for unit in owner.units] == [unit.host is not None for unit in owner.units]
    assert node.spill.host.filled == 2
    node.run()
    check_two(node)


def test_the_others_step_while_blocks_are_copied() -> None:
    """Nothing waits for a copy but who needs its block."""
    node = SpillNode(num_blocks=12, host_blocks=20, copy_blocks_max=1)
    for i in range(3):
        assert node.enter(f"{i}", prompt_of(i, 5 + i), params_of(24))
    node.step_until("2", SpillState.SPILLING)
    before = node.engine.counters.tokens_drawn
    batch = node.engine.schedule()
    assert batch is not None, "everybody waits"
    assert {piece.key for piece in batch.slices} <= {key_of("0"), key_of("1")}
    node.copier.finish()  # during the step: nothing of the batch is touched
    node.check()
    node.events += node.engine.postprocess(batch, node.engine.run(batch, NullSink()))
    assert node.engine.counters.tokens_drawn > before
    node.run()
    for i in range(3):
        assert node.tokens(f"{i}") == reference(prompt_of(i, 5 + i), 24)
    assert node.engine.counters.tokens_computed == node.expected_tokens_computed
    node.assert_nothing_held()


def test_idle_cached_blocks_go_before_anybody_is_swapped_out() -> None:
    """The prefix cache is full of what nobody holds: growth evicts it, and nothing is copied."""
    node = SpillNode(num_blocks=10, host_blocks=12)
    assert node.enter("gone", prompt_of(3, 30), params_of(2))
    node.run()
    assert node.ledger.counts().cached == 7
    assert node.enter("old", prompt_of(1, 9), params_of(28))
    node.run()
    assert node.tokens("old") == reference(prompt_of(1, 9), 28)
    assert node.spill.counters.swapped_out == 0
    node.assert_nothing_held()


def test_a_shared_prefix_stays_while_somebody_runs_on_it() -> None:
    """Two answers over the same prompt: the swapped-out one's own blocks leave, the prompt's stay where they are."""
    node = SpillNode(num_blocks=11, host_blocks=12)
    prompt = prompt_of(1, 4 * BLOCK)
    assert node.enter("old", [*prompt, 1], params_of(20))
    node.step()
    assert node.enter("young", [*prompt, 2], params_of(20))
    shared = node.entered["young"].block_table[:4]
    assert node.entered["old"].block_table[:4] == shared
    node.step_until("young", SpillState.SPILLED)
    units = node.spill._swapped_out[key_of("young")].units
    assert [unit.device for unit in units[:4]] == shared
    assert all(node.ledger.holders(block) == 2 for block in shared)
    node.run()
    assert node.tokens("old") == reference([*prompt, 1], 20)
    assert node.tokens("young") == reference([*prompt, 2], 20)
    assert node.engine.counters.tokens_computed == node.expected_tokens_computed
    node.assert_nothing_held()


def test_a_prefix_that_only_swapped_out_sequences_share_leaves_once_and_returns_to_both() -> None:
    """The old one needs the whole device; two others, over one prompt, are swapped out. It goes to host memory once."""
    node = SpillNode(num_blocks=10, host_blocks=24)
    assert node.enter("old", prompt_of(1, 4), params_of(36))
    prompt = prompt_of(2, 2 * BLOCK)
    assert node.enter("a", [*prompt, 1], params_of(24))
    node.step()
    assert node.enter("b", [*prompt, 2], params_of(24))
    seen = []
    while node.engine.has_work:
        node.step()
        node.copier.finish_all()
        node.check()
        shared = [unit for owner in node.spill._swapped_out.values() for unit in owner.units if len(unit.holders) == 2]
        seen.append(sum(unit.device is None for unit in shared))
    assert max(seen) >= 4, "each of the two units, seen from both"
    assert node.tokens("old") == reference(prompt_of(1, 4), 36)
    for name, last in (("a", 1), ("b", 2)):
        assert node.tokens(name) == reference([*prompt, last], 24)
    assert node.engine.counters.tokens_computed == node.expected_tokens_computed
    node.assert_nothing_held()


def test_a_shared_block_that_is_still_being_copied_keeps_both_swapped_out() -> None:
    """Both sharers come back at once; the second one's own blocks are there before the prefix, which is copied for the
    first: it waits for that too."""
    node = SpillNode(num_blocks=31, host_blocks=40, copy_blocks_max=1)
    assert node.enter("old", prompt_of(1, 4), params_of(60))
    assert node.enter("big", prompt_of(3, 40), params_of(40))
    prompt = prompt_of(2, 2 * BLOCK)
    assert node.enter("a", [*prompt, 1], params_of(40))
    node.step()
    assert node.enter("b", [*prompt, 2], params_of(40))

    def shared_away() -> bool:
        a, b = (node.spill._swapped_out.get(key_of(name)) for name in "ab")
        return a is not None and b is not None and all(unit.device is None for unit in (*a.units, *b.units))

    while not shared_away():
        node.step()
        node.copier.finish_all()
    node.engine.abort(key_of("big"))
    node.blocks.prefix_cache.forget(map(BlockId, range(node.ledger.num_blocks)))
    node.step()
    assert node.state("a") is node.state("b") is SpillState.RETURNING
    of_b = node.spill._swapped_out[key_of("b")].copies
    for _ in range(of_b):
        node.copier.finish(-1)
        node.check()
    assert node.spill._swapped_out[key_of("b")].copies == 0
    assert node.state("b") is SpillState.SPILLED, "it runs on a prefix that is not there yet"
    node.run()
    for name, last in (("a", 1), ("b", 2)):
        assert node.tokens(name) == reference([*prompt, last], 40)
    node.assert_nothing_held()


def test_a_block_that_the_prefix_cache_still_has_is_not_copied_back() -> None:
    """A full block that left is still indexed and nobody needed its room: the return takes it from the cache."""
    node = two_in_a_tight_place()
    node.step_until("young", SpillState.SPILLED)
    assert node.engine.abort(key_of("old"))
    node.run()
    spill = node.spill
    assert spill.counters.merged > 0
    assert spill.counters.merged + spill.counters.copied_back == spill.counters.copied_out
    assert node.tokens("young") == reference(prompt_of(2, 9), 24)
    node.assert_nothing_held()


def test_a_block_that_is_found_in_the_cache_during_its_copy_stays() -> None:
    """A new request matches the swapped-out one's prompt while it is being copied: the block has a runner now."""
    node = SpillNode(num_blocks=10, host_blocks=12, headroom_blocks=4)
    assert node.enter("old", prompt_of(1, 9), params_of(28))
    assert node.enter("young", prompt_of(2, 9), params_of(24))
    node.step_until("young", SpillState.SPILLING)
    copied = {unit.device for unit in node.spill._swapped_out[key_of("young")].units if unit.copying}
    found = [block for block in node.blocks.prefix_cache.match(prompt_of(2, 9), b"", 2) if block in copied]
    assert found, "the copy does not reach the prompt"
    node.blocks.ledger.hold(found)
    node.copier.finish_all()
    node.check()
    assert all(node.ledger.holders(block) == 2 for block in found)
    node.blocks.release(found)
    node.run()
    check_two(node)


def test_what_is_pinned_stays_on_the_device() -> None:
    """The old one needs all blocks but two, and those of the youngest one's prompt are pinned: everything else of the
    two others leaves, and the old one finishes beside the two."""
    node = SpillNode(num_blocks=11, host_blocks=24)
    assert node.enter("old", prompt_of(1, 9), params_of(28))
    assert node.enter("middle", prompt_of(3, 9), params_of(28))
    assert node.enter("young", prompt_of(2, 9), params_of(36))
    node.step()
    cache = node.blocks.prefix_cache
    chain = cache.chain(prompt_of(2, 9), b"")
    cache.pin(chain)
    assert cache.pinned_of(chain) == 0, "the young one may need the whole device"
    assert node.engine.abort(key_of("young"))
    assert node.enter("young", prompt_of(2, 9), params_of(28))
    node.step()
    assert cache.pinned_of(chain) == 2
    pinned = cache.match(prompt_of(2, 9), b"", 2)
    young = node.entered["young"]
    assert node.spill._running(young, 0, pressure=True).spillable == len(young.block_table) - 2
    on_device = set()
    while node.engine.has_work:
        node.step()
        copied = [block for copy, _ in node.copier.waiting for block in copy.device]
        assert not set(pinned) & set(copied)
        node.copier.finish_all()
        node.check()
        owner = node.spill._swapped_out.get(key_of("young"))
        if owner is not None:
            assert [unit.device for unit in owner.units[:2]] == pinned
            on_device.add(sum(unit.device is not None for unit in owner.units))
    assert min(on_device) == 2
    for name, number in (("old", 1), ("middle", 3), ("young", 2)):
        tokens = [e.token for e in node.events if e.seq is node.entered[name] and e.token is not None]
        assert tokens == reference(prompt_of(number, 9), 28)
    cache.unpin(chain)
    node.assert_nothing_held()


def test_a_block_that_is_pinned_during_its_copy_stays() -> None:
    """The copy is for nothing: the block is where it was, and its place in host memory is free again."""
    node = SpillNode(num_blocks=10, host_blocks=12, headroom_blocks=4)
    assert node.enter("old", prompt_of(1, 9), params_of(28))
    assert node.enter("young", prompt_of(2, 9), params_of(24))
    node.step_until("young", SpillState.SPILLING)
    assert node.engine.abort(key_of("old"))  # two pinned blocks would not fit beside it
    units = node.spill._swapped_out[key_of("young")].units
    copying = [unit for unit in units if unit.copying]
    cache = node.blocks.prefix_cache
    chain = cache.chain(prompt_of(2, 9), b"")
    cache.pin(chain)
    assert cache.pinned_of(chain) == 2
    pinned = [unit for unit in units[:2] if unit in copying]
    assert pinned, "the copy does not reach the prompt"
    node.copier.finish_all()
    node.check()
    assert all(unit.device is not None for unit in pinned)
    assert node.spill.host.filled == len(copying) - len(pinned)
    node.run()
    assert node.tokens("young") == reference(prompt_of(2, 9), 24)
    cache.unpin(chain)
    node.assert_nothing_held()


STATES = [SpillState.RUNNING, SpillState.SPILLING, SpillState.SPILLED, SpillState.RETURNING]


@pytest.mark.parametrize("victim", ["old", "young"])
@pytest.mark.parametrize("state", STATES)
def test_aborted_in_each_state(state: SpillState, victim: str) -> None:
    """The younger one is in this state when one of the two is cancelled (or its deadline passes, which is the same
    here): the other's answer is right, and everything on the device and in host memory is free in the end."""
    node = SpillNode(num_blocks=14, host_blocks=14)
    assert node.enter("first", prompt_of(3, 9), params_of(12))  # ends early, and makes room for a return
    assert node.enter("old", prompt_of(1, 9), params_of(28))
    assert node.enter("young", prompt_of(2, 11), params_of(24))
    node.step()
    node.step_until("young", state)
    assert node.engine.abort(key_of(victim))
    node.check()
    assert not node.engine.abort(key_of(victim))
    assert not node.engine.has(key_of(victim))
    if victim == "young":
        assert node.state("young") is None
    node.run()
    assert node.finish(victim) == [FinishReason.ABORTED]
    expected = {"old": reference(prompt_of(1, 9), 28), "young": reference(prompt_of(2, 11), 24)}
    reported = node.tokens(victim)
    assert reported == expected.pop(victim)[: len(reported)]
    assert {name: node.tokens(name) for name in expected} == expected
    node.assert_nothing_held()


def test_what_a_copy_touches_is_kept_until_the_copy_has_ended() -> None:
    """Both are cancelled during a copy out, and again during a copy back: the blocks on both sides stay held until it
    ends, and are free then."""
    for state in (SpillState.SPILLING, SpillState.RETURNING):
        node = two_in_a_tight_place()
        node.step_until("young", state)
        copying = sum(len(copy.device) for copy, _ in node.copier.waiting)
        assert copying > 0
        node.engine.abort(key_of("young"))
        node.engine.abort(key_of("old"))
        node.check()
        assert (node.ledger.counts().held, node.spill.host.copying) == (copying, copying)
        node.copier.finish_all()
        node.assert_nothing_held()


def test_the_same_key_may_come_again_while_an_old_copy_is_under_way() -> None:
    """The end of the old copy means nothing to the new sequence."""
    node = two_in_a_tight_place()
    node.step_until("young", SpillState.SPILLING)
    node.engine.abort(key_of("young"))
    while not node.enter("young", prompt_of(2, 9), params_of(24)):
        node.step()
    node.copier.finish_all()
    node.check()
    node.run()
    assert node.tokens("old") == reference(prompt_of(1, 9), 28)
    events = [event.token for event in node.events if event.seq is node.entered["young"] and event.token is not None]
    assert events == reference(prompt_of(2, 9), 24)
    node.assert_nothing_held()


def test_full_on_both_sides_they_trade_places_through_the_reserve() -> None:
    """Host memory holds what the sums need and its reserve of one: the two swap block by block, and both finish."""
    node = SpillNode(num_blocks=8, host_blocks=9)
    for name, count in (("old", 28), ("young", 28)):
        assert node.enter(name, prompt_of(len(name), 4), params_of(count))
    assert node.ledger.available_with_host == 0
    node.run()
    for name in ("old", "young"):
        assert node.tokens(name) == reference(prompt_of(len(name), 4), 28)
    assert node.engine.counters.tokens_computed == node.expected_tokens_computed
    node.assert_nothing_held()


def test_a_copy_that_breaks_off_breaks_the_engine_and_is_not_silent() -> None:
    """A copy fails only for a bug of ours: the next step raises it."""
    node = two_in_a_tight_place()
    node.step_until("young", SpillState.SPILLING)
    _, done = node.copier.waiting.pop()
    done(ValueError("out of bounds"))
    with pytest.raises(ValueError, match="out of bounds"):
        node.engine.schedule()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_arrivals_copies_and_aborts(data: st.DataObject) -> None:
    """With one group of layers or two. Sequences that share prompts or not come, grow, are aborted at any time; copies
    end in any order at any time; prefixes are pinned and unpinned. Conservation holds after every call; whoever was not
    aborted has the reference's tokens; each token was computed once; nothing is left."""
    headroom = data.draw(st.integers(1, 3), label="headroom")
    config = data.draw(st.sampled_from([SMALL, GROUPED]), label="config")
    groups = config.layout.num_groups
    node = SpillNode(
        config,
        num_blocks=data.draw(st.integers(6 * groups, 14 * groups), label="device"),
        host_blocks=data.draw(st.integers(headroom + 1, 24 * groups), label="host"),
        headroom_blocks=headroom,
        copy_blocks_max=data.draw(st.sampled_from([1, 3, 64]), label="copy"),
    )
    names = iter(range(100))
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    cache = node.blocks.prefix_cache
    pins: list[tuple[bytes, ...]] = []
    for _ in range(data.draw(st.integers(5, 60), label="events")):
        match data.draw(st.sampled_from(["enter", "step", "step", "step", "copy", "abort", "pin", "unpin"])):
            case "enter" if len(asked) < 8:
                prompt = prompt_of(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 12)))
                count = data.draw(st.integers(2, 4 * (node.ledger.num_blocks // groups) + 1 - len(prompt)))
                name = f"{next(names)}"
                if node.enter(name, prompt, params_of(count)):
                    asked[name] = (prompt, count)
            case "step":
                node.step()
            case "copy" if node.copier.waiting:
                node.copier.finish(data.draw(st.integers(0, len(node.copier.waiting) - 1)))
            case "abort" if asked:
                name = data.draw(st.sampled_from(sorted(asked)))
                if node.engine.abort(key_of(name)):
                    aborted.add(name)
            case "pin":
                prefix = prompt_of(data.draw(st.integers(1, 2)), data.draw(st.integers(4, 12)))
                pins.append(cache.chain(prefix, b""))
                cache.pin(pins[-1])
            case "unpin" if pins:
                cache.unpin(pins.pop(data.draw(st.integers(0, len(pins) - 1))))
        node.check()
    node.run()
    for name, (prompt, count) in asked.items():
        expected = reference(prompt, count, config)
        reported = node.tokens(name)
        assert reported == (expected[: len(reported)] if name in aborted else expected)
    if not aborted:
        assert node.engine.counters.tokens_computed == node.expected_tokens_computed
    for chain in pins:
        cache.unpin(chain)
    node.assert_nothing_held()
