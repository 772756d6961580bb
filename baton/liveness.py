"""How a process learns that another one has died, stopped or been cut off. One configuration for every such place.

Each gRPC connection between nodes is pinged from both ends while it is silent. gRPC answers a ping on a thread of its
own, in native code: a process whose event loop or interpreter lock is busy answers, one that is stopped or cut off
does not. A connection that ends, or whose ping goes unanswered, ends every call on it. Whoever holds a long-lived call
to a peer (`Reach`) then tries to reach it again for a short time before it believes it lost. A peer that takes every
such call and ends each at once, with nothing of use said, might as well be gone, and is believed lost too.
Being wrong costs what was under way there and is safe: ownership of blocks and of tokens never depends on it.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from baton.clock import Clock
from baton.config import fixed, setting
from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason, check_positive

JITTER_MAX: Final = 0.2
"""The pause between pings is shorter by up to this share on some connections, so that pings spread out."""
REFUSALS_MAX: Final = 3
"""Tries in a row at which nobody listens there before the peer is lost at once."""
DOUBT_PAUSE_MS: Final = 1_000
"""After a peer was lost for ending every call at once: until it is tried again, doubled with each time."""
DOUBT_PAUSE_MS_MAX: Final = 5_000
"""A peer that recovers is tried again at most this much later, and is of use `failed_stream_ms_max` after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    heartbeat_ms: int = setting(
        500,
        "pause between pings of a silent connection to a node",
        "A peer that stops should be noticed sooner (lower all three of liveness), or the network is slow.",
    )
    answer_ms_max: int = setting(
        1_500,
        "a ping unanswered for this long ends the connection and every call on it",
        "Machines or networks stand still for longer without being dead.",
    )
    reconnect_ms_max: int = setting(
        700,
        "a peer that is not reached again this long after its connection ended is lost",
        "Connections break and come back, as behind a load balancer or a restarting network.",
    )
    reconnect_pause_ms: int = fixed(50)
    """Pause between two tries to reach it again."""
    failed_stream_ms_max: int = fixed(1_000)
    """A long call that ends before this, with nothing of use received on it, was of no use."""
    failed_streams_max: int = fixed(6)
    """Such calls in a row, with longer and longer pauses, before the peer is lost."""

    def __post_init__(self) -> None:
        check_positive(self, "heartbeat_ms", "answer_ms_max", "reconnect_ms_max", "reconnect_pause_ms")
        check_positive(self, "failed_stream_ms_max", "failed_streams_max")

    @property
    def noticed_ms_max(self) -> int:
        """The longest that a stopped or cut-off peer is taken to be alive."""
        return self.heartbeat_ms + self.answer_ms_max + self.reconnect_ms_max

    def ping_options(self, rng: random.Random | None) -> list[tuple[str, int]]:
        """gRPC's options for a channel or a server. A server's pings cannot be spread: `rng` is None there.

        The name `keepalive_timeout` does not keep what it promises: in the versions that we know (1.74) a ping is given
        up after `ping_timeout`, a minute by default, so both are set.
        """
        shorter = rng.uniform(0, JITTER_MAX) if rng is not None else 0.0
        return [
            ("grpc.keepalive_time_ms", max(1, round(self.heartbeat_ms * (1 - shorter)))),
            ("grpc.keepalive_timeout_ms", self.answer_ms_max),
            ("grpc.http2.ping_timeout_ms", self.answer_ms_max),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]


class Reach:
    """What one holder of a long-lived call to a peer believes of it. Lives on one event loop.

    Each call goes through `connected`; `heard` is called when something comes on it; after each end, `lost` says
    whether to believe the peer lost.
    """

    def __init__(self, endpoint: str, config: LivenessConfig, clock: Clock) -> None:
        self._endpoint = endpoint
        self._config = config
        self._clock = clock
        self._broken_s: float | None = None
        self._refusals = 0
        self._connected_s: float | None = None
        self._failed_streams = 0
        self._doubts = 0
        """Times in a row that it was lost for calls that came to nothing."""
        self.why = ""

    @property
    def doubted(self) -> bool:
        """Lost for calls that came to nothing, and nothing heard since: that it takes a call says little."""
        return self._doubts > 0

    @property
    def doubt_pause_s(self) -> float:
        """How long a peer that is doubted is left alone; 0 for one that is not."""
        return doubt_pause_ms(self._doubts) / 1000

    async def connected(self, call: Any) -> None:
        """Wait until a call that has just been made is on a connection to the peer. Cancels it where that takes longer
        than is left, and raises BatonError PEER_UNREACHABLE; raises grpc.aio.AioRpcError where it has ended."""
        try:
            async with asyncio.timeout(self._left_s):
                await call.wait_for_connection()
        except TimeoutError as error:
            call.cancel()
            raise BatonError(Reason.PEER_UNREACHABLE, f"No connection to {self._endpoint} yet.") from error
        self._begin()
        self._connected_s = self._clock.monotonic_s()

    def heard(self) -> None:
        """The peer has said something of use on the call, or has kept it long enough: it is of use."""
        self._connected_s = None
        self._failed_streams = 0
        self._doubts = 0

    @property
    def _left_s(self) -> float:
        if self._broken_s is None:
            return self._config.reconnect_ms_max / 1000
        return max(0.0, self._broken_s + self._config.reconnect_ms_max / 1000 - self._clock.monotonic_s())

    async def lost(self) -> bool:
        """The call has ended, or could not be made. True: the peer is lost, `why` says how that is known, and the next
        call has all the time again. Pauses where it is not."""
        self._count_failed_stream()
        if self._broken_s is None:
            self._broken_s = self._clock.monotonic_s()
        if await nobody_listens(self._endpoint, timeout_s=self._left_s):
            self._refusals += 1
        else:
            self._refusals = 0
        if self._refusals >= REFUSALS_MAX:
            self.why = "nobody listens at its address"
            self._doubts = 0
        elif self._failed_streams >= (1 if self.doubted else self._config.failed_streams_max):
            self.why = f"it took {self._failed_streams} calls in a row and ended each at once"
            self._doubts += 1
        elif self._left_s == 0.0:
            self.why = f"it was not reached again for {self._config.reconnect_ms_max} ms"
            self._doubts = 0
        else:
            await self._clock.sleep_s(self._pause_s)
            return False
        self._failed_streams = 0
        self._begin()
        return True

    @property
    def _pause_s(self) -> float:
        """One failed stream may be a link that broke twice; from the third on the pauses grow."""
        pause_s = self._config.reconnect_pause_ms / 1000
        return max(
            min(pause_s, self._left_s), pause_s * (1 << (self._failed_streams - 2)) if self._failed_streams > 2 else 0.0
        )

    def _count_failed_stream(self) -> None:
        connected_s, self._connected_s = self._connected_s, None
        if connected_s is None:
            return
        if (self._clock.monotonic_s() - connected_s) * 1000 < self._config.failed_stream_ms_max:
            self._failed_streams += 1
        else:
            self.heard()

    def _begin(self) -> None:
        self._broken_s = None
        self._refusals = 0


def doubt_pause_ms(doubts: int) -> int:
    """Pause before trying a peer again that was lost this often in a row for ending every call at once."""
    return min(DOUBT_PAUSE_MS << min(doubts - 1, 16), DOUBT_PAUSE_MS_MAX) if doubts else 0


async def nobody_listens(endpoint: str, *, timeout_s: float) -> bool:
    """Whether the peer's machine says that no process has this port. False where it says nothing or is not found."""
    host, port = split_endpoint(endpoint)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (TimeoutError, OSError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False
