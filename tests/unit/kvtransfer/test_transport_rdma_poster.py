"""The native poster against a device that does nothing but keep what it is handed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.ids import Epoch
from kvtransfer.transport import ConnectError, DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports import rdma
from kvtransfer.transports.rdma import (
    CODEC,
    Hold,
    LinkEnds,
    QpAddress,
    RdmaWelcome,
    RdmaWriterLink,
    RegionAddress,
)
from kvtransfer.transports.rdma_verbs import (
    Poster,
    QueuePairFailed,
    rdma_library,
)
from kvtransfer.transports.writer_link import LinkParts
from tests.support.null_verbs import NullVerbs
from tests.support.shm_harness import Recorder, pair_of

WRITE, WRITE_WITH_IMM, SIGNALED = 0, 1, 2
"""enum ibv_wr_opcode, ibv_send_flags (infiniband/verbs.h)."""
POSTED = np.dtype(
    [
        ("wr_id", "u8"), ("remote", "u8"), ("local", "u8"), ("length", "u4"), ("lkey", "u4"), ("rkey", "u4"),
        ("opcode", "u4"), ("flags", "u4"), ("immediate_be", "u4"), ("chain", "u4"), ("_", "u4"),
    ]
)  # fmt: skip


class NullDevice:
    """Keeps the first `log_max` requests; more are refused as a full queue refuses them."""

    def __init__(self, log_max: int) -> None:
        library = rdma_library()
        if library is None:
            pytest.skip("the poster is built where libibverbs-dev is installed")
        self.poll_max = library.poll_max
        self.log = np.zeros(log_max, POSTED)
        self.null = NullVerbs(library, self.log)
        self.channel = os.eventfd(0)
        self.wake = os.eventfd(0)
        self.poster = Poster(
            qps=[self.null.qp],
            cq=self.null.cq,
            channel_fd=self.channel,
            src_base=1 << 40,
            lkey=3,
            dst_base=1 << 41,
            rkey=5,
            take_event=self._take_event,
        )
        self.events_taken = 0

    def _take_event(self) -> None:
        self.events_taken += 1

    @property
    def posted(self) -> np.ndarray:
        return self.log[: self.null.logged]

    def close(self) -> None:
        os.close(self.channel)
        os.close(self.wake)


def ops(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    return tuple(rng.integers(1, 1 << 30, count, dtype=np.int64) for _ in range(3))  # type: ignore[return-value]


@pytest.mark.parametrize("count", [1, 2, 32, 256])
def test_a_chain_is_one_doorbell_and_one_completion(count: int) -> None:
    """Every write as given, at both regions' addresses and keys, in order; only the last asks for a completion."""
    device = NullDevice(300)
    src_W, dst_W, nbytes_W = ops(count)
    device.poster.post_writes(0, src_W, dst_W, nbytes_W, 9)
    posted = device.posted
    assert len(posted) == count
    assert (posted["chain"] == 1).all()
    assert (posted["opcode"] == WRITE).all()
    assert posted["flags"].tolist() == [0] * (count - 1) + [SIGNALED]
    assert (posted["local"] == (1 << 40) + src_W).all()
    assert (posted["remote"] == (1 << 41) + dst_W).all()
    assert (posted["length"] == nbytes_W).all()
    assert set(posted["lkey"]) == {3} and set(posted["rkey"]) == {5}
    completions, waited_us = device.poster.wait(device.wake, 0, 0)
    assert completions == [(9, 0)]
    assert waited_us >= 0
    device.close()


def test_a_seal_is_an_empty_write_with_its_number() -> None:
    """The immediate is in network order, cut to the 32 bits that there are; it completes."""
    device = NullDevice(10)
    device.poster.post_seal(0, (7 << 32) | 0x01020304, 11)
    (posted,) = device.posted
    assert posted["opcode"] == WRITE_WITH_IMM
    assert posted["length"] == 0
    assert posted["rkey"] == 5
    assert socket.ntohl(int(posted["immediate_be"])) == 0x01020304
    assert device.poster.wait(device.wake, 0, 0)[0] == [(11, 0)]
    device.close()


def test_a_number_below_zero_comes_back_as_it_was_posted() -> None:
    """Chains have numbers above 0, parts of seals below: a completion names the one that was posted."""
    device = NullDevice(1)
    device.poster.post_seal(0, 1, -3)
    assert device.poster.wait(device.wake, 0, 0)[0] == [(-3, 0)]
    device.close()


def test_a_refused_post_is_an_error() -> None:
    """The queue takes ten of twelve: the link is told, with the driver's errno."""
    device = NullDevice(10)
    with pytest.raises(QueuePairFailed, match="errno 12"):
        device.poster.post_writes(0, *ops(12), 1)
    with pytest.raises(QueuePairFailed, match="errno 12"):
        device.poster.post_seal(0, 1, 1)
    device.close()


def test_a_chain_that_is_too_long_is_not_posted() -> None:
    """More than the C code has room for is refused whole."""
    device = NullDevice(600)
    with pytest.raises(QueuePairFailed, match="errno 22"):
        device.poster.post_writes(0, *ops(device.poster.chain_wrs_max + 1), 1)
    assert len(device.posted) == 0
    device.close()


def test_completions_beyond_one_call_come_with_the_next() -> None:
    """A hundred seals: at most `poll_max` completions a call, none lost, none twice, in order."""
    device = NullDevice(100)
    for number in range(100):
        device.poster.post_seal(0, number, number)
    first, _ = device.poster.wait(device.wake, 0, 0)
    second, _ = device.poster.wait(device.wake, 0, 0)
    assert len(first) == device.poll_max
    assert [number for number, _ in first + second] == list(range(100))
    device.close()


@pytest.mark.parametrize("spin_us", [0, 200])
def test_a_sleeping_poster_is_woken(spin_us: int) -> None:
    """With nothing on its way it sleeps, without end if need be, until its descriptor says that there is work."""
    device = NullDevice(1)
    for descriptor, events_taken in ((device.wake, 0), (device.channel, 1)):
        os.eventfd_write(descriptor, 1)
        assert device.poster.wait(device.wake, spin_us, -1)[0] == []
        assert device.events_taken == events_taken
    device.close()


def test_a_device_that_goes_away_under_the_poster_is_told_as_such() -> None:
    """The completion channel is readable because the device is gone, and taking the event from it fails: the link's end
    has a reason, and not an error that nobody foresaw."""

    def refuse() -> None:
        raise QueuePairFailed("Failed to get CQ event")

    device = NullDevice(1)
    try:
        os.eventfd_write(device.channel, 1)
        device.poster._take_event = refuse
        with pytest.raises(QueuePairFailed, match="Failed to get CQ event"):
            device.poster.wait(device.wake, 0, 1_000)
    finally:
        device.close()


def test_without_a_thread_to_post_with_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process can have no more threads when a link has just been connected: the queue pairs are destroyed, the
    receiver hears BYE, and the hold on the device is released, which could never be closed otherwise."""
    happened: list[str] = []
    ours, theirs = socket.socketpair()

    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    ends = LinkEnds(
        gid=bytes(16), lid=0, mtu=5, ethernet=True, seals_max=4, qps=(QpAddress(number=1, first_packet=1),) * 2
    )
    welcome = RdmaWelcome(region_nbytes=64, probe_base=1, probe_rkey=1, ends=ends.encode())
    qps = SimpleNamespace(
        ends=ends,
        connect=lambda _: None,
        poster=lambda **_: SimpleNamespace(chain_wrs_max=4),
        destroy=lambda: happened.append("destroyed"),
    )

    async def opened(*_: object, **__: object) -> wire.WriterChannel:
        return wire.WriterChannel(ours, asyncio.get_running_loop(), CODEC, address="here")

    async def shake_hands(*_: object) -> wire.Welcome:
        return wire.Welcome(proof=bytes(32), payload=welcome.encode())

    async def prove(*_: object) -> None:
        pass

    monkeypatch.setattr(wire.WriterChannel, "open", opened)
    monkeypatch.setattr(wire.WriterChannel, "shake_hands", shake_hands)
    monkeypatch.setattr(rdma, "QueuePairs", lambda *_, **__: qps)
    monkeypatch.setattr(rdma, "_prove", prove)
    monkeypatch.setattr(threading.Thread, "start", fail)
    device: Any = SimpleNamespace(config=SimpleNamespace(qps=2), send_wrs_max=8, seals_max=4, nbytes=64)
    memory: Any = SimpleNamespace(
        acquire=lambda: Hold(memory, device),
        release=lambda _: happened.append("released"),
        repeats=SimpleNamespace(over=lambda *_: None),
    )
    address = RegionAddress(listens="127.0.0.1:1", base=0, rkey=0).encode()
    endpoint = DataEndpoint(transport=TransportName.RDMA, address=address, secret=b"", epoch=Epoch(3))

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(ConnectError, match="no thread to post with"):
            await RdmaWriterLink.connect(LinkParts(endpoint, pair_of(1), Recorder(), loop), memory)

    descriptors = len(os.listdir("/proc/self/fd"))
    with theirs:
        asyncio.run(scene())
        assert happened == ["destroyed", "released"]
        assert list(wire.Inbox(CODEC).feed(theirs.recv(4096))) == [wire.Bye(epoch=Epoch(3))]
    assert len(os.listdir("/proc/self/fd")) == descriptors - 2
