"""The calling side of gRPC: one channel per peer, and the edge where failed calls become domain errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from baton.endpoint import check_reachable
from baton.errors import BatonError, InvalidField, Reason, check_positive
from baton.liveness import LivenessConfig
from baton.rpc_wakes import whole_wakes
from baton.status import from_rpc_error


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelLimits:
    """How a process keeps its channels."""

    channels_max: int = 1024
    message_bytes_max: int = 16 * 1024 * 1024
    connect_ms_max: int = 1_000
    reconnect_ms_min: int = 50
    reconnect_ms_max: int = 500
    """A peer that restarts is reached again within about this time."""
    liveness: LivenessConfig = field(default_factory=LivenessConfig)
    """A peer that is stopped or cut off ends its calls after its `heartbeat_ms` and `answer_ms_max`."""

    def __post_init__(self) -> None:
        check_positive(
            self, "channels_max", "message_bytes_max", "connect_ms_max", "reconnect_ms_min", "reconnect_ms_max"
        )
        if self.reconnect_ms_min > self.reconnect_ms_max:
            raise InvalidField("reconnect_ms_min", "must not exceed reconnect_ms_max")


class Channels:
    """Channels by endpoint, made on first use and kept. Lives on one event loop."""

    def __init__(self, *, limits: ChannelLimits, rng: random.Random | None = None) -> None:
        """`rng` spreads the pings of different channels; None: all keep the same pause."""
        self._limits = limits
        self._rng = rng
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = False

    def get(self, endpoint: str) -> grpc.aio.Channel:
        """The channel to `endpoint` ("host:port"); connects in the background. The caller does not close it.

        Raises BatonError BAD_ENDPOINT, or TOO_MANY_PEERS beyond `channels_max`.
        """
        assert not self._closed, "get after close"
        channel = self._channels.get(endpoint)
        if channel is None:
            check_reachable(endpoint)
            if len(self._channels) >= self._limits.channels_max:
                raise BatonError(
                    Reason.TOO_MANY_PEERS,
                    f"No channel to {endpoint}: this process has {len(self._channels)} already, its limit.",
                )
            with whole_wakes():
                channel = grpc.aio.insecure_channel(endpoint, options=self._options())
            self._channels[endpoint] = channel
        return channel

    async def drop(self, endpoint: str) -> None:
        """Forget a peer that is gone. Its running calls end as if their tasks were cancelled: stop them first."""
        channel = self._channels.pop(endpoint, None)
        if channel is not None:
            await channel.close()

    async def close(self) -> None:
        """Close all channels; stop the calls that use them first, as for `drop`. Idempotent."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _options(self) -> list[tuple[str, int]]:
        limits = self._limits
        return [
            ("grpc.max_receive_message_length", limits.message_bytes_max),
            ("grpc.max_send_message_length", limits.message_bytes_max),
            *limits.liveness.ping_options(self._rng),
            ("grpc.initial_reconnect_backoff_ms", limits.reconnect_ms_min),
            ("grpc.max_reconnect_backoff_ms", limits.reconnect_ms_max),
            # gRPC's name for the time one attempt to connect may take.
            ("grpc.min_reconnect_backoff_ms", limits.connect_ms_max),
            # A restarted pod keeps its name and gets another address.
            ("grpc.dns_min_time_between_resolutions_ms", limits.reconnect_ms_max),
            # Peers are inside the cluster, whatever http_proxy says.
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]


async def begun(call: Any) -> bool:
    """Wait until the peer's handler has sent its initial metadata, by which it says that it has the call. False: the
    call is over. (In the moment in which it fails, True may come first.)

    What the peer has written is left to be read, also where a failure came behind it: `wait_for_connection` would
    raise that first. Cancelling the caller cancels the call.
    """
    try:
        await call.initial_metadata()
    except asyncio.CancelledError:
        call.cancel()
        raise
    return not call.done()


@contextmanager
def rpc_errors(peer: str) -> Iterator[None]:
    """Turn a call's failure inside the block into the BatonError that the peer raised, or one that names `peer`.

    Cancellation of the calling task passes through.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, peer=peer) from error
