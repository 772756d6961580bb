"""The picture of a run of `baton bench`. Needs matplotlib, which only this module imports."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from baton.errors import BatonError, Reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".png", ".svg", ".pdf")
_LABELS: Final = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2e": "E2E"}


def check_plot(path: Path) -> None:
    """Refuse before the run what could not be drawn after it. Raises BatonError BAD_CONFIG."""
    if path.suffix not in SUFFIXES:
        raise BatonError(Reason.BAD_CONFIG, f"--plot {path}: the name must end in {', '.join(SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise BatonError(
            Reason.BAD_CONFIG,
            "--plot needs matplotlib, which is not installed: pip install 'baton-serve[plot]', or use --json and draw "
            "it elsewhere.",
        )


def draw(data: Mapping[str, Any], path: Path, *, title: str) -> None:
    """Draw what `cli.bench_report.report_data` made. Raises OSError where `path` cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 2)
    _curves(axes[0][0], data["curves"], ("ttft", "e2e"), "share of requests")
    _curves(axes[0][1], data["curves"], ("itl", "tpot"), "share of gaps (ITL), requests (TPOT)")
    _rates(axes[1][0], data["timeline"])
    _worst(axes[1][1], data["timeline"])
    figure.savefig(path, dpi=130)


def _curves(axes: Axes, curves: Mapping[str, Any], names: tuple[str, ...], label: str) -> None:
    for name in names:
        points = curves[name]
        if points:
            values, counts = zip(*points, strict=True)
            axes.step(values, [count / counts[-1] for count in counts], where="post", label=_LABELS[name])
    axes.set(xscale="log", xlabel="ms", ylabel=label, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(loc="lower right")


def _times(timeline: Mapping[str, Any]) -> list[float]:
    return [(i + 0.5) * timeline["bucket_s"] for i in range(len(timeline["tokens"]))]


def _rates(axes: Axes, timeline: Mapping[str, Any]) -> None:
    times, width = _times(timeline), timeline["bucket_s"]
    axes.plot(times, [tokens / width for tokens in timeline["tokens"]], label="output tokens/s")
    axes.set(xlabel="s", ylabel="output tokens/s", xlim=(0, None), ylim=(0, None))
    axes.grid(alpha=0.3)
    if any(timeline["failed"]):
        right = axes.twinx()
        right.bar(times, timeline["failed"], width=width, color="tab:red", alpha=0.4)
        right.set(ylabel="requests failed", ylim=(0, None))


def _worst(axes: Axes, timeline: Mapping[str, Any]) -> None:
    times = _times(timeline)
    for name, label in (("ttft_ms_max", "longest TTFT"), ("gap_ms_max", "longest gap")):
        axes.plot(times, [value or math.nan for value in timeline[name]], ".", label=label, markersize=4)
    axes.set(xlabel="s", ylabel="ms", yscale="log", xlim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
