"""What the tcp tests share: a port to talk to, and a stream spoken by hand."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from baton.ids import Epoch, GrantId
from kvtransfer.region import Region
from kvtransfer.transport import WriteRanges
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.receiver_port import PortLimits
from kvtransfer.transports.tcp import (
    CODEC,
    MESSAGE_BYTES,
    TCP_PORT_LIMITS,
    Data,
    TcpHello,
    TcpReceiverPort,
)
from tests.support.shm_harness import DEADLINE_S, REGION_NBYTES, Recorder, grant_of, pair_of

EPOCH = Epoch(3)
PAIR = pair_of(2)
GRANT = grant_of(7)
PAYLOAD = bytes(range(1, 201)) * 5


class First(WriteRanges):
    """Ranges of a grant that may write the first bytes of the region."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        return bool((dst_S + nbytes_S <= self.nbytes).all())


class Receiving:
    def __init__(self, limits: PortLimits) -> None:
        self.events = Recorder()
        self.region = Region.create(REGION_NBYTES, "test-region")
        self.port = TcpReceiverPort(
            region=self.region,
            events=self.events,
            limits=limits,
        )
        self.endpoint = self.port.expect(PAIR, EPOCH)

    @property
    def refused(self) -> object:
        return self.port.describe()["refused"]


async def wait_until(holds: Callable[[], bool]) -> None:
    """For what another thread does without an event."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


@asynccontextmanager
async def receiving(limits: PortLimits = TCP_PORT_LIMITS) -> AsyncIterator[Receiving]:
    it = Receiving(limits)
    try:
        yield it
    finally:
        await it.port.close()
        it.region.close()


class Raw:
    """A welcomed stream, spoken by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def send(self, *parts: bytes) -> None:
        await self._loop.sock_sendall(self.sock, b"".join(parts))

    async def receive(self) -> wire.Message | None:
        """The next message; None: closed."""
        packet = bytearray()
        async with asyncio.timeout(DEADLINE_S):
            while len(packet) < MESSAGE_BYTES:
                data = await self._loop.sock_recv(self.sock, MESSAGE_BYTES - len(packet))
                if not data:
                    assert not packet
                    return None
                packet += data
        return CODEC.decode(packet)


@asynccontextmanager
async def raw(r: Receiving, stream: int = 0, link: int = 1) -> AsyncIterator[Raw]:
    hello = wire.Hello(pair=PAIR, epoch=EPOCH, link=link, payload=TcpHello(stream=stream).encode())
    address, loop = r.endpoint.address, asyncio.get_running_loop()
    channel = await wire.WriterChannel.open(address, loop, CODEC, address=address)
    with channel.sock:
        await channel.shake_hands(r.endpoint.secret, hello)
        yield Raw(channel.sock)


def table(*segments: tuple[int, int]) -> bytes:
    return np.array(segments, dtype="<i8").tobytes()


def head(
    sequence: int = 0,
    *,
    epoch: Epoch = EPOCH,
    grant: GrantId = GRANT,
    segments: int = 1,
    nbytes: int = len(PAYLOAD),
) -> bytes:
    return CODEC.encode(Data(sequence=sequence, epoch=epoch, grant=grant, segments=segments, payload_nbytes=nbytes))


GOOD = head() + table((0, len(PAYLOAD))) + PAYLOAD
