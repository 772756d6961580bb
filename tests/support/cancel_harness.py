"""What the cancel tests share: stages at which a request is held, the victim's call, and that all lets go of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

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
from tests.support.inprocess_cluster import InProcessCluster, Point

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
    assert cluster.traces() == {}
    again = await cluster.client.generate(prompt, max_tokens=8)
    assert again.ids == mock_tokens(prompt, 8), "what the victim left in the prefix caches is not exact"
    await assert_conserved(cluster)
