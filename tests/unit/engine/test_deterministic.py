"""Deterministic mode (I6): the scores of a token are the same bits whatever is computed beside it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ModelFamily
from engine.runner import TorchRunner
from engine.types import Batch, SamplingParams, SequenceSlice
from tests.support.every_row import score

BLOCK_SIZE = 8
NUM_BLOCKS = 96
TABLE_BLOCKS = 16
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64)
TOKENS = 90


@pytest.fixture(scope="module", params=[ModelFamily.LLAMA, ModelFamily.QWEN3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("deterministic") / "model"
    write_demo_model(path, DemoModelParams(family=request.param, num_layers=2, hidden_size=96, intermediate_size=200))
    return path


def piece(sequence: int, tokens: Sequence[int], start: int, stop: int) -> SequenceSlice:
    """`sequence` numbers the table: its blocks lie backwards in the region."""
    first = (sequence + 1) * TABLE_BLOCKS
    return SequenceSlice(
        key=RequestKey(request=RequestId(f"s{sequence}"), attempt=Attempt(0)),
        tokens=list(tokens),
        start=start,
        stop=stop,
        block_table=[BlockId(first - 1 - i) for i in range(TABLE_BLOCKS)],
        sample=stop == len(tokens),
        output_index=0,
        params=GREEDY,
    )


def bound(folder: Path, *, deterministic: bool) -> TorchRunner:
    runner = TorchRunner.load(folder, block_size=BLOCK_SIZE, deterministic=deterministic)
    spec = runner.kv_spec
    size = spec.num_layers * NUM_BLOCKS * 2 * spec.num_kv_heads * BLOCK_SIZE * spec.head_dim * 4
    runner.bind(np.full(size, 0xFF, np.uint8), NUM_BLOCKS)
    return runner


def scores_in_one_chunk(runner: TorchRunner, tokens: Sequence[int]) -> torch.Tensor:
    return score(runner, Batch(slices=(piece(0, tokens, 0, len(tokens)),)))


def scores_among_others(runner: TorchRunner, tokens: Sequence[int], rng: random.Random) -> torch.Tensor:
    """Random chunks, each in a step with pieces of other sequences before and behind it."""
    others = {number: [rng.randrange(3, 90) for _ in range(TOKENS)] for number in (1, 2, 3)}
    computed = dict.fromkeys(others, 0)
    rows, start = [], 0
    while start < len(tokens):
        stop = min(len(tokens), start + rng.choice((1, 1, 2, 7, 30)))
        slices, first_row = [], 0
        for number, text in others.items():
            end = min(len(text), computed[number] + rng.randrange(0, 5))
            if end > computed[number]:
                slices.append(piece(number, text, computed[number], end))
                first_row += end - computed[number]
                computed[number] = end
        slices.append(piece(0, tokens, start, stop))
        scores = score(runner, Batch(slices=tuple(slices)))
        rows.append(scores[first_row : first_row + stop - start])
        start = stop
    return torch.cat(rows)


def test_the_batch_changes_no_bit(folder: Path) -> None:
    """One prompt in one chunk, and the same in random chunks among other sequences: equal bits, for every token."""
    rng = random.Random(5)
    runner = bound(folder, deterministic=True)
    for _ in range(3):
        tokens = [rng.randrange(3, 90) for _ in range(TOKENS)]
        alone = scores_in_one_chunk(runner, tokens)
        assert torch.equal(alone, scores_among_others(runner, tokens, rng))
    runner.unbind()


def test_it_is_the_same_model(folder: Path) -> None:
    """The fast way gives the same scores within float32's rounding."""
    tokens = [random.Random(6).randrange(3, 90) for _ in range(TOKENS)]
    slow, fast = bound(folder, deterministic=True), bound(folder, deterministic=False)
    torch.testing.assert_close(scores_in_one_chunk(slow, tokens), scores_in_one_chunk(fast, tokens), rtol=0, atol=1e-3)
    slow.unbind()
    fast.unbind()


def test_each_layer_is_reported_before_the_next_one_is_computed(folder: Path) -> None:
    """When the sink is called for a layer, that layer holds K and V of all new tokens, and later layers hold none."""
    runner = TorchRunner.load(folder, block_size=BLOCK_SIZE, deterministic=True)
    spec = runner.kv_spec
    shape = (spec.num_layers, NUM_BLOCKS, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    kv_LN2KSD = np.full(shape, np.nan, np.float32)
    runner.bind(kv_LN2KSD.view(np.uint8).reshape(-1), NUM_BLOCKS)
    counts: list[tuple[int, list[int]]] = []

    class Sink:
        def layer_done(self, layer: int) -> None:
            counts.append((layer, np.isfinite(kv_LN2KSD[:, :, 0, 0, :, 0]).sum(axis=(1, 2)).tolist()))

    rng = random.Random(7)
    pieces = [piece(number, rng.choices(range(3, 90), k=20), 0, stop) for number, stop in ((0, 20), (1, 9))]
    runner.run(Batch(slices=tuple(pieces)), Sink())
    assert counts == [(0, [29, 0]), (1, [29, 29])]
    runner.unbind()
