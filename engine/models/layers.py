"""The parts of a decoder layer that are the same in every supported model. Shape suffixes as in engine/types.py.

All functions are pure: they return new tensors and keep nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model_config import Llama3Scaling, RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """An affine map: weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TE, self.weight, self.bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each vector of the last dimension to root mean square 1, then by `weight` (Zhang & Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def swiglu(x_TE: torch.Tensor, gate: Linear, up: Linear, down: Linear) -> torch.Tensor:
    """The gated feed-forward block (Shazeer 2020) -> [T, E]."""
    return down(F.silu(gate(x_TE)) * up(x_TE))


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair -> [D/2], float32 (Su et al. 2021, RoFormer)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    return frequencies if rope.scaling is None else _stretched(frequencies, rope.scaling)


def _stretched(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's context extension: slow frequencies divided by `factor`, fast ones kept, a linear blend between.

    `turns` counts how often a pair turns round within the context the model was first trained on.
    """
    turns = scaling.original_context_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rotary_angles(positions_T: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for `rotate`, each [T, 1, D/2] to broadcast over heads."""
    angles = (positions_T[:, None].to(torch.float32) * frequencies)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pair (d, d + D/2) of each head by its angle: the half-split order of Hugging Face checkpoints."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
