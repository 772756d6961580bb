"""Whole clusters under a simulated clock and network: short seeds, repeatability, and mutants that must be found out.

`make sim SEED=n STEPS=m` does one longer run. A seed that fails says how to run it again; what it found becomes a test
of its own where the mistake was.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, mutated
from tests.sim.run import (
    SUITE_REQUESTS,
    SUITE_SEEDS,
    RunConfig,
    simulate,
    simulate_or_fail,
    suite_config,
)

BATCH = 10
QUICK_SEEDS = 10
"""How many of the seeds `make test` plays."""
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=() if n < QUICK_SEEDS else pytest.mark.slow) for n in range(1, SUITE_SEEDS + 1, BATCH)],
)
def test_short_runs_under_faults(first: int) -> None:
    """Crashes, restarts, stops, cuts, losses, duplicates, delays, jumps of clocks and a lost directory: every answer is
    right, every block accounted for, nothing lands where it may not, all becomes quiet and works again. Some clients
    want their answers in one piece."""
    faults = whole = 0
    for seed in range(first, first + BATCH):
        outcome = simulate_or_fail(suite_config(seed))
        assert outcome.figures.asked == outcome.figures.ended > SUITE_REQUESTS
        faults += sum(outcome.faults.values())
        whole += outcome.figures.whole
    assert faults > BATCH
    assert whole > BATCH


def test_two_groups_of_layers_under_faults() -> None:
    """Every position has two blocks: as in the short runs, every answer is right and every block accounted for."""
    for seed in range(1, 4):
        outcome = simulate_or_fail(suite_config(seed, profile="grouped"))
        assert outcome.figures.asked == outcome.figures.ended > SUITE_REQUESTS
        assert outcome.faults


def test_prefixes_are_fetched_under_faults() -> None:
    """Prefill nodes fetch from each other and from decode nodes while either end dies, stops or is cut off: some
    fetches bring their blocks, some bring nothing, every answer is right and every block accounted for."""
    brought = failed = 0
    for seed in range(1, 5):
        outcome = simulate_or_fail(RunConfig(seed=seed, requests=60, profile="fetching"))
        brought, failed = brought + outcome.fetches, failed + outcome.fetches_failed
    assert brought > 10
    assert failed


def test_without_faults_nothing_is_lost() -> None:
    """In a healthy cluster every request that its client waits for is answered whole."""
    figures = simulate_or_fail(RunConfig(seed=1, requests=150, profile="wide", fault_gap_s=0)).figures
    assert not figures.lost and not figures.refused
    assert figures.complete + figures.left == figures.asked


@pytest.mark.parametrize("resumable", [None, 0.0])
def test_data_links_that_break_while_messages_are_late(resumable: float | None) -> None:
    """What the suite's seeds hardly ever bring together: data arrives when its blocks are another's, and is refused."""
    for seed in range(1, 6):
        outcome = simulate_or_fail(suite_config(seed, resumable, "resets"))
        assert outcome.faults["reset_links"] and outcome.faults["delay"]


@pytest.mark.slow
def test_a_wide_cluster_under_faults() -> None:
    """16 prefill nodes, 2 decode nodes, 2 routers."""
    outcome = simulate_or_fail(RunConfig(seed=2, requests=400, profile="wide", fault_gap_s=0.01))
    assert sum(outcome.faults.values()) > 5


def test_a_seed_repeats_itself() -> None:
    """The same seed gives the same messages at the same times, in another process with other hash seeds too."""
    here = simulate_or_fail(RunConfig(seed=8, requests=30, profile="routers"))
    digests = {here.digest}
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.sim", "--seed", "8", "--steps", "30", "--profile", "routers"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        reported = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
        digests.add(reported.partition("digest ")[2].split()[0])
    assert len(digests) == 1, digests
    other = simulate_or_fail(RunConfig(seed=9, requests=30, profile="routers"))
    assert other.digest != here.digest


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_mutant_is_caught(name: str) -> None:
    """With one guard taken out of the product, one of the short seeds finds something wrong."""
    mutant = MUTANTS[name]
    for seed in (mutant.seed, *range(1, SUITE_SEEDS + 1)):
        with mutated(name):
            outcome = simulate(suite_config(seed, mutant.resumable, mutant.profile))
        if outcome.violations:
            # A replacement that no longer fits what it replaces would be found out by any seed, and show nothing.
            assert not re.search(r"\b(TypeError|AttributeError|NameError)\b", outcome.violations[0]), outcome.violations
            return
    pytest.fail(f"none of {SUITE_SEEDS} seeds has found out: {name}")
