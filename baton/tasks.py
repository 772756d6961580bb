"""Background tasks of one owner: kept until they end, logged if they fail, ended together. Calls from threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from baton.log import Log, get_log

_log = get_log("tasks")


class Tasks:
    """Tasks whose results nobody waits for. Lives on one event loop, used from its thread.

    A task that raises is logged as an error, with the text `broken` and `fields`; the others go on. The owner calls
    `cancel`, or `drain`, which may leave some, at its end.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, log: Log, *, broken: str = "task broke off", **fields: Any
    ) -> None:
        self._loop = loop
        self._log = log
        self._broken = broken
        self._fields = fields
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in a task of its own."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    async def drain(self, ms_max: float | None = None) -> None:
        """Wait until all have ended, also those spawned meanwhile; at most `ms_max`. Cancels none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if ms_max is None else ms_max / 1000):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel all, and wait until they have ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._log.error(self._broken, **self._fields, exc_info=task.exception())


def log_failure(task: asyncio.Task[None]) -> None:
    """Done callback of a task that runs for as long as its owner: whatever ends it is a bug."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("ended by a bug of ours", task=task.get_name(), exc_info=task.exception())


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel `task`, if there is one, and wait until it has ended. Does not raise what it raises. Idempotent."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


def call_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object) -> None:
    """Call on the loop's thread, in the order of these calls. From any thread; dropped if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        # At the end of the process the loop may be closed first; then nobody is left to call.
        if not loop.is_closed():
            raise
