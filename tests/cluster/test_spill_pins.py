"""Pinned prefixes on a decode node that promises more than its device holds: a pinned block cannot be moved."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.support.cluster_harness import CALL_S_MAX, assert_conserved, make_request, mock_spec, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, ask_exactly, inprocess, until
from tests.support.node_states import decode_state

SIZE = 16
BLOCKS = 24
SPEC = mock_spec(
    prefill_flags={"engine.num_blocks": 100},
    decode_flags={
        "engine.num_blocks": BLOCKS,
        "engine.mock_layer_delay_ms": 2,
        "spill.host_blocks": 40,
        "spill.headroom_blocks": 1,
    },
)


@asynccontextmanager
async def running(cluster: InProcessCluster, *, footprint: int) -> AsyncIterator[None]:
    """An answer that may come to so many blocks runs, far from its end, and is cancelled in the end."""
    node = cluster.decode["decode-0"]
    request = make_request(list(range(2, 2 + SIZE)), max_tokens=(footprint - 1) * SIZE + 1)
    call: Any = cluster.client.stub.Generate(request, timeout=CALL_S_MAX)
    await until(cluster, "the long one to run", lambda: any(job.resumed for job in decode_state(node).jobs))
    assert [job.footprint for job in decode_state(node).jobs] == [footprint]
    yield
    assert node.requests == 1, "it ended early"
    call.cancel()
    await assert_conserved(cluster)


def test_a_pin_waits_for_an_answer_that_may_need_its_blocks() -> None:
    """A running answer may grow to all blocks but two when a prefix of four is pinned: two of it are, the others on
    their next use once that answer is over."""

    async def scenario() -> None:
        rng = random.Random(51)
        async with inprocess(SPEC) as cluster:
            cache = cluster.decode["decode-0"].pool.blocks.prefix_cache
            prefix = random_prompt(rng, 4 * SIZE)
            chain = cache.chain(prefix, b"")
            await ask_exactly(cluster, [*prefix, 1], 2)
            await assert_conserved(cluster)
            async with running(cluster, footprint=BLOCKS - 2):
                cache.pin(chain)
                assert (cache.pinned_of(chain), cache.pinned_blocks_wanted) == (2, 4)
            await ask_exactly(cluster, [*prefix, 2], 9)
            assert cache.pinned_of(chain) == 4
            cache.unpin(chain)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_pin_without_its_blocks_holds_nobody_up() -> None:
    """Eight blocks are pinned that have not been computed, beside an answer that leaves room for six: a small request
    is served meanwhile. They are pinned when they come, beside an answer that can do without them."""

    async def scenario() -> None:
        rng = random.Random(52)
        async with inprocess(SPEC) as cluster:
            cache = cluster.decode["decode-0"].pool.blocks.prefix_cache
            prefix = random_prompt(rng, 8 * SIZE)
            chain = cache.chain(prefix, b"")
            async with running(cluster, footprint=BLOCKS - 6):
                cache.pin(chain)
                await ask_exactly(cluster, random_prompt(rng, 10), 9)
            async with running(cluster, footprint=BLOCKS - 9):
                await ask_exactly(cluster, [*prefix, 1], 2)
                assert cache.pinned_of(chain) == 8
            cache.unpin(chain)
            await assert_conserved(cluster)

    asyncio.run(scenario())
