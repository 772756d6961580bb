"""The proxy of the fault cases: whose connections are whose, and what a dark link does with old and new ones."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from tests.faults import owners
from tests.faults.proxy import Dark, Proxy
from tests.support.cluster_harness import wait_for

ME: Final = "me"


@asynccontextmanager
async def echoing() -> AsyncIterator[Proxy]:
    """A proxy before a server that says everything again; this process is known to it as ME."""
    running: set[asyncio.Task[None]] = set()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            while data := await reader.read(100):
                writer.write(data)
        finally:
            writer.transport.abort()
            running.discard(task)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = Proxy(("127.0.0.1", 0), server.sockets[0].getsockname()[:2], pids=lambda: {ME: os.getpid()})
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()
        if running:
            await asyncio.wait(running)


async def opened(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", proxy.port)


@pytest.mark.parametrize("dark", [Dark.BOTH, Dark.REQUESTS])
def test_who_gives_up_in_the_dark_leaves_nothing(dark: Dark) -> None:
    """Fifty connections are made while nothing passes, say something and close: none is kept. One that stays is
    answered when all is well again, and so is one from before."""

    async def scenario() -> None:
        async with echoing() as proxy:
            old_reader, old = await opened(proxy)
            old.write(b"1")
            assert await old_reader.read(1) == b"1"
            proxy.darken(ME, dark)
            old.write(b"2")
            for _ in range(50):
                _, writer = await opened(proxy)
                writer.write(b"is anybody there")
                writer.close()
            staying_reader, staying = await opened(proxy)
            staying.write(b"3")

            async def alone() -> bool:
                return len(proxy._tasks) == 2

            await wait_for(alone, "those that gave up to be forgotten")
            proxy.heal()
            assert await old_reader.read(1) == b"2"
            assert await staying_reader.read(1) == b"3"
            old.close()
            staying.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
@pytest.mark.parametrize("tables", [False, True])
def test_whose_a_connection_is(monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily, tables: bool) -> None:
    """That of this process, over either kind of socket, and with a kernel that cannot be asked about one alone."""
    if tables:
        monkeypatch.setattr(owners, "_inode", lambda *_ends: None)
    pids = {"another": os.getppid(), ME: os.getpid()}
    with socket.socket() as listener, socket.socket(family) as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.connect(("127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1", listener.getsockname()[1]))
        accepted, _ = listener.accept()
        with accepted:
            ends = accepted.getpeername(), accepted.getsockname()
            assert owners.owner_of(*ends, pids) == ME
            assert owners.owner_of(*ends, {"another": os.getppid()}) == owners.OWNER_UNKNOWN


def test_a_connection_that_has_ended_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that connect again and again have often given up by the time that somebody looks. The kernel says that
    there is no such connection, and its tables are not read, which would take a thousand times as long."""

    def read(*_ports: int) -> int:
        raise AssertionError("the tables were read")

    with socket.socket() as listener, socket.create_connection(listen(listener)) as client:
        ends = client.getsockname(), client.getpeername()
    if owners._inode(*ends) is None:
        pytest.skip("this kernel cannot be asked about one connection alone (sock_diag)")
    monkeypatch.setattr(owners, "_inode_in_tables", read)
    assert owners.owner_of(*ends, {ME: os.getpid()}) == owners.OWNER_UNKNOWN


def listen(listener: socket.socket) -> tuple[str, int]:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    address: tuple[str, int] = listener.getsockname()
    return address
