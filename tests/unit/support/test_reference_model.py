"""The comparison that the exactness tests stand on: what it lets pass as a tie, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tests.support.reference_model as reference_model
from engine.demo_model import EOS_ID, DemoModelParams, write_demo_model
from engine.types import SamplingParams
from tests.support.reference_model import OneProcess, ReferenceModel

NEW = 12
PROMPT = [5, 300, 77, 12, 402, 9]
PLACE = 4
PARAMS = DemoModelParams(
    num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=512
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "model"
    write_demo_model(folder, PARAMS)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceModel:
    return ReferenceModel(folder)


@pytest.fixture(scope="module")
def expected(reference: ReferenceModel) -> list[int]:
    return reference.generate([PROMPT], max_new=NEW, eos_token_ids=())[0]


@pytest.fixture(scope="module")
def swapped(reference: ReferenceModel, expected: list[int]) -> tuple[list[int], float]:
    """An answer that takes the second best token at PLACE and goes on from there, and how far that one is behind."""
    best = reference.scores64(PROMPT, expected)[PLACE].topk(2)
    start = [*expected[:PLACE], int(best.indices[1])]
    rest = reference.generate([[*PROMPT, *start]], max_new=NEW - len(start), eos_token_ids=())[0]
    return [*start, *rest], float(best.values[0] - best.values[1])


def test_an_equal_answer_has_no_ties(reference: ReferenceModel, expected: list[int]) -> None:
    """The reference's own answer."""
    assert reference.compare(PROMPT, expected, expected) == []


def test_a_token_within_the_tolerance_is_a_tie_and_its_sequel_is_compared(
    reference: ReferenceModel, expected: list[int], swapped: tuple[list[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second best token just within the tolerance: one tie, though all that follows differs from `generate`."""
    answer, gap = swapped
    assert sum(a != b for a, b in zip(answer, expected, strict=True)) > 2
    monkeypatch.setattr(reference_model, "TIE_TOLERANCE", gap * 1.001)
    (tie,) = reference.compare(PROMPT, answer, expected)
    assert (tie.prompt_len, tie.index, tie.token, tie.expected) == (6, PLACE, answer[PLACE], expected[PLACE])
    assert tie.gap == pytest.approx(gap)


def test_a_token_beyond_the_tolerance_fails(
    reference: ReferenceModel, expected: list[int], swapped: tuple[list[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same just beyond it: the message has the place, both tokens and the gap. The real one is far smaller."""
    answer, gap = swapped
    assert gap > 10 * reference_model.TIE_TOLERANCE
    monkeypatch.setattr(reference_model, "TIE_TOLERANCE", gap * 0.999)
    reported = f"prompt of 6 tokens, output token {PLACE}: at {PLACE} {answer[PLACE]} instead of {expected[PLACE]}"
    with pytest.raises(AssertionError, match=reported):
        reference.compare(PROMPT, answer, expected)


def test_a_wrong_token_after_a_tie_fails(
    reference: ReferenceModel, expected: list[int], swapped: tuple[list[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a tie the answer goes its own way, but not any way: the worst token two places on is found."""
    answer, gap = swapped
    monkeypatch.setattr(reference_model, "TIE_TOLERANCE", gap * 1.001)
    worst = int(reference.scores64(PROMPT, answer)[PLACE + 2].argmin())
    with pytest.raises(AssertionError, match=f"at {PLACE + 2} {worst} instead of {answer[PLACE + 2]}"):
        reference.compare(PROMPT, [*answer[: PLACE + 2], worst, *answer[PLACE + 3 :]], expected)


def test_an_answer_of_another_length_fails(reference: ReferenceModel, expected: list[int]) -> None:
    """A token too few, or one too many, is no tie."""
    for answer in (expected[:-1], [*expected, 3], []):
        with pytest.raises(AssertionError, match=f"{len(answer)} tokens instead of {NEW}"):
            reference.compare(PROMPT, answer, expected)


def test_batched_answers_are_those_of_each_prompt_alone(reference: ReferenceModel) -> None:
    """Prompts of two lengths in mixed order, and end tokens that end each row in its own place."""
    prompts = [[i + 2, *PROMPT[: 3 + i % 2]] for i in range(6)]
    alone = [reference.generate([prompt], max_new=NEW, eos_token_ids=())[0] for prompt in prompts]
    assert reference.generate(prompts, max_new=NEW, eos_token_ids=()) == alone
    ends = [alone[0][3], alone[1][5], EOS_ID]
    for row, full in zip(reference.generate(prompts, max_new=NEW, eos_token_ids=ends), alone, strict=True):
        length = next((i + 1 for i, token in enumerate(full) if token in ends), NEW)
        assert row == full[:length]


def test_scores_are_those_before_each_token(reference: ReferenceModel, expected: list[int]) -> None:
    """The best token of each row of scores is the greedy answer; float32 is close to float64 but not equal."""
    scores_IV = reference.scores64(PROMPT, expected)
    assert (scores_IV.dtype, scores_IV.shape) == (torch.float64, (NEW, 512))
    assert scores_IV.argmax(dim=-1).tolist() == expected
    assert 0 < reference.rounding(PROMPT, expected) < 1e-4


def test_one_process_draws_what_the_reference_scores_say(folder: Path, reference: ReferenceModel) -> None:
    """Two sampled requests and a greedy one in one batch; another seed would be noticed."""
    hot = SamplingParams(temperature=1.5, top_k=50, top_p=0.95, seed=9, max_tokens=NEW, ignore_eos=True)
    cool = SamplingParams(temperature=0.6, top_k=0, top_p=1.0, seed=10, max_tokens=NEW, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=NEW, ignore_eos=True)
    single = OneProcess(folder, block_size=16, num_blocks=20, tokens_per_step_max=16)
    answers = single.answers([(PROMPT, hot), (PROMPT[::-1], cool), (PROMPT, greedy)])
    for prompt, answer, params in ((PROMPT, answers[0], hot), (PROMPT[::-1], answers[1], cool)):
        drawn, lead = reference.draws(prompt, answer, params)
        assert drawn == answer
        assert lead > 0
    assert reference.draws(PROMPT, answers[0], cool)[0] != answers[0]
    assert answers[2] == reference.generate([PROMPT], max_new=NEW, eos_token_ids=())[0]
