"""One decoder for Llama, Mistral, Qwen2 and Qwen3: they differ only in biases and in the norm of queries and keys.

Shape suffixes as in engine/types.py. The batch is flat: tokens of all sequences one after another, [T].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model_config import ModelConfig
from engine.models import weights
from engine.models.layers import Linear, rms_norm, swiglu
from engine.models.rotary import attention_factor, rotary_angles, rotary_frequencies, rotate

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_THD, k_TKD, v_TKD) -> out_THD: keeps K and V of the new tokens and attends over all tokens so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    input_norm: torch.Tensor
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    post_attention_norm: torch.Tensor
    gate: Linear
    up: Linear
    down: Linear


class Decoder:
    """A model's weights and its forward pass, layer by layer, so that the caller can act between layers.

    Not changed after construction; any thread may use it, inside `torch.inference_mode`.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors of `weights.weight_shapes(config)`, all on one device, without copying them."""
        self.config = config
        self.embedding_VE = tensors[weights.EMBEDDING]
        self.final_norm = tensors[weights.FINAL_NORM]
        self.lm_head_VE = self.embedding_VE if config.tie_word_embeddings else tensors[weights.LM_HEAD]
        self.layers = tuple(_layer(tensors, weights.layer_prefix(layer)) for layer in range(config.num_layers))
        self.frequencies = rotary_frequencies(config.rope, config.head_dim).to(self.embedding_VE.device)
        self.rope_factor = attention_factor(config.rope)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Token ids -> [T, E], what goes into layer 0."""
        return F.embedding(tokens_T, self.embedding_VE)

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary cosines and sines of a batch, the same for all layers."""
        return rotary_angles(positions_T, self.frequencies, factor=self.rope_factor, dtype=self.embedding_VE.dtype)

    def run_layer(
        self, layer: int, x_TE: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None, attend: Attend
    ) -> torch.Tensor:
        """Layer `layer` of the pre-norm transformer -> [T, E]. Calls `attend` once.

        Without `angles`, `attend` gets queries and keys that are not turned yet: it does that itself.
        """
        w, eps = self.layers[layer], self.config.rms_norm_eps
        num_tokens, head_dim = x_TE.shape[0], self.config.head_dim

        normed_TE = rms_norm(x_TE, w.input_norm, eps)
        q_THD = w.q(normed_TE).view(num_tokens, self.config.num_heads, head_dim)
        k_TKD = w.k(normed_TE).view(num_tokens, self.config.num_kv_heads, head_dim)
        v_TKD = w.v(normed_TE).view(num_tokens, self.config.num_kv_heads, head_dim)
        if w.q_norm is not None and w.k_norm is not None:
            q_THD, k_TKD = rms_norm(q_THD, w.q_norm, eps), rms_norm(k_TKD, w.k_norm, eps)
        if angles is not None:
            q_THD, k_TKD = rotate(q_THD, *angles), rotate(k_TKD, *angles)
        out_THD = attend(q_THD, k_TKD, v_TKD)
        x_TE = x_TE + w.o(out_THD.reshape(num_tokens, -1))

        return x_TE + swiglu(rms_norm(x_TE, w.post_attention_norm, eps), w.gate, w.up, w.down)

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token after each of the given rows of the last layer's output -> [B, V]."""
        return F.linear(rms_norm(x_BE, self.final_norm, self.config.rms_norm_eps), self.lm_head_VE)


def _layer(tensors: Mapping[str, torch.Tensor], prefix: str) -> _Layer:
    def linear(name: str) -> Linear:
        return Linear(weight=tensors[f"{prefix}{name}.weight"], bias=tensors.get(f"{prefix}{name}.bias"))

    return _Layer(
        input_norm=tensors[f"{prefix}input_layernorm.weight"],
        q=linear("self_attn.q_proj"),
        k=linear("self_attn.k_proj"),
        v=linear("self_attn.v_proj"),
        o=linear("self_attn.o_proj"),
        q_norm=tensors.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=tensors.get(f"{prefix}self_attn.k_norm.weight"),
        post_attention_norm=tensors[f"{prefix}post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )
