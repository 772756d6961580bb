"""A whole pool with its engine loop, without a node around it: prompts in, answers out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Several

from cachestore.block_manager import growth_blocks
from engine.core import TokenEvent
from engine.scheduler import Sequence, SequenceMode
from engine.types import Batch, KvSink, NullSink, SamplingParams
from node.engine_loop import EngineLoop, done_or_broken
from node.pool import DevicePool
from tests.support.engine_bench import key_of

WAIT_S = 60


class Host:
    """Collects tokens; `over` is set when as many sequences as expected have ended."""

    def __init__(self, expected: int) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.over = asyncio.Event()
        self._left = expected

    def step_begins(self, batch: Batch) -> KvSink:
        del batch
        return NullSink()

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        del sink
        for event in events:
            assert event.token is not None
            self.tokens.setdefault(event.seq.key.request, []).append(event.token)
            self._left -= event.finish is not None
        if self._left == 0:
            self.over.set()


def admit(pool: DevicePool, name: str, prompt: list[int], params: SamplingParams) -> None:
    """Under overcommit where the pool has host memory."""
    held = pool.blocks.blocks_for(len(prompt))
    growth = growth_blocks(
        prompt_len=len(prompt),
        known_len=len(prompt),
        max_tokens=params.max_tokens,
        context_len_max=pool.model.context_len_max,
        block_size=pool.blocks.block_size,
        blocks_held=held,
    )
    pool.engine.submit(
        Sequence(
            key=key_of(name),
            params=params,
            tokens=list(prompt),
            prompt_len=len(prompt),
            computed=0,
            block_table=pool.blocks.admit(
                [], held, promise_key=name, promise=growth, host_backed=pool.host is not None
            ),
            promise_key=name,
            mode=SequenceMode.COMPLETE,
        )
    )


async def answers_of(pool: DevicePool, asked: Several[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    """All at once, to the end. Raises what `done_or_broken` does when the engine cannot go on."""
    host = Host(len(asked))
    loop = EngineLoop(pool.engine, host, name="test")
    for i, (prompt, params) in enumerate(asked):
        admit(pool, f"{i}", prompt, params)
    stepping = asyncio.create_task(loop.run())
    try:
        async with asyncio.timeout(WAIT_S):
            await done_or_broken(_wait(host.over), stepping)
    finally:
        await loop.stop(stepping)
    return [host.tokens[f"{i}"] for i in range(len(asked))]


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
