"""What the samples of the transfer benchmark say: medians of rounds, ratios against the bars, a picture.

A round's figure is the median of its runs; shown are the median, minimum and maximum of the rounds' figures.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """`ours` has to reach `times` the best of `others`, for blocks of these sizes."""

    transport: str
    ours: str
    others: tuple[str, ...]
    times: float
    size_min: int = 0
    size_max: int = 1 << 40


BARS = (
    Bar(transport="shm", ours="baton", others=("nixl", "nixl-spin"), times=3),
    Bar(transport="shm", ours="baton", others=("stores, 2 threads",), times=0.85, size_min=1 << 16),
    Bar(transport="shm", ours="baton, 1 thread", others=("stores, 1 thread",), times=0.8),
    Bar(transport="tcp", ours="baton", others=("mooncake",), times=1.5, size_max=1 << 16),
    Bar(transport="tcp", ours="baton", others=("mooncake",), times=1.2, size_min=1 << 18, size_max=1 << 18),
    Bar(transport="tcp", ours="baton", others=("nixl",), times=2),
    Bar(transport="tcp", ours="baton", others=("nixl-spin",), times=1, size_max=1 << 16),
    Bar(transport="tcp", ours="baton", others=("socket", "socket, 2 streams"), times=0.9),
    Bar(transport="tcp", ours="baton, 1 stream", others=("socket",), times=0.9),
)
PING_OVER_US_MAX = 50.0
PINGS = (("baton shm", "doorbell"), ("baton tcp", "echo"))

Figures = dict[tuple[str, str, int], list[float]]
"""By transport, method and size: one figure for each round."""


def figures(samples: Iterable[Sample], key: str) -> Figures:
    runs: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    for sample in samples:
        if key in sample:
            runs[sample["transport"], sample["method"], sample["size"], sample["round"]].append(sample[key])
    rounds: Figures = defaultdict(list)
    for (transport, method, size, _), values in runs.items():
        rounds[transport, method, size].append(statistics.median(values))
    return dict(rounds)


def report(samples: list[Sample]) -> str:
    """Tables of text."""
    speed = figures(samples, "gb_s")
    parts = []
    for transport in dict.fromkeys(key[0] for key in speed):
        parts.append(_table(f"{transport}: GB/s, median (minimum to maximum) of rounds", speed, transport, spread=True))
        for side in ("sender", "receiver"):
            spent = figures(samples, f"{side}_cpu_s_gb")
            parts.append(_table(f"{transport}: CPU seconds of the {side} for each GB", spent, transport, spread=False))
    parts.append("\n".join(["ratios of medians", *(_verdict(bar, speed) for bar in BARS)]))
    parts.append("\n".join(["one record of 16 KiB, microseconds", *_pings(samples)]))
    return "\n\n".join(parts)


def _table(title: str, values: Figures, transport: str, *, spread: bool) -> str:
    sizes = sorted({size for t, _, size in values if t == transport})
    methods = list(dict.fromkeys(method for t, method, _ in values if t == transport))
    lines = [title, "| method | " + " | ".join(_size(size) for size in sizes) + " |", "| --- " * (len(sizes) + 1) + "|"]
    for method in methods:
        cells = []
        for size in sizes:
            rounds = values.get((transport, method, size), [])
            cell = f"{statistics.median(rounds):.2f}" if rounds else "-"
            cells.append(f"{cell} ({min(rounds):.1f}-{max(rounds):.1f})" if rounds and spread else cell)
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdict(bar: Bar, speed: Figures) -> str:
    found = []
    for size in sorted({size for t, _, size in speed if t == bar.transport and bar.size_min <= size <= bar.size_max}):
        ours = speed.get((bar.transport, bar.ours, size))
        others = [speed[bar.transport, o, size] for o in bar.others if (bar.transport, o, size) in speed]
        if ours and others:
            ratio = statistics.median(ours) / max(statistics.median(rounds) for rounds in others)
            found.append(f"{_size(size)} {ratio:.3f}" + ("" if ratio >= bar.times else " MISSED"))
    return f"{bar.transport}: {bar.ours} / {' or '.join(bar.others)} (wanted {bar.times}): {', '.join(found)}"


def _pings(samples: list[Sample]) -> list[str]:
    times: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for sample in samples:
        if "us" in sample:
            times[sample["method"]][sample["round"]] = sample["us"]
    medians = {name: {seed: statistics.median(us) for seed, us in rounds.items()} for name, rounds in times.items()}
    lines = [
        f"{name}: {_spread(medians[name].values())}, 99% below "
        f"{statistics.median(us[int(len(us) * 0.99)] for us in rounds.values()):.1f}"
        for name, rounds in times.items()
    ]
    for ours, bare in PINGS:
        both = medians.get(ours, {}).keys() & medians.get(bare, {}).keys()
        if both:
            over = [medians[ours][seed] - medians[bare][seed] for seed in both]
            verdict = "" if statistics.median(over) <= PING_OVER_US_MAX else " MISSED"
            lines.append(
                f"{ours} over {bare}, round by round: {_spread(over)} (wanted {PING_OVER_US_MAX:.0f}){verdict}"
            )
    return lines


def _spread(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def plot(samples: list[Sample], path: Path) -> None:
    """Lines of medians over block sizes, with bars from minimum to maximum; limits dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    speed = figures(samples, "gb_s")
    transports = list(dict.fromkeys(key[0] for key in speed))
    drawing, panels = pyplot.subplots(1, len(transports), figsize=(6 * len(transports), 4.8), squeeze=False)
    for panel, transport in zip(panels[0], transports, strict=True):
        marks = itertools.cycle("os^vDP")
        for method in dict.fromkeys(m for t, m, _ in speed if t == transport):
            sizes = sorted(size for t, m, size in speed if (t, m) == (transport, method))
            rounds = [speed[transport, method, size] for size in sizes]
            middle = [statistics.median(of) for of in rounds]
            ends = [[m - min(of) for m, of in zip(middle, rounds, strict=True)]]
            ends.append([max(of) - m for m, of in zip(middle, rounds, strict=True)])
            limit = method.startswith(("stores", "socket"))
            style = {"linestyle": "--", "color": "grey"} if limit else {}
            panel.errorbar(sizes, middle, yerr=ends, marker=next(marks), label=method, capsize=2, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [_size(size) for size in sizes])
        panel.set_ylim(bottom=0)
        panel.set_title(f"{transport}, GB/s by block size")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
