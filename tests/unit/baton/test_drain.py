"""The orders to one node, and when it may say that it is empty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from baton.clock import Clock
from baton.drain import PROOF_MS, Holdings, NodeDrain, node_draining, refused_by
from baton.errors import BatonError, Reason
from baton.ids import Incarnation
from baton.lifecycle import Lifecycle, LifecycleEvent, NodeLifecycle
from tests.support.still_clock import StillClock

WAIT_S_MAX = 30.0
LONG_MS = 600_000


class Node:
    """A node that is READY, whose holdings the test sets."""

    def __init__(self, holds: Holdings, *, lame_duck_ms: int = 0, clock: Clock | None = None) -> None:
        self.holds = holds
        self.lifecycle = NodeLifecycle(now_s=0.0)
        self.lifecycle.handle(LifecycleEvent.STARTED, now_s=0.0)
        self.changes: list[Lifecycle] = []
        self.changed, self.drained = asyncio.Event(), asyncio.Event()
        self.drain = NodeDrain(
            self.lifecycle,
            clock=clock or Clock(),
            holds=lambda: self.holds,
            changed=self._changed,
            lame_duck_ms=lame_duck_ms,
        )

    def _changed(self) -> None:
        self.changes.append(self.lifecycle.state)
        self.changed.set()
        if self.lifecycle.state is Lifecycle.DRAINED:
            self.drained.set()


def play(holds: Holdings, scene: Callable[[Node], Coroutine[Any, Any, None]], **of_node: Any) -> None:
    async def limited() -> None:
        node = Node(holds, **of_node)
        async with asyncio.timeout(WAIT_S_MAX):
            try:
                await scene(node)
            finally:
                await node.drain.close()

    asyncio.run(limited())


def test_an_idle_node_is_drained_at_once() -> None:
    """The proof comes with the order; what is quarantined ends with the process and does not count."""

    async def scene(node: Node) -> None:
        node.drain.order(LifecycleEvent.DRAIN, "operator")
        assert node.changes == [Lifecycle.DRAINING, Lifecycle.DRAINED]
        assert node.drain.safe_to_delete
        assert "(operator), DRAINED" in node.lifecycle.story()

    play(Holdings(grants_received=2, grants_quarantined=2), scene)


def test_a_proof_that_no_longer_holds_is_none() -> None:
    """A call that was on its way when the proof was given: DRAINED, but not safe to delete until it has ended."""

    async def scene(node: Node) -> None:
        node.drain.order(LifecycleEvent.DRAIN, "")
        node.holds = Holdings(requests=1)
        assert (node.lifecycle.state, node.drain.safe_to_delete) == (Lifecycle.DRAINED, False)
        node.holds = Holdings()
        assert node.drain.safe_to_delete

    play(Holdings(), scene)


@pytest.mark.parametrize(
    "what", ["requests", "answers_unacknowledged", "grants_received", "grants_written", "unacknowledged_writes"]
)
def test_anything_that_is_left_holds_the_proof_back(what: str) -> None:
    """Each of the five alone: DRAINING until it is gone, then DRAINED without another order."""

    async def scene(node: Node) -> None:
        node.drain.order(LifecycleEvent.DRAIN, "")
        node.drain.order(LifecycleEvent.DRAIN, "again")
        assert node.changes == [Lifecycle.DRAINING]
        assert node.holds.left() == {what: 1}
        assert not node.drain.safe_to_delete
        node.holds = Holdings()
        await node.drained.wait()
        assert node.drain.safe_to_delete

    play(Holdings(**{what: 1}), scene)


def test_a_drain_is_taken_back_and_begun_again() -> None:
    """Undrain while something is left: becoming empty then means nothing. The second drain is proved as the first."""

    async def scene(node: Node) -> None:
        node.drain.order(LifecycleEvent.DRAIN, "")
        node.drain.order(LifecycleEvent.UNDRAIN, "")
        node.holds = Holdings()
        assert node.lifecycle.takes_requests and not node.drain.safe_to_delete
        node.holds = Holdings(requests=1)
        node.drain.order(LifecycleEvent.DRAIN, "")
        node.holds = Holdings()
        await node.drained.wait()
        node.drain.order(LifecycleEvent.UNDRAIN, "")
        expected = [Lifecycle.DRAINING, Lifecycle.READY, Lifecycle.DRAINING, Lifecycle.DRAINED, Lifecycle.READY]
        assert node.changes == expected

    play(Holdings(requests=1), scene)


def test_a_process_that_ends_finishes_first() -> None:
    """Told to end with a request left: it waits for it, and there is no way back any more."""

    async def scene(node: Node) -> None:
        stop, drain = asyncio.Event(), asyncio.Event()
        drain.set()
        serving = asyncio.create_task(node.drain.serve_until(stop, drain, drain_ms_max=LONG_MS))
        await node.changed.wait()
        with pytest.raises(BatonError, match="the process is stopping") as caught:
            node.drain.order(LifecycleEvent.UNDRAIN, "")
        assert caught.value.reason is Reason.BAD_LIFECYCLE
        assert not serving.done()
        node.holds = Holdings()
        await serving
        assert node.lifecycle.state is Lifecycle.DRAINED

    play(Holdings(requests=1), scene)


def test_a_lame_duck_drains_when_its_time_is_over() -> None:
    """A second order does not make it longer, and being empty does not make it shorter. Then it is a drain as any."""
    clock = StillClock()

    async def scene(node: Node) -> None:
        node.drain.order(LifecycleEvent.DRAIN, "")
        clock.now_s += 0.4
        node.drain.order(LifecycleEvent.DRAIN, "again")
        assert (node.changes, node.lifecycle.takes_requests) == ([Lifecycle.LAME_DUCK], True)
        await node.drained.wait()
        assert node.changes == [Lifecycle.LAME_DUCK, Lifecycle.DRAINING, Lifecycle.DRAINED]
        assert 0.6 <= round(sum(clock.slept), 3) < 0.6 + 2 * PROOF_MS / 1e3

    play(Holdings(), scene, lame_duck_ms=1_000, clock=clock)


def test_a_lame_duck_that_is_to_stay() -> None:
    """Undrained in its time, and drained again: its time begins anew. A cordoned node has none: it takes nothing."""
    clock = StillClock()

    async def scene(node: Node) -> None:
        node.drain.order(LifecycleEvent.DRAIN, "")
        clock.now_s += 0.9
        node.drain.order(LifecycleEvent.UNDRAIN, "")
        clock.now_s += 1.0
        assert node.lifecycle.ready
        before_s = clock.now_s
        node.drain.order(LifecycleEvent.DRAIN, "")
        await node.drained.wait()
        assert 1.0 <= round(clock.now_s - before_s, 3) < 1.0 + 2 * PROOF_MS / 1e3
        for event in (LifecycleEvent.UNDRAIN, LifecycleEvent.CORDON, LifecycleEvent.DRAIN):
            node.drain.order(event, "")
        assert node.changes[-3:] == [Lifecycle.CORDONED, Lifecycle.DRAINING, Lifecycle.DRAINED]

    play(Holdings(), scene, lame_duck_ms=1_000, clock=clock)


def test_the_limit_of_a_drain_begins_behind_the_lame_duck() -> None:
    """One second of each, and a request that does not end: given up after two."""

    class Shared(StillClock):
        async def sleep_s(self, delay_s: float) -> None:
            await super().sleep_s(delay_s)
            await asyncio.sleep(0)

    clock = Shared()

    async def scene(node: Node) -> None:
        drain = asyncio.Event()
        drain.set()
        await node.drain.serve_until(asyncio.Event(), drain, drain_ms_max=1_000)
        assert 2.0 in clock.slept

    play(Holdings(requests=1), scene, lame_duck_ms=1_000, clock=clock)


@pytest.mark.parametrize("how", ["limit", "stop", "stop at once"])
def test_a_drain_at_the_end_is_bounded(how: str) -> None:
    """The limit is over, or a second signal says now: it returns with the request still there, for its owner to end."""

    async def scene(node: Node) -> None:
        stop, drain = asyncio.Event(), asyncio.Event()
        (stop if how == "stop at once" else drain).set()
        limit_ms = 1 if how == "limit" else LONG_MS
        serving = asyncio.create_task(node.drain.serve_until(stop, drain, drain_ms_max=limit_ms))
        if how == "stop":
            await node.changed.wait()
            stop.set()
        await serving
        assert node.changes == ([] if how == "stop at once" else [Lifecycle.DRAINING])

    play(Holdings(requests=1), scene)


def test_who_refused() -> None:
    """A prefill node passes its decode node's refusal on: that one says nothing of the prefill node."""
    error = node_draining(Incarnation(7))
    assert refused_by(error, Incarnation(7))
    assert not refused_by(error, Incarnation(8))
    assert not refused_by(BatonError(Reason.QUEUE_FULL, "Full."), Incarnation(7))
