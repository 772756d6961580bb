"""What the cancel tests share: stages at which a request is held, the victim's call, and that every node frees it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import grpc

from cli.supervisor import ClusterSpec
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Client,
    assert_conserved,
    collect,
    make_request,
    mock_tokens,
    random_prompt,
)
from tests.support.cluster_harness import wait_for as wait_until
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, inprocess

PROMPT_TOKENS = 1500
"""Three chunks of 512."""
REACHED_S_MAX = 30.0
DEADLINES_S = (0.4, 1.5, 9.0)
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


async def ask_or_leave(
    cluster: InProcessCluster, prompt: Sequence[int], *, max_tokens: int, leave_after: int | None
) -> None:
    """One request: answered exactly, or cancelled by its client when so many events have come and one more."""
    call: Any = cluster.client.stub.Generate(make_request(prompt, max_tokens=max_tokens), timeout=CALL_S_MAX)
    if leave_after is None:
        assert (await collect(call)).ids == mock_tokens(prompt, max_tokens)
        return
    left = leave_after
    async for _ in call:
        if left == 0:
            break
        left -= 1
    call.cancel()


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
    await freed_after_s(cluster, cluster.loop.time())
    again = await cluster.client.generate(prompt, max_tokens=8)
    assert again.ids == mock_tokens(prompt, 8), "what the victim left in the prefix caches is not exact"
    await assert_conserved(cluster)


Make = Callable[[], AbstractAsyncContextManager[InProcessCluster]]


def play_cancel(make: Make, stage: Stage, *, seed: int, others_first: bool) -> None:
    """The client cancels at this stage. With `others_first` other requests run before it comes, else from then on."""

    async def scenario() -> None:
        rng = random.Random(seed)
        prompt = [MARK, *random_prompt(rng, PROMPT_TOKENS - 1)]
        async with make() as cluster:
            for point in stage.closed:
                cluster.gates[point].close()
            others = bystanders(cluster, rng) if others_first else []
            victim = Victim(cluster.client, prompt, stage, REACHED_S_MAX)
            assert await at_stage(cluster, victim, stage), "ended before its stage"
            others = others or bystanders(cluster, rng)
            assert victim.ids == mock_tokens(prompt, len(victim.ids))
            victim.call.cancel()
            since_s = cluster.loop.time()
            if stage.engine_held:
                cluster.gates[Point.LAYER].open()
            print(f"freed after {await freed_after_s(cluster, since_s):.3f} s")
            assert await victim.ended is grpc.StatusCode.CANCELLED
            await leave(cluster, stage, prompt, others)

    asyncio.run(scenario())


def play_deadline(make: Make, stage: Stage, *, seed: int, others_first: bool) -> None:
    """The client's deadline passes at this stage; `others_first` as in `play_cancel`."""

    async def scenario(deadline_s: float) -> bool:
        rng = random.Random(seed)
        prompt = [MARK, *random_prompt(rng, PROMPT_TOKENS - 1)]
        async with make() as cluster:
            for point in stage.closed:
                cluster.gates[point].close()
            others = bystanders(cluster, rng) if others_first else []
            victim = Victim(cluster.client, prompt, stage, deadline_s)
            arrived = await at_stage(cluster, victim, stage)
            others = others or bystanders(cluster, rng)
            assert await victim.ended is grpc.StatusCode.DEADLINE_EXCEEDED
            if stage.engine_held:
                cluster.gates[Point.LAYER].open()
            seconds = await freed_after_s(cluster, victim.deadline_s)
            if arrived:
                print(f"freed {seconds:.3f} s after the deadline")
            await leave(cluster, stage, prompt, others)
        return arrived

    assert any(asyncio.run(scenario(deadline_s)) for deadline_s in DEADLINES_S), "never came to its stage in time"


def play_random_leaves(spec: ClusterSpec, *, seed: int) -> None:
    """Sixty requests, two thirds of which are cancelled after a random number of their events."""

    async def scenario() -> None:
        rng = random.Random(seed)
        async with inprocess(spec) as cluster:

            async def ask(index: int) -> None:
                prompt = random_prompt(rng, rng.choice([3, 40, 130, 600, 1100]))
                leave_after = rng.randrange(0, 12) if index % 3 else None
                await ask_or_leave(cluster, prompt, max_tokens=25, leave_after=leave_after)

            await asyncio.gather(*(ask(index) for index in range(60)))
            await assert_conserved(cluster)

    asyncio.run(scenario())
