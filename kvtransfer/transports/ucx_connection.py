"""One writer's connection at the receiver: its limits, and its state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass, field

from kvtransfer.transports import ucx_wire as wire
from kvtransfer.transports.pair_fence import Evidence
from kvtransfer.transports.seal_gather import SealGather
from kvtransfer.transports.ucx_nixl import UcxAgent
from kvtransfer.transports.words_connection import WordsConnection


@dataclass(slots=True, kw_only=True, eq=False)
class Connection(WordsConnection):
    """`opened`: it may write, from before its WELCOME until its agent is destroyed *and* there is evidence."""

    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    hello: wire.Hello | None = None
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
    seals: SealGather | None = None

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

    def _encode(self, message: wire.Message) -> bytes:
        return wire.encode(message)

    def cancel_timers(self) -> None:
        self.cancel_timer()
        if self.poll_timer is not None:
            self.poll_timer.cancel()
            self.poll_timer = None

    def open_pidfd(self, pid: int) -> None:
        """Before the nonce is made: the answer to it shows that the process lived, so that the pidfd is its own."""
        with contextlib.suppress(OSError, ValueError):
            self.pidfd = os.pidfd_open(pid)

    def close_pidfd(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
