"""Resumption at its edges: requests without a decode node, answers that come while a router asks, channels in use."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import patch

from baton.errors import BatonError, Reason
from baton.ids import RequestKey
from cli.services import Service
from decode_node.node import DecodeNode
from router.decode_streams import DecodeSubscription
from router.job import Inbox
from tests.cluster.test_resume import FAST, kill
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.inprocess_cluster import MARK, Point, inprocess
from tests.support.node_states import decode_state

PROMPT_SEED = 83


def test_a_request_that_kills_prefill_nodes_without_a_decode_node() -> None:
    """It asks for one token, so no decode node is asked. Two prefill nodes die while they compute it: the third one is
    spared, and the client told why."""

    async def scenario(cluster: RunningCluster) -> None:
        prompt = random_prompt(random.Random(PROMPT_SEED), 1500)
        asked = asyncio.create_task(error_of(cluster.client.generate(prompt, max_tokens=1)))
        killed: set[str] = set()
        for _ in range(2):
            victim = await computes(cluster, asked, killed)
            killed.add(victim)
            await kill(cluster, victim)
        error = await asked
        assert error.reason is Reason.ATTEMPTS_SPENT, error
        assert "2 of them with the death of a node" in error.message
        await assert_conserved(cluster)

    async def computes(cluster: RunningCluster, asked: asyncio.Task[Any], killed: set[str]) -> str:
        found: list[str] = []

        async def holds() -> bool:
            assert not asked.done(), asked
            statuses = await cluster.statuses()
            found[:] = [name for name, status in statuses.items() if status.record.load.blocks.held]
            return bool(found)

        await wait_for(holds, "a prefill node to compute it", story=cluster.story)
        return found[0]

    flags = {**FAST, "placement_wait_ms_max": 20_000}
    slow = {"engine.mock_layer_delay_ms": 300}
    with running(mock_spec(prefill=3, decode=1, both=FAST, router_flags=flags, prefill_flags=slow)) as cluster:
        cluster.run(scenario(cluster))


def test_the_answer_ends_while_its_router_asks() -> None:
    """The router has lost its prefill call, and its Resolve is not answered; meanwhile the stream brings the rest of
    the answer. That is the answer: nothing is resumed."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill=1)) as cluster:
            cluster.gates[Point.COMMIT_ANSWERED].close()
            cluster.gates[Point.LAST_TOKEN].close()
            asking = asyncio.Event()

            async def unanswered(self: DecodeSubscription, inbox: Inbox) -> bool:
                asking.set()
                cluster.gates[Point.LAST_TOKEN].open()
                await wait_for(lambda: ended(inbox), "the end of the answer")
                return False

            prompt = [MARK, *random_prompt(random.Random(PROMPT_SEED + 1), 40)]
            with patch.object(DecodeSubscription, "has_committed", unanswered):
                asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=50))
                await cluster.gates[Point.LAST_TOKEN].reached.wait()
                (inbox,) = cluster.router.streams.inboxes.values()
                inbox.fail(BatonError(Reason.PEER_UNREACHABLE, "The test has broken the call."))
                await asking.wait()
                cluster.gates[Point.COMMIT_ANSWERED].open()
                answer = await asked
            assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 50), 0)
            await assert_conserved(cluster)

    async def ended(inbox: Any) -> bool:
        return inbox.finish is not None

    asyncio.run(scenario())


def test_the_record_of_a_lost_node_goes_while_a_router_asks_it() -> None:
    """All requests of a decode node have failed and the router asks about one of them when the node's record leaves the
    directory. The channel stays until that call is over: closing it would end the client's request as cancelled."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill=1, decode=2)) as cluster:
            cluster.gates[Point.LAST_TOKEN].close()
            real, asking, dropped = DecodeSubscription.has_committed, asyncio.Event(), asyncio.Event()

            async def slow(self: DecodeSubscription, inbox: Inbox) -> bool:
                asking.set()
                await dropped.wait()
                return await real(self, inbox)

            prompt = [MARK, *random_prompt(random.Random(PROMPT_SEED + 2), 40)]
            with patch.object(DecodeSubscription, "has_committed", slow):
                asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=50))
                await cluster.gates[Point.LAST_TOKEN].reached.wait()
                (inbox,) = cluster.router.streams.inboxes.values()
                (lost,) = [s for s in cluster.router.streams._subscriptions.values() if inbox.key in s._inboxes]
                lost.fail_all(BatonError(Reason.PEER_UNREACHABLE, "The test has lost it."))
                await asking.wait()
                records = [r for r in cluster.runtimes["router-0"].membership.nodes() if r.name != lost.name]
                cluster.router.follow_directory(records)
                await cluster.router._tasks.drain(5_000)
                dropped.set()
                cluster.gates[Point.LAST_TOKEN].open()
                answer = await asked
            assert answer.ids == mock_tokens(prompt, 50)
            await assert_conserved(cluster)

            async def unused() -> bool:
                return all(s.users == 0 and s.idle for s in cluster.router.streams._subscriptions.values())

            await wait_for(unused, "nobody to use a stream")

    asyncio.run(scenario())


def test_an_answer_that_was_given_up_does_not_go_on() -> None:
    """A committed request is cancelled on its decode node by somebody else than its router. Whether it goes on there?
    No, though it was committed: a router that took a yes would wait for tokens that never come."""

    async def scenario() -> None:
        async with inprocess(mock_spec(prefill=1)) as cluster:
            cluster.gates[Point.LAST_TOKEN].close()
            prompt = [MARK, *random_prompt(random.Random(PROMPT_SEED + 3), 40)]
            asked = asyncio.create_task(cluster.client.generate(prompt, max_tokens=50))
            await cluster.gates[Point.LAST_TOKEN].reached.wait()
            decode = cluster.decode["decode-0"]
            (job,) = decode_state(decode).known.values()
            assert decode.resolve(job.key)
            job.output.finish, finish = None, job.output.finish
            job.output.error = "cancelled: the test says so"
            assert not decode.resolve(job.key)
            job.output.finish, job.output.error = finish, None
            cluster.gates[Point.LAST_TOKEN].open()
            await asked
            await wait_for(lambda: forgotten(decode, job.key), "the answer to be acknowledged")
            assert not decode.resolve(job.key)
            await assert_conserved(cluster)

    async def forgotten(decode: DecodeNode, key: RequestKey) -> bool:
        return key not in decode_state(decode).known

    asyncio.run(scenario())


def test_routers_share_the_pace_out() -> None:
    """The pace of resumptions is the cluster's: a second router halves each one's share, and gives it back."""

    async def scenario() -> None:
        async with inprocess(mock_spec(router_flags=FAST)) as cluster:
            (first,) = cluster.routers.values()

            async def counts(routers: int) -> None:
                async def holds() -> bool:
                    return first._pace.routers == routers

                await wait_for(holds, f"{routers} routers to be counted")

            await counts(1)
            await cluster.start_node("router-1", Service.ROUTER)
            await counts(2)
            await cluster.stop_node("router-1")
            await counts(1)

    asyncio.run(scenario())
