"""The two kinds of data links: tcp, whose receiver decides what lands, and shm, whose writer does."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from baton.ids import Epoch, GrantId
from kvtransfer.transport import ConnectError, Seal, TransportName
from kvtransfer.transports.receiver_port import Evidence
from kvtransfer.transports.writer_link import LinkParts
from tests.sim.data import Batch, SimLink
from tests.sim.loop import ProcessState

if TYPE_CHECKING:
    from tests.sim.cluster import Process

CONNECT_S_MAX = 2.0
DRAIN_S_MAX = 5.0
"""tcp: how long an abandoned frame may go unacknowledged before the link is ended."""
JOIN_S_MAX = 0.001
"""How long a receive thread takes to end."""


class SimTcpLink(SimLink):
    transport = TransportName.TCP

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._receiving = True

    @classmethod
    async def connect(cls, parts: LinkParts, source: Any, config: Any = None) -> SimTcpLink:
        link = await _connect(cls, parts, ConnectError)
        assert isinstance(link, SimTcpLink)
        return link

    def abandon(self, grant: GrantId) -> None:
        super().abandon(grant)
        if any(isinstance(item, Batch) and item.grant == grant for item in self._sent):
            self._loop.call_later(DRAIN_S_MAX, self._drain_deadline, grant)

    def _drain_deadline(self, grant: GrantId) -> None:
        if any(isinstance(item, Batch) and item.grant == grant for item in self._sent):
            self._end("an abandoned grant was not acknowledged in time")

    def _pump(self) -> None:
        self._pumping = False
        if self._ended or not self._queue:
            return
        source = self.process.region
        group: list[tuple[Batch | Seal, list[bytes]]] = []
        for item in self._queue:
            if isinstance(item, Batch):
                ops = item.ops
                data = [bytes(source[s : s + n]) for s, n in zip(ops.src.tolist(), ops.nbytes.tolist(), strict=True)]
                group.append((item, data))
            else:
                group.append((item, []))
        self._sent.extend(self._queue)
        self._queue.clear()
        self._tell_receiver(self._arrived, group)

    def _arrived(self, group: list[tuple[Batch | Seal, list[bytes]]]) -> None:
        """On the receiver's loop (its receive thread)."""
        if not self._receiving or self.port.closed:
            return
        landed = []
        for item, data in group:
            if isinstance(item, Seal):
                self.port.events.seal_landed(self.pair, item)
                landed.append(True)
            else:
                admitted = self.port.admits(self, item)
                if admitted:
                    self.port.land(self, item, data)
                landed.append(admitted)
        self._tell_writer(self._acknowledged, landed)

    def _acknowledged(self, landed: list[bool]) -> None:
        if self._ended:
            return
        for copied in landed:
            item = self._sent.popleft()
            if isinstance(item, Batch):
                self._complete_soon(item, copied=copied)

    def _end(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        for item in (*self._sent, *self._queue):
            if isinstance(item, Batch):
                self._complete_soon(item, copied=False)
        self._sent.clear()
        self._queue.clear()
        self._tell_receiver(self._receiver_sees_end, self._closing)
        self._loop.call_soon(self._finish, reason)

    def _receiver_sees_end(self, orderly: bool) -> None:
        self._receiving = False
        self.port.process.loop.call_later(JOIN_S_MAX * self.process.network.rng.random(), self._joined, orderly)

    def _joined(self, orderly: bool) -> None:
        self.port.proved(self, Evidence.JOINED, orderly=orderly)

    def fence_by_receiver(self, epoch: Epoch) -> None:
        self._receiving = False
        self._tell_writer(self._told_fence, epoch)
        self._receiver_sees_end(True)

    def _told_fence(self, epoch: Epoch) -> None:
        self._fenced = True
        self._end(f"fenced by the receiver up to epoch {epoch}")

    def reset(self, reason: str) -> None:
        if not self._ended:
            self._loop.call_soon(self._end, reason)

    def writer_died(self) -> None:
        """Its kernel closes the socket: what was sent before still arrives."""
        self._tell_receiver(self._receiver_sees_end, False)


class SimShmLink(SimLink):
    transport = TransportName.SHM

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._under_way: Batch | None = None
        self._reason = ""

    @classmethod
    async def connect(cls, parts: LinkParts, source: Any, config: Any = None, turns: Any = None) -> SimShmLink:
        link = await _connect(cls, parts, ConnectError)
        assert isinstance(link, SimShmLink)
        return link

    def _pump(self) -> None:
        """The copying thread: one batch after the other, each of which takes its time, however long the process was
        stopped meanwhile. The one under way can be abandoned no more."""
        self._pumping = False
        if not self._queue:
            return
        item = self._queue.popleft()
        if isinstance(item, Seal):
            self._tell_receiver(self._sealed, item)
            if self._queue:
                self._pump_soon()
        else:
            self._pumping = True
            self._under_way = item
            self._loop.call_later(self.process.pace_s * self.process.network.rng.random(), self._copied, item)

    def _copied(self, batch: Batch) -> None:
        source, ops = self.process.region, batch.ops
        data = [bytes(source[s : s + n]) for s, n in zip(ops.src.tolist(), ops.nbytes.tolist(), strict=True)]
        self.port.land(self, batch, data)
        self._complete_soon(batch, copied=True)
        self._under_way = None
        self._pumping = False
        if self._ended:
            self._unmap_soon()
        elif self._queue:
            self._pump_soon()

    def _sealed(self, seal: Seal) -> None:
        if not self.port.closed:
            self.port.events.seal_landed(self.pair, seal)

    def _end(self, reason: str) -> None:
        """Stop copying, unmap, and only then acknowledge."""
        if self._ended:
            return
        self._ended = True
        for item in self._queue:
            if isinstance(item, Batch):
                self._complete_soon(item, copied=False)
        self._queue.clear()
        self._reason = reason
        if self._under_way is None:
            self._unmap_soon()

    def _unmap_soon(self) -> None:
        self._loop.call_later(JOIN_S_MAX * self.process.network.rng.random(), self._unmapped)

    def _unmapped(self) -> None:
        self._tell_receiver(self._bye)
        self._finish(self._reason)

    def _bye(self) -> None:
        self.port.proved(self, Evidence.ACKNOWLEDGED, orderly=True)

    def fence_by_receiver(self, epoch: Epoch) -> None:
        self._tell_writer(self._told_fence, epoch)

    def _told_fence(self, epoch: Epoch) -> None:
        if epoch >= self._epoch:
            self._fenced = True
            self._end(f"fenced by the receiver up to epoch {epoch}")

    def reset(self, reason: str) -> None:
        """A Unix socket is not reset."""

    def writer_died(self) -> None:
        self._tell_receiver(self._dead)

    def _dead(self) -> None:
        """The pidfd is readable."""
        self.port.proved(self, Evidence.DEAD, orderly=False)


async def _connect(kind: type[SimLink], parts: LinkParts, failure: type[Exception]) -> SimLink:
    endpoint, loop = parts.endpoint, cast("Any", parts.loop)
    process: Process = loop.sink
    network = process.network
    port = network.data_ports.get(endpoint.address)
    if port is None or port.process.loop.state is ProcessState.DEAD:
        await asyncio.sleep(network.rng.random() * 0.002)
        raise failure(f"{endpoint.address}: connection refused")
    link = kind(process=process, port=port, pair=parts.pair, epoch=endpoint.epoch, events=parts.events)
    welcomed: asyncio.Future[str | None] = loop.create_future()

    def hello() -> None:
        link._tell_writer(answered, port.opened(link, endpoint.secret))

    def answered(refusal: str | None) -> None:
        if not welcomed.done():
            welcomed.set_result(refusal)

    link._tell_receiver(hello)
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            refusal = await welcomed
    except BaseException as error:
        link._closing = True
        link._end("not connected after all")
        if isinstance(error, TimeoutError):
            raise failure(f"{endpoint.address}: no link in time") from error
        raise
    if link._ended:  # while the welcome was on its way
        raise failure(f"{endpoint.address}: the connection was reset")
    if refusal is not None:
        link._ended = True
        process.links.remove(link)
        raise failure(f"{endpoint.address}: refused: {refusal}")
    link.in_use = True
    return link
