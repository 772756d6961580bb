"""The writing side of ucx: writes handed to NIXL by a thread of the link's own, which looks for their completion.

A batch is complete when UCX has flushed all its writes, or when the link is over and its agent is destroyed: then
nothing reads the source any more (DESIGN I1). NIXL offers nothing to sleep on, hence the looking, with longer and
longer pauses.
"""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import numpy as np

from baton.ids import Pair
from baton.log import get_log
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.chain_link import ChainLink, LinkLimits
from kvtransfer.transports.loop_calls import call_loop
from kvtransfer.transports.rdma_queue import QueueLimits, SealPart
from kvtransfer.transports.ucx import CODEC, Connected, UcxWriterConfig, connect
from kvtransfer.transports.ucx_nixl import UcxFailed, ucx_transports

log = get_log("ucx")

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
        config: UcxWriterConfig,
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
            limits=LinkLimits(
                queue=QueueLimits(
                    qps=1,
                    send_wrs_max=1 << 30,
                    chain_wrs_max=config.transfer_writes_max,
                    chain_bytes_max=config.transfer_bytes_max,
                    wr_bytes_max=1 << 30,
                    on_the_way_bytes_max=config.on_the_way_bytes_max,
                    abandoned_grants_max=config.abandoned_grants_max,
                ),
                seals_max=config.seals_max,
                seals_waiting_max=config.seals_waiting_max,
                drain_ms_max=config.drain_ms_max,
                bye_ms_max=config.bye_ms_max,
            ),
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
        config: UcxWriterConfig | None = None,
    ) -> UcxWriterLink:
        """Connect, prove the pair's secret, register the source for this link, which lets go of it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, no NIXL, or not done within `connect_ms_max`.
        """
        config = config or UcxWriterConfig()
        connected = await connect(endpoint, pair, source_region_U8, loop, config)
        try:
            return cls(connected=connected, endpoint=endpoint, pair=pair, events=events, loop=loop, config=config)
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
        pause_us = self._config.poll_us_min
        try:
            while not self._cut and not (self._draining and self._queue.drained and not self._seals_out):
                self._awake.clear()
                moved = self._post_what_fits()
                for number in self._agent.completed():
                    self._queue.completed(number)
                    moved = True
                pause_us = self._config.poll_us_min if moved else min(2 * pause_us, self._config.poll_us_max)
                self._awake.wait(pause_us / 1e6 if self._queue.on_the_way else SLEEP_MS_MAX / 1000)
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
        while not self._cut and (taken := self._queue.take()) is not None:
            posted = True
            if isinstance(taken, SealPart):
                self._agent.notify(taken.seal)
                self._queue.completed(taken.number)
            else:
                self._agent.post(taken.ops, taken.number)
        return posted

    # Control thread.

    def _send_seal(self, number: int, seal: Seal) -> None:
        self._send(wire.SealSent(number=number, seal=seal))
        self._queue.seal(number, seal.grant)

    def _handle(self, message: wire.Message) -> None:
        match message:
            case wire.Sealed(number=number) if number in self._seals_out:
                self._sealed(number)
            case wire.Fence(epoch=epoch):
                self._ending.by_fence |= not self._ending.begun
                # The receiver may need our word that all has arrived; where it does not it closes the connection.
                self._seals_out.clear()
                self._end(f"fenced by the receiver up to epoch {epoch}", orderly=True)
            case wire.Refused(reason=reason):
                self._seals_out.clear()
                self._end(f"refused by the receiver: {reason.name}", orderly=True)
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _thread_left(self, failure: str, destroyed: bool) -> None:
        if failure and not self._ending.begun:
            # The receiver's word, if it left one, says more than the error of a write.
            self._read()
            self._end(failure)
        self._thread.join()
        self._stop_watching()
        if not destroyed:
            # A bug of ours, raised in the thread. Its worker may still read the source: no completion, and no BYE.
            log.error("ucx link keeps its source blocks", peer=self._address)
            self._hang_up(None)
            self._ending.finish()
            return
        drained = not self._queue.writes_out  # else some are adrift, as it tells of each grant
        self._queue.lose_all()
        self._hang_up(wire.Bye(epoch=self._epoch, drained=drained))
        # Behind the completions, which the queue has just handed to the loop.
        self._loop.call_soon(self._ending.finish)
