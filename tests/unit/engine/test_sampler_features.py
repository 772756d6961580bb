"""Penalties, bias, min_p, min_tokens and logprobs: against their definitions, and transformers' own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.sampler import (
    adjusted_scores,
    best_ranked,
    gumbel_noise,
    row_key,
)
from engine.types import SamplingParams
from tests.support.sampler_ways import filtered_scores, gumbel_noise_of, sample, sample_by_torch, token_logprobs

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)
VOCAB = 13
EOS = frozenset({2, 99})
"""One of them is outside the vocabulary, as in some checkpoints."""


def naive_scores(logits: Sequence[float], p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """The first group of changes, one token at a time."""
    scores = [float(x) for x in logits]
    for token, bias in p.logit_bias:
        scores[token] += bias
    if len(output) < p.min_tokens:
        for token in set(p.stop_token_ids) | (set() if p.ignore_eos else set(EOS)):
            if token < len(scores):
                scores[token] = -math.inf
    for token in set(prompt) | set(output):
        scores[token] *= 1 / p.repetition_penalty if scores[token] > 0 else p.repetition_penalty
    for token in set(output):
        scores[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    return scores


def naive_kept(scores: Sequence[float], p: SamplingParams) -> set[int]:
    """The filters, by their definition: rank, cut at min_p, at top_k, then take until top_p of what is left."""
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    best = scores[ranked[0]]
    weights = {token: math.exp(scores[token] - best) for token in ranked}
    assume(all(abs(weight - p.min_p) > 1e-9 for weight in weights.values() if p.min_p not in (0, 1)))
    left = [token for token in ranked if weights[token] >= p.min_p][: p.top_k or None]
    total, mass = sum(weights[token] for token in left), 0.0
    kept: set[int] = set()
    for token in left:
        assume(p.top_p == 1 or abs(mass - p.top_p * total) > 1e-9)
        if kept and p.top_p < 1 and mass >= p.top_p * total:
            break
        kept.add(token)
        mass += weights[token]
    return kept


def naive_draw(logits: Sequence[float], p: SamplingParams, prompt: list[int], output: list[int]) -> int:
    scores = naive_scores(logits, p, prompt, output)
    if p.temperature > 0:
        scores = [score / p.temperature for score in scores]
        kept = naive_kept(scores, p)
        noise = gumbel_noise([row_key(p.seed, p.choice, len(output))], len(scores))[0].tolist()
        scores = [score + noise[token] if token in kept else -math.inf for token, score in enumerate(scores)]
    best = sorted(scores)[-2:]
    assume(best[1] - best[0] > 1e-9 or best[1] == best[0])  # rounding decides nothing
    return scores.index(best[1])


token_ids = st.integers(0, VOCAB - 1)
any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 9, VOCAB, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.77, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.03, 0.4, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(100),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.35, -0.2]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.25, 100.0]), max_size=4).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    stop_token_ids=st.frozensets(token_ids, max_size=2),
    min_tokens=st.integers(0, 5),
    ignore_eos=st.booleans(),
)
any_row = st.tuples(
    any_params,
    st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB),
    st.lists(token_ids, min_size=1, max_size=6),
    st.lists(token_ids, max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(any_row, min_size=1, max_size=5), first_width=st.sampled_from([2, 5, 256]))
def test_every_row_of_any_batch_is_drawn_by_the_definition(
    batch: list[tuple[SamplingParams, list[float], list[int], list[int]]], first_width: int
) -> None:
    """All features at once, ties among the scores, short and long lists of candidates: each token is the naive one."""
    expected = [naive_draw(logits, p, prompt, output) for p, logits, prompt, output in batch]
    logits_BV = torch.tensor([logits for _, logits, _, _ in batch])
    before_BV = logits_BV.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampler.CANDIDATES_FIRST", first_width)
        patch.setattr("engine.sampler.CANDIDATES_GROWTH", 2)
        tokens = sample(
            logits_BV,
            [p for p, _, _, _ in batch],
            [len(output) for _, _, _, output in batch],
            tokens=[prompt + output for _, _, prompt, output in batch],
            eos_token_ids=EOS,
        )
    assert tokens.tolist() == expected
    assert torch.equal(logits_BV, before_BV)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    spread=st.sampled_from([0.0, 0.5, 3.0, 10.0]),
    steps=st.sampled_from([0.0, 0.25]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 0, 1, 7, 255, 256, 300, 2999, 3000]),
            st.sampled_from([1.0, 0.05, 0.5, 0.9, 0.999, 1 - 1e-9]),
            st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_list_of_candidates_keeps_what_a_full_sort_keeps(
    seed: int, spread: float, steps: float, rows: list[tuple[int, float, float]]
) -> None:
    """3,000 tokens, from all equal to sharp, with and without many ties: the same scores stay, bit for bit."""
    scores = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(rows), 3000)) * spread)
    scores = (scores / steps).round() * steps if steps else scores
    params = [replace(OFF, top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in rows]
    assert torch.equal(filtered_scores(scores, params), by_full_sort(scores, params))


def by_full_sort(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The filters in one pass over the whole ranking."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampler.CANDIDATES_FIRST", scores.shape[1])
        return filtered_scores(scores, params)


def test_a_short_list_draws_what_a_full_sort_draws() -> None:
    """A vocabulary of 50,000: 400 draws with all kinds of filters are the same by a list and by the whole ranking."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(40, 50_000, generator=generator) * 4
    kinds = [
        replace(OFF, top_k=50), replace(OFF, top_p=0.9), replace(OFF, min_p=0.02), replace(OFF, top_k=900, top_p=0.97)
    ]  # fmt: skip
    params = [replace(kinds[i % 4], seed=i, temperature=0.5 + i % 3) for i in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampler.CANDIDATES_FIRST", 50_000)
        whole = [sample(logits, params, [index] * 40).tolist() for index in range(5)]
    assert [sample(logits, params, [index] * 40).tolist() for index in range(5)] == whole
    assert len({token for tokens in whole for token in tokens}) > 100


def test_noise_of_some_tokens_is_their_part_of_the_noise_of_all() -> None:
    """The same values, whichever tokens are asked for and in whichever order."""
    keys = [row_key(1, 0, 0), row_key(2**63, 1, 7)]
    ids = torch.tensor([[5, 0, 999, 4], [4, 4, 1, 998]])
    expected = gumbel_noise(keys, 1000).gather(-1, ids)
    torch.testing.assert_close(gumbel_noise_of(keys, ids), expected, rtol=1e-14, atol=0)


ids_2T = torch.tensor([[3, 1, 1, 4, 7], [0, 2, 2, 2, 8]])


@pytest.fixture
def logits_2V() -> torch.Tensor:
    return torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def adjusted(logits: torch.Tensor, params: SamplingParams, output_count: int) -> torch.Tensor:
    scores = logits.clone()
    adjusted_scores(logits, [params] * 2, ids_2T.tolist(), [output_count] * 2, EOS).put(scores)
    return scores


def test_repetition_penalty_is_that_of_transformers(logits_2V: torch.Tensor) -> None:
    """Over prompt and output alike."""
    for penalty in (1.4, 0.6):
        expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids_2T, logits_2V.clone())
        assert torch.equal(adjusted(logits_2V, replace(OFF, repetition_penalty=penalty), 2), expected)


def test_min_tokens_is_that_of_transformers(logits_2V: torch.Tensor) -> None:
    """Three of five tokens are output: with min_tokens 4 the ends are out, with 3 they are not."""
    for min_tokens in (3, 4):
        processor = transformers.MinNewTokensLengthLogitsProcessor(2, min_tokens, [2, 11])
        params = replace(OFF, min_tokens=min_tokens, stop_token_ids=frozenset({11}))
        found = adjusted(logits_2V, params, 3)
        assert torch.equal(found, processor(ids_2T, logits_2V.clone()))
        assert bool(found.isinf().any()) is (min_tokens == 4)


def test_logit_bias_is_that_of_transformers(logits_2V: torch.Tensor) -> None:
    """transformers calls it a sequence bias of sequences of one token."""
    biases = {4: 2.5, 9: -100.0}
    processor = transformers.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in biases.items()])
    found = adjusted(logits_2V, replace(OFF, logit_bias=tuple(biases.items())), 2)
    torch.testing.assert_close(found, processor(ids_2T, logits_2V.clone()), rtol=0, atol=1e-6)


def test_filters_are_those_of_transformers(logits_2V: torch.Tensor) -> None:
    """One at a time: their order differs from transformers', which has min_p last."""
    cases: list[tuple[SamplingParams, Any]] = [
        (replace(OFF, min_p=0.2), transformers.MinPLogitsWarper(0.2)),
        (replace(OFF, top_k=4), transformers.TopKLogitsWarper(4)),
        (replace(OFF, top_p=0.6), transformers.TopPLogitsWarper(0.6)),
    ]
    for params, warper in cases:
        expected = warper(ids_2T, logits_2V.clone())
        assert 2 < int(expected.isfinite().sum()) < 2 * VOCAB
        assert torch.equal(filtered_scores(logits_2V, [params] * 2), expected)


def test_parameters_that_are_off_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tokens nor penalties nor filters are looked at for rows without them."""

    def not_here(*_: object) -> None:
        raise AssertionError("not for these rows")

    monkeypatch.setattr("engine.sampler.adjusted_scores", not_here)
    monkeypatch.setattr("engine.sampler.candidates", not_here)
    monkeypatch.setattr("engine.sampler.best_ranked", not_here)
    logits = torch.tensor([[0.0, 3.0], [2.0, 0.0]])
    tokens = sample_by_torch(logits, [OFF, replace(OFF, temperature=0.0, min_tokens=2)], [0, 2])
    assert tokens.tolist()[1] == 0
    assert token_logprobs(logits, tokens, [OFF, OFF]) == {}
    with pytest.raises(AssertionError, match="not for these rows"):
        sample_by_torch(logits, [OFF, replace(OFF, min_tokens=3)], [0, 2], tokens=[[1], [1, 1, 1]])


def test_logprobs_are_of_the_model_s_own_scores() -> None:
    """Rows that ask for none, for none but the drawn one's, and for more than there are; ties rank by id."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.5, 0.5, 0.5, 0.5], [3.0, 0.0, 1.0, 2.0]], dtype=torch.bfloat16)
    params = [replace(OFF, logprobs=3), OFF, replace(OFF, logprobs=0, temperature=0.1, logit_bias=((3, 5.0),))]
    found = token_logprobs(logits, torch.tensor([3, 0, 2]), params)
    expected = logits.double().log_softmax(dim=-1)
    assert set(found) == {0, 2}
    assert found[0].logprob == pytest.approx(expected[0, 3].item(), abs=1e-14)
    assert [token for token, _ in found[0].top] == [1, 2, 0]
    assert [value for _, value in found[0].top] == pytest.approx(expected[0, [1, 2, 0]].tolist(), abs=1e-14)
    assert len(found[2].top) == 0
    assert found[2].logprob == pytest.approx(expected[2, 2].item(), abs=1e-14)
    many = token_logprobs(logits, torch.tensor([3, 0, 2]), [replace(OFF, logprobs=20)] * 3)
    assert [token for token, _ in many[1].top] == [0, 1, 2, 3]
    assert many[0].top[:3] == found[0].top


@settings(deadline=None)
@given(scores=st.lists(st.integers(-3, 3), min_size=1, max_size=60), count=st.integers(0, 25))
def test_the_best_are_ranked_through_ties(scores: list[int], count: int) -> None:
    """More tokens tie with the last one than were asked for: the lowest ids are named."""
    expected = sorted(range(len(scores)), key=lambda token: (-scores[token], token))[:count]
    values, ids = best_ranked(torch.tensor([scores], dtype=torch.float64), count)
    assert ids[0].tolist() == expected
    assert values[0].tolist() == [scores[token] for token in expected]
