"""Products by a model's matrices: one protocol for all forms in which they are kept.

Shape suffixes as in engine/types.py; X inputs and Y outputs of a matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.native.kernels import PANEL, Epilogue, Kernels, Operand, Workspace, pack

HALF_PANEL = PANEL // 2
LOGITS = "logits"
"""The name of the output projection."""


class Matmul(Protocol):
    """x -> x W^T + b for one matrix, or for several with their outputs concatenated.

    For a gated pair (`Packing.gated`) x -> silu(x G^T + g) * (x U^T + u).
    """

    def __call__(self, x_TX: torch.Tensor, /) -> torch.Tensor:
        """[T, Y], of the type of `x_TX`. Valid until the next call of a matmul of the same name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """An affine map as in the checkpoint, which is a `Matmul` too: weight [out, in], bias [out] or none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x_TX: torch.Tensor, /) -> torch.Tensor:
        return F.linear(x_TX, self.weight, self.bias)


class Packing(ABC):
    """How a model's matrices are kept. Linears of one call have the same inputs; all have a bias, or none."""

    @abstractmethod
    def matmul(self, name: str, *linears: Linear) -> Matmul:
        """Matmuls of one `name` may share a buffer for their results."""

    def gated(self, gate: Linear, up: Linear) -> Matmul:
        both = self.matmul("gated", gate, up)

        def product(x_TX: torch.Tensor, /) -> torch.Tensor:
            gate_TY, up_TY = both(x_TX).chunk(2, dim=-1)
            return F.silu(gate_TY).mul_(up_TY)

        return product

    def output(self, linear: Linear) -> Matmul:
        """The output projection, which is never rounded below 8 bits."""
        return linear

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Other tensors than layers' matrices, on the device of the products."""
        return tensor


class PlainPacking(Packing):
    """The checkpoint's own tensors, one product for each: the reference for the others."""

    def matmul(self, name: str, *linears: Linear) -> Matmul:
        del name
        if len(linears) == 1:
            return linears[0]
        return lambda x_TX: torch.cat([linear(x_TX) for linear in linears], dim=-1)


def joined(linears: Sequence[Linear]) -> Linear:
    """One linear with all outputs, in order."""
    if len(linears) == 1:
        return linears[0]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "some of the matrices have a bias, others have none"
    return Linear(weight=torch.cat([linear.weight for linear in linears]), bias=torch.cat(biases) if biases else None)


class NativePacking(Packing):
    """Layouts for the compute kernels."""

    def __init__(self, kernels: Kernels, workspace: Workspace, bits: int = 16) -> None:
        """`bits` of a weight: 16 is bfloat16; 8 and 4 round it."""
        self._kernels = kernels
        self._workspace = workspace
        self._bits = bits

    def matmul(self, name: str, *linears: Linear) -> NativeMatmul:
        bits = max(self._bits, 8) if name == LOGITS else self._bits
        whole = joined(linears)
        return NativeMatmul(self._kernels, self._workspace, name, pack(whole.weight, bits, bias_Y=whole.bias))

    def output(self, linear: Linear) -> Matmul:
        return self.matmul(LOGITS, linear)

    def gated(self, gate: Linear, up: Linear) -> NativeMatmul:
        assert (gate.bias is None) == (up.bias is None), "one of the pair has a bias, the other has none"
        bias_Y = None if gate.bias is None or up.bias is None else _interleave(gate.bias, up.bias)
        # Twice the width of one matrix: the halves of the last panel end with the two matrices.
        columns = 2 * gate.weight.shape[0]
        operand = pack(_interleave(gate.weight, up.weight), self._bits, bias_Y=bias_Y, columns=columns)
        return NativeMatmul(self._kernels, self._workspace, "gated", operand, gated=True)


class NativeMatmul:
    """See `Matmul`."""

    def __init__(
        self, kernels: Kernels, workspace: Workspace, name: str, operand: Operand, *, gated: bool = False
    ) -> None:
        self.operand = operand
        self._kernels = kernels
        self._workspace = workspace
        self._name = name
        self._columns = operand.columns // 2 if gated else operand.columns
        self._epilogue = Epilogue.SWIGLU if gated else Epilogue.STORE

    def __call__(self, x_TX: torch.Tensor, /) -> torch.Tensor:
        out_TY = self._workspace.take(self._name, x_TX.shape[0], self._columns)
        self._kernels.linear(x_TX, self.operand, out_TY, epilogue=self._epilogue, workspace=self._workspace)
        return out_TY


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """In turn 16 rows of the one and 16 of the other; zeros fill the last ones."""
    sixteens = -(-gate.shape[0] // HALF_PANEL)
    halves = [
        F.pad(part.view(part.shape[0], -1), (0, 0, 0, sixteens * HALF_PANEL - part.shape[0])) for part in (gate, up)
    ]
    both = torch.stack([half.view(sixteens, HALF_PANEL, -1) for half in halves], dim=1)
    return both.view(sixteens * PANEL, *gate.shape[1:])
