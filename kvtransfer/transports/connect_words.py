"""The words of a handshake of rdma or ucx, at the writer: either side says one at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvtransfer.transport import ConnectError
from kvtransfer.transports.message_stream import MessageStream
from kvtransfer.transports.tcp_socket import RECV_BYTES, open_connection, take_leave, tune

MessageT = TypeVar("MessageT")
WordT = TypeVar("WordT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect(Generic[MessageT]):
    """What one wire's handshakes are spoken in. `refused` is the word with a reason that may come in the place of any
    other; `error` is what is raised."""

    encode: Callable[[MessageT], bytes]
    inbox: Callable[[], MessageStream[Any, MessageT]]
    refused: type[Any]
    error: type[ConnectError]


class ConnectWords(Generic[MessageT]):
    """The connection for words while a link is being made; its socket is the caller's, and does not block."""

    def __init__(
        self, sock: socket.socket, loop: asyncio.AbstractEventLoop, dialect: Dialect[MessageT], *, address: str
    ) -> None:
        """Use `open`. `address` is for people."""
        self.sock = sock
        self._loop = loop
        self._dialect = dialect
        self._inbox = dialect.inbox()
        self._address = address

    @classmethod
    async def open(
        cls,
        listens: str,
        loop: asyncio.AbstractEventLoop,
        dialect: Dialect[MessageT],
        *,
        address: str,
    ) -> ConnectWords[MessageT]:
        """Connect to `listens`, host:port. Raises OSError, and BatonError BAD_ENDPOINT."""
        sock = await open_connection(listens, loop)
        try:
            tune(sock)
        except BaseException:
            sock.close()
            raise
        return cls(sock, loop, dialect, address=address)

    async def say(self, message: MessageT) -> None:
        """Raises OSError."""
        await self._loop.sock_sendall(self.sock, self._dialect.encode(message))

    async def hear(self, wanted: type[WordT]) -> WordT:
        """The next word, which has to be of this kind, and the last that was said so far.

        Raises:
            ConnectError: the receiver refused us, closed, or said something else.
            OSError: the connection is lost.
            Malformed: what came is no word of this wire.
        """
        refused, failed = self._dialect.refused, self._dialect.error
        while True:
            data = await self._loop.sock_recv(self.sock, RECV_BYTES)
            if not data:
                raise failed(f"{self._address}: the receiver closed the connection")
            for message in self._inbox.feed(data):
                if isinstance(message, refused):
                    raise failed(f"refused by the receiver: {message.reason.name}", message.reason)
                if not isinstance(message, wanted):
                    raise failed(f"{self._address}: {type(message).__name__} instead of {wanted.__name__}")
                if not self._inbox.empty:
                    raise failed(f"{self._address}: the receiver speaks out of turn")
                return message

    def leave(self, last_word: MessageT) -> None:
        """No link comes to be: say so, and close the socket."""
        take_leave(self.sock, self._dialect.encode(last_word))
