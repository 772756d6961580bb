"""The sampler against a plain reference, its noise against fixed values, its draws against the softmax."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.sampler import gumbel_noise, noise_bits, row_key
from engine.types import NO_TOKEN, SamplingParams
from tests.support.sampler_ways import filtered_scores, sample, token_logprobs

SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)
GREEDY = replace(SAMPLED, temperature=0.0)
MASK64 = 2**64 - 1


def draw(logits: list[list[float]], params: list[SamplingParams], indices: list[int]) -> list[int]:
    tokens: list[int] = sample(torch.tensor(logits, dtype=torch.float32), params, indices).tolist()
    return tokens


def splitmix64(state: int) -> int:
    """The published generator, on Python integers: the output after advancing `state` once."""
    z = (state + 0x9E3779B97F4A7C15) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def test_greedy_takes_the_first_of_the_highest() -> None:
    """Exact ties go to the lowest token id, whether or not another row of the batch is sampled."""
    rows = [[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -1.0, -1.0]]
    assert draw(rows, [GREEDY] * 3, [0, 1, 2]) == [1, 0, 2]
    assert draw([*rows, [0.0, 0.0, 0.0, 0.0]], [*[GREEDY] * 3, SAMPLED], [0, 1, 2, 3])[:3] == [1, 0, 2]


NAN, INF = math.nan, math.inf
BROKEN_ROWS = {
    "all NaN": [NAN] * 5,
    "one NaN": [1.0, 2.0, NAN, 0.0, 3.0],
    "infinite": [1.0, INF, 0.0, 0.0, 0.0],
    "nothing above minus infinity": [-INF] * 5,
}


@pytest.mark.parametrize("broken", BROKEN_ROWS.values(), ids=BROKEN_ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SAMPLED,
        replace(SAMPLED, top_k=2),
        replace(SAMPLED, top_p=0.9),
        replace(SAMPLED, min_p=0.1),
        replace(GREEDY, logit_bias=((1, 2.0),)),
        replace(SAMPLED, repetition_penalty=1.5),
    ],
    ids=["greedy", "sampled", "top_k", "top_p", "min_p", "bias", "penalty"],
)
def test_nothing_is_drawn_from_scores_that_are_not_numbers(
    params: SamplingParams, dtype: torch.dtype, broken: list[float]
) -> None:
    """A row that is broken between two good ones, greedy and sampled, in every way of drawing: it has no token, and
    the others draw what they draw without it. Log-probabilities can be asked for all the same."""
    good = [[0.0, 2.0, 1.0, -1.0, 0.5], [3.0, 2.0, 1.0, 0.0, -1.0]]
    tokens = [[1, 2]] * 3
    alone = sample(torch.tensor(good, dtype=dtype), [params] * 2, [0, 2], tokens=tokens[:2])
    logits_BV = torch.tensor([good[0], broken, good[1]], dtype=dtype)
    drawn = sample(logits_BV, [params] * 3, [0, 1, 2], tokens=tokens)
    assert drawn.tolist() == [alone[0], NO_TOKEN, alone[1]]
    reported = token_logprobs(logits_BV, drawn, [replace(params, logprobs=2)] * 3)
    assert sorted(reported) == [0, 1, 2] and not math.isfinite(reported[1].logprob)


def test_greedy_ignores_the_filters() -> None:
    """temperature 0 with top_k and top_p set is still the plain argmax."""
    params = replace(GREEDY, top_k=2, top_p=0.1)
    assert draw([[1.0, 3.0, 2.0], [0.0, 0.0, 1.0]], [params, SAMPLED], [0, 0])[0] == 1


def test_a_greedy_batch_makes_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only greedy rows: the cost of the noise is not paid."""

    def no_noise(*_: object) -> Any:
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr("engine.sampler.draw_kernel", no_noise)
    monkeypatch.setattr("engine.sampler.gumbel_noise", no_noise)
    assert draw([[0.0, 1.0]], [GREEDY], [0]) == [1]
    with pytest.raises(AssertionError, match="noise for a greedy batch"):
        draw([[0.0, 1.0]], [SAMPLED], [0])


def bits_of(keys: list[int], vocab_size: int) -> torch.Tensor:
    """Of all tokens, in each row's stream."""
    return noise_bits(torch.tensor(np.array(keys, np.uint64).view(np.int64)), torch.arange(vocab_size)[None, :])


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    choice=st.integers(0, 2**31),
    index=st.integers(0, 2**31),
    vocab_size=st.integers(1, 40),
)
def test_noise_bits_are_the_published_generator(seed: int, choice: int, index: int, vocab_size: int) -> None:
    """Each token's bits are the next output of splitmix64 started at the row's key, on exact integers."""
    key = row_key(seed, choice, index)
    state = 0
    for part in (seed, choice, index):
        state = splitmix64(state ^ (part & MASK64))
    assert key == state
    expected = [splitmix64((key + token * 0x9E3779B97F4A7C15) & MASK64) >> 12 for token in range(vocab_size)]
    assert bits_of([key], vocab_size)[0].tolist() == expected


def test_noise_has_not_changed() -> None:
    """Known answers: nodes of different versions must draw the same tokens, so these values may never change."""
    assert row_key(0, 0, 0) == 0x238275BC38FCBE91
    assert row_key(2**64 - 1, 1, 5) == row_key(-1, 1, 5) == 0xBD6726CF886F2317
    assert bits_of([row_key(42, 0, 7)], 5)[0].tolist() == [
        782586303279591,
        1030819529338135,
        2573348707663578,
        1777588225335196,
        3375919027075966,
    ]
    noise = gumbel_noise([row_key(42, 0, 7)], 5)[0].tolist()
    assert noise == pytest.approx(
        [-0.559631825021044, -0.38833444510606324, 0.5804098408220637, 0.072979939751466, 1.2440679705801923], abs=1e-12
    )


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest 52-bit number give large but finite noise, of the right sign."""
    ends = torch.tensor([[0, 2**52 - 1]])
    monkeypatch.setattr("engine.sampler.noise_bits", lambda *_: ends)
    low, high = gumbel_noise([0], 2)[0].tolist()
    assert low == pytest.approx(-math.log(53 * math.log(2)))
    assert high == pytest.approx(53 * math.log(2))


def test_seed_choice_and_index_each_change_the_noise() -> None:
    """Neighbouring keys give streams without a common value."""
    keys = {row_key(s, c, i) for s in range(20) for c in range(20) for i in range(20)}
    assert len(keys) == 8000
    bits = bits_of([row_key(1, 0, 0), row_key(0, 1, 0), row_key(0, 0, 1), row_key(0, 0, 0)], 1000)
    assert len(set(bits.flatten().tolist())) == 4000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    """20,000 draws of one seed: chi-square against the softmax within what one in 10,000 exceed; the seed is fixed."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0, 1.1, -0.4, 0.7, -2.5])
    count = 20_000
    params = [replace(SAMPLED, temperature=temperature, seed=9)] * count
    tokens = sample(logits.expand(count, -1), params, range(count))
    observed = torch.bincount(tokens, minlength=8).double()
    expected = (logits.double() / temperature).softmax(0) * count
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 29.9  # 7 degrees of freedom


def test_draws_follow_the_softmax_over_seeds() -> None:
    """The first token of 20,000 requests with consecutive seeds is as well spread as that of one request."""
    count, vocab_size = 20_000, 16
    tokens = sample(torch.zeros(count, vocab_size), [replace(SAMPLED, seed=s) for s in range(count)], [0] * count)
    observed = torch.bincount(tokens, minlength=vocab_size).double()
    assert ((observed - count / vocab_size) ** 2 / (count / vocab_size)).sum().item() < 44.3  # 15 degrees of freedom


def naive_filter(scores: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The ids that stay, by the definition: rank, cut at top_k, renormalise, take until top_p is reached."""
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    ranked = ranked[:top_k] if top_k else ranked
    weights = np.exp(scores[ranked] - scores[ranked].max())
    probabilities = weights / weights.sum()
    kept: set[int] = set()
    mass = 0.0
    for token, probability in zip(ranked, probabilities, strict=True):
        assume(top_p == 1 or abs(mass - top_p) > 1e-9)
        if kept and mass >= top_p and top_p < 1:
            break
        kept.add(token)
        mass += probability
    return kept


rows = st.lists(
    st.tuples(
        st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=9, max_size=9),
        st.integers(0, 12),
        st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    ),
    min_size=1,
    max_size=5,
)


@given(rows=rows)
def test_filters_keep_what_the_definition_keeps(rows: list[tuple[list[float], int, float]]) -> None:
    """Rows with different top_k and top_p, many ties among them: the same ids stay, with unchanged scores."""
    scores = torch.tensor([row for row, _, _ in rows], dtype=torch.float64)
    params = [replace(SAMPLED, top_k=top_k, top_p=top_p) for _, top_k, top_p in rows]
    result = filtered_scores(scores, params)
    for before, after, p in zip(scores, result, params, strict=True):
        kept = naive_filter(before.numpy(), p.top_k, p.top_p)
        assert {int(i) for i in after.isfinite().nonzero()} == kept
        assert after[sorted(kept)].tolist() == before[sorted(kept)].tolist()


params_of_a_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    max_tokens=st.just(1),
)


@settings(max_examples=60)
@given(
    batch=st.lists(st.tuples(params_of_a_row, st.integers(0, 100), st.integers(0, 2**31)), min_size=1, max_size=6),
)
def test_a_row_does_not_depend_on_the_others(batch: list[tuple[SamplingParams, int, int]]) -> None:
    """Each row drawn alone gives the token that it gives in the batch; the scores passed in are not changed."""
    logits = torch.stack([torch.from_numpy(np.random.default_rng(noise).normal(size=11)) for _, _, noise in batch])
    logits = logits.float()
    before = logits.clone()
    params, indices = [p for p, _, _ in batch], [i for _, i, _ in batch]
    together = sample(logits, params, indices)
    assert torch.equal(logits, before)
    for i in range(len(batch)):
        assert sample(logits[i : i + 1], params[i : i + 1], indices[i : i + 1]).item() == together[i]


def test_extreme_temperatures_stay_defined() -> None:
    """The smallest positive temperature is greedy, a huge one uniform; neither gives an undefined score."""
    logits = [[1.0, 4.0, 2.0]]
    cold = {draw(logits, [replace(SAMPLED, temperature=5e-324, seed=s)], [0])[0] for s in range(50)}
    hot = {draw(logits, [replace(SAMPLED, temperature=1e300, seed=s)], [0])[0] for s in range(50)}
    assert (cold, hot) == ({1}, {0, 1, 2})


def test_filters_limit_what_is_drawn() -> None:
    """top_k 1, and a top_p below the best token's share, leave only the best token, at any noise."""
    logits = [[0.0, 0.1, 0.05, 0.1]]
    for params in (replace(SAMPLED, top_k=1), replace(SAMPLED, top_p=0.01)):
        assert {draw(logits, [replace(params, seed=s)], [0])[0] for s in range(100)} == {1}


def test_ties_rank_by_token_id_in_a_large_vocabulary() -> None:
    """Far more equal scores than a sort handles in one piece: the lowest ids stay."""
    scores = torch.zeros(2, 50_000, dtype=torch.float64)
    scores[:, 40_000:] = 1.0
    kept = filtered_scores(scores, [replace(SAMPLED, top_k=10), replace(SAMPLED, top_k=10_003)]).isfinite()
    assert kept[0].nonzero().flatten().tolist() == list(range(40_000, 40_010))
    assert kept[1].nonzero().flatten().tolist() == [0, 1, 2, *range(40_000, 50_000)]
