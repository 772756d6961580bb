"""The settings of the transports: one name each, for the writer and the receiver, on every kind of node.

Everything else that bounds a transport is fixed, in constants beside their use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.config import setting
from baton.errors import InvalidField, check_positive

STREAMS_MAX: Final = 64
"""Streams of one tcp link: a seal names them by the bits of one word."""
QPS_MAX: Final = 16
"""Queue pairs of one rdma link."""
UNANSWERED_MS_MAX: Final = 30_000
"""How long a packet may go without an acknowledgement before its queue pair fails, whatever is configured."""
_ACK_TIMEOUT_UNIT_MS: Final = 4.096e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmConfig:
    copy_threads: int = setting(
        1,
        "threads of the process that copy at the same time, over all its links",
        "One thread does not fill the memory bandwidth. Count these threads with engine.compute_threads.",
    )

    def __post_init__(self) -> None:
        check_positive(self, "copy_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpConfig:
    streams: int = setting(
        2,
        "tcp connections to each receiver, with one sending thread each",
        "One connection does not fill the network. More streams cost a thread each on both sides.",
    )

    def __post_init__(self) -> None:
        check_positive(self, "streams")
        if self.streams > STREAMS_MAX:
            raise InvalidField("streams", f"must not exceed {STREAMS_MAX}, not {self.streams}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaConfig:
    """The device and its queue pairs. The codes are those of the InfiniBand specification (IBTA vol. 1)."""

    device: str = setting(
        "",
        "RDMA device to use, such as mlx5_0 or mlx5_0:1; empty: the first that works",
        "The machine has several devices, and one of them is in the network of the other nodes.",
    )
    qps: int = setting(2, "queue pairs of each link", "A device needs several queue pairs to reach its full rate.")
    traffic_class: int = setting(
        0,
        "traffic class of the packets (DSCP and ECN bits), 0 to 255",
        "The switches of a RoCE network select lossless queues by DSCP.",
    )
    ack_timeout_code: int = setting(
        14,
        "a packet waits 4.096 us times 2 to this power for its acknowledgement, 1 to 31",
        "Links fail under congestion (raise it), or a dead peer is noticed too late (lower it).",
    )
    retries_max: int = setting(
        7,
        "how often a packet that is not acknowledged is sent again, 1 to 7",
        "As ack_timeout_code: both together decide when a link fails.",
    )

    def __post_init__(self) -> None:
        # Code 0 would be no timeout at all.
        for name, least, most in (
            ("qps", 1, QPS_MAX),
            ("ack_timeout_code", 1, 31),
            ("retries_max", 1, 7),
            ("traffic_class", 0, 255),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidField(name, f"must be from {least} to {most}, not {value}")
        if self.unanswered_ms > UNANSWERED_MS_MAX:
            raise InvalidField(
                "ack_timeout_code",
                f"is {self.ack_timeout_code}, with retries_max {self.retries_max}: a write that nobody acknowledges "
                f"would fail after {self.unanswered_ms:,.0f} ms; at most {UNANSWERED_MS_MAX:,} are allowed",
            )

    @property
    def unanswered_ms(self) -> float:
        """How long a packet goes unacknowledged before its queue pair fails; a device may take 4 times as long."""
        return _ACK_TIMEOUT_UNIT_MS * (1 << self.ack_timeout_code) * (self.retries_max + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxConfig:
    tls: str = setting(
        "all",
        "UCX transport to use: all, or one by name (tcp, rc, ...); UCX_TLS wins where it is set",
        "UCX picks a transport that does not work between the nodes, or one that is slower than another.",
    )

    def __post_init__(self) -> None:
        # NIXL takes its settings as one string with commas between them.
        if not self.tls or not self.tls.replace("_", "").isalnum():
            raise InvalidField("tls", f"must be one name of a UCX transport, got {self.tls!r}; for several set UCX_TLS")
