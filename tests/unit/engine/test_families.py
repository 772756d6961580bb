"""Every family, rotary scaling and type against transformers: tiny random models over a region of scattered blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.build import EngineConfig, build_runner
from engine.checkpoint import INDEX_FILE
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ComputeDtype, ModelFamily, parse_model_config
from engine.models.decoder import attention_factor, rotary_frequencies
from engine.runner import TorchRunner
from engine.types import Batch, SamplingParams, SequenceSlice
from tests.support.every_row import score

BLOCK_SIZE = 4
NUM_BLOCKS = 24
CONTEXT = 96
TOLERANCE = 1e-4
"""Of the largest reference score: float32 against float32."""
TOLERANCE_BFLOAT16 = 1.1
"""Of transformers' own error in bfloat16, both errors against float32 with the same (bfloat16) weights: root mean
square over all scores of a prompt. Its size depends on the weights; here, where all are large, it is 2 to 7 per cent.
"""

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
}
THETA = {"rope_theta": 500.0}
YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": THETA | {"rope_type": "default"},
    "linear": THETA | {"rope_type": "linear", "factor": 2.5},
    "dynamic": THETA | {"rope_type": "dynamic", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_no_truncation": YARN | {"truncate": False},
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_attention_factor": YARN | {"attention_factor": 1.25},
    "yarn_mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.4},
    "yarn_whole_context": THETA | {"rope_type": "yarn", "factor": 1.5},
}
MODELS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "llama2": (transformers.LlamaConfig, {"num_key_value_heads": 6}),
    "llama3_tied": (transformers.LlamaConfig, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_biased": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_linear": (transformers.LlamaConfig, {"rope_parameters": ROPES["linear"]}),
    "llama_dynamic": (transformers.LlamaConfig, {"rope_parameters": ROPES["dynamic"]}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_tied_yarn": (transformers.Qwen2Config, {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3_tied_biased": (
        transformers.Qwen3Config,
        {"head_dim": 10, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3_yarn": (transformers.Qwen3Config, {"head_dim": 16, "rope_parameters": ROPES["yarn_mscale"]}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral_head_dim": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 10}),
    "mistral_window_of_the_context": (transformers.MistralConfig, {"sliding_window": CONTEXT}),
    "qwen2_window_of_the_context": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": CONTEXT, "max_window_layers": 1},
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers has written in several files; every weight is random, norms and biases too."""
    torch.manual_seed(3)
    kind, changes = MODELS[request.param]
    auto_model: Any = transformers.AutoModelForCausalLM
    model = auto_model.from_config(kind(**SIZES | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=2.0 / parameter.shape[1] ** 0.5)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="40KB")
    return folder


def prompt(length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(length).integers(0, 101, size=length)]


def scores(runner: TorchRunner, tokens: Sequence[int], stops: Sequence[int]) -> torch.Tensor:
    """Scores of all tokens, computed in chunks that end at `stops`, over a region full of NaN."""
    region = np.full(runner.layout.region_bytes(NUM_BLOCKS), 0xFF, dtype=np.uint8)
    runner.bind(region, NUM_BLOCKS)
    table = [BlockId(int(b)) for b in np.random.default_rng(5).permutation(NUM_BLOCKS)]
    parts = []
    for start, stop in zip([0, *stops], stops, strict=False):
        piece = SequenceSlice(
            key=RequestKey(request=RequestId("r"), attempt=Attempt(0)),
            tokens=list(tokens),
            start=start,
            stop=stop,
            block_table=table[: -(-stop // BLOCK_SIZE)],
            sample=False,
            output_index=0,
            params=SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1),
        )
        parts.append(score(runner, Batch(slices=(piece,))))
    return torch.cat(parts)


@torch.inference_mode()
def reference_scores(folder: Path, dtype: torch.dtype, tokens: Sequence[int]) -> torch.Tensor:
    auto_model: Any = transformers.AutoModelForCausalLM
    model = auto_model.from_pretrained(folder, dtype=dtype).eval()
    result: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return result


def relative_error(scores_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    return float((scores_TV.float() - expected_TV.float()).abs().max() / expected_TV.float().abs().max())


def test_scores_in_float32(folder: Path) -> None:
    """A prompt as long as the context, in uneven chunks: the scores are transformers'. The weights are in shards."""
    assert len(set(json.loads((folder / INDEX_FILE).read_text())["weight_map"].values())) > 1
    tokens = prompt(CONTEXT)
    runner = TorchRunner.load(folder, block_size=BLOCK_SIZE)
    assert runner.kv_spec.dtype == "float32"
    found = scores(runner, tokens, [1, 8, 21, 64, 65, CONTEXT])
    assert relative_error(found, reference_scores(folder, torch.float32, tokens)) < TOLERANCE


def rms_error(scores_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    return float((scores_TV.float() - expected_TV.float()).square().mean().sqrt())


def test_scores_in_bfloat16(folder: Path) -> None:
    """bfloat16 weights, arithmetic and KV: as near to float32 of the same weights as transformers' bfloat16 is."""
    tokens = prompt(CONTEXT)
    runner = TorchRunner.load(folder, block_size=BLOCK_SIZE, dtype=ComputeDtype.BFLOAT16)
    assert runner.kv_spec.dtype == "bfloat16"
    found = scores(runner, tokens, [1, 8, 21, 64, 65, CONTEXT])
    auto_model: Any = transformers.AutoModelForCausalLM
    rounded = auto_model.from_pretrained(folder, dtype=torch.bfloat16).float().eval()
    with torch.inference_mode():
        exact = rounded(torch.tensor([tokens])).logits[0]
    theirs = rms_error(reference_scores(folder, torch.bfloat16, tokens), exact)
    assert theirs < 0.1 * rms_error(exact, torch.zeros_like(exact)), "the reference itself is lost in rounding"
    assert rms_error(found, exact) < TOLERANCE_BFLOAT16 * theirs


FAMILY_CONFIGS = [
    (transformers.LlamaConfig, "LlamaForCausalLM", {}),
    (transformers.Qwen2Config, "Qwen2ForCausalLM", {}),
    (transformers.Qwen3Config, "Qwen3ForCausalLM", {"head_dim": 64}),
    (transformers.MistralConfig, "MistralForCausalLM", {"sliding_window": None, "head_dim": 32}),
]


@pytest.mark.parametrize("rope", list(ROPES))
@pytest.mark.parametrize(("kind", "architecture", "changes"), FAMILY_CONFIGS)
@pytest.mark.parametrize("outside", [False, True])
def test_rotary_frequencies(kind: Any, architecture: str, changes: dict[str, Any], rope: str, outside: bool) -> None:
    """Each scaling in each family, in both spellings: the frequencies and the factor are transformers'."""
    config = kind(**SIZES | changes | {"hidden_size": 384, "rope_parameters": dict(ROPES[rope])})
    written = config.to_dict() | {"architectures": [architecture]}
    if outside:
        settings = dict(written.pop("rope_parameters"))
        written |= {"rope_theta": settings.pop("rope_theta"), "rope_scaling": settings}
    parsed = parse_model_config(written, source="config.json", generation={})
    if ROPES[rope]["rope_type"] == "default":
        expected = 500.0 ** -(torch.arange(0, parsed.head_dim, 2) / parsed.head_dim)
        factor = 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[ROPES[rope]["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(rotary_frequencies(parsed.rope, parsed.head_dim), expected, rtol=2e-6, atol=0)
    assert attention_factor(parsed.rope) == pytest.approx(factor, rel=1e-12)


def test_auto_takes_the_type_of_the_checkpoint(tmp_path: Path) -> None:
    """EngineConfig.dtype auto: bfloat16 if config.json says so in either spelling, else float32; a name is obeyed."""
    params = DemoModelParams(num_layers=1, hidden_size=16, num_heads=2, head_dim=8, vocab_size=300)
    folder = tmp_path / "demo"
    write_demo_model(folder, params)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    for stated, dtype, expected in (
        ({"dtype": "bfloat16"}, ComputeDtype.AUTO, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, ComputeDtype.AUTO, "bfloat16"),
        ({"dtype": "float16"}, ComputeDtype.AUTO, "float32"),
        ({}, ComputeDtype.AUTO, "float32"),
        ({"dtype": "bfloat16"}, ComputeDtype.FLOAT32, "float32"),
        ({"dtype": "float32"}, ComputeDtype.BFLOAT16, "bfloat16"),
    ):
        (folder / "config.json").write_text(json.dumps(config | stated))
        built = build_runner(EngineConfig(model=str(folder), dtype=dtype))
        assert isinstance(built.runner, TorchRunner)
        spec = built.runner.kv_spec
        assert spec.dtype == expected, (stated, dtype)
    float32, bfloat16 = (replace(spec, dtype=name) for name in ("float32", "bfloat16"))
    assert float32.layout.record_bytes == 2 * bfloat16.layout.record_bytes
    assert float32.layout.compatibility_hash() != bfloat16.layout.compatibility_hash()


def test_every_family_has_a_model_here() -> None:
    """A family that is added is compared too."""
    here = {kind.model_type for kind, _ in MODELS.values()}
    assert here == {family.name.lower() for family in ModelFamily}
