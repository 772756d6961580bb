"""Configuration of a decode node. Section `[decode]`, environment `BATON_DECODE_*`."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.config import fixed, setting
from baton.errors import InvalidField, check_positive
from baton.retry_time import RESUMED_PAUSE_MS_MAX, RESUMED_WAIT_MS_MIN
from node.config import NodeConfig
from node.spill import SpillConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(NodeConfig):
    spill: SpillConfig = field(default_factory=SpillConfig)
    requests_max: int = setting(
        64, "requests granted and running at the same time", "As engine.sequences_max, which it must not exceed."
    )
    finished_ms_max: int = setting(
        60_000,
        "how long a finished answer is kept for its router",
        "Routers may be away for longer, or memory is short.",
    )
    orphan_ms: int = setting(
        10_000,
        "a request that has no router for this long is cancelled",
        "Routers restart slowly, clients attach late, or lost requests hold room for too long.",
    )
    resume_ms: int = setting(
        30_000,
        "how long the finished answer to a resumable request is kept for a client that may attach",
        "Clients come back later, or memory is short, or drains should end sooner.",
    )
    finished_max: int = fixed(4_096)
    """Finished answers kept until the router has them."""
    resumed_wait_ms: int = fixed(1_500)
    """How long new requests yield to a resumed one that found no room."""
    resumed_hold_ms_max: int = fixed(5_000)
    """How long they do so at most for one that asks again and again, from its first try."""

    def __post_init__(self) -> None:
        NodeConfig.__post_init__(self)
        if self.requests_max > self.engine.sequences_max:
            raise InvalidField("requests_max", f"must not exceed engine.sequences_max ({self.engine.sequences_max})")
        check_positive(self, "requests_max", "finished_max", "finished_ms_max", "orphan_ms", "resume_ms")
        if self.resumed_wait_ms < RESUMED_WAIT_MS_MIN:
            raise InvalidField(
                "resumed_wait_ms",
                f"must be at least {RESUMED_WAIT_MS_MIN}, not {self.resumed_wait_ms}: routers ask again for such a "
                f"request after up to {RESUMED_PAUSE_MS_MAX} ms, and its way here takes time too",
            )
        if self.resumed_hold_ms_max < self.resumed_wait_ms:
            raise InvalidField(
                "resumed_hold_ms_max",
                f"must not be less than resumed_wait_ms ({self.resumed_wait_ms}), not {self.resumed_hold_ms_max}",
            )
