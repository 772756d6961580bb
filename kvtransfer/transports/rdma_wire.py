"""Messages of the rdma transport, on the tcp connection that each link has beside its queue pairs.

    writer                                           receiver
      HELLO(pair, epoch, link, its queue pairs) ->
                                                <-       CHALLENGE(nonce)
      ANSWER(proof of the secret)               ->
                                                <-       WELCOME(proof, region size, place of probes, its queue pairs)
      on each of its queue pairs a probe        ->
                                                <-       READY: all of them have come
      SEAL(number, seal, queue pairs) ...       ->       beside it an immediate with the number on each of those
                                                <-       SEALED(number): all of it has come
      BYE(epoch)                                ->       nothing is posted any more
                                                <-       FENCE(epoch), and the receiver closes

Data goes by RDMA WRITE on the queue pairs alone. A probe is a WRITE_WITH_IMM of one whole packet to a place that nobody
reads, with the index of its queue pair as immediate. The link is made when the writer has READY, and from its device
the acknowledgements of all probes: words tell nothing of the way between the devices. REFUSED(reason) may come from the
receiver at any point, and it closes. The secret never travels: both sides show an HMAC-SHA256 over the HELLO, the nonce
and, in the WELCOME, what that says, each under a label of its own. A message is a head (magic, version, kind, length of
the body) and a body; integers are little-endian. The region's address and key are part of `DataEndpoint.address`, which
travels by gRPC.
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

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
PROOF_BYTES = 32
GRANT_BYTES = 16
GID_BYTES = 16
QPS_MAX = 16
"""Queue pairs of one link."""
BODY_BYTES_MAX = 512
PROBE_BYTES = 4096
"""The largest packet that RDMA has."""

_END = struct.Struct(f"<{GID_BYTES}sHBBHH")
_QP = struct.Struct("<II")


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
    DEVICE = 11
    LINK_LAYER = 12
    SEALS_MAX = 13
    SEAL = 14
    QUEUE_PAIR = 15
    PROBE = 16
    FLUSH = 17


class MalformedMessage(Malformed):
    """Bytes that are none of ours. `reason` is MALFORMED or VERSION."""

    def __init__(self, text: str, reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class QpAddress:
    """Number of a queue pair and of its first packet, 24 bits each."""

    number: int
    first_packet: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """One side's ends of a link. `mtu` is the code of ibv_mtu; `seals_max`: immediates that may be on their way."""

    gid: bytes
    lid: int
    mtu: int
    ethernet: bool
    seals_max: int
    qps: tuple[QpAddress, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlace:
    """PROBE_BYTES of the receiver's memory, outside its region, which writers may write to and nobody reads."""

    base: int
    rkey: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    pair: Pair
    epoch: Epoch
    link: int
    ends: LinkEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    proof: bytes
    region_nbytes: int
    probes: ProbePlace
    ends: LinkEnds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Each queue pair has carried its probe: seals may come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    reason: RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SealSent:
    """`qps_mask` has a bit for each queue pair that the grant's data took: an immediate goes down each of them."""

    number: int
    seal: Seal
    qps_mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    epoch: Epoch


Message = Hello | Challenge | Answer | Welcome | Ready | Refused | SealSent | Sealed | Fence | Bye


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
    READY = 10


_BODIES = {
    _Kind.HELLO: struct.Struct("<QQQQ"),
    _Kind.CHALLENGE: struct.Struct(f"<{NONCE_BYTES}s"),
    _Kind.ANSWER: struct.Struct(f"<{PROOF_BYTES}s"),
    _Kind.WELCOME: struct.Struct(f"<{PROOF_BYTES}sQQI"),
    _Kind.REFUSED: struct.Struct("<H"),
    _Kind.SEAL: struct.Struct(f"<QQ{GRANT_BYTES}sQQQ"),
    _Kind.SEALED: struct.Struct("<Q"),
    _Kind.FENCE: struct.Struct("<Q"),
    _Kind.BYE: struct.Struct("<Q"),
    _Kind.READY: struct.Struct("<"),
}
_WITH_ENDS = frozenset({_Kind.HELLO, _Kind.WELCOME})


_FRAMING = Framing(
    magic=b"BtRd",
    version=PROTOCOL_VERSION,
    kinds=_Kind,
    body_bytes_max=BODY_BYTES_MAX,
    malformed=MalformedMessage,
    other_version=partial(MalformedMessage, reason=RefusalReason.VERSION),
)


def writer_proof(secret: bytes, hello: Hello, nonce: bytes) -> bytes:
    """What the writer shows in its ANSWER."""
    return hmac.digest(secret, b"baton rdma writer" + encode(hello) + nonce, "sha256")


def receiver_proof(
    secret: bytes, hello: Hello, nonce: bytes, region_nbytes: int, probes: ProbePlace, ends: LinkEnds
) -> bytes:
    """What the receiver shows in its WELCOME: it knows the secret, and the queue pairs are its own."""
    says = struct.pack("<QQI", region_nbytes, probes.base, probes.rkey) + _encode_ends(ends)
    return hmac.digest(secret, b"baton rdma receiver" + encode(hello) + nonce + says, "sha256")


def encode(message: Message) -> bytes:
    match message:
        case Hello(pair=pair, epoch=epoch, link=link, ends=ends):
            return _pack(_Kind.HELLO, pair.receiver, pair.writer, epoch, link, ends=ends)
        case Challenge(nonce=nonce):
            assert len(nonce) == NONCE_BYTES, len(nonce)
            return _pack(_Kind.CHALLENGE, nonce)
        case Answer(proof=proof):
            assert len(proof) == PROOF_BYTES, len(proof)
            return _pack(_Kind.ANSWER, proof)
        case Welcome(proof=proof, region_nbytes=region_nbytes, probes=probes, ends=ends):
            assert len(proof) == PROOF_BYTES, len(proof)
            return _pack(_Kind.WELCOME, proof, region_nbytes, probes.base, probes.rkey, ends=ends)
        case Ready():
            return _pack(_Kind.READY)
        case Refused(reason=reason):
            return _pack(_Kind.REFUSED, reason.value)
        case SealSent(number=number, seal=seal, qps_mask=mask):
            assert len(seal.grant) == GRANT_BYTES, len(seal.grant)
            return _pack(_Kind.SEAL, number, seal.epoch, seal.grant, seal.writes, seal.bytes_written, mask)
        case Sealed(number=number):
            return _pack(_Kind.SEALED, number)
        case Fence(epoch=epoch):
            return _pack(_Kind.FENCE, epoch)
        case Bye(epoch=epoch):
            return _pack(_Kind.BYE, epoch)


class Inbox(MessageStream[_Kind, Message]):
    """See `MessageStream`. `feed` raises MalformedMessage."""

    def __init__(self) -> None:
        super().__init__(_FRAMING, _decode)


def _decode(kind: _Kind, body: bytes) -> Message:
    fixed = _BODIES[kind]
    if len(body) < fixed.size or (kind not in _WITH_ENDS and len(body) > fixed.size):
        raise MalformedMessage(f"{kind.name} of {len(body)} bytes")
    f = fixed.unpack_from(body)
    match kind:
        case _Kind.HELLO:
            pair = Pair(receiver=Incarnation(f[0]), writer=Incarnation(f[1]))
            return Hello(pair=pair, epoch=Epoch(f[2]), link=f[3], ends=_decode_ends(body[fixed.size :]))
        case _Kind.CHALLENGE:
            return Challenge(nonce=f[0])
        case _Kind.ANSWER:
            return Answer(proof=f[0])
        case _Kind.WELCOME:
            probes = ProbePlace(base=f[2], rkey=f[3])
            return Welcome(proof=f[0], region_nbytes=f[1], probes=probes, ends=_decode_ends(body[fixed.size :]))
        case _Kind.READY:
            return Ready()
        case _Kind.REFUSED:
            return Refused(reason=_reason_of(f[0]))
        case _Kind.SEAL:
            seal = Seal(grant=GrantId(f[2]), epoch=Epoch(f[1]), writes=f[3], bytes_written=f[4])
            return SealSent(number=f[0], seal=seal, qps_mask=f[5])
        case _Kind.SEALED:
            return Sealed(number=f[0])
        case _Kind.FENCE:
            return Fence(epoch=Epoch(f[0]))
        case _Kind.BYE:
            return Bye(epoch=Epoch(f[0]))


def _encode_ends(ends: LinkEnds) -> bytes:
    assert len(ends.gid) == GID_BYTES, len(ends.gid)
    assert 0 < len(ends.qps) <= QPS_MAX, len(ends.qps)
    head = _END.pack(ends.gid, ends.lid, ends.mtu, ends.ethernet, ends.seals_max, len(ends.qps))
    return head + b"".join(_QP.pack(qp.number, qp.first_packet) for qp in ends.qps)


def _decode_ends(body: bytes) -> LinkEnds:
    if len(body) < _END.size:
        raise MalformedMessage("a link without its ends")
    gid, lid, mtu, ethernet, seals_max, count = _END.unpack_from(body)
    if not 0 < count <= QPS_MAX or len(body) != _END.size + count * _QP.size:
        raise MalformedMessage(f"{count} queue pairs in {len(body)} bytes")
    if not (1 <= mtu <= 5 and ethernet <= 1 and seals_max):
        raise MalformedMessage(f"mtu code {mtu}, link layer {ethernet}, {seals_max} seals")
    qps = [QpAddress(number=n, first_packet=p) for n, p in _QP.iter_unpack(body[_END.size :])]
    if any(qp.number >= 1 << 24 or qp.first_packet >= 1 << 24 for qp in qps):
        raise MalformedMessage("a queue pair's number of more than 24 bits")
    return LinkEnds(gid=gid, lid=lid, mtu=mtu, ethernet=bool(ethernet), seals_max=seals_max, qps=tuple(qps))


def _pack(kind: _Kind, *fields: int | bytes, ends: LinkEnds | None = None) -> bytes:
    return _FRAMING.pack(kind, _BODIES[kind].pack(*fields) + (_encode_ends(ends) if ends is not None else b""))


def _reason_of(code: int) -> RefusalReason:
    try:
        return RefusalReason(code)
    except ValueError as error:
        raise MalformedMessage(f"refusal reason {code}") from error
