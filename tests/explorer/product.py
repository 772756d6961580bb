"""The product of receiver, writer, control network and data path: which steps are possible, and what must hold.

Control messages: see `messages`. Data, by profile:

CHANNEL  Writes and seals travel in order on one connection per epoch and land only if the receiver admits them. A
         connection may break at any time. Its writes then complete at the writer, but what was under way on it may
         still arrive, at any later time. A fence completes at any time.
RDMA     As CHANNEL, but all that is under way lands, until a fence of the pair has completed. Seals go behind the
         completions of their grant's writes; a write completes when it has landed, or, its connection broken, in doubt.
SHM      A posted write may be stored at any instant until it has completed, whatever the receiver thinks of it. Seals
         travel on a socket, behind the completions of their grant's writes. A fence completes when the writer's
         process is dead, or when it has closed its mapping of that epoch with nothing outstanding.

A process that is stopped is a process that takes no step, so that needs no step of its own. What has no effect on the
other side is not a step either: an answered renewal, a timer of a grant that no longer has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.ids import Epoch
from kvtransfer.protocol.receiver import PairFenced, SealLanded
from kvtransfer.protocol.writer import LinkLost, WriterState
from kvtransfer.transport import Seal
from tests.explorer.bounds import BYTES_PER_WRITE, Bounds, Profile, Violation, pair_of, writer_index, writer_of_grant
from tests.explorer.data_path import SEAL, DataPath
from tests.explorer.messages import Messages
from tests.explorer.network import Network
from tests.explorer.receiver_part import ReceiverInfo, ReceiverPart
from tests.explorer.writer_part import HandoffView, WriterInfo, WriterPart

State = tuple[int, int, int, int, int]
"""Receiver, writer, data, budget (numbers of the parts' states), network (mask). A receiver of -1 is a dead process."""
Label = tuple[str, int]
DEAD = -1


@dataclass(frozen=True, slots=True)
class Budget:
    asked: int
    crashes_left: int
    suspicions_left: int


class Product:
    """Steps and checks of the product machine of one exploration."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.shm = bounds.profile is Profile.SHM
        self.rdma = bounds.profile is Profile.RDMA
        self.all_landed = (1 << bounds.writes_per_grant) - 1
        self.messages = Messages()
        self.receivers = ReceiverPart(bounds, self.messages)
        self.writers = WriterPart(bounds, self.messages)
        self.path = (bounds.data_path or DataPath)(self.receivers, bounds.profile)
        self._network = Network(self.messages, self.receivers, self.writers, merges=bounds.merges)
        self._budget_ids: dict[Budget, int] = {}
        self.budgets: list[Budget] = []
        self.trying: Label = ("nothing", 0)
        """The step under way, for the trace of one that fails."""
        budget = Budget(asked=0, crashes_left=bounds.crashes_max, suspicions_left=bounds.suspicions_max)
        self.start: State = (
            self.receivers.start.id,
            self.writers.start(0).id,
            self.path.nothing,
            self.budget_id(budget),
            0,
        )

    def budget_id(self, budget: Budget) -> int:
        number = self._budget_ids.get(budget)
        if number is None:
            number = self._budget_ids[budget] = len(self.budgets)
            self.budgets.append(budget)
        return number

    # Safety in every state.

    def rank(self, state: State) -> tuple[tuple[int, int, int, int], tuple[int, int, int]]:
        """Of two states with the same first part, the one with more in each of the second can do all that the other
        can: messages in the network, crashes and suspicions still to come."""
        budget = self.budgets[state[3]]
        return (*state[:3], budget.asked), (state[4], budget.crashes_left, budget.suspicions_left)

    def check(self, state: State) -> None:
        """Every write that may still reach the block belongs to the one grant whose writer owns the block."""
        if state[0] == DEAD:
            return
        receiver = self.receivers.by_id[state[0]]
        if self.shm:
            for handoff in self.writers.by_id[state[1]].handoffs:
                if handoff.outstanding and handoff.grant != receiver.owner:
                    raise Violation(f"grant {handoff.grant.hex()} may still write; the block is {_whose(receiver)}")
            return
        for connection in self.path.by_id[state[2]].connections:
            for grant, index in connection.queue:
                if index == SEAL or grant == receiver.owner:
                    continue
                if self.path.admits(receiver, connection, grant):
                    raise Violation(
                        f"a write of grant {grant.hex()} is under way and would land; the block is {_whose(receiver)}"
                    )

    # Steps.

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        """All that can happen next and that changes anything (for the rest see `Network`).

        Raises Violation where a step itself breaks an invariant.
        """
        if state[0] == DEAD:
            yield from self._steps_of_orphan(state)
            return
        receiver = self.receivers.by_id[state[0]]
        writer = self.writers.by_id[state[1]]
        yield from self.deliveries(state, receiver, writer)
        yield from self._receiver_steps(state, receiver, writer)
        yield from self._writer_steps(state, receiver, writer)
        yield from self._data_steps(state, receiver, writer)
        yield from self._crashes(state, receiver, writer)

    def deliveries(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Iterator[tuple[Label, State]]:
        rest, merges = state[4], self.bounds.merges
        items = self.messages.items
        while rest:
            bit = rest & -rest
            rest ^= bit
            number = bit.bit_length() - 1
            if items[number].to_receiver:
                effect = receiver.effects.get(number)
                if not merges or effect is None or effect.to is not receiver:
                    yield ("to receiver", number), self.receiver_does(state, receiver, writer, number)
                continue
            known = writer.effects.get(number)
            if not merges or known is None or known.to is not writer:
                yield ("to writer", number), self.writer_does(state, receiver, writer, number)

    def _receiver_steps(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo
    ) -> Iterator[tuple[Label, State]]:
        merges = self.bounds.merges
        for event in (*receiver.timers, *receiver.ended):
            yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        for event in receiver.checks:
            effect = receiver.effects.get(event)
            if not merges or effect is None or effect.to is not receiver:
                yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        budget = self.budgets[state[3]]
        for events in receiver.lets_go[: budget.asked]:
            for event in events:
                effect = receiver.effects.get(event)
                if not merges or effect is None or effect.to is not receiver:
                    yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        if budget.suspicions_left:
            less = replace(budget, suspicions_left=budget.suspicions_left - 1)
            poorer = (*state[:3], self.budget_id(less), state[4])
            for event in receiver.suspects:
                yield ("receiver", event), self.receiver_does(poorer, receiver, writer, event)
        for fenced, epoch, event in receiver.fencing:
            if self.fence_may_complete(state, writer, fenced, epoch):
                yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        if self.shm:
            # The port learns of a death by itself, fence or no fence.
            for dead, event in receiver.proofs:
                if dead < writer.writer:
                    yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        if self.bounds.forgets_pairs and self.receivers.first_epoch(receiver) < self.bounds.first_epoch_max:
            for dead in receiver.writers:
                if dead < writer.writer:
                    to = self.receivers.forget_pair(receiver, dead)
                    yield ("forget pair", dead), self._now(state, to, writer, state[2], state[4])

    def _writer_steps(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Iterator[tuple[Label, State]]:
        merges = self.bounds.merges
        for event in writer.local:
            effect = writer.effects.get(event)
            if not merges or effect is None or effect.to is not writer:
                yield ("writer", event), self.writer_does(state, receiver, writer, event)
        if self.bounds.writers_give_peers_up and writer.handoffs:
            event = self.writers.peer_gone
            yield ("writer", event), self.writer_does(state, receiver, writer, event)
        budget = self.budgets[state[3]]
        if budget.asked < len(self.writers.asks) and writer.can_ask:
            event = self.writers.asks[budget.asked]
            asked = self.budget_id(replace(budget, asked=budget.asked + 1))
            yield ("writer", event), self.writer_does((*state[:3], asked, state[4]), receiver, writer, event)
        for handoff in writer.handoffs:
            if handoff.state is WriterState.WRITING:
                yield self.write_or_finish(state, receiver, writer, handoff)
            if handoff.outstanding and self.may_complete(state, handoff):
                yield ("writer", handoff.complete), self.complete(state, receiver, writer, handoff)

    def write_or_finish(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo, handoff: HandoffView
    ) -> tuple[Label, State]:
        """Post the next write, connecting for it if need be. After the last one, report AllPosted."""
        if handoff.writes == self.bounds.writes_per_grant:
            return ("writer", handoff.all_posted), self.writer_does(state, receiver, writer, handoff.all_posted)
        connected = self.path.by_id[state[2]].link(writer.writer, handoff.epoch) is not None
        if not connected and not self._may_connect(receiver, writer, handoff.epoch):
            lost = self.messages.intern(LinkLost(epoch=handoff.epoch))
            return ("writer", lost), self.lose_link(state, receiver, writer, handoff.epoch)
        item = () if self.shm else ((handoff.grant, handoff.writes),)
        posted = (*state[:2], self.path.put(state[2], writer.writer, handoff.epoch, item), *state[3:])
        return ("writer", handoff.post), self.writer_does(posted, receiver, writer, handoff.post)

    def _may_connect(self, receiver: ReceiverInfo, writer: WriterInfo, epoch: Epoch) -> bool:
        """The port takes connections of the present epoch, and none that a fence under way is about."""
        if any(w == writer.writer and fenced >= epoch for w, fenced, _ in receiver.fencing):
            return False
        return self.receivers.epoch(receiver, writer.writer) == epoch

    def may_complete(self, state: State, handoff: HandoffView) -> bool:
        """Has the transport let go of the oldest outstanding write: landed, abandoned, or its connection broken?"""
        if self.rdma:
            known = handoff.outstanding > self.path.under_way(state[2], handoff.grant, is_open=False)
            return known or handoff.state not in (WriterState.WRITING, WriterState.COMMITTING)
        if self.shm or not self.bounds.writes_land_apart:
            return True
        return handoff.outstanding > self.path.under_way(state[2], handoff.grant, is_open=True)

    def complete(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, handoff: HandoffView) -> State:
        """One write completes; in shm it is stored at the latest now, unless it was abandoned."""
        number = state[2]
        if self.rdma and handoff.outstanding <= self.path.under_way(number, handoff.grant, is_open=False):
            doubted = self.writer_does(state, receiver, writer, handoff.in_doubt)
            return self.writer_does(doubted, receiver, self.writers.by_id[doubted[1]], handoff.complete)
        if not self.shm and not self.bounds.writes_land_apart:
            number = self.path.oldest_landed(number, receiver, writer.writer, handoff.grant)
        data = self.path.by_id[number]
        given_up = handoff.state not in (WriterState.WRITING, WriterState.COMMITTING)
        if self.shm and not given_up and data.link(writer.writer, handoff.epoch) is not None:
            number = self.path.id(data.with_landed(handoff.grant, handoff.writes - handoff.outstanding))
            if handoff.state is WriterState.COMMITTING and handoff.outstanding == 1:
                number = self.path.put(number, writer.writer, handoff.epoch, ((handoff.grant, SEAL),))
        if self.rdma and handoff.state is WriterState.COMMITTING and handoff.outstanding == 1:
            number = self._seal_put(number, writer, handoff)
        return self.writer_does((*state[:2], number, *state[3:]), receiver, writer, handoff.complete)

    def _data_steps(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Iterator[tuple[Label, State]]:
        connections = self.path.by_id[state[2]].connections
        for place, connection in enumerate(connections):
            if not connection.queue:
                continue
            arrived = self.arrive(state, receiver, writer, place)
            if arrived is not None:
                yield ("arrives", place), arrived
            skipped = self.path.skipped(state[2], place, writer) if connection.open else state[2]
            if skipped != state[2]:
                yield ("skips abandoned", place), (*state[:2], skipped, *state[3:])
        epochs = {c.epoch for c in connections if c.open}
        epochs |= {h.epoch for h in writer.handoffs if h.state in (WriterState.WRITING, WriterState.COMMITTING)}
        for epoch in epochs:
            if self.bounds.links_break or not self._may_connect(receiver, writer, epoch):
                lost = self.messages.intern(LinkLost(epoch=epoch))
                yield ("writer", lost), self.lose_link(state, receiver, writer, epoch)

    def arrive(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, place: int) -> State | None:
        """What is oldest on this connection reaches the receiver (see `DataPath.arrived`). None: nothing changes."""
        connection = self.path.by_id[state[2]].connections[place]
        number, sealed = self.path.arrived(state[2], receiver, place, one=self.bounds.writes_land_apart)
        if sealed is None:
            if number == state[2]:
                return None
            return self._now(state, receiver, writer, number, state[4])
        writes = self.bounds.writes_per_grant
        seal = Seal(grant=sealed, epoch=connection.epoch, writes=writes, bytes_written=writes * BYTES_PER_WRITE)
        event = self.messages.intern(SealLanded(pair=pair_of(connection.writer), seal=seal))
        return self.receiver_does((*state[:2], number, *state[3:]), receiver, writer, event)

    def lose_link(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, epoch: Epoch) -> State:
        """The writer's connection of this epoch is gone; what is under way on it may still arrive."""
        event = self.messages.intern(LinkLost(epoch=epoch))
        broken = self.path.broken(state[2], writer.writer, epoch)
        return self.writer_does((*state[:2], broken, *state[3:]), receiver, writer, event)

    def fence_may_complete(self, state: State, writer: WriterInfo, fenced: int, epoch: Epoch) -> bool:
        if not self.shm or fenced < writer.writer:
            return True
        outstanding = sum(h.outstanding for h in writer.handoffs if h.epoch <= epoch)
        return self.path.may_leave(state[2], fenced, epoch, outstanding)

    def _crashes(self, state: State, receiver: ReceiverInfo, writer: WriterInfo) -> Iterator[tuple[Label, State]]:
        budget = self.budgets[state[3]]
        if budget.crashes_left == 0:
            return
        left = self.budget_id(replace(budget, crashes_left=budget.crashes_left - 1))
        started = self.writers.start(writer.writer + 1)
        yield (
            ("writer crashes and restarts", 0),
            self._now(
                (*state[:3], left, state[4]),
                receiver,
                started,
                self.path.broken(state[2], writer.writer, None),
                state[4],
            ),
        )
        # With the receiver's memory goes all that its old incarnation shared with anybody. The writer's machine for
        # that pair and the machine for the new one have nothing in common from here on: each is followed by itself.
        yield (
            ("receiver crashes and restarts", 0),
            (self.receivers.start.id, self.writers.start(0).id, self.path.nothing, left, 0),
        )
        to_writer = state[4] & self.writers.minds(writer) & writer.receives
        yield ("receiver crashes, its writer goes on", 0), (DEAD, state[1], self.path.nothing, state[3], to_writer)

    def _steps_of_orphan(self, state: State) -> Iterator[tuple[Label, State]]:
        """A writer whose receiver process is dead. Its writes reach nobody: a broken connection, a dead mapping."""
        writer = self.writers.by_id[state[1]]
        events = [*writer.local, self.writers.peer_gone]
        for handoff in writer.handoffs:
            if handoff.state is WriterState.WRITING:
                done = handoff.writes == self.bounds.writes_per_grant
                events.append(handoff.all_posted if done else handoff.post)
                events.append(self.messages.intern(LinkLost(epoch=handoff.epoch)))
            if handoff.outstanding:
                events.append(handoff.complete)
        rest = state[4]
        while rest:
            bit = rest & -rest
            rest ^= bit
            events.append(bit.bit_length() - 1)
        for event in events:
            self.trying = ("orphan", event)
            to = self.writers.effect(writer, event).to
            yield ("orphan", event), (DEAD, to.id, self.path.nothing, state[3], state[4] & self.writers.minds(to))

    # Carrying out.

    def _seal_put(self, number: int, writer: WriterInfo, handoff: HandoffView) -> int:
        """By RDMA a seal makes no connection of its own: where there is none it is lost."""
        if self.rdma and self.path.by_id[number].link(writer.writer, handoff.epoch) is None:
            return number
        return self.path.put(number, writer.writer, handoff.epoch, ((handoff.grant, SEAL),))

    def receiver_does(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, event: int) -> State:
        self.trying = ("receiver", event)
        fenced = self.messages.event(event)
        if self.rdma and isinstance(fenced, PairFenced):
            number = self.path.fenced(state[2], writer_index(fenced.pair), fenced.epoch)
            state = (*state[:2], number, *state[3:])
        effect = self.receivers.effect(receiver, event)
        if effect.scheduled is not None:
            landed = self.path.by_id[state[2]].landed_of(effect.scheduled)
            if landed != self.all_landed:
                raise Violation(f"grant {effect.scheduled.hex()} commits, but of its writes only {landed:b} landed")
        return self._now(state, effect.to, writer, state[2], state[4] | effect.sent)

    def writer_does(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, event: int) -> State:
        self.trying = ("writer", event)
        effect = self.writers.effect(writer, event)
        data = state[2]
        for grant in effect.seals:
            handoff = effect.to.by_grant[grant]
            if self.path.may_seal(handoff.outstanding):
                data = self._seal_put(data, writer, handoff)
        return self._now(state, receiver, effect.to, data, state[4] | effect.sent)

    def calmed(self, state: State, data: int, budget: int) -> State:
        """This state with another data path and budget, and with no message left but those of calls still repeated."""
        if state[0] == DEAD:
            return DEAD, state[1], data, budget, 0
        receiver, writer = self.receivers.by_id[state[0]], self.writers.by_id[state[1]]
        return self._now((*state[:3], budget, 0), receiver, writer, data, 0)

    def _now(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, data: int, net: int) -> State:
        completed = self._network.completed(receiver, writer, net)
        return receiver.id, writer.id, self.path.settled(data, receiver), state[3], completed


def _whose(receiver: ReceiverInfo) -> str:
    if receiver.owner is None:
        return "no writer's"
    return f"grant {receiver.owner.hex()}'s (writer {writer_of_grant(receiver.owner)})"
