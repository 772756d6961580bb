"""The receiver machine where Commits carry checksums: what happens from the last seal to the comparison's result."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.receiver import (
    AnswerCommit,
    AnswerRelease,
    CheckRecords,
    CloseGrant,
    GrantState,
    ReportCorrupt,
    RequestCancelled,
    TimerKind,
)
from tests.support.grant_scripts import PAIR, Receiver, committed, grant_of, key_of, nth, revoking

CHECK = CheckRecords(grant=grant_of(0))
REPORT = ReportCorrupt(pair=PAIR, key=key_of(), grant=grant_of(0))
CORRUPT = AnswerCommit(pair=PAIR, grant=grant_of(0), committed=False, corrupt=True)
REVOKED = AnswerCommit(pair=PAIR, grant=grant_of(0), committed=False)
STOP = CloseGrant(grant=grant_of(0))


def sampled(*, commit_first: bool = False) -> Receiver:
    """Sealed and committed, with checksums; the comparison is asked for once."""
    r = Receiver()
    r.reserve(promise=1)
    if commit_first:
        assert r.commit(sampled=True) == []
        assert r.seal() == [CHECK]
    else:
        assert r.seal() == []
        assert r.commit(sampled=True) == [CHECK]
    assert (r.state(), r.classes()) == (GrantState.WRITING, (0, 2, 0, 0, 2))
    return r


@pytest.mark.parametrize("commit_first", [False, True])
def test_an_intact_sample_commits(commit_first: bool) -> None:
    """Repeats of Commit and seal meanwhile change nothing; all that wait are answered together."""
    r = sampled(commit_first=commit_first)
    assert r.commit(sampled=True) == []
    assert r.seal() == []
    assert r.checked(intact=True) == committed()
    assert (r.state(), r.classes()) == (GrantState.COMMITTED, (0, 0, 2, 0, 2))
    assert r.commit(sampled=True) == [AnswerCommit(pair=PAIR, grant=grant_of(0), committed=True)]
    assert r.checked(intact=True) == []


def test_a_corrupt_sample_is_refused_for_good() -> None:
    """The writer has sealed, so the blocks are free at once; it is told why, on a repeat too; its Release ends it."""
    r = sampled()
    assert r.checked(intact=False) == [REPORT, CORRUPT, STOP]
    assert (r.state(), r.classes()) == (GrantState.FENCED, (0, 0, 0, 0, 4))
    assert r.machine.ledger.promise_left(grant_of(0)) is None
    assert r.commit(sampled=True) == [CORRUPT]
    assert r.release() == [AnswerRelease(pair=PAIR, number=nth(0))]
    assert r.state() is GrantState.RELEASED
    assert r.commit(sampled=True) == [CORRUPT]


def test_a_cancel_meanwhile_wins() -> None:
    """The request lets go while its records are compared; the blocks wait for the result, and are free then."""
    r = sampled()
    assert r.machine.handle(RequestCancelled(key=key_of())) == [REVOKED, *revoking()]
    assert (r.state(), r.classes()) == (GrantState.REVOKING, (0, 2, 0, 0, 2))
    assert r.checked(intact=True) == [STOP]
    assert (r.state(), r.classes()) == (GrantState.FENCED, (0, 0, 0, 0, 4))
    assert r.commit(sampled=True) == [REVOKED]


def test_corruption_is_reported_though_the_request_is_gone() -> None:
    """A lease that ran out in the middle of it: nobody needs the records, but the hardware is still bad."""
    r = sampled()
    r.fire(TimerKind.LEASE)
    assert r.checked(intact=False) == [REPORT, STOP]
    assert r.state() is GrantState.FENCED


@pytest.mark.parametrize("intact", [False, True])
def test_a_result_that_comes_too_late_says_nothing(intact: bool) -> None:
    """The pair was fenced meanwhile, and another request has the blocks: what was read there may be its bytes."""
    r = sampled()
    r.fenced()
    assert (r.state(), r.classes()) == (GrantState.FENCED, (0, 0, 0, 0, 4))
    assert r.checked(intact=intact) == []
    assert r.commit(sampled=True) == [REVOKED]


def test_what_contradicts_the_commit_is_not_compared() -> None:
    """Counts that disagree: the lease decides, as without checksums."""
    r = Receiver()
    r.reserve()
    r.seal(writes=2)
    (refused,) = r.commit(sampled=True)
    assert type(refused).__name__ == "CountRefused"
    assert r.state() is GrantState.WRITING


def test_of_an_unknown_grant_nothing_is_said() -> None:
    assert Receiver().checked(intact=False) == []
