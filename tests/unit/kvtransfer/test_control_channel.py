"""The control channel of every transport: messages on the wire, proofs, and the receiver's states without any I/O."""

from __future__ import annotations

import contextlib
import itertools
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import Seal, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import cuda_ipc, rdma, shm, tcp, ucx
from kvtransfer.transports.control_channel import (
    Broken,
    ChannelState,
    Codec,
    Deliver,
    Do,
    Left,
    Message,
    Prepared,
    ReceiverChannel,
    Refusal,
    RefusalReason,
    Signal,
)

CODECS: dict[TransportName, Codec] = {
    codec.transport: codec for codec in (m.CODEC for m in (ucx, rdma, shm, cuda_ipc, tcp))
}
ONLY_ON: dict[type[Message], set[TransportName]] = {
    wire.Ready: {TransportName.RDMA},
    wire.LateBye: {TransportName.SHM, TransportName.CUDA_IPC},
    tcp.Data: {TransportName.TCP},
    tcp.Ack: {TransportName.TCP},
}
"""Messages that only some transports have; every one has the others."""
U64 = st.integers(0, (1 << 64) - 1)
BYTES16 = st.binary(min_size=16, max_size=16)
BYTES32 = st.binary(min_size=32, max_size=32)
EPOCHS = U64.map(Epoch)
PAIRS = st.builds(Pair, receiver=U64.map(Incarnation), writer=U64.map(Incarnation))
SEALS = st.builds(Seal, grant=BYTES16.map(GrantId), epoch=EPOCHS, writes=U64, bytes_written=U64)


def messages_of(codec: Codec) -> st.SearchStrategy[Message]:
    """Everything that this channel can carry."""
    room = codec.message_bytes or 1000
    hello_bytes = room - wire.HEAD_BYTES - wire.Hello.LAYOUT.size
    welcome_bytes = room - wire.HEAD_BYTES - wire.Welcome.LAYOUT.size
    payload_max = min(codec.payload_bytes_max, hello_bytes, welcome_bytes)
    payloads = st.binary(max_size=payload_max)
    whole = [
        st.builds(wire.Hello, pair=PAIRS, epoch=EPOCHS, link=U64, payload=payloads),
        st.builds(wire.Challenge, nonce=BYTES32),
        st.builds(wire.Answer, proof=BYTES32),
        st.builds(wire.Welcome, proof=BYTES32, payload=payloads),
        st.builds(wire.Refused, reason=st.sampled_from(RefusalReason)),
        st.builds(wire.SealSent, number=U64, seal=SEALS, ways_mask=U64),
        st.builds(wire.Sealed, number=U64),
        st.builds(wire.Fence, epoch=EPOCHS),
        st.builds(wire.Bye, epoch=EPOCHS, sequence=U64, drained=st.booleans()),
    ]
    own: dict[type[Message], st.SearchStrategy[Message]] = {
        wire.Ready: st.just(wire.Ready()),
        wire.LateBye: st.builds(wire.LateBye, nonce=BYTES32),
        tcp.Data: st.builds(
            tcp.Data, sequence=U64, epoch=EPOCHS, grant=BYTES16.map(GrantId), segments=U64, payload_nbytes=U64
        ),
        tcp.Ack: st.builds(tcp.Ack, sequence=U64, landed=st.booleans()),
    }
    return st.one_of(*whole, *(made for kind, made in own.items() if codec.transport in ONLY_ON[kind]))


WITH_MESSAGES = st.sampled_from(list(CODECS.values())).flatmap(
    lambda codec: st.tuples(st.just(codec), st.lists(messages_of(codec), min_size=1, max_size=4))
)


@given(WITH_MESSAGES, st.integers(1, 200))
def test_messages_come_out_as_they_went_in(sent: tuple[Codec, list[Message]], piece: int) -> None:
    """However a stream is cut into pieces; a packet is one message."""
    codec, messages = sent
    packets, inbox = list(map(codec.encode, messages)), wire.Inbox(codec)
    assert [codec.decode(packet) for packet in packets] == messages
    stream = b"".join(packets)
    pieces = packets if codec.packets else [stream[at : at + piece] for at in range(0, len(stream), piece)]
    assert list(itertools.chain.from_iterable(inbox.feed(each) for each in pieces)) == messages
    assert inbox.empty


@given(WITH_MESSAGES)
def test_a_message_of_another_length_is_refused(sent: tuple[Codec, list[Message]]) -> None:
    """One byte less, or one more; on a stream it is the beginning of a message, or of the next."""
    codec, messages = sent
    packet = codec.encode(messages[0])
    if codec.message_bytes is not None:
        assert len(packet) == codec.message_bytes
        return
    for broken in (packet[:-1], packet + b"\0"):
        with pytest.raises(wire.MalformedMessage):
            codec.decode(broken)


@given(WITH_MESSAGES, st.integers(0, 600), st.integers(1, 255))
def test_a_changed_byte_is_another_message_or_none(sent: tuple[Codec, list[Message]], at: int, change: int) -> None:
    """Never an error of ours: another message, more bytes wanted, or a refusal; never what was sent."""
    codec, messages = sent
    packet = bytearray(codec.encode(messages[0]))
    packet[at % len(packet)] ^= change
    try:
        received = list(wire.Inbox(codec).feed(bytes(packet)))
    except wire.MalformedMessage:
        return
    assert received != messages[:1]
    assert bytes(packet).startswith(b"".join(map(codec.encode, received)))


@given(st.sampled_from(list(CODECS.values())), st.binary(max_size=80), st.integers(0, 20), st.booleans())
def test_any_bytes_are_a_message_or_refused(codec: Codec, body: bytes, kind: int, with_head: bool) -> None:
    """Whatever a peer sends: what is decoded encodes to the same bytes."""
    packet = struct.pack("<2sBBI", b"Bt", wire.PROTOCOL_VERSION, kind, len(body)) + body if with_head else body
    if codec.message_bytes is not None:
        packet = packet.ljust(codec.message_bytes, b"\0")[: codec.message_bytes]
    with contextlib.suppress(wire.MalformedMessage):
        assert codec.encode(codec.decode(packet)) == packet


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.transport.value)
def test_another_version_is_refused_as_such(codec: Codec) -> None:
    """Also the first bytes of what earlier versions sent, whose head had the version two bytes later."""
    packet = bytearray(codec.encode(wire.Fence(epoch=Epoch(1))))
    packet[2] = wire.PROTOCOL_VERSION + 1
    for other in (bytes(packet), b"BtTc\1\0\1\0".ljust(64, b"\0")):
        with pytest.raises(wire.MalformedMessage) as caught:
            list(wire.Inbox(codec).feed(other))
        assert caught.value.reason is RefusalReason.VERSION


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.transport.value)
@pytest.mark.parametrize("kind", ONLY_ON)
def test_a_message_of_another_transport_is_refused(codec: Codec, kind: type[Message]) -> None:
    if codec.transport in ONLY_ON[kind]:
        return
    packet = struct.pack("<2sBBI", b"Bt", wire.PROTOCOL_VERSION, kind.KIND, kind.LAYOUT.size) + bytes(kind.LAYOUT.size)
    with pytest.raises(wire.MalformedMessage, match=f"^kind {kind.KIND.value}$"):
        codec.decode(packet.ljust(codec.message_bytes or 0, b"\0"))


def test_proofs_cover_what_each_side_says() -> None:
    """Another payload, nonce, secret, epoch, link, pair, transport or side: another proof."""
    secret, nonce, payload = b"s" * 16, bytes(32), b"payload"
    pair = Pair(receiver=Incarnation(1), writer=Incarnation(2))
    other_pair = Pair(receiver=Incarnation(2), writer=Incarnation(1))
    hello = wire.Hello(pair=pair, epoch=Epoch(1), link=1, payload=payload)
    hellos = [
        hello,
        wire.Hello(pair=pair, epoch=Epoch(1), link=1, payload=b"other"),
        wire.Hello(pair=pair, epoch=Epoch(1), link=2, payload=payload),
        wire.Hello(pair=pair, epoch=Epoch(2), link=1, payload=payload),
        wire.Hello(pair=other_pair, epoch=Epoch(1), link=1, payload=payload),
    ]
    proofs = []
    for codec in CODECS.values():
        proofs += [codec.writer_proof(secret, each, nonce) for each in hellos]
        proofs += [codec.writer_proof(b"t" * 16, hello, nonce), codec.writer_proof(secret, hello, b"n" * 32)]
        proofs += [codec.receiver_proof(secret, each, nonce, payload) for each in hellos]
        proofs += [codec.receiver_proof(secret, hello, nonce, b""), codec.receiver_proof(secret, hello, nonce, b"x")]
    assert len(set(proofs)) == len(proofs)


# The receiver's states.

PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(2))
EPOCH = Epoch(3)
SECRET = b"s" * 16
HELLO = rdma.CODEC.tagged(SECRET, wire.Hello(pair=PAIR, epoch=EPOCH, link=7))
SEAL = wire.SealSent(number=1, seal=Seal(grant=GrantId(bytes(16)), epoch=EPOCH, writes=1, bytes_written=1))
BYE = wire.Bye(epoch=EPOCH)
PREPARED = Prepared(payload=b"region")


class Receiver:
    """A channel whose pair has a secret, or not any more."""

    def __init__(self) -> None:
        self.secret: bytes | RefusalReason = SECRET
        self.channel = ReceiverChannel(rdma.CODEC, secret_of=self.secret_of)

    def secret_of(self, *_: object) -> bytes:
        if isinstance(self.secret, RefusalReason):
            raise Refusal(self.secret)
        return self.secret

    def handle(self, event: wire.Event) -> list[wire.Instruction]:
        """As a port does."""
        try:
            return self.channel.handle(event)
        except Refusal as refusal:
            return self.handle(refusal)

    def answer(self, secret: bytes = SECRET) -> wire.Answer:
        return wire.Answer(proof=rdma.CODEC.writer_proof(secret, HELLO, self.channel.nonce))


def receiver_in(state: ChannelState) -> Receiver:
    """By the shortest way that leads there."""
    made = Receiver()
    to_open = (HELLO, None, PREPARED)
    to_probing = (HELLO, None, Prepared(payload=b"region", probes=True))
    ways: dict[ChannelState, tuple[wire.Event | None, ...]] = {
        ChannelState.NEW: (),
        ChannelState.CHALLENGED: (HELLO,),
        ChannelState.PREPARING: (HELLO, None),
        ChannelState.PROBING: to_probing,
        ChannelState.OPEN: to_open,
        ChannelState.BROKEN: (*to_open, HELLO),
        ChannelState.LOST: (*to_open, Signal.EOF),
        ChannelState.ENDED: (Signal.EOF,),
    }
    for event in ways[state]:
        made.handle(made.answer() if event is None else event)
    assert made.channel.state is state
    return made


def refused(reason: RefusalReason, then: wire.Instruction) -> list[wire.Instruction]:
    return [wire.Refused(reason=reason), then]


def test_a_handshake_with_probes() -> None:
    """HELLO, ANSWER, what the data needs, probes: the connection counts before its WELCOME leaves."""
    r = Receiver()
    assert r.handle(HELLO) == [Do.IDENTIFY, wire.Challenge(nonce=r.channel.nonce)]
    assert r.handle(r.answer()) == [Do.PREPARE]
    assert not r.channel.opened
    proof = rdma.CODEC.receiver_proof(SECRET, HELLO, r.channel.nonce, b"region")
    welcome = wire.Welcome(proof=proof, payload=b"region")
    assert r.handle(Prepared(payload=b"region", probes=True)) == [Do.OPEN, welcome, Do.START]
    assert (r.channel.opened, r.channel.may_write) == (True, True)
    assert r.handle(Signal.PROBES_CAME) == [wire.Ready()]
    assert r.handle(SEAL) == [Deliver(message=SEAL)]
    assert r.handle(wire.Bye(epoch=EPOCH, drained=False)) == [Left(drained=False)]


HANDSHAKING = (ChannelState.NEW, ChannelState.CHALLENGED, ChannelState.PREPARING)
WRITING = (ChannelState.PROBING, ChannelState.OPEN)


@pytest.mark.parametrize("state", ChannelState)
def test_eof_loses_one_that_may_write_and_drops_any_other(state: ChannelState) -> None:
    """A closed connection is no evidence."""
    r = receiver_in(state)
    may_write = r.channel.may_write
    wanted: list[wire.Instruction] = [] if state is ChannelState.ENDED else [Do.LOSE if may_write else Do.DROP]
    assert r.handle(Signal.EOF) == wanted
    assert r.channel.may_write == may_write


@pytest.mark.parametrize("state", ChannelState)
def test_bye_counts_where_it_may_write_and_of_its_epoch_only(state: ChannelState) -> None:
    """After a breach too; before WELCOME it ends the handshake; of another epoch it is a breach, and no evidence."""
    own: dict[ChannelState, list[wire.Instruction]] = {
        **{each: [Do.DROP] for each in HANDSHAKING},
        **{each: [Left(drained=True)] for each in (*WRITING, ChannelState.BROKEN)},
    }
    assert receiver_in(state).handle(BYE) == own.get(state, [])
    if state in WRITING:
        broken = refused(RefusalReason.OUT_OF_ORDER, Broken(reason=RefusalReason.OUT_OF_ORDER))
        assert receiver_in(state).handle(wire.Bye(epoch=Epoch(4))) == broken
    if state is ChannelState.BROKEN:
        assert receiver_in(state).handle(wire.Bye(epoch=Epoch(4))) == []


@pytest.mark.parametrize("state", ChannelState)
def test_a_seal_counts_only_on_an_open_channel(state: ChannelState) -> None:
    """Before its probes, or in the handshake, it is a breach; after a breach it is counted, and not believed."""
    wanted: dict[ChannelState, list[wire.Instruction]] = {
        **dict.fromkeys(HANDSHAKING, refused(RefusalReason.OUT_OF_ORDER, Do.DROP)),
        ChannelState.PROBING: refused(RefusalReason.OUT_OF_ORDER, Broken(reason=RefusalReason.OUT_OF_ORDER)),
        ChannelState.OPEN: [Deliver(message=SEAL)],
        ChannelState.BROKEN: [Do.COUNT_SEAL_REFUSED],
    }
    assert receiver_in(state).handle(SEAL) == wanted.get(state, [])


@pytest.mark.parametrize("state", ChannelState)
def test_the_deadline_is_for_handshakes_and_probes(state: ChannelState) -> None:
    wanted: dict[ChannelState, list[wire.Instruction]] = {
        **dict.fromkeys(HANDSHAKING, refused(RefusalReason.DEADLINE, Do.DROP)),
        ChannelState.PROBING: refused(RefusalReason.PROBE, Broken(reason=RefusalReason.PROBE)),
    }
    assert receiver_in(state).handle(Signal.DEADLINE) == wanted.get(state, [])


@pytest.mark.parametrize("state", ChannelState)
def test_what_the_port_refuses_ends_the_link_as_far_as_it_may(state: ChannelState) -> None:
    """One that may write is left its BYE, and its seals do not count any more, connected or not. A
    second breach costs it the connection."""
    reason = RefusalReason.MALFORMED
    wanted: dict[ChannelState, list[wire.Instruction]] = {
        **dict.fromkeys(HANDSHAKING, refused(reason, Do.DROP)),
        **dict.fromkeys((*WRITING, ChannelState.LOST), refused(reason, Broken(reason=reason))),
        ChannelState.BROKEN: refused(reason, Do.LOSE),
    }
    r = receiver_in(state)
    may_write = r.channel.may_write
    assert r.handle(Refusal(reason)) == wanted.get(state, [])
    assert r.channel.state is (ChannelState.BROKEN if may_write else ChannelState.ENDED)


@pytest.mark.parametrize("message", [HELLO, wire.Answer(proof=bytes(32)), wire.Ready(), wire.Sealed(number=1)])
@pytest.mark.parametrize("state", ChannelState)
def test_a_message_out_of_order_is_a_breach(state: ChannelState, message: Message) -> None:
    """Of a connection that is over, or that has broken the protocol, nothing but BYE is looked at."""
    expected = {(ChannelState.NEW, wire.Hello), (ChannelState.CHALLENGED, wire.Answer)}
    if (state, type(message)) in expected:
        return
    reason = RefusalReason.OUT_OF_ORDER
    wanted: dict[ChannelState, list[wire.Instruction]] = {
        **dict.fromkeys(HANDSHAKING, refused(reason, Do.DROP)),
        **dict.fromkeys(WRITING, refused(reason, Broken(reason=reason))),
    }
    assert receiver_in(state).handle(message) == wanted.get(state, [])


def test_a_late_bye_is_heard_on_a_new_connection_only() -> None:
    message = wire.LateBye(nonce=bytes(32))
    assert receiver_in(ChannelState.NEW).handle(message) == [Do.DROP, Deliver(message=message)]
    for state in (ChannelState.CHALLENGED, ChannelState.PREPARING):
        assert receiver_in(state).handle(message) == refused(RefusalReason.OUT_OF_ORDER, Do.DROP)


@pytest.mark.parametrize("hello", [replace(HELLO, tag=bytes(16)), replace(HELLO, link=8), replace(HELLO, payload=b"x")])
def test_a_stranger_is_not_challenged(hello: wire.Hello) -> None:
    """Whoever knows the pair and its epoch but not the secret, without a tag or with that of another HELLO: refused
    before anything is kept for it."""
    r = Receiver()
    assert r.handle(hello) == refused(RefusalReason.SECRET, Do.DROP)
    assert not r.channel.expected


def test_a_wrong_proof_opens_nothing() -> None:
    """Of another secret, or of another handshake's nonce."""
    r = receiver_in(ChannelState.CHALLENGED)
    assert r.handle(r.answer(b"x" * 16)) == refused(RefusalReason.SECRET, Do.DROP)
    recorded = receiver_in(ChannelState.CHALLENGED).answer()
    assert receiver_in(ChannelState.CHALLENGED).handle(recorded) == refused(RefusalReason.SECRET, Do.DROP)


@pytest.mark.parametrize("reason", [RefusalReason.NOT_EXPECTED, RefusalReason.EPOCH])
def test_a_fence_at_any_moment_of_the_handshake_refuses_it(reason: RefusalReason) -> None:
    """The secret is asked for at each step."""
    for state, event in (
        (ChannelState.NEW, HELLO),
        (ChannelState.CHALLENGED, None),
        (ChannelState.PREPARING, PREPARED),
    ):
        r = receiver_in(state)
        answer = r.answer() if event is None else event
        r.secret = reason
        assert r.handle(answer) == refused(reason, Do.DROP)
        assert not r.channel.opened
