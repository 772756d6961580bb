"""The GPU's runner, in Triton's interpreter on the CPU, against the torch runner; and the buckets of its graphs."""

from __future__ import annotations

import gc
import random
import weakref
from collections import abc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu_models import (
    BLOCK_SIZE,
    DRAWN,
    GREEDY,
    NUM_BLOCKS,
    FakeCapture,
    Sequence,
    random_tensors,
    tiny_config,
)

# isort: split
from baton.errors import InvalidField
from baton.ids import BlockId
from engine.attention import PagedAttention
from engine.gpu.config import GpuConfig, GraphConfig
from engine.gpu.graphs import bucket_sizes
from engine.gpu.runner import GpuRunner
from engine.runner import TorchRunner
from engine.types import Batch, NullSink, Runner, SamplingParams, SequenceSlice, StepResult
from tests.support.every_row import score

CONFIG = tiny_config()
TENSORS = random_tensors(CONFIG, 1)
PADDING = BlockId(NUM_BLOCKS - 1)


class MadeOnDemand(Mapping[str, torch.Tensor]):
    """Makes a tensor each time it is asked for one, as a reader that widens them does."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most_alive = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = TENSORS[name].clone()
        self.alive = [each for each in self.alive if each() is not None]
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            self.alive.append(weakref.ref(tensor))
        self.most_alive = max(self.most_alive, len(self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(TENSORS)

    def __len__(self) -> int:
        return len(TENSORS)


def test_weights_are_not_all_there_twice() -> None:
    """For a model that takes half the memory: of what is joined, the matrices of one product alone are there beside."""
    tensors = MadeOnDemand()
    GpuRunner(config=CONFIG, tensors=tensors, block_size=BLOCK_SIZE, device="cpu")
    assert tensors.most_alive == 3


class LayerCounter:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def layer_done(self, layer: int) -> None:
        self.layers.append(layer)


class OnePlan:
    """As FlashInfer keeps it: the plan that was made last."""

    def __init__(self, inner: PagedAttention) -> None:
        self._inner = inner
        self._plan: Any = None

    def prepare(self, slices: abc.Sequence[SequenceSlice]) -> None:
        self._plan = self._inner.prepare(slices)

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: None) -> torch.Tensor:
        return self._inner.attend(layer, q_RHD, self._plan)


def region(runner: Runner) -> np.ndarray:
    """Poisoned: reading an unwritten slot makes NaN."""
    return np.full(runner.layout.region_bytes(NUM_BLOCKS), 0xFF, dtype=np.uint8)


def gpu_runner(graphs: GraphConfig | None = None) -> tuple[GpuRunner, FakeCapture]:
    capture = FakeCapture()
    gpu = GpuConfig(graphs=graphs or GraphConfig(graph_rows_max=4, graph_context_max=64))
    runner = GpuRunner(config=CONFIG, tensors=TENSORS, block_size=BLOCK_SIZE, device="cpu", gpu=gpu, capture=capture)
    runner.bind(region(runner), NUM_BLOCKS)
    runner.warm_up(PADDING)
    return runner, capture


def sequences(lengths: list[int], params: SamplingParams, seed: int) -> list[Sequence]:
    chance = random.Random(seed)
    free = [BlockId(block) for block in range(NUM_BLOCKS - 1)]
    chance.shuffle(free)
    return [
        Sequence(i, [chance.randrange(60) for _ in range(n)], [free.pop() for _ in range(n // BLOCK_SIZE + 4)], params)
        for i, n in enumerate(lengths)
    ]


def step(runner: Runner, seqs: list[Sequence], counts: list[int | None]) -> StepResult:
    slices = tuple(seq.slice(count) for seq, count in zip(seqs, counts, strict=True))
    result = runner.run(Batch(slices=slices), NullSink())
    for seq, s in zip(seqs, slices, strict=True):
        seq.computed = s.stop
        if s.sample:
            seq.tokens.append(result.sampled[seq.key])
    return result


def play(runner: Runner, params: SamplingParams) -> tuple[list[list[int]], list[StepResult]]:
    """Prompts in chunks beside running sequences, then decode alone in batches that grow and shrink."""
    seqs = sequences([9, 1, 14, 3, 6], params, seed=2)
    results = [step(runner, seqs[:1], [None]), step(runner, seqs[:3], [None, None, 5])]
    results.append(step(runner, [seqs[2], seqs[0], seqs[1]], [None, None, None]))
    results.append(step(runner, seqs[:3], [None, None, None]))
    results.append(step(runner, [*seqs[:3], *seqs[3:]], [None, None, None, None, None]))
    later = (seqs, seqs[:4], seqs[1:3], seqs[4:])
    results.extend(step(runner, batch, [None] * len(batch)) for batch in later)
    return [seq.tokens for seq in seqs], results


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_of_the_torch_runner(params: SamplingParams) -> None:
    """The same schedule on both: the same tokens, alternatives within rounding; some steps ran as graphs, some not."""
    runner, capture = gpu_runner()
    reference = TorchRunner(config=CONFIG, tensors=TENSORS, block_size=BLOCK_SIZE)
    reference.bind(region(reference), NUM_BLOCKS)
    tokens, results = play(runner, params)
    wanted_tokens, wanted = play(reference, params)
    assert tokens == wanted_tokens
    for found, other in zip(results, wanted, strict=True):
        assert found.logprobs.keys() == other.logprobs.keys()
        for key, logprobs in found.logprobs.items():
            assert logprobs.logprob == pytest.approx(other.logprobs[key].logprob, abs=1e-4)
    assert capture.captured == 3
    # Of 9 steps, those of one token a sequence and at most 4 of them: 3, then 4, 2, 1.
    assert runner.describe()["decode graphs used"] == "4 steps, 1 rows of padding"


def test_padding_touches_its_own_block_only() -> None:
    """A graph of four rows with three in use writes the three new slots and the padding block, nothing else."""
    runner, _ = gpu_runner()
    seqs = sequences([5, 7, 4], GREEDY, seed=4)
    step(runner, seqs, [None] * 3)
    step(runner, seqs, [None] * 3)
    assert runner._bound is not None
    pool = runner._bound.pool
    before = pool.kv_LN2KSD.clone()
    step(runner, seqs, [None] * 3)
    bits, was = pool.kv_LN2KSD.view(torch.int32), before.view(torch.int32)
    changed = (bits != was).flatten(4).any(-1).any(2).any(2).any(0)
    written = {int(block) for block in changed.nonzero()[:, 0]}
    assert written - {PADDING} == {seq.table[(seq.computed - 1) // BLOCK_SIZE] for seq in seqs}


def test_the_sink_is_told_of_every_layer_once_in_order() -> None:
    """In an eager step as each layer is queued, in a graph all after the launch: a prompt's last token may be one."""
    runner, _ = gpu_runner()
    seq = sequences([9], GREEDY, seed=5)[0]
    for count, graph_steps in ((8, 0), (None, 1)):
        sink = LayerCounter()
        s = seq.slice(count)
        runner.run(Batch(slices=(s,)), sink)
        seq.computed = s.stop
        assert sink.layers == list(range(CONFIG.num_layers))
        assert runner.describe()["decode graphs used"].startswith(f"{graph_steps} steps")


def test_the_last_layer_is_for_rows_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a prompt's chunk no row goes on behind the last layer's K and V, beside a running sequence that one's row; the
    attention of single tokens keeps one plan at a time."""
    runner, _ = gpu_runner(GraphConfig(graph_rows_max=0))
    assert runner._bound is not None
    runner._bound.attention.decode = OnePlan(runner._bound.attention.decode)
    rows_seen: list[int] = []
    original = torch.nn.functional.silu

    def silu(x_TX: torch.Tensor) -> torch.Tensor:
        rows_seen.append(len(x_TX))
        return original(x_TX)

    monkeypatch.setattr(torch.nn.functional, "silu", silu)
    running, reading = sequences([5, 12], GREEDY, seed=12)
    for batch, counts in (
        ([running], [None]),
        ([reading], [4]),
        ([running, reading], [None, 6]),
        ([running, reading], [None, None]),
    ):
        sink = LayerCounter()
        slices = tuple(seq.slice(count) for seq, count in zip(batch, counts, strict=True))
        result = runner.run(Batch(slices=slices), sink)
        assert sink.layers == list(range(CONFIG.num_layers))
        for seq, s in zip(batch, slices, strict=True):
            seq.computed = s.stop
            if s.sample:
                seq.tokens.append(result.sampled[seq.key])
    assert rows_seen == [5, 1, 4, 7, 1, 3, 2]
    reference = TorchRunner(config=CONFIG, tensors=TENSORS, block_size=BLOCK_SIZE)
    reference.bind(region(reference), NUM_BLOCKS)
    for seq, other in zip((running, reading), sequences([5, 12], GREEDY, seed=12), strict=True):
        while len(other.tokens) < len(seq.tokens):
            step(reference, [other], [None])
        assert seq.tokens == other.tokens


@pytest.mark.slow
def test_long_contexts_and_large_batches_run_without_a_graph() -> None:
    """Beyond either limit the step runs kernel by kernel, with the same tokens."""
    limits = GraphConfig(graph_rows_max=2, graph_context_max=8)
    runner, capture = gpu_runner(limits)
    eager, _ = gpu_runner(GraphConfig(graph_rows_max=0))
    seen = []
    for each in (runner, eager):
        seqs = sequences([7, 3, 2], GREEDY, seed=6)
        step(each, seqs, [None] * 3)
        step(each, seqs[:2], [None] * 2)  # contexts 8 and 4: fits
        step(each, seqs[:2], [None] * 2)  # 9: too long
        step(each, seqs, [None] * 3)  # too many
        seen.append([seq.tokens for seq in seqs])
    assert seen[0] == seen[1]
    assert capture.captured == 2
    assert runner.describe()["decode graphs used"] == "1 steps, 0 rows of padding"
    assert runner.describe()["decode graphs"] == "of 1, 2 rows, contexts up to 8 tokens"
    assert eager.describe()["decode graphs"] == "none (graph_rows_max is 0)"
    assert (runner.padding_blocks, eager.padding_blocks) == (1, 0)


def test_rows_that_draw_nothing_are_computed_and_not_answered() -> None:
    """In a batch that runs as a graph, one sequence may only be reading its prompt's last but one token."""
    runner, _ = gpu_runner()
    reading, running = sequences([6, 5], GREEDY, seed=8)
    step(runner, [reading, running], [4, None])
    result = step(runner, [reading, running], [1, None])
    assert set(result.sampled) == {running.key}
    assert runner.describe()["decode graphs used"].startswith("1 steps")
    result = step(runner, [reading], [None])
    assert set(result.sampled) == {reading.key}


def test_scores_are_those_of_the_torch_runner() -> None:
    """Every token's scores, with a prompt in chunks."""
    runner, _ = gpu_runner()
    reference = TorchRunner(config=CONFIG, tensors=TENSORS, block_size=BLOCK_SIZE)
    reference.bind(region(reference), NUM_BLOCKS)
    scores = []
    for each in (runner, reference):
        seq = sequences([11], GREEDY, seed=9)[0]
        parts = []
        for count in (3, 1, None):
            s = seq.slice(count)
            parts.append(score(each, Batch(slices=(s,))))
            seq.computed = s.stop
        scores.append(torch.cat(parts))
    assert (scores[0] - scores[1]).abs().max() < 1e-4 * scores[1].abs().max()


@pytest.mark.parametrize(
    ("rows_max", "sizes"),
    [
        (0, ()),
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100)),
    ],
)
def test_bucket_sizes(rows_max: int, sizes: tuple[int, ...]) -> None:
    """Each holds every smaller batch; the last is the largest batch itself."""
    assert bucket_sizes(rows_max) == sizes


def test_graph_limits_are_checked() -> None:
    """A limit that makes no sense is refused by name."""
    with pytest.raises(InvalidField, match="graph_rows_max is -1"):
        GraphConfig(graph_rows_max=-1)
    with pytest.raises(InvalidField, match="graph_context_max is 0"):
        GraphConfig(graph_context_max=0)


def test_unbound_it_keeps_nothing_of_the_region() -> None:
    """After `unbind` the region's owner may close it: no view is left."""
    runner, _ = gpu_runner()
    assert runner._bound is not None
    pool = weakref.ref(runner._bound.pool)
    runner.unbind()
    gc.collect()
    assert pool() is None
