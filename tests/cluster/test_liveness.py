"""Nodes that are stopped or cut off: their peers notice by unanswered pings, long before any lease.

Leases, orphan times and the like are set so long that nothing but the noticing could make these tests end.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from batonpb import common_pb2, directory_pb2, directory_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc

from baton.errors import BatonError, Code
from baton.rpc import rpc_errors
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    collect,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

NOTICED_S_MAX = 8.0
"""Well under what any other timer here takes; on an idle machine it is under 3 s."""
LONG_MS = 600_000
NO_LEASES = {"receiver.lease_ms": LONG_MS, "orphan_ms": LONG_MS}
SLOW_PREFILL = {"engine.mock_layer_delay_ms": 40}
SLOW_DECODE = {"engine.mock_layer_delay_ms": 2}
PROMPT_TOKENS = 1500


async def until(cluster: RunningCluster, what: str, text: str, name: str) -> None:
    async def holds() -> bool:
        return text in cluster.log_text(name)

    await wait_for(holds, what, story=cluster.story, timeout_s=NOTICED_S_MAX)


async def writer_owns_blocks(cluster: RunningCluster) -> None:
    async def holds() -> bool:
        return (await cluster.status("decode-0")).record.load.blocks.writer_owned > 0

    await wait_for(holds, "a handoff", story=cluster.story)


async def begun(cluster: RunningCluster, prompt: list[int], count: int) -> asyncio.Task[Answer]:
    """Ask, and return once the answer comes from the decode node."""
    call: Any = cluster.client.stub.Generate(make_request(prompt, max_tokens=count), timeout=60)
    got = asyncio.Event()

    async def events() -> AsyncIterator[inference_pb2.GenerateEvent]:
        async for event in call:
            if event.HasField("tokens") and event.tokens.first_index > 0:
                got.set()
            yield event

    async def whole() -> Answer:
        with rpc_errors("router-0"):
            answer = await collect(events())
        assert answer.ids == mock_tokens(prompt, count)
        return answer

    task = asyncio.create_task(whole())
    await got.wait()
    return task


async def whole_or_told(calls: list[asyncio.Task[Answer]]) -> None:
    """Each ends with its whole answer (whoever awaited it has looked) or is told that a node was lost."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if not isinstance(outcome, Answer):
            assert isinstance(outcome, BatonError), outcome
            assert outcome.code in (Code.UNAVAILABLE, Code.ABORTED), outcome


@pytest.mark.slow
def test_a_stopped_decode_node_is_noticed_by_router_and_prefill_node() -> None:
    """decode-0 is stopped with answers on it and handoffs to it: the router believes it lost, the prefill node gives
    the handoffs up and frees its blocks. It goes on: what it still had of them is freed, and it gets work again."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(61)
        calls = [await begun(cluster, random_prompt(rng, 20), 700) for _ in range(2)]
        calls += [
            asyncio.create_task(cluster.client.generate(random_prompt(rng, PROMPT_TOKENS), max_tokens=20))
            for _ in range(2)
        ]
        await writer_owns_blocks(cluster)
        cluster.send_signal("decode-0", signal.SIGSTOP)
        cluster.set_down("decode-0")
        began_s = asyncio.get_running_loop().time()
        await until(cluster, "the router to notice", "node lost", "router-0")
        print(f"noticed after {asyncio.get_running_loop().time() - began_s:.3f} s")
        await until(cluster, "the prefill node to notice", "receiver lost", "prefill-0")

        async def freed() -> bool:
            return (await cluster.status("prefill-0")).record.load.blocks.held == 0

        await wait_for(freed, "the prefill node's blocks", story=cluster.story)
        cluster.send_signal("decode-0", signal.SIGCONT)
        cluster.set_down("decode-0", False)
        await whole_or_told(calls)
        await assert_conserved(cluster)

        async def served() -> bool:
            prompt = random_prompt(rng, 100)
            (answer,) = await asyncio.gather(cluster.client.generate(prompt, max_tokens=5), return_exceptions=True)
            if isinstance(answer, BatonError):
                assert answer.code in (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.ABORTED), answer
                return False
            assert isinstance(answer, Answer), answer
            assert answer.ids == mock_tokens(prompt, 5)
            return True

        await wait_for(served, "the node to get work again", story=cluster.story)
        await assert_conserved(cluster)

    spec = mock_spec(blocks=800, prefill_flags=SLOW_PREFILL, decode_flags={**NO_LEASES, **SLOW_DECODE})
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_stopped_prefill_node_is_noticed_by_its_decode_node(transport: str) -> None:
    """Stopped in the middle of a handoff, under a lease of ten minutes: over tcp the decode node fences it by itself
    and has its blocks back; over shm they are quarantined until the writer goes on. Then nothing is left anywhere."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(62)
        call = asyncio.create_task(cluster.client.generate(random_prompt(rng, PROMPT_TOKENS), max_tokens=20))
        await writer_owns_blocks(cluster)
        cluster.send_signal("prefill-0", signal.SIGSTOP)
        cluster.set_down("prefill-0")

        async def taken_back() -> bool:
            blocks = (await cluster.status("decode-0")).record.load.blocks
            return blocks.writer_owned == 0 and (transport == "tcp") == (blocks.quarantined == 0)

        await wait_for(taken_back, "the grant to be taken back", story=cluster.story, timeout_s=2 * NOTICED_S_MAX)
        cluster.send_signal("prefill-0", signal.SIGCONT)
        cluster.set_down("prefill-0", False)
        await whole_or_told([call])
        await assert_conserved(cluster)

    spec = mock_spec(both={"transports": transport}, blocks=800, prefill_flags=SLOW_PREFILL, decode_flags=NO_LEASES)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
def test_a_stopped_router_is_noticed_by_the_nodes() -> None:
    """The router is stopped with answers running and prompts being read: the prefill node sees its calls end, the
    decode node its stream, and after `orphan_ms` nothing of it is left on either. It goes on, and serves."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(63)
        calls = [await begun(cluster, random_prompt(rng, 20), 1500) for _ in range(2)]
        calls.append(asyncio.create_task(cluster.client.generate(random_prompt(rng, PROMPT_TOKENS), max_tokens=1500)))
        await writer_owns_blocks(cluster)
        cluster.send_signal("router-0", signal.SIGSTOP)
        cluster.set_down("router-0")
        await assert_conserved(cluster, timeout_s=2 * NOTICED_S_MAX)
        assert "orphan" in cluster.log_text("decode-0")
        cluster.send_signal("router-0", signal.SIGCONT)
        cluster.set_down("router-0", False)
        await whole_or_told(calls)
        prompt = random_prompt(rng, 50)
        answer = await cluster.client.generate(prompt, max_tokens=5)
        assert answer.ids == mock_tokens(prompt, 5)
        await assert_conserved(cluster)

    spec = mock_spec(
        blocks=1200,
        prefill_flags=SLOW_PREFILL,
        decode_flags={"receiver.lease_ms": LONG_MS, "orphan_ms": 300, **SLOW_DECODE},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
def test_a_node_in_a_long_engine_step_is_not_taken_for_dead() -> None:
    """Steps of two seconds on either node, while an unanswered ping is given up after one: every answer is whole."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(64)
        prompts = [random_prompt(rng, 30) for _ in range(3)]
        answers = await asyncio.gather(*(cluster.client.generate(prompt, max_tokens=3) for prompt in prompts))
        assert [answer.ids for answer in answers] == [mock_tokens(prompt, 3) for prompt in prompts]
        for name in ("router-0", "prefill-0", "decode-0"):
            assert " lost" not in cluster.log_text(name), cluster.story()
        await assert_conserved(cluster)

    tight = {"liveness.heartbeat_ms": 100, "liveness.answer_ms_max": 1_000, "liveness.reconnect_ms_max": 200}
    with running(
        mock_spec(both={**tight, "engine.mock_layer_delay_ms": 500}, router_flags=tight), warm_up=False
    ) as cluster:
        cluster.run(scenario(cluster))


def test_an_answer_that_its_router_has_dropped_unseen_is_freed_at_once() -> None:
    """A client leaves after the prefill call has ended and before the router has read who granted: the decode node runs
    an answer that the router knows nothing of. It is told so on the stream that the router keeps there, long before
    the answer would be an orphan."""

    async def scenario(cluster: RunningCluster) -> None:
        await cluster.client.generate([1, 2, 3], max_tokens=2)  # the prefill node knows the decode node by now
        prefill, router = await cluster.status("prefill-0"), await cluster.status("router-0")
        message = prefill_pb2.PrefillRequest(
            header=common_pb2.Header(sender=router.record.incarnation, receiver=prefill.record.incarnation),
            key=common_pb2.RequestKey(request="dropped"),
            prompt=[1, 2, 3],
            sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=4_000),
            router=router.record.incarnation,
        )
        call: Any = prefill_pb2_grpc.PrefillStub(cluster.channel("prefill-0")).Prefill(message, timeout=60)
        with rpc_errors("prefill-0"):
            assert [event.WhichOneof("event") async for event in call][-1] == "handed_off"
        await assert_conserved(cluster, timeout_s=NOTICED_S_MAX)

    slow = {"engine.mock_layer_delay_ms": 20}
    with running(mock_spec(decode_flags={**NO_LEASES, **slow}), warm_up=False) as cluster:

        async def known() -> None:
            async def prefill_knows() -> bool:
                directory = directory_pb2_grpc.DirectoryStub(cluster.channel("directory"))
                reply = await directory.List(directory_pb2.ListRequest(), timeout=60)
                return len(reply.records) == 3

            await wait_for(prefill_knows, "the nodes to register", story=cluster.story)

        cluster.run(known())
        cluster.run(scenario(cluster))
