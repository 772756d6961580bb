"""What a decode step costs on the host besides its arithmetic: the small model, batch 16, one thread.

    OMP_NUM_THREADS=1 python -m benchmarks.host            # under a minute; processor time, so other work harms little
    OMP_NUM_THREADS=1 python -m benchmarks.host --profile  # and which functions it goes to

Processor time of the calling thread, medians over the steps that only decode, of the fastest of several answers.
"arithmetic" are the calls of kernels.c and draw.c themselves; all else is Python, NumPy and PyTorch around them. What
the timers cost is measured first and taken off.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engine_cases import write_config
from benchmarks.engine_own import BLOCK_SIZE, NUM_BLOCKS, OwnEngine
from engine import runner
from engine.native.kernels import native_kernels
from engine.sampler import draw_kernel

BATCH, ANSWER = 16, 256
ARITHMETIC = ("_linear", "_rms_norm", "layers", "layer_open", "layer_close", "_highest")


class Parts:
    """Processor time by part, of the step in hand; nested parts are taken out of the one around them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside = [0.0]
        self._own_s = self._around_s = 0.0
        self._calibrate()

    def _calibrate(self) -> None:
        """What a timer adds to its own part, and to the one around it."""
        count = 2_000
        empty = self.timed("own", lambda: None)

        def many() -> None:
            for _ in range(count):
                empty()

        self.timed("around", many)()
        self._own_s, self._around_s = self.seconds["own"] / count, self.seconds["around"] / count
        self.seconds.clear()

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            begin_s = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                spent_s = time.thread_time() - begin_s
                self.seconds[part] += spent_s - self._inside.pop() - self._own_s
                self._inside[-1] += spent_s + self._around_s

        return run


def instrument(parts: Parts, engine: OwnEngine) -> None:
    kernels, draws = native_kernels(), draw_kernel()
    assert kernels is not None and draws is not None, "this needs the compute kernels"
    for name in ARITHMETIC:
        setattr(kernels, name, parts.timed("arithmetic", getattr(kernels, name)))
    for part, owner, name in (
        ("arithmetic", draws, "_draw"),
        ("plan of the batch", runner, "plan_attention"),
        ("token ids", runner, "token_ids"),
        ("sampling", runner, "sample"),
    ):
        setattr(owner, name, parts.timed(part, getattr(owner, name)))
    engine.around = parts.timed


def measure(engine: OwnEngine, parts: Parts, temperature: float, answers: int, context: int) -> dict[str, float]:
    """Milliseconds a step, by part."""
    best: dict[str, float] = {}
    rng = random.Random(0)
    for _ in range(answers):
        steps: list[dict[str, float]] = []

        def step_ended(num_tokens: int, steps: list[dict[str, float]] = steps) -> None:
            if num_tokens == BATCH:
                steps.append(dict(parts.seconds))
            parts.seconds.clear()

        prompts = [[rng.randrange(3, 8_000) for _ in range(context)] for _ in range(BATCH)]
        engine.generate(prompts, ANSWER, temperature=temperature, step_ended=step_ended)
        found = {name: 1e3 * median(step.get(name, 0.0) for step in steps) for name in steps[-1]}
        if not best or sum(found.values()) < sum(best.values()):
            best = found
    return best


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = Parts()
    with tempfile.TemporaryDirectory() as folder:
        blocks = max(NUM_BLOCKS, BATCH * (-(-(args.context + ANSWER) // BLOCK_SIZE)))
        engine = OwnEngine(write_config(Path(folder), "small"), num_blocks=blocks)
    instrument(parts, engine)
    measure(engine, parts, 0.0, 1, args.context)
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, engine, parts, 0.0, 1, args.context)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    found = {f"temperature {t:g}": measure(engine, parts, t, args.answers, args.context) for t in (0.0, 0.8)}
    for name, own in found.items():
        host = sum(own.values()) - own["arithmetic"]
        print(f"{name}: host {host:.3f} ms a step", {part: round(ms, 3) for part, ms in own.items()})
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
