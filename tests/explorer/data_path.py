"""What is under way between the two regions, and what has landed: the data half of a product state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.ids import Epoch, GrantId
from kvtransfer.protocol.writer import WriterState
from tests.explorer.bounds import Profile
from tests.explorer.receiver_part import ReceiverInfo, ReceiverPart
from tests.explorer.writer_part import WriterInfo

SEAL = -1
Item = tuple[GrantId, int]
"""A write of a grant, by index, or its SEAL."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One connection of one writer process; `queue` is what is under way on it, oldest first."""

    writer: int
    epoch: Epoch
    open: bool
    queue: tuple[Item, ...] = ()

    def is_link(self, writer: int, epoch: Epoch) -> bool:
        """The connection on which this writer can post in this epoch."""
        return self.open and self.writer == writer and self.epoch == epoch

    @property
    def order(self) -> tuple[int, int, bool, tuple[Item, ...]]:
        return self.writer, self.epoch, self.open, self.queue


@dataclass(frozen=True, slots=True)
class Data:
    """Connections, and which writes of the block's present owner have landed in it (a mask)."""

    connections: tuple[Connection, ...] = ()
    owner: GrantId | None = None
    landed: int = 0

    def landed_of(self, grant: GrantId) -> int:
        return self.landed if self.owner == grant else 0

    def with_landed(self, grant: GrantId, index: int) -> Data:
        return replace(self, owner=grant, landed=self.landed_of(grant) | 1 << index)

    def with_queue(self, place: int, queue: tuple[Item, ...]) -> Data:
        changed = replace(self.connections[place], queue=queue)
        return replace(self, connections=(*self.connections[:place], changed, *self.connections[place + 1 :]))

    def link(self, writer: int, epoch: Epoch) -> int | None:
        """The place of the connection on which this writer can post in this epoch."""
        return next((i for i, c in enumerate(self.connections) if c.is_link(writer, epoch)), None)


class DataPath:
    """Numbers for data states, and the steps of one that concern nobody else, each worked out once."""

    def __init__(self, receivers: ReceiverPart, profile: Profile) -> None:
        self._receivers = receivers
        self._idle_links_matter = profile is Profile.SHM
        self._rdma = profile is Profile.RDMA
        self._seals_in_order = profile is Profile.CHANNEL
        self._ids: dict[Data, int] = {}
        self.by_id: list[Data] = []
        self._settled: dict[tuple[int, int], int] = {}
        self._puts: dict[tuple[int, int, Epoch, tuple[Item, ...]], int] = {}
        self._breaks: dict[tuple[int, int, Epoch | None], int] = {}
        self._fences: dict[tuple[int, int, Epoch], int] = {}
        self.nothing = self.id(Data())

    def id(self, data: Data) -> int:
        number = self._ids.get(data)
        if number is None:
            number = self._ids[data] = len(self.by_id)
            self.by_id.append(data)
        return number

    def put(self, number: int, writer: int, epoch: Epoch, items: tuple[Item, ...]) -> int:
        """Behind all that is under way on the open connection of this epoch, which is made if there is none."""
        asked = (number, writer, epoch, items)
        put = self._puts.get(asked)
        if put is None:
            data = self.by_id[number]
            place = data.link(writer, epoch)
            if place is None:
                made = Connection(writer=writer, epoch=epoch, open=True, queue=items)
                put = self.id(replace(data, connections=(*data.connections, made)))
            else:
                put = self.id(data.with_queue(place, data.connections[place].queue + items))
            self._puts[asked] = put
        return put

    def broken(self, number: int, writer: int, epoch: Epoch | None) -> int:
        """With the writer's connection of this epoch closed; all of them for None."""
        asked = (number, writer, epoch)
        broken = self._breaks.get(asked)
        if broken is None:
            data = self.by_id[number]
            hit = [c.writer == writer and (epoch is None or c.epoch == epoch) for c in data.connections]
            connections = tuple(replace(c, open=False) if h else c for c, h in zip(data.connections, hit, strict=True))
            broken = self._breaks[asked] = self.id(replace(data, connections=connections))
        return broken

    def may_seal(self, outstanding: int) -> bool:
        """Where a seal does not travel in order behind the writes, it waits until all of them have completed."""
        return self._seals_in_order or outstanding == 0

    def may_leave(self, number: int, writer: int, epoch: Epoch, outstanding: int) -> bool:
        """May a living writer send BYE, a fence's evidence in shm? Its mappings up to this epoch are closed, and none
        of its `outstanding` writes may still be stored."""
        return outstanding == 0 and not any(
            c.open and c.writer == writer and c.epoch <= epoch for c in self.by_id[number].connections
        )

    def fenced(self, number: int, writer: int, epoch: Epoch) -> int:
        """With the receiver's end of the writer's connections up to this epoch closed: nothing lands from them."""
        asked = (number, writer, epoch)
        fenced = self._fences.get(asked)
        if fenced is None:
            data = self.by_id[number]
            left = tuple(c for c in data.connections if c.writer != writer or c.epoch > epoch)
            fenced = self._fences[asked] = self.id(replace(data, connections=left))
        return fenced

    def under_way(self, number: int, grant: GrantId, *, is_open: bool) -> int:
        """Writes of this grant on open, or on broken, connections."""
        queues = (c.queue for c in self.by_id[number].connections if c.open is is_open)
        return sum(g == grant and index != SEAL for queue in queues for g, index in queue)

    def settled(self, number: int, receiver: ReceiverInfo) -> int:
        """Without what matters no more: bytes of a past owner, connections with nothing to come."""
        if number == self.nothing:
            return number
        asked = (number, receiver.id)
        settled = self._settled.get(asked)
        if settled is None:
            data = self.by_id[number]
            owner, landed = (data.owner, data.landed) if data.owner == receiver.owner else (None, 0)
            connections = sorted((c for c in data.connections if self._matters(c, receiver)), key=lambda c: c.order)
            settled = self._settled[asked] = self.id(Data(tuple(connections), owner, landed))
        return settled

    def _matters(self, connection: Connection, receiver: ReceiverInfo) -> bool:
        """An idle connection matters where a fence waits for its end. A broken one with nothing that the receiver still
        admits, never: neither an epoch nor a grant comes back."""
        if connection.open:
            return self._idle_links_matter or bool(connection.queue)
        if self._rdma and any(index != SEAL for _, index in connection.queue):
            return True
        admits, pair = self._receivers.admits, (connection.writer, connection.epoch)
        return any(admits(receiver, *pair, grant) for grant, _ in connection.queue)

    def admits(self, receiver: ReceiverInfo, connection: Connection, grant: GrantId) -> bool:
        """Would a write of this grant land, if it came now on this connection? By RDMA as long as there is one: the
        device asks nobody."""
        return self._rdma or self._receivers.admits(receiver, connection.writer, connection.epoch, grant)

    def oldest_landed(self, number: int, receiver: ReceiverInfo, writer: int, grant: GrantId) -> int:
        """The oldest write of the grant on the writer's open connection has arrived, and landed if it still may."""
        data = self.by_id[number]
        for place, c in enumerate(data.connections):
            at = next((i for i, (g, index) in enumerate(c.queue) if g == grant and index != SEAL), None)
            if not c.open or c.writer != writer or at is None:
                continue
            index = c.queue[at][1]
            data = data.with_queue(place, c.queue[:at] + c.queue[at + 1 :])
            return self.id(data.with_landed(grant, index) if self.admits(receiver, c, grant) else data)
        return number

    def arrived(self, number: int, receiver: ReceiverInfo, place: int, *, one: bool) -> tuple[int, GrantId | None]:
        """The next seal has arrived, and before it the writes ahead of it; just the oldest item for `one`.

        Returns the data and the grant of the seal. A write that is not admitted goes to scratch.

        Writes that land without a seal behind them change nothing that a step asks for but their completion, which
        takes them along (`oldest_landed`), and that they may land is checked in every state. One that landed before
        its grant was over is like one that is refused: no seal of that grant has an effect any more.
        """
        data = self.by_id[number]
        connection = data.connections[place]
        for at, (grant, index) in enumerate(connection.queue):
            if index == SEAL:
                return self.id(data.with_queue(place, connection.queue[at + 1 :])), grant
            if self.admits(receiver, connection, grant):
                data = data.with_landed(grant, index)
            if one:
                return self.id(data.with_queue(place, connection.queue[1:])), None
        return number, None

    def skipped(self, number: int, place: int, writer: WriterInfo) -> int:
        """Writes and seal of a handoff that was given up, and that have not left yet, never leave."""
        data = self.by_id[number]
        queue = data.connections[place].queue
        last = queue[-1][0]
        handoff = writer.by_grant.get(last)
        if handoff is not None and handoff.state in (WriterState.WRITING, WriterState.COMMITTING):
            return number
        kept = len(queue)
        while kept and queue[kept - 1][0] == last:
            kept -= 1
        return self.id(data.with_queue(place, queue[:kept]))
