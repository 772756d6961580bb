"""A cluster whose decode node computes with weights of 4 bits, its prefill node with those of the checkpoint."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Reason
from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.native.kernels import native_kernels
from tests.support.cluster_harness import assert_conserved, error_of, running, wait_for

PARAMS = DemoModelParams(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, vocab_size=600)
TOKENS = 12

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="no compiler, or a CPU without AVX512-BF16")


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ClusterSpec:
    folder: Path = tmp_path_factory.mktemp("quantisation") / "model"
    write_demo_model(folder, PARAMS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return ClusterSpec(
        prefill=1,
        decode=1,
        model=str(folder),
        engine_kind=EngineKind.MODEL,
        blocks=128,
        flags={
            Service.PREFILL: {"engine.poison_freed": True},
            Service.DECODE: {"engine.poison_freed": True, "engine.quantisation": "int4"},
        },
    )


def test_a_decode_pool_of_four_bits(spec: ClusterSpec) -> None:
    """The first token is that of a cluster without quantisation, all blocks are handed over, answers repeat."""
    rng = random.Random(4)
    prompts = [[rng.randrange(2, PARAMS.vocab_size) for _ in range(length)] for length in (1, 16, 75)]
    with running(spec) as cluster:
        answers = [cluster.run(cluster.client.generate(p, max_tokens=TOKENS, ignore_eos=True)) for p in prompts]
        again = [cluster.run(cluster.client.generate(p, max_tokens=TOKENS, ignore_eos=True)) for p in prompts]
        cluster.run(assert_conserved(cluster))
        statuses = cluster.run(cluster.statuses())
        assert statuses["prefill-0"].record.model.kv_root != statuses["decode-0"].record.model.kv_root
    plain = replace(
        spec, flags={service: {"engine.poison_freed": True} for service in (Service.PREFILL, Service.DECODE)}
    )
    with running(plain) as cluster:
        expected = [cluster.run(cluster.client.generate(p, max_tokens=TOKENS, ignore_eos=True)) for p in prompts]
    for prompt, answer, repeat, right in zip(prompts, answers, again, expected, strict=True):
        assert len(answer.ids) == TOKENS
        assert answer.ids == repeat.ids
        assert answer.ids[0] == right.ids[0]
        assert answer.stats.blocks_written == -(-len(prompt) // 16)
    assert [answer.ids for answer in answers] != [right.ids for right in expected], "4 bits have changed nothing"


def test_a_node_that_insists_refuses(spec: ClusterSpec) -> None:
    """quantisation_must_agree on one of the two: nothing is handed over, and the error says why."""
    strict = {"engine.poison_freed": True, "engine.quantisation_must_agree": True}
    flags = {**spec.flags, Service.PREFILL: strict}
    with running(replace(spec, flags=flags), warm_up=False) as cluster:

        async def refused() -> bool:
            error = await error_of(cluster.client.generate([5, 6, 7], max_tokens=TOKENS))
            return error.reason is Reason.INCOMPATIBLE_NODE and "quantisation" in str(error)

        cluster.run(wait_for(refused, "the nodes to know of each other, and to refuse", story=cluster.story))
        cluster.run(assert_conserved(cluster))
