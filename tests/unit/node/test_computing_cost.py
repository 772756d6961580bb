"""What computing is believed to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.computing_cost import LEAST_TOKEN_SHARE, STEP_TIMES_MAX, STEPS_KEPT, ComputingCost, attended


def test_before_the_first_step_it_is_as_believed() -> None:
    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    assert cost.of(0, 100) == pytest.approx(0.015) and cost.saved(0, 100) == pytest.approx(0.01)


def test_short_prompts_among_long_ones() -> None:
    """Steps of 16 to 2,048 tokens; of the long ones most is attention. Each is known within a tenth, as is the later
    half of a prompt, which was never computed alone."""

    def takes_s(first: int, end: int) -> float:
        return 0.002 + 6e-5 * (end - first) + 5e-8 * attended(first, end)

    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    for _ in range(4):
        for length in (2048, 16, 1024, 512, 256):
            cost.measured(length, attended(0, length), takes_s(0, length))
    for first, end in [(0, 16), (0, 128), (0, 512), (0, 2048), (0, 4096), (1024, 2048)]:
        assert cost.of(first, end) == pytest.approx(takes_s(first, end), rel=0.1), (first, end)


@given(steps=st.lists(st.tuples(st.integers(1, 9000), st.floats(1e-6, 10)), max_size=2 * STEPS_KEPT))
def test_more_is_never_cheaper(steps: list[tuple[int, float]]) -> None:
    """Whatever was measured: no part is less than nothing, and what is saved is less than the whole."""
    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    for tokens, seconds in steps:
        cost.measured(tokens, attended(0, tokens), seconds)
    assert 0 <= cost.of(0, 1) <= cost.of(0, 100) <= cost.of(0, 5000)
    assert 0 <= cost.saved(0, 100) <= cost.of(0, 100)


def usual_s(end: int) -> float:
    return 0.002 + 6e-5 * end + 5e-8 * attended(0, end)


def warm(*lengths: int) -> ComputingCost:
    """Has measured steps of these lengths, again and again."""
    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    for length in lengths * STEPS_KEPT:
        cost.measured(length, attended(0, length), usual_s(length))
    return cost


@given(
    lengths=st.lists(st.integers(1, 4096), min_size=1, max_size=5, unique=True),
    tokens=st.integers(1, 4096),
    seconds=st.floats(0, 1e4),
)
def test_one_odd_step_moves_the_estimate_by_no_more_than_a_factor(
    lengths: list[int], tokens: int, seconds: float
) -> None:
    """After many usual steps one takes next to nothing, or hours. Steps like it, and the usual ones, are believed
    to take at most about `STEP_TIMES_MAX` times as long as before, or that part of it."""
    cost = warm(*lengths)
    before = {end: cost.of(0, end) for end in (tokens, *lengths)}
    cost.measured(tokens, attended(0, tokens), seconds)
    for end, before_s in before.items():
        assert before_s / STEP_TIMES_MAX <= cost.of(0, end) * 1.1 <= before_s * STEP_TIMES_MAX * 1.2, end


@pytest.mark.parametrize("seconds", [0.0, 1e4])
def test_one_odd_step_among_steps_of_all_lengths_says_little(seconds: float) -> None:
    cost = warm(64, 512, 2048)
    cost.measured(512, attended(0, 512), seconds)
    for end in (64, 512, 2048, 8192):
        assert cost.of(0, end) == pytest.approx(usual_s(end), rel=0.4)


def test_the_first_step_says_how_fast_the_machine_is() -> None:
    """It is a hundred times as slow as believed."""
    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    cost.measured(512, attended(0, 512), 5.6)
    assert cost.of(0, 512) == pytest.approx(5.6, rel=0.01)


@pytest.mark.parametrize("times", [0.1, 10])
def test_another_speed_is_believed_after_a_while(times: float) -> None:
    cost = warm(64, 512)
    for _ in range(4 * STEPS_KEPT):
        for length in (64, 512):
            cost.measured(length, attended(0, length), times * usual_s(length))
    assert cost.of(0, 512) == pytest.approx(times * usual_s(512), rel=0.2)


def test_noise_makes_nothing_look_cheap() -> None:
    """Half of the steps take a third as long as the others: the mean is believed."""
    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    for _ in range(2 * STEPS_KEPT):
        for length in (128, 512):
            for times in (0.5, 1.5):
                cost.measured(length, attended(0, length), times * usual_s(length))
    assert cost.of(0, 512) == pytest.approx(usual_s(512), rel=0.1)


def test_a_token_always_costs_something() -> None:
    """Steps take a time whatever their tokens, as where the device is not full."""
    cost = ComputingCost(fixed_s=0.005, token_s=1e-4)
    for _ in range(STEPS_KEPT):
        for length in (16, 64, 512):
            cost.measured(length, attended(0, length), 0.01)
    mean_s = 0.03 / (16 + 64 + 512)
    assert cost.saved(0, 100) >= LEAST_TOKEN_SHARE * 100 * mean_s * 0.99
    assert cost.of(0, 512) == pytest.approx(0.01, rel=0.3)
