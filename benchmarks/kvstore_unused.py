"""What the store costs where nothing is reused: random prompts, with the store and without, in short turns.

Two clusters of one prefill and one decode node run all the time, one with host memory and disk below its regions, one
without. `baton bench` asks one of them at a time, in turns, which share no prefix with each other. Regions are so small
that everything is evicted. Processor time is that of the processes of the cluster that is asked, during its turn and
until it is quiet again; what the other one spends meanwhile by being there is in neither.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from engine.demo_model import DemoModelParams, write_demo_model

BLOCKS: Final = 512
"""Of each region: some seconds' worth."""
HOST_BYTES: Final = 96 << 20
DISK_BYTES: Final = 96 << 20
THROUGHPUT_BAR: Final = 0.98
ITL_BAR: Final = 1.05
PORTS: Final = {False: (51070, 51071), True: (51072, 51073)}
"""Of router and directory, by whether there is a store."""
START_S_MAX: Final = 60.0
QUIET_S: Final = 0.5
"""After a turn, in which what is idle is copied down."""
ROOT: Final = Path(__file__).resolve().parents[1]
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
ENVIRONMENT: Final = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100, help="of each turn")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--engine", choices=["mock", "model"], nargs="+", default=["mock", "model"])
    parser.add_argument("--json", type=Path, help="keep the samples there")


class Cluster:
    """Of one prefill and one decode node. Ends with `undo`."""

    def __init__(self, engine: list[str], folder: Path, undo: ExitStack, *, store: bool) -> None:
        self._router, directory = (f"127.0.0.1:{port}" for port in PORTS[store])
        config = folder / "nodes.toml"
        settings = f'store.host_bytes = {HOST_BYTES}\nstore.disk_path = "{folder}"\nstore.disk_bytes = {DISK_BYTES}\n'
        config.write_text(f"[prefill]\n{settings}[decode]\n{settings}" if store else "")
        command = [
            sys.executable, "-m", "cli.main", "up", *engine, "--blocks", str(BLOCKS), "--config", str(config),
            "--listen", self._router, "--directory-listen", directory, "--prefill", "1", "--decode", "1",
        ]  # fmt: skip
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, **quiet)  # type: ignore[call-overload]
        undo.callback(self._end)
        self._folder = folder

    def _end(self) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait()

    def turn(self, concurrency: int, *, requests: int, seed: int) -> dict[str, float]:
        """-> tokens a second of prompts and answers, P99 of gaps, and processor time of the cluster's processes."""
        figures = self._folder / "run.json"
        command = [
            sys.executable, "-m", "cli.main", "bench", "--router", self._router, "--prompt-tokens", "256",
            "--output-tokens", "32", "--requests", str(requests), "--warm-up", str(min(8, requests - 1)),
            "--concurrency", str(concurrency), "--seed", str(seed), "--json", str(figures),
        ]  # fmt: skip
        before_s = self._cpu_s()
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, **quiet)  # type: ignore[call-overload]
        time.sleep(QUIET_S)
        cpu_s = self._cpu_s() - before_s
        found: dict[str, Any] = json.loads(figures.read_text())
        if found["requests"]["failed"]:
            raise SystemExit(f"{found['requests']['failed']} requests failed: {found['errors']}")
        rates = found["throughput"]
        return {
            "tokens_per_s": rates["prompt_tokens_per_s"] + rates["output_tokens_per_s"],
            "itl_p99_ms": found["latency_ms"]["itl"]["p99"],
            "cpu_s": cpu_s,
        }

    def wait(self) -> None:
        """Until it answers."""
        end_s = time.monotonic() + START_S_MAX
        while True:
            try:
                self.turn(1, requests=2, seed=0)
            except subprocess.CalledProcessError:
                if time.monotonic() > end_s or self._process.poll() is not None:
                    raise
                time.sleep(1)
            else:
                return

    def _cpu_s(self) -> float:
        """Of the supervisor and of all that it has started, directly or not."""
        parents, ticks = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            pid = int(stat.parent.name)
            parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
        own = {self._process.pid}
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return sum(ticks[pid] for pid in own) / TICKS_PER_S


def measure(kind: str, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    engine = ["--engine-kind", "mock"] if kind == "mock" else ["--model", str(folder / "model")]
    rng = random.Random(kind)
    with ExitStack() as undo:
        clusters = {}
        for store in (False, True):
            place = folder / f"{kind}-{store}"
            place.mkdir()
            clusters[store] = Cluster(engine, place, undo, store=store)
        for cluster in clusters.values():
            cluster.wait()
        for number in range(-1, options.rounds):  # the first round fills the regions
            found = {}
            for store in rng.sample((False, True), 2):
                seed = 2 * number + store + 10
                found[store] = clusters[store].turn(options.concurrency, requests=options.requests, seed=seed)
            if number >= 0:
                samples.append({"engine": kind, "with": found[True], "without": found[False]})
                _print(samples[-1])
    return samples


def run(options: argparse.Namespace) -> None:
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_demo_model(folder / "model", DemoModelParams())
        for kind in options.engine:
            mine = measure(kind, options, folder)
            _summary(kind, mine)
            samples += mine
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1))


def _print(sample: dict[str, Any]) -> None:
    on, off = sample["with"], sample["without"]
    print(
        f"{sample['engine']:6} {on['tokens_per_s']:9.0f} tokens/s with the store, {off['tokens_per_s']:9.0f} without; "
        f"ITL P99 {on['itl_p99_ms']:.2f} ms, {off['itl_p99_ms']:.2f}; "
        f"processor {on['cpu_s']:.2f} s, {off['cpu_s']:.2f}",
        flush=True,
    )


def _summary(kind: str, samples: list[dict[str, Any]]) -> None:
    """Medians of the rounds' ratios, each with its middle half and its bar."""
    bars: tuple[tuple[str, float, Callable[[float], bool]], ...] = (
        ("tokens_per_s", THROUGHPUT_BAR, lambda ratio: ratio < THROUGHPUT_BAR),
        ("itl_p99_ms", ITL_BAR, lambda ratio: ratio > ITL_BAR),
        ("cpu_s", 1 / THROUGHPUT_BAR, lambda ratio: ratio * THROUGHPUT_BAR > 1),
    )
    for name, bar, misses in bars:
        ratios = sorted(sample["with"][name] / sample["without"][name] for sample in samples)
        ratio, quarter = statistics.median(ratios), len(ratios) // 4
        whole = sum(sample["with"][name] for sample in samples) / sum(sample["without"][name] for sample in samples)
        missed = " MISSED" if misses(ratio) else ""
        print(
            f"{kind:6} {name}: {ratio:.3f} of without (half of the rounds: {ratios[quarter]:.3f} to "
            f"{ratios[-1 - quarter]:.3f}; of the sums {whole:.3f}), bar {bar:.2f}{missed}"
        )
