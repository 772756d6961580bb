"""A decode node that promises more than its device holds: real processes, the mock engine, host memory behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Final

import pytest
from batonpb import node_pb2, node_pb2_grpc

from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.operators import as_operator

DECODE: Final = "decode-0"
BLOCKS: Final = 24
HOST_BLOCKS: Final = 60
ANSWER_TOKENS: Final = 128
LONG_TOKENS: Final = 250
"""The device holds one such answer: the others are swapped out for long enough to be seen."""
AT_ONCE: Final = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Prefill has room; decode's device holds two full answers of the tests below, and host memory some more."""
    spec = mock_spec(
        prefill_flags={"engine.num_blocks": 300},
        decode_flags={
            "engine.num_blocks": BLOCKS,
            "engine.mock_layer_delay_ms": 0.5,
            "spill.host_blocks": HOST_BLOCKS,
            "spill.headroom_blocks": 1,
        },
        router_flags={"placement_wait_ms_max": 60_000},
    )
    with running(spec) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def spill_counters(status: node_pb2.NodeStatus) -> dict[str, int]:
    own = "spill: "
    return {c.name.removeprefix(own): int(c.value) for c in status.counters if c.name.startswith(own)}


async def ask(cluster: RunningCluster, prompt: list[int], tokens: int = ANSWER_TOKENS) -> None:
    answer = await cluster.client.generate(prompt, max_tokens=tokens)
    assert answer.ids == mock_tokens(prompt, tokens)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, rng.randrange(10, 33)) for _ in range(AT_ONCE)]


def test_device_memory_runs_out_and_every_answer_is_right(cluster: RunningCluster) -> None:
    """Twelve answers that grow to ten blocks each, all at once, on a device of 24: blocks go to host memory and come
    back, and every token is the reference's."""

    async def ask_all() -> None:
        await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts(21)))

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))
    status = cluster.run(cluster.status(DECODE))
    load, facts = status.record.load, spill_counters(status)
    assert (load.swapped_out_requests, load.host_blocks_filled, load.host_blocks_free) == (0, 0, HOST_BLOCKS)
    assert facts["sequences swapped out since start"] > 0
    assert facts["bytes copied out"] > 0
    assert facts["host blocks"] == facts["host blocks free"] == HOST_BLOCKS
    assert (facts["sequences swapped out"], facts["host blocks filled"]) == (0, 0)
    assert facts["host blocks in a copy"] == 0


def test_a_drain_waits_for_what_is_in_host_memory(cluster: RunningCluster) -> None:
    """Ordered while sequences are swapped out: they come back and finish, every answer is right,
    then the node is empty."""

    async def order(what: str) -> node_pb2.NodeStatus:
        stub = node_pb2_grpc.NodeStub(cluster.command_channel(DECODE))
        status: node_pb2.NodeStatus = await getattr(stub, what)(
            node_pb2.LifecycleOrder(), timeout=CALL_S_MAX, metadata=as_operator()
        )
        return status

    async def all_run_and_some_are_swapped_out() -> bool:
        status = await cluster.status(DECODE)
        return status.requests == few and spill_counters(status)["sequences swapped out"] > 0

    async def empty() -> bool:
        return (await cluster.status(DECODE)).safe_to_delete

    async def scenario() -> None:
        asking = [asyncio.create_task(ask(cluster, prompt, LONG_TOKENS)) for prompt in prompts(22)[:few]]
        await wait_for(all_run_and_some_are_swapped_out, "a swapped-out sequence", story=cluster.story)
        status = await order("Drain")
        assert not status.safe_to_delete
        await asyncio.gather(*asking)
        await wait_for(empty, "the node to be empty", story=cluster.story)
        await order("Undrain")

    few = 4
    cluster.run(scenario())
    cluster.run(assert_conserved(cluster))
