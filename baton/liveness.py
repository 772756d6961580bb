"""How a process learns that another one has died, stopped or been cut off.

Both ends ping each silent gRPC connection between nodes. gRPC answers on a thread of its own in native code, so a busy
process answers and one that is stopped or cut off does not. A connection that ends, or leaves a ping unanswered, ends
every call on it. The holder of a long-lived call to a peer (`Reach`) then tries to reach it again for a short time
before it counts it as lost. A peer that accepts every such call and ends it at once counts as lost too.
A wrong guess costs the work under way there and is safe: ownership of blocks and tokens never depends on it.
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
from baton.grpc_core import ping_options

JITTER_MAX: Final = 0.2
"""The pause between pings is shorter by up to this share, so that the pings of many connections spread out."""
REFUSALS_MAX: Final = 3
"""A peer is lost after this many tries in a row at which nobody listens at its address."""
DOUBT_PAUSE_MS: Final = 1_000
"""Pause before the next try after a peer was lost for ending every call at once; doubled each time."""
DOUBT_PAUSE_MS_MAX: Final = 5_000


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
    """Pause between two tries to reach a peer again."""
    failed_stream_ms_max: int = fixed(1_000)
    """A long call that ends before this with nothing of use received has failed."""
    failed_streams_max: int = fixed(6)
    """Failed calls in a row, with growing pauses, before the peer is lost."""

    def __post_init__(self) -> None:
        check_positive(self, *self.__slots__)

    def ping_options(self, rng: random.Random | None) -> list[tuple[str, int]]:
        """gRPC's options for a channel or a server. `rng` spreads the pings; None for a server, where it cannot."""
        shorter = rng.uniform(0, JITTER_MAX) if rng is not None else 0.0
        return ping_options(max(1, round(self.heartbeat_ms * (1 - shorter))), self.answer_ms_max)


class Reach:
    """Whether a peer counts as lost, for the holder of a long-lived call to it. Lives on one event loop.

    Pass each call to `connected`, call `heard` when something arrives on it, and after each end ask `lost`.
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
        """How often in a row it was lost for failed calls."""
        self.why = ""

    @property
    def doubted(self) -> bool:
        """Lost for failed calls and not heard since: that it accepts a call proves little."""
        return self._doubts > 0

    @property
    def doubt_pause_s(self) -> float:
        """Pause before a doubted peer is tried again; 0 for others."""
        return doubt_pause_ms(self._doubts) / 1000

    async def connected(self, call: Any) -> None:
        """Wait until a new call is on a connection to the peer.

        Raises BatonError PEER_UNREACHABLE and cancels the call when the time is over; grpc.aio.AioRpcError if it ended.
        """
        try:
            async with asyncio.timeout(self._left_s):
                await call.wait_for_connection()
        except TimeoutError as error:
            call.cancel()
            raise BatonError(Reason.PEER_UNREACHABLE, f"No connection to {self._endpoint} yet.") from error
        self._broken_s, self._refusals = None, 0
        self._connected_s = self._clock.monotonic_s()

    def heard(self) -> None:
        """The peer sent something of use on the call, or kept the call for long enough."""
        self._connected_s = None
        self._failed_streams = self._doubts = 0

    @property
    def _left_s(self) -> float:
        """Time left to reach the peer again."""
        now_s = self._clock.monotonic_s()
        broken_s = now_s if self._broken_s is None else self._broken_s
        return max(0.0, broken_s + self._config.reconnect_ms_max / 1000 - now_s)

    async def lost(self) -> bool:
        """The call has ended, or could not be made. Returns whether the peer is lost, and then `why` says the reason.

        It pauses before it returns False. After True, the next call has all the time again.
        """
        self._count_failed_stream()
        if self._broken_s is None:
            self._broken_s = self._clock.monotonic_s()
        refused = await nobody_listens(self._endpoint, timeout_s=self._left_s)
        self._refusals = self._refusals + 1 if refused else 0
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
            pause_s = self._config.reconnect_pause_ms / 1000
            # One failed stream may be a link that broke twice; from the third on the pauses grow.
            growing_s = pause_s * (1 << (self._failed_streams - 2)) if self._failed_streams > 2 else 0.0
            await self._clock.sleep_s(max(min(pause_s, self._left_s), growing_s))
            return False
        self._broken_s, self._refusals, self._failed_streams = None, 0, 0
        return True

    def _count_failed_stream(self) -> None:
        connected_s, self._connected_s = self._connected_s, None
        if connected_s is None:
            return
        if (self._clock.monotonic_s() - connected_s) * 1000 < self._config.failed_stream_ms_max:
            self._failed_streams += 1
        else:
            self.heard()


def doubt_pause_ms(doubts: int) -> int:
    """Pause before the next try of a peer that was lost this often in a row for failed calls."""
    return min(DOUBT_PAUSE_MS << min(doubts - 1, 16), DOUBT_PAUSE_MS_MAX) if doubts else 0


async def nobody_listens(endpoint: str, *, timeout_s: float) -> bool:
    """Whether the peer's machine answers that no process has this port. False if it does not answer or is not found."""
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
