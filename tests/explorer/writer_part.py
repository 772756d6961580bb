"""The writer side of the product: one process's machine for the pair with the receiver at hand, and its promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.ids import Epoch, GrantId, ReserveNumber
from kvtransfer.protocol.receiver import CommitAsked, RenewAsked, ReserveAsked, WriterReleased
from kvtransfer.protocol.writer import (
    AllPosted,
    AnswerRevoke,
    CommitAnswered,
    CommitUnanswered,
    GiveUp,
    HandoffAsked,
    HandoffEnd,
    PeerGone,
    ReleaseAnswered,
    ReleaseSources,
    ReleaseUnanswered,
    ReportEnd,
    ReserveGranted,
    ReserveRefused,
    ReserveUnanswered,
    RevokeAsked,
    SendCommit,
    SendRelease,
    SendReserve,
    SendSeal,
    StartWriting,
    WriterInstruction,
    WriterMachine,
    WriterState,
    WriterStep,
    WritesCompleted,
    WritesInDoubt,
    WritesPosted,
)
from tests.explorer.bounds import BYTES_PER_WRITE, Bounds, Violation, grant_of, number_of, pair_of
from tests.explorer.codec import WriterTuple, load_writer, save_writer
from tests.explorer.messages import Message, Messages

_ACTIVE = (WriterState.ASKING, WriterState.WRITING, WriterState.COMMITTING)


@dataclass(frozen=True, slots=True)
class WriterProcess:
    """`released`: numbers whose sources were released; `reported`: whose end was. Only of known numbers."""

    writer: int
    machine: WriterTuple
    released: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False)
class WriterEffect:
    """`seals`: to be put behind the writes of their grant."""

    to: WriterInfo
    sent: int
    seals: tuple[GrantId, ...]
    instructions: list[WriterInstruction]


@dataclass(frozen=True, slots=True)
class HandoffView:
    number: ReserveNumber
    state: WriterState
    grant: GrantId
    epoch: Epoch
    writes: int
    outstanding: int
    post: int
    all_posted: int
    complete: int
    in_doubt: int
    """Said before the completion of a write that may land yet."""


@dataclass(slots=True, eq=False)
class WriterInfo:
    """One state of the writer side, with what the product asks of it again and again."""

    id: int
    state: WriterProcess
    writer: int
    handoffs: tuple[HandoffView, ...]
    by_grant: dict[GrantId, HandoffView]
    local: tuple[int, ...]
    """Events that may come at any time: give-ups and failed calls."""
    unanswered: tuple[int, ...]
    """The failed calls among them."""
    can_ask: bool
    over: bool
    effects: dict[int, WriterEffect]
    alive: int = 0
    """Messages that somebody is there to receive; `receives`: this writer."""
    receives: int = 0
    minds: int = 0
    minds_known: int = 0


class WriterPart:
    """Steps of the writer side, each carried out by the real machine once and remembered."""

    def __init__(self, bounds: Bounds, messages: Messages) -> None:
        self._bounds = bounds
        self._live_span_max = bounds.receiver_limits.live_span_max
        self._messages = messages
        self._infos: dict[WriterProcess, WriterInfo] = {}
        self.by_id: list[WriterInfo] = []
        self._started: dict[int, WriterInfo] = {}
        self.steps_seen: set[tuple[WriterState, WriterStep, WriterState]] = set()
        self._make = _recorded(bounds.writer, self.steps_seen)
        self.asks = [messages.intern(HandoffAsked(key=k)) for k in bounds.keys]
        self.peer_gone = messages.intern(PeerGone())

    def start(self, writer: int) -> WriterInfo:
        """The `writer`-th process, just started."""
        if writer not in self._started:
            machine = self._make(live_span_max=self._live_span_max)
            self._started[writer] = self._info(WriterProcess(writer, save_writer(machine)))
        return self._started[writer]

    def effect(self, info: WriterInfo, event: int) -> WriterEffect:
        known = info.effects.get(event)
        if known is None:
            known = info.effects[event] = self._carry_out(info, self._messages.event(event))
        return known

    def minds(self, info: WriterInfo) -> int:
        """Messages that may change this writer now or later, or whose answer it waits for, as a mask."""
        items = self._messages.items
        for i in range(info.minds_known, len(items)):
            if items[i].to_receiver:
                info.alive |= 1 << i
            elif items[i].writer == info.writer:
                info.alive |= 1 << i
                info.receives |= 1 << i
            if items[i].writer == info.writer and self._minds(info, items[i].event):
                info.minds |= 1 << i
        info.minds_known = len(items)
        return info.minds

    def _minds(self, info: WriterInfo, event: Any) -> bool:
        """False only where no delivery matters from here on: a handoff never returns to a state it has left."""
        match event:
            case RenewAsked(grant=grant) | CommitAsked(grant=grant):
                number = number_of(grant)
            case _:
                number = event.number
        state = next((h.state for h in info.handoffs if h.number == number), WriterState.DONE)
        match event:
            case ReserveAsked() | ReserveGranted() | ReserveRefused():
                return state is WriterState.ASKING
            case RenewAsked() | GiveUp() | RevokeAsked():
                return state in (*_ACTIVE, WriterState.DRAINING)
            case CommitAsked() | CommitAnswered():
                return state is WriterState.COMMITTING
            case WriterReleased() | ReleaseAnswered():
                return state is WriterState.RELEASING
            case _:
                raise AssertionError(event)

    def _carry_out(self, info: WriterInfo, event: Any) -> WriterEffect:
        machine = load_writer(self._make, self._live_span_max, info.state.machine)
        try:
            instructions = machine.handle(event)
        except (AssertionError, KeyError) as error:
            raise Violation(f"the writer raised {type(error).__name__}: {error}") from error
        shell = _Shell(self._messages, info.state, machine, samples=self._bounds.samples)
        for instruction in instructions:
            shell.carry_out(instruction)
        return WriterEffect(self._info(shell.state()), shell.sent, tuple(shell.seals), instructions)

    def _info(self, state: WriterProcess) -> WriterInfo:
        info = self._infos.get(state)
        if info is not None:
            return info
        machine = load_writer(self._make, self._live_span_max, state.machine)
        views = tuple(self._view(row) for row in state.machine[1])
        unanswered = tuple(self._unanswered(h) for h in views if h.state in _WAITING)
        info = WriterInfo(
            id=len(self.by_id),
            state=state,
            writer=state.writer,
            handoffs=views,
            by_grant={h.grant: h for h in views if h.grant},
            # Giving up for another reason differs in what is reported and in nothing else.
            local=unanswered + tuple(self._given_up(h.number) for h in views if h.state in _ACTIVE),
            unanswered=unanswered,
            can_ask=machine.can_ask,
            over=machine.live == 0,
            effects={},
        )
        self._infos[state] = info
        self.by_id.append(info)
        return info

    def _view(self, row: tuple[Any, ...]) -> HandoffView:
        intern = self._messages.intern
        return HandoffView(
            number=row[0],
            state=row[2],
            grant=row[3],
            epoch=row[4],
            writes=row[5],
            outstanding=row[7],
            post=intern(WritesPosted(number=row[0], writes=1, bytes_written=BYTES_PER_WRITE)),
            all_posted=intern(AllPosted(number=row[0])),
            complete=intern(WritesCompleted(number=row[0], writes=1)),
            in_doubt=intern(WritesInDoubt(number=row[0])),
        )

    def _given_up(self, number: ReserveNumber) -> int:
        return self._messages.intern(GiveUp(number=number, end=HandoffEnd.CANCELLED))

    def _unanswered(self, handoff: HandoffView) -> int:
        return self._messages.intern(_WAITING[handoff.state](number=handoff.number))


_WAITING: dict[WriterState, Any] = {
    WriterState.ASKING: ReserveUnanswered,
    WriterState.COMMITTING: CommitUnanswered,
    WriterState.RELEASING: ReleaseUnanswered,
}


class _Shell:
    """Carries instructions out within the model, and holds the machine to its promises."""

    def __init__(self, messages: Messages, old: WriterProcess, machine: WriterMachine, *, samples: bool) -> None:
        self._messages = messages
        self._machine = machine
        self._samples = samples
        self._writer = old.writer
        self._pair = pair_of(old.writer)
        self._known = {row[0]: row[3] for row in old.machine[1]}
        self._released = set(old.released)
        self._reported = set(old.reported)
        self.sent = 0
        self.seals: list[GrantId] = []

    def state(self) -> WriterProcess:
        saved = save_writer(self._machine)
        rows = {row[0]: row for row in saved[1]}
        for number, grant in self._known.items():
            over = number not in rows or rows[number][2] is WriterState.RELEASING
            if over and number not in self._reported:
                raise Violation(f"handoff {number} is over and its end was not reported")
            if over and grant and number not in self._released:
                raise Violation(f"handoff {number} is over with its sources held")
        # A Release under way: whether there was a grant matters no more, and no source is held.
        self._released |= {number for number, row in rows.items() if row[2] is WriterState.RELEASING}
        return WriterProcess(
            self._writer, saved, frozenset(self._released & rows.keys()), frozenset(self._reported & rows.keys())
        )

    def carry_out(self, instruction: WriterInstruction) -> None:
        match instruction:
            case SendReserve(number=number, lowest_live=lowest_live, key=key):
                self._send(
                    ReserveAsked(
                        pair=self._pair,
                        number=number,
                        lowest_live=lowest_live,
                        key=key,
                        grant=grant_of(self._writer, number),
                        blocks_new=1,
                    )
                )
            case StartWriting(grant=grant):
                # Renewals go out all the time from here: one may be under way at any moment.
                self._send(RenewAsked(pair=self._pair, grant=grant))
            case SendSeal(seal=seal):
                self.seals.append(seal.grant)
            case SendCommit(seal=seal):
                self._send(
                    CommitAsked(
                        pair=self._pair,
                        grant=seal.grant,
                        writes=seal.writes,
                        bytes_written=seal.bytes_written,
                        sampled=self._samples,
                    )
                )
            case SendRelease(number=number, lowest_live=lowest_live, in_doubt=in_doubt):
                self._drained(number, "a Release")
                self._send(WriterReleased(pair=self._pair, number=number, lowest_live=lowest_live, in_doubt=in_doubt))
            case AnswerRevoke(number=number, in_doubt=in_doubt):
                self._drained(number, "the answer to a Revoke")
                self._send(
                    WriterReleased(pair=self._pair, number=number, lowest_live=ReserveNumber(0), in_doubt=in_doubt)
                )
            case ReleaseSources(number=number):
                self._drained(number, "the release of its sources")
                if number in self._released:
                    raise Violation(f"the sources of handoff {number} are released twice")
                self._released.add(number)
            case ReportEnd(number=number):
                if number in self._reported:
                    raise Violation(f"the end of handoff {number} is reported twice")
                self._reported.add(number)

    def _drained(self, number: ReserveNumber, what: str) -> None:
        handoff = self._machine._handoffs.get(number)
        if handoff is not None and handoff.outstanding:
            raise Violation(f"handoff {number}: {what} while {handoff.outstanding} writes are outstanding")

    def _send(self, event: Any) -> None:
        self.sent |= self._messages.bit(Message(to_receiver=True, writer=self._writer, event=event))


def _recorded(
    base: type[WriterMachine], steps_seen: set[tuple[WriterState, WriterStep, WriterState]]
) -> type[WriterMachine]:
    class Recorded(base):  # type: ignore[misc,valid-type]
        def _step(self, handoff: Any, step: WriterStep, to: WriterState) -> None:
            steps_seen.add((handoff.state, step, to))
            super()._step(handoff, step, to)

    return Recorded
