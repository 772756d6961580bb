"""How late the control thread is: it sleeps shortly again and again, and each sleep's excess is the lag.

All that a node promises in time (heartbeats, leases, revocations, answers) runs on that thread.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from baton.clock import Clock
from baton.log import get_log
from baton.tasks import end_task

log = get_log("node")

LOOK_MS: Final = 100
"""One sleep. A stall shows if it is longer than what is left of one."""
LAG_LOG_MS_MIN: Final = 500
WINDOW_S: Final = 30.0
"""`max_ms` covers at least this time, and at most twice as much."""
BUCKETS_MS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)


class LoopLag:
    """Lives on one event loop. `start` once, `close` before the loop ends."""

    def __init__(self, clock: Clock) -> None:
        self.looks = 0
        self.report: Callable[[float], object] = float
        """Called with each lag in seconds."""
        self._clock = clock
        self._counts = [0] * (len(BUCKETS_MS) + 1)
        self._window_began_s = clock.monotonic_s()
        self._max_ms = 0.0
        self._max_before_ms = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_forever(), name="loop-lag")

    async def close(self) -> None:
        """Idempotent."""
        await end_task(self._task)

    @property
    def max_ms(self) -> float:
        """The longest lag lately (`WINDOW_S`)."""
        return max(self._max_ms, self._max_before_ms)

    def below_ms(self, share: float) -> float:
        """The upper bound of the bucket with this quantile of all lags; infinite beyond the last bucket."""
        seen = 0
        for bound_ms, count in zip((*BUCKETS_MS, float("inf")), self._counts, strict=True):
            seen += count
            if seen >= share * self.looks:
                return bound_ms
        raise AssertionError(share)

    def look(self, lag_s: float) -> None:
        """One measurement has ended."""
        lag_ms = max(0.0, lag_s * 1000)
        self.looks += 1
        self._counts[bisect_left(BUCKETS_MS, lag_ms)] += 1
        now_s = self._clock.monotonic_s()
        if now_s - self._window_began_s >= WINDOW_S:
            self._window_began_s, self._max_before_ms, self._max_ms = now_s, self._max_ms, 0.0
        self._max_ms = max(self._max_ms, lag_ms)
        self.report(lag_ms / 1000)
        if lag_ms >= LAG_LOG_MS_MIN:
            log.warning("the control thread was held up", lag_ms=round(lag_ms))

    async def _look_forever(self) -> None:
        while True:
            began_s = self._clock.monotonic_s()
            await self._clock.sleep_s(LOOK_MS / 1000)
            self.look(self._clock.monotonic_s() - began_s - LOOK_MS / 1000)
