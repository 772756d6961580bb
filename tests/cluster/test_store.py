"""Tiers below the regions of a mock cluster: what was evicted comes back, byte for byte, and to its own tenant only."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import pytest

from cli.services import Service
from engine.build import MOCK_TWO_GROUPS, TWO_GROUPS_LATENT, TWO_GROUPS_LAYERS
from engine.mock import MockConfig
from node.store import Store
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.inprocess_cluster import InProcessCluster, inprocess
from tests.support.steering import Steering, compute_slowly, connected, steered

SIZE: Final = 16
PROMPT_BLOCKS: Final = 8
PROMPTS: Final = 12
MAX_TOKENS: Final = 4
POSITION_BYTES: Final = 4 * 2 * 16 * 8
"""Of the mock engine: layers, K and V, tokens, bytes of each."""
REGION_BLOCKS: Final = 32
HOST_BLOCKS: Final = 1_000


def prompts(seed: int, count: int = PROMPTS) -> list[list[int]]:
    rng = random.Random(seed)
    return [random_prompt(rng, PROMPT_BLOCKS * SIZE + 5) for _ in range(count)]


def play(story: Callable[[InProcessCluster], Awaitable[None]], **flags: object) -> None:
    """One prefill node, or one mixed node where `mixed` says so, and a decode node with room."""
    mixed = bool(flags.pop("mixed", False))
    below = {"engine.num_blocks": REGION_BLOCKS, "store.host_bytes": HOST_BLOCKS * POSITION_BYTES, **flags}
    roomy = {"engine.num_blocks": 300, **{key: value for key, value in flags.items() if key == "engine.model"}}
    if mixed:
        spec = mock_spec(prefill=0, decode=0, mixed=1, mixed_flags=below)
    else:
        spec = mock_spec(prefill_flags=below, decode_flags=roomy)

    async def scenario() -> None:
        async with inprocess(spec) as cluster:
            brings_all_it_can(cluster)
            await story(cluster)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def brings_all_it_can(cluster: InProcessCluster) -> None:
    for name in cluster.prefill:
        compute_slowly(cluster, name)


async def ask(
    cluster: InProcessCluster, prompt: list[int], salt: str | None = None, config: MockConfig | None = None
) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=MAX_TOKENS, cache_salt=salt)
    assert answer.ids == mock_tokens(prompt, MAX_TOKENS, config=config or MockConfig())
    return answer


def store_of(cluster: InProcessCluster) -> Store:
    (node,) = cluster.prefill.values()
    assert node.pool.store is not None
    return node.pool.store


async def all_down(cluster: InProcessCluster, blocks: int) -> None:
    books = store_of(cluster).host.books
    await wait_for(lambda: _holds(books.blocks >= blocks), f"{blocks} blocks in host memory")


async def all_on_disk(cluster: InProcessCluster, blocks: int) -> None:
    disk = store_of(cluster).disk
    assert disk is not None
    await wait_for(lambda: _holds(disk.books.blocks >= blocks), f"{blocks} blocks on disk")


async def _holds(true: bool) -> bool:
    return true


@pytest.mark.parametrize("mixed", [False, True], ids=["prefill", "mixed"])
def test_what_the_region_has_no_room_for_comes_back_from_host_memory(mixed: bool) -> None:
    """Twelve prompts of eight blocks over a region of 32: asked a second time, most are not on the device any more. All
    of them come back, and every token is the reference's."""

    async def story(cluster: InProcessCluster) -> None:
        asked = prompts(1)
        for number, prompt in enumerate(asked, 1):
            await ask(cluster, prompt)
            await all_down(cluster, number * PROMPT_BLOCKS)
        again = [await ask(cluster, prompt) for prompt in asked]
        assert [answer.stats.prompt_tokens_cached for answer in again] == [PROMPT_BLOCKS * SIZE] * PROMPTS
        counters = store_of(cluster).host.counters
        assert counters.hit_blocks >= (PROMPTS - 4) * PROMPT_BLOCKS
        assert counters.promotion_times.count >= PROMPTS - 4
        device = store_of(cluster)._cache
        assert device.evicted >= device.evicted_unused > 0

    play(story, mixed=mixed)


@pytest.mark.parametrize("mixed", [False, True], ids=["prefill and decode", "mixed"])
def test_a_request_is_one_use_of_its_blocks(mixed: bool) -> None:
    """At every node that has them: a prompt that is seen once must not look as if it had come twice. One mixed node may
    do both parts."""

    async def story(cluster: InProcessCluster) -> None:
        nodes: list[Any] = [*cluster.prefill.values(), *cluster.decode.values()]
        caches = [node.pool.blocks.prefix_cache for node in nodes]
        uses: list[Counter[bytes]] = [Counter() for _ in caches]
        for cache, counts in zip(caches, uses, strict=True):
            cache.on_idle = lambda entries, used, counts=counts: counts.update([e.digest for e in entries] * used)
        (prompt,) = prompts(5, count=1)
        await ask(cluster, prompt)
        await assert_conserved(cluster)
        once = Counter(caches[0].chain(prompt, b""))
        had = [counts for counts in uses if counts]
        assert len(had) == len(caches) or (mixed and len(had) == 1)
        assert had == [once] * len(had)

    play(story, mixed=mixed)


def test_two_groups_of_layers_come_back_together() -> None:
    """The same with two blocks of the region for every position, of records of two sizes."""
    config = MockConfig(num_layers=TWO_GROUPS_LAYERS, latent_layers=TWO_GROUPS_LATENT)

    async def story(cluster: InProcessCluster) -> None:
        asked = prompts(3)
        for number, prompt in enumerate(asked, 1):
            await ask(cluster, prompt, config=config)
            await all_down(cluster, number * PROMPT_BLOCKS)
        for prompt in asked:
            await ask(cluster, prompt, config=config)
        assert store_of(cluster).host.counters.hit_blocks >= (PROMPTS - 4) * PROMPT_BLOCKS

    flags = {"engine.model": MOCK_TWO_GROUPS, "engine.num_blocks": 2 * REGION_BLOCKS}
    play(story, **flags, **{"store.host_bytes": 2 * HOST_BLOCKS * POSITION_BYTES})


def test_many_prompts_at_once_over_a_small_region() -> None:
    """Blocks go down, are evicted and come up for six clients at a time, and no token is wrong."""

    async def story(cluster: InProcessCluster) -> None:
        rng, asked, places = random.Random(4), prompts(4), asyncio.Semaphore(6)

        async def client(prompt: list[int]) -> None:
            async with places:
                await ask(cluster, prompt)

        await asyncio.gather(*(client([*rng.choice(asked)[: rng.randrange(20, 133)], 7]) for _ in range(120)))
        assert store_of(cluster).host.counters.hit_blocks > 0

    play(story)


def test_another_node_fetches_what_is_in_host_memory() -> None:
    """The first node has computed twelve prompts, and few of them are in its region still. The second fetches the
    oldest one from it: all of its blocks come, by way of the first one's region."""
    below = {"engine.num_blocks": REGION_BLOCKS, "store.host_bytes": HOST_BLOCKS * POSITION_BYTES}

    async def story(cluster: InProcessCluster, steering: Steering) -> None:
        asked, owner = prompts(7), cluster.prefill["prefill-0"].pool
        steering.prefill, steering.owners = "prefill-0", []
        assert owner.store is not None
        books = owner.store.host.books
        for number, prompt in enumerate(asked, 1):
            await ask(cluster, prompt)
            await wait_for(lambda number=number: _holds(books.blocks == number * PROMPT_BLOCKS), "it to be down")  # type: ignore[misc]
        assert owner.blocks.match_prompt(asked[0], b"") == []
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        answer = await ask(cluster, asked[0])
        assert answer.stats.sources.fetched == PROMPT_BLOCKS * SIZE
        assert owner.store.host.counters.hit_blocks == PROMPT_BLOCKS

    async def scenario() -> None:
        spec = mock_spec(prefill=2, node_flags={"prefill-0": below})
        async with inprocess(spec) as cluster:
            with steered(cluster) as steering:
                compute_slowly(cluster, "prefill-1")
                await connected(cluster, "prefill-1", "prefill-0")
                await story(cluster, steering)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.parametrize("two_groups", [False, True], ids=["one group of layers", "two groups"])
def test_a_prefix_on_disk_outlives_the_node(tmp_path: Path, two_groups: bool) -> None:
    """A prompt that was asked twice is on disk. The node ends, and another of its name has it before the first request;
    it comes up for its own tenant only. Where layers are of two groups, so is each block of the file."""
    flags: dict[str, object] = {"store.disk_path": str(tmp_path), "store.disk_bytes": 4 << 20}
    config = MockConfig()
    if two_groups:
        config = MockConfig(num_layers=TWO_GROUPS_LAYERS, latent_layers=TWO_GROUPS_LATENT)
        flags |= {"engine.model": MOCK_TWO_GROUPS, "engine.num_blocks": 2 * REGION_BLOCKS}
        flags |= {"store.host_bytes": 2 * HOST_BLOCKS * POSITION_BYTES}

    async def story(cluster: InProcessCluster) -> None:
        (prompt, other) = prompts(5, 2)
        for _ in range(2):
            await ask(cluster, prompt, "a", config)
        await ask(cluster, other, "a", config)
        await all_on_disk(cluster, PROMPT_BLOCKS)
        await cluster.stop_node("prefill-0")
        await cluster.start_node("prefill-0", Service.PREFILL)
        brings_all_it_can(cluster)
        disk = store_of(cluster).disk
        assert disk is not None
        assert disk.books.blocks == PROMPT_BLOCKS
        for salt, asked, cached in (("b", prompt, 0), ("a", other, 0), ("a", prompt, PROMPT_BLOCKS * SIZE)):
            answer = await ask(cluster, asked, salt, config)
            assert answer.stats.prompt_tokens_cached == cached
        assert disk.counters.hit_blocks == PROMPT_BLOCKS
        assert (tmp_path / "prefill-0.kv").exists()

    play(story, **flags)


def test_a_node_that_was_killed_begins_warm(tmp_path: Path) -> None:
    """SIGKILL, with blocks on disk: the process started again says that it has them before it has seen a request, and
    its answers are right."""
    flags = {
        "store.host_bytes": HOST_BLOCKS * POSITION_BYTES,
        "store.disk_path": str(tmp_path),
        "store.disk_bytes": 4 << 20,
    }

    async def disk_blocks(cluster: RunningCluster) -> int:
        load = (await cluster.status("prefill-0")).record.load
        return next(int(tier.blocks) for tier in load.tiers if tier.tier == "disk")

    async def scenario(cluster: RunningCluster) -> None:
        (prompt,) = prompts(6, 1)
        for _ in range(2):
            answer = await cluster.client.generate(prompt, max_tokens=MAX_TOKENS)
            assert answer.ids == mock_tokens(prompt, MAX_TOKENS)

        async def written() -> bool:
            return await disk_blocks(cluster) == PROMPT_BLOCKS

        await wait_for(written, "the blocks to be on disk", story=cluster.story)
        cluster.send_signal("prefill-0", signal.SIGKILL)
        assert await cluster.wait_exit("prefill-0") == -signal.SIGKILL
        await cluster.cluster.start_process("prefill-0")
        assert await disk_blocks(cluster) == PROMPT_BLOCKS
        answer = await cluster.client.generate(prompt, max_tokens=MAX_TOKENS)
        assert answer.ids == mock_tokens(prompt, MAX_TOKENS)

    with running(mock_spec(prefill_flags=flags)) as cluster:
        cluster.run(scenario(cluster))
        cluster.run(assert_conserved(cluster))


def test_two_tenants_with_one_prompt() -> None:
    """One's blocks are in host memory: the other's prompt, and one without a salt, are computed from the start."""

    async def story(cluster: InProcessCluster) -> None:
        asked = prompts(2)
        for number, prompt in enumerate(asked, 1):
            await ask(cluster, prompt, "a")
            await all_down(cluster, number * PROMPT_BLOCKS)
        for salt, cached in (("b", 0), (None, 0), ("a", PROMPT_BLOCKS * SIZE)):
            answer = await ask(cluster, asked[0], salt)
            assert answer.stats.prompt_tokens_cached == cached

    play(story)
