"""The product of receiver, writer, control network and data path: which steps are possible, and what must hold.

Control messages: see `messages`. Data, by profile:

CHANNEL  Writes and seals travel in order on one connection per epoch and land only if the receiver admits them. A
         connection may break at any time. Its writes then complete at the writer, but what was under way on it may
         still arrive, at any later time. A fence completes at any time.
SHM      A posted write may be stored at any instant until it has completed, whatever the receiver thinks of it. Seals
         travel on a socket, behind the completions of their grant's writes. A fence completes when the writer's
         process is dead, or when it has closed its mapping of that epoch with nothing outstanding.

A process that is stopped is a process that takes no step, so that needs no step of its own. What has no effect on the
other side is not a step either: an answered renewal, a timer of a grant that no longer has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.ids import Epoch, GrantId
from kvtransfer.grant_messages import LinkLost, SealLanded
from kvtransfer.writer_grants import WriterState
from tests.explorer.bounds import BYTES_PER_WRITE, Bounds, Profile, Violation, pair_of, writer_of_grant
from tests.explorer.messages import Messages
from tests.explorer.receiver_part import ReceiverInfo, ReceiverPart
from tests.explorer.writer_part import HandoffView, WriterInfo, WriterPart

State = tuple[int, int, int, int, int]
"""Receiver, writer, data, budget (numbers of the parts' states), network (mask). A receiver of -1 is a dead process."""
Label = tuple[str, int]
DEAD = -1
SEAL = -1


@dataclass(frozen=True, slots=True)
class Connection:
    """`queue`: what is under way, oldest first: (grant, index of the write, or SEAL)."""

    writer: int
    epoch: Epoch
    open: bool
    queue: tuple[tuple[GrantId, int], ...] = ()

    def is_link(self, writer: int, epoch: Epoch) -> bool:
        """The connection on which this writer can post in this epoch."""
        return self.open and self.writer == writer and self.epoch == epoch


@dataclass(frozen=True, slots=True)
class Data:
    """Connections, and which writes of the block's present owner have landed in it."""

    connections: tuple[Connection, ...] = ()
    owner: GrantId | None = None
    landed: int = 0


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
        self.all_landed = (1 << bounds.writes_per_grant) - 1
        self.messages = Messages()
        self.receivers = ReceiverPart(bounds, self.messages)
        self.writers = WriterPart(bounds, self.messages)
        self._data_ids: dict[Data, int] = {}
        self.data: list[Data] = []
        self._budget_ids: dict[Budget, int] = {}
        self.budgets: list[Budget] = []
        self._settled_data: dict[tuple[int, int], int] = {}
        self._puts: dict[tuple[int, int, Epoch, tuple[tuple[GrantId, int], ...]], int] = {}
        self._breaks: dict[tuple[int, int, Epoch | None], int] = {}
        self._closed: dict[tuple[int, int, int], int] = {}
        self.trying: Label = ("nothing", 0)
        """The step under way, for the trace of one that fails."""
        budget = Budget(asked=0, crashes_left=bounds.crashes_max, suspicions_left=bounds.suspicions_max)
        self.no_data = self.data_id(Data())
        self.start: State = (
            self.receivers.start.id,
            self.writers.start(0).id,
            self.no_data,
            self.budget_id(budget),
            0,
        )

    def data_id(self, data: Data) -> int:
        number = self._data_ids.get(data)
        if number is None:
            number = self._data_ids[data] = len(self.data)
            self.data.append(data)
        return number

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
        for connection in self.data[state[2]].connections:
            for grant, index in connection.queue:
                if index == SEAL or grant == receiver.owner:
                    continue
                if self.receivers.admits(receiver, connection.writer, connection.epoch, grant):
                    raise Violation(
                        f"a write of grant {grant.hex()} is under way and would land; the block is {_whose(receiver)}"
                    )

    # Steps.

    def steps(self, state: State) -> Iterator[tuple[Label, State]]:
        """All that can happen next and that changes anything (`_close` has seen to the rest). Raises Violation where a step itself breaks an invariant."""
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

    def deliveries(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo
    ) -> Iterator[tuple[Label, State]]:
        rest = state[4]
        items = self.messages.items
        while rest:
            bit = rest & -rest
            rest ^= bit
            number = bit.bit_length() - 1
            if items[number].to_receiver:
                effect = receiver.effects.get(number)
                if effect is None or effect.to is not receiver:
                    yield ("to receiver", number), self.receiver_does(state, receiver, writer, number)
                continue
            told = writer.effects.get(number)
            if told is None or told.to is not writer:
                yield ("to writer", number), self.writer_does(state, receiver, writer, number)

    def _receiver_steps(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo
    ) -> Iterator[tuple[Label, State]]:
        for event in (*receiver.timers, *receiver.ended):
            yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        budget = self.budgets[state[3]]
        for events in receiver.lets_go[: budget.asked]:
            for event in events:
                effect = receiver.effects.get(event)
                if effect is None or effect.to is not receiver:
                    yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        if budget.suspicions_left:
            less = replace(budget, suspicions_left=budget.suspicions_left - 1)
            poorer = (*state[:3], self.budget_id(less), state[4])
            for event in receiver.suspects:
                yield ("receiver", event), self.receiver_does(poorer, receiver, writer, event)
        for fenced, epoch, event in receiver.fencing:
            if self.fence_may_complete(state, writer, fenced, epoch):
                yield ("receiver", event), self.receiver_does(state, receiver, writer, event)
        if self.bounds.forgets_pairs:
            for dead in receiver.writers:
                if dead < writer.writer:
                    to = self.receivers.forget_pair(receiver, dead)
                    yield ("forget pair", dead), self._now(state, to, writer, state[2], state[4])

    def _writer_steps(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo
    ) -> Iterator[tuple[Label, State]]:
        for event in writer.local:
            told = writer.effects.get(event)
            if told is None or told.to is not writer:
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
        """Post the next write, connecting for it if need be; after the last one, say so."""
        if handoff.writes == self.bounds.writes_per_grant:
            return ("writer", handoff.all_posted), self.writer_does(state, receiver, writer, handoff.all_posted)
        connected = any(c.is_link(writer.writer, handoff.epoch) for c in self.data[state[2]].connections)
        if not connected and not self._accepts_connection(receiver, writer, handoff):
            lost = self.messages.intern(LinkLost(epoch=handoff.epoch))
            return ("writer", lost), self.lose_link(state, receiver, writer, handoff.epoch)
        item = () if self.shm else ((handoff.grant, handoff.writes),)
        posted = (*state[:2], self._put(state[2], writer.writer, handoff.epoch, item), *state[3:])
        return ("writer", handoff.post), self.writer_does(posted, receiver, writer, handoff.post)

    def _accepts_connection(self, receiver: ReceiverInfo, writer: WriterInfo, handoff: HandoffView) -> bool:
        """The port takes connections of the present epoch, and none that a fence under way is about."""
        if any(w == writer.writer and epoch >= handoff.epoch for w, epoch, _ in receiver.fencing):
            return False
        return self.receivers.epoch(receiver, writer.writer) == handoff.epoch

    def may_complete(self, state: State, handoff: HandoffView) -> bool:
        """Has the transport let go of the oldest outstanding write: landed, abandoned, or its connection broken?"""
        if self.shm or not self.bounds.writes_land_apart:
            return True
        under_way = sum(
            grant == handoff.grant and index != SEAL
            for c in self.data[state[2]].connections
            if c.open
            for grant, index in c.queue
        )
        return handoff.outstanding > under_way

    def complete(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, handoff: HandoffView) -> State:
        """One write completes; in shm it is stored at the latest now, unless it was abandoned."""
        if not self.shm:
            landed = self._land_oldest(self.data[state[2]], receiver, writer, handoff)
            return self.writer_does((*state[:2], landed, *state[3:]), receiver, writer, handoff.complete)
        data = self.data[state[2]]
        linked = any(c.is_link(writer.writer, handoff.epoch) for c in data.connections)
        if linked and handoff.state in (WriterState.WRITING, WriterState.COMMITTING):
            index = handoff.writes - handoff.outstanding
            landed = self._landed(data, handoff.grant) | 1 << index
            stored = self.data_id(replace(data, owner=handoff.grant, landed=landed))
            if handoff.state is WriterState.COMMITTING and handoff.outstanding == 1:
                stored = self._put(stored, writer.writer, handoff.epoch, ((handoff.grant, SEAL),))
            state = (*state[:2], stored, *state[3:])
        return self.writer_does(state, receiver, writer, handoff.complete)

    def _land_oldest(self, data: Data, receiver: ReceiverInfo, writer: WriterInfo, handoff: HandoffView) -> int:
        """The oldest write of the handoff on its open connection, landing if it still may."""
        for place, c in enumerate(data.connections):
            if not c.open or c.writer != writer.writer:
                continue
            for at, (grant, index) in enumerate(c.queue):
                if grant == handoff.grant and index != SEAL:
                    kept = replace(c, queue=c.queue[:at] + c.queue[at + 1 :])
                    data = _replaced(data, place, kept)
                    if self.receivers.admits(receiver, c.writer, c.epoch, grant):
                        data = replace(data, owner=grant, landed=self._landed(data, grant) | 1 << index)
                    return self.data_id(data)
        return self.data_id(data)

    def _data_steps(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo
    ) -> Iterator[tuple[Label, State]]:
        data = self.data[state[2]]
        for place, connection in enumerate(data.connections):
            if connection.queue:
                arrived = self.arrive(state, receiver, writer, place)
                if arrived is not None:
                    yield ("arrives", place), arrived
                if connection.open:
                    skipped = self.skip_abandoned(data, place, writer)
                    if skipped is not None:
                        yield ("skips abandoned", place), (*state[:2], self.data_id(skipped), *state[3:])
        if self.bounds.links_break:
            epochs = {c.epoch for c in data.connections if c.open}
            epochs |= {h.epoch for h in writer.handoffs if h.state in (WriterState.WRITING, WriterState.COMMITTING)}
            for epoch in epochs:
                lost = self.messages.intern(LinkLost(epoch=epoch))
                yield ("writer", lost), self.lose_link(state, receiver, writer, epoch)

    def arrive(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, place: int) -> State | None:
        """What is oldest on this connection reaches the receiver. None: a write that it does not admit."""
        data = self.data[state[2]]
        connection = data.connections[place]
        if not self.bounds.writes_land_apart:
            return self._arrive_up_to_seal(state, receiver, writer, place)
        (grant, index), rest = connection.queue[0], connection.queue[1:]
        without = _replaced(data, place, replace(connection, queue=rest))
        if index == SEAL:
            event = self._seal_landed(connection, grant)
            return self.receiver_does((*state[:2], self.data_id(without), *state[3:]), receiver, writer, event)
        if not self.receivers.admits(receiver, connection.writer, connection.epoch, grant):
            return None
        landed = replace(without, owner=grant, landed=self._landed(data, grant) | 1 << index)
        return self._now(state, receiver, writer, self.data_id(landed), state[4])

    def _arrive_up_to_seal(
        self, state: State, receiver: ReceiverInfo, writer: WriterInfo, place: int
    ) -> State | None:
        """The next seal, and before it the writes ahead of it, all of which must be admitted.

        Writes that land by themselves change nothing that a step asks for but the completion, which takes its write
        along (see `complete`); that a write under way may land is checked in every state. One that landed before the
        receiver ceased to admit it is like one that completes unlanded: no seal behind it has an effect any more.
        """
        data = self.data[state[2]]
        connection = data.connections[place]
        for at, (grant, index) in enumerate(connection.queue):
            if index == SEAL:
                without = _replaced(data, place, replace(connection, queue=connection.queue[at + 1 :]))
                event = self._seal_landed(connection, grant)
                return self.receiver_does((*state[:2], self.data_id(without), *state[3:]), receiver, writer, event)
            if not self.receivers.admits(receiver, connection.writer, connection.epoch, grant):
                return None
            data = replace(data, owner=grant, landed=self._landed(data, grant) | 1 << index)
        return None

    def _seal_landed(self, connection: Connection, grant: GrantId) -> int:
        return self.messages.intern(
            SealLanded(
                pair=pair_of(connection.writer),
                grant=grant,
                epoch=connection.epoch,
                writes=self.bounds.writes_per_grant,
                bytes_written=self.bounds.writes_per_grant * BYTES_PER_WRITE,
            )
        )

    def skip_abandoned(self, data: Data, place: int, writer: WriterInfo) -> Data | None:
        """Writes and seal of a handoff that was given up, and that have not left yet, never leave."""
        connection = data.connections[place]
        last = connection.queue[-1][0]
        handoff = writer.by_grant.get(last)
        if handoff is not None and handoff.state in (WriterState.WRITING, WriterState.COMMITTING):
            return None
        kept = len(connection.queue)
        while kept and connection.queue[kept - 1][0] == last:
            kept -= 1
        return _replaced(data, place, replace(connection, queue=connection.queue[:kept]))

    def lose_link(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, epoch: Epoch) -> State:
        """The writer's connection of this epoch is gone; what is under way on it may still arrive."""
        event = self.messages.intern(LinkLost(epoch=epoch))
        broken = self._broken(state[2], writer.writer, epoch)
        return self.writer_does((*state[:2], broken, *state[3:]), receiver, writer, event)

    def fence_may_complete(self, state: State, writer: WriterInfo, fenced: int, epoch: Epoch) -> bool:
        if not self.shm or fenced < writer.writer:
            return True
        if any(h.outstanding and h.epoch <= epoch for h in writer.handoffs):
            return False
        connections = self.data[state[2]].connections
        return not any(c.open and c.writer == fenced and c.epoch <= epoch for c in connections)

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
                self._broken(state[2], writer.writer, None),
                state[4],
            ),
        )
        # With the receiver's memory goes all that its old incarnation shared with anybody. The writer's machine for
        # that pair and the machine for the new one have nothing in common from here on: each is followed by itself.
        yield (
            ("receiver crashes and restarts", 0),
            (self.receivers.start.id, self.writers.start(0).id, self.no_data, left, 0),
        )
        to_writer = state[4] & self.writers.minds(writer) & writer.hears
        yield ("receiver crashes, its writer goes on", 0), (DEAD, state[1], self.no_data, state[3], to_writer)

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
            yield ("orphan", event), (DEAD, to.id, self.no_data, state[3], state[4] & self.writers.minds(to))

    # Carrying out.

    def receiver_does(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, event: int) -> State:
        self.trying = ("receiver", event)
        effect = self.receivers.effect(receiver, event)
        if effect.scheduled is not None:
            self._check_commit(self.data[state[2]], effect.scheduled)
        return self._now(state, effect.to, writer, state[2], state[4] | effect.sent)

    def writer_does(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, event: int) -> State:
        self.trying = ("writer", event)
        effect = self.writers.effect(writer, event)
        data = state[2]
        for grant in effect.seals:
            handoff = effect.to.by_grant[grant]
            if not self.shm or not handoff.outstanding:
                data = self._put(data, writer.writer, handoff.epoch, ((grant, SEAL),))
        return self._now(state, receiver, effect.to, data, state[4] | effect.sent)

    def calmed(self, state: State, data: int, budget: int) -> State:
        """This state with another data path and budget, and with no message left but those of calls still repeated."""
        if state[0] == DEAD:
            return DEAD, state[1], data, budget, 0
        receiver, writer = self.receivers.by_id[state[0]], self.writers.by_id[state[1]]
        return self._now((*state[:3], budget, 0), receiver, writer, data, 0)

    def _now(self, state: State, receiver: ReceiverInfo, writer: WriterInfo, data: int, net: int) -> State:
        asked = (receiver.id, writer.id, net)
        closed = self._closed.get(asked)
        if closed is None:
            closed = self._closed[asked] = self._close(receiver, writer, net)
        return receiver.id, writer.id, self._settled(data, receiver), state[3], closed

    def _close(self, receiver: ReceiverInfo, writer: WriterInfo, net: int) -> int:
        """The network with every message added that a step sends which has no other effect, and without those that
        matter no more.

        What is possible with fewer messages in the network is possible with more. So the states before such a step
        need no visit of their own.
        """
        while True:
            minds = self.receivers.minds(receiver) | self.writers.minds(writer)
            net &= minds & writer.alive
            before = net
            for event in writer.unanswered:
                effect = self.writers.effect(writer, event)
                if effect.to is writer:
                    net |= effect.sent
            rest = net
            while rest:
                bit = rest & -rest
                rest ^= bit
                number = bit.bit_length() - 1
                if self.messages.items[number].to_receiver:
                    heard = self.receivers.effect(receiver, number)
                    net |= heard.sent if heard.to is receiver else 0
                else:
                    told = self.writers.effect(writer, number)
                    net |= told.sent if told.to is writer else 0
            # New messages may have been named meanwhile, so ask again.
            minds = self.receivers.minds(receiver) | self.writers.minds(writer)
            net &= minds & writer.alive
            if net == before:
                return net

    def _check_commit(self, data: Data, grant: GrantId) -> None:
        if self._landed(data, grant) != self.all_landed:
            raise Violation(f"grant {grant.hex()} commits, but of its writes only {self._landed(data, grant):b} landed")

    def _landed(self, data: Data, grant: GrantId) -> int:
        return data.landed if data.owner == grant else 0

    def _put(self, number: int, writer: int, epoch: Epoch, items: tuple[tuple[GrantId, int], ...]) -> int:
        """Behind all that is under way on the open connection of this epoch, which is made if there is none."""
        asked = (number, writer, epoch, items)
        put = self._puts.get(asked)
        if put is None:
            data = self.data[number]
            at = next((i for i, c in enumerate(data.connections) if c.is_link(writer, epoch)), None)
            if at is None:
                made = Connection(writer=writer, epoch=epoch, open=True, queue=items)
                put = self.data_id(replace(data, connections=(*data.connections, made)))
            else:
                longer = replace(data.connections[at], queue=data.connections[at].queue + items)
                put = self.data_id(_replaced(data, at, longer))
            self._puts[asked] = put
        return put

    def _broken(self, number: int, writer: int, epoch: Epoch | None) -> int:
        """With the writer's connection of this epoch closed; all of them for None."""
        asked = (number, writer, epoch)
        broken = self._breaks.get(asked)
        if broken is None:
            data = self.data[number]
            hit = [c.writer == writer and (epoch is None or c.epoch == epoch) for c in data.connections]
            connections = tuple(
                replace(c, open=False) if h else c for c, h in zip(data.connections, hit, strict=True)
            )
            broken = self._breaks[asked] = self.data_id(replace(data, connections=connections))
        return broken

    def _settled(self, number: int, receiver: ReceiverInfo) -> int:
        """Without what matters no more: bytes of a past owner, connections with nothing to come."""
        if number == self.no_data:
            return number
        asked = (number, receiver.id)
        settled = self._settled_data.get(asked)
        if settled is None:
            data = self.data[number]
            owner, landed = (data.owner, data.landed) if data.owner == receiver.owner else (None, 0)
            connections = tuple(c for c in data.connections if self._matters(c, receiver))
            settled = self.data_id(Data(tuple(sorted(connections, key=_order)), owner, landed))
            self._settled_data[asked] = settled
        return settled

    def _matters(self, connection: Connection, receiver: ReceiverInfo) -> bool:
        """An idle connection matters where a fence waits for its end. A broken one that the receiver admits no more,
        never: an epoch does not come back."""
        if connection.open:
            return self.shm or bool(connection.queue)
        if not connection.queue:
            return False
        grant = connection.queue[0][0]
        return self.receivers.admits(receiver, connection.writer, connection.epoch, grant)


def _order(connection: Connection) -> tuple[int, int, bool, tuple[tuple[GrantId, int], ...]]:
    return connection.writer, connection.epoch, connection.open, connection.queue


def _replaced(data: Data, place: int, connection: Connection) -> Data:
    connections = (*data.connections[:place], connection, *data.connections[place + 1 :])
    return replace(data, connections=connections)


def _whose(receiver: ReceiverInfo) -> str:
    if receiver.owner is None:
        return "no writer's"
    return f"grant {receiver.owner.hex()}'s (writer {writer_of_grant(receiver.owner)})"
