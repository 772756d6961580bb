"""A decode node that promises more than its device holds: real processes, the mock engine, host memory behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Final

import pytest
from batonpb import node_pb2

from tests.cluster_harness import RunningCluster, assert_conserved, mock_spec, mock_tokens, random_prompt, running

DECODE: Final = "decode-0"
BLOCKS: Final = 24
HOST_BLOCKS: Final = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Prefill has room; decode's 24 blocks hold two full answers of the tests below, and host memory five more."""
    spec = mock_spec(
        prefill_flags={"engine.num_blocks": 300},
        decode_flags={
            "engine.num_blocks": BLOCKS,
            "engine.mock_layer_delay_ms": 0.2,
            "spill.host_blocks": HOST_BLOCKS,
            "spill.headroom_blocks": 1,
        },
        router_flags={"placement_wait_ms_max": 60_000},
    )
    with running(spec) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def counters(status: node_pb2.NodeStatus) -> dict[str, int]:
    return {each.name: int(each.value) for each in status.counters if each.name.startswith("spill: ")}


def test_device_memory_runs_out_and_every_answer_is_right(cluster: RunningCluster) -> None:
    """Twelve answers that grow to ten blocks each, all at once, on a device of 24: blocks go to host memory and come
    back, and every token is the reference's."""
    rng = random.Random(21)
    prompts = [random_prompt(rng, rng.randrange(10, 33)) for _ in range(12)]

    async def ask(prompt: list[int]) -> None:
        answer = await cluster.client.generate(prompt, max_tokens=128)
        assert answer.ids == mock_tokens(prompt, 128)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, prompts))

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))
    told = counters(cluster.run(cluster.status(DECODE)))
    assert told["spill: sequences parked since start"] > 0
    assert told["spill: bytes copied out"] > 0
    assert (
        told["spill: sequences parked"]
        == told["spill: host blocks filled"]
        == told["spill: host blocks in a copy"]
        == 0
    )
    assert told["spill: host blocks"] == told["spill: host blocks free"] == HOST_BLOCKS
