"""The part of `benchmarks/gpu.py` about the same answers: against the torch runner on the CPU."""

from __future__ import annotations

import torch

from benchmarks.gpu_bench import BLOCK_SIZE, Bench, config_of, random_weights, slice_of
from benchmarks.gpu_children import Figures
from benchmarks.gpu_receiver import make_driver
from engine.runner import TorchRunner
from engine.types import Batch, NullSink
from kvtransfer.device.region import DeviceRegion
from tests.support.every_row import score

NUM_BLOCKS = 64
CONTEXT_MAX = 512
PROMPT_TOKENS = 300
"""Several tiles and several splits of the decode kernel, the last of each not full."""
FIRST_BLOCK = 3


def measure(bench: Bench, figures: Figures) -> None:
    """float32, over memory of the driver's, as a node has it: greedy tokens equal to the torch runner's, a prompt and
    then one at a time as graphs. bfloat16: scores of the prompt and of single tokens behind it, against float32 over
    the same rounded weights."""
    config = config_of("exact")
    weights = {name: tensor.cpu() for name, tensor in random_weights(config, torch.float32, bench.device).items()}
    driver = make_driver(bench.device.type)

    def allocate(nbytes: int) -> torch.Tensor:
        # As a node's region; it ends with the process.
        return torch.as_tensor(DeviceRegion(driver, nbytes, "bench-region", shared=False).memory)

    gpu = bench.runner(config, weights, NUM_BLOCKS, 4, CONTEXT_MAX, allocate=allocate)
    figures.add(attention_float32=gpu.describe())
    reference = TorchRunner(config=config, tensors=weights, block_size=BLOCK_SIZE)
    reference.bind(bench.zeros(bench.region_bytes(reference, NUM_BLOCKS)).cpu().numpy(), NUM_BLOCKS)
    answers = []
    count = 4 if bench.tiny else 64
    for runner in (gpu, reference):
        tokens = [7 * i % 61 for i in range(PROMPT_TOKENS)]
        start = 0
        for _ in range(count):
            s = slice_of("exact", tokens, start, len(tokens), FIRST_BLOCK)
            start = len(tokens)
            tokens.append(runner.run(Batch(slices=(s,)), NullSink()).sampled[s.key])
        answers.append(tokens)
    figures.add(float32_tokens_equal=answers[0] == answers[1], float32_tokens=count, graphs=gpu.describe())

    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    half = bench.runner(config, rounded, NUM_BLOCKS, 0, CONTEXT_MAX)
    wide = {name: tensor.float() for name, tensor in rounded.items()}
    reference = TorchRunner(config=config, tensors=wide, block_size=BLOCK_SIZE)
    reference.bind(bench.zeros(bench.region_bytes(reference, NUM_BLOCKS)).cpu().numpy(), NUM_BLOCKS)
    tokens = answers[1]

    def parts(*stops: int) -> list[Batch]:
        starts = (0, *stops)
        return [
            Batch(slices=(slice_of("scores", tokens, start, stop, FIRST_BLOCK),))
            for start, stop in zip(starts, stops, strict=False)
        ]

    (whole,) = parts(len(tokens))
    wanted = score(reference, whole)
    steps = parts(PROMPT_TOKENS, *range(PROMPT_TOKENS + 1, len(tokens) + 1))
    found = torch.cat([score(half, step).cpu().float() for step in steps])
    error = (found - wanted).abs() / wanted.abs().max()
    figures.add(
        bfloat16_prefill_error_of_largest=float(error[:PROMPT_TOKENS].max()),
        bfloat16_decode_error_of_largest=float(error[PROMPT_TOKENS:].max()),
        attention_bfloat16=half.describe(),
    )
