"""What the store costs where nothing is reused: random prompts, with the store and without, alternating.

`baton bench` starts one prefill and one decode node and sends prompts that share no prefix. Every block goes down to
host memory, and to the disk as that fills. The region is so small that everything is evicted. Processor time is that of
the whole cluster, less that of a run of one request, the least of two: the start, which makes and fills the tiers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.demo_model import DemoModelParams, write_demo_model

BLOCKS = 512
"""Of each region: some seconds' worth."""
HOST_BYTES = 96 << 20
DISK_BYTES = 96 << 20
THROUGHPUT_BAR = 0.98
ITL_BAR = 1.05
ROOT = Path(__file__).resolve().parents[1]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300, help="of each run")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--engine", choices=["mock", "model"], nargs="+", default=["mock", "model"])
    parser.add_argument("--json", type=Path, help="keep the samples there")


def once(
    engine: list[str], folder: Path, concurrency: int, *, requests: int, store: bool, seed: int
) -> dict[str, float]:
    """One run -> tokens a second of prompts and answers, P99 of gaps, and processor time of the whole cluster with its
    start, which says more than the clock where other work runs beside it."""
    config, figures = folder / "nodes.toml", folder / "run.json"
    settings = f'store.host_bytes = {HOST_BYTES}\nstore.disk_path = "{folder}"\nstore.disk_bytes = {DISK_BYTES}\n'
    config.write_text(f"[prefill]\n{settings}[decode]\n{settings}" if store else "")
    command = [
        sys.executable, "-m", "cli.main", "bench", *engine, "--blocks", str(BLOCKS), "--config", str(config),
        "--prompt-tokens", "256", "--output-tokens", "32", "--requests", str(requests),
        "--warm-up", str(min(20, requests - 1)), "--concurrency", str(concurrency), "--seed", str(seed),
        "--json", str(figures),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto")])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=True, **quiet)  # type: ignore[call-overload]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = json.loads(figures.read_text())
    if found["requests"]["failed"]:
        raise SystemExit(f"{found['requests']['failed']} requests failed: {found['errors']}")
    rates = found["throughput"]
    return {
        "tokens_per_s": rates["prompt_tokens_per_s"] + rates["output_tokens_per_s"],
        "itl_p99_ms": found["latency_ms"]["itl"]["p99"],
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def run(options: argparse.Namespace) -> None:
    samples: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_demo_model(folder / "model", DemoModelParams())
        for kind in options.engine:
            engine = ["--mock"] if kind == "mock" else ["--model", str(folder / "model")]
            one = partial(once, engine, folder, options.concurrency)
            start_s = {
                store: min(one(requests=1, store=store, seed=seed)["cpu_s"] for seed in range(2))
                for store in (False, True)
            }
            print(f"{kind:6} start: processor {start_s[True]:.1f} s with the store, {start_s[False]:.1f} without")
            for seed in range(options.rounds):
                order = (True, False) if seed % 2 else (False, True)
                pair = {store: one(requests=options.requests, store=store, seed=seed) for store in order}
                for store, found in pair.items():
                    found["cpu_s"] -= start_s[store]
                samples.append({"engine": kind, "with": pair[True], "without": pair[False]})
                _print(samples[-1])
            _summary(kind, [sample for sample in samples if sample["engine"] == kind])
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1))


def _print(sample: dict[str, Any]) -> None:
    on, off = sample["with"], sample["without"]
    print(
        f"{sample['engine']:6} {on['tokens_per_s']:9.0f} tokens/s with the store, {off['tokens_per_s']:9.0f} without; "
        f"ITL P99 {on['itl_p99_ms']:.2f} ms, {off['itl_p99_ms']:.2f}; "
        f"processor {on['cpu_s']:.1f} s, {off['cpu_s']:.1f}",
        flush=True,
    )


def _summary(kind: str, samples: list[dict[str, Any]]) -> None:
    """Medians over the rounds, each with its bar."""
    bars: tuple[tuple[str, float, Callable[[float], bool]], ...] = (
        ("tokens_per_s", THROUGHPUT_BAR, lambda ratio: ratio < THROUGHPUT_BAR),
        ("itl_p99_ms", ITL_BAR, lambda ratio: ratio > ITL_BAR),
        ("cpu_s", 1 / THROUGHPUT_BAR, lambda ratio: ratio * THROUGHPUT_BAR > 1),
    )
    for name, bar, misses in bars:
        ratios = sorted(sample["with"][name] / sample["without"][name] for sample in samples)
        ratio = statistics.median(ratios)
        missed = " MISSED" if misses(ratio) else ""
        print(f"{kind:6} {name}: {ratio:.3f} of without ({ratios[0]:.3f} to {ratios[-1]:.3f}), bar {bar:.2f}{missed}")
