"""The writer machine alone: for each story, exactly what the shell is told to do."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.writer import (
    WRITER_TRANSITIONS,
    AnswerRevoke,
    CommitAnswered,
    CommitUnanswered,
    GiveUp,
    HandoffEnd,
    LinkLost,
    PeerGone,
    ReleaseAnswered,
    ReleaseUnanswered,
    ReserveRefused,
    ReserveUnanswered,
    SendSeal,
    StartWriting,
    WriterMachine,
    WriterState,
    WriterStep,
    WritesInDoubt,
)
from tests.support.grant_scripts import (
    ABANDON,
    COMMIT,
    EPOCH_0,
    RELEASE,
    Writer,
    ended,
    grant_of,
    nth,
    release_sent,
    reserve_sent,
    seal_of,
)


def test_writer_from_ask_to_commit() -> None:
    """Ask, write, seal and commit: sources are released by the last completion or the commit, whichever is later."""
    w = Writer()
    assert w.ask() == [reserve_sent(0)]
    assert w.granted() == [StartWriting(number=nth(0), grant=grant_of(0), epoch=EPOCH_0)]
    assert w.state() is WriterState.WRITING
    assert w.posted() == []
    assert w.all_posted() == [SendSeal(number=nth(0), seal=seal_of(grant_of(0), writes=2)), COMMIT]
    assert w.state() is WriterState.COMMITTING
    assert w.completed(writes=2) == []
    assert w.machine.handle(CommitAnswered(number=nth(0), committed=True)) == [ended(HandoffEnd.COMMITTED), RELEASE]
    assert (w.machine.live, w.machine.lowest_live, w.state()) == (0, nth(1), WriterState.DONE)


def test_commit_accepted_before_the_last_completion() -> None:
    """The acknowledgement of the last write is late: the sources stay held, and the number stays live, until then."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted()
    w.all_posted()
    w.completed()
    assert w.machine.handle(CommitAnswered(number=nth(0), committed=True)) == [ended(HandoffEnd.COMMITTED)]
    assert (w.machine.live, w.machine.outstanding, w.machine.lowest_live) == (1, 1, nth(0))
    assert w.completed() == [RELEASE]
    assert (w.machine.live, w.machine.lowest_live) == (0, nth(1))


def test_refused_reserve_ends_the_handoff() -> None:
    """No room there: nothing was granted, so there is nothing to let go of."""
    w = Writer()
    w.ask()
    assert w.machine.handle(ReserveRefused(number=nth(0))) == [ended(HandoffEnd.REFUSED)]
    assert w.machine.live == 0
    assert w.granted() == []


def test_unanswered_reserve_is_released() -> None:
    """Granted or not, nobody knows: the Release is repeated until it is answered. A late grant is not used."""
    w = Writer()
    w.ask()
    assert w.machine.handle(ReserveUnanswered(number=nth(0))) == [ended(HandoffEnd.UNANSWERED), release_sent()]
    assert w.granted() == []
    assert w.machine.handle(ReleaseUnanswered(number=nth(0))) == [release_sent()]
    assert w.machine.handle(ReleaseAnswered(number=nth(0))) == []
    assert w.machine.live == 0
    assert w.machine.handle(ReleaseUnanswered(number=nth(0))) == []


@pytest.mark.parametrize(
    ("event", "end"),
    [
        (GiveUp(number=nth(0), end=HandoffEnd.CANCELLED), HandoffEnd.CANCELLED),
        (GiveUp(number=nth(0), end=HandoffEnd.LEASE_LAPSED), HandoffEnd.LEASE_LAPSED),
        (GiveUp(number=nth(0), end=HandoffEnd.REVOKED), HandoffEnd.REVOKED),
        (LinkLost(epoch=EPOCH_0), HandoffEnd.LINK_LOST),
    ],
    ids=["cancelled", "lease lapsed", "renewal refused", "link lost"],
)
def test_giving_up_lets_go_only_when_drained(event: GiveUp | LinkLost, end: HandoffEnd) -> None:
    """Two writes are under way: post no more, wait for both, then release the sources and let go."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted()
    assert w.machine.handle(event) == [ended(end), ABANDON]
    assert w.machine.handle(event) == []
    assert w.all_posted() == []
    assert w.completed() == []
    assert w.completed() == [RELEASE, release_sent()]
    assert w.machine.handle(ReleaseAnswered(number=nth(0))) == []
    assert w.machine.live == 0


def test_revoke_is_answered_after_draining() -> None:
    """The answer is evidence: it waits for the writes, and comes at once when asked again."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted(writes=1)
    assert w.revoke() == [ended(HandoffEnd.REVOKED), ABANDON]
    assert w.revoke() == []
    answer = AnswerRevoke(number=nth(0))
    assert w.completed() == [RELEASE, answer, release_sent()]
    assert w.revoke() == [answer]
    w.machine.handle(ReleaseAnswered(number=nth(0)))
    assert w.revoke() == [answer]


def test_revoke_of_a_handoff_that_asks() -> None:
    """The grant's answer is still under way: nothing was posted, so the word can be given at once."""
    w = Writer()
    w.ask()
    assert w.revoke() == [ended(HandoffEnd.REVOKED), AnswerRevoke(number=nth(0)), release_sent()]


def test_refused_commit_gives_up() -> None:
    """Revoked before the seal landed: the answer says so."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted()
    w.all_posted()
    w.completed(writes=2)
    assert w.machine.handle(CommitAnswered(number=nth(0), committed=False)) == [
        ended(HandoffEnd.REVOKED),
        ABANDON,
        RELEASE,
        release_sent(),
    ]


def test_unanswered_commit_is_asked_again() -> None:
    """The end of a commit is only known from its answer, so it is asked until there is one."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted()
    w.all_posted()
    assert w.machine.handle(LinkLost(epoch=EPOCH_0)) == []
    assert w.machine.handle(CommitUnanswered(number=nth(0))) == [COMMIT]
    w.completed(writes=2)
    w.machine.handle(CommitAnswered(number=nth(0), committed=True))
    assert w.machine.handle(CommitUnanswered(number=nth(0))) == []


def test_a_lost_link_of_an_old_epoch_leaves_newer_handoffs_alone() -> None:
    """The link of epoch 0 ends after a fence; a handoff on the link of epoch 1 goes on."""
    w = Writer()
    w.ask()
    w.ask()
    w.granted(0, epoch=0)
    w.granted(1, epoch=1)
    assert w.machine.handle(LinkLost(epoch=EPOCH_0)) == [
        ended(HandoffEnd.LINK_LOST),
        ABANDON,
        RELEASE,
        release_sent(0),
    ]
    assert w.state(1) is WriterState.WRITING


def test_peer_gone_ends_everything_and_tells_nobody() -> None:
    """The receiver process has ended; sources are still held until the transport has let go of them."""
    w = Writer(WriterMachine(live_span_max=4))
    for _ in range(3):
        w.ask()
    w.granted(0)
    w.posted(0, writes=1)
    w.machine.handle(ReserveUnanswered(number=nth(2)))
    assert w.machine.handle(PeerGone()) == [
        ABANDON,
        ended(HandoffEnd.PEER_GONE, 0),
        ended(HandoffEnd.PEER_GONE, 1),
    ]
    assert (w.machine.live, w.machine.outstanding) == (1, 1)
    assert w.completed(0) == [RELEASE]
    assert w.machine.live == 0


def test_revoke_waits_for_the_writes_of_a_peer_that_was_given_up() -> None:
    """A writer that shuts down calls its peer gone. Should it live, it must not be told that nobody writes."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted(writes=1)
    w.revoke()
    assert w.machine.handle(PeerGone()) == []
    assert w.revoke() == []
    assert w.machine.lowest_live == nth(0)
    assert w.completed() == [RELEASE, AnswerRevoke(number=nth(0))]
    assert w.revoke() == [AnswerRevoke(number=nth(0))]


def test_span_limits_how_many_numbers_may_be_live() -> None:
    """Number 0 hangs: at the span's end nothing more is asked for until it is over."""
    w = Writer()
    w.ask()
    assert w.ask() == [reserve_sent(1)]
    w.machine.handle(ReserveRefused(number=nth(1)))
    w.machine.handle(GiveUp(number=nth(0), end=HandoffEnd.CANCELLED))
    assert not w.machine.can_ask
    with pytest.raises(AssertionError, match="can_ask"):
        w.ask()
    w.machine.handle(ReleaseAnswered(number=nth(0)))
    assert w.ask() == [reserve_sent(2, lowest_live=2)]


def test_writer_asserts_what_only_a_bug_of_ours_can_do() -> None:
    """Posting outside WRITING, completing what was not posted, a Revoke of a number never asked for."""
    w = Writer()
    w.ask()
    with pytest.raises(AssertionError):
        w.posted()
    w.granted()
    w.posted(writes=1)
    with pytest.raises(AssertionError):
        w.completed(writes=2)
    with pytest.raises(AssertionError):
        w.revoke(7)


def test_a_writer_that_leaves_its_table_says_so_with_its_story() -> None:
    """A bug of ours, provoked."""
    w = Writer()
    w.ask()
    w.granted()
    handoff = w.machine._handoffs[nth(0)]
    with pytest.raises(AssertionError, match="WRITING --granted--> DONE is not in the table") as caught:
        w.machine._step(handoff, WriterStep.GRANTED, WriterState.DONE)
    assert "ASKING --granted--> WRITING" in str(caught.value)


def test_no_handoff_returns_to_a_state_it_has_left() -> None:
    """What the explorer takes for granted when it drops messages that can have no effect any more."""
    order = list(WriterState)
    for (state, _), ends in WRITER_TRANSITIONS.items():
        assert all(order.index(to) > order.index(state) for to in ends), (state, ends)


def test_the_word_of_a_handoff_with_writes_in_doubt_says_so() -> None:
    """The link failed with a write on its way: Release and the answers to Revoke tell it, until the receiver has
    answered, which it does when it has fenced."""
    w = Writer()
    w.ask()
    w.granted()
    w.posted(writes=2)
    w.revoke()
    w.completed(writes=1)
    assert w.machine.handle(WritesInDoubt(number=nth(0))) == []
    answer = AnswerRevoke(number=nth(0), in_doubt=True)
    assert w.completed() == [RELEASE, answer, release_sent(in_doubt=True)]
    assert w.revoke() == [answer]
    assert w.machine.handle(ReleaseUnanswered(number=nth(0))) == [release_sent(in_doubt=True)]
    w.machine.handle(ReleaseAnswered(number=nth(0)))
    assert w.revoke() == [AnswerRevoke(number=nth(0))]
    assert w.machine.lowest_live == nth(1)


def test_a_release_with_writes_in_doubt_no_longer_counts_as_writing() -> None:
    """Its answer waits for a fence of the receiver's, perhaps for ever: it stays live, and no drain waits for it. Every
    other handoff is answered for: one that writes, one whose Release is answered at once, one whose writes are
    in doubt and not over."""
    w = Writer(WriterMachine(live_span_max=4))
    w.ask()
    w.granted()
    w.posted(writes=2)
    w.machine.handle(GiveUp(number=nth(0), end=HandoffEnd.CANCELLED))
    w.completed(writes=1)
    w.machine.handle(WritesInDoubt(number=nth(0)))
    assert (w.machine.live, w.machine.writing) == (1, 1)
    w.completed(writes=1)
    assert (w.state(), w.machine.live, w.machine.writing) == (WriterState.RELEASING, 1, 0)
    w.ask()
    assert (w.machine.live, w.machine.writing) == (2, 1)
    w.machine.handle(GiveUp(number=nth(1), end=HandoffEnd.CANCELLED))
    assert (w.state(1), w.machine.live, w.machine.writing) == (WriterState.RELEASING, 2, 1)
    w.machine.handle(ReleaseAnswered(number=nth(1)))
    assert (w.machine.live, w.machine.writing) == (1, 0)
    w.machine.handle(ReleaseAnswered(number=nth(0)))
    assert (w.machine.live, w.machine.writing) == (0, 0)


def test_writes_in_doubt_outlive_the_peer_that_was_given_up() -> None:
    """The peer was given up before it knew. Should it live and be asked again, no lowest live number vouches for them,
    until a grant of a later epoch shows that they were fenced."""
    w = Writer(WriterMachine(live_span_max=4))
    w.ask()
    w.granted()
    w.posted(writes=1)
    w.machine.handle(PeerGone())
    w.machine.handle(WritesInDoubt(number=nth(0)))
    w.completed()
    assert (w.machine.live, w.machine.lowest_live) == (0, nth(0))
    assert w.revoke() == [AnswerRevoke(number=nth(0), in_doubt=True)]
    assert w.ask() == [reserve_sent(1, lowest_live=0)]
    w.granted(1, epoch=0)
    assert w.machine.lowest_live == nth(0)
    assert w.ask() == [reserve_sent(2, lowest_live=0)]
    w.granted(2, epoch=1)
    assert w.machine.lowest_live == nth(1)
    assert w.revoke() == [AnswerRevoke(number=nth(0), in_doubt=False)]
