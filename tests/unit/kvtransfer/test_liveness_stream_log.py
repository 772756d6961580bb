"""The writer's end of the call by which a pair watches each other: what is told, and when."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any, Self

import pytest
from batonpb import transfer_pb2

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.liveness import LivenessConfig
from kvtransfer.link import LivenessStream, PeerAddress
from tests.support.grant_scripts import PAIR

HANG_S = 30.0
LIVENESS = LivenessConfig(heartbeat_ms=50, answer_ms_max=200, reconnect_ms_max=300, reconnect_pause_ms=100)


class Call:
    """One Liveness call to a receiver that says something on it, once, and keeps it open until `broken`."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._said = False

    async def wait_for_connection(self) -> None:
        if not self._receiver.passes:
            raise BatonError(Reason.PEER_UNREACHABLE, "Nothing passes.")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> transfer_pb2.LivenessReply:
        if self._said:
            self._receiver.watched.set()
            await self._receiver.broken.wait()
            raise BatonError(Reason.PEER_UNREACHABLE, "It broke.")
        self._said = True
        return transfer_pb2.LivenessReply()


class Receiver:
    """A stub whose calls come through while it `passes`."""

    def __init__(self) -> None:
        self.passes = True
        self.watched = asyncio.Event()
        """The writer has heard from it, and goes on listening."""
        self.broken = asyncio.Event()

    def Liveness(self, _request: object) -> Any:
        return Call(self)

    def cut(self) -> None:
        self.passes = False
        self.watched.clear()
        self.broken.set()

    def heal(self) -> None:
        self.passes = True
        self.broken.clear()


class PausingClock(Clock):
    """Its time is moved by whoever sleeps. The long pause, before one that is lost is tried again, takes a word."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.paused = asyncio.Event()
        self.go_on = asyncio.Event()

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep_s(self, delay_s: float) -> None:
        self.now_s += delay_s
        if delay_s * 1000 >= LIVENESS.reconnect_ms_max:
            self.paused.set()
            await self.go_on.wait()
            self.go_on.clear()

    async def tried(self) -> None:
        """Return when it is tried in vain and the next pause has begun."""
        self.paused.clear()
        self.go_on.set()
        await self.paused.wait()


def test_a_receiver_is_lost_once_and_reached_again_once(caplog: pytest.LogCaptureFixture) -> None:
    """Cut off, tried again in vain, healed, and cut off a second time: the writer is told of each loss once, the log of
    each change; in between it counts as out of reach until it has said something."""

    async def scene() -> None:
        reported: list[str] = []
        clock, receiver = PausingClock(), Receiver()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            stream = LivenessStream(
                address=PeerAddress(name="decode-0", endpoint=f"127.0.0.1:{listener.getsockname()[1]}", pair=PAIR),
                stub=receiver,  # type: ignore[arg-type]
                lost=lambda: reported.append("lost"),
                gone=lambda: reported.append("gone"),
                liveness=LIVENESS,
                clock=clock,
            )
            async with asyncio.timeout(HANG_S):
                await receiver.watched.wait()
                assert (reported, stream.out_of_reach) == ([], False)
                receiver.cut()
                await clock.paused.wait()
                assert (reported, stream.out_of_reach) == (["lost"], True)
                await clock.tried()
                assert (reported, stream.out_of_reach) == (["lost"], True)
                receiver.heal()
                clock.go_on.set()
                await receiver.watched.wait()
                assert (reported, stream.out_of_reach) == (["lost"], False)
                clock.paused.clear()
                receiver.cut()
                await clock.paused.wait()
                assert (reported, stream.out_of_reach) == (["lost", "lost"], True)
                await stream.close()

    with caplog.at_level(logging.INFO, logger="baton.writer"):
        asyncio.run(scene())
    assert [record.getMessage() for record in caplog.records] == [
        "receiver lost", "receiver reached again", "receiver lost",
    ]  # fmt: skip
