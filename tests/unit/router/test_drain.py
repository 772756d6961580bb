"""What a router does about a node that refuses work before the directory has told of it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from typing import Any

from batonpb import common_pb2, inference_pb2, prefill_pb2, prefill_pb2_grpc

from baton.drain import node_draining
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import NodeRecord, Role
from router.answers import Collected
from router.config import RouterConfig
from tests.support.router_records import MODEL, client_call, lone_router

WAIT_S_MAX = 30.0


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Answers every request with one token, the last; or refuses as a draining node does."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.draining = False
        self.calls = 0

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.calls += 1
        if self.draining:
            raise node_draining(self.incarnation)
        token = prefill_pb2.FirstToken(token=self.incarnation, finish=common_pb2.FINISH_REASON_LENGTH)
        yield prefill_pb2.PrefillEvent(first_token=token)


async def start(node: Prefill, rng: random.Random) -> tuple[RpcServer, NodeRecord]:
    server = RpcServer(limits=RpcLimits(), rng=rng)
    server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, node)
    port = await server.start("127.0.0.1:0")
    record = NodeRecord(
        name=NodeName(f"prefill-{node.incarnation}"), role=Role.PREFILL, incarnation=node.incarnation,
        endpoint=f"127.0.0.1:{port}", lifecycle=Lifecycle.READY, model=MODEL, sequence=1,
    )  # fmt: skip
    return server, record


def test_a_draining_node_is_asked_once() -> None:
    """The directory still says that a node is ready, and it is the one that placement prefers. It refuses once; from
    then on everything goes to the other one, without an error, until a later record says that it takes requests.
    """

    async def scene() -> None:
        rng = random.Random(5)
        nodes = [Prefill(Incarnation(1)), Prefill(Incarnation(2))]
        started = [await start(node, rng) for node in nodes]
        records = [record for _, record in started]
        channels = Channels(limits=ChannelLimits())
        router = lone_router(records, config=RouterConfig(placement_retry_ms=1), channels=channels, rng=rng)

        async def ask() -> int:
            request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
            deadline_s = asyncio.get_running_loop().time() + WAIT_S_MAX
            answer = Collected()
            await router.run(request, client_call(deadline_s), answer)
            ids = [token for part in answer.parts for token in part.ids]
            assert len(ids) == 1
            return ids[0]

        try:
            async with asyncio.timeout(WAIT_S_MAX):
                assert await ask() == 1
                nodes[0].draining = True
                assert [await ask() for _ in range(3)] == [2, 2, 2]
                assert nodes[0].calls == 2
                nodes[0].draining = False
                assert await ask() == 2
                records[0] = dataclasses.replace(records[0], sequence=2)
                router.follow_directory(records)
                assert await ask() == 1
        finally:
            await router.close()
            await channels.close()
            for server, _ in started:
                await server.stop(0)

    asyncio.run(scene())
