"""The receiving side of ucx: proves writers, has a NIXL agent for each link, and fences by destroying it.

Evidence (I3). Where the receiving worker itself moves every byte into the region (`MOVED_BY_THE_RECEIVER`), its
destruction is proof: a writer that is dead, stopped or cut off is fenced at once, and a link that ends without BYE is
itself the reason for a fence. With every other UCX transport (cma, verbs, all that UCX may choose by itself) this is
not proved. There it also takes the writer: its BYE, sent after all its posts have completed and its agent is destroyed,
or, on the same host, the proof of its death by its pidfd. Without either the pair's blocks stay quarantined.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from typing import ClassVar, Final

from baton.log import get_log
from kvtransfer.link import host_identity
from kvtransfer.region import Region
from kvtransfer.transport import ReceiverEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import ChannelState, Refusal, RefusalReason, SealGather
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.receiver_port import Connection, Evidence, ListeningPort
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.ucx import (
    CODEC,
    UcxAgent,
    UcxFailed,
    UcxHello,
    UcxUnavailable,
    UcxWelcome,
    destruction_fences,
    ucx_transports,
)

log = get_log("ucx")

UCX_PORT_LIMITS: Final = PortLimits(handshake_ms_max=10_000)
SEALS_PARTIAL_MAX: Final = 512
"""Seals of one connection of which only a part has come."""
SEAL_POLL_US: Final = 200
"""Pause between two looks for the rest of a seal."""


@dataclass(slots=True, kw_only=True, eq=False)
class UcxConnection(Connection):
    """It may write from before its WELCOME until its agent is destroyed *and* there is evidence."""

    poll_timer: asyncio.TimerHandle | None = None
    pidfd: int | None = None
    agent: UcxAgent | None = None
    work: asyncio.Task[None] | None = None
    """Making its agent, or destroying it."""
    evidence: Evidence | None = None
    """Once it is there the agent is destroyed, and then the evidence counts."""

    @property
    def has_more(self) -> bool:
        """Unread bytes of the writer have come."""
        if self.sock is None:
            return False
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False


class UcxReceiverPort(ListeningPort[PortLimits, UcxConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). A pool's thread makes and destroys
    agents."""

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self,
        *,
        region: Region,
        events: ReceiverEvents,
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        config: UcxConfig | None = None,
        limits: PortLimits = UCX_PORT_LIMITS,
    ) -> None:
        """See `ListeningPort`. `region` is the caller's and outlives the port.

        Raises OSError also where the host's identity cannot be read.
        """
        self._host = host_identity()
        self._config = config or UcxConfig()
        self._region = region
        self._ucx_transports = ucx_transports(self._config.tls)
        self._fences_alone = destruction_fences(self._ucx_transports)
        super().__init__(UcxConnection, listen=listen, advertise_host=advertise_host, events=events, limits=limits)

    async def close(self) -> None:
        """See `BasePort.close`. Returns when all agents are destroyed."""
        await super().close()
        while works := [c.work for c in self._connections.values() if c.work is not None]:
            await asyncio.wait(works)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "ucx_transports": self._ucx_transports,
            "fence": "by the receiver alone" if self._fences_alone else "needs the writer's BYE, or its death",
            "connections_unproved": sum(c.channel.opened and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "destroy_failed")},
        }

    # Handshake.

    def _is_writing(self, connection: UcxConnection) -> bool:
        return connection.channel.opened and connection.sock is not None

    def _identify(self, connection: UcxConnection) -> None:
        hello = UcxHello.decode(connection.hello.payload)
        if not self._fences_alone and hello.host == self._host:
            # The answer to the nonce, which is sent after this, shows that the process is alive: the pidfd is its own.
            with contextlib.suppress(OSError, ValueError):
                connection.pidfd = os.pidfd_open(hello.pid)

    def _prepare(self, connection: UcxConnection) -> None:
        connection.work = self._loop.create_task(self._make_agent(connection))

    async def _make_agent(self, connection: UcxConnection) -> None:
        name = f"receiver-{connection.number}-{connection.hello.link:x}"
        try:
            agent = await self._loop.run_in_executor(None, UcxAgent, self._region.array_U8, name, self._config.tls)
        except UcxUnavailable as error:
            log.warning("no agent for a writer", reason=str(error))
            connection.work = None
            if connection.sock is None:
                self._drop(connection)
            else:
                self._handle(connection, wire.Refuse(reason=RefusalReason.UCX))
            return
        connection.agent, connection.work = agent, None
        if connection.sock is None or self._closed:
            self._drop(connection)
            return
        welcome = UcxWelcome(region_base=agent.base, region_nbytes=agent.nbytes, metadata=agent.metadata())
        self._handle(connection, wire.Prepared(payload=welcome.encode()))

    def _opened(self, connection: UcxConnection) -> None:
        connection.seals = SealGather(epoch=connection.epoch, ways=1, seals_max=SEALS_PARTIAL_MAX)
        if connection.pidfd is not None:
            self._loop.add_reader(connection.pidfd, self._writer_died, connection)

    # What writers send.

    def _left(self, connection: UcxConnection, *, drained: bool) -> None:
        self._take_notifications(connection)
        # On the same host an agent that is destroyed has no put of its own under way. Elsewhere the network may.
        if connection.evidence is None and (drained or connection.pidfd is not None):
            self._prove(connection, Evidence.ACKNOWLEDGED)
        elif connection.evidence is None:
            self._lost(connection)

    def _lost(self, connection: UcxConnection) -> None:
        """Without a BYE that counts. Whole seals are delivered first."""
        self._take_notifications(connection)
        if self._fences_alone and connection.evidence is None:
            self._prove(connection, Evidence.WORKER)
            self._fence_own(connection)
        else:
            # It may write on, until its pidfd, if there is one, proves its death.
            connection.close_sock(self._loop)

    def _writer_died(self, connection: UcxConnection) -> None:
        assert connection.pidfd is not None
        self._loop.remove_reader(connection.pidfd)
        while connection.has_more:
            self._read(connection)
        if connection.evidence is None:
            self._prove(connection, Evidence.DEAD)
            self._fence_own(connection)

    def _deliver(self, connection: UcxConnection, message: wire.SealSent | wire.LateBye) -> None:
        super()._deliver(connection, message)
        self._take_notifications(connection)

    def _take_notifications(self, connection: UcxConnection) -> None:
        """Look for the other half of seals; come back soon while some wait for it."""
        connection.poll_timer = None
        believed = connection.channel.state in (ChannelState.OPEN, ChannelState.LOST)
        if connection.agent is None or connection.seals is None or connection.evidence or not believed:
            return
        try:
            for number in connection.agent.notified():
                self._report(connection, connection.seals.number_came(number))
        except Refusal as refusal:
            self._handle(connection, wire.Refuse(reason=refusal.reason))
        except UcxFailed as error:
            log.warning("ucx link ended", reason=str(error))
            self._handle(connection, wire.Refuse(reason=RefusalReason.UCX))
        wanted = connection.seals.waiting and connection.sock is not None
        if wanted and connection.evidence is None and connection.poll_timer is None:
            connection.poll_timer = self._loop.call_later(SEAL_POLL_US / 1e6, self._take_notifications, connection)

    # Ends.

    def _broken(self, connection: UcxConnection, reason: RefusalReason) -> None:
        """Its pair is fenced. Where its BYE is needed the port goes on reading."""
        del reason  # the base has counted it
        self._fenced(connection)
        self._fence_own(connection)

    def _fenced(self, connection: UcxConnection) -> None:
        if self._fences_alone and connection.evidence is None:
            self._prove(connection, Evidence.WORKER)

    def _drop(self, connection: UcxConnection) -> None:
        """Close one that never could write, or that cannot any more; at the end of the port any."""
        connection.close_sock(self._loop)
        if connection.poll_timer is not None:
            connection.poll_timer.cancel()
            connection.poll_timer = None
        if connection.pidfd is not None:
            self._loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None
        if connection.work is not None:
            return  # it comes back here, or is on its way out already
        if connection.agent is None:
            self._connections.pop(connection.number, None)
            return
        connection.work = self._loop.create_task(self._destroy(connection))

    def _prove(self, connection: UcxConnection, evidence: Evidence) -> None:
        """The one place where a connection stops counting as one that may write, as soon as its agent is destroyed."""
        assert connection.channel.opened and connection.evidence is None, connection
        connection.evidence = evidence
        self._drop(connection)

    async def _destroy(self, connection: UcxConnection) -> None:
        assert connection.agent is not None
        try:
            await self._loop.run_in_executor(None, connection.agent.destroy)
        except AssertionError as error:
            # A bug of ours: its worker may live. There is no evidence, and never will be.
            self._counts["destroy_failed"] += 1
            connection.work = None
            connection.agent = None
            log.error("a fence has no evidence", reason=str(error))
            if self._closed:
                self._connections.pop(connection.number, None)
            return
        connection.agent = connection.work = None
        self._connections.pop(connection.number, None)
        if connection.channel.opened and not self._closed:
            assert connection.evidence is not None
            pid = UcxHello.decode(connection.hello.payload).pid
            self._proved(connection, connection.evidence, pid)
