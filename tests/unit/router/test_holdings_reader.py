"""How a router keeps its index of who has which blocks true."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from batonpb import holdings_pb2, holdings_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import NodeRecord, Role
from cachestore.holder_index import HolderIndex
from cachestore.holdings import Holdings, Tier
from node.holdings import HoldingsService
from router import holdings_reader
from router.holdings_reader import HoldingsReader
from tests.support.router_records import MODEL

WAIT_S = 20.0
ROUTER = Incarnation(9)


def digest(number: int) -> bytes:
    return random.Random(number).randbytes(16)


CHAIN = [digest(number) for number in range(8)]


class Node:
    """A process that says what it has, at one port, or what a test makes of that."""

    def __init__(self, incarnation: int, **limits: int) -> None:
        self.incarnation = Incarnation(incarnation)
        self.holdings = Holdings(**limits)
        self.service = HoldingsService(self.holdings, self.incarnation, Clock(), nodes=lambda: 1)
        self.server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
        self.known: list[int] = []
        """By each call: the change up to which the caller knew all."""
        self.spoil: Callable[[holdings_pb2.HoldingsNews], Any] = lambda news: None
        self.server.add("baton.v1.Holdings", holdings_pb2_grpc.add_HoldingsServicer_to_server, self)
        self.endpoint = ""

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[holdings_pb2.HoldingsNews]:
        self.known.append(request.known)
        async for news in self.service.Watch(request, context):
            self.spoil(news)
            yield news

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self.endpoint = f"127.0.0.1:{await self.server.start(listen)}"

    async def stop(self) -> None:
        self.service.close()
        await self.server.stop(0.1)

    def has(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.holdings.added(CHAIN[number], Tier.DEVICE)

    def breaks(self, having: Sequence[int] = ()) -> None:
        """This stream, now; and it has more by the time that there is another."""
        self.spoil = lambda _news: None
        self.has(having)
        raise BatonError(Reason.INTERNAL, "The stream breaks.")

    @property
    def record(self) -> NodeRecord:
        return NodeRecord(
            name=NodeName("node-0"), role=Role.DECODE, incarnation=self.incarnation, endpoint=self.endpoint,
            lifecycle=Lifecycle.READY, model=MODEL,
        )  # fmt: skip


class Router:
    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        loop = asyncio.get_running_loop()
        self.index = HolderIndex()
        self.reader = HoldingsReader(
            self.index,
            own=ROUTER,
            channels=channels,
            clock=Clock(),
            repeats=RepeatLog(get_log("test"), loop.time, key="node"),
        )

    def blocks(self, node: Node) -> int:
        return int(
            (self.index.lookup(CHAIN) or self.index.nothing()).blocks[self.index.holders.get(node.incarnation, -1)]
        )

    async def until(self, node: Node, blocks: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.blocks(node) != blocks:  # noqa: ASYNC110 - what others see is what counts
                await asyncio.sleep(0.005)


@asynccontextmanager
async def router() -> AsyncIterator[Router]:
    channels = Channels(limits=ChannelLimits())
    made = Router(channels)
    try:
        yield made
    finally:
        await made.reader.close()
        await channels.close()


def play(scenario: Callable[[Router, Node], Awaitable[None]], **limits: int) -> None:
    async def run() -> None:
        node = Node(1, **limits)
        await node.start()
        async with router() as made:
            made.reader.follow([node.record])
            await scenario(made, node)
        await node.stop()

    asyncio.run(run())


def test_a_router_knows_what_a_node_has_and_what_it_evicts() -> None:
    """Blocks that were there before the router, that come, and that go. One snapshot is all that it takes."""

    async def scenario(made: Router, node: Node) -> None:
        node.has(range(3))
        await made.until(node, 3)
        node.has(range(3, 8))
        await made.until(node, 8)
        for digest in CHAIN[5:8]:  # what is behind a block that goes has gone, too
            node.holdings.removed(digest, Tier.DEVICE)
        await made.until(node, 5)
        assert made.reader.snapshots == 1 and node.known == [0]

    play(scenario)


def test_a_stream_that_broke_goes_on_behind_what_is_known() -> None:
    """It ends in the middle and is opened again: no snapshot."""

    async def scenario(made: Router, node: Node) -> None:
        node.has(range(3))
        await made.until(node, 3)
        node.spoil = lambda _news: node.breaks()
        node.has([3])
        await made.until(node, 4)
        assert made.reader.snapshots == 1 and node.known == [0, 3]

    play(scenario)


def test_a_gap_costs_a_snapshot() -> None:
    """A message is lost on its way, by what bug ever: the next one does not fit, and the router asks for all."""

    async def scenario(made: Router, node: Node) -> None:
        node.has(range(3))
        await made.until(node, 3)

        def skip(news: holdings_pb2.HoldingsNews) -> None:
            news.behind += 1
            node.spoil = lambda news: None

        node.spoil = skip
        node.has([3, 4])
        await made.until(node, 5)
        assert made.reader.snapshots == 2 and node.known == [0, 0]

    play(scenario)


def test_a_malformed_message_costs_a_snapshot_too() -> None:
    """Digests of another length, or a tier that nobody knows."""

    async def scenario(made: Router, node: Node) -> None:
        await made.until(node, 0)

        def cut(news: holdings_pb2.HoldingsNews) -> None:
            node.spoil = tier
            news.digests = news.digests[:-1]

        def tier(news: holdings_pb2.HoldingsNews) -> None:
            node.spoil = lambda news: None
            news.tiers = b"\7" * len(news.tiers)

        node.spoil = cut
        node.has(range(4))
        await made.until(node, 4)
        assert node.known == [0, 0, 0]

    play(scenario)


def test_a_node_that_says_that_it_has_too_much_is_not_known() -> None:
    """Three blocks are known of a node at most here, or six before they are counted. With eight, in changes or in a
    snapshot, nothing is known of it. One that says much, but of the same three, stays known."""

    async def scenario(made: Router, node: Node) -> None:
        await made.until(node, 0)
        node.has(range(3))
        await made.until(node, 3)
        for _ in range(4):
            node.holdings.removed(CHAIN[2], Tier.DEVICE)
            await made.until(node, 2)
            node.has([2])
            await made.until(node, 3)
        assert node.known == [0]
        node.has(range(3, 8))
        async with asyncio.timeout(WAIT_S):
            while len(node.known) < 3:  # noqa: ASYNC110 - it asks for snapshots, and takes none
                await asyncio.sleep(0.005)
        assert (node.known[1:3], made.blocks(node), made.index.holders) == ([0, 0], 0, {})
        while made.index.sweep():
            pass
        assert made.index.entries == 0

    with patch.object(holdings_reader, "BLOCKS_MAX", 3):
        play(scenario)


def test_a_router_that_was_away_for_long_gets_a_snapshot() -> None:
    """The node's log keeps four changes, and six have come while the stream was broken."""

    async def scenario(made: Router, node: Node) -> None:
        node.has([0])
        await made.until(node, 1)
        node.spoil = lambda _news: node.breaks(having=range(2, 7))
        node.has([1])
        await made.until(node, 7)
        assert made.reader.snapshots == 2 and node.known == [0, 1]

    play(scenario, changes_kept_max=4)


def test_a_process_that_is_gone_is_forgotten_at_once() -> None:
    """The directory drops it: nothing of it counts from that moment. Another under its name is learnt anew."""

    async def scenario(made: Router, node: Node) -> None:
        node.has(range(3))
        await made.until(node, 3)
        made.reader.follow([])
        assert made.blocks(node) == 0 and not made.reader.use(node.endpoint)
        endpoint = node.endpoint
        await node.stop()
        again = Node(2)
        await again.start(endpoint)
        again.has(range(2))
        made.reader.follow([again.record])
        await made.until(again, 2)
        assert made.blocks(node) == 0
        made.reader.upkeep()
        assert made.index.entries == 2
        await again.stop()

    play(scenario)


def test_a_process_is_forgotten_where_its_address_is_anothers() -> None:
    """It has restarted and the directory does not say so yet: the process there refuses the call."""

    async def scenario(made: Router, node: Node) -> None:
        node.has(range(3))
        await made.until(node, 3)
        endpoint = node.endpoint
        await node.stop()
        again = Node(2)
        await again.start(endpoint)
        await made.until(node, 0)
        made.reader.follow([replace(again.record, incarnation=again.incarnation)])
        again.has([0])
        await made.until(again, 1)
        await again.stop()

    play(scenario)


def test_a_restarted_router_learns_it_all() -> None:
    """Nothing of what nodes have is the router's own."""

    async def scenario(made: Router, node: Node) -> None:
        node.has(range(5))
        await made.until(node, 5)
        async with router() as again:
            again.reader.follow([node.record])
            await again.until(node, 5)

    play(scenario)
