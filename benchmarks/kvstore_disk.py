"""The disk tier's file beside fio: random blocks, as many jobs as threads, the same sizes, the same direct flag.

Both files are written whole before. In each round reading and writing of both take turns. Ours computes and compares
its sums; fio does not look at the data.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cachestore.tier_books import BlockKey, TierSlot, block_keys
from kvtransfer.native.disk import Offsets
from kvtransfer.region import Region
from node.disk_file import BLOCKS_IN_FLIGHT_MAX, THREADS, DiskFile, Outcome
from node.disk_format import FileIdentity

SIZES = (64 << 10, 256 << 10, 1 << 20)
BLOCK_TOKENS = 16
FILE_BYTES = 1 << 30
MEMORY_BYTES = 256 << 20
ASKED_BLOCKS = 256
"""At a time, as a tier asks for the blocks of one prompt: 4,096 tokens in blocks of 16."""
BARS = {"read": 0.8, "write": 0.7}


class Ours:
    """A file of blocks of one size, and host memory that some lie in."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.slots = FILE_BYTES // size
        self.blocks = MEMORY_BYTES // size
        self._region = Region.create(MEMORY_BYTES, "benchmark")
        self.memory_U8 = self._region.array_U8
        self.memory_U8[:] = np.random.default_rng(0).integers(0, 256, MEMORY_BYTES, np.uint8)
        identity = FileIdentity(kv_root=b"bench", layout_hash="bench", block_bytes=size, block_tokens=BLOCK_TOKENS)
        self.keys = block_keys(b"bench", b"", range(self.slots * BLOCK_TOKENS), BLOCK_TOKENS)
        self.file = DiskFile.open(
            folder / f"ours-{size}",
            bytes_max=identity.file_nbytes(self.slots),
            identity=identity,
        )

    def close(self) -> None:
        self.file.close()
        self.file.path.unlink()
        del self.memory_U8
        self._region.close()

    def places(self, blocks: Sequence[int]) -> Offsets:
        return np.asarray(blocks, dtype=np.int64) * self.size

    def block_of(self, slot: int) -> int:
        return slot % self.blocks

    async def move(self, slots: Sequence[int], *, writing: bool) -> float:
        """-> bytes a second, with as many blocks asked for as may be."""
        loop = asyncio.get_running_loop()
        left, ended = len(slots), loop.create_future()
        batches = [slots[at : at + ASKED_BLOCKS] for at in range(0, len(slots), ASKED_BLOCKS)][::-1]

        def done(outcomes: Sequence[Outcome]) -> None:
            nonlocal left
            assert all(outcome is Outcome.DONE for outcome in outcomes), outcomes
            left -= len(outcomes)
            ask()
            if not left:
                ended.set_result(None)

        def ask() -> None:
            while batches and self.file.room >= len(batches[-1]) and self.file.room > BLOCKS_IN_FLIGHT_MAX // 2:
                chosen = [TierSlot(slot) for slot in batches.pop()]
                places = self.places([self.block_of(slot) for slot in chosen])
                if writing:
                    keys: list[BlockKey] = [self.keys[slot] for slot in chosen]
                    self.file.start_store(self.memory_U8, chosen, keys, places, done)
                else:
                    self.file.start_load(self.memory_U8, chosen, places, done)

        began_s = time.perf_counter()
        ask()
        await ended
        return len(slots) * self.size / (time.perf_counter() - began_s)


def fio(path: Path, size: int, *, writing: bool, direct: bool, nbytes: int) -> float:
    """-> bytes a second."""
    command = [
        "fio", "--name=peer", f"--filename={path}", f"--filesize={FILE_BYTES}", f"--bs={size}", "--ioengine=psync",
        f"--rw={'randwrite' if writing else 'randread'}", f"--direct={int(direct)}", f"--numjobs={THREADS}", "--thread",
        f"--io_size={nbytes // THREADS}", "--randrepeat=0", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(report["jobs"][0]["write" if writing else "read"]["bw_bytes"])


def measure(folder: Path, size: int, rounds: int, nbytes: int, note: Callable[[dict[str, Any]], None]) -> None:
    ours = Ours(folder, size)
    peer = folder / "peer"
    with peer.open("wb") as file:
        for _ in range(FILE_BYTES // MEMORY_BYTES):
            file.write(ours.memory_U8.data)
    subprocess.run(["sync", str(peer)], check=True)
    rng = random.Random(size)
    try:
        asyncio.run(ours.move(range(ours.slots), writing=True))
        for number in range(rounds):
            for writing in (False, True):
                slots = rng.sample(range(ours.slots), nbytes // size)
                turns: dict[str, Callable[[], float]] = {
                    "ours": lambda slots=slots, writing=writing: asyncio.run(ours.move(slots, writing=writing)),
                    "fio": lambda writing=writing: fio(
                        peer, size, writing=writing, direct=ours.file.direct, nbytes=nbytes
                    ),
                }
                order = ("ours", "fio") if number % 2 == 0 else ("fio", "ours")
                rates = {name: turns[name]() for name in order}
                note({"size": size, "what": "write" if writing else "read", "direct": ours.file.direct, **rates})
        print(ours.file.describe())
    finally:
        ours.close()
        peer.unlink()


def report(samples: list[dict[str, Any]]) -> str:
    """The median of each round's ratio, with its range."""
    cases: defaultdict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for sample in samples:
        cases[sample["size"], sample["what"]].append(sample)
    lines = ["block      what      ours MB/s   fio MB/s   ratio (range)        bar"]
    for (size, what), own in sorted(cases.items()):
        ratios = sorted(each["ours"] / each["fio"] for each in own)
        ratio, bar = statistics.median(ratios), BARS[what]
        rates = [statistics.median(each[name] for each in own) / 1e6 for name in ("ours", "fio")]
        verdict = "" if ratio >= bar else "  MISSED"
        lines.append(
            f"{size >> 10:5} KiB  {what:6}{rates[0]:12.0f}{rates[1]:11.0f}   {ratio:.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})   {bar}{verdict}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the drive that is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="moved in each turn")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--json", type=Path)


def run(options: argparse.Namespace) -> None:
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in options.sizes:
            measure(Path(folder), size, options.rounds, options.mib << 20, samples.append)
    if options.json is not None:
        options.json.write_text(json.dumps(samples))
    print(report(samples))
