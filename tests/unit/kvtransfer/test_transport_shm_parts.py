"""The pure parts of the shm transport: its messages, its book of open connections."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.ids import BlockId, Epoch, GrantId, Incarnation, Pair
from kvtransfer.transport import Seal, WriteOps, WriteOutOfBounds, check_granted, check_ops
from kvtransfer.transports import shm_wire as wire
from kvtransfer.transports.pair_fence import Evidence, PairFence
from kvtransfer.transports.shm_receiver import refusal_of

U64 = st.integers(0, 2**64 - 1)
TOKEN = st.binary(min_size=16, max_size=16)
MESSAGES = st.one_of(
    st.builds(
        lambda receiver, writer, epoch, secret: wire.Hello(
            pair=Pair(receiver=Incarnation(receiver), writer=Incarnation(writer)), epoch=Epoch(epoch), secret=secret
        ),
        U64,
        U64,
        U64,
        TOKEN,
    ),
    st.builds(lambda nonce: wire.Challenge(nonce=nonce), TOKEN),
    st.builds(lambda nonce: wire.Answer(nonce=nonce), TOKEN),
    st.builds(lambda nbytes: wire.Welcome(region_nbytes=nbytes), U64),
    st.builds(lambda reason: wire.Refused(reason=reason), st.sampled_from(wire.RefusalReason)),
    st.builds(lambda epoch: wire.Fence(epoch=Epoch(epoch)), U64),
    st.builds(lambda epoch: wire.Bye(epoch=Epoch(epoch)), U64),
    st.builds(lambda nonce: wire.LateBye(nonce=nonce), TOKEN),
    st.builds(
        lambda grant, epoch, writes, nbytes: Seal(
            grant=GrantId(grant), epoch=Epoch(epoch), writes=writes, bytes_written=nbytes
        ),
        TOKEN,
        U64,
        U64,
        U64,
    ),
)


@given(MESSAGES)
def test_every_message_survives_its_packet(message: wire.Message) -> None:
    """Encoded and decoded it is the same; one byte more or less is refused."""
    packet = wire.encode(message)
    assert len(packet) <= wire.MESSAGE_BYTES_MAX
    assert wire.decode(packet) == message
    for broken in (packet[:-1], packet + b"\0"):
        with pytest.raises(wire.MalformedMessage):
            wire.decode(broken)


def packet_nbytes(kind: int) -> int:
    return 8 + {1: 40, 2: 16, 3: 16, 4: 8, 5: 2, 6: 40, 7: 8, 8: 8, 9: 16}[kind]


@given(st.binary(max_size=80), st.integers(0, 12), st.booleans())
def test_any_packet_is_a_message_or_refused(body: bytes, kind: int, with_header: bool) -> None:
    """Whatever a peer sends, decoding ends in a message or in MalformedMessage."""
    packet = b"BtSh" + (1).to_bytes(2, "little") + kind.to_bytes(2, "little") + body if with_header else body
    try:
        message = wire.decode(packet)
    except wire.MalformedMessage:
        assert kind == 0 or kind > 9 or not with_header or len(packet) != packet_nbytes(kind) or kind == 5
    else:
        assert isinstance(message, get_args(wire.Message))
        assert wire.encode(message) == packet


class PairFenceMachine(RuleBasedStateMachine):
    """Any order of expect, open, close and fence, against the plain meaning of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.book = PairFence()
        self.epoch = 0
        self.fenced = 0
        self.open: dict[int, int] = {}
        self.asked: set[int] = set()
        self.made = 0

    def hello(self, epoch: int, secret: bytes) -> wire.Hello:
        pair = Pair(receiver=Incarnation(1), writer=Incarnation(2))
        return wire.Hello(pair=pair, epoch=Epoch(epoch), secret=secret)

    @rule(by=st.integers(1, 2))
    def expect(self, by: int) -> None:
        self.epoch = max(self.epoch, self.fenced) + by
        self.book.expect(Epoch(self.epoch), self.epoch.to_bytes(16, "big"))

    @rule(back=st.integers(0, 3))
    def connect(self, back: int) -> None:
        epoch = max(1, self.epoch - back)
        reason = refusal_of(self.book, self.hello(epoch, epoch.to_bytes(16, "big")))
        assert (reason is None) == (epoch == self.epoch and epoch > self.fenced)
        if reason is None:
            self.made += 1
            self.book.opened(self.made, Epoch(epoch))
            self.open[self.made] = epoch
            assert refusal_of(self.book, self.hello(epoch, b"x" * 16)) is wire.RefusalReason.SECRET

    @precondition(lambda self: self.open)
    @rule(data=st.data(), evidence=st.sampled_from(Evidence))
    def close(self, data: st.DataObject, evidence: Evidence) -> None:
        connection = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[connection]
        self.book.closed(connection, evidence, 42)

    @rule(epoch=st.integers(1, 12))
    def fence(self, epoch: int) -> None:
        told = self.book.fence(Epoch(epoch))
        assert sorted(told) == sorted(c for c, e in self.open.items() if e <= epoch)
        assert self.book.is_fencing(Epoch(epoch))
        self.fenced = max(self.fenced, epoch)
        self.asked.add(epoch)

    @rule()
    def settle(self) -> None:
        due = sorted(e for e in self.asked if not any(its <= e for its in self.open.values()))
        told = []
        while (settled := self.book.settled()) is not None:
            told.append(settled[0])
        assert told == due
        self.asked -= set(due)

    @invariant()
    def idle_means_nothing_is_left(self) -> None:
        expected = self.epoch > self.fenced
        assert self.book.is_idle == (not self.open and not self.asked and not expected)


TestPairFence = PairFenceMachine.TestCase


def test_the_evidence_says_who_acknowledged_and_who_died() -> None:
    """Two connections with BYE, one dead, in two epochs: one text for the fence of both, told once."""
    book = PairFence()
    book.expect(Epoch(1), b"a" * 16)
    book.opened(1, Epoch(1))
    book.opened(2, Epoch(1))
    book.expect(Epoch(2), b"b" * 16)
    book.opened(3, Epoch(2))
    assert book.fence(Epoch(2)) == [1, 2, 3]
    book.closed(1, Evidence.ACKNOWLEDGED, 10)
    book.closed(3, Evidence.DEAD, 11)
    assert book.settled() is None
    book.closed(2, Evidence.ACKNOWLEDGED, 10)
    assert book.settled() == (2, "2 acknowledged, 1 dead, by pidfd (pid 11)")
    assert book.settled() is None
    assert book.is_idle


def test_blocks_that_the_grant_does_not_open_are_refused_by_the_writer() -> None:
    """Any of the grant's blocks, in any order; with one that is not among them nothing is planned."""
    granted = [BlockId(7), BlockId(3), BlockId(12)]
    check_granted(np.array([12, 7], np.int64), granted)
    check_granted(np.zeros(0, np.int64), [])
    with pytest.raises(WriteOutOfBounds, match="block 4 is none of the 3 of the grant"):
        check_granted(np.array([3, 4, 5], np.int64), granted)


def test_ops_of_another_shape_or_type_are_our_own_bug() -> None:
    """Anything but three int64 arrays of one length."""
    good = np.zeros(2, np.int64)
    for bad in (np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros((2, 1), np.int64)):
        with pytest.raises(AssertionError):
            check_ops(WriteOps(src=good, dst=bad, nbytes=good), 10, 10)
