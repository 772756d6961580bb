"""One connection over HTTP: how answers are framed, and when it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.endpoint import split_endpoint
from router import http_connection, http_server
from router.http_connection import LINGER_BYTES_MAX, HttpConnection
from tests.support.http_door import REQUEST, Door, Stream, answer, run

POST = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: "
BIG = b"x" * (4 << 20)
"""More than the kernel keeps of an answer for both sides."""
SLOW_S = 1.5
"""In which a slow client reads it; more than twice as long as `quick` lets one read nothing."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short times for clients that are slow."""
    monkeypatch.setattr(http_server, "UPKEEP_MS", 20)
    for name in ("IDLE_MS_MAX", "LINGER_MS_MAX"):
        monkeypatch.setattr(http_connection, name, 300)
    monkeypatch.setattr(http_connection, "UNREAD_MS_FREE", 700)


async def stream(scope: Scope, _receive: Receive, send: Send) -> None:
    """Two parts, of no length that is known before."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def early(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer before the body is read."""
    await Response(b"no", 401)(scope, receive, send)


async def who(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(scope["client"][0])(scope, receive, send)


async def big(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(BIG)(scope, receive, send)


class Holding:
    """An app whose calls last until the test ends them, or their client leaves."""

    def __init__(self) -> None:
        self.begun = asyncio.Semaphore(0)
        self.go_on = asyncio.Event()
        self.left = asyncio.Semaphore(0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.release()
        gone = asyncio.create_task(self._gone(receive))
        going = asyncio.create_task(self.go_on.wait())
        await asyncio.wait([gone, going], return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self.left.release()
            going.cancel()
            return
        gone.cancel()
        await Response(b"held")(scope, receive, send)

    async def _gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


async def read_all(stream: Stream, request: bytes) -> bytes:
    stream[1].write(request)
    return await stream[0].read()


async def sent(stream: Stream, data: bytes) -> None:
    """Again and again, until the connection is closed."""
    with suppress(ConnectionError):
        while True:
            stream[1].write(data)
            await stream[1].drain()


def test_answers_of_unknown_length() -> None:
    """In chunks for HTTP/1.1, where the connection goes on; up to its end for HTTP/1.0; nothing for HEAD."""

    async def scene(door: Door) -> None:
        one = await door()
        one[1].write(REQUEST)
        assert b"\r\ntransfer-encoding: chunked\r\n" in await one[0].readuntil(b"\r\n\r\n")
        assert await one[0].readuntil(b"\r\n0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        ended = await read_all(
            one, REQUEST.replace(b"GET", b"HEAD") + REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        assert [ended.count(part) for part in (b"HTTP/1.1 200 OK\r\n", b"one", b"connection: close")] == [2, 1, 1]
        old = await read_all(await door(), REQUEST.replace(b"1.1", b"1.0"))
        head, _, body = old.partition(b"\r\n\r\n")
        assert (b"chunked" in head, b"\r\nconnection: close" in head, body) == (False, True, b"onetwo")

    run(scene, stream)


async def direct(scope: Scope, _receive: Receive, send: Send) -> None:
    """As `stream`, but the second part is put without waiting."""
    call = scope["extensions"][http_connection.STREAM]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one", "more_body": True})
    assert call.put(b"two")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_parts_that_are_put_without_waiting() -> None:
    """Framed as others are: in chunks for HTTP/1.1, bare for HTTP/1.0, not at all for HEAD."""

    async def scene(door: Door) -> None:
        one = await door()
        one[1].write(REQUEST.replace(b"GET", b"HEAD") + REQUEST)
        await one[0].readuntil(b"\r\n\r\n")
        assert b"\r\ntransfer-encoding: chunked\r\n" in await one[0].readuntil(b"\r\n\r\n")
        assert await one[0].readuntil(b"\r\n0\r\n\r\n") == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        old = await read_all(await door(), REQUEST.replace(b"1.1", b"1.0"))
        assert old.partition(b"\r\n\r\n")[2] == b"onetwo"

    run(scene, direct)


def test_a_client_that_reads_nothing_of_what_is_put() -> None:
    """The call is not open any more, until the client reads."""
    closed, opened = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, _receive: Receive, send: Send) -> None:
        call = scope["extensions"][http_connection.STREAM]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        assert not call.put(BIG)
        closed.set()
        await call.opened()
        opened.set()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scene(door: Door) -> None:
        reader, writer = await door()
        writer.write(REQUEST)
        await closed.wait()
        assert not opened.is_set()
        await reader.readexactly(len(BIG))
        await opened.wait()

    run(scene, app)


def test_what_the_kernel_does_not_take_at_once_closes_the_call() -> None:
    """However little it is: what comes then waits elsewhere, and is joined."""
    limits = asyncio.Queue[tuple[int, int]]()

    class Watched(HttpConnection):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            assert isinstance(transport, asyncio.WriteTransport)
            limits.put_nowait(transport.get_write_buffer_limits())

    async def scene(door: Door) -> None:
        await door()
        assert await limits.get() == (0, 0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http_server, "HttpConnection", Watched)
        run(scene, direct)


def test_a_client_that_leaves_before_its_answer_begins() -> None:
    """What is sent and put is dropped: who writes in a loop does not wait for a client that has gone."""

    seen = asyncio.Queue[bool]()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        call = scope["extensions"][http_connection.STREAM]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        seen.put_nowait(call.put(b"two"))

    async def scene(door: Door) -> None:
        one = await door()
        one[1].write(REQUEST)
        await one[1].drain()
        one[1].close()
        assert await seen.get()

    run(scene, late)


def test_calls_that_wait_for_the_ones_before_them() -> None:
    """Three at once on one connection, with bodies: three answers, in order."""

    async def scene(door: Door) -> None:
        one = await door()
        one[1].write(b"".join(POST + b"1\r\n\r\n" + body for body in (b"a", b"b", b"c")))
        assert [(await answer(one, b""))[1] for _ in range(3)] == [b"a", b"b", b"c"]

    run(scene)


def test_what_waits_for_its_turn_when_the_last_answer_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop has much to do: a part of the body is not looked at before the 401 is written. What comes afterwards is
    still read to its end, so that the client is not reset."""
    monkeypatch.setattr(http_connection, "LINGER_MS_MAX", 1_000_000)
    waiting: list[Callable[[], None]] = []
    hold = Holding()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        hold.begun.release()
        await hold.go_on.wait()
        await early(scope, receive, send)

    async def scene(door: Door) -> None:
        reader, writer = await door()
        writer.write(POST + b"100\r\n\r\n")
        await hold.begun.acquire()
        later = asyncio.Event()

        def do(work: Callable[[], None]) -> bool:
            waiting.append(work)
            later.set()
            return False

        monkeypatch.setattr(door.server._served.turns, "do", do)
        writer.write(b"part")
        await later.wait()
        hold.go_on.set()
        await reader.read()
        waiting.pop()()
        writer.close()
        async with asyncio.timeout(5):
            await door.all_closed()

    run(scene, app)


def test_a_client_that_asks_whether_to_send() -> None:
    """It is told so when the body is wanted, and not at all where the answer does not need it."""

    async def scene(door: Door) -> None:
        one = await door()
        one[1].write(POST + b"2\r\nExpect: 100-continue\r\n\r\n")
        assert await one[0].readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await answer(one, b"hi"))[1] == b"hi"

    async def scene_early(door: Door) -> None:
        ended = await read_all(await door(), POST + b"2\r\nExpect: 100-continue\r\n\r\n")
        assert ended.startswith(b"HTTP/1.1 401 Unauthorized\r\n")

    run(scene)
    run(scene_early, early)


def test_an_answer_before_the_end_of_the_call() -> None:
    """The client still sends when it is refused: it can read the answer, which says that the connection ends. What it
    sends after that is thrown away, for so long and no longer."""

    async def scene(door: Door) -> None:
        one = await door()
        head, body = await answer(one, POST + b"%d\r\n\r\n" % LINGER_BYTES_MAX + b"x" * 100_000)
        assert (body, b"\r\nconnection: close\r\n" in head) == (b"no", True)
        one[1].write(b"x" * 100_000)
        await one[1].drain()
        assert await one[0].read() == b""
        endless = await door()
        endless[1].write(POST + b"%d\r\n\r\n" % (1 << 40))
        await sent(endless, b"x" * 65_536)

    run(scene, early)


def test_a_client_that_resets_its_call_while_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is written, and the connection is gone before its end is: that is no failure of the app."""
    failures: list[OSError] = []

    async def early_and_safe(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await early(scope, receive, send)
        except OSError as error:
            failures.append(error)

    async def scene(door: Door) -> None:
        client = socket.create_connection(split_endpoint(door.endpoint))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        write, lost = HttpConnection.write_now, asyncio.Event()

        def write_and_lose(connection: HttpConnection, data: bytes) -> None:
            write(connection, data)
            client.close()
            lost.set()

        monkeypatch.setattr(HttpConnection, "write_now", write_and_lose)
        client.sendall(POST + b"9\r\n\r\n")
        await lost.wait()
        await door.all_closed()
        assert failures == []

    run(scene, early_and_safe)


@pytest.mark.usefixtures("quick")
def test_a_client_that_does_not_end_its_call() -> None:
    """It was refused, and neither goes on nor leaves: its connection is closed."""

    async def scene(door: Door) -> None:
        one = await door()
        assert (await answer(one, POST + b"9\r\n\r\nx"))[1] == b"no"
        await door.all_closed()

    run(scene, early)


@pytest.mark.usefixtures("quick")
def test_idle_connections_end() -> None:
    """One has had an answer and asks nothing more. That of a proxy stays: the proxy is to close it."""

    async def scene(door: Door) -> None:
        one, proxy = await door(), await door(source="127.0.0.2")
        for each in (proxy, one):
            assert (await answer(each))[1] == b"ok"
        assert await one[0].read() == b""
        assert (await answer(proxy))[1] == b"ok"

    run(scene, trusted_proxies=("127.0.0.2",))


@pytest.mark.usefixtures("quick")
def test_answers_that_nobody_reads() -> None:
    """A whole answer, more than the kernel takes. Who reads nothing of it is cut off, whether the connection was to end
    with it or not; who reads it slowly has it all, long after the time for which he may read nothing."""

    async def scene(door: Door) -> None:
        unread = [await door(), await door()]
        unread[0][1].write(REQUEST)
        unread[1][1].write(REQUEST.replace(b"1.1", b"1.0"))
        reader, writer = await door()
        writer.write(REQUEST)
        await reader.readuntil(b"\r\n\r\n")
        read, now_s = 0, asyncio.get_running_loop().time
        began_s = now_s()
        while read < len(BIG):
            if read <= len(BIG) * (now_s() - began_s) / SLOW_S:  # as fast however seldom this turn comes
                part = await reader.read(16_384)
                assert part, f"cut off after {read} bytes"
                read += len(part)
            else:
                await asyncio.sleep(0.004)
        await door.all_closed()
        assert [len(await each[0].read()) < len(BIG) for each in unread] == [True, True]

    run(scene, big)


def test_a_client_that_leaves_ends_its_call() -> None:
    """The app is told so."""

    async def scene(door: Door) -> None:
        one = await door()
        one[1].write(REQUEST)
        await holding.begun.acquire()
        one[1].close()
        await holding.left.acquire()

    holding = Holding()
    run(scene, holding)


def test_what_is_no_http(caplog: pytest.LogCaptureFixture) -> None:
    """An OpenAI error, told to whoever counts what is refused, and no line of its own in the log. In the middle of a
    body it ends the call."""

    async def scene(door: Door) -> None:
        head, _, body = (await read_all(await door(), b"\x16\x03\x01\r\n")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        bad = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"
        one = await door()
        one[1].write(bad)
        await holding.begun.acquire()
        assert (await read_all(one, b"x\r\n")).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        await holding.left.acquire()
        assert len(door.refused) == 2

    holding = Holding()
    with caplog.at_level(logging.INFO):
        run(scene, holding)
    assert caplog.records == []


def test_an_address_has_half_of_the_connections_and_leaves_the_rest() -> None:
    """The attacker has all that he can get; another address is served as ever."""

    async def scene(door: Door) -> None:
        taken = [await door(source="127.0.0.66") for _ in range(4)]
        found = [(await answer(each))[0].split()[1] for each in taken]
        assert found == [b"200", b"200", b"200", b"429"]
        other = await door()
        assert (await answer(other))[1] == b"ok"

    run(scene, http_connections_max=6)


def test_clients_behind_a_proxy() -> None:
    """Its connections are as many as there are. Each client behind it has calls under way as an address of its own
    would have connections, and is named to the app; what others claim in X-Forwarded-For counts for nothing."""

    def ask(client: bytes) -> bytes:
        return REQUEST[:-2] + b"X-Forwarded-For: 9.9.9.9, " + client + b"\r\n\r\n"

    async def names(door: Door) -> None:
        assert (await answer(await door(source="127.0.0.2"), ask(b"5.6.7.8")))[1] == b"5.6.7.8"
        assert (await answer(await door(), ask(b"5.6.7.8")))[1] == b"127.0.0.1"

    async def shares(door: Door) -> None:
        taken = [await door(source="127.0.0.2") for _ in range(4)]
        for each in taken[:2]:
            each[1].write(ask(b"5.6.7.8"))
            await holding.begun.acquire()
        head, _ = await answer(taken[2], ask(b"5.6.7.8"))
        assert head.startswith(b"HTTP/1.1 429 ")
        taken[3][1].write(ask(b"5.6.7.9"))
        await holding.begun.acquire()
        holding.go_on.set()
        assert [(await answer(each, b""))[1] for each in (*taken[:2], taken[3])] == [b"held"] * 3
        assert (await answer(taken[0], ask(b"5.6.7.8")))[1] == b"held"

    holding = Holding()
    run(names, who, trusted_proxies=("127.0.0.2",))
    run(shares, holding, trusted_proxies=("127.0.0.2",), http_connections_max=4)
    holding = Holding()  # in one of two workers, which does not know what an address has at the other one
    run(shares, holding, trusted_proxies=("127.0.0.2",), http_connections_max=8, workers=2)


def test_a_server_that_stops() -> None:
    """A connection without a call ends at once, one with a call when it has its answer."""

    async def scene(door: Door) -> None:
        idle, busy = await door(), await door()
        busy[1].write(REQUEST)
        await holding.begun.acquire()
        stopping = asyncio.create_task(door.server.stop())
        assert await idle[0].read() == b""
        holding.go_on.set()
        head, body = await answer(busy, b"")
        assert (body, b"\r\nconnection: close\r\n" in head) == (b"held", True)
        assert await busy[0].read() == b""
        await stopping

    holding = Holding()
    run(scene, holding)


def test_connections_that_are_not_to_stay() -> None:
    """While the server is not ready, each ends with its next answer. When it takes no more calls, those without one end
    at once, and one whose call has begun to come when it has its answer."""

    async def scene(door: Door) -> None:
        used, idle, begun = await door(), await door(), await door()
        assert b"\r\nconnection: close\r\n" not in (await answer(used))[0]
        door.server.keep_connections(False, idle=True)
        assert b"\r\nconnection: close\r\n" in (await answer(used))[0]
        assert await used[0].read() == b""
        begun[1].write(REQUEST[:9])
        while sum(connection.idle for connection in door.server._served.connections) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        door.server.keep_connections(False, idle=False)
        assert await idle[0].read() == b""
        head, body = await answer(begun, REQUEST[9:])
        assert (body, b"\r\nconnection: close\r\n" in head) == (b"ok", True)
        door.server.keep_connections(True, idle=True)
        again = await door()
        assert b"\r\nconnection: close\r\n" not in (await answer(again))[0]

    run(scene)


def test_an_answer_under_way_when_connections_are_not_to_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun as one behind which the connection stays: it ends as it should, and then the connection does."""
    monkeypatch.setattr(http_connection, "IDLE_MS_MAX", 1 << 30)
    go_on = asyncio.Event()

    async def halting(_scope: Scope, _receive: Receive, send: Send) -> None:
        length = [(b"content-length", b"10")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"over", "more_body": False})

    async def scene(door: Door) -> None:
        reader, writer = await door()
        writer.write(REQUEST)
        assert b"connection: close" not in await reader.readuntil(b"begun ")
        door.server.keep_connections(False, idle=False)
        go_on.set()
        assert await reader.read() == b"over"

    run(scene, halting)


def test_a_server_that_stops_at_last() -> None:
    """A call that does not end in the grace time is ended."""

    async def scene(door: Door) -> None:
        busy = await door()
        busy[1].write(REQUEST)
        await holding.begun.acquire()
        await door.server.stop()
        assert await busy[0].read() == b""

    holding = Holding()
    run(scene, holding, stop_grace_ms=100)


def test_an_app_that_fails() -> None:
    """The connection ends without an answer."""

    async def fail(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise ValueError

    async def scene(door: Door) -> None:
        assert await read_all(await door(), REQUEST) == b""

    run(scene, fail)
