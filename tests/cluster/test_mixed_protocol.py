"""A router of our own speaks to mixed nodes: calls that break, Cancel and Resolve at any time, newer attempts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final
from unittest.mock import patch

import pytest
from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from baton.errors import Reason
from baton.rpc import rpc_errors
from mixed_node.node import MixedNode
from prefill_node.node import PrefillNode
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
from tests.support.node_states import decode_state, prefill_state

MIN: Final = 64
ROUTER: Final = 0xFEED


def key(request: str, attempt: int = 0) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request=request, attempt=attempt)


async def directly(
    cluster: InProcessCluster,
    name: str,
    key: common_pb2.RequestKey,
    prompt: list[int],
    count: int,
    events: list[str],
    *,
    output: Sequence[int] = (),
    avoid: Sequence[int] = (),
) -> int:
    """Send a request to one node as a router of our own, with `output` of its answer, that does not reach those to
    `avoid`; which process has granted. Raises BatonError."""
    runtime = cluster.runtimes[name]
    request = prefill_pb2.PrefillRequest(
        header=common_pb2.Header(sender=ROUTER, receiver=runtime.incarnation),
        key=key,
        prompt=prompt,
        output=output,
        sampling=common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=count, ignore_eos=True),
        router=ROUTER,
        avoid_decode=avoid,
    )
    granted = 0
    stub = prefill_pb2_grpc.PrefillStub(runtime.channels.get(runtime.endpoint))
    with rpc_errors(name):
        async for event in stub.Prefill(request, timeout=CALL_S_MAX):
            events.append(event.WhichOneof("event"))
            granted = granted or event.granted.decode_incarnation
    return granted


async def cancel(cluster: InProcessCluster, name: str, key: common_pb2.RequestKey) -> bool:
    runtime = cluster.runtimes[name]
    stub = decode_pb2_grpc.DecodeStub(runtime.channels.get(runtime.endpoint))
    request = decode_pb2.CancelRequest(
        header=common_pb2.Header(sender=ROUTER, receiver=runtime.incarnation), key=key, reason="a test"
    )
    return bool((await stub.Cancel(request, timeout=CALL_S_MAX)).known)


async def resolve(cluster: InProcessCluster, name: str, key: common_pb2.RequestKey) -> bool:
    runtime = cluster.runtimes[name]
    stub = decode_pb2_grpc.DecodeStub(runtime.channels.get(runtime.endpoint))
    request = decode_pb2.ResolveRequest(header=common_pb2.Header(sender=ROUTER, receiver=runtime.incarnation), key=key)
    return bool((await stub.Resolve(request, timeout=CALL_S_MAX)).committed)


def test_full_decode_nodes() -> None:
    """The decode node has one place, which is taken. By default a long prompt is refused then, and may come again;
    where the policy says so it runs here instead, and a short one runs here in any case."""

    async def scenario(fallback: str) -> None:
        rng = random.Random(45)
        spec = mock_spec(
            prefill=1,
            decode=1,
            mixed=1,
            both={"engine.mock_layer_delay_ms": 0.2},
            decode_flags={"requests_max": 1},
            mixed_flags={"handoff_tokens_min": MIN, "local_fallback": fallback},
        )
        async with inprocess(spec) as cluster:
            mixed = cluster.runtimes["mixed-0"]
            holder = random_prompt(rng, 100)
            seen: list[str] = []
            key = common_pb2.RequestKey(request="holder")
            held = asyncio.create_task(directly(cluster, "mixed-0", key, holder, 2_000, seen))

            async def taken() -> bool:
                return cluster.decode["decode-0"].requests == 1 and "handed_off" in seen

            await wait_for(taken, "the only place to be taken", story=cluster.story)
            one = common_pb2.RequestKey(request="one")
            prompt = random_prompt(rng, 200)
            if fallback == "full":
                events: list[str] = []
                assert await directly(cluster, "mixed-0", one, prompt, 4, events) == mixed.incarnation
                assert events == ["granted", "first_token", "handed_off"]
            else:
                error = await error_of(directly(cluster, "mixed-0", one, prompt, 4, []))
                assert error.reason is Reason.DECODE_FULL
            short = common_pb2.RequestKey(request="short")
            assert await directly(cluster, "mixed-0", short, prompt[: MIN - 1], 4, []) == mixed.incarnation
            await held
            for name in ("mixed-0", "decode-0"):
                for request in ("holder", "one", "short"):
                    await cancel(cluster, name, common_pb2.RequestKey(request=request))
            await assert_conserved(cluster)

    for fallback in ("unreachable", "full"):
        asyncio.run(scenario(fallback))


def test_a_cancel_that_comes_first_wins() -> None:
    """Cancel and Resolve of an attempt that is not here yet leave a tombstone: the attempt is refused when it comes,
    and so is every one before it. A later attempt runs, and the router hears that it is committed."""

    async def scenario() -> None:
        spec = mock_spec(prefill=0, decode=0, mixed=1, mixed_flags={"orphan_ms": 60_000})
        async with inprocess(spec) as cluster:
            assert await cancel(cluster, "mixed-0", key("a", 1)) is False
            assert await resolve(cluster, "mixed-0", key("b", 1)) is False
            for request in ("a", "b"):
                for attempt in (0, 1):
                    error = await error_of(directly(cluster, "mixed-0", key(request, attempt), [7, 8], 4, []))
                    assert error.reason is Reason.CANCELLED
                await directly(cluster, "mixed-0", key(request, 2), [7, 8], 4, [])
                assert await resolve(cluster, "mixed-0", key(request, 2)) is True
                assert await cancel(cluster, "mixed-0", key(request, 2)) is True
                error = await error_of(directly(cluster, "mixed-0", key(request, 1), [7, 8], 4, []))
                assert error.reason is Reason.CANCELLED
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_an_orphan_that_is_kept_is_cancelled() -> None:
    """A router prefills and never subscribes: after orphan_ms its request is given up, in the middle of its answer."""

    async def scenario() -> None:
        flags = {"orphan_ms": 100, "engine.mock_layer_delay_ms": 1}
        async with inprocess(mock_spec(prefill=0, decode=0, mixed=1, mixed_flags=flags)) as cluster:
            events: list[str] = []
            await directly(cluster, "mixed-0", common_pb2.RequestKey(request="a"), [5, 6, 7], 3_000, events)
            assert events == ["granted", "first_token", "handed_off"]
            decode = cluster.decode["mixed-0"]
            await assert_conserved(cluster)
            assert (decode.requests, decode.answers_unacknowledged) == (0, 0)
            assert 0 < decode.pool.engine.counters.tokens_drawn < 3_000, "the answer has ended by itself"

    asyncio.run(scenario())


def test_an_attempt_that_comes_while_the_one_before_it_runs() -> None:
    """A newer attempt of a kept request, kept or by a Reserve, drops the older one, which no router waits for."""

    async def scenario() -> None:
        flags = {"handoff_tokens_min": MIN, "engine.mock_layer_delay_ms": 1, "orphan_ms": 60_000}
        async with inprocess(mock_spec(prefill=1, decode=0, mixed=1, mixed_flags=flags)) as cluster:
            decode = cluster.decode["mixed-0"]
            keys = [common_pb2.RequestKey(request="a", attempt=attempt) for attempt in range(3)]
            for node, attempt in (("mixed-0", 0), ("mixed-0", 1), ("prefill-0", 2)):
                granted = await directly(cluster, node, keys[attempt], [5, 6, 7], 2_000, [])
                assert granted == cluster.runtimes["mixed-0"].incarnation

                async def alone() -> bool:
                    return decode.requests == 1

                await wait_for(alone, "the older attempt to be gone", story=cluster.story)
                assert [job.key.attempt for job in decode_state(decode).jobs] == [attempt]
            assert [await resolve(cluster, "mixed-0", key) for key in keys] == [False, False, True]
            await cancel(cluster, "mixed-0", keys[2])
            await assert_conserved(cluster)

    asyncio.run(scenario())


async def held_in_its_prompt(cluster: InProcessCluster, request: str) -> asyncio.Task[int]:
    """A request that mixed-0 keeps, stopped in the second chunk of its prompt; nobody has a token of it."""
    gate = cluster.gates[Point.LAYER]
    gate.close()
    prompt = [MARK, *random_prompt(random.Random(46), 1_000)]
    call = asyncio.create_task(directly(cluster, "mixed-0", key(request), prompt, 50, []))
    await asyncio.wait_for(gate.reached.wait(), CALL_S_MAX)
    return call


def test_a_prefill_call_that_breaks_is_a_cancel() -> None:
    """The call ends before the first token, and no Cancel comes: nothing of the request is left, long before its
    router would count as away. The attempt is over for good."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill=0, decode=0, mixed=1, mixed_flags={"orphan_ms": 600_000})) as cluster:
            call = await held_in_its_prompt(cluster, "a")
            call.cancel()
            await asyncio.wait([call])

            async def over() -> bool:
                return cluster.prefill["mixed-0"].requests == 0

            await wait_for(over, "the call to end", story=cluster.story)
            cluster.gates[Point.LAYER].open()
            await assert_conserved(cluster)
            assert (await error_of(directly(cluster, "mixed-0", key("a"), [1], 5, []))).reason is Reason.CANCELLED

    asyncio.run(scenario())


@pytest.mark.parametrize("ask", ["cancel", "resolve"])
def test_what_is_asked_before_the_first_token(ask: str) -> None:
    """Cancel ends the request; Resolve finds it not committed, says so, and ends it too: its call gets an error."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill=0, decode=0, mixed=1, mixed_flags={"orphan_ms": 600_000})) as cluster:
            call = await held_in_its_prompt(cluster, "a")
            if ask == "cancel":
                assert await cancel(cluster, "mixed-0", key("a")) is True
            else:
                assert await resolve(cluster, "mixed-0", key("a")) is False
            cluster.gates[Point.LAYER].open()
            assert (await error_of(call)).reason is Reason.HANDOFF_FAILED
            assert await resolve(cluster, "mixed-0", key("a")) is False
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_an_older_attempt_comes_late() -> None:
    """Attempt 0 was granted and runs, attempt 1 is kept and drops it; then a Reserve of attempt 0 comes again, and is
    refused, and attempt 1 runs on."""

    async def scenario() -> None:
        flags = {"handoff_tokens_min": MIN, "engine.mock_layer_delay_ms": 1, "orphan_ms": 600_000}
        async with inprocess(mock_spec(prefill=1, decode=0, mixed=1, mixed_flags=flags)) as cluster:
            decode = cluster.decode["mixed-0"]
            await directly(cluster, "prefill-0", key("a", 0), [5, 6, 7], 2_000, [])
            await directly(cluster, "mixed-0", key("a", 1), [5, 6, 7], 2_000, [])

            async def alone() -> bool:
                return [job.key.attempt for job in decode_state(decode).jobs] == [1]

            await wait_for(alone, "the older attempt to be gone", story=cluster.story)
            late = await error_of(directly(cluster, "prefill-0", key("a", 0), [5, 6, 7], 2_000, []))
            assert late.reason is Reason.INCOMPATIBLE_NODE
            assert await alone()
            await cancel(cluster, "mixed-0", key("a", 1))
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_room_that_a_grant_gives_back_is_used_at_once() -> None:
    """A grant to another node's writer holds nearly all of the region, and a request that is to run here waits. The
    grant is cancelled, with no step of the engine near: the waiting one is told of it."""

    def look_again(self: MixedNode) -> None:
        self._looking = False
        self.prefill._admit()

    async def scenario() -> None:
        rng = random.Random(47)
        with (
            patch.object(PrefillNode, "look_again", lambda _self: None),
            patch.object(MixedNode, "_look_again", look_again),
        ):
            async with inprocess(mock_spec(prefill=1, decode=0, mixed=1, blocks=80)) as cluster:
                gate = cluster.gates[Point.COMMIT_ARRIVED]
                gate.close()
                big, small = [MARK, *random_prompt(rng, 999)], random_prompt(rng, 300)
                call = asyncio.create_task(directly(cluster, "prefill-0", key("big"), big, 20, []))
                await asyncio.wait_for(gate.reached.wait(), CALL_S_MAX)
                events: list[str] = []
                waiting = asyncio.create_task(directly(cluster, "mixed-0", key("small"), small, 20, events))

                async def waits() -> bool:
                    return len(prefill_state(cluster.prefill["mixed-0"]).queue) == 1

                await wait_for(waits, "the request to wait", story=cluster.story)
                call.cancel()
                await waiting
                assert events == ["granted", "first_token", "handed_off"]
                gate.open()
                await cancel(cluster, "mixed-0", key("small"))
                await assert_conserved(cluster)

    asyncio.run(scenario())


def test_more_of_both_halves_than_the_engine_has_places() -> None:
    """Four places in each engine, and a hundred requests to two mixed nodes, half of them handed over: all are
    answered, none finds the engine full."""

    async def scenario() -> None:
        rng = random.Random(48)
        flags = {
            "handoff_tokens_min": MIN,
            "requests_max": 4,
            "engine.sequences_max": 4,
            "engine.tokens_per_step_max": 32,
        }
        router = {"placement_wait_ms_max": 60_000}
        spec = mock_spec(prefill=0, decode=0, mixed=2, blocks=600, mixed_flags=flags, router_flags=router)
        async with inprocess(spec) as cluster:
            prompts = [random_prompt(rng, rng.choice([3, 40, 100, 200])) for _ in range(100)]
            answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=30) for p in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.ids == mock_tokens(prompt, 30)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_node_that_leaves_the_directory_goes_on_streaming() -> None:
    """A mixed node's record goes while it writes an answer, whose prefill call is long over: the router drops what it
    had for prefill calls to it, and the stream, which comes from the same endpoint, brings the answer to its end."""

    async def scenario() -> None:
        flags = {"engine.mock_layer_delay_ms": 1}
        async with inprocess(mock_spec(prefill=0, decode=0, mixed=1, mixed_flags=flags)) as cluster:
            answer = asyncio.create_task(cluster.client.generate([5, 6, 7], max_tokens=300))

            async def handed_off() -> bool:
                return cluster.decode["mixed-0"].requests == 1 and cluster.prefill["mixed-0"].requests == 0

            await wait_for(handed_off, "the prefill call to be over", story=cluster.story)
            await cluster.runtimes["mixed-0"].membership.stop()

            async def gone() -> bool:
                return not cluster.router._prefill_calls._running

            await wait_for(gone, "the router to have forgotten the node", story=cluster.story)
            assert not answer.done()
            assert (await answer).ids == mock_tokens([5, 6, 7], 300)
            await assert_conserved(cluster)

    asyncio.run(scenario())
