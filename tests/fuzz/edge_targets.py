"""What comes with a request, and what this cluster reads from others: metadata, keys, addresses, records, answers."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any, Final, cast

from batonpb import common_pb2, directory_pb2
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from baton import directory_redis
from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, Reason
from baton.rpc import RpcLimits, time_left_s
from baton.tracing import Traceparent, call_metadata, forward_metadata, new_request_id, read_metadata
from baton.wire import record_from_proto, record_to_proto
from cli.bench_load import OpenAiTarget, TargetError
from router.keys import KEYS_MAX, KeyBook, parse_keys
from tests.fuzz.target import Target, refusal_is_typed

LIMITS: Final = RpcLimits()
KEY: Final = "baton-" + "k" * 43
_DIGEST: Final = hashlib.sha256(KEY.encode()).hexdigest()
_KEYS: Final = (
    f'[[keys]]\nname = "a"\nsha256 = "{_DIGEST}"\nconcurrency = 2\ncache_salt = "x"\npriority = "low"\n'.encode()
)


def check_metadata(data: bytes) -> None:
    """Lines `name: value`; values that are no ASCII come as bytes, as gRPC gives them."""
    pairs: list[tuple[str, str | bytes]] = []
    for line in data.split(b"\n"):
        name, _, value = line.partition(b": ")
        pairs.append((name.decode("latin-1").lower(), value.decode() if value.isascii() else value))
    rng = random.Random(1)
    with refusal_is_typed():
        called = read_metadata(pairs)
        forwarded = forward_metadata(pairs, rng)
        if called.traceparent is not None:
            assert Traceparent.parse(str(called.traceparent)) == called.traceparent
        trace = called.traceparent or Traceparent.new(rng, sampled=True)
        again = read_metadata(call_metadata(request_id=called.request_id or new_request_id(rng), traceparent=trace))
        assert again.traceparent == trace
        assert read_metadata(forwarded).request_id == called.request_id
    if (left := _number(dict(pairs).get("deadline", ""))) is not None:
        in_time = time_left_s(cast(Any, SimpleNamespace(time_remaining=lambda: left)), LIMITS)
        assert not in_time > LIMITS.public_deadline_ms_max / 1000
    book = KeyBook(parse_keys(_KEYS, source="f"), blind=b"blind", now_s=0.0)
    for _, sent in pairs:
        with refusal_is_typed():
            assert book.find(sent).key.name == "a"
            assert KEY.encode() in (sent if isinstance(sent, bytes) else sent.encode())


def _number(value: str | bytes) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def check_keys(data: bytes) -> None:
    """A file of API keys. What is wrong with it is told without a word of it that may be a key."""
    try:
        keys = parse_keys(data, source="f")
    except BatonError as error:
        assert (error.reason, len(error.message) < 2_000) == (Reason.BAD_CONFIG, True), repr(error)[:400]
        assert KEY not in error.message
        return
    assert 0 < len(keys) <= KEYS_MAX
    assert [use.key for use in KeyBook(keys, blind=b"blind", now_s=0.0).uses()] == list(keys)


def check_endpoint(data: bytes) -> None:
    try:
        host, port = split_endpoint(data.decode(errors="replace"))
    except BatonError as error:
        assert error.reason is Reason.BAD_ENDPOINT
        return
    assert split_endpoint(join_endpoint(host, port)) == (host, port)


def check_record(data: bytes) -> None:
    """A node's record, over gRPC or out of Redis."""
    for kept in directory_redis._records([b"node", data]):
        assert kept.name == "node"
    try:
        message = directory_pb2.NodeRecord.FromString(data)
    except DecodeError:
        return
    with refusal_is_typed():
        record = record_from_proto(message)
        assert record_from_proto(record_to_proto(record)) == record


def check_answer(data: bytes) -> None:
    """What an HTTP server sends to `baton bench`, head and all: tokens, or an error that it counts."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = OpenAiTarget(f"http://127.0.0.1:{port}", model=None, timeout_s=20.0, temperature=0.0)
        try:
            async with aclosing(target.prepare([1], 1)()) as messages:
                async for message in messages:
                    assert message.tokens > 0
        except TargetError as error:
            assert len(str(error)) < 2_000
        finally:
            server.close()
            await server.wait_closed()

    asyncio.run(scene())


_ids = st.text("0123456789abcdefx._:-é", max_size=70)
_lines = st.lists(
    st.tuples(
        st.sampled_from(["x-request-id", "traceparent", "authorization", "X-Request-Id", "deadline", "a-bin"]),
        _ids
        | st.floats().map(str)
        | st.sampled_from([f"Bearer {KEY}", "bearer  x", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"]),
    ),
    max_size=5,
)
_RECORD: Final = directory_pb2.NodeRecord(
    name="node",
    role=common_pb2.ROLE_PREFILL,
    incarnation=7,
    endpoint="10.0.0.1:7000",
    lifecycle=common_pb2.LIFECYCLE_READY,
    transports=["tcp"],
).SerializeToString()
_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_CHUNK: Final = b'data: {"choices": [{"text": "a", "finish_reason": null}], "usage": {"completion_tokens": 1}}\n\n'
_data = st.sampled_from(
    [
        _CHUNK,
        b"data: [DONE]\n\n",
        b'data: {"choices": [1]}\n\n',
        b'data: {"choices": {"a": 1}}\n\n',
        b"data: 1\n",
        b": a\n",
    ]
    + [
        b'data: {"usage": {"completion_tokens": -1}, "choices": "x"}\n',
        b'data: {"error": {"message": "m"}}\r\n',
        b"data:",
    ]
)

METADATA: Final = Target(
    name="metadata",
    check=check_metadata,
    inputs=_lines.map(lambda lines: "\n".join(f"{name}: {value}" for name, value in lines).encode()),
    samples=[
        f"x-request-id: r.1\ntraceparent: 00-{'a' * 32}-{'b' * 16}-01\nauthorization: Bearer {KEY}".encode(),
        b"traceparent: cc-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01-what",
    ],
    repeats=[(b"x-request-id: ", b"a", b""), (b"traceparent: 00-", b"a-", b""), (b"authorization: ", b" ", b"x")],
)
KEYS: Final = Target(
    name="api_keys",
    check=check_keys,
    inputs=st.text(max_size=60).map(lambda text: _KEYS + text.encode()),
    samples=[
        _KEYS + KEY.encode() + b" = 1\n",
        _KEYS,
        _KEYS + _KEYS.replace(b'"a"', b'"b"'),
        _KEYS.replace(_DIGEST.encode(), KEY.encode()),
    ],
    repeats=[(b"", b"[[keys]]\n", b""), (b"a = ", b"[", b""), (b"a = '", b"x", b"'")],
)
ENDPOINTS: Final = Target(
    name="endpoint",
    check=check_endpoint,
    inputs=st.text("0123456789abf:[].%/ ", max_size=30).map(str.encode),
    samples=[b"127.0.0.1:7000", b"[::1]:80", b"host:0"],
    repeats=[(b"a:", b"1", b""), (b"", b":", b"1"), (b"[", b":", b"]:1")],
)
RECORDS: Final = Target(
    name="record",
    check=check_record,
    inputs=st.binary(max_size=60).map(lambda more: _RECORD + more),
    samples=[_RECORD, b"a 5 b\n" + _RECORD],
    repeats=[(b"", _RECORD, b""), (b"1 ", b"9", b" 1\n" + _RECORD)],
)
ANSWERS: Final = Target(
    name="answer",
    check=check_answer,
    inputs=st.lists(_data, max_size=6).map(lambda lines: _HEAD + b"".join(lines)),
    samples=[_HEAD + _CHUNK + b"data: [DONE]\n\n", b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}"],
    repeats=[
        (_HEAD, b":\n", b""),
        (_HEAD + b"data: ", b"[", b"\n"),
        (_HEAD, _CHUNK, b""),
        (b"HTTP/1.1 200 ", b"a", b""),
    ],
)
