"""tcp between regions on devices, by way of pinned memory: over simulated devices that run work as late and as oddly as
CUDA allows. What every transport must do besides is in the conformance suite."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.errors import InvalidField
from kvtransfer.device.staging import StagedRegion, StagingConfig, StagingFull, StagingLimits, StagingShare
from kvtransfer.transport import ConnectError, DeviceError, Seal, WriteOutOfBounds
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import tcp
from kvtransfer.transports.control_channel import RefusalReason
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import CODEC, ReceiveStream
from tests.conformance.transport_kits import Everything, FakeSource
from tests.support.fake_device import FakeDriver
from tests.support.shm_harness import grant_of, ops_of, pair_of, run
from tests.support.staging_scenes import (
    BLOCKS,
    CHUNK,
    EPOCH,
    GRANT,
    LAYERS,
    NBYTES,
    PAIR,
    RECORD,
    SMALL,
    Node,
    Scene,
    ShimPinned,
    check_touches,
    scene,
    whole,
)
from tests.support.stream_shim import ShimStream
from tests.support.tcp_harness import head, raw, table, wait_until


@pytest.mark.parametrize("seed", range(8))
def test_what_is_computed_arrives_in_every_order_that_devices_may_run_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are posted while they are computed, blocks are computed anew once their batches have completed; at each
    seal the receiver has what was computed, and no byte is touched before the device is known to be through with it."""

    async def test() -> None:
        chance = random.Random(seed)
        wanted_U8 = np.zeros(NBYTES, np.uint8)
        async with scene(monkeypatch, seed, streams=1 + seed % 3) as s:
            posted = 0
            for round_ in range(3):
                for layer in range(LAYERS):
                    blocks = chance.sample(range(BLOCKS), 3)
                    values = [round_ * 50 + layer * BLOCKS + block + 1 for block in blocks]
                    at = [s.writer.compute(layer, b, v) for b, v in zip(blocks, values, strict=True)]
                    s.link.post(GRANT, ops_of(at, at, [RECORD] * 3))
                    posted += 1
                    for start, value in zip(at, values, strict=True):
                        wanted_U8[start : start + RECORD] = value
                await s.completed(posted)
                s.seal(round_)
                await s.arrived.until(lambda e, count=round_ + 1: len(e.seals) == count)  # type: ignore[misc]
                assert np.array_equal(s.arrived.bytes_at_seal[round_], wanted_U8)
            assert s.posted.completed == [(GRANT, 3, 3 * RECORD, True)] * posted
            figures = s.link.describe()
            assert (figures["writes"], figures["bytes"]) == (3 * posted, 3 * posted * RECORD)
            assert s.port.describe()["staging_bytes_used"] == (1 + seed % 3) * 2 * CHUNK

    run(test())


def test_bytes_sent_before_their_copy_is_over_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not wait for the event: the simulator objects when the piece is posted."""

    async def test() -> None:
        async with scene(monkeypatch) as s:
            s.writer.device.hasty = True
            at = s.writer.compute(0, 0, 7)
            s.link.post(GRANT, whole(at, RECORD))
            await s.completed(1)
            assert len(s.writer.found) == 1
            assert s.writer.found.pop().startswith("the host touches pinned[")
            s.writer.device.hasty = False

    run(test())


def test_a_seal_told_before_the_copies_are_over_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that does not wait for the event: the simulator objects when the seal is told, and when a chunk that
    is being copied from is received into."""

    async def test() -> None:
        async with scene(monkeypatch, streams=1) as s:
            s.receiver.device.hasty = True
            s.receiver.freeze()
            s.writer.compute(0, 0, 7)
            s.link.post(GRANT, whole(0, 3 * CHUNK))
            await s.completed(1)
            s.seal(1)
            await s.arrived.until(lambda e: bool(e.seals))
            touched = {text.split("[")[0] for text in s.receiver.found}
            assert touched == {"the host touches pinned", "the host touches region"}
            s.receiver.found.clear()
            s.receiver.device.hasty = False
            s.receiver.thaw()

    run(test())


@pytest.mark.parametrize("waits", [True, False])
def test_a_seal_overtakes_no_copy(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that seals before it has been acknowledged, over a device that stands still: the seal is told when the
    device has gone on. A receive thread that tells it at once is found."""

    async def test() -> None:
        if not waits:
            monkeypatch.setattr(ReceiveStream, "_settle", lambda self: None)
        async with scene(monkeypatch) as s:
            endpoint: Any = SimpleNamespace(endpoint=s.port.expect(PAIR, EPOCH))
            async with raw(endpoint) as by_hand:
                s.receiver.freeze()
                seal = Seal(grant=GRANT, epoch=EPOCH, writes=1, bytes_written=CHUNK)
                sealing = CODEC.encode(wire.SealSent(number=1, seal=seal, ways_mask=1))
                await by_hand.send(head(nbytes=CHUNK), table((RECORD, CHUNK)), bytes([9]) * CHUNK, sealing)
                if waits:
                    await wait_until(lambda: len(s.receiver.region.accesses) == 3)
                    assert s.arrived.seals == []
                    s.receiver.thaw()
                await s.arrived.until(lambda e: bool(e.seals))
                if waits:
                    wanted_U8 = np.repeat(np.array([0, 9, 0], np.uint8), [RECORD, CHUNK, NBYTES - CHUNK - RECORD])
                    assert np.array_equal(s.arrived.bytes_at_seal[0], wanted_U8)
                else:
                    (found,) = s.receiver.found
                    assert found.startswith("the host touches region[0:2048], and nothing orders it after copy")
                    s.receiver.found.clear()
                    s.receiver.thaw()
            await s.arrived.until(lambda e: bool(e.gone))
            await s.posted.until(lambda e: bool(e.lost))

    run(test())


def test_a_copy_that_does_not_wait_for_its_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's event left out: the copy is refused, the staging thread fails, the link is lost and the batch
    completes uncopied."""
    failures: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(str(args.exc_value)))
    monkeypatch.setattr(ShimStream, "wait", lambda self, event: None)

    async def test() -> None:
        async with scene(monkeypatch) as s:
            at = s.writer.compute(0, 0, 7)
            s.link.post(GRANT, whole(at, RECORD))
            await s.posted.until(lambda e: bool(e.lost))
            assert s.posted.completed == [(GRANT, 1, RECORD, False)]
            assert s.posted.lost == [(PAIR, "a staging thread failed")]
            (failure,) = failures
            assert failure.startswith("copy touches region[0:64]") and "after layer 0 of stream 0" in failure

    run(test())


def test_a_forbidden_grant_has_nothing_left_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device runs only for the control thread: `forbid` finds copies of the grant under way, waits for them, and
    every byte may then be somebody else's."""

    async def test() -> None:
        async with scene(monkeypatch, streams=1) as s:
            run_some, control = s.receiver.device.run_some, threading.current_thread()

            def for_control() -> None:
                if threading.current_thread() is control:
                    run_some()

            s.receiver.device.run_some = for_control  # type: ignore[method-assign]
            s.link.post(GRANT, whole())
            await wait_until(lambda: bool(s.receiver.region.accesses[2:]))
            s.port.forbid(GRANT)
            s.receiver.look(s.receiver.region, 0, NBYTES, write=True)
            s.receiver.thaw()
            await s.completed(1)
            assert s.posted.completed == [(GRANT, 1, NBYTES, False)]

    run(test())


def claims_to_have_settled(share: StagingShare[Any]) -> bool:
    share._flying.clear()
    share._settled = True
    return True


@pytest.mark.parametrize("waits", [True, False])
def test_a_fence_is_evidence_only_behind_the_last_copy(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair is fenced with copies on a device that stands still: the writer is gone when the device has gone on. A
    receive thread that ends without waiting for its copies is found."""

    async def test() -> None:
        if not waits:
            monkeypatch.setattr(StagingShare, "try_settle", claims_to_have_settled)
        async with scene(monkeypatch, streams=1) as s:
            s.receiver.freeze()
            s.link.post(GRANT, whole())
            await wait_until(lambda: bool(s.receiver.region.accesses[2:]))
            s.port.fence(PAIR, EPOCH)
            await s.posted.until(lambda e: bool(e.lost))
            assert s.link.fenced
            if waits:
                assert s.arrived.gone == []
                s.receiver.thaw()
            await s.arrived.until(lambda e: bool(e.gone))
            assert s.arrived.gone == [(PAIR, EPOCH, "1 closed, its receive thread joined")]
            if not waits:
                (found,) = s.receiver.found
                assert found.startswith("the host touches region[0:2048], and nothing orders it after copy")
                s.receiver.found.clear()
                s.receiver.thaw()

    run(test())


def test_devices_that_stand_still_hold_up_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far more is posted than there is pinned memory, while neither device moves: all of it arrives once they do."""

    async def test() -> None:
        async with scene(monkeypatch) as s:
            s.writer.freeze()
            s.receiver.freeze()
            for layer in range(LAYERS):
                for block in range(BLOCKS):
                    s.writer.compute(layer, block, layer * BLOCKS + block + 1)
            for _ in range(20):
                s.link.post(GRANT, whole())
            await wait_until(lambda: len(s.writer.region.accesses) >= 2 + LAYERS * BLOCKS + SMALL.link_chunks)
            assert s.link.describe()["batches_unstaged"] == 20
            s.writer.thaw()
            await wait_until(lambda: len(s.receiver.region.accesses) >= 2 + SMALL.stream_chunks)
            assert s.posted.completed == []
            s.receiver.thaw()
            await s.completed(20)
            assert s.posted.completed == [(GRANT, 1, NBYTES, True)] * 20
            wanted_U8 = np.repeat(np.arange(1, LAYERS * BLOCKS + 1, dtype=np.uint8), RECORD)
            assert np.array_equal(s.receiver.region.bytes_U8, wanted_U8)

    run(test())


def test_two_nodes_write_to_each_other_with_the_least_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has room for one chunk to send from and one to receive into: nobody waits for the other for ever."""
    least = StagingLimits(chunk_bytes=CHUNK, link_chunks=1, stream_chunks=1)

    async def test() -> None:
        nodes = Node(3, least, 2), Node(4, least, 2)
        check_touches(monkeypatch, *nodes)
        for node, value in zip(nodes, (5, 6), strict=True):
            for block in range(BLOCKS):
                node.compute(0, block, value)
        ways = [Scene(a, b, TcpConfig(streams=1)) for a, b in (nodes, nodes[::-1])]
        for way in ways:
            way.link = await way.connect()
        half = NBYTES // 2
        for _ in range(10):
            for way in ways:
                way.link.post(GRANT, ops_of([0], [half], [half]))
        for way in ways:
            await way.completed(10)
            assert way.posted.completed == [(GRANT, 1, half, True)] * 10
        for way in ways:
            await way.link.close()
            await way.port.close()
        for node, value in zip(nodes, (6, 5), strict=True):
            node.staged.close()
            assert (node.region.bytes_U8[half : half + BLOCKS * RECORD] == value).all()
            assert node.found == []

    run(test())


def test_who_finds_no_pinned_memory_is_refused_and_nobody_else_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's is full, then the receiver's: one more link is refused by name, and made when another has closed."""

    async def test() -> None:
        room = StagingLimits(chunk_bytes=CHUNK, link_chunks=4, stream_chunks=2)
        async with scene(monkeypatch, streams=2, limits=room, chunks=4) as s:
            with pytest.raises(ConnectError, match=r"0 of 4 chunks of pinned memory are free, 4 are needed"):
                await s.connect(pair_of(5))
            other = Node(9)
            crowded = Scene(other, s.receiver, TcpConfig(streams=1))
            crowded.port, theirs = s.port, crowded.port
            await theirs.close()
            with pytest.raises(ConnectError) as refused:
                await crowded.connect(pair_of(6))
            assert refused.value.reason is RefusalReason.CONNECTIONS_MAX
            s.link.post(GRANT, whole())
            await s.completed(1)
            assert s.posted.completed == [(GRANT, 1, NBYTES, True)]
            await s.link.close()
            await wait_until(lambda: s.port.describe()["staging_bytes_used"] == 0)
            again = await crowded.connect(pair_of(6))
            await again.close()
            other.staged.close()

    run(test())


def test_an_abandoned_grant_waits_for_its_copies_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's device stands still: what has not begun to be copied completes at once, the batch that has begun
    completes when the device is through, and another grant's goes on."""

    async def test() -> None:
        async with scene(monkeypatch) as s:
            s.port.allow(PAIR, EPOCH, grant_of(8), Everything())
            s.writer.freeze()
            s.link.post(GRANT, whole())
            s.link.post(GRANT, whole(0, RECORD))
            s.link.post(grant_of(8), whole(0, 2 * RECORD))
            await wait_until(lambda: len(s.writer.region.accesses) >= 2 + SMALL.link_chunks)
            s.link.abandon(GRANT)
            s.link.post(GRANT, whole(0, 3))
            await s.completed(2)
            assert s.posted.completed == [(GRANT, 1, RECORD, False), (GRANT, 1, 3, False)]
            s.writer.thaw()
            await s.completed(4)
            assert sorted(s.posted.completed[2:]) == [(GRANT, 1, NBYTES, False), (grant_of(8), 1, 2 * RECORD, True)]
            s.link.forget(GRANT)
            s.link.post(GRANT, whole(0, RECORD))
            s.link.post(GRANT, ops_of([], [], []))
            await s.completed(6)
            assert sorted(s.posted.completed[4:]) == [(GRANT, 0, 0, True), (GRANT, 1, RECORD, True)]
            with pytest.raises(WriteOutOfBounds):
                s.link.post(GRANT, whole(1))

    run(test())


def broken() -> Any:
    raise DeviceError("an illegal memory access was encountered")


def test_an_error_of_the_writers_device_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what was copied: everything completes uncopied, and the reason is told."""

    async def test() -> None:
        async with scene(monkeypatch) as s:
            s.writer.device.run_some = broken  # type: ignore[method-assign]
            s.link.post(GRANT, whole())
            s.link.post(grant_of(8), whole())
            await s.posted.until(lambda e: bool(e.lost))
            assert sorted(s.posted.completed) == [(GRANT, 1, NBYTES, False), (grant_of(8), 1, NBYTES, False)]
            assert s.posted.lost == [(PAIR, "the device failed: an illegal memory access was encountered")]
            assert s.arrived.bytes_at_seal == []
            s.writer.thaw()

    run(test())


def test_a_piece_that_cannot_be_posted_completes_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are in pinned memory, and the link refuses it: the link is lost, and the batch completes uncopied."""
    failures: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(str(args.exc_value)))

    def refuse(*_: Any) -> None:
        raise MemoryError("no room for a table")

    async def test() -> None:
        async with scene(monkeypatch) as s:
            s.link._stager._post = refuse
            s.link.post(GRANT, whole())
            await s.posted.until(lambda e: bool(e.lost))
            assert s.posted.completed == [(GRANT, 1, NBYTES, False)]
            assert s.posted.lost == [(PAIR, "a staging thread failed")]
            assert failures == ["no room for a table"]
            assert s.writer.staged.describe()["staging_bytes_used"] == 0

    run(test())


def test_an_error_of_the_receivers_device_fences_the_pair_and_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is acknowledged that may not have landed. A fence has begun, but neither the joined thread nor `forbid`
    proves that the copies are over: no `writer_gone` comes, and the connection is counted. Once the device says that
    it has finished them, there is evidence."""
    monkeypatch.setattr(tcp, "PROVE_RETRY_MS", 10)

    async def test() -> None:
        async with scene(monkeypatch, streams=1) as s:
            s.receiver.device.run_some = broken  # type: ignore[method-assign]
            s.link.post(GRANT, whole())
            await wait_until(lambda: s.port.describe()["copies_unproved"] == 1)
            await s.posted.until(lambda e: bool(e.lost))
            assert s.posted.completed == [(GRANT, 1, NBYTES, False)]
            assert not s.port.forbid(GRANT)
            assert not s.port.forbid(GRANT)
            figures = s.port.describe()
            assert (figures["fences_waiting"], figures["staging_bytes_used"]) == (1, SMALL.stream_chunks * CHUNK)
            assert s.arrived.gone == []
            s.receiver.thaw()
            await s.arrived.until(lambda e: bool(e.gone))
            assert s.arrived.gone == [(PAIR, EPOCH, "1 closed, its receive thread joined")]
            assert s.port.forbid(GRANT)
            figures = s.port.describe()
            assert (figures["copies_unproved"], figures["staging_bytes_used"]) == (0, 0)

    run(test())


def test_pinned_memory_of_failed_copies_stays_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both devices fail and stay so: the link and the port close, and neither node unpins what its device may still
    copy from or to."""
    unpinned: list[str] = []
    monkeypatch.setattr(ShimPinned, "close", lambda self: unpinned.append(self.memory.name))

    async def test() -> None:
        async with scene(monkeypatch, streams=1) as s:
            s.receiver.device.run_some = broken  # type: ignore[method-assign]
            s.link.post(GRANT, whole())
            await wait_until(lambda: s.port.describe()["copies_unproved"] == 1)
            await s.posted.until(lambda e: len(e.lost) == 1)
            await s.link.close()
            s.link = await s.connect(pair_of(9), grant_of(9))
            s.writer.device.run_some = broken  # type: ignore[method-assign]
            s.link.post(grant_of(9), whole())
            await s.posted.until(lambda e: len(e.lost) == 2)
            assert s.writer.staged.describe()["staging_bytes_used"] == SMALL.link_chunks * CHUNK
        assert unpinned == []

    run(test())


def test_pinned_memory_without_room_for_one_link_is_refused() -> None:
    """By the name of the setting, before anything is pinned."""
    driver: Any = None
    region: Any = SimpleNamespace(nbytes=NBYTES)
    with pytest.raises(InvalidField, match="is 1,048,576; one link or connection needs 8,388,608") as refused:
        StagedRegion(driver=driver, region=region, config=StagingConfig(bytes_max=1 << 20))
    assert refused.value.field == "staging.bytes_max"


def test_shares_are_apart_and_come_back() -> None:
    """Chunks of two shares never overlap; one that is used up leaves the other's; all are there again at the end."""
    driver: Any = FakeDriver()
    region = FakeSource(memory=np.arange(64, dtype=np.uint8), nbytes=64)
    staged = StagedRegion(driver=driver, region=region, config=StagingConfig(bytes_max=16 * CHUNK), limits=SMALL)
    first, second = staged.share(7), staged.share(9)
    with pytest.raises(StagingFull, match="0 of 16 chunks"):
        staged.share(1)
    taken = [first.take() for _ in range(7)]
    assert len(set(taken)) == 7 and first.take() is None and not first.has_room
    start = second.take()
    assert start is not None and start not in taken
    ops = ops_of([3, 40], [0, 0], [5, 8])
    second.to_host(start, ops.src, ops.nbytes, behind=staged.here(), tag="out")
    looks = [second.finished() for _ in range(3)]
    assert (looks, second.flying) == ([None, None, "out"], 0)
    assert staged.host_U8[start : start + 13].tolist() == [*range(3, 8), *range(40, 48)]
    for share in (first, second):
        share.settle()
        share.give_back()
    assert staged.describe() == {"staging_bytes": 16 * CHUNK, "staging_bytes_used": 0}
    staged.close()
