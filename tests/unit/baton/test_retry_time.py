"""The time that a refused client is told to wait: from the load, within limits, apart from the others'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.retry_time import ENDS_KEPT_MAX, RETRY_MS_MAX, SPREAD, LeaveRate, retry_after_ms, spread_of, wait_s

spreads = st.floats(0, 1)
waits = st.none() | st.floats(0, 1e9)


@given(wait=waits, ms_min=st.integers(1, 60_000), spread=spreads)
def test_within_the_limits(wait: float | None, ms_min: int, spread: float) -> None:
    assert ms_min <= retry_after_ms(wait, ms_min=ms_min, spread=spread) <= max(ms_min, RETRY_MS_MAX)


@given(one=st.floats(0, 100), other=st.floats(0, 100), spread=spreads)
def test_a_longer_wait_is_never_told_as_a_shorter_time(one: float, other: float, spread: float) -> None:
    short, long = sorted((one, other))
    reported = [retry_after_ms(wait, ms_min=50, spread=spread) for wait in (short, long)]
    assert reported[0] <= reported[1]


@pytest.mark.parametrize(
    ("wait", "spread", "reported"),
    [(None, 0, 200), (0.0, 0, 200), (2.0, 0, 2_000), (2.0, 1, 3_000), (2.0, 0.5, 2_500), (1e6, 0, RETRY_MS_MAX)],
)
def test_told_as_expected(wait: float | None, spread: float, reported: int) -> None:
    assert retry_after_ms(wait, ms_min=200, spread=spread) == reported


def test_askers_are_spread_out_and_each_is_told_the_same_again() -> None:
    reported = [retry_after_ms(1.0, ms_min=50, spread=spread_of(f"request-{n}")) for n in range(200)]
    assert reported == [retry_after_ms(1.0, ms_min=50, spread=spread_of(f"request-{n}")) for n in range(200)]
    assert min(reported) < 1_100 and max(reported) > 1_400
    assert max(reported) <= 1_000 * (1 + SPREAD)
    assert len(set(reported)) > 100


def test_nothing_is_known_before_the_second_end() -> None:
    rate = LeaveRate()
    assert rate.per_s(5.0) == 0
    rate.left(10, 5.0)
    assert (rate.per_s(5.0), rate.per_s(9.0)) == (0, 0)
    assert wait_s(100, rate.per_s(9.0)) is None
    rate.left(10, 7.0)
    assert rate.per_s(7.0) == 5
    assert wait_s(100, rate.per_s(7.0)) == 20


def test_the_rate_falls_while_nothing_leaves_and_old_ends_are_forgotten() -> None:
    rate = LeaveRate()
    for second in range(100):
        rate.left(4, float(second))
    assert rate.per_s(99.0) == pytest.approx(4)
    assert rate.per_s(99.0 + (ENDS_KEPT_MAX - 1)) == pytest.approx(2)


@given(
    gaps=st.lists(st.floats(0.001, 10), min_size=2, max_size=100),
    amounts=st.lists(st.integers(1, 50), min_size=100, max_size=100),
)
def test_a_rate_is_what_left_over_the_time_it_took(gaps: list[float], amounts: list[int]) -> None:
    """Whatever the pattern: not faster than the largest amount in the smallest gap, nor slower than the opposite."""
    rate, now = LeaveRate(), 0.0
    for gap, amount in zip(gaps, amounts, strict=False):
        now += gap
        rate.left(amount, now)
    last = gaps[-(ENDS_KEPT_MAX - 1) :]
    assert 1 / max(last) * 0.999 <= rate.per_s(now) <= 50 / min(last) * 1.001
