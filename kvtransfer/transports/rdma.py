"""Transport over RDMA (RoCE, InfiniBand): the writer's device writes straight into the receiver's registered region.

Here is what its HELLO and WELCOME carry. `rdma_ports` finds devices, `rdma_device` has the open device, the registered
region and the queue pairs, `rdma_receiver` the port, `rdma_writer` the link, `rdma_verbs` pyverbs and the posting by C.

Data goes only by RDMA WRITE on the queue pairs. A probe is a WRITE_WITH_IMM of one whole packet to a place that nobody
reads; its immediate is the index of its queue pair. The receiver sends READY when all have come. The link is made when
the writer has that and its device has acknowledged each probe: the control channel shows nothing about the way between
the devices. With each SEAL an immediate with its number goes down each queue pair that the SEAL names; SEALED says that
all have come. The region's address and key are part of `DataEndpoint.address`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from baton.endpoint import join_endpoint, split_endpoint
from kvtransfer.transport import TransportName
from kvtransfer.transports.control_channel import Codec, MalformedMessage, Ready
from kvtransfer.transports.settings import QPS_MAX

GID_BYTES: Final = 16
PROBE_BYTES: Final = 4096
"""The largest packet that RDMA has."""
_END: Final = struct.Struct(f"<{GID_BYTES}sHBBHH")
_QP: Final = struct.Struct("<II")
_WELCOME: Final = struct.Struct("<QQI")
CODEC: Final = Codec(TransportName.RDMA, Ready, payload_bytes_max=_WELCOME.size + _END.size + QPS_MAX * _QP.size)


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
