"""What a prefill node reports as its load: the tokens that it still has to compute, and no others."""

from __future__ import annotations

import asyncio
import random

from tests.support.cluster_harness import assert_conserved, mock_spec, random_prompt
from tests.support.inprocess_cluster import MARK, Point, ask_exactly, inprocess, until

ENGINE = {"engine.tokens_per_step_max": 64, "engine.sequences_max": 8}


def test_cached_and_computed_tokens_are_no_load() -> None:
    """The node has 12 full blocks of a prompt cached, and has computed 64 of another's 201 tokens. Two prompts wait
    that go on behind the cached 192 tokens with the same 28: the load is 137 tokens that are begun, 28 that the first
    computes for both but for the last block's rest, and 12 of the second. The node is idle: no load."""

    async def scenario() -> None:
        rng = random.Random(1)
        async with inprocess(mock_spec(prefill_flags=ENGINE)) as cluster:
            node, layer = cluster.prefill["prefill-0"], cluster.gates[Point.LAYER]
            prefix = random_prompt(rng, 192)
            await ask_exactly(cluster, [*prefix, *random_prompt(rng, 1)])
            await until(cluster, "an idle node", lambda: node.requests == 0)
            assert node.load().waiting_tokens == 0
            layer.close()
            calls = [asyncio.create_task(ask_exactly(cluster, [MARK, *random_prompt(rng, 200)]))]
            await layer.reached.wait()
            assert node.load().waiting_tokens == 201 - 64
            longer = [*prefix, *random_prompt(rng, 28)]
            calls += [asyncio.create_task(ask_exactly(cluster, longer)) for _ in range(2)]
            await until(cluster, "both to be in the queue", lambda: node.requests == 3)
            assert node.load().waiting_tokens == (201 - 64) + 28 + (28 - 16)
            layer.open()
            await asyncio.gather(*calls)
            await until(cluster, "an idle node", lambda: node.requests == 0)
            assert node.load().waiting_tokens == 0
            await assert_conserved(cluster)

    asyncio.run(scenario())
