"""Processes stopped and killed in the middle of a handoff or an answer.

"In the middle" is seen from outside, by GetStatus: the decode node has blocks that a writer owns.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest
from batonpb import (
    common_pb2,
    directory_pb2,
    directory_pb2_grpc,
    inference_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)

from baton.errors import BatonError, Code, Reason
from baton.rpc_client import rpc_errors
from tests.cluster_harness import (
    CALL_S_MAX,
    Answer,
    RunningCluster,
    assert_conserved,
    collect,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

PROMPT_TOKENS = 1500
PROMPT_BLOCKS = 94
FAST_MEMBERSHIP = {"membership.heartbeat_ms": 100, "membership.ttl_ms": 600}
SLOW_PREFILL = {"engine.mock_layer_delay_ms": 40}
"""Three chunks of four layers: half a second in the middle of a handoff."""
SLOW_DECODE = {"engine.mock_layer_delay_ms": 0.5}
ROUTER = 0xFEED


async def ask_exactly(cluster: RunningCluster, prompt: list[int], count: int) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


async def until(cluster: RunningCluster, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    await wait_for(holds, what, story=cluster.story)


async def writer_owns_blocks(cluster: RunningCluster, decode: str) -> None:
    async def holds() -> bool:
        return (await cluster.status(decode)).record.load.blocks.writer_owned > 0

    await until(cluster, f"a handoff to {decode}", holds)


Ask = Callable[[], Coroutine[Any, Any, Answer]]


async def ask_until_handoff(
    cluster: RunningCluster, decode: str, *, long: Ask, short: Ask | None = None, requests_min: int = 0
) -> list[asyncio.Task[Answer]]:
    """Keep two `long` and eight `short` requests going until a handoff to this decode node is under way, and every
    decode node has `requests_min` requests at least. All that were asked."""
    feeds = [(long, 2)] if short is None else [(long, 2), (short, 8)]
    calls: list[list[asyncio.Task[Answer]]] = [[] for _ in feeds]

    async def holds() -> bool:
        statuses = await cluster.statuses()
        fewest = min(status.requests for name, status in statuses.items() if name.startswith("decode"))
        if fewest >= requests_min and statuses[decode].record.load.blocks.writer_owned > 0:
            return True
        for (ask, at_once), asked in zip(feeds, calls, strict=True):
            missing = at_once - sum(not call.done() for call in asked)
            asked += [asyncio.create_task(ask()) for _ in range(missing)]
        return False

    await until(cluster, f"a handoff to {decode}", holds)
    return [call for asked in calls for call in asked]


async def directory_lists(cluster: RunningCluster, name: str, listed: bool) -> None:
    stub = directory_pb2_grpc.DirectoryStub(cluster.channel("directory"))

    async def holds() -> bool:
        reply = await stub.List(directory_pb2.ListRequest(), timeout=CALL_S_MAX)
        return any(record.name == name for record in reply.records) is listed

    await until(cluster, f"{name} in the directory: {listed}", holds)


async def prefill_directly(cluster: RunningCluster, name: str, request: str, prompt: list[int]) -> list[str]:
    """Send a request to this prefill node, as a router of our own; the kinds of its events. Raises BatonError."""
    status = await cluster.status(name)
    message = prefill_pb2.PrefillRequest(
        header=common_pb2.Header(sender=ROUTER, receiver=status.record.incarnation),
        key=common_pb2.RequestKey(request=request),
        prompt=prompt,
        sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=20),
        router=ROUTER,
    )
    call: Any = prefill_pb2_grpc.PrefillStub(cluster.channel(name)).Prefill(message, timeout=CALL_S_MAX)
    with rpc_errors(name):
        return [event.WhichOneof("event") async for event in call]


async def with_tokens(cluster: RunningCluster, prompt: list[int], count: int) -> asyncio.Task[Answer]:
    """Ask, and return once the answer has begun to come from the decode node."""
    call: Any = cluster.client.stub.Generate(make_request(prompt, max_tokens=count), timeout=CALL_S_MAX)
    stream = aiter(call)
    events: list[inference_pb2.GenerateEvent] = []
    while sum(len(event.tokens.ids) for event in events) < 3:
        events.append(await anext(stream))

    async def rest() -> AsyncIterator[inference_pb2.GenerateEvent]:
        for event in events:
            yield event
        async for event in stream:
            yield event

    async def read() -> Answer:
        with rpc_errors("router-0"):
            return await collect(rest())

    return asyncio.create_task(read())


def test_a_stopped_decode_node_does_not_hold_up_the_other() -> None:
    """decode-1 is stopped while handoffs to it are under way and answers run on it. Twenty new requests are served by
    decode-0 meanwhile, exactly; continued, decode-1 finishes what it had, exactly."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(51)
        longs = [random_prompt(rng, 20) for _ in range(6)]
        calls = await asyncio.gather(*(with_tokens(cluster, prompt, 1000) for prompt in longs))
        handoffs = await ask_until_handoff(
            cluster, "decode-1", long=lambda: ask_exactly(cluster, random_prompt(rng, PROMPT_TOKENS), 20)
        )
        cluster.cluster.send_signal("decode-1", signal.SIGSTOP)
        cluster.set_down("decode-1")
        served = await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 100), 10) for _ in range(20)))
        assert {answer.stats.decode_node for answer in served} == {"decode-0"}
        assert any(not call.done() for call in handoffs), "the handoff to the stopped node was not stuck"
        cluster.cluster.send_signal("decode-1", signal.SIGCONT)
        cluster.set_down("decode-1", False)
        answers = await asyncio.gather(*calls)
        assert [answer.ids for answer in answers] == [mock_tokens(prompt, 1000) for prompt in longs]
        for outcome in await asyncio.gather(*handoffs, return_exceptions=True):
            assert isinstance(outcome, Answer) or (
                isinstance(outcome, BatonError) and outcome.code in (Code.UNAVAILABLE, Code.ABORTED)
            ), outcome
        await assert_conserved(cluster)

    spec = mock_spec(decode=2, blocks=900, prefill_flags={"engine.mock_layer_delay_ms": 10}, decode_flags=SLOW_DECODE)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_stopped_prefill_node_keeps_its_blocks_until_it_has_let_go() -> None:
    """prefill-0 is stopped in the middle of a handoff. Its lease lapses, its revocation goes unanswered: the blocks
    are quarantined and never reused, while other requests fill the rest of the region again and again, exactly.
    Continued, it lets go and everything is free."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(52)
        stuck = asyncio.create_task(
            error_of(prefill_directly(cluster, "prefill-0", "stuck", random_prompt(rng, PROMPT_TOKENS)))
        )
        await writer_owns_blocks(cluster, "decode-0")
        cluster.cluster.send_signal("prefill-0", signal.SIGSTOP)
        cluster.set_down("prefill-0")

        async def quarantined() -> bool:
            blocks = (await cluster.status("decode-0")).record.load.blocks
            assert blocks.writer_owned + blocks.quarantined == PROMPT_BLOCKS, blocks
            return blocks.quarantined == PROMPT_BLOCKS

        await until(cluster, "quarantine", quarantined)
        await directory_lists(cluster, "prefill-0", False)
        for _ in range(6):
            prompts = [random_prompt(rng, rng.randrange(150, 400)) for _ in range(4)]
            await asyncio.gather(*(ask_exactly(cluster, prompt, 30) for prompt in prompts))
            assert await quarantined(), "quarantined blocks were given away"
        cluster.cluster.send_signal("prefill-0", signal.SIGCONT)
        cluster.set_down("prefill-0", False)
        error = await stuck
        assert error.reason in (Reason.HANDOFF_FAILED, Reason.PEER_UNREACHABLE), error
        assert "decode-0" in error.message
        await assert_conserved(cluster)
        await directory_lists(cluster, "prefill-0", True)
        await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 500), 10) for _ in range(4)))
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill=2,
        blocks=150,
        both=FAST_MEMBERSHIP,
        router_flags={**FAST_MEMBERSHIP, "placement_wait_ms_max": 30_000},
        decode_flags={"receiver.lease_ms": 400, "receiver.revoke_ms": 100},
        node_flags={"prefill-0": SLOW_PREFILL},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_killed_prefill_node_is_fenced_by_its_death() -> None:
    """prefill-0 is killed in the middle of a handoff: its client is told at once, the decode node's proof is the
    pidfd and its blocks are free; started again, the cluster serves."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(53)
        call = asyncio.create_task(error_of(cluster.client.generate(random_prompt(rng, PROMPT_TOKENS), max_tokens=5)))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.cluster.send_signal("prefill-0", signal.SIGKILL)
        assert await cluster.cluster.wait_exit("prefill-0") == -signal.SIGKILL
        cluster.set_down("prefill-0")
        error = await call
        assert (error.code, error.reason) == (Code.UNAVAILABLE, Reason.PEER_UNREACHABLE), error
        assert "prefill-0" in error.message
        await assert_conserved(cluster)
        assert "dead" in cluster.cluster.log_text("decode-0"), "fenced without its proof"
        await cluster.cluster.start_process("prefill-0")
        cluster.set_down("prefill-0", False)
        await directory_lists(cluster, "prefill-0", True)

        async def served() -> bool:
            outcome = await asyncio.gather(ask_exactly(cluster, random_prompt(rng, 100), 5), return_exceptions=True)
            if isinstance(outcome[0], BatonError) and outcome[0].code is Code.UNAVAILABLE:
                return False
            assert isinstance(outcome[0], Answer), outcome
            return True

        await until(cluster, "the restarted node to serve", served)
        await assert_conserved(cluster)

    spec = mock_spec(both=FAST_MEMBERSHIP, router_flags=FAST_MEMBERSHIP, prefill_flags=SLOW_PREFILL)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_killed_decode_node_fails_its_requests_and_no_others() -> None:
    """decode-1 is killed with answers running on it and a handoff to it under way: their clients are told UNAVAILABLE,
    the others' answers are exact, and the prefill node lets go of everything."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(54)
        loop = asyncio.get_running_loop()
        calls = await ask_until_handoff(
            cluster,
            "decode-1",
            long=lambda: ask_exactly(cluster, random_prompt(rng, PROMPT_TOKENS), 20),
            short=lambda: ask_exactly(cluster, random_prompt(rng, 20), 800),
            requests_min=4,
        )
        cluster.cluster.send_signal("decode-1", signal.SIGKILL)
        killed_s = loop.time()
        await cluster.cluster.wait_exit("decode-1")
        cluster.set_down("decode-1")
        told_s: list[float] = []
        for call in calls:
            call.add_done_callback(lambda c: told_s.append(loop.time() - killed_s) if c.exception() else None)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, BatonError), outcome
                assert outcome.code is Code.UNAVAILABLE, outcome
                assert "decode-1" in outcome.message
        assert told_s, "nothing ran on the killed node"
        assert len(told_s) < len(calls), "nothing ran on the other node"
        print(f"told after at most {max(told_s):.3f} s")
        await assert_conserved(cluster)
        await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 100), 10) for _ in range(6)))
        await assert_conserved(cluster)

    spec = mock_spec(
        decode=2,
        blocks=800,
        both=FAST_MEMBERSHIP,
        router_flags={**FAST_MEMBERSHIP, "liveness.reconnect_ms_max": 400},
        prefill_flags={"engine.mock_layer_delay_ms": 10},
        decode_flags=SLOW_DECODE,
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_killed_router_leaves_orphans_that_are_cancelled() -> None:
    """The router is killed with requests at every stage: prefill nodes see their calls end, decode nodes cancel what
    runs after orphan_ms."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(55)
        calls = await asyncio.gather(*(with_tokens(cluster, random_prompt(rng, 20), 3000) for _ in range(4)))
        for _ in range(2):
            prompt = random_prompt(rng, PROMPT_TOKENS)
            calls.append(asyncio.create_task(cluster.client.generate(prompt, max_tokens=3000)))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.cluster.send_signal("router-0", signal.SIGKILL)
        cluster.set_down("router-0")
        errors = await asyncio.gather(*map(error_of, calls))
        assert {error.code for error in errors} == {Code.UNAVAILABLE}
        await assert_conserved(cluster)
        assert "orphan" in cluster.cluster.log_text("decode-0")

    spec = mock_spec(
        blocks=2000,
        prefill_flags={"engine.mock_layer_delay_ms": 10},
        decode_flags={"orphan_ms": 300, **SLOW_DECODE},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_node_that_is_asked_to_stop_leaves_nothing_on_its_peer(name: str) -> None:
    """SIGINT in the middle of handoffs and answers: status 0, errors that say so, and nothing left at the peer."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(56)
        calls = await asyncio.gather(*(with_tokens(cluster, random_prompt(rng, 20), 700) for _ in range(3)))
        for _ in range(2):
            prompt = random_prompt(rng, PROMPT_TOKENS)
            calls.append(asyncio.create_task(cluster.client.generate(prompt, max_tokens=100)))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.cluster.send_signal(name, signal.SIGINT)
        assert await cluster.cluster.wait_exit(name) == 0, cluster.story()
        cluster.set_down(name)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, (Answer, BatonError)), outcome
        await assert_conserved(cluster)

    spec = mock_spec(
        blocks=1200,
        both=FAST_MEMBERSHIP,
        router_flags={**FAST_MEMBERSHIP, "liveness.reconnect_ms_max": 400},
        prefill_flags={"engine.mock_layer_delay_ms": 10},
        decode_flags=SLOW_DECODE,
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
