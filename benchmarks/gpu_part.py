"""One part of `benchmarks/gpu.py`, in a process of its own.

python -m benchmarks.gpu_part NAME FIGURES.json --device cuda --limits '{}'  < a pipe that the parent holds open
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_children import Figures, end_with_parent

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench

TRACED_REPEATS = 3


def limits(bench: Bench, figures: Figures) -> None:
    """What the device does at best: a large matrix product, and a copy within its memory (read and written)."""
    import torch

    side = 64 if bench.tiny else 8192
    dtype = torch.float32 if bench.tiny else torch.bfloat16
    a = torch.randn(side, side, device=bench.device, dtype=dtype)
    b = torch.randn(side, side, device=bench.device, dtype=dtype)
    figures.add(matrix_tflops=2 * side**3 / bench.time_s(lambda: a @ b) / 1e12)
    source = torch.empty((1 << 20) if bench.tiny else (4 << 30), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    figures.add(copy_gbytes_s=2 * len(source) / bench.time_s(lambda: target.copy_(source)) / 1e9)


def weights(bench: Bench, measured: dict[str, float], figures: Figures) -> None:
    """Weights in 16, 8 and 4 bits: see benchmarks/gpu_weights.py."""
    import torch

    from benchmarks import gpu_weights
    from benchmarks.gpu_bench import config_of, decode_batch, random_weights, slice_of
    from engine.types import Batch

    config = config_of("tiny" if bench.tiny else "qwen3-8b")
    prompt_len, rows, context = (24, (1, 2), 20) if bench.tiny else (64, (1, 16, 64), 1024)
    gpu_weights.measure(
        bench,
        config,
        random_weights(config, torch.bfloat16, bench.device),
        measured,
        figures,
        decode=decode_batch,
        prompt=Batch(slices=(slice_of("prompt", [7 * i % 61 for i in range(prompt_len)], 0, prompt_len, 0),)),
        rows=rows,
        context=context,
    )


def overlap_trace(bench: Bench, trace: Path | None, figures: Figures) -> None:
    """A handoff under torch's profiler, in the format that Perfetto opens."""
    import torch

    from benchmarks import gpu_handoff

    if trace is None:
        figures.add(skipped="no --trace")
        return
    bench.repeats = min(bench.repeats, TRACED_REPEATS)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        gpu_handoff.measure(bench, Figures())
    profile.export_chrome_trace(str(trace))
    figures.add(file=str(trace), bytes=trace.stat().st_size)


def part_of(name: str, bench: Bench, measured: dict[str, float], trace: Path | None) -> Callable[[Figures], None]:
    from benchmarks import gpu_card, gpu_exactness, gpu_handoff, gpu_kernels, gpu_model, gpu_spill

    parts: dict[str, Callable[[Figures], None]] = {
        "kernels": lambda figures: gpu_kernels.measure(bench, figures),
        "limits": lambda figures: limits(bench, figures),
        "exactness": lambda figures: gpu_exactness.measure(bench, figures),
        "handoff": lambda figures: gpu_handoff.measure(bench, figures),
        "trace": lambda figures: overlap_trace(bench, trace, figures),
        "card": lambda figures: gpu_card.card(bench.device.type, figures),
        "spill": lambda figures: gpu_spill.measure(bench, figures),
        "weights": lambda figures: weights(bench, measured, figures),
    }
    return parts.get(name) or (lambda figures: gpu_model.measure(bench, name, measured, figures))


def facts(device: str) -> dict[str, Any]:
    import torch
    import triton

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, interpreted"
    return {
        "device": name, "torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("figures", type=Path)
    parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limits", type=json.loads, default={}, help="the figures of the part `limits`, as JSON")
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    end_with_parent()
    figures = Figures(arguments.figures)
    try:
        if arguments.device == "cpu":
            from engine.gpu.interpreter import use_interpreter

            use_interpreter()
        import torch

        figures = Figures(arguments.figures, facts(arguments.device))
        figures.add()
        from benchmarks.gpu_bench import Bench

        bench = Bench(device=arguments.device, tiny=arguments.tiny)
        with torch.inference_mode():
            part_of(arguments.name, bench, arguments.limits, arguments.trace)(figures)
    except Exception as error:
        # The other parts go on: a machine may be there for minutes only.
        traceback.print_exc()
        figures.add(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
