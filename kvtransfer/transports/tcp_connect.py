"""The writer's handshake: one connection, both sides proved."""

from __future__ import annotations

import asyncio
import hmac
import socket

from baton.errors import BatonError
from baton.ids import Epoch
from kvtransfer.transport import ConnectError, DataEndpoint
from kvtransfer.transports import tcp_wire as wire
from kvtransfer.transports.tcp_socket import open_connection, take_leave, tune


class TcpConnectError(ConnectError):
    """Of a tcp link."""


async def connect_stream(
    endpoint: DataEndpoint, hello: wire.Hello, loop: asyncio.AbstractEventLoop
) -> tuple[socket.socket, wire.Welcome]:
    """A welcomed connection, in blocking mode; the caller's. The caller bounds the time.

    Raises:
        TcpConnectError: refused, unreachable, or whoever answers does not know the secret.
    """
    sock: socket.socket | None = None
    try:
        sock = await open_connection(endpoint.address, loop)
        tune(sock)
        welcome = await _shake_hands(sock, endpoint, hello, loop)
        sock.setblocking(True)
        return sock, welcome
    except BaseException as error:
        if sock is not None:
            leave_stream(sock, endpoint.epoch)  # the receiver's WELCOME may be on its way
        if isinstance(error, (OSError, BatonError, wire.MalformedMessage)) and not isinstance(error, TimeoutError):
            raise TcpConnectError(f"{endpoint.address}: {error}") from error
        raise


async def _shake_hands(
    sock: socket.socket, endpoint: DataEndpoint, hello: wire.Hello, loop: asyncio.AbstractEventLoop
) -> wire.Welcome:
    await loop.sock_sendall(sock, wire.encode(hello))
    challenge = await _receive(sock, loop)
    if not isinstance(challenge, wire.Challenge):
        raise TcpConnectError(f"{endpoint.address}: {type(challenge).__name__} instead of a challenge")
    proof = wire.writer_proof(endpoint.secret, hello, challenge.nonce)
    await loop.sock_sendall(sock, wire.encode(wire.Answer(proof=proof)))
    welcome = await _receive(sock, loop)
    if not isinstance(welcome, wire.Welcome):
        raise TcpConnectError(f"{endpoint.address}: {type(welcome).__name__} instead of a welcome")
    if not hmac.compare_digest(welcome.proof, wire.receiver_proof(endpoint.secret, hello, challenge.nonce)):
        raise TcpConnectError(f"{endpoint.address}: whoever listens there does not know the pair's secret")
    return welcome


async def _receive(sock: socket.socket, loop: asyncio.AbstractEventLoop) -> wire.Message:
    """The next message, and not a byte more."""
    packet = bytearray()
    while len(packet) < wire.MESSAGE_BYTES:
        data = await loop.sock_recv(sock, wire.MESSAGE_BYTES - len(packet))
        if not data:
            raise TcpConnectError("the receiver closed the connection")
        packet += data
    message = wire.decode(packet)
    if isinstance(message, wire.Refused):
        raise TcpConnectError(f"refused by the receiver: {message.reason.name}", message.reason)
    return message


def leave_stream(sock: socket.socket, epoch: Epoch) -> None:
    """A stream that is not used after all: with a BYE the receiver need not fence the pair."""
    take_leave(sock, wire.encode(wire.Bye(sequence=0, epoch=epoch)))
