"""A prefill node fetches a prompt's leading blocks from another node. The mock engine's tokens are a hash of the bytes
that it reads back: one wrong byte changes them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.cluster_harness import Answer, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.support.steering import Steering, compute_slowly, connected, steered

SIZE = 16
BLOCKS = 20
PROMPT_TOKENS = BLOCKS * SIZE + 3

Scene = Callable[[InProcessCluster, Steering], Coroutine[Any, Any, None]]


def play(scene: Scene, **spec: Any) -> None:
    """Two prefill nodes, the second of which fetches whatever it can, and a decode node."""

    async def scenario() -> None:
        async with inprocess(mock_spec(**{"prefill": 2, "decode": 1, **spec})) as cluster:
            with steered(cluster) as steering:
                compute_slowly(cluster, "prefill-1")
                await connected(cluster, "prefill-1", "prefill-0")
                await scene(cluster, steering)
            nodes = (*cluster.prefill.values(), *cluster.decode.values())
            await until(cluster, "nothing to be left", lambda: not any(node.holds().left() for node in nodes))
            for node in nodes:
                counts = node.ledger.check()
                assert counts.cached + counts.free == counts.total, counts

    asyncio.run(scenario())


async def ask(cluster: InProcessCluster, prompt: list[int], count: int = 8, **sampling: Any) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count, **sampling)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_another_prefill_node_has_is_not_computed_again(transport: str) -> None:
    """The first node has computed a prompt. The second is asked for it too: all of its full blocks but the last come
    from the first, and the tokens are the same."""
    prompt = random_prompt(random.Random(1), PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        steering.prefill, steering.owners = "prefill-1", ["prefill-0"]
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.computed, sources.cached_device) == (BLOCKS * SIZE, 3, 0)
        assert sources.fetched_from == "prefill-0"
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.computed, sources.cached_device) == (0, 3, BLOCKS * SIZE)
        status = (await cluster.statuses())["prefill-1"].fetches
        assert [(each.owner, each.fetches, each.tokens) for each in status] == [("prefill-0", 1, BLOCKS * SIZE)]
        (pair,) = [p for p in (await cluster.statuses())["prefill-0"].pairs if p.peer == "prefill-1"]
        assert pair.bytes_fetched == pair.bytes_moved == status[0].nbytes > 0
        assert pair.transport == transport

    play(scene, both={"transports": transport})


def test_only_what_is_missing_is_fetched() -> None:
    """The second node has the beginning of a prompt already: the rest comes."""
    rng = random.Random(2)
    prompt = random_prompt(rng, PROMPT_TOKENS)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await ask(cluster, prompt)
        steering.prefill = "prefill-1"
        await ask(cluster, prompt[: 5 * SIZE + 1])
        steering.owners = ["prefill-0"]
        sources = (await ask(cluster, prompt)).stats.sources
        assert (sources.fetched, sources.cached_device, sources.computed) == ((BLOCKS - 5) * SIZE, 5 * SIZE, 3)

    play(scene)


def test_the_next_turn_computes_new_tokens_only() -> None:
    """The decode node has prompt and answer of a turn. The next one's prompt has both, and comes to a prefill node that
    has neither: but for the block that was not full, only its new tokens are computed."""
    rng = random.Random(3)

    async def scene(cluster: InProcessCluster, steering: Steering) -> None:
        await connected(cluster, "prefill-1", "decode-0")
        talk = random_prompt(rng, PROMPT_TOKENS)
        talk += (await ask(cluster, talk, 45)).ids
        # The KV of the last token drawn is never written.
        known = (len(talk) - 1) // SIZE * SIZE
        talk += random_prompt(rng, 30)
        steering.prefill, steering.owners = "prefill-1", ["decode-0"]
        sources = (await ask(cluster, talk, 20)).stats.sources
        assert (sources.fetched, sources.fetched_from) == (known, "decode-0")
        assert sources.computed == len(talk) - known

    play(scene)
