"""The writer's watch over a receiver that takes the call and does not keep it: asked again more and more rarely."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from batonpb import transfer_pb2

from baton.errors import BatonError, Reason
from baton.liveness import LivenessConfig
from kvtransfer.link import LivenessStream, PeerAddress
from tests.support.cluster_harness import wait_for
from tests.support.grant_scripts import PAIR
from tests.support.still_clock import StillClock

HANG_S = 30.0
LIVENESS = LivenessConfig(reconnect_ms_max=700, reconnect_pause_ms=50, failed_stream_ms_max=50, failed_streams_max=6)


class YieldingClock(StillClock):
    """Who sleeps lets others run."""

    async def sleep_s(self, delay_s: float) -> None:
        await super().sleep_s(delay_s)
        await asyncio.sleep(0)


class Receiver:
    """Stands for the stub: takes each call, answers once, and then fails it, or keeps it until `ends` is set, once."""

    def __init__(self) -> None:
        self.reached = True
        self.failing = False
        self.bug: Exception | None = None
        """Raised by the next call."""
        self.ends = asyncio.Event()
        self.calls = 0

    def Liveness(self, _request: transfer_pb2.LivenessRequest) -> Any:
        self.calls += 1
        bug, self.bug = self.bug, None
        if bug is not None:
            raise bug
        return Call(self)


class Call:
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def wait_for_connection(self) -> None:
        if not self._receiver.reached:
            raise BatonError(Reason.PEER_UNREACHABLE, "Nobody is there.")

    async def __aiter__(self) -> AsyncIterator[transfer_pb2.LivenessReply]:
        yield transfer_pb2.LivenessReply()
        if self._receiver.failing:
            raise BatonError(Reason.INTERNAL, "A bug in the decode node.")
        await self._receiver.ends.wait()
        self._receiver.ends.clear()


class Scene:
    def __init__(self, endpoint: str) -> None:
        self.receiver, self.clock, self.lost = Receiver(), YieldingClock(), 0
        self.fails = False
        self.stream = LivenessStream(
            address=PeerAddress(name="decode-0", endpoint=endpoint, pair=PAIR),
            stub=self.receiver,  # type: ignore[arg-type]
            lost=self._lost,
            gone=lambda: None,
            liveness=LIVENESS,
            clock=self.clock,
        )

    def _lost(self) -> None:
        self.lost += 1
        if self.fails:
            raise ValueError("handoffs")


def play(scene: Callable[[Scene], Any]) -> None:
    """Somebody listens at the receiver's address, so that no try is refused."""

    async def limited() -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=1_000) as listener:
            one = Scene(f"127.0.0.1:{listener.getsockname()[1]}")
            async with asyncio.timeout(HANG_S):
                try:
                    await scene(one)
                finally:
                    await one.stream.close()

    asyncio.run(limited())


async def until(holds: Callable[[], bool]) -> None:
    async def now() -> bool:
        return holds()

    await wait_for(now, "the writer to do so")


def test_a_receiver_that_answers_once_and_fails_is_left_alone_for_longer_and_longer() -> None:
    """Six such calls, with pauses that grow, and it is lost, once: nothing is placed there. The pauses grow on, up to
    their limit. Then it keeps a call: it is trusted when that has stayed, and its next failure is like a first one."""

    async def scene(one: Scene) -> None:
        one.receiver.failing = True
        await until(lambda: len(one.clock.slept) >= 12)
        assert one.clock.slept[:5] == [0.05, 0.05, 0.1, 0.2, 0.4]
        assert one.clock.slept[5:12] == [1, 2, 4, 5, 5, 5, 5]
        assert (one.lost, one.stream.out_of_reach) == (1, True)
        one.receiver.failing = False
        await until(lambda: not one.stream.out_of_reach)
        calls, pauses = one.receiver.calls, len(one.clock.slept)
        one.receiver.ends.set()
        await until(lambda: one.receiver.calls > calls)
        assert (one.clock.slept[pauses], one.lost) == (0.05, 1)

    play(scene)


def test_a_receiver_that_was_away_is_trusted_at_once() -> None:
    """It is not reached for its time, and lost. Nothing is held against it: the next call that it takes is enough."""

    async def scene(one: Scene) -> None:
        one.receiver.reached = False
        await until(lambda: one.stream.out_of_reach)
        assert (one.lost, max(one.clock.slept) <= 0.7) == (1, True)
        calls = one.receiver.calls
        one.receiver.reached = True
        await until(lambda: not one.stream.out_of_reach)
        assert one.receiver.calls == calls + 1

    play(scene)


def test_a_bug_while_watching_is_logged_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A call raises what nobody expects: that is logged with its traceback, the receiver counts as lost, once, and the
    next call reaches it again."""

    async def scene(one: Scene) -> None:
        await until(lambda: one.receiver.calls == 1)
        one.receiver.bug = ValueError("no such field")
        one.receiver.ends.set()
        await until(lambda: one.lost == 1)
        await until(lambda: not one.stream.out_of_reach)
        assert (one.lost, one.receiver.calls) == (1, 3)

    with caplog.at_level(logging.INFO, logger="baton.writer"):
        play(scene)
    assert [record.getMessage() for record in caplog.records] == [
        "watching a receiver failed", "receiver lost", "receiver reached again",
    ]  # fmt: skip
    assert caplog.records[0].exc_info is not None and isinstance(caplog.records[0].exc_info[1], ValueError)


def test_a_handler_of_a_loss_that_fails_is_logged_and_the_watch_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Giving the handoffs up raises: that is logged, and the receiver is reached again all the same."""

    async def scene(one: Scene) -> None:
        await until(lambda: one.receiver.calls == 1)
        one.fails = True
        one.receiver.reached = False
        one.receiver.ends.set()
        await until(lambda: one.stream.out_of_reach)
        one.receiver.reached = True
        await until(lambda: not one.stream.out_of_reach)

    play(scene)
    raised = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert list(map(repr, raised)) == ["ValueError('handoffs')"]
