"""Shares the turns of the event loop between what many connections bring at once and everything else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

TURN_MS: Final = 4
"""Work of one turn. What is more waits for the next one, in which streams go on too."""


class Turns:
    """Work is done at once while its turn has time left, and in a later turn, in order, when it has not."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], now_s: Callable[[], float]) -> None:
        """`call_soon` calls in the next turn."""
        self._call_soon = call_soon
        self._now_s = now_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._end_s: float | None = None
        """Of the time in this turn; None in one that has had no work."""

    def do(self, work: Callable[[], None]) -> bool:
        """Whether it is done. Each caller has one piece of work at most that waits."""
        if self._waiting or not self._time_left():
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
        if self._end_s is None:
            self._end_s = self._now_s() + TURN_MS / 1000
            self._call_soon(self._next)
            return True
        return self._now_s() < self._end_s

    def _next(self) -> None:
        self._end_s = None
        while self._waiting and self._time_left():
            self._waiting.popleft()()
