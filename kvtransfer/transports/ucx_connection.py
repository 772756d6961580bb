"""One writer's connection at the receiver: its limits, its state, and the seals of which something has come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field

from baton.ids import Epoch
from kvtransfer.transport import Seal
from kvtransfer.transports import ucx_wire as wire
from kvtransfer.transports.pair_fence import Evidence
from kvtransfer.transports.tcp_socket import TcpSocketOptions, close_politely
from kvtransfer.transports.ucx_connect import TLS_HELP, check_tls
from kvtransfer.transports.ucx_nixl import UcxAgent
from kvtransfer.transports.ucx_wire import RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxReceiverConfig:
    """Limits of one port. `connections_max` counts a connection until there is evidence for it, not until EOF."""

    tls: str = field(default="all", metadata={"help": TLS_HELP})
    connections_max: int = field(
        default=64, metadata={"help": "connections that may write; each has an agent of NIXL, with a thread"}
    )
    handshakes_max: int = field(
        default=64, metadata={"help": "connections at a time that have not proved themselves yet"}
    )
    pairs_max: int = field(default=1024, metadata={"help": "writer processes known at a time"})
    handshake_ms_max: int = field(default=10_000, metadata={"help": "how long a handshake may take"})
    accepts_per_wake_max: int = field(
        default=16, metadata={"help": "connections accepted in one go before others get their turn"}
    )
    accept_pause_ms: int = field(
        default=100,
        metadata={"help": "how long no connection is accepted after the process ran out of file descriptors"},
    )
    seals_max: int = field(default=512, metadata={"help": "seals of one connection of which only a part has come"})
    seal_poll_us: int = field(default=200, metadata={"help": "pause between two looks for the rest of a seal"})
    socket: TcpSocketOptions = field(default_factory=TcpSocketOptions)

    def __post_init__(self) -> None:
        check_tls(self.tls)
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


class SealRefused(Exception):
    """The writer breaks the protocol."""

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(reason.name)
        self.reason = reason


class SealParts:
    """Puts the message of each seal and its notification together, in whichever order they come. Pure."""

    def __init__(self, *, epoch: Epoch, seals_max: int) -> None:
        self._epoch = epoch
        self._seals_max = seals_max
        self._told: dict[int, Seal] = {}
        self._notified: set[int] = set()

    @property
    def waiting(self) -> bool:
        """A message has come whose notification has not."""
        return bool(self._told)

    def told(self, message: wire.SealSent) -> Seal | None:
        """The message: its seal if it is whole now. Raises SealRefused."""
        if message.seal.epoch != self._epoch or message.number in self._told:
            raise SealRefused(RefusalReason.SEAL)
        if message.number in self._notified:
            self._notified.discard(message.number)
            return message.seal
        self._told[message.number] = message.seal
        self._check()
        return None

    def notified(self, number: int) -> Seal | None:
        """A notification: the seal if it is whole now. Raises SealRefused."""
        if number in self._notified:
            raise SealRefused(RefusalReason.SEAL)
        if number not in self._told:
            self._notified.add(number)
            self._check()
        return self._told.pop(number, None)

    def _check(self) -> None:
        if len(self._told) + len(self._notified) > self._seals_max:
            raise SealRefused(RefusalReason.SEALS_MAX)


@dataclass(slots=True, kw_only=True, eq=False)
class Connection:
    """`opened`: it may write, from before its WELCOME until its agent is destroyed *and* there is evidence."""

    number: int
    sock: socket.socket | None
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    hello: wire.Hello | None = None
    nonce: bytes = b""
    handshake_timer: asyncio.TimerHandle | None = None
    poll_timer: asyncio.TimerHandle | None = None
    pidfd: int | None = None
    agent: UcxAgent | None = None
    work: asyncio.Task[None] | None = None
    """Making its agent, or destroying it."""
    answered: bool = False
    opened: bool = False
    refused: bool = False
    """It broke the protocol: only its BYE is still listened to."""
    evidence: Evidence | None = None
    """Once it is there the agent is destroyed, and then it is told."""
    seals: SealParts | None = None

    @property
    def may_be_read(self) -> bool:
        return self.sock is not None and self.evidence is None

    @property
    def has_more(self) -> bool:
        """Bytes of the writer have come that were not read yet."""
        if self.sock is None or self.evidence is not None:
            return False
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def send(self, message: wire.Message) -> None:
        """Best effort: the few bytes fit any socket buffer, and a writer has its own deadlines."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.send(wire.encode(message))

    def close_sock(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.sock is not None:
            loop.remove_reader(self.sock)
            close_politely(self.sock)
            self.sock = None

    def cancel_timers(self) -> None:
        for timer in (self.handshake_timer, self.poll_timer):
            if timer is not None:
                timer.cancel()
        self.handshake_timer = self.poll_timer = None

    def open_pidfd(self, pid: int) -> None:
        """Before the nonce is made: the answer to it shows that the process lived, so that the pidfd is its own."""
        with contextlib.suppress(OSError, ValueError):
            self.pidfd = os.pidfd_open(pid)

    def close_pidfd(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
