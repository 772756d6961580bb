"""Background tasks of one owner: kept until they end, logged if they fail, ended together. Callers that wait for an
answer. Calls from threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from baton.log import Log, get_log

_log = get_log("tasks")

KeyT = TypeVar("KeyT", bound=Hashable)
AnswerT = TypeVar("AnswerT")


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

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in a task of its own."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

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


def call_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
    """Call on the loop's thread, in the order of these calls. From any thread; dropped if the loop has been closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        # At the end of the process the loop may be closed first; then nobody is left to call.
        if not loop.is_closed():
            raise


class PendingCalls(Generic[KeyT, AnswerT]):
    """Callers that wait for an answer. All under one key get the same answer, once. Control thread only; the caller
    bounds the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[KeyT, list[asyncio.Future[AnswerT]]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._waiting

    async def ask(self, key: KeyT, ask: Callable[[], object]) -> AnswerT:
        """Wait from before `ask` is called, during which the answer may come. Raises what `fail` is given."""
        waiter: asyncio.Future[AnswerT] = self._loop.create_future()
        self._waiting.setdefault(key, []).append(waiter)
        try:
            ask()
            return await waiter
        finally:
            others = self._waiting.get(key, [])
            if waiter in others:
                others.remove(waiter)
                if not others:
                    del self._waiting[key]

    def answer(self, key: KeyT, answer: AnswerT) -> None:
        for waiter in self._pop(key):
            waiter.set_result(answer)

    def fail(self, key: KeyT, error: Callable[[], Exception]) -> None:
        """Each gets an error of its own."""
        for waiter in self._pop(key):
            waiter.set_exception(error())

    def fail_all(self, error: Callable[[], Exception]) -> None:
        for key in list(self._waiting):
            self.fail(key, error)

    def _pop(self, key: KeyT) -> list[asyncio.Future[AnswerT]]:
        """Without those that were cancelled."""
        return [waiter for waiter in self._waiting.pop(key, []) if not waiter.done()]
