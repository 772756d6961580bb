"""Rotary position embedding (Su et al. 2021, RoFormer) and its stretchings. Shape suffixes as in engine/types.py.

All functions are pure: they return new tensors and keep nothing.
"""

from __future__ import annotations

import math

import torch

from engine.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair -> [D/2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, rope.theta, head_dim)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's context extension: slow frequencies divided by `factor`, fast ones kept, a linear blend between.

    `turns` counts how often a pair turns round within the context the model was first trained on.
    """
    turns = scaling.original_context_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> torch.Tensor:
    """NTK-by-parts (Peng et al. 2023, YaRN): as Llama 3.1's, but the blend is linear in the dimension."""

    def pair_that_turns(turns: float) -> float:
        """The (fractional) pair whose frequency makes so many turns within the original context."""
        return head_dim * math.log(scaling.original_context_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1.0 - stretched)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def rotary_angles(
    positions_T: torch.Tensor, frequencies: torch.Tensor, *, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for `rotate`, each [T, 1, D/2] to broadcast over heads. Computed in float32, then cast."""
    angles = (positions_T[:, None].to(torch.float32) * frequencies)[:, None, :]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pair (d, d + D/2) of each head by its angle: the half-split order of Hugging Face checkpoints."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
