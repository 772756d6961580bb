"""Log-probabilities of prompts' own tokens: which rows are computed, and that nothing else of a step changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ComputeDtype
from engine.prompt_scores import PromptRows
from engine.runner import TorchRunner
from engine.types import Batch, NullSink, SamplingParams, SequenceSlice, StepResult

GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=8)
SCORED = replace(GREEDY, prompt_logprobs=1)
BLOCK_SIZE, NUM_BLOCKS = 4, 64


def piece(
    name: str, tokens: list[int], start: int, stop: int, params: SamplingParams, first_block: int = 0
) -> SequenceSlice:
    table = [BlockId(first_block + i) for i in range(-(-stop // BLOCK_SIZE))]
    key = RequestKey(request=RequestId(name), attempt=Attempt(0))
    return SequenceSlice(
        key=key, tokens=tokens, start=start, stop=stop, block_table=table, sample=stop == len(tokens),
        output_index=0, params=params,
    )  # fmt: skip


def test_the_rows_of_a_step() -> None:
    """All are computed to the end. Those of scored slices are found again, and those that draw; a slice of one new
    token, as in decoding, is not scored."""
    tokens = list(range(10))
    slices = (
        piece("a", tokens, 0, 10, GREEDY), piece("b", tokens, 4, 7, SCORED), piece("c", tokens, 0, 5, GREEDY),
        piece("d", tokens, 7, 10, SCORED), piece("e", tokens, 9, 10, SCORED),
    )  # fmt: skip
    rows = PromptRows.of(Batch(slices=slices))
    assert rows is not None
    assert (rows.batch.slices, rows.batch.drawing_rows) == (slices, [*range(22)])
    assert [(s.key.request, row) for s, row in rows.prompts] == [("b", 10), ("d", 18)]
    assert rows.draws == [9, 20, 21]
    assert PromptRows.of(Batch(slices=(slices[0], slices[2], slices[4]))) is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores") / "tiny"
    write_demo_model(folder, DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, head_dim=16, vocab_size=600))
    return folder


def run(model: Path, dtype: ComputeDtype, deterministic: bool, steps: list[Batch]) -> list[StepResult]:
    runner = TorchRunner.load(model, dtype=dtype, block_size=BLOCK_SIZE, deterministic=deterministic)
    runner.bind(np.zeros(runner.layout.region_bytes(NUM_BLOCKS), dtype=np.uint8), NUM_BLOCKS)
    try:
        return [runner.run(step, NullSink()) for step in steps]
    finally:
        runner.unbind()


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [(ComputeDtype.FLOAT32, False), (ComputeDtype.FLOAT32, True), (ComputeDtype.BFLOAT16, False)],
)
def test_scores_of_two_steps_are_those_of_one(model: Path, dtype: ComputeDtype, deterministic: bool) -> None:
    """A scored prompt in two chunks beside another one, and in one: the same scores within rounding, and for both
    prompts the tokens that are drawn without scores."""
    ids, other = [5 + 11 * i % 500 for i in range(90)], [7, 8, 9]
    whole = [Batch(slices=(piece("a", ids, 0, 90, SCORED),))]
    chunks = [
        Batch(slices=(piece("a", ids, 0, 70, SCORED), piece("b", other, 0, 3, GREEDY, first_block=40))),
        Batch(slices=(piece("a", ids, 70, 90, SCORED),)),
    ]
    plain = [Batch(slices=(piece("a", ids, 0, 90, GREEDY), piece("b", other, 0, 3, GREEDY, first_block=40)))]
    (one,) = run(model, dtype, deterministic, whole)
    first, second = run(model, dtype, deterministic, chunks)
    (drawn,) = run(model, dtype, deterministic, plain)
    (key,) = one.prompt_logprobs
    found = first.prompt_logprobs[key] + second.prompt_logprobs[key]
    assert (len(first.prompt_logprobs[key]), len(found)) == (70, 89)
    tolerance = 1e-4 if dtype is ComputeDtype.FLOAT32 else 0.1
    wanted = [each.logprob for each in one.prompt_logprobs[key]]
    assert [each.logprob for each in found] == pytest.approx(wanted, abs=tolerance)
    assert all(each.logprob <= each.top[0][1] + 1e-9 for each in found)
    if dtype is ComputeDtype.FLOAT32:
        assert {**first.sampled, **second.sampled} == drawn.sampled
