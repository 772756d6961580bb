"""The writer's configuration, and its handshake: one connection for words, queue pairs for data, both sides proved."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from dataclasses import dataclass, field

from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError
from baton.ids import Pair
from kvtransfer.transport import DataEndpoint
from kvtransfer.transports import rdma_wire as wire
from kvtransfer.transports.rdma_device import QueuePairFailed, QueuePairs, RdmaConfig, RdmaDevice
from kvtransfer.transports.tcp_socket import RECV_BYTES, TcpSocketOptions, open_connection, tune


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaWriterConfig:
    """Limits of one link."""

    connect_ms_max: int = field(default=5000, metadata={"help": "how long connecting and the handshake may take"})
    chain_wrs_max: int = field(default=32, metadata={"help": "writes posted with one doorbell, the last completing"})
    chain_bytes_max: int = field(default=4 << 20, metadata={"help": "bytes of such a chain, unless one write is more"})
    wr_bytes_max: int = field(default=1 << 20, metadata={"help": "bytes of one write; longer ones are cut"})
    on_the_way_bytes_max: int = field(
        default=32 << 20, metadata={"help": "bytes handed to the device and not completed, at which no more are"}
    )
    abandoned_grants_max: int = field(default=1 << 20, metadata={"help": "abandoned grants that one link remembers"})
    seals_waiting_max: int = field(
        default=4096, metadata={"help": "seals that wait for a receiver that does not take them"}
    )
    bye_ms_max: int = field(
        default=2000, metadata={"help": "how long closing waits for the device to complete what was on its way"}
    )
    spin_us_max: int = field(default=50, metadata={"help": "polling for a completion before sleeping; 0: never"})
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    socket: TcpSocketOptions = field(default_factory=TcpSocketOptions)

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value <= 0 and name != "spin_us_max":
                raise ValueError(f"{name} must be positive, got {value}")
        if self.spin_us_max < 0 or self.wr_bytes_max > 1 << 30:
            raise ValueError("spin_us_max must not be negative, wr_bytes_max at most 1 GiB")


class RdmaConnectError(Exception):
    """No link came to be. `reason` is the receiver's, if it gave one."""

    def __init__(self, text: str, reason: wire.RefusalReason | None = None) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAddress:
    """`DataEndpoint.address` of this transport: where the receiver listens, and its region's address and key."""

    listens: str
    base: int
    rkey: int

    def encode(self) -> str:
        return f"{self.listens}/{self.base:016x}/{self.rkey:08x}"

    @classmethod
    def decode(cls, address: str) -> RegionAddress:
        """Raises ValueError or BatonError: not such an address."""
        listens, base, rkey = address.split("/")
        host, port = split_endpoint(listens)
        return cls(listens=join_endpoint(host, port), base=int(base, 16), rkey=int(rkey, 16))


@dataclass(slots=True, kw_only=True)
class Connected:
    """A welcomed link; everything in it is the caller's."""

    sock: socket.socket
    qps: QueuePairs
    region: RegionAddress
    region_nbytes: int
    peer: wire.LinkEnds


async def connect(
    endpoint: DataEndpoint, pair: Pair, device: RdmaDevice, loop: asyncio.AbstractEventLoop, config: RdmaWriterConfig
) -> Connected:
    """Connect and prove the pair's secret. The caller bounds the time.

    Raises:
        RdmaConnectError: refused, unreachable, or whoever answers does not know the secret.
    """
    sock: socket.socket | None = None
    qps: QueuePairs | None = None
    try:
        region = RegionAddress.decode(endpoint.address)
        qps = QueuePairs(device, config.rdma.qps, os.urandom, sends=True)
        link = int.from_bytes(os.urandom(8))
        hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link, ends=qps.ends)
        sock = await open_connection(region.listens, loop)
        tune(sock, config.socket)
        welcome = await _shake_hands(sock, endpoint, hello, loop)
        if len(welcome.ends.qps) != len(qps.ends.qps):
            raise RdmaConnectError(f"{endpoint.address}: {len(welcome.ends.qps)} queue pairs in the welcome")
        qps.connect(welcome.ends)
        return Connected(sock=sock, qps=qps, region=region, region_nbytes=welcome.region_nbytes, peer=welcome.ends)
    except BaseException as error:
        if qps is not None:
            qps.destroy()
        if sock is not None:
            take_leave(sock, endpoint)
        if isinstance(error, (OSError, ValueError, BatonError, wire.MalformedMessage, QueuePairFailed)) and not (
            isinstance(error, TimeoutError)
        ):
            raise RdmaConnectError(f"{endpoint.address}: {error}") from error
        raise


async def _shake_hands(
    sock: socket.socket, endpoint: DataEndpoint, hello: wire.Hello, loop: asyncio.AbstractEventLoop
) -> wire.Welcome:
    inbox = wire.Inbox()
    await loop.sock_sendall(sock, wire.encode(hello))
    challenge = await _receive(sock, inbox, loop)
    if not isinstance(challenge, wire.Challenge):
        raise RdmaConnectError(f"{endpoint.address}: {type(challenge).__name__} instead of a challenge")
    proof = wire.writer_proof(endpoint.secret, hello, challenge.nonce)
    await loop.sock_sendall(sock, wire.encode(wire.Answer(proof=proof)))
    welcome = await _receive(sock, inbox, loop)
    if not isinstance(welcome, wire.Welcome):
        raise RdmaConnectError(f"{endpoint.address}: {type(welcome).__name__} instead of a welcome")
    wanted = wire.receiver_proof(endpoint.secret, hello, challenge.nonce, welcome.region_nbytes, welcome.ends)
    if not hmac.compare_digest(welcome.proof, wanted):
        raise RdmaConnectError(f"{endpoint.address}: whoever listens there does not know the pair's secret")
    if not inbox.empty:
        raise RdmaConnectError(f"{endpoint.address}: the receiver speaks out of turn")
    return welcome


async def _receive(sock: socket.socket, inbox: wire.Inbox, loop: asyncio.AbstractEventLoop) -> wire.Message:
    """The next message: the receiver says one at a time until it has welcomed us."""
    while True:
        data = await loop.sock_recv(sock, RECV_BYTES)
        if not data:
            raise RdmaConnectError("the receiver closed the connection")
        for message in inbox.feed(data):
            if isinstance(message, wire.Refused):
                raise RdmaConnectError(f"refused by the receiver: {message.reason.name}", message.reason)
            return message


def take_leave(sock: socket.socket, endpoint: DataEndpoint) -> None:
    """A link that is not used after all: with a BYE the receiver need not fence the pair."""
    try:
        sock.send(wire.encode(wire.Bye(epoch=endpoint.epoch)))
    except OSError:
        pass
    finally:
        sock.close()
