"""How a router gets past prefill nodes that cannot take a request: those that are gone, and one that knows nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2, prefill_pb2, prefill_pb2_grpc

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import NodeRecord, Role
from router.answers import Collected
from router.config import RouterConfig
from router.retries import PLACEMENT_DOUBLINGS_MAX
from tests.support.router_records import MODEL, client_call, lone_router

WAIT_S_MAX = 30.0


class Cluster(prefill_pb2_grpc.PrefillServicer):
    """All prefill nodes at one endpoint. `fails(node, calls)` is why a node cannot take the request that is the
    `calls`th of all; None: it answers with one token, the last."""

    def __init__(self, fails: Callable[[int, int], Reason | None]) -> None:
        self.fails = fails
        self.asked: list[int] = []

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        node = request.header.receiver
        self.asked.append(node)
        reason = self.fails(node, len(self.asked))
        if reason is not None:
            raise BatonError(reason, "It cannot take it.")
        token = prefill_pb2.FirstToken(token=node, finish=common_pb2.FINISH_REASON_LENGTH)
        yield prefill_pb2.PrefillEvent(first_token=token)


def ask_once(cluster: Cluster, *, nodes: int, search_ms_max: int = int(WAIT_S_MAX * 1000)) -> list[int]:
    """One request to a router with so many ready nodes on its list. How often each of its pauses was doubled; a pause
    takes no time."""
    pauses: list[int] = []

    async def scene() -> None:
        rng, loop = random.Random(5), asyncio.get_running_loop()
        server = RpcServer(limits=RpcLimits(), rng=rng)
        server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, cluster)
        port = await server.start("127.0.0.1:0")
        records = [
            NodeRecord(
                name=NodeName(f"prefill-{n}"), role=Role.PREFILL, incarnation=Incarnation(n), sequence=1,
                endpoint=f"127.0.0.1:{port}", lifecycle=Lifecycle.READY, model=MODEL,
            )
            for n in range(1, nodes + 1)
        ]  # fmt: skip
        channels = Channels(limits=ChannelLimits())
        config = RouterConfig(placement_wait_ms_max=search_ms_max)
        router = lone_router(records, config=config, channels=channels, rng=rng)

        async def pause(rounds: int, *, resumed: bool) -> None:
            assert not resumed
            pauses.append(min(rounds, PLACEMENT_DOUBLINGS_MAX))

        router._pause = pause  # type: ignore[method-assign]
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                answer = Collected()
                await router.run(request, client_call(loop.time() + WAIT_S_MAX), answer)
                ids = [token for part in answer.parts for token in part.ids]
                assert ids == cluster.asked[-1:]
        finally:
            await router.close()
            await channels.close()
            await server.stop(0)

    asyncio.run(scene())
    return pauses


def test_a_node_that_knows_no_decode_node_is_not_asked_again_while_there_is_another() -> None:
    """It came up while the directory was lost and has nothing to do, so that placement prefers it. Another node knows
    where to hand over to: the request is there with the second try."""
    cluster = Cluster(lambda node, _: Reason.NO_DECODE_NODE if node == 1 else None)
    assert ask_once(cluster, nodes=2) == [0]
    assert cluster.asked == [1, 2]


@pytest.mark.parametrize("reason", [Reason.PEER_UNREACHABLE, Reason.INCARNATION_MISMATCH, Reason.NODE_DRAINING])
def test_the_dead_of_an_old_list_are_passed_without_longer_and_longer_pauses(reason: Reason) -> None:
    """The directory is lost, and of nine nodes known eight are gone: the ninth is reached at the first pace."""
    cluster = Cluster(lambda node, _: reason if node < 9 else None)
    assert ask_once(cluster, nodes=9) == [0] * 8
    assert cluster.asked == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_the_pause_grows_from_round_to_round() -> None:
    """All are gone, and come back when the second round is nearly over."""
    cluster = Cluster(lambda _, calls: Reason.PEER_UNREACHABLE if calls < 8 else None)
    assert ask_once(cluster, nodes=4) == [0, 0, 0, 0, 1, 1, 1]
    assert sorted(cluster.asked[:4]) == sorted(cluster.asked[4:]) == [1, 2, 3, 4]


def test_the_pause_grows_where_the_others_may_have_the_same_trouble() -> None:
    """None knows a decode node: each is asked once before any is asked again, more and more slowly."""
    cluster = Cluster(lambda _, calls: Reason.NO_DECODE_NODE if calls < 5 else None)
    assert ask_once(cluster, nodes=4) == [0, 1, 2, 3]
    assert sorted(cluster.asked[:4]) == [1, 2, 3, 4]


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.TOO_MANY_CALLS])
def test_a_full_node_says_nothing_of_the_others(reason: Reason) -> None:
    """Each is asked once, without a pause. Then all are full, and the request waits in line until one has room, for
    longer than it may look for nodes."""
    cluster = Cluster(lambda _, calls: reason if calls < 7 else None)
    assert ask_once(cluster, nodes=4, search_ms_max=1) == []
    assert sorted(cluster.asked[:4]) == [1, 2, 3, 4]
    assert len(cluster.asked) == 7


def test_waiting_for_room_is_no_search_for_a_node() -> None:
    """The only living node is full for longer than a request may look for nodes, and the other one is dead. The request
    waits, and is not told that nobody was reached."""
    reasons = {1: Reason.PEER_UNREACHABLE, 2: Reason.DECODE_FULL}
    cluster = Cluster(lambda node, calls: reasons[node] if node == 1 or calls < 12 else None)
    assert ask_once(cluster, nodes=2, search_ms_max=100) == [0] * cluster.asked.count(1)
    assert cluster.asked[-1] == 2
