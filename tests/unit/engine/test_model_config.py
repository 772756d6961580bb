"""Reading config.json: both spellings, the defaults, and an error with a name for everything that cannot be run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.model_config import (
    SIZES_MAX,
    ConfigFileError,
    Llama3Scaling,
    ModelError,
    ModelFamily,
    ModelFolderError,
    RopeConfig,
    SamplingDefaults,
    UnsupportedModelError,
    load_model_config,
    load_sampling_defaults,
    parse_model_config,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
QWEN3: dict[str, Any] = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SCALED = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_len=256)


def parse(config: dict[str, Any], **changes: Any) -> Any:
    return parse_model_config(config | changes, source="m/config.json", generation={})


def test_llama_is_read_with_its_defaults() -> None:
    """A Llama config without head_dim, biases, tying or rotary keys, as the oldest checkpoints are."""
    config = parse(LLAMA)
    assert config.family is ModelFamily.LLAMA
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 8, 2, 8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 1000)
    assert (config.context_len_max, config.rms_norm_eps) == (512, 1e-5)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (False, False, False)
    assert config.rope == RopeConfig(theta=10_000.0)
    assert config.eos_token_ids == frozenset({2})
    assert not config.qk_norm


def test_qwen3_is_read() -> None:
    """Qwen3 has a head size of its own, and norms on queries and keys."""
    config = parse(QWEN3, attention_bias=True, mlp_bias=True)
    assert (config.family, config.head_dim, config.qk_norm) == (ModelFamily.QWEN3, 16, True)
    assert config.tie_word_embeddings
    assert (config.attention_bias, config.mlp_bias) == (True, False)


def test_missing_kv_heads_mean_one_for_each_query_head() -> None:
    """Llama checkpoints from before grouped queries."""
    assert parse(LLAMA, num_key_value_heads=None).num_kv_heads == 8


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING}, RopeConfig(theta=5e5, scaling=SCALED)),
        ({"rope_scaling": {"type": "default"}}, RopeConfig(theta=1e4)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5} | LLAMA3_SCALING}, RopeConfig(theta=5e5, scaling=SCALED)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7}, "rope_theta": 9}, RopeConfig(theta=7)),
    ],
)
def test_both_spellings_of_the_rotary_settings(keys: dict[str, Any], rope: RopeConfig) -> None:
    """Before transformers 5: rope_theta and rope_scaling. Since: rope_parameters, which wins where both are there."""
    assert parse(LLAMA, **keys).rope == rope


@pytest.mark.parametrize(
    ("parameters", "older", "same"),
    [
        (LLAMA3_SCALING, {"type": "llama3", **{k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"}}, True),
        ({"rope_type": "default", "rope_theta": 7}, {"type": "default"}, True),
        ({"rope_type": "default"}, LLAMA3_SCALING, False),
        (LLAMA3_SCALING, LLAMA3_SCALING | {"factor": 4.0}, False),
        ({"rope_type": "default", "rope_theta": 7}, {"type": "default", "rope_theta": 8}, False),
    ],
)
def test_two_rotary_settings_must_agree(parameters: dict[str, Any], older: dict[str, Any], same: bool) -> None:
    """Both keys are there: the same said twice is read, two different settings are refused."""
    both = {"rope_parameters": parameters, "rope_scaling": older}
    if same:
        assert parse(LLAMA, **both).rope == parse(LLAMA, rope_parameters=parameters).rope
        return
    with pytest.raises(UnsupportedModelError, match="rope_parameters and rope_scaling are both there and differ"):
        parse(LLAMA, **both)


@pytest.mark.parametrize("key", sorted(SIZES_MAX))
def test_an_implausible_size_is_refused(key: str) -> None:
    """A size beyond its limit is an error that names key and limit; nothing is built from it first."""
    with pytest.raises(
        ConfigFileError, match=f"m/config.json: {key} must be at most {SIZES_MAX[key]}, found 1{'0' * 12}$"
    ):
        parse(QWEN3, **{key: 10**12})


def test_the_largest_sizes_are_read() -> None:
    """Each limit itself is allowed."""
    assert parse(QWEN3, **SIZES_MAX).num_layers == SIZES_MAX["num_hidden_layers"]


def test_llama3_scaling_falls_back_to_the_context() -> None:
    """Without original_max_position_embeddings the model's context stands in, as in transformers."""
    scaling = {key: value for key, value in LLAMA3_SCALING.items() if not key.startswith("original")}
    assert parse(LLAMA, rope_parameters=scaling).rope.scaling.original_context_len == 512


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [(2, None, {2}), ([2, 5], None, {2, 5}), (None, None, set()), (2, [7, 8], {7, 8}), (None, 7, {7})],
)
def test_end_of_sequence_ids(in_config: Any, in_generation: Any, expected: set[int]) -> None:
    """One id, several or none; generation_config.json has the last word."""
    config = LLAMA | {"eos_token_id": in_config}
    parsed = parse_model_config(config, source="m", generation={"eos_token_id": in_generation})
    assert parsed.eos_token_ids == expected


@pytest.mark.parametrize("key", [key for key in LLAMA if key not in ("hidden_act", "eos_token_id")])
def test_a_missing_key_is_named(key: str) -> None:
    """Each key without a default; Qwen3 has none for the two that old Llamas lack."""
    with pytest.raises(ConfigFileError, match=rf"m/config\.json.*{key} is missing"):
        parse({k: v for k, v in QWEN3.items() if k != key})


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (
            UnsupportedModelError,
            {"architectures": ["GPT2LMHeadModel"]},
            "LlamaForCausalLM, MistralForCausalLM, Qwen2",
        ),
        (UnsupportedModelError, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (UnsupportedModelError, {"use_sliding_window": True, "sliding_window": 64}, "sliding_attention"),
        (UnsupportedModelError, {"layer_types": ["full_attention", "chunked_attention"]}, "use chunked_attention"),
        (UnsupportedModelError, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (UnsupportedModelError, {"rope_scaling": {"type": "longrope"}}, "rope_scaling: rope type 'longrope'"),
        (UnsupportedModelError, {"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters: rope type 'mrope'"),
        (ConfigFileError, {"rope_scaling": {"type": "linear"}}, "rope_scaling: key factor is missing"),
        (ConfigFileError, {"rope_scaling": {"type": "dynamic", "factor": 0}}, "factor must be a positive number"),
        (ConfigFileError, {"rope_scaling": {"type": "yarn", "beta_fast": 1, "beta_slow": 2}}, "beta_fast >= beta_slow"),
        (ConfigFileError, {"rope_scaling": {"type": "yarn", "truncate": 1}}, "truncate must be true or false"),
        (UnsupportedModelError, {"rope_parameters": {"full_attention": {}}}, "per layer type .full_attention."),
        (UnsupportedModelError, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (ConfigFileError, {"rope_parameters": LLAMA3_SCALING | {"factor": None}}, "key factor is missing"),
        (ConfigFileError, {"rope_parameters": LLAMA3_SCALING | {"high_freq_factor": 0.5}}, "low_freq_factor < high"),
        (ConfigFileError, {"rope_parameters": 3}, "rope_parameters must be an object"),
        (ConfigFileError, {"hidden_size": "64"}, "hidden_size must be a positive integer, found '64'"),
        (ConfigFileError, {"vocab_size": 0}, "vocab_size must be a positive integer"),
        (ConfigFileError, {"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        (ConfigFileError, {"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        (ConfigFileError, {"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        (ConfigFileError, {"head_dim": 7}, "head_dim 7 is odd"),
        (ConfigFileError, {"eos_token_id": "</s>"}, "eos_token_id"),
        (ConfigFileError, {"layer_types": 3}, "layer_types must be a list"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(error: type[ModelError], changes: dict[str, Any], message: str) -> None:
    """Each error has its own type, is a ModelError, and names the key."""
    with pytest.raises(error, match=message):
        parse(LLAMA, **changes)


QWEN2: dict[str, Any] = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
MISTRAL: dict[str, Any] = LLAMA | {"architectures": ["MistralForCausalLM"]}


def test_biases_follow_the_family() -> None:
    """Qwen2 has biases on q, k and v whatever the config says, Mistral has none; elsewhere the config says."""
    for config, asked, expected in (
        (LLAMA, True, (True, True)),
        (QWEN3, True, (True, True)),
        (QWEN2, False, (True, False)),
        (MISTRAL, True, (False, False)),
    ):
        parsed = parse(config, attention_bias=asked, sliding_window=None)
        assert (parsed.attention_bias, parsed.output_bias) == expected, parsed.family
        assert not parse(config, mlp_bias=config is not LLAMA, sliding_window=None).mlp_bias


@pytest.mark.parametrize(
    ("config", "changes", "refused"),
    [
        (MISTRAL, {}, True),  # of 4096, in a longer context
        (MISTRAL, {"sliding_window": None}, False),
        (MISTRAL, {"sliding_window": 511}, True),
        (MISTRAL, {"sliding_window": 512}, False),
        (MISTRAL, {"sliding_window": 511, "layer_types": ["full_attention"] * 3}, True),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 511, "max_window_layers": 2}, True),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 511, "max_window_layers": 3}, False),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 511}, False),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0}, False),
        (QWEN2, {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, False),
        (QWEN3, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, True),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, True),
        (
            QWEN3,
            {"use_sliding_window": True, "sliding_window": 512, "layer_types": ["sliding_attention"] * 3},
            False,
        ),
    ],
)
def test_a_window_is_refused_where_it_would_hide_something(
    config: dict[str, Any], changes: dict[str, Any], refused: bool
) -> None:
    """A window of the whole context, one that is off, and one that no layer uses are fine; any other is refused."""
    context = {"max_position_embeddings": 32_768} if not changes else {}
    if not refused:
        assert parse(config, **changes).context_len_max == 512
        return
    with pytest.raises(UnsupportedModelError, match=r"layers use sliding_attention.*whole context is supported"):
        parse(config, **changes, **context)


def test_the_refusal_of_a_window_names_its_size() -> None:
    """Mistral 7B v0.1: a window of 4,096 in a context of 32,768."""
    with pytest.raises(UnsupportedModelError, match=r"sliding_window 4096, max_position_embeddings 32768"):
        parse(MISTRAL, sliding_window=4096, max_position_embeddings=32_768)


def test_a_window_that_is_switched_off_is_no_obstacle() -> None:
    """Qwen3 checkpoints carry window settings with use_sliding_window false."""
    assert parse(QWEN3, use_sliding_window=False, sliding_window=4096, max_window_layers=1).num_layers == 3
    assert parse(QWEN3, use_sliding_window=True, sliding_window=None).num_layers == 3


def test_folder_errors_name_the_file(tmp_path: Path) -> None:
    """No folder, no config.json, broken JSON, JSON nested too deep, JSON that is no object, a broken
    generation_config.json."""
    with pytest.raises(ModelFolderError, match="nowhere does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigFileError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ')
    with pytest.raises(ConfigFileError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigFileError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)
    config.write_text("[" * 100_000)
    with pytest.raises(ConfigFileError, match=r"config\.json is not valid JSON"):
        load_model_config(tmp_path)
    config.write_text("[1]")
    with pytest.raises(ConfigFileError, match="must hold a JSON object, found list"):
        load_model_config(tmp_path)
    config.write_text(json.dumps(LLAMA))
    assert load_model_config(tmp_path).eos_token_ids == frozenset({2})
    generation = tmp_path / "generation_config.json"
    generation.write_text('{"eos_token_id": [3, 4]}')
    assert load_model_config(tmp_path).eos_token_ids == frozenset({3, 4})
    generation.write_text("{")
    with pytest.raises(ConfigFileError, match=r"generation_config\.json is not valid JSON"):
        load_model_config(tmp_path)


def test_the_router_can_read_a_config_without_torch() -> None:
    """Neither the config nor the weight names nor the demo model pull torch in."""
    code = "import sys, engine.model_config, engine.demo_model; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


def test_sampling_defaults_are_what_the_file_states(tmp_path: Path) -> None:
    """The file of a released model; one with a null and -1 for off; one that states none; and no file at all."""
    path = tmp_path / "generation_config.json"
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()
    released = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    path.write_text(json.dumps({**released, "min_p": 0.1, "eos_token_id": [1, 2], "max_new_tokens": 9}))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05
    )
    path.write_text(json.dumps({"temperature": None, "top_k": -1, "top_p": 1}))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults()
    path.write_text(json.dumps({"eos_token_id": 2}))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("top_p", 0),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_sampling_defaults_that_no_client_may_have_are_refused(tmp_path: Path, key: str, value: object) -> None:
    """The error names file and key."""
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigFileError, match=rf"generation_config\.json: {key} must be"):
        load_sampling_defaults(tmp_path)
