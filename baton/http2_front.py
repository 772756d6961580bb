"""`http2_front.c`, with its types: what stands between the clients of a public gRPC server and the server.

gRPC takes 16 MiB of metadata of a client that has not acknowledged its limits, and cannot be told to count frames. So
clients are led to it by way of a thread that follows what they send and needs no lock of Python's.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import socket
import tempfile
from collections.abc import Callable
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

from baton.endpoint import Address, join_endpoint
from baton.errors import BatonError, Reason
from baton.log import get_log
from baton.native import load

log = get_log("front")

ENDED_AT_ONCE_MAX: Final = 256
"""Connections that have ended, told in one turn of the loop."""
_SHARED_MEMORY: Final = Path("/dev/shm")
"""Can be written to in containers whose root cannot."""


class Ended(Enum):
    """Why a connection has; the numbers are those of http2_follower.h."""

    LEFT = 0
    """By one of its sides."""
    NO_PREFACE = 1
    NO_SETTINGS = 2
    FRAME_SIZE = 3
    BLOCK_SIZE = 4
    BLOCK_BROKEN = 5
    PUSHED = 6
    TOO_FAST = 7
    LATE = 8
    NO_ROOM = 9
    """There was no memory, or the kernel watches no more sockets."""


class NativeFront:
    """The calls of http2_front.c."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, size, u64, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int
        text, numbers, whys = ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint8)
        make = ctypes.CFUNCTYPE
        self.open = make(pointer, u64, use_errno=True)(("baton_front_open", handle))
        self.news = make(number, pointer)(("baton_front_news", handle))
        self.lead_to = make(number, pointer, text)(("baton_front_lead_to", handle))
        self.add = make(number, pointer, number, text, number, u64)(("baton_front_add", handle))
        self.ended = make(size, pointer, numbers, whys, size)(("baton_front_ended", handle))
        self.stop = make(None, pointer)(("baton_front_stop", handle))
        self.free = make(None, pointer)(("baton_front_free", handle))


@cache
def native_front() -> NativeFront | None:
    """The first call may compile it, which takes a second. None: there is no compiler, and the log says so."""
    library = load(Path(__file__).parent / "http2_front.c")
    if library.handle is None:
        log.warning("gRPC faces its clients itself: floods of HTTP/2 frames can hold this process", why=library.status)
        return None
    return NativeFront(library.handle)


class Http2Front:
    """One thread before the gRPC servers of a port, of which one at a time takes connections. Lives on one loop. Call
    `close` at the end."""

    def __init__(
        self, native: NativeFront, *, rng: random.Random, ended: Callable[[int, Ended], None] = lambda *_: None
    ) -> None:
        """`ended(number, why)` is called on the loop, once for each connection. Raises BatonError LISTEN_REFUSED."""
        self._native = native
        self._ended = ended
        self._front = native.open(rng.getrandbits(64))
        if not self._front:
            why = os.strerror(ctypes.get_errno()).lower()
            text = f"The gRPC port cannot open: {why}. Raise this process' limits of open files, threads and memory."
            raise BatonError(Reason.LISTEN_REFUSED, text)
        self._loop = asyncio.get_running_loop()
        self._news: int = native.news(self._front)
        self._loop.add_reader(self._news, self._report)
        self._server: int | None = None
        self.opened: Callable[[], None] = lambda: None
        """Called when there is a server again."""

    @property
    def is_open(self) -> bool:
        """There is a server for new connections."""
        return self._server is not None

    def next_place(self) -> str:
        """Where the next gRPC server is to listen: a path that others of this machine may not enter.

        Raises BatonError LISTEN_REFUSED.
        """
        refused: list[str] = []
        for parent in (None, _SHARED_MEMORY):
            try:
                return f"{tempfile.mkdtemp(prefix='baton-front-', dir=parent)}/grpc"
            except OSError as error:
                refused.append(str(error))
        text = f"The gRPC port cannot open: its socket has no folder ({', '.join(refused)}). Set TMPDIR to one that "
        raise BatonError(Reason.LISTEN_REFUSED, f"{text}this process can write to.")

    def lead_to(self, place: str | None) -> None:
        """From now on clients are led to the server that listens there; None: to nobody. Those that are connected stay
        where they are.

        The socket has no name afterwards, so that nothing is left of a process that is killed.
        """
        if self._server is not None:
            os.close(self._server)
            self._server = None
        if place is None:
            return
        self._server = os.open(place, os.O_PATH | os.O_CLOEXEC)
        os.unlink(place)
        os.rmdir(os.path.dirname(place))
        failed = self._native.lead_to(self._front, f"/proc/self/fd/{self._server}".encode())
        assert not failed, os.strerror(failed)
        self.opened()

    def add(self, sock: socket.socket, peer: Address, number: int, *, paced: bool) -> None:
        """Lead this client to the server; `sock` is not the caller's any more. `paced` says whether its frames per
        second have a limit. Raises OSError where the server does not take it; then nothing has changed."""
        assert self.is_open, "no server"
        text = join_endpoint(str(peer), 0).encode()
        failed = self._native.add(self._front, sock.fileno(), text, int(paced), number)
        if failed:
            raise OSError(failed, os.strerror(failed))
        sock.detach()

    async def close(self) -> None:
        """After the servers have stopped. May take a second, while their last words are written. Idempotent."""
        if not self._front:
            return
        front, self._front = self._front, None
        self.lead_to(None)
        self._loop.remove_reader(self._news)
        await asyncio.to_thread(self._native.stop, front)
        while self._take_ended(front):
            pass
        self._native.free(front)

    def _report(self) -> None:
        self._take_ended(self._front)

    def _take_ended(self, front: int) -> int:
        numbers = (ctypes.c_uint64 * ENDED_AT_ONCE_MAX)()
        whys = (ctypes.c_uint8 * ENDED_AT_ONCE_MAX)()
        count: int = self._native.ended(front, numbers, whys, ENDED_AT_ONCE_MAX)
        for number, why in zip(numbers[:count], whys[:count], strict=True):
            self._ended(number, Ended(why))
        return count
