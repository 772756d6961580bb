"""Rdma into memory of a device: what the card has written is flushed before a seal is told, and before a fence is;
where it cannot be, neither is. And out of it: nothing is read before the device has computed it. On a card made of
arrays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.errors import InvalidField
from baton.ids import Pair
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DeviceError, PairBeingFenced, Seal
from kvtransfer.transports.rdma import DeviceBytes
from tests.conformance.transport_kits import RDMA_KITS, Everything, Kit
from tests.conformance.transport_suite import (
    a_closed_port_lets_go_of_everything,
    an_abandoned_grant_completes_and_others_go_on,
    an_orderly_close_is_no_reason_for_a_fence,
    expected_region,
    record_ops,
    writes_outside_a_region_are_not_taken,
)
from tests.conformance.transport_suite_more import (
    a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence,
    head_ranges_land_in_records_of_another_width,
    many_writers_at_once_each_in_its_own_blocks,
    random_ops_of_any_length_land_as_posted,
    what_is_posted_after_a_fence_lands_nowhere,
)
from tests.support.fake_device import FakeDriver
from tests.support.offered import RDMA, TCP, offer
from tests.support.rdma_double import DoubleQueuePairs
from tests.support.rdma_harness import EPOCH, GRANT, PAIR, Receiving, double, linked, receiving, seal_of
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, run
from tests.support.shm_peer import source_bytes

__all__ = ["double"]

pytestmark = pytest.mark.usefixtures("double")
SOURCE_U8 = source_bytes(1, REGION_NBYTES)


class LooseDriver(FakeDriver):
    """Of a device that sees what a card has written when it is flushed, and not before. `broken`: why it is not;
    `fails`: so many times."""

    broken = ""
    fails = 0

    def allocate(self, nbytes: int) -> int:
        self.seen_U8 = np.zeros(nbytes, np.uint8)
        self._address = super().allocate(nbytes)
        return self._address

    def memory(self, address: int, nbytes: int) -> Any:
        return self.seen_U8

    def flush_remote_writes(self) -> None:
        if self.broken or self.fails:
            self.fails = max(0, self.fails - 1)
            raise DeviceError(self.broken or "not now")
        self.seen_U8[:] = super().memory(self._address, len(self.seen_U8))


class OrderedDriver(FakeDriver):
    """Of a device that must not be flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = replace(self.allowed, ordered=True)

    def flush_remote_writes(self) -> None:
        raise AssertionError("there is nothing to flush")


class Seen(Recorder):
    """What the device sees in the moment in which a seal, or the end of a writer, is told."""

    def __init__(self, look: Callable[[], np.ndarray]) -> None:
        super().__init__()
        self._look = look
        self.at_seal: list[np.ndarray] = []

    def seal_landed(self, pair: Pair, seal: Seal) -> None:
        self.at_seal.append(self._look().copy())
        super().seal_landed(pair, seal)


@asynccontextmanager
async def on(driver: FakeDriver) -> AsyncIterator[tuple[Receiving, Seen]]:
    """A receiver with its region on this device."""
    region = DeviceRegion(driver, REGION_NBYTES, "region", shared=False)
    try:
        events = Seen(lambda: np.array(region.memory))
        async with receiving(registered=DeviceBytes(region), events=events) as r:
            yield r, events
    finally:
        region.close()


def figures(r: Receiving) -> tuple[object, ...]:
    reported = r.port.describe()
    return tuple(reported[name] for name in ("seals", "flushes", "flush_failed", "fences_waiting", "fences_ended"))


def test_when_a_seal_is_told_the_device_sees_all_of_it() -> None:
    """Two batches and two seals on a device that sees nothing of itself: at each seal all that was posted before."""

    async def test() -> None:
        async with on(LooseDriver()) as (r, events), linked(r, SOURCE_U8) as (link, reported):
            assert r.port.describe()["registered"] == (
                "double0:1, device memory as peer memory (no dma-buf: the device's driver makes none)"
            )
            batches = [record_ops(2, 20), record_ops(3, 20)]
            for number, ops in enumerate(batches, 1):
                link.post(GRANT, ops)
                await reported.until(lambda e, count=number: len(e.completed) == count)  # type: ignore[misc]
                link.seal(seal_of(number))
                await r.events.until(lambda e, count=number: len(e.seals) == count)  # type: ignore[misc]
            assert np.array_equal(events.at_seal[0], expected_region(SOURCE_U8, batches[0]))
            assert np.array_equal(events.at_seal[1], expected_region(SOURCE_U8, *batches))
            assert figures(r) == (2, 2, 0, 0, 0)

    run(test())


def test_a_device_with_an_order_of_its_own_is_not_flushed() -> None:
    async def test() -> None:
        async with on(OrderedDriver()) as (r, events), linked(r, SOURCE_U8) as (link, reported):
            link.post(GRANT, record_ops(2))
            await reported.until(lambda e: bool(e.completed))
            link.seal(seal_of())
            await r.events.until(lambda e: bool(e.seals))
            assert np.array_equal(events.at_seal[0], expected_region(SOURCE_U8, record_ops(2)))
            assert figures(r) == (1, 0, 0, 0, 0)

    run(test())


def test_a_seal_that_cannot_be_flushed_counts_for_nothing_and_frees_nothing() -> None:
    """The writer is told why, its link ends; no seal is told, and though its queue pairs are destroyed there is no
    evidence for its blocks until the device can be flushed. Then it has seen all that had come before."""

    async def test() -> None:
        driver = LooseDriver()
        async with on(driver) as (r, _), linked(r, SOURCE_U8) as (link, reported):
            link.post(GRANT, record_ops(2))
            await reported.until(lambda e: bool(e.completed))
            driver.broken = "cudaDeviceFlushGPUDirectRDMAWrites: an illegal memory access was encountered"
            link.seal(seal_of())
            await reported.until(lambda e: bool(e.lost))
            assert reported.lost == [(PAIR, "refused by the receiver: FLUSH")]
            assert r.refused == {"FLUSH": 1}
            assert (r.events.seals, r.events.gone) == ([], [])
            assert not any(not qps.sends for qps in DoubleQueuePairs.alive.values())
            with pytest.raises(PairBeingFenced):
                r.port.expect(PAIR, EPOCH)
            (seals, _, failed, waiting, ended) = figures(r)
            assert (seals, waiting, ended) == (0, 1, 0)
            assert isinstance(failed, int) and failed >= 2  # the seal's, and the fence's so far
            assert not driver.seen_U8.any()
            driver.broken = ""
            await r.events.until(lambda e: bool(e.gone))
            assert r.events.gone == [(PAIR, EPOCH, "1 reset, its queue pairs destroyed")]
            assert np.array_equal(driver.seen_U8, expected_region(SOURCE_U8, record_ops(2)))
            assert r.events.seals == []

    run(test())


def test_a_fence_has_its_evidence_when_the_device_sees_what_came_before() -> None:
    """Nothing was sealed: what has landed is flushed all the same, before its blocks are anybody else's."""

    async def test() -> None:
        driver = LooseDriver()
        async with on(driver) as (r, _), linked(r, SOURCE_U8) as (link, reported):
            link.post(GRANT, record_ops(2))
            await reported.until(lambda e: bool(e.completed))
            assert not driver.seen_U8.any()
            r.port.fence(PAIR, EPOCH)
            await r.events.until(lambda e: bool(e.gone))
            assert np.array_equal(driver.seen_U8, expected_region(SOURCE_U8, record_ops(2)))
            assert figures(r) == (0, 1, 0, 0, 1)

    run(test())


def test_a_fence_that_is_tried_again_leaves_the_descriptors_of_others_alone() -> None:
    """Its completion channel is closed with its queue pairs: what is opened next gets the number, and is heard."""

    async def test() -> None:
        driver, loop, came = LooseDriver(), asyncio.get_running_loop(), asyncio.Event()
        async with on(driver) as (r, _), linked(r, SOURCE_U8):
            fd = r.qps.fd
            driver.fails = 3
            r.port.fence(PAIR, EPOCH)
            taken = [os.eventfd(0)]
            while taken[-1] != fd:
                taken.append(os.eventfd(0))
            loop.add_reader(fd, came.set)
            await r.events.until(lambda e: bool(e.gone))
            os.eventfd_write(fd, 1)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await came.wait()
            finally:
                loop.remove_reader(fd)
                for each in taken:
                    os.close(each)

    run(test())


def test_a_port_closes_though_its_device_cannot_be_flushed() -> None:
    """Nobody is told of anything any more; the queue pairs are destroyed, and the card is let go of."""

    async def test() -> None:
        driver = LooseDriver()
        async with on(driver) as (r, _), linked(r, SOURCE_U8):
            device: Any = r.memory.device
            driver.broken = "the device is lost"
            r.port.fence(PAIR, EPOCH)
            await r.port.close()
            assert not any(not qps.sends for qps in DoubleQueuePairs.alive.values())
            assert r.events.gone == []
            await r.memory.close()
            assert device.closed

    run(test())


def test_a_receiver_whose_device_cannot_be_flushed_at_all_does_not_offer_rdma() -> None:
    """Alone in the list it is an error that says why, before others it is left out; a writer only reads its region."""

    async def test() -> None:
        driver = FakeDriver()
        driver.allowed = replace(driver.allowed, host_flushes=False)
        region = DeviceRegion(driver, REGION_NBYTES, "region", shared=False)
        assert (await offer(region, RDMA, TCP)).offered == (TCP,)
        with pytest.raises(InvalidField, match=r"rdma alone, which does not work here: what a card writes .* late"):
            await offer(region, RDMA)
        assert (await offer(region, RDMA, TCP, remote_writes=False)).offered == (RDMA, TCP)
        region.close()

    run(test())


@pytest.mark.parametrize(
    "case",
    [
        a_closed_port_lets_go_of_everything,
        an_abandoned_grant_completes_and_others_go_on,
        an_orderly_close_is_no_reason_for_a_fence,
        writes_outside_a_region_are_not_taken,
        a_connect_that_is_given_up_at_any_step_leaves_nothing_to_fence,
        head_ranges_land_in_records_of_another_width,
        many_writers_at_once_each_in_its_own_blocks,
        random_ops_of_any_length_land_as_posted,
        what_is_posted_after_a_fence_lands_nowhere,
    ],
    ids=lambda case: case.__name__,
)
def test_from_a_source_that_is_computed_late_all_is_as_elsewhere(
    case: Callable[[Kit], Coroutine[None, None, None]],
) -> None:
    """The cases of all transports that need no second process, from the stand-in device to the stand-in device."""
    run(case(RDMA_KITS[1]))


@pytest.mark.parametrize("sealed", [False, True])
def test_what_a_writer_lets_go_of_by_its_own_word_is_flushed(sealed: bool) -> None:
    """Posted and completed. With a seal of it the device has been flushed already; without one the end of the grant
    does it, so that nothing of it is on its way to a block that is free from then on."""

    async def test() -> None:
        driver, ops = LooseDriver(), record_ops(2, 20)
        async with on(driver) as (r, _), linked(r, SOURCE_U8) as (link, reported):
            r.port.allow(PAIR, EPOCH, GRANT, Everything())
            link.post(GRANT, ops)
            await reported.until(lambda e: bool(e.completed))
            if sealed:
                link.seal(replace(seal_of(), grant=GRANT))
                await r.events.until(lambda e: bool(e.seals))
            assert figures(r)[:3] == (int(sealed), int(sealed), 0)
            r.port.forbid(GRANT)
            assert figures(r)[:3] == (int(sealed), 1, 0)
            assert np.array_equal(driver.seen_U8, expected_region(SOURCE_U8, ops))
            r.port.forbid(GRANT)
            assert figures(r)[:3] == (int(sealed), 1, 0)

    run(test())


def test_a_grant_that_ends_on_a_device_that_cannot_be_flushed_ends_its_link() -> None:
    async def test() -> None:
        driver = LooseDriver()
        async with on(driver) as (r, _), linked(r, SOURCE_U8) as (link, reported):
            r.port.allow(PAIR, EPOCH, GRANT, Everything())
            link.post(GRANT, record_ops(2, 20))
            await reported.until(lambda e: bool(e.completed))
            driver.fails = 1
            assert not r.port.forbid(GRANT)
            await reported.until(lambda e: bool(e.lost))
            assert (r.port.describe()["refused"], figures(r)[2]) == ({"FLUSH": 1}, 1)

    run(test())
