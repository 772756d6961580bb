"""The parts of a decoder layer that are the same in every supported model. Shape suffixes as in engine/types.py.

All functions are pure: they return new tensors and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """An affine map: weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TE, self.weight, self.bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each vector of the last dimension to root mean square 1, then by `weight` (Zhang & Sennrich 2019).

    The scaling is computed in float32 whatever the type of `x`, the weight applied in it: as in transformers.
    """
    x32 = x.to(torch.float32)
    return (x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


def swiglu(x_TE: torch.Tensor, gate: Linear, up: Linear, down: Linear) -> torch.Tensor:
    """The gated feed-forward block (Shazeer 2020) -> [T, E]."""
    return down(F.silu(gate(x_TE)) * up(x_TE))
