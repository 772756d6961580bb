"""A model's shapes and tensors, read from `config.json` and `generation_config.json`, and its folder. Imports no torch,
as the router reads it too.

Configs describe the rotary position embedding in two ways: `rope_theta` with `rope_scaling` (transformers before 5), or
`rope_parameters` (transformers 5). The `dynamic` scaling begins beyond the stated context (`max_position_embeddings`),
which is never exceeded here, so it is the plain embedding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final


class ModelError(Exception):
    """A model cannot be used; the message names the file or key and what to do."""


class ModelFolderError(ModelError):
    """There is no such model: no folder of that name, and nothing on the hub."""


class ConfigFileError(ModelError):
    """A config file is missing, is not JSON, lacks a key or has a value of the wrong kind."""


class UnsupportedModelError(ModelError):
    """The model is well formed but needs something that is not implemented."""


class Keys:
    """Reads typed values out of one JSON object; a wrong one is a ConfigFileError that names file and key.

    A key that is absent or null gets the default; without a default that is an error.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, key: str, kind: type | tuple[type, ...], what: str, default: object) -> Any:
        """A value of this kind, which `what` describes. A bool is no number."""
        value = self.values.get(key)
        if value is None and default is None:
            raise ConfigFileError(f"{self.source}: key {key} is missing")
        value = default if value is None else value
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(key, what, value)
        return value

    def wrong(self, key: str, what: str, value: object) -> ConfigFileError:
        return ConfigFileError(f"{self.source}: {key} must be {what}, found {value!r}")

    def integer(self, key: str, *, default: int | None = None, low: int = 1) -> int:
        what = "a positive integer" if low == 1 else f"an integer of {low} or more"
        value: int = self.get(key, int, what, default)
        if value < low:
            raise self.wrong(key, what, value)
        if value > SIZES_MAX.get(key, value):
            raise self.wrong(key, f"at most {SIZES_MAX[key]}", value)
        return value

    def optional_float(self, key: str) -> float | None:
        """A positive number, or None where the key is absent, null or 0."""
        return self.positive_float(key) if self.values.get(key) not in (None, 0) else None

    def positive_float(self, key: str, *, default: float | None = None) -> float:
        value = self.get(key, (int, float), "a positive number", default)
        if not 0 < value < math.inf:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def number(self, key: str, *, default: float, high: float, above_zero: bool = False) -> float:
        """From 0 to `high`; with `above_zero` not 0 itself."""
        what = f"a number {'above' if above_zero else 'from'} 0 {'and at most' if above_zero else 'to'} {high:g}"
        value = self.get(key, (int, float), what, default)
        if not 0 <= value <= high or (above_zero and value == 0):
            raise self.wrong(key, what, value)
        return float(value)

    def flag(self, key: str, *, default: bool = False) -> bool:
        value: bool = self.get(key, bool, "true or false", default)
        return value

    def section(self, key: str) -> dict[str, Any]:
        """The object under a key; empty where it is absent."""
        return dict(self.get(key, dict, "an object", {}))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises ConfigFileError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigFileError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigFileError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


ROPE_THETA_DEFAULT = 10_000.0
"""Base of the rotary frequencies in configs from before the key existed."""
YARN_BETA_FAST_DEFAULT = 32.0
YARN_BETA_SLOW_DEFAULT = 1.0


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
class LinearScaling:
    """All frequencies divided by `factor` (`rope_type: linear`; Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp over the dimensions between (`rope_type: yarn`;
    Peng et al. 2023).
    """

    factor: float
    original_context_len: int
    beta_fast: float
    """Turns within the original context above which a frequency is kept."""
    beta_slow: float
    """Turns below which it is divided."""
    truncate: bool
    """The ends of the ramp are whole dimensions."""
    attention_factor: float
    """Queries and keys are both scaled by this."""

    def __post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ConfigFileError(f"rope scaling yarn needs beta_fast >= beta_slow; found {self}")


Scaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head dimension."""

    theta: float
    scaling: Scaling | None = None


def parse_rope(keys: Keys, context_len_max: int) -> RopeConfig:
    """Both ways give one object of settings, with `rope_theta` inside or beside it. If both are there they must agree,
    as either may be what the model was trained with.

    Raises ConfigFileError, UnsupportedModelError.
    """
    sections = [(f"{keys.source}: {name}", keys.section(name)) for name in ("rope_parameters", "rope_scaling")]
    theta = keys.positive_float("rope_theta", default=ROPE_THETA_DEFAULT)
    ropes = []
    for where, settings in [each for each in sections if each[1]] or sections[-1:]:
        rope = Keys(settings, where)
        theta = rope.positive_float("rope_theta", default=theta)
        nested = [key for key, value in settings.items() if isinstance(value, dict)]
        partial = settings.get("partial_rotary_factor", keys.values.get("partial_rotary_factor"))
        if nested or partial not in (None, 1, 1.0):
            what = f"a setting per layer type ({', '.join(nested)})" if nested else f"partial_rotary_factor {partial}"
            raise UnsupportedModelError(f"{where}: {what} is not supported; one setting over the whole head is")
        ropes.append(RopeConfig(theta=theta, scaling=_scaling(rope, keys, context_len_max)))
    if ropes[0] != ropes[-1]:
        raise UnsupportedModelError(
            f"{keys.source}: rope_parameters and rope_scaling are both there and differ; remove the wrong one"
        )
    return ropes[0]


def _scaling(rope: Keys, keys: Keys, context_len_max: int) -> Scaling | None:
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type == "dynamic":
        rope.positive_float("factor")
        return None
    if rope_type == "linear":
        return LinearScaling(factor=rope.positive_float("factor"))
    # Where both are there, transformers takes the one outside.
    inner = rope.integer("original_max_position_embeddings", default=context_len_max)
    original_context_len = keys.integer("original_max_position_embeddings", default=inner)
    if rope_type == "llama3":
        return Llama3Scaling(
            factor=rope.positive_float("factor"),
            low_freq_factor=rope.positive_float("low_freq_factor"),
            high_freq_factor=rope.positive_float("high_freq_factor"),
            original_context_len=original_context_len,
        )
    if rope_type == "yarn":
        factor = rope.positive_float("factor", default=context_len_max / original_context_len)
        return YarnScaling(
            factor=factor,
            original_context_len=original_context_len,
            beta_fast=rope.optional_float("beta_fast") or YARN_BETA_FAST_DEFAULT,
            beta_slow=rope.optional_float("beta_slow") or YARN_BETA_SLOW_DEFAULT,
            truncate=rope.flag("truncate", default=True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    raise UnsupportedModelError(
        f"{rope.source}: rope type {rope_type!r} is not supported; supported are default, linear, dynamic, llama3, yarn"
    )


def _yarn_attention_factor(rope: Keys, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.positive_float("attention_factor")
    mscale, mscale_all_dim = rope.optional_float("mscale"), rope.optional_float("mscale_all_dim")
    if mscale is not None and mscale_all_dim is not None:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


GENERATION_CONFIG: Final = "generation_config.json"
TEMPERATURE_MAX: Final = 100.0
REPETITION_PENALTY_MAX: Final = 100.0
MISTRAL_WINDOW_DEFAULT = 4096
"""Sliding window of a Mistral config that lacks the key; null means that there is none."""
MAX_WINDOW_LAYERS_DEFAULT = 28
"""Qwen: layers from this one on slide, where a window is in use and the key is missing."""

SIZES_MAX: Final[Mapping[str, int]] = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
}
"""By key of config.json, about eight times the largest models' sizes: a larger one is an error in the file, and would
take endless memory and time."""


class ModelFamily(Enum):
    """Architectures that can be run; the value is `architectures[0]` of config.json."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"  # Qwen2.5 too
    QWEN3 = "Qwen3ForCausalLM"


class Quantisation(Enum):
    """How matrices are rounded when they are loaded; KV cache and activations stay bfloat16.

    Which of them a device has: `engine.build.QUANTISATIONS`. The output projection is never below 8 bits.
    """

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"
    FP8 = "fp8"  # the inputs of each product as well

    @property
    def bits(self) -> int:
        return {Quantisation.NONE: 16, Quantisation.INT4: 4}.get(self, 8)


class ComputeDtype(Enum):
    """Type of weights, activations and KV cache."""

    AUTO = "auto"  # bfloat16 where the config says that the weights are, else float32
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def resolve(self, stored_dtype: str) -> ComputeDtype:
        """FLOAT32 or BFLOAT16, for a checkpoint whose config says `stored_dtype` (float32 for float16)."""
        if self is not ComputeDtype.AUTO:
            return self
        return ComputeDtype.BFLOAT16 if stored_dtype == "bfloat16" else ComputeDtype.FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that defines a model but its weights."""

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
    """q, k and v projections have a bias."""
    output_bias: bool
    """The o projection has a bias."""
    mlp_bias: bool
    """gate, up and down projections have a bias."""
    tie_word_embeddings: bool
    """The output projection is the embedding matrix."""
    context_len_max: int
    """Tokens of prompt and answer together."""
    eos_token_ids: frozenset[int]
    stored_dtype: str
    """Type of the weights by the config ("bfloat16", "float32", ...); empty if not stated."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling values for requests without. The neutral defaults here leave the model's scores unchanged."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Those that `generation_config.json` states; a key that is absent or null, or a missing file, is neutral.

    Raises ConfigFileError: the file cannot be read, or a value is no number or out of a client's range.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return SamplingDefaults()
    keys = Keys(read_json(path), str(path))
    top_k = 0 if keys.values.get("top_k") == -1 else keys.integer("top_k", default=0, low=0)  # some write -1 for "off"
    return SamplingDefaults(
        temperature=keys.number("temperature", default=1.0, high=TEMPERATURE_MAX),
        top_k=top_k,
        top_p=keys.number("top_p", default=1.0, high=1.0, above_zero=True),
        min_p=keys.number("min_p", default=0.0, high=1.0),
        repetition_penalty=keys.number("repetition_penalty", default=1.0, high=REPETITION_PENALTY_MAX, above_zero=True),
    )


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
    config = read_json(path)
    generation_path = folder / GENERATION_CONFIG
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(config, source=str(path), generation=generation)


def parse_model_config(config: Mapping[str, Any], *, source: str, generation: Mapping[str, Any]) -> ModelConfig:
    """Turn the contents of config.json and generation_config.json into a ModelConfig; `source` is named in errors.

    The end-of-sequence ids of generation_config.json win over those of config.json, as in transformers' `generate`.

    Raises:
        ConfigFileError, UnsupportedModelError: as `load_model_config`.
    """
    keys = Keys(config, source)
    family = _family(keys)
    context_len_max = keys.integer("max_position_embeddings")
    _refuse_unsupported(keys)
    _refuse_window(keys, family, context_len_max)
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    # Llama checkpoints from before grouped queries and free head sizes lack these two keys; Qwen3's always have them.
    derived_head_dim = None if family is ModelFamily.QWEN3 else hidden_size // num_heads
    head_dim = keys.integer("head_dim", default=derived_head_dim)
    default_kv_heads = num_heads if family is ModelFamily.LLAMA else None
    # Fixed by the architecture in Qwen2 and Mistral, a setting elsewhere.
    biased = family in (ModelFamily.LLAMA, ModelFamily.QWEN3) and keys.flag("attention_bias")
    eos_source = generation if generation.get("eos_token_id") is not None else config
    return ModelConfig(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=default_kv_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.positive_float("rms_norm_eps"),
        rope=parse_rope(keys, context_len_max),
        attention_bias=biased or family is ModelFamily.QWEN2,
        output_bias=biased,
        mlp_bias=keys.flag("mlp_bias") and family is ModelFamily.LLAMA,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        context_len_max=context_len_max,
        eos_token_ids=_eos_token_ids(eos_source, source),
        stored_dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
    )


def _family(keys: Keys) -> ModelFamily:
    names = keys.values.get("architectures")
    supported = ", ".join(family.value for family in ModelFamily)
    if not isinstance(names, list) or not names:
        raise ConfigFileError(f"{keys.source}: key architectures is missing; supported are {supported}")
    if names[0] not in [family.value for family in ModelFamily]:
        raise UnsupportedModelError(
            f"{keys.source}: architecture {names[0]!r} is not supported; supported are {supported}"
        )
    return ModelFamily(names[0])


def _refuse_unsupported(keys: Keys) -> None:
    activation = keys.values.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModelError(f"{keys.source}: hidden_act {activation!r} is not supported, only 'silu'")
    for key in ("quantization_config", "compression_config"):
        if keys.values.get(key):
            raise UnsupportedModelError(
                f"{keys.source}: the checkpoint is quantised ({key}); use the unquantised checkpoint of this model"
            )


def _refuse_window(keys: Keys, family: ModelFamily, context_len_max: int) -> None:
    """Refuse layers that do not attend over the whole context. A window as long as the context is no limit."""
    window = _window_in_use(keys, family)
    layer_types = keys.values.get("layer_types")
    if layer_types is None:
        num_layers = keys.integer("num_hidden_layers")
        full_layers = 0
        if family in (ModelFamily.QWEN2, ModelFamily.QWEN3):
            full_layers = keys.integer("max_window_layers", default=MAX_WINDOW_LAYERS_DEFAULT, low=0)
        layer_types = ["sliding_attention"] if window is not None and full_layers < num_layers else []
    if not isinstance(layer_types, list):
        raise ConfigFileError(f"{keys.source}: layer_types must be a list, found {layer_types!r}")
    if family is ModelFamily.MISTRAL and window is not None:
        layer_types = [*layer_types, "sliding_attention"]  # whatever the list says, the window counts in every layer
    harmless = {"full_attention"}
    if window is not None and window >= context_len_max:
        harmless.add("sliding_attention")
    other = sorted({str(name) for name in layer_types} - harmless)
    if other:
        size = f" (sliding_window {window}, max_position_embeddings {context_len_max})" if window is not None else ""
        raise UnsupportedModelError(
            f"{keys.source}: layers use {', '.join(other)}{size}; only attention over the whole context is supported"
        )


def _window_in_use(keys: Keys, family: ModelFamily) -> int | None:
    if family is ModelFamily.MISTRAL:
        if "sliding_window" in keys.values and keys.values["sliding_window"] is None:
            return None
        return keys.integer("sliding_window", default=MISTRAL_WINDOW_DEFAULT)
    if not keys.flag("use_sliding_window") or keys.values.get("sliding_window") is None:
        return None
    return keys.integer("sliding_window")


def _eos_token_ids(values: Mapping[str, Any], source: str) -> frozenset[int]:
    eos = values.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigFileError(f"{source}: eos_token_id must be a token id or a list of them, found {eos!r}")
    return frozenset(ids)


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


def layer_prefix(layer: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"model.layers.{layer}."


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model reads, by its Hugging Face name, in the order of computation. Matrices: [out, in]."""
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


def resolve_model(name_or_folder: str, *, weights: bool = True, download: Callable[[str], str] | None = None) -> Path:
    """The folder of a model given by folder, or by its hub name when there is no such folder.

    A hub model is downloaded into the hub's own cache, or found there; without `weights`, its small files only. Blocks
    meanwhile. `download` replaces the hub.

    Raises:
        ModelFolderError: neither a folder nor a model that the hub gives out; says what was tried. Or a folder that
            this user may not read.
    """
    folder = Path(name_or_folder).expanduser()
    try:
        if folder.is_dir():
            next(folder.iterdir(), None)
            (folder / "config.json").exists()  # listing a folder is one right, looking into it another
            return folder
        if folder.exists():
            raise ModelFolderError(f"{folder} is a file; name the folder that holds config.json")
    except OSError as error:
        raise ModelFolderError(
            f"the model folder {folder} cannot be read: {error.strerror}; the user that this process runs as needs the "
            "right to read it and to enter it and the folders above"
        ) from error
    owner, _, rest = name_or_folder.partition("/")
    if not owner or owner[0] in ".~" or not rest or "/" in rest:
        raise ModelFolderError(
            f"there is no folder {folder}, and {name_or_folder!r} has not the form of a hub name (owner/model); "
            "give an existing folder or a hub name"
        )
    # Imported here: the library takes a third of a second to load, and most models are folders.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # its HTTP library's, which it also raises

    try:
        return Path(download(name_or_folder) if download else _download(name_or_folder, weights))
    except (OSError, ValueError, HTTPError) as error:
        raise ModelFolderError(
            f"there is no folder {folder}, and the hub gave no model {name_or_folder!r}: {error}; check the name, "
            "the network and your access to the model, or download it and name its folder"
        ) from error


def _download(name: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"] if weights else ["*.json", "*.jinja"])
