"""Transport between processes of one machine: the receiver's region is a memfd, the writer maps it and copies into it.

Here are what its WELCOME carries and the writer's handshake up to the mapped region; `shm_receiver` has the port,
`shm_writer` the link and its copying threads. The control channel is a Unix SOCK_SEQPACKET connection, with one message
in each packet. The region's descriptor comes with the WELCOME. BYE says that the writer has unmapped the region and
takes no descriptor any more. If the socket breaks before it, LATE_BYE follows, as the only message of a new connection.
"""

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
from typing import Final, Protocol

from baton.ids import Pair
from kvtransfer.transport import ConnectError, DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import Codec, WriterChannel

MESSAGE_BYTES_MAX: Final = 64
# struct sockaddr_un has 108 bytes for the name; the abstract name's leading NUL is one of them.
ADDRESS_BYTES_MAX: Final = 107
ADDRESS_PREFIX: Final = "@baton-shm-"
CONNECT_RETRY_MS: Final = 20
"""Pause while the receiver's backlog is full."""
_UCRED: Final = struct.Struct("iII")
_WELCOME: Final = struct.Struct("<Q")
# A child of a later fork must not inherit the right to write; the mmap module of Python 3.11 may lack the name.
_MADV_DONTFORK: Final = getattr(mmap, "MADV_DONTFORK", 10)


def codec_of(transport: TransportName) -> Codec:
    """cuda_ipc has the same messages."""
    return Codec(transport, wire.LateBye, payload_bytes_max=_WELCOME.size, packets=True)


CODEC: Final = codec_of(TransportName.SHM)


def encode_welcome(region_nbytes: int) -> bytes:
    """The WELCOME's payload."""
    return _WELCOME.pack(region_nbytes)


def decode_welcome(payload: bytes) -> int:
    """`region_nbytes`. Raises MalformedMessage."""
    if len(payload) != _WELCOME.size:
        raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a WELCOME")
    region_nbytes: int = _WELCOME.unpack(payload)[0]
    return region_nbytes


def socket_address(address: str) -> str:
    """The name to bind or connect to, of a `DataEndpoint.address` such as "@baton-shm-0f...": abstract, leading NUL.

    Raises:
        ValueError: not an address of this transport, or too long for a socket address.
    """
    if not address.startswith(ADDRESS_PREFIX) or "\0" in address:
        raise ValueError(f"shm address {address!r} does not start with {ADDRESS_PREFIX!r}")
    if len(address.encode()) > ADDRESS_BYTES_MAX:
        raise ValueError(f"shm address has {len(address.encode())} bytes, the kernel takes {ADDRESS_BYTES_MAX}")
    return "\0" + address[1:]


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id (0: of another PID namespace) and user id of whoever connected, or listened, at the other end."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


async def connect_socket(sock: socket.socket, endpoint: DataEndpoint) -> None:
    """Connect, and make sure that the listener runs under our own user before it sees our proof."""
    address = socket_address(endpoint.address)
    while True:
        try:
            sock.connect(address)
            break
        except BlockingIOError:
            # The listener's backlog is full; a Unix socket does not signal when it has room again.
            await asyncio.sleep(CONNECT_RETRY_MS / 1000)
    _, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise ConnectError(f"{endpoint.address}: the listener runs as user {uid}, we as {os.geteuid()}")


class OpenRegion(Protocol):
    """A receiver's region, open in this process."""

    def close(self) -> None: ...


def map_region(fd: int, nbytes: int, address: str) -> mmap.mmap:
    """An `OpenByDescriptor`."""
    status = os.fstat(fd)
    whole_blocks = -(-nbytes // status.st_blksize) * status.st_blksize  # huge pages are never cut
    if not nbytes or status.st_size not in (nbytes, whole_blocks):
        raise ConnectError(f"{address}: a file of {status.st_size} bytes for a region of {nbytes}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ConnectError(f"{address}: the region could be truncated under us: it is not sealed")
    mapping = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapping.madvise(_MADV_DONTFORK)
    except OSError:
        mapping.close()
        raise
    return mapping


OpenByDescriptor = Callable[[int, int, str], OpenRegion]
"""From (descriptor, bytes of the region, address for people). The caller closes the descriptor. Raises ConnectError,
OSError."""


class ShmChannel(WriterChannel):
    """The handshake on a Unix socket, up to the opened region."""

    _fd: int | None = None
    """It came with the last packet."""

    async def connect(
        self, endpoint: DataEndpoint, pair: Pair, open_region: OpenByDescriptor
    ) -> tuple[OpenRegion, int]:
        """The opened region, the caller's, and how many bytes from its start on are the receiver's blocks.

        Raises ConnectError, OSError, MalformedMessage.
        """
        try:
            hello = wire.Hello(pair=pair, epoch=endpoint.epoch)
            region_nbytes = decode_welcome((await self.shake_hands(endpoint.secret, hello)).payload)
            if self._fd is None:
                raise ConnectError(f"{endpoint.address}: the receiver sent no file descriptor")
            return open_region(self._fd, region_nbytes, endpoint.address), region_nbytes
        finally:
            self._close_fd()

    async def send(self, message: wire.Message) -> None:
        self.sock.send(self.codec.encode(message))

    async def _receive_bytes(self) -> bytes:
        readable = self._loop.create_future()
        self._loop.add_reader(self.sock, lambda: None if readable.done() else readable.set_result(None))
        try:
            await readable
        finally:
            self._loop.remove_reader(self.sock)
        packet, ancillary, _, _ = self.sock.recvmsg(
            MESSAGE_BYTES_MAX + 1, socket.CMSG_LEN(struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
        )
        self._close_fd()
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fd = array.array("i", data)[0]
        return packet

    def _close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def give_up(channel: ShmChannel, endpoint: DataEndpoint) -> None:
    """Nothing is mapped, and a descriptor on its way dies with the socket: so BYE is true, and spares a wait."""
    with channel.sock as sock:
        try:
            sock.send(channel.codec.encode(wire.Bye(epoch=endpoint.epoch)))
            return
        except OSError:
            if not channel.nonce:
                return  # the receiver does not count us as a writer
    with contextlib.suppress(BlockingIOError):
        send_late_bye(endpoint.address, channel.nonce, channel.codec)


def send_late_bye(address: str, nonce: bytes, codec: Codec) -> bool:
    """Send BYE for a connection that has broken. False: the receiver is gone, and nobody waits for it.

    Raises:
        BlockingIOError: the receiver's backlog is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(socket_address(address))
            sock.send(codec.encode(wire.LateBye(nonce=nonce)))
        except BlockingIOError:
            raise
        except OSError:
            return False
    return True
