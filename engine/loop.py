"""The loop around an engine: schedule and postprocess on the control thread, run on the engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from baton.errors import BatonError, Reason
from baton.log import get_log
from engine.core import Engine, TokenEvent
from engine.types import Batch, KvSink

log = get_log("engine")


class StepHost(Protocol):
    """The node around the engine. Called on the control thread."""

    def step_begins(self, batch: Batch) -> KvSink:
        """About to run: the sink is told of each layer, on the engine thread."""
        ...

    def step_ended(self, sink: KvSink, events: list[TokenEvent]) -> None:
        """The step is over (or failed: then its sequences are ABORTED). Also called for events outside of a step."""
        ...


class EngineLoop:
    """Steps the engine while there is work. Owns the engine thread."""

    def __init__(self, engine: Engine, host: StepHost, *, name: str) -> None:
        self._engine = engine
        self._host = host
        self._work = asyncio.Event()
        self._stopping = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"engine-{name}")
        self.steps_failed = 0

    def wake(self) -> None:
        """There may be something to do: after submit, resume or abort."""
        self._work.set()

    async def run(self) -> None:
        """Until `stop`, which waits for the step in flight: its blocks are in use. Not to be cancelled."""
        while not self._stopping:
            if not await self._step():
                self._work.clear()
                await self._work.wait()

    async def _step(self) -> bool:
        """One step, to its end; False: there is nothing to compute. Keeps nothing of it."""
        events = self._engine.take_events()
        if events:
            self._host.step_ended(_NO_SINK, events)
        batch = self._engine.schedule()
        if batch is None:
            return False
        sink = self._host.step_begins(batch)
        try:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._thread, self._engine.run, batch, sink)
        except Exception:
            # Whatever a kernel raises costs the step's requests, not the node.
            log.exception("step failed", sequences=len(batch.slices), tokens=batch.num_tokens)
            self.steps_failed += 1
            events = self._engine.fail_step(batch)
        else:
            events = self._engine.postprocess(batch, result)
        self._host.step_ended(sink, events)
        return True

    async def stop(self, task: asyncio.Task[None]) -> None:
        """End the loop after the step in flight, and its thread."""
        self._stopping = True
        self.wake()
        await asyncio.wait([task])
        self._thread.shutdown(wait=True)


async def done_or_broken(serving: Coroutine[Any, Any, None], stepping: asyncio.Task[None]) -> None:
    """Return when `serving` does. Raises what ended the engine loop, which ends by itself only for a bug of ours."""
    task = asyncio.ensure_future(serving)
    try:
        await asyncio.wait([task, stepping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = task.done()
        task.cancel()
        await asyncio.wait([task])
    if ended:
        await task
    if stepping.done():
        log.error("the engine loop has ended; this node cannot go on", exc_info=stepping.exception())
        raise BatonError(Reason.INTERNAL, "The engine loop broke off; the log says why.") from stepping.exception()


class _NoSink:
    def layer_done(self, layer: int) -> None:
        raise AssertionError(layer)


_NO_SINK = _NoSink()
