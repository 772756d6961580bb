"""Configuration of a prefill node. Section `[prefill]`, environment `BATON_PREFILL_*`."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import fixed, setting
from baton.errors import InvalidField, check_positive
from kvtransfer.transport import RegionKind
from node.config import NodeConfig
from node.regions import region_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(NodeConfig):
    queue_max: int = setting(
        256,
        "requests that wait for a place in the engine; as many again that are resumed wait ahead of them",
        "Clients should be refused sooner (lower it) or wait longer (raise it) when the node is full.",
    )
    decode_tries_max: int = fixed(3)
    """Decode nodes asked for one request before it is given up."""
    affinity_blocks_max: int = setting(
        65_536,
        "prompt blocks remembered as sent to decode nodes, for all of these together",
        "Decode nodes cache more blocks than this. Each takes about 100 bytes here.",
    )
    rate_age_ms_max: int = fixed(10_000)
    """How long routers get a measured rate; afterwards it is unknown."""

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)
        if self.writer.checksum_fraction and region_kind(self.engine) is RegionKind.DEVICE:
            raise InvalidField(
                "writer.checksum_fraction",
                "must be 0 where the region is on a device: a record is posted before the device has computed it",
            )
        check_positive(self, "queue_max", "decode_tries_max", "affinity_blocks_max", "rate_age_ms_max")
