"""The line: who waits, who goes when, and what is refused. Pure: no clock, no cluster."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from router.line import AHEAD_MAX, BYTES_MAX, LATER_S, PAUSE_DOUBLINGS_MAX, Line, Place, Priority, Stage

PAUSE_MS = 50
PAUSE_S_MAX = PAUSE_MS * 1.5 * 2**PAUSE_DOUBLINGS_MAX / 1000


def line_of(*, out_max: int = 1_000, requests_max: int = 1_000) -> Line:
    line = Line(out_max=out_max, requests_max=requests_max, pause_ms=PAUSE_MS, rng=random.Random(1))
    line.prefill_nodes = 100
    return line


def come(line: Line, *, now_s: float = 0.0, priority: Priority = Priority.NORMAL, size_bytes: int = 1) -> Place:
    place = line.enter(priority, size_bytes, now_s)
    line.wait(place, size_bytes)
    return place


def some(line: Line, count: int, *, now_s: float = 0.0) -> list[Place]:
    return [come(line, now_s=now_s) for _ in range(count)]


@dataclass(slots=True, kw_only=True)
class Nodes:
    """So many places; a request has one from its grant to its end. All calls take no time."""

    places: int
    has: list[Place] = field(default_factory=list)
    order: list[Place] = field(default_factory=list)
    refusals: int = 0

    def take(self, line: Line, now_s: float) -> None:
        """Answer until nobody is on the way."""
        while going := line.go(now_s):
            for place in going:
                if len(self.has) < self.places:
                    self.has.append(place)
                    self.order.append(place)
                    line.placed(place)
                else:
                    self.refusals += 1
                    line.refused(place, now_s)

    def end(self, line: Line) -> None:
        line.leave(self.has.pop(0))


def test_nobody_waits_while_the_nodes_take_everything() -> None:
    line = line_of()
    places = some(line, 500)
    assert line.go(0.0) == places
    for place in places:
        line.placed(place)
        line.leave(place)
    assert (line.waiting, line.out, line.wake_s) == (0, 0, None)


def test_no_more_are_on_their_way_than_engines_need() -> None:
    """Two prefill nodes. The others wait where they have an order; each grant lets the next one go. Without a ready
    prefill node all go: each finds out for itself."""
    line = line_of()
    line.prefill_nodes = 2
    places = some(line, 100)
    assert line.go(0.0) == places[: 2 * AHEAD_MAX]
    line.placed(places[5])
    line.searches(places[6])
    assert line.go(0.0) == places[2 * AHEAD_MAX : 2 * AHEAD_MAX + 2]
    line.prefill_nodes = 0
    assert line.go(0.0) == places[2 * AHEAD_MAX + 2 :]


def test_a_request_that_nodes_have_no_room_for_keeps_its_place() -> None:
    """All but the first are refused, the last one first: they go again in the order in which they came, each with the
    end of an answer, and nobody that comes later goes before them."""
    line = line_of()
    places = some(line, 5)
    line.go(0.0)
    line.placed(places[0])
    for place in reversed(places[1:]):
        line.refused(place, 0.0)
    late = come(line)
    assert line.go(0.0) == []
    line.leave(places[0])
    for place in (*places[1:], late):
        assert line.go(0.0) == [place]
        line.placed(place)
        line.leave(place)


def test_each_answer_that_ends_lets_one_go_at_once() -> None:
    """512 requests, 128 places: all are answered in their order. Requests are refused at the start, when nobody knows
    how many places there are, and then few more than once in a pause."""
    line, nodes = line_of(), Nodes(places=128)
    line.prefill_nodes = 2
    places = some(line, 512)
    nodes.take(line, 0.0)
    first = nodes.refusals
    now_s = 0.0
    while nodes.has:
        now_s += 0.001
        nodes.end(line)
        nodes.take(line, now_s)
        assert len(nodes.has) == min(128, 512 - len(nodes.order) + len(nodes.has))
    assert nodes.order == places
    assert first <= 2 * AHEAD_MAX
    assert nodes.refusals - first <= 1 + now_s / (PAUSE_MS / 2000)


def test_new_room_is_found_by_itself_and_taken_twice_as_fast_each_time() -> None:
    """Ten places become a thousand, and no answer ends: after one pause the line is empty."""
    line, nodes = line_of(), Nodes(places=10)
    some(line, 900)
    nodes.take(line, 0.0)
    assert line.waiting == 890
    wake_s = line.wake_s
    assert wake_s is not None and 0 < wake_s <= 0.075
    nodes.places = 1_000
    nodes.take(line, wake_s / 2)
    assert line.waiting == 890, "it is not the time to try"
    nodes.take(line, wake_s)
    assert (line.waiting, line.wake_s) == (0, None)


def test_a_try_that_reaches_no_node_is_made_by_another() -> None:
    """There is room for all, and the one request that is to find that out comes to a node that is gone."""
    line, nodes = line_of(), Nodes(places=10)
    some(line, 20)
    nodes.take(line, 0.0)
    nodes.places = 100
    wake_s = line.wake_s
    assert wake_s is not None
    [lost] = line.go(wake_s)
    line.searches(lost)
    nodes.take(line, wake_s)
    assert (line.waiting, line.wake_s) == (0, None)
    line.placed(lost)
    assert line.out == 20


def test_news_of_room_end_the_pause() -> None:
    """A decode node reports more free blocks, or fewer requests, or is new. The same report once more says nothing."""
    line, nodes = line_of(), Nodes(places=1)
    some(line, 10)
    line.reported({Incarnation(1): (0, -5)})
    nodes.take(line, 0.0)
    for rooms in ({1: (0, -4)}, {1: (3, -4)}, {1: (1, -4), 2: (0, 0)}):
        nodes.places += 1
        line.reported({Incarnation(node): room for node, room in rooms.items()})
        nodes.take(line, 0.0)
        assert len(nodes.has) == nodes.places
    for rooms in ({1: (1, -4), 2: (0, 0)}, {1: (1, -5)}):
        nodes.places += 1
        line.reported({Incarnation(node): room for node, room in rooms.items()})
        nodes.take(line, 0.0)
        assert len(nodes.has) == nodes.places - 1
        nodes.places -= 1


def test_tries_become_rarer_while_the_nodes_take_none() -> None:
    line, nodes = line_of(), Nodes(places=0)
    some(line, 3)
    now_s, pauses_s = 0.0, []
    for _ in range(8):
        nodes.take(line, now_s)
        assert line.wake_s is not None
        pauses_s.append(line.wake_s - now_s)
        now_s = line.wake_s
    assert nodes.refusals == 3 + 7, "the head alone is tried again"
    assert min(pauses_s[PAUSE_DOUBLINGS_MAX:]) >= PAUSE_S_MAX / 3 and max(pauses_s) <= PAUSE_S_MAX
    assert pauses_s[0] <= PAUSE_MS * 1.5 / 1000


def test_priorities() -> None:
    """Who comes within 30 s goes by priority. A request of low priority that came 60 s before one of high priority goes
    first: no stream of others starves it."""
    line = line_of(out_max=1)
    out = come(line)
    assert line.go(0.0) == [out]
    low = come(line, priority=Priority.LOW)
    normal = come(line, now_s=LATER_S - 1)
    high = come(line, now_s=2 * LATER_S - 2, priority=Priority.HIGH)
    late_normal = come(line, now_s=LATER_S + 2)
    late_high = come(line, now_s=2 * LATER_S + 1, priority=Priority.HIGH)
    order = []
    for _ in range(5):
        line.leave(out)
        (out,) = line.go(0.0)
        order.append(out)
    assert order == [high, normal, low, late_high, late_normal]


def test_low_priority_is_not_starved() -> None:
    """One place, and a request of high priority each second, for as long as an answer takes: the one of low priority is
    answered a minute after it came."""
    line = line_of(out_max=1)
    out = come(line, priority=Priority.HIGH)
    assert line.go(0.0) == [out]
    low, now_s = come(line, priority=Priority.LOW), 0
    while low.stage is Stage.WAITING:
        now_s += 1
        come(line, now_s=now_s, priority=Priority.HIGH)
        line.leave(out)
        (out,) = line.go(now_s)
    assert now_s == 2 * LATER_S


def refusal(line: Line, priority: Priority = Priority.NORMAL, size_bytes: int = 1) -> BatonError:
    with pytest.raises(BatonError) as full:
        come(line, priority=priority, size_bytes=size_bytes)
    assert full.value.reason is Reason.TOO_MANY_CALLS
    assert full.value.retry_after_ms in (1_000, 2_000)
    return full.value


def test_one_request_too_many_is_refused_at_once() -> None:
    """Those that are out do not count, those that are being checked do. One of low priority finds at most half."""
    line = line_of(out_max=1, requests_max=4)
    out = come(line)
    line.go(0.0)
    come(line, priority=Priority.LOW)
    checked = line.enter(Priority.LOW, 1, 0.0)
    assert "line_requests_max" in refusal(line, Priority.LOW).message
    come(line)
    last = come(line, priority=Priority.HIGH)
    refusal(line, Priority.HIGH)
    line.leave(last)
    come(line)
    refusal(line)
    line.leave(checked)
    come(line)
    line.leave(out)
    assert len(line.go(0.0)) == 1
    come(line)


def test_a_client_that_comes_back_finds_the_line_full() -> None:
    """It gets an answer that a node has, which does not wait. One that has to be computed again, without a part of it,
    is refused as any other."""
    line = line_of(out_max=1, requests_max=2)
    come(line)
    line.go(0.0)
    waiting = some(line, 2)
    refusal(line)
    taken, again = (line.enter(Priority.NORMAL, 1, 0.0, comes_back=True) for _ in range(2))
    line.skip(taken)
    with pytest.raises(BatonError) as full:
        line.wait(again, 1)
    assert full.value.reason is Reason.TOO_MANY_CALLS
    line.leave(again)
    assert (line.waiting, line.out) == (2, 2)
    line.leave(waiting[0])
    come(line)


def test_bytes_that_wait_are_bounded() -> None:
    """A prompt may turn out to be longer than its text. While nobody waits it is not counted: it goes at once."""
    line = line_of(out_max=1)
    big = line.enter(Priority.NORMAL, 1, 0.0)
    line.wait(big, 2 * BYTES_MAX)
    assert line.go(0.0) == [big]
    some(line, 3)
    longer = line.enter(Priority.NORMAL, 100, 0.0)
    with pytest.raises(BatonError, match="256 MiB"):
        line.wait(longer, BYTES_MAX)
    line.leave(longer)
    come(line, size_bytes=BYTES_MAX - 3)
    refusal(line)


@pytest.mark.parametrize("outcome", [Line.placed, Line.searches])
def test_those_that_did_not_wait_take_no_try_for_room(outcome: Callable[[Line, Place], None]) -> None:
    """While one request tries whether there is room for more, three clients come back for answers that nodes have. The
    one behind it goes all the same."""
    line = line_of()
    first, second, third = some(line, 3)
    assert line.go(0.0) == [first, second, third]
    line.placed(first)
    line.refused(second, 0.0)
    line.refused(third, 0.0)
    assert line.go(PAUSE_S_MAX) == [second]
    for _ in range(3):
        line.skip(line.enter(Priority.NORMAL, 1, PAUSE_S_MAX, comes_back=True))
    assert line.go(PAUSE_S_MAX) == []
    outcome(line, second)
    assert line.go(PAUSE_S_MAX) == [third]


class LineMachine(RuleBasedStateMachine):
    """Whatever happens to requests and nodes: order, bounds, and nobody who could go is left waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.line = Line(out_max=12, requests_max=8, pause_ms=PAUSE_MS, rng=random.Random(1))
        self.line.prefill_nodes = 1
        self.now_s = 0.0
        self.arrived: list[Place] = []
        self.waiting: list[Place] = []
        self.sent: list[Place] = []
        self.searching: list[Place] = []
        self.placed: list[Place] = []
        self.skipped: list[Place] = []
        """Of those that have been placed."""
        self.places = 3

    def go(self) -> None:
        going = self.line.go(self.now_s)
        assert going == sorted(self.waiting, key=lambda place: place.rank)[: len(going)]
        for place in going:
            assert place.stage is Stage.SENT
            self.waiting.remove(place)
            self.sent.append(place)

    def drawn(self, places: Sequence[Place], data: st.DataObject) -> Place:
        return data.draw(st.sampled_from(places))

    @rule(priority=st.sampled_from(Priority))
    def comes(self, priority: Priority) -> None:
        total = len(self.arrived) + len(self.waiting)
        if total >= (4 if priority is Priority.LOW else 8):
            with pytest.raises(BatonError):
                self.line.enter(priority, 1, self.now_s)
        else:
            self.arrived.append(self.line.enter(priority, 1, self.now_s))

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def is_checked(self, data: st.DataObject) -> None:
        place = self.drawn(self.arrived, data)
        self.arrived.remove(place)
        if len(self.waiting) >= 8:  # those that were refused have come back since
            with pytest.raises(BatonError):
                self.line.wait(place, 50)
            self.line.leave(place)
        else:
            self.waiting.append(place)
            self.line.wait(place, 50)
        self.go()

    @precondition(lambda self: self.arrived)
    @rule(data=st.data())
    def is_there_already(self, data: st.DataObject) -> None:
        place = self.drawn(self.arrived, data)
        self.arrived.remove(place)
        self.placed.append(place)
        self.skipped.append(place)
        self.line.skip(place)
        self.go()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def reaches_nobody(self, data: st.DataObject) -> None:
        place = self.drawn(self.sent, data)
        self.sent.remove(place)
        self.searching.append(place)
        self.line.searches(place)
        self.go()

    @precondition(lambda self: self.sent or self.searching)
    @rule(data=st.data())
    def is_answered(self, data: st.DataObject) -> None:
        place = self.drawn([*self.sent, *self.searching], data)
        (self.sent if place in self.sent else self.searching).remove(place)
        if len(self.placed) < self.places:
            self.placed.append(place)
            self.line.placed(place)
        else:
            self.waiting.append(place)
            self.line.refused(place, self.now_s)
        self.go()

    @precondition(lambda self: self.placed)
    @rule(data=st.data())
    def has_to_be_placed_again(self, data: st.DataObject) -> None:
        place = self.drawn(self.placed, data)
        self.placed.remove(place)
        self.waiting.append(place)
        self.line.refused(place, self.now_s)
        self.go()

    @precondition(lambda self: self.sent or self.searching or self.placed or self.waiting or self.arrived)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        place = self.drawn([*self.sent, *self.searching, *self.placed, *self.waiting, *self.arrived], data)
        for places in (self.sent, self.searching, self.placed, self.waiting, self.arrived):
            if place in places:
                places.remove(place)
        self.line.leave(place)
        self.go()

    @rule(places=st.integers(0, 20))
    def room_changes(self, places: int) -> None:
        self.places = places

    @rule(by_s=st.floats(0, 40))
    def time_passes(self, by_s: float) -> None:
        self.now_s += by_s
        self.go()

    @invariant()
    def books_agree(self) -> None:
        assert self.line.waiting == len(self.waiting)
        assert self.line.out == len(self.sent) + len(self.searching) + len(self.placed)
        assert self.line.out - sum(place in self.skipped for place in self.placed) <= 12
        assert self.line._sent == len(self.sent)
        assert self.line._arrived == len(self.arrived)
        assert self.line._bytes == sum(place.size_bytes for place in [*self.arrived, *self.waiting])

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Whoever waits is let go by an answer that ends, or by the clock."""
        if self.waiting and not self.sent and len(self.placed) < 12:
            assert self.line.wake_s is not None or self.placed or self.searching

    def teardown(self) -> None:
        """The nodes take everything from now on: all that wait go, though nothing else happens."""
        self.places = 12
        for _ in range(100):
            while self.sent:
                place = self.sent.pop()
                self.placed.append(place)
                self.line.placed(place)
                self.go()
            if not self.waiting or len(self.placed) + len(self.searching) >= 12:
                return
            assert self.line.wake_s is not None
            self.now_s = max(self.now_s, self.line.wake_s)
            self.go()
        raise AssertionError(f"{len(self.waiting)} still wait")


TestLine = LineMachine.TestCase


@given(st.lists(st.tuples(st.sampled_from(Priority), st.floats(0, 5)), min_size=1, max_size=40))
def test_within_a_priority_the_order_is_that_of_arrival(requests: list[tuple[Priority, float]]) -> None:
    line, nodes, now_s = line_of(), Nodes(places=1), 0.0
    first = come(line)
    nodes.take(line, 0.0)
    places = []
    for priority, gap_s in requests:
        now_s += gap_s
        places.append(come(line, now_s=now_s, priority=priority))
    while nodes.has:
        nodes.end(line)
        nodes.take(line, now_s)
    assert nodes.order[0] is first
    for priority in Priority:
        assert [p for p in nodes.order if p.priority is priority and p is not first] == [
            p for p in places if p.priority is priority
        ]
