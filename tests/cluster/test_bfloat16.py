"""A cluster whose weights, arithmetic and KV cache are bfloat16: half the bytes are handed over, answers are right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Reason
from cli.reference import Reference
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ModelFamily
from engine.types import SamplingParams
from tests.support.cluster_harness import assert_conserved, error_of, running, wait_for

PARAMS = DemoModelParams(
    family=ModelFamily.QWEN2, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=600
)
TOKENS = 16
BLOCK_BYTES = 2 * 2 * PARAMS.num_layers * PARAMS.num_kv_heads * PARAMS.head_dim * 16
"""K and V, two bytes each, of 16 tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16") / "model"
    write_demo_model(folder, PARAMS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def spec_of(model: Path) -> ClusterSpec:
    return ClusterSpec(
        prefill=1,
        decode=1,
        model=str(model),
        engine_kind=EngineKind.MODEL,
        blocks=128,
        flags={service: {"engine.poison_freed": True} for service in (Service.PREFILL, Service.DECODE)},
    )


def test_answers_are_those_of_one_bfloat16_engine(model: Path) -> None:
    """`auto` takes the checkpoint's type on every node. One request at a time: nothing rounds otherwise than alone."""
    reference = Reference(model, num_blocks=64, compute_threads=1)
    rng = random.Random(2)
    with running(spec_of(model)) as cluster:
        for length in (1, 16, 75):
            prompt = [rng.randrange(2, PARAMS.vocab_size) for _ in range(length)]
            answer = cluster.run(cluster.client.generate(prompt, max_tokens=TOKENS))
            greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=TOKENS)
            assert answer.ids == reference.answer(prompt, greedy)
            blocks = -(-length // 16)
            assert (answer.stats.blocks_written, answer.stats.bytes_written) == (blocks, blocks * BLOCK_BYTES)
        cluster.run(assert_conserved(cluster))


def test_nodes_of_different_types_do_not_hand_over(model: Path) -> None:
    """The decode node was told to compute in float32: the request is refused and nothing is held."""
    spec = replace(spec_of(model), node_flags={"decode-0": {"engine.dtype": "float32"}})
    with running(spec, warm_up=False) as cluster:

        async def refused() -> bool:
            error = await error_of(cluster.client.generate([5, 6, 7], max_tokens=TOKENS))
            return error.reason is Reason.INCOMPATIBLE_NODE

        cluster.run(wait_for(refused, "the nodes to know of each other, and to refuse", story=cluster.story))
        cluster.run(assert_conserved(cluster))
