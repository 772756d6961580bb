"""Steps launched behind one in flight, on a device that is as late as it may be: the tokens are the plain engine's, and
no block is freed under a step that may still write to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.core import Engine, TokenEvent
from engine.mock import MockConfig, MockRunner
from engine.scheduler import SchedulerConfig, Sequence, SequenceMode
from engine.types import NO_TOKEN, Batch, FinishReason, KvSink, NullSink, SamplingParams, StepResult
from tests.support.engine_bench import SMALL, Node, key_of, params_of
from tests.support.late_runner import LateRunner, Overlap, OverlapNode, OverlapSpillNode
from tests.support.mock_reference import mock_reference

ENDS_OFTEN = MockConfig(num_layers=2, vocab_size=12, block_size=4, context_len_max=48, draws_eos=True)


def reference(prompt: list[int], count: int) -> list[int]:
    return mock_reference(prompt, params_of(), count, config=SMALL)


def stops_at_the_third(length: int) -> tuple[list[int], SamplingParams]:
    """A prompt of this length, and parameters by which its third token ends the answer, and no earlier one."""
    for first in range(1, 50):
        prompt = [first] * length
        tokens = reference(prompt, 3)
        if tokens[2] not in tokens[:2]:
            return prompt, params_of(8, stop_token_ids=frozenset({tokens[2]}))
    raise AssertionError(length)


def test_every_step_but_the_first_overlaps() -> None:
    """Two answers that end by their length, which is known ahead: no surplus, one token of each in every step."""
    node = OverlapNode()
    node.submit("long", [1, 2, 3], params_of(8))
    node.submit("short", [4] * 6, params_of(5))
    node.run()
    assert node.tokens("long") == reference([1, 2, 3], 8)
    assert node.tokens("short") == reference([4] * 6, 5)
    assert [event.index for event in node.events if event.seq.key == key_of("long")] == list(range(8))
    counters = node.engine.counters
    assert (counters.steps, counters.steps_overlapped, counters.steps_held_back) == (8, 7, 0)
    assert (counters.tokens_drawn, counters.tokens_surplus) == (13, 0)
    assert counters.tokens_computed == 3 + 7 + 6 + 4
    assert node.engine.describe() == {
        "steps overlapped": "7 of 8, 0 held back, 0 surplus tokens",
        "requests ended by scores that are not numbers": "0",
    }
    node.assert_nothing_held()


@pytest.mark.parametrize("length", [2, 3])
def test_a_stop_token_is_told_at_once_and_its_blocks_go_a_step_later(length: int) -> None:
    """The step behind has the sequence once more; with a prompt of two, in a block that it has drawn for it."""
    prompt, params = stops_at_the_third(length)
    node = OverlapNode()
    node.submit("a", prompt, params)
    for _ in range(2):
        (event,) = node.step()
        assert event.finish is None
    (event,) = node.step()
    assert (event.token, event.finish) == (reference(prompt, 3)[2], FinishReason.STOP)
    assert (node.overlap.in_flight, node.engine.scheduler.running, node.engine.has_work) == (1, 0, True)
    counts = node.ledger.check()
    assert (counts.held, counts.promised) == (2, 0)
    assert not node.engine.has(key_of("a"))
    assert not node.engine.abort(key_of("a"))
    assert node.step() == []
    assert not node.engine.has_work
    assert node.ledger.check().held == 0
    counters = node.engine.counters
    assert (counters.steps, counters.tokens_drawn, counters.tokens_surplus) == (4, 3, 1)
    assert counters.tokens_computed == length + 2
    node.assert_nothing_held()


def test_what_a_surplus_slice_computed_is_not_in_the_prefix_cache() -> None:
    """Seven tokens are computed by right, the eighth by the surplus slice: the follow-up finds one block, not two."""
    prompt, params = stops_at_the_third(5)
    node = OverlapNode()
    node.submit("a", prompt, params)
    node.run()
    assert node.engine.counters.tokens_surplus == 1
    answer = reference(prompt, 3)
    again = [*prompt, *answer, 7]
    follow_up = node.submit("b", again, params_of(3))
    assert follow_up.cached_tokens == 4
    node.run()
    assert node.tokens("b") == reference(again, 3)
    node.assert_nothing_held()


def test_freed_too_early_is_seen() -> None:
    """The same with an engine that frees the blocks of an ended sequence at once, while a step may write to them."""
    prompt, params = stops_at_the_third(3)
    node = OverlapNode()
    node.submit("a", prompt, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_release_if_over", release_at_once)
        with pytest.raises(AssertionError, match="freed under a step in flight"):
            node.run()


def release_at_once(engine: Engine, seq: Sequence) -> None:
    engine._blocks.release(seq.block_table)
    seq.block_table.clear()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_an_abort_is_told_when_the_last_step_with_it_is_over(steps: int) -> None:
    """Two steps are in flight with it, then one: no token is told after the abort, the blocks stay until the end."""
    node = OverlapNode()
    node.submit("a", [1, 2, 3], params_of(8))
    for _ in range(steps):
        node.step()
    asked: list[int] = []

    def abort_with_two_in_flight() -> None:
        asked.append(node.overlap.in_flight)
        if node.overlap.in_flight == 2 and len(asked) <= 3:
            assert node.engine.abort(key_of("a"))
            assert node.engine.abort(key_of("a"))

    node.overlap.between = abort_with_two_in_flight
    assert node.step() == []
    assert node.ledger.check().held > 0
    (event,) = node.step()
    assert (event.token, event.index, event.finish) == (None, steps, FinishReason.ABORTED)
    assert node.ledger.check().held == 0
    assert node.tokens("a") == reference([1, 2, 3], steps)
    assert not node.engine.has_work
    node.assert_nothing_held()


def test_a_long_prompt_overlaps_chunk_by_chunk() -> None:
    """Its next chunk needs nothing of the one in flight; beside it another request decodes."""
    node = OverlapNode(tokens_per_step=9)
    prompt = [n * 7 % 50 for n in range(60)]
    node.submit("decodes", [5, 6], params_of(20))
    node.step()
    node.submit("reads", prompt, params_of(4))
    node.run()
    assert node.tokens("decodes") == reference([5, 6], 20)
    assert node.tokens("reads") == reference(prompt, 4)
    assert node.engine.counters.steps_overlapped == node.engine.counters.steps - 1
    node.assert_nothing_held()


def test_a_prefill_leaves_with_its_first_token_and_is_in_no_step_behind() -> None:
    """Its blocks are the caller's with the event: no step in flight has them. The chunks before overlap."""
    node = OverlapNode(tokens_per_step=8)
    seq = node.submit("a", [3] * 20, params_of(5), mode=SequenceMode.PREFILL_ONLY)
    node.run()
    assert node.tokens("a") == reference([3] * 20, 1)
    assert seq.steps_in_flight == 0
    assert node.engine.counters.steps == 3
    node.blocks.release(seq.block_table)
    node.ledger.unpromise("a")
    node.assert_nothing_held()


def test_an_aborted_prefill_keeps_its_blocks_until_both_chunks_are_over() -> None:
    """Two chunks in flight: the event, with which the caller frees the blocks, comes after the second."""
    node = OverlapNode(tokens_per_step=8)
    seq = node.submit("a", [3] * 30, params_of(5), mode=SequenceMode.PREFILL_ONLY)
    node.step()
    assert node.overlap.in_flight == 1
    node.engine.abort(key_of("a"))
    (event,) = node.step()
    assert (event.finish, node.overlap.in_flight) == (FinishReason.ABORTED, 0)
    assert node.engine.counters.steps == 2
    node.blocks.release(seq.block_table)
    node.ledger.unpromise("a")
    node.assert_nothing_held()


def test_a_request_that_needs_the_host_holds_the_steps_back_and_says_so() -> None:
    """A penalty counts the tokens before: while such a request decodes, each step waits for the one before."""
    node = OverlapNode()
    node.submit("plain", [1, 2], params_of(9))
    node.submit("penalised", [3, 4], replace(params_of(4), repetition_penalty=1.5))
    node.run()
    counters = node.engine.counters
    # The penalised one is in steps 0 to 3, and not drawn for behind step 3.
    assert (counters.steps, counters.steps_overlapped, counters.steps_held_back) == (9, 9 - 1 - 3, 3)
    assert node.tokens("plain") == reference([1, 2], 9)
    assert node.tokens("penalised") == reference([3, 4], 4)
    node.assert_nothing_held()


def test_a_step_that_fails_takes_the_sequences_of_the_step_behind_along() -> None:
    """One is in the failed step and the one behind, one in the one behind only: the second is answered."""
    node = OverlapNode(tokens_per_step=8)
    node.late.break_collect = 1
    node.submit("both", [1, 2], params_of(6))
    node.step()
    node.submit("behind", [3] * 5, params_of(4))
    engine, flying = node.engine, node.overlap._flying
    behind = engine.schedule_overlapped()
    assert behind is not None and engine.overlap is not None
    assert [piece.key for piece in behind.slices] == [key_of("both"), key_of("behind")]
    flying.append((behind, engine.overlap.launch(behind, NullSink())))
    batch, step = flying.popleft()
    with pytest.raises(RuntimeError, match="device lost"):
        engine.overlap.collect(step)
    assert engine.fail_step(batch) == []
    assert node.ledger.check().held == 3
    node.run()
    assert node.tokens("both") == reference([1, 2], 1)
    assert node.finish("both") == [FinishReason.ABORTED]
    assert node.tokens("behind") == reference([3] * 5, 4)
    node.assert_nothing_held()


def test_a_row_without_a_token_ends_its_sequence_and_no_other() -> None:
    """The third draw of one answer finds scores that are not numbers, as the step behind it is launched already: its
    surplus slice is dropped, its blocks are free after it, and the answer beside it goes on."""
    broken = key_of("broken")
    run = MockRunner.run

    def run_broken(self: MockRunner, batch: Batch, sink: KvSink) -> StepResult:
        result = run(self, batch, sink)
        third = [piece for piece in batch.slices if piece.key == broken and piece.output_index == 2]
        return replace(result, sampled={**result.sampled, broken: NO_TOKEN}) if third else result

    node = OverlapNode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MockRunner, "run", run_broken)
        patch.setattr(node.runner, "_check", lambda piece: None)  # the surplus slice has no token to check
        node.submit("broken", [1, 2, 3], params_of(8))
        node.submit("good", [4] * 6, params_of(8))
        node.run()
    assert node.tokens("broken") == reference([1, 2, 3], 2)
    assert node.finish("broken") == [FinishReason.NOT_FINITE]
    assert node.tokens("good") == reference([4] * 6, 8)
    counters = node.engine.counters
    assert (counters.not_finite, counters.tokens_surplus, counters.tokens_drawn) == (1, 1, 2 + 8)
    assert node.engine.describe()["requests ended by scores that are not numbers"] == "1"
    node.assert_nothing_held()


def test_no_step_overlaps_where_the_runner_is_too_small() -> None:
    """More tokens may be drawn in a step than the runner can pass on: its steps are run one after the other."""
    runner = LateRunner(SMALL)
    runner.overlap_rows_max = 3
    node = Node(sequences=4, runner=runner)
    assert node.engine.overlap is None
    assert node.engine.describe() == {"requests ended by scores that are not numbers": "0"}
    runner.overlap_rows_max = 4
    limits = SchedulerConfig(tokens_per_step_max=8, sequences_max=4, waiting_max=4)
    assert Engine(runner, node.blocks, limits).overlap is runner


def test_growth_that_does_not_fit_holds_the_steps_back() -> None:
    """Ten blocks for two that want nine and eight: nothing can be swapped out while a step is in flight, so the steps
    wait where memory is short. Both answers are whole, and each token was computed once."""
    node = OverlapSpillNode(num_blocks=10, host_blocks=12)
    prompts = {"old": [n % 50 for n in range(9)], "young": [n * 3 % 50 for n in range(9)]}
    counts = {"old": 28, "young": 24}
    for name, prompt in prompts.items():
        assert node.enter(name, prompt, params_of(counts[name]))
    node.run()
    for name, prompt in prompts.items():
        assert node.tokens(name) == reference(prompt, counts[name])
    counters = node.engine.counters
    assert counters.steps_overlapped > 10
    assert counters.steps_held_back > 0
    assert node.spill.counters.copied_out > 0
    assert counters.tokens_computed == node.expected_tokens_computed
    node.assert_nothing_held()


@pytest.mark.parametrize("first_seed", [0, 100, 200])
def test_random_growth_under_overcommit(first_seed: int) -> None:
    """Some sequences that end by length or by a stop token on a device too small for them, aborts in between."""
    overlapped = held_back = surplus = 0
    for seed in range(first_seed, first_seed + 15):
        rng = random.Random(seed)
        node = OverlapSpillNode(num_blocks=rng.choice([8, 10, 14]), host_blocks=16, chance=rng)
        wanted = {}
        for n in range(4):
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 12))]
            tokens = reference(prompt, rng.randrange(2, 20))
            stop = rng.choice([None, tokens[-1]])
            end = len(tokens) if stop is None else tokens.index(stop) + 1
            params = params_of(len(tokens)) if stop is None else params_of(20, stop_token_ids=frozenset({stop}))
            if node.enter(f"{n}", prompt, params):
                wanted[f"{n}"] = tokens[:end]
        aborted: set[str] = set()

        def ask(node: OverlapSpillNode = node, rng: random.Random = rng, aborted: set[str] = aborted) -> None:
            name = f"{rng.randrange(4)}"
            if rng.random() < 0.01 and node.engine.abort(key_of(name)):
                aborted.add(name)

        node.overlap.between = ask
        node.run()
        for name, tokens in wanted.items():
            reported = node.tokens(name)
            assert reported == (tokens[: len(reported)] if name in aborted else tokens)
        node.assert_nothing_held()
        counters = node.engine.counters
        overlapped, held_back = overlapped + counters.steps_overlapped, held_back + counters.steps_held_back
        surplus += counters.tokens_surplus
    assert min(overlapped, held_back, surplus) > 0


@pytest.mark.parametrize("first_seed", [0, 100, 200, 300])
def test_random_work_gives_the_plain_engines_answers(first_seed: int) -> None:
    """Prompts in chunks, many with a common beginning, ends by token, by length and by context, handoffs, requests
    that hold the steps back, aborts at any moment, memory short: each answer is the one that the plain engine gives."""
    plays = [Play(seed) for seed in range(first_seed, first_seed + 20)]
    for play in plays:
        play.run()
        play.check()
    assert sum(play.node.engine.counters.steps_overlapped for play in plays) > 300
    assert sum(play.node.engine.counters.steps_held_back for play in plays) > 20
    assert sum(play.node.engine.counters.tokens_surplus for play in plays) > 20
    assert sum(len(play.aborted_in_flight) for play in plays) > 1


def test_random_work_finds_blocks_that_are_freed_too_early() -> None:
    """The engine that frees at once does not get through."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_release_if_over", release_at_once)
        with pytest.raises(AssertionError, match="freed under a step in flight"):
            run_all(range(20))


def run_all(seeds: range) -> None:
    for seed in seeds:
        Play(seed).run()


class Play:
    """Twelve requests on a node of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.node = OverlapNode(
            ENDS_OFTEN,
            num_blocks=rng.choice([24, 40, 100]),
            sequences=rng.randrange(1, 7),
            tokens_per_step=rng.randrange(7, 40),
            chance=rng.choice([None, rng]),
        )
        common = [rng.randrange(12) for _ in range(24)]
        self.jobs = {f"{n}": self.job(common) for n in range(12)}
        self.pending = list(self.jobs)
        self.aborted: set[str] = set()
        self.aborted_in_flight: set[str] = set()
        self.node.overlap.between = self.between
        eager = rng.choice([1.0, 0.7])
        self.node.overlap.overlaps = lambda: rng.random() < eager

    def job(self, common: list[int]) -> tuple[list[int], SamplingParams, SequenceMode]:
        rng = self.rng
        prompt = common[: rng.randrange(25)] + [rng.randrange(12) for _ in range(rng.randrange(1, 20))]
        params = params_of(
            rng.randrange(1, 20),
            temperature=rng.choice([0.0, 0.9]),
            seed=rng.randrange(1000),
            stop_token_ids=frozenset({rng.randrange(12)} if rng.random() < 0.3 else ()),
        )
        penalty = 1.5 if rng.random() < 0.1 else 1.0
        params = replace(params, min_tokens=rng.choice([0, 3]), repetition_penalty=penalty)
        return prompt, params, SequenceMode.PREFILL_ONLY if rng.random() < 0.2 else SequenceMode.COMPLETE

    def between(self) -> None:
        engine, rng = self.node.engine, self.rng
        if self.pending and engine.scheduler.waiting < 4 and rng.random() < 0.4:
            prompt, params, mode = self.jobs[self.pending[0]]
            seq = self.node.sequence(self.pending[0], prompt, params, mode=mode)
            if seq is not None:
                engine.submit(seq)
                self.pending.pop(0)
        name = rng.choice(list(self.jobs))
        seq = engine.scheduler.find(key_of(name))
        if seq is not None and rng.random() < 0.1:
            assert engine.abort(key_of(name))
            self.aborted.add(name)
            if seq.steps_in_flight == 2:
                self.aborted_in_flight.add(name)

    def run(self) -> None:
        while self.pending or self.node.engine.has_work:
            for event in self.node.step():
                self.take(event)

    def take(self, event: TokenEvent) -> None:
        """As a prefill node does: with the event, the blocks are released, to whoever comes."""
        if event.seq.mode is SequenceMode.PREFILL_ONLY:
            self.node.blocks.release(event.seq.block_table)
            self.node.ledger.unpromise(event.seq.promise_key)

    def check(self) -> None:
        for name, (prompt, params, mode) in self.jobs.items():
            plain = Node(ENDS_OFTEN, num_blocks=40)
            plain.submit(name, prompt, params, mode=mode)
            plain.run()
            reported, wanted = self.node.tokens(name), plain.tokens(name)
            if name in self.aborted:
                assert reported == wanted[: len(reported)]
                assert self.node.finish(name) == [FinishReason.ABORTED]
            else:
                assert (reported, self.node.finish(name)) == (wanted, plain.finish(name))
        assert self.node.overlap.in_flight == self.node.late.in_flight == 0
        self.node.assert_nothing_held()


def test_the_plain_drive_is_a_special_case() -> None:
    """A runner that could overlap, asked for no step behind: the same answers, no surplus."""
    node = OverlapNode()
    node.overlap.overlaps = lambda: False
    prompt, params = stops_at_the_third(3)
    node.submit("a", prompt, params)
    node.run()
    assert node.tokens("a") == reference(prompt, 3)
    assert (node.engine.counters.steps_overlapped, node.engine.counters.tokens_surplus) == (0, 0)
    assert isinstance(node.overlap, Overlap)
    node.assert_nothing_held()
