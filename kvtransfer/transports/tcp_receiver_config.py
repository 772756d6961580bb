"""The limits of a tcp port and of each of its data connections."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.transports import tcp_wire as wire
from kvtransfer.transports.tcp_socket import TcpSocketOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    frame_bytes_max: int = field(default=wire.FRAME_BYTES_MAX, metadata={"help": "bytes of one frame"})
    frame_segments_max: int = field(
        default=1024, metadata={"help": "pieces of the region that one frame may be scattered to"}
    )
    ack_frames_max: int = field(
        default=16, metadata={"help": "frames taken in before an acknowledgement is sent even though more are waiting"}
    )
    outbox_bytes_max: int = field(
        default=1 << 16, metadata={"help": "bytes of acknowledgements that a writer may leave unread"}
    )

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.frame_bytes_max > wire.FRAME_BYTES_MAX:
            raise ValueError(f"frame_bytes_max must not exceed {wire.FRAME_BYTES_MAX}")
        if self.frame_segments_max > wire.FRAME_SEGMENTS_MAX:
            raise ValueError(f"frame_segments_max must not exceed {wire.FRAME_SEGMENTS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpReceiverConfig:
    """Limits of one port. `connections_max`: proved connections; strangers can only fill `handshakes_max`."""

    connections_max: int = field(default=256, metadata={"help": "proved connections at a time"})
    handshakes_max: int = field(
        default=64, metadata={"help": "connections at a time that have not proved themselves yet"}
    )
    pairs_max: int = field(default=1024, metadata={"help": "writer processes known at a time"})
    handshake_ms_max: int = field(default=2000, metadata={"help": "how long a handshake may take"})
    accepts_per_wake_max: int = field(
        default=16, metadata={"help": "connections accepted in one go before others get their turn"}
    )
    accept_pause_ms: int = field(
        default=100,
        metadata={"help": "how long no connection is accepted after the process ran out of file descriptors"},
    )
    seals_partial_max: int = field(
        default=4096, metadata={"help": "seals that have come on some of their streams and not yet on all"}
    )
    stream: StreamLimits = field(default_factory=StreamLimits)
    socket: TcpSocketOptions = field(default_factory=TcpSocketOptions)

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
