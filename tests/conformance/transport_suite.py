"""What every transport must do: one coroutine for each situation; test_transport_conformance runs them all."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import PairBeingFenced, ReceiverPort, Seal, WriteOps, WriteOutOfBounds, WriterLink
from tests.conformance.transport_kits import (
    AnyRegion,
    ConnectErrors,
    Everything,
    Kit,
    endpoint_from_json,
    endpoint_to_json,
)
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Child, Recorder, child, grant_of, ops_of, pair_of
from tests.support.shm_peer import source_bytes

RECORD_NBYTES = 4096
RECORDS = REGION_NBYTES // RECORD_NBYTES
EPOCH = Epoch(3)
GRANT, OTHER_GRANT = grant_of(7), grant_of(8)
PAIR, OTHER_PAIR = pair_of(2), pair_of(3)


class Receiving:
    """A region with one port on it, in this process. GRANT and OTHER_GRANT of both pairs may write anywhere."""

    def __init__(self, kit: Kit, events: Recorder) -> None:
        self.kit = kit
        self.events = events
        self.region = kit.region(REGION_NBYTES)
        self.port: ReceiverPort = kit.port(self.region, events)

    def expect(self, pair: Pair = PAIR, epoch: Epoch = EPOCH, grant: GrantId = GRANT) -> dict[str, Any]:
        self.port.allow(pair, epoch, grant, Everything())
        return endpoint_to_json(self.port.expect(pair, epoch))


@asynccontextmanager
async def receiving(kit: Kit, events: Recorder | None = None) -> AsyncIterator[Receiving]:
    it = Receiving(kit, events or Recorder())
    try:
        yield it
    finally:
        await it.port.close()
        it.region.close()


def writing() -> Any:
    return child("transport_peer.py")


async def link(writer: Child, kit: Kit, endpoint: dict[str, Any], pair: Pair = PAIR, seed: int = 0) -> Any:
    return await writer.ask(
        "link",
        kit=kit.name,
        name="a",
        endpoint=endpoint,
        pair=[pair.receiver, pair.writer],
        seed=seed,
        nbytes=REGION_NBYTES,
    )


async def receive(peer: Child, kit: Kit, grants: int = 1) -> Any:
    """Let a child receive: GRANT, or the first so many of `grant_of`, may write anywhere. -> the endpoint, as JSON."""
    of = [GRANT] if grants == 1 else [grant_of(i) for i in range(grants)]
    return await peer.ask(
        "receive",
        kit=kit.name,
        nbytes=REGION_NBYTES,
        pair=[PAIR.receiver, PAIR.writer],
        epoch=EPOCH,
        grants=[grant.hex() for grant in of],
    )


@asynccontextmanager
async def linked(r: Receiving, source_U8: np.ndarray) -> AsyncIterator[tuple[WriterLink, Recorder]]:
    """A link within this process."""
    events = Recorder()
    it = await r.kit.link(endpoint_from_json(r.expect()), PAIR, source_U8, events)
    r.port.allow(PAIR, EPOCH, OTHER_GRANT, Everything())
    try:
        yield it, events
    finally:
        await it.close()


def record_ops(seed: int, count: int = RECORDS // 2) -> WriteOps:
    """Records from random places to random other places, none written twice."""
    rng = np.random.default_rng(seed)
    src = rng.permutation(RECORDS)[:count].astype(np.int64) * RECORD_NBYTES
    dst = rng.permutation(RECORDS)[:count].astype(np.int64) * RECORD_NBYTES
    return WriteOps(src=src, dst=dst, nbytes=np.full(count, RECORD_NBYTES, np.int64))


def expected_region(source_U8: np.ndarray, *batches: WriteOps) -> np.ndarray:
    region_U8 = np.zeros(REGION_NBYTES, np.uint8)
    for ops in batches:
        for src, dst, nbytes in zip(ops.src, ops.dst, ops.nbytes, strict=True):
            region_U8[dst : dst + nbytes] = source_U8[src : src + nbytes]
    return region_U8


class Snapshots(Recorder):
    """Copies the region in the moment in which a seal, or the end of a writer, is reported."""

    region: AnyRegion

    def __init__(self) -> None:
        super().__init__()
        self.at_seal: list[np.ndarray] = []
        self.at_gone: list[np.ndarray] = []

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self.at_seal.append(self.region.array_U8.copy())
        super().seal_landed(pair, seal)

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        self.at_gone.append(self.region.array_U8.copy())
        super().writer_gone(pair, epoch, evidence)


async def records_have_landed_when_the_seal_arrives(kit: Kit) -> None:
    """Whole records, part records, neighbours, nothing, and everything at once: at the seal all of it is there."""
    equal = record_ops(1, 100)
    free = sorted(set(range(RECORDS)) - set((equal.dst // RECORD_NBYTES).tolist()))
    odd = ops_of([5, 1_000, 0], [free[0] * RECORD_NBYTES + 1, free[1] * RECORD_NBYTES, 0], [7, RECORD_NBYTES - 1, 0])
    run_src, run_dst = [0, 512, 1024], [free[2] * RECORD_NBYTES + 512 * i for i in range(3)]
    neighbours = ops_of(run_src, run_dst, [512, 512, 512])
    events = Snapshots()
    async with receiving(kit, events) as r, writing() as writer:
        events.region = r.region
        assert await link(writer, kit, r.expect(), seed=5) == "linked"
        for ops in (equal, odd, neighbours, ops_of([], [], [])):
            await writer.post("a", GRANT, ops)
        done = [await writer.event("completed") for _ in range(4)]
        assert sorted((e["writes"], e["bytes"], e["copied"]) for e in done) == [
            (0, 0, True),
            (3, 1536, True),
            (3, RECORD_NBYTES + 6, True),
            (100, 100 * RECORD_NBYTES, True),
        ]
        await writer.ask("seal", name="a", grant=GRANT.hex(), epoch=EPOCH, writes=106, bytes_written=11)
        await events.until(lambda e: len(e.seals) == 1)
        assert events.seals == [(PAIR, Seal(grant=GRANT, epoch=EPOCH, writes=106, bytes_written=11))]
        wanted = expected_region(source_bytes(5, REGION_NBYTES), equal, odd, neighbours)
        assert np.array_equal(events.at_seal[0], wanted)
        await writer.post("a", GRANT, ops_of([0], [0], [REGION_NBYTES]))
        assert (await writer.event("completed"))["copied"] is True
        assert np.array_equal(r.region.array_U8, source_bytes(5, REGION_NBYTES))
        await writer.ask("close", name="a")
        assert events.gone == []


async def a_killed_writer_is_gone_and_writes_no_more(kit: Kit) -> None:
    """SIGKILL with much of the data on its way: the death is reported unasked, and from then on no byte changes."""
    events = Snapshots()
    async with receiving(kit, events) as r, writing() as writer:
        events.region = r.region
        await link(writer, kit, r.expect())
        await writer.post("a", GRANT, record_ops(1), times=2_000)
        await writer.event("completed")
        writer.signal(signal.SIGKILL)
        await events.until(lambda e: bool(e.gone))
        writer.process.wait()
        assert events.gone_epochs == [(PAIR, EPOCH)]
        assert events.at_gone[0].any()
        assert np.array_equal(r.region.array_U8, events.at_gone[0])
        # Asked again, the port answers again.
        r.port.fence(PAIR, EPOCH)
        await events.until(lambda e: len(e.gone) == 2)
        assert events.gone[1] == (PAIR, EPOCH, "no connection that could write")


async def a_stopped_writer_is_fenced_as_its_transport_can(kit: Kit) -> None:
    """SIGSTOP in mid-batch, then a fence. Where the receiver takes part in the writes it ends at once, elsewhere only
    when the writer runs again; either way no byte changes after it, and a running writer's fence is not held up."""
    events = Snapshots()
    async with receiving(kit, events) as r, writing() as stopped, writing() as other:
        events.region = r.region
        await link(stopped, kit, r.expect())
        await link(other, kit, r.expect(OTHER_PAIR), OTHER_PAIR)
        await stopped.post("a", GRANT, record_ops(1), times=2_000)
        await stopped.event("completed")
        stopped.stop()
        r.port.fence(PAIR, EPOCH)
        with pytest.raises(PairBeingFenced):
            r.port.expect(PAIR, EPOCH)
        r.port.fence(OTHER_PAIR, EPOCH)
        count = 2 if kit.fences_without_the_writer else 1
        await events.until(lambda e: len(e.gone) == count)
        assert ((PAIR, EPOCH) in events.gone_epochs) == kit.fences_without_the_writer
        stopped.signal(signal.SIGCONT)
        await events.until(lambda e: len(e.gone) == 2)
        assert set(events.gone_epochs) == {(PAIR, EPOCH), (OTHER_PAIR, EPOCH)}
        at_evidence = events.at_gone[events.gone_epochs.index((PAIR, EPOCH))]
        assert (await stopped.event("lost"))["reason"] == f"fenced by the receiver up to epoch {EPOCH}"
        assert await stopped.ask("fenced", name="a") is True
        assert np.array_equal(r.region.array_U8, at_evidence)


async def a_stopped_writer_does_not_hold_up_another(kit: Kit) -> None:
    """While one writer stands still in mid-batch, in its half of the region, the other's records land in the other half
    and its seal arrives."""
    half = RECORDS // 2
    src = (np.random.default_rng(1).permutation(half) * RECORD_NBYTES).tolist()
    lower, upper = ([(first + i) * RECORD_NBYTES for i in range(half)] for first in (0, half))
    async with receiving(kit) as r, writing() as stopped, writing() as other:
        await link(stopped, kit, r.expect())
        await link(other, kit, r.expect(OTHER_PAIR, grant=OTHER_GRANT), OTHER_PAIR, seed=9)
        await stopped.post("a", GRANT, ops_of(src, upper, [RECORD_NBYTES] * half), times=2_000)
        await stopped.event("completed")
        stopped.stop()
        ops = ops_of(src, lower, [RECORD_NBYTES] * half)
        await other.post("a", OTHER_GRANT, ops)
        assert (await other.event("completed"))["copied"] is True
        await other.ask("seal", name="a", grant=OTHER_GRANT.hex(), epoch=EPOCH, writes=1, bytes_written=1)
        await r.events.until(lambda e: bool(e.seals))
        assert r.events.seals[0][0] == OTHER_PAIR
        wanted = expected_region(source_bytes(9, REGION_NBYTES), ops)[: half * RECORD_NBYTES]
        assert np.array_equal(r.region.array_U8[: half * RECORD_NBYTES], wanted)


async def after_a_fence_only_the_next_epoch_connects(kit: Kit) -> None:
    """The fenced link is lost; its endpoint is refused from then on; a new epoch links the same pair again."""
    async with receiving(kit) as r, writing() as writer:
        old = r.expect()
        assert r.expect() == old, "expect is idempotent"
        await link(writer, kit, old)
        r.port.fence(PAIR, EPOCH)
        assert await link(writer, kit, old) == "NOT_EXPECTED"
        await r.events.until(lambda e: bool(e.gone))
        new = r.expect(epoch=Epoch(EPOCH + 1))
        assert new["secret"] != old["secret"]
        assert await link(writer, kit, old) == "EPOCH"
        assert await link(writer, kit, {**new, "secret": old["secret"]}) == "SECRET"
        assert await link(writer, kit, new, OTHER_PAIR) == "NOT_EXPECTED"
        assert await link(writer, kit, new, seed=4) == "linked"
        await writer.post("a", GRANT, record_ops(2))
        assert (await writer.event("completed"))["copied"] is True
        assert np.array_equal(r.region.array_U8, expected_region(source_bytes(4, REGION_NBYTES), record_ops(2)))
        assert r.events.gone_epochs == [(PAIR, EPOCH)]
        assert r.port.describe()["refused"] == {"NOT_EXPECTED": 2, "EPOCH": 1, "SECRET": 1}


async def a_killed_receiver_loses_the_link_and_every_batch_completes(kit: Kit) -> None:
    """The receiver dies amid a long queue: each batch completes exactly once, then the link is lost, once."""
    source_U8, events = source_bytes(1, REGION_NBYTES), Recorder()
    async with writing() as peer:
        reported = await receive(peer, kit, grants=40)
        it = await kit.link(endpoint_from_json(reported), PAIR, source_U8, events)
        for i in range(40):
            it.post(grant_of(i), record_ops(1))
        await events.until(lambda e: bool(e.completed))
        peer.signal(signal.SIGKILL)
        await events.until(lambda e: bool(e.lost))
        counts = Counter(grant for grant, *_ in events.completed)
        assert counts == Counter(grant_of(i) for i in range(40))
        assert {(w, b) for _, w, b, _ in events.completed} == {(RECORDS // 2, RECORDS // 2 * RECORD_NBYTES)}
        assert it.fenced is False
        it.post(GRANT, record_ops(1, 20))
        await events.until(lambda e: len(e.completed) == 41)
        assert events.completed[40] == (GRANT, 20, 20 * RECORD_NBYTES, False)
        it.post(GRANT, record_ops(1, 5))
        await it.close()
        assert events.completed[41] == (GRANT, 5, 5 * RECORD_NBYTES, False)
        assert len(events.lost) == 1
        with pytest.raises(ConnectErrors):
            await kit.link(endpoint_from_json(reported), PAIR, source_U8, events)


async def a_stopped_receiver_hangs_neither_abandon_nor_close(kit: Kit) -> None:
    """The receiver stands still with far more posted than any socket buffer holds: abandoned batches complete, and
    close returns."""
    source_U8, events = source_bytes(1, REGION_NBYTES), Recorder()
    async with writing() as peer:
        reported = await receive(peer, kit)
        it = await kit.link(endpoint_from_json(reported), PAIR, source_U8, events)
        peer.stop()
        for _ in range(100):
            it.post(GRANT, ops_of([0], [0], [REGION_NBYTES]))
        it.abandon(GRANT)
        await events.until(lambda e: len(e.completed) == 100)
        it.post(GRANT, record_ops(1, 3))
        async with asyncio.timeout(DEADLINE_S):
            await it.close()
        assert events.completed[100] == (GRANT, 3, 3 * RECORD_NBYTES, False)
        assert len(events.completed) == 101


async def an_abandoned_grant_completes_and_others_go_on(kit: Kit) -> None:
    """Of a long queue of one grant the rest is left out, and what is posted to it afterwards; none completes twice, and
    another grant's records land whole."""
    source_U8 = source_bytes(6, REGION_NBYTES)
    async with receiving(kit) as r, linked(r, source_U8) as (it, events):
        for _ in range(1_000):
            it.post(GRANT, record_ops(1))
        it.abandon(GRANT)
        it.post(GRANT, record_ops(1, 3))  # the transport may have been faster than the posts before
        await events.until(lambda e: len(e.completed) == 1_001)
        assert (GRANT, 3, 3 * RECORD_NBYTES, False) in events.completed
        it.forget(GRANT)
        it.post(OTHER_GRANT, ops_of([0], [0], [REGION_NBYTES]))
        await events.until(lambda e: len(e.completed) == 1_002)
        assert events.completed[1_001] == (OTHER_GRANT, 1, REGION_NBYTES, True)
        assert np.array_equal(r.region.array_U8, source_U8)
        assert not events.lost


async def writes_outside_a_region_are_not_taken(kit: Kit) -> None:
    """Out of the source, out of the destination, negative: an error at once, no completion, and the link lives."""
    source_U8 = source_bytes(6, REGION_NBYTES)
    async with receiving(kit) as r, linked(r, source_U8) as (it, events):
        for src, dst, nbytes in [(REGION_NBYTES, 0, 1), (0, REGION_NBYTES - 1, 2), (-1, 0, 1), (0, 0, -1)]:
            with pytest.raises(WriteOutOfBounds):
                it.post(GRANT, ops_of([src], [dst], [nbytes]))
        it.post(GRANT, ops_of([9], [0], [1]))
        await events.until(lambda e: bool(e.completed))
        assert events.completed == [(GRANT, 1, 1, True)]
        assert r.region.array_U8[0] == source_U8[9]


async def an_orderly_close_is_no_reason_for_a_fence(kit: Kit) -> None:
    """A closed link is no death: nothing is reported, the same epoch connects again, and a fence is answered."""
    source_U8 = source_bytes(6, REGION_NBYTES)
    async with receiving(kit) as r:
        async with linked(r, source_U8) as (it, events):
            it.post(GRANT, record_ops(1))
            await events.until(lambda e: bool(e.completed))
        assert events.lost == []
        async with linked(r, source_U8) as (it, events):
            it.post(GRANT, record_ops(1))
            await events.until(lambda e: bool(e.completed))
            assert events.completed[0][3] is True
            assert r.events.gone == []
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            await events.until(lambda e: bool(e.lost))
            assert it.fenced is True
        assert r.events.gone_epochs == [(PAIR, EPOCH)]


async def a_closed_port_lets_go_of_everything(kit: Kit) -> None:
    """The port closes under two links in mid-batch: the region can be closed, the links are lost, all completes."""
    source_U8, events = source_bytes(6, REGION_NBYTES), Recorder()
    async with receiving(kit) as r:
        it = await kit.link(endpoint_from_json(r.expect()), PAIR, source_U8, events)
        for _ in range(50):
            it.post(GRANT, record_ops(1))
        await r.port.close()
        await events.until(lambda e: bool(e.lost))
        assert len(events.completed) == 50
        await it.close()


CASES = (
    records_have_landed_when_the_seal_arrives,
    a_killed_writer_is_gone_and_writes_no_more,
    a_stopped_writer_is_fenced_as_its_transport_can,
    a_stopped_writer_does_not_hold_up_another,
    after_a_fence_only_the_next_epoch_connects,
    a_killed_receiver_loses_the_link_and_every_batch_completes,
    a_stopped_receiver_hangs_neither_abandon_nor_close,
    an_abandoned_grant_completes_and_others_go_on,
    writes_outside_a_region_are_not_taken,
    an_orderly_close_is_no_reason_for_a_fence,
    a_closed_port_lets_go_of_everything,
)
