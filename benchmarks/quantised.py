"""What rounded weights make of a decode step: the whole engine with bfloat16, int8 and int4, in turn, in one process.

    python -m benchmarks.quantised --threads 2                # an idle machine of 16 GiB: elapsed time

Milliseconds a step, medians over the steps in which every answer is decoded, of the fastest round. The model is "473m"
of `benchmarks.engine`, all layers or the first `--layers`; random weights, contexts of 64 tokens and what is written.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import median

import torch

from benchmarks.engine_cases import MODELS, full_steps
from benchmarks.engine_own import OwnEngine
from engine.model_config import Quantisation

KINDS = (Quantisation.NONE, Quantisation.INT8, Quantisation.INT4)
CONTEXT = 64


def step_ms(engine: OwnEngine, batch: int, steps: int) -> float:
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 32_000) for _ in range(CONTEXT)] for _ in range(batch)]
    return 1e3 * median(full_steps(engine.generate(prompts, 1 + steps), batch))


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=MODELS["473m"]["num_hidden_layers"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS["473m"] | {"num_hidden_layers": args.layers}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        engines = {kind: OwnEngine(Path(folder), quantisation=kind) for kind in KINDS}
    print("| batch | " + " | ".join(kind.value for kind in KINDS) + " |\n|" + " --- |" * (1 + len(KINDS)))
    for batch in args.batch:
        least = dict.fromkeys(KINDS, float("inf"))
        for _ in range(args.rounds):
            for kind, engine in engines.items():
                least[kind] = min(least[kind], step_ms(engine, batch, args.steps))
        print(f"| {batch} | " + " | ".join(f"{ms:.2f}" for ms in least.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
