"""The receiver's half of the handoff protocol: who may write into which block, and when that right has ended.

A state machine without I/O: it changes itself and its ledger, is owned by one thread, knows no clock (timers are
instructions and come back as events) and draws no random numbers (fresh grant ids come with the event).

    RESERVED    granted, nothing heard from the writer yet      WRITING   renewed or sealed at least once
    COMMITTED   sealed and committed: the writer's right is over
    REVOKING    the request has let go, the writer has not
    QUARANTINED the same, and no evidence came in time
    FENCED      evidence came; kept to answer repeats           RELEASED  nobody owns blocks by it; kept for repeats

Time may start a revocation; only evidence ends a writer's right (I2): seal and commit, the writer's own Release
(`WriterReleased`, or a rising `lowest_live`), or the transport's fence (`PairFenced`). If a Release says that writes
are in doubt, the receiver fences the pair, and answers the Release when the fence has ended. Until then the writer does
not raise its `lowest_live` past that number.

The two sides name the same thing differently: the *number* of a Reserve within its pair (the writer knows it from the
start) and the *grant* (drawn by the receiver, known to the writer once granted).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from baton.ids import Attempt, BlockId, Epoch, GrantId, Pair, RequestId, RequestKey, ReserveNumber
from cachestore.ledger import Ledger
from kvtransfer.protocol.writer import LIVE_SPAN_MAX, STORY_STEPS_MAX, StepTaken, told
from kvtransfer.transport import Seal


class GrantState(Enum):
    RESERVED = "RESERVED"
    WRITING = "WRITING"
    COMMITTED = "COMMITTED"
    REVOKING = "REVOKING"
    QUARANTINED = "QUARANTINED"
    FENCED = "FENCED"
    RELEASED = "RELEASED"


class RecordCheck(Enum):
    """Of a grant whose Commit carries checksums; the state stays what it is meanwhile."""

    NONE = "none"
    WANTED = "wanted"  # until the seal is here too
    RUNNING = "running"
    CORRUPT = "corrupt"  # the grant is FENCED: seal and commit were evidence enough


class Step(Enum):
    """What can happen to one grant: the columns of the transition table."""

    RENEW = "Renew"
    SEAL = "Seal"
    COMMIT = "Commit"
    CHECKED = "records checked"
    RELEASE = "writer releases"
    FENCE = "fence"
    SUSPECT = "writer suspected"
    CANCEL = "Cancel"
    END = "request ends"
    LEASE_TIMER = "lease timer"
    REVOKE_TIMER = "revoke timer"


UNCOMMITTED = frozenset({GrantState.RESERVED, GrantState.WRITING, GrantState.REVOKING, GrantState.QUARANTINED})
OPEN = frozenset({GrantState.RESERVED, GrantState.WRITING})

TRANSITIONS: dict[tuple[GrantState, Step], tuple[GrantState, ...]] = {
    **{(state, Step.RENEW): (GrantState.WRITING,) for state in OPEN},
    **{(state, Step.SEAL): (GrantState.WRITING, GrantState.COMMITTED) for state in OPEN},
    (GrantState.RESERVED, Step.COMMIT): (GrantState.RESERVED,),  # a seal would have made it WRITING
    (GrantState.WRITING, Step.COMMIT): (GrantState.WRITING, GrantState.COMMITTED),
    (GrantState.WRITING, Step.CHECKED): (GrantState.COMMITTED, GrantState.FENCED),
    (GrantState.REVOKING, Step.CHECKED): (GrantState.FENCED,),
    (GrantState.QUARANTINED, Step.CHECKED): (GrantState.FENCED,),
    **{(state, Step.RELEASE): (GrantState.FENCED,) for state in UNCOMMITTED},
    **{(state, Step.FENCE): (GrantState.FENCED,) for state in UNCOMMITTED},
    **{(state, Step.SUSPECT): (GrantState.REVOKING,) for state in OPEN},
    **{(state, Step.CANCEL): (GrantState.REVOKING,) for state in OPEN},
    **{(state, Step.LEASE_TIMER): (GrantState.REVOKING,) for state in OPEN},
    (GrantState.COMMITTED, Step.CANCEL): (GrantState.RELEASED,),
    (GrantState.COMMITTED, Step.END): (GrantState.RELEASED,),
    (GrantState.REVOKING, Step.SEAL): (GrantState.REVOKING, GrantState.FENCED),
    (GrantState.REVOKING, Step.COMMIT): (GrantState.REVOKING, GrantState.FENCED),
    (GrantState.REVOKING, Step.REVOKE_TIMER): (GrantState.REVOKING, GrantState.QUARANTINED),
    (GrantState.QUARANTINED, Step.SEAL): (GrantState.QUARANTINED, GrantState.FENCED),
    (GrantState.QUARANTINED, Step.COMMIT): (GrantState.QUARANTINED, GrantState.FENCED),
    (GrantState.QUARANTINED, Step.REVOKE_TIMER): (GrantState.QUARANTINED,),
    (GrantState.FENCED, Step.RELEASE): (GrantState.RELEASED,),
}
"""Where each step may lead. A step that a state does not list changes nothing there; a question is still answered."""


class Refusal(Enum):
    """Why a Reserve was not granted."""

    BUSY = "busy"  # no room now; ask again later or elsewhere
    STALE = "stale"  # the writer has released this number already, or it was answered and forgotten
    CANCELLED = "cancelled"  # the request let go of this attempt
    SPAN = "span"  # too far above the writer's lowest live number
    FENCING = "fencing"  # the pair's right to write is being taken back


class TimerKind(Enum):
    LEASE = "lease"  # the writer has not renewed: start taking its right back
    REVOKE = "revoke"  # no evidence yet: repeat, then fence, then quarantine


class ReceiverEvent:
    """What happened."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveAsked(ReceiverEvent):
    """`grant` is a fresh random id, used if granted; `prefix` are cached blocks that the shell keeps held meanwhile."""

    pair: Pair
    number: ReserveNumber
    lowest_live: ReserveNumber
    key: RequestKey
    grant: GrantId
    blocks_new: int
    prefix: tuple[BlockId, ...] = ()
    promise: int = 0
    host_backed: bool = False
    """The promise may be covered by host memory (see `cachestore.ledger`)."""
    room: bool = True
    """False when the shell has no room for it, whatever the ledger says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewAsked(ReceiverEvent):
    pair: Pair
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class SealLanded(ReceiverEvent):
    pair: Pair
    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAsked(ReceiverEvent):
    pair: Pair
    grant: GrantId
    writes: int
    bytes_written: int
    sampled: bool = False
    """It carries checksums, which are to be compared before it counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsChecked(ReceiverEvent):
    """The answer to CheckRecords: whether the sampled records are here as the writer read them at the source."""

    grant: GrantId
    intact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterReleased(ReceiverEvent):
    """The writer's own claim, after draining: it does not write under `number`, nor under any below `lowest_live`."""

    pair: Pair
    number: ReserveNumber
    lowest_live: ReserveNumber
    in_doubt: bool = False
    """Its link ended with writes of `number` on their way, which may land yet: no evidence for that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFenced(ReceiverEvent):
    """Evidence from the transport: no connection of the pair up to `epoch` can write any more."""

    pair: Pair
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterSuspected(ReceiverEvent):
    """Something outside says the writer is gone (its incarnation left the directory): take its right back now."""

    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled(ReceiverEvent):
    """The request lets go of this attempt and all before it (client gone, deadline, newer attempt)."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded(ReceiverEvent):
    """The committed sequence is finished and has dropped its own references."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveAsked(ReceiverEvent):
    """Did this attempt commit? If not it never will."""

    key: RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantTimerFired(ReceiverEvent):
    grant: GrantId
    kind: TimerKind


class ReceiverInstruction:
    """What the shell does about it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGranted(ReceiverInstruction):
    pair: Pair
    number: ReserveNumber
    grant: GrantId
    epoch: Epoch
    blocks: tuple[BlockId, ...]
    prefix: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRefused(ReceiverInstruction):
    pair: Pair
    number: ReserveNumber
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRenew(ReceiverInstruction):
    pair: Pair
    grant: GrantId
    renewed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCommit(ReceiverInstruction):
    """Answers every Commit of the grant that is still waiting."""

    pair: Pair
    grant: GrantId
    committed: bool
    corrupt: bool = False
    """Not committed because sampled records are not what the writer sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRecords(ReceiverInstruction):
    """Seal and commit are here and agree: compare the sample, then report RecordsChecked. Comes once for a grant."""

    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCorrupt(ReceiverInstruction):
    """The sample differs, in blocks that nobody but the grant's writer could have written."""

    pair: Pair
    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRelease(ReceiverInstruction):
    """Answers every Release of this number that waits. If writes were in doubt, a fence has stopped them by now."""

    pair: Pair
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerResolve(ReceiverInstruction):
    key: RequestKey
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRevoke(ReceiverInstruction):
    pair: Pair
    number: ReserveNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class FencePair(ReceiverInstruction):
    """Ask the transport for evidence about all connections of the pair up to `epoch`; ends in PairFenced, or never."""

    pair: Pair
    epoch: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest(ReceiverInstruction):
    """Committed and sealed: the prompt's KV is in the region; run it."""

    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest(ReceiverInstruction):
    """The request of a committed grant was cancelled: take its sequence out of the engine."""

    key: RequestKey
    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetGrant(ReceiverInstruction):
    """The machine knows this grant no more: the shell drops what it kept for it."""

    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class StartGrantTimer(ReceiverInstruction):
    """Arms the timer anew. A grant has one timer at a time: CloseGrant comes before one of the other kind."""

    grant: GrantId
    kind: TimerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseGrant(ReceiverInstruction):
    """It is no longer open: stop its timer, and forbid its bytes where the port can refuse them."""

    grant: GrantId


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRefused(ReceiverInstruction):
    """A message of a wrong epoch, or a seal that contradicts the commit: refused and counted."""

    pair: Pair
    what: str
    """One of a few fixed texts: a counter's name."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    live_span_max: int = LIVE_SPAN_MAX
    tombstones_max: int = 65_536
    """Cancelled requests remembered so that a late Reserve or Commit of them is refused; the oldest goes first."""
    revoke_rounds_before_fence: int = 1
    revoke_rounds_before_quarantine: int = 3


@dataclass(slots=True, kw_only=True)
class GrantEntry:
    """One grant, with what is known of its writes so far."""

    id: GrantId
    number: ReserveNumber
    key: RequestKey
    pair: Pair
    epoch: Epoch
    state: GrantState
    blocks: tuple[BlockId, ...]
    prefix: tuple[BlockId, ...]
    sealed: tuple[int, int] | None = None
    """Writes and bytes that the seal vouches for."""
    expected: tuple[int, int] | None = None
    """Writes and bytes that the Commit states."""
    commit_waits: bool = False
    check: RecordCheck = RecordCheck.NONE
    was_committed: bool = False
    revoke_rounds: int = 0
    release_waits: bool = False
    """The writer has released it with writes in doubt: the Release is answered when there is evidence."""
    story: tuple[StepTaken, ...] = ()


@dataclass(slots=True, kw_only=True)
class PairEntry:
    """The numbering of one pair: numbers that have a grant, those that were refused, the epoch of new ones."""

    epoch: Epoch = Epoch(0)
    lowest_live: ReserveNumber = ReserveNumber(0)
    refused: dict[ReserveNumber, Refusal] = field(default_factory=dict)
    by_number: dict[ReserveNumber, GrantId] = field(default_factory=dict)
    fencing: bool = False


class ReceiverMachine:
    """All grants that one receiver process has given. See the module's docstring for the contract."""

    def __init__(self, ledger: Ledger, limits: ReceiverLimits | None = None) -> None:
        self.ledger = ledger
        self.limits = limits or ReceiverLimits()
        self._grants: dict[GrantId, GrantEntry] = {}
        self._pairs: dict[Pair, PairEntry] = {}
        self._first_epoch = Epoch(0)
        self._dead_attempts: dict[RequestId, Attempt] = {}
        self._by_request: dict[RequestId, set[GrantId]] = {}
        self._out: list[ReceiverInstruction] = []
        self._handlers: dict[type, Callable[..., None]] = {
            ReserveAsked: self._reserve,
            RenewAsked: self._renew,
            SealLanded: self._seal,
            CommitAsked: self._commit,
            RecordsChecked: self._checked,
            WriterReleased: self._released,
            PairFenced: self._fenced,
            WriterSuspected: lambda e: self._start_fence(e.pair),
            RequestCancelled: lambda e: self._cancel(e.key),
            RequestEnded: self._ended,
            ResolveAsked: self._resolve,
            GrantTimerFired: self._timer,
        }

    def handle(self, event: ReceiverEvent) -> list[ReceiverInstruction]:
        self._out = []
        self._handlers[type(event)](event)
        return self._out

    def take_over(self, grant_id: GrantId) -> bool:
        """Pass the references of a committed grant's blocks to the caller; the promise stays under the grant's id.
        False, with nothing done, when its request has ended already."""
        grant = self._grants.get(grant_id)
        if grant is None or grant.state is not GrantState.COMMITTED:
            return False
        grant.blocks = grant.prefix = ()
        return True

    def forget_pair(self, pair: Pair) -> list[ReceiverInstruction]:
        """Forget a fenced pair whose writer is gone, as far as is known. Does nothing while a grant of it lives.

        No epoch is given twice: a returning writer that sees a later one knows that it was fenced. Without that sign it
        would wait for ever for its writes in doubt, and its numbers could not move on."""
        self._out = []
        if pair in self._pairs and self.is_quiet(pair):
            for grant in self._grants_of(pair):
                self._forget(grant)
            self._first_epoch = max(self._first_epoch, self._pairs.pop(pair).epoch)
        return self._out

    # Questions. They change nothing.

    @property
    def entries(self) -> Mapping[GrantId, GrantEntry]:
        """Every grant that is known, to be read only."""
        return self._grants

    def epoch(self, pair: Pair) -> Epoch:
        """The epoch that new connections of the pair carry."""
        return self._pair(pair).epoch

    def has_answered(self, pair: Pair, number: ReserveNumber) -> bool:
        """Is the answer to this Reserve stored? A repeat gets it, whatever has changed here meanwhile."""
        known = self._pairs.get(pair)
        return known is not None and (number in known.by_number or number in known.refused)

    def state_of(self, grant: GrantId) -> GrantState | None:
        known = self._grants.get(grant)
        return known.state if known else None

    def blocks_uncommitted(self, grant: GrantId, pair: Pair) -> tuple[BlockId, ...] | None:
        """The blocks that this pair's writer may have written under this grant; None where its right is over."""
        known = self._grant(grant, pair)
        return known.blocks if known is not None and known.state in UNCOMMITTED else None

    def uncommitted(self, pair: Pair) -> list[GrantEntry]:
        """This pair's grants whose writer may still write, by the numbers of their Reserves, ascending."""
        return [grant for grant in self._grants_of(pair) if grant.state in UNCOMMITTED]

    def is_quiet(self, pair: Pair) -> bool:
        """No grant of this pair owns blocks."""
        return all(g.state in (GrantState.FENCED, GrantState.RELEASED) for g in self._grants_of(pair))

    @property
    def unreleased(self) -> int:
        """Grants through which somebody owns blocks."""
        return sum(g.state not in (GrantState.FENCED, GrantState.RELEASED) for g in self._grants.values())

    def states(self) -> Counter[GrantState]:
        return Counter(grant.state for grant in self._grants.values())

    def is_over(self, key: RequestKey) -> bool:
        """True if this attempt gets no more grants: it was cancelled, a newer attempt came, or it has a grant already
        that is not being revoked."""
        if key.attempt <= self._dead_attempts.get(key.request, -1):
            return True
        grants = [self._grants[g] for g in self._by_request.get(key.request, ())]
        if any(g.key.attempt > key.attempt for g in grants):
            return True
        return any(g.key == key and (g.was_committed or g.state in OPEN) for g in grants)

    # Events.

    def _reserve(self, event: ReserveAsked) -> None:
        pair = self._pair(event.pair)
        self._raise_lowest_live(event.pair, event.lowest_live)
        known = self._grants.get(pair.by_number.get(event.number, GrantId(b"")))
        if known is not None:
            if known.state in OPEN:
                self._answer_granted(known)
            else:
                self._refuse(event, Refusal.STALE)
            return
        refusal = self._why_not(event, pair)
        if refusal is not None:
            # Remembered, so that a repeat of this Reserve does not get a grant that nobody waits for.
            if refusal not in (Refusal.STALE, Refusal.SPAN):
                pair.refused[event.number] = refusal
            self._refuse(event, refusal)
            return
        self._cancel_attempts(RequestKey(request=event.key.request, attempt=Attempt(event.key.attempt - 1)))
        blocks = tuple(self.ledger.take(event.blocks_new))
        self.ledger.hold(event.prefix)
        self.ledger.promise(event.grant, event.promise, host_backed=event.host_backed)
        self.ledger.give_writer(blocks, event.grant)
        grant = GrantEntry(
            id=event.grant,
            number=event.number,
            key=event.key,
            pair=event.pair,
            epoch=pair.epoch,
            state=GrantState.RESERVED,
            blocks=blocks,
            prefix=event.prefix,
        )
        self._grants[grant.id] = grant
        pair.by_number[grant.number] = grant.id
        self._by_request.setdefault(grant.key.request, set()).add(grant.id)
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.LEASE))
        self._answer_granted(grant)

    def _why_not(self, event: ReserveAsked, pair: PairEntry) -> Refusal | None:
        if event.number < pair.lowest_live:
            return Refusal.STALE
        if event.number in pair.refused:
            return pair.refused[event.number]
        if event.number >= pair.lowest_live + self.limits.live_span_max:
            return Refusal.SPAN
        if self.is_over(event.key):
            return Refusal.CANCELLED
        if pair.fencing:
            return Refusal.FENCING
        room = self.ledger.can_give(event.blocks_new, event.promise, host_backed=event.host_backed)
        if not event.room or not room or self.ledger.free < event.blocks_new:
            return Refusal.BUSY
        return None

    def _renew(self, event: RenewAsked) -> None:
        grant = self._grant(event.grant, event.pair)
        renewed = grant is not None and grant.state in OPEN
        if grant is not None and renewed:
            self._step(grant, Step.RENEW, GrantState.WRITING)
            self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.LEASE))
        self._out.append(AnswerRenew(pair=event.pair, grant=event.grant, renewed=renewed))

    def _seal(self, event: SealLanded) -> None:
        seal = event.seal
        grant = self._grant(seal.grant, event.pair)
        if seal.epoch != self._pair(event.pair).epoch or (grant is not None and grant.epoch != seal.epoch):
            self._out.append(CountRefused(pair=event.pair, what="seal of another epoch"))
            return
        if grant is None or grant.state not in UNCOMMITTED:
            return
        grant.sealed = (seal.writes, seal.bytes_written)
        stay = GrantState.WRITING if grant.state in OPEN else grant.state
        self._step(grant, Step.SEAL, self._after_seal_or_commit(grant, stay))

    def _commit(self, event: CommitAsked) -> None:
        grant = self._grant(event.grant, event.pair)
        if grant is None or grant.state not in UNCOMMITTED:
            committed = grant is not None and grant.was_committed
            corrupt = grant is not None and grant.check is RecordCheck.CORRUPT
            answer = AnswerCommit(pair=event.pair, grant=event.grant, committed=committed, corrupt=corrupt)
            self._out.append(answer)
            return
        grant.expected = (event.writes, event.bytes_written)
        grant.commit_waits = True
        if event.sampled and grant.check is RecordCheck.NONE:
            grant.check = RecordCheck.WANTED
        if grant.state not in OPEN:
            self._answer_commit(grant, committed=False)
        self._step(grant, Step.COMMIT, self._after_seal_or_commit(grant, grant.state))

    def _after_seal_or_commit(self, grant: GrantEntry, stay: GrantState) -> GrantState:
        """COMMITTED (or FENCED, if revoked meanwhile) once seal and commit are here and agree."""
        if grant.expected is None or grant.sealed is None:
            return stay
        if grant.sealed != grant.expected:
            # The writer has sealed, so it writes no more; but what landed is not what it meant to send.
            self._out.append(
                CountRefused(
                    pair=grant.pair,
                    what="seals that contradict the commit",
                    detail=f"sealed {grant.sealed}, committed {grant.expected} (writes, bytes)",
                )
            )
            return stay
        if grant.state not in OPEN:
            return GrantState.FENCED
        if grant.check is RecordCheck.WANTED:
            grant.check = RecordCheck.RUNNING
            self._out.append(CheckRecords(grant=grant.id))
        return stay if grant.check is RecordCheck.RUNNING else GrantState.COMMITTED

    def _checked(self, event: RecordsChecked) -> None:
        """If the grant is no longer uncommitted, its blocks may be another's by now, and the comparison is void."""
        grant = self._grants.get(event.grant)
        if grant is None or grant.state not in UNCOMMITTED:
            return
        assert grant.check is RecordCheck.RUNNING, told(*grant.story)
        if not event.intact:
            grant.check = RecordCheck.CORRUPT
            self._out.append(ReportCorrupt(pair=grant.pair, key=grant.key, grant=grant.id))
        # Seal and commit agree, so the writer writes no more, whatever its records are worth.
        commits = event.intact and grant.state in OPEN
        self._step(grant, Step.CHECKED, GrantState.COMMITTED if commits else GrantState.FENCED)

    def _released(self, event: WriterReleased) -> None:
        pair = self._pair(event.pair)
        self._raise_lowest_live(event.pair, event.lowest_live)
        grant = self._grants.get(pair.by_number.get(event.number, GrantId(b"")))
        if event.in_doubt and grant is not None and grant.state in UNCOMMITTED:
            # What is under way lands without asking for the grant, until our end of its link is closed.
            grant.release_waits = True
            self._start_fence(event.pair)
            return
        if grant is not None:
            self._writer_releases(grant)
        within_span = pair.lowest_live <= event.number < pair.lowest_live + self.limits.live_span_max
        if within_span and event.number not in pair.by_number:
            pair.refused[event.number] = Refusal.STALE
        self._out.append(AnswerRelease(pair=event.pair, number=event.number))

    def _writer_releases(self, grant: GrantEntry) -> None:
        if grant.state in UNCOMMITTED:
            self._step(grant, Step.RELEASE, GrantState.FENCED)
        if grant.state is GrantState.FENCED:
            self._step(grant, Step.RELEASE, GrantState.RELEASED)

    def _raise_lowest_live(self, pair_key: Pair, lowest_live: ReserveNumber) -> None:
        """The writer has released every number below too. What nobody owns any more is forgotten."""
        pair = self._pair(pair_key)
        if lowest_live <= pair.lowest_live:
            return
        pair.lowest_live = lowest_live
        for number in [n for n in pair.by_number if n < lowest_live]:
            grant = self._grants[pair.by_number[number]]
            self._writer_releases(grant)
            if grant.state is GrantState.RELEASED:
                self._forget(grant)
        for number in [n for n in pair.refused if n < lowest_live]:
            del pair.refused[number]

    def _fenced(self, event: PairFenced) -> None:
        pair = self._pair(event.pair)
        if event.epoch >= pair.epoch:  # evidence about an older epoch does not end the fence of this one
            pair.fencing = False
        pair.epoch = max(pair.epoch, Epoch(event.epoch + 1))
        for grant in self._grants_of(event.pair):
            if grant.state in UNCOMMITTED and grant.epoch <= event.epoch:
                self._step(grant, Step.FENCE, GrantState.FENCED)

    def _start_fence(self, pair_key: Pair) -> None:
        """A fence ends the right of the whole pair. Its open grants cannot commit, so their requests let go now."""
        pair = self._pair(pair_key)
        for grant in self._grants_of(pair_key):
            if grant.state in OPEN:
                self._step(grant, Step.SUSPECT, GrantState.REVOKING)
        if not pair.fencing:
            pair.fencing = True
            self._out.append(FencePair(pair=pair_key, epoch=pair.epoch))

    def _cancel(self, key: RequestKey) -> None:
        self._add_tombstone(key)
        self._cancel_attempts(key)

    def _cancel_attempts(self, key: RequestKey) -> None:
        for grant_id in sorted(self._by_request.get(key.request, ())):
            grant = self._grants[grant_id]
            if grant.key.attempt > key.attempt:
                continue
            if grant.state in OPEN:
                self._step(grant, Step.CANCEL, GrantState.REVOKING)
            elif grant.state is GrantState.COMMITTED:
                self._out.append(StopRequest(key=grant.key, grant=grant.id))
                self._step(grant, Step.CANCEL, GrantState.RELEASED)
                self._forget_if_over(grant)

    def _ended(self, event: RequestEnded) -> None:
        for grant_id in sorted(self._by_request.get(event.key.request, ())):
            grant = self._grants[grant_id]
            if grant.key == event.key and grant.state is GrantState.COMMITTED:
                self._step(grant, Step.END, GrantState.RELEASED)
                self._forget_if_over(grant)

    def _resolve(self, event: ResolveAsked) -> None:
        grants = [self._grants[g] for g in self._by_request.get(event.key.request, ())]
        committed = any(g.key == event.key and g.was_committed for g in grants)
        if not committed:
            self._cancel(event.key)
        self._out.append(AnswerResolve(key=event.key, committed=committed))

    def _timer(self, event: GrantTimerFired) -> None:
        grant = self._grants.get(event.grant)
        if grant is None:
            return
        if event.kind is TimerKind.LEASE and grant.state in OPEN:
            self._step(grant, Step.LEASE_TIMER, GrantState.REVOKING)
        elif event.kind is TimerKind.REVOKE and grant.state in (GrantState.REVOKING, GrantState.QUARANTINED):
            self._next_revoke_round(grant)

    def _next_revoke_round(self, grant: GrantEntry) -> None:
        limits = self.limits
        grant.revoke_rounds = min(grant.revoke_rounds + 1, limits.revoke_rounds_before_quarantine)
        self._out.append(SendRevoke(pair=grant.pair, number=grant.number))
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.REVOKE))
        late = grant.revoke_rounds >= limits.revoke_rounds_before_quarantine
        self._step(grant, Step.REVOKE_TIMER, GrantState.QUARANTINED if late else grant.state)
        if grant.revoke_rounds >= limits.revoke_rounds_before_fence:
            self._start_fence(grant.pair)

    # One step of one grant: the only place where it changes its state. Ledger, timers and answers follow from it.

    def _step(self, grant: GrantEntry, step: Step, to: GrantState) -> None:
        taken = (grant.state, step, to)
        allowed = TRANSITIONS.get(taken[:2], ())
        assert to in allowed, f"grant {grant.id.hex()}: {told(taken)} is not in the table; {told(*grant.story)}"
        grant.story = (*grant.story, taken)[-STORY_STEPS_MAX:]
        came_from, grant.state = grant.state, to
        if to is came_from:
            return
        if to is GrantState.REVOKING:
            self._enter_revoking(grant)
        elif to is GrantState.COMMITTED:
            self._enter_committed(grant)
        elif to is GrantState.QUARANTINED:
            self.ledger.quarantine(grant.blocks, grant.id)
        elif to is GrantState.FENCED:
            self._enter_fenced(grant, came_from)
        elif to is GrantState.RELEASED and came_from is GrantState.COMMITTED:
            self._drop_request(grant)

    def _enter_revoking(self, grant: GrantEntry) -> None:
        self._drop_request(grant)
        self._answer_commit(grant, committed=False)
        self._out.append(CloseGrant(grant=grant.id))
        self._out.append(SendRevoke(pair=grant.pair, number=grant.number))
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.REVOKE))

    def _enter_committed(self, grant: GrantEntry) -> None:
        grant.was_committed = True
        self.ledger.writer_gone(grant.blocks, grant.id)
        self._out.append(CloseGrant(grant=grant.id))
        self._out.append(ScheduleRequest(key=grant.key, grant=grant.id))
        self._answer_commit(grant, committed=True)

    def _enter_fenced(self, grant: GrantEntry, came_from: GrantState) -> None:
        self.ledger.writer_gone(grant.blocks, grant.id)
        if came_from in OPEN:
            self._drop_request(grant)
        self._answer_commit(grant, committed=False)
        self._out.append(CloseGrant(grant=grant.id))
        if grant.release_waits:
            grant.release_waits = False
            self._step(grant, Step.RELEASE, GrantState.RELEASED)
            self._out.append(AnswerRelease(pair=grant.pair, number=grant.number))

    def _drop_request(self, grant: GrantEntry) -> None:
        self.ledger.drop(grant.blocks)
        self.ledger.drop(grant.prefix)
        self.ledger.unpromise(grant.id)

    def _answer_commit(self, grant: GrantEntry, *, committed: bool) -> None:
        if grant.commit_waits:
            grant.commit_waits = False
            corrupt = not committed and grant.check is RecordCheck.CORRUPT
            self._out.append(AnswerCommit(pair=grant.pair, grant=grant.id, committed=committed, corrupt=corrupt))

    def _answer_granted(self, grant: GrantEntry) -> None:
        self._out.append(
            AnswerGranted(
                pair=grant.pair,
                number=grant.number,
                grant=grant.id,
                epoch=grant.epoch,
                blocks=grant.blocks,
                prefix=grant.prefix,
            )
        )

    def _refuse(self, event: ReserveAsked, refusal: Refusal) -> None:
        self._out.append(AnswerRefused(pair=event.pair, number=event.number, refusal=refusal))

    def _forget_if_over(self, grant: GrantEntry) -> None:
        if grant.state is GrantState.RELEASED and grant.number < self._pair(grant.pair).lowest_live:
            self._forget(grant)

    def _forget(self, grant: GrantEntry) -> None:
        del self._grants[grant.id]
        del self._pairs[grant.pair].by_number[grant.number]
        siblings = self._by_request[grant.key.request]
        siblings.remove(grant.id)
        if not siblings:
            del self._by_request[grant.key.request]
        self._out.append(ForgetGrant(grant=grant.id))

    def _add_tombstone(self, key: RequestKey) -> None:
        """Leave a tombstone: no Reserve or Commit of this attempt, or of one before it, is accepted from now on."""
        dead = max(key.attempt, self._dead_attempts.pop(key.request, key.attempt))
        self._dead_attempts[key.request] = dead
        while len(self._dead_attempts) > self.limits.tombstones_max:
            del self._dead_attempts[next(iter(self._dead_attempts))]

    def _pair(self, pair: Pair) -> PairEntry:
        return self._pairs.setdefault(pair, PairEntry(epoch=self._first_epoch))

    def _grant(self, grant: GrantId, pair: Pair) -> GrantEntry | None:
        """The grant, if it was given to this pair: what another pair says about it does not count."""
        known = self._grants.get(grant)
        return known if known is not None and known.pair == pair else None

    def _grants_of(self, pair: Pair) -> list[GrantEntry]:
        known = self._pairs.get(pair)
        return [] if known is None else [self._grants[grant] for _, grant in sorted(known.by_number.items())]
