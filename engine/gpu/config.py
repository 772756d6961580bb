"""Settings of an engine on a GPU. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from baton.config import setting
from baton.errors import InvalidField

AUTO: Final = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """Which decode steps run as graphs; others run kernel by kernel."""

    graph_rows_max: int = setting(
        64,
        "largest decode batch that runs as a CUDA graph; 0: none",
        "Larger batches are usual, or graphs take too long to capture at start.",
    )
    graph_context_max: int = setting(
        8192,
        "longest context, in tokens, of a sequence in a decode batch that runs as a graph",
        "Contexts are longer. It costs memory for each captured batch size.",
    )

    def __post_init__(self) -> None:
        if self.graph_rows_max < 0:
            raise InvalidField("graph_rows_max", f"is {self.graph_rows_max}; must be 0 (no graphs) or more")
        if self.graph_context_max < 1:
            raise InvalidField("graph_context_max", f"is {self.graph_context_max}; must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuConfig:
    """For engines whose region is in the device's memory."""

    attention_prefill: str = setting(
        AUTO,
        "attention of prompts: auto (the fastest that passes its trial), or a name",
        "A trial picks one that is slower or wrong here.",
    )
    attention_decode: str = setting(AUTO, "attention of single tokens: auto, or a name", "As attention_prefill.")
    graphs: GraphConfig = field(default_factory=GraphConfig)
    overlap_steps: bool = setting(
        True,
        "overlap scheduling: launch a step while the one before is computed; off: one after the other",
        "To compare, or to look for an error.",
    )
