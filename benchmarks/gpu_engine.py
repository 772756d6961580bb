"""Decode steps through the engine and its loop, overlapped and one after the other: what the host's work costs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from baton.ids import Attempt, RequestId, RequestKey
from cachestore.block_manager import BlockManager, growth_blocks
from cachestore.ledger import Ledger
from engine.core import Engine, TokenEvent
from engine.gpu.runner import OVERLAP_ROWS_MAX, GpuRunner
from engine.scheduler import SchedulerConfig, Sequence, SequenceMode
from engine.types import Batch, KvSink, NullSink, SamplingParams
from node.engine_loop import EngineLoop


class _Host:
    """Counts; the clock runs from the first step that only decodes to the last one."""

    def __init__(self, rows: int) -> None:
        self.over = asyncio.Event()
        self.began_s = self.ended_s = 0.0
        self.steps = 0
        self._rows = self._left = rows

    def step_begins(self, batch: Batch) -> KvSink:
        del batch
        return NullSink()

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        del sink
        self.ended_s = time.perf_counter()
        self._left -= sum(event.finish is not None for event in events)
        if len(events) == self._rows:
            self.began_s = self.began_s or self.ended_s
            self.steps += 1
        if self._left == 0:
            self.over.set()


def steps_through_the_engine(
    runner: GpuRunner, num_blocks: int, *, rows: int, prompt_len: int, tokens: int
) -> dict[str, Any]:
    """Both ways, overlapped first; the last block of the region is the padding's. `runner` is bound and warmed up."""
    results: dict[str, Any] = {}
    for name, overlap_rows_max in (("overlapped", OVERLAP_ROWS_MAX), ("one_after_the_other", 0)):
        runner.overlap_rows_max = overlap_rows_max
        engine, host = asyncio.run(_decode(runner, num_blocks, rows, prompt_len, tokens))
        results[f"steps_s_{name}"] = (host.steps - 1) / (host.ended_s - host.began_s)
        results[f"steps_{name}"] = engine.describe().get("steps overlapped", "none overlapped")
    return results


async def _decode(runner: GpuRunner, num_blocks: int, rows: int, prompt_len: int, tokens: int) -> tuple[Engine, _Host]:
    block_size = runner.kv_spec.block_size
    blocks = BlockManager(Ledger(num_blocks - 1), block_size, b"benchmark")
    limits = SchedulerConfig(tokens_per_step_max=max(2048, rows), sequences_max=rows, waiting_max=rows)
    engine, host = Engine(runner, blocks, limits), _Host(rows)
    for row in range(rows):
        held = blocks.blocks_for(prompt_len)
        growth = growth_blocks(
            prompt_len=prompt_len,
            known_len=prompt_len,
            max_tokens=tokens,
            context_len_max=runner.context_len_max,
            block_size=block_size,
            blocks_held=held,
        )
        engine.submit(
            Sequence(
                key=RequestKey(request=RequestId(f"{row}"), attempt=Attempt(0)),
                params=SamplingParams(
                    temperature=0.6, top_k=20, top_p=0.95, seed=row, max_tokens=tokens, ignore_eos=True
                ),
                tokens=[(row + i) % 61 for i in range(prompt_len)],
                prompt_len=prompt_len,
                computed=0,
                block_table=blocks.admit([], held, promise_key=row, promise=growth),
                promise_key=row,
                mode=SequenceMode.COMPLETE,
            )
        )
    loop = EngineLoop(engine, host, name="benchmark")
    stepping = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(120):
            await host.over.wait()
    finally:
        await loop.stop(stepping)
    return engine, host
