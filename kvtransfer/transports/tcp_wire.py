"""Messages of the tcp transport: each is exactly MESSAGE_BYTES long; DATA is followed by its table and its payload.

    writer                                        receiver
      HELLO(pair, epoch, link, stream)     ->
                                           <-       CHALLENGE(nonce)
      ANSWER(proof of the secret)          ->
                                           <-       WELCOME(proof, region size, frame limits)
      DATA(sequence, epoch, grant) ...     ->
                                           <-       ACK(sequence, landed or dropped), cumulative
      SEAL(sequence, grant, counts) ...    ->
      BYE(sequence, epoch)                 ->       nothing follows; the receiver closes
                                           <-       FENCE(epoch), and the receiver closes

REFUSED(reason) may come from the receiver at any point, and it closes. The secret itself never travels: both sides show
an HMAC-SHA256 over the HELLO and the nonce, each under a label of its own. DATA, SEAL and BYE are numbered from 0 on in
each stream. A DATA message's table has one (destination, length) pair of int64 for each segment; its payload is the
segments' bytes in that order. Integers are little-endian; what a kind does not use of its message is zero.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import Seal

PROTOCOL_VERSION = 1
MESSAGE_BYTES = 64
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
GRANT_BYTES = 16
SEGMENT_BYTES = 16
"""Of one entry of a DATA message's table."""
FRAME_BYTES_MAX = 1 << 25
"""A frame's payload, which takes several system calls: what a frame costs beside them is to be little."""
FRAME_SEGMENTS_MAX = 4096
STREAMS_MAX = 64
"""A seal names its streams by the bits of one word."""

_MAGIC = b"BtTc"
_HEADER = struct.Struct("<4sHH")
_I64_MAX = (1 << 63) - 1


class RefusalReason(Enum):
    """Why a receiver refused a message or a connection. The value is the wire code."""

    MALFORMED = 1
    VERSION = 2
    OUT_OF_ORDER = 3
    NOT_EXPECTED = 4
    EPOCH = 5
    SECRET = 6
    DEADLINE = 7
    CONNECTIONS_MAX = 8
    HANDSHAKES_MAX = 9
    DESCRIPTORS = 10
    REPLAYED = 11
    SEQUENCE = 12
    OVERSIZED = 13
    TRUNCATED = 14
    OUT_OF_GRANT = 15
    SEALS_MAX = 16
    ACKS_UNREAD = 17


class MalformedMessage(Exception):
    """Bytes that are none of ours. `reason` is MALFORMED or VERSION."""

    def __init__(self, text: str, reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """`link` is the same in all streams of one link; `stream` counts from 0."""

    pair: Pair
    epoch: Epoch
    link: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What a frame may hold at most comes from the receiver's limits, perhaps of a version that takes more."""

    proof: bytes
    region_nbytes: int
    frame_bytes_max: int
    frame_segments_max: int

    @property
    def limits_here(self) -> tuple[int, int]:
        """Bytes and segments of a frame: what the receiver takes, and no more than this version makes."""
        return min(self.frame_bytes_max, FRAME_BYTES_MAX), min(self.frame_segments_max, FRAME_SEGMENTS_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    sequence: int
    epoch: Epoch
    grant: GrantId
    segments: int
    payload_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealFrame:
    """`streams_mask` has a bit for each stream that the grant's data took; the seal goes down each of them."""

    sequence: int
    seal: Seal
    streams_mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    sequence: int
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Everything up to `sequence` that was not acknowledged before has landed, or else was dropped."""

    sequence: int
    landed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    epoch: Epoch


Message = Hello | Challenge | Answer | Welcome | Refused | Data | SealFrame | Bye | Ack | Fence


class _Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    ANSWER = 3
    WELCOME = 4
    REFUSED = 5
    DATA = 6
    SEAL = 7
    BYE = 8
    ACK = 9
    FENCE = 10


_BODIES = {
    _Kind.HELLO: struct.Struct("<QQQQQ"),
    _Kind.CHALLENGE: struct.Struct(f"<{NONCE_BYTES}s"),
    _Kind.ANSWER: struct.Struct(f"<{PROOF_BYTES}s"),
    _Kind.WELCOME: struct.Struct(f"<{PROOF_BYTES}sQQQ"),
    _Kind.REFUSED: struct.Struct("<Q"),
    _Kind.DATA: struct.Struct(f"<QQ{GRANT_BYTES}sQQ"),
    _Kind.SEAL: struct.Struct(f"<QQ{GRANT_BYTES}sQQQ"),
    _Kind.BYE: struct.Struct("<QQ"),
    _Kind.ACK: struct.Struct("<QQ"),
    _Kind.FENCE: struct.Struct("<Q"),
}
_PADDING = {kind: bytes(MESSAGE_BYTES - _HEADER.size - body.size) for kind, body in _BODIES.items()}
assert all(_HEADER.size + body.size <= MESSAGE_BYTES for body in _BODIES.values())


def writer_proof(secret: bytes, hello: Hello, nonce: bytes) -> bytes:
    """What the writer shows in its ANSWER."""
    return hmac.digest(secret, b"baton tcp writer" + encode(hello) + nonce, "sha256")


def receiver_proof(secret: bytes, hello: Hello, nonce: bytes) -> bytes:
    """What the receiver shows in its WELCOME, so that a writer hands KV to no stranger."""
    return hmac.digest(secret, b"baton tcp receiver" + encode(hello) + nonce, "sha256")


def encode(message: Message) -> bytes:
    """The MESSAGE_BYTES of a message."""
    match message:  # the frequent ones first
        case Data(sequence=sequence, epoch=epoch, grant=grant):
            assert len(grant) == GRANT_BYTES, len(grant)
            return _pack(_Kind.DATA, sequence, epoch, grant, message.segments, message.payload_nbytes)
        case Ack(sequence=sequence, landed=landed):
            return _pack(_Kind.ACK, sequence, int(landed))
        case Hello(pair=pair, epoch=epoch, link=link, stream=stream):
            return _pack(_Kind.HELLO, pair.receiver, pair.writer, epoch, link, stream)
        case Challenge(nonce=nonce):
            assert len(nonce) == NONCE_BYTES, len(nonce)
            return _pack(_Kind.CHALLENGE, nonce)
        case Answer(proof=proof):
            assert len(proof) == PROOF_BYTES, len(proof)
            return _pack(_Kind.ANSWER, proof)
        case Welcome(proof=proof):
            assert len(proof) == PROOF_BYTES, len(proof)
            limits = message.frame_bytes_max, message.frame_segments_max
            return _pack(_Kind.WELCOME, proof, message.region_nbytes, *limits)
        case Refused(reason=reason):
            return _pack(_Kind.REFUSED, reason.value)
        case SealFrame(sequence=sequence, seal=seal, streams_mask=mask):
            assert len(seal.grant) == GRANT_BYTES, len(seal.grant)
            return _pack(_Kind.SEAL, sequence, seal.epoch, seal.grant, seal.writes, seal.bytes_written, mask)
        case Bye(sequence=sequence, epoch=epoch):
            return _pack(_Kind.BYE, sequence, epoch)
        case Fence(epoch=epoch):
            return _pack(_Kind.FENCE, epoch)


def decode(packet: bytes | bytearray | memoryview) -> Message:
    """The message in MESSAGE_BYTES bytes.

    Raises:
        MalformedMessage: wrong magic, version, kind, value or padding.
    """
    assert len(packet) == MESSAGE_BYTES, len(packet)
    kind = _kind_of(packet)
    body = _BODIES[kind]
    if packet[_HEADER.size + body.size :] != _PADDING[kind]:
        raise MalformedMessage(f"{kind.name} with bytes after its end")
    f = body.unpack_from(packet, _HEADER.size)
    match kind:  # the frequent ones first
        case _Kind.DATA:
            return Data(sequence=f[0], epoch=Epoch(f[1]), grant=GrantId(f[2]), segments=f[3], payload_nbytes=f[4])
        case _Kind.ACK:
            return Ack(sequence=f[0], landed=bool(_at_most(f[1], 1)))
        case _Kind.HELLO:
            pair = Pair(receiver=Incarnation(f[0]), writer=Incarnation(f[1]))
            return Hello(pair=pair, epoch=Epoch(f[2]), link=f[3], stream=_at_most(f[4], STREAMS_MAX - 1))
        case _Kind.CHALLENGE:
            return Challenge(nonce=f[0])
        case _Kind.ANSWER:
            return Answer(proof=f[0])
        case _Kind.WELCOME:
            if not min(f[2], f[3]):
                raise MalformedMessage("a frame limit of 0")
            return Welcome(
                proof=f[0],
                region_nbytes=_at_most(f[1], _I64_MAX),
                frame_bytes_max=f[2],
                frame_segments_max=f[3],
            )
        case _Kind.REFUSED:
            return Refused(reason=_reason_of(f[0]))
        case _Kind.SEAL:
            seal = Seal(grant=GrantId(f[2]), epoch=Epoch(f[1]), writes=f[3], bytes_written=f[4])
            return SealFrame(sequence=f[0], seal=seal, streams_mask=f[5])
        case _Kind.BYE:
            return Bye(sequence=f[0], epoch=Epoch(f[1]))
        case _Kind.FENCE:
            return Fence(epoch=Epoch(f[0]))


def _pack(kind: _Kind, *fields: int | bytes) -> bytes:
    packet = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, kind) + _BODIES[kind].pack(*fields)
    return packet.ljust(MESSAGE_BYTES, b"\0")


def _kind_of(packet: bytes | bytearray | memoryview) -> _Kind:
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


def _at_most(value: int, limit: int) -> int:
    if value > limit:
        raise MalformedMessage(f"{value}, at most {limit} is possible here")
    return value
