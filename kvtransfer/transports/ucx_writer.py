"""The writing side of ucx: writes handed to NIXL by a thread of the link's own, which looks for their completion.

A batch is complete when UCX has flushed all its writes, or when the link is over and its agent is destroyed: then
nothing reads the source any more (I1). NIXL offers nothing to sleep on, hence the looking, with longer and
longer pauses.
"""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar, Final

import numpy as np

from baton.ids import Pair
from baton.log import get_log
from baton.tasks import call_loop
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.chain_link import ChainLink, QueueLimits, SealPart
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx import CODEC, UCX_LINK_LIMITS, Connected, connect
from kvtransfer.transports.ucx_nixl import UcxFailed, ucx_transports

log = get_log("ucx")

TRANSFER_WRITES_MAX: Final = 4096
"""Writes handed to NIXL at once."""
TRANSFER_BYTES_MAX: Final = 16 << 20
"""Bytes of these, unless one write is more."""
ON_THE_WAY_BYTES_MAX: Final = 64 << 20
"""Once this many bytes are handed to NIXL and not completed, no more are."""
SEALS_MAX: Final = 256
"""Seals on their way that the receiver has not confirmed."""
POLL_US_MIN: Final = 50
"""Pause between two looks at what is on its way, at first."""
POLL_US_MAX: Final = 1000
"""The longest pause, while nothing completes."""
SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""


class UcxWriterLink(ChainLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    The end comes once: from `close` or a FENCE, which let what is on its way arrive, or from EOF, a failed write or a
    deadline, which destroy the agent at once. `link_lost` is called last, after every completion, and not for an end
    that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.UCX

    def __init__(
        self,
        *,
        connected: Connected,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: UcxConfig,
        limits: LinkLimits,
    ) -> None:
        """Takes over what is connected. Use `connect`."""
        self._agent, self._config = connected.agent, config
        self._awake = threading.Event()
        super().__init__(
            sock=connected.sock,
            codec=CODEC,
            src_nbytes=self._agent.nbytes,
            dst_nbytes=connected.region_nbytes,
            endpoint=endpoint,
            pair=pair,
            events=events,
            loop=loop,
            limits=limits,
            queue=QueueLimits(
                qps=1,
                send_wrs_max=1 << 30,
                chain_wrs_max=TRANSFER_WRITES_MAX,
                chain_bytes_max=TRANSFER_BYTES_MAX,
                wr_bytes_max=1 << 30,
                on_the_way_bytes_max=ON_THE_WAY_BYTES_MAX,
                abandoned_grants_max=limits.abandoned_grants_max,
            ),
            seals_max=SEALS_MAX,
            wake=self._awake.set,
        )
        self._thread = threading.Thread(target=self._post_all, name=f"ucx-post-{pair.receiver:x}", daemon=True)
        self._thread.start()
        loop.add_reader(self._sock, self._read)

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: UcxConfig | None = None,
        limits: LinkLimits = UCX_LINK_LIMITS,
    ) -> UcxWriterLink:
        """Connect, prove the pair's secret, register the source for this link, which releases it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, no NIXL, or not done within `connect_ms_max`.
        """
        config = config or UcxConfig()
        connected = await connect(endpoint, pair, source_region_U8, loop, config=config, limits=limits)
        try:
            return cls(
                connected=connected,
                endpoint=endpoint,
                pair=pair,
                events=events,
                loop=loop,
                config=config,
                limits=limits,
            )
        except RuntimeError as error:
            connected.agent.destroy()
            wire.take_leave(connected.sock, CODEC.encode(wire.Bye(epoch=endpoint.epoch)))
            raise ConnectError(f"{endpoint.address}: no thread to post with: {error}") from error

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {**super().describe(), "ucx_transports": ucx_transports(self._config.tls)}

    # Posting thread.

    def _post_all(self) -> None:
        failure, destroyed = "the posting thread failed", False
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
            failure = ""
        except UcxFailed as error:
            failure = str(error)
        finally:
            try:
                self._agent.destroy()
                destroyed = True
            finally:
                call_loop(self._loop, self._thread_left, failure, destroyed)

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

    def _send_numbered(self, number: int, seal: Seal) -> None:
        self._send_message(wire.SealSent(number=number, seal=seal))
        self._lanes.seal(number, seal.grant)

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Sealed(number=number) if number in self._seals_out:
                self._sealed(number)
            case wire.Fence(epoch=epoch):
                # The receiver may need our BYE that all has arrived; otherwise it closes the connection.
                self._seals_out.clear()
                if not self._ending:
                    self._fenced_by_receiver(epoch, orderly=True)
            case wire.Refused(reason=reason):
                self._seals_out.clear()
                self._end(f"refused by the receiver: {reason.name}", orderly=True)
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _thread_left(self, failure: str, destroyed: bool) -> None:
        if failure and not self._ending:
            # The receiver's last message, if there is one, explains more than the error of a write.
            self._read()
            self._end(failure)
        self._thread.join()
        self._stop_watching()
        if not destroyed:
            # A bug of ours, raised in the thread. Its worker may still read the source: no completion, and no BYE.
            log.error("ucx link keeps its source blocks", peer=self._address)
            self._hang_up(None)
            self._finish()
            return
        drained = not self._queue.on_the_way  # else some are in doubt, and the queue reports each grant
        self._lanes.lose()
        self._hang_up(wire.Bye(epoch=self._epoch, drained=drained))
        self._finish_soon()
