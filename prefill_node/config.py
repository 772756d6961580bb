"""Configuration of a prefill node. Section `[prefill]`, environment `BATON_PREFILL_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import InvalidField, check_positive
from kvtransfer.transport import RegionKind
from node.config import WriterNodeConfig
from node.regions import region_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(WriterNodeConfig):
    queue_max: int = field(default=256, metadata={"help": "requests that wait for a place in the engine"})
    resumed_queue_max: int = field(
        default=256, metadata={"help": "requests in the middle of their answer that wait too, ahead of the others"}
    )
    decode_tries_max: int = field(default=3, metadata={"help": "decode nodes asked for one request before giving up"})
    affinity_blocks_max: int = field(
        default=65_536, metadata={"help": "prompt blocks remembered as sent to decode nodes, all of these together"}
    )
    rate_age_ms_max: int = field(
        default=10_000, metadata={"help": "how long a measured rate is told to the routers; afterwards it is unknown"}
    )

    def __post_init__(self) -> None:
        self.check()
        if self.writer.checksum_fraction and region_kind(self.engine) is RegionKind.DEVICE:
            raise InvalidField(
                "writer.checksum_fraction",
                "must be 0 where the region is on a device: a record is posted before the device has computed it",
            )
        check_positive(
            self, "queue_max", "resumed_queue_max", "decode_tries_max", "affinity_blocks_max", "rate_age_ms_max"
        )
