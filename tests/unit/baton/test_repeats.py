"""A problem that comes again and again takes few lines of a log, and no repeat of it goes uncounted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidField
from baton.log import Log
from baton.repeats import OTHERS, RepeatLimits, RepeatLog

LIMITS = RepeatLimits(interval_ms=10_000, pause_ms=1_000, kept_max=3)


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Lines(Log):
    """A log that keeps its lines: level, text and fields."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("baton.lines"))
        self._lines: list[tuple[str, str, dict[str, Any]]] = []

    def log(self, level: int, msg: object, *_args: object, **fields: Any) -> None:
        self._lines.append((logging.getLevelName(level), str(msg), fields))

    def take(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Those since the last call."""
        lines, self._lines = self._lines, []
        return lines


class Repeats:
    """A RepeatLog, the time that it reads, and the lines that each of its calls leads to."""

    def __init__(self, limits: RepeatLimits) -> None:
        self.time, self.lines = Time(), Lines()
        self.log = RepeatLog(self.lines, self.time, limits)

    def seen(self, what: str, peer: str, **fields: Any) -> bool:
        """Whether it is logged by itself."""
        self.log.warning(what, peer=peer, **fields)
        lines = self.lines.take()
        assert lines in ([], [("WARNING", what, {"peer": peer, **fields})])
        return bool(lines)

    def over(self, peer: str, why: str, *, what: str | None = None) -> list[dict[str, Any]]:
        self.log.over(peer, why, what=what)
        return self._summaries()

    def due(self) -> list[dict[str, Any]]:
        self.log.upkeep()
        return self._summaries()

    def close(self) -> list[dict[str, Any]]:
        self.log.close()
        return self._summaries()

    def _summaries(self) -> list[dict[str, Any]]:
        return [{"text": text, **fields} for _, text, fields in self.lines.take()]


def test_the_first_is_logged_and_the_repeats_when_the_peer_answers() -> None:
    """A revoke is tried for thirty seconds: one line at once, one at the end, with how often and for how long."""
    repeats = Repeats(RepeatLimits(interval_ms=60_000))
    logged = []
    for number in range(31):
        logged.append(repeats.seen("revoke unanswered", "prefill-0", number=number))
        assert repeats.due() == []
        repeats.time.now_s += 1
    assert logged == [True] + [False] * 30
    assert repeats.over("prefill-0", "it has answered") == [
        {
            "text": "revoke unanswered: no more", "peer": "prefill-0", "times": 30, "over_s": 31.0, "lasted_s": 31.0,
            "because": "it has answered",
        }
    ]  # fmt: skip
    assert repeats.seen("revoke unanswered", "prefill-0"), "over and come again: that is news"


def test_what_goes_on_is_summed_up_every_interval() -> None:
    """Once a second for a minute, and then no more: a line each ten seconds, none for the quiet afterwards."""
    repeats = Repeats(LIMITS)
    lines = []
    for second in range(120):
        if second < 60:
            lines += ["first"] * repeats.seen("lost", "a", second=second)
        repeats.time.now_s += 1
        lines += [f"{each['times']} in {each['over_s']:g} to {each['second']}" for each in repeats.due()]
    assert lines == [
        "first", "9 in 10 to 9", "10 in 10 to 19", "10 in 10 to 29", "10 in 10 to 39", "10 in 10 to 49",
        "10 in 10 to 59",
    ]  # fmt: skip
    assert repeats.seen("lost", "a")


def test_several_may_be_logged_in_full() -> None:
    """Up to three of a kind in an interval, the others are counted; once it is quieter, each is logged again."""
    repeats = Repeats(RepeatLimits(interval_ms=10_000, full_max=3))
    assert [repeats.seen("failed", "FULL") for _ in range(9)] == [True] * 3 + [False] * 6
    repeats.time.now_s += 10
    assert [each["times"] for each in repeats.due()] == [6]
    assert [repeats.seen("failed", "FULL") for _ in range(2)] == [False] * 2, "still too many in an interval"
    repeats.time.now_s += 10
    assert [each["times"] for each in repeats.due()] == [2]
    assert [repeats.seen("failed", "FULL") for _ in range(4)] == [True] * 3 + [False]


def test_a_problem_that_comes_and_goes_very_fast_is_logged_once_a_second() -> None:
    """A peer answers every other call: two lines a second at most, and each failure is in one of them."""
    repeats = Repeats(LIMITS)
    lines = failures = counted = 0
    for _ in range(1_000):
        repeats.time.now_s += 0.01
        failures += 1
        first = repeats.seen("call failed", "a")
        summaries = [*repeats.over("a", "it answers"), *repeats.due()]
        lines += first + len(summaries)
        counted += first + sum(each["times"] for each in summaries)
    assert lines <= 2 * 10 + 1
    assert counted + sum(each["times"] for each in repeats.close()) == failures


def test_one_kind_may_be_over_alone() -> None:
    repeats = Repeats(LIMITS)
    for what in ("commit", "release"):
        assert [repeats.seen(what, "a") for _ in range(2)] == [True, False]
    repeats.time.now_s += 2
    assert [each["text"] for each in repeats.over("a", "answered", what="commit")] == ["commit: no more"]
    assert repeats.over("a", "answered", what="commit") == []
    assert [each["text"] for each in repeats.over("a", "gone")] == ["release: no more"]
    assert repeats.over("a", "gone") == repeats.over("nobody", "gone") == []


def test_a_field_named_as_the_sums_own_gives_way_to_it() -> None:
    """The single line has what its caller counted; the sum says how often the line came, and for how long."""
    repeats = Repeats(LIMITS)
    assert repeats.seen("no room", "decode-0", times=77, over_s=99, blocks=5)
    for _ in range(2):
        repeats.time.now_s += 5
        assert not repeats.seen("no room", "decode-0", times=77, over_s=99, blocks=6)
    assert repeats.due() == [{"text": "no room: repeated", "peer": "decode-0", "times": 2, "over_s": 10.0, "blocks": 6}]


def test_more_problems_than_are_kept_are_counted_together() -> None:
    """Peers that nobody has heard of take one place between them, and those that are known keep theirs."""
    repeats = Repeats(LIMITS)
    assert [repeats.seen("lost", peer) for peer in "abcdefa"] == [True] * 4 + [False] * 3
    assert {each["peer"]: each["times"] for each in repeats.close()} == {OTHERS: 2, "a": 1}


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("xy"), st.floats(0, 30), st.sampled_from("sod"))),
    st.integers(1, 3),
)
def test_nothing_goes_uncounted(steps: list[tuple[str, str, float, str]], full_max: int) -> None:
    """Whatever happens: logged one by one and counted together are all that were seen, and lines keep their pause."""
    repeats = Repeats(RepeatLimits(interval_ms=10_000, full_max=full_max, kept_max=6))
    seen = logged = counted = 0
    for peer, what, wait_s, step in steps:
        repeats.time.now_s += wait_s
        if step == "s":
            seen += 1
            logged += repeats.seen(what, peer)
            continue
        for each in repeats.over(peer, "gone") if step == "o" else repeats.due():
            assert each["times"] > 0
            assert each.get("lasted_s", each["over_s"]) >= each["over_s"] >= (1.0 if step == "o" else 0.0)
            counted += each["times"]
    assert logged + counted + sum(each["times"] for each in repeats.close()) == seen
    assert repeats.close() == []
    assert not repeats.log._problems and repeats.log._kept == 0


def test_limits_are_positive() -> None:
    with pytest.raises(InvalidField):
        RepeatLimits(full_max=0)


def test_the_lines_of_a_log() -> None:
    """What an operator reads of a peer that is stopped for some time: the problem, that it goes on, that it is over."""
    repeats = Repeats(LIMITS)
    log = repeats.log
    for number in range(25):
        log.warning("revoke unanswered", peer="prefill-0", number=number, error="silence")
        repeats.time.now_s += 1
        log.upkeep()
    log.over("prefill-0", "it has answered")
    log.over("prefill-0", "it has answered")
    log.close()
    assert repeats.lines.take() == [
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
