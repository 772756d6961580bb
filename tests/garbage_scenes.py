"""What a prefill node has built for a request is freed when the request ends, and does not wait for the collector.

In a process that has loaded a model the collector looks everywhere only when there is a quarter more to look at: on a
small cycle per request, thousands of prompts would hang until then.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from baton.errors import Reason
from engine.prefix_cache import IndexCursor
from engine.sequence import Sequence
from kvtransfer.handoff import Handoff
from kvtransfer.step_writes import StepWrites
from prefill_node.job import Job
from tests.cluster_harness import assert_conserved, error_of, make_request, mock_spec, random_prompt
from tests.inprocess_cluster import InProcessCluster, inprocess
from tests.inprocess_scenes import ask_exactly, until

OF_A_REQUEST = (Job, Handoff, StepWrites, Sequence, IndexCursor)
PROMPT_TOKENS = 100


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def there() -> Counter[str]:
    """What is in memory of each kind, whoever refers to it or nobody."""
    return Counter(type(found).__name__ for found in gc.get_objects() if isinstance(found, OF_A_REQUEST))


async def is_answered(cluster: InProcessCluster, prompt: list[int]) -> None:
    await ask_exactly(cluster, prompt)


async def is_answered_at_once(cluster: InProcessCluster, prompt: list[int]) -> None:
    """No decode node is needed."""
    await ask_exactly(cluster, prompt, 1)


async def is_given_up(cluster: InProcessCluster, prompt: list[int]) -> None:
    """In the middle of its answer."""
    call = cluster.client.stub.Generate(make_request(prompt, max_tokens=900), timeout=30)
    async for event in call:
        if event.tokens.first_index >= 2:
            break
    call.cancel()


async def is_refused(cluster: InProcessCluster, prompt: list[int]) -> None:
    """By the decode node: the answer would not fit."""
    error = await error_of(cluster.client.generate(prompt, max_tokens=3_000))
    assert error.reason is Reason.PROMPT_TOO_LONG, error


ENDS = {ends.__name__: ends for ends in (is_answered, is_answered_at_once, is_given_up, is_refused)}


def play(ends: Callable[[InProcessCluster, list[int]], Awaitable[None]]) -> None:
    """Ten requests, one after the other, and no collector: nothing of them is in memory when the nodes are empty."""

    async def scenario() -> None:
        rng = random.Random(5)
        async with inprocess(mock_spec(decode_flags={"engine.num_blocks": 70})) as cluster:
            await ask_exactly(cluster, random_prompt(rng, PROMPT_TOKENS))
            await assert_conserved(cluster)
            with without_collector():
                for _ in range(10):
                    await ends(cluster, random_prompt(rng, PROMPT_TOKENS))
                await assert_conserved(cluster)
                await until(cluster, "nothing of them to be left", lambda: not there())

    asyncio.run(scenario())


if __name__ == "__main__":
    play(ENDS[sys.argv[1]])
