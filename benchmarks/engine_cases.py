"""What benchmarks/engine.py measures, the same on both sides. Imports nothing but the standard library."""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "473m": _QWEN3
    | {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_000,
    },
    "small": _QWEN3
    | {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8_192,
    },
}
MODELS["small8"] = MODELS["small"] | {"num_hidden_layers": 8}
DECODES = {"473m": ((1, 64), (1, 512), (16, 64), (16, 512)), "small": ((16, 64),), "small8": ((8, 64),)}
"""(batch, context)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much of a model is measured in a round."""

    prefill: tuple[int, int]
    """(prompts, tokens of each): one whole step of either side."""
    steps: int
    """Of each answer."""
    repeats: int
    """In a round: the larger model's takes half a minute."""
    shared: bool = False
    """Contexts are not read again: prompts that are only decoded after begin as the prefill's does, which the peer has
    kept, and of ours all but the last token are taken to be computed (see engine_own.py)."""
    peer_tokens_per_step: int = 2_048
    """The peer computes a step of so many when it starts."""


LOADS = {
    "473m": Load(prefill=(4, 512), steps=32, repeats=1),
    "small": Load(prefill=(4, 512), steps=256, repeats=3),
    "small8": Load(prefill=(4, 512), steps=256, repeats=3),
}
LIGHT = Load(prefill=(1, 512), steps=16, repeats=1, shared=True)
WEIGHTS = {
    "full": LOADS,
    "light": LOADS | {"473m": LIGHT},
    "lightest": LOADS | {"473m": replace(LIGHT, steps=8, peer_tokens_per_step=128)},
}
"""How much is measured. Lightest where the peer emulates bfloat16: it reads some twenty tokens a second there, as many
in steps of 64 as of 256, and computes a whole step when it starts."""


def load_of(model: str, weight: str) -> Load:
    return WEIGHTS[weight][model]


Steps = list[tuple[float, int]]
"""Of each step of an engine: when it ended, in seconds after the prompts were submitted, and the answers it went on."""
Generate = Callable[[list[list[int]], int], Steps]
"""(prompts, tokens to write) -> the steps."""
Rates = Callable[[], dict[str, list[float]]]
"""By name, what was measured around the steps of the last `Generate`; empty where nobody measured."""


def write_config(folder: Path, model: str) -> Path:
    """A folder with nothing but config.json: each side makes random weights of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    return folder


def weight_bytes(model: str) -> int:
    """Of the matrices that a step reads, in bfloat16; the embedding is read as the output projection."""
    m = MODELS[model]
    hidden, head = m["hidden_size"], m["head_dim"]
    attention = 2 * hidden * head * (m["num_attention_heads"] + m["num_key_value_heads"])
    mlp = 3 * hidden * m["intermediate_size"]
    return int(2 * (m["num_hidden_layers"] * (attention + mlp) + m["vocab_size"] * hidden))


def product_flops(model: str) -> int:
    """Of a token in prefill: the layers' products, two for each weight. The output projection takes a few rows only."""
    output_bytes = 2 * MODELS[model]["vocab_size"] * MODELS[model]["hidden_size"]
    return int(weight_bytes(model) - output_bytes)


def kv_bytes(model: str, tokens: int) -> int:
    m = MODELS[model]
    return int(2 * 2 * tokens * m["num_hidden_layers"] * m["num_key_value_heads"] * m["head_dim"])


def attention_flops(model: str, tokens: int) -> int:
    """Scores and values of one query of each head over so many tokens, in all layers."""
    m = MODELS[model]
    return int(4 * tokens * m["num_hidden_layers"] * m["num_attention_heads"] * m["head_dim"])


def measure(model: str, load: Load, rng: random.Random, generate: Generate, rates: Rates = dict) -> dict[str, float]:
    """Tokens a second of prefill; seconds of a step in which all answers are decoded, the median, and the mean of each
    of the rates around it. `rng` goes on from round to round: no prompt comes twice."""
    size = MODELS[model]["vocab_size"]

    def prompts(batch: int, context: int, begin: Sequence[int] = ()) -> list[list[int]]:
        return [[*begin, *(rng.randrange(2, size) for _ in range(context - len(begin)))] for _ in range(batch)]

    batch, context = load.prefill
    read, rate = [], 0.0
    for _ in range(load.repeats):
        read = prompts(batch, context)
        rate = max(rate, batch * context / generate(read, 1)[-1][0])
    found = {"prefill_tokens_s": rate}
    for batch, context in DECODES[model]:
        steps: list[float] = []
        around: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(load.repeats):
            # One token more, as the peer keeps whole blocks.
            asked = prompts(batch, context + 1, read[0][:context]) if load.shared else prompts(batch, context)
            steps += full_steps(generate(asked, 1 + load.steps), batch)
            for name, values in rates().items():
                around[name] += values
        found[f"decode_s_{batch}_{context}"] = median(steps)
        found |= {f"{name}_{batch}_{context}": mean(values) for name, values in around.items()}
    return found


def full_steps(steps: Steps, batch: int) -> list[float]:
    """Seconds of each step that decodes all of `batch` answers and reads no prompt.

    Prompts are read one after the other, so the first answer may end well before the last one does; and the first step
    that goes on all of them may still read the last prompt.
    """
    return [after[0] - before[0] for before, after in pairwise(steps) if before[1] == after[1] == batch]


def serve(
    model: str, load: Load, generate: Generate, rates: Rates = dict, more: Callable[[], dict[str, float]] = dict
) -> None:
    """Warm up and say so, then answer every line on the input with the figures of a round and what `more` returns."""
    rng = random.Random(1)
    size = MODELS[model]["vocab_size"]
    for prompts, tokens in ((1, 16), (16, 1)) if load.shared else ((4, 256), (16, 64)):
        generate([[rng.randrange(2, size) for _ in range(tokens)] for _ in range(prompts)], 3 if load.shared else 8)
    print("{}", flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure(model, load, rng, generate, rates) | more()), flush=True)
