"""The line of requests in a prefill node: who goes before whom, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from prefill_node.request_queue import RequestQueue


@dataclass(slots=True, eq=False)
class One:
    name: int
    rank: int
    bypassed: int = 0


RANKS = {"resumed": 0, "high": 1, "normal": 2, "low": 3}


def line_of(kinds: list[str], bypasses_max: int) -> Any:
    line: Any = RequestQueue(bypasses_max=bypasses_max)
    for name, kind in enumerate(kinds):
        line.add(One(name, RANKS[kind]))
    return line


def test_resumed_requests_go_first_so_often() -> None:
    """Two may pass the new request 0; the third stands behind it, and those that come later behind both."""
    line = line_of(["normal", "resumed", "resumed", "resumed", "normal", "resumed"], bypasses_max=2)
    assert [one.name for one in line] == [1, 2, 0, 3, 5, 4]


def test_a_higher_class_goes_first_so_often() -> None:
    """Two go before the low request 0, and the third no more, nor past it; resumed ones before all classes."""
    line = line_of(["low", "normal", "high", "high", "resumed", "normal"], bypasses_max=2)
    assert [one.name for one in line] == [2, 1, 0, 4, 3, 5]


@given(st.lists(st.sampled_from([*RANKS, "pop", "remove"]), max_size=60), st.integers(1, 4))
def test_nobody_is_bypassed_more_often(course: list[str], bypasses_max: int) -> None:
    """In any course no request sees more than `bypasses_max` later ones leave before it, and among requests of a kind
    the first to come is the first to leave."""
    line: Any = RequestQueue(bypasses_max=bypasses_max)
    passed: dict[int, int] = {}
    last = dict.fromkeys(RANKS.values(), -1)
    for name, what in enumerate(course):
        if what in RANKS:
            line.add(One(name, RANKS[what]))
            passed[name] = 0
        elif what == "remove" and len(line):
            line.remove(line[name % len(line)])
        elif what == "pop" and len(line):
            first = line.popleft()
            assert first.name > last[first.rank]
            last[first.rank] = first.name
            for one in line:
                passed[one.name] += first.name > one.name
                assert passed[one.name] <= bypasses_max
    assert all(one.bypassed <= bypasses_max for one in line)
