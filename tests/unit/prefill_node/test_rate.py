"""prefill_node.request_queue: what a prefill node says of its speed, by the steps that it has had."""

from __future__ import annotations

import pytest

from prefill_node.request_queue import PrefillRate


def rate() -> PrefillRate:
    return PrefillRate(tokens_per_step_max=100, age_ms_max=10_000)


def test_the_first_full_step_counts_whole_and_each_later_one_a_tenth() -> None:
    """100 tokens in 0.1 s, then steps of half that speed: the rate moves towards them slowly."""
    found = rate()
    assert (found.per_s(0.0), found.last_per_s) == (0.0, 0.0)
    found.step_ended(100, began_s=1.0, now_s=1.1)
    assert found.per_s(1.1) == pytest.approx(1_000)
    found.step_ended(100, began_s=1.1, now_s=1.3)
    assert found.per_s(1.3) == pytest.approx(0.9 * 1_000 + 0.1 * 500)


def test_a_step_of_a_few_tokens_says_nothing() -> None:
    """It costs nearly as much as a full one: below half the budget it is left out."""
    found = rate()
    found.step_ended(49, began_s=1.0, now_s=1.1)
    assert found.per_s(1.1) == 0
    found.step_ended(50, began_s=2.0, now_s=2.1)
    assert found.per_s(2.1) == pytest.approx(500)


def test_a_step_launched_behind_another_counts_from_that_ones_end() -> None:
    """Launched at 1.0 while a small step was under way until 1.5: it has had the device for half a second."""
    found = rate()
    found.step_ended(1, began_s=0.9, now_s=1.5)
    found.step_ended(100, began_s=1.0, now_s=2.0)
    assert found.per_s(2.0) == pytest.approx(200)


def test_an_old_rate_is_forgotten() -> None:
    """After ten seconds nothing is known, though the last measure is kept; the next step counts whole again."""
    found = rate()
    found.step_ended(100, began_s=0.0, now_s=100.0)
    assert [found.per_s(now_s) for now_s in (110.0, 110.1)] == [1.0, 0.0]
    assert found.last_per_s == 1.0
    found.step_ended(100, began_s=110.0, now_s=111.0)
    assert found.per_s(111.0) == pytest.approx(100)
