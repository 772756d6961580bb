"""The receiver machine alone when grants are taken back: cancels, leases, fences, resolves, newer attempts."""

from __future__ import annotations

import pytest

from baton.ids import Epoch, GrantId
from kvtransfer.protocol.receiver import (
    TRANSITIONS,
    AnswerCommit,
    AnswerRelease,
    AnswerRenew,
    AnswerResolve,
    CloseGrant,
    CommitAsked,
    CountRefused,
    FencePair,
    ForgetGrant,
    GrantState,
    PairFenced,
    ReceiverLimits,
    Refusal,
    RenewAsked,
    RequestCancelled,
    RequestEnded,
    ResolveAsked,
    SealLanded,
    StartGrantTimer,
    Step,
    StopRequest,
    TimerKind,
    WriterSuspected,
)
from kvtransfer.protocol.writer import PeerGone, WriterMachine, WritesInDoubt
from tests.support.grant_scripts import (
    EPOCH_0,
    EPOCH_1,
    OTHER_PAIR,
    PAIR,
    Receiver,
    Writer,
    grant_of,
    granted,
    key_of,
    nth,
    refused,
    revoke_again,
    revoking,
    seal_of,
)


def test_cancel_before_commit_revokes() -> None:
    """The client goes away while the writer writes: the request lets go, the writer still owns the blocks."""
    r = Receiver()
    r.reserve()
    r.commit()
    assert r.machine.handle(RequestCancelled(key=key_of())) == revoking(commit_waits=True)
    assert (r.classes(), r.state()) == ((0, 2, 0, 0, 2), GrantState.REVOKING)
    assert r.release() == [CloseGrant(grant=grant_of(0)), AnswerRelease(pair=PAIR, number=nth(0))]
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.RELEASED)


def test_cancel_before_reserve_refuses_it() -> None:
    """The cancel overtakes the Reserve of its attempt; a newer attempt is welcome."""
    r = Receiver()
    assert r.machine.handle(RequestCancelled(key=key_of(attempt=2))) == []
    assert r.reserve(0, key=key_of(attempt=1)) == refused(0, Refusal.CANCELLED)
    assert r.reserve(1, key=key_of(attempt=2)) == refused(1, Refusal.CANCELLED)
    assert r.reserve(2, key=key_of(attempt=3))[1] == granted(2)


def test_cancel_after_commit_stops_the_request() -> None:
    """No writer is left: the blocks are free at once, and the Commit's repeat still gets the truth."""
    r = Receiver()
    r.reserve()
    r.seal()
    r.commit()
    assert r.machine.handle(RequestCancelled(key=key_of())) == [StopRequest(key=key_of(), grant=grant_of(0))]
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.RELEASED)
    assert r.commit() == [AnswerCommit(pair=PAIR, grant=grant_of(0), committed=True)]
    assert r.release(lowest_live=1) == [ForgetGrant(grant=grant_of(0)), AnswerRelease(pair=PAIR, number=nth(0))]
    assert len(r.machine.entries) == 0


def test_a_committed_grant_below_the_lowest_live_number_is_forgotten_at_its_end() -> None:
    """The writer is done with it long before the request is."""
    r = Receiver()
    r.reserve()
    r.seal()
    r.commit()
    assert r.release(lowest_live=1) == [AnswerRelease(pair=PAIR, number=nth(0))]
    assert r.machine.handle(RequestEnded(key=key_of())) == [ForgetGrant(grant=grant_of(0))]
    assert (len(r.machine.entries), r.classes()) == (0, (0, 0, 0, 0, 4))


def test_expired_lease_to_fence() -> None:
    """A silent writer: revoke, revoke again and fence, evidence, and only then free."""
    r = Receiver()
    r.reserve()
    assert r.fire(TimerKind.LEASE) == revoking()
    assert r.fire(TimerKind.REVOKE) == [*revoke_again(), FencePair(pair=PAIR, epoch=EPOCH_0)]
    assert r.reserve(1, key=key_of("s"), blocks=1) == refused(1, Refusal.FENCING)
    assert r.classes() == (0, 2, 0, 0, 2)
    assert r.fenced() == [CloseGrant(grant=grant_of(0))]
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.FENCED)
    assert r.machine.epoch(PAIR) == EPOCH_1
    assert r.reserve(2, key=key_of("s"))[1] == granted(2, blocks=(1, 0), epoch=EPOCH_1)


def test_quarantine_and_return() -> None:
    """No evidence in time: quarantined, revoked for ever, and free when the writer is heard of after all."""
    r = Receiver()
    r.reserve()
    r.fire(TimerKind.LEASE)
    r.fire(TimerKind.REVOKE)
    assert r.fire(TimerKind.REVOKE) == revoke_again()
    assert (r.classes(), r.state()) == ((2, 0, 0, 0, 2), GrantState.QUARANTINED)
    assert r.fire(TimerKind.REVOKE) == revoke_again()
    assert r.release() == [CloseGrant(grant=grant_of(0)), AnswerRelease(pair=PAIR, number=nth(0))]
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.RELEASED)


@pytest.mark.parametrize("rounds", [0, 2])
def test_commit_of_a_revoked_grant_is_refused_and_its_seals_are_evidence(rounds: int) -> None:
    """Too late by a moment, or by a quarantine: the request is gone, but sealed and committed means written no more."""
    r = Receiver()
    r.reserve()
    r.fire(TimerKind.LEASE)
    for _ in range(rounds):
        r.fire(TimerKind.REVOKE)
    assert r.commit() == [AnswerCommit(pair=PAIR, grant=grant_of(0), committed=False)]
    assert r.seal() == [CloseGrant(grant=grant_of(0))]
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.FENCED)
    assert r.commit() == [AnswerCommit(pair=PAIR, grant=grant_of(0), committed=False)]


def test_renewing_a_revoked_grant_tells_the_writer() -> None:
    """A writer that missed the Revoke learns it from its next renewal."""
    r = Receiver()
    r.reserve()
    r.fire(TimerKind.LEASE)
    refusal = [AnswerRenew(pair=PAIR, grant=grant_of(0), renewed=False)]
    assert r.machine.handle(RenewAsked(pair=PAIR, grant=grant_of(0))) == refusal
    assert r.machine.handle(RenewAsked(pair=PAIR, grant=GrantId(b"?"))) == [
        AnswerRenew(pair=PAIR, grant=GrantId(b"?"), renewed=False)
    ]


def test_resolve_of_a_committed_attempt_changes_nothing() -> None:
    """Carry on: the answer is yes, also after the request has ended."""
    r = Receiver()
    r.reserve()
    r.seal()
    r.commit()
    yes = [AnswerResolve(key=key_of(), committed=True)]
    assert r.machine.handle(ResolveAsked(key=key_of())) == yes
    assert r.state() is GrantState.COMMITTED
    r.machine.handle(RequestEnded(key=key_of()))
    assert r.machine.handle(ResolveAsked(key=key_of())) == yes


def test_resolve_of_an_uncommitted_attempt_ends_it() -> None:
    """The answer no is final: grant revoked, tombstone left, commit refused."""
    r = Receiver()
    r.reserve()
    r.commit()
    assert r.machine.handle(ResolveAsked(key=key_of())) == [
        *revoking(commit_waits=True),
        AnswerResolve(key=key_of(), committed=False),
    ]
    assert r.seal() == [CloseGrant(grant=grant_of(0))]
    assert r.state() is GrantState.FENCED
    assert r.reserve(1) == refused(1, Refusal.CANCELLED)


def test_a_newer_attempt_drops_the_older_ones() -> None:
    """Attempt 2 comes while 1 runs, attempt 3 while 2 is being written: each lets go of the one before."""
    r = Receiver(blocks=6)
    r.reserve(0, key=key_of(attempt=1))
    r.seal()
    r.commit()
    assert r.reserve(1, key=key_of(attempt=2)) == [
        StopRequest(key=key_of(attempt=1), grant=grant_of(0)),
        StartGrantTimer(grant=grant_of(1), kind=TimerKind.LEASE),
        granted(1, blocks=(1, 0)),
    ]
    assert r.state(0) is GrantState.RELEASED
    assert r.reserve(2, key=key_of(attempt=3), blocks=1) == [
        *revoking(1),
        StartGrantTimer(grant=grant_of(2), kind=TimerKind.LEASE),
        granted(2, blocks=(2,)),
    ]
    assert r.reserve(3, key=key_of(attempt=2)) == refused(3, Refusal.CANCELLED)


def test_the_same_attempt_again_only_when_its_grant_is_doomed() -> None:
    """The writer gave up and tries again before the receiver knows: refused while the first grant is open."""
    r = Receiver()
    r.reserve(0)
    assert r.reserve(1) == refused(1, Refusal.CANCELLED)
    r.fire(TimerKind.LEASE)
    assert r.reserve(2)[1] == granted(2, blocks=(2, 3))
    assert (r.state(0), r.state(2)) == (GrantState.REVOKING, GrantState.RESERVED)


def test_suspicion_takes_the_whole_pair_and_no_other() -> None:
    """The directory says the writer is gone: all its open grants are revoked, and a fence is asked for, once."""
    r = Receiver()
    r.reserve(0, blocks=1)
    r.reserve(1, key=key_of("s"), blocks=1)
    r.reserve(0, key=key_of("t"), blocks=1, pair=OTHER_PAIR)
    fence = FencePair(pair=PAIR, epoch=EPOCH_0)
    assert r.machine.handle(WriterSuspected(pair=PAIR)) == [*revoking(0), *revoking(1), fence]
    assert r.machine.handle(WriterSuspected(pair=PAIR)) == []
    assert r.machine.state_of(grant_of(0, OTHER_PAIR)) is GrantState.RESERVED
    assert r.fenced() == [CloseGrant(grant=grant_of(0)), CloseGrant(grant=grant_of(1))]
    assert r.classes() == (0, 1, 0, 0, 3)


def test_a_fence_of_an_old_epoch_spares_newer_grants() -> None:
    """Evidence about epoch 0 that comes twice says nothing of a grant of epoch 1."""
    r = Receiver()
    r.fenced(0)
    r.reserve()
    assert r.fenced(0) == []
    assert (r.state(), r.machine.epoch(PAIR)) == (GrantState.RESERVED, EPOCH_1)


def test_a_fence_of_an_old_epoch_does_not_end_the_fence_of_this_one() -> None:
    """The pair is in epoch 1 and being fenced when evidence about epoch 0 comes again: Reserves are still refused, no
    second fence is asked for, and only evidence about epoch 1 opens the pair again."""
    r = Receiver()
    r.fenced(0)
    r.reserve(0)
    fence = FencePair(pair=PAIR, epoch=EPOCH_1)
    assert r.machine.handle(WriterSuspected(pair=PAIR)) == [*revoking(0), fence]
    assert r.fenced(0) == []
    assert r.reserve(1, key=key_of("s")) == refused(1, Refusal.FENCING)
    assert r.machine.handle(WriterSuspected(pair=PAIR)) == []
    assert r.fenced(1) == [CloseGrant(grant=grant_of(0))]
    assert r.reserve(2, key=key_of("s"))[1] == granted(2, blocks=(1, 0), epoch=Epoch(2))


def test_a_seal_of_another_epoch_is_refused_and_counted() -> None:
    """Both a seal of the past and one that names a future."""
    r = Receiver()
    r.fenced(0)
    r.reserve()
    refused = [CountRefused(pair=PAIR, what="seal of another epoch")]
    assert r.seal(epoch=0) == refused
    assert r.seal(epoch=2) == refused
    assert r.seal(epoch=1) == []
    assert r.state() is GrantState.WRITING


def test_another_pairs_word_about_a_grant_counts_for_nothing() -> None:
    """A grant is one writer's: another one can neither renew, seal nor commit it."""
    r = Receiver()
    r.reserve()
    renew = RenewAsked(pair=OTHER_PAIR, grant=grant_of(0))
    assert r.machine.handle(renew) == [AnswerRenew(pair=OTHER_PAIR, grant=grant_of(0), renewed=False)]
    assert r.machine.handle(SealLanded(pair=OTHER_PAIR, seal=seal_of(grant_of(0), writes=3))) == []
    commit = CommitAsked(pair=OTHER_PAIR, grant=grant_of(0), writes=3, bytes_written=30)
    assert r.machine.handle(commit) == [AnswerCommit(pair=OTHER_PAIR, grant=grant_of(0), committed=False)]
    assert r.state() is GrantState.RESERVED


def test_a_write_is_admitted_only_for_a_grant_whose_writer_owns_its_blocks() -> None:
    """Epoch and grant and pair: a connection that broke may still deliver what its writer has let go of."""
    r = Receiver()
    admits = r.machine.admits_write
    assert not admits(PAIR, EPOCH_0, grant_of(0))
    r.reserve()
    assert admits(PAIR, EPOCH_0, grant_of(0))
    assert not admits(PAIR, EPOCH_1, grant_of(0))
    assert not admits(OTHER_PAIR, EPOCH_0, grant_of(0))
    r.fire(TimerKind.LEASE)
    assert admits(PAIR, EPOCH_0, grant_of(0))
    r.release()
    assert not admits(PAIR, EPOCH_0, grant_of(0))


def test_forget_pair_waits_until_nothing_of_it_lives() -> None:
    """The writer process is dead: its books go, but not before there was evidence for each grant."""
    r = Receiver()
    r.reserve()
    assert r.machine.forget_pair(PAIR) == []
    assert not r.machine.is_quiet(PAIR)
    r.fenced()
    assert r.machine.is_quiet(PAIR)
    assert r.machine.forget_pair(PAIR) == [ForgetGrant(grant=grant_of(0))]
    assert len(r.machine.entries) == 0
    assert r.machine.forget_pair(PAIR) == []


def test_a_writer_that_was_forgotten_and_comes_back_gets_an_epoch_that_it_has_not_had() -> None:
    """It had writes in doubt, gave this receiver up before it had told, and was itself taken for dead, fenced and
    forgotten. A grant of the same epoch would say nothing of that fence: the numbers from there on would be held for
    ever, and at `live_span_max` of them nothing more could be asked."""
    w = Writer(WriterMachine(live_span_max=4))
    r = Receiver()
    w.ask()
    r.reserve()
    w.granted()
    w.posted(writes=1)
    w.machine.handle(PeerGone())
    w.machine.handle(WritesInDoubt(number=nth(0)))
    w.completed()
    r.machine.handle(WriterSuspected(pair=PAIR))
    r.fenced()
    assert r.machine.forget_pair(PAIR) == [ForgetGrant(grant=grant_of(0))]
    assert (r.machine.epoch(PAIR), r.machine.epoch(OTHER_PAIR)) == (EPOCH_1, EPOCH_1)
    assert w.machine.lowest_live == nth(0)
    w.ask()
    r.reserve(1)
    w.granted(1, epoch=r.machine.epoch(PAIR))
    assert w.machine.lowest_live == nth(1)


def test_the_latest_epoch_of_all_that_were_forgotten_counts() -> None:
    """One pair was fenced five times, another once and forgotten last: the first still gets none that it has had."""
    r = Receiver()
    r.reserve()
    r.release()
    r.machine.handle(WriterSuspected(pair=OTHER_PAIR))
    for epoch in range(5):
        r.fenced(epoch)
    r.machine.handle(PairFenced(pair=OTHER_PAIR, epoch=EPOCH_0))
    for pair in (PAIR, OTHER_PAIR):
        r.machine.forget_pair(pair)
    assert r.machine.epoch(PAIR) == 5


def test_cached_prefix_is_held_by_the_grant() -> None:
    """One block of the prompt is cached here: referenced, not written, cached again afterwards."""
    r = Receiver()
    (cached,) = r.machine.ledger.take(1)
    r.machine.ledger.mark_cached(cached)
    r.machine.ledger.drop([cached])
    assert r.reserve(prefix=(cached,))[1] == granted(blocks=(1, 2), prefix=(0,))
    assert r.classes() == (0, 2, 1, 0, 1)
    r.seal()
    r.commit()
    r.machine.handle(RequestEnded(key=key_of()))
    assert r.classes() == (0, 0, 0, 1, 3)


def test_the_oldest_tombstone_goes_first() -> None:
    """Two are remembered: the third pushes the first out, and a repeat of the second keeps it young."""
    r = Receiver(limits=ReceiverLimits(tombstones_max=2))
    for request in ("a", "b", "a", "c"):
        r.machine.handle(RequestCancelled(key=key_of(request)))
    assert r.reserve(0, key=key_of("a"), blocks=1) == refused(0, Refusal.CANCELLED)
    assert r.reserve(1, key=key_of("b"), blocks=1)[1] == granted(1, blocks=(0,))
    assert r.reserve(2, key=key_of("c"), blocks=1) == refused(2, Refusal.CANCELLED)


def test_a_timer_that_comes_too_late_does_nothing() -> None:
    """Fired in the moment in which its grant was over, or forgotten."""
    r = Receiver()
    r.reserve()
    r.seal()
    r.commit()
    assert r.fire(TimerKind.LEASE) == []
    assert r.fire(TimerKind.REVOKE) == []
    assert r.fire(TimerKind.LEASE, number=9) == []


def test_a_receiver_that_leaves_its_table_says_so_with_its_story() -> None:
    """A bug of ours, provoked: the error names grant, step and the way there."""
    r = Receiver()
    r.reserve()
    grant = r.machine._grants[grant_of(0)]
    r.machine.handle(RenewAsked(pair=PAIR, grant=grant_of(0)))
    with pytest.raises(AssertionError, match="--> RELEASED is not in the table") as caught:
        r.machine._step(grant, Step.RENEW, GrantState.RELEASED)
    assert "RESERVED --Renew--> WRITING" in str(caught.value)


def test_no_state_that_frees_blocks_leads_back() -> None:
    """What the explorer takes for granted when it forgets a finished grant's seals."""
    over = {GrantState.COMMITTED, GrantState.FENCED, GrantState.RELEASED}
    back = {(state, to) for (state, _), ends in TRANSITIONS.items() for to in ends if state in over and to not in over}
    assert back == set()


def test_a_release_with_writes_in_doubt_is_answered_by_a_fence() -> None:
    """The link has failed with writes on their way: the word frees nothing. Every grant of the pair is taken back, and
    the fence's evidence frees the blocks and answers; its repeat is answered at once."""
    r = Receiver()
    r.reserve()
    r.reserve(1, key=key_of("s"), blocks=1)
    assert r.release(in_doubt=True) == [
        *revoking(),
        *revoking(1),
        FencePair(pair=PAIR, epoch=EPOCH_0),
    ]
    assert (r.classes(), r.state()) == ((0, 3, 0, 0, 1), GrantState.REVOKING)
    assert r.release(in_doubt=True) == []
    answer = AnswerRelease(pair=PAIR, number=nth(0))
    assert r.fenced() == [CloseGrant(grant=grant_of(0)), answer, CloseGrant(grant=grant_of(1))]
    assert (r.classes(), r.state(), r.state(1)) == ((0, 0, 0, 0, 4), GrantState.RELEASED, GrantState.FENCED)
    assert r.release(in_doubt=True) == [answer]
    assert r.machine.epoch(PAIR) == EPOCH_1


def test_writes_in_doubt_of_a_grant_that_is_over_call_for_no_fence() -> None:
    """The receiver saw the link's end first and has fenced it, or the grant is no longer known: nothing is at stake."""
    r = Receiver()
    r.reserve()
    r.machine.handle(WriterSuspected(pair=PAIR))
    r.fenced()
    assert r.release(in_doubt=True) == [AnswerRelease(pair=PAIR, number=nth(0))]
    assert r.state() is GrantState.RELEASED
    assert r.release(7, in_doubt=True) == [AnswerRelease(pair=PAIR, number=nth(7))]


def test_a_quarantined_grant_is_freed_by_the_fence_and_not_by_a_release_with_writes_in_doubt() -> None:
    """The fence under way since the second round is what both wait for."""
    r = Receiver()
    r.reserve()
    r.fire(TimerKind.LEASE)
    r.fire(TimerKind.REVOKE)
    r.fire(TimerKind.REVOKE)
    assert r.release(in_doubt=True) == []
    assert (r.classes(), r.state()) == ((2, 0, 0, 0, 2), GrantState.QUARANTINED)
    assert r.fenced() == [CloseGrant(grant=grant_of(0)), AnswerRelease(pair=PAIR, number=nth(0))]
    assert (r.classes(), r.state()) == ((0, 0, 0, 0, 4), GrantState.RELEASED)
