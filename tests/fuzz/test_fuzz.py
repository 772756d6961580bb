"""Whatever strangers send to a parser, it is taken, or refused with an error of ours. `make fuzz` looks for longer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fuzz.growth import too_costly
from tests.fuzz.target import SEEDS, Target
from tests.fuzz.targets import TARGETS

EXAMPLES = 60
EACH = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@EACH
def test_a_few_inputs(target: Target) -> None:
    """The good ones, those that once failed, and some that are made up, the same in every run."""
    for data in [*target.samples, *(path.read_bytes() for path in target.seeds())]:
        target.check(data)

    @settings(max_examples=EXAMPLES)
    @given(target.examples())
    def made_up(data: bytes) -> None:
        target.check(data)

    made_up()


@EACH
@pytest.mark.slow
def test_the_cost_of_long_inputs(target: Target) -> None:
    """An input four times as long takes about four times as long, and memory in proportion."""
    for begin, part, end in target.repeats:
        assert too_costly(target, begin, part, end) is None, (begin, part, end)


def test_every_seed_has_a_target() -> None:
    assert {path.name for path in SEEDS.iterdir() if path.is_dir()} <= set(TARGETS)
