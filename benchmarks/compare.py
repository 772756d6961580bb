"""Is this tree as fast as an older one? Transfers, and handoffs if asked for, of two checkouts in alternating rounds.

    python -m benchmarks.compare OLD NEW --json compare.json
    python -m benchmarks.compare OLD NEW --json compare.json --handoff
    python -m benchmarks.compare OLD NEW --json compare.json --report

OLD and NEW are folders, each with its own environment in .venv. Each of the nine rounds runs `benchmarks.transfer`
(shm, tcp and the ping, our side only) in one tree and then in the other; which comes first alternates. A figure of a
round is the ratio of the two medians, above 1 where NEW is faster. Rounds are added to the JSON file, so that a
measurement can be made in several pieces (`--rounds 3`).

Fails where the 95% interval of the mean ratio lies wholly below 0.97. The mean is that of the logarithms, its interval
by Student's t.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = 9
RATIO_MIN = 0.97
TRANSFER_SIZES = (1 << 14, 1 << 18, 1 << 22)
OUR_METHODS = ("baton", "baton, 1 thread", "baton, 1 stream", "baton shm", "baton tcp")
HANDOFF_LENGTHS = "512,4096"
T_95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)
"""Of Student's t, by the degrees of freedom, from 1 on."""

Round = dict[str, dict[str, float]]
"""Of one round: for each tree, "old" and "new", its speed by the name of the figure. More is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """95% of a mean ratio, new to old."""

    low: float
    mean: float
    high: float

    @property
    def slower(self) -> bool:
        return self.high < RATIO_MIN


def interval_of(ratios: list[float]) -> Interval:
    """Of at least two ratios."""
    assert len(ratios) >= 2, "one round has no interval"
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    freedom = min(len(logs) - 1, len(T_95))
    half = T_95[freedom - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(low=math.exp(mean - half), mean=math.exp(mean), high=math.exp(mean + half))


def transfer_speeds(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Median GB/s by transport, method and size; of the ping 1 / median microseconds."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        name = f"{sample['transport']}, {sample['method']}, {sample['size'] >> 10} KiB"
        found[name] += [1 / us for us in sample["us"]] if "us" in sample else [sample["gb_s"]]
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def handoff_speeds(samples: list[dict[str, Any]]) -> dict[str, float]:
    """1 / median exposed milliseconds by transport, case and length."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        name = f"handoff over {sample['transport']}, {sample['case']}, {sample['length']} tokens"
        found[name].append(1 / sample["exposed_ms"])
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def report(rounds: list[Round]) -> tuple[str, bool]:
    """A line for each figure that every round has; True: none is slower."""
    names = sorted(set.intersection(*(set(each["old"]) & set(each["new"]) for each in rounds)))
    lines, fine = [f"{'new / old':44} 95% interval        mean   ({len(rounds)} rounds)"], True
    for name in names:
        found = interval_of([each["new"][name] / each["old"][name] for each in rounds])
        fine &= not found.slower
        verdict = f"  SLOWER than {RATIO_MIN}" if found.slower else ""
        lines.append(f"{name:44} {found.low:.3f} .. {found.high:.3f}   {found.mean:.3f}{verdict}")
    return "\n".join(lines), fine


def _run(tree: Path, module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a benchmark of this tree has measured."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "proto")])}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "samples.json"
        command = [str(tree / ".venv/bin/python"), "-m", module, "--json", str(target), *arguments]
        subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.DEVNULL)
        samples: list[dict[str, Any]] = json.loads(target.read_text())
        return samples


def measure(tree: Path, *, handoff: bool) -> dict[str, float]:
    """One round of one tree."""
    methods = [part for method in OUR_METHODS for part in ("--method", method)]
    sizes = ["--sizes", *map(str, TRANSFER_SIZES)]
    speeds = transfer_speeds(_run(tree, "benchmarks.transfer", "--rounds", "1", *methods, *sizes))
    if handoff:
        arguments = ("--rounds", "1", "--lengths", HANDOFF_LENGTHS, "--cases", "cold,prefill-cached")
        speeds |= handoff_speeds(_run(tree, "benchmarks.handoff", *arguments))
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="a checkout with its .venv")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--json", type=Path, required=True, help="rounds are read from and added to this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--handoff", action="store_true", help="handoffs too: minutes a round")
    parser.add_argument("--report", action="store_true", help="measure nothing, compare what the file has")
    options = parser.parse_args()
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    rounds: list[Round] = json.loads(options.json.read_text()) if options.json.exists() else []
    for _ in range(0 if options.report else options.rounds):
        order = ("old", "new") if len(rounds) % 2 == 0 else ("new", "old")
        rounds.append({which: measure(trees[which], handoff=options.handoff) for which in order})
        options.json.write_text(json.dumps(rounds))
        print(f"round {len(rounds)}", file=sys.stderr, flush=True)
    text, fine = report(rounds)
    print(text)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
