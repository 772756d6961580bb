"""Time as an argument: nothing else in this project reads a clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """The machine's clock and the running event loop's timer, in seconds. A simulation has one of its own."""

    def monotonic_s(self) -> float:
        """Never goes back."""
        return time.monotonic()

    def wall_s(self) -> float:
        """May jump: for display and logs only."""
        return time.time()

    async def sleep_s(self, delay_s: float) -> None:
        """Return after at least `delay_s` of `monotonic_s`; at the next turn of the loop for 0."""
        await asyncio.sleep(delay_s)


async def first_of(*waits: Coroutine[Any, Any, T]) -> T:
    """Wait for one of them and cancel the others. Returns what it returns, or raises what it raises; where several have
    ended, the first of them counts."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del task
        tasks.clear()  # an error that one has leads back to this frame


async def wait_s(clock: Clock, event: asyncio.Event, delay_s: float) -> bool:
    """Wait for `event`, for at most `delay_s`. Whether it was set."""
    await first_of(clock.sleep_s(delay_s), event.wait())
    return event.is_set()
