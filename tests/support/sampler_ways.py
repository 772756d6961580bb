"""`engine.sampler.sample` by the kernel, by PyTorch's operations, by those that look at no value: one answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from engine import sampler
from engine.types import SamplingParams, TokenLogprobs


def sample_by_torch(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    *,
    tokens: Sequence[Sequence[int]] = (),
    eos_token_ids: Collection[int] = (),
) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampler.draw_kernel", lambda: None)
        return sampler.sample(logits_BV, params, output_indices, tokens=tokens, eos_token_ids=eos_token_ids)


def sample(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    *,
    tokens: Sequence[Sequence[int]] = (),
    eos_token_ids: Collection[int] = (),
) -> torch.Tensor:
    """What all ways say; a difference is an error. Where there is no C compiler, all are PyTorch's."""
    drawn_B = sampler.sample(logits_BV, params, output_indices, tokens=tokens, eos_token_ids=eos_token_ids)
    expected_B = sample_by_torch(logits_BV, params, output_indices, tokens=tokens, eos_token_ids=eos_token_ids)
    assert drawn_B.tolist() == expected_B.tolist()
    blind_B = sampler.sample(logits_BV, params, output_indices, tokens=tokens, eos_token_ids=eos_token_ids, blind=True)
    assert blind_B.tolist() == expected_B.tolist()
    return drawn_B


def filtered_scores(scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The scores, -inf where a filter excludes the token."""
    result_RV = torch.full_like(scores_RV, float("-inf"))
    for part in sampler.candidates(scores_RV, params):
        result_RV[part.rows_R[:, None], part.ids_RC] = part.scores_RC.masked_fill(~part.kept_RC, float("-inf"))
    return result_RV


def gumbel_noise_of(keys: Sequence[int], ids_RC: torch.Tensor) -> torch.Tensor:
    """The noise of some tokens of each row only -> float64 [R, C]."""
    return sampler._gumbel(sampler.noise_bits(sampler._on_device(keys, ids_RC.device), ids_RC))


def token_logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """By row, for the rows whose `params.logprobs` is set."""
    scored = sampler.ScoredRows.of(logits_BV, tokens_B, params)
    return {} if scored is None else scored.by_row(scored.packed().cpu().numpy())
