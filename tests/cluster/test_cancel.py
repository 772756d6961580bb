"""A client goes away, or its deadline passes, at every stage of a request's life: all nodes let go of it, at once.

Each stage is a set of points (`inprocess_cluster.Point`) at which the request is held, and what must have been reached
before the client leaves. Where the held thing is a message, it stays held until everything has been freed: a lost
message must not keep a block. Then it is let through, late. The end of a long answer is held too: however slow the
machine, the client leaves before it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from batonpb import common_pb2

from tests.support.cancels import REACHED_S_MAX, Stage, play_cancel, play_deadline, play_random_leaves
from tests.support.cluster_harness import assert_conserved, make_request, mock_spec, mock_tokens, random_prompt
from tests.support.cluster_harness import wait_for as wait_until
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, inprocess
from tests.support.node_states import prefill_state

STAGES = {
    "waiting-for-placement": Stage(closed=(Point.PLACEMENT,), reached=(Point.PLACEMENT,)),
    "queued-at-prefill": Stage(closed=(Point.PREFILL_QUEUE,), reached=(Point.PREFILL_QUEUE,)),
    "reserve-sent": Stage(closed=(Point.RESERVE_ARRIVED,), reached=(Point.RESERVE_ARRIVED,)),
    "granted": Stage(closed=(Point.RESERVE_ANSWERED,), reached=(Point.RESERVE_ANSWERED,)),
    "mid-prefill": Stage(closed=(Point.LAYER,), reached=(Point.LAYER,), engine_held=True),
    "first-token": Stage(
        closed=(Point.SEAL, Point.COMMIT_ARRIVED), reached=(Point.SEAL, Point.COMMIT_ARRIVED), tokens=1
    ),
    "sealed": Stage(closed=(Point.COMMIT_ARRIVED,), reached=(Point.SEAL_LANDED, Point.COMMIT_ARRIVED), tokens=1),
    "commit-sent": Stage(closed=(Point.SEAL,), reached=(Point.SEAL, Point.COMMIT_TAKEN), tokens=1),
    "commit-answered": Stage(
        closed=(Point.COMMIT_ANSWERED, Point.LAST_TOKEN), reached=(Point.COMMIT_ANSWERED,), tokens=1, max_tokens=2000
    ),
    "decoding": Stage(closed=(Point.LAST_TOKEN,), reached=(), tokens=4, max_tokens=2000),
    "last-token": Stage(closed=(Point.LAST_TOKEN,), reached=(Point.LAST_TOKEN,), tokens=1, max_tokens=3),
}
by_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


@asynccontextmanager
async def small_cluster() -> AsyncIterator[InProcessCluster]:
    """One by one, with decode steps slow enough that a long answer is still running when its client leaves."""
    spec = mock_spec(blocks=400, decode_flags={"engine.mock_layer_delay_ms": 0.5})
    async with inprocess(spec) as cluster:
        yield cluster


@by_stage
def test_cancelled_at(stage: Stage) -> None:
    """The client cancels its call at this stage."""
    play_cancel(small_cluster, stage, seed=21, others_first=True)


@by_stage
def test_deadline_passes_at(stage: Stage) -> None:
    """The client's deadline passes at this stage, with nobody cancelling anything."""
    play_deadline(small_cluster, stage, seed=22, others_first=True)


def test_one_token_needs_no_decode_node() -> None:
    """max_tokens 1: the prefill node's token is the answer; no Reserve is sent, nothing is granted."""

    async def scenario() -> None:
        async with small_cluster() as cluster:
            prompt = [MARK, *random_prompt(random.Random(23), 70)]
            answer = await cluster.client.generate(prompt, max_tokens=1)
            assert answer.ids == mock_tokens(prompt, 1)
            assert answer.reason == common_pb2.FINISH_REASON_LENGTH
            assert answer.stats.decode_node == ""
            assert not cluster.gates[Point.RESERVE_ARRIVED].reached.is_set()
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_stop_token_that_comes_first_gives_the_grant_back() -> None:
    """The first token ends the request: it was granted, and is let go of; no Commit, no seal."""

    async def scenario() -> None:
        async with small_cluster() as cluster:
            prompt = [MARK, *random_prompt(random.Random(24), 700)]
            stop = mock_tokens(prompt, 1)
            answer = await cluster.client.generate(prompt, max_tokens=50, stop_token_ids=stop)
            assert answer.ids == stop
            assert answer.reason == common_pb2.FINISH_REASON_STOP
            assert answer.stats.decode_node == ""
            assert cluster.gates[Point.RESERVE_ANSWERED].reached.is_set()
            assert not cluster.gates[Point.COMMIT_ARRIVED].reached.is_set()
            await assert_conserved(cluster)
            assert cluster.decode["decode-0"].ledger.counts().cached == 0, "cached what was never committed"

    asyncio.run(scenario())


def test_many_clients_leave_at_random_moments() -> None:
    """Sixty requests on two small nodes, two thirds of which are cancelled after a random number of their events:
    the others are exact, and nothing is left."""
    play_random_leaves(mock_spec(blocks=200), seed=25)


def test_a_turn_that_comes_while_its_request_is_being_cancelled() -> None:
    """The head of the prefill node's queue is cancelled, and in the same moment, before its task has run, others'
    blocks become free: its turn is skipped, the next in line is served."""

    async def scenario() -> None:
        async with small_cluster() as cluster:
            gate = cluster.gates[Point.PREFILL_QUEUE]
            gate.close()
            head: Any = cluster.client.stub.Generate(make_request([MARK, 1], max_tokens=3), timeout=REACHED_S_MAX)
            await asyncio.wait_for(gate.reached.wait(), REACHED_S_MAX)
            behind = asyncio.create_task(cluster.client.generate([5, 6], max_tokens=3))

            async def both_wait() -> bool:
                return len(prefill_state(cluster.prefill["prefill-0"]).queue) == 2

            await wait_until(both_wait, "two in the queue", story=cluster.story)
            tasks = cluster.runtimes["prefill-0"].server._edge._tasks
            handlers = [task for task, method in tasks.items() if method == "/baton.v1.Prefill/Prefill"]
            assert len(handlers) == 2
            handlers[0].cancel()
            gate.open()
            assert (await behind).ids == mock_tokens([5, 6], 3)
            head.cancel()
            await assert_conserved(cluster)

    asyncio.run(scenario())
