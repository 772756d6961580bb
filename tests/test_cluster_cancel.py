"""A client goes away, or its deadline passes, at every stage of a request's life: all nodes let go of it, at once.

Each stage is a set of points (`inprocess_cluster.Point`) at which the request is held, and what must have been reached
before the client leaves. Where the held thing is a message, it stays held until everything has been freed: a lost
message must not keep a block. Then it is let through, late.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from batonpb import common_pb2

from tests.cluster_harness import Client, assert_conserved, collect, make_request, mock_spec, mock_tokens, random_prompt
from tests.cluster_harness import wait_for as wait_until
from tests.inprocess_cluster import MARK, InProcessCluster, Point, inprocess

PROMPT_TOKENS = 1500
"""Three chunks of 512."""
REACHED_S_MAX = 30.0
DEADLINES_S = (1.0, 3.0, 9.0)
"""Tried in turn: on a loaded machine the first may pass before the request has come to its stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One moment of a request's life: what is closed, what was reached, how many tokens the client has by then."""

    closed: tuple[Point, ...] = ()
    reached: tuple[Point, ...]
    tokens: int = 0
    max_tokens: int = 8
    engine_held: bool = False
    """The gate stops the engine itself: it opens as soon as the client has left ("one step")."""


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
    "commit-answered": Stage(closed=(Point.COMMIT_ANSWERED,), reached=(Point.COMMIT_ANSWERED,), tokens=1),
    "decoding": Stage(reached=(), tokens=4, max_tokens=2000),
    "last-token": Stage(closed=(Point.LAST_TOKEN,), reached=(Point.LAST_TOKEN,), tokens=1, max_tokens=3),
}
by_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


class Victim:
    """The marked request's call, read on a task of its own."""

    def __init__(self, client: Client, prompt: Sequence[int], stage: Stage, timeout_s: float) -> None:
        request = make_request(prompt, max_tokens=stage.max_tokens, ignore_eos=True)
        loop = asyncio.get_running_loop()
        self.deadline_s = loop.time() + timeout_s
        self.call: Any = client.stub.Generate(request, timeout=timeout_s)
        self.ids: list[int] = []
        self.ended = loop.create_task(self._read())

    async def _read(self) -> grpc.StatusCode:
        try:
            async for event in self.call:
                self.ids.extend(event.tokens.ids)
        except grpc.aio.AioRpcError as error:
            return error.code()
        except asyncio.CancelledError:
            if not self.call.cancelled():
                raise
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode.OK


@asynccontextmanager
async def small_cluster() -> AsyncIterator[InProcessCluster]:
    """One by one, with decode steps slow enough that a long answer is still running when its client leaves."""
    spec = mock_spec(blocks=400, decode_flags={"engine.mock_layer_delay_ms": 0.5})
    async with inprocess(spec) as cluster:
        yield cluster


def bystanders(cluster: InProcessCluster, rng: random.Random) -> list[asyncio.Task[None]]:
    """Requests beside the victim, two prompts of which share its length; each checks its own tokens."""

    async def ask(length: int, count: int) -> None:
        prompt = [1, *random_prompt(rng, length - 1)]
        answer = await cluster.client.generate(prompt, max_tokens=count)
        assert answer.ids == mock_tokens(prompt, count)

    work = [(5, 40), (100, 30), (PROMPT_TOKENS, 10), (17, 2), (33, 1)]
    return [asyncio.create_task(ask(length, count)) for length, count in work]


async def at_stage(cluster: InProcessCluster, victim: Victim, stage: Stage) -> bool:
    """Wait until the victim is there; False when its call ended first."""

    async def there() -> bool:
        arrived = all(cluster.gates[point].reached.is_set() for point in stage.reached)
        return victim.ended.done() or (arrived and len(victim.ids) >= stage.tokens)

    await wait_until(there, "the stage", story=cluster.story, timeout_s=REACHED_S_MAX)
    return not victim.ended.done()


async def freed_after_s(cluster: InProcessCluster, since_s: float) -> float:
    """Wait until no node has anything of the victim; the seconds since the client left."""

    async def freed() -> bool:
        return not cluster.traces()

    await wait_until(freed, "the request to be freed everywhere", story=cluster.story)
    return cluster.loop.time() - since_s


async def leave(cluster: InProcessCluster, stage: Stage, prompt: list[int], others: list[asyncio.Task[None]]) -> None:
    """After the client left: freed while the message is still held; late messages change nothing; others are exact."""
    for point in stage.closed:
        cluster.gates[point].open()
    await asyncio.gather(*others)
    await assert_conserved(cluster)
    assert cluster.traces() == {}
    again = await cluster.client.generate(prompt, max_tokens=8)
    assert again.ids == mock_tokens(prompt, 8), "what the victim left in the prefix caches is not exact"
    await assert_conserved(cluster)


@by_stage
def test_cancelled_at(stage: Stage) -> None:
    """The client cancels its call at this stage."""

    async def scenario() -> None:
        rng = random.Random(21)
        prompt = [MARK, *random_prompt(rng, PROMPT_TOKENS - 1)]
        async with small_cluster() as cluster:
            for point in stage.closed:
                cluster.gates[point].close()
            others = bystanders(cluster, rng)
            victim = Victim(cluster.client, prompt, stage, REACHED_S_MAX)
            assert await at_stage(cluster, victim, stage), "ended before its stage"
            assert victim.ids == mock_tokens(prompt, len(victim.ids))
            victim.call.cancel()
            since_s = cluster.loop.time()
            if stage.engine_held:
                cluster.gates[Point.LAYER].open()
            print(f"freed after {await freed_after_s(cluster, since_s):.3f} s")
            assert await victim.ended is grpc.StatusCode.CANCELLED
            await leave(cluster, stage, prompt, others)

    asyncio.run(scenario())


@by_stage
def test_deadline_passes_at(stage: Stage) -> None:
    """The client's deadline passes at this stage, with nobody cancelling anything."""

    async def scenario(deadline_s: float) -> bool:
        rng = random.Random(22)
        prompt = [MARK, *random_prompt(rng, PROMPT_TOKENS - 1)]
        async with small_cluster() as cluster:
            for point in stage.closed:
                cluster.gates[point].close()
            others = bystanders(cluster, rng)
            victim = Victim(cluster.client, prompt, stage, deadline_s)
            arrived = await at_stage(cluster, victim, stage)
            assert await victim.ended is grpc.StatusCode.DEADLINE_EXCEEDED
            if stage.engine_held:
                cluster.gates[Point.LAYER].open()
            seconds = await freed_after_s(cluster, victim.deadline_s)
            if arrived:
                print(f"freed {seconds:.3f} s after the deadline")
            await leave(cluster, stage, prompt, others)
        return arrived

    assert any(asyncio.run(scenario(deadline_s)) for deadline_s in DEADLINES_S), "never came to its stage in time"


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

    async def scenario() -> None:
        rng = random.Random(25)
        async with inprocess(mock_spec(blocks=200)) as cluster:

            async def ask(index: int) -> None:
                prompt = random_prompt(rng, rng.choice([3, 40, 130, 600, 1100]))
                call: Any = cluster.client.stub.Generate(make_request(prompt, max_tokens=25), timeout=60)
                if index % 3 == 0:
                    assert (await collect(call)).ids == mock_tokens(prompt, 25)
                    return
                events = rng.randrange(0, 12)
                async for _ in call:
                    if events == 0:
                        break
                    events -= 1
                call.cancel()

            await asyncio.gather(*(ask(index) for index in range(60)))
            await assert_conserved(cluster)

    asyncio.run(scenario())
