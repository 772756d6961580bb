"""The writer's handshake: one connection for words, and an agent of its own for data."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from baton.errors import BatonError
from baton.ids import Pair
from kvtransfer.negotiation import host_identity
from kvtransfer.transport import ConnectError, DataEndpoint
from kvtransfer.transports import ucx_wire as wire
from kvtransfer.transports.connect_words import ConnectWords, Dialect
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx_nixl import UcxAgent, UcxFailed, UcxUnavailable

UCX_LINK_LIMITS: Final = LinkLimits(connect_ms_max=10_000)


class UcxConnectError(ConnectError):
    """Of a ucx link."""


_DIALECT: Dialect[wire.Message] = Dialect(
    encode=wire.encode, inbox=wire.Inbox, refused=wire.Refused, error=UcxConnectError
)


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
        UcxConnectError: refused, unreachable, whoever answers does not know the secret, no UCX, or too late.
    """
    hello = wire.Hello(
        pair=pair, epoch=endpoint.epoch, link=int.from_bytes(os.urandom(8)), host=host_identity(), pid=os.getpid()
    )
    making = loop.run_in_executor(None, UcxAgent, source_U8, f"writer-{hello.link:x}", config.tls)
    words: ConnectWords[wire.Message] | None = None
    try:
        async with asyncio.timeout(limits.connect_ms_max / 1000):
            words = await ConnectWords.open(endpoint.address, loop, _DIALECT, address=endpoint.address)
            welcome = await _shake_hands(words, endpoint, hello)
            agent = await asyncio.shield(making)
        loading = loop.run_in_executor(
            None, agent.load_peer, welcome.metadata, welcome.region_base, welcome.region_nbytes
        )
        if cancelled := await _until_over(loading):
            raise cancelled
        loading.result()
        return Connected(sock=words.sock, agent=agent, region_nbytes=welcome.region_nbytes)
    except BaseException as error:
        cancelled = await _until_over(making)
        if making.exception() is None:
            cancelled = await _until_over(loop.run_in_executor(None, making.result().destroy)) or cancelled
        if words is not None:
            words.leave(wire.Bye(epoch=endpoint.epoch, drained=True))
        if cancelled is not None:
            raise cancelled from error
        if isinstance(error, TimeoutError):
            raise UcxConnectError(f"{endpoint.address}: no link within {limits.connect_ms_max} ms") from error
        if isinstance(error, (OSError, BatonError, wire.MalformedMessage, UcxFailed, UcxUnavailable)):
            raise UcxConnectError(f"{endpoint.address}: {error}") from error
        raise


async def _until_over(work: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """A thread cannot be stopped in the middle of a call: one who is cancelled waits all the same, and is told here."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    return cancelled


async def _shake_hands(words: ConnectWords[wire.Message], endpoint: DataEndpoint, hello: wire.Hello) -> wire.Welcome:
    await words.say(hello)
    challenge = await words.hear(wire.Challenge)
    await words.say(wire.Answer(proof=wire.writer_proof(endpoint.secret, hello, challenge.nonce)))
    w = await words.hear(wire.Welcome)
    wanted = wire.receiver_proof(endpoint.secret, hello, challenge.nonce, w.region_base, w.region_nbytes, w.metadata)
    if not hmac.compare_digest(w.proof, wanted):
        raise UcxConnectError(f"{endpoint.address}: whoever listens there does not know the pair's secret")
    return w
