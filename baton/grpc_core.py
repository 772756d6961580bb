"""What gRPC's core has to be told in every process: when to ping, and how to wake the event loop."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final


def ping_options(heartbeat_ms: int, answer_ms_max: int, *, idle: bool = True) -> list[tuple[str, int]]:
    """Options of a channel or a server: ping a silent connection, and end it where a ping stays unanswered. `idle`:
    also where it has no call.

    Despite its name, `keepalive_timeout` limits no ping in gRPC 1.74: `ping_timeout` does, by default a minute.
    """
    return [
        ("grpc.keepalive_time_ms", heartbeat_ms),
        ("grpc.keepalive_timeout_ms", answer_ms_max),
        ("grpc.http2.ping_timeout_ms", answer_ms_max),
        ("grpc.keepalive_permit_without_calls", int(idle)),
        ("grpc.http2.max_pings_without_data", 0),
    ]


_BYTES_AT_ONCE: Final = 4096
_BYTES_LEFT: Final = 32
"""Under a quarter of what the kernel takes: it must let a blocked thread go on."""
_DO_NOT_WAIT: Final = int(socket.MSG_DONTWAIT)
_MAKING: Final = threading.Lock()


class WakeReader(socket.socket):
    """The event loop's end of the socket through which gRPC wakes it.

    gRPC's thread writes one byte per event. The loop reads one byte per turn, in which it takes all waiting events, so
    a busy loop leaves bytes over. At 278 of them the kernel blocks gRPC's thread until three quarters are read. Until
    then no connection of the process is read or written and its peers' pings stay unanswered: with 20 ms per turn these
    are four seconds, and all peers count as lost. So this class reads many bytes at once.

    It leaves a few to be read one by one, but in a process with `one_loop`. If an event belongs to a loop that is
    closed, the turn ends before the events behind it are delivered, and each byte left is another turn. Measured with
    gRPC 1.74.
    """

    one_loop: ClassVar[bool] = False

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        try:
            if self.one_loop:
                return super().recv(_BYTES_AT_ONCE, _DO_NOT_WAIT)
            waiting = len(super().recv(_BYTES_AT_ONCE, flags | _DO_NOT_WAIT | socket.MSG_PEEK))
            return super().recv(max(bufsize, waiting - _BYTES_LEFT), flags | _DO_NOT_WAIT)
        except BlockingIOError:
            return b""


@contextmanager
def whole_wakes() -> Iterator[None]:
    """Make gRPC use `WakeReader`: with the first channel or server it makes its thread and that socket.

    Other threads that make socket pairs meanwhile get plain ones.
    """
    own = threading.get_ident()

    def pair(*args: Any, **kwargs: Any) -> tuple[socket.socket, socket.socket]:
        reader, writer = plain(*args, **kwargs)
        return (WakeReader(fileno=reader.detach()), writer) if threading.get_ident() == own else (reader, writer)

    with _MAKING:
        plain, socket.socketpair = socket.socketpair, pair
        try:
            yield
        finally:
            socket.socketpair = plain
