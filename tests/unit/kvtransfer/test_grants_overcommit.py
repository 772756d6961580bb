"""The receiver's machine on a node that promises more than its device holds."""

from __future__ import annotations

from kvtransfer.protocol.receiver import GrantState, Refusal, RequestEnded, StartGrantTimer, TimerKind
from tests.support.grant_scripts import Receiver, grant_of, granted, key_of, refused


def lease(number: int) -> StartGrantTimer:
    return StartGrantTimer(grant=grant_of(number), kind=TimerKind.LEASE)


def test_a_promise_may_exceed_the_device_and_the_blocks_may_not() -> None:
    """Four blocks and host memory for six: two blocks with a promise of seven are granted; four blocks are not, since
    only two are there."""
    r = Receiver()
    r.machine.ledger.host_room = 6
    assert r.reserve(0, blocks=2, promise=7) == refused(0, Refusal.BUSY)
    assert r.reserve(1, blocks=2, promise=7, host_backed=True) == [lease(1), granted(1)]
    assert r.machine.ledger.promise_left(grant_of(1)) == 7
    assert r.reserve(2, key=key_of("s"), blocks=2, host_backed=True) == refused(2, Refusal.BUSY)
    assert r.reserve(3, key=key_of("s"), blocks=1, host_backed=True)[1] == granted(3, blocks=(2,))
    assert r.classes() == (0, 3, 0, 0, 1)


def test_a_node_without_room_refuses_and_sticks_to_it() -> None:
    """The shell says that there is no room: a repeat gets the same answer though there is some by then; a repeat of
    what was granted gets its grant though there is none any more."""
    r = Receiver()
    assert r.reserve(0, room=False) == refused(0, Refusal.BUSY)
    assert r.reserve(0) == refused(0, Refusal.BUSY)
    assert r.reserve(1) == [lease(1), granted(1)]
    assert r.reserve(1, room=False) == [granted(1)]


def test_the_references_of_a_committed_grant_can_be_taken_over() -> None:
    """The taker drops them when it likes; the end of the request drops the promise and nothing else."""
    r = Receiver()
    r.reserve(promise=1)
    assert not r.machine.take_over(grant_of(0)), "not committed yet"
    r.seal()
    r.commit()
    assert r.machine.take_over(grant_of(0))
    assert r.classes() == (0, 0, 2, 0, 2)
    r.machine.handle(RequestEnded(key=key_of()))
    assert r.state() in (GrantState.RELEASED, None)
    assert r.classes() == (0, 0, 2, 0, 2)
    assert r.machine.ledger.promise_left(grant_of(0)) is None
    assert not r.machine.take_over(grant_of(0)), "over"
    r.machine.ledger.drop(granted(0).blocks)
    assert r.classes() == (0, 0, 0, 0, 4)
