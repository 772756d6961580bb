"""Our side of benchmarks/engine.py: `python -m benchmarks.engine_own MODEL FOLDER THREADS KERNELS LOAD`.

See `serve`."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from baton.ids import Attempt, RequestId, RequestKey
from baton.native import load as load_library
from benchmarks.engine_cases import Steps, load_of, serve, write_config
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.core import Engine
from engine.grammar import Matcher
from engine.kernel_sets import KernelSet
from engine.model_config import Quantisation, load_model_config, weight_shapes
from engine.native.kernels import huge_pages
from engine.runner import TorchRunner
from engine.scheduler import SchedulerConfig, Sequence, SequenceMode
from engine.types import Grammar, NullSink, SamplingParams

BLOCK_SIZE, NUM_BLOCKS, TOKENS_PER_STEP = 16, 1_024, 2_048
KV_BYTE = 0x3C
"""Of keys and values that nobody has computed: 0.0115, for products of no special kind."""
READ_BYTES, READ_PASSES = 1 << 30, 8
"""Many times the caches, and memory as the weights lie in: anonymous, in huge pages."""
PRODUCT, PRODUCT_PASSES = (2_048, 1_024, 6_144), 5
"""Rows, inner dimension and columns: the larger model's widest product."""
MULTIPLY_ROUNDS, MULTIPLY_PASSES = 1_000_000, 50
"""Of each thread: some 5 ms a pass. A core needs many to come up to its rate."""


class OwnEngine:
    """Scheduler, blocks and runner on this thread; nothing is kept between two calls."""

    def __init__(
        self,
        folder: Path,
        *,
        quantisation: Quantisation = Quantisation.NONE,
        kernels: KernelSet = KernelSet.AUTO,
        num_blocks: int = NUM_BLOCKS,
    ) -> None:
        config = load_model_config(folder)
        generator = torch.Generator().manual_seed(0)
        tensors = {
            name: (torch.ones(s) if len(s) == 1 else torch.randn(s, generator=generator) * s[1] ** -0.5).bfloat16()
            for name, s in weight_shapes(config).items()
        }
        self._runner = TorchRunner(
            config=config, tensors=tensors, block_size=BLOCK_SIZE, quantisation=quantisation, kernels=kernels
        )
        region = np.full(self._runner.layout.region_bytes(num_blocks), KV_BYTE, np.uint8)
        self._runner.bind(region, num_blocks)
        self._num_blocks = num_blocks
        self.kernel_set = self._runner.kernel_set
        self._calls = 0
        self.outside_s: list[float] = []
        """Of each step of the last call that only decodes: the time that is not the runner's."""
        self.around: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda _, call: call
        """Put around schedule, run and postprocess, by name: for timers."""

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        *,
        temperature: float = 0.0,
        grammar: tuple[Grammar, Matcher] | None = None,
        step_ended: Callable[[int], None] | None = None,
        known: bool = False,
    ) -> Steps:
        """`step_ended` hears of each, with its number of tokens; what it takes is no part of any step. `known`: the
        prompts, but for their last tokens, are taken to be computed: what lies in the blocks is their KV."""
        blocks = BlockManager(Ledger(self._num_blocks), BLOCK_SIZE, b"benchmark")
        limits = SchedulerConfig(tokens_per_step_max=TOKENS_PER_STEP, sequences_max=16, waiting_max=16)
        engine = Engine(self._runner, blocks, limits)
        self.outside_s.clear()
        steps: Steps = []
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            seq = self._sequence(blocks, f"{self._calls}-{number}", prompt, tokens, temperature, grammar)
            seq.computed = len(prompt) - 1 if known else 0
            engine.submit(seq)
        self._calls += 1
        schedule, run, postprocess = (
            self.around(name, call)
            for name, call in (
                ("schedule", engine.schedule),
                ("runner", engine.run),
                ("postprocess", engine.postprocess),
            )
        )
        while True:
            begun = time.perf_counter()
            batch = schedule()
            if batch is None:
                return steps
            ran = time.perf_counter()
            result = run(batch, NullSink())
            done = time.perf_counter()
            postprocess(batch, result)
            steps.append((time.perf_counter() - started, sum(each.sample for each in batch.slices)))
            if batch.num_tokens == len(prompts):
                self.outside_s.append(time.perf_counter() - done + ran - begun)
            if step_ended is not None:
                reported = time.perf_counter()
                step_ended(batch.num_tokens)
                started += time.perf_counter() - reported

    def _sequence(
        self,
        blocks: BlockManager,
        name: str,
        prompt: list[int],
        tokens: int,
        temperature: float,
        grammar: tuple[Grammar, Matcher] | None,
    ) -> Sequence:
        held = blocks.blocks_for(len(prompt))
        growth = growth_blocks(
            prompt_len=len(prompt),
            known_len=len(prompt),
            max_tokens=tokens,
            context_len_max=self._runner.context_len_max,
            block_size=BLOCK_SIZE,
            blocks_held=held,
        )
        return Sequence(
            key=RequestKey(request=RequestId(name), attempt=Attempt(0)),
            params=SamplingParams(
                temperature=temperature,
                top_k=0,
                top_p=1.0,
                seed=0,
                max_tokens=tokens,
                ignore_eos=True,
                grammar=grammar and grammar[0],
            ),
            grammar=grammar and grammar[1].copy(),
            tokens=list(prompt),
            prompt_len=len(prompt),
            computed=0,
            block_table=blocks.admit([], held, promise_key=name, promise=growth),
            promise_key=name,
            mode=SequenceMode.COMPLETE,
        )


class Multipliers:
    """Those of a set: loops over numbers in registers, on some threads."""

    def __init__(self, kernels: KernelSet, threads: int) -> None:
        handle = load_library(Path(__file__).with_name("engine_multipliers.c")).handle
        self._loop = getattr(handle, f"multiply_{kernels.value}", None)
        if self._loop is not None:
            self._loop.restype, self._loop.argtypes = ctypes.c_int64, [ctypes.c_int64]
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def flops_s(self) -> list[float]:
        """The rate of each pass, all threads together. 0: not known."""
        if self._loop is None:
            return [0.0]
        rates = []
        for _ in range(MULTIPLY_PASSES):
            started = time.perf_counter()
            operations = sum(self._pool.map(self._loop, [MULTIPLY_ROUNDS] * self._threads))
            rates.append(operations / (time.perf_counter() - started))
        return rates


class RatedEngine:
    """An engine whose decode steps stand between two measurements of how fast the same threads read memory, and of how
    fast they multiply."""

    def __init__(self, engine: OwnEngine, multipliers: Multipliers, *, known: bool) -> None:
        """`known`: answers go on contexts that are taken to be computed, each in blocks of its own."""
        self._engine = engine
        self._multipliers = multipliers
        self._known = known
        self._block = huge_pages(READ_BYTES).view(torch.int32).fill_(1)
        self._rates: defaultdict[str, list[float]] = defaultdict(list)
        self.all_read_bytes_s: list[float] = []
        """Of all calls."""

    def generate(self, prompts: list[list[int]], tokens: int) -> Steps:
        """As `OwnEngine.generate`. Rates are taken when all prompts have been read, and after the last step; not where
        there is nothing but a prefill."""
        self._rates.clear()

        def step_ended(num_tokens: int) -> None:
            if num_tokens == len(prompts) and not self._rates:
                self._take_rates()

        steps = self._engine.generate(prompts, tokens, step_ended=step_ended, known=self._known and tokens > 1)
        if self._rates:
            self._take_rates()
        self.all_read_bytes_s += self._rates.get("read_bytes_s", [])
        return steps

    def rates(self) -> dict[str, list[float]]:
        """Of the last call, before and after its steps: bytes and operations a second."""
        return dict(self._rates)

    def _take_rates(self) -> None:
        self._rates["multiply_flops_s"].append(median(self._multipliers.flops_s()))
        self._rates["read_bytes_s"].append(self._read_bytes_s())

    def _read_bytes_s(self) -> float:
        """The median of some passes, as a step's time is the median of some steps."""
        times = []
        for _ in range(READ_PASSES):
            started = time.perf_counter()
            self._block.max()
            times.append(time.perf_counter() - started)
        return READ_BYTES / median(times)


def float32_flops_s() -> float:
    """PyTorch's rate of float32 products, of the shape of a prefill's: the median of some, after one for warmth."""
    rows, inner, columns = PRODUCT
    x, w = torch.rand(rows, inner), torch.rand(columns, inner)
    times = []
    for _ in range(1 + PRODUCT_PASSES):
        started = time.perf_counter()
        torch.nn.functional.linear(x, w)
        times.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / median(times[1:])


def main() -> None:
    model, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    engine = OwnEngine(write_config(folder, model), kernels=KernelSet(sys.argv[4]))
    load = load_of(model, sys.argv[5])
    multipliers = Multipliers(engine.kernel_set, threads)
    rated = RatedEngine(engine, multipliers, known=load.shared)

    def more() -> dict[str, float]:
        rates, rated.all_read_bytes_s = rated.all_read_bytes_s, []
        return {
            "read_bytes_s": median(rates),
            "outside_runner_s": median(engine.outside_s),
            "float32_flops_s": float32_flops_s(),
            "multiply_flops_s": max(multipliers.flops_s()),
        }

    serve(model, load, rated.generate, rated.rates, more)


if __name__ == "__main__":
    main()
