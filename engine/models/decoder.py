"""One decoder for Llama, Mistral, Qwen2 and Qwen3: they differ only in biases and in the norm of queries and keys.

Shape suffixes as in engine/types.py; X the width of some heads. The batch is flat: tokens of all sequences one after
another, [T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model_config import ModelConfig
from engine.models import weights
from engine.models.layers import Affine, Affines, Linear, Linears, Norm, PlainLinears, rms_norm, swiglu
from engine.models.rotary import attention_factor, rotary_angles, rotary_frequencies, rotate

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_THD, k_TKD, v_TKD) -> out_THD: keeps K and V of the new tokens and attends over all tokens so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Affines
    o: Affine
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor
    gate_up: Affines
    down: Affine


class Decoder:
    """A model's weights and its forward pass, layer by layer, so that the caller can act between layers.

    Not changed after construction; any thread may use it, inside `torch.inference_mode`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        linears: Linears | None = None,
        norm: Norm = rms_norm,
    ) -> None:
        """Takes the tensors of `weights.weight_shapes(config)`, all on one device, without copying them.

        `linears` may keep the layers' matrices otherwise, and may be given them on another device. The output
        projection stays as it is.
        """
        self.config = config
        self.norm = norm
        linears = linears or PlainLinears()
        self.embedding_VE = tensors[weights.EMBEDDING]
        self.final_norm = tensors[weights.FINAL_NORM]
        self.lm_head_VE = self.embedding_VE if config.tie_word_embeddings else tensors[weights.LM_HEAD]
        prefixes = map(weights.layer_prefix, range(config.num_layers))
        self.layers = tuple(_layer(tensors, prefix, linears) for prefix in prefixes)
        self.frequencies = rotary_frequencies(config.rope, config.head_dim).to(self.embedding_VE.device)
        self.rope_factor = attention_factor(config.rope)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Token ids -> [T, E], what goes into layer 0."""
        return F.embedding(tokens_T, self.embedding_VE)

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary cosines and sines of a batch, the same for all layers."""
        return rotary_angles(positions_T, self.frequencies, factor=self.rope_factor, dtype=self.embedding_VE.dtype)

    def run_layer(
        self,
        layer: int,
        x_TE: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        attend: Attend,
        rows_W: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer `layer` of the pre-norm transformer -> [T, E]. Calls `attend` once.

        Without `angles`, `attend` gets queries and keys that are not turned yet: it does that itself. With `rows_W` it
        answers for these rows alone, and the result is theirs, [W, E]; there may be none.
        """
        w, eps = self.layers[layer], self.config.rms_norm_eps
        num_tokens, head_dim = x_TE.shape[0], self.config.head_dim

        normed_TE = self.norm(x_TE, w.input_norm, eps)
        q_TX, k_TX, v_TX = w.qkv(normed_TE)
        q_THD = q_TX.view(num_tokens, self.config.num_heads, head_dim)
        k_TKD = k_TX.view(num_tokens, self.config.num_kv_heads, head_dim)
        v_TKD = v_TX.view(num_tokens, self.config.num_kv_heads, head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q_THD, k_TKD = self.norm(q_THD, w.q_norm, eps), self.norm(k_TKD, w.k_norm, eps)
        if angles is not None:
            q_THD, k_TKD = rotate(q_THD, *angles), rotate(k_TKD, *angles)
        out_THD = attend(q_THD, k_TKD, v_TKD)
        if rows_W is not None:
            x_TE = x_TE[rows_W]
            if not len(x_TE):
                return x_TE
        x_TE = x_TE + w.o(out_THD.flatten(1))

        return x_TE + swiglu(self.norm(x_TE, w.post_attention_norm, eps), w.gate_up, w.down)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after each of the given rows of the last layer's output -> [B, V]."""
        return F.linear(self.norm(x_BE, self.final_norm, self.config.rms_norm_eps), self.lm_head_VE)


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str, linears: Linears) -> _Layer:
    def linear(name: str) -> Linear:
        return Linear(weight=tensors[f"{prefix}{name}.weight"], bias=tensors.get(f"{prefix}{name}.bias"))

    return _Layer(
        input_norm=tensors[f"{prefix}input_layernorm.weight"],
        qkv=linears.joined([linear(f"self_attn.{name}_proj") for name in "qkv"]),
        o=linears.one(linear("self_attn.o_proj")),
        q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
        post_attention_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate_up=linears.joined([linear("mlp.gate_proj"), linear("mlp.up_proj")]),
        down=linears.one(linear("mlp.down_proj")),
    )
