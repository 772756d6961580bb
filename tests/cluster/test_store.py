"""Tiers below the regions of a mock cluster: what was evicted comes back, byte for byte, and to its own tenant only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final

from node.sources import LinearCost
from tests.support.cluster_harness import Answer, assert_conserved, mock_spec, mock_tokens, random_prompt, wait_for
from tests.support.inprocess_cluster import InProcessCluster, inprocess

SIZE: Final = 16
PROMPT_BLOCKS: Final = 8
PROMPTS: Final = 12
MAX_TOKENS: Final = 4
POSITION_BYTES: Final = 4 * 2 * 16 * 8
"""Of the mock engine: layers, K and V, tokens, bytes of each."""
REGION_BLOCKS: Final = 32
HOST_BLOCKS: Final = 1_000
COMPUTING: Final = LinearCost(fixed_s=0.0, unit_s=1.0, units=SIZE)
"""So slow that everything is brought that can be, on any machine."""


def prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, PROMPT_BLOCKS * SIZE + 5) for _ in range(count)]


def play(story: Callable[[InProcessCluster], Awaitable[None]], **prefill: object) -> None:
    flags = {"engine.num_blocks": REGION_BLOCKS, "store.host_bytes": HOST_BLOCKS * POSITION_BYTES, **prefill}
    spec = mock_spec(prefill_flags=flags, decode_flags={"engine.num_blocks": 300})

    async def scenario() -> None:
        async with inprocess(spec) as cluster:
            for node in cluster.prefill.values():
                node.gatherer._computing = COMPUTING
            await story(cluster)
            await assert_conserved(cluster)

    asyncio.run(scenario())


async def ask(cluster: InProcessCluster, prompt: list[int], salt: str | None = None) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=MAX_TOKENS, cache_salt=salt)
    assert answer.ids == mock_tokens(prompt, MAX_TOKENS)
    return answer


async def all_down(cluster: InProcessCluster, blocks: int) -> None:
    store = cluster.prefill["prefill-0"].pool.store
    assert store is not None
    await wait_for(lambda: _holds(store.host.books.blocks >= blocks), f"{blocks} blocks in host memory")


async def _holds(true: bool) -> bool:
    return true


def test_what_the_region_has_no_room_for_comes_back_from_host_memory() -> None:
    """Twelve prompts of eight blocks over a region of 32: asked a second time, most are not on the device any more. All
    of them come back, and every token is the reference's."""

    async def story(cluster: InProcessCluster) -> None:
        asked = prompts(1)
        for prompt in asked:
            await ask(cluster, prompt)
        await all_down(cluster, PROMPTS * PROMPT_BLOCKS)
        again = [await ask(cluster, prompt) for prompt in asked]
        node = cluster.prefill["prefill-0"]
        assert [answer.stats.prompt_tokens_cached for answer in again] == [PROMPT_BLOCKS * SIZE] * PROMPTS
        assert node.pool.store is not None
        counters = node.pool.store.host.counters
        assert counters.hit_blocks >= (PROMPTS - 4) * PROMPT_BLOCKS
        assert counters.promotions >= PROMPTS - 4

    play(story)


def test_two_tenants_with_one_prompt() -> None:
    """One's blocks are in host memory: the other's prompt, and one without a salt, are computed from the start."""

    async def story(cluster: InProcessCluster) -> None:
        asked = prompts(2)
        for prompt in asked:
            await ask(cluster, prompt, "a")
        await all_down(cluster, PROMPTS * PROMPT_BLOCKS)
        for salt, cached in (("b", 0), (None, 0), ("a", PROMPT_BLOCKS * SIZE)):
            answer = await ask(cluster, asked[0], salt)
            assert answer.stats.prompt_tokens_cached == cached

    play(story)
