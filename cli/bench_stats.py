"""What `baton bench` keeps of a run: histograms, counts, a timeline. Pure; of the same size however long it runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

PERCENTILES: Final = (50, 90, 95, 99)
VALUE_MIN_MS: Final = 1e-3
VALUE_MAX_MS: Final = 1e9
BUCKET_RATIO: Final = 1.005
"""Of one bucket's upper end to its lower end: a percentile is off by at most half of that, 0.25%."""
_LOG_RATIO: Final = math.log(BUCKET_RATIO)
_BUCKETS: Final = math.ceil(math.log(VALUE_MAX_MS / VALUE_MIN_MS) / _LOG_RATIO) + 1
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
        self._buckets: dict[int, int] = {}

    def add(self, value_ms: float) -> None:
        assert value_ms >= 0, value_ms
        self.count += 1
        self.total += value_ms
        self.least = min(self.least, value_ms)
        self.most = max(self.most, value_ms)
        bucket = _bucket(value_ms)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """The smallest value that so many percent of all are not above (nearest rank), to BUCKET_RATIO; 0 if empty."""
        assert 0 < percent <= 100, percent
        rank = math.ceil(self.count * percent / 100)
        seen = 0
        for bucket, number in sorted(self._buckets.items()):
            seen += number
            if seen >= rank:
                # The ends are known exactly, and the middle of a bucket may lie outside of them.
                return min(max(_middle(bucket), self.least), self.most)
        return 0.0

    def curve(self) -> list[tuple[float, int]]:
        """(value, how many are not above it) for each bucket that is not empty, ascending."""
        points, seen = [], 0
        for bucket, number in sorted(self._buckets.items()):
            seen += number
            points.append((min(max(_middle(bucket), self.least), self.most), seen))
        return points

    def figures(self) -> dict[str, float]:
        """Mean, percentiles and maximum, for a report."""
        shares = {f"p{percent}": self.percentile(percent) for percent in PERCENTILES}
        return {"count": self.count, "mean": self.mean, **shares, "max": self.most}


def _bucket(value_ms: float) -> int:
    if value_ms <= VALUE_MIN_MS:
        return 0
    return min(_BUCKETS - 1, 1 + int(math.log(value_ms / VALUE_MIN_MS) / _LOG_RATIO))


def _middle(bucket: int) -> float:
    return VALUE_MIN_MS * math.exp((bucket - 0.5) * _LOG_RATIO) if bucket else VALUE_MIN_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count as good. None: not asked for."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Its longest gap."""
    tpot_ms: float | None = None

    @property
    def asked(self) -> bool:
        return (self.ttft_ms, self.itl_ms, self.tpot_ms) != (None, None, None)

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


@dataclass(slots=True, kw_only=True)
class _Bucket:
    tokens: int = 0
    answered: int = 0
    failed: int = 0
    ttft_ms_max: float = 0.0
    gap_ms_max: float = 0.0

    def take(self, other: _Bucket) -> None:
        self.tokens += other.tokens
        self.answered += other.answered
        self.failed += other.failed
        self.ttft_ms_max = max(self.ttft_ms_max, other.ttft_ms_max)
        self.gap_ms_max = max(self.gap_ms_max, other.gap_ms_max)


class Timeline:
    """The run in at most TIMELINE_BUCKETS_MAX equal pieces of time, which double when they are used up."""

    def __init__(self, bucket_s: float = 0.25) -> None:
        self.bucket_s = bucket_s
        self.buckets: list[_Bucket] = []

    def tokens(self, at_s: float, tokens: int, gap_ms: float) -> None:
        bucket = self._at(at_s)
        bucket.tokens += tokens
        bucket.gap_ms_max = max(bucket.gap_ms_max, gap_ms)

    def first_token(self, at_s: float, ttft_ms: float) -> None:
        bucket = self._at(at_s)
        bucket.ttft_ms_max = max(bucket.ttft_ms_max, ttft_ms)

    def ended(self, at_s: float, *, failed: bool) -> None:
        bucket = self._at(at_s)
        bucket.failed += failed
        bucket.answered += not failed

    def _at(self, at_s: float) -> _Bucket:
        assert at_s >= 0, at_s
        while at_s >= TIMELINE_BUCKETS_MAX * self.bucket_s:
            self._double()
        index = min(int(at_s / self.bucket_s), TIMELINE_BUCKETS_MAX - 1)
        while len(self.buckets) <= index:
            self.buckets.append(_Bucket())
        return self.buckets[index]

    def _double(self) -> None:
        self.bucket_s *= 2
        for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=False):
            left.take(right)
        self.buckets = self.buckets[::2]

    def data(self) -> dict[str, Any]:
        names = ("tokens", "answered", "failed", "ttft_ms_max", "gap_ms_max")
        columns = {name: [getattr(bucket, name) for bucket in self.buckets] for name in names}
        return {"bucket_s": self.bucket_s, **columns}


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
        self.timeline.ended(at_s, failed=False)
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
        """Errors of warm-up requests are told too."""
        self.timeline.ended(at_s, failed=True)
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
