"""A device made of arrays, for the two sides of rdma in one process: queue pairs copy, until they are destroyed.

Every device is found by the address that its region is given, every queue pair by its number.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from kvtransfer.transports import rdma
from kvtransfer.transports.rdma import (
    Keys,
    LinkEnds,
    ProbeLost,
    QpAddress,
    RdmaLimits,
    RdmaRegion,
    Registrar,
    RegistrationRefused,
)
from kvtransfer.transports.rdma_ports import Gid, GidKind, RdmaPort
from kvtransfer.transports.rdma_verbs import QueuePairFailed, RdmaUnavailable
from kvtransfer.transports.settings import RdmaConfig

PORT = RdmaPort(
    device="double0",
    number=1,
    state="ACTIVE",
    link_layer="Ethernet",
    gids=(Gid(index=0, kind=GidKind.ROCE_V2, raw=bytes(range(16))),),
    uverbs="uverbs9",
)
Deliver = Callable[[], bool]
"""A write that is on its way arrives. False: its queue pair is gone, and the device drops it."""
REFUSED = 10
"""Status of a write to a queue pair that is gone."""
_numbers = itertools.count(100)


class DoubleRegistrar(Registrar):
    """Whatever lies at an address of this process is memory that the double can be given."""

    registered_U8: np.ndarray

    def __init__(self) -> None:
        pass

    def by_address(self, address: int, nbytes: int) -> Keys:
        self.registered_U8 = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        key = next(_numbers)
        return Keys(address, key, key)

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        raise RegistrationRefused("the double takes no dma-buf")


class DoubleDevice:
    def __init__(self, region: RdmaRegion, config: RdmaConfig, *, remote_writes: bool, limits: RdmaLimits) -> None:
        self.port, self.config, self.remote_writes = PORT, config, remote_writes
        registrar = DoubleRegistrar()
        self.keys, how = region.register(registrar, remote_writes=remote_writes)
        self.registered_as = f"{PORT.device}:{PORT.number}, {how}"
        self.nbytes, self.region_U8 = region.nbytes, registrar.registered_U8
        self.probe_keys = Keys(next(_numbers), next(_numbers), next(_numbers))
        self.mtu, self.lid, self.ethernet = 5, 0, True
        self.send_wrs_max, self.seals_max = limits.send_wrs_max, limits.seals_max
        self.closed = False

    @property
    def gid(self) -> bytes:
        return self.port.best_gid.raw

    def close(self) -> None:
        self.closed = True
        self.region_U8 = np.zeros(0, np.uint8)


class DoubleQueuePairs:
    """`fails_to_destroy` makes the next so many calls of `destroy` come without evidence. Where `on_the_way` is a list,
    chains of writes stay in it, uncompleted: the network holds them back. `probes_lost` has the queue pairs whose probe
    is lost, by index, with the status that it completes with at last; None: it does not within any deadline. `arriving`
    is held while something arrives: as on a real device, nothing does any more when `destroy` has returned."""

    arriving: ClassVar[threading.Lock] = threading.Lock()
    on_the_way: ClassVar[list[Deliver] | None] = None
    alive: ClassVar[dict[int, DoubleQueuePairs]] = {}
    fails_to_destroy: ClassVar[int] = 0
    probes_lost: ClassVar[dict[int, int | None]] = {}

    def __init__(self, device: DoubleDevice, count: int, *, sends: bool) -> None:
        self.device, self.sends = device, sends
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.immediates: list[tuple[int, int]] = []
        self.probed: list[int] = []
        self.broken = False
        self.peer: LinkEnds | None = None
        self.destroyed = False
        self.ends = LinkEnds(
            gid=device.gid,
            lid=0,
            mtu=5,
            ethernet=True,
            seals_max=device.seals_max,
            qps=tuple(QpAddress(number=next(_numbers), first_packet=1) for _ in range(count)),
        )
        for qp in self.ends.qps:
            self.alive[qp.number] = self

    def connect(self, peer: LinkEnds) -> None:
        self.peer = peer

    def poster(self, *, dst_base: int, rkey: int) -> DoublePoster:
        return DoublePoster(self, dst_base, rkey)

    def post_probes(self, dst_base: int, rkey: int) -> None:
        assert self.peer is not None
        for index, end in enumerate(self.peer.qps):
            status = self.probes_lost.get(index, 0)
            if status == 0:
                with self.arriving:
                    there = self.alive[end.number]
                    probes = there.device.probe_keys
                    assert (probes.base, probes.rkey) == (dst_base, rkey)
                    there.immediate_came(index, index)
            if status is not None:
                self.probed.append(status)
                os.eventfd_write(self.fd, 1)

    def take_probes(self) -> int:
        self.take_event()
        statuses, self.probed = self.probed, []
        if any(statuses):
            raise ProbeLost(f"a probe was not acknowledged: it completed with status {max(statuses)}")
        return len(statuses)

    def immediate_came(self, index: int, number: int) -> None:
        """Another thread than the loop's holds `arriving`."""
        self.immediates.append((index, socket.htonl(number & 0xFFFF_FFFF)))
        os.eventfd_write(self.fd, 1)

    def take_event(self) -> None:
        os.eventfd_read(self.fd)

    def take_immediates(self) -> list[tuple[int, int]]:
        if self.broken:
            raise QueuePairFailed("completion with status 5")
        with self.arriving:
            taken, self.immediates = self.immediates, []
        return taken

    def fail(self) -> None:
        """As the device does it: tells that there is something, which is an error."""
        self.broken = True
        os.eventfd_write(self.fd, 1)

    def destroy(self) -> None:
        if self.destroyed:
            return
        if DoubleQueuePairs.fails_to_destroy:
            DoubleQueuePairs.fails_to_destroy -= 1
            raise QueuePairFailed("a queue pair cannot be destroyed: try again")
        with self.arriving:
            self.destroyed = True
            for qp in self.ends.qps:
                del self.alive[qp.number]
            os.close(self.fd)


class DoublePoster:
    chain_wrs_max = 16

    def __init__(self, qps: DoubleQueuePairs, dst_base: int, rkey: int) -> None:
        self.qps, self.dst_base, self.rkey = qps, dst_base, rkey
        self.done: list[tuple[int, int]] = []

    def _peer(self, qp: int) -> tuple[DoubleQueuePairs, int] | None:
        assert self.qps.peer is not None
        number = self.qps.peer.qps[qp].number
        found = DoubleQueuePairs.alive.get(number)
        return (found, [q.number for q in found.ends.qps].index(number)) if found is not None else None

    def post_writes(self, qp: int, src_W: np.ndarray, dst_W: np.ndarray, nbytes_W: np.ndarray, wr_id: int) -> None:
        pieces = [
            (dst, self.qps.device.region_U8[src : src + nbytes].copy())
            for src, dst, nbytes in zip(src_W.tolist(), dst_W.tolist(), nbytes_W.tolist(), strict=True)
        ]
        if DoubleQueuePairs.on_the_way is not None:
            DoubleQueuePairs.on_the_way.append(lambda: self._deliver(qp, pieces))
            return
        self.done.append((wr_id, 0 if self._deliver(qp, pieces) else REFUSED))

    def _deliver(self, qp: int, pieces: list[tuple[int, np.ndarray]]) -> bool:
        with DoubleQueuePairs.arriving:
            peer = self._peer(qp)
            if peer is None:
                return False
            to = peer[0].device
            assert to.remote_writes and (to.keys.base, to.keys.rkey) == (self.dst_base, self.rkey)
            for dst, piece_U8 in pieces:
                to.region_U8[dst : dst + len(piece_U8)] = piece_U8
            return True

    def post_seal(self, qp: int, number: int, wr_id: int) -> None:
        with DoubleQueuePairs.arriving:
            peer = self._peer(qp)
            if peer is not None:
                peer[0].immediate_came(peer[1], number)
        self.done.append((wr_id, 0 if peer is not None else REFUSED))

    def wait(self, wake_fd: int, spin_us: int, timeout_ms: int) -> tuple[list[tuple[int, int]], int]:
        if not self.done:
            poll = select.poll()
            poll.register(wake_fd, select.POLLIN)
            poll.poll(timeout_ms)
        done, self.done = self.done, []
        return done, 0


def install(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The double in the device's place, for both sides. `lost` in what is returned says why it does not work."""
    state = {"lost": ""}

    def make_device(region: RdmaRegion, config: RdmaConfig, *, remote_writes: bool, limits: RdmaLimits) -> DoubleDevice:
        if state["lost"]:
            raise RdmaUnavailable(state["lost"])
        try:
            return DoubleDevice(region, config, remote_writes=remote_writes, limits=limits)
        except RegistrationRefused as error:
            raise RdmaUnavailable(str(error)) from error

    def find() -> list[RdmaPort]:
        return [] if state["lost"] else [PORT]

    monkeypatch.setattr(rdma, "RdmaDevice", make_device)
    monkeypatch.setattr(rdma, "why_lost", lambda _: state["lost"])
    monkeypatch.setattr(rdma, "find_ports", find)
    monkeypatch.setattr(rdma, "QueuePairs", DoubleQueuePairs)
    monkeypatch.setattr(DoubleQueuePairs, "fails_to_destroy", 0)
    monkeypatch.setattr(DoubleQueuePairs, "on_the_way", None)
    monkeypatch.setattr(DoubleQueuePairs, "probes_lost", {})
    return state
