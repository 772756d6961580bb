"""The writing side of rdma: RDMA WRITEs from the registered source region, posted by a thread of the link's own.

The thread posts chains as the queue pairs have room and takes their completions, in native calls; the control thread
has the control channel. A batch is complete when the device has completed all its chains, or when the link is over and
its queue pairs are destroyed: then the device reads nothing of the source any more (I1). That says nothing of what had
left it: such writes are `writes_in_doubt`, and the receiver fences before it reuses their blocks.
"""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Unpack

from baton.ids import Pair
from baton.log import get_log
from baton.repeats import RepeatLog
from kvtransfer.transport import ConnectError, DataEndpoint, TransportName, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.chain_link import ChainLimits, ChainLink, LinkParts, SealPart
from kvtransfer.transports.control_channel import WriterChannel, connect_errors
from kvtransfer.transports.limits import check_limits
from kvtransfer.transports.rdma import CODEC, Hold, ProbeLost, QueuePairs, RdmaMemory, RdmaWelcome, RegionAddress
from kvtransfer.transports.rdma_verbs import Poster, QueuePairFailed, RdmaUnavailable

log = get_log("rdma")

SLEEP_MS_MAX = 1000
"""The posting thread looks about at least this often."""
DESTROY_RETRY_MS = 1000
DESTROY_TRIES_MAX = 3
"""While the link closes. Before, there is no limit."""


class Waker:
    """Any number of calls wake the thread once."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._woken = False

    def wake(self) -> None:
        """From any thread."""
        with self._lock:
            if not self._woken:
                self._woken = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """The thread is awake: calls from now on wake it again."""
        with self._lock:
            if self._woken:
                self._woken = False
                os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaLinkLimits(ChainLimits):
    """`connect_ms_max` includes the first data. A chain is posted with one doorbell, and its last write completes."""

    spin_us_max: int = 50
    """How long the thread polls for a completion before it sleeps; 0: never."""

    def __post_init__(self) -> None:
        check_limits(self, but=("spin_us_max",))
        if self.spin_us_max < 0 or self.wr_bytes_max > 1 << 30:
            raise ValueError("spin_us_max must not be negative, wr_bytes_max at most 1 GiB")


RDMA_LINK_LIMITS: Final = RdmaLinkLimits()


class RdmaUnproved(ConnectError):
    """The handshake is done, and no data arrives: the devices do not reach each other (a route, a VLAN, a filter of UDP
    port 4791, or a switch whose MTU is smaller than the devices')."""


def _all_came(acknowledged: asyncio.Future[None]) -> bool:
    """The devices reach each other, even if the receiver has stood still and not said so."""
    return acknowledged.done() and not acknowledged.cancelled() and acknowledged.exception() is None


def _concerns_the_way(error: BaseException) -> bool:
    """The error is about the way between the devices, not about one of the two sides."""
    refused = isinstance(error, ConnectError) and error.reason is wire.RefusalReason.PROBE
    return refused or isinstance(error, (TimeoutError, ProbeLost))


async def _prove(
    channel: WriterChannel,
    qps: QueuePairs,
    welcome: RdmaWelcome,
    loop: asyncio.AbstractEventLoop,
    acknowledged: asyncio.Future[None],
) -> None:
    """Returns when every queue pair has carried a whole packet there and its acknowledgement back, and the receiver has
    seen all of them. The way back needs no more: a receiver sends only acknowledgements.

    Raises ConnectError, ProbeLost, QueuePairFailed.
    """
    left = len(qps.ends.qps)

    def look() -> None:
        nonlocal left
        try:
            left -= qps.take_probes()
        except QueuePairFailed as error:
            loop.remove_reader(qps.fd)
            if not acknowledged.done():
                acknowledged.set_exception(error)
            return
        if not left and not acknowledged.done():
            acknowledged.set_result(None)

    qps.post_probes(welcome.ends, welcome.probes)
    loop.add_reader(qps.fd, look)
    ready = loop.create_task(channel.receive(wire.Ready))
    try:
        await asyncio.gather(acknowledged, ready)
    finally:
        loop.remove_reader(qps.fd)
        ready.cancel()
        await asyncio.wait([ready])  # it has to be off the socket before that is closed


def give_up(endpoint: DataEndpoint, hold: Hold, qps: QueuePairs | None, channel: WriterChannel | None) -> None:
    """A link that is not used after all. With a BYE the receiver need not fence the pair."""
    try:
        if qps is not None:
            qps.destroy()
    except QueuePairFailed as error:
        hold.leave_behind(f"{endpoint.address}: {error}")
        if channel is not None:
            channel.sock.close()
        return
    hold.release()
    if channel is not None:
        channel.leave(wire.Bye(epoch=endpoint.epoch))


class RdmaWriterLink(ChainLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    The end comes once: from `close`, which lets what is on its way arrive, or from a FENCE, EOF, an error of a queue
    pair or the loss of the device, which destroys the queue pairs. `link_lost` is called last, after every completion,
    and not for an end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.RDMA
    codec: ClassVar[wire.Codec] = CODEC
    failed = QueuePairFailed

    def __init__(
        self,
        channel: WriterChannel,
        *,
        qps: QueuePairs,
        hold: Hold,
        region: RegionAddress,
        welcome: RdmaWelcome,
        limits: RdmaLinkLimits,
        **parts: Unpack[LinkParts],
    ) -> None:
        """Takes over what is connected, and the hold. Use `connect`."""
        self._qps, self._hold, self._spin_us_max = qps, hold, limits.spin_us_max
        self._poster: Poster = qps.poster(dst_base=region.base, rkey=region.rkey)
        self._waker = Waker()
        self._tries_left: int | None = None
        self._repeats = RepeatLog(log, parts["loop"].time)
        try:
            super().__init__(
                channel,
                src_nbytes=hold.device.nbytes,
                dst_nbytes=welcome.region_nbytes,
                limits=replace(limits, chain_wrs_max=min(limits.chain_wrs_max, self._poster.chain_wrs_max)),
                qps=len(qps.ends.qps),
                send_wrs_max=hold.device.send_wrs_max,
                seals_max=min(qps.ends.seals_max, welcome.ends.seals_max),
                **parts,
            )
        except ConnectError:
            self._waker.close()
            raise

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        memory: RdmaMemory,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        limits: RdmaLinkLimits = RDMA_LINK_LIMITS,
    ) -> RdmaWriterLink:
        """Connect the queue pairs, prove the pair's secret and that data passes. `memory` has the source region, and
        outlives the link.

        Raises:
            RdmaUnproved: the devices do not reach each other.
            ConnectError: refused, unreachable, not the receiver, no device, or not done within `connect_ms_max`.
        """
        try:
            hold = memory.acquire()
        except RdmaUnavailable as error:
            raise ConnectError(str(error)) from error
        parts = LinkParts(endpoint=endpoint, pair=pair, events=events, loop=loop)
        channel: WriterChannel | None = None
        qps: QueuePairs | None = None
        acknowledged: asyncio.Future[None] | None = None
        with connect_errors(endpoint.address, limits.connect_ms_max, QueuePairFailed):
            try:
                async with asyncio.timeout(limits.connect_ms_max / 1000):
                    region = RegionAddress.decode(endpoint.address)
                    qps = QueuePairs(hold.device, hold.device.config.qps, sends=True)
                    link_id = int.from_bytes(os.urandom(8))
                    hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link_id, payload=qps.ends.encode())
                    channel = await WriterChannel.open(region.listens, loop, CODEC, address=endpoint.address)
                    welcome = RdmaWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
                    if len(welcome.ends.qps) != len(qps.ends.qps):
                        raise ConnectError(f"{endpoint.address}: {len(welcome.ends.qps)} queue pairs in the welcome")
                    qps.connect(welcome.ends)
                    acknowledged = loop.create_future()
                    await _prove(channel, qps, welcome, loop, acknowledged)
                link = cls(channel, qps=qps, hold=hold, region=region, welcome=welcome, limits=limits, **parts)
            except BaseException as error:
                give_up(endpoint, hold, qps, channel)
                if acknowledged is None or _all_came(acknowledged) or not _concerns_the_way(error):
                    raise
                late = f"no data arrives within {limits.connect_ms_max} ms"
                text = f"the devices do not reach each other: {late if isinstance(error, TimeoutError) else error}"
                reason = error.reason if isinstance(error, ConnectError) else None
                raise RdmaUnproved(f"{endpoint.address}: {text}", reason) from error
        hold.on_lost(link._device_lost)
        return link

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when the thread has ended, the queue pairs are destroyed, all is done.

        Queue pairs that cannot be destroyed are tried again a few times, then logged and left to the process's end.
        What was posted on them never completes, for the device may still read it.
        """
        if self._tries_left is None:
            self._tries_left = DESTROY_TRIES_MAX
        await super().close()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        own = {"device": self._hold.device.port.device, "queue_pairs": len(self._qps.ends.qps)}
        return {**super().describe(), **own}

    # Posting thread.

    def _post_all(self) -> None:
        spin_us = 0
        while not self._cut and not (self._ending and self._lanes.drained):
            self._post_what_fits()
            busy = self._lanes.on_the_way
            completions, waited_us = self._poster.wait(self._waker.fd, spin_us if busy else 0, SLEEP_MS_MAX)
            self._waker.clear()
            for number, status in completions:
                if status:
                    raise QueuePairFailed(f"a write completed with status {status}")
                self._lanes.completed(number)
            # Polling pays only where the last wait was so short that polling would have caught it.
            spin_us = self._spin_us_max if waited_us <= self._spin_us_max else 0

    def _post_what_fits(self) -> None:
        while not self._cut and (taken := self._lanes.take()) is not None:
            if isinstance(taken, SealPart):
                self._poster.post_seal(taken.lane, taken.seal, taken.number)
            else:
                ops = taken.part.ops
                self._poster.post_writes(taken.lane, ops.src, ops.dst, ops.nbytes, taken.number)

    # Control thread.

    def _wake(self) -> None:
        self._waker.wake()

    def _device_lost(self, reason: str) -> None:
        self._end(f"RDMA device lost: {reason}")

    def _thread_over(self, failure: str) -> None:
        self._destroy(say_bye=not failure and not self._cut)

    def _destroy(self, *, say_bye: bool) -> None:
        """The device reads the source until the last queue pair is destroyed: nothing completes before that."""
        try:
            self._qps.destroy()
        except QueuePairFailed as error:
            self._repeats.error("RDMA link keeps its source blocks", peer=self._address, reason=str(error))
            self._repeats.upkeep()
            if self._tries_left is not None:
                if not self._tries_left:
                    self._hold.leave_behind(self._address)
                    self._let_go(None)
                    return
                self._tries_left -= 1
            self._loop.call_later(DESTROY_RETRY_MS / 1000, lambda: self._destroy(say_bye=say_bye))
            return
        self._repeats.over(self._address, "its queue pairs are destroyed")
        self._lanes.lose()
        self._hold.release()
        self._let_go(wire.Bye(epoch=self._epoch) if say_bye else None)

    def _let_go(self, last: wire.Message | None) -> None:
        self._repeats.close()
        self._hang_up(last)
        self._waker.close()
        self._finish_soon()
