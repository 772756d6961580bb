"""One HTTP connection, served as ASGI. A client that is slow, or reads nothing, does not keep its place for long.

The parser says what a call may be, `Slots` who may have a connection, `Turns` how much of the loop connections take.
"""

from __future__ import annotations

import asyncio
import http
import json
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Final

from starlette.types import ASGIApp, Message, Scope

from baton.endpoint import Address, Network, is_trusted, source_of
from baton.errors import BatonError
from baton.log import get_log
from router import openai
from router.http_parser import End, Event, Head, RequestParser
from router.http_slots import Slot, Slots, client_address
from router.line import Turns

log = get_log("http")

READ_BYTES: Final = 32_768
"""Taken off the kernel at a time."""
BODY_HELD_BYTES: Final = 65_536
"""Of a body that the app has not asked for yet. With more we read no further."""
SURPLUS_MS_MAX: Final = 2_000
"""How long a connection that is one too many may take for the head of its call."""
IDLE_MS_MAX: Final = 5_000
"""Between the end of an answer and the next call."""
PROXY_IDLE_MS_MAX: Final = 75_000
"""The same, for a trusted proxy: it may send a call just when we close, so it must be the one to close first."""
UNREAD_MS_FREE: Final = 10_000
"""How long a client may read nothing of what waits for it. What it reads then gives it more time, up to as much."""
UNREAD_BYTES_PER_S: Final = 8_192
LINGER_MS_MAX: Final = 2_000
"""After the last answer: how long its end may take, and how long we read on of a call that was answered before its
end, so that the client can read the answer."""
LINGER_BYTES_MAX: Final = 1 << 20
CALL_MS: Final = 0.25
"""What the beginning of a call takes of the next turn of the loop, about."""
END_MS: Final = 0.1
"""And the end of a connection."""

SURPLUS: Final = "surplus connection"
"""In a call's state: its connection, or the call of a proxy's client, was one too many when it came."""

STREAM: Final = "baton.stream"
"""In a call's extensions: the `HttpCall`, for who writes more of a body without waiting."""

SOURCE: Final = "source"
"""Who the call counts for in limits by address; None for a proxy of ours."""

_STATUS: Final = {each.value: b"HTTP/1.1 %d %s\r\n" % (each.value, each.phrase.encode()) for each in http.HTTPStatus}
_STATUS[499] = b"HTTP/1.1 499 \r\n"


@dataclass(slots=True, kw_only=True)
class Served:
    """What the connections of one server share."""

    app: ASGIApp
    proxied: Slots
    """Of the calls under way for clients behind trusted proxies, who share connections."""
    trusted_proxies: tuple[Network, ...]
    head_ms_max: int
    turns: Turns
    refused: Callable[[BatonError], None]
    connections: set[HttpConnection] = field(default_factory=set)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each connection that ends."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Calls under way."""
    date: bytes = b""
    """The header of answers."""
    stopping: bool = False
    keep_alive: bool = True
    """Whether a connection stays open behind an answer that begins now."""
    keep_idle: bool = True
    """Whether one without a call stays open, whatever its last answer has said."""

    def caller(self, peer: Address | None, head: Head) -> Address | None:
        """Whom the call counts for: None for our own proxies."""
        if peer is not None and is_trusted(peer, self.trusted_proxies):
            named = [value.decode("latin-1") for name, value in head.headers if name == b"x-forwarded-for"]
            peer = client_address(peer, named, self.trusted_proxies)
        return peer if peer is None or not is_trusted(peer, self.trusted_proxies) else None

    def upkeep(self, now_s: float) -> None:
        """Every half second or so."""
        self.date = formatdate(usegmt=True).encode()
        for connection in tuple(self.connections):
            if connection.is_late(now_s):
                self.turns.do(connection.transport.abort)
                self.turns.charge(END_MS)


class HttpConnection(asyncio.Protocol):
    """Reads calls one after another, and answers each before it begins the next."""

    def __init__(self, served: Served, peer: Address | None, slot: Slot, closed: Callable[[], None]) -> None:
        """`closed` is called when it is over."""
        self.served = served
        self.transport: asyncio.Transport
        self.server: tuple[str, int] | None = None
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser()
        self._events: deque[Event] = deque()
        """Read, but the call before them is not over."""
        self._call: HttpCall | None = None
        self._peer = peer
        self._slot = slot
        self._closed = closed
        self._due_s = math.inf
        """When the client must have done what we wait for."""
        self._head_begun = False
        self._deferred = False
        """A piece of data waits for its turn."""
        self._paused = False
        self._written = 0
        self._unread: tuple[float, int] | None = None
        """While bytes wait for the client to read: when it is too late, and how many it has read."""
        self.is_writable = True
        """Whether the client has taken enough of what was written."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._discarded: int | None = None
        """Bytes that came after the last answer; None before it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        transport.set_write_buffer_limits(high=0)  # what the kernel does not take at once is added to no more
        self.server = transport.get_extra_info("sockname")[:2]
        self.served.connections.add(self)
        if self.served.stopping:
            transport.abort()
            return
        head_ms_max = SURPLUS_MS_MAX if self._slot is Slot.SURPLUS else self.served.head_ms_max
        self._due_s = self._loop.time() + head_ms_max / 1000

    def connection_lost(self, _exc: Exception | None) -> None:
        self.served.connections.discard(self)
        self.served.closed.set()
        self._closed()
        if self._call is not None:
            self._call.leave()
        self._call = None
        self._events.clear()
        self.resume_writing()
        self._parser.close()
        vars(self.transport).pop(
            "_read_ready_cb", None
        )  # asyncio's: it refers to itself, so only the collector frees it

    def data_received(self, data: bytes) -> None:
        if self._discarded is not None:
            self._discarded += len(data)
            if self._discarded > LINGER_BYTES_MAX:
                self.transport.abort()
        elif not self.served.turns.do(lambda: self._feed(data)):
            self._deferred = True
            self._pause()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._writable.clear()

    def resume_writing(self) -> None:
        self.is_writable = True
        self._writable.set()

    def is_late(self, now_s: float) -> bool:
        """Whether the client has been slow for too long."""
        left = self.transport.get_write_buffer_size()
        read, due_s = self._written - left, self._due_s
        if left:
            due_s, before = self._unread or (math.inf, read)
            due_s = min(now_s + UNREAD_MS_FREE / 1000, due_s + (read - before) / UNREAD_BYTES_PER_S)
            self._unread = due_s, read
        elif self._unread is not None:
            self._unread = None
            due_s = self._due_s = max(due_s, now_s + LINGER_MS_MAX / 1000)
        return now_s >= due_s

    @property
    def idle(self) -> bool:
        """Between two calls, or before the first."""
        return self._call is None and not self._head_begun

    def stop(self) -> None:
        """Take no further call."""
        if self._call is None and self._discarded is None:
            self._close()

    async def writable(self) -> None:
        await self._writable.wait()

    async def write(self, data: bytes) -> None:
        """Once there is room for it."""
        await self._writable.wait()
        self.write_now(data)

    def write_now(self, data: bytes) -> None:
        if self._discarded is None and not self.transport.is_closing():
            self._written += len(data)
            self.transport.write(data)

    def ended(self, call: HttpCall, *, keep_alive: bool) -> None:
        """Its answer is written."""
        if call is not self._call:
            return
        self._call = None
        if not keep_alive or not self.served.keep_idle:
            self._close(read=call.read)
            return
        self._head_begun = False
        idle_ms_max = PROXY_IDLE_MS_MAX if self._owner() is None else IDLE_MS_MAX
        self._due_s = self._loop.time() + idle_ms_max / 1000
        if self._events:
            self.served.turns.do(self._work)
        else:
            self.resume()

    def resume(self) -> None:
        """Read on, unless what is there has to wait."""
        if self._paused and not self._deferred and not self._events and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        self.transport.write(data)

    def _owner(self) -> Address | None:
        trusted = self._peer is None or is_trusted(self._peer, self.served.trusted_proxies)
        return None if trusted else self._peer

    def _feed(self, data: bytes) -> None:
        self._deferred = False
        if self.transport.is_closing() or self._discarded is not None:
            self.resume()
            return
        if self._call is None and not self._head_begun:
            self._head_begun = True
            if self._slot is Slot.REGULAR:
                self._due_s = self._loop.time() + self.served.head_ms_max / 1000
        self._events.extend(self._parser.feed(data))
        self._work()

    def _work(self) -> None:
        """Take what was read, up to where a call has to wait for the one before it."""
        while self._events and not (self._call is not None and self._call.read):
            event = self._events.popleft()
            if isinstance(event, Head):
                self._begin(event)
            elif isinstance(event, BatonError):
                self._refuse(event)
            elif self._call is not None:
                self._call.add(event)
        if self._events or (self._call is not None and len(self._call.body) > BODY_HELD_BYTES):
            self._pause()
        else:
            self.resume()

    def _begin(self, head: Head) -> None:
        self._due_s = math.inf
        self._call = HttpCall(self, head, self._peer, surplus=self._slot is Slot.SURPLUS)
        task = self._loop.create_task(self._call.run())
        self.served.tasks.add(task)
        task.add_done_callback(self.served.tasks.discard)
        self.served.turns.charge(CALL_MS)

    def _refuse(self, error: BatonError) -> None:
        """What came is no call, or no rest of the call before."""
        self.served.refused(error)
        self._events.clear()
        call, self._call = self._call, None
        if call is not None:
            call.leave()
            if call.started:
                self.transport.abort()
                return
        body = json.dumps(openai.error_json(error)).encode()
        head = b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self._write(head % (_STATUS[openai.error_status(error)], len(body)) + body)
        self._close(read=False)

    def _close(self, *, read: bool = True) -> None:
        """Once the client has what was written. `read` says that nothing more is to come: a connection that is closed
        while something comes is reset, and the client may lose its answer."""
        self._discarded = 0
        self._due_s = self._loop.time() + LINGER_MS_MAX / 1000
        self._events.clear()
        if read or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.resume()
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection since
                self.transport.abort()

    def _pause(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()


class HttpCall:
    """One call of a connection, as ASGI sees it."""

    def __init__(self, connection: HttpConnection, head: Head, peer: Address | None, *, surplus: bool) -> None:
        self.body = bytearray()
        self.read = False
        """All of it has come."""
        self.started = False
        """The answer has begun."""
        self._connection = connection
        self._served = connection.served
        self._head = head
        self._peer = peer
        self._surplus = surplus
        self.on_leave: Callable[[], None] | None = None
        """Called when the client has gone before its answer."""
        self.gone = False
        """The client has."""
        self._news = asyncio.Event()
        self._told_end = False
        self._done = False
        self._keep_alive = head.keep_alive and not surplus
        self._expects_continue = head.expects_continue
        self._chunked = False
        self._first = b""
        """The head of the answer, which goes out with the first bytes of its body."""

    def add(self, event: bytes | End) -> None:
        if isinstance(event, End):
            self.read = True
        else:
            self.body += event
        self._news.set()

    def leave(self) -> None:
        """The client has gone."""
        self.gone = True
        self._news.set()
        if self.on_leave is not None:
            self.on_leave()

    async def run(self) -> None:
        caller = self._served.caller(self._peer, self._head)
        slot = self._served.proxied.take(caller) if caller != self._peer else None
        surplus = self._surplus or slot is Slot.SURPLUS
        try:
            await self._served.app(self._scope(caller, surplus=surplus), self._receive, self._send)
        except Exception:
            if not self._done:
                log.exception("an HTTP call failed", path=self._head.path)
        finally:
            if slot is not None:
                self._served.proxied.leave(slot, caller)
            if not self._done and not self.gone:
                self._connection.transport.abort()

    def _scope(self, caller: Address | None, *, surplus: bool) -> Scope:
        head, client = self._head, caller or self._peer
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": self._connection.server,
            "client": (str(client), 0) if client is not None else None,
            "scheme": "http",
            "method": head.method,
            "root_path": "",
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "extensions": {STREAM: self},
            "state": {SURPLUS: surplus, SOURCE: source_of(str(caller)) if caller is not None else None},
        }

    async def _receive(self) -> Message:
        if self._expects_continue and not self.read and not self.started:
            self._expects_continue = False
            await self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not self.gone and not self._done:
            if self.body or (self.read and not self._told_end):
                part, self.body = bytes(self.body), bytearray()
                self._told_end = self.read
                self._connection.resume()
                return {"type": "http.request", "body": part, "more_body": not self.read}
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    def take_body(self) -> bytearray | None:
        """The whole body, if it has come, in place of what ASGI would give; else None."""
        if not self.read or self._told_end:
            return None
        body, self.body, self._told_end = self.body, bytearray(), True
        self._connection.resume()
        return body

    async def _send(self, message: Message) -> None:
        assert not self._done
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._first = self._start(message["status"], message["headers"])
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        body = self._framed(body)
        if self._chunked and not more:
            body += b"0\r\n\r\n"
        if self._first or body:
            await self._connection.writable()  # who is cancelled here has sent nothing
            self._connection.write_now(self._first + body)
            self._first = b""
        if not more:
            self._done = True
            self._news.set()
            self._connection.ended(self, keep_alive=self._keep_alive)

    async def opened(self) -> None:
        """Of an answer whose beginning has gone out."""
        await self._connection.writable()

    def put(self, body: bytes) -> bool:
        """More of the body, whose beginning has gone out, without waiting. Whether it may be called again; for a client
        that has gone always."""
        assert not self._done
        connection = self._connection
        if not self.gone:
            connection.write_now(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked and body else self._framed(body))
        return connection.is_writable

    def put_text(self, before: bytes, text: bytes, behind: bytes) -> bool:
        """`put` of these three together, which are not empty: a stream does it for each token."""
        assert not self._done
        connection = self._connection
        if not self._chunked or self.gone:
            return self.put(before + text + behind)
        size = len(before) + len(text) + len(behind)
        connection.write_now(b"%x\r\n%b%b%b\r\n" % (size, before, text, behind))
        return connection.is_writable

    def _framed(self, body: bytes) -> bytes:
        if self._head.method == "HEAD":
            return b""
        return b"%x\r\n%b\r\n" % (len(body), body) if self._chunked and body else body

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The connection stays open where the whole call was read, and both sides want it to."""
        self.started = True
        named = {name.lower(): value.lower() for name, value in headers}
        bare = status in (204, 304) or self._head.method == "HEAD"
        self._keep_alive = (
            self._keep_alive and self.read and self._served.keep_alive and named.get(b"connection") != b"close"
        )
        lines = [b"date: " + self._served.date, *(name + b": " + value for name, value in headers)]
        if not bare and b"content-length" not in named:
            self._chunked = self._head.version == "1.1"
            self._keep_alive = self._keep_alive and self._chunked
            if self._chunked:
                lines.append(b"transfer-encoding: chunked")
        if not self._keep_alive and b"connection" not in named:
            lines.append(b"connection: close")
        head = _STATUS[status] + b"\r\n".join([*lines, b"", b""])
        assert head.count(b"\n") == len(lines) + 2, "a header with a line break"
        return head
