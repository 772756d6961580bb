"""What has to wait in a router: requests in the line, and work for which a turn of the loop has no time left. Pure.

The line: requests that wait until the cluster has room, and how many of them are on their way there.

First come, first served: a request goes when those that came before it have gone. One of the next lower priority counts
as if it had come `LATER_S` later, so it goes behind all that come until then, and no stream of others starves it.

While nodes take everything, nobody waits. A refusal for want of room puts the request back to its old place and limits
the requests that are out to those that are out then: from there on each answer that ends lets one go. Whether there is
room for more is tried after a pause, or when the directory reports room: with one request, then with twice as many as
long as all are taken. A request that the nodes refuse holds up those behind it: otherwise small ones would take the
room that it waits for.
"""

from __future__ import annotations

import operator
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Final

from batonpb import common_pb2

from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.retry_time import whole_seconds_ms

BYTES_MAX: Final = 256 << 20
"""Of the requests that wait."""
TOKEN_BYTES: Final = 40
"""That a token of a prompt takes here: a number and the reference to it."""
LATER_S: Final = 30.0
"""How much later than it came a request counts as come, for each step of priority below the highest."""
LOW_SHARE: Final = 2
"""Requests of the lowest priority fill at most the line's half: the others find room behind any number of them."""
AHEAD_MAX: Final = 32
"""Requests on their way for each prefill node that is ready, not granted yet. More than an engine begins in the time of
a call, so that none idles; the others wait here, where they have an order and a priority."""
PAUSE_DOUBLINGS_MAX: Final = 2
"""How often the pause before the next try doubles while the nodes take none."""
TURN_MS: Final = 4
"""Work of one turn. What is more waits for the next one, in which streams go on too."""


class Priority(IntEnum):
    """Who goes first where requests wait; the smaller number does."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


def priority_to_proto(priority: Priority) -> common_pb2.Priority:
    return _PROTO[priority]


def priority_from_proto(value: common_pb2.Priority) -> Priority | None:
    """None: it is not set, or one that a later version has."""
    return next((priority for priority, named in _PROTO.items() if named == value), None)


_PROTO: Final = {
    Priority.HIGH: common_pb2.PRIORITY_HIGH,
    Priority.NORMAL: common_pb2.PRIORITY_NORMAL,
    Priority.LOW: common_pb2.PRIORITY_LOW,
}


class Stage(Enum):
    ARRIVED = auto()
    """It is being checked."""
    WAITING = auto()
    SENT = auto()
    """To a prefill node; whether there is room for it is not known yet."""
    PLACED = auto()
    """Nodes have it, or it looks for one that is there."""
    OVER = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Place:
    """One request's, from its arrival to its end."""

    priority: Priority
    rank: tuple[float, int]
    """When it counts as come, and its number."""
    size_bytes: int
    stage: Stage = Stage.ARRIVED
    tries: int = -1
    """Value of `Line._tries` when it was sent."""


class Line:
    """Times are of one clock that does not go back. After any change call `go`."""

    def __init__(
        self, *, out_max: int, requests_max: int, pause_ms: int, rng: random.Random, ahead_max: int = AHEAD_MAX
    ) -> None:
        """`out_max` bounds the requests that are out, `requests_max` those that arrive and wait, and `ahead_max` those
        on their way to a prefill node. `pause_ms` is the shortest pause between a refusal and the next try."""
        assert out_max > 0 and requests_max > 0 and pause_ms > 0
        self._out_max = out_max
        self._requests_max = requests_max
        self._ahead_max = ahead_max
        self._pause_ms = pause_ms
        self._rng = rng
        self.prefill_nodes = 0
        """Ready ones. While there is none, requests go to find that out."""
        self._number = 0
        self._waiting: list[Place] = []
        """In the order of their ranks."""
        self._arrived = 0
        self._bytes = 0
        """Of those that arrive and wait."""
        self._sent = self._out = 0
        self._limit: int | None = None
        """Of the requests that are out. None: the cluster has taken all so far."""
        self._pause_until_s: float | None = None
        """Set from a refusal to the next try, in which the limit does not grow."""
        self._tries = 0
        """Times of trying for more room so far."""
        self._refused_in_a_row = 0
        self._rooms: Mapping[Incarnation, tuple[int, int]] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def out(self) -> int:
        return self._out

    @property
    def wake_s(self) -> float | None:
        """When `go` is to be called if nothing changes until then."""
        return self._pause_until_s if self._waiting else None

    def enter(self, priority: Priority, size_bytes: int, now_s: float, *, comes_back: bool = False) -> Place:
        """A request has come. One that `comes_back` for its answer may not have to wait: that is found out first.
        Raises BatonError TOO_MANY_CALLS where the line is full."""
        most = max(1, self._requests_max // LOW_SHARE) if priority is Priority.LOW else self._requests_max
        if not comes_back:
            self._check_count(self._arrived + len(self._waiting), most)
        self._check_bytes(size_bytes)
        self._number += 1
        self._arrived += 1
        self._bytes += size_bytes
        return Place(priority=priority, rank=(now_s + LATER_S * priority, self._number), size_bytes=size_bytes)

    def wait(self, place: Place, size_bytes: int) -> None:
        """It has been checked, and holds so many bytes now. Raises BatonError TOO_MANY_CALLS where it would have to
        wait, and they are too many."""
        assert place.stage is Stage.ARRIVED
        if self._waiting or not self._may_go():
            self._check_count(len(self._waiting), self._requests_max)
            self._check_bytes(size_bytes - place.size_bytes)
        self._bytes -= place.size_bytes
        place.size_bytes = size_bytes
        self._arrived -= 1
        self._put(place)

    def skip(self, place: Place) -> None:
        """It does not wait: nodes have it already, or its client has the beginning of its answer."""
        assert place.stage is Stage.ARRIVED
        self._arrived -= 1
        self._bytes -= place.size_bytes
        self._out += 1
        place.stage = Stage.PLACED

    def refused(self, place: Place, now_s: float) -> None:
        """Nodes have no room for it now: it waits at its old place."""
        self._leave_nodes(place)
        self._put(place)
        self._limit = self._out
        if self._pause_until_s is None:
            doublings = min(self._refused_in_a_row, PAUSE_DOUBLINGS_MAX)
            self._pause_until_s = now_s + (self._pause_ms << doublings) * self._rng.uniform(0.5, 1.5) / 1000
            self._refused_in_a_row += 1

    def placed(self, place: Place) -> None:
        """There was room for it. Idempotent."""
        if place.stage is Stage.SENT and self._pause_until_s is None and place.tries == self._tries:
            self._refused_in_a_row = 0
            if self._limit is not None:
                self._limit = max(self._limit, self._out) + 2  # some out may not have waited
        self._arrives(place)

    def searches(self, place: Place) -> None:
        """It looks for a node that is there, which says nothing of room: others go meanwhile, one of them in its place
        where it was to try for more room. Idempotent."""
        tried = place.stage is Stage.SENT and self._pause_until_s is None and place.tries == self._tries
        if tried and self._limit is not None:
            self._limit = max(self._limit, self._out) + 1
        self._arrives(place)

    def leave(self, place: Place) -> None:
        """It is over, at whatever stage."""
        if place.stage is Stage.WAITING:
            self._take(bisect_left(self._waiting, place.rank, key=_rank))
        elif place.stage is Stage.ARRIVED:
            self._arrived -= 1
            self._bytes -= place.size_bytes
        else:
            self._leave_nodes(place)
        place.stage = Stage.OVER

    def reported(self, rooms: Mapping[Incarnation, tuple[int, int]]) -> None:
        """What the decode nodes that are ready have free, by their reports: blocks, and places less some number."""
        before, self._rooms = self._rooms, rooms
        more = [n for n, room in rooms.items() if n not in before or any(map(operator.gt, room, before[n]))]
        if more and self._pause_until_s is not None:
            self._pause_until_s = 0.0

    def go(self, now_s: float) -> list[Place]:
        """Those that may go now, in order. They count as sent."""
        if self._pause_until_s is not None and now_s >= self._pause_until_s:
            self._pause_until_s = None
            self._tries += 1
            assert self._limit is not None
            self._limit = max(self._limit, self._out) + 1
        going = []
        while self._waiting and self._may_go():
            place = self._take(0)
            place.stage, place.tries = Stage.SENT, self._tries
            self._sent += 1
            self._out += 1
            going.append(place)
        if not self._waiting and self._pause_until_s is None:
            self._limit = None
            self._refused_in_a_row = 0
        return going

    def _may_go(self) -> bool:
        ahead = self._sent < self._ahead_max * self.prefill_nodes or not self.prefill_nodes
        return ahead and self._out < self._out_max and (self._limit is None or self._out < self._limit)

    def _arrives(self, place: Place) -> None:
        if place.stage is Stage.SENT:
            place.stage = Stage.PLACED
            self._sent -= 1

    def _put(self, place: Place) -> None:
        place.stage = Stage.WAITING
        self._bytes += place.size_bytes
        insort(self._waiting, place, key=_rank)

    def _take(self, index: int) -> Place:
        place = self._waiting.pop(index)
        self._bytes -= place.size_bytes
        return place

    def _leave_nodes(self, place: Place) -> None:
        assert place.stage in (Stage.SENT, Stage.PLACED), place.stage
        self._out -= 1
        self._sent -= place.stage is Stage.SENT

    def _check_count(self, waiting: int, most: int) -> None:
        if waiting >= most:
            raise self._full(f"{most} requests wait for this router already, the limit (line_requests_max).")

    def _check_bytes(self, more: int) -> None:
        if self._bytes + more > BYTES_MAX:
            raise self._full(f"The requests that wait for this router fill the {BYTES_MAX >> 20} MiB kept for them.")

    def _full(self, text: str) -> BatonError:
        return BatonError(
            Reason.TOO_MANY_CALLS,
            f"{text} Send the request again after the time in this error.",
            retry_after_ms=whole_seconds_ms(self._rng.random()),
        )


def _rank(place: Place) -> tuple[float, int]:
    return place.rank


class Turns:
    """Work is done at once while its turn has time left, and in a later turn, in order, when it has not."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], now_s: Callable[[], float]) -> None:
        """`call_soon` calls in the next turn."""
        self._call_soon = call_soon
        self._now_s = now_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._end_s: float | None = None
        """Of the time in this turn; None in one that has had no work."""
        self.looked_s = 0.0
        """When the clock was last looked at: before each piece of work."""

    def begin(self) -> bool:
        """Whether there is time for one piece of work now, and none waits."""
        return not self._waiting and self._time_left()

    def do(self, work: Callable[[], None]) -> bool:
        """Whether it is done. Each caller has one piece of work at most that waits."""
        if not self.begin():
            self._waiting.append(work)
            return False
        work()
        return True

    def later(self, work: Callable[[], None]) -> None:
        """The rest of what was done: behind all that waits."""
        self._time_left()
        self._waiting.append(work)

    def charge(self, ms: float) -> None:
        """Work that was begun in this turn takes so long in the next one."""
        if self._time_left():
            assert self._end_s is not None
            self._end_s -= ms / 1000

    def _time_left(self) -> bool:
        now_s = self.looked_s = self._now_s()
        if self._end_s is None:
            self._end_s = now_s + TURN_MS / 1000
            self._call_soon(self._next)
            return True
        return now_s < self._end_s

    def _next(self) -> None:
        self._end_s = None
        while self._waiting and self._time_left():
            self._waiting.popleft()()
