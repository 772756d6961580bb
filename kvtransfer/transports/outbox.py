"""Words that wait for a socket to take them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable


class Outbox:
    """For a stream that does not block: sends in order, now what the socket takes, the rest when it takes more.

    Loop's thread. The socket is the caller's, who calls `close` before closing it, and bounds what it says.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, broken: Callable[[str], None]) -> None:
        """`broken` is told when the connection is lost; what was waiting is dropped."""
        self._sock = sock
        self._loop = loop
        self._broken = broken
        self._waiting = bytearray()

    def send(self, packet: bytes) -> None:
        self._waiting += packet
        self._flush()

    def close(self) -> None:
        """Send nothing more. Idempotent."""
        self._waiting.clear()
        self._loop.remove_writer(self._sock)

    def _flush(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: self._sock.send(self._waiting)]
        except BlockingIOError:
            self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as error:
            self.close()
            self._broken(f"connection lost: {error}")
            return
        self._loop.remove_writer(self._sock)
