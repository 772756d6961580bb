"""A decode node that takes every stream of tokens and then fails it: it serves nobody, and must not pass for alive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

from batonpb import decode_pb2

import baton.liveness
from baton.errors import BatonError, Reason
from cli.supervisor import ROUTER_NAME, ClusterSpec
from decode_node.service import DecodeService
from router.decode_streams import DecodeStreams, DecodeSubscription
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until

BROKEN = "decode-0"
"""It has so much more room that every request goes there by itself."""
OTHER = "decode-1"
ROUTER = {"liveness.failed_stream_ms_max": 300, "liveness.reconnect_pause_ms": 5, "retries.resume_jitter_ms_max": 0}
SPEC = mock_spec(
    decode=2,
    blocks=1_000,
    node_flags={OTHER: {"engine.num_blocks": 200}},
    router_flags=ROUTER,
    decode_flags={"engine.mock_layer_delay_ms": 0.5},
)


class Streams:
    """Those of the broken node, to the router of `cluster`."""

    def __init__(self, cluster: InProcessCluster, broken: str) -> None:
        self._cluster = cluster
        self._broken = broken
        self.failing = False
        self.failed = 0

    @property
    def stream(self) -> DecodeSubscription:
        (stream,) = [s for s in self._cluster.router.streams._subscriptions.values() if s.name == self._broken]
        return stream

    def fail(self) -> None:
        """The one that is open ends, and each after it, as soon as it is taken."""
        self.failing = True
        self._cluster.decode[self._broken].streams.close_all()

    def follow(self) -> None:
        """What the router does at each news of the directory."""
        self._cluster.router.follow_directory(self._cluster.runtimes[ROUTER_NAME].membership.nodes())


@asynccontextmanager
async def breakable(spec: ClusterSpec = SPEC, broken: str = BROKEN) -> AsyncIterator[tuple[InProcessCluster, Streams]]:
    scenes: list[Streams] = []
    real = DecodeService.Subscribe

    async def subscribe(self: DecodeService, requests: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        if self._node.config.name == broken and any(scene.failing for scene in scenes):
            scenes[0].failed += 1
            await context.send_initial_metadata(())
            raise BatonError(Reason.INTERNAL, "A bug in the decode node.")
        async with aclosing(real(self, requests, context)) as batches:  # type: ignore[type-var]
            async for batch in batches:
                yield batch

    with patch.object(DecodeService, "Subscribe", subscribe):
        async with inprocess(spec) as cluster:
            scenes.append(Streams(cluster, broken))
            await until(cluster, "a stream to each", lambda: len(cluster.router.streams._subscriptions) == 2)
            yield cluster, scenes[0]
            scenes[0].failing = False


@contextmanager
def pauses(ms: int) -> Iterator[None]:
    """Before a node that was lost for its streams is tried again."""
    with (
        patch.object(baton.liveness, "DOUBT_PAUSE_MS", ms),
        patch.object(baton.liveness, "DOUBT_PAUSE_MS_MAX", ms),
    ):
        yield


def test_an_answer_leaves_a_node_whose_streams_fail() -> None:
    """In mid-answer the node's streams begin to fail, each behind its connection. The node is lost, as if it had died:
    the client has the whole answer, from the other one. Nothing is left on either."""

    async def scenario() -> None:
        async with breakable() as (cluster, streams):
            prompt = random_prompt(random.Random(1), 40)
            call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=600))
            node = cluster.decode[BROKEN]
            await until(cluster, "an answer", lambda: node.pool.engine.counters.tokens_drawn > 50)
            streams.fail()
            answer = await call
            assert answer.ids == mock_tokens(prompt, 600)
            assert (answer.stats.resumptions, answer.stats.decode_node) == (1, OTHER)
            assert streams.failed >= 6
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_node_is_tried_again_after_a_pause_and_trusted_when_its_stream_stays() -> None:
    """Idle, its streams fail: requests stay away. However much news the directory has, the node is left alone until the
    pause is over; one more stream that fails is enough then. When a stream stays a while the node gets requests."""

    async def scenario() -> None:
        async with breakable() as (cluster, streams):
            stream = streams.stream
            with pauses(10**9):
                streams.fail()
                await until(cluster, "the node to be lost", lambda: stream.lost)
                assert (stream.out_of_reach, stream.silent) == (True, False)
                failed = streams.failed
                for _ in range(20):
                    streams.follow()
                assert (streams.failed, stream.lost) == (failed, True)
                answer = await cluster.client.generate(random_prompt(random.Random(2), 40), max_tokens=20)
                assert (answer.stats.decode_node, answer.stats.resumptions) == (OTHER, 0)
            with pauses(0), patch.object(DecodeStreams, "follow", lambda *_: []):
                stream.open()
                await until(cluster, "one more try", lambda: stream.lost)
                assert (streams.failed, stream.out_of_reach) == (failed + 1, True)
                streams.failing = False
                stream.open()
                await until(cluster, "the stream to stay", lambda: not stream.out_of_reach)
            answer = await cluster.client.generate(random_prompt(random.Random(3), 40), max_tokens=20)
            assert (answer.stats.decode_node, answer.stats.resumptions) == (BROKEN, 0)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_mixed_node_whose_streams_fail_keeps_no_request() -> None:
    """Of two mixed nodes one's streams fail. It reads prompts as ever, and hands all of them over, the short ones too,
    which it would keep; the other one keeps what it reads, the long ones too. No request has to be taken up again."""

    async def scenario() -> None:
        spec = mock_spec(
            prefill=0, decode=0, mixed=2, blocks=1_000, router_flags=ROUTER, mixed_flags={"handoff_tokens_min": 64}
        )
        async with breakable(spec, "mixed-0") as (cluster, streams):
            stream, rng = streams.stream, random.Random(4)
            with pauses(10**9):
                streams.fail()
                await until(cluster, "the node to be lost", lambda: stream.lost)
                prompts = [random_prompt(rng, length) for length in (8, 30, 200, 300) * 4]
                answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=20) for p in prompts))
            assert [answer.ids for answer in answers] == [mock_tokens(prompt, 20) for prompt in prompts]
            ways = {(answer.stats.prefill_node, answer.stats.decode_node) for answer in answers}
            assert ways == {("mixed-0", "mixed-1"), ("mixed-1", "mixed-1")}
            assert {answer.stats.resumptions for answer in answers} == {0}
            await assert_conserved(cluster)

    asyncio.run(scenario())
