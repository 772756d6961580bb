"""Configuration of a mixed node. Section `[mixed]`, environment `BATON_MIXED_*`.

A key means what it means in `[prefill]` or `[decode]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from baton.config import setting
from baton.errors import InvalidField
from decode_node.config import DecodeConfig
from node.spill import SpillConfig
from prefill_node.config import PrefillConfig
from prefill_node.local_policy import LocalFallback, LocalPolicy


def _of_prefill(name: str) -> Any:
    """A setting that means what it means in `[prefill]`."""
    (same,) = (each for each in fields(PrefillConfig) if each.name == name)
    return setting(same.default, **same.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedConfig(DecodeConfig):
    """The decode half's configuration is this itself."""

    spill: SpillConfig = field(default_factory=SpillConfig, metadata={"shown": False})
    """Must be off: here so that a refusal can say why."""
    queue_max: int = _of_prefill("queue_max")
    affinity_blocks_max: int = _of_prefill("affinity_blocks_max")
    handoff_tokens_min: int = setting(
        256,
        "a prompt with fewer tokens that are not cached here runs here; 0: none does",
        "Short prompts should go to other nodes too, or longer ones stay.",
    )
    local_fallback: LocalFallback = setting(
        LocalFallback.UNREACHABLE,
        "when longer prompts run here too: never, when no decode node is reachable, or when all are full as well",
        "A full cluster should slow down (full) rather than refuse requests.",
    )

    def __post_init__(self) -> None:
        """Raises InvalidField, by the same checks as those of the two halves, and for overcommit."""
        if self.spill.host_blocks:
            raise InvalidField(
                "spill.host_blocks",
                f"is {self.spill.host_blocks}; must be 0 on a mixed node, whose answers share its blocks with prompts "
                "that cannot be moved. Run decode nodes where answers should spill to host memory",
            )
        self.policy()
        self.prefill_half()
        DecodeConfig.__post_init__(self)

    def policy(self) -> LocalPolicy:
        return LocalPolicy(handoff_tokens_min=self.handoff_tokens_min, fallback=self.local_fallback)

    def prefill_half(self) -> PrefillConfig:
        shared = {each.name for each in fields(self)}
        return PrefillConfig(
            **{each.name: getattr(self, each.name) for each in fields(PrefillConfig) if each.name in shared}
        )
