"""An HTTP server with an app of the tests' own, on the loop of the test, and clients that say what they like."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.endpoint import split_endpoint
from baton.errors import BatonError
from router.config import RouterConfig
from router.http_server import HttpServer

HANG_S: Final = 30.0
REQUEST: Final = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """The body, or "ok"."""
    await Response((await Request(scope, receive).body()) or b"ok")(scope, receive, send)


class Door:
    """`refused` has what the server has said no to."""

    def __init__(self, app: ASGIApp, config: RouterConfig) -> None:
        self.refused: list[BatonError] = []
        self.server = HttpServer(app, config, rng=random.Random(1), refused=self.refused.append)
        self.endpoint = self.server.start("127.0.0.1:0")
        self._writers: list[asyncio.StreamWriter] = []

    async def __call__(self, *, source: str = "127.0.0.1") -> Stream:
        """A new connection."""
        stream = await asyncio.open_connection(*split_endpoint(self.endpoint), local_addr=(source, 0), limit=1 << 16)
        self._writers.append(stream[1])
        return stream

    async def all_closed(self) -> None:
        """By the server."""
        await self.server._all_closed()

    async def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        await self.server.stop()


@asynccontextmanager
async def served(app: ASGIApp, limits: dict[str, Any]) -> AsyncIterator[Door]:
    door = Door(app, RouterConfig(**limits))
    try:
        yield door
    finally:
        await door.close()


def run(scene: Callable[[Door], Awaitable[None]], app: ASGIApp = echo, **limits: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S), served(app, limits) as door:
            await scene(door)

    asyncio.run(limited())


async def answer(stream: Stream, request: bytes = REQUEST) -> tuple[bytes, bytes]:
    """The head and the body, which must have a length."""
    reader, writer = stream
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (int(line.split()[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return head, await reader.readexactly(length)
