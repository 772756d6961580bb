"""How fast room becomes free in a decode node: what left over the time that it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.retry_time import wait_s
from decode_node.reserving import ENDS_KEPT_MAX, LeaveRate


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
