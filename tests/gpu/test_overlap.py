"""The GPU's runner with steps overlapped, in Triton's interpreter on the CPU: tokens that were never on the host,
and a launch that looks at nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support.gpu_models import (
    BLOCK_SIZE,
    DRAWN,
    GREEDY,
    NUM_BLOCKS,
    FakeCapture,
    NoLooking,
    Sequence,
    random_tensors,
    tiny_config,
)

# isort: split
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.core import Engine
from engine.gpu.config import GpuConfig, GraphConfig
from engine.gpu.graphs import HOST_KNOWS
from engine.gpu.runner import FutureTokens, GpuRunner, pick
from engine.grammar import GrammarCompiler
from engine.model_config import ModelConfig
from engine.runner import LaunchedStep, TorchRunner
from engine.sampler import TOP_K_BLIND_MAX, best_blind, best_ranked, draws_blind, sample
from engine.scheduler import SchedulerConfig, SequenceMode
from engine.scheduler import Sequence as EngineSequence
from engine.types import (
    Batch,
    FinishReason,
    Grammar,
    GrammarKind,
    NullSink,
    OverlapRunner,
    Runner,
    SamplingParams,
    TokenLogprobs,
)
from node.engine_loop import EngineLoop
from tests.support.schemas import write_byte_tokenizer

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG, 1)
PARAMS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn, told with alternatives": DRAWN,
    "top_k and top_p": replace(DRAWN, top_k=20, top_p=0.9, seed=3, logprobs=None),
    "min_p": replace(DRAWN, min_p=0.1, seed=4, logprobs=0),
    "bias and min_tokens": replace(
        GREEDY, logit_bias=((7, 3.0), (8, -2.0)), min_tokens=4, stop_token_ids=frozenset(range(20, 61))
    ),
    "stops early": replace(DRAWN, seed=5, stop_token_ids=frozenset(range(12))),
}


def region(runner: Runner) -> np.ndarray:
    return np.full(runner.layout.region_bytes(NUM_BLOCKS), 0xFF, dtype=np.uint8)


def gpu_runner(
    *,
    graph_rows_max: int = 4,
    overlap_steps: bool = True,
    config: ModelConfig = CONFIG,
    tensors: dict[str, torch.Tensor] = TENSORS,
) -> GpuRunner:
    """Binds, and captures with the last block for padding."""
    graphs = GraphConfig(graph_rows_max=graph_rows_max, graph_context_max=64)
    gpu = GpuConfig(graphs=graphs, overlap_steps=overlap_steps)
    runner = GpuRunner(
        config=config, tensors=tensors, block_size=BLOCK_SIZE, device="cpu", gpu=gpu, capture=FakeCapture()
    )
    runner.bind(region(runner), NUM_BLOCKS)
    runner.warm_up(BlockId(NUM_BLOCKS - 1))
    return runner


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Server:
    """An engine over either runner. Requests come at given steps."""

    def __init__(self, runner: Runner, grammars: GrammarCompiler | None = None) -> None:
        self.grammars = grammars
        ledger = Ledger(NUM_BLOCKS - 1)
        self.blocks = BlockManager(ledger, BLOCK_SIZE, b"tiny")
        limits = SchedulerConfig(tokens_per_step_max=12, sequences_max=6, waiting_max=16)
        self.engine = Engine(runner, self.blocks, limits)
        self.runner = runner
        self.answers: dict[str, Answer] = {}

    def submit(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        held = self.blocks.blocks_for(len(prompt))
        growth = growth_blocks(
            prompt_len=len(prompt),
            known_len=len(prompt),
            max_tokens=params.max_tokens,
            context_len_max=CONFIG.context_len_max,
            block_size=BLOCK_SIZE,
            blocks_held=held,
        )
        self.answers[name] = Answer([], [])
        self.engine.submit(
            EngineSequence(
                key=RequestKey(request=RequestId(name), attempt=Attempt(0)),
                params=params,
                tokens=list(prompt),
                prompt_len=len(prompt),
                computed=0,
                block_table=self.blocks.admit([], held, promise_key=name, promise=growth),
                promise_key=name,
                mode=SequenceMode.COMPLETE,
                grammar=self.grammars.compile(params.grammar) if params.grammar and self.grammars else None,
            )
        )

    def serve(self, jobs: dict[str, tuple[int, list[int], SamplingParams]]) -> dict[str, Answer]:
        engine, flying, turn = self.engine, deque[tuple[Batch, Any]](), 0
        waiting = dict(jobs)
        while waiting or engine.has_work:
            for name in [name for name, (when, _, _) in waiting.items() if when <= turn]:
                self.submit(name, *waiting.pop(name)[1:])
            turn += 1
            batch = None if flying else engine.schedule()
            if engine.overlap is None:
                assert batch is not None
                self.take(engine.postprocess(batch, engine.run(batch, NullSink())))
                continue
            for launched in (batch, engine.schedule_overlapped() if flying or batch is not None else None):
                if launched is not None:
                    flying.append((launched, engine.overlap.launch(launched, NullSink())))
            batch, in_flight = flying.popleft()
            self.take(engine.postprocess(batch, engine.overlap.collect(in_flight)))
        assert self.blocks.ledger.available == NUM_BLOCKS - 1
        return self.answers

    def take(self, events: list[Any]) -> None:
        for event in events:
            if event.token is not None:
                answer = self.answers[event.seq.key.request]
                answer.tokens.append(event.token)
                answer.logprobs.append(event.logprobs)


def jobs_of(seed: int, names: list[str]) -> dict[str, tuple[int, list[int], SamplingParams]]:
    chance = random.Random(seed)
    return {
        f"{name} {n}": (
            chance.randrange(8),
            [chance.randrange(60) for _ in range(chance.randrange(1, 16))],
            replace(PARAMS[name], max_tokens=chance.randrange(3, 9)),
        )
        for n, name in enumerate(names)
    }


@pytest.mark.slow
@pytest.mark.parametrize("graph_rows_max", [0, 4], ids=["kernel by kernel", "graphs"])
def test_answers_are_those_of_the_plain_engine_over_the_torch_runner(graph_rows_max: int) -> None:
    """Requests of every kind arrive while others decode, some end early: chunks, mixed and decode steps."""
    jobs = jobs_of(2, [*PARAMS, "stops early", "greedy"])
    plain = TorchRunner(config=CONFIG, tensors=TENSORS, block_size=BLOCK_SIZE)
    plain.bind(region(plain), NUM_BLOCKS)
    wanted = Server(plain).serve(jobs)
    runner = gpu_runner(graph_rows_max=graph_rows_max)
    server = Server(runner)
    found = server.serve(jobs)
    assert {name: answer.tokens for name, answer in found.items()} == {n: a.tokens for n, a in wanted.items()}
    for name, answer in found.items():
        for mine, theirs in zip(answer.logprobs, wanted[name].logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    counters = server.engine.counters
    assert counters.steps_held_back == 0
    assert counters.steps_overlapped > 0.8 * counters.steps
    assert counters.tokens_surplus > 0


@pytest.mark.slow
def test_a_request_with_an_open_top_p_or_a_penalty_does_not_overlap() -> None:
    """They are held back, with the same answers; switched off, nothing overlaps."""
    on, off = gpu_runner(graph_rows_max=0), gpu_runner(graph_rows_max=0, overlap_steps=False)
    for params in (replace(DRAWN, top_p=0.9), replace(DRAWN, repetition_penalty=1.3)):
        jobs = {"a": (0, [1, 2, 3], replace(params, max_tokens=4)), "b": (0, [4], replace(GREEDY, max_tokens=3))}
        server, one_by_one = Server(on), Server(off)
        assert server.serve(jobs) == one_by_one.serve(jobs)
        assert one_by_one.engine.overlap is None
        assert (server.engine.counters.steps_overlapped, server.engine.counters.steps_held_back) == (0, 3)
    assert not on.can_overlap(replace(DRAWN, top_k=TOP_K_BLIND_MAX + 1))
    assert on.can_overlap(replace(DRAWN, top_k=TOP_K_BLIND_MAX, top_p=0.9))


@pytest.mark.slow
@pytest.mark.parametrize("graph_rows_max", [0, 4], ids=["kernel by kernel", "graphs"])
def test_answers_with_grammars_overlap(graph_rows_max: int, tmp_path: Path) -> None:
    """Each step is launched before the host knows the token that its masks need: it is drawn once the one before is
    collected. Two with grammars, of which one ends early, beside one without: the plain engine's answers, none held
    back."""
    eos = write_byte_tokenizer(tmp_path / "tokenizer.json")
    config = replace(CONFIG, vocab_size=eos + 1, eos_token_ids=frozenset({eos}))
    tensors = random_tensors(config, 1)
    grammars = GrammarCompiler(
        tmp_path / "tokenizer.json", vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    digits = Grammar(kind=GrammarKind.REGEX, text="[0-9]{2,4}")
    words = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"enum": ["one", "two", "three"]}')
    jobs = {
        "digits": (0, [1, 2, 3], replace(DRAWN, grammar=digits)),
        "free": (0, [4], replace(GREEDY, max_tokens=12)),
        "words": (2, [5, 6], replace(GREEDY, grammar=words)),
    }
    plain = TorchRunner(config=config, tensors=tensors, block_size=BLOCK_SIZE)
    plain.bind(region(plain), NUM_BLOCKS)
    wanted = {name: answer.tokens for name, answer in Server(plain, grammars).serve(jobs).items()}
    runner = gpu_runner(graph_rows_max=graph_rows_max, config=config, tensors=tensors)
    server = Server(runner, grammars)
    assert {name: answer.tokens for name, answer in server.serve(jobs).items()} == wanted
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert re.fullmatch("[0-9]{2,4}", tokenizer.decode(wanted["digits"]))
    assert json.loads(tokenizer.decode(wanted["words"])) in ("one", "two", "three")
    counters = server.engine.counters
    assert (counters.steps_held_back, counters.steps_overlapped) == (0, counters.steps - 1)
    assert counters.tokens_surplus == 2


@pytest.mark.slow
def test_a_step_that_cannot_be_drawn_costs_its_own_requests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was launched, and is drawn when the step before it is collected, which fails however often it is tried. The
    next request is served."""
    eos = write_byte_tokenizer(tmp_path / "tokenizer.json")
    config = replace(CONFIG, vocab_size=eos + 1, eos_token_ids=frozenset({eos}))
    grammars = GrammarCompiler(
        tmp_path / "tokenizer.json", vocab_size=config.vocab_size, eos_token_ids=config.eos_token_ids
    )
    runner = gpu_runner(config=config, tensors=random_tensors(config, 1))
    server = Server(runner, grammars)
    draw = runner.draw

    def fail(drawn: Any, *args: Any, **kwargs: Any) -> Any:
        if any(s.key.request == "broken" and s.token_pending for s in drawn):
            raise RuntimeError("no masks")
        return draw(drawn, *args, **kwargs)

    monkeypatch.setattr(runner, "draw", fail)
    params = replace(GREEDY, max_tokens=6, grammar=Grammar(kind=GrammarKind.REGEX, text="[0-9]{2,4}"))
    ended: dict[str, FinishReason | None] = {}

    class Host:
        def step_begins(self, batch: Batch) -> NullSink:
            return NullSink()

        def step_ended(self, sink: Any, events: list[Any], *, is_timed: bool) -> None:
            ended.update({event.seq.key.request: event.finish for event in events if event.finish is not None})
            if "broken" in ended and "whole" not in server.answers:
                server.submit("whole", [1, 2, 3], params)
            if "whole" in ended:
                asyncio.get_running_loop().call_soon(over.set)

    async def scenario() -> None:
        loop = EngineLoop(server.engine, Host(), name="test")
        running = asyncio.create_task(loop.run())
        server.submit("broken", [1, 2, 3], params)
        async with asyncio.timeout(120):
            await over.wait()
        await loop.stop(running)
        assert loop.steps_failed <= 2

    over = asyncio.Event()
    asyncio.run(scenario())
    assert ended == {"broken": FinishReason.ABORTED, "whole": FinishReason.STOP}


@pytest.mark.slow
@pytest.mark.parametrize("graph_rows_max", [0, 4], ids=["kernel by kernel", "graphs"])
def test_a_launch_looks_at_nothing(graph_rows_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a mixed step and a decode step with a token from the one before: no value is taken to the host."""
    runner = gpu_runner(graph_rows_max=graph_rows_max)
    assert isinstance(runner, OverlapRunner)
    chance = random.Random(1)
    seqs = [
        Sequence(n, [chance.randrange(60) for _ in range(5)], [BlockId(8 * n + i) for i in range(8)], params)
        for n, params in enumerate(PARAMS.values())
    ]

    def no_list(tensor: torch.Tensor) -> Any:
        raise AssertionError(f"{tensor.shape} taken to the host")

    launched = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", no_list)
        with NoLooking():  # type: ignore[no-untyped-call]
            first, second = (tuple(seq.slice(None) for seq in part) for part in (seqs[:3], seqs[3:]))
            launched.append(runner.launch(Batch(slices=first), NullSink()))
            pending = tuple(
                replace(s, start=s.stop, stop=s.stop + 1, output_index=1, token_pending=True) for s in first
            )
            launched.append(runner.launch(Batch(slices=(*pending, *second)), NullSink()))
            pending = tuple(
                replace(s, start=s.stop, stop=s.stop + 1, output_index=s.output_index + 1, token_pending=True)
                for s in (*pending, *second)[2:]
            )
            launched.append(runner.launch(Batch(slices=pending), NullSink()))
    counts = [len(runner.collect(step).sampled) for step in launched]
    assert counts == [3, 6, 4]
    assert runner._graphs is None or runner._graphs.steps == 1


def test_one_copy_carries_tokens_and_log_probabilities() -> None:
    """Two of three rows are to be told, two alternatives at most: 3 tokens, and 2 rows of 1 + 2 + 2 numbers."""
    runner = gpu_runner()
    seqs = [
        Sequence(n, [n + 1, 2, 3], [BlockId(2 * n), BlockId(2 * n + 1)], replace(DRAWN, logprobs=logprobs))
        for n, logprobs in enumerate((2, None, 1))
    ]
    step = runner.launch(Batch(slices=tuple(seq.slice() for seq in seqs)), NullSink())
    assert isinstance(step, LaunchedStep)
    assert step.packed_P is not None
    assert step.packed_P.shape == (3 + 2 * (1 + 2 + 2),)
    result = runner.collect(step)
    assert {key: len(found.top) for key, found in result.logprobs.items()} == {seqs[0].key: 2, seqs[2].key: 1}


def test_a_step_that_draws_nothing_brings_nothing() -> None:
    """A chunk: no copy, an empty result, and no token for a step behind."""
    runner = gpu_runner()
    seq = Sequence(0, [1, 2, 3, 4, 5], [BlockId(0), BlockId(1)], GREEDY)
    step = runner.launch(Batch(slices=(seq.slice(3),)), NullSink())
    assert isinstance(step, LaunchedStep)
    assert step.packed_P is None
    assert runner.collect(step).sampled == {}
    with pytest.raises(KeyError):
        runner._future.row_of(replace(seq.slice(), token_pending=True))


def test_a_launch_that_fails_leaves_the_runner_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler raises: the error comes through, and the next step is computed."""
    runner = gpu_runner()
    seq = Sequence(0, [1, 2, 3], [BlockId(0), BlockId(1)], GREEDY)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("engine.runner.sample", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            runner.launch(Batch(slices=(seq.slice(),)), NullSink())
    assert len(runner.run(Batch(slices=(seq.slice(),)), NullSink()).sampled) == 1


def test_future_tokens_are_picked_by_row() -> None:
    """Rows that the host knows keep its token, the others get that of the step before, whatever their order."""
    future = FutureTokens(torch.device("cpu"))
    seqs = [Sequence(n, [1], [BlockId(n)], GREEDY) for n in range(3)]
    future.keep([seq.slice() for seq in seqs], torch.tensor([11, 12, 13]))
    pieces = [
        replace(seqs[2].slice(), token_pending=True),
        seqs[1].slice(),
        replace(seqs[0].slice(), token_pending=True),
    ]
    rows = [future.row_of(piece) for piece in pieces]
    assert rows == [2, HOST_KNOWS, 0]
    assert pick(torch.tensor([0, 5, 0]), torch.tensor(rows), future.ids).tolist() == [13, 5, 11]


blind_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40, TOP_K_BLIND_MAX]),
    top_p=st.sampled_from([1.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(9),
    logit_bias=st.sampled_from([(), ((3, 2.0), (9, -100.0))]),
    min_tokens=st.sampled_from([0, 5]),
)


@settings(max_examples=60, deadline=None)
@given(params=st.lists(blind_params, min_size=1, max_size=4), seed=st.integers(0, 1000), steps=st.booleans())
def test_what_may_be_drawn_blind_is(params: list[SamplingParams], seed: int, steps: bool) -> None:
    """Whatever `draws_blind` says yes to is drawn without a look, with the token of the sampler that looks."""
    params = [p for p in params if draws_blind(p)]
    scores_BV = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(params), 1500))).float()
    scores_BV = (scores_BV * 2).round() if steps else scores_BV
    indices = list(range(len(params)))
    if not params:
        return
    with NoLooking():  # type: ignore[no-untyped-call]
        tokens_B = sample(scores_BV, params, indices, tokens=[[]] * len(params), eos_token_ids={2}, blind=True)
    looked_B = sample(scores_BV, params, indices, tokens=[[]] * len(params), eos_token_ids={2})
    assert tokens_B.tolist() == looked_B.tolist()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=9, max_size=9), min_size=1, max_size=4), count=st.integers(0, 12)
)
def test_the_best_without_a_look(rows: list[list[int]], count: int) -> None:
    """Many equal scores: the list is the one that looks as often as it has to."""
    scores_RV = torch.tensor(rows, dtype=torch.float64)
    values_RC, ids_RC = best_blind(scores_RV, count)
    wanted_values_RC, wanted_ids_RC = best_ranked(scores_RV, count)
    assert ids_RC.tolist() == wanted_ids_RC.tolist()
    assert values_RC.tolist() == wanted_values_RC.tolist()
