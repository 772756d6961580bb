"""What tests of both sides of rdma share: a port and links on a device made of arrays, and a writer spoken by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch
from kvtransfer.region import Region
from kvtransfer.transport import Seal
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import rdma
from kvtransfer.transports.rdma import (
    CODEC,
    HostBytes,
    LinkEnds,
    RdmaLimits,
    RdmaLinkLimits,
    RdmaMemory,
    RdmaReceiverPort,
    RdmaRegion,
    RdmaWelcome,
    RdmaWriterLink,
    RegionAddress,
)
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.settings import RdmaConfig
from kvtransfer.transports.writer_link import LinkParts
from tests.support.rdma_double import DoubleDevice, DoubleQueuePairs, install
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, pair_of

PAIR, EPOCH, GRANT, OTHER = pair_of(2), Epoch(3), grant_of(7), grant_of(8)
CONFIG = RdmaConfig(qps=2)
LIMITS = RdmaLimits(seals_max=4, device_check_ms=5)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """`lost`: why the device does not work, if it does not."""
    monkeypatch.setattr(rdma, "DESTROY_RETRY_MS", 5)
    yield install(monkeypatch)
    assert not DoubleQueuePairs.alive


class Receiving:
    """`registered` is what is registered in the place of a region in host memory."""

    def __init__(self, registered: RdmaRegion | None = None, events: Recorder | None = None, **limits: Any) -> None:
        self.events = events or Recorder()
        self.offered: list[bool] = []
        self.region = Region.create(REGION_NBYTES, "test-region")
        registered = registered or HostBytes(lambda: self.region.array_U8)
        self.memory = RdmaMemory(region=registered, config=CONFIG, remote_writes=True, limits=LIMITS)
        self.port = RdmaReceiverPort(
            memory=self.memory,
            events=self.events,
            offered=self.offered.append,
            limits=PortLimits(**limits),
        )

    @property
    def refused(self) -> object:
        return self.port.describe()["refused"]

    @property
    def qps(self) -> DoubleQueuePairs:
        """Those of the only link, at this side."""
        (found,) = {id(q): q for q in DoubleQueuePairs.alive.values() if not q.sends}.values()
        return found


@asynccontextmanager
async def receiving(**limits: Any) -> AsyncIterator[Receiving]:
    it = Receiving(**limits)
    try:
        yield it
    finally:
        await it.port.close()
        await it.memory.close()
        it.region.close()


@asynccontextmanager
async def linked(
    r: Receiving, source_U8: np.ndarray, epoch: Epoch = EPOCH, **limits: Any
) -> AsyncIterator[tuple[RdmaWriterLink, Recorder]]:
    loop, events = asyncio.get_running_loop(), Recorder()
    memory = RdmaMemory(region=HostBytes(lambda: source_U8), config=CONFIG, remote_writes=False, limits=LIMITS)
    try:
        link_limits = RdmaLinkLimits(**{"connect_ms_max": 2_000, **limits})
        link = await RdmaWriterLink.connect(
            LinkParts(r.port.expect(PAIR, epoch), PAIR, events, loop), memory, link_limits
        )
        try:
            yield link, events
        finally:
            await link.close()
    finally:
        await memory.close()


def seal_of(number: int = 1) -> Seal:
    return Seal(grant=grant_of(number), epoch=EPOCH, writes=number, bytes_written=number)


class Raw:
    """The words of a writer, spoken by hand, with queue pairs of the double."""

    def __init__(self, r: Receiving) -> None:
        self.endpoint = r.port.expect(PAIR, EPOCH)
        self.source_U8 = np.zeros(1, np.uint8)
        device = DoubleDevice(HostBytes(lambda: self.source_U8), CONFIG, remote_writes=False, limits=LIMITS)
        self.qps = DoubleQueuePairs(device, 2, sends=True)
        self.inbox = wire.Inbox(CODEC)
        self.waiting: list[wire.Message] = []

    async def open(self) -> None:
        host, port = RegionAddress.decode(self.endpoint.address).listens.rsplit(":", 1)
        self.reader, self.writer = await asyncio.open_connection(host, int(port))

    async def say(self, *messages: wire.Message) -> None:
        self.writer.write(b"".join(map(CODEC.encode, messages)))
        await self.writer.drain()

    async def hear(self) -> wire.Message | None:
        async with asyncio.timeout(DEADLINE_S):
            while not self.waiting:
                data = await self.reader.read(4096)
                if not data:
                    return None
                self.waiting += self.inbox.feed(data)
        return self.waiting.pop(0)

    async def welcome(self) -> RdmaWelcome:
        """Up to a link that is made."""
        welcome = await self.welcome_unproved()
        self.qps.post_probes(welcome.probe_base, welcome.probe_rkey)
        assert await self.hear() == wire.Ready()
        return welcome

    async def welcome_unproved(self) -> RdmaWelcome:
        await self.open()
        untagged = wire.Hello(pair=PAIR, epoch=EPOCH, link=1, payload=self.qps.ends.encode())
        hello = CODEC.tagged(self.endpoint.secret, untagged)
        await self.say(hello)
        challenge = await self.hear()
        assert isinstance(challenge, wire.Challenge)
        await self.say(wire.Answer(proof=CODEC.writer_proof(self.endpoint.secret, hello, challenge.nonce)))
        message = await self.hear()
        assert isinstance(message, wire.Welcome)
        welcome = RdmaWelcome.decode(message.payload)
        self.qps.connect(LinkEnds.decode(welcome.ends))
        return welcome

    async def close(self) -> None:
        self.qps.destroy()
        self.writer.close()
        await self.writer.wait_closed()
