"""The engine gives the reference's tokens, whatever happens around: prefix hits, aborts, evictions, failed steps."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.mock import MockConfig, MockRunner
from engine.scheduler import EngineFullError, Sequence, SequenceMode
from engine.types import NO_TOKEN, Batch, FinishReason, KvSink, NullSink, SamplingParams, StepResult, TokenLogprobs
from tests.support.engine_bench import GROUPED, SMALL, Node, key_of, params_of
from tests.support.mock_reference import mock_reference

WAIT_S = 20


def test_two_thousand_tokens_in_chunks() -> None:
    """A long prompt and its decode with default sizes."""
    config = MockConfig()
    node = Node(config, num_blocks=140, tokens_per_step=512)
    prompt = [n * 7 % 1000 for n in range(2_000)]
    node.submit("a", prompt, params_of(12))
    node.run()
    assert node.tokens("a") == mock_reference(prompt, params_of(12), 12, config=config)
    assert node.engine.counters.steps == 4 + 11
    node.assert_nothing_held()


def test_finish_by_max_tokens_context_and_stop_tokens() -> None:
    """The token that stops is told like any other, with the reason; a stop token as the last allowed one is a stop."""
    prompt = [2, 3, 4]
    reference = mock_reference(prompt, params_of(), 20, config=SMALL)
    third = frozenset({reference[2]})
    assert reference[2] not in reference[:2]
    node = Node(num_blocks=100)
    node.submit("max", prompt, params_of(3))
    node.submit("stop", prompt, params_of(8, stop_token_ids=third))
    node.submit("both", prompt, params_of(3, stop_token_ids=third))
    node.submit("first", prompt, params_of(8, stop_token_ids=frozenset({reference[0]})))
    node.submit("context", [4] * 250, params_of(100))
    node.run()
    assert [node.tokens(n) for n in ("max", "stop", "both", "first")] == [reference[:3]] * 3 + [reference[:1]]
    assert node.finish("max") == [FinishReason.LENGTH]
    assert node.finish("stop") == node.finish("both") == node.finish("first") == [FinishReason.STOP]
    assert node.tokens("context") == mock_reference([4] * 250, params_of(), 6, config=SMALL)
    assert node.finish("context") == [FinishReason.LENGTH]
    node.assert_nothing_held()


def test_a_first_token_that_cannot_be_drawn_ends_one_sequence_of_the_batch() -> None:
    """Two prompts in one step, one to its first token only and with scores that are not numbers: it ends without a
    token and says why, nothing of it is held, and the other goes on."""

    class Broken(MockRunner):
        def run(self, batch: Batch, sink: KvSink) -> StepResult:
            result = super().run(batch, sink)
            return replace(
                result, sampled={key: NO_TOKEN if key == key_of("b") else t for key, t in result.sampled.items()}
            )

    node = Node(runner=Broken(SMALL))
    node.submit("a", [1, 2, 3], params_of(4))
    node.submit("b", [5] * 4, params_of(4))
    node.run()
    assert node.tokens("a") == mock_reference([1, 2, 3], params_of(4), 4, config=SMALL)
    assert (node.tokens("b"), node.finish("b")) == ([], [FinishReason.NOT_FINITE])
    assert (node.engine.counters.not_finite, node.engine.counters.tokens_drawn) == (1, 4)
    node.assert_nothing_held()


class NoTokenForBroken(MockRunner):
    """The scores of the request "broken" are not numbers."""

    def run(self, batch: Batch, sink: KvSink) -> StepResult:
        result = super().run(batch, sink)
        broken = {key: NO_TOKEN if key == key_of("broken") else t for key, t in result.sampled.items()}
        return replace(result, sampled=broken)


@pytest.mark.parametrize("mode", list(SequenceMode))
def test_blocks_of_a_request_without_a_token_are_not_used_again(mode: SequenceMode) -> None:
    """Its own and the prefix that it took from the cache, pinned or not, for their KV may be the reason. What another
    prompt has computed stays, and the same prompt is computed anew and pinned again."""

    node = Node(runner=NoTokenForBroken(SMALL))
    prefix, other = [7] * 8, [9] * 8
    cache = node.blocks.prefix_cache
    cache.pin(cache.chain(prefix, b""))
    node.submit("first", [*prefix, 1], params_of(1))
    node.submit("other", [*other, 1], params_of(1))
    node.run()
    assert (len(node.blocks.prefix_cache.match(prefix, b"", 9)), cache.pinned_blocks) == (2, 2)
    broken = node.submit("broken", [*prefix, *[2] * 9], params_of(4), mode=mode)
    assert broken.cached_tokens == 8
    node.run()
    assert node.finish("broken") == [FinishReason.NOT_FINITE]
    if mode is SequenceMode.PREFILL_ONLY:
        node.blocks.release(broken.block_table)
    assert node.blocks.prefix_cache.match([*prefix, *[2] * 9], b"", 9) == []
    assert (len(node.blocks.prefix_cache.match(other, b"", 9)), cache.pinned_blocks) == (2, 0)
    again = node.submit("again", [*prefix, 1], params_of(2))
    node.run()
    assert (again.cached_tokens, cache.pinned_blocks) == (0, 2)
    assert node.tokens("again") == mock_reference([*prefix, 1], params_of(2), 2, config=SMALL)
    cache.unpin(cache.chain(prefix, b""))
    node.assert_nothing_held()


def test_a_running_sequence_does_not_bring_broken_blocks_back() -> None:
    """It shares the prefix of a request that ends without a token, and fills blocks of its own afterwards."""

    node = Node(runner=NoTokenForBroken(SMALL))
    prefix = [7] * 8
    cache = node.blocks.prefix_cache
    running = node.submit("running", [*prefix, 1], params_of(20))
    while len(running.tokens) < 10:
        node.step()
    broken = node.submit("broken", [*prefix, 2], params_of(4))
    assert broken.cached_tokens == 8
    node.run()
    assert (node.finish("broken"), len(running.tokens)) == ([FinishReason.NOT_FINITE], 29)
    assert cache.match(running.tokens, b"", 9) == []
    assert len(cache) == 0
    node.assert_nothing_held()


def test_end_of_sequence_stops_unless_ignored() -> None:
    """A model that draws its end token often."""
    config = MockConfig(num_layers=2, vocab_size=6, block_size=4, draws_eos=True)
    reference = mock_reference([1, 2], params_of(), 30, config=config)
    at = reference.index(0)
    node = Node(config)
    node.submit("ends", [1, 2], params_of(30))
    node.submit("on", [1, 2], params_of(30, ignore_eos=True))
    node.run()
    assert (node.tokens("ends"), node.finish("ends")) == (reference[: at + 1], [FinishReason.STOP])
    assert (node.tokens("on"), node.finish("on")) == (reference, [FinishReason.LENGTH])
    node.assert_nothing_held()


def test_nothing_ends_before_min_tokens() -> None:
    """A model that does not hold its end token back (the mock): one that comes too early is a token like any other."""
    config = MockConfig(num_layers=2, vocab_size=6, block_size=4, draws_eos=True)
    reference = mock_reference([1, 2], params_of(), 30, config=config)
    ends = [i for i, token in enumerate(reference) if token == 0]
    for min_tokens, at in ((0, ends[0]), (ends[0], ends[0]), (ends[0] + 1, ends[1]), (ends[1], ends[1])):
        node = Node(config)
        node.submit("eos", [1, 2], replace(params_of(30), min_tokens=min_tokens))
        node.submit("stop", [1, 2], replace(params_of(30, stop_token_ids=frozenset({0})), min_tokens=min_tokens))
        node.run()
        for name in ("eos", "stop"):
            assert (node.tokens(name), node.finish(name)) == (reference[: at + 1], [FinishReason.STOP])


def test_events_carry_the_log_probabilities_that_are_asked_for() -> None:
    """One with each token, the last one too; none for the request beside it that asks for none."""
    node = Node()
    node.submit("asks", [1, 2, 3], replace(params_of(4), logprobs=2))
    node.submit("does not", [1, 2, 3], params_of(4))
    node.run()
    asked = [event for event in node.events if event.seq.key == key_of("asks")]
    expected = [TokenLogprobs(logprob=0.0, top=((token, 0.0),)) for token in node.tokens("asks")]
    assert [event.logprobs for event in asked] == expected
    assert len(expected) == 4
    assert all(event.logprobs is None for event in node.events if event.seq.key == key_of("does not"))


def test_prefill_here_decode_there() -> None:
    """The handoff without a network: prefill alone, records copied to other blocks of another region, decode resumed.
    The prefill side's blocks stay held until the caller lets go; the decode side serves the prefix to the next one."""
    prompt = list(range(1, 12))
    params = params_of(10, temperature=0.7)
    reference = mock_reference(prompt, params, 10, config=SMALL)
    here, there = Node(), Node()
    there.ledger.take(5)  # so that block numbers differ
    seq = here.submit("a", prompt, params, mode=SequenceMode.PREFILL_ONLY)
    here.run()
    assert (here.tokens("a"), here.finish("a"), here.engine.has_work) == (reference[:1], [], False)
    assert here.ledger.check().held == 3
    table = there.blocks.admit([], 3, promise_key="a", promise=2)
    there.pages[:, table] = here.pages[:, seq.block_table]
    here.blocks.release(seq.block_table)
    here.ledger.unpromise("a")
    here.assert_nothing_held()
    resumed = Sequence(
        key=key_of("a"),
        params=params,
        tokens=[*prompt, reference[0]],
        prompt_len=11,
        computed=11,
        block_table=table,
        promise_key="a",
        mode=SequenceMode.COMPLETE,
    )
    there.engine.resume(resumed)
    assert there.blocks.prefix_cache.match(prompt, b"", 9) == table[:2]
    there.run()
    assert there.tokens("a") == reference[1:]
    assert there.events[0].index == 1
    follow_up = there.submit("b", [*prompt, *reference, 7], params_of(4))
    assert follow_up.cached_tokens == 20
    there.run()
    assert there.tokens("b") == mock_reference([*prompt, *reference, 7], params_of(4), 4, config=SMALL)
    assert there.blocks.prefix_cache.hit_tokens == 20


def test_a_prefill_that_ends_the_request_says_so() -> None:
    """max_tokens is one: the event carries token and reason; the blocks are still the caller's."""
    node = Node()
    seq = node.submit("a", [1, 2, 3], params_of(1), mode=SequenceMode.PREFILL_ONLY)
    node.run()
    assert node.finish("a") == [FinishReason.LENGTH]
    assert node.ledger.check().held == len(seq.block_table) == 1


def test_tenants_do_not_share_blocks() -> None:
    """The same prompt under another salt is computed again."""
    node = Node()
    prompt = [1] * 12
    node.submit("a", prompt, params_of(2), salt=b"x")
    node.run()
    assert node.submit("b", prompt, params_of(2), salt=b"y").cached_tokens == 0
    assert node.submit("c", prompt, params_of(2), salt=b"x").cached_tokens == 8
    node.run()
    assert node.tokens("a") == node.tokens("b") == node.tokens("c")
    node.assert_nothing_held()


def test_abort_of_something_unknown() -> None:
    """Never seen, and gone already."""
    node = Node()
    assert not node.engine.abort(key_of("a"))
    node.submit("a", [1], params_of(1))
    node.run()
    assert not node.engine.abort(key_of("a"))
    assert node.engine.take_events() == []


def test_abort_while_waiting_frees_at_once() -> None:
    """No step runs, nothing else is there: the event is to be had without one."""
    node = Node()
    node.submit("a", [1, 2, 3, 4, 5], params_of(4))
    assert node.engine.abort(key_of("a"))
    assert node.ledger.check().free == 64
    assert not node.engine.has_work
    (event,) = node.engine.take_events()
    assert (event.token, event.index, event.finish) == (None, 0, FinishReason.ABORTED)
    assert node.engine.schedule() is None


def test_abort_during_a_step_keeps_the_blocks_until_it_is_over() -> None:
    """The engine thread is inside the step when the abort, and a submit, arrive. Twice aborted is told once."""
    entered, leave = threading.Event(), threading.Event()

    class Sink:
        def layer_done(self, layer: int) -> None:
            entered.set()
            assert leave.wait(WAIT_S)

    node = Node()
    node.submit("a", [1, 2, 3, 4, 5], params_of(4))
    node.submit("b", [6, 7], params_of(4))
    batch = node.engine.schedule()
    assert batch is not None
    read = [(list(piece.tokens), list(piece.block_table)) for piece in batch.slices]
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(node.engine.run, batch, Sink())
        try:
            assert entered.wait(WAIT_S)
            assert node.engine.abort(key_of("a"))
            assert node.engine.abort(key_of("a"))
            node.submit("c", [8], params_of(4))
            assert node.ledger.check().held == 4
            assert node.engine.take_events() == []
            assert [(list(piece.tokens), list(piece.block_table)) for piece in batch.slices] == read
        finally:
            leave.set()
        node.events += node.engine.postprocess(batch, future.result(WAIT_S))
    assert (node.tokens("a"), node.finish("a")) == ([], [FinishReason.ABORTED])
    assert node.ledger.check().held == 2
    node.run()
    for name, prompt in (("b", [6, 7]), ("c", [8])):
        assert node.tokens(name) == mock_reference(prompt, params_of(4), 4, config=SMALL)
    node.assert_nothing_held()


def test_an_abort_does_not_outlive_its_step() -> None:
    """A sequence is aborted during a step; another one of the same key is answered in full afterwards."""
    node = Node()
    node.submit("a", [1], params_of(4))
    batch = node.engine.schedule()
    assert batch is not None
    node.engine.abort(key_of("a"))
    node.engine.postprocess(batch, node.engine.run(batch, NullSink()))
    node.submit("a", [1], params_of(4))
    node.run()
    assert node.tokens("a") == mock_reference([1], params_of(4), 4, config=SMALL)
    assert node.finish("a") == [FinishReason.LENGTH]
    node.assert_nothing_held()


def test_a_step_that_fails_aborts_its_sequences_and_no_others() -> None:
    """The runner raises in a layer: the batch is lost, half-written blocks are not cached, who waited goes on."""

    class Broken(MockRunner):
        broken = True

        def run(self, batch: Batch, sink: KvSink) -> StepResult:
            result = super().run(batch, sink)
            if self.broken:
                raise RuntimeError("device lost")
            return result

    runner = Broken(SMALL)
    node = Node(runner=runner, sequences=2)
    prompts = {"a": [1] * 9, "b": [2, 3], "c": [1] * 9}
    for name, prompt in prompts.items():
        node.submit(name, prompt, params_of(4))
    lent = node.submit("d", [5] * 5, params_of(4), mode=SequenceMode.PREFILL_ONLY)
    batch = node.engine.schedule()
    assert batch is not None
    with pytest.raises(RuntimeError, match="device lost"):
        node.engine.run(batch, NullSink())
    assert node.engine.abort(key_of("a"))
    node.events += node.engine.fail_step(batch)
    assert node.finish("a") == node.finish("b") == [FinishReason.ABORTED]
    assert len(node.blocks.prefix_cache) == 0
    assert node.ledger.check().held == 3 + 2
    runner.broken = False
    node.run()
    assert node.tokens("c") == mock_reference(prompts["c"], params_of(4), 4, config=SMALL)
    node.blocks.release(lent.block_table)
    node.ledger.unpromise("d")
    node.assert_nothing_held()


def test_one_step_in_flight() -> None:
    """A second schedule before the first step is over, or the outcome of another batch, is our bug."""
    node = Node()
    node.submit("a", [1], params_of(4))
    batch = node.engine.schedule()
    assert batch is not None
    with pytest.raises(AssertionError, match="in flight"):
        node.engine.schedule()
    with pytest.raises(AssertionError, match="in flight"):
        node.engine.postprocess(Batch(slices=batch.slices), StepResult())


def test_the_engine_refuses_to_write_into_a_shared_block() -> None:
    """A prompt whose every block is in the cache, none of it cut off."""
    node = Node()
    node.submit("a", [1] * 8, params_of(1))
    node.run()
    table = node.blocks.prefix_cache.match([1] * 8, b"", 2)
    assert len(table) == 2
    node.blocks.admit(table, 0, promise_key="b", promise=0)
    seq = Sequence(
        key=key_of("b"),
        params=params_of(1),
        tokens=[1] * 8,
        prompt_len=8,
        computed=7,
        block_table=table,
        promise_key="b",
        mode=SequenceMode.COMPLETE,
    )
    with pytest.raises(AssertionError, match="shared block"):
        node.engine.submit(seq)


def test_a_full_queue_refuses_and_leaves_the_sequence_with_the_caller() -> None:
    """Sixteen wait; the next is refused, its blocks are given back by the caller, the others are answered."""
    node = Node(sequences=1)
    for n in range(16):
        node.submit(f"{n}", [n + 1], params_of(2))
    extra = node.sequence("extra", [1], params_of(2))
    assert extra is not None
    with pytest.raises(EngineFullError):
        node.engine.submit(extra)
    assert (node.engine.scheduler.running, node.engine.scheduler.waiting) == (0, 16)
    node.blocks.release(extra.block_table)
    node.ledger.unpromise("extra")
    node.run()
    assert [node.tokens(f"{n}") for n in range(16)] == [
        mock_reference([n + 1], params_of(2), 2, config=SMALL) for n in range(16)
    ]
    node.assert_nothing_held()


def test_abort_at_every_step() -> None:
    """Three sequences share a prefix. One is aborted before, in, or after each step of its life: the others' answers
    are the reference, nothing stays held, and what it was told so far is the beginning of its own reference."""
    prompts = {"a": [1] * 9, "b": [1] * 8 + [2] * 14, "c": [1] * 9 + [3] * 9}
    reference = {name: mock_reference(prompt, params_of(7), 7, config=SMALL) for name, prompt in prompts.items()}
    visited = 0
    for victim in prompts:
        for when in ("before", "during", "after"):
            for at in range(12):
                node = Node(tokens_per_step=9, sequences=2, num_blocks=24)
                for name, prompt in prompts.items():
                    node.submit(name, prompt, params_of(7))
                known = run_and_abort(node, victim, when, at)
                visited += known
                reported = node.tokens(victim)
                assert reported == reference[victim][: len(reported)]
                assert node.finish(victim) == [FinishReason.ABORTED if known else FinishReason.LENGTH]
                for name in prompts.keys() - {victim}:
                    assert node.tokens(name) == reference[name]
                node.assert_nothing_held()
    assert visited > 80


def run_and_abort(node: Node, victim: str, when: str, at: int) -> bool:
    """Run to the end; abort `victim` around step `at`. Whether it was still there."""
    known = False
    step = 0
    while node.engine.has_work:
        if step == at and when == "before":
            known = node.engine.abort(key_of(victim))
        batch = node.engine.schedule()
        if batch is None:
            break
        if step == at and when == "during":
            known = node.engine.abort(key_of(victim))
        node.events += node.engine.postprocess(batch, node.engine.run(batch, NullSink()))
        if step == at and when == "after":
            known = node.engine.abort(key_of(victim))
        node.ledger.check()
        step += 1
    node.events += node.engine.take_events()
    return known


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([24, 40, 100]),
    sequences=st.integers(1, 6),
    extra_budget=st.integers(0, 40),
    seeded=st.booleans(),
    config=st.sampled_from([SMALL, GROUPED]),
)
def test_random_work_gives_the_reference(
    seed: int, num_blocks: int, sequences: int, extra_budget: int, seeded: bool, config: MockConfig
) -> None:
    """One group of layers, or two. Prompts of 1 to 60 tokens, many of them with a common beginning, arrive when
    there is room for them, some are aborted, some are retries that bring output along; memory is short, so that the
    cache is evicted all the time."""
    rng = random.Random(seed)
    num_blocks = num_blocks * config.layout.num_groups + rng.randrange(2)
    node = Node(config, num_blocks=num_blocks, sequences=sequences, tokens_per_step=sequences + extra_budget)
    common = [rng.randrange(1, 50) for _ in range(40)]
    jobs = {str(n): random_job(rng, common, seeded) for n in range(12)}
    pending = list(jobs)
    aborted = set()
    while pending or node.engine.has_work:
        while pending and node.engine.scheduler.waiting < 4:
            prompt, output, params = jobs[pending[0]]
            seq = node.sequence(pending[0], prompt, params, output=output)
            if seq is None:
                break
            node.engine.submit(seq)
            pending.pop(0)
        batch = node.engine.schedule()
        assert batch is not None
        result = node.engine.run(batch, NullSink())
        if rng.random() < 0.05:
            name = rng.choice(list(jobs))
            if node.engine.abort(key_of(name)):
                aborted.add(name)
        node.events += node.engine.postprocess(batch, result)
        node.ledger.check()
    for name, (prompt, output, params) in jobs.items():
        want = mock_reference(prompt, params, params.max_tokens - len(output), config=config, output=output)
        reported = node.tokens(name)
        assert reported == (want[: len(reported)] if name in aborted else want)
        assert node.finish(name) == [FinishReason.ABORTED if name in aborted else FinishReason.LENGTH]
    node.assert_nothing_held()


def random_job(rng: random.Random, common: list[int], seeded: bool) -> tuple[list[int], list[int], SamplingParams]:
    prompt = common[: rng.randrange(0, 41)] + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
    params = params_of(rng.randrange(1, 14), temperature=0.9 * seeded, seed=rng.randrange(1_000))
    received = rng.randrange(params.max_tokens) if rng.random() < 0.3 else 0
    return prompt, mock_reference(prompt, params, received, config=SMALL), params
