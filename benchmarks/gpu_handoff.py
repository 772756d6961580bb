"""The part of `benchmarks/gpu.py` about the handoff: layer by layer over cuda_ipc into another process of the same GPU,
beside a chain of matrix products."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import grpc
import numpy as np
import torch

from baton.ids import Epoch, GrantId, Pair
from benchmarks.gpu_children import ROOT, environment
from benchmarks.gpu_receiver import COMMIT, GRANT, PAIR, REGION_BYTES, endpoint_from, make_driver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.cuda_ipc import CudaIpcWriterLink
from kvtransfer.transports.writer_link import LinkParts

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench
    from benchmarks.gpu_children import Figures


def measure(bench: Bench, figures: Figures) -> None:
    """`exposed_ms`: the products with the copies less those without, in time of the compute stream.

    `committed_ms`: from the end of the last product to the answer to a gRPC call that waits for the seal at the
    receiver, which does nothing else. `copy_ms`: the same copies with nothing beside them, from the first one's post to
    the last one's end, of which the device's memory allows no less than its bandwidth does.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_receiver", bench.device.type]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    ) as receiver:
        # In this process's group, so that it ends with it, whatever ends it: it may hang before it says a word.
        try:
            asyncio.run(_hand_over(bench, receiver, figures))
        finally:
            receiver.kill()


async def _hand_over(bench: Bench, receiver: subprocess.Popen[str], figures: Figures) -> None:
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    reported = json.loads(await asyncio.to_thread(receiver.stdout.readline))
    endpoint = endpoint_from(reported)
    loop, driver, events = asyncio.get_running_loop(), make_driver(bench.device.type), _Events()
    source = DeviceRegion(driver, REGION_BYTES, "bench-source")
    source.rehearse_copy(8)
    link = await CudaIpcWriterLink.connect(LinkParts(endpoint, PAIR, events, loop), source)
    layers = _Layers(bench, link)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{reported['commit_port']}") as channel:
        await channel.channel_ready()
        commit = channel.unary_unary(COMMIT)
        layers.compute(None)
        copied_s = [await layers.copies_alone(events) for _ in range(1 + bench.repeats)][1:]
        copy_s, nbytes = statistics.median(copied_s), layers.writes * layers.record_bytes
        figures.add(mbytes=nbytes / 1e6, copy_ms=1e3 * copy_s, copy_gbytes_s=2 * nbytes / copy_s / 1e9)
        alone_s, beside_s, committed_s = [], [], []
        for number in range(bench.repeats):
            alone_s.append((await asyncio.to_thread(layers.compute, None))[0])
            grant = GrantId(GRANT[:-1] + bytes([number]))
            expected = len(events.completed) + layers.count
            took_s, ended = await asyncio.to_thread(layers.compute, grant)
            beside_s.append(took_s)
            await events.until(expected)
            link.seal(Seal(grant=grant, epoch=Epoch(1), writes=layers.writes, bytes_written=nbytes))
            await commit(bytes(grant), timeout=60)
            committed_s.append(time.perf_counter() - ended)
    await link.close()
    source.close()
    figures.add(
        alone_ms=1e3 * statistics.median(alone_s),
        exposed_ms=1e3 * (statistics.median(beside_s) - statistics.median(alone_s)),
        committed_ms=1e3 * statistics.median(committed_s),
    )


class _Layers:
    """What is computed and copied, layer by layer."""

    def __init__(self, bench: Bench, link: CudaIpcWriterLink) -> None:
        self.count, self.records, self.record_bytes = (2, 4, 4096) if bench.tiny else (28, 256, 65_536)
        self.writes = self.count * self.records
        self._bench = bench
        self._link = link
        side = 64 if bench.tiny else 4096
        dtype = torch.float32 if bench.tiny else torch.bfloat16
        self._factor = torch.randn(side, side, device=bench.device, dtype=dtype)

    def compute(self, grant: GrantId | None) -> tuple[float, float]:
        """-> (seconds that the compute stream took, when it had finished)."""
        self._bench.synchronize()
        on_device = self._bench.device.type == "cuda"
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_device else []
        begin = time.perf_counter()
        for mark in marks[:1]:
            mark.record()
        for layer in range(self.count):
            for _ in range(4):
                torch.mm(self._factor, self._factor)
            if grant is not None:
                self._post(grant, layer)
        for mark in marks[1:]:
            mark.record()
            mark.synchronize()
        ended = time.perf_counter()
        return marks[0].elapsed_time(marks[1]) / 1e3 if marks else ended - begin, ended

    async def copies_alone(self, events: _Events) -> float:
        """-> seconds."""
        grant, expected = GrantId(bytes(15) + b"\xff"), len(events.completed) + self.count
        self._bench.synchronize()
        begin = time.perf_counter()
        for layer in range(self.count):
            self._post(grant, layer)
        await events.until(expected)
        return time.perf_counter() - begin

    def _post(self, grant: GrantId, layer: int) -> None:
        at = (layer * self.records + np.arange(self.records, dtype=np.int64)) * self.record_bytes
        self._link.post(
            grant, WriteOps(src=at, dst=at, nbytes=np.full(self.records, self.record_bytes, dtype=np.int64))
        )


class _Events:
    def __init__(self) -> None:
        self.completed: list[GrantId] = []
        self._changed = asyncio.Event()

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        self.completed.append(grant)
        self._changed.set()

    def writes_in_doubt(self, grant: GrantId) -> None:
        raise AssertionError(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        raise AssertionError(f"the receiver of the benchmark is gone: {reason}")

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.completed) < count:
                self._changed.clear()
                await self._changed.wait()
