"""The whole path on the mock engine, whose tokens are a hash of the bytes read back: one wrong byte changes them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
from batonpb import common_pb2

from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)

BLOCK = 16
CHUNK = 512
AT_ONCE = 16
AROUND_BLOCKS = [
    1,
    2,
    3,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK - 1,
    2 * BLOCK,
    2 * BLOCK + 1,
    5 * BLOCK,
    7 * BLOCK + 9,
]
AROUND_CHUNKS = [CHUNK - BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + BLOCK, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1]
LENGTHS = [*AROUND_BLOCKS, *AROUND_CHUNKS, 3 * CHUNK - 1, 3 * CHUNK + 1, 1999, 2000]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Two by two, in a region that sixteen long requests overflow: evictions, and BUSY answers."""
    with running(mock_spec(prefill=2, decode=2, blocks=300)) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def prompts_with_repeats(rng: random.Random) -> list[list[int]]:
    """Each boundary length once with fresh tokens, then extensions of earlier prompts and exact repeats: 69 in all."""
    fresh = [random_prompt(rng, length) for length in LENGTHS]
    longer = [prompt[: len(prompt) // BLOCK * BLOCK] + random_prompt(rng, 7) for prompt in fresh]
    return fresh + longer[::2] + fresh[:12] + longer[1::2] + fresh[12:]


def test_every_answer_is_exact_under_eviction_and_repeats(cluster: RunningCluster) -> None:
    """Prompts around every block and chunk boundary, sixteen at once, greedy and seeded by turns, in a region that
    does not hold them all: every token is the reference's, and both sides reuse prefixes."""
    rng = random.Random(11)
    prompts = prompts_with_repeats(rng)
    assert len(prompts) >= 60
    slots = asyncio.Semaphore(AT_ONCE)

    async def ask(index: int, prompt: list[int]) -> tuple[int, int, int]:
        count = rng.choice([2, 15, 16, 17, 33, 60])
        sampling: dict[str, Any] = (
            {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": index} if index % 3 == 1 else {}
        )
        async with slots:
            answer = await cluster.client.generate(prompt, max_tokens=count, **sampling)
        assert answer.ids == mock_tokens(prompt, count, **sampling), (index, len(prompt))
        assert answer.reason == common_pb2.FINISH_REASON_LENGTH
        stats = answer.stats
        assert stats.prompt_tokens == len(prompt)
        assert stats.transport == "shm"
        assert stats.blocks_written + stats.blocks_skipped == -(-len(prompt) // BLOCK)
        assert stats.prompt_tokens_cached < len(prompt), "the last prompt token is always computed"
        return index, stats.blocks_skipped, stats.prompt_tokens_cached

    async def ask_all() -> list[tuple[int, int, int]]:
        return await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))

    outcomes = cluster.run(ask_all())
    assert any(skipped > 0 for _, skipped, _ in outcomes), "no prefix hit on a decode node"
    assert any(cached > 0 for _, _, cached in outcomes), "no prefix hit on a prefill node"
    cluster.run(assert_conserved(cluster))


def test_a_repeat_finds_the_prefix_on_both_sides(cluster: RunningCluster) -> None:
    """One prompt asked again and again, alone: once both decode nodes have seen it, nothing full is sent or computed
    a second time."""
    prompt = random_prompt(random.Random(12), 10 * BLOCK + 3)

    async def ask_until_cached() -> None:
        for _ in range(40):  # the router and the prefill nodes prefer those that have it: met long before
            answer = await cluster.client.generate(prompt, max_tokens=4)
            assert answer.ids == mock_tokens(prompt, 4)
            if answer.stats.blocks_skipped == 10 and answer.stats.prompt_tokens_cached == 10 * BLOCK:
                assert answer.stats.blocks_written == 1
                return
        raise AssertionError("no request found its prefix on both nodes")

    cluster.run(ask_until_cached())
    cluster.run(assert_conserved(cluster))


def test_many_tiny_and_some_huge_answers_share_the_nodes(cluster: RunningCluster) -> None:
    """Long answers (growth promised, blocks taken step by step) beside a stream of one-token ones."""
    rng = random.Random(13)

    async def ask(length: int, count: int) -> None:
        prompt = random_prompt(rng, length)
        answer = await cluster.client.generate(prompt, max_tokens=count)
        assert answer.ids == mock_tokens(prompt, count)
        assert bool(answer.stats.decode_node) == (count > 1), "one token needs no decode node"

    async def ask_all() -> None:
        long = [ask(rng.randrange(1, 60), 400) for _ in range(4)]
        await asyncio.gather(*long, *(ask(rng.randrange(1, 300), 1) for _ in range(30)))

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "seed": 99}], ids=["greedy", "seeded"])
def test_unary_equals_the_stream(cluster: RunningCluster, sampling: dict[str, Any]) -> None:
    """The same request by both methods."""
    prompt = random_prompt(random.Random(14), 77)

    async def ask_both() -> None:
        streamed = await cluster.client.generate(prompt, max_tokens=20, **sampling)
        whole = await cluster.client.unary(prompt, max_tokens=20, **sampling)
        assert list(whole.ids) == streamed.ids == mock_tokens(prompt, 20, **sampling)
        assert whole.reason == streamed.reason == common_pb2.FINISH_REASON_LENGTH
        assert whole.request_id
        assert whole.stats.output_tokens == 20

    cluster.run(ask_both())
    cluster.run(assert_conserved(cluster))


def test_stop_tokens_end_the_answer_where_they_are_drawn(cluster: RunningCluster) -> None:
    """A stop token drawn by the decode node, and one that is the first token (then no decode node runs anything)."""
    prompt = random_prompt(random.Random(15), 40)
    expected = mock_tokens(prompt, 12)

    async def ask() -> None:
        at = next(i for i in range(3, 12) if expected[i] not in expected[:i])
        answer = await cluster.client.generate(prompt, max_tokens=12, stop_token_ids=[expected[at]])
        assert answer.ids == expected[: at + 1]
        assert answer.reason == common_pb2.FINISH_REASON_STOP
        first = await cluster.client.generate(prompt, max_tokens=12, stop_token_ids=[expected[0]])
        assert first.ids == expected[:1]
        assert first.reason == common_pb2.FINISH_REASON_STOP
        assert first.stats.decode_node == ""

    cluster.run(ask())
    cluster.run(assert_conserved(cluster))
