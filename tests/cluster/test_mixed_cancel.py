"""A client of a request that a mixed node keeps goes away, or its deadline passes, at every stage: all is freed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from batonpb import common_pb2

from tests.support.cancels import Stage, play_cancel, play_deadline, play_random_leaves
from tests.support.cluster_harness import (
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    wait_for,
)
from tests.support.inprocess_cluster import InProcessCluster, Point, inprocess

STAGES = {
    "queued": Stage(closed=(Point.PREFILL_QUEUE,), reached=(Point.PREFILL_QUEUE,)),
    "mid-prompt": Stage(closed=(Point.LAYER,), reached=(Point.LAYER,), engine_held=True),
    "running": Stage(closed=(Point.LAST_TOKEN,), reached=(), tokens=4, max_tokens=2000),
    "last-token": Stage(closed=(Point.LAST_TOKEN,), reached=(Point.LAST_TOKEN,), tokens=1, max_tokens=3),
}
by_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


@asynccontextmanager
async def one_node() -> AsyncIterator[InProcessCluster]:
    """A mixed node alone, which keeps everything. A long answer still runs when its client leaves."""
    spec = mock_spec(
        prefill=0,
        decode=0,
        mixed=1,
        blocks=800,
        router_flags={"retries.resume_wait_ms_max": 1_000},
        mixed_flags={"engine.mock_layer_delay_ms": 0.5},
    )
    async with inprocess(spec) as cluster:
        yield cluster


@by_stage
def test_cancelled_at(stage: Stage) -> None:
    """The client cancels; what is held is let through when everything has been freed, and changes nothing."""
    play_cancel(one_node, stage, seed=61, others_first=False)


@by_stage
def test_deadline_passes_at(stage: Stage) -> None:
    """The client's deadline passes at this stage, with nobody cancelling anything."""
    play_deadline(one_node, stage, seed=62, others_first=False)


def test_the_first_token_may_be_the_last() -> None:
    """One token asked for: nothing is kept or granted. A stop token drawn first: kept, and over with it."""

    async def scenario() -> None:
        async with one_node() as cluster:
            prompt = random_prompt(random.Random(63), 70)
            one = await cluster.client.generate(prompt, max_tokens=1)
            assert (one.ids, one.reason) == (mock_tokens(prompt, 1), common_pb2.FINISH_REASON_LENGTH)
            stopped = await cluster.client.generate(prompt, max_tokens=50, stop_token_ids=one.ids)
            assert (stopped.ids, stopped.reason) == (one.ids, common_pb2.FINISH_REASON_STOP)
            assert (one.stats.decode_node, stopped.stats.decode_node) == ("", "")
            await assert_conserved(cluster)

            async def acknowledged() -> bool:
                return cluster.decode["mixed-0"].answers_unacknowledged == 0

            await wait_for(acknowledged, "the router to have said that it has the answer", story=cluster.story)

    asyncio.run(scenario())


def test_many_clients_leave_at_random_moments() -> None:
    """Sixty requests on two small mixed nodes, some kept and some handed over, two thirds of which are cancelled after
    a random number of their events: the others are exact, and nothing is left."""
    play_random_leaves(
        mock_spec(prefill=0, decode=0, mixed=2, blocks=200, mixed_flags={"handoff_tokens_min": 128}), seed=64
    )


@pytest.mark.slow
def test_a_node_that_stops_gives_up_what_it_keeps() -> None:
    """Told to stop at once, with answers running, queued and half prefilled: each client gets an error or its whole
    answer, nothing runs on, and the node ends."""

    async def scenario() -> None:
        rng = random.Random(65)
        async with one_node() as cluster:
            prompts = [random_prompt(rng, length) for length in (5, 300, 2_000) * 4]
            calls = [asyncio.create_task(cluster.client.generate(p, max_tokens=1_000)) for p in prompts]
            node = cluster.decode["mixed-0"]

            async def busy() -> bool:
                return node.requests >= 5

            await wait_for(busy, "five requests", story=cluster.story)
            await cluster.stop_node("mixed-0")
            counts = node.ledger.check()
            assert (counts.held, counts.writer_owned, counts.promised) == (0, 0, 0)
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, Exception), "a thousand tokens cannot have been drawn"

    asyncio.run(scenario())
