"""What is told of a peer that a call has not reached, or has lost: words, and not gRPC's own text."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import grpc
import pytest
from batonpb import decode_pb2, node_pb2, node_pb2_grpc

from baton.clock import Clock
from baton.directory_setting import open_directory
from baton.errors import BatonError, Code, Reason
from baton.rpc import ChannelLimits, Channels, RpcLimits, rpc_errors
from baton.status import from_rpc_error
from tests.support.cli_harness import free_endpoint
from tests.support.rpc_harness import answer, serving

CALL_S = 20.0


def failed(details: str, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> BatonError:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    return from_rpc_error(error, peer="decode-0")


@pytest.mark.parametrize(
    ("details", "message"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Failed to connect to remote "
            "host: connect: Connection refused (111)",
            "decode-0 does not answer: nothing listens there.",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:9: Failed to connect to remote "
            "host: connect: No route to host (113)",
            "decode-0 cannot be reached: there is no route to its host.",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:9: Trying to connect an "
            "http1.x server (HTTP status 400)",
            "decode-0 is no gRPC port: it speaks HTTP/1.",
        ),
        (
            "DNS resolution failed for nowhere:7: C-ares status is not ARES_SUCCESS qtype=A name=nowhere is_balancer=0:"
            " Domain name not found",
            "decode-0 cannot be reached: its host's name is not known.",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.1.2.3:9: FD Shutdown",
            "decode-0 does not answer: no connection came about in time.",
        ),
        ("failed to connect to all addresses; last error: ???", "decode-0 does not answer: no connection came about."),
        (
            "Received http2 header with status: 404",
            "decode-0 is no process of Baton's: a server or a proxy for HTTP answers.",
        ),
        ("Socket closed", "decode-0 has closed the connection in the middle of the call."),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:36319: Socket closed",
            "decode-0 has closed the connection at once: where it uses mTLS, it takes certificates of its CA only "
            "(tls.cert_file, --tls-cert-file).",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:43617: Ssl handshake failed "
            "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER: "
            "Invalid certificate verification context",
            "decode-0 speaks no TLS there: it was started without tls.cert_file, or it is another port.",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:36319: Ssl handshake failed "
            "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
            "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
            "decode-0 has a certificate of another CA than tls.ca_file, or one that has ended.",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:33415: Peer name "
            "node.baton.internal is not in peer certificate",
            "decode-0 has a certificate, but not that of a node.",
        ),
        ("recvmsg:Connection reset by peer", "decode-0 has closed the connection in the middle of the call."),
        ("keepalive watchdog timeout", "decode-0 no longer answers: it is stopped, or cut off."),
        ("ping timeout", "decode-0 no longer answers: it is stopped, or cut off."),
        ("Cancelling all calls", "decode-0 is stopping, and has ended the call."),
        ("GOAWAY received", "decode-0 wants no more calls on this connection, and has closed it."),
        (
            "GOAWAY received; Error code: 11; Debug Text: too_many_pings",
            "decode-0 wants no more calls on this connection, and has closed it.",
        ),
        ("the moon is full", "decode-0: the moon is full"),
        ("", "decode-0: unavailable"),
    ],
)
def test_a_failure_of_the_way(details: str, message: str) -> None:
    """What gRPC says in each case; what it has never said yet comes as it is."""
    error = failed(details)
    assert (error.reason, error.message) == (Reason.PEER_UNREACHABLE, message)


def test_time_is_over() -> None:
    error = failed("Deadline Exceeded", grpc.StatusCode.DEADLINE_EXCEEDED)
    assert (error.reason, error.message) == (Reason.DEADLINE, "decode-0 did not answer in time.")


def test_too_large_a_message_is_no_matter_of_load() -> None:
    """gRPC uses one code for both. Sending it again later would be in vain, so reason and code do not speak of load."""
    error = failed("CLIENT: Sent message larger than max (20000010 vs. 16777216)", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (error.reason, error.code, error.retry_after_ms, error.message) == (
        Reason.BAD_FIELD,
        Code.INVALID_ARGUMENT,
        None,
        "decode-0 takes and gives no message as large as this one (rpc.message_bytes_max).",
    )
    busy = failed("", grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert (busy.reason, busy.code) == (Reason.TOO_MANY_CALLS, Code.RESOURCE_EXHAUSTED)


async def called(endpoint: str, *, timeout_s: float = CALL_S) -> BatonError:
    """The error of a call to what is there, or not."""
    channels = Channels(limits=ChannelLimits())
    try:
        stub = node_pb2_grpc.NodeStub(channels.get(endpoint))
        with pytest.raises(BatonError) as caught, rpc_errors("It"):
            await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=timeout_s)
        return caught.value
    finally:
        await channels.close()


def test_nobody_listens() -> None:
    error = asyncio.run(called(free_endpoint()))
    assert (error.reason, error.message) == (Reason.PEER_UNREACHABLE, "It does not answer: nothing listens there.")


def test_a_host_that_is_not_known() -> None:
    """The top-level domain is set apart for names that never are (RFC 2606)."""
    error = asyncio.run(called("nowhere.invalid:7"))
    assert error.reason in (Reason.PEER_UNREACHABLE, Reason.DEADLINE)
    assert error.message.startswith(("It cannot be reached: ", "It did not answer in time."))


def with_server(serve: Callable[[socket.socket], None]) -> BatonError:
    """The error of a call to a plain socket whose first connection `serve` is given, on a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        server = threading.Thread(target=run)
        server.start()
        try:
            return asyncio.run(called(f"127.0.0.1:{listener.getsockname()[1]}"))
        finally:
            server.join()


def test_a_port_of_http() -> None:
    """As when the port of the OpenAI endpoints is given for that of the router."""

    def refuse(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    error = with_server(refuse)
    assert (error.reason, error.message) == (Reason.PEER_UNREACHABLE, "It is no gRPC port: it speaks HTTP/1.")


def test_a_process_of_another_kind() -> None:
    """A server that does not have the service: no text of gRPC's."""

    async def scene() -> BatonError:
        async with serving(inference=answer) as served:
            return await called(f"127.0.0.1:{served.port}")

    error = asyncio.run(scene())
    assert (error.reason, error.message) == (
        Reason.UNIMPLEMENTED,
        "It runs, but does not know this call: it is another kind of process, or another version.",
    )


def test_a_request_larger_than_a_message_may_be() -> None:
    """Refused by the server here; a client's own limit says the same."""

    async def scene() -> BatonError:
        async with serving(RpcLimits(message_bytes_max=1000), decode=answer) as served:
            with pytest.raises(BatonError) as caught, rpc_errors("It"):
                await served.decode.Cancel(decode_pb2.CancelRequest(reason="x" * 2000), timeout=CALL_S)
            return caught.value

    error = asyncio.run(scene())
    assert error.reason is Reason.BAD_FIELD
    assert error.message == "It takes and gives no message as large as this one (rpc.message_bytes_max)."


@pytest.mark.parametrize("host", ["127.0.0.1", "nowhere.invalid"])
def test_no_redis_there(host: str) -> None:
    """The words are those of its library neither. (A name may also take too long to be looked up.)"""
    setting = f"redis://{host}:{free_endpoint().rpartition(':')[2]}/0"

    async def scene() -> BatonError:
        channels = Channels(limits=ChannelLimits())
        directory = open_directory(setting, channels=channels, clock=Clock(), call_ms_max=20_000)
        try:
            with pytest.raises(BatonError) as caught:
                await directory.list()
            return caught.value
        finally:
            await directory.close()
            await channels.close()

    pytest.importorskip("redis")
    error = asyncio.run(scene())
    why = "nothing listens there" if host == "127.0.0.1" else "its host's name is not known"
    assert error.reason is Reason.DEADLINE or error.message == f"The directory at {setting} cannot be reached: {why}."
