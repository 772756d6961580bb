"""How the event loop is woken by gRPC, whose own way lets nothing pass for long after the loop was busy.

gRPC's thread writes one byte into a socket for each event, and the loop reads one byte at each turn, in which it takes
all events that there are. Where more events come than turns, bytes are left over. At 278 of them the kernel holds the
thread up, and lets it go on when three quarters are read, one by one; until then nothing is read from or written to any
connection of the process, and it does not answer its peers' pings. For a loop that needs 20 ms for a turn, since others
have the machine, these are four seconds: it has lost everybody, and is lost to everybody. Here many bytes are read at
once.

A few are left to be read one by one, as gRPC has it: where an event belongs to a loop that is closed, the turn ends
before the events behind it are delivered, and each byte that is left is another turn. Measured with gRPC 1.74.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

_BYTES_AT_ONCE: Final = 4096
_BYTES_LEFT: Final = 32
"""Under a quarter of what the kernel takes, or a thread that it holds up would be held up further."""
_MAKING: Final = threading.Lock()


class WakeReader(socket.socket):
    """The loop's end: of more than _BYTES_LEFT all but these are read, and where another loop was first, nothing."""

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        flags |= socket.MSG_DONTWAIT
        try:
            waiting = len(super().recv(_BYTES_AT_ONCE, flags | socket.MSG_PEEK))
            return super().recv(max(bufsize, waiting - _BYTES_LEFT), flags)
        except BlockingIOError:
            return b""


@contextlib.contextmanager
def whole_wakes() -> Iterator[None]:
    """Around the making of a channel or server: if it is the first one, gRPC makes its thread and this socket with it.

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
