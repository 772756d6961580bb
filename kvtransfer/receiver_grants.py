"""The receiver's half of the handoff protocol: who may write into which block, and when that right has ended.

A state machine without I/O: `handle(event) -> list[ReceiverInstruction]`. It mutates itself and its ledger, is owned by
one thread, knows no clock (timers are instructions and come back as events) and draws no random numbers (fresh grant
ids come with the event).

Its states and the table of their transitions are in `receiver_states`, the steps in `grant_steps`, its books in
`grant_book`.

Time may start a revocation; only evidence ends a writer's right (DESIGN I2): seals and commit, the writer's own word
(`WriterLetGo`, or a rising `lowest_live`), or the transport's (`PairFenced`). A word of writes that are adrift is none:
it starts a fence, whose evidence ends the right and answers the word. A writer's `lowest_live` stays below that number
until it has the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.ids import Attempt, Epoch, GrantId, Pair, RequestKey, ReserveNumber
from cachestore.ledger import Ledger
from kvtransfer.grant_book import GrantEntry, PairEntry, ReceiverLimits
from kvtransfer.grant_steps import GrantSteps, ReceiverProtocolError
from kvtransfer.receiver_messages import (
    AnswerCommit,
    AnswerGranted,
    AnswerLetGo,
    AnswerRefused,
    AnswerRenew,
    AnswerResolve,
    CheckRecords,
    CommitAsked,
    CountRefused,
    FencePair,
    ForgetGrant,
    GrantTimerFired,
    PairFenced,
    ReceiverEvent,
    ReceiverInstruction,
    RecordsChecked,
    Refusal,
    RenewAsked,
    ReportCorrupt,
    RequestCancelled,
    RequestEnded,
    ReserveAsked,
    ResolveAsked,
    SealLanded,
    SendRevoke,
    StartGrantTimer,
    StopRequest,
    TimerKind,
    WriterLetGo,
    WriterSuspected,
)
from kvtransfer.receiver_states import OPEN, TRANSITIONS, UNCOMMITTED, GrantState, RecordCheck, Step


class ReceiverGrants(GrantSteps):
    """All grants that one receiver process has given. See the module's docstring for the contract."""

    def __init__(self, ledger: Ledger, limits: ReceiverLimits | None = None) -> None:
        super().__init__(ledger, limits or ReceiverLimits())
        self._handlers: dict[type, Callable[..., None]] = {
            ReserveAsked: self._reserve,
            RenewAsked: self._renew,
            SealLanded: self._seal,
            CommitAsked: self._commit,
            RecordsChecked: self._checked,
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

    def take_over(self, grant_id: GrantId) -> bool:
        """Pass the references of a committed grant's blocks to the caller; the promise stays under the grant's id.

        The grant itself lives on until its request ends. False, with nothing done, when that has happened already.
        """
        grant = self._grants.get(grant_id)
        if grant is None or grant.state is not GrantState.COMMITTED:
            return False
        grant.blocks = grant.prefix = ()
        return True

    def forget_pair(self, pair: Pair) -> list[ReceiverInstruction]:
        """Drop the books of a fenced pair whose writer is gone, as far as is known; does nothing while a grant of it
        lives. Should the writer come back it connects anew, in an epoch that it has not had."""
        self._out = []
        state = self._pairs.get(pair)
        if state is not None and self.is_quiet(pair):
            for grant in self._grants_of(state):
                self._forget(grant)
            self._forget_pair(pair)
        return self._out

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
        self._enter(grant)
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
        grant = self._grant(event.grant, event.pair)
        if event.epoch != self._pair(event.pair).epoch or (grant is not None and grant.epoch != event.epoch):
            self._out.append(CountRefused(pair=event.pair, what="seal of another epoch"))
            return
        if grant is None or grant.state not in UNCOMMITTED:
            return
        grant.seals[event.channel] = (event.writes, event.bytes_written)
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
        grant.expected = (event.channels, event.writes, event.bytes_written)
        grant.commit_waits = True
        if event.sampled and grant.check is RecordCheck.NONE:
            grant.check = RecordCheck.WANTED
        if grant.state not in OPEN:
            self._answer_commit(grant, committed=False)
        self._step(grant, Step.COMMIT, self._after_seal_or_commit(grant, grant.state))

    def _after_seal_or_commit(self, grant: GrantEntry, stay: GrantState) -> GrantState:
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
        if grant.state not in OPEN:
            return GrantState.FENCED
        if grant.check is RecordCheck.WANTED:
            grant.check = RecordCheck.RUNNING
            self._out.append(CheckRecords(pair=grant.pair, key=grant.key, grant=grant.id))
        return stay if grant.check is RecordCheck.RUNNING else GrantState.COMMITTED

    def _checked(self, event: RecordsChecked) -> None:
        """Of a grant that is no longer uncommitted the blocks may be another's by now: what was read says nothing."""
        grant = self._grants.get(event.grant)
        if grant is None or grant.state not in UNCOMMITTED:
            return
        assert grant.check is RecordCheck.RUNNING, grant.story
        if not event.intact:
            grant.check = RecordCheck.CORRUPT
            self._out.append(ReportCorrupt(pair=grant.pair, key=grant.key, grant=grant.id))
        # Seals and commit agree, so the writer writes no more, whatever its records are worth.
        commits = event.intact and grant.state in OPEN
        self._step(grant, Step.CHECKED, GrantState.COMMITTED if commits else GrantState.FENCED)

    def _let_go(self, event: WriterLetGo) -> None:
        pair = self._pair(event.pair)
        self._raise_lowest_live(event.pair, event.lowest_live)
        grant = self._grants.get(pair.by_number.get(event.number, GrantId(b"")))
        if event.adrift and grant is not None and grant.state in UNCOMMITTED:
            # What is under way lands without asking for the grant, until our end of its link is closed.
            grant.let_go_waits = True
            self._start_fence(event.pair)
            return
        self._writer_let_go(event.pair, event.number)
        within_span = pair.lowest_live <= event.number < pair.lowest_live + self.limits.live_span_max
        if within_span and event.number not in pair.by_number:
            pair.refused[event.number] = Refusal.STALE
        self._out.append(AnswerLetGo(pair=event.pair, number=event.number))

    def _writer_let_go(self, pair: Pair, number: ReserveNumber) -> None:
        grant = self._grants.get(self._pair(pair).by_number.get(number, GrantId(b"")))
        if grant is None:
            return
        if grant.state in UNCOMMITTED:
            self._step(grant, Step.LET_GO, GrantState.FENCED)
        if grant.state is GrantState.FENCED:
            self._step(grant, Step.LET_GO, GrantState.RELEASED)

    def _raise_lowest_live(self, pair_key: Pair, lowest_live: ReserveNumber) -> None:
        """Everything below is the writer's word too; what nobody owns any more is forgotten."""
        pair = self._pair(pair_key)
        if lowest_live <= pair.lowest_live:
            return
        pair.lowest_live = lowest_live
        for number in [n for n in pair.by_number if n < lowest_live]:
            self._writer_let_go(pair_key, number)
            grant = self._grants[pair.by_number[number]]
            if grant.state is GrantState.RELEASED:
                self._forget(grant)
        for number in [n for n in pair.refused if n < lowest_live]:
            del pair.refused[number]

    def _fenced(self, event: PairFenced) -> None:
        pair = self._pair(event.pair)
        pair.fencing = False
        pair.epoch = max(pair.epoch, Epoch(event.epoch + 1))
        for grant in self._grants_of(pair):
            if grant.state in UNCOMMITTED and grant.epoch <= event.epoch:
                self._step(grant, Step.FENCE, GrantState.FENCED)

    def _suspected(self, event: WriterSuspected) -> None:
        self._start_fence(event.pair)

    def _start_fence(self, pair_key: Pair) -> None:
        """A fence takes the whole pair's right: its open grants are doomed, so their requests let go now."""
        pair = self._pair(pair_key)
        for grant in self._grants_of(pair):
            if grant.state in OPEN:
                self._step(grant, Step.SUSPECT, GrantState.REVOKING)
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
            self._bury(event.key)
            self._cancel_attempts(event.key)
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
        self._out.append(SendRevoke(pair=grant.pair, number=grant.number, grant=grant.id))
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.REVOKE))
        late = grant.revoke_rounds >= limits.revoke_rounds_before_quarantine
        self._step(grant, Step.REVOKE_TIMER, GrantState.QUARANTINED if late else grant.state)
        if grant.revoke_rounds >= limits.revoke_rounds_before_fence:
            self._start_fence(grant.pair)

    # Small helpers.

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
        self._strike_out(grant)
        self._out.append(ForgetGrant(grant=grant.id))


__all__ = [
    "TRANSITIONS",
    "GrantState",
    "ReceiverGrants",
    "ReceiverLimits",
    "ReceiverProtocolError",
    "Step",
]
