"""Pinned prefixes in a running cluster: they outlive a flood, and make nothing impossible that fits beside them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import grpc.aio
from batonpb import inference_pb2, pins_pb2, pins_pb2_grpc

from baton.errors import Reason
from baton.rpc import rpc_errors
from tests.support.cluster_harness import (
    CALL_S_MAX,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    wait_for,
)
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, inprocess
from tests.support.operators import as_operator

SIZE = 16
BLOCKS = 40
NODES = ("prefill-0", "decode-0")


class Operator:
    """Calls the router's Pins service."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._channel = grpc.aio.insecure_channel(cluster.router_others["admin"])
        self._stub = pins_pb2_grpc.PinsStub(self._channel)

    async def __aenter__(self) -> Operator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def pin(self, name: str, tokens: Sequence[int], **fields: Any) -> pins_pb2.PinnedPrefix:
        request = pins_pb2.PinRequest(name=name, token_ids=inference_pb2.TokenIds(ids=tokens), **fields)
        return await self.send(request)

    async def send(self, request: pins_pb2.PinRequest) -> pins_pb2.PinnedPrefix:
        with rpc_errors("router"):
            reply: pins_pb2.PinReply = await self._stub.Pin(request, timeout=CALL_S_MAX, metadata=as_operator())
            return reply.pin

    async def unpin(self, name: str) -> bool:
        with rpc_errors("router"):
            reply: pins_pb2.UnpinReply = await self._stub.Unpin(
                pins_pb2.UnpinRequest(name=name), timeout=CALL_S_MAX, metadata=as_operator()
            )
            return reply.known

    async def pins(self) -> list[pins_pb2.PinnedPrefix]:
        with rpc_errors("router"):
            reply: pins_pb2.ListPinsReply = await self._stub.ListPins(
                pins_pb2.ListPinsRequest(), timeout=CALL_S_MAX, metadata=as_operator()
            )
            return list(reply.pins)


async def pinned(cluster: InProcessCluster) -> dict[str, list[tuple[str, int, int]]]:
    """By node: name, blocks and blocks pinned of each pin."""
    statuses = await cluster.statuses()
    return {name: [(p.name, p.blocks, p.blocks_pinned) for p in statuses[name].prefixes.pins] for name in NODES}


async def flood(cluster: InProcessCluster, rng: random.Random, count: int) -> None:
    """Prompts that have nothing in common, more of them than either region has blocks."""
    for _ in range(count):
        prompt = random_prompt(rng, 5 * SIZE)
        answer = await cluster.client.generate(prompt, max_tokens=2)
        assert answer.ids == mock_tokens(prompt, 2)
        assert answer.stats.prompt_tokens_cached == 0


def test_a_pin_outlives_a_flood_and_ends_with_unpin() -> None:
    """Pinned before its first request, computed once, kept while five regions' worth of other prompts go by; after the
    unpin the same flood takes it."""

    async def scenario() -> None:
        rng = random.Random(1)
        prefix = random_prompt(rng, 4 * SIZE + 3)
        async with inprocess(mock_spec(blocks=BLOCKS)) as cluster, Operator(cluster) as operator:
            pin = await operator.pin("system", prefix)
            assert [(on.node, on.blocks, on.blocks_pinned) for on in pin.nodes] == [
                ("decode-0", 4, 0),
                ("prefill-0", 4, 0),
            ]
            await cluster.client.generate([*prefix, 1], max_tokens=2)
            assert await pinned(cluster) == {name: [("system", 4, 4)] for name in NODES}
            await flood(cluster, rng, 5 * BLOCKS // 5)
            prompt = [*prefix, 2]
            answer = await cluster.client.generate(prompt, max_tokens=9)
            assert answer.ids == mock_tokens(prompt, 9)
            assert answer.stats.prompt_tokens_cached == answer.stats.prompt_tokens_skipped == 4 * SIZE
            assert answer.stats.blocks_skipped == 4
            await assert_conserved(cluster)
            assert await operator.unpin("system")
            assert not await operator.unpin("system")
            assert await pinned(cluster) == {name: [] for name in NODES}
            await flood(cluster, rng, 5 * BLOCKS // 5)
            answer = await cluster.client.generate([*prefix, 3], max_tokens=2)
            assert (answer.stats.prompt_tokens_cached, answer.stats.blocks_skipped) == (0, 0)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_region_full_of_pins_admits_what_fits_beside_them() -> None:
    """Pins take half of each region, the limit: one more is refused by name of the limit, the longest request that fits
    beside them is served, a longer one is refused at once instead of waiting for room that never comes."""

    async def scenario() -> None:
        rng = random.Random(2)
        spec = mock_spec(blocks=BLOCKS, router_flags={"placement_wait_ms_max": 60_000})
        async with inprocess(spec) as cluster, Operator(cluster) as operator:
            for i in range(4):
                prefix = random_prompt(rng, 5 * SIZE)
                await operator.pin(f"p{i}", prefix, warm=False)
                await cluster.client.generate([*prefix, 1], max_tokens=2)
            statuses = await cluster.statuses()
            assert [statuses[name].prefixes.pinned_blocks for name in NODES] == [20, 20]
            assert [statuses[name].record.load.blocks.pinned for name in NODES] == [20, 20]
            error = await error_of(operator.pin("more", random_prompt(rng, SIZE)))
            assert error.reason is Reason.PINS_FULL
            assert "21 blocks would be pinned" in error.message and "at most 20" in error.message
            assert [pin.name for pin in await operator.pins()] == ["p0", "p1", "p2", "p3"]
            # 20 blocks are left: for prompt and answer on the decode node, for the prompt on the prefill node.
            prompt = random_prompt(rng, 18 * SIZE)
            answer = await cluster.client.generate(prompt, max_tokens=2 * SIZE + 1)
            assert answer.ids == mock_tokens(prompt, 2 * SIZE + 1)
            error = await error_of(cluster.client.generate(prompt, max_tokens=2 * SIZE + 2))
            assert error.reason is Reason.PROMPT_TOO_LONG
            assert "need 21 blocks, the region has 40, 20 of them for pinned prefixes" in error.message
            error = await error_of(cluster.client.generate(random_prompt(rng, 20 * SIZE + 1), max_tokens=1))
            assert error.reason is Reason.PROMPT_TOO_LONG
            assert "20 of them for pinned prefixes" in error.message
            many = [random_prompt(rng, 6 * SIZE) for _ in range(12)]
            answers = await asyncio.gather(*(cluster.client.generate(each, max_tokens=20) for each in many))
            assert [answer.ids for answer in answers] == [mock_tokens(each, 20) for each in many]
            await assert_conserved(cluster)
            assert await pinned(cluster) == {name: [(f"p{i}", 5, 5) for i in range(4)] for name in NODES}

    asyncio.run(scenario())


def test_a_pin_that_comes_after_a_request_ends_its_wait() -> None:
    """A request for 25 of 40 blocks is queued when a pin takes 20 of them for good: it is refused, and the one behind
    it is served."""

    async def scenario() -> None:
        rng = random.Random(5)
        async with inprocess(mock_spec(blocks=BLOCKS)) as cluster, Operator(cluster) as operator:
            gate = cluster.gates[Point.PREFILL_QUEUE]
            gate.close()
            waiting = asyncio.create_task(
                error_of(cluster.client.generate([MARK, *random_prompt(rng, 25 * SIZE - 1)], max_tokens=2))
            )
            await asyncio.wait_for(gate.reached.wait(), CALL_S_MAX)
            behind = asyncio.create_task(cluster.client.generate([1, 2, 3], max_tokens=5))
            await operator.pin("system", random_prompt(rng, 20 * SIZE))
            gate.open()
            error = await waiting
            assert error.reason is Reason.PROMPT_TOO_LONG
            assert "need 25 blocks" in error.message and "20 of them for pinned prefixes" in error.message
            assert (await behind).ids == mock_tokens([1, 2, 3], 5)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_node_that_restarts_is_told_of_the_pins() -> None:
    """The new process is another incarnation and knows nothing: the router leases the pin to it as it joins."""

    async def scenario() -> None:
        rng = random.Random(3)
        prefix = random_prompt(rng, 2 * SIZE)
        async with inprocess(mock_spec(blocks=BLOCKS)) as cluster, Operator(cluster) as operator:
            await operator.pin("system", prefix)
            service = dict(cluster.spec.processes())["decode-0"]
            await cluster.stop_node("decode-0")
            await cluster.start_node("decode-0", service)

            async def reported() -> bool:
                return (await pinned(cluster))["decode-0"] == [("system", 2, 0)]

            await wait_for(reported, "the new decode-0 to have the pin")
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_configured_pin_is_computed_before_the_first_user() -> None:
    """The router's own file names it: both nodes have it, and the first request of a user hits it."""

    async def scenario() -> None:
        prefix = random_prompt(random.Random(4), 3 * SIZE)
        flags = {"pinned_prefixes": f'[{{"name": "system", "token_ids": {prefix}, "cache_salt": "acme"}}]'}
        async with inprocess(mock_spec(blocks=BLOCKS, router_flags=flags)) as cluster, Operator(cluster) as operator:

            async def warmed() -> bool:
                return await pinned(cluster) == {
                    "prefill-0": [("system", 3, 3)],
                    "decode-0": [("system", 3, 3)],
                }

            await wait_for(warmed, "the prefix to be computed")
            (pin,) = await operator.pins()
            assert (pin.name, pin.tokens, pin.from_config, pin.has_cache_salt) == ("system", 48, True, True)
            other = await cluster.client.generate([*prefix, 5], max_tokens=2)
            assert other.stats.prompt_tokens_cached == 0
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_mixed_nodes_are_warmed_too() -> None:
    """A cluster of mixed nodes only: a pin that is to be computed at once is, by a node that serves both halves."""

    async def scenario() -> None:
        prefix = random_prompt(random.Random(7), 4 * SIZE)
        spec = mock_spec(prefill=0, decode=0, mixed=1, blocks=BLOCKS)
        async with inprocess(spec) as cluster, Operator(cluster) as operator:

            async def computed() -> bool:
                (pin,) = (await cluster.statuses())["mixed-0"].prefixes.pins
                return bool(pin.blocks_pinned == 4)

            await operator.pin("system", prefix, warm=True)
            await wait_for(computed, "the pin to be computed", story=cluster.story)
            answer = await cluster.client.generate([*prefix, 1], max_tokens=4)
            assert answer.ids == mock_tokens([*prefix, 1], 4)
            assert answer.stats.prompt_tokens_cached == 4 * SIZE
            await assert_conserved(cluster)

    asyncio.run(scenario())
