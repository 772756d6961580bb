"""Names and shapes of the tensors of a checkpoint, as Hugging Face names them. Imports no torch."""

from __future__ import annotations

from engine.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """What the names of all tensors of one layer start with."""
    return f"model.layers.{layer}."


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, in the order of computation. Matrices are [out, in]."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        shapes |= {layer_prefix(layer) + name: shape for name, shape in _layer_shapes(config).items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    attention["o_proj"] = (hidden, q_size)
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}

    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, matrix in attention.items():
        shapes[f"self_attn.{name}.weight"] = matrix
        if config.output_bias if name == "o_proj" else config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = matrix[:1]
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    for name, matrix in mlp.items():
        shapes[f"mlp.{name}.weight"] = matrix
        if config.mlp_bias:
            shapes[f"mlp.{name}.bias"] = matrix[:1]
    return shapes
