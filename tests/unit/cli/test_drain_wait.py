"""How `baton drain --wait` looks at a node that does not always answer, or that ends while it is waited for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from batonpb import common_pb2, directory_pb2, node_pb2, node_pb2_grpc

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.operator import OperatorToken
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import NodeRecord, Role
from cli import drain
from cli.drain import LOOKS_UNANSWERED_MAX, StatusLooks, wait_empty
from cli.operator import Operator
from tests.support.ports import free_ports

BUSY = node_pb2.NodeStatus(
    requests=2, record=directory_pb2.NodeRecord(lifecycle=common_pb2.LIFECYCLE_DRAINING, incarnation=7)
)
EMPTY = node_pb2.NodeStatus(safe_to_delete=True)
ENDED = node_pb2.NodeStatus(ending=True, ended_empty=True)


def waited(
    looks: Iterable[node_pb2.NodeStatus | Reason], *, wait_s_max: float = 60.0
) -> tuple[node_pb2.NodeStatus, int]:
    """What was seen last, of these looks in turn, and how many were left."""
    left = list(looks)

    async def look() -> node_pb2.NodeStatus:
        seen = left.pop(0)
        if isinstance(seen, Reason):
            raise BatonError(seen, "ipv4:127.0.0.1:1: Failed to connect.")
        return seen

    status = wait_empty(BUSY, look, name="decode-0", wait_s_max=wait_s_max, poll_ms=0)
    return asyncio.run(status), len(left)


def test_looks_may_fail_now_and_then() -> None:
    """Nearly as often as is allowed, for whatever reason, an answer between them, and so again: the node is empty in
    the end."""
    some = [Reason.PEER_UNREACHABLE, Reason.INTERNAL, Reason.UNRECOGNISED] * (LOOKS_UNANSWERED_MAX // 3)
    assert waited([*some, BUSY, *some, BUSY, EMPTY]) == (EMPTY, 0)


@pytest.mark.parametrize(
    ("reason", "said"),
    [(Reason.PEER_UNREACHABLE, "no longer answers"), (Reason.INTERNAL, "only says: ipv4:127.0.0.1:1")],
)
def test_a_node_that_never_answers_is_an_error(reason: Reason, said: str) -> None:
    """After so many looks in a row, no more: what it was when it last answered, and what to do, in plain words. What
    gRPC says of a connection is not among them."""
    with pytest.raises(BatonError) as caught:
        waited([BUSY, *[reason] * LOOKS_UNANSWERED_MAX])
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert caught.value.message.startswith(f"decode-0 {said}")
    assert "it was draining and held 2 requests. If its process has ended" in caught.value.message
    assert ("Failed to connect" in caught.value.message) is (reason is Reason.INTERNAL)


@pytest.mark.parametrize("reason", [Reason.INCARNATION_MISMATCH, Reason.BAD_LIFECYCLE])
def test_another_process_or_an_undrain_is_an_error_at_once(reason: Reason) -> None:
    """It would be waited for in vain."""
    with pytest.raises(BatonError) as caught:
        waited([reason])
    assert caught.value.reason is reason


def test_what_is_still_there_when_the_time_is_over() -> None:
    """The last look that was answered is told."""
    status, _ = waited([Reason.PEER_UNREACHABLE] * 3, wait_s_max=0.0)
    assert status == BUSY


def test_a_node_that_ends_is_not_waited_for() -> None:
    """Its last word is that it ends; nobody is asked after that."""
    assert waited([BUSY, ENDED, Reason.PEER_UNREACHABLE]) == (ENDED, 1)


class Node(node_pb2_grpc.NodeServicer):
    """Says what the test has it say on each call that watches, and ends the call then."""

    def __init__(self, *calls: list[node_pb2.NodeStatus | Reason]) -> None:
        self.calls = list(calls)

    async def WatchStatus(self, _request: Any, _context: Any) -> AsyncIterator[node_pb2.NodeStatus]:
        for said in self.calls.pop(0):
            if isinstance(said, Reason):
                raise BatonError(said, "As the test wants it.")
            yield said


class EarlierNode(node_pb2_grpc.NodeServicer):
    """Knows no call that watches."""

    async def GetStatus(self, _request: Any, _context: Any) -> node_pb2.NodeStatus:
        return BUSY


def looked(node: node_pb2_grpc.NodeServicer, scene: Callable[[StatusLooks], Any]) -> None:
    """`scene` with the looks at a real server."""

    async def limited() -> None:
        server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
        server.add("baton.v1.Node", node_pb2_grpc.add_NodeServicer_to_server, node)
        channels = Channels(limits=ChannelLimits())
        port = await server.start("127.0.0.1:0")
        record = NodeRecord(
            name=NodeName("decode-0"), role=Role.DECODE, incarnation=Incarnation(7), endpoint=f"127.0.0.1:{port}",
            lifecycle=Lifecycle.READY,
        )  # fmt: skip
        looks = StatusLooks(channels, record)
        try:
            async with asyncio.timeout(30):
                await scene(looks)
        finally:
            looks.close()
            await channels.close()
            await server.stop(0)

    asyncio.run(limited())


def test_a_call_that_breaks_is_made_again() -> None:
    """The first call says two things and fails, the second ends with nothing, the third says that the node ends."""

    async def scene(looks: StatusLooks) -> None:
        assert [await looks.look(), await looks.look()] == [BUSY, BUSY]
        for reason in (Reason.INTERNAL, Reason.PEER_UNREACHABLE):
            with pytest.raises(BatonError) as caught:
                await looks.look()
            assert caught.value.reason is reason
        last = await looks.look()
        assert (last.ending, last.ended_empty) == (True, True)

    ended = node_pb2.NodeStatus(ending=True, ended_empty=True, record=BUSY.record)
    looked(Node([BUSY, BUSY, Reason.INTERNAL], [], [ended]), scene)


def test_a_node_that_takes_requests_again_is_an_error() -> None:
    """One status or two may be from before the order; a third is not."""
    ready = node_pb2.NodeStatus(record=directory_pb2.NodeRecord(lifecycle=common_pb2.LIFECYCLE_READY, incarnation=7))

    async def scene(looks: StatusLooks) -> None:
        assert [await looks.look() for _ in range(5)] == [ready, ready, BUSY, ready, ready]
        with pytest.raises(BatonError, match="no longer being drained"):
            await looks.look()

    looked(Node([ready, ready, BUSY, ready, ready, ready]), scene)


def test_a_lame_duck_is_waited_for() -> None:
    """A router that serves new requests still is on its way to be drained."""
    record = directory_pb2.NodeRecord(lifecycle=common_pb2.LIFECYCLE_LAME_DUCK, incarnation=7)
    lame_duck = node_pb2.NodeStatus(record=record, requests=2)

    async def scene(looks: StatusLooks) -> None:
        assert [await looks.look() for _ in range(4)] == [lame_duck] * 3 + [BUSY]

    looked(Node([lame_duck, lame_duck, lame_duck, BUSY]), scene)
    said = "router-0 is a lame duck: it is not ready and serves new requests still, soon none; it holds 2 requests."
    assert drain._text("router-0", lame_duck) == said


def test_another_process_at_the_address_is_told_of() -> None:
    async def scene(looks: StatusLooks) -> None:
        with pytest.raises(BatonError, match="was restarted while it was waited for") as caught:
            await looks.look()
        assert caught.value.reason is Reason.INCARNATION_MISMATCH

    looked(Node([node_pb2.NodeStatus(record=directory_pb2.NodeRecord(incarnation=8))]), scene)


def test_a_node_that_cannot_be_watched_is_asked() -> None:
    """One of an earlier version."""

    async def scene(looks: StatusLooks) -> None:
        assert [await looks.look() for _ in range(3)] == [BUSY] * 3

    looked(EarlierNode(), scene)


def test_an_order_to_a_node_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    """The directory still has its record. What gRPC says of the connection is not shown."""
    token = OperatorToken(tmp_path / "token")
    token.read_or_make()
    operator = Operator(operator_token_file=token.path, insecure=False)

    async def scene() -> None:
        channels = Channels(limits=ChannelLimits())
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        record = NodeRecord(
            name=NodeName("decode-0"), role=Role.DECODE, incarnation=Incarnation(7), endpoint=endpoint,
            lifecycle=Lifecycle.READY,
        )  # fmt: skip
        try:
            with pytest.raises(BatonError) as caught:
                await drain._drain(channels, record, operator, wait_s_max=30)
        finally:
            await channels.close()
        assert caught.value.message.startswith(f"decode-0 does not answer at {endpoint}, where the directory has it.")
        assert "onnect" not in caught.value.message

    asyncio.run(scene())


@pytest.mark.parametrize("turns", range(4))
def test_the_end_of_the_wait_counts_though_a_status_comes_in_the_same_moment(turns: int) -> None:
    """A look that is cancelled so many turns of the loop after a status has come, and that has not ended yet, ends as
    cancelled: nothing else ends the wait for a node that stays busy."""

    class Answering:
        def __init__(self) -> None:
            self.status: asyncio.Future[node_pb2.NodeStatus] = asyncio.get_running_loop().create_future()

        async def read(self) -> node_pb2.NodeStatus:
            return await self.status

    async def scene() -> None:
        record = NodeRecord(
            name=NodeName("decode-0"), role=Role.DECODE, incarnation=Incarnation(7), endpoint="127.0.0.1:1",
            lifecycle=Lifecycle.READY,
        )  # fmt: skip
        looks = StatusLooks(Channels(limits=ChannelLimits()), record)
        looks._call = call = Answering()
        looking = asyncio.ensure_future(looks.look())
        for _ in range(4):  # until it reads
            await asyncio.sleep(0)
        call.status.set_result(BUSY)
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelling = looking.cancel()
        await asyncio.wait([looking])
        assert looking.cancelled() == cancelling

    asyncio.run(scene())
