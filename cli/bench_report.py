"""What `baton bench` shows: a line while it runs, the figures at the end, the same as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TextIO

from cli.bench_stats import PERCENTILES, Histogram, Measured
from cli.table import format_table

FORMAT: Final = 1
"""Of the data; raised when a field changes its meaning."""
PROGRESS_LINE_S: Final = 10.0
"""Between two lines of progress where stderr is no terminal."""
LATE_MS_MAX: Final = 10.0
"""A loader that is later than this, one time in a hundred, is told of."""
_HEADER: Final = ("ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max")
_RIGHT: Final = frozenset(range(1, len(_HEADER)))
_NAMES: Final = {
    "ttft": "TTFT  first token",
    "itl": "ITL   gap between messages",
    "tpot": "TPOT  mean for each token",
    "e2e": "E2E   whole answer",
}


def histograms(measured: Measured) -> Mapping[str, Histogram]:
    return {name: getattr(measured, name) for name in _NAMES}


class Progress:
    """One line: rewritten in place on a terminal, else a new one every PROGRESS_LINE_S."""

    def __init__(self, stream: TextIO, requests: int | None) -> None:
        """`requests` is how many there will be, where that is known."""
        self._stream = stream
        self._requests = requests
        self._terminal = stream.isatty()
        self._told_s = 0.0

    def show(self, measured: Measured, elapsed_s: float) -> None:
        if self._terminal:
            self._stream.write(f"\r\x1b[K{self._text(measured, elapsed_s)}")
        elif elapsed_s - self._told_s >= PROGRESS_LINE_S:
            self._told_s = elapsed_s
            self._stream.write(self._text(measured, elapsed_s) + "\n")
        self._stream.flush()

    def end(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _text(self, measured: Measured, elapsed_s: float) -> str:
        of = "" if self._requests is None else f" of {self._requests}"
        failed = f", {measured.failed} failed" if measured.failed else ""
        return (
            f"{elapsed_s:.0f} s: {measured.sent}{of} sent, {measured.in_flight} under way, {measured.answered} answered"
            f"{failed}, TTFT p50 {measured.ttft.percentile(50):.0f} ms, ITL p99 {measured.itl.percentile(99):.0f} ms"
        )


def report_text(measured: Measured, *, what: str, complete: bool) -> str:
    """The figures, for people. `what` says what was sent to whom."""
    rows = []
    for name, histogram in histograms(measured).items():
        figures = histogram.figures()
        shown = [f"{figures[key]:.1f}" if histogram.count else "-" for key in _HEADER[1:]]
        rows.append([_NAMES[name], *shown])
    return "\n".join([
        what,
        _counts(measured, complete=complete),
        "",
        format_table(_HEADER, rows, right=_RIGHT),
        "",
        *_throughput_lines(measured),
        *_error_lines(measured),
        *_loader_lines(measured),
    ])  # fmt: skip


def _counts(measured: Measured, *, complete: bool) -> str:
    parts = [f"{measured.answered} answered in {measured.seconds:.1f} s"]
    if measured.failed:
        parts.append(f"{measured.failed} failed")
    if measured.warm_up:
        parts.append(f"{measured.warm_up} before them left out as warm-up")
    if not complete:
        parts.append(f"{measured.in_flight} given up unfinished")
    elif not measured.sent:
        return "Nothing was sent: no request was due before the end of the run's time (--duration)."
    return ", ".join(parts) + "."


def _throughput_lines(measured: Measured) -> list[str]:
    rates = measured.throughput()
    lines = [
        f"throughput  {rates['requests_per_s']:.2f} requests/s, {rates['prompt_tokens_per_s']:.0f} prompt tokens/s, "
        f"{rates['output_tokens_per_s']:.0f} output tokens/s"
    ]
    if measured.slo.asked:
        limits = {"TTFT": measured.slo.ttft_ms, "every gap": measured.slo.itl_ms, "TPOT": measured.slo.tpot_ms}
        kept = ", ".join(f"{name} at most {limit:g} ms" for name, limit in limits.items() if limit is not None)
        lines.append(
            f"goodput     {rates['goodput_requests_per_s']:.2f} requests/s, {100 * measured.good_share():.1f}% of all "
            f"({kept})"
        )
    return lines


def _error_lines(measured: Measured) -> list[str]:
    return [
        f"error       {count} x {kind}: {measured.error_texts[kind]}" for kind, count in measured.errors.most_common()
    ]


def _loader_lines(measured: Measured) -> list[str]:
    shown = f"event loop late by p99 {measured.loop_late.percentile(99):.1f} ms, max {measured.loop_late.most:.1f} ms"
    if measured.late.count:
        late = measured.late
        shown = f"requests sent late by p99 {late.percentile(99):.1f} ms, max {late.most:.1f} ms; {shown}"
    lines = [f"loader      {shown}"]
    if max(measured.late.percentile(99), measured.loop_late.percentile(99)) > LATE_MS_MAX:
        lines.append("            It is too late for these figures to be the server's alone: give it a free core.")
    return lines


def report_data(measured: Measured, *, config: Mapping[str, object], complete: bool) -> dict[str, Any]:
    """The figures, for programs; latencies in milliseconds. `curves` has (value, requests or gaps not above it)."""
    return {
        "format": FORMAT,
        "config": dict(config),
        "complete": complete,
        "seconds": measured.seconds,
        "requests": {
            "sent": measured.sent,
            "warm_up": measured.warm_up,
            "answered": measured.answered,
            "failed": measured.failed,
            "unfinished": measured.in_flight,
            "good": measured.good if measured.slo.asked else None,
        },
        "errors": {
            kind: {"count": count, "example": measured.error_texts[kind]} for kind, count in measured.errors.items()
        },
        "tokens": {"prompt": measured.prompt_tokens, "output": measured.output_tokens},
        "throughput": measured.throughput(),
        "good_share": measured.good_share() if measured.slo.asked else None,
        "latency_ms": {name: histogram.figures() for name, histogram in histograms(measured).items()},
        "loader_ms": {"sent_late": measured.late.figures(), "event_loop_late": measured.loop_late.figures()},
        "timeline": measured.timeline.data(),
        "curves": {name: histogram.curve() for name, histogram in histograms(measured).items()},
    }
