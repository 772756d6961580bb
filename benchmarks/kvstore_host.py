"""Copies of whole blocks between the region and the host tier, beside one memcpy of as many bytes.

The same copies as a node's (`node/copiers.py`): every layer's record of each block, scattered in the region and one
after the other in host memory. All turns use one thread and memory that exists already.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baton.ids import BlockId
from cachestore.layout import kv_layout
from cachestore.tier_books import TierSlot
from kvtransfer.native.copy import copy_records
from kvtransfer.region import Region
from node.copiers import PositionCopy, PositionPlaces

REGION_BYTES = 512 << 20
LAYERS = 16
COPIED_BYTES = 64 << 20
REPEATS = 4
BAR = 0.8


def timed(work: Callable[[], object], nbytes: int) -> float:
    """-> bytes a second of processor time, which other work on the machine changes little; best of some."""
    times = []
    for _ in range(REPEATS):
        began_s = time.thread_time()
        work()
        times.append(time.thread_time() - began_s)
    return nbytes / min(times)


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    """Of blocks of `size` bytes."""
    head_dim = size // LAYERS // 2 // 16  # K and V of 16 tokens, one head, one byte
    layout = kv_layout(
        num_layers=LAYERS, num_kv_heads=1, head_dim=head_dim, block_size=16, dtype="uint8", dtype_bytes=1
    )
    blocks = REGION_BYTES // size
    device, host = (Region.create(REGION_BYTES, name) for name in ("device", "host"))
    places = PositionPlaces(layout=layout, device_blocks=blocks, slots=blocks, slot_bytes=size)
    rng, count, samples = random.Random(size), COPIED_BYTES // size, []
    for number in range(rounds):
        ids = [rng.sample(range(blocks), count) for _ in range(2)]
        turns: dict[str, Callable[[], float]] = {}
        for name, out in (("demote", True), ("promote", False)):
            copy = PositionCopy(out=out, device=tuple(map(BlockId, ids[0])), host=tuple(map(TierSlot, ids[1])))
            src, dst = (device, host) if out else (host, device)
            turns[name] = lambda copy=copy, src=src, dst=dst: timed(
                lambda: copy_records(dst.array_U8, src.array_U8, places.ops(copy)), COPIED_BYTES
            )
        at = [rng.randrange(0, REGION_BYTES - COPIED_BYTES, 4096) for _ in range(2)]
        addresses = [region.array_U8.ctypes.data + at[i] for i, region in enumerate((host, device))]
        turns["memcpy"] = lambda addresses=addresses: timed(
            lambda: ctypes.memmove(addresses[0], addresses[1], COPIED_BYTES), COPIED_BYTES
        )
        order = list(turns) if number % 2 == 0 else list(turns)[::-1]
        samples.append({"size": size, **{name: turns[name]() for name in order}})
    for region in (device, host):
        region.close()
    return samples


def report(samples: list[dict[str, Any]]) -> str:
    lines = ["block      what      GB/s  memcpy GB/s   ratio (range)        bar"]
    for size in sorted({sample["size"] for sample in samples}):
        own = [sample for sample in samples if sample["size"] == size]
        for what in ("demote", "promote"):
            ratios = sorted(each[what] / each["memcpy"] for each in own)
            ratio = statistics.median(ratios)
            rates = [statistics.median(each[name] for each in own) / 1e9 for name in (what, "memcpy")]
            verdict = "" if ratio >= BAR else "  MISSED"
            lines.append(
                f"{size >> 10:5} KiB  {what:8}{rates[0]:6.1f}{rates[1]:13.1f}   {ratio:.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})   {BAR}{verdict}"
            )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64 << 10, 256 << 10, 1 << 20])
    parser.add_argument("--json", type=Path)


def run(options: argparse.Namespace) -> None:
    samples = [sample for size in options.sizes for sample in measure(size, options.rounds)]
    if options.json is not None:
        options.json.write_text(json.dumps(samples))
    print(report(samples))
