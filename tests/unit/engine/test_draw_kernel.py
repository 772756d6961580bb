"""The sampling kernel against PyTorch's operations, where its shortcuts could go wrong: long rows, ties, odd shapes."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.sampler import allow_only, draw_kernel
from engine.types import NO_TOKEN, SamplingParams
from tests.support.sampler_ways import sample, sample_by_torch

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)
VOCAB = 1_301
"""Two whole blocks of the kernel and a part that no vector divides."""

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

any_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 600, VOCAB - 1, VOCAB, 5_000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.1, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    max_tokens=st.just(100),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    logit_bias=st.sampled_from([(), (), ((0, 3.5), (511, -2.0), (512, 4.0), (VOCAB - 1, 5.0))]),
    min_tokens=st.sampled_from([0, 50]),
)


@settings(max_examples=150, deadline=None)
@given(
    params=st.lists(any_params, min_size=1, max_size=6),
    index=st.integers(0, 99),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    steps=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_draws_what_the_definition_draws(
    params: list[SamplingParams], index: int, dtype: torch.dtype, spread: float, steps: float, seed: int
) -> None:
    """From all scores equal to one far above the rest, with and without ties, each filter, every type."""
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.normal(size=(len(params), VOCAB)) * spread)
    scores = (scores / steps).round() * steps if steps else scores
    tokens = [random.integers(0, VOCAB, index + 20).tolist() for _ in params]
    sample(scores.to(dtype), params, [index] * len(params), tokens=tokens, eos_token_ids={0, 1_300, 9_999})


def test_many_draws_from_rows_as_wide_as_a_real_vocabulary() -> None:
    """151,936 tokens in bfloat16, so that thousands tie: 120 draws of all kinds, the same both ways."""
    logits = (torch.randn(24, 151_936, generator=torch.Generator().manual_seed(3)) * 4).bfloat16()
    kinds = [
        OFF, replace(OFF, top_k=50), replace(OFF, top_p=0.9), replace(OFF, min_p=0.02),
        replace(OFF, top_k=300, top_p=0.97, min_p=0.001), replace(OFF, top_p=0.5, min_p=0.01),
    ]  # fmt: skip
    params = [replace(kinds[i % 6], seed=i, temperature=0.5 + i % 3) for i in range(24)]
    drawn = {token for index in range(5) for token in sample(logits, params, [index] * 24).tolist()}
    assert len(drawn) > 60


def test_the_result_does_not_depend_on_threads_or_on_where_rows_lie() -> None:
    """Rows with gaps between them, one thread and three: what a packed copy gives on one."""
    wide = torch.randn(9, 2 * 8_000, generator=torch.Generator().manual_seed(5))
    params = [replace(OFF, seed=i, top_k=(0, 30)[i % 2], top_p=(1.0, 0.8, 0.95)[i % 3]) for i in range(9)]
    expected = sample_by_torch(wide[:, 100:8_100].clone(), params, [0] * 9).tolist()
    kernel = draw_kernel()
    assert kernel is not None
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert kernel.draw(wide[:, 100:8_100], params, [0] * 9, None).tolist() == expected
    finally:
        torch.set_num_threads(threads)


def test_rows_that_no_model_should_give_have_no_token() -> None:
    """All minus infinity, not a number, one infinite score."""
    rows = torch.zeros(3, 40)
    rows[0] = float("-inf")
    rows[1] = float("nan")
    rows[2, 17] = float("inf")
    kernel = draw_kernel()
    assert kernel is not None
    for params in (OFF, replace(OFF, top_k=5), replace(OFF, top_p=0.5), replace(OFF, min_p=0.5)):
        assert kernel.draw(rows, [params] * 3, [0] * 3, None).tolist() == [NO_TOKEN] * 3


@pytest.mark.parametrize("where", [0, 511, 512, 1_300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_tokens_that_are_forbidden_none_is_drawn(where: int, dtype: torch.dtype) -> None:
    """A grammar leaves a few tokens of a row, or one: the first, the last, on both sides of a block's edge. What is
    drawn is what the definition draws."""
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(where)).to(dtype)
    for left in ({where}, {where, 3, 700}, {where, *range(600, 1_200, 7)}):
        masked = torch.full_like(scores, float("-inf"))
        masked[0, sorted(left)] = scores[0, sorted(left)]
        for params in (OFF, replace(OFF, top_k=5), replace(OFF, top_p=0.5), replace(OFF, min_p=0.3, temperature=3.0)):
            for index in range(20):
                (token,) = sample(masked, [params], [index]).tolist()
                assert token in left, (token, params, index)


def test_the_kernel_is_used() -> None:
    """On this machine, for the types of scores that runners give, and not for a transposed tensor."""
    kernel = draw_kernel()
    assert kernel is not None
    assert all(kernel.takes(torch.zeros(2, 8, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert not kernel.takes(torch.zeros(8, 2).T)
    assert not kernel.takes(torch.zeros(2, 8, device="meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("vocab_size", [31, 64, 3_001, 40_000])
def test_tokens_that_a_mask_leaves_out_are_those_of_pytorch(
    dtype: torch.dtype, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some rows of a part of a larger tensor, with words of all kinds; the other rows and columns stay."""
    rng, words = np.random.default_rng(vocab_size), -(-vocab_size // 32)
    whole_BV = torch.from_numpy(rng.standard_normal((5, vocab_size + 7))).to(dtype)
    allowed_RI = rng.integers(-(2**31), 2**31, (3, words), dtype=np.int64).astype(np.int32)
    allowed_RI[:, ::3], allowed_RI[:, 1::3] = 0, -1
    found, wanted = whole_BV.clone(), whole_BV.clone()
    assert allow_only(found[:, :vocab_size], [0, 2, 4], allowed_RI, in_place=True).data_ptr() == found.data_ptr()
    kept = allow_only(whole_BV[:, :vocab_size], [0, 2, 4], allowed_RI, in_place=False)
    monkeypatch.setattr(sampler, "draw_kernel", lambda: None)
    allow_only(wanted[:, :vocab_size], [0, 2, 4], allowed_RI, in_place=True)
    assert torch.equal(found, wanted) and torch.equal(kept, wanted[:, :vocab_size])
    assert found.isinf().any() and torch.equal(whole_BV[1::2], found[1::2])
