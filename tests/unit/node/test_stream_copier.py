"""Copies of blocks between a region on a device and pinned memory: over a simulated device that runs work as late and
as oddly as CUDA allows, and over the stand-in whose copies come when somebody looks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from baton.ids import BlockId
from cachestore.host_blocks import HostBlockId
from cachestore.layout import kv_layout
from kvtransfer.device.host_driver import HostDriver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.region import Region
from kvtransfer.transport import DeviceError, WriteOps, WriteOutOfBounds
from node.copiers import COPIES_IN_FLIGHT_MAX, BlockCopier, BlockCopy, BlockPlaces
from tests.conformance.transport_kits import FakeSource
from tests.support.shm_harness import run
from tests.support.staging_scenes import HastyDevice, ShimPinned
from tests.support.stream_shim import ForgetfulDevice, Memory, MissingDependency, ShimDevice, ShimEvent, ShimStream
from tests.support.tcp_harness import wait_until

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=2, dtype="uint8", dtype_bytes=1)
RECORD, LAYERS = LAYOUT.record_bytes, LAYOUT.num_layers
BLOCKS, HOST_BLOCKS = 6, 8
PLACES = BlockPlaces(layout=LAYOUT, device_blocks=BLOCKS, host_blocks=HOST_BLOCKS)
WAIT_S = 30


def copy_of(device: list[int], host: list[int], *, back: bool = False) -> BlockCopy:
    return BlockCopy(out=not back, device=tuple(map(BlockId, device)), host=tuple(map(HostBlockId, host)))


class Scene:
    """`told` has the number of each copy that has ended, and how."""

    def __init__(self, device: ShimDevice) -> None:
        self.device = device
        self.region = Memory("region", np.zeros(LAYOUT.region_bytes(BLOCKS), np.uint8))
        self.host = Memory("host memory", np.zeros(LAYOUT.region_bytes(HOST_BLOCKS), np.uint8))
        streams: Any = device
        self.copier = BlockCopier(
            streams=streams,
            places=PLACES,
            device=FakeSource(self.region, len(self.region.bytes_U8)),
            host=ShimPinned(self.host),
            name="test",
            poll_interval_s=1e-5,
        )
        self.reported: list[tuple[int, BaseException | None]] = []
        self._changed = asyncio.Event()
        self._asked = 0

    def start(self, copy: BlockCopy) -> int:
        number, self._asked = self._asked, self._asked + 1

        def done(error: BaseException | None) -> None:
            self.reported.append((number, error))
            self._changed.set()

        self.copier.start(copy, done)
        return number

    def out(self, device: list[int], host: list[int]) -> int:
        return self.start(copy_of(device, host))

    def back(self, device: list[int], host: list[int]) -> int:
        return self.start(copy_of(device, host, back=True))

    async def until_told(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.reported) < count:
                self._changed.clear()
                await self._changed.wait()

    async def until_on_device(self, copies: int) -> None:
        """So many copies of one block have been queued there."""
        await wait_until(lambda: len(self.host.accesses) == copies * LAYERS)

    def compute(self, block: int, value: int) -> None:
        """A step that writes one block, in every layer."""
        spans = self._spans(block)

        def kernel() -> None:
            for memory, first, end in spans:
                memory.bytes_U8[first:end] = value

        self.device.compute.launch(f"a step on block {block}", kernel, writes=spans)

    def read(self, block: int, into: list[int]) -> None:
        """A step that reads one block; what it finds is in `into` when the device has run it."""
        spans = self._spans(block)

        def kernel() -> None:
            (value,) = {int(byte) for memory, first, end in spans for byte in memory.bytes_U8[first:end]}
            into.append(value)

        self.device.compute.launch(f"a step that reads block {block}", kernel, reads=spans)

    def host_blocks(self) -> list[int]:
        """What each block of host memory holds, the same in every layer."""
        values_LB = self.host.bytes_U8.reshape(LAYERS, HOST_BLOCKS, RECORD).min(axis=2)
        assert (values_LB == values_LB[0]).all()
        assert (self.host.bytes_U8.reshape(LAYERS, HOST_BLOCKS, RECORD) == values_LB[:, :, None]).all()
        return [int(value) for value in values_LB[0]]

    def host_looks(self) -> None:
        """The host may touch both memories: all that touches them is known to have ended."""
        for memory in (self.region, self.host):
            self.device.host_access(memory, 0, len(memory.bytes_U8), write=True)

    def _spans(self, block: int) -> list[tuple[Memory, int, int]]:
        starts = [(layer * BLOCKS + block) * RECORD for layer in range(LAYERS)]
        return [(self.region, start, start + RECORD) for start in starts]


def freeze(device: ShimDevice) -> None:
    """Nothing queued runs, so nothing can have passed."""
    device.run_some = lambda: None  # type: ignore[method-assign]


def thaw(device: ShimDevice) -> None:
    del device.run_some


@pytest.mark.parametrize("seed", range(12))
def test_blocks_leave_and_return_in_every_order_that_a_device_may_run_it(seed: int) -> None:
    """Steps compute blocks, copies out are asked for right behind them, the blocks are computed anew as soon as their
    copy is told to have ended; others come back, over steps that the host has not seen end, and are read by steps
    launched when that is told: every byte is the one that was computed, and nothing was left to luck."""

    async def scene() -> None:
        chance = random.Random(seed)
        device = ShimDevice(seed)
        s = Scene(device)
        away: dict[int, int] = {}
        found: list[int] = []
        wanted: list[int] = []
        value, reported = 0, 0
        for _ in range(6):
            left, right = chance.sample(range(BLOCKS), 3), list(range(HOST_BLOCKS))
            chance.shuffle(right)
            homes = [host for host in right if host not in away][:3]
            for block in left:
                value += 1
                s.compute(block, value)
                away[homes[left.index(block)]] = value
            s.out(left[:2], homes[:2])
            s.out(left[2:], homes[2:])
            reported += 2
            await s.until_told(reported)
            for block in range(BLOCKS):
                s.compute(block, 255)
            returning = chance.sample(sorted(away), 2)
            targets = chance.sample(range(BLOCKS), 2)
            s.back(targets, returning)
            reported += 1
            await s.until_told(reported)
            for block, host in zip(targets, returning, strict=True):
                wanted.append(away.pop(host))
                s.read(block, found)
        device.finish()
        assert found == wanted
        assert s.reported == [(number, None) for number in range(reported)]
        s.copier.close()

    run(scene())


def test_without_an_event_of_the_compute_stream_the_simulator_objects() -> None:
    """The wait left out: the copy is refused, and the error told, although it might have done no harm."""

    async def scene() -> None:
        s = Scene(ForgetfulDevice(1))
        s.compute(2, 7)
        s.out([2], [0])
        await s.until_told(1)
        ((number, error),) = s.reported
        assert number == 0 and isinstance(error, MissingDependency)
        assert str(error).startswith("copy touches region[64:96], and nothing orders it after a step on block 2")
        s.copier.close()

    run(scene())


def test_a_block_reused_before_its_copy_out_has_ended_is_found() -> None:
    """That is what nobody does who waits to be told."""

    async def scene() -> None:
        device = ShimDevice(2)
        s = Scene(device)
        freeze(device)
        s.out([2], [0])
        await s.until_on_device(1)
        assert s.reported == []
        with pytest.raises(MissingDependency, match=r"a step on block 2 touches region.* after copy of stream 1"):
            s.compute(2, 8)
        thaw(device)
        await s.until_told(1)
        s.compute(2, 8)
        s.copier.close()

    run(scene())


def test_a_block_read_before_its_copy_back_has_ended_is_found() -> None:
    """By a step of the compute stream, and by a host that gives the place in host memory to another block."""

    async def scene() -> None:
        device = ShimDevice(3)
        s = Scene(device)
        freeze(device)
        s.back([4], [5])
        await s.until_on_device(1)
        with pytest.raises(
            MissingDependency, match=r"a step that reads block 4 touches region.* after copy of stream 1"
        ):
            s.read(4, [])
        with pytest.raises(MissingDependency, match="the host touches host memory"):
            device.host_access(s.host, 0, len(s.host.bytes_U8), write=True)
        thaw(device)
        await s.until_told(1)
        s.device.host_access(s.host, 0, len(s.host.bytes_U8), write=True)
        s.copier.close()

    run(scene())


def test_close_waits_for_what_is_on_the_device_and_drops_the_rest() -> None:
    """Five copies, of which the device has two and stands still: they are carried out before `close` returns, nobody is
    told, and the other three touch nothing."""

    async def scene() -> None:
        device = ShimDevice(4)
        s = Scene(device)
        s.compute(2, 9)
        freeze(device)
        for host in range(5):
            s.out([2], [host])
        await s.until_on_device(COPIES_IN_FLIGHT_MAX)
        closing = asyncio.create_task(asyncio.to_thread(s.copier.close))
        await wait_until(lambda: s.copier._closed)
        assert not closing.done()
        thaw(device)
        await closing
        s.host_looks()
        assert s.host_blocks() == [9] * COPIES_IN_FLIGHT_MAX + [0] * (HOST_BLOCKS - COPIES_IN_FLIGHT_MAX)
        assert len(s.host.accesses) == COPIES_IN_FLIGHT_MAX * LAYERS
        assert s.reported == []
        s.copier.close()

    run(scene())


def test_a_copier_that_does_not_wait_at_its_end_is_found() -> None:
    """The same with events that have always passed: the memory would be given back under the copy."""

    async def scene() -> None:
        device = HastyDevice(5)
        device.hasty = True
        s = Scene(device)
        freeze(device)
        s.out([2], [0])
        await s.until_on_device(1)
        s.copier.close()
        with pytest.raises(MissingDependency, match="the host touches region"):
            s.host_looks()

    run(scene())


def broken() -> Any:
    raise DeviceError("an illegal memory access was encountered")


def test_a_device_that_fails_ends_every_copy_with_its_error() -> None:
    """Those that it had, the one that waited, and one that is asked for afterwards; closing does not wait for it."""

    async def scene() -> None:
        device = ShimDevice(6)
        s = Scene(device)
        freeze(device)
        for host in range(3):
            s.out([2], [host])
        await s.until_on_device(COPIES_IN_FLIGHT_MAX)
        device.run_some = broken  # type: ignore[method-assign]
        await s.until_told(3)
        s.back([1], [4])
        await s.until_told(4)
        assert [number for number, _ in s.reported] == [0, 1, 2, 3]
        assert {str(error) for _, error in s.reported} == {"an illegal memory access was encountered"}
        assert {type(error) for _, error in s.reported} == {DeviceError}
        s.copier.close()

    run(scene())


def test_a_copy_that_cannot_be_queued_leaves_the_one_before_it_to_land() -> None:
    """The device finds no memory for the second one's table: nobody is told before the first has ended."""

    class Full(ShimDevice):
        refused = 0

        def copy(self, stream: ShimStream, dst: Memory, src: Memory, ops: WriteOps) -> None:
            if src.accesses:
                self.refused += 1
                raise DeviceError("out of memory")
            super().copy(stream, dst, src, ops)

    async def scene() -> None:
        device = Full(7)
        s = Scene(device)
        freeze(device)
        s.out([2], [0])
        s.out([3], [1])
        await wait_until(lambda: device.refused == 1)
        assert s.reported == []
        thaw(device)
        await s.until_told(2)
        s.host_looks()
        assert [str(error) for _, error in s.reported] == ["out of memory"] * 2
        s.copier.close()

    run(scene())


def test_a_stream_that_takes_no_event_is_told_like_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the very start of a copy, on the control thread: it comes by `done`, not out of `start`."""

    async def scene() -> None:
        s = Scene(ShimDevice(8))

        def no_event() -> ShimEvent:
            raise DeviceError("the context is lost")

        with monkeypatch.context() as patch:
            patch.setattr(s.device.compute, "record", no_event)
            s.out([2], [0])
            assert s.reported == []
            await s.until_told(1)
        assert [str(error) for _, error in s.reported] == ["the context is lost"]
        s.copier.close()

    run(scene())


@pytest.mark.parametrize(("device", "host"), [(BLOCKS, 0), (0, HOST_BLOCKS)])
def test_a_block_outside_of_either_side_is_a_bug_of_ours(device: int, host: int) -> None:
    """Told as such; nothing is touched."""

    async def scene() -> None:
        s = Scene(ShimDevice(9))
        s.out([device], [host])
        await s.until_told(1)
        assert isinstance(s.reported[0][1], WriteOutOfBounds)
        assert (s.region.accesses, s.host.accesses) == ([], [])
        s.copier.close()

    run(scene())


def test_a_rehearsal_leaves_the_region_as_it_was() -> None:
    """A block out and back, waited for."""

    async def scene() -> None:
        s = Scene(ShimDevice(10))
        s.compute(0, 3)
        s.compute(1, 4)
        s.copier.rehearse()
        s.host_looks()
        assert s.host_blocks() == [3] + [0] * (HOST_BLOCKS - 1)
        assert s.region.bytes_U8.reshape(LAYERS, BLOCKS, RECORD)[:, :3, 0].tolist() == [[3, 4, 0]] * LAYERS
        s.copier.close()

    run(scene())


def test_over_the_stand_in_of_a_device() -> None:
    """Copies come when the copier's thread looks, both ways; the regions can be closed after it."""

    async def scene() -> None:
        driver = HostDriver()
        region = DeviceRegion(driver, LAYOUT.region_bytes(BLOCKS), "region", shared=False)
        host = Region.create(LAYOUT.region_bytes(HOST_BLOCKS), "host")
        pinned = driver.register(host.array_U8)
        copier = BlockCopier(streams=driver.streams, places=PLACES, device=region, host=pinned, name="test")
        copier.rehearse()
        random_U8 = np.random.default_rng(1).integers(0, 256, region.nbytes, np.uint8)
        region.memory[:] = random_U8
        was_LBR = random_U8.reshape(LAYERS, BLOCKS, RECORD)
        ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        copier.start(copy_of([5, 1], [0, 7]), ended.put_nowait)
        assert await ended.get() is None
        assert (host.array_U8.reshape(LAYERS, HOST_BLOCKS, RECORD)[:, [0, 7]] == was_LBR[:, [5, 1]]).all()
        copier.start(copy_of([2, 3], [7, 0], back=True), ended.put_nowait)
        assert await ended.get() is None
        now_LBR = np.array(region.memory).reshape(LAYERS, BLOCKS, RECORD)
        assert (now_LBR == was_LBR[:, [0, 1, 1, 5, 4, 5]]).all()
        copier.close()
        pinned.close()
        host.close()
        region.close()

    run(scene())
