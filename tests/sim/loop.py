"""One clock, one queue of what is to happen, and an event loop for each simulated process.

A `World` runs everything in one thread: callbacks that are ready in the order in which they became so, then the next
timer, to whose time the clock jumps. Each process start has a `ProcessLoop` of its own, which asyncio sees as the
running loop while a callback of that process runs. So `asyncio.sleep`, timeouts and tasks inside product code follow
the process's own clock (rate and offset), stand still while it is stopped, and are gone when it has crashed.
"""

from __future__ import annotations

import asyncio
import heapq
import zlib
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from enum import Enum
from random import Random
from types import GeneratorType
from typing import Any, Protocol

NEAR_S = 0.1
"""Timers that are due later than this are kept apart, in no order: nearly all of them are deadlines, cancelled long
before."""
UNWIND_THROWS_MAX = 64
TASKS_KEPT_MIN = 64
"""A process keeps so many of its tasks, and twice those that run, before it sweeps out the ones that have ended."""


class ProcessState(Enum):
    RUNNING = "running"
    STOPPED = "stopped"  # SIGSTOP: keeps everything, does nothing
    DEAD = "dead"


class Handle:
    """One callback to come. What `call_soon` and `call_at` return to asyncio."""

    __slots__ = ("args", "at_s", "callback", "loop", "off")

    def __init__(self, loop: ProcessLoop, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.loop = loop
        self.callback = callback
        self.args = args
        self.off = False
        self.at_s = -1.0
        """When it is due, if it is a timer."""

    def cancel(self) -> None:
        self.off = True
        self.callback, self.args = _nothing, ()  # whoever keeps this handle may be what it would call

    def cancelled(self) -> bool:
        return self.off

    def when(self) -> float:
        return self.loop.local_s(self.at_s)


def _nothing() -> None:
    """Of a cancelled handle."""


class Watched(Protocol):
    """Something that is looked at after each callback that has changed it."""

    def look(self) -> None: ...


class World:
    """The clock and the queue. Everything else of a simulation hangs on it."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        """Of the world itself: network, faults, load. Processes have generators of their own."""
        self.now_s = 0.0
        self.callbacks = 0
        self.failures: list[str] = []
        """What broke off inside a process that was not dead."""
        self.touched: dict[Watched, None] = {}
        """Books that the callback under way has changed."""
        self._ready: deque[Handle] = deque()
        self.make_ready = self._ready.append
        self._timers: list[tuple[float, int, Handle]] = []
        """Those that are due before `_near_until_s`: a heap."""
        self._far: list[tuple[float, int, Handle]] = []
        self._near_until_s = NEAR_S
        self._sequence = 0
        self._stopping = False
        self.outside = ProcessLoop(self, "outside", Random(0))  # type: ignore[abstract]  # what is missing is not used
        """For what belongs to no process: faults, checks, delivery."""

    def at(self, at_s: float, callback: Callable[..., object], *args: object) -> Handle:
        """Call back at a time of the world's clock."""
        return self.schedule(at_s, Handle(self.outside, callback, args))

    def after(self, delay_s: float, callback: Callable[..., object], *args: object) -> Handle:
        return self.schedule(self.now_s + delay_s, Handle(self.outside, callback, args))

    def schedule(self, at_s: float, handle: Handle) -> Handle:
        handle.at_s = at_s
        self._sequence += 1
        if at_s < self._near_until_s:
            heapq.heappush(self._timers, (at_s, self._sequence, handle))
        else:
            self._far.append((at_s, self._sequence, handle))
        return handle

    def stop(self) -> None:
        """End `run` after the callback under way."""
        self._stopping = True

    def run(self, until_s: float) -> None:
        """Run until `stop`, until nothing is left to happen, or until the clock would pass `until_s`.

        After each callback the books that it has touched are looked at.
        """
        ready, timers, touched, running = self._ready, self._timers, self.touched, ProcessState.RUNNING
        pop = heapq.heappop
        current: ProcessLoop | None = None
        count = 0
        self._stopping = False
        try:
            while not self._stopping:
                if ready:
                    handle = ready.popleft()
                    if handle.off:
                        continue
                elif timers or self._bring_near(until_s):
                    entry = pop(timers)
                    at_s, _, handle = entry
                    if handle.off:
                        continue
                    if at_s > until_s:
                        heapq.heappush(timers, entry)
                        self.now_s = until_s
                        return
                    if at_s > self.now_s:  # the clock jumps to its time
                        self.now_s = at_s
                else:
                    return
                loop = handle.loop
                if loop.state is not running:
                    loop.park(handle)
                    continue
                if loop is not current:
                    events._set_running_loop(loop)
                    current = loop
                count += 1
                callback = handle.callback
                callback(*handle.args)
                if touched:
                    for books in touched:
                        books.look()
                    touched.clear()
        except Exception as error:
            self.failures.append(f"{loop.name}: {error!r} in {callback!r}")
            raise
        finally:
            self.callbacks += count
            events._set_running_loop(None)

    def _bring_near(self, until_s: float) -> bool:
        """There is nothing near: go on to the next timers. False: there are none until then."""
        self._far = [entry for entry in self._far if not entry[2].off]
        if not self._far:
            return False
        next_s = min(self._far)[0]
        if next_s > until_s:
            self.now_s = until_s
            return False
        self._near_until_s = next_s + NEAR_S
        self._part(self._far)
        return True

    def _part(self, entries: list[tuple[float, int, Handle]]) -> None:
        """These are all timers."""
        self._timers[:] = [entry for entry in entries if entry[0] < self._near_until_s]
        heapq.heapify(self._timers)
        self._far = [entry for entry in entries if entry[0] >= self._near_until_s]

    def forget_timers(self, loop: ProcessLoop) -> None:
        """A process has ended: its timers never fire."""
        for _, _, handle in (*self._timers, *self._far):
            if handle.loop is loop:
                handle.off = True

    def shift_timers(self, loop: ProcessLoop, by_s: float) -> None:
        """The process's clock has jumped ahead: its timers come so much sooner."""
        entries = [
            (max(self.now_s, at_s - by_s), sequence, handle) if handle.loop is loop else (at_s, sequence, handle)
            for at_s, sequence, handle in (*self._timers, *self._far)
        ]
        for at_s, _, handle in entries:
            handle.at_s = at_s
        self._part(entries)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process start, as asyncio and the product see it."""

    def __init__(self, world: World, name: str, rng: Random, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.mark = zlib.crc32(name.encode())
        """Stands for the name where it has to be short."""
        self.rng = rng
        self.state = ProcessState.RUNNING
        self.stops = 0
        """How often it has been stopped so far."""
        self.slowness = 1.0
        """How many times longer its engine takes."""
        self.sink: Any = None
        """The process that this is the loop of (`cluster.Process`)."""
        self._rate = rate
        self._offset_s = offset_s
        self._parked: list[Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        """In order of their start; those that have ended are swept out when there are many."""
        self._tasks_kept = TASKS_KEPT_MIN
        self._make_ready = world.make_ready

    # What the world does to a process.

    def halt(self) -> None:
        if self.state is ProcessState.RUNNING:
            self.state = ProcessState.STOPPED
            self.stops += 1

    def go_on(self) -> None:
        if self.state is ProcessState.STOPPED:
            self.state = ProcessState.RUNNING
            parked, self._parked = self._parked, []
            for handle in parked:
                self._make_ready(handle)

    def park(self, handle: Handle) -> None:
        """Came due while the process is not running."""
        if self.state is ProcessState.STOPPED:
            self._parked.append(handle)

    def kill(self) -> None:
        """Nothing of this process runs from now on. Its coroutines are unwound here and now, which nobody sees: left to
        the garbage collector they would be unwound at moments that no seed decides."""
        self.state = ProcessState.DEAD
        self._parked.clear()
        self.world.forget_timers(self)
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            tasks, self._tasks = [task for task in self._tasks if not task.done()], []
            for task in tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                _unwind(task.get_coro())
        finally:
            events._set_running_loop(before)

    def jump(self, by_s: float) -> None:
        """The clock of this process leaps ahead."""
        self._offset_s += by_s
        self.world.shift_timers(self, by_s / self._rate)

    # What asyncio asks.

    def local_s(self, at_s: float) -> float:
        return self._offset_s + at_s * self._rate

    def time(self) -> float:
        return self._offset_s + self.world.now_s * self._rate

    def call_soon(self, callback: Callable[..., object], *args: Any, context: object = None) -> Handle:  # type: ignore[override]
        handle = Handle(self, callback, args)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        world = self.world
        handle = Handle(self, callback, args)
        if self.state is ProcessState.DEAD:
            handle.off = True
            return handle
        return world.schedule(world.now_s + delay / self._rate if delay > 0 else world.now_s, handle)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        return self.call_later(when - self.time(), callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: object = None
    ) -> asyncio.Task[Any]:
        if self.state is ProcessState.DEAD:
            coro.close()
            return _never(self)
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name or "task")
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_kept:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks_kept = TASKS_KEPT_MIN + 2 * len(self._tasks)
        return task

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run inline. A function that returns a generator is a computation that takes time: it yields seconds."""
        future = self.create_future()
        try:
            result = func(*args)
        except Exception as error:  # noqa: BLE001  # it is passed on
            future.set_exception(error)
            return future
        if isinstance(result, GeneratorType):
            self._compute(future, result)
        else:
            future.set_result(result)
        return future

    def _compute(self, future: asyncio.Future[Any], computation: Generator[float, None, Any]) -> None:
        try:
            delay_s = next(computation)
        except StopIteration as end:
            future.set_result(end.value)
            return
        except Exception as error:  # noqa: BLE001  # it is passed on
            future.set_exception(error)
            return
        self.call_later(delay_s * self.slowness, self._compute, future, computation)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if self.state is not ProcessState.DEAD:
            self.world.failures.append(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")

    get_debug = bool  # asked for each future: False, without a call of Python

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False


def _unwind(coroutine: Any) -> None:
    """Throw a cancellation in, again at every `await` of a `finally`, until it has ended."""
    for _ in range(UNWIND_THROWS_MAX):
        try:
            coroutine.throw(asyncio.CancelledError())
        except BaseException:  # its end, whatever a dead process has to say  # noqa: BLE001
            return


def _never(loop: ProcessLoop) -> asyncio.Task[Any]:
    """A task of a dead process: it is never run."""

    async def nothing() -> None:
        """Not begun."""

    coroutine = nothing()
    task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine.close()
    return task
