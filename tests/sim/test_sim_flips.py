"""Simulated clusters on bad hardware: with every record compared no flipped bit gets past a Commit."""

from __future__ import annotations

import pytest

from tests.sim.flips import flipping
from tests.sim.run import RunConfig, simulate, simulate_or_fail


@pytest.mark.parametrize(("profile", "first"), [("small", 1), ("pair", 40), ("routers", 80)])
def test_every_flip_is_caught_before_its_commit(profile: str, first: int) -> None:
    """One handoff in eight has a bit flipped, under the usual faults: none of these runs, every answer is right, and
    nothing is lost or left."""
    flips = reported = 0
    for seed in range(first, first + 6):
        with flipping(seed=seed, chance=0.125) as done:
            outcome = simulate_or_fail(RunConfig(seed=seed, requests=30, profile=profile))
        assert outcome.figures.asked == outcome.figures.ended
        flips, reported = flips + len(done.flipped), reported + done.reported
    assert flips > 10
    assert reported > 10


def test_without_faults_each_flip_is_told_by_both_sides() -> None:
    """Nothing else goes wrong, so that every flipped handoff reaches its comparison and both nodes shout; no answer is
    lost."""
    with flipping(seed=9, chance=0.2) as done:
        figures = simulate_or_fail(RunConfig(seed=9, requests=60, profile="small", fault_gap_s=0)).figures
    assert len(done.flipped) > 5
    assert not figures.lost
    # a client may leave before the writer is answered
    assert len(done.flipped) <= done.reported <= 2 * len(done.flipped)


def test_an_unsampled_flip_is_a_wrong_answer() -> None:
    """With nothing compared the same flips are run, and the simulator sees it."""
    with flipping(seed=9, chance=0.2, fraction=0.0) as done:
        outcome = simulate(RunConfig(seed=9, requests=60, profile="small", fault_gap_s=0))
    assert done.flipped
    assert done.reported == 0
    assert "a handoff with a flipped bit runs" in outcome.violations[0]


def test_comparing_changes_nothing_else() -> None:
    """Checksums of everything and no flip: a run under faults is as good as ever."""
    with flipping(seed=1, chance=0.0) as done:
        simulate_or_fail(RunConfig(seed=3, requests=40, profile="small"))
    assert not done.flipped
    assert done.reported == 0
