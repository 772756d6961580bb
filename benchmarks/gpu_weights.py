"""The part of `benchmarks/gpu.py` about rounded weights: how fast they decode, and how far they move the scores."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine.gpu.linears import INT4_GROUP, PACKS, Int4Matmul
from engine.model_config import ModelConfig, Quantisation, UnsupportedModelError
from engine.models.matmul import Linear
from engine.types import Batch, NullSink
from tests.support.every_row import score

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench
    from benchmarks.gpu_children import Figures

BITS = {Quantisation.NONE: 16.0, Quantisation.FP8: 8.0, Quantisation.INT4: 4 + 32 / INT4_GROUP}
PRODUCTS_AT_A_TIME = 20
"""Timed together: one takes no longer than its launch."""


class Widened(Mapping[str, torch.Tensor]):
    """Tensors as float32, each made when it is asked for: all of a large model's at once would not fit beside it."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name].float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def measure(
    bench: Bench,
    config: ModelConfig,
    given: Mapping[str, torch.Tensor],
    limits: Mapping[str, float],
    figures: Figures,
    *,
    decode: Callable[[int, int], Batch],
    prompt: Batch,
    rows: tuple[int, ...],
    context: int,
) -> None:
    """Of each rounding: decode steps per second by batch size, the scores' distance from those of float32, products.

    `decode` makes a batch of so many sequences with such a context; `rows` are tried one after another.
    """
    exact = _scores(bench, config, Widened(given), prompt)
    num_blocks = max(_blocks(prompt), _blocks(decode(max(rows), context))) + 1
    figures.add(decode_context=context, scored_tokens=len(exact))
    for quantisation in (Quantisation.NONE, *PACKS):
        name = "bfloat16" if quantisation is Quantisation.NONE else quantisation.value
        try:
            runner = bench.runner(config, given, num_blocks, max(rows), 2 * context, quantisation)
        except UnsupportedModelError as refused:
            figures.add(**{name: {"refused": str(refused)}})
            continue
        found = score(runner, prompt).cpu().float()
        found_here: dict[str, Any] = {
            "error_in_deviations": float((found - exact).square().mean().sqrt() / exact.std()),
            "best_token_agrees": float((found.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()),
            "weights": runner.describe()["weights"],
            "decode": {},
        }
        for count in rows:
            batch = decode(count, context)
            found_here["decode"][str(count)] = _decode(bench, config, runner, batch, BITS[quantisation], limits)
            figures.add(**{name: found_here})
        del runner, found
        bench.free()
        figures.add(**{name: found_here | {"products": _products(bench, quantisation, config)}})
        with contextlib.suppress(OSError):  # whoever looked on may have gone
            print("weights", name, json.dumps(figures.values[name]), flush=True)


def _blocks(batch: Batch) -> int:
    return 1 + max(block for s in batch.slices for block in s.block_table)


def _scores(bench: Bench, config: ModelConfig, tensors: Mapping[str, torch.Tensor], prompt: Batch) -> torch.Tensor:
    runner = bench.runner(config, tensors, _blocks(prompt) + 1, 0, 1)
    found = score(runner, prompt).cpu()
    del runner
    bench.free()
    return found


def _decode(
    bench: Bench, config: ModelConfig, runner: Any, batch: Batch, bits: float, limits: Mapping[str, float]
) -> dict[str, float]:
    step_s = bench.time_s(lambda: runner.run(batch, NullSink()))
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
    tokens = sum(s.stop for s in batch.slices)
    moved = config.num_layers * (layer * bits / 8 + 4 * kv_size * tokens) + 2 * config.vocab_size * config.hidden_size
    rate = moved / step_s / 1e9
    of_copy_rate = {"of_copy_rate": rate / limits["copy_gbytes_s"]} if "copy_gbytes_s" in limits else {}
    return {"steps_s": 1 / step_s, "gbytes_s": rate, **of_copy_rate}


def _products(bench: Bench, quantisation: Quantisation, config: ModelConfig) -> dict[str, Any]:
    """Microseconds of one product (gate and up joined) by rows; of 4 bits by each of the ways there are."""
    dtype = torch.bfloat16
    weight = torch.randn(2 * config.intermediate_size, config.hidden_size, device=bench.device, dtype=dtype)
    product = Linear(weight=weight) if quantisation is Quantisation.NONE else PACKS[quantisation](weight)
    counts = (1, 4) if bench.tiny else (1, 16, 32, 64, 128, 256, 1024)
    inputs = {count: torch.randn(count, config.hidden_size, device=bench.device, dtype=dtype) for count in counts}

    def microseconds(multiply: Callable[[torch.Tensor], torch.Tensor], x_TX: torch.Tensor) -> float:
        def several() -> None:
            for _ in range(PRODUCTS_AT_A_TIME):
                multiply(x_TX)

        return bench.time_s(several) / PRODUCTS_AT_A_TIME * 1e6

    figures: dict[str, Any] = {"us": {str(count): microseconds(product, x) for count, x in inputs.items()}}
    if isinstance(product, Int4Matmul):
        ways = {"unpacked_us": product.unpacked}
        if product.fits_kernel:
            ways["our_kernel_us"] = product.by_tiles
        if bench.device.type == "cuda":
            ways["torch_kernel_us"] = product.by_torch_tiles
        for name, way in ways.items():
            figures[name] = {str(count): microseconds(way, x) for count, x in inputs.items()}
    return figures
