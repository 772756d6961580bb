"""Messages on the socket of the shm transport: one message per packet of a Unix SOCK_SEQPACKET connection.

    writer                                   receiver
      HELLO(pair, epoch, secret)      ->
                                      <-       CHALLENGE(nonce)
      ANSWER(nonce)                   ->
                                      <-       WELCOME(region size) with the region's file descriptor
      SEAL(grant, epoch, counts) ...  ->
                                      <-       FENCE(epoch), at most once
      BYE(epoch)                      ->       the writer has unmapped the region, and takes no descriptor any more

A BYE whose socket broke first is said on a new connection, as its only message; the nonce names the broken one:

      LATE_BYE(nonce)                 ->       as BYE, for the connection that was challenged with this nonce

REFUSED(reason) may come from the receiver at any point. Every message starts with magic, protocol version and kind;
its length is fixed by its kind. Integers are little-endian.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import Seal

PROTOCOL_VERSION = 1
SECRET_BYTES = 16
NONCE_BYTES = 16
GRANT_BYTES = 16
MESSAGE_BYTES_MAX = 64
# struct sockaddr_un has 108 bytes for the name; the abstract name's leading NUL is one of them.
ADDRESS_BYTES_MAX = 107
ADDRESS_PREFIX = "@baton-shm-"

_UCRED = struct.Struct("iII")
_MAGIC = b"BtSh"
_HEADER = struct.Struct("<4sHH")
_HELLO = struct.Struct(f"<QQQ{SECRET_BYTES}s")
_NONCE = struct.Struct(f"<{NONCE_BYTES}s")
_WELCOME = struct.Struct("<Q")
_REFUSED = struct.Struct("<H")
_SEAL = struct.Struct(f"<{GRANT_BYTES}sQQQ")
_EPOCH = struct.Struct("<Q")


class RefusalReason(Enum):
    """Why a receiver refused a message or a connection. The value is the wire code."""

    MALFORMED = 1
    VERSION = 2
    OUT_OF_ORDER = 3
    NOT_EXPECTED = 4
    EPOCH = 5
    SECRET = 6
    USER = 7
    NO_PIDFD = 8
    CHALLENGE = 9
    DEADLINE = 10
    CONNECTIONS_MAX = 11
    DESCRIPTORS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    pair: Pair
    epoch: Epoch
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    region_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBye:
    nonce: bytes


Message = Hello | Challenge | Answer | Welcome | Refused | Seal | Fence | Bye | LateBye


class MalformedMessage(Exception):
    """A packet that is none of ours. `reason` is MALFORMED or VERSION."""

    def __init__(self, text: str, reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


class _Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    ANSWER = 3
    WELCOME = 4
    REFUSED = 5
    SEAL = 6
    FENCE = 7
    BYE = 8
    LATE_BYE = 9


_BODIES = {
    _Kind.HELLO: _HELLO,
    _Kind.CHALLENGE: _NONCE,
    _Kind.ANSWER: _NONCE,
    _Kind.WELCOME: _WELCOME,
    _Kind.REFUSED: _REFUSED,
    _Kind.SEAL: _SEAL,
    _Kind.FENCE: _EPOCH,
    _Kind.BYE: _EPOCH,
    _Kind.LATE_BYE: _NONCE,
}


def encode(message: Message) -> bytes:
    """The packet of a message: at most MESSAGE_BYTES_MAX bytes."""
    match message:
        case Hello(pair=pair, epoch=epoch, secret=secret):
            assert len(secret) == SECRET_BYTES, len(secret)
            return _pack(_Kind.HELLO, pair.receiver, pair.writer, epoch, secret)
        case Challenge(nonce=nonce):
            assert len(nonce) == NONCE_BYTES, len(nonce)
            return _pack(_Kind.CHALLENGE, nonce)
        case Answer(nonce=nonce):
            assert len(nonce) == NONCE_BYTES, len(nonce)
            return _pack(_Kind.ANSWER, nonce)
        case Welcome(region_nbytes=region_nbytes):
            return _pack(_Kind.WELCOME, region_nbytes)
        case Refused(reason=reason):
            return _pack(_Kind.REFUSED, reason.value)
        case Seal(grant=grant, epoch=epoch, writes=writes, bytes_written=bytes_written):
            assert len(grant) == GRANT_BYTES, len(grant)
            return _pack(_Kind.SEAL, grant, epoch, writes, bytes_written)
        case Fence(epoch=epoch):
            return _pack(_Kind.FENCE, epoch)
        case Bye(epoch=epoch):
            return _pack(_Kind.BYE, epoch)
        case LateBye(nonce=nonce):
            assert len(nonce) == NONCE_BYTES, len(nonce)
            return _pack(_Kind.LATE_BYE, nonce)


def decode(packet: bytes) -> Message:
    """The message of a packet.

    Raises:
        MalformedMessage: wrong magic, version, kind, length or value.
    """
    kind = _kind_of(packet)
    body = _BODIES[kind]
    if len(packet) != _HEADER.size + body.size:
        raise MalformedMessage(f"{kind.name} of {len(packet)} bytes, expected {_HEADER.size + body.size}")
    fields = body.unpack_from(packet, _HEADER.size)
    match kind:
        case _Kind.HELLO:
            pair = Pair(receiver=Incarnation(fields[0]), writer=Incarnation(fields[1]))
            return Hello(pair=pair, epoch=Epoch(fields[2]), secret=fields[3])
        case _Kind.CHALLENGE:
            return Challenge(nonce=fields[0])
        case _Kind.ANSWER:
            return Answer(nonce=fields[0])
        case _Kind.WELCOME:
            return Welcome(region_nbytes=fields[0])
        case _Kind.REFUSED:
            return Refused(reason=_reason_of(fields[0]))
        case _Kind.SEAL:
            return Seal(grant=GrantId(fields[0]), epoch=Epoch(fields[1]), writes=fields[2], bytes_written=fields[3])
        case _Kind.FENCE:
            return Fence(epoch=Epoch(fields[0]))
        case _Kind.BYE:
            return Bye(epoch=Epoch(fields[0]))
        case _Kind.LATE_BYE:
            return LateBye(nonce=fields[0])


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


def _pack(kind: _Kind, *fields: int | bytes) -> bytes:
    packet = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind) + _BODIES[kind].pack(*fields)
    assert len(packet) <= MESSAGE_BYTES_MAX, len(packet)
    return packet


def _kind_of(packet: bytes) -> _Kind:
    if len(packet) < _HEADER.size:
        raise MalformedMessage(f"packet of {len(packet)} bytes")
    magic, version, code = _HEADER.unpack_from(packet)
    if magic != _MAGIC:
        raise MalformedMessage(f"magic {magic!r}")
    if version != PROTOCOL_VERSION:
        raise MalformedMessage(f"protocol version {version}, ours is {PROTOCOL_VERSION}", RefusalReason.VERSION)
    try:
        return _Kind(code)
    except ValueError as error:
        raise MalformedMessage(f"kind {code}") from error


def _reason_of(code: int) -> RefusalReason:
    try:
        return RefusalReason(code)
    except ValueError as error:
        raise MalformedMessage(f"refusal reason {code}") from error
