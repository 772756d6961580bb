"""What a call over HTTP may be, and what is refused before it costs more to read than to write. No I/O."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError
from router.http_parser import (
    BODY_FRAME_BYTES_FREE,
    BODY_PARTS_FREE,
    CALLS_AT_ONCE_MAX,
    HEAD_BYTES_MAX,
    HEADERS_MAX,
    End,
    Event,
    Head,
    RequestParser,
)

HOST = b"Host: h\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST
POST = b"POST / HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def read(data: bytes, size: int | None = None) -> list[Event]:
    """What `data` says in pieces of `size`. Parts of a body that follow each other are one."""
    parser, found = RequestParser(), list[Event]()
    size = size or len(data)
    for begin in range(0, len(data), size):
        for event in parser.feed(data[begin : begin + size]):
            last = found[-1] if found else None
            if isinstance(event, bytes) and isinstance(last, bytes):
                found[-1] = last + event
            else:
                found.append(event)
    parser.close()
    return found


def head(event: Event) -> Head:
    assert isinstance(event, Head)
    return event


def problem(data: bytes, size: int | None = None) -> str:
    *_, error = read(data, size)
    assert isinstance(error, BatonError)
    return error.message


@pytest.mark.parametrize("size", [None, 1, 7])
def test_calls_one_after_another(size: int | None) -> None:
    """A body with a length, one in chunks with an extension and trailers, and none; cut anywhere."""
    data = (
        POST.replace(b"/ ", b"/a%20b?x=1 ") + b"Content-Length: 2\r\nX-A: b \r\n\r\nhi"
        b"" + CHUNKED + b"2;a=b\r\nhi\r\n1\r\n!\r\n0\r\nHost: evil\r\nX: y\r\n\r\n" + GET + b"Connection: close\r\n\r\n"
    )
    first, hi, end, second, more, end2, third, end3 = read(data, size)
    assert (head(first).path, head(first).raw_path, head(first).query) == ("/a b", b"/a%20b", b"x=1")
    assert head(first).headers == [(b"host", b"h"), (b"content-length", b"2"), (b"x-a", b"b")]
    assert head(second).headers == [(b"host", b"h"), (b"transfer-encoding", b"chunked")]
    assert (hi, more, end, end2, end3) == (b"hi", b"hi!", End.END, End.END, End.END)
    assert [head(each).keep_alive for each in (first, second, third)] == [True, True, False]


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://h:80/v1/models?a", "/v1/models", b"a"),
        (b"HTTPS://h", "/", b""),
        (b"http://h?a=b", "/", b"a=b"),
        (b"//x/y", "//x/y", b""),
    ],
)
def test_a_target_may_be_absolute(target: bytes, path: str, query: bytes) -> None:
    """As clients of a proxy send it: only the path counts."""
    (call, _) = read(GET.replace(b"/ ", target + b" ", 1) + b"\r\n")
    assert (head(call).path, head(call).query) == (path, query)


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_client_that_offers_another_protocol_stays_with_this_one(protocol: bytes, size: int | None) -> None:
    """Java's client offers HTTP/2 with each call. Its body is read, and the call after it too."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\nHTTP2-Settings: AA\r\n"
    call, body, _, following, _ = read(POST + offer + b"Content-Length: 2\r\n\r\nhi" + GET + b"\r\n", size)
    assert head(call).headers == [(b"host", b"h"), (b"content-length", b"2")]
    assert (head(call).method, body, head(following).method) == ("POST", b"hi", "GET")


def test_who_waits_to_be_asked_for_the_body() -> None:
    """In HTTP/1.1; HTTP/1.0 does not know the question. Its connections end with the answer."""
    rest = HOST + b"Expect: 100-Continue\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\n"
    (new,), (old,) = read(b"POST / HTTP/1.1\r\n" + rest), read(b"POST / HTTP/1.0\r\n" + rest)
    assert (head(new).expects_continue, head(new).keep_alive) == (True, True)
    assert (head(old).expects_continue, head(old).keep_alive) == (False, False)


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n",
        POST + b"Content-Length: -2\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Transfer-Encoding: gzip\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n",
        CHUNKED + b"fffffffffffffffffffffff\r\n",
        CHUNKED + b"2\nhi\r\n0\r\n\r\n",
        CHUNKED + b"2\r\nhiX",
        b"GET / HTTP/1.1\r\n\r\n",
        GET + HOST + b"\r\n",
        GET.replace(b"1.1", b"0.9") + b"\r\n",
        GET.replace(b"1.1", b"2.0") + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT h:1 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
        GET.replace(b"/ ", b"/a#b ", 1) + b"\r\n",
        GET.replace(b"/ ", b"/\xc3\xa4 ", 1) + b"\r\n",
        GET.replace(b"\r\n", b"\n") + b"\n",
        GET + b"A: b\r\n c\r\n\r\n",
        GET + b"A : b\r\n\r\n",
        GET + b"A: b\0c\r\n\r\n",
        b"\x16\x03\x01\x02",
    ],
)
def test_what_two_readers_could_read_in_two_ways_is_refused(data: bytes, size: int | None) -> None:
    """Two lengths, line ends that are none, versions and hosts that are wrong: nothing that follows counts."""
    parser = RequestParser()
    assert problem(data, size)
    parser.feed(data)
    assert parser.feed(GET + b"\r\n") == []


LONG = "The head of the call is longer than 32768 bytes, the limit."
MANY = f"The call has more than {HEADERS_MAX} headers, the limit."


@pytest.mark.parametrize("size", [None, 1, 1_000])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GET + b"a: " + b"b" * HEAD_BYTES_MAX, LONG),
        (GET + b"a" * (HEAD_BYTES_MAX + 1), LONG),
        (GET + b"a:" + b" " * HEAD_BYTES_MAX, LONG),
        (b"GET /" + b"a" * HEAD_BYTES_MAX, LONG),
        (b"\r\n" * HEAD_BYTES_MAX, LONG),
        (GET + b"a:b\r\n" * HEADERS_MAX + b"\r\n", MANY),
        (CHUNKED + b"0\r\n" + b"a:b\r\n" * HEADERS_MAX + b"\r\n", MANY),
    ],
)
def test_a_head_is_bounded(data: bytes, message: str, size: int | None) -> None:
    """In bytes and in headers, trailers among them, however it is cut and however far it is from its end."""
    assert problem(data, size) == message


def test_a_head_that_is_just_short_enough() -> None:
    """As many headers and bytes as there may be."""
    many = GET + b"a:b\r\n" * (HEADERS_MAX - 1) + b"\r\n"
    long = GET + b"a: " + b"b" * (HEAD_BYTES_MAX - 40) + b"\r\n\r\n"
    assert [type(event) for event in read(many) + read(long, 1)] == [Head, End] * 2


TINY = "The body comes in parts of less than 16 bytes: send longer ones."


@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (CHUNKED + b"1\r\nx\r\n" * (2 * BODY_PARTS_FREE), 32_768, TINY),
        (POST + b"Content-Length: 99999\r\n\r\n" + b"x" * (2 * BODY_PARTS_FREE), 1, TINY),
        (
            CHUNKED + (b"1;" + b"a" * 1_000 + b"\r\nx\r\n") * (BODY_FRAME_BYTES_FREE // 900),
            1_024,
            "The frame of the body is longer than the body: send longer chunks.",
        ),
    ],
)
def test_a_body_brings_more_than_its_frame(data: bytes, size: int, message: str) -> None:
    """Chunks of one byte, packets of one byte, extensions of a thousand."""
    assert problem(data, size) == message


def test_small_chunks_are_taken_while_they_are_few() -> None:
    """And long ones without end."""
    few = CHUNKED + b"1\r\nx\r\n" * BODY_PARTS_FREE + b"0\r\n\r\n"
    long = CHUNKED + (b"4000\r\n" + b"x" * 0x4000 + b"\r\n") * 256 + b"0\r\n\r\n"
    assert [len(each) if isinstance(each, bytes) else type(each) for each in read(few, 8_192) + read(long, 8_192)] == [
        Head, BODY_PARTS_FREE, End, Head, 256 * 0x4000, End,
    ]  # fmt: skip


def test_calls_that_wait_for_no_answer_are_few() -> None:
    """Those that were there are given out, in order, before the rest is refused."""
    *calls, error = read((GET + b"\r\n") * (CALLS_AT_ONCE_MAX + 1))
    assert [type(each) for each in calls] == [Head, End] * CALLS_AT_ONCE_MAX
    assert isinstance(error, BatonError)


PARTS = (
    *(b"1\r\nx\r\n", b"0\r\n\r\n", GET, CHUNKED, b"\r\n", b"\n", b":", b"\0", b"Content-Length: 1\r\n"),
    b"Upgrade: h2c\r\nConnection: upgrade\r\n",
)


@given(st.lists(st.sampled_from(PARTS), max_size=CALLS_AT_ONCE_MAX), st.data())
def test_garbage_reads_the_same_however_it_is_cut(parts: list[bytes], data: st.DataObject) -> None:
    """Whatever comes: events up to an error, and the same ones when it comes in other pieces."""
    raw = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    parser, found = RequestParser(), list[Event]()
    for begin, end in pairwise([0, *cuts, len(raw)]):
        found += parser.feed(raw[begin:end])

    def plain(events: list[Event]) -> list[object]:
        body, kinds = b"", list[object]()
        for event in events:
            if isinstance(event, bytes):
                body += event
            else:
                kinds += [body, "error" if isinstance(event, BatonError) else event]
                body = b""
        return [*kinds, body]

    assert plain(found) == plain(read(raw) if raw else [])
