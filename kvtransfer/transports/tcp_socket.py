"""What both sides of a tcp connection ask of their sockets: those of tcp, and those for the words of rdma and ucx.

Buffer sizes are left to the kernel: setting one would switch off its own tuning, which knows the path better.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Final

from baton.endpoint import split_endpoint

RECV_BYTES = 1 << 12
"""Read in one go where only words are expected."""
UNREAD_BYTES_MAX = 1 << 20
"""Of a connection that is being closed."""
KEEPALIVE_IDLE_S: Final = 10
"""Seconds of silence before the kernel probes the peer."""
KEEPALIVE_INTERVAL_S: Final = 5
KEEPALIVE_PROBES_MAX: Final = 4
"""Unanswered probes before the kernel gives the peer up."""
USER_TIMEOUT_MS: Final = 20_000
"""How long sent bytes may go without an acknowledgement of the peer's kernel (RFC 5482)."""
_TCP_INFO_BYTES = 256
_BYTES_ACKED_AT = 120
"""tcpi_bytes_acked in struct tcp_info (linux/tcp.h), 64 bits."""


def acknowledged_bytes(sock: socket.socket) -> int:
    """How much of what was sent the peer's kernel has acknowledged. 0 where ours does not tell (before Linux 4.1)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[_BYTES_ACKED_AT : _BYTES_ACKED_AT + 8], sys.byteorder)


def tune(sock: socket.socket) -> None:
    """Send at once, and notice a peer whose machine or network is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES_MAX)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


async def open_connection(address: str, loop: asyncio.AbstractEventLoop) -> socket.socket:
    """A non-blocking connection to the first address of `address` (host:port) that takes one; the caller's.

    Raises:
        BatonError: BAD_ENDPOINT.
        OSError: none takes one.
    """
    host, port = split_endpoint(address)
    failure: OSError | None = None
    for family, kind, protocol, _, at in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            await loop.sock_connect(sock, at)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure or OSError(f"{host} has no address")


def take_leave(sock: socket.socket, last_word: bytes) -> None:
    """The last word, if the connection takes it now, and the connection's end. Waits for nothing."""
    with contextlib.suppress(OSError):
        sock.send(last_word, socket.MSG_DONTWAIT)
    close_politely(sock)


def close_politely(sock: socket.socket) -> None:
    """With bytes left unread the kernel would answer by a reset, and drop what it has not sent yet, or sent in vain.

    Reads what has come, and no more than `UNREAD_BYTES_MAX` of it. Waits for nothing.
    """
    left = UNREAD_BYTES_MAX
    with contextlib.suppress(OSError):
        while left > 0 and (data := sock.recv(RECV_BYTES, socket.MSG_DONTWAIT)):
            left -= len(data)
    sock.close()
