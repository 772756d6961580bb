"""The receiver machine alone, from Reserve to Commit: for each story, exactly what the shell is told to do."""

from __future__ import annotations

import runpy
from pathlib import Path

from kvtransfer.protocol.receiver import (
    AnswerRelease,
    AnswerRenew,
    CloseGrant,
    CountRefused,
    ForgetGrant,
    GrantState,
    Refusal,
    RenewAsked,
    RequestEnded,
    StartGrantTimer,
    TimerKind,
)
from tests.support.grant_scripts import (
    LEASE,
    PAIR,
    Receiver,
    committed,
    grant_of,
    granted,
    key_of,
    nth,
    refused,
    revoking,
)


def test_handoff_from_reserve_to_end() -> None:
    """Reserve, renewal, seal, commit, end of the request: blocks pass from writer to request to free."""
    r = Receiver()
    assert r.reserve(promise=1) == [LEASE, granted()]
    assert (r.classes(), r.state()) == ((0, 2, 0, 0, 2), GrantState.RESERVED)
    assert r.machine.handle(RenewAsked(pair=PAIR, grant=grant_of(0))) == [
        LEASE,
        AnswerRenew(pair=PAIR, grant=grant_of(0), renewed=True),
    ]
    assert r.state() is GrantState.WRITING
    assert r.seal() == []
    assert r.commit() == committed()
    assert (r.classes(), r.state()) == ((0, 0, 2, 0, 2), GrantState.COMMITTED)
    assert r.machine.unreleased == 1
    assert r.machine.ledger.promise_left(grant_of(0)) == 1
    assert r.machine.handle(RequestEnded(key=key_of())) == []
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.RELEASED)
    assert (r.machine.unreleased, r.machine.ledger.promise_left(grant_of(0))) == (0, None)


def test_commit_before_the_seal_waits_for_it() -> None:
    """The Commit overtakes the data: it is answered when the seal has landed, once for all that wait."""
    r = Receiver()
    r.reserve()
    assert r.commit() == []
    assert r.commit() == []
    assert r.state() is GrantState.RESERVED
    assert r.seal() == committed()


def test_a_repeated_seal_counts_once() -> None:
    """The seal lands twice before the Commit, which asks for the writes of one."""
    r = Receiver()
    r.reserve()
    assert r.seal(writes=2) == []
    assert r.seal(writes=2) == []
    assert r.commit(writes=2) == committed()


def test_seals_that_contradict_the_commit_are_counted_and_nothing_is_scheduled() -> None:
    """The writer says five writes, three have landed: the commit stays open until the lease ends it."""
    r = Receiver()
    r.reserve()
    r.seal(writes=3)
    detail = f"sealed {(3, 30)}, committed {(5, 50)} (writes, bytes)"
    assert r.commit(writes=5) == [CountRefused(pair=PAIR, what="seals that contradict the commit", detail=detail)]
    assert r.fire(TimerKind.LEASE) == revoking(commit_waits=True)


def test_no_room_is_answered_busy_and_stays_the_answer_of_that_number() -> None:
    """A repeat of a Reserve that was refused must not get a grant that nobody waits for."""
    r = Receiver()
    r.reserve(0, blocks=3)
    assert r.reserve(1, key=key_of("s"), blocks=2) == refused(1, Refusal.BUSY)
    r.release(0)
    assert r.reserve(1, key=key_of("s"), blocks=2) == refused(1, Refusal.BUSY)
    assert r.reserve(2, key=key_of("s"), blocks=2)[1] == granted(2, blocks=(2, 1))


def test_promises_of_others_count_against_a_reserve() -> None:
    """Two blocks promised to a running request: two of four free ones are left to be granted."""
    r = Receiver()
    r.machine.ledger.promise("running", 2)
    assert r.reserve(0, blocks=2, promise=1) == refused(0, Refusal.BUSY)
    assert r.reserve(1, blocks=2)[1] == granted(1)


def test_a_repeated_reserve_gets_the_same_grant() -> None:
    """The answer was lost: the same blocks again, and no second timer."""
    r = Receiver()
    r.reserve()
    assert r.reserve() == [granted()]
    assert r.classes() == (0, 2, 0, 0, 2)


def test_a_repeated_reserve_of_a_grant_that_is_over_is_stale() -> None:
    """A late repeat, after the commit: it gets no writer a right."""
    r = Receiver()
    r.reserve()
    r.seal()
    r.commit()
    assert r.reserve() == refused(0, Refusal.STALE)


def test_a_release_overtakes_its_reserve() -> None:
    """The writer gave up before its Reserve arrived: the number is refused for good."""
    r = Receiver()
    assert r.release(0) == [AnswerRelease(pair=PAIR, number=nth(0))]
    assert r.reserve(0) == refused(0, Refusal.STALE)
    assert r.classes() == (0, 0, 0, 0, 4)


def test_numbers_below_the_lowest_live_one_are_stale_without_being_remembered() -> None:
    """The writer says it has nothing below 3: the tombstones below go, the refusals stay."""
    r = Receiver()
    r.release(0)
    r.release(1, lowest_live=3)
    assert r.reserve(0) == refused(0, Refusal.STALE)
    assert r.reserve(2) == refused(2, Refusal.STALE)
    assert r.reserve(3, lowest_live=3)[1] == granted(3)


def test_rising_lowest_live_number_is_evidence_and_forgets() -> None:
    """Grant 0's Release got lost, the Reserve of 1 says that 0 is over: its blocks are free in time for 1."""
    r = Receiver(blocks=2)
    r.reserve(0)
    reported = r.reserve(1, key=key_of("s"), lowest_live=1)
    assert reported == [
        CloseGrant(grant=grant_of(0)),
        ForgetGrant(grant=grant_of(0)),
        StartGrantTimer(grant=grant_of(1), kind=TimerKind.LEASE),
        granted(1, blocks=(1, 0)),
    ]
    assert len(r.machine.entries) == 1


def test_a_number_too_far_above_the_lowest_live_one_is_refused() -> None:
    """The span bounds what is remembered for a pair; the refusal is not remembered itself."""
    r = Receiver()
    assert r.reserve(4) == refused(4, Refusal.SPAN)
    assert r.reserve(4, lowest_live=1)[1] == granted(4)


def test_diagrams_in_the_docs_are_those_of_the_tables() -> None:
    """`python docs/generate_state_diagrams.py` has been run since the tables changed."""
    generator = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "generate_state_diagrams.py"))
    receiver = generator["diagrams"]()["receiver-states"]
    assert "    COMMITTED --> RELEASED : Cancel, request ends\n" in receiver
    assert {page: page.read_text(encoding="utf-8") for page in generator["renewed"]()} == generator["renewed"]()
