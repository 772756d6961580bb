"""The control channel of a link: framing, one handshake, one set of refusals, one state machine, for every transport.

    writer                                           receiver
      HELLO(pair, epoch, link, tag, payload)    ->
                                                <-       CHALLENGE(nonce)
      ANSWER(proof)                             ->
                                                <-       WELCOME(proof, payload)
                                                <-       READY                     rdma: every probe has come
      SEAL(number, seal, ways) ...              ->
                                                <-       SEALED(number)            rdma, ucx: all its parts have come
      BYE(epoch, sequence, drained)             ->       nothing follows
                                                <-       FENCE(epoch)

The receiver may send REFUSED(reason) at any point. The secret never travels: each side sends an HMAC-SHA256 of the
HELLO, the nonce and, in the WELCOME, its payload, under its own label. The tag is an HMAC of the HELLO alone. It may be
a recorded one, so it proves nothing; but strangers have none, and a flood of theirs takes no place from writers.

HELLO and WELCOME also carry a payload of the transport. LATE_BYE(nonce) is shm's BYE on a new connection, for a broken
one that was challenged with this nonce.

Evidence stays on the channel that orders it. On tcp this is the data connection, where SEAL and BYE have a place in the
sequence of DATA. shm's BYE says that the region is unmapped. ucx's says whether all writes were drained. rdma and ucx
answer a seal with SEALED when its parts have come beside the data.

A message is a head (magic, version, kind, length of the body) and a body; integers are little-endian. tcp pads each to
one size, since it reads them between frames. shm has one in each packet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum
from typing import Any, ClassVar, Final, Self, TypeVar

from baton.endpoint import split_endpoint
from baton.errors import BatonError
from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import ConnectError, Seal, TransportName

PROTOCOL_VERSION: Final = 4
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
TAG_BYTES: Final = 16
GRANT_BYTES: Final = 16
RECV_BYTES: Final = 1 << 12
"""Read in one call where only messages are expected."""
UNREAD_BYTES_MAX: Final = 1 << 20
"""Read, and dropped, of a connection that is being closed."""
_MAGIC: Final = b"Bt"
_HEAD: Final = struct.Struct("<2sBBI")
HEAD_BYTES: Final = _HEAD.size


class RefusalReason(IntEnum):
    """Why a receiver refuses a message or a connection. The value is the wire code."""

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
    SEAL = 11
    SEALS_MAX = 12
    # shm
    USER = 20
    NO_PIDFD = 21
    # tcp
    REPLAYED = 30
    SEQUENCE = 31
    OVERSIZED = 32
    TRUNCATED = 33
    OUT_OF_GRANT = 34
    ACKS_UNREAD = 35
    # rdma
    DEVICE = 40
    LINK_LAYER = 41
    QUEUE_PAIR = 42
    PROBE = 43
    FLUSH = 44
    # ucx
    UCX = 50


class Refusal(Exception):
    """The receiver refuses what a writer sent, or asks for."""

    def __init__(self, reason: RefusalReason, text: str = "") -> None:
        super().__init__(text or reason.name)
        self.reason = reason


class MalformedMessage(Refusal):
    """Bytes that are not a message of this channel. `reason` is MALFORMED or VERSION."""

    def __init__(self, text: str, reason: RefusalReason = RefusalReason.MALFORMED) -> None:
        super().__init__(reason, text)


# Messages.


class Kind(IntEnum):
    """Code of a message on the wire."""

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
    LATE_BYE = 11
    DATA = 12
    ACK = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Fields in order, as bytes: the body of a message, or what a HELLO or WELCOME carries for its transport.

    With `HAS_PAYLOAD` the last is bytes of any length, behind `LAYOUT`.
    """

    LAYOUT: ClassVar[struct.Struct]
    HAS_PAYLOAD: ClassVar[bool] = False

    def encode(self) -> bytes:
        values = [getattr(self, each.name) for each in fields(self)]
        payload = values.pop() if self.HAS_PAYLOAD else b""
        packed = self.LAYOUT.pack(*values)
        assert list(self.LAYOUT.unpack(packed)) == values, self
        return packed + payload

    @classmethod
    def decode(cls, packed: bytes | bytearray | memoryview) -> Self:
        """From exactly these bytes. Raises MalformedMessage."""
        nbytes = cls.LAYOUT.size
        if len(packed) < nbytes or (len(packed) > nbytes and not cls.HAS_PAYLOAD):
            raise MalformedMessage(f"{cls.__name__} of {len(packed)} bytes instead of {nbytes}")
        values = cls.LAYOUT.unpack_from(packed)
        return cls.of((*values, bytes(packed[nbytes:])) if cls.HAS_PAYLOAD else values)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Self:
        """From what `LAYOUT` unpacks, and the payload if there is one. Raises MalformedMessage."""
        names = (each.name for each in fields(cls))
        return cls(**dict(zip(names, values, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Packed):
    KIND: ClassVar[Kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """`link` is random, and the same in all connections of one link. `tag` is `Codec.tagged`'s. `payload` is the
    transport's."""

    KIND = Kind.HELLO
    LAYOUT = struct.Struct(f"<QQQQ{TAG_BYTES}s")
    HAS_PAYLOAD = True
    pair: Pair
    epoch: Epoch
    link: int = 0
    tag: bytes = bytes(TAG_BYTES)
    payload: bytes = b""

    def encode(self) -> bytes:
        return self.LAYOUT.pack(self.pair.receiver, self.pair.writer, self.epoch, self.link, self.tag) + self.payload

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Hello:
        receiver, writer, epoch, link, tag, payload = values
        pair = Pair(receiver=Incarnation(receiver), writer=Incarnation(writer))
        return cls(pair=pair, epoch=Epoch(epoch), link=link, tag=tag, payload=payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge(Message):
    KIND = Kind.CHALLENGE
    LAYOUT = struct.Struct(f"<{NONCE_BYTES}s")
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Message):
    KIND = Kind.ANSWER
    LAYOUT = struct.Struct(f"<{PROOF_BYTES}s")
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """`payload` is the transport's: what the writer needs to write."""

    KIND = Kind.WELCOME
    LAYOUT = struct.Struct(f"<{PROOF_BYTES}s")
    HAS_PAYLOAD = True
    proof: bytes
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    KIND = Kind.REFUSED
    LAYOUT = struct.Struct("<H")
    reason: RefusalReason

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Refused:
        try:
            return cls(reason=RefusalReason(values[0]))
        except ValueError as error:
            raise MalformedMessage(f"refusal reason {values[0]}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SealSent(Message):
    """`ways_mask` has a bit for each tcp stream or rdma queue pair that carried data of the grant. The seal, or its
    number, goes down each. On tcp `number` is the stream's sequence."""

    KIND = Kind.SEAL
    LAYOUT = struct.Struct(f"<QQ{GRANT_BYTES}sQQQ")
    number: int
    seal: Seal
    ways_mask: int = 1

    def encode(self) -> bytes:
        seal = self.seal
        assert len(seal.grant) == GRANT_BYTES, len(seal.grant)
        return self.LAYOUT.pack(self.number, seal.epoch, seal.grant, seal.writes, seal.bytes_written, self.ways_mask)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> SealSent:
        number, epoch, grant, writes, bytes_written, ways_mask = values
        seal = Seal(grant=GrantId(grant), epoch=Epoch(epoch), writes=writes, bytes_written=bytes_written)
        return cls(number=number, seal=seal, ways_mask=ways_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed(Message):
    KIND = Kind.SEALED
    LAYOUT = struct.Struct("<Q")
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(Message):
    KIND = Kind.FENCE
    LAYOUT = struct.Struct("<Q")
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye(Message):
    """`sequence` is its place behind tcp's DATA and SEAL. `drained`: every write that was posted has completed."""

    KIND = Kind.BYE
    LAYOUT = struct.Struct("<QQB")
    epoch: Epoch
    sequence: int = 0
    drained: bool = True

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Bye:
        return cls(epoch=Epoch(values[0]), sequence=values[1], drained=bool(at_most(values[2], 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Each queue pair has carried its probe: seals may come."""

    KIND = Kind.READY
    LAYOUT = struct.Struct("<")


@dataclass(frozen=True, slots=True, kw_only=True)
class LateBye(Message):
    """BYE for the connection that was challenged with this nonce, whose socket broke first."""

    KIND = Kind.LATE_BYE
    LAYOUT = struct.Struct(f"<{NONCE_BYTES}s")
    nonce: bytes


_COMMON: Final[tuple[type[Message], ...]] = (
    Hello, Challenge, Answer, Welcome, Refused, SealSent, Sealed, Fence, Bye,
)  # fmt: skip


def at_most(value: int, limit: int) -> int:
    """Raises MalformedMessage."""
    if value > limit:
        raise MalformedMessage(f"{value}, at most {limit} is possible here")
    return value


# Framing.


class Codec:
    """The messages of one transport's channel, as bytes."""

    def __init__(
        self,
        transport: TransportName,
        *own: type[Message],
        payload_bytes_max: int,
        message_bytes: int | None = None,
        packets: bool = False,
    ) -> None:
        """`own`: kinds beside the common ones. `payload_bytes_max`: of HELLO and WELCOME. `message_bytes`: each message
        is padded to this size. `packets`: the connection keeps the borders of messages."""
        self.transport = transport
        self.message_bytes = message_bytes
        self.packets = packets
        self.payload_bytes_max = payload_bytes_max
        self._kinds: dict[int, type[Message]] = {message.KIND: message for message in (*_COMMON, *own)}
        self._zeros = bytes(message_bytes or 0)

    def encode(self, message: Message) -> bytes:
        body = message.encode()
        packet = _HEAD.pack(_MAGIC, PROTOCOL_VERSION, message.KIND, len(body)) + body
        if self.message_bytes is not None:
            assert len(packet) <= self.message_bytes, (message, len(packet))
            return packet.ljust(self.message_bytes, b"\0")
        return packet

    def decode(self, packet: bytes | bytearray | memoryview) -> Message:
        """The message of exactly these bytes.

        Raises:
            MalformedMessage: wrong magic, version, kind, length, value or padding.
        """
        message, end = self._head(packet)
        if self.message_bytes is None:
            if len(packet) != end:
                raise MalformedMessage(f"{message.__name__} of {len(packet)} bytes instead of {end}")
        elif packet[end:] != self._zeros[end:]:
            raise MalformedMessage(f"{message.__name__} with bytes after its end")
        return message.decode(packet[HEAD_BYTES:end])

    def whole_bytes(self, received: bytearray) -> int | None:
        """Size of the message that `received` begins with; None: the rest of it is still to come. Raises
        MalformedMessage."""
        if self.message_bytes is not None:
            return self.message_bytes if len(received) >= self.message_bytes else None
        if len(received) < HEAD_BYTES:
            return None
        end = self._head(received)[1]
        return end if len(received) >= end else None

    def tagged(self, secret: bytes, hello: Hello) -> Hello:
        """With the tag that it has to carry."""
        tag = self._proof("hello", secret, replace(hello, tag=bytes(TAG_BYTES)), b"")[:TAG_BYTES]
        return replace(hello, tag=tag)

    def writer_proof(self, secret: bytes, hello: Hello, nonce: bytes) -> bytes:
        """What the writer shows in its ANSWER."""
        return self._proof("writer", secret, hello, nonce)

    def receiver_proof(self, secret: bytes, hello: Hello, nonce: bytes, payload: bytes) -> bytes:
        """What the receiver shows in its WELCOME: it knows the secret, and the payload is its own."""
        return self._proof("receiver", secret, hello, nonce, payload)

    def _proof(self, side: str, secret: bytes, hello: Hello, nonce: bytes, payload: bytes = b"") -> bytes:
        label = f"baton {self.transport.value} {side}".encode()
        return hmac.digest(secret, label + self.encode(hello) + nonce + payload, "sha256")

    def _head(self, packet: bytes | bytearray | memoryview) -> tuple[type[Message], int]:
        """The kind, and where the message ends."""
        if len(packet) < HEAD_BYTES:
            raise MalformedMessage(f"{len(packet)} bytes")
        magic, version, code, nbytes = _HEAD.unpack_from(packet)
        if magic != _MAGIC:
            raise MalformedMessage(f"magic {magic!r}")
        if version != PROTOCOL_VERSION:
            text = f"protocol version {version}, ours is {PROTOCOL_VERSION}"
            raise MalformedMessage(text, RefusalReason.VERSION)
        message = self._kinds.get(code)
        if message is None:
            raise MalformedMessage(f"kind {code}")
        extra = nbytes - message.LAYOUT.size
        if not 0 <= extra <= (self.payload_bytes_max if message.HAS_PAYLOAD else 0):
            raise MalformedMessage(f"{message.__name__} with a body of {nbytes} bytes")
        return message, HEAD_BYTES + nbytes


class Inbox:
    """Cuts what comes into messages. Not thread-safe."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._received = bytearray()

    @property
    def empty(self) -> bool:
        """No beginning of a message waits for the rest of it."""
        return not self._received

    @property
    def read_bytes_max(self) -> int:
        """What to read at once. Where messages have one size: no byte behind the present one, for data may follow."""
        if self._codec.message_bytes is None:
            return RECV_BYTES
        return self._codec.message_bytes - len(self._received)

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole now. Raises MalformedMessage, after which the stream is of no use."""
        if self._codec.packets:
            yield self._codec.decode(data)
            return
        self._received += data
        while (nbytes := self._codec.whole_bytes(self._received)) is not None:
            packet = bytes(self._received[:nbytes])
            del self._received[:nbytes]
            yield self._codec.decode(packet)


# The writer's side.

MessageT = TypeVar("MessageT", bound=Message)


class WriterChannel:
    """The writer's end of a channel while its link is being made: one message at a time from either side.

    The socket does not block, and is the caller's.
    """

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, codec: Codec, *, address: str) -> None:
        """`address` is for people."""
        self.sock = sock
        self.nonce = b""
        """Of the receiver's challenge; from the answer to it on, the receiver may count us as a writer."""
        self._loop = loop
        self.codec = codec
        self._inbox = Inbox(codec)
        self._address = address

    @classmethod
    async def open(cls, listens: str, loop: asyncio.AbstractEventLoop, codec: Codec, *, address: str) -> WriterChannel:
        """Connect to `listens`, host:port. Raises OSError, and BatonError BAD_ENDPOINT."""
        return cls(await open_connection(listens, loop), loop, codec, address=address)

    async def shake_hands(self, secret: bytes, hello: Hello) -> Welcome:
        """Prove the pair's secret, and have the receiver prove it.

        Raises:
            ConnectError: refused, closed, out of turn, or whoever listens there does not know the secret.
            OSError: the connection is lost.
            MalformedMessage: what came is not a message of this channel.
        """
        hello = self.codec.tagged(secret, hello)
        await self.send(hello)
        self.nonce = (await self.receive(Challenge)).nonce
        await self.send(Answer(proof=self.codec.writer_proof(secret, hello, self.nonce)))
        welcome = await self.receive(Welcome)
        wanted = self.codec.receiver_proof(secret, hello, self.nonce, welcome.payload)
        if not hmac.compare_digest(welcome.proof, wanted):
            raise ConnectError(f"{self._address}: whoever listens there does not know the pair's secret")
        return welcome

    async def send(self, message: Message) -> None:
        """Raises OSError."""
        await self._loop.sock_sendall(self.sock, self.codec.encode(message))

    async def receive(self, wanted: type[MessageT]) -> MessageT:
        """The next message: it has to be of this kind, and the last that was sent so far. Raises as `shake_hands`."""
        while True:
            data = await self._receive_bytes()
            if not data:
                raise ConnectError(f"{self._address}: the receiver closed the connection")
            for message in self._inbox.feed(data):
                if isinstance(message, Refused):
                    raise ConnectError(f"refused by the receiver: {message.reason.name}", message.reason)
                if not isinstance(message, wanted):
                    raise ConnectError(f"{self._address}: {type(message).__name__} instead of {wanted.__name__}")
                if not self._inbox.empty:
                    raise ConnectError(f"{self._address}: the receiver speaks out of turn")
                return message

    def leave(self, last: Message) -> None:
        """There will be no link: send the last message, and close the socket."""
        take_leave(self.sock, self.codec.encode(last))

    async def _receive_bytes(self) -> bytes:
        return await self._loop.sock_recv(self.sock, self._inbox.read_bytes_max)


@contextlib.contextmanager
def connect_errors(address: str, connect_ms_max: int, *also: type[Exception]) -> Iterator[None]:
    """Raises ConnectError for whatever ends a handshake. `also`: errors of the transport's own."""
    failures: tuple[type[Exception], ...] = (OSError, ValueError, BatonError, MalformedMessage, *also)
    try:
        yield
    except TimeoutError as error:
        raise ConnectError(f"{address}: no link within {connect_ms_max} ms") from error
    except failures as error:
        raise ConnectError(f"{address}: {error}") from error


# The receiver's side.


class ChannelState(Enum):
    NEW = "waits for HELLO"
    CHALLENGED = "waits for ANSWER"
    PREPARING = "proved; the port makes what its data needs"
    PROBING = "may write; not all its probes have come"
    OPEN = "may write, and seal"
    BROKEN = "broke the protocol while it may write: only its BYE counts"
    LOST = "its connection is over; it may write on until there is evidence"
    ENDED = "never could write, and never will"


class Signal(Enum):
    """Events that carry nothing."""

    PROBES_CAME = "every queue pair has carried its probe"
    EOF = "the connection is closed, or lost"
    DEADLINE = "the time for the handshake is over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The port has what the writer's data needs. `payload` is the WELCOME's. `probes`: the link has to be proved."""

    payload: bytes
    probes: bool = False


Event = Message | Prepared | Refusal | Signal
"""A `Refusal`: the port refuses what has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliver:
    """Hand it to the transport."""

    message: SealSent | LateBye


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """It may write, and sent BYE."""

    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """It may write, and was refused."""

    reason: RefusalReason


class Do(Enum):
    """Instructions that carry nothing."""

    IDENTIFY = "look at the HELLO's payload, and take hold of the process; may refuse"
    PREPARE = "make what the data needs, then `Prepared`; may refuse"
    OPEN = "from now on it counts as one that may write; may refuse"
    START = "the WELCOME has been sent"
    COUNT_SEAL_REFUSED = "a seal that does not count"
    LOSE = "it may write, and its connection is of no more use"
    DROP = "it never could write: close its connection"


Instruction = Message | Deliver | Left | Broken | Do
"""A message is to be sent; a REFUSED is counted too."""
Instructions = list[Instruction]


class ReceiverChannel:
    """The receiver's end of one writer's channel, from HELLO to BYE. It has no I/O.

    Instructions are carried out in order. If one refuses, its `Refusal` follows as an event in place of the rest.
    """

    def __init__(self, codec: Codec, *, secret_of: Callable[[Pair, Epoch], bytes]) -> None:
        """`secret_of` gives what a connection of this pair and epoch has to prove now. It raises Refusal where none is
        accepted."""
        self.state = ChannelState.NEW
        self.hello: Hello | None = None
        self.nonce = b""
        self.expected = False
        """Its HELLO was made by somebody who knows the secret, though perhaps sent by another."""
        self.proved = False
        """It knows the secret."""
        self.opened = False
        """It may write, or once could."""
        self._codec = codec
        self._secret_of = secret_of

    @property
    def may_write(self) -> bool:
        return self.state in _MAY_WRITE

    def handle(self, event: Event) -> Instructions:
        """Raises Refusal: no secret holds for the pair any more. It follows as an event."""
        match self.state, event:
            case ChannelState.ENDED, _:
                return []
            case _, Refusal() as refusal:
                return self._reject(refusal.reason)
            case _, Signal.EOF:
                return self._close(Do.LOSE) if self.may_write else self._end()
            case ChannelState.PROBING, Signal.DEADLINE:
                return self._reject(RefusalReason.PROBE)
            case _, Signal.DEADLINE if not self.may_write:
                return self._reject(RefusalReason.DEADLINE)
            case ChannelState.PROBING, Signal.PROBES_CAME:
                self.state = ChannelState.OPEN
                return [Ready()]
            case ChannelState.NEW, Hello() as hello:
                return self._challenge(hello)
            case ChannelState.CHALLENGED, Answer() as answer:
                return self._prove(answer)
            case ChannelState.PREPARING, Prepared() as prepared:
                return self._welcome(prepared)
            case ChannelState.OPEN, SealSent() as seal:
                return [Deliver(message=seal)]
            case ChannelState.BROKEN, SealSent():
                return [Do.COUNT_SEAL_REFUSED]
            case ChannelState.NEW, LateBye() as late_bye:
                return [*self._end(), Deliver(message=late_bye)]
            case ChannelState.NEW | ChannelState.CHALLENGED | ChannelState.PREPARING, Bye():
                return self._end()
            case ChannelState.PROBING | ChannelState.OPEN | ChannelState.BROKEN, Bye() as bye if self._is_own(bye):
                return self._close(Left(drained=bye.drained))
            case ChannelState.BROKEN | ChannelState.LOST, Message():
                return []
            case _, Message():
                return self._reject(RefusalReason.OUT_OF_ORDER)
        return []

    def _secret(self, hello: Hello) -> bytes:
        """Asked again at each step: a fence, or a newer epoch, may have come in between. Raises Refusal."""
        return self._secret_of(hello.pair, hello.epoch)

    def _challenge(self, hello: Hello) -> Instructions:
        self.hello = hello
        if not hmac.compare_digest(hello.tag, self._codec.tagged(self._secret(hello), hello).tag):
            return self._reject(RefusalReason.SECRET)
        # The answer to a nonce that is sent after IDENTIFY shows that the process was alive then.
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.state = ChannelState.CHALLENGED
        self.expected = True
        return [Do.IDENTIFY, Challenge(nonce=self.nonce)]

    def _prove(self, answer: Answer) -> Instructions:
        assert self.hello is not None
        wanted = self._codec.writer_proof(self._secret(self.hello), self.hello, self.nonce)
        if not hmac.compare_digest(answer.proof, wanted):
            return self._reject(RefusalReason.SECRET)
        self.proved = True
        self.state = ChannelState.PREPARING
        return [Do.PREPARE]

    def _welcome(self, prepared: Prepared) -> Instructions:
        assert self.hello is not None
        proof = self._codec.receiver_proof(self._secret(self.hello), self.hello, self.nonce, prepared.payload)
        self.opened = True
        self.state = ChannelState.PROBING if prepared.probes else ChannelState.OPEN
        # It counts before the writer can have what it needs: from here on only evidence ends it.
        return [Do.OPEN, Welcome(proof=proof, payload=prepared.payload), Do.START]

    def _is_own(self, bye: Bye) -> bool:
        assert self.hello is not None
        return bye.epoch == self.hello.epoch

    def _close(self, how: Instruction) -> Instructions:
        """What came before counts, unless it broke the protocol."""
        if self.state is not ChannelState.BROKEN:
            self.state = ChannelState.LOST
        return [how]

    def _end(self) -> Instructions:
        self.state = ChannelState.ENDED
        return [Do.DROP]

    def _reject(self, reason: RefusalReason) -> Instructions:
        """One that may write can still send BYE."""
        if self.state is ChannelState.BROKEN:
            return [Refused(reason=reason), Do.LOSE]
        if self.may_write:
            self.state = ChannelState.BROKEN
            return [Refused(reason=reason), Broken(reason=reason)]
        return [Refused(reason=reason), *self._end()]


_MAY_WRITE = frozenset({ChannelState.PROBING, ChannelState.OPEN, ChannelState.BROKEN, ChannelState.LOST})


# Seals in parts.

_NUMBER_MASK: Final = 0xFFFF_FFFF
"""What comes beside the data has 32 bits of a seal's number."""


class SealGather:
    """Joins the parts of each seal of rdma or ucx, in any order: its message, and its number on each way that the data
    took. Pure."""

    def __init__(self, *, epoch: Epoch, ways: int, seals_max: int) -> None:
        """`ways`: queue pairs of rdma; 1 for ucx. `seals_max`: seals of which a part may be missing."""
        self._epoch = epoch
        self._ways = ways
        self._seals_max = seals_max
        self._messages: dict[int, SealSent] = {}
        self._arrived: dict[int, int] = {}
        """By number, a bit for each way on which it has come."""

    @property
    def waiting(self) -> bool:
        """A message has come whose numbers have not, or not all."""
        return bool(self._messages)

    def message_came(self, message: SealSent) -> SealSent | None:
        """The message again if the seal is whole now. Raises Refusal: SEAL, a part that is wrong or has come before;
        SEALS_MAX, too many seals lack a part."""
        if message.seal.epoch != self._epoch or not 0 < message.ways_mask < 1 << self._ways:
            raise Refusal(RefusalReason.SEAL)
        number = self._admitted(message.number)
        if number in self._messages:
            raise Refusal(RefusalReason.SEAL)
        self._messages[number] = message
        return self._whole(number)

    def number_came(self, number: int, way: int = 0) -> SealSent | None:
        """Beside the data: the seal if it is whole now. Raises as `message_came`."""
        number = self._admitted(number)
        if self._arrived.get(number, 0) >> way & 1:
            raise Refusal(RefusalReason.SEAL)
        self._arrived[number] = self._arrived.get(number, 0) | 1 << way
        return self._whole(number)

    def _admitted(self, number: int) -> int:
        number &= _NUMBER_MASK
        is_new = number not in self._messages and number not in self._arrived
        if is_new and len(self._messages.keys() | self._arrived.keys()) >= self._seals_max:
            raise Refusal(RefusalReason.SEALS_MAX)
        return number

    def _whole(self, number: int) -> SealSent | None:
        message = self._messages.get(number)
        if message is None or self._arrived.get(number) != message.ways_mask:
            return None
        del self._arrived[number]
        return self._messages.pop(number)


# Sockets.

KEEPALIVE_IDLE_S: Final = 10
"""Seconds of silence before the kernel probes the peer,"""
KEEPALIVE_INTERVAL_S: Final = 5
"""between two probes,"""
KEEPALIVE_PROBES_MAX: Final = 4
"""and unanswered probes before it gives the peer up."""
USER_TIMEOUT_MS: Final = 20_000
"""How long sent bytes may go without an acknowledgement of the peer's kernel (RFC 5482)."""


def tune(sock: socket.socket) -> None:
    """Send at once, and notice a peer whose machine or network is gone. Setting a buffer size would switch off the
    kernel's own tuning, which knows the path better."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES_MAX)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


async def open_connection(address: str, loop: asyncio.AbstractEventLoop) -> socket.socket:
    """A tuned, non-blocking connection to the first address of `address` (host:port) that takes one; the caller's.

    Raises:
        BatonError: BAD_ENDPOINT.
        OSError: none takes one.
    """
    host, port = split_endpoint(address)
    failure: OSError | None = None
    for family, kind, protocol, _, at in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        try:
            tune(sock)
            await loop.sock_connect(sock, at)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure or OSError(f"{host} has no address")


def take_leave(sock: socket.socket, last: bytes) -> None:
    """Send the last message, if the connection takes it now, and close. Waits for nothing."""
    with contextlib.suppress(OSError):
        sock.send(last, socket.MSG_DONTWAIT)
    close_politely(sock)


def close_politely(sock: socket.socket) -> None:
    """Read what has come, up to `UNREAD_BYTES_MAX`, and close. Waits for nothing. With bytes left unread the kernel
    would reset the connection, and drop what the peer has not taken yet."""
    left = UNREAD_BYTES_MAX
    with contextlib.suppress(OSError):
        while left > 0 and (data := sock.recv(RECV_BYTES, socket.MSG_DONTWAIT)):
            left -= len(data)
    sock.close()
