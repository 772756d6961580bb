"""A listening socket on the loop: accepts in small batches, and pauses while the process is out of descriptors."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Final

from baton.endpoint import check_reachable, join_endpoint, split_endpoint

ACCEPTS_PER_WAKE_MAX: Final = 16
"""Connections accepted in one go before others get their turn."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CONNECTION_GONE: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EPERM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.ETIMEDOUT,
    }
)
"""Of the one connection that was to be accepted, says accept(2), and none of ours; the next one may be well."""


def listen_on(listen: str, advertise_host: str | None, *, backlog: int) -> tuple[socket.socket, str]:
    """A listening, non-blocking tcp socket, the caller's; and where peers reach it.

    Raises:
        BatonError: BAD_ENDPOINT.
        OSError: the address cannot be listened on.
    """
    host, port = split_endpoint(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    try:
        listener.setblocking(False)
        address = join_endpoint(advertise_host or host, listener.getsockname()[1])
        check_reachable(address)
    except BaseException:
        listener.close()
        raise
    return listener, address


class Acceptor:
    """Hands each accepted connection, non-blocking, to `admit`, whose own it is then. Runs on `loop`'s thread."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        admit: Callable[[socket.socket], None],
        paused: Callable[[], None],
        pause_ms: int,
    ) -> None:
        """Takes the listening, non-blocking socket over. `paused` is told each time that descriptors ran out."""
        self._listener = listener
        self._loop = loop
        self._admit = admit
        self._paused = paused
        self._pause_ms = pause_ms
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Listen no more. Once."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_WAKE_MAX):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _CONNECTION_GONE:
                    continue
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._pause()
                return
            sock.setblocking(False)
            self._admit(sock)

    def _pause(self) -> None:
        """Without descriptors the listener stays readable and accept keeps failing: that would be a busy loop."""
        self._paused()
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(self._pause_ms / 1000, self._loop.add_reader, self._listener, self._accept)
