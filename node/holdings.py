"""baton.v1.Holdings: says to routers what this node has cached, in few and large messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from batonpb import holdings_pb2, holdings_pb2_grpc

from baton.clock import Clock, wait_s
from baton.ids import Incarnation
from baton.wire import check_header
from cachestore.holdings import Holdings

NEWS_PAUSE_MS: Final = 100
"""At least, between two messages to a follower, each of which costs it as much as four tokens of a stream, or more."""
NEWS_PER_ROUTER_PER_S: Final = 500
"""What the nodes of a cluster together send to one router at most: the more they are, the longer each one's pause."""
PART_BLOCKS_MAX: Final = 4_096
"""Blocks in one message of a snapshot: a router takes a millisecond to enter them."""


class HoldingsService(holdings_pb2_grpc.HoldingsServicer):
    """Control thread only. `close` ends the calls."""

    def __init__(self, holdings: Holdings, own: Incarnation, clock: Clock, *, nodes: Callable[[], int]) -> None:
        """`nodes` says how many nodes a router follows, about."""
        self._holdings = holdings
        self._own = own
        self._clock = clock
        self._nodes = nodes
        self._news = asyncio.Event()
        self._closing = asyncio.Event()
        self.followers = 0

    async def Watch(
        self, request: holdings_pb2.WatchHoldingsRequest, context: Any
    ) -> AsyncIterator[holdings_pb2.HoldingsNews]:
        check_header(request.header, own=self._own)
        known = self._since(request.known) if 0 < request.known <= self._holdings.number else None
        self.followers += 1
        try:
            number = request.known
            if known is not None:
                yield known
                number = known.number
            else:
                for part in self._parts():
                    yield part
                    number = part.number
            while await self._changed(number):
                news = self._since(number)
                if news is not None:
                    yield news
                    number = news.number
                    continue
                for part in self._parts():
                    yield part
                    number = part.number
        finally:
            self.followers -= 1

    def close(self) -> None:
        self._closing.set()
        self._wake()

    def _parts(self) -> Iterator[holdings_pb2.HoldingsNews]:
        """Of a snapshot; at least one. Made one by one, as they are sent."""
        holdings, snapshot = self._holdings, self._holdings.snapshot()
        count = max(1, -(-len(snapshot.digests) // PART_BLOCKS_MAX))
        for index in range(count):
            part = holdings.part(snapshot, index * PART_BLOCKS_MAX, (index + 1) * PART_BLOCKS_MAX)
            yield holdings_pb2.HoldingsNews(
                number=part.number, part=index + 1, parts=count, digests=part.digests, tiers=part.tiers
            )

    def _since(self, number: int) -> holdings_pb2.HoldingsNews | None:
        part = self._holdings.since(number)
        if part is None:
            return None
        return holdings_pb2.HoldingsNews(behind=number, number=part.number, digests=part.digests, tiers=part.tiers)

    async def _changed(self, number: int) -> bool:
        """Wait for the pause, and then for a change behind `number`. False: the node ends."""
        pause_s = max(NEWS_PAUSE_MS / 1000, self._nodes() / NEWS_PER_ROUTER_PER_S)
        if await wait_s(self._clock, self._closing, pause_s):
            return False
        while self._holdings.number == number and not self._closing.is_set():
            self._holdings.on_change = self._wake
            await self._news.wait()
        return not self._closing.is_set()

    def _wake(self) -> None:
        self._holdings.on_change = None
        news, self._news = self._news, asyncio.Event()
        news.set()
