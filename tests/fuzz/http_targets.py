"""What comes over an HTTP connection before there is a body: heads, frames of bodies, addresses of proxies."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from itertools import pairwise
from typing import Final

import h11
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from router.http_parser import BODY_FRAME_BYTES_FREE, CALLS_AT_ONCE_MAX, HEAD_BYTES_MAX, End, Event, Head, RequestParser
from router.http_slots import client_address
from tests.fuzz.target import Target

PROXIES: Final = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def check_http(data: bytes) -> None:
    """However it is cut, the same calls are read: a proxy that cuts it in another way sees no other call begin."""
    whole = _read([data])
    if len(data) <= min(HEAD_BYTES_MAX, BODY_FRAME_BYTES_FREE) and whole.count(End.END) < CALLS_AT_ONCE_MAX:
        for size in (1, 7, 64):
            assert _read([data[at : at + size] for at in range(0, len(data), size)]) == whole
    for event in whole:
        if isinstance(event, Head):
            assert sum(len(name) + len(value) for name, value in event.headers) <= HEAD_BYTES_MAX
            assert event.path.startswith("/") and event.version in ("1.0", "1.1")
            assert not any(b"\n" in value or b"\0" in value for _, value in event.headers)
    for ours, others in zip(_calls_of(whole), _as_h11_reads(data), strict=False):
        assert ours == others
    for before, after in pairwise(whole):
        assert (before is End.END) == isinstance(after, Head) or after == "refused", (before, after)


def _read(pieces: list[bytes]) -> list[Event | str]:
    """The calls, each with its body in one part. An error ends them, and takes an unfinished body with it."""
    parser, events = RequestParser(), list[Event | str]()
    for piece in pieces:
        for event in parser.feed(piece):
            if isinstance(event, BatonError):
                assert event.reason is Reason.BAD_FIELD and len(event.message) < 400
                while events and isinstance(events[-1], bytes):
                    events.pop()
                events.append("refused")
            elif isinstance(event, bytes) and events and isinstance(events[-1], bytes):
                events[-1] += event
            else:
                events.append(event)
    parser.close()
    return events


def check_forwarded(data: bytes) -> None:
    """X-Forwarded-For from a proxy of ours and from somebody else, who cannot choose whom his calls count for."""
    values = [line.decode("latin-1") for line in data.split(b"\n")]
    stranger, proxy = ip_address("192.0.2.1"), ip_address("10.0.0.1")
    assert client_address(stranger, values, PROXIES) == stranger
    named = client_address(proxy, values, PROXIES)
    assert client_address(proxy, [str(named)], PROXIES) == named
    assert client_address(proxy, [*values, "192.0.2.1"], PROXIES) == stranger


def _calls_of(events: list[Event | str]) -> list[tuple[bytes, bytes]]:
    """Method and body of each whole call."""
    calls, head, body = [], None, b""
    for event in events:
        if isinstance(event, Head):
            head, body = event, b""
        elif isinstance(event, bytes):
            body = event
        elif event is End.END and head is not None:
            calls.append((head.method.encode(), body))
    return calls


def _as_h11_reads(data: bytes) -> list[tuple[bytes, bytes]]:
    """The same of another parser, up to what it does not take: if both take a call, it must be the same one."""
    connection, calls, body = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), [], b""
    try:
        connection.receive_data(data)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED, h11.ConnectionClosed()):
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                calls.append((request.method, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    except h11.ProtocolError:
        pass
    return calls


_headers = st.sampled_from(
    [b"Host: h", b"Content-Length: 5", b"Content-Length: 05", b"Content-Length: 5, 5", b"Transfer-Encoding: chunked"]
    + [b"Transfer-Encoding: gzip, chunked", b"Connection: close", b"Connection: Upgrade", b"Upgrade: websocket"]
    + [b"a:\tb", b"Expect: 100-continue", b" folded: x", b"no colon", b"Content-Length : 5", b"X: \xff", b"Host:"]
    + [b"X-Y: \0"]
)
_bodies = st.sampled_from(
    [b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"5;a=b\r\nhello\r\n0\r\nT: x\r\n\r\n", b"5\nhello\n0\n\n", b""]
)
_starts = st.sampled_from(
    [b"POST /v1/completions HTTP/1.1", b"GET / HTTP/1.0", b"GET http://h/x?y HTTP/1.1", b"OPTIONS * HTTP/1.1", b"GET /"]
    + [b"CONNECT h:1 HTTP/1.1", b"GET /%00%ff HTTP/1.1", b"PRI * HTTP/2.0", b"GET  / HTTP/1.1", b"get / HTTP/1.1"]
)
_ends = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"])
_calls = st.builds(
    lambda start, headers, end, body: end.join([start, *headers, b"", b""]) + body,
    _starts, st.lists(_headers, max_size=5).map(lambda more: [b"Host: h", *more]), _ends, _bodies,
)  # fmt: skip
_CALL: Final = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello"
_CHUNKS: Final = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"

HTTP: Final = Target(
    name="http",
    check=check_http,
    inputs=st.lists(_calls, max_size=4).map(b"".join),
    samples=[_CALL, _CALL * 2, _CHUNKS + b"5;a\r\nhello\r\n0\r\nT: x\r\n\r\n" + _CALL],
    repeats=[
        (b"", _CALL, b""), (b"GET / HTTP/1.1\r\n", b"A: b\r\n", b""), (b"GET / HTTP/1.1\r\nA: ", b"b", b"\r\n\r\n"),
        (b"GET /", b"%20", b" HTTP/1.1\r\n"), (_CHUNKS, b"1\r\na\r\n", b""), (_CHUNKS, b"0", b"1\r\na"),
        (b"", b"\r\n", b""), (_CHUNKS + b"1;", b"a=b;", b"\r\na"),
    ],
)  # fmt: skip
FORWARDED: Final = Target(
    name="forwarded",
    check=check_forwarded,
    inputs=st.lists(st.text("0123456789abf:.,[]% \n", max_size=20) | st.ip_addresses().map(str), max_size=6).map(
        lambda parts: ",".join(parts).encode()
    ),
    samples=[b"192.0.2.7, 10.1.1.1", b"[fd00::1]:80,::ffff:10.0.0.2"],
    repeats=[(b"", b"10.0.0.1,", b""), (b"", b"1", b""), (b"", b":", b""), (b"", b"[", b""), (b"", b"10.0.0.1\n", b"")],
)
