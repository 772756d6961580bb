"""The writer's handshake up to the mapped region, and the word of one whose socket has broken."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from baton.ids import Pair
from kvtransfer.transport import ConnectError, DataEndpoint
from kvtransfer.transports import shm_wire as wire

# A child of a later fork must not inherit the right to write; the mmap module of Python 3.11 may lack the name.
_MADV_DONTFORK = getattr(mmap, "MADV_DONTFORK", 10)


class ShmConnectError(ConnectError):
    """Of a link by shared memory: nothing is mapped."""


CONNECT_RETRY_MS: Final = 20
"""Pause while the receiver's backlog is full."""


async def connect_socket(sock: socket.socket, endpoint: DataEndpoint) -> None:
    """Connect, and make sure that the listener runs under our own user before it sees our secret."""
    address = wire.socket_address(endpoint.address)
    while True:
        try:
            sock.connect(address)
            break
        except BlockingIOError:
            # The listener's backlog is full; a Unix socket does not tell when it has room again.
            await asyncio.sleep(CONNECT_RETRY_MS / 1000)
    _, uid = wire.peer_credentials(sock)
    if uid != os.geteuid():
        raise ShmConnectError(f"{endpoint.address}: the listener runs as user {uid}, we as {os.geteuid()}")


class OpenRegion(Protocol):
    """A receiver's region, open in this process."""

    def close(self) -> None: ...


def _map_region(fd: int, nbytes: int, address: str) -> mmap.mmap:
    status = os.fstat(fd)
    whole_blocks = -(-nbytes // status.st_blksize) * status.st_blksize  # huge pages are never cut
    if not nbytes or status.st_size not in (nbytes, whole_blocks):
        raise ShmConnectError(f"{address}: a file of {status.st_size} bytes for a region of {nbytes}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ShmConnectError(f"{address}: the region could be truncated under us: it is not sealed")
    mapping = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapping.madvise(_MADV_DONTFORK)
    except OSError:
        mapping.close()
        raise
    return mapping


@dataclass(slots=True)
class Handshake:
    """HELLO, CHALLENGE, ANSWER, WELCOME on one socket."""

    nonce: bytes = b""
    """Of the receiver's challenge; from the answer to it on, the receiver may count us as a writer."""
    open_region: Callable[[int, int, str], OpenRegion] | None = None
    """From (descriptor, bytes of the region, address for messages); the descriptor is closed afterwards. None: it is
    the memory itself, and is mapped."""

    async def run(
        self, sock: socket.socket, endpoint: DataEndpoint, pair: Pair, loop: asyncio.AbstractEventLoop
    ) -> tuple[OpenRegion, int]:
        """The opened region, the caller's, and how many bytes from its start on are the receiver's blocks.

        Raises ShmConnectError, OSError, MalformedMessage.
        """
        sock.send(wire.encode(wire.Hello(pair=pair, epoch=endpoint.epoch, secret=endpoint.secret)))
        challenge, fd = await _receive(sock, loop)
        if fd is not None:
            os.close(fd)
        if not isinstance(challenge, wire.Challenge):
            raise ShmConnectError(f"{endpoint.address}: {type(challenge).__name__} instead of a challenge")
        self.nonce = challenge.nonce
        sock.send(wire.encode(wire.Answer(nonce=challenge.nonce)))
        welcome, fd = await _receive(sock, loop)
        if fd is None:
            raise ShmConnectError(f"{endpoint.address}: the receiver sent no file descriptor")
        try:
            if not isinstance(welcome, wire.Welcome):
                raise ShmConnectError(f"{endpoint.address}: {type(welcome).__name__} instead of a welcome")
            open_region = self.open_region or _map_region
            return open_region(fd, welcome.region_nbytes, endpoint.address), welcome.region_nbytes
        finally:
            os.close(fd)


async def _receive(sock: socket.socket, loop: asyncio.AbstractEventLoop) -> tuple[wire.Message, int | None]:
    """The next message, and the descriptor that came with it: the caller's to close.

    Raises:
        ShmConnectError: EOF, or the receiver refused us.
    """
    readable = loop.create_future()
    loop.add_reader(sock, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    packet, ancillary, _, _ = sock.recvmsg(
        wire.MESSAGE_BYTES_MAX + 1, socket.CMSG_LEN(struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
    )
    fd = None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fd = array.array("i", data)[0]
    try:
        if not packet:
            raise ShmConnectError("the receiver closed the connection")
        message = wire.decode(packet)
        if isinstance(message, wire.Refused):
            raise ShmConnectError(f"refused by the receiver: {message.reason.name}", message.reason)
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    return message, fd


def give_up(sock: socket.socket, endpoint: DataEndpoint, nonce: bytes) -> None:
    """Nothing is mapped, and a descriptor still under way dies with the socket: so BYE is true, and spares a wait."""
    try:
        sock.send(wire.encode(wire.Bye(epoch=endpoint.epoch)))
        said = True
    except OSError:
        said = not nonce  # not connected, or the receiver is gone: nobody waits for it
    finally:
        sock.close()
    if not said:
        with contextlib.suppress(BlockingIOError):
            say_late_bye(endpoint.address, nonce)


def say_late_bye(address: str, nonce: bytes) -> bool:
    """Say BYE for a connection that has broken. False: the receiver is gone, and nobody waits for it.

    Raises:
        BlockingIOError: the receiver's backlog is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(wire.socket_address(address))
            sock.send(wire.encode(wire.LateBye(nonce=nonce)))
        except BlockingIOError:
            raise
        except OSError:
            return False
    return True
