"""The comparison of two trees: which ratio fails, and what the figures are made of."""

from __future__ import annotations

import math

import pytest

from benchmarks.compare import Round, handoff_speeds, interval_of, report, transfer_speeds


def rounds_of(*ratios: float) -> list[Round]:
    return [{"old": {"shm": 2.0}, "new": {"shm": 2.0 * ratio}} for ratio in ratios]


def test_only_a_whole_interval_below_the_least_ratio_fails() -> None:
    """0.95 in every round fails. A mean of 0.95 whose interval reaches 0.97 does not, nor does 0.98 in every round."""
    assert not report(rounds_of(*[0.95, 0.951] * 4, 0.95))[1]
    assert report(rounds_of(*[0.85, 1.06] * 4, 0.95))[1]
    assert report(rounds_of(*[0.98, 0.981] * 4, 0.98))[1]


def test_the_interval_is_students() -> None:
    """Logarithms 0 and 2: mean 1, standard deviation sqrt 2, so 12.71 times 1 on either side."""
    found = interval_of([1.0, math.exp(2)])
    assert found.mean == pytest.approx(math.e)
    assert found.low == pytest.approx(math.exp(1 - 12.71))
    assert found.high == pytest.approx(math.exp(1 + 12.71))


def test_figures_are_medians_and_times_count_inversely() -> None:
    """Three runs of one size; pings in microseconds; exposed milliseconds of two handoffs."""
    runs = [{"transport": "shm", "method": "baton", "size": 1 << 14, "gb_s": speed} for speed in (1.0, 9.0, 2.0)]
    pings = [{"transport": "ping", "method": "baton tcp", "size": 1 << 14, "us": [50.0, 20.0, 40.0]}]
    assert transfer_speeds([*runs, *pings]) == {"shm, baton, 16 KiB": 2.0, "ping, baton tcp, 16 KiB": 1 / 40}
    handoffs = [{"transport": "tcp", "case": "cold", "length": 512, "exposed_ms": ms} for ms in (4.0, 2.0, 5.0)]
    assert handoff_speeds(handoffs) == {"handoff over tcp, cold, 512 tokens": 1 / 4}


def test_a_figure_that_one_tree_does_not_have_is_left_out() -> None:
    """A method that only the new tree has."""
    rounds = rounds_of(1.0, 1.0)
    rounds[1]["new"]["a new one"] = 1.0
    assert "a new one" not in report(rounds)[0]
