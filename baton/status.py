"""BatonError to a gRPC status with rich details, and back (google.rpc error model, https://google.aip.dev/193)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton.errors import BatonError, Code, Reason

DOMAIN: Final = "baton"
MESSAGE_BYTES_MAX: Final = 800
"""Text and details are HTTP/2 trailers: encoded, all of them must stay under the usual 8 KiB."""
METADATA_ENTRIES_MAX: Final = 8
METADATA_BYTES_MAX: Final = 96

_GRPC_CODES: Final[Mapping[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}

_PLAIN_REASONS: Final[Mapping[Code, Reason]] = {
    Code.UNAVAILABLE: Reason.PEER_UNREACHABLE,
    Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    Code.CANCELLED: Reason.CANCELLED,
    Code.UNIMPLEMENTED: Reason.UNIMPLEMENTED,
    Code.RESOURCE_EXHAUSTED: Reason.TOO_MANY_CALLS,
    Code.INTERNAL: Reason.INTERNAL,
}
"""The reason of a status without our details: gRPC itself made it, not a node."""

_WORDS: Final = (
    ("larger than max", "takes and gives no message as large as this one (rpc.message_bytes_max)"),
    ("Method not found", "runs, but does not know this call: it is another kind of process, or another version"),
    ("http1.x server", "is no gRPC port: it speaks HTTP/1"),
    ("http2 header with status", "is no process of Baton's: a server or a proxy for HTTP answers"),
    ("Connection refused", "does not answer: nothing listens there"),
    ("No route to host", "cannot be reached: there is no route to its host"),
    ("Network is unreachable", "cannot be reached: there is no route to its network"),
    ("Domain name not found", "cannot be reached: its host's name is not known"),
    ("DNS resolution failed", "cannot be reached: its host's name is not known, or the name service does not answer"),
    ("DNS query cancelled", "cannot be reached: the name service does not answer"),
    ("watchdog timeout", "no longer answers: it is stopped, or cut off"),
    ("ping timeout", "no longer answers: it is stopped, or cut off"),
    ("Connection timed out", "does not answer: no connection came about in time"),
    ("FD Shutdown", "does not answer: no connection came about in time"),
    ("handshaker shutdown", "does not answer: no connection came about in time"),
    ("connection attempt timed out", "does not answer: no connection came about in time"),
    ("WRONG_VERSION_NUMBER", "speaks no TLS there: it was started without tls.cert_file, or it is another port"),
    ("is not in peer certificate", "has a certificate, but not that of a node"),
    ("Ssl handshake failed", "has a certificate of another CA than tls.ca_file, or one that has ended"),
    (
        ": Socket closed",
        "has closed the connection at once: where it uses mTLS, it takes certificates of its CA only (tls.cert_file, "
        "--tls-cert-file)",
    ),
    ("failed to connect", "does not answer: no connection came about"),
    ("Socket closed", "has closed the connection in the middle of the call"),
    ("Connection reset", "has closed the connection in the middle of the call"),
    ("Broken pipe", "has closed the connection in the middle of the call"),
    ("End of TCP stream", "has closed the connection in the middle of the call"),
    ("Cancelling all calls", "is stopping, and has ended the call"),
    ("Server shutdown", "is stopping, and has ended the call"),
    ("GOAWAY", "wants no more calls on this connection, and has closed it"),
    ("Deadline Exceeded", "did not answer in time"),
)
"""A part of gRPC's text, and what it means about the peer. The first match counts: a text has both cause and effect."""
_TOO_LARGE: Final = _WORDS[0][0]


def to_status(error: BatonError) -> grpc.Status:
    """The status to end a call with: ErrorInfo always, BadRequest for a field, RetryInfo for a retry time."""
    message = _cut(error.message, MESSAGE_BYTES_MAX)
    metadata = {
        _cut(key, METADATA_BYTES_MAX): _cut(value, METADATA_BYTES_MAX)
        for key, value in list(error.metadata.items())[:METADATA_ENTRIES_MAX]
    }
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=metadata)]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code.value, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    result = rpc_status.to_status(status)
    assert isinstance(result, grpc.Status)
    return result


def from_rpc_error(error: grpc.aio.AioRpcError, *, peer: str | None = None) -> BatonError:
    """What a failed call means. `peer` (a name or an endpoint) goes into the text of a status that no node made."""
    code = Code(error.code().value[0])
    try:
        rich = rpc_status.from_call(error)
    except ValueError:  # The details contradict the status since a proxy changed one of them: the status counts.
        rich = None
    if rich is None:
        return _plain(code, error.details() or "", peer)
    reason, field, retry_after_ms, metadata = Reason.UNRECOGNISED, None, None, {}
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in rich.details:
        if detail.Unpack(info):
            metadata = dict(info.metadata)
            try:
                reason = Reason(info.reason)
            except ValueError:
                metadata["reason"] = info.reason
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after_ms = max(0, retry.retry_delay.ToMilliseconds())
    message = rich.message or code.name
    return BatonError(reason, message, code=code, field=field, retry_after_ms=retry_after_ms, metadata=metadata)


def is_of_node(error: grpc.aio.AioRpcError) -> bool:
    """Whether a node made this status, and not gRPC or a proxy."""
    return any(key == "grpc-status-details-bin" for key, _ in error.trailing_metadata() or ())


def _plain(code: Code, details: str, peer: str | None) -> BatonError:
    reason = _PLAIN_REASONS.get(code, Reason.UNRECOGNISED)
    if code is Code.RESOURCE_EXHAUSTED and _TOO_LARGE in details:
        reason = Reason.BAD_FIELD  # the same again would be as large
        code = reason.code
    for part, words in _WORDS:
        if part in details:
            return BatonError(reason, f"{peer or 'The peer'} {words}.", code=code)
    text = _cut(details, MESSAGE_BYTES_MAX) or code.name.lower()
    return BatonError(reason, text if peer is None else f"{peer}: {text}", code=code)


def _cut(text: str, bytes_max: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return encoded[: bytes_max - 3].decode(errors="ignore") + "..."
