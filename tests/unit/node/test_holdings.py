"""baton.v1.Holdings: what a router is sent of a node's cache, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from unittest.mock import patch

import pytest
from batonpb import common_pb2, holdings_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from cachestore.holdings import Holdings, Tier
from node import holdings as service_module
from node.holdings import HoldingsService
from tests.support.still_clock import StillClock

OWN = Incarnation(7)


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def watch(service: HoldingsService, known: int = 0, receiver: int = OWN) -> AsyncIterator[holdings_pb2.HoldingsNews]:
    header = common_pb2.Header(sender=9, receiver=receiver)
    return service.Watch(holdings_pb2.WatchHoldingsRequest(header=header, known=known), None)


def make(nodes: int = 2, **limits: int) -> tuple[Holdings, HoldingsService, StillClock]:
    holdings, clock = Holdings(**limits), StillClock()
    return holdings, HoldingsService(holdings, OWN, clock, nodes=lambda: nodes), clock


def test_a_router_is_sent_all_and_then_what_changes() -> None:
    """Of an empty node too there is a first message at once. Ten changes of one moment are one message."""

    async def scenario() -> None:
        holdings, service, clock = make()
        async with aclosing(watch(service)) as news:  # type: ignore[type-var]
            first = await anext(news)
            assert (first.part, first.parts, first.number, first.digests) == (1, 1, 0, b"")
            waiting = asyncio.ensure_future(anext(news))
            await asyncio.sleep(0)
            assert service.followers == 1
            for number in range(10):
                holdings.added(digest(number), Tier.DEVICE)
            later = await waiting
            assert (later.behind, later.number, later.part, len(later.tiers)) == (0, 10, 0, 10)
            holdings.removed(digest(3), Tier.DEVICE)
            last = await anext(news)
            assert (last.behind, last.number, last.digests, last.tiers) == (10, 11, digest(3), b"\0")
        assert service.followers == 0
        assert clock.slept == [0.1, 0.1]

    asyncio.run(scenario())


def test_a_router_that_comes_back_goes_on_where_it_was() -> None:
    """It names the last change it knows. What the log does not reach, or another process's numbers, gets a snapshot."""

    async def scenario() -> None:
        holdings, service, _ = make(changes_kept_max=4)
        for number in range(6):
            holdings.added(digest(number), Tier.DEVICE)
        for known, part, blocks in ((5, 0, 1), (6, 0, 0), (1, 1, 6), (9, 1, 6)):
            async with aclosing(watch(service, known)) as news:  # type: ignore[type-var]
                first = await anext(news)
                assert (first.part, len(first.tiers), first.number) == (part, blocks, 6), known

    asyncio.run(scenario())


def test_a_large_snapshot_comes_in_parts() -> None:
    """Five blocks, two in a message. What changes meanwhile follows."""

    async def scenario() -> None:
        holdings, service, _ = make()
        for number in range(5):
            holdings.added(digest(number), Tier.HOST)
        with patch.object(service_module, "PART_BLOCKS_MAX", 2):
            async with aclosing(watch(service)) as news:  # type: ignore[type-var]
                parts = [await anext(news)]
                holdings.removed(digest(0), Tier.HOST)
                parts += [await anext(news), await anext(news)]
                assert [(p.part, p.parts, p.number, bytes(p.tiers)) for p in parts] == [
                    (1, 3, 5, b"\2\2"), (2, 3, 5, b"\2\2"), (3, 3, 5, b"\2")
                ]  # fmt: skip
                after = await anext(news)
                assert (after.behind, after.number, after.digests) == (5, 6, digest(0))

    asyncio.run(scenario())


def test_the_more_nodes_the_rarer_each_ones_messages() -> None:
    """2,000 nodes: each sends a message in four seconds, 500 a second to a router."""

    async def scenario() -> None:
        holdings, service, clock = make(nodes=2_000)
        async with aclosing(watch(service)) as news:  # type: ignore[type-var]
            await anext(news)
            holdings.added(digest(1), Tier.DEVICE)
            await anext(news)
        assert clock.slept == [4.0]

    asyncio.run(scenario())


def test_a_node_that_ends_ends_its_streams() -> None:
    """A router that waits for news is let go, and one that names another process is refused."""

    async def scenario() -> None:
        _, service, _ = make()
        async with aclosing(watch(service)) as news:  # type: ignore[type-var]
            await anext(news)
            waiting = asyncio.ensure_future(anext(news))
            await asyncio.sleep(0)
            service.close()
            with pytest.raises(StopAsyncIteration):
                await waiting
        with pytest.raises(BatonError) as refused:
            await anext(watch(service, receiver=8))
        assert refused.value.reason is Reason.INCARNATION_MISMATCH

    asyncio.run(scenario())
