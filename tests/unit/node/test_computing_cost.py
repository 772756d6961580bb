"""What computing is believed to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.computing_cost import STEPS_KEPT, ComputingCost, attended


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
