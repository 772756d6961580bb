"""The writer's handshake: one connection for messages, queue pairs for data, all of it proved."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Final

from baton.ids import Pair
from baton.log import get_log
from kvtransfer.transport import ConnectError, DataEndpoint
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import WriterChannel, connect_error
from kvtransfer.transports.limits import LinkLimits, check_limits
from kvtransfer.transports.rdma import CODEC, LinkEnds, RdmaWelcome, RegionAddress
from kvtransfer.transports.rdma_device import Hold, ProbeLost, QueuePairFailed, QueuePairs

log = get_log("rdma")


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaLinkLimits(LinkLimits):
    """`connect_ms_max` includes the first data."""

    chain_wrs_max: int = 32
    """Writes posted with one doorbell, the last completing."""
    chain_bytes_max: int = 4 << 20
    """Bytes of such a chain, unless one write is more."""
    wr_bytes_max: int = 1 << 20
    """Bytes of one write; longer ones are cut."""
    on_the_way_bytes_max: int = 32 << 20
    """Once this many bytes are posted and not completed, no more are posted."""
    spin_us_max: int = 50
    """How long the thread polls for a completion before it sleeps; 0: never."""

    def __post_init__(self) -> None:
        check_limits(self, but=("spin_us_max",))
        if self.spin_us_max < 0 or self.wr_bytes_max > 1 << 30:
            raise ValueError("spin_us_max must not be negative, wr_bytes_max at most 1 GiB")


RDMA_LINK_LIMITS: Final = RdmaLinkLimits()


class RdmaUnproved(ConnectError):
    """The handshake is done, the queue pairs are connected, and no data arrives: the devices do not reach each other (a
    route, a VLAN, a filter of UDP port 4791, or a switch whose MTU is smaller than the devices')."""


@dataclass(slots=True, kw_only=True)
class Connected:
    """A link that is made; everything in it is the caller's."""

    sock: socket.socket
    qps: QueuePairs
    region: RegionAddress
    region_nbytes: int
    peer: LinkEnds


async def connect(
    endpoint: DataEndpoint, pair: Pair, hold: Hold, loop: asyncio.AbstractEventLoop, limits: LinkLimits
) -> Connected:
    """Connect, prove the pair's secret, and then that data passes. Lets go of the hold where it fails.

    Raises:
        RdmaUnproved: messages arrive at the receiver, and data does not.
        ConnectError: refused, unreachable, whoever answers does not know the secret, or too late.
    """
    channel: WriterChannel | None = None
    qps: QueuePairs | None = None
    acknowledged: asyncio.Future[None] | None = None
    try:
        async with asyncio.timeout(limits.connect_ms_max / 1000):
            region = RegionAddress.decode(endpoint.address)
            qps = QueuePairs(hold.device, hold.device.config.qps, os.urandom, sends=True)
            link = int.from_bytes(os.urandom(8))
            hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link, payload=qps.ends.encode())
            channel = await WriterChannel.open(region.listens, loop, CODEC, address=endpoint.address)
            welcome = RdmaWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
            if len(welcome.ends.qps) != len(qps.ends.qps):
                raise ConnectError(f"{endpoint.address}: {len(welcome.ends.qps)} queue pairs in the welcome")
            qps.connect(welcome.ends)
            acknowledged = loop.create_future()
            await _prove(channel, qps, welcome, loop, acknowledged)
        return Connected(
            sock=channel.sock, qps=qps, region=region, region_nbytes=welcome.region_nbytes, peer=welcome.ends
        )
    except BaseException as error:
        give_up(endpoint, hold, qps, channel.sock if channel is not None else None)
        if acknowledged is not None and not _all_came(acknowledged) and _concerns_the_way(error):
            text = f"no data arrives within {limits.connect_ms_max} ms" if isinstance(error, TimeoutError) else error
            reason = error.reason if isinstance(error, ConnectError) else None
            raise RdmaUnproved(f"{endpoint.address}: the devices do not reach each other: {text}", reason) from error
        failed = connect_error(
            error, address=endpoint.address, connect_ms_max=limits.connect_ms_max, also=(QueuePairFailed,)
        )
        if failed is not None:
            raise failed from error
        raise


def _all_came(acknowledged: asyncio.Future[None]) -> bool:
    """The devices reach each other, whatever keeps the receiver from saying so: it may stand still for a while."""
    return acknowledged.done() and not acknowledged.cancelled() and acknowledged.exception() is None


def _concerns_the_way(error: BaseException) -> bool:
    """Or else of something that has happened to one of the two meanwhile."""
    refused = isinstance(error, ConnectError) and error.reason is wire.RefusalReason.PROBE
    return refused or isinstance(error, (TimeoutError, ProbeLost))


async def _prove(
    channel: WriterChannel,
    qps: QueuePairs,
    welcome: RdmaWelcome,
    loop: asyncio.AbstractEventLoop,
    acknowledged: asyncio.Future[None],
) -> None:
    """Returns when every queue pair has carried a whole packet there, its acknowledgement back, and the receiver has
    seen all of them. The other way needs no more than that: what a receiver sends are acknowledgements.

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


def give_up(endpoint: DataEndpoint, hold: Hold, qps: QueuePairs | None, sock: socket.socket | None) -> None:
    """A link that is not used after all. With a BYE the receiver need not fence the pair."""
    try:
        if qps is not None:
            qps.destroy()
    except QueuePairFailed as error:
        log.error("queue pairs are left to the end of the process", peer=endpoint.address, reason=str(error))
        hold.leave_behind()
        if sock is not None:
            sock.close()
        return
    hold.release()
    if sock is not None:
        wire.take_leave(sock, CODEC.encode(wire.Bye(epoch=endpoint.epoch)))
