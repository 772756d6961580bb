"""The gRPC edge over real servers on the loopback: errors, deadlines, limits, health, reflection, restarts."""

from __future__ import annotations

import asyncio
import io
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from batonpb import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.endpoint import join_endpoint
from baton.errors import BatonError, Code, Reason
from baton.log import LogLevel, set_up_logging, tear_down_logging
from baton.rpc import RpcLimits, RpcServer, time_left_s
from baton.rpc_client import ChannelLimits, Channels, rpc_errors

HANG_S = 20.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

Behavior = Callable[..., Any]
SERVICES: dict[str, tuple[str, Behavior, tuple[str, ...]]] = {
    "node": (
        "baton.v1.Node",
        node_pb2_grpc.add_NodeServicer_to_server,
        ("GetStatus", "Cordon", "Uncordon", "Drain", "Undrain"),
    ),
    "prefill": ("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, ("Prefill",)),
    "decode": (
        "baton.v1.Decode",
        decode_pb2_grpc.add_DecodeServicer_to_server,
        ("Subscribe", "Cancel", "Resolve"),
    ),
    "inference": (
        "baton.v1.Inference",
        inference_pb2_grpc.add_InferenceServicer_to_server,
        ("Generate", "GenerateUnary"),
    ),
}
"""Full name, the generated add function, and the methods, which all get the test's behavior."""


class Served:
    """A server and the channels to it; handlers raise, wait or answer as the test says."""

    def __init__(self, server: RpcServer, port: int, channels: Channels) -> None:
        self.server, self.port, self.channels = server, port, channels
        channel = channels.get(f"127.0.0.1:{port}")
        self.node = node_pb2_grpc.NodeStub(channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(channel)
        self.decode = decode_pb2_grpc.DecodeStub(channel)
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.reflection = reflection_pb2_grpc.ServerReflectionStub(channel)

    async def get_status(self, timeout: float | None = HANG_S) -> node_pb2.NodeStatus:
        with rpc_errors("node-0"):
            reply: node_pb2.NodeStatus = await self.node.GetStatus(node_pb2.GetStatusRequest(), timeout=timeout)
        return reply

    async def check(self, service: str) -> int:
        reply = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return int(reply.status)


async def answer(_request: object, _context: object) -> node_pb2.NodeStatus:
    return node_pb2.NodeStatus(requests=7)


def make_server(limits: RpcLimits | None = None, **behaviors: Behavior) -> RpcServer:
    server = RpcServer(limits=limits or RpcLimits(), rng=random.Random(1))
    for name, behavior in behaviors.items():
        service, register, methods = SERVICES[name]
        server.add(service, register, SimpleNamespace(**dict.fromkeys(methods, behavior)))
    return server


@asynccontextmanager
async def serving(limits: RpcLimits | None = None, **behaviors: Behavior) -> AsyncIterator[Served]:
    server = make_server(limits, **behaviors)
    channels = Channels(limits=ChannelLimits())
    try:
        port = await server.start("127.0.0.1:0")
        yield Served(server, port, channels)
    finally:
        await channels.close()
        await server.stop(0)


def run(test: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S):
            await test

    asyncio.run(limited())


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


def test_a_message_over_the_limit_is_refused() -> None:
    """A reply of 2 MiB against a limit of 1 MiB is an error of the call, and the server lives on."""
    size = 2 * 1024 * 1024

    async def big(_request: object, _context: object) -> node_pb2.NodeStatus:
        return node_pb2.NodeStatus(counters=[node_pb2.Counter(name="x" * size)])

    async def scene() -> None:
        async with serving(RpcLimits(message_bytes_max=1024 * 1024), node=big) as served:
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            assert await served.check("") == SERVING

    run(scene())


def test_readiness_flips_and_liveness_does_not() -> None:
    """Not ready after the start, ready when the node says so, not ready when it drains; two watchers see each change,
    also after the first of them has left. An unknown service is NOT_FOUND."""

    async def states(served: Served) -> list[int]:
        return [await served.check(service) for service in ("", "ready", "baton.v1.Node")]

    async def scene() -> None:
        async with serving(node=answer) as served:
            assert await states(served) == [
                SERVING,
                NOT_SERVING,
                NOT_SERVING,
            ]
            watches = [served.health.Watch(health_pb2.HealthCheckRequest(service="ready")) for _ in range(2)]
            assert [(await w.read()).status for w in watches] == [NOT_SERVING, NOT_SERVING]
            served.server.set_ready(True)
            assert [(await w.read()).status for w in watches] == [SERVING, SERVING]
            watches[0].cancel()
            assert await states(served) == [SERVING, SERVING, SERVING]
            served.server.set_ready(False)
            assert (await watches[1].read()).status == NOT_SERVING
            assert await states(served) == [
                SERVING,
                NOT_SERVING,
                NOT_SERVING,
            ]
            watches[1].cancel()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.check("baton.v1.Moon")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    run(scene())


def test_reflection_lists_and_describes_the_services() -> None:
    """grpcurl asks without a deadline: it gets the names, and the files that define one."""

    async def scene() -> None:
        async with serving(node=answer) as served:
            call = served.reflection.ServerReflectionInfo()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
            reply = await call.read()
            assert {service.name for service in reply.list_services_response.service} == {
                "baton.v1.Node",
                "grpc.health.v1.Health",
                "grpc.reflection.v1alpha.ServerReflection",
            }
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Node"))
            reply = await call.read()
            files = [FileDescriptorProto.FromString(f) for f in reply.file_descriptor_response.file_descriptor_proto]
            assert sorted(file.name for file in files) == [
                "batonpb/common.proto",
                "batonpb/directory.proto",
                "batonpb/node.proto",
            ]
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF

    run(scene())


def test_a_port_in_use_is_named() -> None:
    """Another process listens there, here a plain socket and then one of our own servers; nothing is left running."""

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(BatonError) as caught:
                await make_server(node=answer).start(f"127.0.0.1:{port}")
        assert (caught.value.code, caught.value.reason) == (Code.ALREADY_EXISTS, Reason.PORT_IN_USE)
        assert f"127.0.0.1:{port}: the port is in use" in caught.value.message
        async with serving(node=answer) as served:
            second = make_server(node=answer)
            for host in ("127.0.0.1", "localhost", "0.0.0.0"):
                with pytest.raises(BatonError, match=f"{host}:{served.port}: the port is in use"):
                    await second.start(f"{host}:{served.port}")
            await second.stop(0)

    run(scene())


@pytest.mark.parametrize(
    ("listen", "reason"),
    [
        ("192.0.2.1:0", Reason.LISTEN_REFUSED),
        ("no-such-host.invalid:0", Reason.LISTEN_REFUSED),
        ("7000", Reason.BAD_ENDPOINT),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(listen: str, reason: Reason) -> None:
    """An address of another machine, an unknown host, no host at all."""

    async def scene() -> None:
        with pytest.raises(BatonError) as caught:
            await make_server(node=answer).start(listen)
        assert caught.value.reason is reason
        assert listen in caught.value.message

    run(scene())


def test_a_peer_that_restarts_is_reached_again_on_the_same_channel() -> None:
    """Server down: UNAVAILABLE naming the peer. Server up again on its port: a waiting call gets through."""

    async def scene() -> None:
        async with serving(node=answer) as served:
            assert (await served.get_status()).requests == 7
            await served.server.stop(0)
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, Reason.PEER_UNREACHABLE)
            assert caught.value.message.startswith("node-0: ")
            again = make_server(node=answer)
            try:
                await again.start(f"127.0.0.1:{served.port}")
                reply = await served.node.GetStatus(node_pb2.GetStatusRequest(), timeout=HANG_S, wait_for_ready=True)
                assert reply.requests == 7
            finally:
                await again.stop(0)

    run(scene())


def test_stop_lets_running_calls_end() -> None:
    """A call is running when the server stops with a grace period: it is answered, a new one is not."""
    running, gate = asyncio.Event(), asyncio.Event()

    async def slow(_request: object, _context: object) -> node_pb2.NodeStatus:
        running.set()
        await gate.wait()
        return node_pb2.NodeStatus(requests=3)

    async def scene() -> None:
        async with serving(node=slow) as served:
            call = asyncio.create_task(served.get_status())
            await running.wait()
            stop = asyncio.create_task(served.server.stop(HANG_S))
            await asyncio.sleep(0)
            gate.set()
            assert (await call).requests == 3
            await stop
            with pytest.raises(BatonError) as caught:
                await served.get_status()
            assert caught.value.reason is Reason.PEER_UNREACHABLE

    run(scene())


@pytest.mark.parametrize("style", ["unary", "stream"])
def test_stop_returns_after_the_handlers_have_ended(style: str) -> None:
    """A call is cut off by the stop; what its handler does in its `finally` takes some turns of the loop, and is done
    when `stop` returns. Nothing is left on the loop then."""
    running, cleaned = asyncio.Event(), asyncio.Event()

    async def clean() -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        cleaned.set()

    async def unary(_request: object, _context: object) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await clean()

    async def stream(_request: object, _context: object) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        running.set()
        try:
            yield prefill_pb2.PrefillEvent()
            await asyncio.Event().wait()
        finally:
            await clean()

    async def scene() -> None:
        async with serving(node=unary, prefill=stream) as served:
            if style == "unary":
                call = served.node.GetStatus(node_pb2.GetStatusRequest(), timeout=HANG_S)
            else:
                call = served.prefill.Prefill(prefill_pb2.PrefillRequest(), timeout=HANG_S)
            await running.wait()
            await served.server.stop(0)
            assert cleaned.is_set()
            call.cancel()

    run(scene())


def test_a_handler_that_will_not_end_does_not_hold_stop_up() -> None:
    """It goes on although it was cancelled: after the limit `stop` returns, and the log names the method."""
    running, gate = asyncio.Event(), asyncio.Event()

    async def stubborn(_request: object, _context: object) -> None:
        running.set()
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    async def scene() -> None:
        async with serving(RpcLimits(handler_end_ms_max=50), node=stubborn) as served:
            call = asyncio.create_task(served.get_status())
            await running.wait()
            await served.server.stop(0)
            assert "handlers still running after stop methods=/baton.v1.Node/GetStatus" in stream.getvalue()
            gate.set()
            with pytest.raises(BatonError):
                await call

    stream = io.StringIO()
    handler = set_up_logging(node="node-0", level=LogLevel.INFO, stream=stream)
    try:
        run(scene())
    finally:
        tear_down_logging(handler)


def test_channels_are_shared_bounded_and_checked() -> None:
    """One channel per endpoint; a limit on their number, which dropping one makes room under; no channel to nowhere."""

    async def scene() -> None:
        channels = Channels(limits=ChannelLimits(channels_max=1))
        first = channels.get("127.0.0.1:9")
        assert channels.get("127.0.0.1:9") is first
        with pytest.raises(BatonError) as caught:
            channels.get("127.0.0.1:10")
        assert caught.value.reason is Reason.TOO_MANY_PEERS
        await channels.drop("127.0.0.1:9")
        channels.get("127.0.0.1:10")
        with pytest.raises(BatonError) as caught:
            channels.get("0.0.0.0:11")
        assert caught.value.reason is Reason.BAD_ENDPOINT
        await channels.close()
        await channels.close()

    run(scene())


def test_an_ipv6_listener_is_reached() -> None:
    """Brackets on both sides; skipped where the machine has no IPv6 loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")

    async def scene() -> None:
        server, channels = make_server(node=answer), Channels(limits=ChannelLimits())
        try:
            port = await server.start("[::1]:0")
            stub = node_pb2_grpc.NodeStub(channels.get(join_endpoint("::1", port)))
            assert (await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=HANG_S)).requests == 7
        finally:
            await channels.close()
            await server.stop(0)

    run(scene())


def test_enums_agree_with_the_wire() -> None:
    """The own enums have the names and numbers of the generated ones."""
    from baton.lifecycle import Lifecycle
    from baton.wire import Role

    for own, wire in ((Lifecycle, common_pb2.Lifecycle), (Role, common_pb2.Role)):
        prefix = own.__name__.upper() + "_"
        expected = {name.removeprefix(prefix): number for name, number in wire.items() if number != 0}
        assert {member.name: member.value for member in own} == expected
