"""Turns the bytes of one connection into calls, with a limit on what costs us more to read than its sender to write.

Pure. The grammar is llhttp's, in C and strict; what a call may be is said here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, NoReturn
from urllib.parse import unquote

import httptools

from baton.errors import BatonError, Reason

HEAD_BYTES_MAX: Final = 32_768
"""Of the head of one call, its trailers too."""
HEADERS_MAX: Final = 128
"""Of one call, its trailers too."""
BODY_PARTS_FREE: Final = 4_096
"""Chunks, or packets, of one body that may be of any size."""
BODY_PART_BYTES_MIN: Final = 16
"""What further ones must have on average."""
BODY_FRAME_BYTES_FREE: Final = 65_536
"""Beside the bytes of a body itself, of which its frame may take as many again: sizes of chunks, their extensions."""
CALLS_AT_ONCE_MAX: Final = 16
"""In one piece of data. Reading stops while a call waits for the one before it."""

_ABSOLUTE: Final = re.compile(rb"https?://[^/?#]*([^#]*)", re.IGNORECASE)
_LONG_HEAD: Final = f"The head of the call is longer than {HEAD_BYTES_MAX} bytes, the limit."
_VERSIONS: Final = frozenset({"1.0", "1.1"})

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Begins a call."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    version: str
    headers: Headers
    """Names in lower case."""
    keep_alive: bool
    expects_continue: bool


class End(Enum):
    """Ends a call."""

    END = auto()


Event = Head | bytes | End | BatonError
"""Bytes are a part of the body; an error is the last event."""


class RequestParser:
    """Reads one connection. `close` when it is over. llhttp calls what begins with `on_`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._events: list[Event] = []
        self._body = bytearray()
        self._problem = ""
        self._in_head = True
        self._calls = 0
        """Begun in this piece of data."""
        self._unframed = 0
        """Bytes of this call so far, but for those that came in one piece of data with its head."""
        self._upgrade: bytes | None = None
        """The method of a call that offers another protocol."""
        self._begin()

    def feed(self, data: bytes) -> list[Event]:
        """What `data` completes; consecutive parts of a body are one."""
        if self._problem:
            return []
        self._events, self._calls = [], 0
        self._unframed += len(data)
        self._parse(data)
        return self._found()

    def close(self) -> None:
        """Break the circle of references."""
        self._problem = self._problem or "The connection is closed."
        del self._parser

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._problem = self._problem or f"This is no HTTP/1.1: {error}."

    def _stay(self, rest: bytes) -> None:
        """The client offers another protocol, and we stay with this one: the call is read as if it had offered none.
        llhttp would leave its body out."""
        if self._upgrade is None or self._problem:
            self._problem = self._problem or "This is no HTTP/1.1: another protocol begins."
            return
        offered = {b"upgrade", b"connection", b"http2-settings"}
        lines = [b": ".join(each) for each in self._headers if each[0] not in offered]
        head = b"\r\n".join([self._upgrade + b" " + self._url + b" HTTP/1.1", *lines, b"", b""])
        self._upgrade = None
        self._parser = httptools.HttpRequestParser(self)
        self._parse(head + rest)

    def _found(self) -> list[Event]:
        self._flush()
        if not self._problem:
            self._check_frame()
        if self._problem:
            self._events.append(BatonError(Reason.BAD_FIELD, self._problem))
        return self._events

    def _check_frame(self) -> None:
        if self._in_head:
            if self._unframed > HEAD_BYTES_MAX:
                self._problem = _LONG_HEAD
        elif self._unframed > 2 * self._body_bytes + BODY_FRAME_BYTES_FREE:
            self._problem = "The frame of the body is longer than the body: send longer chunks."

    def _begin(self) -> None:
        self._url = b""
        self._headers: Headers = []
        self._headers_count = 0
        self._head_bytes = 0
        self._expects_continue = False
        self._upgrade = None
        self._body_bytes = 0
        self._body_parts = 0

    def _flush(self) -> None:
        if self._body:
            self._events.append(bytes(self._body))
            self._body.clear()

    def _grow_head(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(_LONG_HEAD)

    def _refuse(self, problem: str) -> NoReturn:
        """From a callback: the parser reads no further."""
        self._problem = problem
        raise ValueError

    def on_message_begin(self) -> None:
        self._calls += 1
        if self._calls > CALLS_AT_ONCE_MAX:
            self._refuse(f"More than {CALLS_AT_ONCE_MAX} calls were sent without waiting for an answer, the limit.")
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._grow_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_count += 1
        if self._headers_count > HEADERS_MAX:
            self._refuse(f"The call has more than {HEADERS_MAX} headers, the limit.")
        self._grow_head(len(name) + len(value) + 4)
        if not self._in_head:
            return  # a trailer: nobody asks for one
        name, value = name.lower(), value.rstrip(b" \t")
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        version, method = self._parser.get_http_version(), self._parser.get_method()
        names = [name for name, _ in self._headers]
        if version not in _VERSIONS:
            self._refuse("Only HTTP/1.1 and HTTP/1.0 are understood.")
        if names.count(b"host") != 1 and (version == "1.1" or b"host" in names):
            self._refuse("The call must have one Host header.")
        codings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or version == "1.0"):
            self._refuse("The only Transfer-Encoding that is understood is chunked, in HTTP/1.1.")
        if method == b"CONNECT":
            self._refuse("This is no proxy.")
        if self._parser.should_upgrade():
            self._upgrade = method
            return
        raw_path, _, query = self._target().partition(b"?")
        head = Head(
            method=method.decode(),
            path=unquote(raw_path.decode()),
            raw_path=raw_path,
            query=query,
            version=version,
            headers=self._headers,
            keep_alive=version == "1.1" and self._parser.should_keep_alive(),
            expects_continue=self._expects_continue and version == "1.1",
        )
        self._in_head = False
        self._unframed = 0
        self._events.append(head)

    def _target(self) -> bytes:
        target = self._url
        if not target.startswith(b"/"):
            absolute = _ABSOLUTE.fullmatch(target)
            if absolute is None:
                self._refuse("The target of the call must be a path or an http URL.")
            target = absolute[1] if absolute[1].startswith(b"/") else b"/" + absolute[1]
        if not target.isascii() or b"#" in target:
            self._refuse("The target of the call must be in ASCII, without a fragment.")
        return target

    def on_body(self, part: bytes) -> None:
        self._body += part
        self._body_bytes += len(part)
        self._body_parts += 1
        if self._body_parts > BODY_PARTS_FREE + self._body_bytes // BODY_PART_BYTES_MIN:
            self._refuse(f"The body comes in parts of less than {BODY_PART_BYTES_MIN} bytes: send longer ones.")

    def on_message_complete(self) -> None:
        if self._upgrade is not None:
            return
        self._flush()
        self._events.append(End.END)
        self._in_head = True
        self._unframed = 0
