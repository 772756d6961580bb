"""benchmarks.kvstore_fetch: what is said of its samples, and a short run of both parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.kvstore_fetch import (
    STOPS,
    crossover,
    measure_choice,
    measure_rate,
    measure_stopped,
    report_choice,
    report_rate,
    report_stopped,
)


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({32: 0.9, 64: 0.5}, "below 32 tokens"),
        ({32: 1.5, 64: 1.2}, "beyond 64 tokens"),
        ({32: 4.0, 64: 2.0, 256: 0.5}, "at about 128 tokens"),
        ({32: 0.9, 64: 2.0, 256: 0.5}, "at about 128 tokens"),
    ],
)
def test_where_fetching_becomes_sooner(ratios: dict[int, float], said: str) -> None:
    """Between two lengths, in proportion of logarithms; behind the last length at which computing is sooner."""
    assert crossover(ratios) == said


def test_a_rate_below_its_bar_is_said_to_be_missed() -> None:
    """Three fetches take twice as long as the transport alone, or 1.25 times, or as long: the middle one is 0.80."""
    parts = {"granted": 0.001, "commit asked": 0.002, "answered": 0.2}
    runs = [
        {"part": "rate", "transport": "shm", "mib": 128, "alone_s": alone_s, **parts, "indexed": 0.1}
        for alone_s in (0.05, 0.08, 0.1)
    ]
    assert "0.80 (0.50..1.00) MISSED" in report_rate(runs)
    assert "1.00 (1.00..1.00)  " in report_rate(runs[2:])


def test_a_choice_beside_the_better_of_both() -> None:
    """The node computed, which took 20 ms, where fetching takes 10: 2.00, missed."""
    seconds = {"compute": (0.02, 0), "fetch": (0.01, 16), "choose": (0.02, 0)}
    modes = {mode: {"seconds": took, "fetched": tokens} for mode, (took, tokens) in seconds.items()}
    line = report_choice([{"part": "choice", "transport": "tcp", "length": 32, **modes}]).splitlines()[1]
    assert line.split() == ["tcp", "32", "20.0", "10.0", "20.0", "0.50", "2.00", "0.00", "MISSED"]


def test_an_owner_that_costs_more_than_its_bar_is_said_to_miss_it() -> None:
    """Computing takes 20 ms. Of three owners that stop half-way two cost 6 ms, the third had sent all before."""
    compute = {"seconds": 0.02, "fetched": 0}
    stopped = {"seconds": 0.026, "fetched": 0, "waited": 0.006, "asked": 1}
    gone = {"seconds": 0.01, "fetched": 240, "waited": 0.005, "asked": 0}
    which = {"part": "stopped", "transport": "shm", "stop": "half", "length": 256, "compute": compute}
    lines = report_stopped([{**which, "stopped": each} for each in (stopped, gone, stopped)]).splitlines()
    assert lines[1].endswith("1.30  1.30 (1.30..1.30)  2 of 3  MISSED")


@pytest.mark.slow
def test_an_owner_that_stops(tmp_path: Path) -> None:
    """Its process stands still: before it is asked, when it has been granted room, and when a half has come. But for
    the last one, which may have sent all by then, its prompt is computed, and one wait was in vain."""
    samples = asyncio.run(measure_stopped("shm", [256], 1, tmp_path))
    assert [sample["stop"] for sample in samples] == list(STOPS)
    for sample in samples[:2]:
        assert (sample["stopped"]["fetched"], sample["stopped"]["asked"]) == (0, 1)


@pytest.mark.slow
def test_both_parts_run(tmp_path: Path) -> None:
    """One round each: what was fetched is what the owner had, and all three ways draw the same token."""
    (rate,) = asyncio.run(measure_rate("shm", 128, 1, tmp_path / "rate"))
    assert 0 < rate["granted"] < rate["indexed"] <= rate["answered"]
    choices = asyncio.run(measure_choice("tcp", [64, 128], 1, tmp_path / "choice"))
    assert [sample["fetch"]["fetched"] for sample in choices] == [48, 112]
