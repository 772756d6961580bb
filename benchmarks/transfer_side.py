"""What every side of the transfer benchmark has: its memory, the plan of a run, and a parent that tells it what to do.

Needs NumPy only: the peers' sides run in an environment without our packages.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import numpy as np

REGION_BYTES = 1 << 29
MOVED_BYTES = 128 << 20
CHECKED_BLOCKS_MAX = 64
_MADV_POPULATE_WRITE = 23


@dataclass(frozen=True)
class Plan:
    """Blocks of `size` bytes from and to random places, none used twice. Offsets are int64, one for each block."""

    size: int
    src: np.ndarray
    dst: np.ndarray


def plan_of(size: int, seed: int, moved_bytes: int = MOVED_BYTES, region_bytes: int = REGION_BYTES) -> Plan:
    rng = np.random.default_rng(seed)
    places, count = region_bytes // size, moved_bytes // size
    src, dst = (rng.permutation(places)[:count].astype(np.int64) * size for _ in range(2))
    return Plan(size, src, dst)


def memory(shared: bool = True) -> np.ndarray:
    """A region whose pages exist, of the kind that the machine gives unasked. Never given back: the process ends."""
    if shared:
        fd = os.memfd_create("benchmark")
        os.ftruncate(fd, REGION_BYTES)
        mapping = mmap.mmap(fd, REGION_BYTES)
    else:
        mapping = mmap.mmap(-1, REGION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(_MADV_POPULATE_WRITE)
    return np.frombuffer(mapping, np.uint8)


def fill(region_U8: np.ndarray) -> None:
    """Words that tell where they are from."""
    words = region_U8.view(np.uint64)
    words[:] = np.arange(len(words), dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)


def has_landed(region_U8: np.ndarray, plan: Plan, checked_max: int = CHECKED_BLOCKS_MAX) -> bool:
    """So many of the blocks, compared with what `fill` puts at their source."""
    for i in np.linspace(0, len(plan.src) - 1, min(len(plan.src), checked_max)).astype(int):
        first = int(plan.src[i]) // 8
        wanted = np.arange(first, first + plan.size // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        if not np.array_equal(region_U8[plan.dst[i] : plan.dst[i] + plan.size].view(np.uint64), wanted):
            return False
    return True


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Side(Protocol):
    """A receiver tells its `address`; a sender connects to it, and then moves blocks as often as it is told."""

    region_U8: np.ndarray

    def address(self) -> dict[str, Any]: ...

    def connect(self, address: dict[str, Any]) -> None: ...

    def prepare(self, plan: Plan) -> Any:
        """What is not part of the measured time."""
        ...

    def move(self, prepared: Any) -> None:
        """Returns when every block is in its place. A side may have `move_each` too: see `_ping`."""
        ...


def serve(side: Side, replies: TextIO = sys.stdout) -> None:
    """Do what the parent says, a line of JSON each, until it closes stdin."""
    prepared: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "address":
                reply: Any = side.address()
            case "connect":
                side.connect(command["address"])
                reply = None
            case "fill":
                fill(side.region_U8)
                reply = None
            case "prepare":
                prepared = side.prepare(_plan(**command))
                reply = None
            case "move":
                reply = _move(side, prepared)
            case "ping":
                reply = _ping(side, command["size"], command["times"])
            case "cpu":
                reply = cpu_s()
            case "check":
                reply = has_landed(side.region_U8, _plan(**command))
            case unknown:
                raise AssertionError(unknown)
        print(json.dumps({"reply": reply}), file=replies, flush=True)
    os._exit(0)  # nothing to give back, and the peers' destructors take long


def _plan(size: int, seed: int, nbytes: int = MOVED_BYTES) -> Plan:
    return plan_of(size, seed, nbytes)


def _move(side: Side, prepared: Any) -> dict[str, float]:
    cpu, start = cpu_s(), time.perf_counter()
    side.move(prepared)
    return {"seconds": time.perf_counter() - start, "cpu_s": cpu_s() - cpu}


def _ping(side: Side, size: int, times: int) -> list[float]:
    """Microseconds of each of many moves of one block, after as many that are not counted."""
    plan = plan_of(size, 0)
    prepared = [side.prepare(Plan(size, plan.src[i : i + 1], plan.dst[i : i + 1])) for i in range(times)]
    if hasattr(side, "move_each"):
        side.move_each(prepared)
        return list(side.move_each(prepared))
    for one in prepared:
        side.move(one)
    took = []
    for one in prepared:
        start = time.perf_counter()
        side.move(one)
        took.append((time.perf_counter() - start) * 1e6)
    return took
