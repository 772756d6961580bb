"""The life of a gRPC server on the loopback: health, reflection, addresses, restarts, its stop; and channels to it."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
from batonpb import (
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
)
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from baton.endpoint import join_endpoint
from baton.errors import BatonError, Code, Reason
from baton.log import LogLevel, set_up_logging
from baton.rpc import ChannelLimits, Channels, RpcLimits
from tests.support import raw_http2 as http2
from tests.support.logs import tear_down_logging
from tests.support.ports import free_ports
from tests.support.rpc_harness import HANG_S, SERVING, Served, answer, make_server, run, serving

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_readiness_flips_and_liveness_does_not() -> None:
    """Not ready after the start, ready when the node says so, not ready when it drains; two watchers see each change,
    also after the first of them has left. An unknown service is NOT_FOUND."""

    async def states(served: Served) -> list[int]:
        return [await served.check(service) for service in ("", "live", "ready", "baton.v1.Node")]

    async def scene() -> None:
        async with serving(node=answer) as served:
            assert await states(served) == [
                SERVING,
                SERVING,
                NOT_SERVING,
                NOT_SERVING,
            ]
            watches = [served.health.Watch(health_pb2.HealthCheckRequest(service="ready")) for _ in range(2)]
            assert [(await w.read()).status for w in watches] == [NOT_SERVING, NOT_SERVING]
            served.server.set_ready(True)
            assert [(await w.read()).status for w in watches] == [SERVING, SERVING]
            watches[0].cancel()
            assert await states(served) == [SERVING, SERVING, SERVING, SERVING]
            served.server.set_ready(False)
            assert (await watches[1].read()).status == NOT_SERVING
            assert await states(served) == [
                SERVING,
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
                "grpc.reflection.v1.ServerReflection",
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


def test_reflection_is_there_by_its_newer_name_too() -> None:
    """A tool that asks for v1 gets the same names, and v1's own description, which names no message of v1alpha."""

    async def scene() -> None:
        async with serving(node=answer) as served:
            channel = served.channels.get(f"127.0.0.1:{served.port}")
            call = channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )()
            await call.write(reflection_pb2.ServerReflectionRequest(list_services="*"))
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert "baton.v1.Node" in names
            await call.write(
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection")
            )
            (raw,) = (await call.read()).file_descriptor_response.file_descriptor_proto
            assert FileDescriptorProto.FromString(raw).package == "grpc.reflection.v1"
            assert b"v1alpha" not in raw
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
            assert caught.value.message.startswith("node-0 does not answer: ")
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


async def _goodbye(reader: asyncio.StreamReader) -> bytes:
    """The text of the first GOAWAY."""
    while True:
        kind, _, _, payload = await http2.read_frame(reader)
        if kind == http2.GOAWAY:
            return payload[8:]


def test_a_server_that_takes_no_calls_for_a_while() -> None:
    """Who is connected is told to go (GOAWAY), and its call goes on to its end. Nobody gets a connection, but to the
    port for probes, where the process is alive. Opened again it answers at its port, while that call still runs."""
    begun, go_on = asyncio.Semaphore(0), asyncio.Event()
    (probes,) = free_ports(1)

    async def wait(_request: object, _context: object) -> node_pb2.NodeStatus:
        begun.release()
        await go_on.wait()
        return node_pb2.NodeStatus(requests=7)

    async def scene() -> None:
        server = make_server(node=wait)
        channels, others = Channels(limits=ChannelLimits()), Channels(limits=ChannelLimits())
        try:
            served = Served(server, await server.start("127.0.0.1:0", probe_listen=f"127.0.0.1:{probes}"), channels)
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(http2.GREETING)
            call = asyncio.create_task(served.get_status())
            await begun.acquire()
            server.set_open(False)
            assert await _goodbye(reader) == b"Server shutdown"
            writer.close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", served.port)
            health = health_pb2_grpc.HealthStub(channels.get(f"127.0.0.1:{probes}"))
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
            server.set_open(True)
            again = Served(server, served.port, others)
            late = again.node.GetStatus(node_pb2.GetStatusRequest(), timeout=HANG_S, wait_for_ready=True)
            await begun.acquire()
            go_on.set()
            assert ((await call).requests, (await late).requests) == (7, 7)
        finally:
            await channels.close()
            await others.close()
            await server.stop(0)

    run(scene())


def test_a_server_is_stopped_while_it_takes_no_calls() -> None:
    """Calls that go on are ended, whether it was opened again or not."""

    async def forever(_request: object, _context: object) -> None:
        begun.release()
        await asyncio.Event().wait()

    begun = asyncio.Semaphore(0)

    async def scene() -> None:
        for again in (False, True):
            async with serving(node=forever) as served:
                call = asyncio.create_task(served.get_status())
                await begun.acquire()
                served.server.set_open(False)
                served.server.set_open(again)
                await served.server.stop(0)
                with pytest.raises(BatonError, match="is stopping"):
                    await call

    run(scene())
