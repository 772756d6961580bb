"""A trouble that comes again and again takes few lines of a log, and no repeat of it goes uncounted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidField
from baton.log import get_log
from baton.repeats import OTHERS, RepeatLimits, RepeatLog, Repeats

LIMITS = RepeatLimits(interval_ms=10_000, pause_ms=1_000, kept_max=3)


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_is_told_and_the_repeats_when_the_peer_answers() -> None:
    """A revoke is tried for thirty seconds: one line at once, one at the end, with how often and for how long."""
    time = Time()
    repeats = Repeats(time, RepeatLimits(interval_ms=60_000))
    told = []
    for number in range(31):
        told.append(repeats.seen("revoke unanswered", "prefill-0", {"number": number}))
        assert repeats.due() == []
        time.now_s += 1
    assert told == [True] + [False] * 30
    (summary,) = repeats.over("prefill-0", "it has answered")
    assert (summary.peer, summary.what, summary.times) == ("prefill-0", "revoke unanswered", 30)
    assert (summary.over_s, summary.lasted_s, summary.ended) == (31.0, 31.0, "it has answered")
    assert summary.last == {"number": 30}
    assert repeats.seen("revoke unanswered", "prefill-0", {}), "over and come again: that is news"


def test_what_goes_on_is_summed_up_every_interval() -> None:
    """Once a second for a minute, and then no more: a line each ten seconds, none for the quiet afterwards."""
    time = Time()
    repeats = Repeats(time, LIMITS)
    lines = []
    for second in range(120):
        if second < 60:
            lines += ["first"] * repeats.seen("lost", "a", {})
        time.now_s += 1
        lines += [f"{summary.times} in {summary.over_s:g} of {summary.lasted_s:g}" for summary in repeats.due()]
    assert lines == [
        "first", "9 in 10 of 10", "10 in 10 of 20", "10 in 10 of 30", "10 in 10 of 40", "10 in 10 of 50",
        "10 in 10 of 60",
    ]  # fmt: skip
    assert repeats.seen("lost", "a", {})


def test_several_may_be_told_in_full() -> None:
    """Up to three of a kind in an interval, the others are counted; once it is quieter, each is told again."""
    time = Time()
    repeats = Repeats(time, RepeatLimits(interval_ms=10_000, full_max=3))
    assert [repeats.seen("failed", "FULL", {}) for _ in range(9)] == [True] * 3 + [False] * 6
    time.now_s += 10
    assert [summary.times for summary in repeats.due()] == [6]
    assert [repeats.seen("failed", "FULL", {}) for _ in range(2)] == [False] * 2, "still too many in an interval"
    time.now_s += 10
    assert [summary.times for summary in repeats.due()] == [2]
    assert [repeats.seen("failed", "FULL", {}) for _ in range(4)] == [True] * 3 + [False]


def test_a_trouble_that_comes_and_goes_very_fast_is_told_once_a_second() -> None:
    """A peer answers every other call: two lines a second at most, and each failure is in one of them."""
    time = Time()
    repeats = Repeats(time, LIMITS)
    lines = failures = counted = 0
    for _ in range(1_000):
        time.now_s += 0.01
        failures += 1
        first = repeats.seen("call failed", "a", {})
        summaries = [*repeats.over("a", "it answers"), *repeats.due()]
        lines += first + len(summaries)
        counted += first + sum(summary.times for summary in summaries)
    assert lines <= 2 * 10 + 1
    assert counted + sum(summary.times for summary in repeats.close()) == failures


def test_one_kind_may_be_over_alone() -> None:
    time = Time()
    repeats = Repeats(time, LIMITS)
    for what in ("commit", "let-go"):
        assert [repeats.seen(what, "a", {}) for _ in range(2)] == [True, False]
    time.now_s += 2
    assert [summary.what for summary in repeats.over("a", "answered", what="commit")] == ["commit"]
    assert repeats.over("a", "answered", what="commit") == []
    assert [summary.what for summary in repeats.over("a", "gone")] == ["let-go"]
    assert repeats.over("a", "gone") == repeats.over("nobody", "gone") == []


def test_more_troubles_than_are_kept_are_counted_together() -> None:
    """Peers that nobody has heard of take one place between them, and those that are known keep theirs."""
    time = Time()
    repeats = Repeats(time, LIMITS)
    assert [repeats.seen("lost", peer, {}) for peer in "abcdefa"] == [True] * 4 + [False] * 3
    assert {summary.peer: summary.times for summary in repeats.close()} == {OTHERS: 2, "a": 1}


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("xy"), st.floats(0, 30), st.sampled_from("sod"))),
    st.integers(1, 3),
)
def test_nothing_goes_uncounted(steps: list[tuple[str, str, float, str]], full_max: int) -> None:
    """Whatever happens, told one by one and counted together are all that were seen, and time between lines is kept."""
    time = Time()
    repeats = Repeats(time, RepeatLimits(interval_ms=10_000, full_max=full_max, kept_max=6))
    seen = told = counted = 0
    for peer, what, wait_s, step in steps:
        time.now_s += wait_s
        if step == "s":
            seen += 1
            told += repeats.seen(what, peer, {})
            continue
        for summary in repeats.over(peer, "gone") if step == "o" else repeats.due():
            assert summary.times > 0
            assert summary.lasted_s >= summary.over_s >= (1.0 if step == "o" else 0.0)
            counted += summary.times
    assert told + counted + sum(summary.times for summary in repeats.close()) == seen
    assert repeats.close() == []
    assert repeats._kept == 0


def test_limits_are_positive() -> None:
    with pytest.raises(InvalidField):
        RepeatLimits(full_max=0)


@contextmanager
def heard(name: str) -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, ear = logging.getLogger(f"baton.{name}"), Ear()
    level = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)


def test_the_lines_of_a_log() -> None:
    """What an operator reads of a peer that is stopped for some time: the trouble, that it goes on, that it is over."""
    time = Time()
    with heard("ear") as records:
        log = RepeatLog(get_log("ear"), time, LIMITS)
        for number in range(25):
            log.warning("revoke unanswered", peer="prefill-0", number=number, error="silence")
            time.now_s += 1
            log.upkeep()
        log.over("prefill-0", "it has answered")
        log.over("prefill-0", "it has answered")
        log.close()
    lines = [(r.levelname, r.getMessage(), r.baton_fields) for r in records]  # type: ignore[attr-defined]
    assert lines == [
        ("WARNING", "revoke unanswered", {"peer": "prefill-0", "number": 0, "error": "silence"}),
        (
            "WARNING", "revoke unanswered: repeated",
            {"peer": "prefill-0", "times": 9, "over_s": 10.0, "number": 9, "error": "silence"},
        ),
        (
            "WARNING", "revoke unanswered: repeated",
            {"peer": "prefill-0", "times": 10, "over_s": 10.0, "number": 19, "error": "silence"},
        ),
        (
            "INFO", "revoke unanswered: no more",
            {"peer": "prefill-0", "times": 5, "over_s": 5.0, "lasted_s": 25.0, "because": "it has answered"},
        ),
    ]  # fmt: skip
