"""What every directory must do, whatever it is made of: scenes that each kind of directory is put through.

A test file derives one class for each kind (`class TestThatKind(DirectorySuite)`) and says how one is opened.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from batonpb import directory_pb2

from baton.clock import Clock
from baton.directory import DirectoryLimits
from baton.directory_client import Directory, Snapshot
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.membership import MembershipConfig
from baton.wire import BlockLoad, NodeLoad, NodeRecord, Role, record_to_proto
from tests.support.membership_doubles import WatchedMembership

HANG_S = 60.0
LONG_MS = 60_000
MANY = 1_000


class Place(ABC):
    """One directory process and clients of it, all closed by whoever opened the place."""

    @abstractmethod
    def client(self) -> Directory: ...

    @abstractmethod
    async def stop(self) -> None:
        """The process is gone, and all that it knew."""

    @abstractmethod
    async def start(self) -> None:
        """The process is back at the same address, empty."""

    @abstractmethod
    async def put(self, message: directory_pb2.NodeRecord) -> None:
        """A record that a node of another version would push."""


def record(
    name: str = "decode-0", *, incarnation: int = 1, endpoint: str = "127.0.0.1:7001", sequence: int = 1, free: int = 0
) -> NodeRecord:
    return NodeRecord(
        name=NodeName(name),
        role=Role.DECODE,
        incarnation=Incarnation(incarnation),
        endpoint=endpoint,
        lifecycle=Lifecycle.READY,
        load=NodeLoad(blocks=BlockLoad(free=free)),
        transports=("shm",),
        sequence=sequence,
    )


async def refused(call: Awaitable[object]) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await call
    return caught.value


async def error_of(call: Awaitable[object]) -> BatonError | None:
    """What the call ends with, None where it ends well."""
    try:
        await call
    except BatonError as error:
        return error
    return None


async def until(snapshots: AsyncIterator[Snapshot], holds: Callable[[Snapshot], bool]) -> Snapshot:
    """The first snapshot for which it holds; the scene's time limit ends a wait in vain."""
    async for snapshot in snapshots:
        if holds(snapshot):
            return snapshot
    raise AssertionError("the watch ended")


def seen(snapshot: Snapshot) -> list[tuple[str, int]]:
    return [(each.name, each.incarnation) for each in snapshot.records]


class DirectorySuite(ABC):
    @abstractmethod
    def open_place(self, limits: DirectoryLimits) -> AbstractAsyncContextManager[Place]: ...

    def run(self, scene: Callable[[Place], Awaitable[None]], limits: DirectoryLimits | None = None) -> None:
        async def limited() -> None:
            async with asyncio.timeout(HANG_S), self.open_place(limits or DirectoryLimits()) as place:
                await scene(place)

        asyncio.run(limited())

    def test_push_list_and_remove(self) -> None:
        """Records come back as they went, by name; a name that is held is refused with the holder's place; a removal
        says whether it was one."""

        async def scene(place: Place) -> None:
            directory = place.client()
            first = record("a", endpoint="h:1", sequence=2**64 - 1, free=7)
            second = record("b", incarnation=2**64 - 1, endpoint="h:2")
            await directory.push(second, ttl_ms=LONG_MS)
            await directory.push(first, ttl_ms=LONG_MS)
            assert await directory.list() == Snapshot(records=(first, second))
            error = await refused(directory.push(record("a", incarnation=3, endpoint="h:3"), ttl_ms=LONG_MS))
            assert (error.reason, error.field) == (Reason.NAME_IN_USE, "name")
            assert error.metadata == {"endpoint": "h:1", "incarnation": f"{1:016x}"}
            assert error.retry_after_ms is not None
            assert 0 < error.retry_after_ms <= LONG_MS
            assert not await directory.remove(NodeName("a"), Incarnation(3))
            assert await directory.remove(NodeName("a"), Incarnation(1))
            assert (await directory.list()).records == (second,)

        self.run(scene)

    def test_a_restart_at_the_same_endpoint_takes_over_at_once(self) -> None:
        """A port cannot be held by two living processes. Neither the dead one's late push nor its late goodbye counts,
        and a later sequence does not help it."""

        async def scene(place: Place) -> None:
            directory = place.client()
            await directory.push(record(incarnation=1, sequence=50), ttl_ms=LONG_MS)
            await directory.push(record(incarnation=2, sequence=1), ttl_ms=LONG_MS)
            error = await refused(directory.push(record(incarnation=1, sequence=51), ttl_ms=LONG_MS))
            assert error.reason is Reason.INCARNATION_MISMATCH
            assert not await directory.remove(NodeName("decode-0"), Incarnation(1))
            assert seen(await directory.list()) == [("decode-0", 2)]

        self.run(scene)

    def test_what_was_removed_does_not_come_back(self) -> None:
        """A push that its own removal overtook, before and after the record was there; the successor is welcome."""

        async def scene(place: Place) -> None:
            directory = place.client()
            for pushed in (record("a", incarnation=1), record("b", incarnation=2)):
                if pushed.name == "a":
                    await directory.push(pushed, ttl_ms=LONG_MS)
                assert await directory.remove(pushed.name, pushed.incarnation) is (pushed.name == "a")
                error = await refused(directory.push(replace(pushed, sequence=9), ttl_ms=LONG_MS))
                assert error.reason is Reason.INCARNATION_MISMATCH
            await directory.push(record("a", incarnation=3, endpoint="h:3"), ttl_ms=LONG_MS)
            assert seen(await directory.list()) == [("a", 3)]

        self.run(scene)

    def test_what_arrives_late_is_ignored(self) -> None:
        """Pushes of one incarnation out of order, the numbers too large for a double: the last one said counts."""

        async def scene(place: Place) -> None:
            directory = place.client()
            last = 2**63 + 1
            for sequence in (last - 1, last, last - 1, last, 9):
                await directory.push(record(sequence=sequence, free=sequence % 100), ttl_ms=LONG_MS)
            assert (await directory.list()).records == (record(sequence=last, free=last % 100),)

        self.run(scene)

    def test_a_record_that_is_not_renewed_runs_out(self) -> None:
        """A living node of the same name keeps another one out only for its time; the late push neither renews it nor
        does the waker get its name back."""

        async def scene(place: Place) -> None:
            directory = place.client()
            await directory.push(record(incarnation=1, sequence=5), ttl_ms=300)
            other = record(incarnation=2, endpoint="h:2")
            while (held := await error_of(directory.push(other, ttl_ms=LONG_MS))) is not None:
                assert held.reason is Reason.NAME_IN_USE
                assert held.retry_after_ms is not None
                assert held.retry_after_ms <= 300
            error = await refused(directory.push(record(incarnation=1, sequence=6), ttl_ms=LONG_MS))
            assert error.reason is Reason.NAME_IN_USE
            assert seen(await directory.list()) == [("decode-0", 2)]

        self.run(scene)

    def test_a_process_that_was_only_stopped_may_come_back(self) -> None:
        """Its record ran out, nobody took the name: the next heartbeat brings it back."""

        async def scene(place: Place) -> None:
            directory = place.client()
            await directory.push(record(sequence=1), ttl_ms=200)
            async with aclosing(directory.watch()) as snapshots:
                await until(snapshots, lambda snapshot: not snapshot.records)
            await directory.push(record(sequence=2), ttl_ms=LONG_MS)
            assert (await directory.list()).records == (record(sequence=2),)

        self.run(scene)

    @pytest.mark.parametrize(
        ("changes", "ttl_ms", "reason", "field"),
        [
            ({"name": "a b"}, LONG_MS, Reason.BAD_NAME, "name"),
            ({"endpoint": "0.0.0.0:7000"}, LONG_MS, Reason.BAD_ENDPOINT, "endpoint"),
            ({"incarnation": 0}, LONG_MS, Reason.BAD_FIELD, "incarnation"),
            ({}, 199, Reason.BAD_FIELD, "ttl_ms"),
            ({}, 60_001, Reason.BAD_FIELD, "ttl_ms"),
        ],
    )
    def test_a_record_that_nobody_could_use_is_refused(
        self, changes: dict[str, object], ttl_ms: int, reason: Reason, field: str
    ) -> None:
        """The field is named, nothing is stored."""

        async def scene(place: Place) -> None:
            directory = place.client()
            error = await refused(directory.push(replace(record(), **changes), ttl_ms=ttl_ms))  # type: ignore[arg-type]
            assert (error.reason, error.field) == (reason, field)
            assert (await directory.list()).records == ()

        self.run(scene)

    def test_the_number_of_records_is_bounded(self) -> None:
        """The third name of two is refused; renewing, replacing and leaving still work, and then there is room."""

        async def scene(place: Place) -> None:
            directory = place.client()
            for i in range(2):
                await directory.push(record(f"n{i}", incarnation=i + 1, endpoint=f"h:{i + 1}"), ttl_ms=LONG_MS)
            third = record("n2", incarnation=9, endpoint="h:9")
            assert (await refused(directory.push(third, ttl_ms=LONG_MS))).reason is Reason.DIRECTORY_FULL
            await directory.push(record("n0", incarnation=1, endpoint="h:1", sequence=2), ttl_ms=LONG_MS)
            await directory.push(record("n0", incarnation=7, endpoint="h:1"), ttl_ms=LONG_MS)
            assert await directory.remove(NodeName("n1"), Incarnation(2))
            await directory.push(third, ttl_ms=LONG_MS)
            assert seen(await directory.list()) == [("n0", 7), ("n2", 9)]

        self.run(scene, DirectoryLimits(records_max=2))

    def test_a_thousand_records(self) -> None:
        """Listed and watched whole, each as it is; one of them changes, and only then is there news."""

        async def scene(place: Place) -> None:
            directory, rng = place.client(), random.Random(3)
            records = [
                record(f"n{i:04d}", incarnation=rng.getrandbits(64) | 1, endpoint=f"h:{i + 1}", free=i)
                for i in range(MANY)
            ]
            for pushed in records:
                await directory.push(pushed, ttl_ms=LONG_MS)
            assert (await directory.list()).records == tuple(records)
            async with aclosing(directory.watch()) as snapshots:
                assert (await anext(snapshots)).records == tuple(records)
                records[500] = replace(records[500], sequence=2, lifecycle=Lifecycle.DRAINING)
                await directory.push(records[500], ttl_ms=LONG_MS)
                assert (await anext(snapshots)).records == tuple(records)

        self.run(scene)

    def test_a_watcher_sees_every_change_in_the_end(self) -> None:
        """A record comes, changes, runs out of its time and another is removed: each shows up at a watcher that
        waits, with the names that left. A renewal without news does not."""

        async def scene(place: Place) -> None:
            directory = place.client()
            stays = record("b", incarnation=2, endpoint="h:2")
            await directory.push(stays, ttl_ms=LONG_MS)
            async with aclosing(place.client().watch()) as snapshots:
                assert (await anext(snapshots)) == Snapshot(records=(stays,))
                await directory.push(replace(stays, sequence=2), ttl_ms=LONG_MS)
                short = record("a", endpoint="h:1", free=1)
                await directory.push(short, ttl_ms=LONG_MS)
                came = await anext(snapshots)
                assert seen(came) == [("a", 1), ("b", 2)]
                changed = record("a", endpoint="h:1", free=5, sequence=2)
                await directory.push(changed, ttl_ms=LONG_MS)
                assert (await anext(snapshots)).records == (changed, stays)
                await directory.push(replace(changed, sequence=3, lifecycle=Lifecycle.DRAINING), ttl_ms=200)
                gone = await until(snapshots, lambda snapshot: seen(snapshot) == [("b", 2)])
                assert gone.left == frozenset({"a"})
                await directory.remove(stays.name, stays.incarnation)
                assert await anext(snapshots) == Snapshot(records=(), left=frozenset({NodeName("b")}))

        self.run(scene)

    def test_who_begins_to_watch_is_told_of_goodbyes_only(self) -> None:
        """One node ran out, one said goodbye. Who watches all the while is told of both; who comes back after a break
        is told of the goodbye: that the directory has not heard of the other may be its own fault."""

        async def scene(place: Place) -> None:
            directory = place.client()
            await directory.push(record("b", incarnation=2, endpoint="h:2"), ttl_ms=LONG_MS)
            async with aclosing(place.client().watch()) as snapshots:
                assert seen(await anext(snapshots)) == [("b", 2)]
                await directory.push(record("a", endpoint="h:1"), ttl_ms=LONG_MS)
                assert seen(await anext(snapshots)) == [("a", 1), ("b", 2)]
                await directory.push(record("a", endpoint="h:1", sequence=2), ttl_ms=200)
                assert (await until(snapshots, lambda snapshot: seen(snapshot) == [("b", 2)])).left == {"a"}
            assert await directory.remove(NodeName("b"), Incarnation(2))
            async with aclosing(place.client().watch()) as snapshots:
                assert await anext(snapshots) == Snapshot(records=(), left=frozenset({NodeName("b")}))
            assert not await directory.remove(NodeName("a"), Incarnation(1))
            async with aclosing(place.client().watch()) as snapshots:
                assert (await anext(snapshots)).left == {"a", "b"}

        self.run(scene)

    def test_a_slow_watcher_ends_up_with_what_is_there(self) -> None:
        """More leave than the directory remembers while the watcher does not read; what left and came again is not
        reported as gone."""

        async def scene(place: Place) -> None:
            directory = place.client()
            for i in range(6):
                await directory.push(record(f"n{i}", incarnation=i + 1, endpoint=f"h:{i + 1}"), ttl_ms=LONG_MS)
            async with aclosing(place.client().watch()) as snapshots:
                assert len((await anext(snapshots)).records) == 6
                for i in range(5):
                    assert await directory.remove(NodeName(f"n{i}"), Incarnation(i + 1))
                await directory.push(record("n4", incarnation=40, endpoint="h:5"), ttl_ms=LONG_MS)
                wanted = [("n4", 40), ("n5", 6)]
                last = await until(snapshots, lambda snapshot: seen(snapshot) == wanted)
                assert "n4" not in last.left

        self.run(scene, DirectoryLimits(removals_kept_max=2))

    def test_a_goodbye_is_passed_on_although_the_directory_does_not_know_the_node(self) -> None:
        """The directory was restarted, and the node leaves before its next heartbeat: one that watches is told, and
        one that begins to watch now, too."""

        async def scene(place: Place) -> None:
            directory = place.client()
            stays = record("b", incarnation=2)
            await directory.push(stays, ttl_ms=LONG_MS)
            async with aclosing(place.client().watch()) as snapshots:
                await anext(snapshots)
                assert not await directory.remove(NodeName("a"), Incarnation(1))
                expected = Snapshot(records=(stays,), left=frozenset({NodeName("a")}))
                assert await anext(snapshots) == expected
            async with aclosing(place.client().watch()) as snapshots:
                assert await anext(snapshots) == expected

        self.run(scene)

    def test_a_record_of_a_later_version_does_not_hide_the_others(self) -> None:
        """A role that this version does not know: the directory keeps it, the client leaves that record out."""

        async def scene(place: Place) -> None:
            directory = place.client()
            known, newer = record("a", endpoint="h:1"), record_to_proto(record("b", incarnation=2, endpoint="h:2"))
            newer.role = 99  # type: ignore[assignment]
            await directory.push(known, ttl_ms=LONG_MS)
            await place.put(newer)
            assert (await directory.list()).records == (known,)
            error = await refused(directory.push(record("b", incarnation=3, endpoint="h:3"), ttl_ms=LONG_MS))
            assert error.reason is Reason.NAME_IN_USE
            async with aclosing(directory.watch()) as snapshots:
                assert (await anext(snapshots)).records == (known,)

        self.run(scene)

    def test_many_at_once_agree_on_one_holder(self) -> None:
        """Ten processes want one name at the same moment: one gets it, nine are told who."""

        async def scene(place: Place) -> None:
            wanted = [record("a", incarnation=i + 1, endpoint=f"h:{i + 1}") for i in range(10)]
            outcomes = await asyncio.gather(
                *(place.client().push(each, ttl_ms=LONG_MS) for each in wanted), return_exceptions=True
            )
            winners = [each for each, outcome in zip(wanted, outcomes, strict=True) if outcome is None]
            assert len(winners) == 1
            for outcome in outcomes:
                if outcome is not None:
                    assert isinstance(outcome, BatonError)
                    assert outcome.reason is Reason.NAME_IN_USE
                    assert outcome.metadata["endpoint"] == winners[0].endpoint
            assert (await place.client().list()).records == (winners[0],)

        self.run(scene)

    def test_a_restart_of_the_directory(self) -> None:
        """A watcher is told that the directory was lost, never that everybody left; calls fail while it is away, and
        afterwards the same client works with a directory that knows nobody."""

        async def scene(place: Place) -> None:
            directory, watching = place.client(), place.client()
            await directory.push(record(), ttl_ms=LONG_MS)
            async with aclosing(watching.watch()) as snapshots:
                assert seen(await anext(snapshots)) == [("decode-0", 1)]
                await place.stop()
                assert (await refused(anext(snapshots))).reason is Reason.PEER_UNREACHABLE
            error = await refused(directory.list())
            assert error.reason in (Reason.PEER_UNREACHABLE, Reason.DEADLINE)
            await place.start()
            assert await eventually(directory.list) == Snapshot(records=())
            await directory.push(record(sequence=2), ttl_ms=LONG_MS)
            async with aclosing(watching.watch()) as snapshots:
                assert seen(await anext(snapshots)) == [("decode-0", 1)]

        self.run(scene)

    def test_two_routers_outlive_the_directory(self) -> None:
        """Two routers watch a node. The directory is restarted, empty: nobody loses anybody for a moment. Then the node
        leaves, and both see it go."""

        async def scene(place: Place) -> None:
            names = ["node", "router-0", "router-1"]
            async with member(place, "router-0") as first, member(place, "router-1") as second:
                async with member(place, "node") as node:
                    members = (first, second, node)
                    for each in members:
                        await each.wait_until(lambda each=each: known(each) == names)  # type: ignore[misc]
                    views: list[list[str]] = []
                    noting = [asyncio.create_task(note_views(each, views)) for each in members]
                    await place.stop()
                    for each in members:
                        await each.wait_until(lambda each=each: each.stale)  # type: ignore[misc]
                    await place.start()
                    for each in members:
                        await each.wait_until(lambda each=each: not each.stale)  # type: ignore[misc]
                    for task in noting:
                        task.cancel()
                    assert views
                    assert all(view == names for view in views)
                for each in (first, second):
                    await each.wait_until(lambda each=each: known(each) == names[1:])  # type: ignore[misc]

        self.run(scene)


async def eventually(call: Callable[[], Awaitable[Snapshot]]) -> Snapshot:
    """The answer, once there is one: a client may still be backing off. The scene's time limit ends it."""
    while True:
        try:
            return await call()
        except BatonError as error:
            if error.reason not in (Reason.PEER_UNREACHABLE, Reason.DEADLINE):
                raise


@asynccontextmanager
async def member(place: Place, name: str) -> AsyncIterator[WatchedMembership]:
    number = 1 + sum(name.encode())
    own = replace(record(name, incarnation=number, endpoint=f"h:{number}"), role=Role.ROUTER)
    membership = WatchedMembership(
        directory=place.client(),
        own_record=lambda: own,
        clock=Clock(),
        rng=random.Random(number),
        config=MembershipConfig(heartbeat_ms=50, ttl_ms=20_000),
    )
    try:
        await membership.start()
        yield membership
    finally:
        await membership.stop()


def known(membership: WatchedMembership) -> list[str]:
    return [each.name for each in membership.nodes()]


async def note_views(membership: WatchedMembership, views: list[list[str]]) -> None:
    def note() -> bool:
        views.append(known(membership))
        return False

    await membership.wait_until(note)
