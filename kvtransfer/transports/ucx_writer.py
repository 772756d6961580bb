"""The writing side of ucx: a thread of the link's own hands writes to NIXL and looks for their completion.

A batch is complete when UCX has flushed all its writes, or when the link is over and its agent is destroyed: then
nothing reads the source any more (I1). NIXL offers nothing to sleep on, so the thread looks again after ever longer
pauses.
"""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, ClassVar, Final, Unpack

import numpy as np

from baton.ids import Pair
from baton.log import get_log
from kvtransfer.link import host_identity
from kvtransfer.transport import DataEndpoint, TransportName, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.chain_link import ChainLimits, ChainLink, LinkParts, SealPart
from kvtransfer.transports.control_channel import WriterChannel, connect_errors
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx import CODEC, UcxAgent, UcxFailed, UcxHello, UcxUnavailable, UcxWelcome, ucx_transports

log = get_log("ucx")

UCX_LINK_LIMITS: Final = ChainLimits(
    connect_ms_max=10_000,
    chain_wrs_max=4096,
    chain_bytes_max=16 << 20,
    wr_bytes_max=1 << 30,
    on_the_way_bytes_max=64 << 20,
)
"""A chain is what is handed to NIXL at once."""
SEND_WRS_MAX: Final = 1 << 30
"""NIXL takes any number of writes."""
SEALS_MAX: Final = 256
"""Seals on their way that the receiver has not confirmed."""
POLL_US_MIN: Final = 50
"""Pause between two looks at what is on its way, at first."""
POLL_US_MAX: Final = 1000
"""The longest pause, while nothing completes."""
SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""


async def _until_over(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait even where the caller is cancelled, since a thread cannot be stopped in a call. Returns the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


class UcxWriterLink(ChainLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    The end comes once: from `close`, FENCE or REFUSED, which let what is on its way arrive, or from EOF, a failed write
    or a deadline, which destroy the agent at once. `link_lost` is called last, after every completion, and not for an
    end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.UCX
    codec: ClassVar[wire.Codec] = CODEC
    ends_in_order = True
    failed = UcxFailed

    def __init__(
        self,
        channel: WriterChannel,
        agent: UcxAgent,
        *,
        config: UcxConfig,
        limits: ChainLimits,
        **parts: Unpack[LinkParts],
    ) -> None:
        """Takes over what is connected. Use `connect`."""
        self._agent, self._config = agent, config
        self._destroyed = False
        self._awake = threading.Event()
        super().__init__(
            channel,
            src_nbytes=agent.nbytes,
            dst_nbytes=agent.peer_nbytes,
            limits=limits,
            qps=1,
            send_wrs_max=SEND_WRS_MAX,
            seals_max=SEALS_MAX,
            **parts,
        )

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: UcxConfig | None = None,
        limits: ChainLimits = UCX_LINK_LIMITS,
    ) -> UcxWriterLink:
        """Connect, prove the pair's secret, register the source for this link, which releases it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, no NIXL, or not done within `connect_ms_max`.
        """
        config = config or UcxConfig()
        parts = LinkParts(endpoint=endpoint, pair=pair, events=events, loop=loop)
        link = int.from_bytes(os.urandom(8))
        own = UcxHello(host=host_identity(), pid=os.getpid())
        hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link, payload=own.encode())
        making = loop.run_in_executor(None, UcxAgent, source_region_U8, f"writer-{link:x}", config.tls)
        channel: WriterChannel | None = None
        with connect_errors(endpoint.address, limits.connect_ms_max, UcxFailed, UcxUnavailable):
            try:
                async with asyncio.timeout(limits.connect_ms_max / 1000):
                    channel = await WriterChannel.open(endpoint.address, loop, CODEC, address=endpoint.address)
                    welcome = UcxWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
                    agent = await asyncio.shield(making)
                there = (welcome.metadata, welcome.region_base, welcome.region_nbytes)
                loading = loop.run_in_executor(None, agent.load_peer, *there)
                if cancelled := await _until_over(loading):
                    raise cancelled
                loading.result()
                return cls(channel, agent, config=config, limits=limits, **parts)
            except BaseException as error:
                cancelled = await _until_over(making)
                if making.exception() is None:
                    cancelled = await _until_over(loop.run_in_executor(None, making.result().destroy)) or cancelled
                if channel is not None:
                    channel.leave(wire.Bye(epoch=endpoint.epoch))
                if cancelled is not None:
                    raise cancelled from error
                raise

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {**super().describe(), "ucx_transports": ucx_transports(self._config.tls)}

    def _wake(self) -> None:
        self._awake.set()

    # Posting thread.

    def _post_all(self) -> None:
        pause_us = POLL_US_MIN
        try:
            while not self._cut and not (self._ending and self._lanes.drained and not self._seals_out):
                self._awake.clear()
                moved = self._post_what_fits()
                for number in self._agent.completed():
                    self._lanes.completed(number)
                    moved = True
                pause_us = POLL_US_MIN if moved else min(2 * pause_us, POLL_US_MAX)
                self._awake.wait(pause_us / 1e6 if self._lanes.on_the_way else SLEEP_MS_MAX / 1000)
        finally:
            self._agent.destroy()
            self._destroyed = True

    def _post_what_fits(self) -> bool:
        posted = False
        while not self._cut and (taken := self._lanes.take()) is not None:
            posted = True
            if isinstance(taken, SealPart):
                self._agent.notify(taken.seal)
                self._lanes.completed(taken.number)
            else:
                self._agent.post(taken.part.ops, taken.number)
        return posted

    # Control thread.

    def _handle(self, message: wire.Message) -> None:
        if isinstance(message, (wire.Fence, wire.Refused)):
            # No seal is confirmed any more. The receiver may need our BYE, which says that all has arrived.
            self._seals_out.clear()
        super()._handle(message)

    def _thread_over(self, failure: str) -> None:
        del failure
        if not self._destroyed:
            # A bug of ours, raised in the thread. Its worker may still read the source: no completion, and no BYE.
            log.error("ucx link keeps its source blocks", peer=self._address)
            self._hang_up(None)
            self._finish()
            return
        drained = not self._queue.on_the_way  # else some are in doubt, and the queue reports each grant
        self._lanes.lose()
        self._hang_up(wire.Bye(epoch=self._epoch, drained=drained))
        self._finish_soon()
