"""Errors: what a node raises is what the caller gets, and what gRPC itself says is understood too."""

from __future__ import annotations

import io
import json
import logging
import math
import random
import re
import sys

import grpc
import grpc.aio
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.endpoint import check_reachable, join_endpoint, split_endpoint
from baton.errors import BatonError, Code, Reason
from baton.ids import RequestId
from baton.log import LogFormat, LogLevel, get_log, set_up_logging
from baton.status import from_rpc_error, to_status
from baton.tracing import Traceparent, call_metadata, new_request_id, read_metadata
from tests.support.logs import tear_down_logging

HEADER_BYTES_MAX = 8192


def over_the_wire(error: BatonError) -> BatonError:
    return from_rpc_error(as_received(to_status(error)))


def as_received(status: grpc.Status) -> grpc.aio.AioRpcError:
    return rpc_error(status.code, status.details or "", *(status.trailing_metadata or ()))


def rpc_error(code: grpc.StatusCode, details: str, *trailers: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details)


def test_every_reason_has_a_code_and_is_spelt_like_its_name() -> None:
    """The reason's text is the public interface."""
    assert all(isinstance(reason.code, Code) for reason in Reason)
    assert all(reason.value == reason.name for reason in Reason)
    assert {code.value: code.name for code in Code} == {
        code.value[0]: code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK
    }


@settings(deadline=None)
@given(
    reason=st.sampled_from(Reason),
    code=st.none() | st.sampled_from(Code),
    message=st.text(min_size=1, max_size=150),
    field=st.none() | st.from_regex(r"[a-z_.]{1,30}", fullmatch=True),
    retry_after_ms=st.none() | st.integers(0, 10_000_000),
    metadata=st.dictionaries(st.from_regex(r"[a-z_]{1,20}", fullmatch=True), st.text(max_size=20), max_size=4),
)
def test_an_error_arrives_as_it_was_raised(
    reason: Reason,
    code: Code | None,
    message: str,
    field: str | None,
    retry_after_ms: int | None,
    metadata: dict[str, str],
) -> None:
    """Every part of the error survives the rich status."""
    sent = BatonError(reason, message, code=code, field=field, retry_after_ms=retry_after_ms, metadata=metadata)
    got = over_the_wire(sent)
    assert (got.reason, got.code, got.message) == (sent.reason, sent.code, sent.message)
    assert (got.field, got.retry_after_ms, got.metadata) == (field, retry_after_ms, metadata)


def test_an_error_that_is_too_long_is_cut_to_fit_the_trailers() -> None:
    """A message of 100,000 wide characters and 50 long facts: status text and details stay under 8 KiB as encoded."""
    huge = BatonError(
        Reason.BAD_FIELD,
        "é漢" * 50_000,
        field="sampling.top_p",
        retry_after_ms=1,
        metadata={f"key{i}" * 50: "漢" * 500 for i in range(50)},
    )
    status = to_status(huge)
    ((_, details),) = status.trailing_metadata or ()
    assert isinstance(details, bytes)
    percent_encoded_bytes = 3 * len((status.details or "").encode())
    assert percent_encoded_bytes + len(details) * 4 / 3 < HEADER_BYTES_MAX
    got = over_the_wire(huge)
    assert got.reason is Reason.BAD_FIELD
    assert got.message.startswith("é漢é漢")
    assert got.message.endswith("...")


def test_a_reason_of_a_newer_peer_is_kept_as_text() -> None:
    """A peer of a later version raises a reason that this version does not have."""
    info = error_details_pb2.ErrorInfo(reason="MOON_FULL", domain="baton", metadata={"moon": "new"})
    detail = any_pb2.Any()
    detail.Pack(info)
    rich = status_pb2.Status(code=Code.ABORTED.value, message="later", details=[detail])
    trailer = ("grpc-status-details-bin", rich.SerializeToString())
    got = from_rpc_error(rpc_error(grpc.StatusCode.ABORTED, "later", trailer))
    assert (got.code, got.reason, got.message) == (Code.ABORTED, Reason.UNRECOGNISED, "later")
    assert got.metadata == {"moon": "new", "reason": "MOON_FULL"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, Reason.PEER_UNREACHABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.DEADLINE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TOO_MANY_CALLS),
        (grpc.StatusCode.DATA_LOSS, Reason.UNRECOGNISED),
    ],
)
def test_a_status_made_by_grpc_names_the_peer(code: grpc.StatusCode, reason: Reason) -> None:
    """No node wrote this status, so the text says who was called."""
    got = from_rpc_error(rpc_error(code, "it broke"), peer="decode-0 at h:1")
    assert (got.code.name, got.reason, got.message) == (code.name, reason, "decode-0 at h:1: it broke")


def test_details_that_contradict_the_status_are_ignored() -> None:
    """A proxy replaced the code and left the details: the code counts."""
    trailers = to_status(BatonError(Reason.QUEUE_FULL, "full")).trailing_metadata or ()
    got = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, "proxy", *trailers))
    assert (got.code, got.reason, got.message) == (Code.UNAVAILABLE, Reason.PEER_UNREACHABLE, "proxy")


@settings(deadline=None)
@given(
    host=st.sampled_from(["127.0.0.1", "::1", "decode-0.pool.svc", "localhost"]),
    port=st.integers(0, 65535),
)
def test_an_endpoint_is_split_as_it_was_joined(host: str, port: int) -> None:
    """IPv6 addresses get brackets, others none."""
    assert split_endpoint(join_endpoint(host, port)) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:x", "h:65536", "::1:70", "h:-1", "a b:1", "h:٣"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    """The error quotes the text."""
    with pytest.raises(BatonError, match=re.escape(f"'{text}' is not a usable endpoint")) as caught:
        split_endpoint(text)
    assert caught.value.reason is Reason.BAD_ENDPOINT


@pytest.mark.parametrize("text", ["0.0.0.0:7000", "[::]:7000", "decode-0:0"])
def test_an_endpoint_for_listening_cannot_be_advertised(text: str) -> None:
    """A wildcard address or port 0 in a node's record would send peers to themselves."""
    with pytest.raises(BatonError, match="advertise") as caught:
        check_reachable(text)
    assert caught.value.reason is Reason.BAD_ENDPOINT


def test_trace_context_is_carried_from_call_to_call() -> None:
    """A child keeps trace and sampling and gets a span of its own; metadata carries it unchanged."""
    rng = random.Random(1)
    parent = Traceparent.new(rng, sampled=True)
    child = parent.child(rng)
    assert (child.trace, child.sampled) == (parent.trace, True)
    assert child.span != parent.span
    request_id = new_request_id(rng)
    read = read_metadata([("user-agent", "x"), *call_metadata(request_id=request_id, traceparent=child)])
    assert (read.request_id, read.traceparent) == (request_id, child)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", True),
        ("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-what-comes-later", True),
        ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", False),
        ("ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", False),
        ("00-00000000000000000000000000000000-b7ad6b7169203331-01", False),
        ("00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", False),
        ("00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01", False),
        ("", False),
    ],
)
def test_traceparent_of_a_caller(text: str, known: bool) -> None:
    """Valid ones are continued, later versions too; broken ones are as good as none (W3C Trace Context, 3.2.2)."""
    parsed = read_metadata([("traceparent", text)]).traceparent
    if known:
        assert str(parsed) == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    else:
        assert parsed is None


@pytest.mark.parametrize("text", ["", "a" * 65, "a b", "a\nb", "é"])
def test_a_request_id_that_we_would_not_log_is_left_out(text: str) -> None:
    """Request ids of clients end up in logs and metadata: the call gets another one."""
    assert read_metadata([("x-request-id", text)]).request_id is None
    assert read_metadata([("x-request-id", "client-1.a:b_c")]).request_id == RequestId("client-1.a:b_c")


TIME = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d"


def test_an_event_is_one_line_whatever_its_values() -> None:
    """Values with spaces, quotes and line ends of a hostile client cannot forge a second line."""
    stream = io.StringIO()
    handler = set_up_logging(node="decode-0", level=LogLevel.INFO, stream=stream)
    try:
        log = get_log("directory")
        log.debug("not shown")
        log.info("record %s", "expired\nforged", name="a b", text='"\n', reason=Reason.INTERNAL, share=0.25, empty="")
        logging.getLogger("some.library").info("not shown")
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("failed", id=b"\x01\xff")
    finally:
        tear_down_logging(handler)
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(
        TIME + r" INFO decode-0 directory record expired\\nforged "
        r'name="a b" text="\\"\\n" reason=INTERNAL share=0.25 empty=""',
        lines[0],
    )
    assert re.fullmatch(TIME + r" ERROR decode-0 directory failed id=01ff", lines[1])
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'x'"


def test_an_event_as_json_is_one_line_too() -> None:
    """Numbers stay numbers, what JSON has not becomes text, and a field may be called like a part of the line."""
    stream = io.StringIO()
    handler = set_up_logging(node="decode-0", level=LogLevel.INFO, log_format=LogFormat.JSON, stream=stream)
    try:
        log = get_log("directory")
        log.info(
            "expired\n",
            node="a b",
            share=0.25,
            left=math.inf,
            count=3,
            none=None,
            long="x" * 400,
            reason=Reason.INTERNAL,
        )
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("failed", id=b"\x01\xff")
    finally:
        tear_down_logging(handler)
    reported, failed = (json.loads(line) for line in stream.getvalue().splitlines())
    assert re.fullmatch(TIME, reported.pop("time"))
    assert reported == {
        "level": "INFO", "node": "decode-0", "component": "directory", "message": "expired\n",
        "fields": {"node": "a b", "share": 0.25, "left": "inf", "count": 3, "none": None, "long": "x" * 297 + "...",
                   "reason": "INTERNAL"},
    }  # fmt: skip
    assert failed["fields"] == {"id": "01ff"}
    assert failed["traceback"].startswith("Traceback (most recent call last):")
    assert failed["traceback"].endswith("KeyError: 'x'")


def test_logging_is_set_up_again_without_doubling() -> None:
    """A second call replaces the first one's handler; stderr is the default."""
    first = set_up_logging(node="a", level=LogLevel.ERROR, stream=io.StringIO())
    second = set_up_logging(node="b", level=LogLevel.INFO)
    try:
        assert first not in logging.getLogger().handlers
        assert second in logging.getLogger().handlers
        assert isinstance(second, logging.StreamHandler)
        assert second.stream is sys.stderr
    finally:
        tear_down_logging(second)
