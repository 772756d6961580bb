"""Who is next in a prefill node: requests that wait for a place in the engine. Pure.

In order of arrival, but that those in the middle of their answer (`resumed`) go before those without a token, each of
which is overtaken at most `overtakes_max` times.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    overtaken: int
    """How many have come later and stand before it. Counted by the line."""

    @property
    def resumed(self) -> bool: ...


_W = TypeVar("_W", bound=Waiter)


class WaitingLine(Generic[_W]):
    """A queue of waiters; control thread only."""

    def __init__(self, *, overtakes_max: int) -> None:
        self._overtakes_max = overtakes_max
        self._waiters: deque[_W] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[_W]:
        return iter(self._waiters)

    def __getitem__(self, place: int) -> _W:
        return self._waiters[place]

    def __contains__(self, waiter: object) -> bool:
        return waiter in self._waiters

    def add(self, waiter: _W) -> None:
        """Behind all that came before it, or, resumed, before those without a token that may still be overtaken."""
        place = len(self._waiters)
        while waiter.resumed and place and self._gives_way(self._waiters[place - 1]):
            place -= 1
            self._waiters[place].overtaken += 1
        self._waiters.insert(place, waiter)

    def popleft(self) -> _W:
        return self._waiters.popleft()

    def remove(self, waiter: _W) -> None:
        self._waiters.remove(waiter)

    def _gives_way(self, waiter: _W) -> bool:
        return not waiter.resumed and waiter.overtaken < self._overtakes_max
