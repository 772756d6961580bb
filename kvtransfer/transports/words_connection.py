"""What the connections of tcp, rdma and ucx have in common at their port: words go over them, over tcp's data too."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from kvtransfer.transports.tcp_socket import close_politely


@dataclass(slots=True, kw_only=True, eq=False)
class WordsConnection(ABC):
    """One writer's. `sock` is None once it is closed; loop's thread."""

    number: int
    sock: socket.socket | None
    nonce: bytes = b""
    handshake_timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def _encode(self, message: Any) -> bytes:
        """As the transport's own wire has it."""

    def send(self, message: Any) -> None:
        """Best effort: the few bytes fit any socket buffer, and a writer has its own deadlines."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.send(self._encode(message))

    def cancel_timer(self) -> None:
        if self.handshake_timer is not None:
            self.handshake_timer.cancel()
            self.handshake_timer = None

    def close_sock(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.sock is not None:
            loop.remove_reader(self.sock)
            close_politely(self.sock)
            self.sock = None
