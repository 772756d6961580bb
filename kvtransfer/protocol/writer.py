"""The writer's half of the handoff protocol, for one pair (this process, one receiver process).

A state machine without I/O: `handle(event) -> list[WriterInstruction]`. It changes only itself, is owned by one thread
and knows no clock: the shell measures the lease (from the *sending* of the Reserve or Renew that was answered) and
gives up when it has lapsed. A handoff goes by the *number* of its Reserve; see `protocol.receiver`.

    ASKING      Reserve sent                      WRITING    granted: writes may be posted
    COMMITTING  all posted, seal and Commit sent  DRAINING   given up: waiting for posted writes to complete
    RELEASING   drained: Release sent             DONE       forgotten, except for a source that is still being read

Two promises hold at every moment. No write is posted outside WRITING. `SendRelease` and `AnswerRevoke` (the writer's
evidence, I2) leave only when no posted write is outstanding, and they say so (`in_doubt`) if some writes
completed here without being known to have landed or to be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from baton.ids import Epoch, GrantId, RequestKey, ReserveNumber
from kvtransfer.transport import Seal

LIVE_SPAN_MAX: Final = 4096
"""Reserve numbers of one pair between the writer's lowest live one and its newest."""
STORY_STEPS_MAX: Final = 24
StepTaken = tuple[Enum, Enum, Enum]
"""From a state, by a step, to a state."""


def told(*story: StepTaken) -> str:
    return ", ".join(f"{state.value} --{step.value}--> {to.value}" for state, step, to in story)


class WriterState(Enum):
    ASKING = "ASKING"
    WRITING = "WRITING"
    COMMITTING = "COMMITTING"
    DRAINING = "DRAINING"
    RELEASING = "RELEASING"
    DONE = "DONE"


class WriterStep(Enum):
    """What can happen to one handoff: the columns of the transition table."""

    GRANTED = "granted"
    REFUSED = "refused"
    GIVE_UP = "give up"  # cancelled, revoked, lease lapsed, link lost
    UNANSWERED = "Reserve unanswered"
    ALL_POSTED = "all posted"
    COMMITTED = "Commit accepted"
    DRAINED = "writes drained"
    RELEASE_ANSWERED = "Release answered"
    PEER_GONE = "peer gone"


_W = WriterState

WRITER_TRANSITIONS: dict[tuple[WriterState, WriterStep], tuple[WriterState, ...]] = {
    (_W.ASKING, WriterStep.GRANTED): (_W.WRITING,),
    (_W.ASKING, WriterStep.REFUSED): (_W.DONE,),
    (_W.ASKING, WriterStep.UNANSWERED): (_W.RELEASING,),
    (_W.ASKING, WriterStep.GIVE_UP): (_W.RELEASING,),
    (_W.WRITING, WriterStep.ALL_POSTED): (_W.COMMITTING,),
    (_W.WRITING, WriterStep.GIVE_UP): (_W.DRAINING,),
    (_W.COMMITTING, WriterStep.COMMITTED): (_W.DONE,),
    (_W.COMMITTING, WriterStep.GIVE_UP): (_W.DRAINING,),
    (_W.DRAINING, WriterStep.DRAINED): (_W.RELEASING,),
    (_W.RELEASING, WriterStep.RELEASE_ANSWERED): (_W.DONE,),
    **{(state, WriterStep.PEER_GONE): (_W.DONE,) for state in _W if state is not _W.DONE},
}
"""Where each step may lead. A step that a state does not list changes nothing there."""


class HandoffEnd(Enum):
    """How a handoff ended, as the writer sees it."""

    COMMITTED = "committed"
    REFUSED = "refused"
    REVOKED = "revoked"
    CORRUPT = "corrupt"
    CANCELLED = "cancelled"
    LEASE_LAPSED = "lease_lapsed"
    LINK_LOST = "link_lost"
    UNANSWERED = "unanswered"
    PEER_GONE = "peer_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterEvent:
    """What happened, to all handoffs of the pair unless it is a HandoffEvent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffEvent(WriterEvent):
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffAsked(WriterEvent):
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveGranted(HandoffEvent):
    grant: GrantId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused(HandoffEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveUnanswered(HandoffEvent):
    """The call failed: whether there is a grant is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesPosted(HandoffEvent):
    writes: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesCompleted(HandoffEvent):
    """The local transport no longer reads the sources of `writes` posted writes (landed, or abandoned)."""

    writes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesInDoubt(HandoffEvent):
    """The link ended with posted writes on their way: they complete here, and may land yet. Comes before completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllPosted(HandoffEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnswered(HandoffEvent):
    committed: bool
    corrupt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUnanswered(HandoffEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeAsked(HandoffEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp(HandoffEvent):
    """The handoff cannot succeed, or nobody wants it.

    CANCELLED: by its owner. REVOKED: the receiver has refused to renew the grant. LEASE_LAPSED: no renewal was answered
    in time, counted from the sending of the last one that was. LINK_LOST: a posted write or the seal will never arrive.
    """

    end: HandoffEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAnswered(HandoffEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseUnanswered(HandoffEvent):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost(WriterEvent):
    """The data connection of this epoch is gone: nothing more can be posted on it."""

    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone(WriterEvent):
    """The receiver process has ended: nothing is sent to it any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterInstruction:
    """What the shell does, for one handoff."""

    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReserve(WriterInstruction):
    lowest_live: ReserveNumber
    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWriting(WriterInstruction):
    grant: GrantId
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class SendSeal(WriterInstruction):
    """Goes out on the data channel, behind all writes of the grant."""

    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommit(WriterInstruction):
    """States what the seal vouches for."""

    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonWrites(WriterInstruction):
    """Post no more, copy no more of what is queued."""

    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSources(WriterInstruction):
    """No write of this handoff is outstanding and none will follow: its source blocks may be released. Comes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRelease(WriterInstruction):
    lowest_live: ReserveNumber
    in_doubt: bool = False
    """No evidence: see WriterReleased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRevoke(WriterInstruction):
    """Answers every Revoke of this number that waits."""

    in_doubt: bool = False
    """No evidence: see WriterReleased."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportEnd(WriterInstruction):
    """How the handoff ended. Comes once for each number."""

    end: HandoffEnd


@dataclass(slots=True, kw_only=True)
class HandoffEntry:
    number: ReserveNumber
    key: RequestKey
    state: WriterState = WriterState.ASKING
    grant: GrantId = GrantId(b"")
    epoch: Epoch = Epoch(0)
    writes: int = 0
    bytes_written: int = 0
    outstanding: int = 0
    sources_held: bool = False
    in_doubt: bool = False
    revoke_waits: bool = False
    reported: bool = False
    story: tuple[StepTaken, ...] = ()

    @property
    def seal(self) -> Seal:
        return Seal(grant=self.grant, epoch=self.epoch, writes=self.writes, bytes_written=self.bytes_written)


class WriterMachine:
    """All handoffs of one pair. `handle(HandoffAsked)` needs `can_ask`."""

    def __init__(self, *, live_span_max: int = LIVE_SPAN_MAX) -> None:
        """No new Reserve while the lowest live number is `live_span_max` behind; the receiver's must be as large."""
        self._live_span_max = live_span_max
        self._handoffs: dict[ReserveNumber, HandoffEntry] = {}
        self._next = ReserveNumber(0)
        self._in_doubt: dict[ReserveNumber, Epoch] = {}
        self._out: list[WriterInstruction] = []
        self._handlers: dict[type, Callable[..., None]] = {
            HandoffAsked: self._asked,
            ReserveGranted: self._granted,
            ReserveRefused: self._refused,
            ReserveUnanswered: self._unanswered,
            WritesPosted: self._posted,
            WritesInDoubt: self._writes_in_doubt,
            WritesCompleted: self._completed,
            AllPosted: self._all_posted,
            CommitAnswered: self._commit_answered,
            CommitUnanswered: self._commit_unanswered,
            RevokeAsked: self._revoke_asked,
            GiveUp: lambda e: self._give_up(e.number, e.end),
            ReleaseAnswered: self._release_answered,
            ReleaseUnanswered: self._release_unanswered,
            LinkLost: self._link_lost,
            PeerGone: self._peer_gone,
        }

    def handle(self, event: WriterEvent) -> list[WriterInstruction]:
        self._out = []
        self._handlers[type(event)](event)
        return self._out

    @property
    def next_number(self) -> ReserveNumber:
        """The number that the next HandoffAsked gets."""
        return self._next

    @property
    def lowest_live(self) -> ReserveNumber:
        """No write under a lower number is outstanding, in doubt or still to be posted. As strong as a Release."""
        return min((*self._handoffs, *self._in_doubt), default=self._next)

    @property
    def can_ask(self) -> bool:
        return self._next < self.lowest_live + self._live_span_max

    @property
    def live(self) -> int:
        """Handoffs that are not over, and those whose sources are still being read."""
        return len(self._handoffs)

    @property
    def writing(self) -> int:
        """Live handoffs under which something is or may yet be written, or whose Release the receiver answers at once:
        not one with writes in doubt, which waits for a fence that may never end (ucx)."""
        return sum(not (h.in_doubt and h.state is _W.RELEASING) for h in self._handoffs.values())

    @property
    def outstanding(self) -> int:
        """Posted writes whose sources the transport still reads."""
        return sum(h.outstanding for h in self._handoffs.values())

    def outstanding_of(self, number: ReserveNumber) -> int:
        """The same of one handoff."""
        return self._handoffs[number].outstanding if number in self._handoffs else 0

    def knows(self, number: ReserveNumber) -> bool:
        """It is not over, or its sources are still being read."""
        return number in self._handoffs

    def state_of(self, number: ReserveNumber) -> WriterState:
        known = self._handoffs.get(number)
        return known.state if known else _W.DONE

    # One step of one handoff: the only place where it changes its state.

    def _step(self, handoff: HandoffEntry, step: WriterStep, to: WriterState) -> None:
        taken = (handoff.state, step, to)
        allowed = WRITER_TRANSITIONS.get(taken[:2], ())
        assert to in allowed, f"handoff {handoff.number}: {told(taken)} is not in the table; {told(*handoff.story)}"
        handoff.story = (*handoff.story, taken)[-STORY_STEPS_MAX:]
        handoff.state = to
        if to is _W.DRAINING:
            self._out.append(AbandonWrites(number=handoff.number, grant=handoff.grant))
            self._drain(handoff)
        elif to is _W.RELEASING:
            self._answer_revoke(handoff)
            self._send_release(handoff)
        elif to is _W.DONE:
            self._forget_if_over(handoff)

    def _drain(self, handoff: HandoffEntry) -> None:
        if handoff.outstanding == 0:
            self._release_sources(handoff)
            if handoff.state is _W.DRAINING:
                self._step(handoff, WriterStep.DRAINED, _W.RELEASING)

    def _release_sources(self, handoff: HandoffEntry) -> None:
        if handoff.sources_held:
            handoff.sources_held = False
            self._out.append(ReleaseSources(number=handoff.number))

    def _forget_if_over(self, handoff: HandoffEntry) -> None:
        if handoff.state is _W.DONE and handoff.outstanding == 0:
            self._release_sources(handoff)
            self._answer_revoke(handoff)
            del self._handoffs[handoff.number]
            if handoff.in_doubt:
                self._in_doubt[handoff.number] = handoff.epoch

    def _report(self, handoff: HandoffEntry, end: HandoffEnd) -> None:
        if not handoff.reported:
            handoff.reported = True
            self._out.append(ReportEnd(number=handoff.number, end=end))

    def _answer_revoke(self, handoff: HandoffEntry) -> None:
        if handoff.revoke_waits:
            handoff.revoke_waits = False
            self._out.append(AnswerRevoke(number=handoff.number, in_doubt=handoff.in_doubt))

    def _send_release(self, handoff: HandoffEntry) -> None:
        self._out.append(SendRelease(number=handoff.number, lowest_live=self.lowest_live, in_doubt=handoff.in_doubt))

    # Events.

    def _asked(self, event: HandoffAsked) -> None:
        assert self.can_ask, "the caller checks can_ask"
        number = self._next
        self._next = ReserveNumber(number + 1)
        self._handoffs[number] = HandoffEntry(number=number, key=event.key)
        self._out.append(SendReserve(number=number, lowest_live=self.lowest_live, key=event.key))

    def _in(self, number: ReserveNumber, state: WriterState) -> HandoffEntry | None:
        """The handoff, if it is in this state: an answer that comes too late changes nothing."""
        handoff = self._handoffs.get(number)
        return handoff if handoff is not None and handoff.state is state else None

    def _granted(self, event: ReserveGranted) -> None:
        # A later epoch means that the receiver has fenced the earlier ones.
        self._in_doubt = {n: e for n, e in self._in_doubt.items() if e >= event.epoch}
        handoff = self._in(event.number, _W.ASKING)
        if handoff is None:
            return  # the Release under way or answered covers it
        handoff.grant, handoff.epoch, handoff.sources_held = event.grant, event.epoch, True
        self._step(handoff, WriterStep.GRANTED, _W.WRITING)
        self._out.append(StartWriting(number=event.number, grant=event.grant, epoch=event.epoch))

    def _refused(self, event: ReserveRefused) -> None:
        if handoff := self._in(event.number, _W.ASKING):
            self._report(handoff, HandoffEnd.REFUSED)
            self._step(handoff, WriterStep.REFUSED, _W.DONE)

    def _unanswered(self, event: ReserveUnanswered) -> None:
        if handoff := self._in(event.number, _W.ASKING):
            self._report(handoff, HandoffEnd.UNANSWERED)
            self._step(handoff, WriterStep.UNANSWERED, _W.RELEASING)

    def _posted(self, event: WritesPosted) -> None:
        handoff = self._handoffs[event.number]
        assert handoff.state is _W.WRITING, (handoff.state, told(*handoff.story))
        handoff.writes += event.writes
        handoff.bytes_written += event.bytes_written
        handoff.outstanding += event.writes

    def _writes_in_doubt(self, event: WritesInDoubt) -> None:
        handoff = self._handoffs[event.number]
        assert handoff.outstanding, (event, handoff)
        handoff.in_doubt = True

    def _completed(self, event: WritesCompleted) -> None:
        handoff = self._handoffs[event.number]
        assert 0 < event.writes <= handoff.outstanding, (event, handoff)
        handoff.outstanding -= event.writes
        if handoff.state is _W.DRAINING:
            self._drain(handoff)
        elif handoff.state is _W.DONE:
            self._forget_if_over(handoff)

    def _all_posted(self, event: AllPosted) -> None:
        handoff = self._in(event.number, _W.WRITING)
        if handoff is None:
            return  # given up while the last layer was computed
        self._step(handoff, WriterStep.ALL_POSTED, _W.COMMITTING)
        self._out.append(SendSeal(number=handoff.number, seal=handoff.seal))
        self._out.append(SendCommit(number=handoff.number, seal=handoff.seal))

    def _commit_answered(self, event: CommitAnswered) -> None:
        handoff = self._in(event.number, _W.COMMITTING)
        if handoff is not None and event.committed:
            self._report(handoff, HandoffEnd.COMMITTED)
            self._step(handoff, WriterStep.COMMITTED, _W.DONE)
        elif handoff is not None:
            self._give_up(event.number, HandoffEnd.CORRUPT if event.corrupt else HandoffEnd.REVOKED)

    def _commit_unanswered(self, event: CommitUnanswered) -> None:
        if handoff := self._in(event.number, _W.COMMITTING):
            self._out.append(SendCommit(number=handoff.number, seal=handoff.seal))

    def _give_up(self, number: ReserveNumber, end: HandoffEnd) -> None:
        handoff = self._handoffs.get(number)
        if handoff is None or handoff.state not in (_W.ASKING, _W.WRITING, _W.COMMITTING):
            return
        self._report(handoff, end)
        to = _W.RELEASING if handoff.state is _W.ASKING else _W.DRAINING
        self._step(handoff, WriterStep.GIVE_UP, to)

    def _revoke_asked(self, event: RevokeAsked) -> None:
        assert event.number < self._next, (event, self._next)
        handoff = self._handoffs.get(event.number)
        if handoff is None:
            # Writes in doubt: they were on their way when their link ended, and the peer was given up before it knew.
            self._out.append(AnswerRevoke(number=event.number, in_doubt=event.number in self._in_doubt))
            return
        if handoff.state is _W.RELEASING:
            self._out.append(AnswerRevoke(number=event.number, in_doubt=handoff.in_doubt))
            return
        handoff.revoke_waits = True
        self._give_up(event.number, HandoffEnd.REVOKED)

    def _release_answered(self, event: ReleaseAnswered) -> None:
        if handoff := self._in(event.number, _W.RELEASING):
            handoff.in_doubt = False  # the receiver has fenced the pair
            self._step(handoff, WriterStep.RELEASE_ANSWERED, _W.DONE)

    def _release_unanswered(self, event: ReleaseUnanswered) -> None:
        if handoff := self._in(event.number, _W.RELEASING):
            self._send_release(handoff)

    def _link_lost(self, event: LinkLost) -> None:
        for handoff in list(self._handoffs.values()):
            # A handoff that has committed its writes already learns its end from the Commit's answer.
            if handoff.state is _W.WRITING and handoff.epoch <= event.epoch:
                self._give_up(handoff.number, HandoffEnd.LINK_LOST)

    def _peer_gone(self, event: PeerGone) -> None:
        del event
        for handoff in list(self._handoffs.values()):
            if handoff.state is _W.DONE:
                continue
            if handoff.state in (_W.WRITING, _W.COMMITTING):
                self._out.append(AbandonWrites(number=handoff.number, grant=handoff.grant))
            self._report(handoff, HandoffEnd.PEER_GONE)
            self._step(handoff, WriterStep.PEER_GONE, _W.DONE)
