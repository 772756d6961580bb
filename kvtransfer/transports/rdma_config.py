"""What is asked of the RDMA device, and of each link on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import InvalidField
from kvtransfer.transports import rdma_wire as wire

UNANSWERED_MS_MAX = 30_000
"""How long a packet may go without an acknowledgement before its queue pair fails, whatever is configured."""
_ACK_TIMEOUT_UNIT_MS = 4.096e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaConfig:
    """The device, and what each link asks of it. The codes are those of the InfiniBand specification (IBTA vol. 1)."""

    device: str = field(
        default="", metadata={"help": "device to use, such as mlx5_0 or mlx5_0:1; default: the first that works"}
    )
    qps: int = field(default=2, metadata={"help": "queue pairs of each link"})
    send_wrs_max: int = field(default=128, metadata={"help": "writes on their way on one queue pair"})
    seals_max: int = field(default=64, metadata={"help": "seals of one link on their way"})
    ack_timeout_code: int = field(
        default=14,
        metadata={"help": "how long a packet waits for its acknowledgement: 4.096 us times 2 to this power, from 1 on"},
    )
    retries_max: int = field(default=7, metadata={"help": "repeats of a packet that is not acknowledged; 1 to 7"})
    hop_limit: int = field(default=64, metadata={"help": "routers that a packet may pass (RoCE v2)"})
    traffic_class: int = field(default=0, metadata={"help": "traffic class of the packets (DSCP and ECN bits)"})
    device_check_ms: int = field(default=500, metadata={"help": "time between two looks whether the device is there"})

    def __post_init__(self) -> None:
        # Code 0 would be no timeout at all, and a queue pair of one write has no place that is kept for a seal.
        for name, least, most in (
            ("qps", 1, wire.QPS_MAX),
            ("send_wrs_max", 2, None),
            ("seals_max", 1, (1 << 16) - 1),
            ("ack_timeout_code", 1, 31),
            ("retries_max", 1, 7),
            ("hop_limit", 1, 255),
            ("traffic_class", 0, 255),
            ("device_check_ms", 1, None),
        ):
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                allowed = f"{least} or more" if most is None else f"from {least} to {most}"
                raise InvalidField(name, f"must be {allowed}, not {value}")
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
