"""Our transports as sides of the transfer benchmark.

python -m benchmarks.transfer_ours shm|tcp|ucx THREADS      (copying threads of shm, streams of tcp, 1 of ucx)
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np

from baton.ids import BlockId, Epoch, GrantId, Incarnation, Pair
from benchmarks.transfer_side import REGION_BYTES, Plan, serve
from cachestore.layout import kv_layout
from kvtransfer.region import Region
from kvtransfer.transport import DataEndpoint, ReceiverPort, Seal, TransportName, WriteOps, WriteRanges, WriterLink
from kvtransfer.transports.settings import ShmConfig, TcpConfig, UcxConfig
from kvtransfer.transports.shm import ShmReceiverPort, ShmWriterLink
from kvtransfer.transports.tcp import TcpReceiverPort, TcpWriterLink
from kvtransfer.transports.ucx import UcxReceiverPort, UcxWriterLink
from kvtransfer.transports.writer_link import LinkParts

PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(2))
EPOCH = Epoch(1)
GRANT = GrantId(bytes(16))


def everything() -> WriteRanges:
    """A grant of every record: what a receiver checks each frame against."""
    layout = kv_layout(num_layers=1, num_kv_heads=1, head_dim=128, block_size=32, dtype="bfloat16", dtype_bytes=2)
    blocks = REGION_BYTES // layout.record_bytes
    return WriteRanges(layout, blocks, map(BlockId, range(blocks)))


class Events:
    """Of both sides; the sender waits for `done` on the loop's thread, for `moved` on another."""

    def __init__(self) -> None:
        self.done: asyncio.Future[float] | None = None
        self.moved: threading.Event | None = None

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        assert copied
        if self.moved is not None:
            self.moved.set()
        else:
            assert self.done is not None
            self.done.set_result(time.perf_counter())

    def writes_in_doubt(self, grant: GrantId) -> None:
        raise AssertionError(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        """The receiver is the first to be ended."""

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        raise AssertionError("no seal is sent")

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        """The sender's end is the benchmark's end."""


class OurSide:
    def __init__(self, transport: TransportName, threads: int) -> None:
        self._transport, self._threads = transport, threads
        self._region = Region.create(REGION_BYTES, "benchmark")
        self.region_U8 = self._region.array_U8
        self._events = Events()
        self._loop = asyncio.new_event_loop()
        self._port: ReceiverPort | None = None
        self._link: WriterLink | None = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def _call(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def address(self) -> dict[str, Any]:
        async def listen() -> DataEndpoint:
            common: Any = {"region": self._region, "events": self._events}
            if self._transport is TransportName.SHM:
                self._port = ShmReceiverPort(**common)
            elif self._transport is TransportName.UCX:
                self._port = UcxReceiverPort(**common, config=UcxConfig(tls="tcp"))
            else:
                self._port = TcpReceiverPort(**common)
            self._port.allow(PAIR, EPOCH, GRANT, everything())
            return self._port.expect(PAIR, EPOCH)

        endpoint: DataEndpoint = self._call(listen())
        return {"address": endpoint.address, "secret": endpoint.secret.hex()}

    def connect(self, address: dict[str, Any]) -> None:
        endpoint = DataEndpoint(
            transport=self._transport,
            address=address["address"],
            secret=bytes.fromhex(address["secret"]),
            epoch=EPOCH,
        )
        common = (LinkParts(endpoint, PAIR, self._events, self._loop), self.region_U8)
        if self._transport is TransportName.SHM:
            shm = self._call(ShmWriterLink.connect(*common, ShmConfig(copy_threads=self._threads)))
            while shm.describe()["pages_ready_bytes"] < REGION_BYTES:
                time.sleep(0.01)
            self._link = shm
        elif self._transport is TransportName.UCX:
            self._link = self._call(UcxWriterLink.connect(*common, UcxConfig(tls="tcp")))
        else:
            self._link = self._call(TcpWriterLink.connect(*common, TcpConfig(streams=self._threads)))

    def prepare(self, plan: Plan) -> WriteOps:
        return WriteOps(src=plan.src, dst=plan.dst, nbytes=np.full(len(plan.src), plan.size, np.int64))

    def move(self, prepared: WriteOps) -> None:
        done = self._events.moved = threading.Event()
        assert self._link is not None
        self._link.post(GRANT, prepared)  # as an engine's thread does
        done.wait()

    def move_each(self, prepared: list[WriteOps]) -> list[float]:
        """Microseconds from each post to the call that tells of its completion, both on the loop's thread."""

        self._events.moved = None

        async def all_of_them() -> list[float]:
            took = []
            for ops in prepared:
                start = time.perf_counter()
                took.append((await self._post(ops) - start) * 1e6)
            return took

        result: list[float] = self._call(all_of_them())
        return result

    async def _post(self, ops: WriteOps) -> float:
        """When it was completed."""
        assert self._link is not None
        self._events.done = self._loop.create_future()
        self._link.post(GRANT, ops)
        return await self._events.done


if __name__ == "__main__":
    serve(OurSide(TransportName(sys.argv[1]), int(sys.argv[2])))
