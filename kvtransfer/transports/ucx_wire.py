"""Messages of the ucx transport, on the tcp connection that each link has beside NIXL's own connections.

    writer                                           receiver
      HELLO(pair, epoch, link, host, pid)       ->
                                                <-       CHALLENGE(nonce)
      ANSWER(proof of the secret)               ->
                                                <-       WELCOME(proof, region, metadata of its agent)
      SEAL(number, seal) ...                    ->       beside it a NIXL notification with the number
                                                <-       SEALED(number): both have come
                                                <-       FENCE(epoch)
      BYE(epoch, drained)                       ->       its agent is destroyed

`drained`: everything that was ever handed to UCX has completed, so nothing is adrift. REFUSED(reason) may come from the
receiver at any point. The secret never travels: both sides show an HMAC-SHA256 over the HELLO, the nonce and, in the
WELCOME, what that says, each under a label of its own. A message is a head (magic, version, kind, length of the body)
and a body; integers are little-endian.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import Seal
from kvtransfer.transports.message_stream import Framing, Malformed, MessageStream

PROTOCOL_VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
GRANT_BYTES = 16
HOST_BYTES = 16
METADATA_BYTES_MAX = 1 << 16


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
    UCX = 11
    SEALS_MAX = 12
    SEAL = 13
    CLOSED = 14


class MalformedMessage(Malformed):
    """Bytes that are none of ours. `reason` is MALFORMED or VERSION."""

    def __init__(self, text: str, reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """`host` is `negotiation.host_identity`, 32 hexadecimal digits; `pid` is of use only where it is the same."""

    pair: Pair
    epoch: Epoch
    link: int
    host: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    proof: bytes
    region_base: int
    region_nbytes: int
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SealSent:
    number: int
    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    epoch: Epoch
    drained: bool


Message = Hello | Challenge | Answer | Welcome | Refused | SealSent | Sealed | Fence | Bye


class _Kind(IntEnum):
    HELLO = 1
    CHALLENGE = 2
    ANSWER = 3
    WELCOME = 4
    REFUSED = 5
    SEAL = 6
    SEALED = 7
    FENCE = 8
    BYE = 9


_BODIES = {
    _Kind.HELLO: struct.Struct(f"<QQQQ{HOST_BYTES}sI"),
    _Kind.CHALLENGE: struct.Struct(f"<{NONCE_BYTES}s"),
    _Kind.ANSWER: struct.Struct(f"<{PROOF_BYTES}s"),
    _Kind.WELCOME: struct.Struct(f"<{PROOF_BYTES}sQQ"),
    _Kind.REFUSED: struct.Struct("<H"),
    _Kind.SEAL: struct.Struct(f"<QQ{GRANT_BYTES}sQQ"),
    _Kind.SEALED: struct.Struct("<Q"),
    _Kind.FENCE: struct.Struct("<Q"),
    _Kind.BYE: struct.Struct("<Q?"),
}
_BODY_BYTES_MAX = METADATA_BYTES_MAX + _BODIES[_Kind.WELCOME].size


_FRAMING = Framing(
    magic=b"BtUx",
    version=PROTOCOL_VERSION,
    kinds=_Kind,
    body_bytes_max=_BODY_BYTES_MAX,
    malformed=MalformedMessage,
    other_version=partial(MalformedMessage, reason=RefusalReason.VERSION),
)


def writer_proof(secret: bytes, hello: Hello, nonce: bytes) -> bytes:
    """What the writer shows in its ANSWER."""
    return hmac.digest(secret, b"baton ucx writer" + encode(hello) + nonce, "sha256")


def receiver_proof(secret: bytes, hello: Hello, nonce: bytes, base: int, nbytes: int, metadata: bytes) -> bytes:
    """What the receiver shows in its WELCOME: it knows the secret, and the agent is its own."""
    says = struct.pack("<QQ", base, nbytes) + metadata
    return hmac.digest(secret, b"baton ucx receiver" + encode(hello) + nonce + says, "sha256")


def encode(message: Message) -> bytes:
    match message:
        case Hello(pair=pair, epoch=epoch, link=link, host=host, pid=pid):
            raw = bytes.fromhex(host)
            assert len(raw) == HOST_BYTES, host
            return _pack(_Kind.HELLO, pair.receiver, pair.writer, epoch, link, raw, pid)
        case Challenge(nonce=nonce):
            assert len(nonce) == NONCE_BYTES, len(nonce)
            return _pack(_Kind.CHALLENGE, nonce)
        case Answer(proof=proof):
            assert len(proof) == PROOF_BYTES, len(proof)
            return _pack(_Kind.ANSWER, proof)
        case Welcome(proof=proof, region_base=base, region_nbytes=nbytes, metadata=metadata):
            assert len(proof) == PROOF_BYTES and 0 < len(metadata) <= METADATA_BYTES_MAX, (len(proof), len(metadata))
            return _pack(_Kind.WELCOME, proof, base, nbytes, tail=metadata)
        case Refused(reason=reason):
            return _pack(_Kind.REFUSED, reason.value)
        case SealSent(number=number, seal=seal):
            assert len(seal.grant) == GRANT_BYTES, len(seal.grant)
            return _pack(_Kind.SEAL, number, seal.epoch, seal.grant, seal.writes, seal.bytes_written)
        case Sealed(number=number):
            return _pack(_Kind.SEALED, number)
        case Fence(epoch=epoch):
            return _pack(_Kind.FENCE, epoch)
        case Bye(epoch=epoch, drained=drained):
            return _pack(_Kind.BYE, epoch, drained)


class Inbox(MessageStream[_Kind, Message]):
    """See `MessageStream`. `feed` raises MalformedMessage."""

    def __init__(self) -> None:
        super().__init__(_FRAMING, _decode)


def _decode(kind: _Kind, body: bytes) -> Message:
    fixed = _BODIES[kind]
    if len(body) < fixed.size or (len(body) > fixed.size) != (kind is _Kind.WELCOME):
        raise MalformedMessage(f"{kind.name} of {len(body)} bytes")
    f = fixed.unpack_from(body)
    match kind:
        case _Kind.HELLO:
            pair = Pair(receiver=Incarnation(f[0]), writer=Incarnation(f[1]))
            return Hello(pair=pair, epoch=Epoch(f[2]), link=f[3], host=f[4].hex(), pid=f[5])
        case _Kind.CHALLENGE:
            return Challenge(nonce=f[0])
        case _Kind.ANSWER:
            return Answer(proof=f[0])
        case _Kind.WELCOME:
            return Welcome(proof=f[0], region_base=f[1], region_nbytes=f[2], metadata=body[fixed.size :])
        case _Kind.REFUSED:
            return Refused(reason=_reason_of(f[0]))
        case _Kind.SEAL:
            return SealSent(
                number=f[0], seal=Seal(grant=GrantId(f[2]), epoch=Epoch(f[1]), writes=f[3], bytes_written=f[4])
            )
        case _Kind.SEALED:
            return Sealed(number=f[0])
        case _Kind.FENCE:
            return Fence(epoch=Epoch(f[0]))
        case _Kind.BYE:
            return Bye(epoch=Epoch(f[0]), drained=f[1])


def _pack(kind: _Kind, *fields: int | bytes, tail: bytes = b"") -> bytes:
    return _FRAMING.pack(kind, _BODIES[kind].pack(*fields) + tail)


def _reason_of(code: int) -> RefusalReason:
    try:
        return RefusalReason(code)
    except ValueError as error:
        raise MalformedMessage(f"refusal reason {code}") from error
