"""A real model with less device memory than it has promised: a node's whole pool, copies on a thread."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

import torch

from engine.build import EngineConfig
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ComputeDtype
from engine.types import SamplingParams
from node.pool import open_device_pool
from node.spill import SpillConfig
from tests.support.pool_bench import answers_of
from tests.support.reference_model import OneProcess, ReferenceModel

BLOCK_SIZE: Final = 4
MODEL: Final = DemoModelParams(
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=300,
    context_len_max=256,
)
PARAMS: Final = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=40, ignore_eos=True)


def test_a_model_out_of_device_memory_gives_the_undisturbed_answers(tmp_path: Path) -> None:
    """Five sequences that grow to twelve or thirteen blocks each on a device of twenty: the answers are those of a run
    in which nothing was ever short, and no token was computed twice."""
    write_demo_model(tmp_path, MODEL)
    rng = random.Random(5)
    prompts = [[rng.randrange(2, MODEL.vocab_size) for _ in range(8 + i)] for i in range(5)]
    config = EngineConfig(
        model=str(tmp_path), dtype=ComputeDtype.FLOAT32, block_size=BLOCK_SIZE, num_blocks=20, poison_freed=True
    )

    async def scenario() -> list[list[int]]:
        pool = await open_device_pool(
            config, name="spill", progress=lambda *_: None, spill=SpillConfig(host_blocks=60, headroom_blocks=1)
        )
        try:
            assert pool.host is not None
            assert pool.describe()["below the region"] == f"{pool.host.memory.region.nbytes:,} bytes of host memory"
            answers = await answers_of(pool, [(prompt, PARAMS) for prompt in prompts])
            spill = pool.host.spill
            assert spill.counters.swapped_out > 0
            assert spill.counters.copied_out == spill.counters.copied_back + spill.counters.merged > 0
            assert (spill.busy, spill.host.free) == (False, 60)
            computed = sum(len(prompt) + PARAMS.max_tokens - 1 for prompt in prompts)
            assert pool.engine.counters.tokens_computed == computed
            counts = pool.ledger.check()
            pool.host.spill.check()
            assert (counts.free + counts.cached, counts.promised) == (20, 0)
            return answers
        finally:
            pool.close()

    torch.set_num_threads(1)
    answers = asyncio.run(scenario())
    undisturbed = OneProcess(tmp_path, block_size=BLOCK_SIZE, num_blocks=100, tokens_per_step_max=512).answers(
        [(prompt, PARAMS) for prompt in prompts]
    )
    reference = ReferenceModel(tmp_path)
    for prompt, answer, expected in zip(prompts, answers, undisturbed, strict=True):
        assert len(answer) == PARAMS.max_tokens
        reference.compare(prompt, answer, expected)
