"""One writer's connection at the receiver: its limits, its state, and the seals of which something has come."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from baton.ids import Epoch
from kvtransfer.transports import rdma_wire as wire
from kvtransfer.transports.rdma_device import QueuePairs, RdmaConfig
from kvtransfer.transports.rdma_memory import Hold
from kvtransfer.transports.rdma_wire import RefusalReason
from kvtransfer.transports.tcp_socket import TcpSocketOptions

_NUMBER_MASK = 0xFFFF_FFFF
"""An immediate has 32 bits of a seal's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaReceiverConfig:
    """Limits of one port. `connections_max`: proved links; strangers can only fill `handshakes_max`."""

    connections_max: int = field(default=256, metadata={"help": "proved links at a time"})
    handshakes_max: int = field(
        default=64, metadata={"help": "connections at a time that have not proved themselves yet"}
    )
    pairs_max: int = field(default=1024, metadata={"help": "writer processes known at a time"})
    handshake_ms_max: int = field(default=5000, metadata={"help": "how long a handshake may take"})
    accepts_per_wake_max: int = field(
        default=16, metadata={"help": "connections accepted in one go before others get their turn"}
    )
    accept_pause_ms: int = field(
        default=100,
        metadata={"help": "how long no connection is accepted after the process ran out of file descriptors"},
    )
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    socket: TcpSocketOptions = field(default_factory=TcpSocketOptions)

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


class SealRefused(Exception):
    """The writer breaks the protocol."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


@dataclass(slots=True, kw_only=True)
class _Parts:
    """Of one seal: its message, and immediates by the bits of their queue pairs."""

    message: wire.SealSent | None = None
    arrived: int = 0


class SealGather:
    """Puts the message of each seal and its immediates together, in whichever order they come. Pure."""

    def __init__(self, *, epoch: Epoch, qps: int, seals_max: int) -> None:
        self._epoch = epoch
        self._qps = qps
        self._seals_max = seals_max
        self._parts: dict[int, _Parts] = {}

    def told(self, message: wire.SealSent) -> wire.SealSent | None:
        """The message of a seal: returned if it is whole now. Raises SealRefused."""
        if message.seal.epoch != self._epoch or not 0 < message.qps_mask < 1 << self._qps:
            raise SealRefused(RefusalReason.SEAL)
        parts = self._of(message.number)
        if parts.message is not None:
            raise SealRefused(RefusalReason.SEAL)
        parts.message = message
        return self._whole(message.number, parts)

    def arrived(self, qp: int, number: int) -> wire.SealSent | None:
        """An immediate on this queue pair: the seal's message if it is whole now. Raises SealRefused."""
        parts = self._of(number)
        if parts.arrived >> qp & 1:
            raise SealRefused(RefusalReason.SEAL)
        parts.arrived |= 1 << qp
        return self._whole(number, parts)

    def _of(self, number: int) -> _Parts:
        number &= _NUMBER_MASK
        if number not in self._parts and len(self._parts) >= self._seals_max:
            raise SealRefused(RefusalReason.SEALS_MAX)
        return self._parts.setdefault(number, _Parts())

    def _whole(self, number: int, parts: _Parts) -> wire.SealSent | None:
        if parts.message is None or parts.arrived != parts.message.qps_mask:
            return None
        del self._parts[number & _NUMBER_MASK]
        return parts.message


@dataclass(slots=True, kw_only=True, eq=False)
class Connection:
    """`qps` from the moment that it may write until they are destroyed; then it is forgotten."""

    number: int
    sock: socket.socket | None
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    hello: wire.Hello | None = None
    nonce: bytes = b""
    handshake_timer: asyncio.TimerHandle | None = None
    destroy_timer: asyncio.TimerHandle | None = None
    qps: QueuePairs | None = None
    hold: Hold | None = None
    seals: SealGather | None = None
