"""The loop around an engine: schedule and postprocess on the control thread, the runner on the engine thread.

Where the engine overlaps steps, the next step is scheduled and launched before the one in flight is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, Protocol

from baton.clock import first_of
from baton.errors import BatonError, Reason
from baton.log import get_log
from engine.core import Engine, TokenEvent
from engine.types import Batch, FinishReason, KvSink, NullSink

log = get_log("engine")

COLLECT_SHARE_MIN: Final = 0.5
"""Of what a step seems to take: a launched one that is waited for less may have been done long before."""


class StepHost(Protocol):
    """The node around the engine. Called on the control thread."""

    def step_begins(self, batch: Batch) -> KvSink:
        """About to run: the sink is called after each layer, on the engine thread. The step before may still run."""
        ...

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        """The step is over (or failed: then its sequences are ABORTED). Also called for events outside of a step.

        `is_timed`: the time since its beginning, or since the end of the step before if that came later, is what it
        took: it did not fail, and was not done long before it was collected."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    batch: Batch
    sink: KvSink
    began_s: float
    launched: asyncio.Future[Any] | None
    """Done: what `OverlapRunner.collect` takes, or why the launch failed. None: the step is to be run."""


class _EngineThread:
    """Runs calls one after another. As an executor of one thread, whose futures, locks and callbacks cost a step of few
    sequences as much as the step's own books. Who has it waits for each call before the next: one is there at most.

    A daemon, as a process that ends without `stop` is not to wait for a call for ever."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._stopped = False
        self._thread.start()

    def run(self, call: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        assert not self._stopped
        future: asyncio.Future[Any] = self._loop.create_future()
        self._calls.put((future, call, arguments))
        return future

    def stop(self) -> None:
        """After the calls that are there, for which it waits."""
        self._stopped = True
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call, arguments = item
            result: object = None
            error: BaseException | None = None
            try:
                result = call(*arguments)
            except StopIteration as raised:  # no future takes that one
                error = RuntimeError("a call for the engine's thread raised StopIteration")
                error.__cause__ = raised
            except BaseException as raised:  # noqa: BLE001 - who waits for the call gets it
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(_settle, future, result, error)
            del item, future, call, arguments, result, error  # nothing of a step is kept while there is none


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():  # nobody waits for it any more
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class EngineLoop:
    """Steps the engine while there is work. Owns the engine thread."""

    def __init__(self, engine: Engine, host: StepHost, *, name: str) -> None:
        """`engine.changed` wakes it from now on."""
        engine.changed = self._wake
        self._engine = engine
        self._host = host
        self._work = asyncio.Event()
        self._stopping = False
        self._thread = _EngineThread(name)
        self._loop = asyncio.get_running_loop()
        self._ended_s = 0.0
        """When the last step ended."""
        self.steps_failed = 0

    def _now_s(self) -> float:
        return self._loop.time()

    def _wake(self) -> None:
        self._work.set()

    async def run(self) -> None:
        """Until `stop`, which waits for the steps in flight: their blocks are in use. Not to be cancelled."""
        step: _Step | None = None
        while step is not None or not self._stopping:
            self._report_ends()
            if step is None:
                step = await self._begin(self._engine.schedule())
            if step is None:
                self._work.clear()
                await self._work.wait()
                continue
            behind = None
            if step.launched is not None and step.launched.exception() is None and not self._stopping:
                behind = await self._begin(self._engine.schedule_overlapped())
            await self._end(step)
            step = behind

    def _report_ends(self) -> None:
        """What ended without a step. A function of its own, so that nothing of it is kept while there is no work."""
        events = self._engine.take_events()
        if events:
            self._host.step_ended(NullSink(), events, is_timed=False)

    async def _begin(self, batch: Batch | None) -> _Step | None:
        if batch is None:
            return None
        sink = self._host.step_begins(batch)
        began_s, launched, runner = self._now_s(), None, self._engine.overlap
        if runner is not None:
            launched = self._thread.run(runner.launch, batch, sink)
            # Until it has returned it reads tokens and block tables, which scheduling the next step changes.
            await asyncio.wait([launched])
        return _Step(batch, sink, began_s, launched)

    async def _end(self, step: _Step) -> None:
        batch, waits_s, is_timed = step.batch, self._now_s(), False
        try:
            runner = self._engine.overlap
            if runner is None or step.launched is None:
                result = await self._thread.run(self._engine.run, batch, step.sink)
            else:
                result = await self._thread.run(runner.collect, step.launched.result())
        except Exception:
            # Whatever a kernel raises costs the step's requests, not the node.
            log.exception("step failed", sequences=len(batch.slices), tokens=batch.num_tokens)
            self.steps_failed += 1
            events = self._engine.fail_step(batch)
        else:
            now_s = self._now_s()
            took_s = now_s - max(step.began_s, self._ended_s)
            is_timed = step.launched is None or now_s - waits_s > COLLECT_SHARE_MIN * took_s
            events = self._engine.postprocess(batch, result)
            for event in events:
                if event.finish is FinishReason.NOT_FINITE:
                    log.error("no token can be drawn: the scores are not numbers", request=event.seq.key.request)
        self._ended_s = self._now_s()
        self._host.step_ended(step.sink, events, is_timed=is_timed)

    async def stop(self, task: asyncio.Task[None]) -> None:
        """End the loop after the steps in flight, and its thread."""
        self._stopping = True
        self._wake()
        await asyncio.wait([task])
        self._thread.stop()


async def done_or_broken(serving: Coroutine[Any, Any, None], stepping: asyncio.Task[None]) -> None:
    """Return when `serving` does. Raises what ended the engine loop, which ends by itself only for a bug of ours."""
    await first_of(serving, asyncio.wait([stepping]))
    if stepping.done():
        log.error("the engine loop has ended; this node cannot go on", exc_info=stepping.exception())
        raise BatonError(Reason.INTERNAL, "The engine loop failed; the log says why.") from stepping.exception()
