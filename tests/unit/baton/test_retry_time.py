"""The time that a refused client is told to wait: from the load, within limits, apart from the others'."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.retry_time import RETRY_MS_MAX, SPREAD, retry_after_ms, spread_of

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
