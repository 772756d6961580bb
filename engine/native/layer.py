"""A decoder layer in two calls of kernels.c, or all layers in one: a call from Python costs as much as a small product.

Shape suffixes as in engine/types.py; X the width of query, key and value together.
"""

from __future__ import annotations

from ctypes import Structure, addressof, c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from engine.native.kernels import AttentionPlan, Kernels, Opening, Operand, Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """bfloat16 all; norms of queries and keys where the model has them."""

    input_norm: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None
    attended_norm: torch.Tensor
    qkv: Operand
    o: Operand
    gate_up: Operand
    down: Operand


class _Operand(Structure):
    _fields_ = [(name, c_void_p) for name in ("panels", "scales", "bias")] + [
        (name, c_int64) for name in ("bits", "columns", "inputs")
    ]


class _Layer(Structure):
    _fields_ = [(name, c_void_p) for name in ("input_norm", "q_norm", "k_norm", "attended_norm")] + [
        (name, _Operand) for name in ("qkv", "o", "gate_up", "down")
    ]


class _Step(Structure):
    _fields_ = (
        [(name, c_void_p) for name in ("x", "normed", "qkv", "attended", "gated", "cosines", "sines")]
        + [(name, c_void_p) for name in ("tables", "table_at", "rows_at", "contexts", "tasks", "blocks", "slots")]
        + [(name, c_void_p) for name in ("product_scratch", "attention_scratch")]
        + [(name, c_int64) for name in ("rows", "hidden", "num_tasks", "heads", "kv_heads", "block_size", "d")]
        + [(name, c_int64) for name in ("attention_scratch_bytes", "threads")]
        + [(name, c_double) for name in ("eps", "scale")]
    )


_STEP_FIELDS = {field[0] for field in _Step._fields_}


class Layers:
    """All layers of a model. One step at a time: `begin`, then `open` and `close` of each layer in order, or `run`.

    `begin` again, between them, goes on with other rows.
    """

    def __init__(
        self,
        weights: list[LayerWeights],
        *,
        kernels: Kernels,
        workspace: Workspace,
        heads: int,
        eps: float,
    ) -> None:
        """Keeps the weights alive: the kernel has nothing but their addresses."""
        self._weights = weights
        self._layers = (_Layer * len(weights))(*[_layer(each) for each in weights])
        self._at = [addressof(each) for each in self._layers]
        self._kernels = kernels
        self._workspace = workspace
        self._heads = heads
        self._eps = eps
        self._step = _Step()
        self._step_at = addressof(self._step)
        self._alive: tuple[Any, ...] = ()

    def begin(
        self,
        x_TE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        region_N2KSD: torch.Tensor,
    ) -> None:
        """`x_TE` becomes each layer's output in turn. `region_N2KSD`: of any layer, for its shape."""
        rows, hidden = x_TE.shape
        _, _, kv_heads, block_size, head_dim = region_N2KSD.shape
        first, take, threads = self._weights[0], self._workspace.take, torch.get_num_threads()
        operands = (first.qkv, first.o, first.gate_up, first.down)
        words = max(self._kernels.linear_scratch(rows, each.matrix) for each in operands)
        attention_bytes = self._kernels.attention_scratch(int(plan.contexts_B.max()), head_dim)
        buffers = {
            "normed": take("norm", rows, hidden),
            "qkv": take("qkv", rows, first.qkv.columns),
            "attended": take("attended", rows, self._heads * head_dim),
            "gated": take("gated", rows, first.gate_up.columns // 2),
            "product_scratch": take("linear", 1, words, torch.int32),
            "attention_scratch": take("attention", threads, attention_bytes, torch.uint8),
        }
        tensors = buffers | {"x": x_TE, "cosines": angles[0], "sines": angles[1]}
        arrays = {
            "tables": plan.tables, "table_at": plan.table_at_B, "rows_at": plan.rows_at, "contexts": plan.contexts_B,
            "tasks": plan.tasks, "blocks": plan.blocks_T, "slots": plan.slots_T,
        }  # fmt: skip
        sizes = {
            "rows": rows, "hidden": hidden, "num_tasks": len(plan.tasks), "heads": self._heads, "kv_heads": kv_heads,
            "block_size": block_size, "d": head_dim, "attention_scratch_bytes": attention_bytes, "threads": threads,
            "eps": self._eps, "scale": head_dim**-0.5,
        }  # fmt: skip
        places = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        places |= {name: array.ctypes.data for name, array in arrays.items()}
        fields = places | sizes
        assert fields.keys() == _STEP_FIELDS, fields.keys() ^ _STEP_FIELDS  # or one would be an old step's
        for name, value in fields.items():
            setattr(self._step, name, value)
        self._alive = (tensors, plan)

    def run(self, kv_LN2KSD: torch.Tensor) -> None:
        """All layers, for a step whose keys and values nobody waits for: the threads go through it together."""
        assert len(kv_LN2KSD) == len(self._weights), len(kv_LN2KSD)
        at, stride = kv_LN2KSD.data_ptr(), kv_LN2KSD.stride(0)
        self._kernels.layers(self._at[0], len(self._weights), self._step_at, at, stride)

    def open(self, layer: int, region_N2KSD: torch.Tensor, opening: Opening = Opening.WHOLE) -> None:
        """Write the new tokens' keys and values of one layer to their slots, and make the queries that `close` asks
        for; or one of the two."""
        self._kernels.layer_open(opening, self._at[layer], self._step_at, region_N2KSD.data_ptr())

    def close(self, layer: int, region_N2KSD: torch.Tensor) -> None:
        """The rest of the layer that was opened last."""
        self._kernels.layer_close(self._at[layer], self._step_at, region_N2KSD.data_ptr())


def _layer(weights: LayerWeights) -> _Layer:
    q_norm, k_norm = weights.norms or (None, None)
    return _Layer(
        input_norm=weights.input_norm.data_ptr(),
        q_norm=_at(q_norm),
        k_norm=_at(k_norm),
        attended_norm=weights.attended_norm.data_ptr(),
        qkv=_operand(weights.qkv),
        o=_operand(weights.o),
        gate_up=_operand(weights.gate_up),
        down=_operand(weights.down),
    )


def _operand(operand: Operand) -> _Operand:
    matrix = operand.matrix
    return _Operand(
        panels=matrix.panels.data_ptr(),
        scales=_at(matrix.scales),
        bias=_at(operand.bias),
        bits=matrix.bits,
        columns=operand.columns,
        inputs=matrix.inputs,
    )


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
