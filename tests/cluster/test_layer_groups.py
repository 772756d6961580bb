"""The whole path with two groups of layers: the mock engine's records of two sizes, with a block of each group for
every position. Its tokens are hashes of the bytes read back from both, so one block in the wrong place changes them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import Final

import pytest

from engine.build import MOCK_TWO_GROUPS, TWO_GROUPS_LATENT, TWO_GROUPS_LAYERS
from engine.mock import MockConfig
from node.computing_cost import ComputingCost
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.inprocess_cluster import inprocess
from tests.support.steering import compute_slowly, connected, steered

BLOCK: Final = 16
CONFIG: Final = MockConfig(num_layers=TWO_GROUPS_LAYERS, latent_layers=TWO_GROUPS_LATENT)
POSITION_BYTES: Final = 4 * 2 * BLOCK * 8 + 2 * BLOCK * 8
"""Four layers have K and V of eight bytes, two have a latent of eight."""
expected = partial(mock_tokens, config=CONFIG)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A device of 24 positions that holds two full answers, host memory behind it; every record is compared."""
    spec = mock_spec(
        both={"engine.model": MOCK_TWO_GROUPS, "transports": request.param},
        prefill_flags={"engine.num_blocks": 201, "writer.checksum_fraction": 1.0},
        decode_flags={
            "engine.num_blocks": 49,
            "engine.mock_layer_delay_ms": 0.5,
            "spill.host_blocks": 120,
            "spill.headroom_blocks": 2,
        },
        router_flags={"placement_wait_ms_max": 60_000},
    )
    with running(spec) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def test_every_record_of_both_groups_is_handed_over(cluster: RunningCluster) -> None:
    """Prompts around every boundary of a block: every token is the reference's, and what was written is a record of
    each layer for each position, the short ones of the second group among them."""
    rng = random.Random(1)

    async def ask(length: int) -> None:
        prompt = random_prompt(rng, length)
        answer = await cluster.client.generate(prompt, max_tokens=20)
        assert answer.ids == expected(prompt, 20), length
        stats, positions = answer.stats, -(-length // BLOCK)
        assert (stats.blocks_written, stats.blocks_skipped) == (positions, 0)
        assert stats.bytes_written == positions * POSITION_BYTES

    async def ask_all() -> None:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 7 * BLOCK + 9):
            await ask(length)

    async def checked() -> int:
        (pair,) = (await cluster.status("prefill-0")).pairs
        assert pair.handoffs_corrupt == 0
        return pair.records_checksummed

    before = cluster.run(checked())
    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))
    assert cluster.run(checked()) - before == TWO_GROUPS_LAYERS * (1 + 1 + 1 + 2 + 5 + 8)


def test_a_prefix_is_found_on_both_sides(cluster: RunningCluster) -> None:
    """One prompt three times, then with another end: positions are found whole, on the prefill node and on the decode
    node, and only the rest is computed and written."""
    prompt = random_prompt(random.Random(2), 6 * BLOCK + 3)
    other = prompt[: 4 * BLOCK] + random_prompt(random.Random(3), 5)

    async def ask_all() -> None:
        for asked, cached in ((prompt, 0), (prompt, 6), (prompt, 6), (other, 4)):
            answer = await cluster.client.generate(asked, max_tokens=4)
            assert answer.ids == expected(asked, 4)
            positions = -(-len(asked) // BLOCK)
            assert (answer.stats.blocks_skipped, answer.stats.blocks_written) == (cached, positions - cached)
            assert answer.stats.prompt_tokens_cached == cached * BLOCK
            assert answer.stats.prompt_tokens_skipped == cached * BLOCK

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))


def test_blocks_of_both_groups_go_to_host_memory_and_come_back(cluster: RunningCluster) -> None:
    """Eight answers that grow to ten positions each, all at once, on a device of 24: every token is the reference's."""
    rng = random.Random(4)
    prompts = [random_prompt(rng, rng.randrange(10, 33)) for _ in range(8)]

    async def ask(prompt: list[int]) -> None:
        answer = await cluster.client.generate(prompt, max_tokens=128)
        assert answer.ids == expected(prompt, 128)

    async def ask_all() -> None:
        await asyncio.gather(*(ask(prompt) for prompt in prompts))

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))
    status = cluster.run(cluster.status("decode-0"))
    counts = {c.name.removeprefix("spill: "): c.value for c in status.counters if c.name.startswith("spill: ")}
    assert counts["sequences swapped out since start"] > 0
    assert counts["bytes copied out"] > 0
    assert counts["bytes copied out"] % (2 * BLOCK * 8) == 0
    assert counts["host blocks free"] == 120


def test_positions_come_back_from_the_store_with_both_blocks() -> None:
    """Six prompts of eight positions over a region of 24: asked again, all that was evicted comes back from host
    memory, a copy of the two blocks of each position, and every token is the reference's."""
    rng = random.Random(5)
    prompts = [random_prompt(rng, 8 * BLOCK + 5) for _ in range(6)]
    spec = mock_spec(
        both={"engine.model": MOCK_TWO_GROUPS},
        prefill_flags={"engine.num_blocks": 49, "store.host_bytes": 100 * POSITION_BYTES},
    )

    async def scenario() -> None:
        async with inprocess(spec) as cluster:
            node = cluster.prefill["prefill-0"]
            # So slow that everything is brought that can be, on any machine.
            node.gatherer._computing = ComputingCost(fixed_s=0.0, token_s=1.0)
            store = node.pool.store
            assert store is not None
            books, counters = store.host.books, store.host.counters

            async def all_down() -> bool:
                return books.blocks >= 8 * asked

            for asked, prompt in enumerate(prompts, start=1):
                assert (await cluster.client.generate(prompt, max_tokens=4)).ids == expected(prompt, 4)
                await wait_for(all_down, f"{8 * asked} positions in host memory")
            for prompt in prompts:
                answer = await cluster.client.generate(prompt, max_tokens=4)
                assert answer.ids == expected(prompt, 4)
                assert answer.stats.prompt_tokens_cached == 8 * BLOCK
            assert counters.hit_blocks >= 8 * 4
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_mixed_node_keeps_and_hands_over() -> None:
    """Short prompts run where they are computed, long ones go to the other node; growth takes a whole position."""
    spec = mock_spec(prefill=0, decode=0, mixed=2, both={"engine.model": MOCK_TWO_GROUPS})

    async def scenario() -> None:
        rng, transports = random.Random(6), set()
        async with inprocess(spec) as cluster:
            for length in (5, 5 * BLOCK, 700, 1_100):
                prompt = random_prompt(rng, length)
                answer = await cluster.client.generate(prompt, max_tokens=3 * BLOCK)
                assert answer.ids == expected(prompt, 3 * BLOCK)
                transports.add(answer.stats.transport)
            await assert_conserved(cluster)
        assert transports == {"local", "shm"}

    asyncio.run(scenario())


def test_a_prompt_is_fetched_from_another_node_with_both_blocks_of_a_position() -> None:
    """A second prefill node has a prompt's positions from the first, then the next turn's from the decode node: only
    what is new is computed, and every token is the reference's."""
    spec = mock_spec(prefill=2, both={"engine.model": MOCK_TWO_GROUPS})

    async def scenario() -> None:
        talk = random_prompt(random.Random(7), 12 * BLOCK + 3)
        async with inprocess(spec) as cluster:
            with steered(cluster) as steering:
                compute_slowly(cluster, "prefill-1")
                for owner in ("prefill-0", "decode-0"):
                    await connected(cluster, "prefill-1", owner)
                answer = await cluster.client.generate(talk, max_tokens=40)
                assert answer.ids == expected(talk, 40)
                steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
                answer = await cluster.client.generate(talk, max_tokens=40)
                assert answer.ids == expected(talk, 40)
                sources = answer.stats.sources
                assert (sources.fetched, sources.computed, sources.cached_device) == (12 * BLOCK, 3, 0)
                known = (len(talk) + 40 - 1) // BLOCK * BLOCK  # the KV of the last token drawn is never written
                talk += answer.ids + random_prompt(random.Random(8), 30)
                steering.owners = ["decode-0"]
                answer = await cluster.client.generate(talk, max_tokens=8)
                assert answer.ids == expected(talk, 8)
                sources = answer.stats.sources
                assert (sources.fetched, sources.cached_device) == (known - 12 * BLOCK, 12 * BLOCK)
                assert sources.computed == len(talk) - known
            await assert_conserved(cluster)

    asyncio.run(scenario())
