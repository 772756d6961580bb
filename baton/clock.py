"""Time as an argument: nothing else in this project reads a clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds, as floats. `monotonic_s` never goes back; `wall_s` may jump and is for display and logs only."""

    def monotonic_s(self) -> float: ...

    def wall_s(self) -> float: ...

    async def sleep_s(self, delay_s: float) -> None:
        """Return after at least `delay_s` of `monotonic_s`; at the next turn of the loop for 0."""
        ...


class SystemClock:
    """The machine's clock and the running event loop's timer."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep_s(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


async def wait_s(clock: Clock, event: asyncio.Event, delay_s: float) -> bool:
    """Wait for `event`, for at most `delay_s`. Whether it was set."""
    sleep = asyncio.ensure_future(clock.sleep_s(delay_s))
    wake = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({sleep, wake}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        sleep.cancel()
        wake.cancel()
    return event.is_set()
