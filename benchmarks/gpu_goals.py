"""What `benchmarks/gpu.py` is to find, and whether it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure of a part: true, or at least, or at most so much."""

    part: str
    figure: str
    least: float | None = None
    most: float | None = None
    exactness: bool = False
    """Not a matter of speed: without it the run has failed."""

    def __str__(self) -> str:
        if self.least is not None:
            return f"at least {self.least:g}"
        return "true" if self.most is None else f"at most {self.most:g}"

    def met(self, found: Any) -> bool:
        if self.least is None and self.most is None:
            return found is True
        # A NaN is neither.
        return (self.least is None or found >= self.least) and (self.most is None or found <= self.most)


GOALS = (
    Goal(part="kernels", figure="agree", exactness=True),
    Goal(part="exactness", figure="float32_tokens_equal", exactness=True),
    Goal(part="exactness", figure="bfloat16_prefill_error_of_largest", most=0.05, exactness=True),
    Goal(part="exactness", figure="bfloat16_decode_error_of_largest", most=0.05, exactness=True),
    Goal(part="qwen3-8b", figure="prefill_of_matrix_rate", least=0.6),
    Goal(part="qwen3-8b", figure="decode_of_copy_rate", least=0.7),
    Goal(part="qwen3-0.6b", figure="decode_of_copy_rate", least=0.5),
    Goal(part="handoff", figure="exposed_ms", most=0.2),
    Goal(part="handoff", figure="committed_ms", most=1.0),
)


def outcome(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Of each goal: what was wanted, what was found, and whether that is enough."""
    table = {}
    for goal in GOALS:
        found = results.get(goal.part, {}).get(goal.figure)
        met = NOT_MEASURED if found is None else goal.met(found)
        table[f"{goal.part}: {goal.figure}"] = {"goal": str(goal), "found": found, "met": met}
    return table


def passed(results: Mapping[str, Any], parts: tuple[str, ...]) -> bool:
    """Whether none of these parts has failed, and those about exactness have found it."""
    failed = any("error" in results.get(part, {}) for part in parts)
    table = outcome(results)
    exact = [goal for goal in GOALS if goal.exactness and goal.part in parts]
    return not failed and all(table[f"{goal.part}: {goal.figure}"]["met"] is True for goal in exact)
