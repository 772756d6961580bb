"""Two nodes whose regions are on simulated devices, a tcp link between them through pinned memory, and a look at every
touch of the host.

`MissingDependency` is kept, not raised: it would end a thread of the transport, or be lost in a callback.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.device.driver import PinnedMemory
from kvtransfer.device.staging import StagedRegion, StagingConfig, StagingLimits
from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import ReceiveStream, TcpReceiverPort, TcpWriterLink
from kvtransfer.transports.tcp_staged import StagedTcpLink
from kvtransfer.transports.writer_link import LinkLimits, LinkParts
from tests.conformance.transport_kits import Everything, FakeSource
from tests.support.shm_harness import Recorder, grant_of, ops_of, pair_of
from tests.support.stream_shim import Memory, MissingDependency, ShimDevice, ShimStream

RECORD = 64
LAYERS, BLOCKS = 4, 8
NBYTES = RECORD * LAYERS * BLOCKS
CHUNK = 2 * RECORD
PAIR, EPOCH, GRANT = pair_of(2), Epoch(3), grant_of(7)
SMALL = StagingLimits(chunk_bytes=CHUNK, link_chunks=3, stream_chunks=2)
SHORT = LinkLimits(drain_ms_max=300, bye_ms_max=300)


class HastyDevice(ShimDevice):
    """Whoever asks whether an event has passed is told so: what code does that does not wait."""

    hasty = False

    def side(self) -> ShimStream:
        stream = super().side()
        record = stream.record

        def hasty_record() -> Any:
            event = record()
            if self.hasty:
                event.done = lambda: True  # type: ignore[method-assign]
            return event

        stream.record = hasty_record  # type: ignore[method-assign]
        return stream


class ShimPinned(PinnedMemory):
    def __init__(self, memory: Memory) -> None:
        super().__init__(memory, memory.bytes_U8)

    def close(self) -> None:
        pass


class ShimDriver:
    def __init__(self, device: ShimDevice) -> None:
        self.streams = device
        self.pinned = Memory("pinned", np.zeros(0, np.uint8))

    def pin(self, nbytes: int) -> ShimPinned:
        self.pinned = Memory("pinned", np.zeros(nbytes, np.uint8))
        return ShimPinned(self.pinned)


class Node:
    """A region on a device of its own, and what was found wrong there."""

    def __init__(self, seed: int, limits: StagingLimits = SMALL, chunks: int = 16) -> None:
        self.device = HastyDevice(seed)
        self.region = Memory("region", np.zeros(NBYTES, np.uint8))
        self.driver = ShimDriver(self.device)
        driver: Any = self.driver
        self.staged = StagedRegion(
            driver=driver,
            region=FakeSource(self.region, NBYTES),
            config=StagingConfig(bytes_max=chunks * CHUNK),
            limits=limits,
        )
        self.found: list[str] = []

    def look(self, memory: Memory, first: int, end: int, *, write: bool) -> None:
        """The host is about to touch these bytes."""
        try:
            self.device.host_access(memory, first, end, write=write)
        except MissingDependency as error:
            self.found.append(str(error))

    def compute(self, layer: int, block: int, value: int) -> int:
        """A kernel of the compute stream that makes one record; where it lies."""
        at = (layer * BLOCKS + block) * RECORD

        def kernel() -> None:
            self.region.bytes_U8[at : at + RECORD] = value

        self.device.compute.launch(f"layer {layer}", kernel, writes=[(self.region, at, at + RECORD)])
        return at

    def freeze(self) -> None:
        """Nothing queued runs, so nothing can have passed."""
        self.device.run_some = lambda: None  # type: ignore[method-assign]

    def thaw(self) -> None:
        del self.device.run_some


class Arrivals(Recorder):
    """Looks at the whole region when a writer's end is told, and at nothing else: a seal's bytes are the test's."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self.bytes_at_seal: list[np.ndarray] = []

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self._node.look(self._node.region, 0, NBYTES, write=False)
        self.bytes_at_seal.append(self._node.region.bytes_U8.copy())
        super().seal_landed(pair, seal)

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        self._node.look(self._node.region, 0, NBYTES, write=True)
        super().writer_gone(pair, epoch, evidence)


class Scene:
    """`link` writes from `writer` to `receiver`; `posted` and `arrived` are their events."""

    def __init__(self, writer: Node, receiver: Node, config: TcpConfig) -> None:
        self.writer, self.receiver = writer, receiver
        self.arrived = Arrivals(receiver)
        self.posted = Recorder()
        self.config = config
        self.port = TcpReceiverPort(region=receiver.staged, events=self.arrived)
        self.link: StagedTcpLink

    async def connect(self, pair: Pair = PAIR, grant: GrantId = GRANT) -> StagedTcpLink:
        self.port.allow(pair, EPOCH, grant, Everything())
        endpoint = self.port.expect(pair, EPOCH)
        loop = asyncio.get_running_loop()
        return await StagedTcpLink.connect_staged(
            LinkParts(endpoint, pair, self.posted, loop), self.writer.staged, self.config, SHORT
        )

    async def completed(self, count: int) -> None:
        await self.posted.until(lambda e: len(e.completed) >= count)

    def seal(self, number: int) -> None:
        self.link.seal(Seal(grant=GRANT, epoch=EPOCH, writes=number, bytes_written=number))


def check_touches(monkeypatch: pytest.MonkeyPatch, *nodes: Node) -> None:
    """From now on the host's touches of pinned memory are looked at: when a piece is posted, and when a frame is to be
    received."""
    by_memory = {node.driver.pinned.bytes_U8.ctypes.data: node for node in nodes}

    post = TcpWriterLink.post

    def looking_post(self: TcpWriterLink, grant: GrantId, ops: WriteOps, completed: Any = None) -> None:
        assert self._source_U8 is not None
        node = by_memory[self._source_U8.ctypes.data]
        for start, nbytes in zip(ops.src.tolist(), ops.nbytes.tolist(), strict=True):
            node.look(node.driver.pinned, start, start + nbytes, write=False)
        post(self, grant, ops, completed)

    place = ReceiveStream._place

    def looking_place(self: ReceiveStream, table_S2: np.ndarray) -> np.ndarray:
        place_S2 = place(self, table_S2)
        assert self._memory_U8 is not None
        node = by_memory[self._memory_U8.ctypes.data]
        start, nbytes = place_S2[0].tolist()
        node.look(node.driver.pinned, start, start + nbytes, write=True)
        return place_S2

    monkeypatch.setattr(TcpWriterLink, "post", looking_post)
    monkeypatch.setattr(ReceiveStream, "_place", looking_place)


@asynccontextmanager
async def scene(
    monkeypatch: pytest.MonkeyPatch,
    seed: int = 1,
    *,
    streams: int = 2,
    limits: StagingLimits = SMALL,
    chunks: int = 16,
) -> AsyncIterator[Scene]:
    """Linked. At the end everything is closed, and nothing may have been found wrong that the test has not taken."""
    writer, receiver = Node(seed, limits, chunks), Node(seed + 100, limits, chunks)
    check_touches(monkeypatch, writer, receiver)
    it = Scene(writer, receiver, TcpConfig(streams=streams))
    it.link = await it.connect()
    try:
        yield it
    finally:
        await it.link.close()
        await it.port.close()
        writer.staged.close()
        receiver.staged.close()
    assert (writer.found, receiver.found) == ([], [])


def whole(at: int = 0, nbytes: int = NBYTES) -> WriteOps:
    return ops_of([at], [at], [nbytes])
