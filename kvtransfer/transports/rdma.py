"""Transport over RDMA (RoCE, InfiniBand): the writer's device writes straight into the receiver's registered region.

Here are the open device, a node's region registered with it, the queue pairs of a link, and what HELLO and WELCOME say
of them. `rdma_ports` finds devices, `rdma_receiver` has the port, `rdma_writer` the link, `rdma_verbs` pyverbs and the
posting by C.

Data goes only by RDMA WRITE on the queue pairs. A probe is a WRITE_WITH_IMM of one whole packet to a place that nobody
reads; its immediate is the index of its queue pair. The receiver sends READY when all have come. The link is made when
the writer has that and its device has acknowledged each probe: the control channel shows nothing about the way between
the devices. With each SEAL an immediate with its number goes down each queue pair that the SEAL names; SEALED says that
all have come. The region's address and key are part of `DataEndpoint.address`.

A region on a device is registered as a dma-buf where its driver makes one and the card takes it. Otherwise it is
registered by its address, as peer memory: then a kernel module (nvidia_peermem) has to know
what lies there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.device.driver import GpuDirect
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DeviceError, TransportName
from kvtransfer.transports.control_channel import Codec, MalformedMessage, Ready
from kvtransfer.transports.limits import check_limits
from kvtransfer.transports.rdma_ports import RdmaPort, choose_port, find_ports, why_lost
from kvtransfer.transports.rdma_verbs import (
    Addresses,
    Poster,
    QueuePairFailed,
    RdmaUnavailable,
    channel_fd,
    cq_address,
    load_verbs,
    need_library,
    qp_address,
)
from kvtransfer.transports.settings import QPS_MAX, RdmaConfig

log = get_log("rdma")

GID_BYTES: Final = 16
PROBE_BYTES: Final = 4096
"""The largest packet that RDMA has."""
_END: Final = struct.Struct(f"<{GID_BYTES}sHBBHH")
_QP: Final = struct.Struct("<II")
_WELCOME: Final = struct.Struct("<QQI")
CODEC: Final = Codec(TransportName.RDMA, Ready, payload_bytes_max=_WELCOME.size + _END.size + QPS_MAX * _QP.size)
HOP_LIMIT: Final = 64
"""Routers that a packet may pass (RoCE v2)."""
_POLL_MAX = 64
_RNR_TIMER_CODE = 12
_RNR_RETRIES = 6
"""Repeats, 0.64 ms apart, of an immediate for which no receive is posted; 7 would repeat for ever. Enough receives are
posted, so a repeat means that one side broke the protocol."""
_QP_BITS: Final = {
    "qp_state": "STATE", "pkey_index": "PKEY_INDEX", "port_num": "PORT", "qp_access_flags": "ACCESS_FLAGS",
    "ah_attr": "AV", "path_mtu": "PATH_MTU", "dest_qp_num": "DEST_QPN", "rq_psn": "RQ_PSN",
    "max_dest_rd_atomic": "MAX_DEST_RD_ATOMIC", "min_rnr_timer": "MIN_RNR_TIMER", "sq_psn": "SQ_PSN",
    "timeout": "TIMEOUT", "retry_cnt": "RETRY_CNT", "rnr_retry": "RNR_RETRY", "max_rd_atomic": "MAX_QP_RD_ATOMIC",
}  # fmt: skip
"""Fields of ibv_qp_attr, and the ends of the names of their bits, IBV_QP_..."""

WHAT_GPUS_NEED = (
    "load the kernel's module nvidia_peermem (modprobe nvidia_peermem), or use NVIDIA's open kernel modules, which "
    "make dma-bufs; a region larger than the GPU's BAR1 (nvidia-smi -q) cannot be registered either way"
)
_WHAT_HOSTS_NEED = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=, or the capability IPC_LOCK)"


@dataclass(frozen=True, slots=True, kw_only=True)
class QpAddress:
    """Number of a queue pair and of its first packet, 24 bits each."""

    number: int
    first_packet: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """One side's ends of a link: the HELLO's payload. `mtu` is a code of ibv_mtu. `seals_max` immediates may be on the
    way."""

    gid: bytes
    lid: int
    mtu: int
    ethernet: bool
    seals_max: int
    qps: tuple[QpAddress, ...]

    def encode(self) -> bytes:
        """As the HELLO's payload, or a part of the WELCOME's."""
        assert len(self.gid) == GID_BYTES, len(self.gid)
        assert 0 < len(self.qps) <= QPS_MAX, len(self.qps)
        head = _END.pack(self.gid, self.lid, self.mtu, self.ethernet, self.seals_max, len(self.qps))
        return head + b"".join(_QP.pack(qp.number, qp.first_packet) for qp in self.qps)

    @classmethod
    def decode(cls, payload: bytes) -> LinkEnds:
        """Raises MalformedMessage."""
        if len(payload) < _END.size:
            raise MalformedMessage("a link without its ends")
        gid, lid, mtu, ethernet, seals_max, count = _END.unpack_from(payload)
        if not 0 < count <= QPS_MAX or len(payload) != _END.size + count * _QP.size:
            raise MalformedMessage(f"{count} queue pairs in {len(payload)} bytes")
        if not (1 <= mtu <= 5 and ethernet <= 1 and seals_max):
            raise MalformedMessage(f"mtu code {mtu}, link layer {ethernet}, {seals_max} seals")
        qps = [QpAddress(number=n, first_packet=p) for n, p in _QP.iter_unpack(payload[_END.size :])]
        if any(qp.number >= 1 << 24 or qp.first_packet >= 1 << 24 for qp in qps):
            raise MalformedMessage("a queue pair's number of more than 24 bits")
        return cls(gid=gid, lid=lid, mtu=mtu, ethernet=bool(ethernet), seals_max=seals_max, qps=tuple(qps))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlace:
    """PROBE_BYTES of the receiver's memory, outside its region: writers write to it and nobody reads it."""

    base: int
    rkey: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWelcome:
    region_nbytes: int
    probes: ProbePlace
    ends: LinkEnds

    def encode(self) -> bytes:
        return _WELCOME.pack(self.region_nbytes, self.probes.base, self.probes.rkey) + self.ends.encode()

    @classmethod
    def decode(cls, payload: bytes) -> RdmaWelcome:
        """Raises MalformedMessage."""
        if len(payload) < _WELCOME.size:
            raise MalformedMessage(f"a payload of {len(payload)} bytes in a WELCOME")
        nbytes, base, rkey = _WELCOME.unpack_from(payload)
        ends = LinkEnds.decode(payload[_WELCOME.size :])
        return cls(region_nbytes=nbytes, probes=ProbePlace(base=base, rkey=rkey), ends=ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAddress:
    """`DataEndpoint.address` of this transport: where the receiver listens, and its region's address and key."""

    listens: str
    base: int
    rkey: int

    def encode(self) -> str:
        return f"{self.listens}/{self.base:016x}/{self.rkey:08x}"

    @classmethod
    def decode(cls, address: str) -> RegionAddress:
        """Raises ValueError or BatonError: not such an address."""
        listens, base, rkey = address.split("/")
        host, port = split_endpoint(listens)
        return cls(listens=join_endpoint(host, port), base=int(base, 16), rkey=int(rkey, 16))


class RegistrationRefused(Exception):
    """Memory cannot be registered with this card; the text says why."""


class Keys(NamedTuple):
    """`base`: where the card finds the first byte, under these keys."""

    base: int
    lkey: int
    rkey: int


class Registration(NamedTuple):
    """`how`, for people: what has been registered, and why not in the way that is tried first."""

    keys: Keys
    how: str


class Registrar:
    """Registers memory with one card by pyverbs, in one protection domain. Closed before the domain."""

    def __init__(self, verbs: Any, domain: Any, access: int) -> None:
        self._verbs = verbs
        self._domain = domain
        self._access = access
        self._opened = contextlib.ExitStack()

    def by_address(self, address: int, nbytes: int) -> Keys:
        """Raises RegistrationRefused."""
        return self._kept(address, lambda: self._verbs.mr.MR(self._domain, nbytes, self._access, address=address))

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        """`nbytes` from `offset` on; `fd` stays the caller's, who may close it at once. Raises RegistrationRefused.

        pyverbs gives such memory the addresses from `offset` on, wherever it lies.
        """
        make = getattr(self._verbs.mr, "DmaBufMR", None)
        if make is None:
            raise RegistrationRefused("this pyverbs knows no dma-bufs; rdma-core 34 does")
        try:
            return self._kept(offset, lambda: make(self._domain, nbytes, self._access, dmabuf=fd, offset=offset))
        except TypeError as error:
            raise RegistrationRefused(f"this pyverbs takes no dma-buf by its descriptor: {error}") from error

    def close(self) -> None:
        """Deregister all. Raises what pyverbs raises."""
        self._opened.close()

    def _kept(self, base: int, register: Callable[[], Any]) -> Keys:
        try:
            registered = register()
        except self._verbs.error as error:
            raise RegistrationRefused(str(error)) from error
        self._opened.callback(registered.close)
        return Keys(base, int(registered.lkey), int(registered.rkey))


class HostBytes:
    """A region in host memory. The processor sees what a card has written before the card reports it."""

    def __init__(self, array_U8: Callable[[], np.ndarray]) -> None:
        """`array_U8` gives all bytes, which never move; no view of them is kept."""
        self._array_U8 = array_U8

    @property
    def nbytes(self) -> int:
        return len(self._array_U8())

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """The whole region. Raises RegistrationRefused."""
        del remote_writes  # they need nothing
        array_U8 = self._array_U8()
        assert array_U8.dtype == np.uint8 and array_U8.flags.c_contiguous
        try:
            return Registration(registrar.by_address(int(array_U8.ctypes.data), len(array_U8)), "host memory")
        except RegistrationRefused as error:
            raise RegistrationRefused(f"{error}; {_WHAT_HOSTS_NEED}") from error

    def flush(self) -> bool:
        """See `DeviceBytes.flush`."""
        return False


class DeviceBytes:
    """A region on a device."""

    def __init__(self, region: DeviceRegion) -> None:
        self._region = region
        self._allowed: GpuDirect | None = None

    @property
    def nbytes(self) -> int:
        return self._region.nbytes

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """The whole region, as a dma-buf, or else as peer memory. `remote_writes`: others may write into it.

        Raises RegistrationRefused.
        """
        try:
            allowed = self._region.driver.gpudirect()
        except DeviceError as error:
            raise RegistrationRefused(str(error)) from error
        refusal = allowed.refusal(remote_writes=remote_writes)
        if refusal is not None:
            raise RegistrationRefused(refusal)
        self._allowed = allowed
        why = "the device's driver makes none"
        if allowed.dma_buf:
            try:
                return Registration(self._by_dma_buf(registrar), "device memory as a dma-buf")
            except (DeviceError, RegistrationRefused) as error:
                why = str(error)
        try:
            if not allowed.peer_memory:
                raise RegistrationRefused("the device's driver does not report its pages")
            keys = registrar.by_address(self._region.address, self._region.nbytes)
        except RegistrationRefused as error:
            raise RegistrationRefused(f"as a dma-buf: {why}; as peer memory: {error}; {WHAT_GPUS_NEED}") from error
        return Registration(keys, f"device memory as peer memory (no dma-buf: {why})")

    def flush(self) -> bool:
        """Make what a card is known to have written visible to all that is launched after this. A completion only says
        that the card has sent its writes towards the device. True: something had to be done.

        Once registered; any thread, one at a time. Raises DeviceError.
        """
        assert self._allowed is not None, "not registered"
        if self._allowed.ordered:
            return False
        self._region.driver.flush_remote_writes()
        return True

    def _by_dma_buf(self, registrar: Registrar) -> Keys:
        found = self._region.driver.dma_buf(self._region.address, self._region.nbytes)
        try:
            return registrar.by_dma_buf(found.fd, found.offset, self._region.nbytes)
        finally:
            os.close(found.fd)


RdmaRegion = HostBytes | DeviceBytes
"""What `RdmaMemory` registers. The memory outlives the registration."""


class ProbeLost(QueuePairFailed):
    """A probe was not acknowledged: packets do not reach the other device, or its answers do not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaLimits:
    """Limits of a device and its queue pairs."""

    send_wrs_max: int = 128
    """Writes on their way on one queue pair, one of them kept for a seal."""
    seals_max: int = 64
    """Seals of one link on their way."""
    device_check_ms: int = 500
    """Time between two checks of the device."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.send_wrs_max < 2 or self.seals_max >= 1 << 16:
            raise ValueError("send_wrs_max must be 2 or more, seals_max less than 65,536")


RDMA_LIMITS: Final = RdmaLimits()


class RdmaDevice:
    """One port of one device, one protection domain, one memory region over the whole of `region`.

    The region stays pinned and must stay where it is until `close`. Control thread only, but for the making: pinning
    the region takes a while, so that may be another thread.
    """

    def __init__(
        self, port: RdmaPort, region: RdmaRegion, config: RdmaConfig, *, remote_writes: bool, limits: RdmaLimits
    ) -> None:
        """Opens and registers. `remote_writes`: others may write into the region (a receiver), or none may.

        Raises:
            RdmaUnavailable: no pyverbs, no right to open the device, or the region cannot be registered with it.
        """
        self.port = port
        self.config = config
        self.verbs = load_verbs()
        need_library()
        self.nbytes = region.nbytes
        self._probe_U8 = np.zeros(PROBE_BYTES, np.uint8)
        probe_base = int(self._probe_U8.ctypes.data)
        enums = self.verbs.enums
        # Never IBV_ACCESS_RELAXED_ORDERING: a seal's immediate must not overtake the writes before it. And no remote
        # reads.
        access = enums.IBV_ACCESS_LOCAL_WRITE | (enums.IBV_ACCESS_REMOTE_WRITE if remote_writes else 0)
        with contextlib.ExitStack() as opened:
            try:
                self.context = self.verbs.device.Context(name=port.device)
                opened.callback(self.context.close)
                device_limits = self.context.query_device()
                attributes = self.context.query_port(port.number)
                self.domain = self.verbs.pd.PD(self.context)
                opened.callback(self.domain.close)
            except self.verbs.error as error:
                raise RdmaUnavailable(f"{port.device} cannot be opened: {error}") from error
            registrar = Registrar(self.verbs, self.domain, access)
            opened.callback(registrar.close)
            what = f"the KV region of {self.nbytes:,} bytes"
            try:
                keys, self.registered_as = region.register(registrar, remote_writes=remote_writes)
                what = "a page for probes"
                probe = registrar.by_address(probe_base, PROBE_BYTES)
            except RegistrationRefused as error:
                raise RdmaUnavailable(f"{port.device} cannot register {what}: {error}") from error
            self._close = opened.pop_all()
        self.base, self.lkey, self.rkey = keys
        self.probes = ProbePlace(base=probe_base, rkey=probe.rkey)
        """Where writers' probes go, and where ours come from."""
        self.probe_lkey = probe.lkey
        self.gid, self.mtu, self.lid = port.best_gid.raw, int(attributes.active_mtu), int(attributes.lid)
        self.ethernet = port.link_layer == "Ethernet"
        self.send_wrs_max = min(limits.send_wrs_max, int(device_limits.max_qp_wr))
        self.seals_max = min(limits.seals_max, int(device_limits.max_qp_wr), int(device_limits.max_cqe) // config.qps)

    def close(self) -> None:
        """Let go of the region and the device. Its queue pairs are closed before. Idempotent."""
        with contextlib.suppress(self.verbs.error):
            self._close.close()


def open_device(region: RdmaRegion, config: RdmaConfig, *, remote_writes: bool, limits: RdmaLimits) -> RdmaDevice:
    """Find a port and open it. Raises RdmaUnavailable."""
    ports = find_ports()
    port = choose_port(ports, config.device)
    if port is None:
        have = ", ".join(f"{p.device}:{p.number} {p.state}" for p in ports) or "none"
        wanted = f"the device {config.device}" if config.device else "a device"
        raise RdmaUnavailable(f"no port of {wanted} is active and has an address (there are: {have})")
    return RdmaDevice(port, region, config, remote_writes=remote_writes, limits=limits)


class QueuePairs:
    """RC queue pairs of one link and their completion queue. Closed by `destroy`, whose return is the fence."""

    def __init__(self, device: RdmaDevice, count: int, *, sends: bool) -> None:
        """In the state INIT. The receiving side posts receives for `device.seals_max` immediates.

        Raises:
            QueuePairFailed: the device has no room for them, or is gone.
        """
        self._device = device
        self._verbs = verbs = device.verbs
        self._sends = sends
        self._qps: list[Any] = []
        self._destroyed = False
        wrs = device.send_wrs_max if sends else device.seals_max
        with contextlib.ExitStack() as opened, self._or_failed("no queue pair"):
            self._channel = verbs.cq.CompChannel(device.context)
            opened.callback(self._channel.close)
            self._cq = verbs.cq.CQ(device.context, cqe=count * wrs, channel=self._channel)
            opened.callback(self._cq.close)
            for _ in range(count):
                self._qps.append(self._make(wrs))
                opened.callback(self._qps[-1].close)
                self._modify(
                    self._qps[-1],
                    qp_state=verbs.enums.IBV_QPS_INIT,
                    pkey_index=0,
                    port_num=device.port.number,
                    qp_access_flags=0 if sends else verbs.enums.IBV_ACCESS_REMOTE_WRITE,
                )
            if not sends:
                for index in range(count):
                    for _ in range(wrs):
                        self._post_receive(index)
                self._cq.req_notify()
            self.fd = channel_fd(self._channel)
            opened.pop_all()
        self._index = {int(qp.qp_num): index for index, qp in enumerate(self._qps)}
        self.ends = LinkEnds(
            gid=device.gid,
            lid=device.lid,
            mtu=device.mtu,
            ethernet=device.ethernet,
            seals_max=device.seals_max,
            qps=tuple(QpAddress(number=int(qp.qp_num), first_packet=int.from_bytes(os.urandom(3))) for qp in self._qps),
        )

    def connect(self, peer: LinkEnds) -> None:
        """Each to the peer's of the same index, at the smaller MTU. Raises QueuePairFailed."""
        with self._or_failed("a queue pair cannot be connected"):
            for qp, own, other in zip(self._qps, self.ends.qps, peer.qps, strict=True):
                self._to_ready(qp, own, other, peer)

    def poster(self, *, dst_base: int, rkey: int) -> Poster:
        """What posts on these queue pairs. Raises QueuePairFailed."""
        device = self._device
        with self._or_failed("nothing can be posted"):
            return Poster(
                need_library(),
                qps=[qp_address(qp) for qp in self._qps],
                cq=cq_address(self._cq),
                channel_fd=self.fd,
                addresses=Addresses(src_base=device.base, lkey=device.lkey, dst_base=dst_base, rkey=rkey),
                take_event=self._take_event,
            )

    def post_probes(self, peer: LinkEnds, place: ProbePlace) -> None:
        """On each queue pair a packet as large as the path takes, since some paths lose only large ones. `take_probes`
        follows. Raises QueuePairFailed."""
        enums, wr, device = self._verbs.enums, self._verbs.wr, self._device
        nbytes = 128 << min(self.ends.mtu, peer.mtu)  # enum ibv_mtu: 1 is 256, 5 is 4096
        with self._or_failed("a probe cannot be posted"):
            self._cq.req_notify()
            for index, qp in enumerate(self._qps):
                request = wr.SendWR(
                    wr_id=index,
                    opcode=enums.IBV_WR_RDMA_WRITE_WITH_IMM,
                    num_sge=1,
                    imm_data=socket.htonl(index),
                    sg=[wr.SGE(device.probes.base, nbytes, device.probe_lkey)],
                    send_flags=enums.IBV_SEND_SIGNALED,
                )
                request.set_wr_rdma(place.rkey, place.base)
                qp.post_send(request)

    def take_probes(self) -> int:
        """`fd` is readable: how many probes have been acknowledged since the last call.

        Raises:
            ProbeLost: one was not.
            QueuePairFailed: the completion queue is gone.
        """
        self.take_event()
        statuses = [completion.status for completion in self._completions()]
        for status in statuses:
            if status != self._verbs.enums.IBV_WC_SUCCESS:
                raise ProbeLost(f"a probe was not acknowledged: it completed with status {status}")
        return len(statuses)

    def take_event(self) -> None:
        """`fd` is readable: take the event, and ask for the next one. Raises QueuePairFailed."""
        self._take_event()
        with self._or_failed("the completion queue is gone"):
            self._cq.req_notify()

    def take_immediates(self) -> list[tuple[int, int]]:
        """(index of the queue pair, immediate) of what has come; a receive is posted again for each.

        Raises QueuePairFailed: a queue pair is in error. What came before it is lost to the caller, who fences.
        """
        taken: list[tuple[int, int]] = []
        for completion in self._completions():
            if completion.status != self._verbs.enums.IBV_WC_SUCCESS:
                raise QueuePairFailed(f"completion with status {completion.status}")
            index = self._index[int(completion.qp_num)]
            taken.append((index, int(completion.imm_data)))
            with self._or_failed("a receive cannot be posted"):
                self._post_receive(index)
        return taken

    def destroy(self) -> None:
        """RESET and destroy every queue pair, then the completion queue. Idempotent.

        When this returns the device writes nothing more for the peer and reads nothing more for us: RESET drops what is
        queued, and the destroying call returns only when the device has let go. (A queue pair in ERR may still be
        working off what has come in.) What the device has sent towards device memory may still need a flush
        (`RdmaMemory.flush`).

        Raises:
            QueuePairFailed: there is no such evidence.
        """
        if self._destroyed:
            return
        with self._or_failed("a queue pair cannot be destroyed"):
            while self._qps:
                # RESET fails where the device is gone; the destroying call must not.
                with contextlib.suppress(self._verbs.error):
                    self._modify(self._qps[-1], qp_state=self._verbs.enums.IBV_QPS_RESET)
                self._qps[-1].close()
                self._qps.pop()
            self._cq.close()
            self._channel.close()
        self._destroyed = True

    @contextlib.contextmanager
    def _or_failed(self, what: str) -> Iterator[None]:
        try:
            yield
        except (self._verbs.error, RdmaUnavailable) as error:
            raise QueuePairFailed(f"{what}: {error}") from error

    def _take_event(self) -> None:
        with self._or_failed("the completion queue is gone"):
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)

    def _completions(self) -> Iterator[Any]:
        count = _POLL_MAX
        while count == _POLL_MAX:
            with self._or_failed("the completion queue is gone"):
                count, completions = self._cq.poll(_POLL_MAX)
            yield from completions

    def _make(self, wrs: int) -> Any:
        qp, enums = self._verbs.qp, self._verbs.enums
        sends, receives = (wrs, 1) if self._sends else (1, wrs)
        cap = qp.QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        init = qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0)
        return qp.QP(self._device.domain, init)

    def _modify(self, qp: Any, **fields: object) -> None:
        attributes, bits = self._verbs.qp.QPAttr(), 0
        for name, value in fields.items():
            setattr(attributes, name, value)
            bits |= getattr(self._verbs.enums, f"IBV_QP_{_QP_BITS[name]}")
        qp.modify(attributes, bits)

    def _to_ready(self, qp: Any, own: QpAddress, other: QpAddress, peer: LinkEnds) -> None:
        enums, addr, config, port = self._verbs.enums, self._verbs.addr, self._device.config, self._device.port
        gid = ":".join(peer.gid.hex()[i : i + 4] for i in range(0, 2 * GID_BYTES, 4))
        route = addr.GlobalRoute(
            dgid=addr.GID(gid),
            sgid_index=port.best_gid.index,
            hop_limit=HOP_LIMIT,
            traffic_class=config.traffic_class,
        )
        self._modify(
            qp,
            qp_state=enums.IBV_QPS_RTR,
            path_mtu=min(self.ends.mtu, peer.mtu),
            dest_qp_num=other.number,
            rq_psn=other.first_packet,
            max_dest_rd_atomic=0,
            min_rnr_timer=_RNR_TIMER_CODE,
            ah_attr=addr.AHAttr(dlid=peer.lid, is_global=int(peer.ethernet), port_num=port.number, gr=route),
        )
        self._modify(
            qp,
            qp_state=enums.IBV_QPS_RTS,
            sq_psn=own.first_packet,
            timeout=config.ack_timeout_code,
            retry_cnt=config.retries_max,
            rnr_retry=_RNR_RETRIES,
            max_rd_atomic=0,
        )

    def _post_receive(self, index: int) -> None:
        wr, device = self._verbs.wr, self._device
        request = wr.RecvWR(num_sge=1, sg=[wr.SGE(device.base, 0, device.lkey)])
        # An immediate brings no bytes; pyverbs insists on room for some.
        request.num_sge = 0
        self._qps[index].post_recv(request)


class Hold:
    """Keeps the device open until `release`: whoever has one may have queue pairs on it. Control thread only."""

    def __init__(self, device: RdmaDevice, released: Callable[[Hold], None]) -> None:
        self.device = device
        self.left_behind = False
        self._released = released
        self._on_lost: Callable[[str], None] = lambda _: None
        self._reason: str | None = None

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Call this with the reason when the device is lost; at once if it has been."""
        self._on_lost = callback
        if self._reason is not None:
            callback(self._reason)

    def lost(self, reason: str) -> None:
        self._reason = reason
        self._on_lost(reason)

    def release(self) -> None:
        """No queue pair is left. Once."""
        self._released(self)

    def leave_behind(self, peer: str) -> None:
        """Instead of `release`, where a queue pair cannot be destroyed: the device stays open and the region pinned
        until the process ends."""
        self.left_behind = True
        log.error("queue pairs are left to the end of the process: they cannot be destroyed", peer=peer)


class RdmaMemory:
    """A region, registered once as a whole. Links and ports `acquire` the device and release it at their end.

    Control thread only. A device that is taken away, or whose port goes down, is lost: its holders are called, destroy
    their queue pairs and release it; then it is closed. From then on every `device_check_ms` a port that works is
    looked for, and the region is registered there, on a thread: that may take seconds.
    """

    def __init__(
        self, *, region: RdmaRegion, config: RdmaConfig, remote_writes: bool, limits: RdmaLimits = RDMA_LIMITS
    ) -> None:
        """Opens a device at once. `region`'s memory is the caller's and outlives this. Raises RdmaUnavailable."""
        self._region = region
        self._config, self._limits = config, limits
        self._loop = asyncio.get_running_loop()
        self._open = functools.partial(open_device, region, config, remote_writes=remote_writes, limits=limits)
        self._held: RdmaDevice | None = self._open()
        self._lost = False
        self._holds: list[Hold] = []
        self.returned: Callable[[], None] = lambda: None
        """Called each time that a device has been opened again."""
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self.devices_lost = 0
        self.flushes = 0
        """Flushes that the device needed."""
        self._timer = self._loop.call_later(limits.device_check_ms / 1000, self._look)

    @property
    def device(self) -> RdmaDevice | None:
        """None: there is none now."""
        return None if self._lost else self._held

    def flush(self) -> None:
        """See `DeviceBytes.flush`. Before the bytes are used, and before their blocks are used for anything else. Takes
        microseconds. Raises DeviceError: bytes may become visible late, or still be on their way."""
        self.flushes += self._region.flush()

    def describe(self) -> str:
        """For people: the device, and how the region is registered with it."""
        device = self.device
        if device is None:
            return "no device now"
        return f"{device.port.device}:{device.port.number}, {device.registered_as}"

    def acquire(self) -> Hold:
        """Raises RdmaUnavailable: there is no device now."""
        device = self.device
        if device is None:
            raise RdmaUnavailable("the RDMA device is gone, or its port is down; it is used again when it is back")
        hold = Hold(device, self._release)
        self._holds.append(hold)
        return hold

    def lose(self, reason: str) -> None:
        """The device is of no use any more. Idempotent."""
        if self._lost or self._held is None:
            return
        self._lost = True
        self.devices_lost += 1
        log.warning("RDMA device lost", device=self._held.port.device, reason=reason)
        for hold in list(self._holds):
            hold.lost(reason)
        self._close_if_free()

    async def close(self) -> None:
        """Once everyone has released it, or left it behind: then the device is not closed. Idempotent."""
        self._closed = True
        self._timer.cancel()
        if self._opening is not None:
            await asyncio.wait([self._opening])
        assert all(hold.left_behind for hold in self._holds), "links or ports still use the device"
        if self._holds:
            log.error("RDMA device stays open: a queue pair cannot be destroyed", holds=len(self._holds))
        elif self._held is not None:
            self._held.close()
            self._held = None

    def _release(self, hold: Hold) -> None:
        self._holds.remove(hold)
        self._close_if_free()

    def _close_if_free(self) -> None:
        if self._lost and not self._holds and self._held is not None:
            self._held.close()
            self._held = None

    def _look(self) -> None:
        if self._closed:
            return
        device = self.device
        if device is not None:
            if reason := why_lost(device.port):
                self.lose(reason)
        elif self._held is None and self._opening is None and choose_port(find_ports(), self._config.device):
            self._opening = self._loop.create_task(self._open_again())
        self._timer = self._loop.call_later(self._limits.device_check_ms / 1000, self._look)

    async def _open_again(self) -> None:
        try:
            opened = await asyncio.to_thread(self._open)
        except RdmaUnavailable as error:
            log.warning("RDMA device cannot be used", reason=str(error))
            return
        finally:
            self._opening = None
        self._held, self._lost = opened, False
        log.info("RDMA device is back", device=opened.port.device)
        if not self._closed:
            self.returned()


@dataclass(frozen=True, slots=True, kw_only=True)
class LentRegistration:
    """One registration for both halves of a node, made and closed by whoever lends it. None: rdma is not offered.

    It is open to remote writes, for the receiving half. The writing half's queue pairs take none.
    """

    memory: RdmaMemory | None


def register_if_usable(
    transports: Sequence[TransportName],
    region: RdmaRegion,
    config: RdmaConfig,
    *,
    remote_writes: bool,
) -> RdmaMemory | None:
    """The registered region; the caller closes it. None: rdma is not to be offered, or cannot be, which is logged. May
    take seconds: the region is pinned.

    Raises:
        InvalidField: rdma alone is to be offered, and it does not work here.
    """
    if TransportName.RDMA not in transports:
        return None
    try:
        memory = RdmaMemory(region=region, config=config, remote_writes=remote_writes)
    except RdmaUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has rdma alone, which does not work here: {error}. `baton doctor` says more"
            ) from error
        # A machine without any such device is no reason for a warning.
        (log.warning if find_ports() else log.debug)("rdma is not offered", reason=str(error))
        return None
    device = memory.device
    assert device is not None
    log.info(
        "rdma is offered",
        device=device.port.device,
        port=device.port.number,
        gid=device.port.best_gid.kind.name,
        region=device.registered_as,
    )
    return memory
