"""What a router counts against a request: not the silence of nodes that it does not reach."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc

import router.prefill_nodes
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer, begun
from baton.wire import NodeRecord, Role
from router.answers import Collected
from router.config import RouterConfig
from router.job import Inbox
from router.node import RouterNode
from router.retries import Retries, RetryConfig, Verdict
from tests.support.cluster_harness import wait_for
from tests.support.router_records import MODEL, client_call, lone_router

WAIT_S_MAX = 20.0
DECODE = Incarnation(7)
Events = AsyncIterator[prefill_pb2.PrefillEvent]


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """What it does about each call is the test's; counts them."""

    def __init__(self, serve: Callable[[int, Any], Events]) -> None:
        self._serve = serve
        self.calls = 0

    async def Prefill(self, request: Any, context: Any) -> Events:
        self.calls += 1
        async for event in self._serve(self.calls, context):
            yield event


class Decode(decode_pb2_grpc.DecodeServicer):
    """Takes subscriptions, and has no tokens."""

    async def Subscribe(self, requests: Any, context: Any) -> AsyncIterator[decode_pb2.TokenBatch]:
        await context.send_initial_metadata(())
        await asyncio.Event().wait()
        yield decode_pb2.TokenBatch()


def last_token() -> prefill_pb2.PrefillEvent:
    token = prefill_pb2.FirstToken(token=5, finish=common_pb2.FINISH_REASON_LENGTH)
    return prefill_pb2.PrefillEvent(first_token=token)


def granted_by(port: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(
        granted=prefill_pb2.Granted(
            decode_node="decode-0", decode_incarnation=DECODE, decode_endpoint=f"127.0.0.1:{port}"
        )
    )


@contextmanager
def silent(*, listens: bool) -> Iterator[socket.socket]:
    """At its port connections are refused, or taken and never answered."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if listens:
            sock.listen(64)
        yield sock


def port_of(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])


class Scene:
    """A router alone, with one prefill node on its list. `judged` has what it knew of each attempt that failed."""

    def __init__(self) -> None:
        self.judged: list[dict[str, Any]] = []
        self.router: RouterNode

    async def ask(self, port: int, *, placement_wait_ms_max: int = 10_000) -> inference_pb2.RequestStats:
        rng, loop = random.Random(5), asyncio.get_running_loop()
        record = NodeRecord(
            name=NodeName("prefill-0"), role=Role.PREFILL, incarnation=Incarnation(1), sequence=1,
            endpoint=f"127.0.0.1:{port}", lifecycle=Lifecycle.READY, model=MODEL,
        )  # fmt: skip
        channels = Channels(limits=ChannelLimits(connect_ms_max=100, reconnect_ms_min=10, reconnect_ms_max=20))
        config = RouterConfig(
            placement_wait_ms_max=placement_wait_ms_max,
            retries=RetryConfig(resume_jitter_ms_max=0, resolve_ms_max=50, resolve_tries_max=1),
            cancel_ms_max=50,
            cancel_tries_max=1,
        )
        self.router = lone_router([record], config=config, channels=channels, rng=rng)

        async def pause(_rounds: int, *, resumed: bool) -> None:
            """No time passes between the tries: all that there is passes in them."""
            await asyncio.sleep(0)

        self.router._pause = pause  # type: ignore[method-assign,assignment]
        real = Retries.judge

        def judge(retries: Retries, error: BatonError, **reported: Any) -> Verdict:
            self.judged.append(reported)
            return real(retries, error, **reported)

        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1]))
        answer = Collected()
        try:
            with patch.object(Retries, "judge", judge):
                await self.router.run(request, client_call(loop.time() + WAIT_S_MAX), answer)
        finally:
            await self.router.close()
            await channels.close()
        return answer.end.stats


@pytest.mark.parametrize("listens", [False, True])
def test_a_node_that_is_never_reached_takes_time_from_the_search(listens: bool) -> None:
    """The only prefill node refuses connections, or takes them and is silent. What the router waits for it is no wait
    in a queue: the request is given up when its time to look is over, long before its deadline."""

    async def scenario() -> None:
        scene = Scene()
        with silent(listens=listens) as sock, pytest.raises(BatonError) as gone:
            await scene.ask(port_of(sock), placement_wait_ms_max=400)
        assert gone.value.reason is Reason.PEER_UNREACHABLE

    asyncio.run(scenario())


def test_no_time_is_gained_by_trying_to_connect() -> None:
    """Each call spends an eighth of the time to look on a connection that it does not get. The time counts from the
    first one's failure: at most nine are made."""

    class Unconnected:
        """What `begun` and the router see of such a call."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            pass

        async def initial_metadata(self) -> None:
            await asyncio.sleep(0.05)

        def done(self) -> bool:
            return True

        def __aiter__(self) -> Unconnected:
            return self

        async def __anext__(self) -> prefill_pb2.PrefillEvent:
            raise BatonError(Reason.PEER_UNREACHABLE, "No connection.")

    class Stub:
        def __init__(self, _channel: Any) -> None:
            self.Prefill = Unconnected

    async def scenario() -> None:
        scene = Scene()
        with patch.object(prefill_pb2_grpc, "PrefillStub", Stub), pytest.raises(BatonError) as gone:
            await scene.ask(1, placement_wait_ms_max=400)
        assert gone.value.reason is Reason.PEER_UNREACHABLE
        assert 1 <= len(scene.judged) <= 9

    asyncio.run(scenario())


def test_a_node_that_has_the_request_in_its_queue_says_so() -> None:
    """Before it is the request's turn. The wait from there on is no search."""

    async def scenario() -> None:
        heard = asyncio.Event()

        async def seen(call: Any) -> bool:
            reported = await begun(call)
            heard.set()
            return reported

        async def serve(call: int, context: Any) -> Events:
            if call == 1:
                await context.send_initial_metadata(())
                await heard.wait()
                raise BatonError(Reason.NO_DECODE_NODE, "There is none.")
            yield last_token()

        scene, node = Scene(), Prefill(serve)
        server = RpcServer(limits=RpcLimits(), rng=random.Random(6))
        server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, node)
        port = await server.start("127.0.0.1:0")
        try:
            with patch.object(router.prefill_nodes, "begun", seen):
                await scene.ask(port)
        finally:
            await server.stop(0)
        assert node.calls == 2
        (reported,) = scene.judged
        assert reported["queued_s"] is not None

    asyncio.run(scenario())


async def held(
    scene: Scene, grants: int, before_grant: Callable[[int, socket.socket], Awaitable[None]]
) -> inference_pb2.RequestStats:
    """The first `grants` attempts are granted by a decode node at a port where nobody listens; the next one is
    answered. `before_grant(call, socket)` is awaited before each."""
    with silent(listens=False) as sock:
        decode_port = port_of(sock)

        async def serve(call: int, _context: Any) -> Events:
            if call <= grants:
                await before_grant(call, sock)
                yield granted_by(decode_port)
                await asyncio.Event().wait()
            yield last_token()

        server = RpcServer(limits=RpcLimits(), rng=random.Random(6))
        server.add("baton.v1.Prefill", prefill_pb2_grpc.add_PrefillServicer_to_server, Prefill(serve))
        port = await server.start("127.0.0.1:0")
        try:
            return await scene.ask(port)
        finally:
            await server.stop(0)


def test_grants_by_a_decode_node_that_is_known_to_be_lost() -> None:
    """The prefill node reaches a decode node that the router does not, and has no other. The first attempt there may
    have been the end of it, those after it were not: the request goes on until another node takes it."""

    async def scenario() -> None:
        async def nothing(_call: int, _sock: socket.socket) -> None:
            pass

        scene = Scene()
        stats = await held(scene, 4, nothing)
        assert stats.resumptions == 4
        assert [reported["lost_before"] for reported in scene.judged] == [False, True, True, True]

    asyncio.run(scenario())


def test_a_node_that_was_lost_and_comes_back_can_die_again() -> None:
    """It was lost when it granted the second attempt, has been reached since, and then ends: that is the second death,
    and the last."""

    async def scenario() -> None:
        scene = Scene()
        server = RpcServer(limits=RpcLimits(), rng=random.Random(7))
        server.add("baton.v1.Decode", decode_pb2_grpc.add_DecodeServicer_to_server, Decode())
        dies: list[asyncio.Task[None]] = []

        async def reached() -> bool:
            stream = scene.router.streams._subscriptions[DECODE]
            return not stream.out_of_reach

        async def die() -> None:
            await wait_for(reached, "the router to reach the decode node")
            await server.stop(0)

        async def comes_back(call: int, sock: socket.socket) -> None:
            if call == 2:
                assert not await reached()
                port = port_of(sock)
                sock.close()
                await server.start(f"127.0.0.1:{port}")
                dies.append(asyncio.create_task(die()))

        try:
            with pytest.raises(BatonError, match="2 attempts at this request have failed, 2 of them with the death"):
                await held(scene, 2, comes_back)
        finally:
            await asyncio.gather(*dies)
        assert [reported["lost_before"] for reported in scene.judged] == [False, False]

    asyncio.run(scenario())


def inbox(*, lost_before: bool) -> Inbox:
    return Inbox(key=None, lost_before=lost_before)  # type: ignore[arg-type]


def test_what_an_attempt_has_failed_of() -> None:
    """The stream of a node that was lost at its grant is not found again: that is it, unless something else has failed
    before, or the node has said meanwhile that it goes on."""
    lost, other = BatonError(Reason.PEER_UNREACHABLE, "Lost."), BatonError(Reason.PEER_UNREACHABLE, "Prefill.")
    first = inbox(lost_before=True)
    first.lose(lost)
    assert (first.error, first.never_reached, first.out_of_reach) == (lost, True, True)
    first.go_on()
    first.lose(lost)
    assert not first.never_reached
    second = inbox(lost_before=True)
    second.fail(other)
    second.lose(lost)
    assert (second.error, second.never_reached, second.out_of_reach) == (other, False, True)
    third = inbox(lost_before=False)
    third.lose(lost)
    assert not third.never_reached
