"""How late the control thread is: counted, remembered for a while, told to metrics, and logged beyond a limit."""

from __future__ import annotations

import asyncio
import logging

import pytest

from baton.clock import Clock
from baton.loop_lag import BUCKETS_MS, LAG_LOG_MS_MIN, WINDOW_S, LoopLag


class StillClock(Clock):
    """Its time is moved by hand; sleeps end when they are told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep_s(self, delay_s: float) -> None:
        raise AssertionError("nobody sleeps here")


def test_shares_are_counted_in_buckets() -> None:
    lag = LoopLag(StillClock())
    for ms in [0.4] * 98 + [30.0, 700.0]:
        lag.look(ms / 1000)
    assert lag.looks == 100
    assert [lag.below_ms(share) for share in (0.5, 0.98, 0.99, 1.0)] == [1, 1, 50, 1_000]
    lag.look(60.0)
    assert lag.below_ms(1.0) == float("inf")
    assert max(BUCKETS_MS) < 60_000


def test_the_longest_is_forgotten_after_a_while() -> None:
    """Not before a whole window has passed, and after two at the latest."""
    clock = StillClock()
    lag = LoopLag(clock)
    lag.look(0.25)
    clock.now_s += WINDOW_S
    lag.look(0.01)
    assert lag.max_ms == 250
    clock.now_s += WINDOW_S
    lag.look(0.02)
    assert lag.max_ms == 20


def test_a_timer_that_comes_early_is_no_lag() -> None:
    lag = LoopLag(StillClock())
    lag.look(-0.001)
    assert (lag.max_ms, lag.below_ms(1.0)) == (0.0, 1)


def test_a_long_one_is_logged_and_each_is_told(caplog: pytest.LogCaptureFixture) -> None:
    lag = LoopLag(StillClock())
    reported: list[float] = []
    lag.report = reported.append
    with caplog.at_level(logging.WARNING, logger="baton.node"):
        lag.look((LAG_LOG_MS_MIN - 1) / 1000)
        assert not caplog.records
        lag.look(LAG_LOG_MS_MIN / 1000)
    assert [record.getMessage() for record in caplog.records] == ["the control thread was held up"]
    assert reported == [(LAG_LOG_MS_MIN - 1) / 1000, LAG_LOG_MS_MIN / 1000]


def test_a_blocked_loop_is_seen() -> None:
    """The clock leaps while a callback holds the thread: the look under way is that much late."""

    class Leaping(Clock):
        leap_s = 0.0

        def monotonic_s(self) -> float:
            return super().monotonic_s() + self.leap_s

    async def scene() -> None:
        clock = Leaping()
        lag = LoopLag(clock)
        looked = asyncio.Event()
        lag.report = lambda lag_s: looked.set() if lag_s >= 3 else None
        lag.start()
        await asyncio.sleep(0)
        clock.leap_s = 3.0
        async with asyncio.timeout(30):
            await looked.wait()
        assert lag.max_ms >= 3_000
        await lag.close()
        await lag.close()

    asyncio.run(scene())
