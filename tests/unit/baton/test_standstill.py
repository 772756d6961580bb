"""A directory that stood still (stopped, or on a machine that was paused) has heard of nobody meanwhile: that is no
reason to believe that nobody is there. First by a clock, then with processes that are stopped."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from batonpb import directory_pb2

from baton.clock import Clock
from baton.directory import DirectoryLimits, DirectoryState
from baton.directory_client import Directory, EmbeddedDirectory
from baton.directory_redis import RedisDirectory, RedisDirectoryConfig
from baton.directory_service import DirectoryConfig, DirectoryService
from baton.errors import BatonError, InvalidField, Reason
from baton.membership import MembershipConfig
from baton.rpc import ChannelLimits, Channels
from baton.wire import NodeRecord, record_to_proto
from tests.conformance.directory_suite import record, until
from tests.support.cli_harness import Foreground, free_endpoint
from tests.support.membership_doubles import WatchedMembership
from tests.support.redis_harness import redis_server

HANG_S = 60.0
TTL_MS = 3_000
LOOK_S = 0.1
NAMES = ["a", "b", "c"]


class SetClock(Clock):
    """Moved by the test only; nobody sleeps on it."""

    def __init__(self) -> None:
        self.now_s = 500.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        raise AssertionError("a wall clock may jump")

    async def sleep_s(self, delay_s: float) -> None:
        raise AssertionError(delay_s)


class Clocked:
    """A directory that looks whenever the test says."""

    def __init__(self, config: DirectoryConfig | None = None) -> None:
        self.clock = SetClock()
        self.service = DirectoryService(config=config or DirectoryConfig(), clock=self.clock)

    async def push(self, pushed: NodeRecord, ttl_ms: int = TTL_MS) -> None:
        await self.service.Push(directory_pb2.PushRequest(record=record_to_proto(pushed), ttl_ms=ttl_ms), None)

    async def listed(self) -> list[str]:
        reply = await self.service.List(directory_pb2.ListRequest(), None)
        return [each.name for each in reply.records]

    async def pass_s(self, seconds: float, *, look_s: float = LOOK_S) -> None:
        """So much time, with looks in between."""
        for _ in range(round(seconds / look_s)):
            self.clock.now_s += look_s
            await self.listed()

    async def stand_still(self, seconds: float) -> None:
        self.clock.now_s += seconds


def nodes() -> list[NodeRecord]:
    return [record(name, incarnation=i + 1, endpoint=f"h:{i + 1}") for i, name in enumerate(NAMES)]


def test_who_was_there_is_there_when_it_goes_on() -> None:
    """It stands still for ten times what a record lives. Nobody is dropped, and each has as long to be heard of as it
    had before, but for the shortest standstill that counts: then those that are silent go."""

    async def scene() -> None:
        directory = Clocked()
        for each in nodes():
            await directory.push(each)
        await directory.pass_s(1.0)
        await directory.stand_still(30.0)
        assert await directory.listed() == NAMES
        await directory.pass_s(1.4)
        await directory.push(record("b", incarnation=2, endpoint="h:2", sequence=2))
        assert await directory.listed() == NAMES
        await directory.pass_s(0.4)
        assert await directory.listed() == ["b"]

    asyncio.run(scene())


def test_each_standstill_counts_once() -> None:
    """Two of them, and many looks after each: a record lives for its own time and theirs, less what is none, and no
    longer."""

    async def scene() -> None:
        directory = Clocked()
        await directory.push(record(), TTL_MS)
        for _ in range(2):
            await directory.stand_still(5.0)
            await directory.pass_s(1.0)
        await directory.pass_s(0.3)
        assert await directory.listed() == ["decode-0"]
        await directory.pass_s(0.2)
        assert await directory.listed() == []

    asyncio.run(scene())


def test_a_look_that_is_late_is_no_standstill() -> None:
    """Every look comes as late as may be: records live no longer for it. The first that comes later does count."""

    async def scene() -> None:
        directory = Clocked(DirectoryConfig(standstill_ms_min=500))
        await directory.push(record(), 1_000)
        await directory.pass_s(1.0, look_s=0.5)
        assert await directory.listed() == []
        await directory.push(record(sequence=2), 1_000)
        await directory.stand_still(0.75)
        await directory.pass_s(0.5, look_s=0.5)
        assert await directory.listed() == ["decode-0"]

    asyncio.run(scene())


def test_a_late_push_of_a_process_that_left_stays_out() -> None:
    """The node's heartbeat waits in the directory's socket while both the node leaves and the directory stands still,
    for longer than departed incarnations are remembered."""

    async def scene() -> None:
        directory = Clocked()
        await directory.push(record())
        await directory.service.Remove(directory_pb2.RemoveRequest(name="decode-0", incarnation=1), None)
        await directory.stand_still(2 * DirectoryLimits().ttl_ms_max / 1e3)
        with pytest.raises(BatonError) as refused:
            await directory.push(record(sequence=2))
        assert refused.value.reason is Reason.INCARNATION_MISMATCH

    asyncio.run(scene())


def test_the_name_of_a_living_node_is_not_given_away() -> None:
    """Another process asks for it first when the directory goes on."""

    async def scene() -> None:
        directory = Clocked()
        await directory.push(record())
        await directory.stand_still(30.0)
        with pytest.raises(BatonError) as refused:
            await directory.push(record(incarnation=2, endpoint="h:2"))
        assert (refused.value.reason, refused.value.retry_after_ms) == (Reason.NAME_IN_USE, TTL_MS - 400)

    asyncio.run(scene())


def test_how_long_it_stood_still() -> None:
    """Only what is beyond the bound, and from the last look on."""
    directory = Clocked(DirectoryConfig(standstill_ms_min=250))
    directory.clock.now_s = 507.0
    directory.service._expire()
    with patch.object(directory.service._state, "stood_still") as stood_still:
        for now_s in (507.125, 507.25, 517.25, 517.25, 517.5, 518.25):
            directory.clock.now_s = now_s
            directory.service._expire()
    assert [call.kwargs["gap_s"] for call in stood_still.call_args_list] == [9.75, 0.5]


def test_a_bound_that_every_look_exceeds_is_refused() -> None:
    """Records would never run out."""
    with pytest.raises(InvalidField) as refused:
        DirectoryConfig(expire_interval_ms=400)
    assert refused.value.field == "standstill_ms_min"


def test_who_begins_to_watch_is_told_of_goodbyes_only() -> None:
    """One has run out, one has said goodbye: a watcher that was there is told of both, one that comes (back) of the
    goodbye. One that runs out and then says goodbye has left."""
    state = DirectoryState(limits=DirectoryLimits())
    for each in nodes():
        state.push(record_to_proto(each), ttl_ms=1_000 if each.name == "a" else 60_000, now_s=0.0)
    version = state.version
    state.expire(now_s=1.0)
    state.remove(name="b", incarnation=2, now_s=1.0)

    def reported(since: int | None) -> tuple[bool, set[str]]:
        changes = state.changes_since(since, now_s=1.0)
        return changes.snapshot, {removal.name for removal in changes.removals}

    assert reported(version) == (False, {"a", "b"})
    assert reported(None) == (True, {"b"})
    state.remove(name="a", incarnation=1, now_s=1.0)
    assert reported(None) == (True, {"a", "b"})


@asynccontextmanager
async def watching(directory: Directory, views: list[list[str]]) -> AsyncIterator[WatchedMembership]:
    """A router's view of the cluster; each change of it goes to `views`."""
    membership = WatchedMembership(
        directory=directory,
        own_record=None,
        clock=Clock(),
        rng=random.Random(1),
        config=MembershipConfig(heartbeat_ms=50, ttl_ms=int(HANG_S * 1e3)),
        on_change=lambda: views.append([each.name for each in membership.nodes()]),
    )
    try:
        await membership.start()
        yield membership
    finally:
        await membership.stop()


async def stand_still(
    directory: Directory, *, ttl_ms: int, signal_it: Callable[[signal.Signals], None]
) -> tuple[list[list[str]], list[str]]:
    """Three nodes are heard of until a router that watches has seen them all, and never again; the directory's process
    stands still for longer than their records live and goes on. What the router saw of them, from the first time that
    it saw all, and whom the directory lists when it goes on."""
    await answering(directory)
    views: list[list[str]] = []
    async with watching(directory, views) as router:
        sequence = 0
        while len(router.nodes()) < len(NAMES):
            sequence += 1
            for each in nodes():
                await directory.push(replace(each, sequence=sequence), ttl_ms=ttl_ms)
            await asyncio.sleep(0.02)
        del views[:-1]
        signal_it(signal.SIGSTOP)
        still_until_s = time.monotonic() + 1.5 * ttl_ms / 1e3
        await router.wait_until(lambda: router.stale)
        await asyncio.sleep(still_until_s - time.monotonic())  # that time passes is what the directory must not mind
        signal_it(signal.SIGCONT)
        listed = await answering(directory)
        await router.wait_until(lambda: not router.stale)
    return views, listed


async def answering(directory: Directory) -> list[str]:
    """Whom the directory lists, when it answers."""
    while True:
        try:
            return [each.name for each in (await directory.list()).records]
        except BatonError as error:
            if error.reason not in (Reason.PEER_UNREACHABLE, Reason.DEADLINE):
                raise
            await asyncio.sleep(0.02)


def run(scene: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S):
            await scene

    asyncio.run(limited())


@pytest.mark.slow
def test_an_embedded_directory_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """The router never sees a node go, and the directory itself still lists them all: it says why in its log. Then they
    run out, since nobody renews them."""

    async def scene(process: Foreground, endpoint: str) -> None:
        channels = Channels(limits=ChannelLimits())
        directory = EmbeddedDirectory(endpoint, channels=channels, call_ms_max=10_000)
        try:
            views, listed = await stand_still(directory, ttl_ms=2_000, signal_it=process.process.send_signal)
            assert listed == NAMES
            assert [name for view in views for name in NAMES if name not in view] == []
            async with aclosing(directory.watch()) as snapshots:
                await until(snapshots, lambda snapshot: not snapshot.records)
        finally:
            await channels.close()

    endpoint = free_endpoint()
    with Foreground("directory", "--listen", endpoint, folder=tmp_path) as process:
        run(scene(process, endpoint))
        before, _, after = process.err.partition("stood still and heard from no node")
        assert "node expired" not in before
        assert after.count("node expired") == len(NAMES)


def test_a_redis_that_is_stopped_and_goes_on() -> None:
    """Its clock has run on, so the first call lets every record run out. The router that has found it again keeps them
    all: it has not heard that anybody left."""

    async def scene() -> None:
        with redis_server() as server:

            def signal_it(signum: signal.Signals) -> None:
                if signum is signal.SIGSTOP:
                    server.pause()
                else:
                    server.resume()

            directory = RedisDirectory(server.address, clock=Clock(), config=RedisDirectoryConfig())
            try:
                views, listed = await stand_still(directory, ttl_ms=800, signal_it=signal_it)
                assert listed == []
            finally:
                await directory.close()
            assert [name for view in views for name in NAMES if name not in view] == []

    run(scene())
