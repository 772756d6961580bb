"""Two builds of the compute kernels in one process: is the newer one as fast as the older?

    git worktree add OLD COMMIT
    python -m benchmarks.engine_libraries OLD/engine/native/kernels_avx512.c engine/native/kernels_avx512.c \\
        --model 473m

Both libraries compute the same steps over the same weights, keys and values with the same threads: in turn a block of
some milliseconds of the one and of the other, and next time the other way round. What changes in the machine within a
minute changes both. A pair of blocks gives one ratio, above 1 where the newer one is faster; the table tells their
median, its 95% interval by resampling, and whether both give the same bits. Prefill goes through one layer
only, which has all its products: a whole prefill takes seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from baton.cores import own_cores
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from baton.native import load
from benchmarks.engine_cases import MODELS, write_config
from engine.kv_pool import KvPool
from engine.model_config import ModelConfig, load_model_config, weight_shapes
from engine.models.matmul import NativePacking
from engine.models.native_decoder import NativeDecoder
from engine.native.kernels import Kernels, Workspace
from engine.runner import plan_attention
from engine.types import Batch, KvSpec, SamplingParams, SequenceSlice

BLOCK_SIZE = 16
KV_BYTE = 0x3C
"""Of keys and values that nobody has computed: 0.0115."""
DECODES = ((1, 64), (1, 512), (8, 64), (16, 64), (16, 512))
"""(batch, context)"""
PREFILL, PREFILL_LAYERS = 512, 1
BLOCK_S = 5e-3
RESAMPLES = 2_000
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=1)


class Either:
    """The kernels of one of two libraries, whichever is `current`."""

    def __init__(self, *sources: Path) -> None:
        """Builds them beside their sources, unless they are there."""
        libraries = [load(source) for source in sources]
        for each in libraries:
            if each.handle is None:
                raise SystemExit(each.status)
        self.both = [Kernels(each.handle, cores=own_cores().usable) for each in libraries if each.handle is not None]
        self.current = self.both[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    steps: int
    """Of a block."""
    ratios: list[float]
    old_ms: float
    new_ms: float
    """Medians of a step."""
    same_bits: bool


class Bench:
    """One model's weights, for both libraries."""

    def __init__(self, either: Either, config: ModelConfig) -> None:
        self._either = either
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: (torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * s[1] ** -0.5).bfloat16()
            for name, s in weight_shapes(config).items()
        }
        kernels, workspace = cast("Kernels", either), Workspace()
        packing = NativePacking(kernels, workspace)
        self._decoder = NativeDecoder(config, tensors, kernels=kernels, packing=packing, workspace=workspace)
        self._spec = KvSpec(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype="bfloat16",
        )

    def case(self, name: str, batch: int, start: int, stop: int, seconds: float) -> Case:
        """`batch` sequences, of each the tokens from `start` to `stop`; measured for so long."""
        step = self._step(batch, start, stop)
        outputs = []
        for kernels in self._either.both:
            self._either.current = kernels
            outputs.append(step().clone())
        once = time.perf_counter()
        step()
        steps = max(1, round(BLOCK_S / (time.perf_counter() - once)))
        pairs: list[tuple[float, float]] = []
        begun = time.perf_counter()
        while time.perf_counter() - begun < seconds:
            took = [0.0, 0.0]
            for which in (0, 1) if len(pairs) % 2 else (1, 0):
                self._either.current = self._either.both[which]
                started = time.perf_counter()
                for _ in range(steps):
                    step()
                took[which] = (time.perf_counter() - started) / steps
            pairs.append((took[0], took[1]))
        old, new = np.median(np.array(pairs), axis=0) * 1e3
        same = torch.equal(*outputs)
        ratios = [a / b for a, b in pairs]
        return Case(name=name, steps=steps, ratios=ratios, old_ms=old, new_ms=new, same_bits=same)

    def _step(self, batch: int, start: int, stop: int) -> Callable[[], torch.Tensor]:
        blocks = -(-stop // BLOCK_SIZE)
        num_blocks = batch * blocks
        record = self._spec.num_layers * num_blocks * 2 * self._spec.num_kv_heads * BLOCK_SIZE * self._spec.head_dim * 2
        pool = KvPool(torch.full((record,), KV_BYTE, dtype=torch.uint8), num_blocks, self._spec)
        slices = [
            SequenceSlice(
                key=RequestKey(request=RequestId(str(number)), attempt=Attempt(0)),
                tokens=list(range(stop)),
                start=start,
                stop=stop,
                block_table=[BlockId(number + batch * at) for at in range(blocks)],
                sample=True,
                output_index=0,
                params=GREEDY,
            )
            for number in range(batch)
        ]
        plan, positions = plan_attention(Batch(slices=tuple(slices)), pool)
        tokens = torch.arange(batch * (stop - start)) % self._decoder.config.vocab_size

        @torch.inference_mode()
        def step() -> torch.Tensor:
            last = self._decoder.run_layers(self._decoder.embed(tokens), positions, plan, pool, None)
            return self._decoder.logits(last) if stop == start + 1 else last

        return step


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """95% of the median ratio, by resampling: (low, median, high)."""
    found = np.array(ratios)
    drawn = np.random.default_rng(0).choice(found, (RESAMPLES, len(found)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(np.median(found)), float(high)


def line(case: Case) -> str:
    low, middle, high = interval(case.ratios)
    told = f"{middle:.3f} ({low:.3f} to {high:.3f})"
    bits = "same" if case.same_bits else "others"
    return (
        f"| {case.name} | {case.old_ms:.3f} | {case.new_ms:.3f} | {told} | {len(case.ratios)} x {case.steps} | {bits} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Two builds of the compute kernels in one process.")
    parser.add_argument("old", type=Path, help="source of the older one: a C file of a checkout")
    parser.add_argument("new", type=Path)
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", default="", help="only those whose names contain this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        "| step | old, ms | new, ms | new is faster by | pairs x steps | bits |\n| --- | --- | --- | --- | --- | --- |"
    )
    either = Either(args.old, args.new)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = {f"batch {batch}, context {context}": (batch, context, context + 1) for batch, context in DECODES}
        for layers, cases in (
            (MODELS[args.model]["num_hidden_layers"], shapes),
            (PREFILL_LAYERS, {f"prefill of {PREFILL}, one layer": (1, 0, PREFILL)}),
        ):
            cases = {name: shape for name, shape in cases.items() if args.cases in name}
            if not cases:
                continue
            write_config(folder, args.model)
            (folder / "config.json").write_text(json.dumps(MODELS[args.model] | {"num_hidden_layers": layers}))
            bench = Bench(either, load_model_config(folder))
            for name, shape in cases.items():
                print(line(bench.case(name, *shape, args.seconds)), flush=True)


if __name__ == "__main__":
    main()
