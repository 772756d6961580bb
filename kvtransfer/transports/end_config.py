"""What the ends of tcp, rdma and ucx are configured with alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.transports.limits import check_limits
from kvtransfer.transports.tcp_socket import TcpSocketOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PortConfig:
    """Limits of a port that listens on tcp. Strangers can only fill `handshakes_max`."""

    connections_max: int = field(default=256, metadata={"help": "connections at a time that have proved themselves"})
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
    socket: TcpSocketOptions = field(default_factory=TcpSocketOptions)

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Limits of a writer's link."""

    connect_ms_max: int = field(default=5000, metadata={"help": "how long connecting and the handshake may take"})
    abandoned_grants_max: int = field(default=1 << 20, metadata={"help": "abandoned grants that one link remembers"})
    seals_waiting_max: int = field(
        default=4096, metadata={"help": "seals that wait for a receiver that does not take them"}
    )
    drain_ms_max: int = field(
        default=2000,
        metadata={"help": "how long writes of an abandoned grant may stand still before the link ends"},
    )
    bye_ms_max: int = field(
        default=2000, metadata={"help": "how long closing waits for the receiver to take in what was on its way"}
    )
    socket: TcpSocketOptions = field(default_factory=TcpSocketOptions)

    def __post_init__(self) -> None:
        check_limits(self)
