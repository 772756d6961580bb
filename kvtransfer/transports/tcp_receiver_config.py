"""The limits of a tcp port and of each of its data connections."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtransfer.transports import tcp_wire as wire
from kvtransfer.transports.end_config import PortConfig
from kvtransfer.transports.limits import check_limits


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
        check_limits(self)
        if self.frame_bytes_max > wire.FRAME_BYTES_MAX:
            raise ValueError(f"frame_bytes_max must not exceed {wire.FRAME_BYTES_MAX}")
        if self.frame_segments_max > wire.FRAME_SEGMENTS_MAX:
            raise ValueError(f"frame_segments_max must not exceed {wire.FRAME_SEGMENTS_MAX}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpReceiverConfig(PortConfig):
    """Limits of one port. Each stream of a link is a connection."""

    handshake_ms_max: int = field(default=2000, metadata={"help": "how long a handshake may take"})
    seals_partial_max: int = field(
        default=4096, metadata={"help": "seals that have come on some of their streams and not yet on all"}
    )
    stream: StreamLimits = field(default_factory=StreamLimits)
