"""A decode node made of the GPU parts whose weights are rounded, and a prefill node with those of the checkpoint.

On a machine with a GPU: `BATON_TEST_DEVICE=cuda python -m pytest tests/gpu/test_cluster_gpu_weights.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.gpu_node import AnyCluster, facts_of, play, random_prompts, spec_of, write_model

# isort: split
from baton.errors import Reason
from cli.services import Service
from cli.supervisor import ClusterSpec
from tests.support.cluster_harness import assert_conserved, error_of, wait_for

TOKENS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpu-weights"))


def rounded_decode(model: Path, quantisation: str, **prefill: object) -> ClusterSpec:
    """In bfloat16, the prefill node as it is but for `prefill`."""
    spec = spec_of(model)
    both = {"engine.dtype": "bfloat16"}
    flags = {
        **spec.flags,
        Service.PREFILL: {**spec.flags[Service.PREFILL], **both, **prefill},
        Service.DECODE: {**spec.flags[Service.DECODE], **both, "engine.quantisation": quantisation},
    }
    return replace(spec, flags=flags)


@pytest.mark.slow
def test_a_decode_node_with_rounded_weights(model: Path) -> None:
    """Blocks are handed over, answers repeat, the first token is the prefill node's and hangs on no rounding; the node
    says what its weights are."""
    prompts = random_prompts(21, 8, 30)
    descriptions = {
        "none": "bfloat16",
        "fp8": "fp8 (products off by",
        "int4": "int4-groups-of-64 (products off by",
    }
    firsts: list[list[int]] = []

    async def scene(cluster: AnyCluster) -> None:
        rounds = [[await cluster.client.generate(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts] for _ in "12"]
        assert [answer.ids for answer in rounds[0]] == [answer.ids for answer in rounds[1]]
        assert {len(answer.ids) for answer in rounds[0]} == {TOKENS}
        assert {answer.stats.transport for answer in rounds[0]} == {"cuda_ipc"}
        await assert_conserved(cluster)
        statuses = await cluster.statuses()
        reported = {name: facts_of(statuses[name])["weights"] for name in ("prefill-0", "decode-0")}
        assert reported["prefill-0"] == "bfloat16"
        assert reported["decode-0"].startswith(descriptions[quantisation])
        firsts.append([answer.ids[0] for answer in rounds[0]])

    for quantisation in descriptions:
        play(rounded_decode(model, quantisation), scene)
    assert firsts[0] == firsts[1] == firsts[2]


@pytest.mark.slow
def test_a_node_that_insists_refuses(model: Path) -> None:
    """quantisation_must_agree on the prefill node: nothing is handed over, and the error names the rounding."""
    strict = {"engine.quantisation_must_agree": True}

    async def scene(cluster: AnyCluster) -> None:
        async def refused() -> bool:
            error = await error_of(cluster.client.generate([5, 6, 7], max_tokens=TOKENS))
            return error.reason is Reason.INCOMPATIBLE_NODE and "none, int4-groups-of-64" in str(error)

        await wait_for(refused, "the nodes to know of each other, and to refuse", story=cluster.story)
        await assert_conserved(cluster)

    play(rounded_decode(model, "int4", **strict), scene)
