"""A real model with less device memory than it has promised: a node's whole pool, copies on a thread."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

import torch

from cachestore.device_pool import DevicePool, open_device_pool
from cachestore.host_tier import SpillConfig
from engine.block_manager import growth_blocks
from engine.build import EngineConfig
from engine.core import TokenEvent
from engine.demo_model import DemoModelParams, write_demo_model
from engine.loop import EngineLoop, done_or_broken
from engine.model_config import ComputeDtype
from engine.sequence import Sequence, SequenceMode
from engine.types import Batch, KvSink, NullSink, SamplingParams
from tests.engine_bench import key_of
from tests.reference_model import OneProcess, ReferenceModel

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
WAIT_S: Final = 60


class Host:
    """Collects tokens; `over` is set when as many sequences as expected have ended."""

    def __init__(self, expected: int) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.over = asyncio.Event()
        self._left = expected

    def step_begins(self, batch: Batch) -> KvSink:
        del batch
        return NullSink()

    def step_ended(self, sink: KvSink, events: list[TokenEvent]) -> None:
        del sink
        for event in events:
            assert event.token is not None
            self.tokens.setdefault(event.seq.key.request, []).append(event.token)
            self._left -= event.finish is not None
        if self._left == 0:
            self.over.set()


def admit(pool: DevicePool, name: str, prompt: list[int]) -> None:
    held = pool.blocks.blocks_for(len(prompt))
    growth = growth_blocks(
        prompt_len=len(prompt),
        known_len=len(prompt),
        max_tokens=PARAMS.max_tokens,
        context_len_max=MODEL.context_len_max,
        block_size=BLOCK_SIZE,
        blocks_held=held,
    )
    pool.engine.submit(
        Sequence(
            key=key_of(name),
            params=PARAMS,
            tokens=list(prompt),
            prompt_len=len(prompt),
            computed=0,
            block_table=pool.blocks.admit([], held, promise_key=name, promise=growth, host_backed=True),
            promise_key=name,
            mode=SequenceMode.COMPLETE,
        )
    )


def test_a_model_out_of_device_memory_gives_the_undisturbed_answers(tmp_path: Path) -> None:
    """Five sequences that grow to twelve or thirteen blocks each on a device of twenty: the answers are those of a run
    in which nothing was ever short, and no token was computed twice."""
    write_demo_model(tmp_path, MODEL)
    rng = random.Random(5)
    prompts = [[rng.randrange(2, MODEL.vocab_size) for _ in range(8 + i)] for i in range(5)]
    config = EngineConfig(
        model=str(tmp_path), dtype=ComputeDtype.FLOAT32, block_size=BLOCK_SIZE, num_blocks=20, poison_freed=True
    )

    async def scenario() -> dict[str, list[int]]:
        pool = await open_device_pool(
            config, name="spill", progress=lambda *_: None, spill=SpillConfig(host_blocks=60, headroom_blocks=1)
        )
        try:
            assert pool.host is not None
            host = Host(len(prompts))
            loop = EngineLoop(pool.engine, host, name="spill")
            pool.host.spill.changed = loop.wake
            for i, prompt in enumerate(prompts):
                admit(pool, f"{i}", prompt)
            stepping = asyncio.create_task(loop.run())
            try:
                async with asyncio.timeout(WAIT_S):
                    await done_or_broken(_wait(host.over), stepping)
            finally:
                await loop.stop(stepping)
            figures = pool.host.spill.figures
            assert figures.parked_total > 0
            assert figures.copied_out == figures.copied_back + figures.merged > 0
            assert (figures.parked, figures.host_free) == (0, 60)
            computed = sum(len(prompt) + PARAMS.max_tokens - 1 for prompt in prompts)
            assert pool.engine.counters.tokens_computed == computed
            counts = pool.ledger.check()
            pool.host.spill.check()
            assert (counts.free + counts.cached, counts.promised) == (20, 0)
            return host.tokens
        finally:
            pool.close()

    torch.set_num_threads(1)
    answers = asyncio.run(scenario())
    undisturbed = OneProcess(tmp_path, block_size=BLOCK_SIZE, num_blocks=100, tokens_per_step_max=512).answers(
        [(prompt, PARAMS) for prompt in prompts]
    )
    reference = ReferenceModel(tmp_path)
    for i, (prompt, expected) in enumerate(zip(prompts, undisturbed, strict=True)):
        assert len(answers[f"{i}"]) == PARAMS.max_tokens
        reference.compare(prompt, answers[f"{i}"], expected)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
