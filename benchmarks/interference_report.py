"""What the runs of `benchmarks.interference` say. Pure but for the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

KEPT = 0.9
"""Share of the best throughput that a chunk size must keep to count."""
LONG_PROMPT = 4_000
VLLM = "vllm-"


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(len(ranked) * percent / 100) - 1)] if ranked else 0.0


def within(run: dict[str, Any], phase: str, what: str) -> list[float]:
    """Gaps (by their end) or TTFTs (by when they were due) of one phase."""
    begin_s, end_s = run["phases"][phase]
    return [value for at_s, value in run[what] if begin_s <= at_s <= end_s]


def throughput(run: dict[str, Any]) -> float:
    """Tokens in one second of the saturated phase: of streams, and of long prompts."""
    begin_s, end_s = run["phases"]["saturated"]
    tokens = len(within(run, "saturated", "gaps")) + LONG_PROMPT * len(within(run, "saturated", "prompts"))
    return tokens / (end_s - begin_s)


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the runs of one system."""
    each = []
    for run in runs:
        busy, alone = within(run, "prompts", "gaps"), within(run, "alone", "gaps")
        ttfts = within(run, "prompts", "prompts")
        each.append({
            "alone_ttft": run["alone_ttft_ms"],
            "alone_p50": percentile(alone, 50),
            "alone_p99": percentile(alone, 99),
            "p50": percentile(busy, 50),
            "p99": percentile(busy, 99),
            "max": max(busy, default=0.0),
            "ttft_p50": percentile(ttfts, 50),
            "ttft_max": max(ttfts, default=0.0),
            "tokens_per_s": throughput(run),
        })  # fmt: skip
    return {name: statistics.median(one[name] for one in each) for name in each[0]}


def by_system(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    names = list(dict.fromkeys(run["system"] for run in runs))
    return {name: figures([run for run in runs if run["system"] == name]) for name in names}


def best_chunk(runs: Sequence[dict[str, Any]]) -> str | None:
    """vLLM at the chunk size with the lowest P99 gap, of those that keep KEPT of its throughput."""
    chunks = {name: found for name, found in by_system(runs).items() if name.startswith(VLLM)}
    if not chunks:
        return None
    fastest = max(found["tokens_per_s"] for found in chunks.values())
    kept = [name for name, found in chunks.items() if found["tokens_per_s"] >= KEPT * fastest]
    return min(kept, key=lambda name: chunks[name]["p99"])


def report(runs: Sequence[dict[str, Any]]) -> str:
    names = ("alone_ttft", "alone_p50", "alone_p99", "p50", "p99", "max", "ttft_p50", "ttft_max", "tokens_per_s")
    lines = ["system       " + "".join(f"{name:>13}" for name in names)]
    found = by_system(runs)
    lines += [f"{system:13}" + "".join(f"{own[name]:13.1f}" for name in names) for system, own in found.items()]
    best = best_chunk(runs)
    if best is not None:
        lines += [
            f"P99 gap of {system}: {own['p99'] / found[best]['p99']:.3f} of {best}'s, the best of vLLM"
            for system, own in found.items()
            if not system.startswith(VLLM)
        ]
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]], path: Path, *, best: str | None) -> None:
    """The gaps over time, of one run of each of our systems and of vLLM at its best chunk."""
    from matplotlib.figure import Figure

    shown = [name for name in dict.fromkeys(run["system"] for run in runs) if not name.startswith(VLLM) or name == best]
    figure = Figure(figsize=(11, 2.6 * len(shown)), layout="constrained")
    for ax, name in zip(figure.subplots(len(shown), 1, sharey=True, squeeze=False)[:, 0], shown, strict=True):
        run = next(run for run in runs if run["system"] == name)
        ax.plot([at for at, _ in run["gaps"]], [gap for _, gap in run["gaps"]], ".", markersize=2)
        begin_s, end_s = run["phases"]["prompts"]
        for due_s, ttft_ms in run["prompts"]:
            if begin_s <= due_s <= end_s:
                ax.axvspan(due_s, due_s + ttft_ms / 1e3, color="tab:orange", alpha=0.25)
        ax.set(title=name, yscale="log", ylabel="gap, ms", xlim=(run["phases"]["alone"][0], end_s))
        ax.grid(alpha=0.3)
    figure.supxlabel("s; shaded: a prompt of 4,000 tokens from its arrival to its first token")
    figure.savefig(path, dpi=120)
