"""A node among others: heartbeats, and the view of the cluster. A lost directory: `test_membership_lost.py`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.clock import Clock
from baton.directory_client import EmbeddedDirectory, Snapshot
from baton.directory_service import DirectoryConfig, DirectoryService
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.membership import MembershipConfig
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import NodeRecord, Role
from tests.support.membership_doubles import (
    HastyClock,
    ManualClock,
    ScriptedDirectory,
    WatchedMembership,
    known,
    lost,
    make,
    record,
    run,
)


def test_heartbeats_carry_the_record_as_it_is_then() -> None:
    """Registered at the start, pushed each heartbeat and at once after `announce`, with rising sequence; removed at the
    end."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        state = Lifecycle.STARTING
        membership = WatchedMembership(
            directory=directory,
            own_record=lambda: record("a", lifecycle=state),
            clock=clock,
            rng=random.Random(1),
            config=MembershipConfig(heartbeat_ms=500),
        )
        await membership.start()
        pushed = [directory.pushes.get_nowait()]
        await clock.asleep(1)
        clock.advance(0.5)
        pushed.append(await directory.pushes.get())
        state = Lifecycle.READY
        membership.announce()
        pushed.append(await directory.pushes.get())
        assert [(each.lifecycle, each.sequence) for each in pushed] == [
            (Lifecycle.STARTING, 1),
            (Lifecycle.STARTING, 2),
            (Lifecycle.READY, 3),
        ]
        await membership.stop()
        await membership.stop()
        assert directory.removals == [("a", record("a").incarnation)]
        assert directory.pushes.empty()

    run(scene())


def test_nodes_are_known_by_role_without_a_call() -> None:
    """The watcher's view, filtered; `on_change` once for each change of it, not for a repetition."""

    async def scene() -> None:
        directory, changes = ScriptedDirectory(), list[list[str]]()
        membership = make(directory, ManualClock(), on_change=lambda: changes.append(known(membership)))
        before = (membership.stale, membership.nodes())
        assert before == (True, ())
        await membership.start()
        directory.show(record("a"))
        directory.show(record("a"))
        directory.show(record("a"), record("p", role=Role.PREFILL))
        await membership.wait_until(lambda: len(membership.nodes()) == 2)
        assert changes == [["a"], ["a", "p"]]
        assert membership.nodes(Role.PREFILL) == (record("p", role=Role.PREFILL),)
        assert membership.nodes(Role.ROUTER) == ()
        assert not membership.stale
        directory.show()
        await membership.wait_until(lambda: membership.nodes() == ())
        await membership.stop()
        assert directory.removals == []

    run(scene())


def test_a_watch_that_ends_slowly_does_not_keep_the_heartbeat_going() -> None:
    """Both end together at the stop: no push comes while a directory takes its time to end the watch."""

    class Slow(ScriptedDirectory):
        ending = asyncio.Event()

        async def watch(self) -> AsyncGenerator[Snapshot, None]:
            try:
                async for snapshot in super().watch():
                    yield snapshot
            finally:
                await self.ending.wait()

    async def scene() -> None:
        directory, clock = Slow(), ManualClock()
        directory.ending = asyncio.Event()
        membership = make(directory, clock, own=record("a"), heartbeat_ms=500)
        await membership.start()
        directory.pushes.get_nowait()
        directory.show(record("a"))
        await membership.wait_until(lambda: len(membership.nodes()) == 1)
        await clock.asleep(1)
        stopping = asyncio.create_task(membership.stop())
        await asyncio.sleep(0)
        clock.advance(0.5)
        for _ in range(10):
            await asyncio.sleep(0)
        assert directory.pushes.empty() and not stopping.done()
        directory.ending.set()
        await stopping
        assert directory.removals == [("a", record("a").incarnation)]

    run(scene())


def test_heartbeats_go_on_when_the_directory_refuses_them() -> None:
    """Three pushes fail; the fourth is taken, with the sequence that it would have had anyway."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        membership = make(directory, clock, own=record("a"), heartbeat_ms=500)
        await membership.start()
        directory.pushes.get_nowait()
        directory.refuse = lambda pushed: lost() if pushed.sequence <= 4 else None
        for _ in range(3):
            await clock.asleep(1)
            clock.advance(0.5)
            await asyncio.sleep(0)
        while directory.pushes.empty():
            await clock.asleep(1)
            clock.advance(0.5)
            await asyncio.sleep(0)
        assert directory.pushes.get_nowait().sequence == 5
        await membership.stop()

    run(scene())


def test_a_restarted_node_waits_for_its_predecessor_to_run_out() -> None:
    """The name is held for another 2.9 s by a process that was killed: the start succeeds after that, and says until
    then what it waits for."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), HastyClock()
        free_s = clock.monotonic_s() + 2.9
        troubles: list[str] = []

        def refuse(_pushed: NodeRecord) -> BatonError | None:
            troubles.append(membership.trouble())
            return name_in_use() if clock.monotonic_s() < free_s else None

        directory.refuse = refuse
        membership = make(directory, clock, own=record("a"), ttl_ms=3000, heartbeat_ms=500)
        await membership.start()
        assert directory.pushes.get_nowait().name == "a"
        waits = "This process waits until it is registered. The name a is held by the node at h:2."
        assert troubles[1:7] == [waits] * 6
        assert "registered" not in membership.trouble()
        await membership.stop()

    run(scene())


def name_in_use() -> BatonError:
    return BatonError(Reason.NAME_IN_USE, "The name a is held by the node at h:2.", retry_after_ms=1000, field="name")


@pytest.mark.parametrize(
    ("error", "waited_ms"),
    [(name_in_use(), 4500), (lost(), 5000), (BatonError(Reason.BAD_NAME, "'-' is no node name."), None)],
    ids=["name held by a living node", "no directory", "bad name"],
)
def test_a_start_that_cannot_succeed_gives_up(error: BatonError, waited_ms: int | None) -> None:
    """A living node has the name, there is no directory, the record is wrong: the first two are waited for within
    their limits, and the error says for how long and why."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), HastyClock()
        directory.refuse = lambda pushed: error
        membership = make(directory, clock, own=record("a"), ttl_ms=3000, heartbeat_ms=500, directory_wait_ms_max=5000)
        begun_s = clock.monotonic_s()
        with pytest.raises(BatonError) as caught:
            await membership.start()
        elapsed_ms = (clock.monotonic_s() - begun_s) * 1e3
        assert caught.value.reason is error.reason
        assert caught.value.field == error.field
        if waited_ms is None:
            assert (caught.value, elapsed_ms) == (error, 0)
        else:
            assert waited_ms <= elapsed_ms < waited_ms + 1000
            hint = " Start the directory first, or say where it is with --directory."
            said = error.message + (hint if error.reason is Reason.PEER_UNREACHABLE else "")
            assert caught.value.message == f"Not registered after {elapsed_ms:.0f} ms. {said}"
        await membership.stop()

    run(scene())


def test_a_start_without_a_directory_goes_on_with_what_was_known() -> None:
    """It says how old that is, and registers once the directory is there, whose nodes count from then on."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        directory.refuse = lambda pushed: lost()
        membership = make(directory, clock, own=record("a"), last_known=(record("b"), record("c")))
        directory.lose()
        before = "The directory has been out of reach for 0 s: no node is known before it answers."
        assert membership.trouble() == before
        await membership.start()
        assert (known(membership), membership.stale) == (["b", "c"], True)
        await clock.asleep(2)
        clock.advance(0.3)
        before = "The directory has been out of reach for 0 s: new requests go to the 2 last known nodes."
        assert membership.trouble() == before
        directory.refuse = lambda pushed: None
        directory.show(record("a"), record("b"), left=frozenset({NodeName("c")}))
        clock.advance(0.7)
        assert (await directory.pushes.get()).name == "a"
        await membership.wait_until(lambda: not membership.stale)
        assert (known(membership), membership.trouble()) == (["a", "b"], "")
        await membership.stop()

    run(scene())


@pytest.mark.parametrize(
    ("config", "field"),
    [({"heartbeat_ms": 0}, "heartbeat_ms"), ({"ttl_ms": 900}, "ttl_ms"), ({"backoff_ms_min": 9999}, "backoff_ms_min")],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, int], field: str) -> None:
    """No heartbeat, a time to live that one lost heartbeat ends, a backoff upside down."""
    with pytest.raises(InvalidField) as caught:
        MembershipConfig(**config)
    assert caught.value.field == field


class RealDirectory:
    """The embedded directory over gRPC; can be stopped and started again on its port, empty."""

    def __init__(self) -> None:
        self.port = 0
        self._service: DirectoryService | None = None
        self._server: RpcServer | None = None

    async def start(self) -> None:
        self._service = DirectoryService(config=DirectoryConfig(), clock=Clock())
        self._server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
        self._service.start(self._server)
        self.port = await self._server.start(f"127.0.0.1:{self.port}")

    async def stop(self) -> None:
        assert self._service is not None
        assert self._server is not None
        await self._service.close()
        await self._server.stop(0)


@asynccontextmanager
async def member(directory: RealDirectory, channels: Channels, own: NodeRecord) -> AsyncIterator[WatchedMembership]:
    client = EmbeddedDirectory(f"127.0.0.1:{directory.port}", channels=channels, call_ms_max=5_000)
    membership = WatchedMembership(
        directory=client,
        own_record=lambda: own,
        clock=Clock(),
        rng=random.Random(2),
        config=MembershipConfig(heartbeat_ms=50, ttl_ms=10_000),
    )
    try:
        await membership.start()
        yield membership
    finally:
        await membership.stop()


def test_two_nodes_find_each_other_and_outlive_the_directory() -> None:
    """Over gRPC: two nodes see each other; the directory is restarted, empty, and neither loses the other for a moment;
    one leaves, and the other one sees it go."""

    async def scene() -> None:
        directory, channels = RealDirectory(), Channels(limits=ChannelLimits())
        await directory.start()
        try:
            async with member(directory, channels, record("a")) as a:
                async with member(directory, channels, record("b")) as b:
                    await a.wait_until(lambda: known(a) == ["a", "b"])
                    await b.wait_until(lambda: known(b) == ["a", "b"])
                    views: list[list[str]] = []
                    watcher = asyncio.create_task(record_views(a, views))
                    await directory.stop()
                    await a.wait_until(lambda: a.stale)
                    await directory.start()
                    await a.wait_until(lambda: not a.stale)
                    await b.wait_until(lambda: not b.stale)
                    watcher.cancel()
                    assert views
                    assert all(view == ["a", "b"] for view in views)
                await a.wait_until(lambda: known(a) == ["a"])
        finally:
            await channels.close()
            await directory.stop()

    run(scene())


async def record_views(membership: WatchedMembership, views: list[list[str]]) -> None:
    def note() -> bool:
        views.append(known(membership))
        return False

    await membership.wait_until(note)


def test_a_node_that_is_replaced_by_its_successor() -> None:
    """Same name, same endpoint, a new process: it takes over at once, and the old one's stop does not remove it."""

    async def scene() -> None:
        directory, channels = RealDirectory(), Channels(limits=ChannelLimits())
        await directory.start()
        try:
            successor = replace(record("a"), incarnation=Incarnation(77))
            async with member(directory, channels, record("a")) as old:
                await old.wait_until(lambda: known(old) == ["a"])
                async with member(directory, channels, successor) as new:
                    await new.wait_until(lambda: [each.incarnation for each in new.nodes()] == [77])
                    await old.stop()
                    client = EmbeddedDirectory(f"127.0.0.1:{directory.port}", channels=channels)
                    assert [each.incarnation for each in (await client.list()).records] == [77]
        finally:
            await channels.close()
            await directory.stop()

    run(scene())
