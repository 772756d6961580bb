"""The receiving side of ucx: proves writers, has an agent of NIXL for each link, and fences by destroying it.

Evidence (DESIGN I3). Where the receiving worker itself moves every byte into the region (`MOVED_BY_THE_RECEIVER`), its
destruction is proof: a writer that is dead, stopped or cut off is fenced at once, and a link that ends without BYE is
itself the reason for a fence. With every other UCX transport (cma, verbs, all that UCX may choose by itself) it is not
proved, so it takes the writer besides: its BYE, sent after all it posted has completed and its agent is destroyed, or,
on the same host, the proof of its death by its pidfd. Without either the pair's blocks stay quarantined, however long.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from typing import ClassVar, Final

from baton.ids import Epoch, Pair
from baton.log import get_log
from kvtransfer.negotiation import host_identity
from kvtransfer.region import Region
from kvtransfer.transport import ReceiverEvents, TransportName
from kvtransfer.transports import ucx_wire as wire
from kvtransfer.transports.base_port import ListeningPort
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.pair_fence import Evidence
from kvtransfer.transports.seal_gather import SealGather, SealRefused, WholeSeal
from kvtransfer.transports.settings import UcxConfig
from kvtransfer.transports.tcp_socket import RECV_BYTES
from kvtransfer.transports.ucx_connection import Connection
from kvtransfer.transports.ucx_nixl import UcxAgent, UcxFailed, UcxUnavailable, destruction_fences, ucx_transports
from kvtransfer.transports.ucx_wire import RefusalReason

log = get_log("ucx")

UCX_PORT_LIMITS: Final = PortLimits(handshake_ms_max=10_000)
SEALS_PARTIAL_MAX: Final = 512
"""Seals of one connection of which only a part has come."""
SEAL_POLL_US: Final = 200
"""Pause between two looks for the rest of a seal."""


class UcxReceiverPort(ListeningPort[PortLimits, RefusalReason, Connection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). Everything runs on `loop`'s thread, but
    the making and destroying of agents, which take a pool's thread."""

    transport: ClassVar[TransportName] = TransportName.UCX

    def __init__(
        self,
        *,
        region: Region,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        config: UcxConfig | None = None,
        limits: PortLimits = UCX_PORT_LIMITS,
    ) -> None:
        """Listens at once. `region` is the caller's and outlives the port.

        Writers are told `advertise_host` instead of the host in `listen`, which it must be given for a wildcard.

        Raises:
            BatonError: BAD_ENDPOINT.
            OSError: the address cannot be listened on.
        """
        config = config or UcxConfig()
        super().__init__(
            listen=listen,
            advertise_host=advertise_host,
            events=events,
            loop=loop,
            randomness=randomness,
            limits=limits,
            reasons=RefusalReason,
        )
        self._region = region
        self._host = host_identity()
        self._config = config
        self._ucx_transports = ucx_transports(config.tls)
        self._fences_alone = destruction_fences(self._ucx_transports)

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`. How long it takes depends on the UCX transports: see the top of this file."""
        for number in self._fences.fence(pair, epoch):
            connection = self._connections[number]
            connection.send(wire.Fence(epoch=epoch))
            if self._fences_alone and connection.evidence is None:
                self._prove(connection, Evidence.WORKER)

    async def close(self) -> None:
        """Stop listening, destroy all agents; no event is delivered any more. Writers see EOF. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        self._fences.close()
        for connection in list(self._connections.values()):
            self._drop(connection)
        while works := [c.work for c in self._connections.values() if c.work is not None]:
            await asyncio.wait(works)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "ucx_transports": self._ucx_transports,
            "fence": "by the receiver alone" if self._fences_alone else "needs the writer's word, or its death",
            "connections_handshaking": sum(not c.opened for c in connections),
            "connections_writing": sum(c.opened and c.sock is not None for c in connections),
            "connections_unproved": sum(c.opened and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "destroy_failed")},
        }

    # Handshake.

    def _connection(self, number: int, sock: socket.socket) -> Connection:
        return Connection(number=number, sock=sock)

    def _handshaking(self, connection: Connection) -> bool:
        return not connection.opened

    def _challenge(self, connection: Connection, hello: wire.Hello) -> None:
        if self._secret(connection, hello.pair, hello.epoch) is None:
            return
        connection.hello = hello
        if not self._fences_alone and hello.host == self._host:
            connection.open_pidfd(hello.pid)
        connection.nonce = self._randomness(wire.NONCE_BYTES)
        connection.send(wire.Challenge(nonce=connection.nonce))

    def _answer(self, connection: Connection, hello: wire.Hello, answer: wire.Answer) -> None:
        secret = self._secret(connection, hello.pair, hello.epoch)
        if secret is None:
            return
        connection.answered = True
        if not hmac.compare_digest(answer.proof, wire.writer_proof(secret, hello, connection.nonce)):
            self._refuse(connection, RefusalReason.SECRET)
            return
        if sum(c.answered for c in self._connections.values()) > self._limits.connections_max:
            self._refuse(connection, RefusalReason.CONNECTIONS_MAX)
            return
        connection.work = self._loop.create_task(self._welcome(connection, hello))

    async def _welcome(self, connection: Connection, hello: wire.Hello) -> None:
        """Make the agent, and let the writer have what it needs to write."""
        name = f"receiver-{connection.number}-{hello.link:x}"
        try:
            agent = await self._loop.run_in_executor(None, UcxAgent, self._region.array_U8, name, self._config.tls)
        except UcxUnavailable as error:
            log.warning("no agent for a writer", reason=str(error))
            connection.work = None
            self._refuse(connection, RefusalReason.UCX)
            return
        connection.agent, connection.work = agent, None
        if connection.sock is None or self._closed:
            self._drop(connection)
            return
        secret = self._secret(connection, hello.pair, hello.epoch)
        if secret is None:
            return
        # Entered before the writer can have the key: from here on only evidence ends the connection.
        self._fences.opened(hello.pair, connection.number, hello.epoch)
        connection.opened = True
        connection.seals = SealGather(epoch=hello.epoch, ways=1, seals_max=SEALS_PARTIAL_MAX)
        connection.cancel_timers()
        if connection.pidfd is not None:
            self._loop.add_reader(connection.pidfd, self._writer_died, connection)
        metadata = agent.metadata()
        proof = wire.receiver_proof(secret, hello, connection.nonce, agent.base, agent.nbytes, metadata)
        connection.send(
            wire.Welcome(proof=proof, region_base=agent.base, region_nbytes=agent.nbytes, metadata=metadata)
        )

    # What writers say.

    def _read(self, connection: Connection) -> None:
        if connection.sock is None:
            return
        try:
            data = connection.sock.recv(RECV_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._eof(connection)
            return
        try:
            for message in connection.inbox.feed(data):
                self._handle(connection, message)
                if not connection.may_be_read:
                    return
        except wire.MalformedMessage as error:
            self._refuse(connection, error.reason)

    def _handle(self, connection: Connection, message: wire.Message) -> None:
        hello = connection.hello
        match message:
            case wire.Bye(epoch=epoch, drained=drained) if connection.opened and hello and epoch == hello.epoch:
                self._bye(connection, drained)
            case _ if connection.refused:
                return
            case wire.Hello() if hello is None:
                self._challenge(connection, message)
            case wire.Answer() if hello is not None and not connection.answered:
                self._answer(connection, hello, message)
            case wire.SealSent() if connection.opened:
                self._seal_sent(connection, message)
            case wire.Bye() if not connection.opened:
                self._drop(connection)
            case _:
                self._refuse(connection, RefusalReason.OUT_OF_ORDER)

    def _bye(self, connection: Connection, drained: bool) -> None:
        self._take_notifications(connection)
        # On the same host an agent that is destroyed has no put of its own under way. Elsewhere the network may.
        if connection.evidence is None and (drained or connection.pidfd is not None):
            self._prove(connection, Evidence.ACKNOWLEDGED)
        elif connection.evidence is None:
            self._eof(connection)

    def _eof(self, connection: Connection) -> None:
        """Without a BYE that counts. Seals of which all has come are delivered first."""
        if not connection.opened:
            self._drop(connection)
            return
        self._take_notifications(connection)
        if self._fences_alone and connection.evidence is None:
            self._prove(connection, Evidence.WORKER)
            self._fence_own(connection)
        else:
            # It may write on. What remains is its pidfd, if there is one, and a fence that waits.
            connection.close_sock(self._loop)

    def _writer_died(self, connection: Connection) -> None:
        assert connection.pidfd is not None
        self._loop.remove_reader(connection.pidfd)
        while connection.has_more:
            self._read(connection)
        if connection.evidence is None:
            self._prove(connection, Evidence.DEAD)
            self._fence_own(connection)

    def _seal_sent(self, connection: Connection, message: wire.SealSent) -> None:
        assert connection.seals is not None
        try:
            whole = connection.seals.told(message.number, message.seal)
        except SealRefused as error:
            self._refuse(connection, RefusalReason[error.fault.name])
            return
        self._tell(connection, whole)
        self._take_notifications(connection)

    def _take_notifications(self, connection: Connection) -> None:
        """Look for the other half of seals; come back soon while there are some that wait for it."""
        connection.poll_timer = None
        if connection.agent is None or connection.seals is None or connection.evidence or connection.refused:
            return
        try:
            for number in connection.agent.notified():
                self._tell(connection, connection.seals.arrived(number))
        except SealRefused as error:
            self._refuse(connection, RefusalReason[error.fault.name])
        except UcxFailed as error:
            log.warning("ucx link ended", reason=str(error))
            self._refuse(connection, RefusalReason.UCX)
        if connection.seals.waiting and connection.may_be_read and connection.poll_timer is None:
            connection.poll_timer = self._loop.call_later(SEAL_POLL_US / 1e6, self._take_notifications, connection)

    def _tell(self, connection: Connection, whole: WholeSeal | None) -> None:
        """Report a seal of which all has come."""
        hello = connection.hello
        if whole is None or hello is None:
            return
        self._counts["seals"] += 1
        connection.send(wire.Sealed(number=whole.number))
        if not self._closed:
            self._events.seal_landed(hello.pair, whole.seal)

    # Ends.

    def _fence_own(self, connection: Connection) -> None:
        """The link cannot go on, and may have lost bytes: fence its pair."""
        hello = connection.hello
        assert hello is not None
        if not self._closed and not self._fences.is_fencing(hello.pair, hello.epoch):
            self.fence(hello.pair, hello.epoch)

    def _refuse(self, connection: Connection, reason: RefusalReason) -> None:
        """Count, tell the peer, close. One that could write is fenced, and heard on where its BYE is needed."""
        self._refused[reason] += 1
        connection.refused = True
        connection.send(wire.Refused(reason=reason))
        if not connection.opened:
            self._drop(connection)
            return
        if self._fences_alone and connection.evidence is None:
            self._prove(connection, Evidence.WORKER)
        self._fence_own(connection)

    def _drop(self, connection: Connection) -> None:
        """A connection that never could write, or the end of the port."""
        connection.cancel_timers()
        connection.close_sock(self._loop)
        if connection.pidfd is not None:
            self._loop.remove_reader(connection.pidfd)
            connection.close_pidfd()
        if connection.work is not None:
            return  # it comes back here, or is on its way out already
        if connection.agent is None:
            self._connections.pop(connection.number, None)
            return
        connection.work = self._loop.create_task(self._destroy(connection))

    def _prove(self, connection: Connection, evidence: Evidence) -> None:
        """The one place where a connection stops counting as one that may write, as soon as its agent is destroyed."""
        assert connection.opened and connection.evidence is None, connection
        connection.evidence = evidence
        self._drop(connection)

    async def _destroy(self, connection: Connection) -> None:
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
        if connection.opened and not self._closed:
            assert connection.hello is not None and connection.evidence is not None
            self._fences.closed(connection.hello.pair, connection.number, connection.evidence, connection.hello.pid)
