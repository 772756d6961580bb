"""The public ports: who gets in, who serves them, and what happens where there is no room."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.endpoint import Address
from baton.errors import BatonError, Reason
from baton.http2_front import native_front
from baton.native import NativeLibrary
from router import doors as module
from router.config import RouterConfig
from router.doors import Door, Doors
from router.http_slots import Slot


class Books:
    """A taker that keeps what it gets."""

    def __init__(self, *, able: bool = True) -> None:
        self.able = able
        self.taken: dict[int, tuple[socket.socket, Address | None, Slot]] = {}
        self.news = asyncio.Event()

    def is_able(self, _door: Door) -> bool:
        return self.able

    def take(self, _door: Door, sock: socket.socket, peer: Address | None, slot: Slot, number: int) -> None:
        self.taken[number] = sock, peer, slot
        self.news.set()

    async def has(self, count: int) -> None:
        while len(self.taken) < count:
            self.news.clear()
            await self.news.wait()


class Scene:
    def __init__(self, **config: Any) -> None:
        self.refused: list[tuple[Door, Reason]] = []
        self.doors = Doors(RouterConfig(**config), refused=self._refuse)
        self.takers: list[Books] = []
        self.writers: list[asyncio.StreamWriter] = []

    def _refuse(self, door: Door, error: BatonError) -> None:
        self.refused.append((door, error.reason))

    def taker(self, *, able: bool = True) -> Books:
        self.takers.append(Books(able=able))
        return self.takers[-1]

    async def connect(self, port: int, host: str = "127.0.0.1", source: str | None = None) -> asyncio.StreamReader:
        local = (source, 0) if source is not None else None
        reader, writer = await asyncio.open_connection(host, port, local_addr=local)
        self.writers.append(writer)
        return reader


def play(scene: Callable[[Scene], Awaitable[None]], **config: Any) -> None:
    async def limited() -> None:
        made = Scene(**config)
        try:
            async with asyncio.timeout(30):
                await scene(made)
        finally:
            made.doors.close()
            for writer in made.writers:
                writer.transport.abort()
            for taker in made.takers:
                for sock, *_ in taker.taken.values():
                    sock.close()

    asyncio.run(limited())


def test_the_one_with_the_fewest_connections_gets_the_next() -> None:
    """Four go to two takers, two each; one that is not able gets none. What is over makes room."""

    async def scene(made: Scene) -> None:
        first, second, sick = made.taker(), made.taker(), made.taker(able=False)
        for taker in (first, second, sick):
            made.doors.add(taker)
        port = made.doors.open(Door.HTTP, "127.0.0.1:0", setting="http_listen")
        for _ in range(4):
            await made.connect(port)
        await first.has(2)
        await second.has(2)
        assert sick.taken == {}
        for number, (sock, *_) in second.taken.items():
            sock.close()
            made.doors.closed(number)
        for _ in range(2):
            await made.connect(port)
        await second.has(4)
        assert len(first.taken) == 2
        assert made.doors.remove(first) == list(first.taken)

    play(scene)


def test_nobody_is_able_for_a_while() -> None:
    """Connections wait in the kernel, and are taken as soon as somebody is."""

    async def scene(made: Scene) -> None:
        taker = made.taker(able=False)
        made.doors.add(taker)
        port = made.doors.open(Door.GRPC, "127.0.0.1:0", setting="listen")
        await made.connect(port)
        assert taker.taken == {}
        taker.able = True
        made.doors.resume()
        await taker.has(1)

    play(scene)


def test_one_address_does_not_take_all_places_of_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight places one address gets four, the next two; a proxy of ours gets what is left. Others are reset, and
    counted."""
    monkeypatch.setattr(module, "GRPC_CONNECTIONS_MAX", 8)

    async def scene(made: Scene) -> None:
        taker = made.taker()
        made.doors.add(taker)
        port = made.doors.open(Door.GRPC, "127.0.0.1:0", setting="listen")
        for source, places in (("127.0.0.66", 4), ("127.0.0.67", 2), ("127.0.9.1", 2)):
            before = len(taker.taken)
            for _ in range(places):
                await made.connect(port, source=source)
            await taker.has(before + places)
            with pytest.raises(ConnectionResetError):
                await (await made.connect(port, source=source)).read(1)
        assert made.refused == [(Door.GRPC, Reason.TOO_MANY_CALLS)] * 3

    play(scene, trusted_proxies=("127.0.9.0/24",))


def test_no_descriptor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop tries again after a pause, not in each turn: a few tries, until there is room."""
    tries = 0

    async def scene(made: Scene) -> None:
        taker = made.taker()
        made.doors.add(taker)
        port = made.doors.open(Door.HTTP, "127.0.0.1:0", setting="http_listen")
        real = socket.socket.accept

        def accept(listener: socket.socket) -> Any:
            nonlocal tries
            tries += 1
            if tries <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(listener)

        monkeypatch.setattr(socket.socket, "accept", accept)
        await made.connect(port)
        await taker.has(1)
        assert tries <= 4

    play(scene)


@pytest.mark.parametrize(
    ("listen", "hosts"),
    [("0.0.0.0:0", ("127.0.0.1", "::1")), ("[::]:0", ("127.0.0.1", "::1")), ("localhost:0", ("127.0.0.1",))],
)
def test_where_a_door_is(listen: str, hosts: tuple[str, ...]) -> None:
    """A wildcard is IPv4 and IPv6; port 0 is one port for all addresses. An IPv4 client is one, however it came."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")

    async def scene(made: Scene) -> None:
        taker = made.taker()
        made.doors.add(taker)
        port = made.doors.open(Door.HTTP, listen, setting="http_listen")
        for host in hosts:
            await made.connect(port, host)
        await taker.has(len(hosts))
        assert [str(peer) for _, peer, _ in taker.taken.values()] == list(hosts)

    play(scene)


def test_a_door_is_closed_and_opened_again() -> None:
    """Nobody gets in meanwhile; it is the same port then."""

    async def scene(made: Scene) -> None:
        taker = made.taker()
        made.doors.add(taker)
        port = made.doors.open(Door.GRPC, "127.0.0.1:0", setting="listen")
        made.doors.set_open(Door.GRPC, False)
        with pytest.raises(ConnectionRefusedError):
            await made.connect(port)
        made.doors.set_open(Door.GRPC, True)
        await made.connect(port)
        await taker.has(1)

    play(scene)


def test_a_port_that_is_taken_while_the_door_is_closed() -> None:
    """It is tried again until the port is free."""

    async def scene(made: Scene) -> None:
        made.doors.add(made.taker())
        port = made.doors.open(Door.GRPC, "127.0.0.1:0", setting="listen")
        made.doors.set_open(Door.GRPC, False)
        with socket.create_server(("127.0.0.1", port)):
            with pytest.raises(BatonError) as raised:
                Doors(RouterConfig()).open(Door.GRPC, f"127.0.0.1:{port}", setting="listen")
            assert (raised.value.reason, raised.value.field) == (Reason.PORT_IN_USE, "listen")
            made.doors.set_open(Door.GRPC, True)
        while True:
            try:
                await made.connect(port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0)

    play(scene)


def test_without_a_compiler_grpc_has_no_front(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning says so, and why."""
    monkeypatch.setattr("baton.http2_front.load", lambda _source: NativeLibrary(handle=None, status="no C compiler"))
    native_front.cache_clear()
    try:
        assert native_front() is None
        assert native_front() is None
        (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
        assert "gRPC faces its clients itself" in record.getMessage()
    finally:
        native_front.cache_clear()


def test_what_a_dead_taker_never_took_goes_to_another_one() -> None:
    """It has two connections, one of them not its own yet, and is gone. That one keeps its place, waits while nobody is
    able, and then goes to the next taker; the other one's place is free."""

    async def scene(made: Scene) -> None:
        dead, heir = made.taker(), made.taker(able=False)
        made.doors.add(dead)
        port = made.doors.open(Door.HTTP, "127.0.0.1:0", setting="http_listen")
        for _ in range(2):
            await made.connect(port)
        await dead.has(2)
        made.doors.add(heir)
        taken, untaken = made.doors.remove(dead)
        made.doors.closed(taken)
        made.doors.take_again(untaken, dead.taken.pop(untaken)[0])
        assert heir.taken == {}
        heir.able = True
        made.doors.resume()
        assert list(heir.taken) == [untaken]
        made.doors.closed(untaken)

    play(scene)


@pytest.mark.parametrize("shut", ["then", "before"])
def test_a_connection_that_nobody_takes_again_is_closed_when_its_door_is_shut(shut: str) -> None:
    """A drain begins while a gRPC connection waits for a worker, or just before it does. Its client is told by the end
    of the connection, as others are; one over HTTP waits still."""

    async def scene(made: Scene) -> None:
        dead = made.taker()
        made.doors.add(dead)
        readers = {
            door: await made.connect(made.doors.open(door, "127.0.0.1:0", setting=setting))
            for door, setting in ((Door.GRPC, "listen"), (Door.HTTP, "http_listen"))
        }
        await dead.has(2)
        if shut == "before":
            made.doors.set_open(Door.GRPC, False)
        for number in made.doors.remove(dead):
            made.doors.take_again(number, dead.taken.pop(number)[0])
        made.doors.set_open(Door.GRPC, False)
        assert await readers[Door.GRPC].read() == b""
        made.doors.add(heir := made.taker())
        assert len(heir.taken) == 1
        assert not readers[Door.HTTP].at_eof()

    play(scene)


@pytest.mark.parametrize("closes", ["then", "before"])
def test_a_connection_that_nobody_takes_again_is_closed_with_the_doors(closes: str) -> None:
    """The router stops while a connection waits for a worker, or a worker that has one dies in a router that stops: its
    client is told by the end of the connection."""

    async def scene(made: Scene) -> None:
        dead = made.taker()
        made.doors.add(dead)
        port = made.doors.open(Door.HTTP, "127.0.0.1:0", setting="http_listen")
        reader = await made.connect(port)
        await dead.has(1)
        if closes == "before":
            made.doors.close()
            made.doors.add(heir := made.taker())
        (number,) = made.doors.remove(dead)
        made.doors.take_again(number, dead.taken.pop(number)[0])
        made.doors.close()
        assert await reader.read() == b""
        assert closes == "then" or not heir.taken

    play(scene)
