"""How a peer's death is noticed: pings that a busy process answers, tries that are refused, time that runs out."""

from __future__ import annotations

import asyncio
import ctypes
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from batonpb import directory_pb2, directory_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError
from baton.liveness import DOUBT_PAUSE_MS_MAX, LivenessConfig, Reach, doubt_pause_ms, nobody_listens
from baton.rpc import ChannelLimits, Channels, RpcLimits, RpcServer, rpc_errors
from tests.support.noticed import noticed_ms_max
from tests.support.ports import free_ports
from tests.support.still_clock import StillClock

HANG_S = 30.0
TIGHT = LivenessConfig(heartbeat_ms=50, answer_ms_max=200, reconnect_ms_max=300, reconnect_pause_ms=20)


class Watched(directory_pb2_grpc.DirectoryServicer):
    """Some long-lived call."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def Watch(self, _request: object, _context: object) -> AsyncIterator[directory_pb2.WatchEvent]:
        yield directory_pb2.WatchEvent()
        await self.go_on.wait()
        yield directory_pb2.WatchEvent()


def run(scene: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HANG_S):
            await scene

    asyncio.run(limited())


def test_who_holds_the_interpreter_lock_for_long_answers_pings() -> None:
    """Server and client share a process whose interpreter lock is held for five times as long as a ping may go
    unanswered, and several heartbeats: the call between them does not notice."""

    async def scene() -> None:
        server = RpcServer(limits=RpcLimits(), rng=random.Random(1), liveness=TIGHT)
        watched = Watched()
        server.add("baton.v1.Directory", directory_pb2_grpc.add_DirectoryServicer_to_server, watched)
        port = await server.start("127.0.0.1:0")
        channels = Channels(limits=ChannelLimits(liveness=TIGHT), rng=random.Random(2))
        try:
            call: Any = directory_pb2_grpc.DirectoryStub(channels.get(f"127.0.0.1:{port}")).Watch(
                directory_pb2.WatchRequest()
            )
            events = aiter(call)
            await anext(events)
            ctypes.PyDLL(None).usleep(1_000_000)  # PyDLL keeps the lock during the call
            watched.go_on.set()
            with rpc_errors("watched"):
                assert len([event async for event in events]) == 1
        finally:
            await channels.close()
            await server.stop(0)

    run(scene())


def test_a_refusal_is_evidence_only_several_times_in_a_row() -> None:
    """Nobody listens: lost at the third refusal, after two pauses. Then the next call has all its tries again."""

    async def scene() -> None:
        clock = StillClock()
        reach = Reach(f"127.0.0.1:{free_ports(1)[0]}", TIGHT, clock)
        for _ in range(2):
            assert [await reach.lost() for _ in range(3)] == [False, False, True]
            assert "nobody listens" in reach.why
        assert clock.slept == [0.02] * 4

    run(scene())


class Taken:
    """A call that the peer takes."""

    async def wait_for_connection(self) -> None:
        """At once."""


def test_a_peer_that_ends_every_call_at_once_is_lost() -> None:
    """It takes each call and says nothing on it: lost at the sixth, with longer and longer pauses. The next time one is
    enough; a call on which something is said, or that stays, takes the doubt away."""

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            clock = StillClock()
            reach = Reach(f"127.0.0.1:{listener.getsockname()[1]}", TIGHT, clock)

            async def lost_after(lasts_s: float = 0.0, *, says: bool = False) -> bool:
                await reach.connected(Taken())
                clock.now_s += lasts_s
                if says:
                    reach.heard()
                return await reach.lost()

            assert [await lost_after() for _ in range(6)] == [False] * 5 + [True]
            assert clock.slept == [0.02, 0.02, 0.04, 0.08, 0.16]
            assert reach.doubt_pause_s == 1.0
            assert (reach.doubted, reach.why) == (True, "it took 6 calls in a row and ended each at once")
            assert await lost_after()
            assert reach.doubt_pause_s == 2.0
            assert [await lost_after(says=True), reach.doubted, reach.doubt_pause_s] == [False, False, 0.0]
            assert [await lost_after() for _ in range(5)] == [False] * 5
            assert not await lost_after(TIGHT.failed_stream_ms_max / 1000), "it stayed"
            assert [await lost_after() for _ in range(6)] == [False] * 5 + [True]
            assert [await lost_after(TIGHT.failed_stream_ms_max / 1000), reach.doubted] == [False, False]

    run(scene())


def test_a_peer_in_doubt_is_left_alone_for_longer_and_longer() -> None:
    """Not at all without a doubt, then a second, doubled with each time up to the limit, however often."""
    assert [doubt_pause_ms(times) for times in range(8)] == [0, 1_000, 2_000, 4_000, 5_000, 5_000, 5_000, 5_000]
    assert doubt_pause_ms(1_000_000) == DOUBT_PAUSE_MS_MAX


def test_silence_ends_with_its_time() -> None:
    """Somebody listens and no call comes about: lost when the time since the first failure is over, not before."""

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            assert not await nobody_listens(endpoint, timeout_s=HANG_S)
            clock = StillClock()
            reach = Reach(endpoint, TIGHT, clock)
            answers = []
            while True not in answers:
                answers.append(await reach.lost())
            assert len(answers) > 10
            assert not any(answers[:-1])
            assert round(clock.now_s - 100.0, 6) == TIGHT.reconnect_ms_max / 1000
            assert "300 ms" in reach.why

    run(scene())


def test_a_call_that_gets_no_connection_is_cancelled() -> None:
    """Somebody listens and never speaks gRPC, as a stopped process does: the try ends with its time."""

    async def scene() -> None:
        channels = Channels(limits=ChannelLimits())
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
            call: Any = directory_pb2_grpc.DirectoryStub(channels.get(endpoint)).Watch(directory_pb2.WatchRequest())
            with pytest.raises(BatonError, match="No connection"):
                await Reach(endpoint, TIGHT, Clock()).connected(call)
            assert call.cancelled()
            await channels.close()

    run(scene())


def test_noticing_takes_under_three_seconds_unless_told_otherwise() -> None:
    """The defaults, their sum, and that nonsense is refused by name."""
    assert noticed_ms_max(LivenessConfig()) < 3_000
    assert noticed_ms_max(TIGHT) == 550
    options = dict(LivenessConfig().ping_options(None))
    assert options["grpc.keepalive_time_ms"] == 500
    assert options["grpc.http2.ping_timeout_ms"] == 1_500
    spread = {dict(LivenessConfig().ping_options(random.Random(i)))["grpc.keepalive_time_ms"] for i in range(20)}
    assert len(spread) > 5
    assert min(spread) >= 400
    assert max(spread) <= 500
