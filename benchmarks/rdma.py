"""RDMA beside `ib_write_bw` on the same device, and how fast requests are posted on a device that does nothing.

    python -m benchmarks.rdma poster           requests a second on one core; needs libibverbs-dev, no device
    python -m benchmarks.rdma device           both of them in turn on the first device; needs perftest

Soft-RoCE: tests/rdma/run.sh -m benchmarks.rdma device. Both sides of each run are on this machine, with the same size
of a write, as many writes on their way and one queue pair. Nothing is asserted: medians, extremes and ratios are shown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton.ids import Epoch, GrantId, Incarnation, Pair
from kvtransfer.region import Region
from kvtransfer.transport import Seal, WriteOps
from kvtransfer.transports.rdma import (
    HostBytes,
    RdmaLimits,
    RdmaLinkLimits,
    RdmaMemory,
    RdmaReceiverPort,
    RdmaWriterLink,
)
from kvtransfer.transports.rdma_ports import choose_port, find_ports
from kvtransfer.transports.rdma_verbs import Poster, rdma_library
from kvtransfer.transports.settings import RdmaConfig
from kvtransfer.transports.writer_link import ChainLanes, ChainLimits, LinkParts, SealPart
from tests.support.null_verbs import NullVerbs

PAIR = Pair(receiver=Incarnation(1), writer=Incarnation(2))
GRANT = GrantId(bytes(16))
EPOCH = Epoch(1)
DEPTH = 128
SERVER_START_S = 2.0
RUN_S_MAX = 120
POSTER_REQUESTS = 1 << 20
POSTER_REGION_BYTES = 1 << 30


class Events:
    """Both sides', as asyncio events."""

    def __init__(self) -> None:
        self.completed = asyncio.Event()
        self.sealed = asyncio.Event()

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        assert copied, (grant, writes, bytes_written)
        self.completed.set()

    def writes_in_doubt(self, grant: GrantId) -> None:
        raise AssertionError(grant)

    def link_lost(self, pair: Pair, reason: str) -> None:
        raise AssertionError((pair, reason))

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self.sealed.set()

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        pass


def scattered(size: int, count: int, region_bytes: int, seed: int) -> WriteOps:
    """`count` writes of `size` bytes from shuffled places to other shuffled places, again and again."""
    rng, places = np.random.default_rng(seed), region_bytes // size
    rounds = -(-count // places)
    src, dst = (
        np.concatenate([rng.permutation(places) for _ in range(rounds)])[:count].astype(np.int64) * size
        for _ in range(2)
    )
    return WriteOps(src=src, dst=dst, nbytes=np.full(count, size, np.int64))


async def ours(size: int, count: int, region_bytes: int, rounds: int, between: Callable[[], None]) -> list[float]:
    """MiB a second of each round: from posting to the seal's arrival. `between` runs before each."""
    loop = asyncio.get_running_loop()
    config, device = RdmaConfig(qps=1), RdmaLimits(send_wrs_max=DEPTH + 1)
    region = Region.create(region_bytes, "bench-region")
    source_U8 = np.random.default_rng(1).integers(0, 255, region_bytes, dtype=np.uint8)
    receiver = RdmaMemory(region=HostBytes(lambda: region.array_U8), config=config, remote_writes=True, limits=device)
    writer = RdmaMemory(region=HostBytes(lambda: source_U8), config=config, remote_writes=False, limits=device)
    events = Events()
    port = RdmaReceiverPort(memory=receiver, events=events)
    limits = RdmaLinkLimits(on_the_way_bytes_max=DEPTH * size, connect_ms_max=30_000)
    link = await RdmaWriterLink.connect(LinkParts(port.expect(PAIR, EPOCH), PAIR, events, loop), writer, limits)
    rates = []
    for number in range(rounds):
        await asyncio.to_thread(between)
        ops = scattered(size, count, region_bytes, number)
        events.completed.clear()
        events.sealed.clear()
        began = time.perf_counter()
        link.post(GRANT, ops)
        await events.completed.wait()
        link.seal(Seal(grant=GRANT, epoch=EPOCH, writes=count, bytes_written=ops.total_bytes))
        await events.sealed.wait()
        rates.append(ops.total_bytes / (time.perf_counter() - began) / (1 << 20))
        dst, src = int(ops.dst[-1]), int(ops.src[-1])
        assert np.array_equal(region.array_U8[dst : dst + size], source_U8[src : src + size])
    await link.close()
    await port.close()
    await writer.close()
    await receiver.close()
    return rates


def ib_write_bw(size: int, count: int) -> float:
    """MiB a second (perftest's "MB/sec") of one run with a server and a client on this machine."""
    port = choose_port(find_ports(), "")
    assert port is not None
    command = [
        "ib_write_bw", "-d", port.device, "-i", str(port.number), "-x", str(port.best_gid.index), "-s", str(size),
        "-n", str(count), "-t", str(DEPTH), "-q", "1", "-F",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(SERVER_START_S)
        done = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=RUN_S_MAX, check=True)
        server.wait(RUN_S_MAX)
    finally:
        server.kill()
        server.wait()
    line = next(line for line in done.stdout.splitlines() if line.split()[:1] == [str(size)])
    return float(line.split()[3])


def device(sizes: list[int], mib: int, region_mib: int, rounds: int) -> dict[str, object]:
    """Both in turn, for each size."""
    found: dict[str, object] = {}
    print(f"{'size':>10} {'ours, MiB/s':>24} {'ib_write_bw, MiB/s':>24} {'ratio of medians':>18}", flush=True)
    for size in sizes:
        count = max(DEPTH, (mib << 20) // size)
        theirs: list[float] = []

        def measure() -> None:
            # Now and then it reports 0.0 on a slow machine: its clock of cycles, not a rate.
            while (rate := ib_write_bw(size, count)) == 0:  # noqa: B023
                print("ib_write_bw reported 0; once more", flush=True)
            theirs.append(rate)  # noqa: B023

        region_bytes = region_mib << 20 or size
        mine = asyncio.run(ours(size, count, region_bytes, rounds, measure))
        ratio = statistics.median(mine) / statistics.median(theirs)
        print(f"{size:>10} {_spread(mine):>24} {_spread(theirs):>24} {ratio:>18.2f}", flush=True)
        found[str(size)] = {"ours_mib_s": mine, "ib_write_bw_mib_s": theirs, "ratio": ratio}
    return found


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


def poster(rounds: int) -> dict[str, object]:
    """Requests a second, in millions: the C code alone, and with the queue that feeds it."""
    library = rdma_library()
    if library is None:
        sys.exit("The native poster is not built: install gcc and libibverbs-dev.")
    null = NullVerbs(library)
    wake = os.eventfd(0)
    native = Poster(
        qps=[null.qp], cq=null.cq, channel_fd=wake, src_base=0, lkey=1, dst_base=0, rkey=2, take_event=lambda: None
    )
    ops = scattered(16 << 10, POSTER_REQUESTS, POSTER_REGION_BYTES, 1)
    found: dict[str, object] = {}
    for chain in (32, 128):
        for name, run in (("poster", _post_alone), ("queue and poster", _post_queued)):
            rates = [POSTER_REQUESTS / run(native, ops, chain) / 1e6 for _ in range(rounds)]
            print(f"{name}, chains of {chain}: {_spread(rates)} million requests/s on one core")
            found[f"{name}, {chain}"] = rates
    os.close(wake)
    return found


def _post_alone(native: Poster, ops: WriteOps, chain: int) -> float:
    began = time.thread_time()
    for start in range(0, POSTER_REQUESTS, chain):
        end = start + chain
        native.post_writes(0, ops.src[start:end], ops.dst[start:end], ops.nbytes[start:end], start)
    return time.thread_time() - began


def _post_queued(native: Poster, ops: WriteOps, chain: int) -> float:
    """As a link's thread does it, of one large batch; the device completes at once."""
    loop = asyncio.new_event_loop()
    limits = ChainLimits(chain_wrs_max=chain, chain_bytes_max=1 << 30, on_the_way_bytes_max=1 << 40)
    lanes = ChainLanes(
        limits=limits,
        qps=1,
        send_wrs_max=chain + 1,
        src_nbytes=POSTER_REGION_BYTES,
        dst_nbytes=POSTER_REGION_BYTES,
        loop=loop,
        completed=lambda *_: None,
        in_doubt=lambda _: None,
        wake=lambda: None,
    )
    began = time.thread_time()
    lanes.queue.post(GRANT, ops)
    while (taken := lanes.take()) is not None:
        assert not isinstance(taken, SealPart)
        chain_ops = taken.part.ops
        native.post_writes(0, chain_ops.src, chain_ops.dst, chain_ops.nbytes, taken.number)
        lanes.completed(taken.number)
    seconds = time.thread_time() - began
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["poster", "device"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16 << 10, 64 << 10, 1 << 20])
    parser.add_argument("--mib", type=int, default=32, help="data of each run")
    parser.add_argument("--region-mib", type=int, default=0, help="0: one buffer of the size, as ib_write_bw has it")
    parser.add_argument("--json", default="", help="where to write the figures")
    arguments = parser.parse_args()
    print(f"Linux {platform.release()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    if arguments.what == "poster":
        found = poster(arguments.rounds)
    else:
        found = device(arguments.sizes, arguments.mib, arguments.region_mib, arguments.rounds)
    if arguments.json:
        text = json.dumps({"what": arguments.what, "rounds": arguments.rounds, "found": found}, indent=1)
        Path(arguments.json).write_text(text)


if __name__ == "__main__":
    main()
