"""Liveness: from every reachable state, once faults stop, everything becomes free.

All that was under way is lost at that moment, and no new handoff is asked for. From then on nothing is lost, nobody
crashes, no link breaks by itself. What can happen happens in a fixed order, and what has to wait for a time limit
comes last: messages, then the data path, then the writers' and the requests' own progress, then fences of the dead,
failed calls, timers. A lease that is being renewed does not run out; a writer renews until it has posted everything,
and then for as long as it has the link on which its seal goes out. In SHM a living writer's acknowledgement of a
fence comes after all of that, so that everything must have become free without it. The last thing to hold is that no
pair is left fenced: new handoffs are possible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.ids import GrantId
from kvtransfer.protocol.receiver import GrantTimerFired, TimerKind
from kvtransfer.protocol.writer import PeerGone, ReserveUnanswered, WriterState
from tests.explorer.bounds import Violation
from tests.explorer.product import DEAD, Budget, Label, Product, State
from tests.explorer.receiver_part import ReceiverInfo
from tests.explorer.search import Counterexample, Found, no_collection
from tests.explorer.trace import step_lines, trace_to
from tests.explorer.writer_part import WriterInfo

Move = tuple[Label, State]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calm:
    """What the walks from all states have shown."""

    starts: int
    states: int
    steps_max: int

    def summary(self) -> str:
        return f"calm from {self.starts:,} of them: all free within {self.steps_max} steps"


def walk_all(found: Found) -> Calm:
    """Walk from every state that was found.

    Raises:
        Counterexample: a walk ends, or goes in a circle, with something still owned or somebody still at it.
    """
    with no_collection():
        return _walk_all(found)


def _walk_all(found: Found) -> Calm:
    walker = _Walker(found.product)
    starts = 0
    for state in found.seen:
        calm = walker.calmed(state)
        if calm not in walker.steps_left:
            starts += 1
            try:
                walker.walk(calm)
            except Violation as violation:
                trace = trace_to(found.product, found.path(state), None)
                raise Counterexample(str(violation), [*trace, "     calm", *walker.steps_from(calm)]) from violation
    return Calm(starts=starts, states=len(walker.steps_left), steps_max=max(walker.steps_left.values()))


class _Walker:
    def __init__(self, product: Product) -> None:
        self._product = product
        self._nothing_left = product.budget_id(Budget(asked=0, crashes_left=0, suspicions_left=0))
        self._calm_data: dict[int, int] = {}
        self.steps_left: dict[State, int] = {}

    def calmed(self, state: State) -> State:
        """Messages and the bytes on broken connections are lost; what they could have done was a step before."""
        number = state[2]
        data = self._calm_data.get(number)
        if data is None:
            old = self._product.path.by_id[number]
            open_ones = tuple(c for c in old.connections if c.open)
            data = self._calm_data[number] = self._product.path.id(replace(old, connections=open_ones))
        return self._product.calmed(state, data, self._nothing_left)

    def walk(self, start: State) -> None:
        path: list[State] = []
        on_path: set[State] = set()
        state = start
        while state not in self.steps_left:
            if state in on_path:
                raise Violation("once faults stop, this goes on for ever")
            path.append(state)
            on_path.add(state)
            move = self.move(state)
            if move is None:
                self._check_end(state)
                self.steps_left[state] = 0
                path.pop()
                break
            state = move[1]
        left = self.steps_left[state]
        for passed in reversed(path):
            left += 1
            self.steps_left[passed] = left

    def steps_from(self, start: State) -> list[str]:
        """The walk from here, in words, up to where it ends or comes round."""
        lines: list[str] = []
        seen: set[State] = set()
        state = start
        while state not in seen:
            seen.add(state)
            move = self.move(state)
            if move is None:
                return lines
            lines += step_lines(self._product, state, *move)
            state = move[1]
        return [*lines, "     and so on"]

    def _check_end(self, state: State) -> None:
        if not self._product.writers.by_id[state[1]].over:
            raise Violation("once faults stop, a handoff of the writer is never over")
        if state[0] == DEAD:
            return
        receiver = self._product.receivers.by_id[state[0]]
        if not receiver.all_over:
            raise Violation("once faults stop, the block never becomes free")
        if any(receiver.fencing_flags):
            raise Violation("once faults stop, a pair stays without the right to write")

    def move(self, state: State) -> Move | None:
        """The one thing that happens next; None when nothing does."""
        product = self._product
        writer = product.writers.by_id[state[1]]
        if state[0] == DEAD:
            return self._orphan_move(state, writer)
        receiver = product.receivers.by_id[state[0]]
        return (
            self._delivery(state, receiver, writer)
            or self._data_path(state, receiver, writer)
            or self._ends(state, receiver, writer)
            or self._timers(state, receiver, writer)
            or self._fence_of_the_living(state, receiver, writer)
        )

    def _delivery(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Move | None:
        return next((m for m in self._product.deliveries(state, receiver, writer) if m[1] != state), None)

    def _data_path(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Move | None:
        product = self._product
        data = product.path.by_id[state[2]]
        for place, connection in enumerate(data.connections):
            if not connection.queue:
                continue
            skipped = product.path.skipped(state[2], place, writer)
            if skipped != state[2]:
                return ("skips abandoned", place), (*state[:2], skipped, *state[3:])
            arrived = product.arrive(state, receiver, writer, place)
            if arrived is not None:
                return ("arrives", place), arrived
        for handoff in writer.handoffs:
            if handoff.outstanding and product.may_complete(state, handoff):
                return ("writer", handoff.complete), product.complete(state, receiver, writer, handoff)
        for handoff in writer.handoffs:
            if handoff.state is WriterState.WRITING:
                return product.write_or_finish(state, receiver, writer, handoff)
        return None

    def _ends(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Move | None:
        """Requests end; fences of the dead complete (and all fences, where the receiver can refuse)."""
        product = self._product
        for event in receiver.ended:
            return ("receiver", event), product.receiver_does(state, receiver, writer, event)
        for event in receiver.checks:
            to = product.receiver_does(state, receiver, writer, event)
            if to != state:
                return ("receiver", event), to
        for fenced, _, event in receiver.fencing:
            if not product.shm or fenced < writer.writer:
                return ("receiver", event), product.receiver_does(state, receiver, writer, event)
        return None

    def _timers(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Move | None:
        product = self._product
        for event in writer.unanswered:
            if isinstance(product.messages.event(event), ReserveUnanswered):
                return ("writer", event), product.writer_does(state, receiver, writer, event)
        for event in receiver.timers:
            timer = product.messages.event(event)
            assert isinstance(timer, GrantTimerFired)
            if timer.kind is TimerKind.LEASE and self._is_renewed(state, writer, timer.grant):
                continue
            to = product.receiver_does(state, receiver, writer, event)
            if to != state:
                return ("receiver", event), to
        return None

    def _is_renewed(self, state: State, writer: WriterInfo, grant: GrantId) -> bool:
        handoff = writer.by_grant.get(grant)
        if handoff is None or handoff.state is not WriterState.COMMITTING:
            return handoff is not None and handoff.state is WriterState.WRITING
        connections = self._product.path.by_id[state[2]].connections
        return any(c.is_link(writer.writer, handoff.epoch) for c in connections)

    def _fence_of_the_living(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Move | None:
        product = self._product
        for fenced, epoch, event in receiver.fencing:
            if not receiver.all_over:
                raise Violation("once faults stop, the block becomes free only by the acknowledgement of a fence")
            if product.fence_may_complete(state, writer, fenced, epoch):
                return ("receiver", event), product.receiver_does(state, receiver, writer, event)
            link = next(c for c in product.path.by_id[state[2]].connections if c.is_link(fenced, c.epoch))
            return ("writer loses link", link.epoch), product.lose_link(state, receiver, writer, link.epoch)
        return None

    def _orphan_move(self, state: State, writer: WriterInfo) -> Move | None:
        for label, to in self._product.steps(state):
            if isinstance(self._product.messages.event(label[1]), PeerGone) and to != state:
                return label, to
        for handoff in writer.handoffs:
            if handoff.outstanding:
                to_writer = self._product.writers.effect(writer, handoff.complete).to
                return ("orphan", handoff.complete), (DEAD, to_writer.id, *state[2:])
        return None
