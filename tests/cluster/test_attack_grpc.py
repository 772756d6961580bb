"""Floods of the router's gRPC port that no client of gRPC would make, beside twenty answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support import raw_http2 as http2
from tests.support.attack import Front, attacker_connection, front_door, nobody_notices

GENERATE = "/baton.v1.Inference/Generate"
CALL = http2.call_head(GENERATE)
LARGE = [b"a" * 16_000] * 16
FRAMES_AT_ONCE = 64


def opened(stream: int) -> bytes:
    """A call whose request does not come."""
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, CALL)


def reset(stream: int) -> bytes:
    """A call that is taken back at once."""
    return opened(stream) + http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL)


def large_head(stream: int) -> bytes:
    """A call with a quarter of a MiB of metadata."""
    parts = [http2.header(b"x-large", value) for value in LARGE]
    frames = [http2.frame(http2.CONTINUATION, 0, stream, part) for part in parts[:-1]]
    last = http2.frame(http2.CONTINUATION, http2.END_HEADERS, stream, parts[-1])
    return b"".join([http2.frame(http2.HEADERS, 0, stream, CALL), *frames, last])


def endless_head(stream: int) -> bytes:
    """One call whose metadata do not end: three thousand entries at a time."""
    begin = http2.frame(http2.HEADERS, 0, 1, CALL) if stream == 1 else b""
    return begin + http2.frame(http2.CONTINUATION, 0, 1, http2.header(b"a", b"b") * 3_000)


def indexed_head(stream: int) -> bytes:
    """A call with 16,000 entries in as many bytes: all are the one before them."""
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream, CALL + b"\x40\x01x\x01y" + b"\xbe" * 16_000)


def ping(_stream: int) -> bytes:
    return http2.frame(http2.PING, 0, 0, bytes(8)) * 16


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with front_door() as front:
        yield front


@asynccontextmanager
async def attacker(front: Front, *, acknowledges: bool) -> AsyncIterator[asyncio.StreamWriter]:
    """An HTTP/2 connection. What comes is dropped."""
    reader, writer = await attacker_connection(front.cluster.router)

    async def drop() -> None:
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass

    dropping = asyncio.create_task(drop())
    acknowledgement = http2.frame(http2.SETTINGS, http2.ACK, 0)
    writer.write(http2.GREETING + (acknowledgement if acknowledges else b""))
    try:
        yield writer
    finally:
        dropping.cancel()
        writer.close()


async def check(front: Front) -> None:
    """Health/Check, over a connection of its own."""
    async with grpc.aio.insecure_channel(front.cluster.router) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.slow
@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize(
    ("says", "count"),
    [(opened, 2_000), (reset, 20_000), (large_head, 200), (endless_head, 1_000), (indexed_head, 400), (ping, 20_000)],
    ids=["half-open calls", "resets", "heads", "endless heads", "indexed heads", "pings"],
)
def test_a_flood_of_the_grpc_port(front: Front, says: Callable[[int], bytes], count: int, acknowledges: bool) -> None:
    """Over two connections, of a client that keeps to the limits it is told, and of one that has not heard of them. The
    streams beside it get their tokens, the router keeps its loop for no longer than it may, and checks are answered."""

    async def one(writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            for first in range(0, count, FRAMES_AT_ONCE):
                writer.write(b"".join(says(2 * i + 1) for i in range(first, first + FRAMES_AT_ONCE)))
                await writer.drain()

    async def attack() -> None:
        async with (
            attacker(front, acknowledges=acknowledges) as first,
            attacker(front, acknowledges=acknowledges) as second,
        ):
            await asyncio.gather(one(first), one(second), check(front))
            await check(front)

    front.run(nobody_notices(front, attack))
