"""What both sides of the tcp transport ask of their sockets.

Buffer sizes are left to the kernel: setting one would switch off its own tuning, which knows the path better.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocketOptions:
    """When the kernel gives a silent peer up. Seconds where the kernel counts in seconds."""

    keepalive_idle_s: int = field(default=10, metadata={"help": "seconds of silence before the kernel probes the peer"})
    keepalive_interval_s: int = field(default=5, metadata={"help": "seconds between two probes"})
    keepalive_probes_max: int = field(
        default=4, metadata={"help": "unanswered probes before the kernel gives the peer up"}
    )
    user_timeout_ms: int = field(
        default=20_000,
        metadata={"help": "how long sent bytes may go without an acknowledgement of the peer's kernel (RFC 5482)"},
    )

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


def tune(sock: socket.socket, options: TcpSocketOptions) -> None:
    """Send at once, and notice a peer whose machine or network is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, options.keepalive_idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, options.keepalive_interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, options.keepalive_probes_max)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, options.user_timeout_ms)
