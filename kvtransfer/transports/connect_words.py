"""The words of a handshake of rdma or ucx, at the writer: either side says one at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvtransfer.transport import ConnectError
from kvtransfer.transports.message_stream import MessageStream
from kvtransfer.transports.tcp_socket import RECV_BYTES

MessageT = TypeVar("MessageT")
WordT = TypeVar("WordT")


class ConnectWords(Generic[MessageT]):
    """The connection for words while a link is being made; the socket is the caller's, and does not block."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        *,
        address: str,
        encode: Callable[[MessageT], bytes],
        inbox: MessageStream[Any, MessageT],
        refused: type[Any],
        error: type[ConnectError],
    ) -> None:
        """`refused` is the word with a reason that may come instead of any other; `error` is what is raised."""
        self._sock = sock
        self._loop = loop
        self._address = address
        self._encode = encode
        self._inbox = inbox
        self._refused = refused
        self._error = error

    async def say(self, message: MessageT) -> None:
        """Raises OSError."""
        await self._loop.sock_sendall(self._sock, self._encode(message))

    async def hear(self, wanted: type[WordT]) -> WordT:
        """The next word, which has to be of this kind, and the last that was said so far.

        Raises:
            ConnectError: the receiver refused us, closed, or said something else.
            OSError: the connection is lost.
            Malformed: what came is no word of this wire.
        """
        while True:
            data = await self._loop.sock_recv(self._sock, RECV_BYTES)
            if not data:
                raise self._error(f"{self._address}: the receiver closed the connection")
            for message in self._inbox.feed(data):
                if isinstance(message, self._refused):
                    raise self._error(f"refused by the receiver: {message.reason.name}", message.reason)
                if not isinstance(message, wanted):
                    raise self._error(f"{self._address}: {type(message).__name__} instead of {wanted.__name__}")
                if not self._inbox.empty:
                    raise self._error(f"{self._address}: the receiver speaks out of turn")
                return message
