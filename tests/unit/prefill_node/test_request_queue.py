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
    resumed: bool
    bypassed: int = 0


def line_of(kinds: list[bool], bypasses_max: int) -> Any:
    line: Any = RequestQueue(bypasses_max=bypasses_max)
    for name, resumed in enumerate(kinds):
        line.add(One(name, resumed))
    return line


def test_resumed_requests_go_first_so_often() -> None:
    """Two may pass the new request 0; the third stands behind it, and those that come later behind both."""
    line = line_of([False, True, True, True, False, True], bypasses_max=2)
    assert [one.name for one in line] == [1, 2, 0, 3, 5, 4]


@given(st.lists(st.sampled_from(["new", "resumed", "pop", "remove"]), max_size=60), st.integers(1, 4))
def test_nobody_is_bypassed_more_often(course: list[str], bypasses_max: int) -> None:
    """In any course no new request sees more than `bypasses_max` later ones leave before it, and among requests of a
    kind the first to come is the first to leave."""
    line: Any = RequestQueue(bypasses_max=bypasses_max)
    passed: dict[int, int] = {}
    last = {True: -1, False: -1}
    for name, what in enumerate(course):
        if what in ("new", "resumed"):
            line.add(One(name, what == "resumed"))
            passed[name] = 0
        elif what == "remove" and len(line):
            line.remove(line[name % len(line)])
        elif what == "pop" and len(line):
            first = line.popleft()
            assert first.name > last[first.resumed]
            last[first.resumed] = first.name
            for one in line:
                passed[one.name] += first.name > one.name
                assert one.resumed or passed[one.name] <= bypasses_max
    assert all(one.resumed or one.bypassed <= bypasses_max for one in line)
