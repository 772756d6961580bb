"""The pure parts of a receiving port: which connections of a pair may still write; and what bounds a writer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.ids import BlockId, Epoch
from kvtransfer.transport import WriteOps, WriteOutOfBounds, check_granted, check_ops
from kvtransfer.transports.receiver_port import Evidence, PairFence


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

    @rule(by=st.integers(1, 2))
    def expect(self, by: int) -> None:
        self.epoch = max(self.epoch, self.fenced) + by
        self.book.expect(Epoch(self.epoch), self.epoch.to_bytes(16, "big"))

    @rule(back=st.integers(0, 3))
    def connect(self, back: int) -> None:
        epoch = max(1, self.epoch - back)
        secret = self.book.secret(Epoch(epoch))
        assert (secret is not None) == (epoch == self.epoch and epoch > self.fenced)
        if secret is not None:
            assert secret == epoch.to_bytes(16, "big")
            self.made += 1
            self.book.opened(self.made, Epoch(epoch))
            self.open[self.made] = epoch

    @precondition(lambda self: self.open)
    @rule(data=st.data(), evidence=st.sampled_from(Evidence))
    def close(self, data: st.DataObject, evidence: Evidence) -> None:
        connection = data.draw(st.sampled_from(sorted(self.open)))
        del self.open[connection]
        self.book.closed(connection, evidence, 42)

    @rule(epoch=st.integers(1, 12))
    def fence(self, epoch: int) -> None:
        reported = self.book.fence(Epoch(epoch))
        assert sorted(reported) == sorted(c for c, e in self.open.items() if e <= epoch)
        assert self.book.is_fencing(Epoch(epoch))
        self.fenced = max(self.fenced, epoch)
        self.asked.add(epoch)

    @rule()
    def settle(self) -> None:
        due = sorted(e for e in self.asked if not any(its <= e for its in self.open.values()))
        reported = []
        while (settled := self.book.settled()) is not None:
            reported.append(settled[0])
        assert reported == due
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
    with pytest.raises(WriteOutOfBounds, match="block 4 is not among the 3 blocks of the grant"):
        check_granted(np.array([3, 4, 5], np.int64), granted)


def test_ops_of_another_shape_or_type_are_our_own_bug() -> None:
    """Anything but three int64 arrays of one length."""
    good = np.zeros(2, np.int64)
    for bad in (np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros((2, 1), np.int64)):
        with pytest.raises(AssertionError):
            check_ops(WriteOps(src=good, dst=bad, nbytes=good), 10, 10)
