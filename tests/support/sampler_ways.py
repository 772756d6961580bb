"""`engine.sampler.sample` by the kernel, by PyTorch's operations, by those that look at no value: one answer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
import torch

from engine import sampler
from engine.types import SamplingParams


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
