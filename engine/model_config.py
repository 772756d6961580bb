"""What a model is, read from `config.json` and `generation_config.json`. Imports no torch: the router reads it too.

Two spellings of the rotary settings are understood: `rope_theta` with `rope_scaling` (transformers before 5), and
`rope_parameters` (transformers 5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ROPE_THETA_DEFAULT = 10_000.0
"""Base of the rotary frequencies where a config is silent: checkpoints from before the key existed mean this."""


class ModelError(Exception):
    """A model cannot be used; the message names the file or key and what to do. Base of all errors about models."""


class ModelFolderError(ModelError):
    """There is no such model: no folder of that name, and nothing on the hub."""


class ConfigFileError(ModelError):
    """A config file is missing, is not JSON, lacks a key or has a value of the wrong kind."""


class UnsupportedModelError(ModelError):
    """The model is well formed but asks for something that is not implemented."""


class UnsupportedArchitectureError(UnsupportedModelError):
    pass


class UnsupportedActivationError(UnsupportedModelError):
    pass


class UnsupportedAttentionError(UnsupportedModelError):
    """Some layer attends otherwise than over the whole context: a sliding window, chunks, a recurrent state."""


class UnsupportedRopeError(UnsupportedModelError):
    pass


class QuantisedCheckpointError(UnsupportedModelError):
    pass


class ModelFamily(Enum):
    """Architectures that can be run; the value is `architectures[0]` of config.json."""

    LLAMA = "LlamaForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Stretching of the low rotary frequencies as in Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_context_len > 0):
            raise ConfigFileError(
                "rope scaling llama3 needs factor > 0, 0 < low_freq_factor < high_freq_factor and "
                f"original_max_position_embeddings > 0; found {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head dimension."""

    theta: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that defines a model besides its weights."""

    family: ModelFamily
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    """q, k, v and o projections have a bias."""
    mlp_bias: bool
    """gate, up and down projections have a bias."""
    tie_word_embeddings: bool
    """The output projection is the embedding matrix."""
    context_len_max: int
    """Tokens of prompt and answer together."""
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise ConfigFileError(
                f"num_attention_heads {self.num_heads} is no multiple of num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2 != 0:
            raise ConfigFileError(f"head_dim {self.head_dim} is odd: rotary embedding turns pairs of dimensions")

    @property
    def qk_norm(self) -> bool:
        """Queries and keys are RMS-normalised per head before the rotary embedding."""
        return self.family is ModelFamily.QWEN3


def load_model_config(folder: Path) -> ModelConfig:
    """Read the model config of a checkpoint folder.

    Raises:
        ModelFolderError: there is no such folder.
        ConfigFileError: config.json or generation_config.json is missing or malformed (the latter may be absent).
        UnsupportedModelError: one of its subclasses, for a model that cannot be run.
    """
    if not folder.is_dir():
        raise ModelFolderError(f"model folder {folder} does not exist or is no folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigFileError(f"{path} is missing: is {folder} a Hugging Face model folder?")
    config = _read_json(path)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(config, source=str(path), generation=generation)


def parse_model_config(config: Mapping[str, Any], *, source: str, generation: Mapping[str, Any]) -> ModelConfig:
    """Turn the contents of config.json and generation_config.json into a ModelConfig; `source` is named in errors.

    The end-of-sequence ids of generation_config.json win over those of config.json, as in transformers' `generate`.

    Raises:
        ConfigFileError, UnsupportedModelError: as `load_model_config`.
    """
    keys = _Keys(config, source)
    family = _family(keys)
    _refuse_unsupported(keys)
    num_heads = keys.positive_int("num_attention_heads")
    hidden_size = keys.positive_int("hidden_size")
    # Llama checkpoints from before grouped queries and free head sizes lack these two keys; Qwen3's always have them.
    old_llama = family is ModelFamily.LLAMA
    head_dim = keys.positive_int("head_dim", default=hidden_size // num_heads if old_llama else None)
    context_len_max = keys.positive_int("max_position_embeddings")
    eos_source = generation if generation.get("eos_token_id") is not None else config
    return ModelConfig(
        family=family,
        vocab_size=keys.positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.positive_int("intermediate_size"),
        num_layers=keys.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.positive_int("num_key_value_heads", default=num_heads if old_llama else None),
        head_dim=head_dim,
        rms_norm_eps=keys.positive_float("rms_norm_eps"),
        rope=_rope(keys, context_len_max),
        attention_bias=keys.flag("attention_bias"),
        mlp_bias=keys.flag("mlp_bias") and family is ModelFamily.LLAMA,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        context_len_max=context_len_max,
        eos_token_ids=_eos_token_ids(eos_source, source),
    )


class _Keys:
    """Reads typed values out of one JSON object; a wrong one is an error that names file and key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def positive_int(self, key: str, *, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ConfigFileError(f"{self.source}: {key} must be a positive integer, found {value!r}")
        return value

    def positive_float(self, key: str, *, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise ConfigFileError(f"{self.source}: {key} must be a positive number, found {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._present(key, False)
        if not isinstance(value, bool):
            raise ConfigFileError(f"{self.source}: {key} must be true or false, found {value!r}")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The object under a key that may be absent or null; empty then."""
        value: object = self._present(key, {})
        if not isinstance(value, dict):
            raise ConfigFileError(f"{self.source}: {key} must be an object, found {value!r}")
        return dict(value)

    def _present(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigFileError(f"{self.source}: key {key} is missing")
        return default


def _family(keys: _Keys) -> ModelFamily:
    names = keys.values.get("architectures")
    supported = ", ".join(family.value for family in ModelFamily)
    if not isinstance(names, list) or not names:
        raise ConfigFileError(f"{keys.source}: key architectures is missing; supported are {supported}")
    try:
        return ModelFamily(names[0])
    except ValueError:
        raise UnsupportedArchitectureError(
            f"{keys.source}: architecture {names[0]!r} is not supported; supported are {supported}"
        ) from None


def _refuse_unsupported(keys: _Keys) -> None:
    activation = keys.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedActivationError(f"{keys.source}: hidden_act {activation!r} is not supported, only 'silu'")
    for key in ("quantization_config", "compression_config"):
        if keys.values.get(key):
            raise QuantisedCheckpointError(
                f"{keys.source}: the checkpoint is quantised ({key}); use the unquantised checkpoint of this model"
            )
    layer_types = keys.values.get("layer_types")
    if layer_types is None:
        windowed = keys.flag("use_sliding_window") and keys.values.get("sliding_window") is not None
        layer_types = ["sliding_attention"] if windowed else []
    if not isinstance(layer_types, list):
        raise ConfigFileError(f"{keys.source}: layer_types must be a list, found {layer_types!r}")
    other = sorted({str(name) for name in layer_types} - {"full_attention"})
    if other:
        raise UnsupportedAttentionError(
            f"{keys.source}: layers use {', '.join(other)}; only attention over the whole context is supported"
        )


def _rope(keys: _Keys, context_len_max: int) -> RopeConfig:
    """Both spellings come down to one object of settings, with `rope_theta` inside it or beside it."""
    settings = keys.section("rope_parameters") or keys.section("rope_scaling")
    where = f"{keys.source}: rope_parameters" if keys.section("rope_parameters") else f"{keys.source}: rope_scaling"
    rope = _Keys(settings, where)
    theta_outside = keys.positive_float("rope_theta", default=ROPE_THETA_DEFAULT)
    theta = rope.positive_float("rope_theta", default=theta_outside)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    nested = [key for key, value in settings.items() if isinstance(value, dict)]
    partial = settings.get("partial_rotary_factor", keys.values.get("partial_rotary_factor"))
    if nested or partial not in (None, 1, 1.0):
        what = f"a setting per layer type ({', '.join(nested)})" if nested else f"partial_rotary_factor {partial}"
        raise UnsupportedRopeError(f"{where}: {what} is not supported; one setting over the whole head is")
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type != "llama3":
        raise UnsupportedRopeError(f"{where}: rope type {rope_type!r} is not supported, only 'default' and 'llama3'")
    return RopeConfig(
        theta=theta,
        scaling=Llama3Scaling(
            factor=rope.positive_float("factor"),
            low_freq_factor=rope.positive_float("low_freq_factor"),
            high_freq_factor=rope.positive_float("high_freq_factor"),
            original_context_len=rope.positive_int("original_max_position_embeddings", default=context_len_max),
        ),
    )


def _eos_token_ids(values: Mapping[str, Any], source: str) -> frozenset[int]:
    eos = values.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigFileError(f"{source}: eos_token_id must be a token id or a list of them, found {eos!r}")
    return frozenset(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigFileError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
