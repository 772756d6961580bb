"""Requests and clusters that cannot work: an exact code, reason and field, a readable message, and nothing left."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import BatonError, Code, Reason
from baton.rpc import rpc_errors
from cli.services import Service
from tests.cluster.test_mixed_protocol import directly
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Answer,
    RunningCluster,
    assert_conserved,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    running,
    wait_for,
)
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, inprocess
from tests.support.node_states import prefill_state

BLOCKS = 100
SOON = {"placement_wait_ms_max": 200}
"""A router that soon stops looking for nodes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running(mock_spec(blocks=BLOCKS)) as cluster:
        yield cluster


def check(error: BatonError, code: Code, reason: Reason, field: str | None, *words: str) -> None:
    assert (error.code, error.reason, error.field) == (code, reason, field), error
    for word in words:
        assert word in error.message, error.message
    assert error.message.endswith("."), error.message


INVALID = Code.INVALID_ARGUMENT
SAMPLING = Reason.SAMPLING_OUT_OF_RANGE
BAD_REQUESTS: dict[str, tuple[dict[str, Any], Code, Reason, str, str]] = {
    "empty": ({"prompt": []}, INVALID, Reason.EMPTY_PROMPT, "token_ids", "empty"),
    "too-long-for-the-model": ({"prompt": [1] * 4096}, INVALID, Reason.PROMPT_TOO_LONG, "token_ids", "4096"),
    "too-long-for-the-region": ({"prompt": [1] * 1601}, INVALID, Reason.PROMPT_TOO_LONG, "prompt", "101 blocks"),
    "answer-too-long-for-the-region": (
        {"prompt": [1] * 1500, "max_tokens": 500},
        INVALID,
        Reason.PROMPT_TOO_LONG,
        "prompt",
        "prompt and answer need 125 blocks",
    ),
    "token-id": ({"prompt": [5, 1000, 7]}, INVALID, Reason.TOKEN_OUT_OF_RANGE, "token_ids", "1000 at position 1"),
    "temperature-negative": ({"temperature": -0.1}, INVALID, SAMPLING, "sampling.temperature", "-0.1"),
    "temperature-nan": ({"temperature": math.nan}, INVALID, SAMPLING, "sampling.temperature", "nan"),
    "temperature-infinite": ({"temperature": math.inf}, INVALID, SAMPLING, "sampling.temperature", "inf"),
    "temperature-huge": ({"temperature": 100.5}, INVALID, SAMPLING, "sampling.temperature", "100.5"),
    "top-p-zero": ({"top_p": 0.0}, INVALID, SAMPLING, "sampling.top_p", "above 0"),
    "top-p-over-one": ({"top_p": 1.01}, INVALID, SAMPLING, "sampling.top_p", "1.01"),
    "top-p-nan": ({"top_p": math.nan}, INVALID, SAMPLING, "sampling.top_p", "nan"),
    "top-k": ({"top_k": 1001}, INVALID, SAMPLING, "sampling.top_k", "1001"),
    "max-tokens": ({"max_tokens": 0}, INVALID, SAMPLING, "sampling.max_tokens", "at least 1"),
    "stop-token": ({"stop_token_ids": [3, 1000]}, INVALID, SAMPLING, "sampling.stop_token_ids", "1000"),
    "stop-tokens": ({"stop_token_ids": range(65)}, INVALID, SAMPLING, "sampling.stop_token_ids", "65"),
    "model": ({"model": "gpt"}, Code.NOT_FOUND, Reason.UNKNOWN_MODEL, "model", "'mock', not 'gpt'"),
    "text": ({"prompt": "hello"}, Code.FAILED_PRECONDITION, Reason.NO_TOKENIZER, "text", "--model"),
}


@pytest.mark.parametrize(
    ("request_", "code", "reason", "field", "word"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys()
)
def test_a_bad_request_is_told_what_is_wrong(
    cluster: RunningCluster, request_: dict[str, Any], code: Code, reason: Reason, field: str, word: str
) -> None:
    """Streamed and unary: the same code, reason and field, and a message that names the value."""

    async def ask() -> None:
        fields = {"prompt": [1, 2, 3], **request_}
        check(await error_of(cluster.client.generate(**fields)), code, reason, field, word)
        check(await error_of(cluster.client.unary(**fields)), code, reason, field, word)
        await assert_conserved(cluster)

    cluster.run(ask())


def test_a_request_without_a_prompt(cluster: RunningCluster) -> None:
    """Neither text nor token ids are set."""

    async def ask() -> None:
        request = make_request([])
        request.ClearField("token_ids")
        with pytest.raises(BatonError) as caught, rpc_errors("router"):
            await cluster.client.stub.GenerateUnary(request, timeout=CALL_S_MAX)
        check(caught.value, INVALID, Reason.EMPTY_PROMPT, "prompt", "empty")

    cluster.run(ask())


def test_the_longest_request_that_fits_is_served(cluster: RunningCluster) -> None:
    """The bounds of the refusals above are exact: a prompt that fills the region, and an answer that does."""

    async def ask() -> None:
        prompt = [1] * 1599
        assert (await cluster.client.generate(prompt, max_tokens=2)).ids == mock_tokens(prompt, 2)
        prompt = [2] * 1500
        assert (await cluster.client.generate(prompt, max_tokens=101)).ids == mock_tokens(prompt, 101)
        error = await error_of(cluster.client.generate(prompt, max_tokens=102))
        assert error.reason is Reason.PROMPT_TOO_LONG
        await assert_conserved(cluster)

    cluster.run(ask())


@pytest.mark.parametrize(
    ("missing", "reason", "word"),
    [("decode-0", Reason.NO_DECODE_NODE, "decode node"), ("prefill-0", Reason.NO_PREFILL_NODE, "prefill node")],
)
def test_a_cluster_without_one_role(missing: str, reason: Reason, word: str) -> None:
    """No node of one role was started: UNAVAILABLE, with a time to come back."""

    async def scenario() -> None:
        async with inprocess(mock_spec(router_flags={"placement_wait_ms_max": 300}), without=(missing,)) as cluster:
            error = await error_of(cluster.client.generate([1, 2], max_tokens=3))
            check(error, Code.UNAVAILABLE, reason, None, word)
            assert error.retry_after_ms == 1000
            await assert_conserved(cluster)

    asyncio.run(scenario())


async def in_line(cluster: InProcessCluster, count: int) -> None:
    async def wait() -> bool:
        return cluster.router.waiting == count

    await wait_for(wait, f"{count} requests to wait in line", story=cluster.story)


async def node_error(cluster: InProcessCluster, name: str) -> BatonError:
    """What the prefill node tells the router."""
    return await error_of(directly(cluster, "prefill-0", common_pb2.RequestKey(request=name), [7, 8], 3, []))


async def waits_for_room(cluster: InProcessCluster) -> asyncio.Task[Answer]:
    """A request that waits in the router's line. Another one has waited there until its deadline, a third one until its
    client left."""
    waiting = asyncio.create_task(cluster.client.generate([7, 8], max_tokens=3))
    leaving = asyncio.create_task(cluster.client.generate([9, 9], max_tokens=3))
    await in_line(cluster, 2)
    error = await error_of(cluster.client.generate([9, 8], max_tokens=3, timeout_s=0.3))
    assert error.reason is Reason.DEADLINE
    leaving.cancel()
    await in_line(cluster, 1)
    assert not waiting.done()
    return waiting


def test_all_decode_nodes_full() -> None:
    """The only place in the decode node is taken: a request waits in line, for longer than it may look for nodes, and
    is answered once the place is free. The node's refusal has a retry time."""

    async def scenario() -> None:
        spec = mock_spec(
            router_flags=SOON, decode_flags={"requests_max": 1, "busy_retry_ms": 123, "engine.mock_layer_delay_ms": 1}
        )
        async with inprocess(spec) as cluster:
            call: Any = cluster.client.stub.Generate(make_request([MARK], max_tokens=4000), timeout=CALL_S_MAX)
            tokens = 0
            async for event in call:
                tokens += len(event.tokens.ids)
                if tokens > 1:
                    break
            waiting = await waits_for_room(cluster)
            error = await node_error(cluster, "first")
            check(error, Code.RESOURCE_EXHAUSTED, Reason.DECODE_FULL, None, "decode-0", "request limit")
            assert error.retry_after_ms is not None
            assert 123 <= error.retry_after_ms < 123 * 1.5, "nothing has ended yet: nothing is known"
            ended, now_s = cluster.decode["decode-0"].reserving.requests_ended, cluster.loop.time()
            ended.left(1, now_s - 20)
            ended.left(1, now_s - 5)
            error = await node_error(cluster, "second")
            assert error.retry_after_ms is not None
            assert 20_000 <= error.retry_after_ms <= 30_000, "one in 20 s, so far"
            call.cancel()
            answer = await waiting
            assert (answer.ids, answer.stats.line_ms > SOON["placement_wait_ms_max"]) == (mock_tokens([7, 8], 3), True)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_prefill_queue_full() -> None:
    """One request waits at the prefill node, whose queue has room for one: the next waits in the router's line."""

    async def scenario() -> None:
        spec = mock_spec(router_flags=SOON, prefill_flags={"queue_max": 1, "busy_retry_ms": 77})
        async with inprocess(spec) as cluster:
            gate = cluster.gates[Point.PREFILL_QUEUE]
            gate.close()
            first = asyncio.create_task(cluster.client.generate([MARK, 1], max_tokens=3))
            await asyncio.wait_for(gate.reached.wait(), CALL_S_MAX)
            waiting = await waits_for_room(cluster)
            error = await node_error(cluster, "first")
            check(error, Code.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, None, "1 requests are waiting")
            assert error.retry_after_ms is not None
            assert 77 <= error.retry_after_ms < 77 * 1.5, "the node has not measured itself yet"
            prefill_state(cluster.prefill["prefill-0"]).rate.last_per_s = 0.05
            error = await node_error(cluster, "second")
            assert error.retry_after_ms is not None
            assert 5_000 <= error.retry_after_ms <= 7_500, "an eighth of two tokens, at 0.05 a second"
            gate.open()
            assert (await first).ids == mock_tokens([MARK, 1], 3)
            assert (await waiting).ids == mock_tokens([7, 8], 3)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_router_full() -> None:
    """Nodes have one request of the router, and may have one: the next one waits. The line has room for two, so one
    more is refused at once, with a retry time in whole seconds."""

    async def scenario() -> None:
        async with inprocess(mock_spec(router_flags={"requests_max": 1, "line_requests_max": 2})) as cluster:
            gate = cluster.gates[Point.PREFILL_QUEUE]
            gate.close()
            first = asyncio.create_task(cluster.client.generate([MARK, 1], max_tokens=3))
            await asyncio.wait_for(gate.reached.wait(), CALL_S_MAX)
            waiting = [asyncio.create_task(cluster.client.generate([7, n], max_tokens=3)) for n in (1, 2)]
            await in_line(cluster, 2)
            error = await error_of(cluster.client.generate([7, 8], max_tokens=3))
            check(error, Code.RESOURCE_EXHAUSTED, Reason.TOO_MANY_CALLS, None, "2 requests", "line_requests_max")
            assert error.retry_after_ms in (1_000, 2_000)
            gate.open()
            assert (await first).ids == mock_tokens([MARK, 1], 3)
            assert [(await each).ids for each in waiting] == [mock_tokens([7, n], 3) for n in (1, 2)]
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "word"),
    [({"engine.mock_seed": 1}, "weights"), ({"engine.block_size": 32}, "block_size")],
    ids=["weights", "layout"],
)
def test_nodes_that_do_not_fit_together_never_hand_over(flags: dict[str, object], word: str) -> None:
    """The decode node has other weights, or another layout: refused by name of what differs, before any Reserve."""

    async def scenario() -> None:
        async with inprocess(mock_spec(decode_flags=flags)) as cluster:
            error = await error_of(cluster.client.generate([MARK, 2], max_tokens=3))
            check(error, Code.FAILED_PRECONDITION, Reason.INCOMPATIBLE_NODE, None, "decode-0", word)
            assert not cluster.gates[Point.RESERVE_ARRIVED].reached.is_set()
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_an_unfit_node_beside_a_fit_one_is_passed_over() -> None:
    """decode-0 has other weights, decode-1 fits: every request goes to decode-1."""

    async def scenario() -> None:
        spec = mock_spec(decode=2, node_flags={"decode-0": {"engine.mock_seed": 1}})
        async with inprocess(spec) as cluster:
            for first in range(1, 9):
                answer = await cluster.client.generate([first, 2], max_tokens=3)
                assert answer.ids == mock_tokens([first, 2], 3)
                assert answer.stats.decode_node == "decode-1"
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_second_node_of_one_name_and_a_port_in_use() -> None:
    """Neither disturbs the node that was there first."""

    async def scenario() -> None:
        fast = {"membership.heartbeat_ms": 50, "membership.ttl_ms": 300}
        async with inprocess(mock_spec(both=fast)) as cluster:
            for name, service in (("decode-0", Service.DECODE), ("prefill-0", Service.PREFILL)):
                error = await cluster.start_double(name, service)
                check(error, Code.ALREADY_EXISTS, Reason.NAME_IN_USE, error.field, name)
                error = await cluster.start_double(name, service, listen=cluster.endpoints[name], name="other")
                check(error, Code.ALREADY_EXISTS, Reason.PORT_IN_USE, "listen", cluster.endpoints[name])
            assert (await cluster.client.generate([3, 2], max_tokens=3)).ids == mock_tokens([3, 2], 3)
            await assert_conserved(cluster)

    asyncio.run(scenario())


ALL_NAMES = ("directory", "router-0", "prefill-0", "decode-0")
OWN_SERVICE = {
    "directory": "baton.v1.Directory",
    "router-0": "baton.v1.Inference",
    "prefill-0": "baton.v1.Prefill",
    "decode-0": "baton.v1.Decode",
}


@pytest.mark.parametrize("name", ALL_NAMES)
def test_health_and_reflection_answer(cluster: RunningCluster, name: str) -> None:
    """The standard services, as probes and grpcurl call them: without a deadline."""

    async def ask() -> None:
        channel = cluster.channel(name)
        for service in ("", OWN_SERVICE[name]):
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        await call.done_writing()
        assert {OWN_SERVICE[name], "grpc.health.v1.Health"} <= listed

    cluster.run(ask())


def header(status: node_pb2.NodeStatus, *, stale: bool = False) -> common_pb2.Header:
    return common_pb2.Header(sender=77, receiver=status.record.incarnation ^ (1 if stale else 0))


def test_an_internal_call_without_a_deadline_is_refused(cluster: RunningCluster) -> None:
    """Every internal method: NO_DEADLINE, before anything else is looked at."""

    async def ask() -> None:
        prefill, decode = cluster.channel("prefill-0"), cluster.channel("decode-0")
        calls: list[tuple[Any, Any]] = [
            (node_pb2_grpc.NodeStub(prefill).GetStatus, node_pb2.GetStatusRequest()),
            (transfer_pb2_grpc.TransferStub(prefill).Revoke, transfer_pb2.RevokeRequest()),
            (transfer_pb2_grpc.TransferStub(decode).Release, transfer_pb2.ReleaseRequest()),
            (decode_pb2_grpc.DecodeStub(decode).Cancel, decode_pb2.CancelRequest()),
        ]
        for method, message in calls:
            with pytest.raises(BatonError) as caught, rpc_errors("node"):
                await method(message)
            check(caught.value, INVALID, Reason.NO_DEADLINE, None, "deadline")

    cluster.run(ask())


Ask = Callable[[RunningCluster, common_pb2.Header], Any]
STALE_CALLS: dict[str, Ask] = {
    "Connect": lambda c, h: _transfer(c).Connect(transfer_pb2.ConnectRequest(header=h), timeout=CALL_S_MAX),
    "Reserve": lambda c, h: _transfer(c).Reserve(
        transfer_pb2.ReserveRequest(header=h, prompt=[1], key=common_pb2.RequestKey(request="r")), timeout=CALL_S_MAX
    ),
    "Renew": lambda c, h: _transfer(c).Renew(transfer_pb2.RenewRequest(header=h), timeout=CALL_S_MAX),
    "Commit": lambda c, h: _transfer(c).Commit(transfer_pb2.CommitRequest(header=h), timeout=CALL_S_MAX),
    "Release": lambda c, h: _transfer(c).Release(transfer_pb2.ReleaseRequest(header=h), timeout=CALL_S_MAX),
    "Cancel": lambda c, h: _decode(c).Cancel(decode_pb2.CancelRequest(header=h), timeout=CALL_S_MAX),
    "Resolve": lambda c, h: _decode(c).Resolve(decode_pb2.ResolveRequest(header=h), timeout=CALL_S_MAX),
}


def _transfer(cluster: RunningCluster) -> transfer_pb2_grpc.TransferStub:
    return transfer_pb2_grpc.TransferStub(cluster.channel("decode-0"))


def _decode(cluster: RunningCluster) -> decode_pb2_grpc.DecodeStub:
    return decode_pb2_grpc.DecodeStub(cluster.channel("decode-0"))


@pytest.mark.parametrize("ask", STALE_CALLS.values(), ids=STALE_CALLS.keys())
def test_a_message_for_another_incarnation_is_refused(cluster: RunningCluster, ask: Ask) -> None:
    """A message for a process that was here before, or one that names no sender: refused, nothing is left of it."""

    async def scenario() -> None:
        status = await cluster.status("decode-0")
        with pytest.raises(BatonError) as caught, rpc_errors("decode-0"):
            await ask(cluster, header(status, stale=True))
        check(caught.value, Code.FAILED_PRECONDITION, Reason.INCARNATION_MISMATCH, None, "restarted")
        assert caught.value.metadata["incarnation"] == f"{status.record.incarnation:016x}"
        with pytest.raises(BatonError) as caught, rpc_errors("decode-0"):
            await ask(cluster, common_pb2.Header(receiver=status.record.incarnation))
        check(caught.value, INVALID, Reason.BAD_FIELD, "header.sender", "sender")
        await assert_conserved(cluster)

    cluster.run(scenario())


def test_a_call_that_floods_the_queue_leaves_nothing(cluster: RunningCluster) -> None:
    """A hundred bad requests at once beside good ones."""

    async def ask() -> None:
        bad = [error_of(cluster.client.generate([1, 2000 + i], max_tokens=3)) for i in range(100)]
        good = [cluster.client.generate([1, 2, i], max_tokens=5) for i in range(1, 10)]
        errors, answers = await asyncio.gather(asyncio.gather(*bad), asyncio.gather(*good))
        assert {error.reason for error in errors} == {Reason.TOKEN_OUT_OF_RANGE}
        assert [a.ids for a in answers] == [mock_tokens([1, 2, i], 5) for i in range(1, 10)]

        async def empty() -> bool:
            return (await cluster.status("router-0")).requests == 0

        await wait_for(empty, "the router to be empty", story=cluster.story)
        await assert_conserved(cluster)

    cluster.run(ask())
