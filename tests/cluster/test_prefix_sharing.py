"""Shared system prompts: each is sent to a decode node once, and never from one tenant to another."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest

from baton.errors import Code, Reason
from cachestore.prefix_cache import chain_digests, root_digest
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    error_of,
    http_call,
    http_endpoint,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)
from tests.support.inprocess_cluster import inprocess, until

SIZE: Final = 16
BLOCKS: Final = 3_000
"""So many that nothing is evicted here."""
SHARED_BLOCKS: Final = 5
SYSTEM_TOKENS: Final = SHARED_BLOCKS * SIZE + 7
"""The last 7 tokens share their block with the user's message: it is never the same."""
REQUESTS: Final = 200
SYSTEMS: Final = 5
AT_A_TIME: Final = 12
MAX_TOKENS: Final = 6


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with running(mock_spec(prefill=2, decode=2, blocks=BLOCKS)) as cluster:
        yield cluster


def systems(rng: random.Random) -> list[list[int]]:
    return [random_prompt(rng, SYSTEM_TOKENS) for _ in range(SYSTEMS)]


def user_requests(rng: random.Random, shared: Sequence[list[int]], count: int) -> list[tuple[int, list[int]]]:
    """Which system prompt, and the whole prompt; users' messages never agree in their first token."""
    requests = []
    for i in range(count):
        which = rng.randrange(len(shared))
        requests.append((which, [*shared[which], 1 + i, *random_prompt(rng, rng.randrange(2, 40))]))
    return requests


def blocks_of(prompt: Sequence[int]) -> int:
    return -(-len(prompt) // SIZE)


async def bytes_moved(cluster: RunningCluster) -> int:
    """For requests: not what the prefill nodes fetch from each other."""
    statuses = await cluster.statuses()
    return sum(
        pair.bytes_moved - pair.bytes_fetched for name in ("prefill-0", "prefill-1") for pair in statuses[name].pairs
    )


async def hit_tokens(cluster: RunningCluster, role: str) -> int:
    statuses = await cluster.statuses()
    return sum(statuses[f"{role}-{i}"].prefixes.hit_tokens for i in (0, 1))


def check_sum(answers: Sequence[Answer], moved: int) -> None:
    """What was written is what the links have moved."""
    block_bytes = {a.stats.bytes_written // a.stats.blocks_written for a in answers}
    assert len(block_bytes) == 1
    assert sum(a.stats.bytes_written for a in answers) == moved
    assert sum(a.stats.blocks_written for a in answers) * block_bytes.pop() == moved


@pytest.mark.slow
def test_200_requests_over_5_system_prompts_one_after_the_other(cluster: RunningCluster) -> None:
    """The blocks sent, exactly: each decode node gets each system prompt with its first request there, and never again;
    likewise each prefill node computes it once, or fetches it where it takes long to compute."""

    async def scenario() -> None:
        rng = random.Random(7)
        requests = user_requests(rng, systems(rng), REQUESTS)
        moved_before = await bytes_moved(cluster)
        answers: list[Answer] = []
        sent: set[tuple[str, int]] = set()
        there: set[tuple[str, int]] = set()
        computed = 0
        for which, prompt in requests:
            answer = await cluster.client.generate(prompt, max_tokens=MAX_TOKENS)
            assert answer.ids == mock_tokens(prompt, MAX_TOKENS)
            stats = answer.stats
            skipped = SHARED_BLOCKS if (stats.decode_node, which) in sent else 0
            is_there = (stats.prefill_node, which) in there
            assert stats.sources.fetched in ((0,) if is_there else (0, SHARED_BLOCKS * SIZE))
            cached = SHARED_BLOCKS if is_there or stats.sources.fetched else 0
            computed += not cached
            assert (stats.blocks_skipped, stats.blocks_written) == (skipped, blocks_of(prompt) - skipped)
            assert (stats.prompt_tokens_skipped, stats.prompt_tokens_cached) == (skipped * SIZE, cached * SIZE)
            sent.add((stats.decode_node, which))
            there.add((stats.prefill_node, which))
            answers.append(answer)
        written = sum(answer.stats.blocks_written for answer in answers)
        assert written == sum(blocks_of(p) for _, p in requests) - SHARED_BLOCKS * (REQUESTS - len(sent))
        # Decode nodes with about equal room: one that has the prefix goes first, so that a second one hardly gets it.
        assert SYSTEMS <= len(sent) <= 2 * SYSTEMS
        assert await hit_tokens(cluster, "decode") == SHARED_BLOCKS * SIZE * (REQUESTS - len(sent))
        assert await hit_tokens(cluster, "prefill") == SHARED_BLOCKS * SIZE * (REQUESTS - computed)
        await assert_conserved(cluster)
        check_sum(answers, await bytes_moved(cluster) - moved_before)

    cluster.run(scenario())


def test_200_requests_over_5_system_prompts_at_once(cluster: RunningCluster) -> None:
    """12 at a time, nothing warm. A decode node is sent a system prompt again only by requests that it granted before
    the first of them committed there; those are under way together with it, so there are at most 12 of them."""

    async def scenario() -> None:
        rng = random.Random(8)
        requests = user_requests(rng, systems(rng), REQUESTS)
        moved_before = await bytes_moved(cluster)
        places = asyncio.Semaphore(AT_A_TIME)

        async def ask(prompt: list[int]) -> Answer:
            async with places:
                return await cluster.client.generate(prompt, max_tokens=MAX_TOKENS)

        answers = await asyncio.gather(*(ask(prompt) for _, prompt in requests))
        assert [a.ids for a in answers] == [mock_tokens(prompt, MAX_TOKENS) for _, prompt in requests]
        misses: dict[tuple[str, int], int] = {}
        for answer, (which, prompt) in zip(answers, requests, strict=True):
            stats = answer.stats
            assert stats.blocks_skipped in (0, SHARED_BLOCKS)
            assert stats.blocks_written == blocks_of(prompt) - stats.blocks_skipped
            where = (stats.decode_node, which)
            misses[where] = misses.get(where, 0) + (stats.blocks_skipped == 0)
        assert all(1 <= count <= AT_A_TIME for count in misses.values()), misses
        written = sum(answer.stats.blocks_written for answer in answers)
        most = sum(blocks_of(p) for _, p in requests) - SHARED_BLOCKS * (REQUESTS - AT_A_TIME * 2 * SYSTEMS)
        assert written <= most
        await assert_conserved(cluster)
        check_sum(answers, await bytes_moved(cluster) - moved_before)

    cluster.run(scenario())


@pytest.fixture(scope="module")
def one_of_each() -> Iterator[RunningCluster]:
    spec = mock_spec(blocks=BLOCKS, router_flags={"http_listen": "127.0.0.1:0"})
    with running(spec) as cluster:
        yield cluster


async def ask_as(cluster: RunningCluster, salt: str | None, prompt: Sequence[int]) -> Answer:
    request = make_request(prompt, max_tokens=MAX_TOKENS)
    if salt is not None:
        request.cache_salt = salt
    return await cluster.client.send(request)


def test_tenants_never_share_a_block(one_of_each: RunningCluster) -> None:
    """One node of each role, one prompt, asked by two tenants and by somebody without a salt, twice: the first time
    nobody hits what the others left, in neither cache; the second time each hits its own. The answers are the same."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(9), 6 * SIZE + 1)
        for again in (False, True):
            for salt in ("acme", "globex", None, "acme "):
                answer = await ask_as(one_of_each, salt, prompt)
                assert answer.ids == mock_tokens(prompt, MAX_TOKENS)
                hits = (answer.stats.prompt_tokens_cached, answer.stats.prompt_tokens_skipped)
                assert hits == ((6 * SIZE, 6 * SIZE) if again else (0, 0)), (salt, again)
        await assert_conserved(one_of_each)

    one_of_each.run(scenario())


def http_completion(cluster: RunningCluster, **body: Any) -> tuple[int, dict[str, Any]]:
    wanted = json.dumps({"max_tokens": MAX_TOKENS, **body}).encode()
    status, _, answer = http_call(http_endpoint(cluster), "POST", "/v1/completions", wanted)
    return status, json.loads(answer)


def test_usage_tells_a_tenant_of_its_own_hits_only(one_of_each: RunningCluster) -> None:
    """prompt_tokens_details.cached_tokens over HTTP, with vLLM's name for the salt."""
    prompt = random_prompt(random.Random(10), 4 * SIZE + 5)
    cached = []
    for salt in ("acme", "globex", "acme", None, "globex"):
        status, reply = http_completion(one_of_each, prompt=prompt, cache_salt=salt)
        assert status == 200
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 4 * SIZE, 0, 4 * SIZE]


def test_a_tenants_prompt_does_not_attract_anothers() -> None:
    """What the router knows of a node's cache is by tenant too: placement would tell of the other one's prompts."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(11), 3 * SIZE)
        async with inprocess(mock_spec()) as cluster:
            request = make_request(prompt, max_tokens=2)
            request.cache_salt = "acme"
            await cluster.client.send(request)
            index, incarnation = cluster.router.holdings.index, cluster.runtimes["prefill-0"].incarnation
            root = cluster.router.model().kv_root

            def known(salt: bytes) -> int:
                found = index.lookup(chain_digests(root_digest(root, salt), prompt, SIZE))
                return 0 if found is None else int(found.blocks[index.holders[incarnation]])

            await until(cluster, "the router to know what the node has", lambda: known(b"acme") == 3)
            assert (known(b"globex"), known(b"")) == (0, 0)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_bad_salt_is_refused(one_of_each: RunningCluster) -> None:
    """Empty (it would share with everybody), longer than the limit, or no string: named, and nothing is left of it."""

    async def scenario() -> None:
        for salt, words in (("", "0 bytes"), ("x" * 257, "257 bytes"), ("é" * 129, "258 bytes")):
            request = make_request([1, 2, 3])
            request.cache_salt = salt
            error = await error_of(one_of_each.client.send(request))
            assert (error.code, error.reason, error.field) == (
                Code.INVALID_ARGUMENT, Reason.BAD_FIELD, "cache_salt"
            ), error  # fmt: skip
            assert words in error.message and "1 to 256" in error.message
        await assert_conserved(one_of_each)

    one_of_each.run(scenario())
    for salt in ("", 5, ["a"], "x" * 257):
        status, reply = http_completion(one_of_each, prompt=[1, 2], cache_salt=salt)
        assert (status, reply["error"]["param"]) == (400, "cache_salt")
    status, _ = http_completion(one_of_each, prompt=[1, 2], cache_salt="é" * 128)
    assert status == 200
