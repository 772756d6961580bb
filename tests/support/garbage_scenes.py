"""What router and nodes have built for a request is freed when the request ends, and does not wait for the collector.

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
from contextlib import contextmanager, suppress
from typing import Any

import grpc.aio

from baton.errors import BatonError, Reason
from cachestore.prefix_cache import IndexCursor
from engine.scheduler import Sequence
from kvtransfer.writer import Handoff, StepWrites
from prefill_node.job import Job as PrefillJob
from router.job import Inbox, Job
from router.request import CheckedRequest
from tests.support.cluster_harness import (
    assert_conserved,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
)
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, ask_exactly, inprocess, until

OF_A_REQUEST = (
    Job, Inbox, CheckedRequest, BatonError, PrefillJob, Handoff, StepWrites, Sequence, IndexCursor,
)  # fmt: skip
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


async def is_no_request(cluster: InProcessCluster, prompt: list[int]) -> None:
    """A token that the model does not have."""
    error = await error_of(cluster.client.generate([*prompt, 1 << 30], max_tokens=8))
    assert error.reason is Reason.TOKEN_OUT_OF_RANGE, error


async def is_placed_again(cluster: InProcessCluster, prompt: list[int]) -> None:
    """No decode node has room at the first look."""
    gate = cluster.gates[Point.PLACEMENT]
    gate.reached.clear()
    gate.close()
    asked = asyncio.create_task(ask_exactly(cluster, [MARK, *prompt]))
    await gate.reached.wait()
    await asyncio.sleep(0)
    gate.open()
    await asked


async def is_resumed(cluster: InProcessCluster, prompt: list[int]) -> None:
    """Its decode node is lost in the middle of the answer."""
    asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=150))
    await until(cluster, "a token", lambda: any(len(i.tokens) > 2 for i in cluster.router.streams.inboxes.values()))
    for inbox in cluster.router.streams.inboxes.values():
        inbox.give_up(BatonError(Reason.HANDOFF_FAILED, "The test says so."))
    del inbox
    answer = await asked
    assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 150), 1)


async def is_late(cluster: InProcessCluster, prompt: list[int]) -> None:
    """Its deadline passes in the middle of its answer."""
    call: Any = cluster.client.stub.Generate(make_request(prompt, max_tokens=900), timeout=0.3)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass


ENDS = {
    ends.__name__: ends
    for ends in (
        is_answered,
        is_answered_at_once,
        is_given_up,
        is_refused,
        is_no_request,
        is_placed_again,
        is_resumed,
        is_late,
    )
}


def play(ends: Callable[[InProcessCluster, list[int]], Awaitable[None]]) -> None:
    """Ten requests, one after the other, and no collector: nothing of them is in memory when the nodes are empty."""

    async def scenario() -> None:
        rng = random.Random(5)
        async with inprocess(
            mock_spec(decode_flags={"engine.num_blocks": 70, "engine.mock_layer_delay_ms": 0.5})
        ) as cluster:
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
