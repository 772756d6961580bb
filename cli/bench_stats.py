"""What `baton bench` keeps of a run: histograms, counts, a timeline, of the same size however long it runs.

And how it shows them: a line while it runs, the figures at the end, the same as data, and a picture, for which alone
matplotlib is imported.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from baton.errors import BatonError, Reason
from cli.output import format_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".png", ".svg", ".pdf")


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
    """Draw what `cli.bench_stats.report_data` made. Raises OSError where `path` cannot be written."""
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
            axes.step(values, [count / counts[-1] for count in counts], where="post", label=name.upper())
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


FORMAT: Final = 1
"""Of the data; raised when a field changes its meaning."""
PROGRESS_LINE_S: Final = 10.0
"""Between two lines of progress where stderr is no terminal."""
LATE_MS_MAX: Final = 10.0
"""The report warns when one request in a hundred is sent later than this."""
PERCENTILES: Final = (50, 90, 95, 99)
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
        self._shown_s = 0.0

    def show(self, measured: Measured, elapsed_s: float) -> None:
        if self._terminal:
            self._stream.write(f"\r\x1b[K{self._text(measured, elapsed_s)}")
        elif elapsed_s - self._shown_s >= PROGRESS_LINE_S:
            self._shown_s = elapsed_s
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
        rows.append([_NAMES[name], *(f"{figures[key]:.1f}" if histogram.count else "-" for key in _HEADER[1:])])
    return "\n".join([
        what,
        _counts(measured, complete=complete),
        "",
        format_table(_HEADER, rows, right=_RIGHT),
        "",
        *_throughput_lines(measured),
        *(f"error       {n} x {kind}: {measured.error_texts[kind]}" for kind, n in measured.errors.most_common()),
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


VALUE_MIN_MS: Final = 1e-3
"""Smaller values are counted as this one."""
BUCKET_RATIO: Final = 1.005
"""Of one bucket's upper end to its lower end: a percentile is off by at most half of that, 0.25%."""
_LOG_RATIO: Final = math.log(BUCKET_RATIO)
TIMELINE_BUCKETS_MAX: Final = 512
ERROR_KINDS_MAX: Final = 64
OTHER_ERRORS: Final = "OTHER"


class Histogram:
    """Counts of values in buckets of equal ratio; least, most and mean are exact. In milliseconds, not below 0."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, value_ms: float) -> None:
        assert value_ms >= 0, value_ms
        self.count += 1
        self.total += value_ms
        self.least = min(self.least, value_ms)
        self.most = max(self.most, value_ms)
        self._buckets[round(math.log(max(value_ms / VALUE_MIN_MS, 1)) / _LOG_RATIO)] += 1

    def percentile(self, percent: float) -> float:
        """The nearest-rank percentile, exact to BUCKET_RATIO; 0 if empty."""
        assert 0 < percent <= 100, percent
        rank = math.ceil(self.count * percent / 100)
        return next((value for value, seen in self.curve() if seen >= rank), 0.0)

    def curve(self) -> list[tuple[float, int]]:
        """(value, how many are not above it) for each bucket that is not empty, ascending."""
        points, seen = [], 0
        for bucket, number in sorted(self._buckets.items()):
            seen += number
            # The ends are known exactly, and the middle of a bucket may lie outside of them.
            value_ms = VALUE_MIN_MS * math.exp(bucket * _LOG_RATIO)
            points.append((min(max(value_ms, self.least), self.most), seen))
        return points

    def figures(self) -> dict[str, float]:
        """Count, mean, percentiles and maximum, for a report."""
        shares = {f"p{percent}": self.percentile(percent) for percent in PERCENTILES}
        mean = self.total / self.count if self.count else 0.0
        return {"count": self.count, "mean": mean, **shares, "max": self.most}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count as good. None: not asked for."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Its longest gap."""
    tpot_ms: float | None = None

    @property
    def asked(self) -> bool:
        return self != Slo()

    def met_by(self, answer: Answered) -> bool:
        limits = ((self.ttft_ms, answer.ttft_ms), (self.itl_ms, answer.longest_gap_ms), (self.tpot_ms, answer.tpot_ms))
        return all(limit is None or value <= limit for limit, value in limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One whole answer. Times count from when it was due (open loop) or sent (closed loop).

    A gap is that between two messages with tokens: those that come in one message came at once.
    """

    ttft_ms: float
    e2e_ms: float
    gaps_ms: Sequence[float]
    prompt_tokens: int
    output_tokens: int

    @property
    def longest_gap_ms(self) -> float:
        return max(self.gaps_ms, default=0.0)

    @property
    def tpot_ms(self) -> float:
        """Mean time of each token after the first; 0 where there is none."""
        return (self.e2e_ms - self.ttft_ms) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class Timeline:
    """The run in at most TIMELINE_BUCKETS_MAX equal pieces of time, which double when they are used up."""

    SUMS: Final = ("tokens", "answered", "failed")
    MAXIMA: Final = ("ttft_ms_max", "gap_ms_max")

    def __init__(self, bucket_s: float = 0.25) -> None:
        self._bucket_s = bucket_s
        self._columns: dict[str, list[float]] = {name: [] for name in (*self.SUMS, *self.MAXIMA)}

    def add(self, at_s: float, **values: float) -> None:
        """What happened at this time; the names are those of SUMS and MAXIMA."""
        assert at_s >= 0, at_s
        while at_s >= TIMELINE_BUCKETS_MAX * self._bucket_s:
            self._double()
        index = min(int(at_s / self._bucket_s), TIMELINE_BUCKETS_MAX - 1)
        for column in self._columns.values():
            column += [0] * (index + 1 - len(column))
        for name, value in values.items():
            column = self._columns[name]
            column[index] = column[index] + value if name in self.SUMS else max(column[index], value)

    def _double(self) -> None:
        self._bucket_s *= 2
        for name, column in self._columns.items():
            merged = sum if name in self.SUMS else max
            self._columns[name] = [merged(column[i : i + 2]) for i in range(0, len(column), 2)]

    def data(self) -> dict[str, Any]:
        return {"bucket_s": self._bucket_s, **self._columns}


@dataclass(slots=True, kw_only=True)
class Measured:
    """All that is known of a run. Warm-up requests are counted, and in nothing else but the timeline."""

    slo: Slo
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    e2e: Histogram = field(default_factory=Histogram)
    late: Histogram = field(default_factory=Histogram)
    """How much later than due requests were sent (open loop)."""
    loop_late: Histogram = field(default_factory=Histogram)
    """How much later than asked for the loader's own event loop woke up: what its figures may be too high by."""
    timeline: Timeline = field(default_factory=Timeline)
    sent: int = 0
    warm_up: int = 0
    """Ended, of those that are left out."""
    answered: int = 0
    failed: int = 0
    good: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    error_texts: dict[str, str] = field(default_factory=dict)
    """The first message of each kind."""
    began_s: float | None = None
    """When the first request that counts was due or sent; on the clock of the run, as all that follows."""
    ended_s: float = 0.0

    @property
    def in_flight(self) -> int:
        return self.sent - self.warm_up - self.answered - self.failed

    @property
    def seconds(self) -> float:
        """From the first request that counts to the last end of one."""
        return 0.0 if self.began_s is None else max(0.0, self.ended_s - self.began_s)

    def begin(self, at_s: float) -> None:
        """A request that counts has begun."""
        self.began_s = at_s if self.began_s is None else min(self.began_s, at_s)

    def answer(self, answered: Answered, *, at_s: float, counts: bool) -> None:
        self.timeline.add(at_s, answered=1)
        if not counts:
            self.warm_up += 1
            return
        self.answered += 1
        self.ended_s = max(self.ended_s, at_s)
        self.prompt_tokens += answered.prompt_tokens
        self.output_tokens += answered.output_tokens
        self.ttft.add(answered.ttft_ms)
        self.e2e.add(answered.e2e_ms)
        if answered.output_tokens > 1:
            self.tpot.add(answered.tpot_ms)
        for gap_ms in answered.gaps_ms:
            self.itl.add(gap_ms)
        self.good += self.slo.met_by(answered)

    def error(self, reason: str, text: str, *, at_s: float, counts: bool) -> None:
        """Errors of warm-up requests are reported too."""
        self.timeline.add(at_s, failed=1)
        kind = reason if reason in self.errors or len(self.errors) < ERROR_KINDS_MAX - 1 else OTHER_ERRORS
        self.errors[kind] += 1
        self.error_texts.setdefault(kind, text)
        if counts:
            self.failed += 1
            self.ended_s = max(self.ended_s, at_s)
        else:
            self.warm_up += 1

    def throughput(self) -> dict[str, float]:
        """Each in one second of `seconds`. Goodput counts the whole answers that kept the SLO."""
        seconds = self.seconds
        counts = {
            "requests_per_s": self.answered,
            "prompt_tokens_per_s": self.prompt_tokens,
            "output_tokens_per_s": self.output_tokens,
        }
        if self.slo.asked:
            counts["goodput_requests_per_s"] = self.good
        return {name: number / seconds if seconds else 0.0 for name, number in counts.items()}

    def good_share(self) -> float:
        """Of all requests that ended, the failed ones too."""
        ended = self.answered + self.failed
        return self.good / ended if ended else 0.0
