"""What routers know of the nodes' caches, in a cluster: it is true, and prompts are placed and fetched by it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np

from baton.lifecycle import LifecycleEvent
from cachestore.prefix_cache import chain_digests, root_digest
from cli.services import Service
from cli.supervisor import ROUTER_NAME
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode
from router.placement import Choice
from tests.support.cluster_harness import Answer, Client, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.support.steering import compute_slowly, connected

SIZE = 16
BLOCKS = 20
Scene = Callable[[InProcessCluster], Coroutine[Any, Any, None]]


def play(scene: Scene, **spec: Any) -> None:
    """Two prefill nodes and a decode node."""

    async def scenario() -> None:
        async with inprocess(mock_spec(**{"prefill": 2, "decode": 1, **spec})) as cluster:
            await scene(cluster)
            nodes: tuple[PrefillNode | DecodeNode, ...] = (*cluster.prefill.values(), *cluster.decode.values())
            for node in nodes:
                node.ledger.check()

    asyncio.run(scenario())


async def ask(cluster: InProcessCluster, prompt: list[int], count: int = 4) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


def known(cluster: InProcessCluster, prompt: Sequence[int]) -> dict[str, int]:
    """Leading blocks of a prompt that nodes have, as the router has it."""
    index = cluster.router.holdings.index
    names = {runtime.incarnation: name for name, runtime in cluster.runtimes.items()}
    model = cluster.runtimes["decode-0"].model
    assert model is not None
    found = index.lookup(chain_digests(root_digest(model.kv_root, b""), prompt, SIZE))
    if found is None:
        return {}
    blocks = {names.get(i, "gone"): int(found.blocks[number]) for i, number in index.holders.items()}
    return {name: count for name, count in blocks.items() if count}


async def until_known(cluster: InProcessCluster, prompt: Sequence[int], **blocks: int) -> None:
    expected = {name.replace("_", "-"): count for name, count in blocks.items()}
    await until(cluster, f"the router to know {expected}", lambda: known(cluster, prompt) == expected)


def test_the_router_names_the_owner_and_the_prompt_is_fetched() -> None:
    """One node has computed a prompt. The next one goes to the other node, as if the first one's queue was too long,
    and the router tells it who has it: but for its end nothing is computed again. Then both have it, and the decode
    node. One that is cordoned gives nothing, and is not named."""
    prompt = random_prompt(random.Random(1), BLOCKS * SIZE + 3)

    async def scene(cluster: InProcessCluster) -> None:
        compute_slowly(cluster, "prefill-1")
        await connected(cluster, "prefill-1", "prefill-0")
        await connected(cluster, "prefill-1", "decode-0")
        assert (await ask(cluster, prompt)).stats.prefill_node == "prefill-0"
        await until_known(cluster, prompt, prefill_0=BLOCKS, decode_0=BLOCKS)
        placement = cluster.router._prefill_nodes.placement
        second = np.array([record.name == "prefill-1" for record in placement.records])
        real_pick = placement.pick

        def pick(*args: Any, **kwargs: Any) -> Choice:
            return real_pick(*args, **{**kwargs, "among": second})

        with patch.object(placement, "pick", pick):
            stats = (await ask(cluster, prompt)).stats
        assert stats.prefill_node == "prefill-1"
        assert (stats.sources.fetched, stats.sources.computed) == (BLOCKS * SIZE, 3)
        assert stats.sources.fetched_from in ("prefill-0", "decode-0")
        await until_known(cluster, prompt, prefill_0=BLOCKS, prefill_1=BLOCKS, decode_0=BLOCKS)
        assert cluster.prefill["prefill-1"].load().fetch.token_s > 0
        assert len(placement.pick((*prompt, *[1] * SIZE), b"other", among=second).owners) == 0
        long = (*prompt, *[1] * SIZE)
        cluster.prefill["prefill-1"].pool.blocks.prefix_cache.evict_until(300)
        await until_known(cluster, prompt, prefill_0=BLOCKS, decode_0=BLOCKS)
        assert {owner.name for owner in placement.pick(long, b"", among=second).owners} == {"prefill-0", "decode-0"}
        cluster.runtimes["prefill-0"].drain.order(LifecycleEvent.CORDON, "the test says so")
        nodes = cluster.router._prefill_nodes
        await until(cluster, "the router to hear of it", lambda: [r.name for r in nodes.ready] == ["prefill-1"])
        assert {owner.name for owner in placement.pick(long, b"").owners} == {"decode-0"}

    play(scene)


def test_evictions_are_seen() -> None:
    """A region with room for one and a half prompts: each prompt takes the place of the one before, and the router
    knows that."""
    rng = random.Random(2)
    first, second = (random_prompt(rng, BLOCKS * SIZE + 3) for _ in range(2))

    async def scene(cluster: InProcessCluster) -> None:
        await ask(cluster, first)
        await until_known(cluster, first, prefill_0=BLOCKS, decode_0=BLOCKS)
        await ask(cluster, second)
        await until_known(cluster, second, prefill_0=BLOCKS, decode_0=BLOCKS)
        await until(cluster, "the evicted to be forgotten", lambda: known(cluster, first).get("prefill-0", 0) < BLOCKS)
        cache = cluster.prefill["prefill-0"].pool.blocks.prefix_cache
        chain = cache.chain(first, b"")
        left = sum(cache.indexed(digest) for digest in chain)
        await until(cluster, "the rest to be right", lambda: known(cluster, first).get("prefill-0", 0) == left)

    play(scene, prefill=1, blocks=30, decode_flags={"engine.num_blocks": 300})


def test_a_node_that_restarts_is_forgotten_and_learnt_anew() -> None:
    """It comes back under its name and has nothing."""
    prompt = random_prompt(random.Random(3), BLOCKS * SIZE + 3)

    async def scene(cluster: InProcessCluster) -> None:
        await ask(cluster, prompt)
        await until_known(cluster, prompt, prefill_0=BLOCKS, decode_0=BLOCKS)
        old = cluster.runtimes["prefill-0"].incarnation
        await cluster.stop_node("prefill-0")
        await until_known(cluster, prompt, decode_0=BLOCKS)
        await cluster.start_node("prefill-0", Service.PREFILL)
        new = cluster.runtimes["prefill-0"].incarnation
        holders = cluster.router.holdings.index.holders
        await until(cluster, "the router to follow the new process", lambda: new in holders and old not in holders)
        stats = (await ask(cluster, prompt)).stats
        assert stats.prompt_tokens_cached == 0
        await until_known(cluster, prompt, prefill_0=BLOCKS, decode_0=BLOCKS)

    play(scene, prefill=1)


def test_a_restarted_router_learns_it_all() -> None:
    """What nodes have is nobody's memory but theirs: a new router sends the prompt where it is."""
    prompt = random_prompt(random.Random(4), BLOCKS * SIZE + 3)

    async def scene(cluster: InProcessCluster) -> None:
        where = (await ask(cluster, prompt)).stats.prefill_node
        await cluster.client.close()
        await cluster.stop_node(ROUTER_NAME)
        await cluster.start_node(ROUTER_NAME, Service.ROUTER)
        cluster.client = Client(cluster.endpoints[ROUTER_NAME])
        await until(cluster, "the router to know the nodes", lambda: len(cluster.router.holdings.index.holders) == 3)
        await until_known(cluster, prompt, **{where.replace("-", "_"): BLOCKS, "decode_0": BLOCKS})
        stats = (await ask(cluster, prompt)).stats
        assert (stats.prefill_node, stats.prompt_tokens_cached) == (where, BLOCKS * SIZE)

    play(scene)
