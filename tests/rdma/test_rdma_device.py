"""RDMA on a real device: what the device refuses, and what becomes of links when it goes away and comes back."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import subprocess
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch
from cli.doctor import check_rdma, works
from kvtransfer.device.driver import DmaBuf, GpuDirect
from kvtransfer.device.host_driver import HostDriver
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import ConnectError, Seal
from kvtransfer.transports.rdma import (
    RDMA_LIMITS,
    DeviceBytes,
    HostBytes,
    LinkEnds,
    ProbeLost,
    QueuePairs,
    RdmaDevice,
    RdmaMemory,
    RdmaUnproved,
)
from kvtransfer.transports.rdma_ports import counters_of, find_ports
from kvtransfer.transports.rdma_verbs import Poster, QueuePairFailed, RdmaUnavailable
from kvtransfer.transports.settings import RdmaConfig
from kvtransfer.transports.writer_link import LinkParts
from tests.conformance.transport_kits import RDMA_KITS, OwningLink
from tests.conformance.transport_suite import EPOCH, GRANT, PAIR, expected_region, linked, receiving, record_ops
from tests.rdma.device_link import ADD_LINK, REMOVE_LINK, note_packets
from tests.support.shm_harness import REGION_NBYTES, Recorder, run
from tests.support.shm_peer import source_bytes

KIT, DEVICE_KIT = RDMA_KITS
WAIT_MS = 5_000


class Two:
    """Two connected ends in this process, each on a registration of its own, with nothing above them."""

    def __init__(self) -> None:
        config = RdmaConfig(qps=1, ack_timeout_code=10, retries_max=3)
        self.source_U8, self.region_U8 = source_bytes(1, REGION_NBYTES), np.zeros(REGION_NBYTES, np.uint8)
        self.writer_device = RdmaDevice(
            HostBytes(lambda: self.source_U8), config, remote_writes=False, limits=RDMA_LIMITS
        )
        self.receiver_device = RdmaDevice(
            HostBytes(lambda: self.region_U8), config, remote_writes=True, limits=RDMA_LIMITS
        )
        self.writer = QueuePairs(self.writer_device, 1, sends=True)
        self.receiver = QueuePairs(self.receiver_device, 1, sends=False)
        self.receiver.connect(self.writer.ends)
        self.writer.connect(self.receiver.ends)
        self.poster = self.writer.poster(dst_base=self.receiver_device.keys.base, rkey=self.receiver_device.keys.rkey)

    def close(self) -> None:
        self.writer.destroy()
        self.receiver.destroy()
        self.writer_device.close()
        self.receiver_device.close()


def completed(poster: Poster, count: int) -> list[tuple[int, int]]:
    wake = os.eventfd(0)
    found: list[tuple[int, int]] = []
    try:
        for _ in range(10):
            found += poster.wait(wake, 0, WAIT_MS)[0]
            if len(found) >= count:
                break
    finally:
        os.close(wake)
    return found


def test_the_doctor_finds_the_device() -> None:
    """Where all the other tests here run, `baton doctor` says that RDMA works; without the device, that it does not."""
    assert works(check_rdma()), check_rdma()
    note_packets()
    subprocess.run(REMOVE_LINK, shell=True, check=True)
    try:
        assert not works(check_rdma())
    finally:
        subprocess.run(ADD_LINK, shell=True, check=True)
    assert works(check_rdma()), check_rdma()


def test_a_late_write_is_refused_by_the_device_after_a_fence() -> None:
    """A write lands. Then the receiver's queue pairs are destroyed, and a writer that knows nothing of it posts another
    one: its own device reports that it was never acknowledged, and the region is as it was."""
    two = Two()
    try:
        ops = record_ops(1)
        two.poster.post_writes(0, ops.src[:32], ops.dst[:32], ops.nbytes[:32], 7)
        assert completed(two.poster, 1) == [(7, 0)]
        before_U8 = two.region_U8.copy()
        assert before_U8.any()
        two.receiver.destroy()
        two.poster.post_writes(0, ops.src[32:64], ops.dst[32:64], ops.nbytes[32:64], 8)
        late = completed(two.poster, 32)
        enums = two.writer_device.verbs.enums
        # On a queue pair in error every request completes: the first says why, the others that they were not tried.
        assert late == [(8, enums.IBV_WC_RETRY_EXC_ERR)] + [(8, enums.IBV_WC_WR_FLUSH_ERR)] * 31
        assert np.array_equal(two.region_U8, before_U8)
    finally:
        two.close()


def probe(two: Two) -> int:
    """Send the probe and wait for the device's word of it: how many were acknowledged."""
    there = two.receiver_device.probe_keys
    two.writer.post_probes(there.base, there.rkey)
    assert select.select([two.writer.fd], [], [], WAIT_MS / 1000)[0], "the device says nothing of the probe"
    return two.writer.take_probes()


def test_a_probe_is_one_whole_packet_beside_the_region() -> None:
    """It arrives in its own place, as large as the path takes, with its queue pair's index as immediate; the region is
    as it was, and data goes the same way afterwards."""
    two = Two()
    try:
        two.writer_device._probe_U8[:] = 7
        assert probe(two) == 1
        assert two.receiver.take_immediates() == [(0, socket.htonl(0))]
        nbytes = 128 << min(two.writer.ends.mtu, two.receiver.ends.mtu)
        landed_U8 = two.receiver_device._probe_U8
        assert nbytes >= 256
        assert (landed_U8[:nbytes] == 7).all() and not landed_U8[nbytes:].any()
        assert not two.region_U8.any()
        ops = record_ops(1)
        two.poster.post_writes(0, ops.src[:32], ops.dst[:32], ops.nbytes[:32], 7)
        assert completed(two.poster, 1) == [(7, 0)]
        assert two.region_U8.any()
    finally:
        two.close()


def test_a_probe_that_nobody_acknowledges_is_lost() -> None:
    """The other end's queue pairs are gone: the device gives up after its repeats, and says so."""
    two = Two()
    try:
        two.receiver.destroy()
        enums = two.writer_device.verbs.enums
        with pytest.raises(ProbeLost, match=f"completed with status {int(enums.IBV_WC_RETRY_EXC_ERR)}$"):
            probe(two)
    finally:
        two.close()


def test_a_link_whose_data_goes_astray_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words are said, and the writer's packets go to queue pairs that nobody has. The connect fails with that
    reason; the receiver fences nothing, and in the same epoch the pair links when its packets find their way."""
    connect = QueuePairs.connect

    def astray(qps: QueuePairs, peer: LinkEnds) -> None:
        others = tuple(replace(qp, number=qp.number ^ 0x7F0000) for qp in peer.qps)
        connect(qps, replace(peer, qps=others) if qps._sends else peer)

    async def test() -> None:
        async with receiving(KIT) as r:
            with monkeypatch.context() as patch:
                patch.setattr(QueuePairs, "connect", astray)
                with pytest.raises(RdmaUnproved, match="the devices do not reach each other"):
                    async with linked(r, source_bytes(1, REGION_NBYTES)):
                        raise AssertionError("there is no link")
            async with linked(r, source_bytes(1, REGION_NBYTES)) as (it, events):
                it.post(GRANT, record_ops(1))
                await events.until(lambda e: bool(e.completed))
                assert events.completed[0][3] is True
            assert r.port.describe()["links_unproved"] == 1
            assert r.events.gone == []

    run(test())


def test_a_write_outside_the_region_is_refused_by_the_device() -> None:
    """Past the end of the registered region, which our own library would not let out: the device answers with an error
    of access, both ends are in error, nothing has landed."""
    two = Two()
    try:
        where = np.array([0], np.int64)
        two.poster.post_writes(0, where, where + REGION_NBYTES - 1, np.array([4096], np.int64), 1)
        assert completed(two.poster, 1) == [(1, two.writer_device.verbs.enums.IBV_WC_REM_ACCESS_ERR)]
        assert not two.region_U8.any()
        with pytest.raises(QueuePairFailed):
            two.receiver.take_immediates()
    finally:
        two.close()


def test_the_structures_of_pyverbs_are_found() -> None:
    """C posts on what it has found behind pyverbs' objects: a chain with one completion, and a seal."""
    two = Two()
    try:
        ops = record_ops(3, 20)
        two.poster.post_writes(0, ops.src, ops.dst, ops.nbytes, 4)
        two.poster.post_seal(0, 0x12345678, 5)
        assert completed(two.poster, 2) == [(4, 0), (5, 0)]
        assert two.receiver.take_immediates() == [(0, socket.htonl(0x12345678))]
        assert np.array_equal(two.region_U8, expected_region(two.source_U8, ops))
    finally:
        two.close()


def test_what_is_written_moves_the_device_counters() -> None:
    """The device's own counter of packets rises by what the bytes need at the path's MTU: no fall back can do that."""
    port = find_ports()[0]

    async def test() -> None:
        async with receiving(KIT) as r, linked(r, source_bytes(6, REGION_NBYTES)) as (it, events):
            before = counters_of(port.device, port.number)["sent_pkts"]
            for _ in range(8):
                it.post(GRANT, record_ops(1))
            await events.until(lambda e: len(e.completed) == 8)
            moved = counters_of(port.device, port.number)["sent_pkts"] - before
            assert moved >= 8 * len(record_ops(1).src), moved

    run(test())


def test_the_link_is_taken_away_and_comes_back() -> None:
    """The device vanishes under a link with a long queue: every batch completes, the link is lost, the pair is fenced,
    and while it is away a connection is refused, with the reason. When it is back the same port links again."""

    async def test() -> None:
        async with receiving(KIT) as r:
            async with linked(r, source_bytes(1, REGION_NBYTES)) as (it, events):
                for _ in range(400):
                    it.post(GRANT, record_ops(1))
                await events.until(lambda e: bool(e.completed))
                note_packets()
                removing = await asyncio.create_subprocess_shell(REMOVE_LINK)
                await events.until(lambda e: bool(e.lost))
                await r.events.until(lambda e: bool(e.gone))
                assert len(events.completed) == 400
                assert r.events.gone_epochs == [(PAIR, EPOCH)]
                assert await removing.wait() == 0
            assert isinstance(it, OwningLink)
            parts = LinkParts(r.port.expect(PAIR, Epoch(EPOCH + 1)), PAIR, events, asyncio.get_event_loop())
            with pytest.raises(ConnectError):
                await it.connect(parts, it.memory)
            adding = await asyncio.create_subprocess_shell(ADD_LINK)
            assert await adding.wait() == 0
            async with asyncio.timeout(WAIT_MS / 1000 * 4):
                while r.port.describe()["device"] == "none":  # noqa: ASYNC110 - the port looks by a timer
                    await asyncio.sleep(0.1)
            after = Recorder()
            source_U8 = source_bytes(2, REGION_NBYTES)
            again = await KIT.link(r.port.expect(PAIR, Epoch(EPOCH + 1)), PAIR, source_U8, after)
            r.region.array_U8[:] = 0
            again.post(GRANT, record_ops(2))
            await after.until(lambda e: bool(e.completed))
            again.seal(Seal(grant=GRANT, epoch=Epoch(EPOCH + 1), writes=1, bytes_written=1))
            await r.events.until(lambda e: bool(e.seals))
            assert np.array_equal(r.region.array_U8, expected_region(source_U8, record_ops(2)))
            await again.close()

    run(test())


class OffersDmaBuf(HostDriver):
    """The stand-in device, with a descriptor that it calls a dma-buf."""

    def __init__(self) -> None:
        super().__init__()
        self.fds: list[int] = []

    def gpudirect(self) -> GpuDirect:
        return replace(super().gpudirect(), dma_buf=True)

    def dma_buf(self, address: int, nbytes: int) -> DmaBuf:
        self.fds.append(os.dup(self._own[address].fd))
        return DmaBuf(fd=self.fds[-1], offset=0)


def test_a_card_that_takes_no_dma_buf_is_given_peer_memory_and_says_so() -> None:
    """Soft-RoCE registers none: the descriptor is refused by it, and closed; the region is registered by its address,
    with the reason in what the node tells."""

    async def test() -> None:
        driver = OffersDmaBuf()
        region = DeviceRegion(driver, REGION_NBYTES, "region", shared=False)
        memory = RdmaMemory(region=DeviceBytes(region), config=RdmaConfig(), remote_writes=True)
        device = memory.device
        assert device is not None
        how = device.registered_as
        assert "device memory as peer memory" in how and device.keys.base == region.address
        print(how)
        assert "Failed to register a dma-buf MR" in how
        assert os.strerror(errno.EOPNOTSUPP) in how
        (fd,) = driver.fds
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        await memory.close()
        region.close()

    run(test())


def test_addresses_that_no_card_knows_are_refused_with_what_to_do() -> None:
    """As those of a GPU whose memory no module of the kernel speaks for."""
    nowhere: Any = SimpleNamespace(driver=HostDriver(), address=(1 << 46) + (1 << 45), nbytes=4096)
    with pytest.raises(RdmaUnavailable, match=r"as peer memory: .*Bad address; load the kernel's module"):
        RdmaDevice(DeviceBytes(nowhere), RdmaConfig(), remote_writes=True, limits=RDMA_LIMITS)


def test_a_region_of_a_device_is_flushed_for_each_seal() -> None:
    """Written by the card, from a source that is computed late."""

    async def test() -> None:
        async with receiving(DEVICE_KIT) as r, linked(r, source_bytes(6, REGION_NBYTES)) as (it, events):
            for number in range(3):
                it.post(GRANT, record_ops(1))
                await events.until(lambda e, count=number + 1: len(e.completed) == count)  # type: ignore[misc]
                it.seal(Seal(grant=GRANT, epoch=EPOCH, writes=number, bytes_written=1))
                await r.events.until(lambda e, count=number + 1: len(e.seals) == count)  # type: ignore[misc]
            reported = r.port.describe()
            assert (reported["seals"], reported["flushes"], reported["flush_failed"]) == (3, 3, 0)
            assert np.array_equal(r.region.array_U8, expected_region(source_bytes(6, REGION_NBYTES), record_ops(1)))

    run(test())
