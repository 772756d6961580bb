"""The data plane: what the shm and the tcp transport promise (`kvtransfer.transport`), over the simulated network.

tcp: frames read the source when they leave and land when they arrive, if the receiver still admits them; what is on its
way when a connection breaks may land after the writer has let go of it. Fences and ends are the receiver's own doing.
shm: the writer copies straight into the receiver's region, at its own pace and unchecked. A stopped writer goes on
copying when it is continued. Evidence is its BYE, or its death.

Bytes are really copied between regions. Which block they land in is told to `Process.landed`, the checker's ear.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import (
    DataEndpoint,
    PairBeingFenced,
    ReceiverEvents,
    Seal,
    TransportName,
    WriteOps,
    WriteRanges,
    WriterEvents,
)
from kvtransfer.transports.receiver_port import Evidence, PairFence

if TYPE_CHECKING:
    from tests.sim.cluster import Process


@dataclass(slots=True, eq=False, kw_only=True)
class Batch:
    """One post."""

    grant: GrantId
    ops: WriteOps
    writes: int
    nbytes: int
    done: bool = False


class SimPort:
    """A `ReceiverPort` of either transport."""

    def __init__(self, *, transport: TransportName, process: Process, events: ReceiverEvents) -> None:
        self.transport = transport
        self.process = process
        self.events = events
        self.closed = False
        self.address = f"{process.name}/{process.start}/{transport.value}"
        self.links: dict[int, SimLink] = {}
        """Connections that are not proved ended, by number."""
        self.allowed: dict[GrantId, tuple[Pair, Epoch, WriteRanges]] = {}
        self.pairs: dict[Pair, PairFence] = {}
        self._made = 0
        process.network.data_ports[self.address] = self
        process.ports.append(self)

    # kvtransfer.transport.ReceiverPort.

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        book = self.pairs.get(pair)
        if book is not None and book.has_fenced(epoch):
            raise PairBeingFenced(f"epoch {epoch} of this pair is being fenced")
        if book is None:
            book = self.pairs[pair] = PairFence()
        secret = book.secret(epoch)
        if secret is None:
            secret = self.process.loop.rng.randbytes(8)
            book.expect(epoch, secret)
        return DataEndpoint(transport=self.transport, address=self.address, secret=secret, epoch=epoch)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        if self.transport is TransportName.TCP:
            self.allowed[grant] = (pair, epoch, ranges)

    def forbid(self, grant: GrantId) -> bool:
        self.allowed.pop(grant, None)
        return True

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        for number in self.pairs.setdefault(pair, PairFence()).fence(epoch):
            self.links[number].fence_by_receiver(epoch)
        self.process.loop.call_soon(self._settle, pair)

    def describe(self) -> dict[str, object]:
        return {"connections": len(self.links), "grants_allowed": len(self.allowed)}

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            del self.process.network.data_ports[self.address]
            for link in self.links.values():
                link.receiver_ended()
            self.links.clear()

    # Connections.

    def opened(self, link: SimLink, secret: bytes) -> str | None:
        """A writer's hello has arrived: None, or why it is refused."""
        book = self.pairs.get(link.pair)
        if self.closed or book is None or book.secret(link.epoch) != secret:
            return "not expected"
        self._made += 1
        link.number = self._made
        self.links[link.number] = link
        book.opened(link.number, link.epoch)
        return None

    def proved(self, link: SimLink, evidence: Evidence, *, orderly: bool) -> None:
        """This connection cannot write any more."""
        if self.closed or self.links.pop(link.number, None) is None:
            return
        book = self.pairs[link.pair]
        book.closed(link.number, evidence, link.number)
        if not orderly and not book.is_fencing(link.epoch):
            self.fence(link.pair, link.epoch)
        self.process.loop.call_soon(self._settle, link.pair)

    def _settle(self, pair: Pair) -> None:
        while not self.closed and (book := self.pairs.get(pair)) is not None:
            settled = book.settled()
            if settled is None:
                if book.is_idle:
                    del self.pairs[pair]
                return
            self.events.writer_gone(pair, *settled)

    def land(self, link: SimLink, batch: Batch, data: list[bytes]) -> None:
        """Bytes reach the region."""
        region = self.process.region
        for dst, piece in zip(batch.ops.dst.tolist(), data, strict=True):
            self.process.landed(batch.grant, link.pair, dst)
            region[dst : dst + len(piece)] = piece

    def admits(self, link: SimLink, batch: Batch) -> bool:
        allowed = self.allowed.get(batch.grant)
        return (
            allowed is not None
            and allowed[:2] == (link.pair, link.epoch)
            and allowed[2].cover(batch.ops.dst, batch.ops.nbytes)
        )


class SimLink:
    """A `WriterLink`; both ends of one connection."""

    transport: ClassVar[TransportName]

    def __init__(self, *, process: Process, port: SimPort, pair: Pair, epoch: Epoch, events: WriterEvents) -> None:
        self.process = process
        self.port = port
        self.pair = pair
        self.number = 0
        self.in_use = False
        """Whoever has asked for it has it."""
        self._epoch = epoch
        self._events = events
        self._loop = process.loop
        self._queue: deque[Batch | Seal] = deque()
        self._sent: deque[Batch | Seal] = deque()
        self._abandoned: dict[GrantId, None] = {}
        self._pumping = False
        self._fenced = False
        self._ended = False
        self._closing = False
        self._arrives_s = 0.0
        self._answers_s = 0.0
        self._over: asyncio.Future[None] = process.loop.create_future()
        process.links.append(self)

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def fenced(self) -> bool:
        return self._fenced

    @property
    def idle(self) -> bool:
        return not self._queue and not self._sent

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        batch = Batch(grant=grant, ops=ops, writes=len(ops.src), nbytes=sum(ops.nbytes.tolist()))
        if self._ended or grant in self._abandoned:
            self._complete_soon(batch, copied=False)
        else:
            self._queue.append(batch)
            self._pump_soon()

    def seal(self, seal: Seal) -> None:
        if not self._ended:
            self._queue.append(seal)
            self._pump_soon()

    def abandon(self, grant: GrantId) -> None:
        self._abandoned[grant] = None
        kept: deque[Batch | Seal] = deque()
        for item in self._queue:
            if isinstance(item, Batch) and item.grant == grant:
                self._complete_soon(item, copied=False)
            else:
                kept.append(item)
        self._queue = kept

    def forget(self, grant: GrantId) -> None:
        self._abandoned.pop(grant, None)

    async def close(self) -> None:
        if not self._ended:
            self._closing = True
            self._end("closed")
        await asyncio.shield(self._over)

    def _complete_soon(self, batch: Batch, *, copied: bool) -> None:
        if not batch.done:
            batch.done = True
            self._loop.call_soon(self._events.writes_completed, batch.grant, batch.writes, batch.nbytes, copied)

    def _pump_soon(self) -> None:
        if not self._pumping and not self._ended:
            self._pumping = True
            self._loop.call_later(self.process.pace_s * 2 * self.process.network.rng.random(), self._pump)

    def _pump(self) -> None:
        raise NotImplementedError

    def _end(self, reason: str) -> None:
        raise NotImplementedError

    def _finish(self, reason: str) -> None:
        """Everything is completed and nothing is copied any more."""
        if self._over.done():
            return
        self._over.set_result(None)
        self.process.links.remove(self)
        if self.in_use and not self._closing:
            self._events.link_lost(self.pair, reason)

    # What happens to the connection from outside.

    def fence_by_receiver(self, epoch: Epoch) -> None:
        raise NotImplementedError

    def receiver_ended(self) -> None:
        """The receiving process has closed its port, or died."""
        self._tell_writer(self._end, "the receiver closed the connection or died")

    def reset(self, reason: str) -> None:
        """The network breaks it, in both directions."""
        raise NotImplementedError

    def writer_died(self) -> None:
        """The writing process has ended."""
        raise NotImplementedError

    def _tell_writer(self, callback: Any, *args: Any) -> None:
        port = self.port.process
        self._answers_s = port.network.send(port.loop, self._loop, self._answers_s, callback, *args)

    def _tell_receiver(self, callback: Any, *args: Any) -> None:
        self._arrives_s = self.process.network.send(
            self._loop, self.port.process.loop, self._arrives_s, callback, *args
        )
