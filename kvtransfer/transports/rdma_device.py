"""An opened RDMA device, a node's region registered with it once, and the queue pairs of a link on it; what happens
when the device goes and comes; and whether a node offers rdma.

A region lies in host memory or on a device. Memory of a device is registered as a dma-buf where its driver makes one
and the card's takes it: that needs nothing but these two. Else by its address, as peer memory, for which a module of
the kernel (nvidia_peermem) has to tell the card's driver what lies there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from baton.errors import InvalidField
from baton.log import get_log
from kvtransfer.device.driver import DeviceError
from kvtransfer.device.gpudirect import GpuDirect
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import TransportName
from kvtransfer.transports.limits import check_limits
from kvtransfer.transports.rdma import GID_BYTES, PROBE_BYTES, LinkEnds, ProbePlace, QpAddress
from kvtransfer.transports.rdma_ports import RdmaPort, choose_port, find_ports, why_lost
from kvtransfer.transports.rdma_verbs import (
    Addresses,
    DeviceBroken,
    Poster,
    RdmaUnavailable,
    Verbs,
    channel_fd,
    cq_address,
    load_verbs,
    need_library,
    qp_address,
    take_event,
)
from kvtransfer.transports.settings import RdmaConfig

log = get_log("rdma")

HOP_LIMIT: Final = 64
"""Routers that a packet may pass (RoCE v2)."""
_POLL_MAX = 64
_RNR_TIMER_CODE = 12
_RNR_RETRIES = 6
"""Repeats of an immediate for which no receive is posted, every 0.64 ms; 7 would be for ever. As many are posted as may
come, so that none is ever repeated unless one side breaks the protocol."""


WHAT_GPUS_NEED = (
    "load the kernel's module nvidia_peermem (modprobe nvidia_peermem), or use NVIDIA's open kernel modules, which "
    "make dma-bufs; a region larger than the GPU's BAR1 (nvidia-smi -q) cannot be registered either way"
)
_WHAT_HOSTS_NEED = "raise the limit of locked memory (ulimit -l, LimitMEMLOCK=, or the capability IPC_LOCK)"


class RegistrationRefused(Exception):
    """Memory cannot be registered with this card; the text says why."""


class RegisteredAs(Enum):
    HOST_MEMORY = "host memory"
    DMA_BUF = "device memory as a dma-buf"
    PEER_MEMORY = "device memory as peer memory"


class Keys(NamedTuple):
    """`base`: where the card finds the first byte, under these keys."""

    base: int
    lkey: int
    rkey: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    keys: Keys
    registered_as: RegisteredAs
    why_not_better: str = ""
    """Why not in the way that is tried first; empty: it was that one."""

    @property
    def text(self) -> str:
        """For people."""
        return self.registered_as.value + (f" ({self.why_not_better})" if self.why_not_better else "")


class Registrar(Protocol):
    """Registers memory with one card, and keeps it registered until it is closed itself."""

    def by_address(self, address: int, nbytes: int) -> Keys:
        """Raises RegistrationRefused."""
        ...

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        """`nbytes` from `offset` on; `fd` stays the caller's, who may close it at once. Raises RegistrationRefused."""
        ...


class RdmaRegion(Protocol):
    """What `RdmaMemory` registers; its memory outlives that. Any thread, one at a time."""

    @property
    def nbytes(self) -> int: ...

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """The whole region. `remote_writes`: others may write into it. Raises RegistrationRefused."""
        ...

    def flush(self) -> bool:
        """What a card is known to have written is seen by all that is launched after this. Whether anything had to be
        done for that. Once registered; raises DeviceError."""
        ...


class HostBytes:
    """A region in host memory: the processor sees what a card has written before the card says so."""

    def __init__(self, array_U8: Callable[[], np.ndarray]) -> None:
        """`array_U8` gives all bytes, which lie where they are for good; no view of them is kept."""
        self._array_U8 = array_U8

    @property
    def nbytes(self) -> int:
        return len(self._array_U8())

    def register(self, registrar: Registrar, *, remote_writes: bool) -> Registration:
        """See `RdmaRegion.register`."""
        del remote_writes  # they need nothing
        array_U8 = self._array_U8()
        assert array_U8.dtype == np.uint8 and array_U8.flags.c_contiguous
        try:
            keys = registrar.by_address(int(array_U8.ctypes.data), len(array_U8))
        except RegistrationRefused as error:
            raise RegistrationRefused(f"{error}; {_WHAT_HOSTS_NEED}") from error
        return Registration(keys=keys, registered_as=RegisteredAs.HOST_MEMORY)

    def flush(self) -> bool:
        """See `RdmaRegion.flush`."""
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
        """See `RdmaRegion.register`: as a dma-buf, or else as peer memory."""
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
                return Registration(keys=self._by_dma_buf(registrar), registered_as=RegisteredAs.DMA_BUF)
            except (DeviceError, RegistrationRefused) as error:
                why = str(error)
        try:
            keys = self._by_address(registrar, allowed)
        except RegistrationRefused as error:
            raise RegistrationRefused(f"as a dma-buf: {why}; as peer memory: {error}; {WHAT_GPUS_NEED}") from error
        return Registration(keys=keys, registered_as=RegisteredAs.PEER_MEMORY, why_not_better=f"no dma-buf: {why}")

    def flush(self) -> bool:
        """See `RdmaRegion.flush`. A completion says that the card has sent its writes on, towards the device; only the
        device's driver can say that they are there."""
        assert self._allowed is not None, "not registered"
        if self._allowed.ordered:
            return False
        self._region.driver.flush_remote_writes()
        return True

    def _by_dma_buf(self, registrar: Registrar) -> Keys:
        region = self._region
        found = region.driver.dma_buf(region.address, region.nbytes)
        try:
            return registrar.by_dma_buf(found.fd, found.offset, region.nbytes)
        finally:
            os.close(found.fd)

    def _by_address(self, registrar: Registrar, allowed: GpuDirect) -> Keys:
        if not allowed.peer_memory:
            raise RegistrationRefused("the device's driver does not report its pages")
        return registrar.by_address(self._region.address, self._region.nbytes)


class VerbsRegistrar:
    """By pyverbs, in one protection domain, before which it is closed."""

    def __init__(self, verbs: Verbs, domain: Any, access: int) -> None:
        self._verbs = verbs
        self._domain = domain
        self._access = access
        self._opened = contextlib.ExitStack()

    def by_address(self, address: int, nbytes: int) -> Keys:
        """See `Registrar`."""
        return self._kept(address, lambda: self._verbs.mr.MR(self._domain, nbytes, self._access, address=address))

    def by_dma_buf(self, fd: int, offset: int, nbytes: int) -> Keys:
        """See `Registrar`. pyverbs gives such memory the addresses from `offset` on, whatever it has elsewhere."""
        make = getattr(self._verbs.mr, "DmaBufMR", None)
        if make is None:
            raise RegistrationRefused("this pyverbs knows no dma-bufs; rdma-core 34 does")
        try:
            return self._kept(offset, lambda: make(self._domain, nbytes, self._access, dmabuf=fd, offset=offset))
        except TypeError as error:
            raise RegistrationRefused(f"this pyverbs takes no dma-buf by its descriptor: {error}") from error

    def close(self) -> None:
        """Nothing is registered any more. Raises what pyverbs raises."""
        self._opened.close()

    def _kept(self, base: int, register: Callable[[], Any]) -> Keys:
        try:
            registered = register()
        except self._verbs.error as error:
            raise RegistrationRefused(str(error)) from error
        self._opened.callback(registered.close)
        return Keys(base, int(registered.lkey), int(registered.rkey))


class QueuePairFailed(Exception):
    """A queue pair met an error; the link cannot go on."""


class ProbeLost(QueuePairFailed):
    """A probe was not acknowledged: nothing gets from this device to that one, or no answer back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaLimits:
    """What each queue pair may have on its way, and how often the device is looked at."""

    send_wrs_max: int = 128
    """Writes on their way on one queue pair, one of them kept for a seal."""
    seals_max: int = 64
    """Seals of one link on their way."""
    device_check_ms: int = 500
    """Time between two looks whether the device is there."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.send_wrs_max < 2 or self.seals_max >= 1 << 16:
            raise ValueError("send_wrs_max must be 2 or more, seals_max less than 65,536")


RDMA_LIMITS: Final = RdmaLimits()


class RdmaDevice:
    """One port of one device, one protection domain, one memory region over the whole of `region`.

    The region stays pinned and must stay where it is until `close`. The thread that calls may wait while it is pinned;
    else control thread only.
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
        self.probe_base = int(self._probe_U8.ctypes.data)
        self._close = contextlib.ExitStack()
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
            registrar = VerbsRegistrar(self.verbs, self.domain, access)
            opened.callback(registrar.close)
            try:
                self.registration = region.register(registrar, remote_writes=remote_writes)
            except RegistrationRefused as error:
                raise RdmaUnavailable(
                    f"{port.device} cannot register the KV region of {self.nbytes:,} bytes: {error}"
                ) from error
            try:
                probe = registrar.by_address(self.probe_base, PROBE_BYTES)
            except RegistrationRefused as error:
                raise RdmaUnavailable(f"{port.device} cannot register a page for probes: {error}") from error
            self._close = opened.pop_all()
        self.base, self.lkey, self.rkey = self.registration.keys
        self.probe_lkey, self.probe_rkey = probe.lkey, probe.rkey
        self.mtu, self.lid = int(attributes.active_mtu), int(attributes.lid)
        self.ethernet = port.link_layer == "Ethernet"
        self.send_wrs_max = min(limits.send_wrs_max, int(device_limits.max_qp_wr))
        self.seals_max = min(limits.seals_max, int(device_limits.max_qp_wr), int(device_limits.max_cqe) // config.qps)

    @property
    def gid(self) -> bytes:
        return self.port.best_gid.raw

    @property
    def probes(self) -> ProbePlace:
        """Where writers' probes go, and whence ours come."""
        return ProbePlace(base=self.probe_base, rkey=self.probe_rkey)

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


def mtu_bytes(code: int) -> int:
    """Of the code of enum ibv_mtu: 1 is 256, 5 is 4096."""
    return 128 << code


class QueuePairs:
    """RC queue pairs of one link and their completion queues. Closed by `destroy`, whose return is the fence."""

    def __init__(self, device: RdmaDevice, count: int, randomness: Callable[[int], bytes], *, sends: bool) -> None:
        """In the state INIT, with receives posted for `device.seals_max` immediates if it is the receiving side.

        Raises:
            QueuePairFailed: the device has no room for them, or is gone.
        """
        self._device = device
        self._verbs: Verbs = device.verbs
        self._sends = sends
        self._qps: list[Any] = []
        self._destroyed = False
        verbs, wrs = self._verbs, device.send_wrs_max if sends else device.seals_max
        with contextlib.ExitStack() as opened:
            try:
                self._channel = verbs.cq.CompChannel(device.context)
                opened.callback(self._channel.close)
                self._cq = verbs.cq.CQ(device.context, cqe=count * wrs, channel=self._channel)
                opened.callback(self._cq.close)
                for _ in range(count):
                    self._qps.append(self._make(wrs))
                    opened.callback(self._qps[-1].close)
                    self._to_init(self._qps[-1])
                if not sends:
                    for index in range(count):
                        for _ in range(wrs):
                            self._post_receive(index)
                    self._cq.req_notify()
                self.fd = channel_fd(self._channel)
            except (verbs.error, RdmaUnavailable) as error:
                raise QueuePairFailed(f"no queue pair: {error}") from error
            opened.pop_all()
        self._index = {int(qp.qp_num): index for index, qp in enumerate(self._qps)}
        packets = [int.from_bytes(randomness(3)) for _ in self._qps]
        self.ends = LinkEnds(
            gid=device.gid,
            lid=device.lid,
            mtu=device.mtu,
            ethernet=device.ethernet,
            seals_max=device.seals_max,
            qps=tuple(
                QpAddress(number=int(qp.qp_num), first_packet=packet)
                for qp, packet in zip(self._qps, packets, strict=True)
            ),
        )

    def connect(self, peer: LinkEnds) -> None:
        """Each to the peer's of the same index, at the smaller MTU. Raises QueuePairFailed."""
        assert len(peer.qps) == len(self._qps), (len(peer.qps), len(self._qps))
        try:
            for qp, own, other in zip(self._qps, self.ends.qps, peer.qps, strict=True):
                self._to_ready(qp, own, other, peer)
        except self._verbs.error as error:
            raise QueuePairFailed(f"a queue pair cannot be connected: {error}") from error

    def poster(self, *, dst_base: int, rkey: int) -> Poster:
        """What posts on these queue pairs. Raises QueuePairFailed."""
        device = self._device
        try:
            return Poster(
                need_library(),
                qps=[qp_address(qp) for qp in self._qps],
                cq=cq_address(self._cq),
                channel_fd=self.fd,
                addresses=Addresses(src_base=device.base, lkey=device.lkey, dst_base=dst_base, rkey=rkey),
                take_event=self._take_event,
            )
        except RdmaUnavailable as error:
            raise QueuePairFailed(str(error)) from error

    def post_probes(self, peer: LinkEnds, place: ProbePlace) -> None:
        """On each a packet as large as the path takes, for some paths lose large ones alone; then `take_probes`.

        Raises QueuePairFailed.
        """
        enums, wr, device = self._verbs.enums, self._verbs.wr, self._device
        nbytes = mtu_bytes(min(self.ends.mtu, peer.mtu))
        try:
            self._cq.req_notify()
            for index, qp in enumerate(self._qps):
                request = wr.SendWR(
                    wr_id=index,
                    opcode=enums.IBV_WR_RDMA_WRITE_WITH_IMM,
                    num_sge=1,
                    imm_data=socket.htonl(index),
                    sg=[wr.SGE(device.probe_base, nbytes, device.probe_lkey)],
                    send_flags=enums.IBV_SEND_SIGNALED,
                )
                request.set_wr_rdma(place.rkey, place.base)
                qp.post_send(request)
        except self._verbs.error as error:
            raise QueuePairFailed(f"a probe cannot be posted: {error}") from error

    def take_probes(self) -> int:
        """`fd` is readable: how many probes have been acknowledged since the last call.

        Raises:
            ProbeLost: one was not.
            QueuePairFailed: the completion queue is gone.
        """
        self.take_event()
        try:
            count, completions = self._cq.poll(_POLL_MAX)
        except self._verbs.error as error:
            raise QueuePairFailed(f"the completion queue is gone: {error}") from error
        for completion in completions:
            if completion.status != self._verbs.enums.IBV_WC_SUCCESS:
                raise ProbeLost(f"a probe was not acknowledged: it completed with status {completion.status}")
        return int(count)

    def take_event(self) -> None:
        """`fd` is readable: take the event, and ask for the next one."""
        try:
            take_event(self._channel, self._cq)
            self._cq.req_notify()
        except self._verbs.error as error:
            raise QueuePairFailed(f"the completion queue is gone: {error}") from error

    def _take_event(self) -> None:
        """For the poster."""
        try:
            take_event(self._channel, self._cq)
        except self._verbs.error as error:
            raise DeviceBroken(str(error)) from error

    def take_immediates(self) -> list[tuple[int, int]]:
        """(index of the queue pair, immediate) of what has come; a receive is posted again for each.

        Raises QueuePairFailed: a queue pair is in error. What came before it is lost to the caller, who fences.
        """
        taken: list[tuple[int, int]] = []
        enums = self._verbs.enums
        try:
            while True:
                count, completions = self._cq.poll(_POLL_MAX)
                for completion in completions:
                    if completion.status != enums.IBV_WC_SUCCESS:
                        raise QueuePairFailed(f"completion with status {completion.status}")
                    index = self._index[int(completion.qp_num)]
                    taken.append((index, int(completion.imm_data)))
                    self._post_receive(index)
                if count < _POLL_MAX:
                    return taken
        except self._verbs.error as error:
            raise QueuePairFailed(f"the completion queue is gone: {error}") from error

    def destroy(self) -> None:
        """RESET and destroy every queue pair, then the queues of completions. Idempotent.

        When this returns the device writes nothing more for the peer and reads nothing more for us: RESET drops what is
        queued, and the destroying call returns only when the device has let go. (A queue pair in ERR may still be
        working off what has come in.) What it has sent on towards memory of a device may have to be flushed then
        (`RdmaMemory.flush`).

        Raises:
            QueuePairFailed: there is no such evidence.
        """
        if self._destroyed:
            return
        try:
            while self._qps:
                with contextlib.suppress(self._verbs.error):
                    # Fails where the device is gone; the destroying call is the one that must not.
                    self._qps[-1].modify(
                        self._attributes(qp_state=self._verbs.enums.IBV_QPS_RESET), self._verbs.enums.IBV_QP_STATE
                    )
                self._qps[-1].close()
                self._qps.pop()
            self._cq.close()
            self._channel.close()
        except self._verbs.error as error:
            raise QueuePairFailed(f"a queue pair cannot be destroyed: {error}") from error
        self._destroyed = True

    def _make(self, wrs: int) -> Any:
        qp, enums = self._verbs.qp, self._verbs.enums
        sends, receives = (wrs, 1) if self._sends else (1, wrs)
        cap = qp.QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1)
        init = qp.QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0)
        return qp.QP(self._device.domain, init)

    def _attributes(self, **fields: object) -> Any:
        attributes = self._verbs.qp.QPAttr()
        for name, value in fields.items():
            setattr(attributes, name, value)
        return attributes

    def _to_init(self, qp: Any) -> None:
        enums = self._verbs.enums
        attributes = self._attributes(
            qp_state=enums.IBV_QPS_INIT,
            pkey_index=0,
            port_num=self._device.port.number,
            qp_access_flags=0 if self._sends else enums.IBV_ACCESS_REMOTE_WRITE,
        )
        qp.modify(
            attributes,
            enums.IBV_QP_STATE | enums.IBV_QP_PKEY_INDEX | enums.IBV_QP_PORT | enums.IBV_QP_ACCESS_FLAGS,
        )

    def _to_ready(self, qp: Any, own: QpAddress, other: QpAddress, peer: LinkEnds) -> None:
        enums, addr, config = self._verbs.enums, self._verbs.addr, self._device.config
        gid = ":".join(peer.gid.hex()[i : i + 4] for i in range(0, 2 * GID_BYTES, 4))
        route = addr.GlobalRoute(
            dgid=addr.GID(gid),
            sgid_index=self._device.port.best_gid.index,
            hop_limit=HOP_LIMIT,
            traffic_class=config.traffic_class,
        )
        ready_to_receive = self._attributes(
            qp_state=enums.IBV_QPS_RTR,
            path_mtu=min(self.ends.mtu, peer.mtu),
            dest_qp_num=other.number,
            rq_psn=other.first_packet,
            max_dest_rd_atomic=0,
            min_rnr_timer=_RNR_TIMER_CODE,
            ah_attr=addr.AHAttr(
                dlid=peer.lid, is_global=int(peer.ethernet), port_num=self._device.port.number, gr=route
            ),
        )
        qp.modify(
            ready_to_receive,
            enums.IBV_QP_STATE | enums.IBV_QP_AV | enums.IBV_QP_PATH_MTU | enums.IBV_QP_DEST_QPN
            | enums.IBV_QP_RQ_PSN | enums.IBV_QP_MAX_DEST_RD_ATOMIC | enums.IBV_QP_MIN_RNR_TIMER,
        )  # fmt: skip
        ready_to_send = self._attributes(
            qp_state=enums.IBV_QPS_RTS,
            sq_psn=own.first_packet,
            timeout=config.ack_timeout_code,
            retry_cnt=config.retries_max,
            rnr_retry=_RNR_RETRIES,
            max_rd_atomic=0,
        )
        qp.modify(
            ready_to_send,
            enums.IBV_QP_STATE | enums.IBV_QP_SQ_PSN | enums.IBV_QP_TIMEOUT | enums.IBV_QP_RETRY_CNT
            | enums.IBV_QP_RNR_RETRY | enums.IBV_QP_MAX_QP_RD_ATOMIC,
        )  # fmt: skip

    def _post_receive(self, index: int) -> None:
        wr, device = self._verbs.wr, self._device
        request = wr.RecvWR(num_sge=1, sg=[wr.SGE(device.base, 0, device.lkey)])
        # An immediate brings no bytes; pyverbs insists on room for some.
        request.num_sge = 0
        self._qps[index].post_recv(request)


Lost = Callable[[str], None]


class Hold:
    """Keeps the device open until `release`: whoever has one may have queue pairs on it. Control thread only."""

    def __init__(self, device: RdmaDevice, released: Callable[[Hold], None]) -> None:
        self.device = device
        self._released = released
        self._on_lost: Lost | None = None
        self._reason: str | None = None
        self.left_behind = False

    def on_lost(self, callback: Lost) -> None:
        """Call this with the reason when the device is lost; at once if it has been."""
        self._on_lost = callback
        if self._reason is not None:
            callback(self._reason)

    def lost(self, reason: str) -> None:
        self._reason = reason
        if self._on_lost is not None:
            self._on_lost(reason)

    def release(self) -> None:
        """No queue pair is left. Once."""
        self._released(self)

    def leave_behind(self) -> None:
        """In the place of `release`, where a queue pair cannot be destroyed: the device stays open and the region
        registered, so pinned, until the process ends."""
        self.left_behind = True


class RdmaMemory:
    """Registered once as a whole. Links and ports `acquire` the device and release their hold at their end.

    Control thread only. A device that is taken away, or whose port goes down, is lost: whoever holds it is called, lets
    go of its queue pairs and releases its hold; then the device is closed. From then on a look is taken every
    `device_check_ms` whether a port works again, and the region is registered there, on a thread: it may take seconds.
    """

    def __init__(
        self,
        *,
        region: RdmaRegion,
        config: RdmaConfig,
        loop: asyncio.AbstractEventLoop,
        remote_writes: bool,
        limits: RdmaLimits = RDMA_LIMITS,
    ) -> None:
        """Opens a device at once. `region`'s memory is the caller's and outlives this. Raises RdmaUnavailable."""
        self._region = region
        self._config, self._limits = config, limits
        self._loop = loop
        self._remote_writes = remote_writes
        self._held: RdmaDevice | None = open_device(region, config, remote_writes=remote_writes, limits=limits)
        self._lost = False
        self._holds: list[Hold] = []
        self._returned: list[Callable[[], None]] = []
        self._opening: asyncio.Task[None] | None = None
        self._closed = False
        self.devices_lost = 0
        self.flushes = 0
        """Times that a device's memory had to be flushed behind the writes of others."""
        self._timer = loop.call_later(limits.device_check_ms / 1000, self._look)

    @property
    def device(self) -> RdmaDevice | None:
        """None: there is none now."""
        return None if self._lost else self._held

    def flush(self) -> None:
        """What others are known to have written is seen by whatever is launched after this: before it is used, and
        before what it lies in is used for anything else. Microseconds, where anything has to be done.

        Raises DeviceError: it may be seen late, or be on its way still.
        """
        self.flushes += self._region.flush()

    def describe(self) -> str:
        """For people: the device, and how the region is registered with it."""
        device = self.device
        if device is None:
            return "no device now"
        return f"{device.port.device}:{device.port.number}, {device.registration.text}"

    def when_returned(self, callback: Callable[[], None]) -> None:
        """Call this each time that a device has been opened again."""
        self._returned.append(callback)

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
            opened = await asyncio.to_thread(
                open_device, self._region, self._config, remote_writes=self._remote_writes, limits=self._limits
            )
        except RdmaUnavailable as error:
            log.warning("RDMA device cannot be used", reason=str(error))
            return
        finally:
            self._opening = None
        self._held, self._lost = opened, False
        log.info("RDMA device is back", device=opened.port.device)
        if not self._closed:
            for returned in self._returned:
                returned()


@dataclass(frozen=True, slots=True, kw_only=True)
class LentRegistration:
    """One registration for both halves of a node, made and closed by whoever lends it. None: rdma is not offered.

    Open to remote writes for the receiving half; of the writing half's queue pairs none takes any.
    """

    memory: RdmaMemory | None


def register_if_usable(
    transports: Sequence[TransportName],
    region: RdmaRegion,
    config: RdmaConfig,
    loop: asyncio.AbstractEventLoop,
    *,
    remote_writes: bool,
) -> RdmaMemory | None:
    """The region, registered once as a whole; the caller closes it. None: rdma is not to be offered, or cannot be,
    which is logged. May take seconds: the region is pinned.

    Raises:
        InvalidField: rdma alone is to be offered, and it does not work here.
    """
    if TransportName.RDMA not in transports:
        return None
    try:
        memory = RdmaMemory(region=region, config=config, loop=loop, remote_writes=remote_writes, limits=RDMA_LIMITS)
    except RdmaUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has rdma alone, which does not work here: {error}. `baton doctor` says more"
            ) from error
        # On a machine without any such device that is nothing to warn of.
        (log.warning if find_ports() else log.debug)("rdma is not offered", reason=str(error))
        return None
    device = memory.device
    assert device is not None
    # That there is no dma-buf is nothing to warn of: peer memory moves the same bytes the same way.
    log.info(
        "rdma is offered",
        device=device.port.device,
        port=device.port.number,
        gid=device.port.best_gid.kind.name,
        region=device.registration.text,
    )
    return memory
