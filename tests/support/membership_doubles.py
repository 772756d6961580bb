"""A directory that does as a test says, clocks that a test moves, and a membership over them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from baton.clock import Clock
from baton.directory_client import Snapshot
from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.membership import Membership, MembershipConfig
from baton.wire import NodeRecord, Role

_T = TypeVar("_T")

HANG_S = 20.0


class ManualClock(Clock):
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []
        self._slept = asyncio.Event()

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    async def sleep_s(self, delay_s: float) -> None:
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now_s + delay_s, waker))
        self._slept.set()
        await waker

    def advance(self, delay_s: float) -> None:
        self._now_s += delay_s
        for due_s, waker in self._sleepers:
            if due_s <= self._now_s and not waker.done():
                waker.set_result(None)
        self._sleepers = [(due_s, waker) for due_s, waker in self._sleepers if not waker.done()]

    async def asleep(self, count: int) -> None:
        """Return when `count` tasks sleep."""
        while len([waker for _, waker in self._sleepers if not waker.done()]) < count:
            self._slept.clear()
            await self._slept.wait()


class HastyClock(ManualClock):
    """Every sleep is over at once, and has taken its time."""

    async def sleep_s(self, delay_s: float) -> None:
        self._now_s += delay_s
        await asyncio.sleep(0)


class ScriptedDirectory:
    """A directory that does as the test says: `refuse` answers pushes, `show` and `lose` speak to the watcher."""

    def __init__(self) -> None:
        self.pushes: asyncio.Queue[NodeRecord] = asyncio.Queue()
        self.removals: list[tuple[str, int]] = []
        self.refuse: Callable[[NodeRecord], BatonError | None] = lambda record: None
        self._events: asyncio.Queue[Snapshot | BatonError] = asyncio.Queue()

    def show(self, *records: NodeRecord, left: frozenset[NodeName] = frozenset()) -> None:
        self._events.put_nowait(Snapshot(records=records, left=left))

    def lose(self) -> None:
        self._events.put_nowait(lost())

    async def push(self, record: NodeRecord, *, ttl_ms: int) -> None:
        error = self.refuse(record)
        if error is not None:
            raise error
        self.pushes.put_nowait(record)

    async def remove(self, name: NodeName, incarnation: Incarnation) -> bool:
        self.removals.append((name, incarnation))
        return True

    async def list(self) -> Snapshot:
        raise AssertionError("not used by a membership")

    async def watch(self) -> AsyncGenerator[Snapshot, None]:
        while True:
            event = await self._events.get()
            if isinstance(event, BatonError):
                raise event
            yield event

    async def close(self) -> None:
        raise AssertionError("a membership does not own its directory")


def lost() -> BatonError:
    return BatonError(Reason.PEER_UNREACHABLE, "directory at h:1: connection refused")


def record(name: str, *, role: Role = Role.DECODE, lifecycle: Lifecycle = Lifecycle.READY) -> NodeRecord:
    number = sum(name.encode())
    return NodeRecord(
        name=NodeName(name),
        role=role,
        incarnation=Incarnation(number),
        endpoint=f"127.0.0.1:{number}",
        lifecycle=lifecycle,
    )


class WatchedMembership(Membership):
    """A membership whose changes a test can wait for."""

    def __init__(self, *, on_change: Callable[[], None] | None = None, **given: Any) -> None:
        self._news = asyncio.Event()

        def changed() -> None:
            news, self._news = self._news, asyncio.Event()
            news.set()
            if on_change is not None:
                on_change()

        super().__init__(on_change=changed, **given)

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Return once `holds()` is true, asked again after every change. The caller sets the time limit."""
        while not holds():
            await self._news.wait()


def make(
    directory: ScriptedDirectory,
    clock: ManualClock,
    *,
    own: NodeRecord | None = None,
    on_change: Callable[[], None] | None = None,
    last_known: tuple[NodeRecord, ...] = (),
    **config: int,
) -> WatchedMembership:
    return WatchedMembership(
        directory=directory,
        own_record=None if own is None else lambda: own,
        clock=clock,
        rng=random.Random(1),
        config=MembershipConfig(**config),
        on_change=on_change,
        last_known=lambda: last_known,
    )


def run(scene: Awaitable[_T]) -> _T:
    async def limited() -> _T:
        async with asyncio.timeout(HANG_S):
            return await scene

    return asyncio.run(limited())


def known(membership: Membership) -> list[str]:
    return [each.name for each in membership.nodes()]
