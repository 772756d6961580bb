"""Copies on a side stream, over a simulated device that runs work as late and as oddly as CUDA allows."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import numpy as np
import pytest

from kvtransfer.transport import WriteOutOfBounds
from kvtransfer.transports import post_queue
from kvtransfer.transports.cuda_ipc import DeviceLanes
from kvtransfer.transports.shm import CopyParts
from tests.support.fake_device import FakeEvent, FakeStream, FakeStreams
from tests.support.shm_harness import grant_of, ops_of, run
from tests.support.stream_shim import ForgetfulDevice, Memory, MissingDependency, ShimDevice

RECORD = 64
LAYERS, BLOCKS = 4, 8
NBYTES = RECORD * LAYERS * BLOCKS


class Scene:
    def __init__(self, device: ShimDevice) -> None:
        self.device = device
        self.src = Memory("source", np.zeros(NBYTES, np.uint8))
        self.dst = Memory("destination", np.zeros(NBYTES, np.uint8))
        self.completed: list[tuple[bytes, int, int, bool]] = []
        self.drained = asyncio.Event()
        self.changed = asyncio.Event()
        parts = CopyParts(
            dst=self.dst,
            src=self.src,
            dst_nbytes=NBYTES,
            src_nbytes=NBYTES,
            loop=asyncio.get_running_loop(),
            completed=self._completed,
            drained=self.drained.set,
            name="device-copy",
        )
        self.pool = DeviceLanes(parts, device)
        self.pool.start()

    def _completed(self, grant: bytes, writes: int, nbytes: int, copied: bool) -> None:
        self.completed.append((grant, writes, nbytes, copied))
        self.changed.set()

    def compute(self, layer: int, block: int, value: int) -> int:
        """A kernel of the compute stream that makes one record; where it lies."""
        at = (layer * BLOCKS + block) * RECORD

        def kernel() -> None:
            self.src.bytes_U8[at : at + RECORD] = value

        self.device.compute.launch(f"layer {layer}", kernel, writes=[(self.src, at, at + RECORD)])
        return at

    async def until_completed(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.completed) < count:
                self.changed.clear()
                await self.changed.wait()

    async def close(self) -> None:
        self.pool.queue.stop()
        async with asyncio.timeout(30):
            await self.drained.wait()
        self.pool.join()


@pytest.mark.parametrize("seed", range(12))
def test_records_are_copied_behind_the_layer_that_made_them(seed: int) -> None:
    """Layers are computed and posted without a wait, blocks are reused once their copies have completed: what arrives
    is what was computed, in every order that the device picks."""

    async def scene() -> None:
        chance = random.Random(seed)
        device = ShimDevice(seed)
        scene = Scene(device)
        posted = 0
        for round_ in range(3):
            wanted: dict[int, int] = {}
            for layer in range(LAYERS):
                blocks = chance.sample(range(BLOCKS), 3)
                at = [scene.compute(layer, block, round_ * 50 + layer * BLOCKS + block + 1) for block in blocks]
                wanted |= {a: round_ * 50 + layer * BLOCKS + block + 1 for a, block in zip(at, blocks, strict=True)}
                scene.pool.queue.post(grant_of(round_), ops_of(at, at, [RECORD] * 3))
                posted += 1
            # The blocks of the round are let go of when their copies have completed, not before.
            await scene.until_completed(posted)
            for at_byte, value in wanted.items():
                device.host_access(scene.dst, at_byte, at_byte + RECORD, write=False)
                assert (scene.dst.bytes_U8[at_byte : at_byte + RECORD] == value).all()
        assert scene.completed == [(grant_of(i // LAYERS), 3, 3 * RECORD, True) for i in range(posted)]
        assert scene.pool.queue.uncompleted(grant_of(0)) == 0
        await scene.close()

    run(scene())


def test_without_the_layers_event_the_simulator_objects() -> None:
    """The same copy with the wait left out: refused, although this order of running might have done no harm."""

    async def scene() -> None:
        scene = Scene(ForgetfulDevice(1))
        at = scene.compute(0, 0, 7)
        with pytest.raises(MissingDependency, match=r"copy touches source\[0:64\].* after layer 0 of stream 0"):
            scene.pool.queue.post(grant_of(1), ops_of([at], [at], [RECORD]))
        await scene.close()

    run(scene())


def test_a_block_reused_before_its_copy_has_completed_is_found() -> None:
    """The next owner's kernel writes the source while the copy may still read it: what holding source blocks is for."""

    async def scene() -> None:
        device = ShimDevice(2)
        scene = Scene(device)
        # Nothing runs, so nothing can have completed.
        device.run_some = lambda: None  # type: ignore[method-assign]
        at = scene.compute(0, 0, 7)
        scene.pool.queue.post(grant_of(1), ops_of([at], [at], [RECORD]))
        with pytest.raises(MissingDependency, match="layer 0 touches source"):
            scene.compute(0, 0, 8)
        with pytest.raises(MissingDependency, match="the host touches destination"):
            device.host_access(scene.dst, at, at + RECORD, write=False)
        del device.run_some
        await scene.until_completed(1)
        scene.compute(0, 0, 8)
        await scene.close()

    run(scene())


def test_after_abandon_and_stop_posts_complete_uncopied() -> None:
    """What was posted before is on its way and completes as copied; later posts touch nothing."""

    async def scene() -> None:
        scene = Scene(ShimDevice(3))
        at = scene.compute(0, 0, 7)
        scene.pool.queue.post(grant_of(1), ops_of([at], [at], [RECORD]))
        scene.pool.queue.abandon(grant_of(1))
        scene.pool.queue.post(grant_of(1), ops_of([at], [at + RECORD], [RECORD]))
        scene.pool.queue.post(grant_of(2), ops_of([], [], []))
        await scene.until_completed(3)
        assert sorted(scene.completed) == [
            (grant_of(1), 1, RECORD, False),
            (grant_of(1), 1, RECORD, True),
            (grant_of(2), 0, 0, True),
        ]
        scene.pool.queue.forget(grant_of(1))
        scene.pool.queue.post(grant_of(1), ops_of([at], [at + RECORD], [RECORD]))
        await scene.until_completed(4)
        assert scene.completed[3] == (grant_of(1), 1, RECORD, True)
        scene.pool.queue.stop()
        scene.pool.queue.post(grant_of(3), ops_of([at], [0], [RECORD]))
        await scene.until_completed(5)
        assert scene.completed[4] == (grant_of(3), 1, RECORD, False)
        assert scene.pool.queue.describe() == {"writes": 2, "bytes": 2 * RECORD, "batches_abandoned": 2}
        await scene.close()

    run(scene())


def test_writes_out_of_bounds_and_too_many_abandoned_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are refused by name, the second by stopping."""
    monkeypatch.setattr(post_queue, "ABANDONED_GRANTS_MAX", 1)

    async def scene() -> None:
        scene = Scene(ShimDevice(4))
        with pytest.raises(WriteOutOfBounds):
            scene.pool.queue.post(grant_of(1), ops_of([0], [NBYTES - 1], [2]))
        assert scene.pool.queue.abandon(grant_of(1))
        assert not scene.pool.queue.abandon(grant_of(2))
        await scene.close()

    run(scene())


def test_a_device_error_ends_the_pool_and_completes_everything_uncopied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An event that raises (a kernel went wrong): no batch stays open, and the error is told."""

    async def scene() -> None:
        reported: list[str] = []
        monkeypatch.setattr("threading.excepthook", lambda args: reported.append(str(args.exc_value)))
        device = ShimDevice(5)
        scene = Scene(device)

        def broken() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        device.run_some = broken  # type: ignore[method-assign]
        at = scene.compute(0, 0, 7)
        scene.pool.queue.post(grant_of(1), ops_of([at], [at], [RECORD]))
        async with asyncio.timeout(30):
            await scene.drained.wait()
        scene.pool.join()
        assert scene.completed == [(grant_of(1), 1, RECORD, False)]
        assert reported == ["an illegal memory access was encountered"]

    run(scene())


def test_a_batch_that_cannot_be_queued_leaves_those_before_it_to_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches are on the device, the third finds no memory for its table: the pool ends, but not before the device
    is through with the second, which is complete and copied; the third completes uncopied."""
    monkeypatch.setattr("kvtransfer.transports.cuda_ipc.BATCHES_IN_FLIGHT_MAX", 2)
    failures: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failures.append(args.exc_type))
    posted = threading.Event()

    class Event(FakeEvent):
        def done(self) -> bool:
            return posted.is_set() and super().done()

    class Stream(FakeStream):
        def record(self) -> FakeEvent:
            return Event()

    class Streams(FakeStreams):
        copies = 0

        def side(self) -> FakeStream:
            return Stream()

        def copy(self, *_: object) -> None:
            self.copies += 1
            if self.copies == 3:
                raise MemoryError

    async def scene() -> None:
        completed: list[tuple[bytes, bool]] = []
        drained = asyncio.Event()
        streams: Any = Streams()
        parts = CopyParts(
            dst=None,
            src=None,
            dst_nbytes=RECORD,
            src_nbytes=RECORD,
            loop=asyncio.get_running_loop(),
            completed=lambda grant, writes, nbytes, copied: completed.append((grant, copied)),
            drained=drained.set,
            name="device-copy",
        )
        pool = DeviceLanes(parts, streams)
        pool.start()
        for i in range(3):
            pool.queue.post(grant_of(i), ops_of([0], [0], [RECORD]))
        posted.set()
        async with asyncio.timeout(30):
            await drained.wait()
        pool.join()
        assert sorted(completed) == [(grant_of(0), True), (grant_of(1), True), (grant_of(2), False)]
        assert failures == [MemoryError]

    run(scene())
