"""The line of requests in a prefill node: who goes before whom, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prefill_node.request_queue import WaitingLine


@dataclass(slots=True, eq=False)
class One:
    name: int
    resumed: bool
    overtaken: int = 0


def line_of(kinds: list[bool], overtakes_max: int) -> WaitingLine[One]:
    line: WaitingLine[One] = WaitingLine(overtakes_max=overtakes_max)
    for name, resumed in enumerate(kinds):
        line.add(One(name, resumed))
    return line


def test_resumed_requests_go_first_so_often() -> None:
    """Two may pass the new request 0; the third stands behind it, and those that come later behind both."""
    line = line_of([False, True, True, True, False, True], overtakes_max=2)
    assert [one.name for one in line] == [1, 2, 0, 3, 5, 4]


@given(st.lists(st.sampled_from(["new", "resumed", "pop", "remove"]), max_size=60), st.integers(1, 4))
def test_nobody_is_overtaken_more_often(course: list[str], overtakes_max: int) -> None:
    """In any course no new request sees more than `overtakes_max` later ones leave before it, and among requests of a
    kind the first to come is the first to leave."""
    line: WaitingLine[One] = WaitingLine(overtakes_max=overtakes_max)
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
                assert one.resumed or passed[one.name] <= overtakes_max
    assert all(one.resumed or one.overtaken <= overtakes_max for one in line)
