"""Transport for any network: the writer sends records from its region, the receiver takes them into its own.

Here are the messages that only tcp has, what its HELLO and WELCOME carry, and the writer's handshake. `tcp_receiver`
has the port and its receive threads, `tcp_writer` the link.

    writer                                        receiver
      DATA(sequence, epoch, grant) ...     ->
                                           <-       ACK(sequence, landed or dropped), cumulative
      SEAL(sequence, grant, counts) ...    ->
      BYE(sequence, epoch)                 ->       nothing follows; the receiver closes

These go over the data connection itself, behind its handshake: DATA, SEAL and BYE are numbered from 0 on in each
stream, and what orders them is evidence. Each message is exactly MESSAGE_BYTES long; DATA is followed by its table,
which has one (destination, length) pair of int64 for each segment, and its payload, the segments' bytes in that order.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any, Final

from baton.errors import BatonError
from baton.ids import Epoch, GrantId
from kvtransfer.native.sockets import native_sockets
from kvtransfer.transport import ConnectError, DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import GRANT_BYTES, Kind, MalformedMessage, WriterChannel, at_most
from kvtransfer.transports.settings import STREAMS_MAX

MESSAGE_BYTES: Final = 64
SEGMENT_BYTES: Final = 16
"""Of one entry of a DATA message's table."""
FRAME_BYTES_MAX: Final = 1 << 25
"""A frame's payload, which takes several system calls: what a frame costs beside them is to be little."""
FRAME_SEGMENTS_MAX: Final = 4096
CALL_SEGMENTS_MAX: Final = 1024
"""Of one system call in Python: IOV_MAX of Linux."""
CALL_BYTES_MAX: Final = 1 << 20
"""Of one system call in Python, as of a native one: who wants the landing lock waits for one call."""
_HELLO: Final = struct.Struct("<Q")
_WELCOME: Final = struct.Struct("<QQQ")
_I64_MAX: Final = (1 << 63) - 1
_TCP_INFO_BYTES: Final = 256
_BYTES_ACKED_AT: Final = 120
"""tcpi_bytes_acked in struct tcp_info (linux/tcp.h), 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(wire.Message):
    """Of one frame. `segments` entries of its table follow, then `payload_nbytes` bytes."""

    KIND = Kind.DATA
    LAYOUT = struct.Struct(f"<QQ{GRANT_BYTES}sQQ")
    sequence: int
    epoch: Epoch
    grant: GrantId
    segments: int
    payload_nbytes: int

    def body(self) -> bytes:
        assert len(self.grant) == GRANT_BYTES, len(self.grant)
        return self.LAYOUT.pack(self.sequence, self.epoch, self.grant, self.segments, self.payload_nbytes)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Data:
        sequence, epoch, grant, segments, nbytes = values
        return cls(
            sequence=sequence, epoch=Epoch(epoch), grant=GrantId(grant), segments=segments, payload_nbytes=nbytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(wire.Message):
    """Everything up to `sequence` that was not acknowledged before has landed, or else was dropped."""

    KIND = Kind.ACK
    LAYOUT = struct.Struct("<QQ")
    sequence: int
    landed: bool

    def body(self) -> bytes:
        return self.LAYOUT.pack(self.sequence, self.landed)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Ack:
        return cls(sequence=values[0], landed=bool(at_most(values[1], 1)))


CODEC: Final = wire.Codec(TransportName.TCP, Data, Ack, payload_bytes_max=_WELCOME.size, message_bytes=MESSAGE_BYTES)


def hello_payload(stream: int) -> bytes:
    """What a HELLO of tcp carries: the number of its stream in the link, from 0."""
    return _HELLO.pack(stream)


def stream_of(payload: bytes) -> int:
    """Raises MalformedMessage."""
    if len(payload) != _HELLO.size:
        raise MalformedMessage(f"a payload of {len(payload)} bytes in a HELLO")
    return at_most(_HELLO.unpack(payload)[0], STREAMS_MAX - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpWelcome:
    """What a frame may hold at most comes from the receiver's limits, perhaps of a version that takes more."""

    region_nbytes: int
    frame_bytes_max: int
    frame_segments_max: int

    @property
    def limits_here(self) -> tuple[int, int]:
        """Bytes and segments of a frame: what the receiver takes, and no more than this version makes."""
        return min(self.frame_bytes_max, FRAME_BYTES_MAX), min(self.frame_segments_max, FRAME_SEGMENTS_MAX)

    def encode(self) -> bytes:
        return _WELCOME.pack(self.region_nbytes, self.frame_bytes_max, self.frame_segments_max)

    @classmethod
    def decode(cls, payload: bytes) -> TcpWelcome:
        """Raises MalformedMessage."""
        if len(payload) != _WELCOME.size:
            raise MalformedMessage(f"a payload of {len(payload)} bytes in a WELCOME")
        nbytes, frame_bytes_max, frame_segments_max = _WELCOME.unpack(payload)
        if not min(frame_bytes_max, frame_segments_max):
            raise MalformedMessage("a frame limit of 0")
        return cls(
            region_nbytes=at_most(nbytes, _I64_MAX),
            frame_bytes_max=frame_bytes_max,
            frame_segments_max=frame_segments_max,
        )


async def connect_stream(
    endpoint: DataEndpoint, hello: wire.Hello, loop: asyncio.AbstractEventLoop
) -> tuple[socket.socket, TcpWelcome]:
    """A welcomed connection, in blocking mode; the caller's. The caller bounds the time.

    Raises:
        ConnectError: refused, unreachable, or whoever answers does not know the secret.
    """
    channel: WriterChannel | None = None
    try:
        channel = await WriterChannel.open(endpoint.address, loop, CODEC, address=endpoint.address)
        welcome = TcpWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
        channel.sock.setblocking(True)
        return channel.sock, welcome
    except BaseException as error:
        if channel is not None:
            leave_stream(channel.sock, endpoint.epoch)  # the receiver's WELCOME may be on its way
        if isinstance(error, (OSError, BatonError, MalformedMessage)) and not isinstance(error, TimeoutError):
            raise ConnectError(f"{endpoint.address}: {error}") from error
        raise


def leave_stream(sock: socket.socket, epoch: Epoch) -> None:
    """A stream that is not used after all: with a BYE the receiver need not fence the pair."""
    wire.take_leave(sock, CODEC.encode(wire.Bye(epoch=epoch)))


def acknowledged_bytes(sock: socket.socket) -> int:
    """What the peer's kernel has acknowledged. 0 where ours does not count it (Linux before 4.1)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[_BYTES_ACKED_AT : _BYTES_ACKED_AT + 8], sys.byteorder)


def moved_by() -> str:
    """How payload is sent and received in this process, for people."""
    return "Python: no native library" if native_sockets() is None else "native"


def of_one_call(views: list[memoryview], first: int = 0) -> list[memoryview]:
    """The views from `first` on that one system call moves; the last of them may be the beginning of one."""
    taken, left = [], CALL_BYTES_MAX
    for view in views[first : first + CALL_SEGMENTS_MAX]:
        taken.append(view[:left])
        left -= taken[-1].nbytes
        if not left:
            break
    return taken
