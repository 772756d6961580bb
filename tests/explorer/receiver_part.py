"""The receiver side of the product: machine, ledger, armed timers, fences under way, and what the checks remember."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.ids import BlockId, Epoch, GrantId
from cachestore.ledger import Ledger
from kvtransfer.protocol.receiver import (
    AnswerCommit,
    AnswerGranted,
    AnswerRefused,
    AnswerRelease,
    AnswerRenew,
    AnswerResolve,
    CloseGrant,
    CommitAsked,
    FencePair,
    ForgetGrant,
    GrantState,
    GrantTimerFired,
    PairFenced,
    ReceiverInstruction,
    RecordCheck,
    RecordsChecked,
    Refusal,
    RenewAsked,
    ReportCorrupt,
    RequestCancelled,
    RequestEnded,
    ReserveAsked,
    ResolveAsked,
    ScheduleRequest,
    SendRevoke,
    StartGrantTimer,
    Step,
    TimerKind,
    WriterReleased,
    WriterSuspected,
)
from kvtransfer.protocol.writer import (
    CommitAnswered,
    GiveUp,
    HandoffEnd,
    ReleaseAnswered,
    ReserveGranted,
    ReserveRefused,
    RevokeAsked,
    WriterEvent,
)
from tests.explorer.bounds import Bounds, Violation, number_of, pair_of, writer_index, writer_of_grant
from tests.explorer.codec import ReceiverTuple, load_receiver, save_receiver
from tests.explorer.messages import Message, Messages
from tests.support.grant_scripts import AdmittingReceiver

BLOCK = BlockId(0)
_OPEN = (GrantState.RESERVED, GrantState.WRITING)
_UNCOMMITTED = (*_OPEN, GrantState.REVOKING, GrantState.QUARANTINED)


@dataclass(frozen=True, slots=True)
class ReceiverState:
    """`granted`, `released`: (writer, number) that ever had a grant, whose Release was answered. `dead`: by request."""

    machine: ReceiverTuple
    timers: frozenset[tuple[GrantId, TimerKind]] = frozenset()
    fences: frozenset[tuple[int, Epoch]] = frozenset()
    granted: frozenset[tuple[int, int]] = frozenset()
    released: frozenset[tuple[int, int]] = frozenset()
    dead: frozenset[tuple[str, int]] = frozenset()


@dataclass(slots=True, eq=False)
class ReceiverEffect:
    to: ReceiverInfo
    sent: int
    scheduled: GrantId | None
    instructions: list[ReceiverInstruction]


@dataclass(slots=True, eq=False)
class ReceiverInfo:
    """One state of the receiver side, with what the product asks of it again and again."""

    id: int
    state: ReceiverState
    owner: GrantId | None
    """The grant whose writer owns the block."""
    all_over: bool
    """The block is free and no grant lives."""
    fencing: tuple[tuple[int, Epoch, int], ...]
    """Fences under way: writer, epoch, and the event of their completion."""
    timers: tuple[int, ...]
    ended: tuple[int, ...]
    checks: tuple[int, ...]
    """Results that comparisons under way may have, the good one of each first."""
    lets_go: tuple[tuple[int, ...], ...]
    """Cancel and Resolve of each key."""
    suspects: tuple[int, ...]
    proofs: tuple[tuple[int, int], ...]
    """For each writer with a grant that lives: the evidence that would end it."""
    writers: tuple[int, ...]
    fencing_flags: tuple[bool, ...]
    effects: dict[int, ReceiverEffect]
    admits: dict[tuple[int, Epoch, GrantId], bool]
    minds: int = 0
    minds_known: int = 0


class ReceiverPart:
    """Steps of the receiver side, each carried out by the real machine once and remembered."""

    def __init__(self, bounds: Bounds, messages: Messages) -> None:
        self._bounds = bounds
        self._messages = messages
        self._infos: dict[ReceiverState, ReceiverInfo] = {}
        self.by_id: list[ReceiverInfo] = []
        self.steps_seen: set[tuple[GrantState, Step, GrantState]] = set()
        self._make = _recorded(bounds.receiver, self.steps_seen)
        self.start = self._info(ReceiverState(save_receiver(self._make(Ledger(1), bounds.receiver_limits))))

    def machine(self, info: ReceiverInfo) -> AdmittingReceiver:
        """A fresh copy of the machine in this state."""
        return load_receiver(self._make, self._bounds.receiver_limits, info.state.machine)

    def effect(self, info: ReceiverInfo, event: int) -> ReceiverEffect:
        known = info.effects.get(event)
        if known is None:
            known = info.effects[event] = self._carry_out(info, self._messages.event(event))
        return known

    def admits(self, info: ReceiverInfo, writer: int, epoch: Epoch, grant: GrantId) -> bool:
        """Would a write of this grant, on a connection of this epoch, land now?"""
        asked = (writer, epoch, grant)
        known = info.admits.get(asked)
        if known is None:
            known = info.admits[asked] = self.machine(info).admits_write(pair_of(writer), epoch, grant)
        return known

    def epoch(self, info: ReceiverInfo, writer: int) -> Epoch:
        """The epoch that the port expects connections of this writer to carry."""
        pair = pair_of(writer)
        return next((p[1] for p in info.state.machine[1] if p[0] == pair), info.state.machine[4])

    def first_epoch(self, info: ReceiverInfo) -> Epoch:
        """Where the epochs of a pair begin that is new, or has been forgotten."""
        return info.state.machine[4]

    def forget_pair(self, info: ReceiverInfo, writer: int) -> ReceiverInfo:
        """`forget_pair` of a dead writer's pair, with the checks' memory of it: nobody waits for its answers."""
        machine = self.machine(info)
        machine.forget_pair(pair_of(writer))
        old = info.state
        return self._info(
            ReceiverState(
                machine=save_receiver(machine),
                timers=old.timers,
                fences=old.fences,
                granted=frozenset(g for g in old.granted if g[0] != writer),
                released=frozenset(g for g in old.released if g[0] != writer),
                dead=old.dead,
            )
        )

    def minds(self, info: ReceiverInfo) -> int:
        """Messages that may change this receiver, now or later, as a mask."""
        items = self._messages.items
        for i in range(info.minds_known, len(items)):
            if self._minds(info.state, items[i]):
                info.minds |= 1 << i
        info.minds_known = len(items)
        return info.minds

    def _minds(self, state: ReceiverState, message: Message) -> bool:
        """False only where no delivery changes the receiver from here on: grants do not come back, tombstones and
        `lowest_live` stay. Whether somebody waits for the answer is the writer's to say."""
        event = message.event
        grants = {g[0]: g for g in state.machine[0]}
        pair = pair_of(message.writer)
        lowest_live, refused, by_number = next(
            ((p[2], dict(p[3]), dict(p[4])) for p in state.machine[1] if p[0] == pair), (0, {}, {})
        )
        match event:
            case ReserveAsked():
                # What keeps an old Reserve from being granted is one of the things to be found out.
                return True
            case RenewAsked(grant=grant):
                return grant in grants and grants[grant][5] in _OPEN
            case CommitAsked(grant=grant):
                return grant in grants and grants[grant][5] in _UNCOMMITTED
            case WriterReleased(number=number) | RevokeAsked(number=number):
                # A Revoke is the writer's business, but for its acknowledgement, which is like a Release.
                claimed = event.lowest_live if isinstance(event, WriterReleased) else 0
                if claimed > lowest_live:
                    return True
                if number in by_number:
                    return grants[by_number[number]][5] in (*_UNCOMMITTED, GrantState.FENCED)
                return number >= lowest_live and refused.get(number) is not Refusal.STALE
            case _:
                return False

    def _carry_out(self, info: ReceiverInfo, event: Any) -> ReceiverEffect:
        machine = self.machine(info)
        try:
            if self._bounds.fetches and isinstance(event, ReserveAsked) and machine.ledger.free == 0:
                evict_if_idle(machine.ledger)
            instructions = machine.handle(event)
            if self._bounds.fetches:
                instructions = [*instructions, *fetched(machine, instructions)]
            machine.ledger.check()
        except AssertionError as error:
            raise Violation(f"the receiver raised {type(error).__name__}: {error}") from error
        shell = _Shell(self._messages, info.state, machine)
        shell.happened(event)
        for instruction in instructions:
            shell.carry_out(instruction)
        good = isinstance(event, RecordsChecked) and event.intact
        if self._bounds.samples and shell.scheduled is not None and not good:
            raise Violation(f"grant {shell.scheduled.hex()} commits, and its records were not found intact")
        return ReceiverEffect(self._info(shell.state()), shell.sent, shell.scheduled, instructions)

    def _info(self, state: ReceiverState) -> ReceiverInfo:
        info = self._infos.get(state)
        if info is not None:
            return info
        grants, pairs, _, _, _ = state.machine
        machine = load_receiver(self._make, self._bounds.receiver_limits, state.machine)
        intern = self._messages.intern
        lets_go = tuple((intern(RequestCancelled(key=k)), intern(ResolveAsked(key=k))) for k in self._bounds.keys)
        info = ReceiverInfo(
            id=len(self.by_id),
            state=state,
            owner=machine.ledger._writer[BLOCK],
            all_over=machine.ledger.reclaimable == 1 and machine.unreleased == 0 and not state.timers,
            fencing=tuple(
                (w, epoch, intern(PairFenced(pair=pair_of(w), epoch=epoch))) for w, epoch in sorted(state.fences)
            ),
            timers=tuple(intern(GrantTimerFired(grant=g, kind=k)) for g, k in sorted(state.timers, key=repr)),
            ended=tuple(intern(RequestEnded(key=g[2])) for g in grants if g[5] is GrantState.COMMITTED),
            checks=tuple(
                intern(RecordsChecked(grant=g[0], intact=intact))
                for g in grants
                if g[13] is RecordCheck.RUNNING
                for intact in (True, False)
            ),
            lets_go=lets_go if self._bounds.lets_go_of_requests else (),
            suspects=tuple(intern(WriterSuspected(pair=p[0])) for p in pairs),
            proofs=tuple(
                (writer_index(p[0]), intern(PairFenced(pair=p[0], epoch=p[1])))
                for p in pairs
                if any(g[3] == p[0] and g[5] in _UNCOMMITTED for g in grants)
            ),
            writers=tuple(writer_index(p[0]) for p in pairs),
            fencing_flags=tuple(p[5] for p in pairs),
            effects={},
            admits={},
        )
        self._infos[state] = info
        self.by_id.append(info)
        return info


def evict_if_idle(ledger: Ledger) -> None:
    """What making room does."""
    if ledger.idle_cached([BLOCK]):
        ledger.evict(BLOCK)


def fetched(machine: AdmittingReceiver, instructions: list[ReceiverInstruction]) -> list[ReceiverInstruction]:
    """What the shell does with a fetch that commits (node.fetching.Fetches.committed)."""
    more: list[ReceiverInstruction] = []
    for instruction in instructions:
        if isinstance(instruction, ScheduleRequest):
            blocks = machine.entries[instruction.grant].blocks
            assert machine.take_over(instruction.grant), "a fetch commits and has no blocks"
            for block in blocks:
                machine.ledger.mark_cached(block)
            machine.ledger.drop(blocks)
            more += machine.handle(RequestEnded(key=instruction.key))
    return more


class _Shell:
    """Carries instructions out within the model: timers armed, fences begun, messages sent, promises remembered."""

    def __init__(self, messages: Messages, old: ReceiverState, machine: AdmittingReceiver) -> None:
        self._messages = messages
        self._machine = machine
        self._old_grants = {g[0] for g in old.machine[0]}
        self.timers = set(old.timers)
        self.fences = set(old.fences)
        self.granted = set(old.granted)
        self.released = set(old.released)
        self.dead = dict(old.dead)
        self.sent = 0
        self.scheduled: GrantId | None = None

    def state(self) -> ReceiverState:
        return ReceiverState(
            machine=save_receiver(self._machine),
            timers=frozenset(self.timers),
            fences=frozenset(self.fences),
            granted=frozenset(self.granted),
            released=frozenset(self.released),
            dead=frozenset(self.dead.items()),
        )

    def happened(self, event: Any) -> None:
        match event:
            case PairFenced():
                self.fences.discard((writer_index(event.pair), event.epoch))
            case GrantTimerFired():
                self.timers.discard((event.grant, event.kind))
            case RequestCancelled():
                self._add_tombstone(event.key.request, event.key.attempt)

    def carry_out(self, instruction: ReceiverInstruction) -> None:
        match instruction:
            case AnswerGranted(number=number, grant=grant, epoch=epoch):
                self._granted(writer_index(instruction.pair), number, grant)
                self._send(instruction, ReserveGranted(number=number, grant=grant, epoch=epoch))
            case AnswerRefused(number=number):
                self._send(instruction, ReserveRefused(number=number))
            case AnswerRenew(grant=grant, renewed=renewed):
                if not renewed:
                    self._send(instruction, GiveUp(number=number_of(grant), end=HandoffEnd.REVOKED))
            case AnswerCommit(grant=grant, committed=committed, corrupt=corrupt):
                self._answered_commit(grant, committed)
                answer = CommitAnswered(number=number_of(grant), committed=committed, corrupt=corrupt)
                self._send(instruction, answer)
            case ReportCorrupt(grant=grant):
                if self._machine.ledger._writer[BLOCK] not in (None, grant):
                    raise Violation(f"grant {grant.hex()} is called corrupt by the bytes of another one")
            case AnswerRelease(number=number):
                self.released.add((writer_index(instruction.pair), number))
                self._send(instruction, ReleaseAnswered(number=number))
            case AnswerResolve(key=key, committed=committed):
                if not committed:
                    self._add_tombstone(key.request, key.attempt)
            case SendRevoke(number=number):
                self._send(instruction, RevokeAsked(number=number))
            case FencePair(epoch=epoch):
                self.fences.add((writer_index(instruction.pair), epoch))
            case ScheduleRequest(key=key, grant=grant):
                assert self.scheduled is None
                self.scheduled = grant
                if key.attempt <= self.dead.get(key.request, -1):
                    raise Violation(f"{key} commits after it was cancelled, or resolved as not committed")
            case StartGrantTimer(grant=grant, kind=kind):
                self.timers.add((grant, kind))
            case CloseGrant(grant=grant):
                self.timers -= {(grant, kind) for kind in TimerKind}
            case ForgetGrant(grant=grant):
                if any(timer[0] == grant for timer in self.timers):
                    raise Violation(f"grant {grant.hex()} is forgotten with a timer armed")

    def _granted(self, writer: int, number: int, grant: GrantId) -> None:
        if (writer, number) in self.released:
            raise Violation(f"number {number} of writer {writer} is granted after its Release was answered")
        if grant not in self._old_grants and (writer, number) in self.granted:
            raise Violation(f"number {number} of writer {writer} is granted twice")
        self.granted.add((writer, number))

    def _answered_commit(self, grant: GrantId, committed: bool) -> None:
        state = self._machine.state_of(grant)
        if committed and state not in (GrantState.COMMITTED, GrantState.RELEASED):
            raise Violation(f"the commit of grant {grant.hex()} is answered True in {state}")
        if not committed and state in _OPEN:
            raise Violation(f"the commit of grant {grant.hex()} is answered False, and may be accepted later")

    def _add_tombstone(self, request: str, attempt: int) -> None:
        self.dead[request] = max(attempt, self.dead.get(request, attempt))

    def _send(self, instruction: Any, event: WriterEvent) -> None:
        message = Message(to_receiver=False, writer=writer_index(instruction.pair), event=event)
        self.sent |= self._messages.bit(message)


def _recorded(
    base: type[AdmittingReceiver], steps_seen: set[tuple[GrantState, Step, GrantState]]
) -> type[AdmittingReceiver]:
    class Recorded(base):  # type: ignore[misc,valid-type]
        def _step(self, grant: Any, step: Step, to: GrantState) -> None:
            steps_seen.add((grant.state, step, to))
            super()._step(grant, step, to)

    return Recorded


__all__ = ["BLOCK", "ReceiverEffect", "ReceiverInfo", "ReceiverPart", "writer_of_grant"]
