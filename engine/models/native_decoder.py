"""The decoder of engine/models/decoder.py for bfloat16 on a CPU: fewer and larger operations, on packed matrices.

It rounds where the plain decoder rounds; only the order of long sums differs. A layer is two calls of the kernels,
or all layers are one: a call from Python costs as much as a small product.

Shape suffixes as in engine/types.py; X the width of query, key and value together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import Array, Structure, addressof, c_double, c_int64, c_void_p
from typing import Any

import numpy as np
import torch

from engine.kv_pool import KvPool
from engine.model_config import ModelConfig
from engine.models.decoder import Decoder, Layer, rotary_angles
from engine.models.matmul import Matmul, NativeMatmul, Packing
from engine.native.kernels import AttentionPlan, Ends, Kernels, Opening, Workspace, address

HEAD_DIM_MAX = 256
"""The largest head dimension that the compute kernels take."""


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


def _layer(layer: Layer) -> _Layer:
    q_norm, k_norm = layer.norms or (None, None)
    return _Layer(
        input_norm=address(layer.input_norm),
        q_norm=address(q_norm),
        k_norm=address(k_norm),
        attended_norm=address(layer.post_attention_norm),
        qkv=_operand(layer.qkv),
        o=_operand(layer.o),
        gate_up=_operand(layer.gated),
        down=_operand(layer.down),
    )


def _operand(product: Matmul) -> _Operand:
    assert isinstance(product, NativeMatmul)
    of = product.operand
    places = {name: address(getattr(of, name)) for name in ("panels", "scales", "bias")}
    return _Operand(**places, bits=of.bits, columns=of.columns, inputs=of.inputs)


class NativeDecoder(Decoder):
    """A model's weights and its forward pass. Used by one thread at a time: it keeps buffers and tables."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Kernels,
        packing: Packing,
        workspace: Workspace,
    ) -> None:
        """Takes the tensors of `weight_shapes(config)`, bfloat16, and copies the matrices."""
        assert config.head_dim <= HEAD_DIM_MAX, config.head_dim
        super().__init__(config, tensors, packing)
        self._kernels = kernels
        self._workspace = workspace
        self._whole = (_Layer * config.num_layers)(*map(_layer, self.layers))
        self._step = _Step()
        self._alive: tuple[Any, ...] = ()
        """Owners of the memory whose addresses the step has."""
        self._cosines = self._sines = torch.empty(0, config.head_dim // 2, dtype=torch.bfloat16)

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary cosines and sines of a batch, [T, D/2] each, for all layers. From a table that grows."""
        end = int(positions_T.max()) + 1
        if end > len(self._cosines):
            known = torch.arange(min(2 * end, max(end, self.config.context_len_max)))
            both = rotary_angles(known, self.frequencies, factor=self.rope_factor, dtype=torch.bfloat16)
            self._cosines, self._sines = (part[:, 0].contiguous() for part in both)
        return self._cosines.index_select(0, positions_T), self._sines.index_select(0, positions_T)

    def run_layers(
        self,
        x_TE: torch.Tensor,
        positions_T: torch.Tensor,
        plan: AttentionPlan,
        pool: KvPool,
        layer_done: Callable[[int], None] | None,
        ends: Ends | None = None,
    ) -> torch.Tensor:
        """The last layer's output -> [T, E], or with `ends` only of its rows -> [W, E]. Overwrites `x_TE`.

        `layer_done` is called when the keys and values of a layer are in the pool.
        """
        angles, whole = self.angles(positions_T), self._whole
        self._begin(whole, x_TE, angles, plan, pool)
        kernels, step, at = self._kernels, addressof(self._step), [addressof(each) for each in whole]
        if layer_done is None and ends is None:  # no call between layers: the threads compute all of them
            kernels.layers(at[0], len(at), step, pool.kv_LN2KSD.data_ptr(), pool.kv_LN2KSD.stride(0))
            return x_TE
        for layer, region in enumerate(pool.kv_LN2KSD):
            cut = layer == len(at) - 1 and ends is not None
            kernels.layer_open(Opening.RECORDS if cut else Opening.WHOLE, at[layer], step, region.data_ptr())
            if layer_done is not None:
                layer_done(layer)
            if not cut:
                kernels.layer_close(at[layer], step, region.data_ptr())
        if ends is None:
            return x_TE
        x_WE = x_TE.index_select(0, ends.rows_W)
        if len(x_WE):  # the last layer of these rows
            cosines, sines = (part.index_select(0, ends.rows_W) for part in angles)
            self._begin(whole, x_WE, (cosines, sines), ends.plan, pool)
            kernels.layer_open(Opening.QUERIES, at[-1], step, region.data_ptr())
            kernels.layer_close(at[-1], step, region.data_ptr())
        return x_WE

    def _begin(
        self,
        whole: Array[_Layer],
        x_TE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        pool: KvPool,
    ) -> None:
        """Fill in the step, whose `x_TE` becomes each layer's output in turn. Between layers: change the rows."""
        rows, hidden = x_TE.shape
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        first, take, threads = whole[0], self._workspace.take, torch.get_num_threads()
        products = (first.qkv, first.o, first.gate_up, first.down)
        words = max(self._kernels.linear_scratch(rows, each.inputs, each.bits) for each in products)
        attention_bytes = self._kernels.attention_scratch(int(plan.contexts_B.max()), head_dim)
        buffers = {
            "normed": take("norm", rows, hidden),
            "qkv": take("qkv", rows, first.qkv.columns),
            "attended": take("attended", rows, heads * head_dim),
            "gated": take("gated", rows, first.gate_up.columns // 2),
            "product_scratch": take("linear", 1, words, torch.int32),
            "attention_scratch": take("attention", threads, attention_bytes, torch.uint8),
        }
        places: dict[str, torch.Tensor | np.ndarray] = {
            **buffers,
            "x": x_TE, "cosines": angles[0], "sines": angles[1], "tables": plan.tables, "table_at": plan.table_at_B,
            "rows_at": plan.rows_at, "contexts": plan.contexts_B, "tasks": plan.tasks, "blocks": plan.blocks_T,
            "slots": plan.slots_T,
        }  # fmt: skip
        sizes = {
            "rows": rows, "hidden": hidden, "num_tasks": len(plan.tasks), "heads": heads, "kv_heads": kv_heads,
            "block_size": pool.spec.block_size, "d": head_dim, "threads": threads,
            "attention_scratch_bytes": attention_bytes, "eps": self.config.rms_norm_eps, "scale": head_dim**-0.5,
        }  # fmt: skip
        fields = {name: address(place) for name, place in places.items()} | sizes
        assert fields.keys() == _STEP_FIELDS, fields.keys() ^ _STEP_FIELDS  # or one would be an old step's
        for name, value in fields.items():
            setattr(self._step, name, value)
        self._alive = (places, plan)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token for each row of the last layer's output -> [B, V], in a reused buffer."""
        return self.output(self._norm(x_BE.contiguous(), self.final_norm))

    def _norm(self, x_TE: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out_TE = self._workspace.take("norm", *x_TE.shape)
        self._kernels.rms_norm(x_TE, weight, out_TE, self.config.rms_norm_eps)
        return out_TE
