"""What follows the frames of HTTP/2, and the front that does so before a gRPC server."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import resource
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.http2_front import Ended, Http2Front, NativeFront, native_front
from baton.native import load
from tests.support import raw_http2 as http2

PRIORITY, PUSH_PROMISE, WINDOW_UPDATE = 2, 5, 8
CALL = http2.call_head("/a/Peer")
SECOND_NS = 1_000_000_000
ENHANCE_YOUR_CALM = 11


@pytest.fixture(scope="module")
def native() -> NativeFront:
    found = native_front()
    if found is None:
        pytest.skip("no C compiler")
    return found


class Follower:
    """`http2_follower.h` alone."""

    def __init__(self, library: ctypes.CDLL, *, paced: bool = True) -> None:
        self._library = library
        self._state = ctypes.create_string_buffer(library.follower_nbytes())
        self.bytes = 0
        library.follower_begin(self._state, ctypes.c_uint64(0), int(paced))

    def take(self, raw: bytes, *, at_ns: int = 0) -> Ended:
        if self.verdict is Ended.LEFT:
            self.bytes += self._library.follower_take(
                self._state, raw, ctypes.c_size_t(len(raw)), ctypes.c_uint64(at_ns)
            )
        return self.verdict

    @property
    def verdict(self) -> Ended:
        return Ended(self._library.follower_verdict(self._state))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = load(Path(__file__).parents[2] / "support" / "http2_follower.c").handle
    if found is None:
        pytest.skip("no C compiler")
    return found


def block(*parts: int, raw: bytes = b"", ends: bool = True) -> bytes:
    """A header block in frames with so many bytes: one long entry, unless `raw` says what."""
    raw = raw or http2.header(b"x", bytes(sum(parts)))
    frames = b""
    for i, nbytes in enumerate(parts):
        flags = http2.END_HEADERS if ends and i == len(parts) - 1 else 0
        part, raw = raw[:nbytes], raw[nbytes:]
        frames += http2.frame(http2.CONTINUATION if i else http2.HEADERS, flags, 1, part)
    return frames


def entries(count: int) -> bytes:
    """A block with entries of each kind that HPACK knows, `count` in all."""
    literals = [
        http2.header(b"n" * 300, b"v" * 200),
        b"\x04\x03abc",
        b"\x0f\x80\x01\x03abc",
        b"\x50\x00",
        b"\x3f\xe1\x1f",
    ]
    kinds = [b"\xbe", b"\xff\x80\x01", http2.header(b"", b""), *literals]
    raw = b"".join(kinds[i % len(kinds)] for i in range(count))
    return block(*[16_000] * (len(raw) // 16_000), len(raw) % 16_000, raw=raw)


@pytest.mark.parametrize(
    ("raw", "verdict"),
    [
        (b"GET / HTTP/1.1\r\n", Ended.NO_PREFACE),
        (http2.PREFACE + http2.frame(http2.PING, 0, 0, bytes(8)), Ended.NO_SETTINGS),
        (http2.PREFACE + http2.frame(http2.SETTINGS, http2.ACK, 0), Ended.NO_SETTINGS),
        (http2.GREETING + block(*[16_384] * 4), Ended.LEFT),
        (http2.GREETING + block(*[16_384] * 4, 1), Ended.BLOCK_SIZE),
        (http2.GREETING + block(*[500] * 32), Ended.LEFT),
        (http2.GREETING + block(*[0] * 33), Ended.BLOCK_SIZE),
        (http2.GREETING + block(16_385), Ended.BLOCK_SIZE),
        (http2.GREETING + entries(256) * 3, Ended.LEFT),
        (http2.GREETING + entries(257), Ended.BLOCK_SIZE),
        (http2.GREETING + http2.frame(http2.HEADERS, 4 | 32, 1, bytes(5) + b"\xbe" * 256), Ended.LEFT),
        (http2.GREETING + http2.frame(http2.HEADERS, 4 | 8, 1, b"\0"), Ended.BLOCK_BROKEN),
        (http2.GREETING + block(5, ends=False) + http2.frame(http2.PING, 0, 0, bytes(8)), Ended.BLOCK_BROKEN),
        (http2.GREETING + block(5, ends=False) + http2.frame(http2.CONTINUATION, 4, 3), Ended.BLOCK_BROKEN),
        (http2.GREETING + http2.frame(http2.CONTINUATION, 4, 1), Ended.BLOCK_BROKEN),
        (http2.GREETING + http2.frame(PUSH_PROMISE, 4, 1, bytes(8)), Ended.PUSHED),
        (http2.GREETING + http2.frame(http2.SETTINGS, 0, 0, bytes(16_386)), Ended.FRAME_SIZE),
        (http2.GREETING + http2.frame(http2.DATA, 0, 1, bytes(60_000)) * 3, Ended.LEFT),
        (http2.GREETING + http2.frame(http2.DATA, 1, 1) * 5_000, Ended.LEFT),
    ],
)
def test_what_a_connection_may_send(library: ctypes.CDLL, raw: bytes, verdict: Ended) -> None:
    """Each limit, and one less than it."""
    assert Follower(library).take(raw) is verdict


@pytest.mark.parametrize(
    ("raw", "burst", "per_s"),
    [
        (http2.frame(http2.SETTINGS, 0, 0), 63, 10),  # the greeting was one
        (http2.frame(http2.PING, 0, 0, bytes(8)), 1_000, 100),
        (http2.frame(http2.RST_STREAM, 0, 1, http2.CANCEL), 4_096, 500),
        (http2.frame(PRIORITY, 0, 1, bytes(5)), 1_000, 100),
        (http2.frame(http2.DATA, 0, 1), 1_000, 100),
        (http2.frame(http2.DATA, 8, 1, b"\1\0"), 1_000, 100),
        (http2.frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1"), 8_192, 1_000),
        (http2.frame(77, 0, 0), 64, 10),
    ],
    ids=["settings", "pings", "resets", "priorities", "empty data", "padding", "windows", "unknown"],
)
def test_frames_that_cost_nothing_are_counted(library: ctypes.CDLL, raw: bytes, burst: int, per_s: int) -> None:
    """So many at once, so many more a second later; a proxy, which speaks for many, may send any number."""
    follower = Follower(library)
    assert follower.take(http2.GREETING + raw * burst) is Ended.LEFT
    assert follower.take(raw * per_s, at_ns=SECOND_NS) is Ended.LEFT
    assert follower.take(raw, at_ns=SECOND_NS) is Ended.TOO_FAST
    assert Follower(library, paced=False).take(http2.GREETING + raw * 3 * burst) is Ended.LEFT


FRAMES = st.builds(
    http2.frame, st.integers(0, 10), st.integers(0, 15), st.sampled_from([0, 1, 3]), st.binary(max_size=40)
)
BYTES = st.one_of(
    st.binary(max_size=200),
    st.lists(FRAMES, max_size=12).map(lambda frames: http2.PREFACE + b"".join(frames)),
    st.lists(st.one_of(FRAMES, st.just(block(9, 9, 9)), st.just(entries(40)), st.just(entries(257))), max_size=90).map(
        lambda fs: http2.GREETING + b"".join(fs)
    ),
    st.tuples(st.integers(0, 24), st.binary(max_size=60)).map(lambda cut: http2.PREFACE[: cut[0]] + cut[1]),
)


@given(raw=BYTES, data=st.data())
def test_a_split_changes_nothing(library: ctypes.CDLL, raw: bytes, data: st.DataObject) -> None:
    """However bytes come in pieces, the verdict falls at the same byte, and is the same."""
    whole, single, split = Follower(library), Follower(library), Follower(library)
    whole.take(raw)
    for i in range(len(raw)):
        single.take(raw[i : i + 1])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        split.take(raw[begin:end])
    assert (whole.verdict, whole.bytes) == (single.verdict, single.bytes) == (split.verdict, split.bytes)


class Fronted:
    """A front, with a port that leads to it."""

    def __init__(self, native: NativeFront) -> None:
        self.ended: dict[int, Ended] = {}
        self.news = asyncio.Event()
        self.front = Http2Front(native, rng=random.Random(1), ended=self._over)
        self.numbers = count(1)
        self.refused: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        sock, (host, _) = self._listener.accept()
        number = next(self.numbers)
        try:
            self.front.add(sock, ip_address(host), number, paced=not host.startswith("127.0.9."))
        except OSError as error:
            sock.close()
            self.refused.append(error.errno or 0)

    def _over(self, number: int, why: Ended) -> None:
        assert number not in self.ended
        self.ended[number] = why
        self.news.set()

    async def has_ended(self, count: int) -> None:
        while len(self.ended) < count:
            self.news.clear()
            await self.news.wait()

    async def connect(self, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))

    async def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await self.front.close()


@asynccontextmanager
async def fronted(native: NativeFront, serve: Callable[[str], Awaitable[Any]]) -> AsyncIterator[Fronted]:
    """A front before what `serve` starts at a path. Each connection is reported once."""
    made = Fronted(native)
    place = made.front.next_place()
    server = await serve(place)
    made.front.lead_to(place)
    try:
        async with asyncio.timeout(60):
            yield made
    finally:
        if isinstance(server, asyncio.Server):
            server.close()
        else:
            await server.stop(0)
        await made.close()
    assert len(made.ended) + len(made.refused) == next(made.numbers) - 1


class Peer(grpc.GenericRpcHandler):
    """Answers with the address that its caller has."""

    def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        async def peer(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return context.peer().encode()

        return grpc.unary_unary_rpc_method_handler(peer)


async def ask(channel: Any) -> str:
    answer: bytes = await channel.unary_unary("/a/Peer")(b"", timeout=10)
    return answer.decode()


async def grpc_server(place: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Peer(),))
    server.add_insecure_port(f"unix:{place}")
    await server.start()
    return server


def raw_server(
    behave: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> Callable[[str], Awaitable[asyncio.Server]]:
    async def serve(place: str) -> asyncio.Server:
        return await asyncio.start_unix_server(behave, place)

    return serve


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers each byte with itself, to the end."""
    with suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.close()


def test_the_server_hears_who_calls(native: NativeFront, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gRPC writes the name of a socket: behind it comes what makes each name another. Nothing is left in the file
    system while they speak."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scene() -> None:
        async with fronted(native, grpc_server) as made:
            for _ in range(3):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{made.port}") as channel:
                    assert (await ask(channel)).startswith("unix-abstract:127.0.0.1:")
            assert os.listdir(tmp_path) == []

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("flood", "why"),
    [
        (block(*[16_000] * 5, ends=False), Ended.BLOCK_SIZE),
        (entries(2_000), Ended.BLOCK_SIZE),
        (http2.frame(http2.PING, 0, 0, bytes(8)) * 20_000, Ended.TOO_FAST),
    ],
    ids=["continuations", "entries", "pings"],
)
def test_a_flood_ends_its_connection_alone(native: NativeFront, flood: bytes, why: Ended) -> None:
    """It is told why (ENHANCE_YOUR_CALM), and that is the end; a client beside it is served on."""

    async def scene() -> None:
        async with (
            fronted(native, grpc_server) as made,
            grpc.aio.insecure_channel(f"127.0.0.1:{made.port}") as channel,
        ):
            await ask(channel)
            reader, writer = await made.connect("127.0.0.66")
            writer.write(http2.GREETING + flood)
            frames = []
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    frames.append(await http2.read_frame(reader))
            kind, _, _, payload = frames[-1]
            assert (kind, struct.unpack(">II", payload)) == (http2.GOAWAY, (0x7FFFFFFF, ENHANCE_YOUR_CALM))
            writer.close()
            await made.has_ended(1)
            assert list(made.ended.values()) == [why]
            await ask(channel)

    asyncio.run(scene())


def test_a_client_that_does_not_read_holds_its_own_server_back(native: NativeFront) -> None:
    """All of 32 MiB comes back in order, however late it is read."""
    data = http2.frame(http2.DATA, 0, 1, random.Random(1).randbytes(16_000)) * 2_048
    sent = http2.GREETING + data

    async def scene() -> None:
        async with fronted(native, raw_server(echo)) as made:
            reader, writer = await made.connect()
            writer.write(sent)
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.drain(), 0.2)
            assert writer.transport.get_write_buffer_size() > 0
            assert await reader.readexactly(len(sent)) == sent
            writer.close()

    asyncio.run(scene())


def test_a_server_that_has_gone_is_heard_to_its_end(native: NativeFront) -> None:
    """It writes 4 MiB and closes; a client that begins to read after that, and goes on talking, has all of it."""
    said = random.Random(2).randbytes(4 << 20)
    gone = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(http2.PREFACE))
        writer.write(said)
        writer.write_eof()
        gone.set()
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async def scene() -> None:
        async with fronted(native, raw_server(talk)) as made:
            reader, writer = await made.connect()
            writer.write(http2.GREETING)
            await gone.wait()
            assert await reader.readexactly(1 << 16) == said[: 1 << 16]
            for _ in range(8):
                writer.write(http2.frame(http2.SETTINGS, 1, 0))
                await asyncio.sleep(0)
            assert await reader.read(-1) == said[1 << 16 :]
            writer.close()

    asyncio.run(scene())


def test_a_client_that_has_said_all_hears_the_answer(native: NativeFront) -> None:
    """It closes its own half only; what the server then says reaches it, and the end too."""

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = await reader.read(-1)
        writer.write(got)
        writer.close()

    async def scene() -> None:
        async with fronted(native, raw_server(late)) as made:
            reader, writer = await made.connect()
            writer.write(http2.GREETING)
            writer.write_eof()
            assert await reader.read(-1) == http2.GREETING
            writer.close()

    asyncio.run(scene())


def test_a_client_that_dies_while_the_server_waits(native: NativeFront) -> None:
    """The server hears the end of its connection, and the place is free."""
    there, over = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(http2.PREFACE))
        there.set()
        await reader.read(-1)
        over.set()
        writer.close()

    async def scene() -> None:
        async with fronted(native, raw_server(wait)) as made:
            _, writer = await made.connect()
            writer.write(http2.GREETING)
            await there.wait()
            writer.transport.abort()
            await over.wait()
            await made.has_ended(1)
            assert made.ended == {1: Ended.LEFT}

    asyncio.run(scene())


def test_a_server_that_takes_nobody(native: NativeFront) -> None:
    """Its backlog is full, then it has gone: the one who adds is told, and keeps the socket; those that wait are ended
    with the front."""

    async def scene() -> None:
        made = Fronted(native)
        place = made.front.next_place()
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(place)
            server.listen(1)
            made.front.lead_to(place)
            waiting = [await made.connect() for _ in range(4)]
            while not made.refused:
                waiting.append(await made.connect())
            assert set(made.refused) == {errno.EAGAIN}
        made.refused.clear()
        while not made.refused:
            waiting.append(await made.connect())
        assert made.refused[0] == errno.ECONNREFUSED
        await made.close()
        for _, writer in waiting:
            writer.close()

    asyncio.run(scene())


def test_a_closed_front_opens_again_to_another_server(native: NativeFront) -> None:
    """Who is connected stays with the first one."""

    async def scene() -> None:
        async with fronted(native, raw_server(echo)) as made:
            reader, writer = await made.connect()
            writer.write(http2.GREETING)
            await reader.readexactly(len(http2.GREETING))
            made.front.lead_to(None)
            assert not made.front.is_open
            place = made.front.next_place()
            second = await grpc_server(place)
            made.front.lead_to(place)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{made.port}") as channel:
                await ask(channel)
            writer.write(http2.frame(http2.SETTINGS, 1, 0))
            assert len(await reader.readexactly(9)) == 9
            writer.close()
            await second.stop(0)

    asyncio.run(scene())


def test_ten_thousand_connections_leave_nothing(native: NativeFront) -> None:
    """They come, speak or not, and go, by a close or by a reset; each is reported, and no descriptor is left."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def scene() -> None:
        async with fronted(native, raw_server(echo)) as made:
            before = descriptors()
            for i in range(100):
                streams = await asyncio.gather(*(made.connect() for _ in range(100)))
                for j, (_, writer) in enumerate(streams):
                    writer.write(http2.GREETING if j % 2 else b"nothing of the kind")
                    if (i + j) % 3:
                        writer.transport.abort()
                    else:
                        writer.close()
                await made.has_ended(100 * (i + 1))
            while descriptors() > before:  # noqa: ASYNC110  # the server's own take another turn
                await asyncio.sleep(0)

    asyncio.run(scene())


def test_a_front_that_has_no_descriptors_says_so(native: NativeFront) -> None:
    """The process may open no file more. Nothing is left, and with room it opens."""

    async def scene() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = os.listdir("/proc/self/fd")
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            with pytest.raises(BatonError) as raised:
                Http2Front(native, rng=random.Random(1))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert raised.value.reason is Reason.LISTEN_REFUSED
        assert "too many open files. Raise" in raised.value.message
        assert os.listdir("/proc/self/fd") == before
        await Http2Front(native, rng=random.Random(1)).close()

    asyncio.run(scene())


def test_a_front_without_a_folder_says_so(native: NativeFront, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the folder for temporary files nor the kernel's memory takes one."""

    def mkdtemp(**_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scene() -> None:
        front = Http2Front(native, rng=random.Random(1))
        monkeypatch.setattr("baton.http2_front.tempfile.mkdtemp", mkdtemp)
        with pytest.raises(BatonError, match=r"No space left on device.*Set TMPDIR") as raised:
            front.next_place()
        assert raised.value.reason is Reason.LISTEN_REFUSED
        await front.close()

    asyncio.run(scene())
