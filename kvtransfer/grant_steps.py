"""The steps that a grant takes at its receiver, each with all that it brings along: ledger, timers, answers. Pure.

Which step follows from which event is in `receiver_grants`, where each may lead in `receiver_states`.
"""

from __future__ import annotations

from cachestore.ledger import Ledger
from kvtransfer.grant_book import GrantBook, GrantEntry, ReceiverLimits
from kvtransfer.receiver_messages import (
    AnswerCommit,
    AnswerLetGo,
    ReceiverInstruction,
    ScheduleRequest,
    SendRevoke,
    StartGrantTimer,
    StopGrantTimers,
    TimerKind,
)
from kvtransfer.receiver_states import OPEN, TRANSITIONS, GrantState, RecordCheck, Step


class ReceiverProtocolError(AssertionError):
    """The machine broke its own table: a bug of ours. Carries the story of the grant."""


class GrantSteps(GrantBook):
    """The one place where a grant changes its state. What is to be done goes to `_out`."""

    def __init__(self, ledger: Ledger, limits: ReceiverLimits) -> None:
        super().__init__(limits)
        self.ledger = ledger
        self._out: list[ReceiverInstruction] = []

    def _step(self, grant: GrantEntry, step: Step, to: GrantState) -> None:
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
        self._out.append(StopGrantTimers(grant=grant.id))
        self._out.append(SendRevoke(pair=grant.pair, number=grant.number, grant=grant.id))
        self._out.append(StartGrantTimer(grant=grant.id, kind=TimerKind.REVOKE))

    def _enter_committed(self, grant: GrantEntry) -> None:
        grant.was_committed = True
        self.ledger.writer_gone(grant.blocks, grant.id)
        self._out.append(StopGrantTimers(grant=grant.id))
        self._out.append(ScheduleRequest(key=grant.key, grant=grant.id))
        self._answer_commit(grant, committed=True)

    def _enter_fenced(self, grant: GrantEntry, came_from: GrantState) -> None:
        self.ledger.writer_gone(grant.blocks, grant.id)
        if came_from in OPEN:
            self._drop_request(grant)
        self._answer_commit(grant, committed=False)
        self._out.append(StopGrantTimers(grant=grant.id))
        if grant.let_go_waits:
            grant.let_go_waits = False
            self._step(grant, Step.LET_GO, GrantState.RELEASED)
            self._out.append(AnswerLetGo(pair=grant.pair, number=grant.number))

    def _drop_request(self, grant: GrantEntry) -> None:
        self.ledger.drop(grant.blocks)
        self.ledger.drop(grant.prefix)
        self.ledger.unpromise(grant.id)

    def _answer_commit(self, grant: GrantEntry, *, committed: bool) -> None:
        if grant.commit_waits:
            grant.commit_waits = False
            corrupt = not committed and grant.check is RecordCheck.CORRUPT
            self._out.append(AnswerCommit(pair=grant.pair, grant=grant.id, committed=committed, corrupt=corrupt))
