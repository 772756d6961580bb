"""Matrices packed once, in the order in which a kernel reads them.

Shape suffixes as in engine/types.py; X and Y are any widths.

A product's result stays the caller's until the next call of the same product: buffers are used again.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.native.kernels import Epilogue, Kernels, Operand, Workspace
from engine.native.packing import PANEL, pack

HALF_PANEL = PANEL // 2
LOGITS = "logits"
"""The name of the output projection."""


class Product(Protocol):
    """x -> x W^T + b, for bfloat16 weights [Y, X]."""

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, x_TX: torch.Tensor, out_TY: torch.Tensor) -> None:
        """Add the product to `out_TY` in place."""
        ...


class GatedProduct(Protocol):
    """x -> silu(x G^T + g) * (x U^T + u)."""

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor: ...


class Packing(Protocol):
    """How a model's matrices are kept."""

    def product(self, name: str, weight_YX: torch.Tensor, bias_Y: torch.Tensor | None) -> Product:
        """Products of one `name` share a buffer for their results."""
        ...

    def gated(
        self, gate_YX: torch.Tensor, up_YX: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None
    ) -> GatedProduct: ...


class OneDnnPacking:
    """oneDNN's own layouts: used where it has AMX, which it drives well and we do not."""

    ROWS_HINT = 512
    """Rows that the layout is chosen for."""

    def product(self, name: str, weight_YX: torch.Tensor, bias_Y: torch.Tensor | None) -> _OneDnn:
        del name
        return _OneDnn(weight_YX, bias_Y)

    def gated(
        self, gate_YX: torch.Tensor, up_YX: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None
    ) -> GatedProduct:
        both = _OneDnn(torch.cat((gate_YX, up_YX)), None if biases is None else torch.cat(biases))

        def gated(x_TX: torch.Tensor) -> torch.Tensor:
            gate_TY, up_TY = both(x_TX).chunk(2, dim=-1)
            return F.silu(gate_TY).mul_(up_TY)

        return gated


class _OneDnn:
    def __init__(self, weight_YX: torch.Tensor, bias_Y: torch.Tensor | None) -> None:
        # A layout of its own in any case, or the result would alias the checkpoint's memory.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_YX.contiguous(), OneDnnPacking.ROWS_HINT)
        self._bias = bias_Y

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TX, self._weight, self._bias, "none", [], "")
        return result

    def add_to(self, x_TX: torch.Tensor, out_TY: torch.Tensor) -> None:
        out_TY += self(x_TX)


class NativePacking:
    """kernels.c."""

    def __init__(self, kernels: Kernels, workspace: Workspace, bits: int = 16) -> None:
        """`bits` of a weight: 16 is bfloat16; 8 and 4 round it, but the output projection is never below 8."""
        self._kernels = kernels
        self._workspace = workspace
        self._bits = bits

    def product(self, name: str, weight_YX: torch.Tensor, bias_Y: torch.Tensor | None) -> NativeProduct:
        bits = max(self._bits, 8) if name == LOGITS else self._bits
        return NativeProduct(self._kernels, self._workspace, name, _operand(weight_YX, bias_Y, bits))

    def gated(
        self, gate_YX: torch.Tensor, up_YX: torch.Tensor, biases: tuple[torch.Tensor, torch.Tensor] | None
    ) -> NativeGated:
        bias_Y = None if biases is None else _interleave(*biases)
        # Twice the true width, so that the last panel's halves end where the two matrices do.
        operand = _operand(_interleave(gate_YX, up_YX), bias_Y, self._bits, columns=2 * gate_YX.shape[0])
        return NativeGated(self._kernels, self._workspace, "gated", operand)


def _operand(weight_YX: torch.Tensor, bias_Y: torch.Tensor | None, bits: int, *, columns: int | None = None) -> Operand:
    matrix = pack(weight_YX, bits)
    bias = None
    if bias_Y is not None:
        bias = bias_Y.new_zeros(-(-matrix.outputs // PANEL) * PANEL)
        bias[: len(bias_Y)] = bias_Y
    return Operand(matrix=matrix, bias=bias, columns=weight_YX.shape[0] if columns is None else columns)


class _Native:
    def __init__(self, kernels: Kernels, workspace: Workspace, name: str, operand: Operand) -> None:
        self.operand = operand
        self._kernels = kernels
        self._workspace = workspace
        self._name = name

    def _run(self, x_TX: torch.Tensor, out_TY: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        self._kernels.linear(x_TX, self.operand, out_TY, epilogue=epilogue, workspace=self._workspace)
        return out_TY


class NativeProduct(_Native):
    """See `Product`."""

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        out_TY = self._workspace.take(self._name, x_TX.shape[0], self.operand.columns)
        return self._run(x_TX, out_TY, Epilogue.STORE)

    def add_to(self, x_TX: torch.Tensor, out_TY: torch.Tensor) -> None:
        self._run(x_TX, out_TY, Epilogue.ADD)


class NativeGated(_Native):
    """See `GatedProduct`."""

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        out_TY = self._workspace.take(self._name, x_TX.shape[0], self.operand.columns // 2)
        return self._run(x_TX, out_TY, Epilogue.SWIGLU)


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 rows of the one, 16 of the other, in turn; zero rows fill the last sixteens."""
    sixteens = -(-gate.shape[0] // HALF_PANEL)
    halves = [
        F.pad(part.view(part.shape[0], -1), (0, 0, 0, sixteens * HALF_PANEL - part.shape[0])) for part in (gate, up)
    ]
    both = torch.stack([half.view(sixteens, HALF_PANEL, -1) for half in halves], dim=1)
    return both.view(sixteens * PANEL, *gate.shape[1:])
