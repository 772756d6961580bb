"""The engine's loop with a runner that overlaps: who is called when, and what a failure or a stop leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from engine.core import TokenEvent
from engine.types import Batch, FinishReason, KvSink, StepResult
from node.engine_loop import EngineLoop
from tests.support.engine_bench import SMALL, key_of, params_of
from tests.support.late_runner import LateStep, OverlapNode
from tests.support.mock_reference import mock_reference

WAIT_S = 20


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0


class Layers:
    def __init__(self) -> None:
        self.done = 0

    def layer_done(self, layer: int) -> None:
        assert layer == self.done
        self.done += 1


class Host:
    """Keeps what it is told of; `over` is set when as many sequences as expected have ended."""

    def __init__(self, node: OverlapNode, expected: int) -> None:
        self.node = node
        self.over = asyncio.Event()
        self.stepped = asyncio.Event()
        self.begun: list[Layers] = []
        self.ended: list[object] = []
        self.timed: list[bool] = []
        self._left = expected

    def step_begins(self, batch: Batch) -> KvSink:
        self.begun.append(Layers())
        return self.begun[-1]

    def step_ended(self, sink: KvSink, events: list[TokenEvent], *, is_timed: bool) -> None:
        self.ended.append(sink)
        self.timed.append(is_timed)
        self.node.events += events
        self.node.ledger.check()
        self._left -= sum(event.finish is not None for event in events)
        self.stepped.set()
        if self._left <= 0:
            self.over.set()


def play(node: OverlapNode, expected: int, wait_for: Callable[[Host], asyncio.Event]) -> Host:
    """Run the loop until the event, then stop it."""

    async def scenario() -> Host:
        host = Host(node, expected)
        loop = EngineLoop(node.engine, host, name="overlap")
        stepping = asyncio.create_task(loop.run())
        try:
            async with asyncio.timeout(WAIT_S):
                await wait_for(host).wait()
        finally:
            await loop.stop(stepping)
        await stepping
        assert node.late.in_flight == 0
        assert host.ended == host.begun
        return host

    node.late.is_held = node.ledger.is_held
    return asyncio.run(scenario())


def reference(prompt: list[int], count: int) -> list[int]:
    return mock_reference(prompt, params_of(), count, config=SMALL)


def test_the_next_step_is_launched_before_the_last_one_is_collected() -> None:
    """Five tokens of one request: at every collect but the last, the step behind is on the device already."""
    node = OverlapNode()
    node.submit("a", [1, 2, 3], params_of(5))
    host = play(node, 1, lambda host: host.over)
    assert node.tokens("a") == reference([1, 2, 3], 5)
    assert node.late.calls == [
        "launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "launch 3", "collect 2", "launch 4", "collect 3",
        "collect 4",
    ]  # fmt: skip
    assert [sink.done for sink in host.begun] == [SMALL.num_layers] * 5
    node.assert_nothing_held()


@pytest.mark.parametrize(("host_s", "device_s", "is_timed"), [(1.0, 0.0, False), (1.0, 3.0, True)])
def test_a_step_that_was_done_before_it_was_waited_for_is_not_timed(
    host_s: float, device_s: float, is_timed: bool
) -> None:
    """Time passes as the host makes a step, and as the device is waited for. Where that is no wait, nobody knows what
    the step took."""
    node, clock = OverlapNode(), Clock()
    begins, collects = Host.step_begins, node.late.collect

    def step_begins(self: Host, batch: Batch) -> KvSink:
        clock.now_s += host_s
        return begins(self, batch)

    def collect(in_flight: Any) -> Any:
        clock.now_s += device_s
        return collects(in_flight)

    node.submit("a", [1, 2, 3], params_of(5))
    with (
        patch.object(EngineLoop, "_now_s", lambda _loop: clock.now_s),
        patch.object(Host, "step_begins", step_begins),
        patch.object(node.late, "collect", collect),
    ):
        host = play(node, 1, lambda host: host.over)
    assert host.timed == [is_timed] * 5


def test_a_stop_waits_for_both_steps() -> None:
    """Stopped after the first step with another one in flight: that one is collected, none is launched behind it. The
    sequence is still in the engine, and goes on from there."""
    node = OverlapNode()
    node.submit("a", [1, 2, 3], params_of(50))
    play(node, 1, lambda host: host.stepped)
    launched = sum(call.startswith("launch") for call in node.late.calls)
    assert sum(call.startswith("collect") for call in node.late.calls) == launched == node.engine.counters.steps
    assert node.engine.scheduler.running == 1
    node.run()
    assert node.tokens("a") == reference([1, 2, 3], 50)
    node.assert_nothing_held()


def test_a_step_that_cannot_be_launched_costs_its_requests() -> None:
    """The step behind is refused by the device: the one in flight is still taken in, then the requests are aborted; no
    step is built on the one that is not there."""
    node = OverlapNode()
    node.late.break_launch = 1
    node.submit("a", [1, 2, 3], params_of(5))
    play(node, 1, lambda host: host.over)
    assert node.late.calls == ["launch 0", "launch 1", "collect 0"]
    assert node.tokens("a") == reference([1, 2, 3], 1)
    assert node.finish("a") == [FinishReason.ABORTED]
    node.submit("b", [4], params_of(3))
    node.run()
    assert node.tokens("b") == reference([4], 3)
    node.assert_nothing_held()


def test_a_step_that_raises_stop_iteration_fails_as_any_other() -> None:
    """No future takes that exception: the loop would wait for ever."""
    node = OverlapNode()
    real_collect = node.late.collect

    def collect(in_flight: LateStep) -> StepResult:
        node.late.collect = real_collect  # type: ignore[method-assign]
        real_collect(in_flight)
        raise StopIteration

    node.late.collect = collect  # type: ignore[method-assign]
    node.submit("a", [1, 2, 3], params_of(5))
    play(node, 1, lambda host: host.over)
    assert node.finish("a") == [FinishReason.ABORTED]
    node.assert_nothing_held()


def test_a_step_that_is_lost_costs_its_requests_when_the_one_behind_is_over() -> None:
    """The second step fails with the third in flight, which is collected before the blocks go."""
    node = OverlapNode()
    node.late.break_collect = 1
    node.submit("a", [1, 2, 3], params_of(9))
    host = play(node, 1, lambda host: host.over)
    assert node.late.calls == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]
    assert node.tokens("a") == reference([1, 2, 3], 1)
    assert node.finish("a") == [FinishReason.ABORTED]
    assert not node.engine.has(key_of("a"))
    assert len(host.begun) == 3 and not host.timed[1]
    node.assert_nothing_held()
