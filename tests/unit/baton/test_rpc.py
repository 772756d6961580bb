"""Calls over real servers on the loopback: errors, deadlines, limits, callers that go away."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from batonpb import (
    common_pb2,
    decode_pb2,
    inference_pb2,
    node_pb2,
    prefill_pb2,
)
from grpc_health.v1 import health_pb2

from baton import rpc
from baton.errors import BatonError, Code, Reason
from baton.log import LogLevel, set_up_logging
from baton.rpc import HEALTH_SERVICE, UNTIMED_STREAMS, RpcLimits, rpc_errors, time_left_s
from tests.support.logs import tear_down_logging
from tests.support.rpc_harness import HANG_S, SERVING, Behavior, answer, run, serving


def full_error() -> BatonError:
    return BatonError(
        Reason.DECODE_FULL,
        "Every decode node is full – try again.",
        field="sampling.max_tokens",
        retry_after_ms=1250,
        metadata={"free": "0"},
    )


def assert_full(error: BatonError) -> None:
    sent = full_error()
    assert (error.code, error.reason, error.message) == (Code.RESOURCE_EXHAUSTED, sent.reason, sent.message)
    assert (error.field, error.retry_after_ms, error.metadata) == (sent.field, 1250, {"free": "0"})


def test_an_error_reaches_the_caller_of_a_unary_call() -> None:
    """The handler raises: the caller gets reason, text, field, retry time and facts."""

    async def refuse(_request: object, _context: object) -> None:
        raise full_error()

    async def scene() -> None:
        async with serving(node=refuse) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert_full(caught.value)

    run(scene())


def test_an_error_reaches_the_caller_of_a_stream_after_its_messages() -> None:
    """The handler yields once, then raises; both handler styles of gRPC, and a stream in both directions."""

    async def by_yield(_request: object, _context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        yield prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token=5))
        raise full_error()

    async def by_write(_request: object, context: Any) -> None:
        await context.write(prefill_pb2.PrefillEvent(first_token=prefill_pb2.FirstToken(token=5)))
        raise full_error()

    async def both_ways(requests: AsyncIterator[decode_pb2.SubscribeRequest], _context: object) -> AsyncIterator[Any]:
        async for _ in requests:
            yield decode_pb2.TokenBatch()
            raise full_error()

    async def scene(behavior: Behavior) -> None:
        async with serving(prefill=behavior, decode=both_ways) as served:
            call = served.prefill.Prefill(prefill_pb2.PrefillRequest(), timeout=HANG_S)
            assert (await call.read()).first_token.token == 5
            with pytest.raises(BatonError) as caught, rpc_errors("prefill-0"):
                await call.read()
            assert_full(caught.value)
            call = served.decode.Subscribe()
            await call.write(decode_pb2.SubscribeRequest())
            assert await call.read() == decode_pb2.TokenBatch()
            with pytest.raises(BatonError) as caught, rpc_errors("decode-0"):
                await call.read()
            assert_full(caught.value)

    run(scene(by_yield))
    run(scene(by_write))


def test_a_bug_in_a_handler_is_told_by_an_id_only() -> None:
    """The caller gets INTERNAL with an id and no inner text; the log has the traceback under that id."""

    async def buggy(_request: object, _context: object) -> None:
        raise KeyError("secret")

    async def scene() -> None:
        async with serving(node=buggy) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert (caught.value.code, caught.value.reason) == (Code.INTERNAL, Reason.INTERNAL)
            assert "secret" not in caught.value.message
            incident = caught.value.metadata["incident"]
            assert incident in caught.value.message
            assert f"method=/baton.v1.Node/GetStatus incident={incident}" in stream.getvalue()
            assert "KeyError: 'secret'" in stream.getvalue()

    stream = io.StringIO()
    handler = set_up_logging(node="node-0", level=LogLevel.INFO, stream=stream)
    try:
        run(scene())
    finally:
        tear_down_logging(handler)


def test_a_handler_that_ends_as_cancelled_by_itself_answers_at_once() -> None:
    """It awaited a task that somebody else cancelled. Without an answer the caller would wait for its deadline."""

    async def stray(_request: object, _context: object) -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        task.cancel()
        await task

    async def scene() -> None:
        async with serving(node=stray) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert caught.value.reason is Reason.INTERNAL

    run(scene())


def test_an_internal_call_without_a_deadline_is_refused() -> None:
    """Node is an internal service; with a deadline the same call is answered."""

    async def scene() -> None:
        async with serving(node=answer) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status(timeout=None)
            assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, Reason.NO_DEADLINE)
            assert "/baton.v1.Node/GetStatus" in caught.value.message
            assert (await served.get_status()).requests == 7

    run(scene())


def test_an_internal_call_with_a_deadline_of_days_ends_with_the_longest_of_a_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A caller that names a week would hold its place for a week."""
    monkeypatch.setattr(rpc, "INTERNAL_MARGIN_S", 0.05)

    async def hang(_request: object, _context: object) -> None:
        await asyncio.Event().wait()

    async def scene() -> None:
        limits = RpcLimits(public_deadline_ms_default=50, public_deadline_ms_max=50)
        async with serving(limits, node=hang) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status(timeout=7 * 86_400)
            assert caught.value.reason is Reason.DEADLINE

    run(scene())


def test_a_public_call_without_a_deadline_gets_the_default() -> None:
    """The handler hangs; the default of 50 ms ends it, the handler's own cleanup runs, the caller gets DEADLINE."""
    cleaned = asyncio.Event()
    left: list[float] = []
    limits = RpcLimits(public_deadline_ms_default=50, public_deadline_ms_max=60)

    async def hang(_request: object, context: Any) -> None:
        left.append(time_left_s(context, limits))
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.set()

    async def scene() -> None:
        async with serving(limits, inference=hang) as served:
            for timeout in (None, HANG_S):
                with pytest.raises(BatonError) as caught, rpc_errors("router"):
                    await served.inference.GenerateUnary(inference_pb2.GenerateRequest(), timeout=timeout)
                assert (caught.value.code, caught.value.reason) == (Code.DEADLINE_EXCEEDED, Reason.DEADLINE)
                assert caught.value.message == "The server's time limit for this call has passed."
                assert cleaned.is_set()
                cleaned.clear()
            assert left == [0.05, 0.06]

    run(scene())


@pytest.mark.parametrize("by", ["cancel", "deadline"])
def test_a_handler_is_ended_when_its_caller_goes_away(by: str) -> None:
    """A stream rests at its second yield when the caller cancels, or its deadline passes: the handler's `finally` runs
    at once, without help of the garbage collector."""
    gate, ended = asyncio.Event(), asyncio.Event()

    async def endless(_request: object, _context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        try:
            while True:
                yield prefill_pb2.PrefillEvent()
                await gate.wait()
        finally:
            ended.set()

    async def scene() -> None:
        async with serving(prefill=endless) as served:
            call = served.prefill.Prefill(prefill_pb2.PrefillRequest(), timeout=HANG_S if by == "cancel" else 1.0)
            assert await call.read() == prefill_pb2.PrefillEvent()
            if by == "cancel":
                call.cancel()
            await ended.wait()
            call.cancel()

    run(scene())


def test_a_slow_reader_does_not_keep_an_ended_stream_alive() -> None:
    """The handler is blocked writing to a caller that does not read; the caller cancels: `finally` runs."""
    ended = asyncio.Event()

    async def flood(_request: object, _context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        try:
            while True:
                yield prefill_pb2.PrefillEvent(granted=prefill_pb2.Granted(decode_node="x" * 100_000))
        finally:
            ended.set()

    async def scene() -> None:
        async with serving(prefill=flood) as served:
            call = served.prefill.Prefill(prefill_pb2.PrefillRequest(), timeout=HANG_S)
            assert (await call.read()).granted.decode_node != ""
            call.cancel()
            await ended.wait()

    run(scene())


def test_beyond_the_limit_of_calls_the_answer_is_busy_and_health_still_works() -> None:
    """Two calls hang at a limit of two: the third is refused with a retry time, liveness is answered, and when one
    ends there is room again."""
    running, gate = asyncio.Semaphore(0), asyncio.Event()

    async def hang(_request: object, _context: object) -> node_pb2.NodeStatus:
        running.release()
        await gate.wait()
        return node_pb2.NodeStatus()

    async def scene() -> None:
        async with serving(RpcLimits(rpcs_max=2, busy_retry_ms=123), node=hang) as served:
            calls = [asyncio.create_task(served.get_status()) for _ in range(2)]
            for _ in calls:
                await running.acquire()
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert (caught.value.reason, caught.value.retry_after_ms) == (Reason.TOO_MANY_CALLS, 123)
            assert await served.check("") == SERVING
            gate.set()
            await asyncio.gather(*calls)
            await served.get_status()

    run(scene())


def test_watchers_of_one_address_take_no_more_than_their_share() -> None:
    """An attacker opens as many health watches as it can: it gets so many, the rest are refused at once. Checks and
    other calls are answered, and when a watch ends there is room for one."""

    async def scene() -> None:
        async with serving(node=answer) as served:
            watch = served.health.Watch
            share = UNTIMED_STREAMS[f"/{HEALTH_SERVICE}/Watch"].of_address
            watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(share)]
            for each in watches:
                assert (await each.read()).status == SERVING
            for _ in range(100):
                with pytest.raises(BatonError) as caught, rpc_errors("node-0"):
                    await watch(health_pb2.HealthCheckRequest()).read()
                assert caught.value.reason is Reason.TOO_MANY_CALLS
            assert await served.check("") == SERVING
            assert (await served.get_status()).requests == 7
            watches[0].cancel()
            while True:  # until the server has noticed
                with suppress(BatonError), rpc_errors("node-0"):
                    assert (await watch(health_pb2.HealthCheckRequest()).read()).status == SERVING
                    break

    run(scene())


def test_a_message_over_the_limit_is_refused() -> None:
    """A reply of 2 MiB against a limit of 1 MiB is an error of the call, no matter of load, and the server lives on."""
    size = 2 * 1024 * 1024

    async def big(_request: object, _context: object) -> node_pb2.NodeStatus:
        return node_pb2.NodeStatus(counters=[node_pb2.Counter(name="x" * size)])

    async def scene() -> None:
        async with serving(RpcLimits(message_bytes_max=1024 * 1024), node=big) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert (caught.value.reason, caught.value.code) == (Reason.BAD_FIELD, Code.INVALID_ARGUMENT)
            assert await served.check("") == SERVING

    run(scene())


@pytest.mark.parametrize("method", ["Subscribe", "Cancel"])
def test_what_is_no_message_is_the_callers_mistake(method: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a stream of requests as in a single one: BAD_FIELD, and no line in the log, which anybody could fill."""

    async def read(request: Any, _context: object) -> AsyncIterator[object]:
        async for message in request:
            yield message

    async def scene() -> None:
        async with serving(decode=read if method == "Subscribe" else answer) as served:
            channel, path = served.channels.get(f"127.0.0.1:{served.port}"), f"/baton.v1.Decode/{method}"
            stream = channel.stream_stream(path)(iter([b"\xff"]), timeout=HANG_S) if method == "Subscribe" else None
            reply = channel.unary_unary(path)(b"\xff", timeout=HANG_S) if stream is None else stream.read()
            with pytest.raises(BatonError) as caught, rpc_errors("decode-0"):
                await reply
            assert caught.value.reason is Reason.BAD_FIELD

    run(scene())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_enums_agree_with_the_wire() -> None:
    """The own enums have the names and numbers of the generated ones."""
    from baton.lifecycle import Lifecycle
    from baton.wire import Role

    for own, wire in ((Lifecycle, common_pb2.Lifecycle), (Role, common_pb2.Role)):
        prefix = own.__name__.upper() + "_"
        expected = {name.removeprefix(prefix): number for name, number in wire.items() if number != 0}
        assert {member.name: member.value for member in own} == expected
