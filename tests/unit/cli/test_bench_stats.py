"""What `baton bench` makes of its measurements: percentiles, goodput, the timeline."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench_stats import (
    BUCKET_RATIO,
    ERROR_KINDS_MAX,
    OTHER_ERRORS,
    PERCENTILES,
    TIMELINE_BUCKETS_MAX,
    VALUE_MIN_MS,
    Answered,
    Histogram,
    Measured,
    Slo,
    Timeline,
)

milliseconds = st.floats(0, 1e9)


def histogram_of(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return histogram


@given(st.lists(milliseconds, min_size=1, max_size=200), st.sampled_from((1, *PERCENTILES, 100)))
def test_percentiles(values: list[float], percent: float) -> None:
    """Each is the value of nearest rank to a quarter of a percent, or to VALUE_MIN_MS; the ends are exact."""
    histogram = histogram_of(values)
    ranked = sorted(values)
    exact = ranked[math.ceil(len(values) * percent / 100) - 1]
    found = histogram.percentile(percent)
    assert abs(found - exact) <= max(VALUE_MIN_MS, exact * (BUCKET_RATIO - 1) / 2 * 1.01)
    assert ranked[0] <= found <= ranked[-1]
    assert (histogram.count, histogram.least, histogram.most) == (len(values), ranked[0], ranked[-1])
    assert histogram.figures()["mean"] == pytest.approx(sum(values) / len(values))


@given(st.lists(milliseconds, min_size=1, max_size=50))
def test_percentiles_and_curves_ascend(values: list[float]) -> None:
    histogram = histogram_of(values)
    shares = [histogram.percentile(percent) for percent in (1, 10, 50, 90, 95, 99, 100)]
    assert shares == sorted(shares)
    curve = histogram.curve()
    assert [point for point, _ in curve] == sorted(point for point, _ in curve)
    assert [seen for _, seen in curve] == sorted({seen for _, seen in curve})
    assert curve[-1][1] == len(values)


def test_an_empty_histogram() -> None:
    assert histogram_of([]).figures() == {"count": 0, "mean": 0, "p50": 0, "p90": 0, "p95": 0, "p99": 0, "max": 0}


def test_a_histogram_does_not_grow() -> None:
    """A hundred thousand values over six decades take no more entries than there are buckets in those."""
    histogram = histogram_of([1.0003**n for n in range(46_000)] * 2)
    assert histogram.count == 92_000
    assert len(histogram.curve()) <= math.log(1.0003**46_000) / math.log(BUCKET_RATIO) + 2


def answered(*, ttft: float = 100, gaps: tuple[float, ...] = (10, 20), tokens: int = 3) -> Answered:
    return Answered(ttft_ms=ttft, e2e_ms=ttft + sum(gaps), gaps_ms=gaps, prompt_tokens=50, output_tokens=tokens)


def test_an_answer_s_figures() -> None:
    """Tokens that come together share a gap; one token has neither gap nor time for each."""
    assert (answered().longest_gap_ms, answered().tpot_ms) == (20, 15)
    assert answered(tokens=7).tpot_ms == 5
    assert (answered(gaps=(), tokens=1).longest_gap_ms, answered(gaps=(), tokens=1).tpot_ms) == (0, 0)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), True),
        (Slo(ttft_ms=100, itl_ms=20, tpot_ms=15), True),
        (Slo(ttft_ms=99.9), False),
        (Slo(itl_ms=19.9), False),
        (Slo(tpot_ms=14.9), False),
        (Slo(ttft_ms=100, itl_ms=19.9), False),
    ],
)
def test_what_is_good(slo: Slo, good: bool) -> None:
    assert slo.met_by(answered()) is good


@given(st.lists(st.builds(answered, ttft=milliseconds), max_size=20), milliseconds, milliseconds)
def test_goodput_grows_with_the_limit(answers: list[Answered], one: float, other: float) -> None:
    """A looser limit never makes fewer answers good, and none at all makes all of them good."""
    low, high = min(one, other), max(one, other)
    goods = []
    for slo in (Slo(ttft_ms=low), Slo(ttft_ms=high), Slo()):
        measured = Measured(slo=slo)
        measured.begin(0)
        for answer in answers:
            measured.answer(answer, at_s=1, counts=True)
        goods.append(measured.good)
    assert goods == sorted(goods)
    assert goods[-1] == len(answers)


def test_a_run() -> None:
    """Warm-up counts for nothing, failures count against goodput and not in latencies, and rates are over the time from
    the first request that counts to the last end of one."""
    measured = Measured(slo=Slo(ttft_ms=100))
    measured.sent = 6
    measured.answer(answered(ttft=9000), at_s=1.0, counts=False)
    measured.error("QUEUE_FULL", "Full.", at_s=1.5, counts=False)
    measured.begin(2.5)
    measured.begin(2.0)
    measured.answer(answered(), at_s=3.0, counts=True)
    measured.answer(answered(ttft=101), at_s=6.0, counts=True)
    measured.error("QUEUE_FULL", "Full again.", at_s=4.0, counts=True)
    assert (measured.in_flight, measured.warm_up, measured.answered, measured.failed) == (1, 2, 2, 1)
    assert (measured.ttft.most, measured.itl.count, measured.seconds) == (101, 4, 4.0)
    assert measured.throughput() == {
        "requests_per_s": 0.5,
        "prompt_tokens_per_s": 25.0,
        "output_tokens_per_s": 1.5,
        "goodput_requests_per_s": 0.25,
    }
    assert measured.good_share() == pytest.approx(1 / 3)
    assert measured.errors == {"QUEUE_FULL": 2}
    assert measured.error_texts == {"QUEUE_FULL": "Full."}


def test_nothing_was_answered() -> None:
    measured = Measured(slo=Slo(ttft_ms=1))
    assert set(measured.throughput().values()) == {0.0}
    assert measured.good_share() == 0


def test_kinds_of_errors_are_limited() -> None:
    """However many kinds a server invents, their table has an end, and no failure is lost."""
    measured = Measured(slo=Slo())
    for n in range(2 * ERROR_KINDS_MAX):
        measured.error(f"KIND_{n}", "?", at_s=0, counts=True)
    assert len(measured.errors) == ERROR_KINDS_MAX
    assert measured.errors[OTHER_ERRORS] == ERROR_KINDS_MAX + 1
    assert measured.failed == 2 * ERROR_KINDS_MAX


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9), milliseconds, st.booleans()), max_size=60))
def test_the_timeline(events: list[tuple[float, int, float, bool]]) -> None:
    """Sums and maxima are kept however often the buckets double, and they stay few."""
    timeline = Timeline(bucket_s=0.25)
    for at_s, tokens, gap_ms, failed in events:
        timeline.add(at_s, tokens=tokens, gap_ms_max=gap_ms)
        timeline.add(at_s, ttft_ms_max=2 * gap_ms)
        timeline.add(at_s, failed=failed, answered=not failed)
    data = timeline.data()
    assert len(data["tokens"]) <= TIMELINE_BUCKETS_MAX
    assert sum(data["tokens"]) == sum(tokens for _, tokens, _, _ in events)
    assert sum(data["failed"]) == sum(failed for *_, failed in events)
    assert sum(data["answered"]) == sum(not failed for *_, failed in events)
    assert max(data["gap_ms_max"], default=0) == max((gap for _, _, gap, _ in events), default=0)
    assert max(data["ttft_ms_max"], default=0) == 2 * max((gap for _, _, gap, _ in events), default=0)
    for at_s, tokens, _, _ in events:
        assert data["tokens"][min(int(at_s / data["bucket_s"]), TIMELINE_BUCKETS_MAX - 1)] >= tokens
