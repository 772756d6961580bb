"""The decoder of engine/models/decoder.py for bfloat16 on a CPU: fewer and larger operations, on packed matrices.

Query, key and value are one product, gate and up another with the activation inside it; norms, rotation and residuals
are done in place. It rounds where the plain decoder rounds; only the order of long sums differs.
Shape suffixes as in engine/types.py; X the width of query, key and value together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.kv_pool import KvPool
from engine.model_config import ModelConfig
from engine.models import weights
from engine.models.products import LOGITS, GatedProduct, NativeGated, NativeProduct, Packing, Product
from engine.models.rotary import attention_factor, rotary_angles, rotary_frequencies
from engine.native.kernels import HEAD_DIM_MAX, AttentionPlan, Ends, Kernels, Opening, Workspace
from engine.native.layer import Layers, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Product
    norms: tuple[torch.Tensor, torch.Tensor] | None
    o: Product
    post_attention_norm: torch.Tensor
    gate_up: GatedProduct
    down: Product


def supports(config: ModelConfig) -> bool:
    """Whether kernels.c takes heads of this size."""
    return config.head_dim % 2 == 0 and config.head_dim <= HEAD_DIM_MAX


class NativeDecoder:
    """Weights and what happens between the attentions. Used by one thread at a time: it keeps buffers and tables."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        kernels: Kernels,
        packing: Packing,
        workspace: Workspace,
    ) -> None:
        """Takes the tensors of `weights.weight_shapes(config)`, bfloat16, and copies the matrices."""
        assert supports(config), config.head_dim
        self.config = config
        self._kernels = kernels
        self._packing = packing
        self._workspace = workspace
        self._embedding_VE = tensors[weights.EMBEDDING]
        self._final_norm = tensors[weights.FINAL_NORM]
        head_VE = self._embedding_VE if config.tie_word_embeddings else tensors[weights.LM_HEAD]
        self._lm_head = packing.product(LOGITS, head_VE, None)
        self._layers = tuple(self._layer(tensors, weights.layer_prefix(i)) for i in range(config.num_layers))
        self._whole = self._in_two_calls()
        self._frequencies = rotary_frequencies(config.rope, config.head_dim)
        self._rope_factor = attention_factor(config.rope)
        self._cosines = self._sines = torch.empty(0, config.head_dim // 2, dtype=torch.bfloat16)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Token ids -> [T, E], what goes into layer 0; changed in place by the layers."""
        return F.embedding(tokens_T, self._embedding_VE)

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary cosines and sines of a batch, [T, D/2] each, the same for all layers. Looked up, once computed."""
        end = int(positions_T.max()) + 1
        if end > len(self._cosines):
            known = torch.arange(min(2 * end, max(end, self.config.context_len_max)))
            both = rotary_angles(known, self._frequencies, factor=self._rope_factor, dtype=torch.bfloat16)
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
        """The last layer's output -> [T, E], or that of the rows of `ends` alone -> [W, E]. Overwrites `x_TE`.

        `layer_done`: the keys and values of a layer are in the pool.
        """
        angles, whole = self.angles(positions_T), self._whole
        if whole is None:
            return self._run_parts(x_TE, angles, plan, pool, layer_done, ends)
        whole.begin(x_TE, angles, plan, pool.kv_LN2KSD[0])
        if layer_done is None and ends is None:
            whole.run(pool.kv_LN2KSD)
            return x_TE
        last = len(self._layers) - 1
        for layer, region in enumerate(pool.kv_LN2KSD):
            cut = layer == last and ends is not None
            whole.open(layer, region, Opening.RECORDS if cut else Opening.WHOLE)
            if layer_done is not None:
                layer_done(layer)
            if not cut:
                whole.close(layer, region)
        return x_TE if ends is None else self._end(whole, x_TE, angles, pool, ends)

    def _end(
        self, whole: Layers, x_TE: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], pool: KvPool, ends: Ends
    ) -> torch.Tensor:
        """The last layer of some rows, its keys and values being in the pool."""
        last, rows_W = len(self._layers) - 1, ends.rows_W
        cosines, sines = (part.index_select(0, rows_W) for part in angles)
        x_WE, region = x_TE.index_select(0, rows_W), pool.kv_LN2KSD[last]
        if len(x_WE):
            whole.begin(x_WE, (cosines, sines), ends.plan, region)
            whole.open(last, region, Opening.QUERIES)
            whole.close(last, region)
        return x_WE

    def _run_parts(
        self,
        x_TE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        pool: KvPool,
        layer_done: Callable[[int], None] | None,
        ends: Ends | None,
    ) -> torch.Tensor:
        """As `run_layers`, where the products are not those of kernels.c: a call for each part."""
        kernels, config = self._kernels, self.config
        attention_TX = self._workspace.take("attended", len(x_TE), config.num_heads * config.head_dim)
        for layer, w in enumerate(self._layers):
            region = pool.kv_LN2KSD[layer]
            qkv_TX = w.qkv(self._norm(x_TE, w.input_norm))
            kernels.rotate_store(qkv_TX, w.norms, angles, region, plan, config.rms_norm_eps)
            if layer_done is not None:
                layer_done(layer)
            if ends is not None and w is self._layers[-1]:
                x_TE, qkv_TX = (each.index_select(0, ends.rows_W) for each in (x_TE, qkv_TX))
                attention_TX, plan = attention_TX[: len(x_TE)], ends.plan
                if not len(x_TE):
                    break
            kernels.attention(qkv_TX, region, plan, attention_TX, self._workspace)
            w.o.add_to(attention_TX, x_TE)
            w.down.add_to(w.gate_up(self._norm(x_TE, w.post_attention_norm)), x_TE)
        return x_TE

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after each of the given rows of the last layer's output -> [B, V], a buffer."""
        return self._lm_head(self._norm(x_BE.contiguous(), self._final_norm))

    def _norm(self, x_TE: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out_TE = self._workspace.take("norm", *x_TE.shape)
        self._kernels.rms_norm(x_TE, weight, out_TE, self.config.rms_norm_eps)
        return out_TE

    def _in_two_calls(self) -> Layers | None:
        """None: the products are not those of kernels.c."""
        found = []
        for each in self._layers:
            qkv, o, gate_up, down = each.qkv, each.o, each.gate_up, each.down
            if not (isinstance(qkv, NativeProduct) and isinstance(o, NativeProduct)):
                return None
            assert isinstance(gate_up, NativeGated) and isinstance(down, NativeProduct)
            found.append(
                LayerWeights(
                    input_norm=each.input_norm,
                    norms=each.norms,
                    attended_norm=each.post_attention_norm,
                    qkv=qkv.operand,
                    o=o.operand,
                    gate_up=gate_up.operand,
                    down=down.operand,
                )
            )
        config = self.config
        return Layers(
            found, kernels=self._kernels, workspace=self._workspace, heads=config.num_heads, eps=config.rms_norm_eps
        )

    def _layer(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> _Layer:
        def weight(name: str) -> torch.Tensor:
            return tensors[f"{prefix}{name}.weight"]

        def bias(name: str) -> torch.Tensor | None:
            return tensors.get(f"{prefix}{name}.bias")

        def joined(*names: str) -> tuple[torch.Tensor, torch.Tensor | None]:
            biases = [found for name in names if (found := bias(name)) is not None]
            assert len(biases) in (0, len(names)), names
            return torch.cat([weight(name) for name in names]), torch.cat(biases) if biases else None

        gate_bias, up_bias = bias("mlp.gate_proj"), bias("mlp.up_proj")
        q_norm, k_norm = (tensors.get(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
        return _Layer(
            input_norm=weight("input_layernorm"),
            qkv=self._packing.product("qkv", *joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
            o=self._packing.product("o", weight("self_attn.o_proj"), bias("self_attn.o_proj")),
            post_attention_norm=weight("post_attention_layernorm"),
            gate_up=self._packing.gated(
                weight("mlp.gate_proj"),
                weight("mlp.up_proj"),
                None if gate_bias is None or up_bias is None else (gate_bias, up_bias),
            ),
            down=self._packing.product("down", weight("mlp.down_proj"), bias("mlp.down_proj")),
        )
