"""More of what every transport must do: layouts and head ranges, many peers, back-pressure, restarts, late writes."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace

import numpy as np
import pytest

from baton.ids import Epoch
from cachestore.layout import Component, LayerGroup, Layout, kv_layout
from kvtransfer.transport import RecordPlan, Seal, TransportName, WriteOps, WriteRanges
from tests.conformance.transport_kits import ConnectErrors, Kit, endpoint_from_json
from tests.conformance.transport_suite import (
    EPOCH,
    GRANT,
    OTHER_GRANT,
    OTHER_PAIR,
    PAIR,
    RECORD_NBYTES,
    RECORDS,
    Snapshots,
    expected_region,
    link,
    linked,
    receive,
    receiving,
    record_ops,
    writing,
)
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, ops_of, pair_of
from tests.support.shm_peer import source_bytes
from tests.support.write_ops import HeadRange, head_ranges


def records(region_U8: np.ndarray, layout: Layout, num_blocks: int) -> np.ndarray:
    """[layer, block, K|V, head, bytes of the head]."""
    heads = layout.groups[0].components[0].num_heads
    shape = (layout.num_layers, num_blocks, 2, heads, -1)
    return region_U8[: layout.region_bytes(num_blocks)].reshape(shape)


async def head_ranges_land_in_records_of_another_width(kit: Kit) -> None:
    """Random layouts, blocks and head ranges: a writer of four or eight heads fills some heads of a receiver of two or
    sixteen, and no byte beside them changes."""
    rng = np.random.default_rng(11)
    source_U8 = source_bytes(3, REGION_NBYTES)
    async with receiving(kit) as r, linked(r, source_U8) as (it, events):
        for done in range(1, 13):
            sizes = {"head_dim": int(rng.choice([8, 24])), "block_size": int(rng.choice([4, 16]))}
            src_heads, dst_heads = int(rng.choice([4, 8])), int(rng.choice([2, 16]))
            layers = int(rng.integers(1, 4))
            src, dst = (
                kv_layout(num_layers=layers, num_kv_heads=heads, dtype="float16", dtype_bytes=2, **sizes)
                for heads in (src_heads, dst_heads)
            )
            src_blocks, dst_blocks = 16, 12
            count = int(rng.integers(1, 3))
            from_heads = HeadRange(first=int(rng.integers(0, src_heads - count + 1)), count=count)
            to_heads = HeadRange(first=int(rng.integers(0, dst_heads - count + 1)), count=count)
            src_B, dst_B = rng.permutation(src_blocks)[:7], rng.permutation(dst_blocks)[:7]
            before_U8 = r.region.array_U8.copy()
            parts = [
                head_ranges(
                    src,
                    dst,
                    layer,
                    src_B,
                    dst_B,
                    src_num_blocks=src_blocks,
                    dst_num_blocks=dst_blocks,
                    src_heads=from_heads,
                    dst_heads=to_heads,
                )
                for layer in range(layers)
            ]
            src_W, dst_W, nbytes_W = (np.concatenate([getattr(p, n) for p in parts]) for n in ("src", "dst", "nbytes"))
            it.post(GRANT, WriteOps(src=src_W, dst=dst_W, nbytes=nbytes_W))
            await events.until(lambda e, done=done: len(e.completed) == done)  # type: ignore[misc]
            wanted = records(before_U8, dst, dst_blocks)
            taken = records(source_U8, src, src_blocks)[:, src_B][:, :, :, from_heads.first :][:, :, :, :count]
            wanted[:, dst_B, :, to_heads.first : to_heads.first + count] = taken
            assert np.array_equal(r.region.array_U8, before_U8), (src, dst)


async def records_of_two_layer_groups_land_in_their_blocks(kit: Kit) -> None:
    """Layers 0, 2 and 3 have records of K and V, layers 1 and 4 shorter ones in blocks of their own, between pages
    that no record fills: every layer of seven positions is written, and no byte beside its records."""
    k, v, latent = (Component(name=name, num_heads=2, slot_bytes=48) for name in ("k", "v", "latent"))
    layout = Layout(
        groups=(LayerGroup(layers=(0, 2, 3), components=(k, v)), LayerGroup(layers=(1, 4), components=(latent,))),
        block_size=16,
        dtype="uint8",
    )
    src_blocks, dst_blocks = 30, 24
    assert layout.region_bytes(src_blocks) <= REGION_NBYTES
    source_U8, rng = source_bytes(5, REGION_NBYTES), np.random.default_rng(3)
    src_B, dst_B = rng.permutation(src_blocks)[:14], rng.permutation(dst_blocks)[:14]
    plan = RecordPlan(layout, src_B, dst_B, src_num_blocks=src_blocks, dst_num_blocks=dst_blocks)
    wanted = np.zeros(REGION_NBYTES, np.uint8)
    for layer, nbytes in enumerate(layout.bytes_by_layer):
        group = 1 if layer in (1, 4) else 0
        assert nbytes == (1536, 3072)[group == 0]
        for src, dst in zip(src_B[group::2], dst_B[group::2], strict=True):
            at, to = layout.offset(layer, src, src_blocks), layout.offset(layer, dst, dst_blocks)
            wanted[to : to + nbytes] = source_U8[at : at + nbytes]
    async with receiving(kit) as r, linked(r, source_U8) as (it, events):
        for layer in range(layout.num_layers):
            it.post(GRANT, plan.of_layer(layer))
        await events.until(lambda e: len(e.completed) == layout.num_layers)
        writes = layout.num_layers * plan.writes_per_layer
        it.seal(Seal(grant=GRANT, epoch=EPOCH, writes=writes, bytes_written=plan.nbytes))
        await r.events.until(lambda e: len(e.seals) == 1)
        assert (writes, plan.nbytes) == (35, 7 * (3 * 3072 + 2 * 1536))
        assert np.array_equal(r.region.array_U8, wanted)


async def random_ops_of_any_length_land_as_posted(kit: Kit) -> None:
    """Batches of scattered pieces from one byte to many pages, at any alignment, none overlapping: byte for byte."""
    rng = np.random.default_rng(5)
    source_U8 = source_bytes(8, REGION_NBYTES)
    async with receiving(kit) as r, linked(r, source_U8) as (it, events):
        wanted = np.zeros(REGION_NBYTES, np.uint8)
        for done in range(1, 9):
            cuts = np.sort(rng.choice(REGION_NBYTES, 200, replace=False))
            starts, lengths = cuts[:-1], np.diff(cuts)
            lengths = np.maximum(lengths - rng.integers(0, 40, len(lengths)), 0)
            order = rng.permutation(len(starts))[:150]
            src = rng.integers(0, REGION_NBYTES - lengths + 1)
            ops = ops_of(src[order].tolist(), starts[order].tolist(), lengths[order].tolist())
            it.post(GRANT, ops)
            await events.until(lambda e, done=done: len(e.completed) == done)  # type: ignore[misc]
            for s, d, n in zip(ops.src, ops.dst, ops.nbytes, strict=True):
                wanted[d : d + n] = source_U8[s : s + n]
            assert np.array_equal(r.region.array_U8, wanted)


async def many_writers_at_once_each_in_its_own_blocks(kit: Kit) -> None:
    """Twelve links write, each many batches into its own part of the region; every seal comes, after all its bytes."""
    count, own = 12, RECORDS // 12
    async with receiving(kit) as r:
        links, events, wanted = [], [], np.zeros(REGION_NBYTES, np.uint8)
        for i in range(count):
            source_U8, recorder = source_bytes(i, REGION_NBYTES), Recorder()
            endpoint = endpoint_from_json(r.expect(pair_of(100 + i), grant=grant_of(100 + i)))
            links.append(await kit.link(endpoint, pair_of(100 + i), source_U8, recorder))
            events.append(recorder)
            part = slice(i * own * RECORD_NBYTES, (i + 1) * own * RECORD_NBYTES)
            wanted[part] = source_U8[part]
        for row in range(own):
            for i, it in enumerate(links):
                at = (i * own + row) * RECORD_NBYTES
                it.post(grant_of(100 + i), ops_of([at], [at], [RECORD_NBYTES]))
        for i, (it, recorder) in enumerate(zip(links, events, strict=True)):
            await recorder.until(lambda e: len(e.completed) == own)
            it.seal(Seal(grant=grant_of(100 + i), epoch=EPOCH, writes=own, bytes_written=own * RECORD_NBYTES))
        await r.events.until(lambda e: len(e.seals) == count)
        assert {pair for pair, _ in r.events.seals} == {pair_of(100 + i) for i in range(count)}
        assert np.array_equal(r.region.array_U8, wanted)
        for it in links:
            await it.close()


async def a_receiver_that_pauses_gets_everything_when_it_goes_on(kit: Kit) -> None:
    """Far more is posted to a stopped receiver than any buffer holds: posting never waits. Where the receiver takes the
    bytes in, none of it is complete when the same batches to another receiver all are. Once the stopped one runs again
    every batch completes, copied, and nothing is lost or repeated."""
    source_U8, events, clock = source_bytes(1, REGION_NBYTES), Recorder(), Recorder()
    # NIXL's batches take a quarter of a second each where its own threads wait for one another.
    count = 20 if kit.transport is TransportName.UCX else 60
    async with receiving(kit) as other, writing() as peer:
        it = await kit.link(endpoint_from_json(await receive(peer, kit)), PAIR, source_U8, events)
        running = await kit.link(endpoint_from_json(other.expect()), PAIR, source_U8, clock)
        peer.stop()
        for _ in range(count):
            it.post(GRANT, ops_of([0], [0], [REGION_NBYTES]))
            running.post(GRANT, ops_of([0], [0], [REGION_NBYTES]))
        await clock.until(lambda e: len(e.completed) == count)
        if kit.receiver_moves_the_bytes:
            assert events.completed == [], "what a receiver has not taken in is not complete"
        peer.signal(signal.SIGCONT)
        await events.until(lambda e: len(e.completed) == count)
        assert {copied for *_, copied in events.completed} == {True}
        assert events.lost == []
        await it.close()
        await running.close()


async def a_connect_to_a_stopped_receiver_ends_at_its_deadline(kit: Kit) -> None:
    """The receiver stands still: connecting fails when `connect_ms_max` has passed, and not never. It goes on, and the
    pair links in the same epoch."""
    source_U8, events = source_bytes(1, REGION_NBYTES), Recorder()
    async with writing() as peer:
        endpoint = endpoint_from_json(await receive(peer, kit))
        peer.stop()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ConnectErrors):
                await replace(kit, connect_ms_max=300).link(endpoint, PAIR, source_U8, events)
        peer.signal(signal.SIGCONT)
        it = await kit.link(endpoint, PAIR, source_U8, events)
        it.post(GRANT, record_ops(1))
        await events.until(lambda e: len(e.completed) == 1)
        assert events.completed[0][3] is True
        await it.close()


async def a_restarted_receiver_is_a_new_pair(kit: Kit) -> None:
    """The receiver is killed and comes back as another incarnation: its old endpoint is of no use, its new one links at
    once, and only the new region is written."""
    source_U8, events, lost = source_bytes(1, REGION_NBYTES), Recorder(), Recorder()
    async with writing() as old, receiving(kit) as new:
        stale = endpoint_from_json(await receive(old, kit))
        it = await kit.link(stale, PAIR, source_U8, lost)
        old.signal(signal.SIGKILL)
        old.process.wait()
        again = await kit.link(endpoint_from_json(new.expect(OTHER_PAIR)), OTHER_PAIR, source_U8, events)
        with pytest.raises(ConnectErrors):
            await kit.link(stale, PAIR, source_U8, Recorder())
        again.post(GRANT, record_ops(2))
        await events.until(lambda e: len(e.completed) == 1)
        assert events.completed[0][3] is True
        assert np.array_equal(new.region.array_U8, expected_region(source_U8, record_ops(2)))
        await lost.until(lambda e: bool(e.lost))
        await it.close()
        await again.close()


async def a_restarted_writer_is_a_new_pair(kit: Kit) -> None:
    """The writer is killed and comes back as another incarnation: it links at once under its own pair, before and after
    the old pair's end is known, and the old endpoint stays of no use."""
    async with receiving(kit) as r, writing() as old, writing() as new:
        stale = r.expect()
        await link(old, kit, stale)
        old.signal(signal.SIGKILL)
        assert await link(new, kit, r.expect(OTHER_PAIR, grant=OTHER_GRANT), OTHER_PAIR, seed=4) == "linked"
        await r.events.until(lambda e: bool(e.gone))
        assert r.events.gone_epochs == [(PAIR, EPOCH)]
        await new.post("a", OTHER_GRANT, record_ops(2))
        assert (await new.event("completed"))["copied"] is True
        assert np.array_equal(r.region.array_U8, expected_region(source_bytes(4, REGION_NBYTES), record_ops(2)))
        assert await link(new, kit, stale) == "NOT_EXPECTED"


async def what_is_posted_after_a_fence_lands_nowhere(kit: Kit) -> None:
    """Posting goes on while the pair is fenced and after it: once the writer's end is told no byte changes, and every
    batch completes all the same."""
    source_U8, events = source_bytes(6, REGION_NBYTES), Snapshots()
    async with receiving(kit, events) as r:
        events.region = r.region
        async with linked(r, source_U8) as (it, recorder):
            for posted in range(400):
                it.post(GRANT, record_ops(posted % 7))
                if posted == 100:
                    r.port.fence(PAIR, EPOCH)
                if posted % 50 == 0:
                    await asyncio.sleep(0)
            await events.until(lambda e: bool(e.gone))
            for _ in range(20):
                it.post(GRANT, ops_of([0], [0], [REGION_NBYTES]))
            await recorder.until(lambda e: len(e.completed) == 420)
            await recorder.until(lambda e: bool(e.lost))
            assert {copied for *_, copied in recorder.completed[-20:]} == {False}
            assert it.fenced is True
        assert np.array_equal(r.region.array_U8, events.at_gone[0])
        assert r.expect(epoch=Epoch(EPOCH + 1))["epoch"] == EPOCH + 1


async def a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence(kit: Kit) -> None:
    """Cancelled after so many turns of the loop that both sides share, in all stages of the handshake: the receiver
    hears that it is over, has nothing to fence and keeps no connection, and the pair links in the same epoch."""
    source_U8 = source_bytes(6, REGION_NBYTES)
    async with receiving(kit) as r:
        endpoint = endpoint_from_json(r.expect())
        for turns in range(0, 40, 3):
            events = Recorder()
            connecting = asyncio.ensure_future(kit.link(endpoint, PAIR, source_U8, events))
            for _ in range(turns):
                await asyncio.sleep(0)
            connecting.cancel()
            await asyncio.wait([connecting])
            if not connecting.cancelled():
                await connecting.result().close()
        async with linked(r, source_U8) as (it, events):
            it.post(GRANT, record_ops(1))
            await events.until(lambda e: bool(e.completed))
            assert events.completed[0][3] is True
            wanted = (0, kit.streams if kit.transport is TransportName.TCP else 1)
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    reported = r.port.describe()
                    if (reported["connections_handshaking"], reported["connections_writing"]) == wanted:
                        break
                    await asyncio.sleep(0)
            assert (r.events.gone, reported["fences_ended"], reported["fences_waiting"]) == ([], 0, 0)


class FirstHalf(WriteRanges):
    """Ranges of a grant that may write the first half of the region."""

    def __init__(self) -> None:
        pass

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        return bool((dst_S + nbytes_S <= REGION_NBYTES // 2).all())


async def a_write_outside_its_grant_ends_the_link(kit: Kit) -> None:
    """One record inside and one outside of a grant, in one batch: tcp, whose receiver puts the bytes in their places,
    lets none of them land, and ends the link. Elsewhere only the writer's library bounds writes, before they come to a
    transport: see `test_a_block_outside_the_grant_is_not_posted`."""
    source_U8, events = source_bytes(6, REGION_NBYTES), Recorder()
    async with receiving(kit) as r:
        endpoint = r.port.expect(PAIR, EPOCH)
        r.port.allow(PAIR, EPOCH, GRANT, FirstHalf())
        it = await kit.link(endpoint, PAIR, source_U8, events)
        it.post(GRANT, ops_of([0, 0], [0, REGION_NBYTES // 2 - 1], [RECORD_NBYTES] * 2))
        await events.until(lambda e: bool(e.lost))
        assert events.completed == [(GRANT, 2, 2 * RECORD_NBYTES, False)]
        assert "OUT_OF_GRANT" in events.lost[0][1]
        assert not r.region.array_U8.any()
        await r.events.until(lambda e: bool(e.gone))
        async with asyncio.timeout(DEADLINE_S):
            await it.close()
        with pytest.raises(AssertionError):
            it.seal(Seal(grant=GRANT, epoch=Epoch(EPOCH + 1), writes=1, bytes_written=1))


MORE_CASES = (
    head_ranges_land_in_records_of_another_width,
    records_of_two_layer_groups_land_in_their_blocks,
    random_ops_of_any_length_land_as_posted,
    many_writers_at_once_each_in_its_own_blocks,
    a_receiver_that_pauses_gets_everything_when_it_goes_on,
    a_connect_to_a_stopped_receiver_ends_at_its_deadline,
    a_restarted_writer_is_a_new_pair,
    a_restarted_receiver_is_a_new_pair,
    what_is_posted_after_a_fence_lands_nowhere,
    a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence,
)
TCP_CASES = (a_write_outside_its_grant_ends_the_link,)
"""Of transports whose receiver looks at every write."""
