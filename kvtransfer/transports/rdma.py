"""Transport over RDMA (RoCE, InfiniBand): the writer's device writes straight into the receiver's registered region.

Here are the open device, a node's region registered with it, the queue pairs of a link, the port and the writer's link.
`rdma_ports` finds devices, `rdma_verbs` has pyverbs and the posting by C.

Data goes only by RDMA WRITE on the queue pairs. A probe is a WRITE_WITH_IMM of one whole packet to a place that nobody
reads; its immediate is the index of its queue pair. The receiver sends READY when all have come. The link is made when
the writer has that and its device has acknowledged each probe: the control channel shows nothing about the way between
the devices. With each SEAL an immediate with its number goes down each queue pair that the SEAL names; SEALED says that
all have come. The region's address and key are part of `DataEndpoint.address`.

A region on a device is registered as a dma-buf where its driver makes one and the card takes it. Otherwise it is
registered by its address, as peer memory: then a kernel module (nvidia_peermem) has to know what lies there.

Evidence (I3): bytes of a pair land only through the receiver's queue pairs of it. Once these are RESET and destroyed,
and the calls have returned, the device drops whatever still comes for them, whatever the writer does. So a writer that
is dead, stopped or cut off is fenced at once. A link that ends without BYE, or with a failed queue pair, is itself the
reason for a fence: before that, no commit of what it carried is accepted. A link whose probes did not all come needs no
fence: its queue pairs have carried nothing else.

Visibility: `RdmaMemory.flush` comes before a seal is reported, before a fence has its evidence, and when a grant ends
without a seal. A seal whose flush fails is refused and never reported: its pair is fenced, and there is no evidence
until a flush succeeds.

A thread of the writer's link posts chains as the queue pairs have room and takes their completions, in native calls;
the control thread has the control channel. A batch is complete when the device has completed all its chains, or when
the link is over and its queue pairs are destroyed: then the device reads nothing of the source any more (I1). That says
nothing of what had left it: such writes are `writes_in_doubt`, and the receiver fences before it reuses their blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from baton.endpoint import join_endpoint, split_endpoint
from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from baton.repeats import RepeatLog
from kvtransfer.device.driver import GpuDirect
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import (
    ConnectError,
    DeviceError,
    ReceiverEvents,
    TransportName,
    WriteRanges,
)
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import (
    Codec,
    MalformedMessage,
    Packed,
    Ready,
    Refusal,
    RefusalReason,
    SealGather,
    Signal,
    WriterChannel,
    connect_errors,
)
from kvtransfer.transports.rdma_ports import choose_port, counters_of, find_ports, why_lost
from kvtransfer.transports.rdma_verbs import (
    Poster,
    QueuePairFailed,
    RdmaUnavailable,
    channel_fd,
    cq_address,
    load_verbs,
    need_library,
    qp_address,
)
from kvtransfer.transports.receiver_port import PORT_LIMITS, Connection, Evidence, ListeningPort, PortLimits
from kvtransfer.transports.settings import QPS_MAX, RdmaConfig
from kvtransfer.transports.writer_link import ChainLimits, ChainLink, LinkParts, SealPart

log = get_log("rdma")

GID_BYTES: Final = 16
PROBE_BYTES: Final = 4096
"""The largest packet that RDMA has."""
_QP: Final = struct.Struct("<II")
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
class LinkEnds(Packed):
    """One side's ends of a link: the HELLO's payload. `mtu` is a code of ibv_mtu. `seals_max` immediates may be on the
    way."""

    LAYOUT = struct.Struct(f"<{GID_BYTES}sHBBHH")
    HAS_PAYLOAD = True
    gid: bytes
    lid: int
    mtu: int
    ethernet: bool
    seals_max: int
    qps: tuple[QpAddress, ...]

    def encode(self) -> bytes:
        assert len(self.gid) == GID_BYTES, len(self.gid)
        assert 0 < len(self.qps) <= QPS_MAX, len(self.qps)
        head = self.LAYOUT.pack(self.gid, self.lid, self.mtu, self.ethernet, self.seals_max, len(self.qps))
        return head + b"".join(_QP.pack(qp.number, qp.first_packet) for qp in self.qps)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> LinkEnds:
        gid, lid, mtu, ethernet, seals_max, count, packed = values
        if not 0 < count <= QPS_MAX or len(packed) != count * _QP.size:
            raise MalformedMessage(f"{count} queue pairs in {len(packed)} bytes")
        if not (1 <= mtu <= 5 and ethernet <= 1 and seals_max):
            raise MalformedMessage(f"mtu code {mtu}, link layer {ethernet}, {seals_max} seals")
        qps = tuple(QpAddress(number=n, first_packet=p) for n, p in _QP.iter_unpack(packed))
        if any(qp.number >= 1 << 24 or qp.first_packet >= 1 << 24 for qp in qps):
            raise MalformedMessage("a queue pair's number of more than 24 bits")
        return cls(gid=gid, lid=lid, mtu=mtu, ethernet=bool(ethernet), seals_max=seals_max, qps=qps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWelcome(Packed):
    """`probe_base`, `probe_rkey`: PROBE_BYTES of the receiver's memory, outside its region, that nobody reads."""

    LAYOUT = struct.Struct("<QQI")
    HAS_PAYLOAD = True
    region_nbytes: int
    probe_base: int
    probe_rkey: int
    ends: bytes
    """The receiver's `LinkEnds`."""


_PAYLOAD_BYTES_MAX: Final = RdmaWelcome.LAYOUT.size + LinkEnds.LAYOUT.size + QPS_MAX * _QP.size
CODEC: Final = Codec(TransportName.RDMA, Ready, payload_bytes_max=_PAYLOAD_BYTES_MAX)


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


class Registrar:
    """Registers memory with one card by pyverbs, in one protection domain, until `opened` closes it."""

    def __init__(self, verbs: Any, domain: Any, access: int, opened: contextlib.ExitStack) -> None:
        self._verbs, self._domain, self._access, self._opened = verbs, domain, access, opened

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
        self.nbytes = len(array_U8())

    def register(self, registrar: Registrar, *, remote_writes: bool) -> tuple[Keys, str]:
        """The whole region; see `DeviceBytes.register`. Raises RegistrationRefused."""
        del remote_writes  # they need nothing
        array_U8 = self._array_U8()
        assert array_U8.dtype == np.uint8 and array_U8.flags.c_contiguous
        try:
            return registrar.by_address(int(array_U8.ctypes.data), self.nbytes), "host memory"
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
        self.nbytes = region.nbytes

    def register(self, registrar: Registrar, *, remote_writes: bool) -> tuple[Keys, str]:
        """The whole region, as a dma-buf, or else as peer memory. `remote_writes`: others may write into it. The text
        says for people what has been registered, and why not in the way that is tried first.

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
                return self._by_dma_buf(registrar), "device memory as a dma-buf"
            except (DeviceError, RegistrationRefused) as error:
                why = str(error)
        try:
            if not allowed.peer_memory:
                raise RegistrationRefused("the device's driver does not report its pages")
            keys = registrar.by_address(self._region.address, self._region.nbytes)
        except RegistrationRefused as error:
            raise RegistrationRefused(f"as a dma-buf: {why}; as peer memory: {error}; {WHAT_GPUS_NEED}") from error
        return keys, f"device memory as peer memory (no dma-buf: {why})"

    def flush(self) -> bool:
        """Make what a card is known to have written visible to all that is launched after this. A completion only says
        that the card has sent it towards the device. True: something had to be done. Any thread. Raises DeviceError."""
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
    """Seals of one link on their way, less than 65,536."""
    device_check_ms: int = 500
    """Time between two checks of the device."""


RDMA_LIMITS: Final = RdmaLimits()


class RdmaDevice:
    """One port of one device, one protection domain, one memory region over the whole of `region`.

    The region stays pinned and must stay where it is until `close`. Control thread only, but for the making: pinning
    the region takes a while, so that may be another thread.
    """

    def __init__(self, region: RdmaRegion, config: RdmaConfig, *, remote_writes: bool, limits: RdmaLimits) -> None:
        """Finds a port, opens and registers. `remote_writes`: others may write into the region (a receiver), or none.

        Raises:
            RdmaUnavailable: no such port, no pyverbs, no right to open the device, or it cannot register the region.
        """
        ports = find_ports()
        port = choose_port(ports, config.device)
        if port is None:
            have = ", ".join(f"{p.device}:{p.number} {p.state}" for p in ports) or "none"
            wanted = f"the device {config.device}" if config.device else "a device"
            raise RdmaUnavailable(f"no port of {wanted} is active and has an address (there are: {have})")
        self.port, self.config = port, config
        self.verbs = load_verbs()
        need_library()
        self.nbytes = region.nbytes
        self._probe_U8 = np.zeros(PROBE_BYTES, np.uint8)
        """Where writers' probes go, and where ours come from."""
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
            registrar = Registrar(self.verbs, self.domain, access, opened)
            what = f"the KV region of {self.nbytes:,} bytes"
            try:
                self.keys, how = region.register(registrar, remote_writes=remote_writes)
                what = "a page for probes"
                self.probe_keys = registrar.by_address(int(self._probe_U8.ctypes.data), PROBE_BYTES)
            except RegistrationRefused as error:
                raise RdmaUnavailable(f"{port.device} cannot register {what}: {error}") from error
            self._close = opened.pop_all()
        self.registered_as = f"{port.device}:{port.number}, {how}"
        """For people."""
        log.info("RDMA device is open", device=port.device, port=port.number, gid=port.best_gid.kind.name)
        self.gid, self.mtu, self.lid = port.best_gid.raw, int(attributes.active_mtu), int(attributes.lid)
        self.ethernet = port.link_layer == "Ethernet"
        self.send_wrs_max = min(limits.send_wrs_max, int(device_limits.max_qp_wr))
        self.seals_max = min(limits.seals_max, int(device_limits.max_qp_wr), int(device_limits.max_cqe) // config.qps)

    def close(self) -> None:
        """Let go of the region and the device. Its queue pairs are closed before. Idempotent."""
        with contextlib.suppress(self.verbs.error):
            self._close.close()


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
        self._mtu = device.mtu
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
        self._mtu = min(self.ends.mtu, peer.mtu)
        with self._or_failed("a queue pair cannot be connected"):
            for qp, own, other in zip(self._qps, self.ends.qps, peer.qps, strict=True):
                self._to_ready(qp, own, other, peer)

    def poster(self, *, dst_base: int, rkey: int) -> Poster:
        """What posts on these queue pairs. Raises QueuePairFailed."""
        device = self._device
        with self._or_failed("nothing can be posted"):
            return Poster(
                qps=[qp_address(qp) for qp in self._qps],
                cq=cq_address(self._cq),
                channel_fd=self.fd,
                src_base=device.keys.base,
                lkey=device.keys.lkey,
                dst_base=dst_base,
                rkey=rkey,
                take_event=functools.partial(self.take_event, notify=False),
            )

    def post_probes(self, dst_base: int, rkey: int) -> None:
        """On each queue pair a packet as large as the path takes, since some paths lose only large ones. `take_probes`
        follows. Raises QueuePairFailed."""
        enums, wr, device = self._verbs.enums, self._verbs.wr, self._device
        nbytes = 128 << self._mtu  # enum ibv_mtu: 1 is 256, 5 is 4096
        with self._or_failed("a probe cannot be posted"):
            self._cq.req_notify()
            for index, qp in enumerate(self._qps):
                request = wr.SendWR(
                    wr_id=index,
                    opcode=enums.IBV_WR_RDMA_WRITE_WITH_IMM,
                    num_sge=1,
                    imm_data=socket.htonl(index),
                    sg=[wr.SGE(device.probe_keys.base, nbytes, device.probe_keys.lkey)],
                    send_flags=enums.IBV_SEND_SIGNALED,
                )
                request.set_wr_rdma(rkey, dst_base)
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

    def take_event(self, *, notify: bool = True) -> None:
        """`fd` is readable: take the event, and ask for the next one, or leave that to C. Raises QueuePairFailed."""
        with self._or_failed("the completion queue is gone"):
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)
            if notify:
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
        """RESET and destroy every queue pair, then the completion queue: evidence. Idempotent.

        RESET drops what is queued; a queue pair in ERR could still be working off what has come in. The destroying call
        returns when the device has let go. Raises QueuePairFailed: there is no evidence.
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
            path_mtu=self._mtu,
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
        request = wr.RecvWR(num_sge=1, sg=[wr.SGE(device.keys.base, 0, device.keys.lkey)])
        # An immediate brings no bytes; pyverbs insists on room for some.
        request.num_sge = 0
        self._qps[index].post_recv(request)


DESTROY_RETRY_MS = 1000
DESTROY_TRIES_MAX = 3
"""While a port or link closes. Before, there is no limit."""


class Hold:
    """Keeps the device open for a port or for the queue pairs of a link. Control thread only."""

    def __init__(self, memory: RdmaMemory, device: RdmaDevice) -> None:
        self.device = device
        self.qps: QueuePairs | None = None
        """The link's, which `destroy` destroys."""
        self.ending = False
        """`destroy` has been called."""
        self.tries_left: int | None = None
        """To destroy them once more; None: no limit."""
        self.left_behind = False
        self.lost = ""
        """Why the device is lost, if it is."""
        self.on_lost: Callable[[str], None] = lambda _: None
        """Called with that reason."""
        self._memory = memory

    def destroy(self, over: Callable[[bool], None], peer: str, meanwhile: str, *, flush: bool = False) -> None:
        """Destroy the queue pairs, flush the device if asked to, and release it. `over(True)`, the evidence, comes in
        this call, or after more tries, which are logged as `meanwhile`. `over(False)`: the last has failed, the device
        stays open and the region pinned until the process ends.

        With limited tries nothing is flushed: a port that closes reports no evidence.
        """
        self.ending = True
        try:
            if self.qps is not None:
                self.qps.destroy()
                if flush and self.tries_left is None:
                    self._memory.flush()
        except (QueuePairFailed, DeviceError) as error:
            self._memory.destroy_failed += isinstance(error, QueuePairFailed)
            if self.tries_left == 0:
                self.left_behind = True
                log.error("queue pairs are left to the end of the process", peer=peer, reason=str(error))
                over(False)
                return
            if self.tries_left is not None:
                self.tries_left -= 1
            self._memory.repeats.error(meanwhile, peer=peer, reason=str(error))
            again = functools.partial(self.destroy, over, peer, meanwhile, flush=flush)
            asyncio.get_running_loop().call_later(DESTROY_RETRY_MS / 1000, again)
            return
        flushed = ", the device is flushed" if flush else ""
        self._memory.repeats.over(peer, f"its queue pairs are destroyed{flushed}")
        self._memory.release(self)
        over(True)


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
        self._open = functools.partial(RdmaDevice, region, config, remote_writes=remote_writes, limits=limits)
        self._held: RdmaDevice | None = self._open()
        self._lost = False
        self._holds: list[Hold] = []
        self.returned: Callable[[], None] = lambda: None
        """Called each time that a device has been opened again."""
        self.repeats = RepeatLog(log, self._loop.time)
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self.devices_lost = self.destroy_failed = self.flush_failed = 0
        self.flushes = 0
        """Flushes that the device needed."""
        self._timer = self._loop.call_later(limits.device_check_ms / 1000, self._look)

    @property
    def device(self) -> RdmaDevice | None:
        """None: there is none now."""
        return None if self._lost else self._held

    def flush(self) -> None:
        """See `DeviceBytes.flush`. Takes microseconds. Raises DeviceError: bytes may become visible late."""
        try:
            self.flushes += self._region.flush()
        except DeviceError:
            self.flush_failed += 1
            raise

    def describe(self) -> str:
        """For people: the device, and how the region is registered with it."""
        return self.device.registered_as if self.device is not None else "no device now"

    def acquire(self) -> Hold:
        """Raises RdmaUnavailable: there is no device now."""
        device = self.device
        if device is None:
            raise RdmaUnavailable("the RDMA device is gone, or its port is down; it is used again when it is back")
        hold = Hold(self, device)
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
            hold.lost = reason
            hold.on_lost(reason)
        self._close_if_free()

    async def close(self) -> None:
        """Once everyone has released it, or left it behind: then the device is not closed. Idempotent."""
        self._closed = True
        self._timer.cancel()
        self.repeats.close()
        if self._opening is not None:
            await asyncio.wait([self._opening])
        assert all(hold.left_behind for hold in self._holds), "links or ports still use the device"
        if self._holds:
            log.error("RDMA device stays open: a queue pair cannot be destroyed", holds=len(self._holds))
        elif self._held is not None:
            self._held.close()
            self._held = None

    def release(self, hold: Hold) -> None:
        """It has no queue pair. Once."""
        self._holds.remove(hold)
        self._close_if_free()

    def _close_if_free(self) -> None:
        if self._lost and not self._holds and self._held is not None:
            self._held.close()
            self._held = None

    def _look(self) -> None:
        if self._closed:
            return
        self.repeats.upkeep()
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


@dataclass(slots=True, kw_only=True, eq=False)
class RdmaConnection(Connection):
    """Has `hold` from just before it may write until its queue pairs are destroyed; then it is forgotten. Its link is
    made when all probes have come: from then on it has `seals`."""

    hold: Hold | None = None
    probed: set[int] = field(default_factory=set)
    """Queue pairs whose probe has come."""

    @property
    def ends(self) -> LinkEnds:
        """The writer's."""
        return LinkEnds.decode(self.hello.payload)

    @property
    def writer(self) -> str:
        """For people."""
        return f"{self.pair.writer:x}"


class RdmaReceiverPort(ListeningPort[RdmaConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). A fence ends when the pair's queue
    pairs are destroyed and the device is flushed; where that fails it is tried again every second."""

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self,
        *,
        memory: RdmaMemory,
        events: ReceiverEvents,
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        offered: Callable[[bool], None] = lambda _: None,
        limits: PortLimits = PORT_LIMITS,
    ) -> None:
        """See `ListeningPort`. `memory` has the region, open to remote writes; the caller's, it outlives the port.

        `offered(False)` is called when the device is lost, `offered(True)` when it is back.
        """
        super().__init__(RdmaConnection, listen=listen, advertise_host=advertise_host, events=events, limits=limits)
        self._memory = memory
        self._offered = offered
        self._hold: Hold | None = None
        self._unsealed: dict[GrantId, Pair] = {}
        """Grants that may be written to, and whose seal has not come."""
        memory.returned = self._device_back
        self._device_back()

    def _endpoint_address(self) -> str:
        # Without a device the address leads to a refusal, which says so.
        keys = self._hold.device.keys if self._hold is not None else Keys(0, 0, 0)
        return RegionAddress(listens=self.address, base=keys.base, rkey=keys.rkey).encode()

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Not enforced: a writer that has the key is bounded only by its own library."""
        del epoch, ranges
        self._unsealed[grant] = pair

    def forbid(self, grant: GrantId) -> bool:
        """The writer has finished. If no seal of this grant has had the device flushed, flush it now.

        False: the flush failed, and the link ends.
        """
        flushed = True
        pair = self._unsealed.pop(grant, None)
        for connection in list(self._connections.values()):
            if connection.hold is None or connection.pair != pair:
                continue
            if connection.hold.ending:
                flushed = False  # it has ended, and its own flush is still to come
                continue
            try:
                self._flush("a grant is over, and the device's memory cannot be flushed", connection)
            except Refusal as refusal:
                self._handle(connection, refusal)
                flushed = False
        if not flushed and pair is not None:
            self._unsealed[grant] = pair
        return flushed

    async def close(self) -> None:
        """See `BasePort.close`. Queue pairs that cannot be destroyed are left behind (`Hold.destroy`)."""
        if self._closed:
            return
        for connection in self._connections.values():
            if connection.hold is not None:
                connection.hold.tries_left = DESTROY_TRIES_MAX
        await super().close()
        while self._connections:  # noqa: ASYNC110 - as long as its queue pairs may be tried again
            await asyncio.sleep(DESTROY_RETRY_MS / 1000)
        if self._hold is not None:
            self._memory.release(self._hold)
            self._hold = None

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics; the device's own among them."""
        held = self._hold.device if self._hold is not None else None
        return {
            **super().describe(),
            "device": held.port.device if held is not None else "none",
            "registered": self._memory.describe(),
            "queue_pairs": sum(len(c.ends.qps) for c in self._connections.values() if c.hold is not None),
            "devices_lost": self._memory.devices_lost,
            "flushes": self._memory.flushes,
            "seals": self._counts["seals"],
            "links_unproved": self._counts["links_unproved"],
            "destroy_failed": self._memory.destroy_failed,
            "flush_failed": self._memory.flush_failed,
            "device_counters": counters_of(held.port.device, held.port.number) if held is not None else {},
        }

    # The device.

    def _device_back(self) -> None:
        if self._closed or self._hold is not None:
            return
        try:
            self._hold = self._memory.acquire()
        except RdmaUnavailable:
            self._offered(False)
            return
        self._hold.on_lost = self._device_lost
        self._offered(True)

    def _device_lost(self, _: str) -> None:
        """Its queue pairs are of no use: destroy them, which fences their pairs, and release it."""
        self._offered(False)
        for connection in list(self._connections.values()):
            if connection.hold is not None and not self._closed:
                self.fence(connection.pair, connection.epoch)
        assert self._hold is not None
        self._memory.release(self._hold)
        self._hold = None

    # Handshake.

    def _identify(self, connection: RdmaConnection) -> None:
        LinkEnds.decode(connection.hello.payload)

    def _prepare(self, connection: RdmaConnection) -> None:
        """Acquire the device and make as many queue pairs as the writer has. `_drop` follows where it refuses."""
        try:
            connection.hold = hold = self._memory.acquire()
        except RdmaUnavailable as error:
            raise Refusal(RefusalReason.DEVICE) from error
        device, ends = hold.device, connection.ends
        if ends.ethernet != device.ethernet:
            raise Refusal(RefusalReason.LINK_LAYER)
        try:
            hold.qps = QueuePairs(device, len(ends.qps), sends=False)
        except QueuePairFailed as error:
            raise self._no_queue_pairs(error) from error
        welcome = RdmaWelcome(
            region_nbytes=device.nbytes,
            probe_base=device.probe_keys.base,
            probe_rkey=device.probe_keys.rkey,
            ends=hold.qps.ends.encode(),
        )
        self._handle(connection, wire.Prepared(payload=welcome.encode(), probes=True))

    def _opened(self, connection: RdmaConnection) -> None:
        """Its queue pairs can receive from here on, and only `_drop` ends that."""
        assert connection.hold is not None and connection.hold.qps is not None
        qps = connection.hold.qps
        self._loop.add_reader(qps.fd, self._completions, connection)
        try:
            qps.connect(connection.ends)
        except QueuePairFailed as error:
            raise self._no_queue_pairs(error) from error

    def _no_queue_pairs(self, error: QueuePairFailed) -> Refusal:
        log.warning("no queue pairs for a writer", reason=str(error))
        return Refusal(RefusalReason.QUEUE_PAIR)

    # What writers send.

    def _left(self, connection: RdmaConnection, *, drained: bool) -> None:
        del drained  # the queue pairs are destroyed, whatever is on its way
        # The immediates of its seals came before the device reported their completion to it.
        self._completions(connection, awaited=False)
        self._drop(connection)

    def _lost(self, connection: RdmaConnection) -> None:
        """Whole seals are delivered first. Then the pair is fenced, for what the writer left unfinished."""
        self._completions(connection, awaited=False)
        self._fail(connection, "the connection ended without BYE")

    def _completions(self, connection: RdmaConnection, *, awaited: bool = True) -> None:
        """Take in the immediates that have come. `awaited`: the device says that there are some."""
        hold = connection.hold
        if hold is None or hold.ending:
            return
        assert hold.qps is not None
        try:
            if awaited:
                hold.qps.take_event()
            for index, immediate_be in hold.qps.take_immediates():
                number = socket.ntohl(immediate_be)
                if connection.seals is not None:
                    self._report(connection, connection.seals.number_came(number, index))
                else:
                    self._probe_came(connection, hold.qps.ends, index, number)
        except QueuePairFailed as error:
            self._fail(connection, str(error))
        except Refusal as refusal:
            self._handle(connection, refusal)

    def _probe_came(self, connection: RdmaConnection, ends: LinkEnds, qp: int, number: int) -> None:
        """The first immediate on a queue pair is its index. The last of them makes the link."""
        if qp in connection.probed or number != qp:
            raise Refusal(RefusalReason.PROBE)
        connection.probed.add(qp)
        if len(connection.probed) == len(ends.qps):
            connection.cancel_timer()
            connection.seals = SealGather(epoch=connection.epoch, ways=len(ends.qps), seals_max=ends.seals_max)
            self._handle(connection, Signal.PROBES_CAME)

    def _flush_for(self, connection: RdmaConnection, message: wire.SealSent) -> None:
        self._flush("a seal is refused: the device's memory cannot be flushed", connection)
        self._unsealed.pop(message.seal.grant, None)

    def _flush(self, failed: str, connection: RdmaConnection) -> None:
        """Raises Refusal: bytes may become visible late, so the link ends. Each is logged."""
        try:
            self._memory.flush()
        except DeviceError as error:
            log.error(failed, writer=connection.writer, reason=str(error))
            raise Refusal(RefusalReason.FLUSH) from error

    # Ends.

    def _fail(self, connection: RdmaConnection, reason: str) -> None:
        """The link cannot go on, and may have lost bytes: fence its pair, if the link was ever made."""
        log.info("rdma link ended", writer=connection.writer, reason=reason)
        if connection.seals is not None:
            self._fence_own(connection)
        self._drop(connection)

    def _broken(self, connection: RdmaConnection, reason: RefusalReason) -> None:
        self._fail(connection, f"refused: {reason.name}")

    def _fenced(self, connection: RdmaConnection) -> None:
        self._drop(connection)

    def _drop(self, connection: RdmaConnection) -> None:
        """The one place where a connection stops counting as one that may write: its queue pairs are destroyed, and
        what has come through them is where it belongs."""
        connection.close_sock(self._loop)
        hold = connection.hold
        if hold is None:
            self._connections.pop(connection.number, None)
        elif not hold.ending:
            if hold.qps is not None:
                # Before it is closed, and the number another's.
                self._loop.remove_reader(hold.qps.fd)
            over = functools.partial(self._destroyed, connection)
            hold.destroy(over, connection.writer, "a fence has no evidence yet", flush=True)

    def _destroyed(self, connection: RdmaConnection, proved: bool) -> None:
        connection.hold = None
        del self._connections[connection.number]
        if connection.channel.opened:
            self._counts["links_unproved"] += connection.seals is None
            if proved and not self._closed:
                self._proved(connection, Evidence.DESTROYED)


SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaLinkLimits(ChainLimits):
    """`connect_ms_max` includes the first data. A chain is posted with one doorbell, and its last write completes."""

    spin_us_max: int = 50
    """How long the thread polls for a completion before it sleeps; 0: never."""


RDMA_LINK_LIMITS: Final = RdmaLinkLimits()


class RdmaUnproved(ConnectError):
    """The handshake is done, and no data arrives: the devices do not reach each other (a route, a VLAN, a filter of UDP
    port 4791, or a switch whose MTU is smaller than the devices')."""


async def _prove(
    channel: WriterChannel,
    qps: QueuePairs,
    welcome: RdmaWelcome,
    parts: LinkParts,
    limits: RdmaLinkLimits,
    deadline_s: float,
) -> None:
    """Returns when every queue pair has carried a whole packet there and its acknowledgement back, and the receiver has
    seen all of them. The way back needs no more: a receiver sends only acknowledgements.

    Raises RdmaUnproved, ConnectError, QueuePairFailed, and TimeoutError: only the receiver's word is missing.
    """
    left, loop = len(qps.ends.qps), parts.loop
    acknowledged = loop.create_future()

    def look() -> None:
        nonlocal left
        try:
            left -= qps.take_probes()
        except QueuePairFailed as error:
            loop.remove_reader(qps.fd)
            if not acknowledged.done():
                acknowledged.set_exception(error)
            return
        if not left and not acknowledged.done():
            acknowledged.set_result(None)

    qps.post_probes(welcome.probe_base, welcome.probe_rkey)
    loop.add_reader(qps.fd, look)
    ready = loop.create_task(channel.receive(wire.Ready))
    try:
        async with asyncio.timeout_at(deadline_s):
            await asyncio.gather(acknowledged, ready)
    except (ConnectError, ProbeLost, TimeoutError) as error:
        reason = error.reason if isinstance(error, ConnectError) else None
        if not left or (isinstance(error, ConnectError) and reason is not RefusalReason.PROBE):
            raise
        why = f"no data arrives within {limits.connect_ms_max} ms" if isinstance(error, TimeoutError) else error
        text = f"{parts.endpoint.address}: the devices do not reach each other: {why}"
        raise RdmaUnproved(text, reason) from error
    finally:
        loop.remove_reader(qps.fd)
        ready.cancel()
        await asyncio.wait([ready])  # it has to be off the socket before that is closed


class RdmaWriterLink(ChainLink):
    """A `ChainLink`. It also ends with an error of a queue pair or the loss of the device. Made by `connect`."""

    transport: ClassVar[TransportName] = TransportName.RDMA
    codec: ClassVar[wire.Codec] = CODEC
    failed = QueuePairFailed

    def __init__(
        self,
        channel: WriterChannel,
        parts: LinkParts,
        limits: RdmaLinkLimits,
        *,
        hold: Hold,
        region: RegionAddress,
        region_nbytes: int,
        peer: LinkEnds,
    ) -> None:
        """Takes over what is connected, and the hold. Use `connect`."""
        assert hold.qps is not None
        self._hold, self._spin_us_max = hold, limits.spin_us_max
        self._poster: Poster = hold.qps.poster(dst_base=region.base, rkey=region.rkey)
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            super().__init__(
                channel,
                parts,
                replace(limits, chain_wrs_max=min(limits.chain_wrs_max, self._poster.chain_wrs_max)),
                src_nbytes=hold.device.nbytes,
                dst_nbytes=region_nbytes,
                qps=len(peer.qps),
                send_wrs_max=hold.device.send_wrs_max,
                seals_max=min(hold.device.seals_max, peer.seals_max),
            )
        except ConnectError:
            os.close(self._wake_fd)
            raise

    @classmethod
    async def connect(
        cls,
        parts: LinkParts,
        memory: RdmaMemory,
        limits: RdmaLinkLimits = RDMA_LINK_LIMITS,
    ) -> RdmaWriterLink:
        """Connect the queue pairs, prove the pair's secret and that data passes. `memory` has the source region, and
        outlives the link.

        Raises:
            RdmaUnproved: the devices do not reach each other.
            ConnectError: refused, unreachable, not the receiver, no device, or not done within `connect_ms_max`.
        """
        endpoint, loop = parts.endpoint, parts.loop
        channel: WriterChannel | None = None
        deadline_s = loop.time() + limits.connect_ms_max / 1000
        with connect_errors(endpoint.address, limits.connect_ms_max, QueuePairFailed, RdmaUnavailable):
            hold = memory.acquire()
            try:
                async with asyncio.timeout_at(deadline_s):
                    region = RegionAddress.decode(endpoint.address)
                    hold.qps = qps = QueuePairs(hold.device, hold.device.config.qps, sends=True)
                    link_id = int.from_bytes(os.urandom(8))
                    hello = wire.Hello(pair=parts.pair, epoch=endpoint.epoch, link=link_id, payload=qps.ends.encode())
                    channel = await WriterChannel.open(region.listens, loop, CODEC, address=endpoint.address)
                    welcome = RdmaWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
                    peer = LinkEnds.decode(welcome.ends)
                    if len(peer.qps) != len(qps.ends.qps):
                        raise ConnectError(f"{endpoint.address}: {len(peer.qps)} queue pairs in the welcome")
                    qps.connect(peer)
                await _prove(channel, qps, welcome, parts, limits, deadline_s)
                link = cls(
                    channel, parts, limits, hold=hold, region=region, region_nbytes=welcome.region_nbytes, peer=peer
                )
            except BaseException:
                # With a BYE the receiver need not fence the pair.
                hold.tries_left = 0
                hold.destroy(lambda _: None, endpoint.address, "")
                if channel is not None and not hold.left_behind:
                    channel.leave(wire.Bye(epoch=endpoint.epoch))
                elif channel is not None:
                    channel.sock.close()
                raise
        hold.on_lost = link._device_lost
        if hold.lost:
            link._device_lost(hold.lost)
        return link

    async def close(self) -> None:
        """See `WriterLink.close`. What was posted on queue pairs that are left behind (`Hold.destroy`) never completes:
        the device may still read it."""
        self._hold.tries_left = DESTROY_TRIES_MAX
        await super().close()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        device = self._hold.device
        return {**super().describe(), "device": device.port.device, "queue_pairs": device.config.qps}

    # Posting thread.

    def _post_all(self) -> None:
        spin_us = 0
        while not self._cut and not (self._ending and self._lanes.drained):
            self._post_what_fits()
            busy = self._lanes.on_the_way
            completions, waited_us = self._poster.wait(self._wake_fd, spin_us if busy else 0, SLEEP_MS_MAX)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            for number, status in completions:
                if status:
                    raise QueuePairFailed(f"a write completed with status {status}")
                self._lanes.completed(number)
            # Polling pays only where the last wait was so short that polling would have caught it.
            spin_us = self._spin_us_max if waited_us <= self._spin_us_max else 0

    def _post_what_fits(self) -> None:
        while not self._cut and (taken := self._lanes.take()) is not None:
            if isinstance(taken, SealPart):
                self._poster.post_seal(taken.lane, taken.seal, taken.number)
            else:
                ops = taken.part.ops
                self._poster.post_writes(taken.lane, ops.src, ops.dst, ops.nbytes, taken.number)

    # Control thread.

    def _wake(self) -> None:
        if self._wake_fd >= 0:  # a link that is over may still be told to abandon grants
            os.eventfd_write(self._wake_fd, 1)

    def _device_lost(self, reason: str) -> None:
        self._end(f"RDMA device lost: {reason}")

    def _thread_over(self, failure: str) -> None:
        """The device reads the source until the last queue pair is destroyed: nothing completes before that."""
        bye = None if failure or self._cut else wire.Bye(epoch=self._epoch)
        over = functools.partial(self._destroyed, bye)
        self._hold.destroy(over, self._address, "RDMA link keeps its source blocks")

    def _destroyed(self, bye: wire.Bye | None, destroyed: bool) -> None:
        if destroyed:
            self._lanes.lose()
        self._hang_up(bye if destroyed else None)
        os.close(self._wake_fd)
        self._wake_fd = -1
        self._finish_soon()
