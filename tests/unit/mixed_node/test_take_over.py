"""Requests that a mixed node keeps change hands as those that it is granted do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import BatonError, Reason
from baton.wire import RESUME_STATE_BYTES_MAX
from tests.support.cluster_harness import CALL_S_MAX, assert_conserved, error_of, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, inprocess, until
from tests.support.node_states import decode_state
from tests.support.played_router import PlayedRouter, key_of

PROMPT = [5, 6, 7]


@asynccontextmanager
async def played() -> AsyncIterator[tuple[InProcessCluster, PlayedRouter, PlayedRouter]]:
    """A mixed node, and two routers that have their streams to it."""
    flags = {"engine.mock_layer_delay_ms": 0.5, "orphan_ms": 600_000}
    async with inprocess(mock_spec(prefill=0, decode=0, mixed=1, mixed_flags=flags)) as cluster:
        routers = [PlayedRouter(cluster, incarnation, node="mixed-0") for incarnation in (0xA, 0xB)]
        try:
            for router in routers:
                await router.subscribe()
            yield cluster, routers[0], routers[1]
        finally:
            for router in routers:
                await router.close()


def test_a_kept_request_is_taken_over() -> None:
    """Its router leaves it, another takes it over. The former one comes back with a later attempt, which would end the
    one that was taken over: it is told TAKEN_OVER. The answer is whole, and the client forgets it."""

    async def scenario() -> None:
        async with played() as (cluster, former, later):
            node = cluster.decode["mixed-0"]
            assert (await former.prefill("one", PROMPT, 200))[-1] == "handed_off"
            await former.leave(key_of("one"))
            await until(cluster, "the leave", lambda: decode_state(node).jobs[0].output.left)
            assert await later.take_over(key_of("one")) == ("TAKEN", 1)
            with pytest.raises(BatonError, match="Another router has taken the request one over"):
                await former.prefill("one", PROMPT, 200, attempt=1)
            assert await former.resolve(key_of("one", attempt=1)) == (False, True)
            await until(cluster, "the end", lambda: later.ends == {("one", 1): "LENGTH"})
            assert later.tokens == {("one", 1): mock_tokens(PROMPT, 200)}
            assert await former.take_over(key_of("one"), forget=True) == ("OVER", 0)
            await until(cluster, "nothing to be left", lambda: not decode_state(node).lives)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_kept_request_without_its_first_token_is_given_up() -> None:
    """Another router asks for it while its prompt is computed: it is ABSENT and ends, its call too, and its router
    knows that it has lost it."""

    async def scenario() -> None:
        async with played() as (cluster, former, later):
            gate = cluster.gates[Point.LAYER]
            gate.close()
            call = asyncio.create_task(former.prefill("one", [MARK, *random_prompt(random.Random(46), 1_000)], 50))
            await asyncio.wait_for(gate.reached.wait(), CALL_S_MAX)
            assert await later.take_over(key_of("one")) == ("ABSENT", 0)
            gate.open()
            with pytest.raises(BatonError):
                await call
            assert await former.resolve(key_of("one")) == (False, True)
            assert await later.take_over(key_of("one")) == ("ABSENT", 0)
            await until(cluster, "the word", lambda: former.ends == {("one", 0): "TAKEN_OVER"})
            await until(cluster, "nothing to be left", lambda: not decode_state(cluster.decode["mixed-0"]).lives)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_kept_request_may_not_bring_too_much() -> None:
    """No Reserve checks what its router leaves with the node: the node does so when it starts."""

    async def scenario() -> None:
        async with played() as (cluster, former, _):
            error = await error_of(former.prefill("one", PROMPT, 20, state=b"s" * (RESUME_STATE_BYTES_MAX + 1)))
            assert (error.reason, error.field) == (Reason.BAD_FIELD, "resumable.state")
            await until(cluster, "nothing to be left", lambda: not decode_state(cluster.decode["mixed-0"]).lives)
            await assert_conserved(cluster)

    asyncio.run(scenario())
