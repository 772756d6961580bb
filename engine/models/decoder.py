"""One decoder for Llama, Mistral, Qwen2 and Qwen3: they differ only in biases and in the norm of queries and keys.

Rotary position embedding: Su et al. 2021, RoFormer. Shape suffixes as in engine/types.py; X the width of some heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.model_config import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
    layer_prefix,
)
from engine.models.matmul import Linear, Matmul, Packing, PlainPacking


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair -> [D/2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(frequencies, rope.scaling, rope.theta, head_dim)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's context extension: slow frequencies divided by `factor`, fast ones kept, a linear blend between.

    `turns` counts how often a pair turns round within the context the model was first trained on.
    """
    turns = scaling.original_context_len * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(frequencies: torch.Tensor, scaling: YarnScaling, theta: float, head_dim: int) -> torch.Tensor:
    """NTK-by-parts (Peng et al. 2023, YaRN): as Llama 3.1's, but the blend is linear in the dimension."""

    def pair_that_turns(turns: float) -> float:
        """The (fractional) pair whose frequency makes so many turns within the original context."""
        return head_dim * math.log(scaling.original_context_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * stretched + frequencies * (1.0 - stretched)


def attention_factor(rope: RopeConfig) -> float:
    """The factor of cosines and sines."""
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0


def rotary_angles(
    positions_T: torch.Tensor, frequencies: torch.Tensor, *, factor: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines for `rotate`, each [T, 1, D/2] to broadcast over heads. Computed in float32, then cast."""
    angles = (positions_T[:, None].to(torch.float32) * frequencies)[:, None, :]
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pair (d, d + D/2) of each head by its angle: the half-split order of Hugging Face checkpoints."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Scale each vector of the last dimension to root mean square 1, then by `weight` (Zhang & Sennrich 2019).

    As in transformers, the first is computed in float32, the second in the type of `x`.
    """
    x32 = x.to(torch.float32)
    return (x32 * torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype) * weight


Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""`rms_norm` or `fused_rms_norm`."""


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm`, in one kernel on CUDA: rounded once, after the weight is applied."""
    return F.rms_norm(x, weight.shape, weight, eps)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_THD, k_TKD, v_TKD) -> out_THD: rotates queries and keys, stores K and V of the new tokens, and attends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer."""

    input_norm: torch.Tensor
    qkv: Matmul
    """Queries, keys and values, concatenated."""
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """Of queries and of keys, if the model has them."""
    o: Matmul
    post_attention_norm: torch.Tensor
    gated: Matmul
    """SwiGLU (Shazeer 2020): the feed-forward block is `down` of it."""
    down: Matmul

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], prefix: str, packing: Packing) -> Layer:
        def linear(name: str) -> Linear:
            return Linear(weight=tensors[f"{prefix}{name}.weight"], bias=tensors.get(f"{prefix}{name}.bias"))

        def norm(name: str) -> torch.Tensor:
            return packing.placed(tensors[f"{prefix}{name}.weight"])

        has_norms = f"{prefix}self_attn.q_norm.weight" in tensors
        return cls(
            input_norm=norm("input_layernorm"),
            qkv=packing.matmul("qkv", *[linear(f"self_attn.{name}_proj") for name in "qkv"]),
            norms=(norm("self_attn.q_norm"), norm("self_attn.k_norm")) if has_norms else None,
            o=packing.matmul("o", linear("self_attn.o_proj")),
            post_attention_norm=norm("post_attention_layernorm"),
            gated=packing.gated(linear("mlp.gate_proj"), linear("mlp.up_proj")),
            down=packing.matmul("down", linear("mlp.down_proj")),
        )


class Decoder:
    """A model's weights and its forward pass, layer by layer.

    Immutable; any thread may use it, inside `torch.inference_mode`.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        packing: Packing | None = None,
        norm: Norm = rms_norm,
    ) -> None:
        """Takes the tensors of `weight_shapes(config)`; only `packing` copies them."""
        self.config = config
        self.norm = norm
        packing = packing or PlainPacking()
        self.embedding_VE = packing.placed(tensors[EMBEDDING])
        self.final_norm = packing.placed(tensors[FINAL_NORM])
        tied = config.tie_word_embeddings
        self.output = packing.output(Linear(weight=self.embedding_VE if tied else packing.placed(tensors[LM_HEAD])))
        prefixes = map(layer_prefix, range(config.num_layers))
        self.layers = tuple(Layer.of(tensors, prefix, packing) for prefix in prefixes)
        self.frequencies = rotary_frequencies(config.rope, config.head_dim).to(self.embedding_VE.device)
        self.rope_factor = attention_factor(config.rope)

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Token ids -> [T, E], the input of layer 0."""
        return F.embedding(tokens_T, self.embedding_VE)

    def angles(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotary cosines and sines of a batch, the same for all layers."""
        return rotary_angles(positions_T, self.frequencies, factor=self.rope_factor, dtype=self.embedding_VE.dtype)

    def run_layer(
        self, layer: int, x_TE: torch.Tensor, attend: Attend, rows_W: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Layer `layer` of the pre-norm transformer -> [T, E]. Calls `attend` once.

        With `rows_W` only these rows, if any, are computed to the end -> [W, E]; `attend` returns those rows.
        """
        w, eps = self.layers[layer], self.config.rms_norm_eps
        num_tokens, head_dim = x_TE.shape[0], self.config.head_dim
        kv_size = self.config.num_kv_heads * head_dim

        normed_TE = self.norm(x_TE, w.input_norm, eps)
        widths = [self.config.num_heads * head_dim, kv_size, kv_size]
        q_TX, k_TX, v_TX = torch.split(w.qkv(normed_TE), widths, dim=-1)
        q_THD = q_TX.view(num_tokens, self.config.num_heads, head_dim)
        k_TKD = k_TX.view(num_tokens, self.config.num_kv_heads, head_dim)
        v_TKD = v_TX.view(num_tokens, self.config.num_kv_heads, head_dim)
        if w.norms is not None:
            q_THD, k_TKD = self.norm(q_THD, w.norms[0], eps), self.norm(k_TKD, w.norms[1], eps)
        out_THD = attend(q_THD, k_TKD, v_TKD)
        if rows_W is not None:
            x_TE = x_TE[rows_W]
            if not len(x_TE):
                return x_TE
        x_TE = x_TE + w.o(out_THD.flatten(1))

        return x_TE + w.down(w.gated(self.norm(x_TE, w.post_attention_norm, eps)))

    def logits(self, x_BE: torch.Tensor) -> torch.Tensor:
        """Scores of the next token for each row of the last layer's output -> [B, V]."""
        return self.output(self.norm(x_BE, self.final_norm, self.config.rms_norm_eps))
