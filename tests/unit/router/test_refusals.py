"""What is refused before it is a request has a line in the router's log, and a flood of it takes few lines."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc.aio
import pytest
from batonpb import inference_pb2, inference_pb2_grpc

from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason, bad_field
from baton.lifecycle import LifecycleEvent, NodeLifecycle
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer, rpc_errors
from router import http_server, text_workers
from router.config import RouterConfig
from router.http_server import HttpServer, OpenAiApp
from router.request_log import LIMITS, RequestLog
from router.service import INFERENCE_SERVICE, InferenceService
from tests.support.cluster_harness import wait_for
from tests.support.router_records import lone_router

HANG_S = 30.0
BODY_BYTES_MAX = 1_000
Asked = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))


class Door:
    """A router that knows no node and thus keeps each request, over gRPC and HTTP."""

    def __init__(self) -> None:
        self.lifecycle: NodeLifecycle
        self.http = ""
        self.stub: Any = None
        self.requests: Callable[[], int] = lambda: 0

    async def call(self, *metadata: tuple[str, str]) -> BatonError:
        """What one call over gRPC is refused with."""
        with pytest.raises(BatonError) as caught, rpc_errors("router-0"):
            await self.stub.GenerateUnary(Asked, timeout=HANG_S, metadata=metadata)
        return caught.value

    async def post(self, body: bytes, *headers: bytes) -> bytes:
        """The status line that one call over HTTP gets."""
        return (await self.head(body, *headers))[0]

    async def head(self, body: bytes, *headers: bytes) -> list[bytes]:
        """Status line and headers, as they come."""
        reader, writer = await asyncio.open_connection(*split_endpoint(self.http))
        lines = [b"POST /v1/completions HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *headers]
        writer.write(b"\r\n".join([*lines, b"", body]))
        try:
            return (await reader.readuntil(b"\r\n\r\n")).splitlines(keepends=True)[:-1]
        finally:
            writer.close()
            await writer.wait_closed()


def play(scene: Callable[[Door], Awaitable[None]], *, rpcs_max: int = 64, **config: Any) -> None:
    async def limited() -> None:
        rng, door = random.Random(5), Door()
        limits = RpcLimits(rpcs_max=rpcs_max, message_bytes_max=BODY_BYTES_MAX)
        settings = RouterConfig(
            rpc=limits, http_body_bytes_max=BODY_BYTES_MAX, placement_wait_ms_max=int(HANG_S * 1_000), **config
        )
        channels = Channels(limits=ChannelLimits())
        node = lone_router([], config=settings, channels=channels, rng=rng)
        assert isinstance(node._lifecycle, NodeLifecycle)
        door.lifecycle = node._lifecycle
        door.requests = lambda: node.requests
        server = RpcServer(limits=limits, rng=rng)
        server.on_refused(partial(node.request_log.refused, door="grpc"))
        server.add(INFERENCE_SERVICE, InferenceService.add_to_server, InferenceService(node))
        port = await server.start("127.0.0.1:0")
        app = OpenAiApp(node)
        http = HttpServer(app.asgi(), settings, rng=rng, refused=partial(node.request_log.refused, door="http"))
        door.http = http.start("127.0.0.1:0")
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        door.stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            async with asyncio.timeout(HANG_S):
                await scene(door)
        finally:
            await channel.close()
            await http.stop()
            await server.stop(0)
            await node.close()
            await channels.close()

    asyncio.run(limited())


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Level and fields of the lines about what was refused."""
    found = [r for r in caplog.records if r.getMessage() == "request refused"]
    return [(r.levelname, r.baton_fields) for r in found]  # type: ignore[attr-defined]


def test_a_router_that_drains(caplog: pytest.LogCaptureFixture) -> None:
    """HTTP says so, with the id that the client gave, which comes back. Over gRPC nobody gets a connection then."""

    async def scene(door: Door) -> None:
        door.lifecycle.handle(LifecycleEvent.DRAIN, now_s=0.0)
        head = await door.head(b'{"prompt": [1]}', b"x-request-id: yours")
        assert head[0] == b"HTTP/1.1 503 Service Unavailable\r\n"
        assert b"x-request-id: yours\r\n" in head

    with caplog.at_level(logging.INFO):
        play(scene)
    why = "This router takes no new requests."
    assert refusals(caplog) == [
        ("WARNING", {"reason": "NODE_DRAINING", "request": "yours", "door": "http", "why": why}),
    ]


def test_a_client_that_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    """A body that is no JSON, one that is too long, a field that cannot be read: the field, not the words. Each is told
    the id that the log has: not its own, which is none that a log should have."""
    ids: list[str] = []

    async def scene(door: Door) -> None:
        for body in (b"secret", b'"' + b"secret" * BODY_BYTES_MAX + b'"', b'{"prompt": [1], "top_p": "secret"}'):
            head = await door.head(body, b"x-request-id: no id!")
            assert head[0] == b"HTTP/1.1 400 Bad Request\r\n"
            ids.extend(line.decode().split()[1] for line in head if line.startswith(b"x-request-id: "))

    with caplog.at_level(logging.INFO):
        play(scene)
    fields = ["none", "body", "top_p"]
    assert [(level, reported["field"]) for level, reported in refusals(caplog)] == [("INFO", field) for field in fields]
    assert [reported["request"] for _, reported in refusals(caplog)] == ids
    assert len(set(ids)) == 3
    assert all(len(id_) == 32 for id_ in ids)
    assert "secret" not in caplog.text


def test_a_call_that_meets_a_bug(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told the id that the log has beside the traceback: its own, or one of ours."""

    def broken(raw: bytes) -> dict[str, Any]:
        raise ZeroDivisionError(raw)

    monkeypatch.setattr("router.openai.parse_body", broken)
    ids: list[str] = []

    async def scene(door: Door) -> None:
        for headers in ((b"x-request-id: yours",), ()):
            head = await door.head(b"{}", *headers)
            assert head[0] == b"HTTP/1.1 500 Internal Server Error\r\n"
            ids.extend(line.decode().split()[1] for line in head if line.startswith(b"x-request-id: "))

    with caplog.at_level(logging.INFO):
        play(scene)
    failed = [r for r in caplog.records if r.getMessage() == "a call failed"]
    assert [r.baton_fields["request"] for r in failed] == ids  # type: ignore[attr-defined]
    assert (ids[0], len(set(ids))) == ("yours", 2)


def test_one_call_too_many(caplog: pytest.LogCaptureFixture) -> None:
    """The server answers one call, and refuses the second before its handler has it."""

    async def scene(door: Door) -> None:
        first = door.stub.Generate(Asked, timeout=HANG_S)

        async def there() -> bool:
            return door.requests() == 1

        await wait_for(there, "the first call")
        assert (await door.call()).reason is Reason.TOO_MANY_CALLS
        first.cancel()

    with caplog.at_level(logging.INFO):
        play(scene, rpcs_max=1)
    ((level, reported),) = refusals(caplog)
    assert (level, reported["reason"], reported["door"]) == ("WARNING", "TOO_MANY_CALLS", "grpc")


def test_one_connection_too_many(caplog: pytest.LogCaptureFixture) -> None:
    """One may be open. Its neighbour is refused, whatever it asks for."""

    async def scene(door: Door) -> None:
        _, first = await asyncio.open_connection(*split_endpoint(door.http))
        while await door.post(b"") != b"HTTP/1.1 429 Too Many Requests\r\n":
            pass
        first.close()
        await first.wait_closed()

    with caplog.at_level(logging.INFO):
        play(scene, http_connections_max=1)
    reported = refusals(caplog)[-1][1]
    assert (reported["reason"], reported["door"]) == ("TOO_MANY_CALLS", "http")


def test_bodies_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients of one address send the beginnings of bodies that together are more than its share: one is refused
    with a time to come back. A short body is taken all the same. When the first has left there is room again."""

    async def scene(door: Door) -> None:
        first, second = [await asyncio.open_connection(*split_endpoint(door.http)) for _ in range(2)]
        for _, writer in (first, second):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 900\r\n\r\n" + b" " * 700)
        done, _ = await asyncio.wait(
            [asyncio.create_task(each[0].readuntil(b"\r\n\r\n")) for each in (first, second)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        (refused,) = done
        assert await door.post(b'"short"') == b"HTTP/1.1 400 Bad Request\r\n"
        assert refused.result().startswith(b"HTTP/1.1 429 ")
        assert re.search(rb"retry-after-ms: [12]000\r\n", refused.result())
        for _, writer in (first, second):
            writer.close()
            await writer.wait_closed()

        async def has_room() -> bool:
            return await door.post(b'"' + b" " * 700 + b'"') == b"HTTP/1.1 400 Bad Request\r\n"

        await wait_for(has_room, "the bytes of those who left to count no more")

    monkeypatch.setattr(http_server, "SHORT_BYTES_MAX", 100)
    monkeypatch.setattr(text_workers, "HELD_BYTES_MAX", 1_000)
    play(scene)


def test_a_body_must_come_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client sends a byte now and then, for ever: it is refused. Another one has sent so much that it may wait."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    async def scene(door: Door) -> None:
        slow, fast = [await asyncio.open_connection(*split_endpoint(door.http)) for _ in range(2)]
        for _, writer in (slow, fast):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 900\r\n\r\n")
        fast[1].write(b" " * 899)
        dripping = asyncio.create_task(drip(slow[1]))
        assert (await slow[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 504 ")
        fast[1].write(b"1")
        assert (await fast[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
        dripping.cancel()
        for _, writer in (slow, fast):
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    monkeypatch.setattr(http_server, "BODY_BYTES_PER_S", 100)
    play(scene, http_body_ms_free=500)


def test_a_flood_of_it_takes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Five thousand a second for half a minute, of two kinds: each has its first lines and its sums, apart from the
    requests that failed for the same reason. None is left out."""
    now_s = 0.0
    log = RequestLog(lambda: now_s)
    kinds = (BatonError(Reason.NODE_DRAINING, "It drains.", retry_after_ms=10), bad_field("body", "No JSON."))
    with caplog.at_level(logging.INFO):
        for _ in range(30):
            for error in kinds:
                for _ in range(2_500):
                    log.refused(error, door="http", request_id=None)
            now_s += 1.0
            log.upkeep()
        log.close()
    assert len(refusals(caplog)) == 2 * LIMITS.full_max
    sums = [r.baton_fields["times"] for r in caplog.records if r.getMessage() == "request refused: repeated"]  # type: ignore[attr-defined]
    assert len(sums) == 6
    assert sum(sums) + 2 * LIMITS.full_max == 150_000
