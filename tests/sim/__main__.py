"""Run the simulator: `make sim SEED=n STEPS=m`, or `python -m tests.sim`. Ends with 1 when a check does not hold."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.sim.profiles import PROFILES
from tests.sim.run import RunConfig
from tests.sim.tally import Result, Tally, run

PROGRESS_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000, help="requests that the clients send")
    parser.add_argument("--seeds", type=int, default=1, help="so many runs, with this seed and the next ones")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds, each run in one of them")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="small")
    parser.add_argument("--fault-gap-s", type=float, default=None, help="mean simulated time between faults; 0: none")
    parser.add_argument("--loss", action="store_true", help="any fault near a request excuses its failure")
    parser.add_argument(
        "--resumable", type=float, default=None, help="share of the requests that are; else the profile's"
    )
    parser.add_argument("--trace", action="store_true", help="print what every node logs, with the simulated time")
    parser.add_argument("--log", type=Path, help="append one line of JSON for each run to this file")
    parser.add_argument("--sum", type=Path, help="run nothing: print the sum of such a file")
    asked = parser.parse_args()
    if asked.sum is not None:
        tally = Tally()
        for line in asked.sum.read_text().splitlines():
            tally.add(Result(**json.loads(line)))
        print(tally.reported())
        return 1 if tally.violations else 0
    configs = [
        RunConfig(
            seed=seed,
            requests=asked.steps,
            profile=asked.profile,
            fault_gap_s=asked.fault_gap_s,
            lost_allowed=asked.loss,
            resumable=asked.resumable,
            trace=asked.trace,
            progress=_Progress() if asked.seeds == 1 and not asked.trace else None,
        )
        for seed in range(asked.seed, asked.seed + asked.seeds)
    ]
    return _run_all(configs, jobs=min(asked.jobs, len(configs)), log=asked.log)


def _run_all(configs: list[RunConfig], *, jobs: int, log: Path | None) -> int:
    tally, began_s = Tally(), time.perf_counter()
    for result in _results(configs, jobs):
        print(result.text, flush=True)
        tally.add(result)
        if log is not None:
            with log.open("a") as file:
                file.write(result.line() + "\n")
    if len(configs) > 1:
        print(f"In all, in {jobs} process{'es' if jobs > 1 else ''}: {tally.reported(time.perf_counter() - began_s)}")
    return 1 if tally.violations else 0


def _results(configs: list[RunConfig], jobs: int) -> Iterator[Result]:
    if jobs <= 1:
        yield from map(run, configs)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, configs)


class _Progress:
    def __init__(self) -> None:
        self._reported_s = self._began_s = time.perf_counter()

    def __call__(self, ended: int, simulated_s: float) -> None:
        now_s = time.perf_counter()
        if now_s - self._reported_s >= PROGRESS_S:
            self._reported_s = now_s
            rate = ended / (now_s - self._began_s)
            print(f"{ended} requests, {simulated_s:.0f} s simulated, {rate:.0f} a second", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
