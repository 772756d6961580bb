"""The parts of a decoder layer that are the same in every supported model. Shape suffixes as in engine/types.py.

All functions are pure: they return new tensors and keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """An affine map: weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TE, self.weight, self.bias)


class Affine(Protocol):
    """x -> x W^T + b. The result is a new tensor."""

    def __call__(self, x_TE: torch.Tensor, /) -> torch.Tensor: ...


class Affines(Protocol):
    """Several affine maps of one input, in their order. Results may be columns of one tensor."""

    def __call__(self, x_TE: torch.Tensor, /) -> tuple[torch.Tensor, ...]: ...


class Linears(Protocol):
    """How a decoder keeps its matrices and multiplies by them."""

    def one(self, linear: Linear) -> Affine: ...

    def joined(self, linears: Sequence[Linear]) -> Affines: ...


class PlainLinears:
    """The checkpoint's own tensors, one product for each."""

    def one(self, linear: Linear) -> Affine:
        return linear

    def joined(self, linears: Sequence[Linear]) -> Affines:
        kept = tuple(linears)

        def products(x_TE: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(linear(x_TE) for linear in kept)

        return products


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each vector of the last dimension to root mean square 1, then by `weight` (Zhang & Sennrich 2019).

    The scaling is computed in float32 whatever the type of `x`, the weight applied in it: as in transformers.
    """
    x32 = x.to(torch.float32)
    return (x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""`rms_norm` or `fused_rms_norm`."""


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm`, in one kernel where torch has one (CUDA): rounded once, after the weight has been applied."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(x_TE: torch.Tensor, gate_up: Affines, down: Affine) -> torch.Tensor:
    """The gated feed-forward block (Shazeer 2020) -> [T, E]."""
    gate_TI, up_TI = gate_up(x_TE)
    return down(F.silu(gate_TI) * up_TI)
