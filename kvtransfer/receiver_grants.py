"""The receiver's half of the handoff protocol: who may write into which block, and when that right has ended.

A state machine without I/O: `handle(event) -> list[ReceiverInstruction]`. It mutates itself and its ledger, is owned by
one thread, knows no clock (timers are instructions and come back as events) and draws no random numbers (fresh grant
ids come with the event).

    RESERVED   granted, nothing heard from the writer yet          WRITING    renewed or sealed at least once
    COMMITTED  sealed and committed: the writer's right is over    REVOKING   the request has let go, the writer has not
    QUARANTINED the same, and no evidence came in time             FENCED     evidence came; kept to answer repeats
    RELEASED   nobody owns anything; kept to answer repeats

Time may start a revocation; only evidence ends a writer's right (DESIGN I2): seals and commit, the writer's own word
(`WriterLetGo`, or a rising `lowest_live`), or the transport's (`PairFenced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from baton.ids import Attempt, BlockId, Epoch, GrantId, Pair, RequestId, RequestKey, ReserveNumber
from kvtransfer.grant_messages import (
    AnswerCommit,
    AnswerGranted,
    AnswerLetGo,
    AnswerRefused,
    AnswerRenew,
    AnswerResolve,
    CommitAsked,
    CountRefused,
    FencePair,
    ForgetGrant,
    GrantTimerFired,
    PairFenced,
    ReceiverEvent,
    ReceiverInstruction,
    Refusal,
    RenewAsked,
    RequestCancelled,
    RequestEnded,
    ReserveAsked,
    ResolveAsked,
    ScheduleRequest,
    SealLanded,
    SendRevoke,
    StartGrantTimer,
    StopGrantTimers,
    StopRequest,
    TimerKind,
    WriterLetGo,
    WriterSuspected,
)
from kvtransfer.ledger import Ledger


class GrantState(Enum):
    RESERVED = "RESERVED"
    WRITING = "WRITING"
    COMMITTED = "COMMITTED"
    REVOKING = "REVOKING"
    QUARANTINED = "QUARANTINED"
    FENCED = "FENCED"
    RELEASED = "RELEASED"


class Step(Enum):
    """What can happen to one grant: the columns of the transition table."""

    RENEW = "Renew"
    SEAL = "Seal"
    COMMIT = "Commit"
    LET_GO = "writer lets go"
    FENCE = "fence"
    SUSPECT = "writer suspected"
    CANCEL = "Cancel"
    END = "request ends"
    LEASE_TIMER = "lease timer"
    REVOKE_TIMER = "revoke timer"


_S = GrantState
_UNCOMMITTED = frozenset({_S.RESERVED, _S.WRITING, _S.REVOKING, _S.QUARANTINED})
_OPEN = frozenset({_S.RESERVED, _S.WRITING})

TRANSITIONS: dict[tuple[GrantState, Step], tuple[GrantState, ...]] = {
    **{(state, Step.RENEW): (_S.WRITING,) for state in _OPEN},
    **{(state, Step.SEAL): (_S.WRITING, _S.COMMITTED) for state in _OPEN},
    (_S.RESERVED, Step.COMMIT): (_S.RESERVED, _S.COMMITTED),
    (_S.WRITING, Step.COMMIT): (_S.WRITING, _S.COMMITTED),
    **{(state, Step.LET_GO): (_S.FENCED,) for state in _UNCOMMITTED},
    **{(state, Step.FENCE): (_S.FENCED,) for state in _UNCOMMITTED},
    **{(state, Step.SUSPECT): (_S.REVOKING,) for state in _OPEN},
    **{(state, Step.CANCEL): (_S.REVOKING,) for state in _OPEN},
    **{(state, Step.LEASE_TIMER): (_S.REVOKING,) for state in _OPEN},
    (_S.COMMITTED, Step.CANCEL): (_S.RELEASED,),
    (_S.COMMITTED, Step.END): (_S.RELEASED,),
    (_S.REVOKING, Step.SEAL): (_S.REVOKING, _S.FENCED),
    (_S.REVOKING, Step.COMMIT): (_S.REVOKING, _S.FENCED),
    (_S.REVOKING, Step.REVOKE_TIMER): (_S.REVOKING, _S.QUARANTINED),
    (_S.QUARANTINED, Step.SEAL): (_S.QUARANTINED, _S.FENCED),
    (_S.QUARANTINED, Step.COMMIT): (_S.QUARANTINED, _S.FENCED),
    (_S.QUARANTINED, Step.REVOKE_TIMER): (_S.QUARANTINED,),
    (_S.FENCED, Step.LET_GO): (_S.RELEASED,),
}
"""Where each step may lead. A step that a state does not list changes nothing there; a question is still answered."""


class ReceiverProtocolError(AssertionError):
    """The machine broke its own table: a bug of ours. Carries the story of the grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverLimits:
    live_span_max: int = 4096
    """Reserve numbers a writer may have between its lowest live one and its newest."""
    tombstones_max: int = 65_536
    """Cancelled requests remembered so that a late Reserve or Commit of them is refused; the oldest goes first."""
    revoke_rounds_before_fence: int = 1
    revoke_rounds_before_quarantine: int = 3
    story_steps_max: int = 24

    def __post_init__(self) -> None:
        assert 0 < self.revoke_rounds_before_fence < self.revoke_rounds_before_quarantine, self
        assert self.live_span_max > 0 and self.tombstones_max > 0, self


@dataclass(slots=True, kw_only=True)
class _Grant:
    id: GrantId
    number: ReserveNumber
    key: RequestKey
    pair: Pair
    epoch: Epoch
    state: GrantState
    blocks: tuple[BlockId, ...]
    prefix: tuple[BlockId, ...]
    seals: dict[int, tuple[int, int]] = field(default_factory=dict)
    expected: tuple[int, int, int] | None = None
    commit_waits: bool = False
    was_committed: bool = False
    revoke_rounds: int = 0
    story: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _PairState:
    epoch: Epoch = Epoch(0)
    lowest_live: ReserveNumber = ReserveNumber(0)
    refused: dict[ReserveNumber, Refusal] = field(default_factory=dict)
    by_number: dict[ReserveNumber, GrantId] = field(default_factory=dict)
    fencing: bool = False


class ReceiverGrants:
    """All grants that one receiver process has given. See the module's docstring for the contract."""

    def __init__(self, ledger: Ledger, limits: ReceiverLimits | None = None) -> None:
        self.ledger = ledger
        self.limits = limits or ReceiverLimits()
        self._grants: dict[GrantId, _Grant] = {}
        self._pairs: dict[Pair, _PairState] = {}
        self._dead_attempts: dict[RequestId, Attempt] = {}
        self._by_request: dict[RequestId, set[GrantId]] = {}
        self._out: list[ReceiverInstruction] = []
        self._handlers: dict[type, Callable[..., None]] = {
            ReserveAsked: self._reserve,
            RenewAsked: self._renew,
            SealLanded: self._seal,
            CommitAsked: self._commit,
            WriterLetGo: self._let_go,
            PairFenced: self._fenced,
            WriterSuspected: self._suspected,
            RequestCancelled: self._cancelled,
            RequestEnded: self._ended,
            ResolveAsked: self._resolve,
            GrantTimerFired: self._timer,
        }

    def handle(self, event: ReceiverEvent) -> list[ReceiverInstruction]:
        self._out = []
        self._handlers[type(event)](event)
        return self._out

    def epoch(self, pair: Pair) -> Epoch:
        """The epoch that new connections of the pair carry."""
        return self._pair(pair).epoch

    def admits_write(self, pair: Pair, epoch: Epoch, grant: GrantId) -> bool:
        """May bytes of this grant, on a connection of this epoch, land? For transports whose receiver can still refuse.

        The epoch alone does not do: after a connection broke, its writer lets go of what it had posted, while bytes
        of it may still be on their way here, in an epoch that nobody had a reason to raise.
        """
        known = self._grant(grant, pair)
        return known is not None and known.state in _UNCOMMITTED and known.epoch == epoch == self.epoch(pair)

    def state_of(self, grant: GrantId) -> GrantState | None:
        known = self._grants.get(grant)
        return known.state if known else None

    def grant_of(self, key: RequestKey) -> GrantId | None:
        """The grant of this attempt that is still known, the newest if there are several."""
        ids = [g for g in self._by_request.get(key.request, ()) if self._grants[g].key == key]
        return max(ids, key=lambda g: self._grants[g].number, default=None)

    def is_quiet(self, pair: Pair) -> bool:
        """No grant of this pair owns blocks."""
        state = self._pairs.get(pair)
        return state is None or all(g.state in (_S.FENCED, _S.RELEASED) for g in self._grants_of(state))

    @property
    def unreleased(self) -> int:
        """Grants through which somebody owns blocks."""
        return sum(g.state not in (_S.FENCED, _S.RELEASED) for g in self._grants.values())

    @property
    def known(self) -> int:
        return len(self._grants)

    def states(self) -> dict[GrantState, int]:
        counts = dict.fromkeys(GrantState, 0)
        for grant in self._grants.values():
            counts[grant.state] += 1
        return counts

    def take_over(self, grant_id: GrantId) -> bool:
        """Pass the references of a committed grant's blocks to the caller; the promise stays under the grant's id.

        The grant itself lives on until its request ends. False, with nothing done, when that has happened already.
        """
        grant = self._grants.get(grant_id)
        if grant is None or grant.state is not _S.COMMITTED:
            return False
        grant.blocks = grant.prefix = ()
        return True

    def forget_pair(self, pair: Pair) -> list[ReceiverInstruction]:
        """Drop the books of a pair whose writer process is proved dead; does nothing while a grant of it lives."""
        self._out = []
        state = self._pairs.get(pair)
        if state is not None and self.is_quiet(pair):
            for grant in self._grants_of(state):
                self._forget(grant)
            del self._pairs[pair]
        return self._out

    # One step of one grant: the only place where a grant changes its state.

    def _step(self, grant: _Grant, step: Step, to: GrantState) -> None:
        allowed = TRANSITIONS.get((grant.state, step), ())
        line = f"{grant.state.value} --{step.value}--> {to.value}"
        if to not in allowed:
            raise ReceiverProtocolError(
                f"grant {grant.id.hex()} of {grant.key}: {line} is not in the table; story: {grant.story}"
            )
        grant.story = (*grant.story, line)[-self.limits.story_steps_max :]
        came_from, grant.state = grant.state, to
        if to is came_from:
            return
        if to is _S.REVOKING:
            self._enter_revoking(grant)
        elif to is _S.COMMITTED:
            self._enter_committed(grant)
        elif to is _S.QUARANTINED:
            self.ledger.quarantine(grant.blocks, grant.id)
        elif to is _S.FENCED:
            self._enter_fenced(grant, came_from)
        elif to is _S.RELEASED and came_from is _S.COMMITTED:
            self._drop_request(grant)

    def _enter_revoking(self, grant: _Grant) -> None:
        self._drop_request(grant)
        self._answer_commit(grant, committed=False)
        self._out.append(StopGrantTimers(grant=grant.id))
        self._out.append(SendRevoke(pair=grant.pair, number=grant.number, grant=grant.id))
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.REVOKE))

    def _enter_committed(self, grant: _Grant) -> None:
        grant.was_committed = True
        self.ledger.writer_gone(grant.blocks, grant.id)
        self._out.append(StopGrantTimers(grant=grant.id))
        self._out.append(ScheduleRequest(key=grant.key, grant=grant.id))
        self._answer_commit(grant, committed=True)

    def _enter_fenced(self, grant: _Grant, came_from: GrantState) -> None:
        self.ledger.writer_gone(grant.blocks, grant.id)
        if came_from in _OPEN:
            self._drop_request(grant)
        self._answer_commit(grant, committed=False)
        self._out.append(StopGrantTimers(grant=grant.id))

    def _drop_request(self, grant: _Grant) -> None:
        self.ledger.drop(grant.blocks)
        self.ledger.drop(grant.prefix)
        self.ledger.unpromise(grant.id)

    def _answer_commit(self, grant: _Grant, *, committed: bool) -> None:
        if grant.commit_waits:
            grant.commit_waits = False
            self._out.append(AnswerCommit(pair=grant.pair, grant=grant.id, committed=committed))

    # Events.

    def _reserve(self, event: ReserveAsked) -> None:
        pair = self._pair(event.pair)
        self._raise_lowest_live(event.pair, event.lowest_live)
        known = self._grants.get(pair.by_number.get(event.number, GrantId(b"")))
        if known is not None:
            if known.state in _OPEN:
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
        grant = _Grant(
            id=event.grant,
            number=event.number,
            key=event.key,
            pair=event.pair,
            epoch=pair.epoch,
            state=_S.RESERVED,
            blocks=blocks,
            prefix=event.prefix,
        )
        self._grants[grant.id] = grant
        pair.by_number[grant.number] = grant.id
        self._by_request.setdefault(grant.key.request, set()).add(grant.id)
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.LEASE))
        self._answer_granted(grant)

    def _why_not(self, event: ReserveAsked, pair: _PairState) -> Refusal | None:
        if event.number < pair.lowest_live:
            return Refusal.STALE
        if event.number in pair.refused:
            return pair.refused[event.number]
        if event.number >= pair.lowest_live + self.limits.live_span_max:
            return Refusal.SPAN
        if self._attempt_is_over(event.key):
            return Refusal.CANCELLED
        if pair.fencing:
            return Refusal.FENCING
        room = self.ledger.can_give(event.blocks_new, event.promise, host_backed=event.host_backed)
        if not event.room or not room or self.ledger.free < event.blocks_new:
            return Refusal.BUSY
        return None

    def _attempt_is_over(self, key: RequestKey) -> bool:
        """Cancelled, overtaken by a newer attempt, or granted already: the same attempt may come again under a new
        number only once its earlier grant is doomed."""
        if key.attempt <= self._dead_attempts.get(key.request, -1):
            return True
        grants = [self._grants[g] for g in self._by_request.get(key.request, ())]
        if any(g.key.attempt > key.attempt for g in grants):
            return True
        return any(g.key == key and (g.was_committed or g.state in _OPEN) for g in grants)

    def _renew(self, event: RenewAsked) -> None:
        grant = self._grant(event.grant, event.pair)
        renewed = grant is not None and grant.state in _OPEN
        if grant is not None and renewed:
            self._step(grant, Step.RENEW, _S.WRITING)
            self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.LEASE))
        self._out.append(AnswerRenew(pair=event.pair, grant=event.grant, renewed=renewed))

    def _seal(self, event: SealLanded) -> None:
        grant = self._grant(event.grant, event.pair)
        if event.epoch != self._pair(event.pair).epoch or (grant is not None and grant.epoch != event.epoch):
            self._out.append(CountRefused(pair=event.pair, what="seal of another epoch"))
            return
        if grant is None or grant.state not in _UNCOMMITTED:
            return
        grant.seals[event.channel] = (event.writes, event.bytes_written)
        stay = _S.WRITING if grant.state in _OPEN else grant.state
        self._step(grant, Step.SEAL, self._after_seal_or_commit(grant, stay))

    def _commit(self, event: CommitAsked) -> None:
        grant = self._grant(event.grant, event.pair)
        if grant is None or grant.state not in _UNCOMMITTED:
            committed = grant is not None and grant.was_committed
            self._out.append(AnswerCommit(pair=event.pair, grant=event.grant, committed=committed))
            return
        grant.expected = (event.channels, event.writes, event.bytes_written)
        grant.commit_waits = True
        if grant.state not in _OPEN:
            self._answer_commit(grant, committed=False)
        self._step(grant, Step.COMMIT, self._after_seal_or_commit(grant, grant.state))

    def _after_seal_or_commit(self, grant: _Grant, stay: GrantState) -> GrantState:
        """COMMITTED (or FENCED, if revoked meanwhile) once all seals and the commit are here and agree."""
        if grant.expected is None or len(grant.seals) < grant.expected[0]:
            return stay
        sealed = (len(grant.seals), sum(w for w, _ in grant.seals.values()), sum(b for _, b in grant.seals.values()))
        if sealed != grant.expected:
            # The writer has sealed, so it writes no more; but what landed is not what it meant to send.
            self._out.append(
                CountRefused(
                    pair=grant.pair,
                    what="seals that contradict the commit",
                    detail=f"sealed {sealed}, committed {grant.expected} (channels, writes, bytes)",
                )
            )
            return stay
        return _S.COMMITTED if grant.state in _OPEN else _S.FENCED

    def _let_go(self, event: WriterLetGo) -> None:
        pair = self._pair(event.pair)
        self._raise_lowest_live(event.pair, event.lowest_live)
        self._writer_let_go(event.pair, event.number)
        within_span = pair.lowest_live <= event.number < pair.lowest_live + self.limits.live_span_max
        if within_span and event.number not in pair.by_number:
            pair.refused[event.number] = Refusal.STALE
        self._out.append(AnswerLetGo(pair=event.pair, number=event.number))

    def _writer_let_go(self, pair: Pair, number: ReserveNumber) -> None:
        grant = self._grants.get(self._pair(pair).by_number.get(number, GrantId(b"")))
        if grant is None:
            return
        if grant.state in _UNCOMMITTED:
            self._step(grant, Step.LET_GO, _S.FENCED)
        if grant.state is _S.FENCED:
            self._step(grant, Step.LET_GO, _S.RELEASED)

    def _raise_lowest_live(self, pair_key: Pair, lowest_live: ReserveNumber) -> None:
        """Everything below is the writer's word too; what nobody owns any more is forgotten."""
        pair = self._pair(pair_key)
        if lowest_live <= pair.lowest_live:
            return
        pair.lowest_live = lowest_live
        for number in [n for n in pair.by_number if n < lowest_live]:
            self._writer_let_go(pair_key, number)
            grant = self._grants[pair.by_number[number]]
            if grant.state is _S.RELEASED:
                self._forget(grant)
        for number in [n for n in pair.refused if n < lowest_live]:
            del pair.refused[number]

    def _fenced(self, event: PairFenced) -> None:
        pair = self._pair(event.pair)
        pair.fencing = False
        pair.epoch = max(pair.epoch, Epoch(event.epoch + 1))
        for grant in self._grants_of(pair):
            if grant.state in _UNCOMMITTED and grant.epoch <= event.epoch:
                self._step(grant, Step.FENCE, _S.FENCED)

    def _suspected(self, event: WriterSuspected) -> None:
        self._start_fence(event.pair)

    def _start_fence(self, pair_key: Pair) -> None:
        """A fence takes the whole pair's right: its open grants are doomed, so their requests let go now."""
        pair = self._pair(pair_key)
        for grant in self._grants_of(pair):
            if grant.state in _OPEN:
                self._step(grant, Step.SUSPECT, _S.REVOKING)
        if not pair.fencing:
            pair.fencing = True
            self._out.append(FencePair(pair=pair_key, epoch=pair.epoch))

    def _cancelled(self, event: RequestCancelled) -> None:
        self._bury(event.key)
        self._cancel_attempts(event.key)

    def _cancel_attempts(self, key: RequestKey) -> None:
        for grant_id in sorted(self._by_request.get(key.request, ())):
            grant = self._grants[grant_id]
            if grant.key.attempt > key.attempt:
                continue
            if grant.state in _OPEN:
                self._step(grant, Step.CANCEL, _S.REVOKING)
            elif grant.state is _S.COMMITTED:
                self._out.append(StopRequest(key=grant.key, grant=grant.id))
                self._step(grant, Step.CANCEL, _S.RELEASED)
                self._forget_if_over(grant)

    def _ended(self, event: RequestEnded) -> None:
        for grant_id in sorted(self._by_request.get(event.key.request, ())):
            grant = self._grants[grant_id]
            if grant.key == event.key and grant.state is _S.COMMITTED:
                self._step(grant, Step.END, _S.RELEASED)
                self._forget_if_over(grant)

    def _resolve(self, event: ResolveAsked) -> None:
        grants = [self._grants[g] for g in self._by_request.get(event.key.request, ())]
        committed = any(g.key == event.key and g.was_committed for g in grants)
        if not committed:
            self._bury(event.key)
            self._cancel_attempts(event.key)
        self._out.append(AnswerResolve(key=event.key, committed=committed))

    def _bury(self, key: RequestKey) -> None:
        """Leave a tombstone: no Reserve or Commit of this attempt, or of one before it, is accepted from now on."""
        dead = max(key.attempt, self._dead_attempts.pop(key.request, key.attempt))
        self._dead_attempts[key.request] = dead
        while len(self._dead_attempts) > self.limits.tombstones_max:
            del self._dead_attempts[next(iter(self._dead_attempts))]

    def _timer(self, event: GrantTimerFired) -> None:
        grant = self._grants.get(event.grant)
        if grant is None:
            return
        if event.kind is TimerKind.LEASE and grant.state in _OPEN:
            self._step(grant, Step.LEASE_TIMER, _S.REVOKING)
        elif event.kind is TimerKind.REVOKE and grant.state in (_S.REVOKING, _S.QUARANTINED):
            self._next_revoke_round(grant)

    def _next_revoke_round(self, grant: _Grant) -> None:
        limits = self.limits
        grant.revoke_rounds = min(grant.revoke_rounds + 1, limits.revoke_rounds_before_quarantine)
        self._out.append(SendRevoke(pair=grant.pair, number=grant.number, grant=grant.id))
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.REVOKE))
        late = grant.revoke_rounds >= limits.revoke_rounds_before_quarantine
        self._step(grant, Step.REVOKE_TIMER, _S.QUARANTINED if late else grant.state)
        if grant.revoke_rounds >= limits.revoke_rounds_before_fence:
            self._start_fence(grant.pair)

    # Small helpers.

    def _pair(self, pair: Pair) -> _PairState:
        return self._pairs.setdefault(pair, _PairState())

    def _grant(self, grant: GrantId, pair: Pair) -> _Grant | None:
        """The grant, if it was given to this pair: another pair's word about it counts for nothing."""
        known = self._grants.get(grant)
        return known if known is not None and known.pair == pair else None

    def _grants_of(self, pair: _PairState) -> list[_Grant]:
        return [self._grants[g] for _, g in sorted(pair.by_number.items())]

    def _answer_granted(self, grant: _Grant) -> None:
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

    def _forget_if_over(self, grant: _Grant) -> None:
        if grant.state is _S.RELEASED and grant.number < self._pair(grant.pair).lowest_live:
            self._forget(grant)

    def _forget(self, grant: _Grant) -> None:
        del self._grants[grant.id]
        del self._pairs[grant.pair].by_number[grant.number]
        siblings = self._by_request[grant.key.request]
        siblings.remove(grant.id)
        if not siblings:
            del self._by_request[grant.key.request]
        self._out.append(ForgetGrant(grant=grant.id))
