"""What KV that outlives its request is worth to a chat: time to first token of later turns, with the store and without.

    python -m benchmarks.kvstore chat                        # about 15 minutes, alternating
    python -m benchmarks.kvstore chat --without-tree ../old  # without: the code of another checkout

Each round starts a cluster of one prefill and one decode node of the demo model twice: once with host memory for every
conversation below each node's region, once with none. `baton bench` then sends 20 conversations of 8 turns to it, in
rounds: 60 tokens a question, 200 an answer. A region holds a quarter of what the conversations come to. The first turn
of each, which nobody has computed before, is left out. Figures: mean and p50 of TTFT over all later turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any, Final

from engine.demo_model import DemoModelParams, write_demo_model

CONVERSATIONS: Final = 20
TURNS: Final = 8
QUESTION_TOKENS: Final = 60
ANSWER_TOKENS: Final = 200
BLOCK_SIZE: Final = 16
REGION_SHARE: Final = 4
MODEL: Final = DemoModelParams(num_layers=8, hidden_size=256, intermediate_size=768)
HOST_BYTES: Final = 1 << 30
"""More than all conversations take."""
SEED: Final = 17


def region_blocks() -> int:
    """A quarter of what all conversations have at their end."""
    return CONVERSATIONS * TURNS * (QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE // REGION_SHARE


def run_bench(tree: Path, model: Path, folder: Path, *, host_bytes: int, concurrency: int) -> dict[str, Any]:
    """One run of `baton bench` with the code of `tree` -> its figures."""
    config, figures = folder / "nodes.toml", folder / "run.json"
    store = f"[prefill.store]\nhost_bytes = {host_bytes}\n[decode.store]\nhost_bytes = {host_bytes}\n"
    config.write_text(store if host_bytes else "")
    command = [
        sys.executable, "-m", "cli.main", "bench", "--model", str(model), "--blocks", str(region_blocks()),
        "--config", str(config), "--conversations", str(CONVERSATIONS), "--turns", str(TURNS),
        "--prompt-tokens", str(QUESTION_TOKENS), "--output-tokens", str(ANSWER_TOKENS),
        "--concurrency", str(concurrency), "--warm-up", str(CONVERSATIONS), "--seed", str(SEED), "--json", str(figures),
    ]  # fmt: skip
    path = os.pathsep.join([str(tree), str(tree / "proto")])
    subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(figures.read_text())
    if found["requests"]["failed"]:
        raise SystemExit(f"{found['requests']['failed']} requests failed: {found['errors']}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=2)
    parser.add_argument("--without-tree", type=Path, help="checkout whose code runs without the store; default: this")


def run(options: argparse.Namespace) -> None:
    here = Path(__file__).resolve().parents[1]
    trees = {"with": here, "without": (options.without_tree or here).resolve()}
    means: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_demo_model(model, MODEL)
        for _ in range(options.rounds):
            for what, tree in trees.items():
                host_bytes = HOST_BYTES if what == "with" else 0
                found = run_bench(tree, model, Path(name), host_bytes=host_bytes, concurrency=options.concurrency)
                ttft, itl = found["latency_ms"]["ttft"], found["latency_ms"]["itl"]
                means[what].append(ttft["mean"])
                print(
                    f"{what:8} TTFT mean {ttft['mean']:.0f} ms, p50 {ttft['p50']:.0f}, p99 {ttft['p99']:.0f}; "
                    f"ITL p50 {itl['p50']:.1f}, p99 {itl['p99']:.1f}; {found['seconds']:.0f} s",
                    flush=True,
                )
    print(f"TTFT with the store over without: {mean(means['with']) / mean(means['without']):.2f}")
