"""Run the simulator: `make sim SEED=n STEPS=m`, or `python -m tests.sim`. Ends with 1 when a check does not hold."""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.profiles import PROFILES
from tests.sim.run import Outcome, RunConfig, simulate

PROGRESS_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000, help="requests that the clients send")
    parser.add_argument("--seeds", type=int, default=1, help="so many runs, with this seed and the next ones")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="small")
    parser.add_argument("--fault-gap-s", type=float, default=None, help="mean simulated time between faults; 0: none")
    parser.add_argument("--loss", action="store_true", help="any fault near a request excuses its failure")
    parser.add_argument("--trace", action="store_true", help="print what every node logs, with the simulated time")
    asked = parser.parse_args()
    failed = 0
    for seed in range(asked.seed, asked.seed + asked.seeds):
        config = RunConfig(
            seed=seed,
            requests=asked.steps,
            profile=asked.profile,
            fault_gap_s=asked.fault_gap_s,
            lost_allowed=asked.loss,
            trace=asked.trace,
            progress=_Progress() if asked.seeds == 1 and not asked.trace else None,
        )
        began_s, cpu_s = time.perf_counter(), time.process_time()
        outcome = simulate(config)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        failed += bool(outcome.violations)
        _tell(outcome, wall_s, cpu_s)
    return 1 if failed else 0


class _Progress:
    def __init__(self) -> None:
        self._told_s = self._began_s = time.perf_counter()

    def __call__(self, ended: int, simulated_s: float) -> None:
        now_s = time.perf_counter()
        if now_s - self._told_s >= PROGRESS_S:
            self._told_s = now_s
            rate = ended / (now_s - self._began_s)
            print(f"{ended} requests, {simulated_s:.0f} s simulated, {rate:.0f} a second", file=sys.stderr, flush=True)


def _tell(outcome: Outcome, wall_s: float, cpu_s: float) -> None:
    print(f"seed {outcome.config.seed}, {outcome.config.profile}: {outcome.told()}")
    print(f"  {wall_s:.1f} s, {cpu_s:.1f} s of one core: {outcome.figures.asked / cpu_s:.0f} requests a second of it")
    for violation in outcome.violations:
        print(f"  VIOLATION {violation}")
    if outcome.violations:
        print(f"  Again: {outcome.config.replay()}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
