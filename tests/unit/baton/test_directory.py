"""Who is in the cluster: the directory's rules for names and times, and its watchers. Pure, then over gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest
from batonpb import common_pb2, directory_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import Clock
from baton.directory import DirectoryLimits, DirectoryState, PushOutcome
from baton.directory_client import EmbeddedDirectory
from baton.directory_service import DirectoryConfig, DirectoryService
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer
from baton.wire import (
    BlockLoad,
    ModelInfo,
    NodeLoad,
    NodeRecord,
    Role,
    check_header,
    record_from_proto,
    record_to_proto,
)

HANG_S = 20.0
TTL_MS = 3000


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


def push(state: DirectoryState, pushed: NodeRecord, now_s: float, ttl_ms: int = TTL_MS) -> PushOutcome:
    return state.push(record_to_proto(pushed), ttl_ms=ttl_ms, now_s=now_s)


def names(state: DirectoryState, now_s: float) -> list[tuple[str, int]]:
    return [(each.name, each.incarnation) for each in state.list(now_s=now_s)]


def refused(state: DirectoryState, pushed: NodeRecord, now_s: float, ttl_ms: int = TTL_MS) -> BatonError:
    with pytest.raises(BatonError) as caught:
        push(state, pushed, now_s, ttl_ms)
    return caught.value


def test_a_record_lives_as_long_as_it_is_renewed() -> None:
    """Pushed, renewed in time, then no more: gone at the end of its time, and welcome when it comes back."""
    state = DirectoryState(limits=DirectoryLimits())
    assert push(state, record(sequence=1), 0.0) is PushOutcome.ADDED
    assert push(state, record(sequence=2), 2.0) is PushOutcome.RENEWED
    assert names(state, 4.999) == [("decode-0", 1)]
    assert names(state, 5.0) == []
    assert push(state, record(sequence=3), 9.0) is PushOutcome.ADDED


def test_two_living_nodes_of_one_name() -> None:
    """The second one is refused, is told who holds the name and for how long, and gets it when the time has run out."""
    state = DirectoryState(limits=DirectoryLimits())
    push(state, record(incarnation=1), 0.0)
    other = record(incarnation=2, endpoint="127.0.0.1:7002")
    error = refused(state, other, 1.0)
    assert (error.reason, error.retry_after_ms) == (Reason.NAME_IN_USE, 2000)
    assert "held by the node at 127.0.0.1:7001" in error.message
    assert "another 2000 ms" in error.message
    assert names(state, 1.0) == [("decode-0", 1)]
    assert push(state, other, 3.0) is PushOutcome.ADDED
    # The first one was only stopped, and wakes up: now it is the second.
    assert refused(state, record(incarnation=1, sequence=9), 3.1).reason is Reason.NAME_IN_USE


def test_a_restart_at_the_same_endpoint_takes_over_at_once() -> None:
    """A port cannot be held by two living processes. A late push of the dead one does not get the name back."""
    state = DirectoryState(limits=DirectoryLimits())
    push(state, record(incarnation=1), 0.0)
    assert push(state, record(incarnation=2), 0.1) is PushOutcome.REPLACED
    assert refused(state, record(incarnation=1, sequence=2), 0.2).reason is Reason.INCARNATION_MISMATCH
    assert names(state, 0.2) == [("decode-0", 2)]


def test_what_arrives_late_is_ignored() -> None:
    """A push that was overtaken by a later one neither changes the record nor lengthens its life."""
    state = DirectoryState(limits=DirectoryLimits())
    push(state, record(sequence=5, free=50), 0.0)
    for sequence in (4, 5):
        assert push(state, record(sequence=sequence, free=40), 1.0) is PushOutcome.STALE
    assert [each.load.blocks.free for each in state.list(now_s=2.999)] == [50]
    assert names(state, 3.0) == []


def test_a_removal_counts_for_its_incarnation_only() -> None:
    """Another incarnation cannot remove the record; its own can, and a push that the removal overtook stays out, for
    as long as such a push could come."""
    state = DirectoryState(limits=DirectoryLimits(ttl_ms_max=5000))
    push(state, record(incarnation=1), 0.0)
    assert not state.remove(name="decode-0", incarnation=2, now_s=0.0)
    assert state.remove(name="decode-0", incarnation=1, now_s=0.0)
    assert names(state, 0.0) == []
    assert refused(state, record(incarnation=1, sequence=2), 4.9).reason is Reason.INCARNATION_MISMATCH
    assert push(state, record(incarnation=1, sequence=2), 5.0) is PushOutcome.ADDED


def test_the_number_of_records_is_bounded() -> None:
    """The third name of two is refused; renewing the others still works."""
    state = DirectoryState(limits=DirectoryLimits(records_max=2))
    for i in range(2):
        push(state, record(f"n{i}", incarnation=i + 1, endpoint=f"h:{i + 1}"), 0.0)
    assert refused(state, record("n2", incarnation=9, endpoint="h:9"), 0.0).reason is Reason.DIRECTORY_FULL
    assert push(state, record("n0", incarnation=1, endpoint="h:1", sequence=2), 1.0) is PushOutcome.RENEWED


@pytest.mark.parametrize(
    ("changes", "ttl_ms", "reason", "field"),
    [
        ({"name": "-x"}, TTL_MS, Reason.BAD_NAME, "name"),
        ({"name": "a" * 64}, TTL_MS, Reason.BAD_NAME, "name"),
        ({"endpoint": "0.0.0.0:7000"}, TTL_MS, Reason.BAD_ENDPOINT, "endpoint"),
        ({"endpoint": "decode-0"}, TTL_MS, Reason.BAD_ENDPOINT, "endpoint"),
        ({"incarnation": 0}, TTL_MS, Reason.BAD_FIELD, "incarnation"),
        ({}, 199, Reason.BAD_FIELD, "ttl_ms"),
        ({}, 60_001, Reason.BAD_FIELD, "ttl_ms"),
    ],
)
def test_a_record_that_nobody_could_use_is_refused(
    changes: dict[str, object], ttl_ms: int, reason: Reason, field: str
) -> None:
    """Wrong name, unreachable endpoint, no incarnation, a time out of range: the field is named, nothing is stored."""
    state = DirectoryState(limits=DirectoryLimits())
    error = refused(state, replace(record(), **changes), 0.0, ttl_ms)  # type: ignore[arg-type]
    assert (error.reason, error.field) == (reason, field)
    assert names(state, 0.0) == []


def test_a_renewal_without_news_wakes_no_watcher() -> None:
    """Only the sequence differs: the version stays. A changed load raises it."""
    state = DirectoryState(limits=DirectoryLimits())
    push(state, record(sequence=1, free=1), 0.0)
    version = state.version
    push(state, record(sequence=2, free=1), 0.1)
    assert state.version == version
    push(state, record(sequence=3, free=2), 0.2)
    changes = state.changes_since(version, now_s=0.2)
    assert not changes.snapshot
    assert [each.load.blocks.free for each in changes.upserts] == [2]


def test_a_watcher_that_missed_too_much_gets_a_snapshot() -> None:
    """Two removals are remembered, three happened: what is left comes as a snapshot. One that is less far behind gets
    the differences."""
    state = DirectoryState(limits=DirectoryLimits(removals_kept_max=2))
    for i in range(4):
        push(state, record(f"n{i}", incarnation=i + 1, endpoint=f"h:{i + 1}"), 0.0)
    start = state.version
    state.remove(name="n0", incarnation=1, now_s=0.0)
    after_one = state.version
    for i in (1, 2):
        state.remove(name=f"n{i}", incarnation=i + 1, now_s=0.0)
    behind = state.changes_since(start, now_s=0.0)
    assert behind.snapshot
    assert [each.name for each in behind.upserts] == ["n3"]
    near = state.changes_since(after_one, now_s=0.0)
    assert not near.snapshot
    assert [removal.name for removal in near.removals] == ["n1", "n2"]


def test_a_goodbye_is_passed_on_although_the_directory_does_not_know_the_node() -> None:
    """The directory was restarted, and the node leaves before its next heartbeat: those who watch know it from before,
    those who begin to watch now may too. The name of somebody else's node is no goodbye."""
    state = DirectoryState(limits=DirectoryLimits())
    push(state, record("b", incarnation=2), 0.0)
    version = state.version
    assert not state.remove(name="a", incarnation=1, now_s=0.0)
    assert not state.remove(name="b", incarnation=3, now_s=0.0)
    for since, snapshot in ((version, False), (None, True)):
        changes = state.changes_since(since, now_s=0.0)
        assert (changes.snapshot, [removal.name for removal in changes.removals]) == (snapshot, ["a"])


STEP = st.tuples(
    st.sampled_from(["push", "remove", "wait", "read"]),
    st.integers(0, 3),  # name
    st.integers(1, 3),  # incarnation
    st.integers(1, 6),  # sequence, free blocks
    st.integers(0, 1500),  # milliseconds, watcher
)


@settings(deadline=None)
@given(steps=st.lists(STEP, max_size=60), removals_kept_max=st.integers(1, 4))
def test_every_watcher_ends_up_with_what_is_there(
    steps: list[tuple[str, int, int, int, int]], removals_kept_max: int
) -> None:
    """Three watchers read at odd times while records come, change and go; after a last read each has the list."""
    state = DirectoryState(limits=DirectoryLimits(removals_kept_max=removals_kept_max, records_max=3))
    versions: list[int | None] = [None] * 3
    views: list[dict[str, bytes]] = [{} for _ in range(3)]
    now_s = 0.0

    def read(watcher: int) -> None:
        changes = state.changes_since(versions[watcher], now_s=now_s)
        versions[watcher] = state.version
        if changes.snapshot:
            views[watcher].clear()
        for removal in changes.removals:
            views[watcher].pop(removal.name, None)
        for each in changes.upserts:
            views[watcher][each.name] = without_sequence(each)

    for action, name, incarnation, number, amount in steps:
        pushed = record(
            f"n{name}", incarnation=10 * name + incarnation, endpoint=f"h:{incarnation // 2 + 1}", sequence=number,
            free=number,
        )  # fmt: skip
        if action == "push":
            try:
                push(state, pushed, now_s, ttl_ms=1000)
            except BatonError as error:
                if error.reason not in (Reason.NAME_IN_USE, Reason.INCARNATION_MISMATCH, Reason.DIRECTORY_FULL):
                    raise
        elif action == "remove":
            state.remove(name=pushed.name, incarnation=pushed.incarnation, now_s=now_s)
        elif action == "wait":
            now_s += amount / 1e3
        else:
            read(amount % 3)
    for watcher in range(3):
        read(watcher)
        assert views[watcher] == {each.name: without_sequence(each) for each in state.list(now_s=now_s)}


def without_sequence(message: directory_pb2.NodeRecord) -> bytes:
    copy = directory_pb2.NodeRecord()
    copy.CopyFrom(message)
    copy.sequence = 0
    return copy.SerializeToString(deterministic=True)


def test_a_record_survives_the_wire() -> None:
    """Every field set to something of its own."""
    full = replace(
        record(sequence=2**60, incarnation=2**64 - 1),
        model=ModelInfo(
            name="m",
            fingerprint="f",
            vocab_size=1,
            context_len_max=2,
            eos_token_ids=(3, 4),
            layout_hash="h",
            block_size=5,
            protocol_min=6,
            protocol_max=7,
            layer_groups=8,
        ),
        load=NodeLoad(
            waiting_requests=1,
            running_requests=2,
            waiting_tokens=3,
            blocks=BlockLoad(quarantined=4, writer_owned=5, held=6, cached=7, free=8, promised=9),
            prefill_tokens_per_s=0.5,
            swapped_out_requests=10,
            host_blocks_filled=11,
            host_blocks_free=12,
        ),
        transports=("shm", "tcp"),
    )
    assert record_from_proto(record_to_proto(full)) == full
    assert record_from_proto(record_to_proto(record())) == record()
    assert full.model is not None
    older = record_to_proto(full)
    older.model.layer_groups = 0  # from a node that does not know groups
    assert record_from_proto(older) == replace(full, model=replace(full.model, layer_groups=1))


def test_a_message_for_another_incarnation_is_refused() -> None:
    """The sender is returned where the receiver fits; a mismatch, an open receiver and no sender are refused."""
    own, peer = Incarnation(7), Incarnation(8)
    assert check_header(common_pb2.Header(sender=peer, receiver=own), own=own) == peer
    for header, reason in (
        (common_pb2.Header(sender=peer, receiver=9), Reason.INCARNATION_MISMATCH),
        (common_pb2.Header(sender=peer), Reason.INCARNATION_MISMATCH),
        (common_pb2.Header(receiver=own), Reason.BAD_FIELD),
    ):
        with pytest.raises(BatonError) as caught:
            check_header(header, own=own)
        assert caught.value.reason is reason


class Cluster:
    """An embedded directory on the loopback and clients of it."""

    def __init__(self, service: DirectoryService, server: RpcServer, client: EmbeddedDirectory) -> None:
        self.service, self.server, self.client = service, server, client


@asynccontextmanager
async def directory(config: DirectoryConfig | None = None) -> AsyncIterator[Cluster]:
    service = DirectoryService(config=config or DirectoryConfig(), clock=Clock())
    server = RpcServer(limits=RpcLimits(), rng=random.Random(1))
    channels = Channels(limits=ChannelLimits())
    service.start(server)
    try:
        port = await server.start("127.0.0.1:0")
        client = EmbeddedDirectory(f"127.0.0.1:{port}", channels=channels, call_ms_max=10_000)
        yield Cluster(service, server, client)
    finally:
        await channels.close()
        await service.close()
        await server.stop(0)


def run(scene: Awaitable[None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S):
            await scene

    asyncio.run(limited())


def test_closing_the_directory_ends_its_watches() -> None:
    """A watcher waits for news when the directory is closed: it is told, and the server stops with nothing left."""

    async def scene() -> None:
        async with directory() as cluster, aclosing(cluster.client.watch()) as snapshots:
            assert (await anext(snapshots)).records == ()
            await cluster.service.close()
            with pytest.raises(BatonError) as caught:
                await anext(snapshots)
            assert caught.value.reason is Reason.PEER_UNREACHABLE
            await cluster.server.stop(HANG_S)

    run(scene())


def test_the_number_of_watchers_is_bounded() -> None:
    """The second of one is refused; when the first has left, there is room."""

    async def scene() -> None:
        async with directory(DirectoryConfig(watchers_max=1)) as cluster:
            async with aclosing(cluster.client.watch()) as first:
                await anext(first)
                with pytest.raises(BatonError) as caught:
                    await anext(cluster.client.watch())
                assert caught.value.reason is Reason.TOO_MANY_CALLS
            while True:
                try:
                    async with aclosing(cluster.client.watch()) as second:
                        await anext(second)
                        break
                except BatonError as error:  # the first one's leaving is still on its way
                    if error.reason is not Reason.TOO_MANY_CALLS:
                        raise

    run(scene())
