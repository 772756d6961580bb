"""Transport over what UCX finds (RoCE, InfiniBand, EFA, tcp, shared memory), through NIXL's Python package.

Optional, and never chosen unless `transports` names it. Here are what its HELLO and WELCOME carry, the writer's
handshake, and whether a node offers it. `ucx_nixl` has the agent of one link (NIXL is imported there, when the first is
made), `ucx_receiver` the port, `ucx_writer` the link.

A seal is a SEAL on the control channel, and beside it a NIXL notification with its number; SEALED says that both have
come. The BYE's `drained` says that everything that was handed to UCX has completed, so that no write is in doubt.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from baton.errors import InvalidField
from baton.ids import Pair
from baton.log import get_log
from kvtransfer.link import host_identity
from kvtransfer.transport import DataEndpoint, TransportName
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import WriterChannel, connect_error
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx_nixl import UcxAgent, UcxFailed, UcxUnavailable, destruction_fences, ucx_transports

log = get_log("ucx")

HOST_BYTES: Final = 16
METADATA_BYTES_MAX: Final = 1 << 16
_TRIAL_BYTES: Final = 1 << 12
_HELLO: Final = struct.Struct(f"<{HOST_BYTES}sI")
_WELCOME: Final = struct.Struct("<QQ")
CODEC: Final = wire.Codec(TransportName.UCX, payload_bytes_max=_WELCOME.size + METADATA_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxHello:
    """`host` is `link.host_identity`, 32 hexadecimal digits; `pid` is of use only where it is the same."""

    host: str
    pid: int

    def encode(self) -> bytes:
        raw = bytes.fromhex(self.host)
        assert len(raw) == HOST_BYTES, self.host
        return _HELLO.pack(raw, self.pid)

    @classmethod
    def decode(cls, payload: bytes) -> UcxHello:
        """Raises MalformedMessage."""
        if len(payload) != _HELLO.size:
            raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a HELLO")
        host, pid = _HELLO.unpack(payload)
        return cls(host=host.hex(), pid=pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxWelcome:
    """Where the receiver's region is, and the metadata of its agent, which a writer needs to write into it."""

    region_base: int
    region_nbytes: int
    metadata: bytes

    def encode(self) -> bytes:
        assert 0 < len(self.metadata) <= METADATA_BYTES_MAX, len(self.metadata)
        return _WELCOME.pack(self.region_base, self.region_nbytes) + self.metadata

    @classmethod
    def decode(cls, payload: bytes) -> UcxWelcome:
        """Raises MalformedMessage."""
        if len(payload) <= _WELCOME.size:
            raise wire.MalformedMessage(f"a payload of {len(payload)} bytes in a WELCOME")
        base, nbytes = _WELCOME.unpack_from(payload)
        return cls(region_base=base, region_nbytes=nbytes, metadata=payload[_WELCOME.size :])


UCX_LINK_LIMITS: Final = LinkLimits(connect_ms_max=10_000)


@dataclass(slots=True, kw_only=True)
class Connected:
    """A welcomed link; both are the caller's."""

    sock: socket.socket
    agent: UcxAgent
    region_nbytes: int


async def connect(
    endpoint: DataEndpoint,
    pair: Pair,
    source_U8: np.ndarray,
    loop: asyncio.AbstractEventLoop,
    *,
    config: UcxConfig,
    limits: LinkLimits,
) -> Connected:
    """Connect, prove the pair's secret, and have an agent that may write to the receiver's.

    Raises:
        ConnectError: refused, unreachable, whoever answers does not know the secret, no UCX, or too late.
    """
    link = int.from_bytes(os.urandom(8))
    own = UcxHello(host=host_identity(), pid=os.getpid())
    hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link, payload=own.encode())
    making = loop.run_in_executor(None, UcxAgent, source_U8, f"writer-{link:x}", config.tls)
    channel: WriterChannel | None = None
    try:
        async with asyncio.timeout(limits.connect_ms_max / 1000):
            channel = await WriterChannel.open(endpoint.address, loop, CODEC, address=endpoint.address)
            welcome = UcxWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
            agent = await asyncio.shield(making)
        loading = loop.run_in_executor(
            None, agent.load_peer, welcome.metadata, welcome.region_base, welcome.region_nbytes
        )
        if cancelled := await _until_over(loading):
            raise cancelled
        loading.result()
        return Connected(sock=channel.sock, agent=agent, region_nbytes=welcome.region_nbytes)
    except BaseException as error:
        cancelled = await _until_over(making)
        if making.exception() is None:
            cancelled = await _until_over(loop.run_in_executor(None, making.result().destroy)) or cancelled
        if channel is not None:
            channel.leave(wire.Bye(epoch=endpoint.epoch))
        if cancelled is not None:
            raise cancelled from error
        failed = connect_error(
            error,
            address=endpoint.address,
            connect_ms_max=limits.connect_ms_max,
            also=(UcxFailed, UcxUnavailable),
        )
        if failed is not None:
            raise failed from error
        raise


async def _until_over(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """A thread cannot be stopped in the middle of a call: a cancelled caller waits all the same. Returns what cancelled
    it."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


def try_ucx(tls: str) -> str:
    """Make an agent and destroy it: the UCX transports that are used. Takes up to a second. Raises UcxUnavailable."""
    UcxAgent(np.zeros(_TRIAL_BYTES, np.uint8), "trial", tls).destroy()
    return ucx_transports(tls)


def usable(transports: Sequence[TransportName], tls: str) -> bool:
    """Whether ucx is to be offered and can be, which is logged. Called once, at start: NIXL is loaded here.

    Raises:
        InvalidField: ucx alone is to be offered, and it does not work here.
    """
    if TransportName.UCX not in transports:
        return False
    try:
        used = try_ucx(tls)
    except UcxUnavailable as error:
        if len(transports) == 1:
            raise InvalidField(
                "transports", f"has ucx alone, which does not work here: {error}. `baton doctor` says more"
            ) from error
        log.warning("ucx is not offered", reason=str(error))
        return False
    log.info("ucx is offered", ucx_transports=used, fence="own" if destruction_fences(used) else "needs the writer")
    return True
