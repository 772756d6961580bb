"""A router that alone cannot reach a decode node: prefill nodes still do, and would place its requests there."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from unittest.mock import patch

import grpc.aio
import pytest
from batonpb import decode_pb2, decode_pb2_grpc, transfer_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from cli.supervisor import ROUTER_NAME
from decode_node.node import DecodeNode
from decode_node.service import DecodeService, ReceiverService
from router.decode_streams import DecodeStreams
from router.retries import ResumptionPace
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until
from tests.support.node_states import prefill_state
from tests.support.ports import free_ports

CUT_OFF = "decode-0"
"""It has so much more room that every request goes there by itself."""
OTHER = "decode-1"
SPEC = mock_spec(
    decode=2,
    blocks=1_000,
    node_flags={OTHER: {"engine.num_blocks": 200}},
    router_flags={"liveness.reconnect_ms_max": 200, "retries.resume_jitter_ms_max": 0},
    decode_flags={"orphan_ms": 300},
)


class Cut:
    """Between the router and `CUT_OFF`, once `at_next_token` is set; prefill nodes reach it all the time."""

    def __init__(self, cluster: InProcessCluster, nowhere: grpc.aio.Channel) -> None:
        (self.stream,) = [s for s in cluster.router.streams._subscriptions.values() if s.name == CUT_OFF]
        """The router's; all its calls to the node are made here."""
        self.at_next_token = False
        self.reserved: list[tuple[str, int]] = []
        """Decode node and attempt of each Reserve."""
        self._stub, self._nowhere = self.stream._stub, decode_pb2_grpc.DecodeStub(nowhere)

    def passes(self, node: DecodeNode) -> bool:
        """A batch of tokens from there to the router."""
        if node.config.name != CUT_OFF:
            return True
        if self.at_next_token:
            self.stream._stub = self._nowhere
        return self.stream._stub is self._stub

    def heal(self) -> None:
        self.at_next_token = False
        self.stream._stub = self._stub


@asynccontextmanager
async def cuttable() -> AsyncIterator[tuple[InProcessCluster, Cut]]:
    cuts: list[Cut] = []
    real_subscribe, real_reserve = DecodeService.Subscribe, ReceiverService.Reserve

    async def subscribe(self: DecodeService, requests: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        async with aclosing(real_subscribe(self, requests, context)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                if not all(cut.passes(self._node) for cut in cuts):
                    raise BatonError(Reason.PEER_UNREACHABLE, "The test has cut it off.")
                yield batch

    async def reserve(self: ReceiverService, request: Any, context: Any) -> transfer_pb2.ReserveReply:
        for cut in cuts:
            cut.reserved.append((self._node.config.name, request.key.attempt))
        return await real_reserve(self, request, context)

    with patch.object(DecodeService, "Subscribe", subscribe), patch.object(ReceiverService, "Reserve", reserve):
        async with (
            inprocess(SPEC) as cluster,
            grpc.aio.insecure_channel(f"127.0.0.1:{free_ports(1)[0]}") as nowhere,
        ):
            cuts.append(Cut(cluster, nowhere))
            yield cluster, cuts[0]


def follow(cluster: InProcessCluster) -> None:
    """What the router does at each news of the directory."""
    cluster.router.follow_directory(cluster.runtimes[ROUTER_NAME].membership.nodes())


@pytest.mark.parametrize("reached_again", [False, True], ids=["lost", "reached-again"])
def test_a_request_leaves_a_decode_node_that_only_its_router_cannot_reach(reached_again: bool) -> None:
    """The stream breaks behind the first token and cannot be had again. The prefill node would choose the same decode
    node, which it reaches, and a second loss would end the request: it is asked to avoid it, and the request goes on
    at the other one. So too where the router has reached the node again meanwhile: the link may be a bad one."""

    async def scenario() -> None:
        async with cuttable() as (cluster, cut):
            real_turn = ResumptionPace.take_turn

            def turn(self: ResumptionPace, now_s: float) -> float:
                if reached_again:
                    cut.heal()
                    cut.stream.out_of_reach = False
                return real_turn(self, now_s)

            prompt = random_prompt(random.Random(1), 40)
            cut.at_next_token = True
            with patch.object(ResumptionPace, "take_turn", turn):
                answer = await cluster.client.generate(prompt, max_tokens=20)
            assert cut.reserved == [(CUT_OFF, 0), (OTHER, 1)]
            assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 20), 1)
            assert answer.stats.decode_node == OTHER
            cut.heal()
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_new_requests_stay_away_from_a_lost_node_until_it_is_reached() -> None:
    """The router has lost a decode node and tries its stream again whenever the directory has news, which under load is
    all the time. A request that comes in the middle of such a try is kept away from the node: it would be lost with the
    try, and computed twice. As soon as the stream is there, requests go to the node."""

    async def scenario() -> None:
        async with cuttable() as (cluster, cut):
            stream = cut.stream
            cut.at_next_token = True
            await cluster.client.generate(random_prompt(random.Random(2), 40), max_tokens=20)
            cut.reserved.clear()
            for seed in range(3, 6):
                await until(cluster, "the try to fail", lambda: stream.lost)
                follow(cluster)
                assert not stream.lost
                answer = await cluster.client.generate(random_prompt(random.Random(seed), 40), max_tokens=20)
                assert answer.stats.resumptions == 0
            assert cut.reserved == [(OTHER, 0)] * 3
            cut.reserved.clear()
            cut.heal()
            await until(cluster, "the try to fail", lambda: stream.lost or not stream.out_of_reach)
            follow(cluster)
            await until(cluster, "the stream", lambda: not stream.out_of_reach)
            await cluster.client.generate(random_prompt(random.Random(6), 40), max_tokens=20)
            assert cut.reserved == [(CUT_OFF, 0)]
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_without_a_directory_requests_have_a_lost_node_tried_again() -> None:
    """The directory says nothing any more. The router has lost a decode node, whose link heals: the next request goes
    elsewhere and has the stream tried, and those behind it go to the node again."""

    async def scenario() -> None:
        async with cuttable() as (cluster, cut):
            stream = cut.stream
            with (
                patch.object(DecodeStreams, "follow", lambda *_: []),
                patch("router.decode_streams.LOST_RETRY_MS", 0),
            ):
                cut.at_next_token = True
                await cluster.client.generate(random_prompt(random.Random(7), 40), max_tokens=20)
                await until(cluster, "the try to fail", lambda: stream.lost)
                cut.heal()
                cut.reserved.clear()
                await cluster.client.generate(random_prompt(random.Random(8), 40), max_tokens=20)
                await until(cluster, "the stream", lambda: not stream.out_of_reach)
                await cluster.client.generate(random_prompt(random.Random(9), 40), max_tokens=20)
                assert cut.reserved == [(OTHER, 0), (CUT_OFF, 0)]
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_node_at_the_address_of_a_dead_one_is_not_taken_for_it() -> None:
    """A decode node has started at the address of another, whose record has not run out yet and comes last. The living
    one's answer goes on, and requests are not kept away from it."""

    async def scenario() -> None:
        async with cuttable() as (cluster, cut):
            records = cluster.runtimes[ROUTER_NAME].membership.nodes()
            (living,) = [r for r in records if r.name == CUT_OFF]
            dead = dataclasses.replace(living, name=NodeName("z"), incarnation=Incarnation(1))
            prompt = random_prompt(random.Random(10), 40)
            call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=200))
            await until(cluster, "an answer", lambda: bool(cut.stream._inboxes))
            cluster.router.follow_directory([*records, dead])
            assert not cut.stream.out_of_reach
            answer = await call
            assert (answer.ids, answer.stats.resumptions) == (mock_tokens(prompt, 200), 0)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_rate_measured_long_ago_is_not_told() -> None:
    """A prefill node has measured how fast it computes. Long idle, it says that it does not know: one slow step would
    else keep requests, and with them any better measure, away from it for good."""

    async def scenario() -> None:
        async with cuttable() as (cluster, _):
            (node,) = cluster.prefill.values()
            half_a_step = node.config.engine.tokens_per_step_max // 2
            await cluster.client.generate(random_prompt(random.Random(11), half_a_step), max_tokens=1)
            assert node.load().prefill_tokens_per_s > 0
            rate = prefill_state(node).rate
            with patch.object(rate, "_measured_s", rate._measured_s - node.config.rate_age_ms_max / 1000 - 30):
                assert node.load().prefill_tokens_per_s == 0
            await assert_conserved(cluster)

    asyncio.run(scenario())
