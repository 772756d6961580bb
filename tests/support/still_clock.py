"""A clock for tests that wait for nothing."""

from __future__ import annotations

from baton.clock import Clock


class StillClock(Clock):
    """Its time is moved by whoever sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep_s(self, delay_s: float) -> None:
        self.slept.append(round(delay_s, 6))
        self.now_s += delay_s
