"""Does a cluster's memory grow while it works? Resident memory of every process, each second, under full load.

    python -m benchmarks.memory --seconds 600 --json memory.json       # twelve minutes with the warm-up
    python -m benchmarks.memory --engine mock --seconds 180

One router, one prefill and one decode node. Prompts and answers of random lengths, some with a common beginning,
some answers given up in their middle, as many at a time as the nodes take. Reported for each process: the median of the
first and of the last tenth of the time, their ratio, and the slope of a line through all samples. Exit status 1 where a
ratio is over 1 + `--growth-max`. The region is a part of it and never grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from baton.client import AsyncClient
from cli.bench_load import RouterTarget, TargetError
from cli.services import Service
from cli.supervisor import Cluster, ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model

CONTEXT = 2_048
BLOCKS = 2_048
REMEMBERED = 4_096
"""Blocks of prompts that router and prefill node remember: so few that they are all there after the warm-up."""
COMMON = 256
"""Tokens of the common beginning that a third of the prompts have."""
ANSWER_S_MAX = 120.0
PARTS = 10
MIB = 1 << 20


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def verdict(samples: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Of (seconds, bytes): see the top of the file."""
    tenth = max(1, len(samples) // PARTS)
    first, last = (statistics.median(value for _, value in part) for part in (samples[:tenth], samples[-tenth:]))
    slope = statistics.linear_regression(*zip(*samples, strict=True)).slope if len(samples) > 1 else 0.0
    return {
        "first_mib": first / MIB,
        "last_mib": last / MIB,
        "most_mib": max(value for _, value in samples) / MIB,
        "ratio": last / first,
        "slope_mib_per_min": slope * 60 / MIB,
    }


class Load:
    """Requests without end, so many at a time."""

    def __init__(self, target: RouterTarget, seed: str) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._common = self._ids(COMMON)
        self.ended = self.given_up = self.refused = 0

    def _ids(self, length: int) -> list[int]:
        return [self._rng.randrange(3, 500) for _ in range(length)]

    async def worker(self) -> None:
        rng = self._rng
        while True:
            ids = self._ids(rng.randrange(1, 700))
            if rng.random() < 1 / 3:
                ids = self._common + ids
            answer = rng.randrange(1, 200)
            gives_up_after = rng.randrange(1, 100) if rng.random() < 0.05 else answer + 1
            reported = 0
            try:
                async with aclosing(self._target.prepare(ids, answer)()) as stream:
                    async for message in stream:
                        reported += message.tokens
                        if reported >= gives_up_after:
                            break
            except TargetError:
                self.refused += 1
                await asyncio.sleep(0.2)
                continue
            self.ended += reported >= answer
            self.given_up += reported < answer


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    mock = args.engine == "mock"
    places: dict[str, object] = {"engine.sequences_max": args.requests}
    spec = ClusterSpec(
        prefill=1, decode=1, threads=1, blocks=BLOCKS,
        model=None if mock else str(args.model_dir), engine_kind=EngineKind.MOCK if mock else None,
        flags={
            Service.PREFILL: {**places, "affinity_blocks_max": REMEMBERED},
            Service.DECODE: {**places, "requests_max": args.requests},
        },
    )  # fmt: skip
    samples: dict[str, list[tuple[float, int]]] = {}
    cluster = Cluster(spec)
    try:
        await cluster.start()
        client = AsyncClient(cluster.router, timeout_s=ANSWER_S_MAX, retries_max=0)
        load = Load(RouterTarget(client, router=cluster.router, temperature=0.8), args.seed)
        workers = [asyncio.create_task(load.worker()) for _ in range(args.requests)]
        try:
            await asyncio.sleep(args.warm_up_s)
            before, begin_s = load.ended, time.monotonic()
            while (at_s := time.monotonic() - begin_s) < args.seconds:
                for name, pid in cluster.pids.items():
                    samples.setdefault(name, []).append((at_s, resident_bytes(pid)))
                await asyncio.sleep(args.every_s)
        finally:
            for task in workers:
                task.cancel()
            ends = await asyncio.gather(*workers, return_exceptions=True)
            await client.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end
    finally:
        await cluster.stop()
    found = {name: verdict(own) for name, own in samples.items()}
    counts = {"ended": load.ended - before, "given_up": load.given_up, "refused": load.refused}
    return {"engine": args.engine, "seconds": args.seconds, "requests": counts, "found": found, "samples": samples}


def table(found: dict[str, dict[str, float]]) -> str:
    lines = ["process        first MiB   last MiB   most MiB    ratio  MiB/min"]
    for name, own in found.items():
        lines.append(
            f"{name:12}{own['first_mib']:12.1f}{own['last_mib']:11.1f}{own['most_mib']:11.1f}{own['ratio']:9.4f}"
            f"{own['slope_mib_per_min']:9.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("model", "mock"), default="model")
    parser.add_argument("--model-dir", type=Path, default=Path("build/memory-model"))
    parser.add_argument("--requests", type=int, default=32, help="at a time")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--warm-up-s", type=float, default=120.0)
    parser.add_argument("--every-s", type=float, default=1.0)
    parser.add_argument("--growth-max", type=float, default=0.02)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.engine == "model" and not (args.model_dir / "config.json").exists():
        write_demo_model(args.model_dir, DemoModelParams(vocab_size=2_048, context_len_max=CONTEXT))
    outcome = asyncio.run(measure(args))
    print(outcome["requests"])
    print(table(outcome["found"]))
    if args.json is not None:
        args.json.write_text(json.dumps(outcome) + "\n")
    if any(own["ratio"] > 1 + args.growth_max for own in outcome["found"].values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
