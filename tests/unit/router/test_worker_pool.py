"""A parent with real worker processes, and no cluster behind them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.lifecycle import LifecycleEvent, NodeLifecycle
from router import worker_pool as module
from router.config import RouterConfig
from router.doors import Door, Doors
from router.metrics import OUTPUT_TOKENS, Figures
from router.supervision import SILENT_S, START_S_MAX, Supervision
from router.worker_pool import WorkerPool, WorkerProcess

SCENE_S_MAX = 100


class Scene:
    def __init__(self) -> None:
        config = RouterConfig(workers=2, http_listen="127.0.0.1:0", stop_grace_ms=100)
        clock = Clock()
        self.lifecycle = NodeLifecycle(now_s=clock.monotonic_s())
        self.doors = Doors(config)
        self.pool = WorkerPool(
            config,
            folder=None,
            doors=self.doors,
            lifecycle=self.lifecycle,
            clock=clock,
            keys=None,
            check_known=lambda: None,
            directory_trouble=str,
        )
        self.port = 0

    async def open(self) -> None:
        await self.pool.start()
        self.port = self.doors.open(Door.HTTP, "127.0.0.1:0", setting="http_listen")
        self.lifecycle.handle(LifecycleEvent.STARTED, now_s=0.0)
        self.pool.follow_lifecycle()

    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.pool._workers.values()]

    async def live(self) -> bytes:
        """The first line of an answer, over a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return await reader.readline()
        finally:
            writer.close()


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(SCENE_S_MAX * 1000):
        if is_so():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never was so")


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def limited() -> None:
        made = Scene()
        try:
            async with asyncio.timeout(SCENE_S_MAX):
                await made.open()
                await scene(made)
        finally:
            made.doors.close()
            await made.pool.stop()
        assert made.pids() == []

    asyncio.run(limited())


@pytest.mark.slow
def test_a_connection_that_a_dead_worker_had_not_taken_is_served_by_another() -> None:
    """One of two workers stands still while eight clients come, and is killed. All have their answer."""

    async def scene(made: Scene) -> None:
        assert await made.live() == b"HTTP/1.1 200 OK\r\n"
        victim = made.pids()[0]
        os.kill(victim, signal.SIGSTOP)
        calls = [asyncio.create_task(made.live()) for _ in range(8)]
        (stopped,) = [worker for worker in made.pool._workers.values() if worker.process.pid == victim]
        await until(lambda: bool(stopped.untaken))
        os.kill(victim, signal.SIGKILL)
        assert await asyncio.gather(*calls) == [b"HTTP/1.1 200 OK\r\n"] * 8
        assert made.pool.ended == 1

    play(scene)


def test_holdings_count_a_worker_until_it_has_heard_of_the_last_order() -> None:
    """A drain is proven only by reports of workers that know of it: one may have begun a request just before."""

    async def scene(made: Scene) -> None:
        await until(lambda: not made.pool.requests)
        made.lifecycle.handle(LifecycleEvent.DRAIN, now_s=0.0)
        made.pool.follow_lifecycle()
        assert made.pool.requests == 2
        await until(lambda: not made.pool.requests)

    play(scene)


@pytest.mark.slow
def test_a_stop_while_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has been killed, and another one comes in its place. It is not waited for."""
    monkeypatch.setattr(module, "STOP_MARGIN_S", 10 * SCENE_S_MAX)

    async def scene(made: Scene) -> None:
        victim = made.pids()[0]
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len(made.pids()) == 2 and victim not in made.pids())
        assert made.pool.ready == 1
        await made.pool.stop()
        assert made.pids() == []

    play(scene)


def test_a_process_that_is_there_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system takes more than a minute to make the processes. The router's start fails, and they are ended."""

    async def scene() -> None:
        made, there, begun = Scene(), asyncio.Event(), list[int]()
        spawn, now_s = made.pool._spawn, 0.0

        async def late(number: int) -> WorkerProcess:
            begun.append(number)
            await there.wait()
            return await spawn(number)

        monkeypatch.setattr(made.pool, "_spawn", late)
        monkeypatch.setattr(made.pool, "_supervision", Supervision(2, now_s=now_s))
        monkeypatch.setattr(made.pool._clock, "monotonic_s", lambda: now_s)
        while now_s < START_S_MAX:
            made.pool._tick()
            now_s += SILENT_S / 2
            await asyncio.sleep(0)
        made.pool._tick()
        assert begun == [0, 1]
        there.set()
        await until(lambda: made.pool.ended >= 2)
        with pytest.raises(BatonError, match="ended before it was ready"):
            await made.pool._all_ready
        await made.pool.stop()
        assert made.pids() == []
        made.doors.close()

    asyncio.run(scene())


def test_figures_of_a_worker_that_ends_while_they_are_added_up() -> None:
    """What was fetched has it as a worker that runs, and not as one that has ended too."""

    async def scene() -> None:
        made = Scene()
        dead = made.pool.dead_figures = Figures()
        dead.add(OUTPUT_TOKENS, by=5)
        (fetched,) = await made.pool.fetch_figures()
        dead.add(OUTPUT_TOKENS, by=2)
        assert fetched[OUTPUT_TOKENS.name] == {(): [5.0]}
        made.doors.close()

    asyncio.run(scene())


def test_workers_without_a_c_compiler_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, and nothing is left running."""
    monkeypatch.setattr(module, "native_front", lambda: None)

    async def scene() -> None:
        made = Scene()
        with pytest.raises(BatonError, match=r"C compiler \(cc\): install one, or set workers to 1") as raised:
            await made.pool.start()
        assert (raised.value.reason, raised.value.field) == (Reason.BAD_CONFIG, "workers")
        await made.pool.stop()
        made.doors.close()

    asyncio.run(scene())
