"""The receiving side of shm: hands the region's descriptor to writers that prove themselves, and keeps watch over them.

Evidence (DESIGN I3) is the writer's BYE, or its pidfd having become readable. The kernel marks a pidfd readable only
when every thread of the process has left user mode for good, so no store of it is still to come. A closed socket
proves nothing: the writer may be alive with the region mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final

from baton.ids import Epoch, Pair
from kvtransfer.region import SharedRegion
from kvtransfer.transport import ReceiverEvents, Seal, TransportName
from kvtransfer.transports import shm_wire as wire
from kvtransfer.transports.base_port import BasePort
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.pair_fence import Evidence, PairFence
from kvtransfer.transports.shm_wire import RefusalReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmPortLimits(PortLimits):
    handshake_ms_max: int = 2000
    late_byes_max: int = 64
    """Connections beyond `connections_max`, open for a late BYE that makes room, and then closed."""
    messages_per_wake_max: int = 64
    """Messages read from one connection before others have a turn."""


SHM_PORT_LIMITS: Final = ShmPortLimits()


class _Stage(Enum):
    HELLO = 1
    CHALLENGED = 2
    WRITING = 3
    REFUSED = 4
    """Broke the protocol while it could write: only its BYE is still listened to."""
    SURPLUS = 5
    """Beyond `connections_max`: a late BYE is listened to, since it ends another connection, and nothing else."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    number: int
    sock: socket.socket | None
    pid: int
    stage: _Stage = _Stage.HELLO
    hello: wire.Hello | None = None
    nonce: bytes = b""
    pidfd: int | None = None
    handshake_timer: asyncio.TimerHandle | None = None
    fence_told: bool = False

    @property
    def may_write(self) -> bool:
        return self.stage in (_Stage.WRITING, _Stage.REFUSED)

    @property
    def epoch(self) -> Epoch | None:
        return self.hello.epoch if self.hello is not None else None


class ShmReceiverPort(BasePort[ShmPortLimits, RefusalReason, _Connection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). Everything runs on `loop`'s thread.

    Listens in the abstract socket namespace: a killed process leaves no file behind, and no directory is needed. Such a
    name has no permissions; the peer's user id and the pair's secret take their place. Writer and receiver must share
    a network namespace (to meet) and a PID namespace (for the pidfd).
    """

    transport: ClassVar[TransportName] = TransportName.SHM

    def __init__(
        self,
        *,
        region: SharedRegion,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        limits: ShmPortLimits = SHM_PORT_LIMITS,
    ) -> None:
        """Listens at once. `region` is the caller's and outlives the port; `randomness(n)` gives n secret bytes."""
        address = wire.ADDRESS_PREFIX + randomness(16).hex()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(wire.socket_address(address))
            listener.listen(limits.connections_max)
        except BaseException:
            listener.close()
            raise
        super().__init__(
            listener=listener,
            address=address,
            events=events,
            loop=loop,
            randomness=randomness,
            limits=limits,
            reasons=RefusalReason,
        )
        self._region = region

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`. A repeat before its `writer_gone` changes nothing; after it, it is answered again.

        A writer that lives and runs drains, unmaps and acknowledges; a stopped one keeps the fence waiting.
        """
        for number in self._fences.fence(pair, epoch):
            connection = self._connections[number]
            if not connection.fence_told:
                connection.fence_told = True
                self._send(connection, wire.Fence(epoch=epoch))

    async def close(self) -> None:
        """Stop listening and watching; no event is delivered any more. Writers see EOF. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        for connection in list(self._connections.values()):
            self._close_socket(connection)
            self._forget(connection)
        self._fences.close()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "region_bytes": self._region.nbytes,
            "region_huge_bytes": self._region.huge_bytes,
            "connections_handshaking": sum(not c.may_write for c in connections),
            "connections_writing": sum(c.may_write and c.sock is not None for c in connections),
            "connections_unproved": sum(c.may_write and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "seals_refused")},
        }

    def _admit(self, sock: socket.socket) -> None:
        pid, uid = wire.peer_credentials(sock)
        self._connections_made += 1
        connection = _Connection(number=self._connections_made, sock=sock, pid=pid)
        surplus = len(self._connections) - self._limits.connections_max
        if surplus >= 0:
            connection.stage = _Stage.SURPLUS
        self._connections[connection.number] = connection
        self._loop.add_reader(sock, self._read, connection)
        connection.handshake_timer = self._loop.call_later(
            self._limits.handshake_ms_max / 1000, self._refuse, connection, RefusalReason.DEADLINE
        )
        if uid != os.geteuid():
            self._refuse(connection, RefusalReason.USER)
        elif surplus >= self._limits.late_byes_max:
            self._refuse(connection, RefusalReason.CONNECTIONS_MAX)

    def _read(self, connection: _Connection) -> None:
        for _ in range(self._limits.messages_per_wake_max):
            if not self._read_one(connection):
                return

    def _read_one(self, connection: _Connection) -> bool:
        """Handle one packet; False when there is none, or the socket is closed."""
        if connection.sock is None:
            return False
        try:
            packet, _, flags, _ = connection.sock.recvmsg(wire.MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer closed with a message of ours unread. The kernel reports that once, and ahead of the packets
            # that the peer sent before: its BYE may be among them.
            return True
        except OSError:
            self._lose(connection)
            return False
        if not packet:
            self._lose(connection)
            return False
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._refuse(connection, RefusalReason.MALFORMED)
            return True
        try:
            message = wire.decode(packet)
        except wire.MalformedMessage as error:
            self._refuse(connection, error.reason)
            return True
        self._handle(connection, message)
        return True

    def _handle(self, connection: _Connection, message: wire.Message) -> None:
        match connection.stage, message:
            case _Stage.HELLO, wire.Hello():
                self._challenge(connection, message)
            case _Stage.CHALLENGED, wire.Answer():
                self._welcome(connection, message)
            case ((_Stage.HELLO | _Stage.SURPLUS), wire.LateBye(nonce=nonce)):
                self._lose(connection)
                self._late_bye(nonce)
            case _Stage.WRITING, Seal():
                self._seal(connection, message)
            case _Stage.REFUSED, Seal():
                self._counts["seals_refused"] += 1
            case ((_Stage.WRITING | _Stage.REFUSED), wire.Bye()) if connection.epoch == message.epoch:
                self._prove(connection, Evidence.ACKNOWLEDGED)
            case _Stage.SURPLUS, _:
                self._refuse(connection, RefusalReason.CONNECTIONS_MAX)
            case ((_Stage.HELLO | _Stage.CHALLENGED), wire.Bye()):
                self._lose(connection)
            case _:
                self._refuse(connection, RefusalReason.OUT_OF_ORDER)

    def _challenge(self, connection: _Connection, hello: wire.Hello) -> None:
        reason = refusal_of(self._fences.book(hello.pair), hello)
        if reason is not None:
            self._refuse(connection, reason)
            return
        try:
            # Pid 0: the peer lives in another PID namespace.
            connection.pidfd = os.pidfd_open(connection.pid) if connection.pid > 0 else None
        except OSError:
            connection.pidfd = None
        if connection.pidfd is None:
            self._refuse(connection, RefusalReason.NO_PIDFD)
            return
        # The pid is that of the process that connected. Had it died before pidfd_open, the pid could by now be another
        # process's. An answer to a nonce made after pidfd_open shows that it was alive then, so the pidfd is its own.
        connection.hello = hello
        connection.nonce = self._randomness(wire.NONCE_BYTES)
        connection.stage = _Stage.CHALLENGED
        self._send(connection, wire.Challenge(nonce=connection.nonce))

    def _welcome(self, connection: _Connection, answer: wire.Answer) -> None:
        hello = connection.hello
        assert hello is not None
        assert connection.pidfd is not None
        assert connection.sock is not None
        if not hmac.compare_digest(answer.nonce, connection.nonce):
            self._refuse(connection, RefusalReason.CHALLENGE)
            return
        # A fence, or a newer epoch, may have come between HELLO and ANSWER.
        reason = refusal_of(self._fences.book(hello.pair), hello)
        if reason is not None:
            self._refuse(connection, reason)
            return
        # Entered before the descriptor leaves: whatever sending reports, the writer may have it from here on.
        self._fences.opened(hello.pair, connection.number, hello.epoch)
        connection.stage = _Stage.WRITING
        self._cancel_timer(connection)
        self._loop.add_reader(connection.pidfd, self._writer_died, connection)
        packet = wire.encode(wire.Welcome(region_nbytes=self._region.nbytes))
        # On an error: a writer that is gone shows as EOF; one that waits in vain says BYE at its deadline.
        with contextlib.suppress(OSError):
            socket.send_fds(connection.sock, [packet], [self._region.fd])

    def _seal(self, connection: _Connection, seal: Seal) -> None:
        hello = connection.hello
        assert hello is not None
        if seal.epoch != hello.epoch:
            self._counts["seals_refused"] += 1
            return
        self._counts["seals"] += 1
        self._events.seal_landed(hello.pair, seal)

    def _late_bye(self, nonce: bytes) -> None:
        """The writer's word about a connection that broke before its BYE. Only that writer knows the nonce."""
        for connection in list(self._connections.values()):
            if connection.nonce and hmac.compare_digest(connection.nonce, nonce):
                if connection.may_write:
                    self._prove(connection, Evidence.ACKNOWLEDGED)
                else:
                    self._lose(connection)

    def _writer_died(self, connection: _Connection) -> None:
        # What the dead writer had still sent is delivered first, its seals and perhaps its BYE; it can add nothing.
        while self._read_one(connection):
            pass
        if connection.number not in self._connections:
            return
        hello = connection.hello
        assert hello is not None
        self._prove(connection, Evidence.DEAD)
        if not self._fences.is_fencing(hello.pair, hello.epoch):
            self.fence(hello.pair, hello.epoch)

    def _prove(self, connection: _Connection, evidence: Evidence) -> None:
        """The one place where a connection stops counting as a writer."""
        hello = connection.hello
        assert hello is not None
        assert connection.may_write
        self._fences.closed(hello.pair, connection.number, evidence, connection.pid)
        self._close_socket(connection)
        self._forget(connection)

    def _refuse(self, connection: _Connection, reason: RefusalReason) -> None:
        """Count, tell the peer, and close; a peer that may write is first left the chance to say BYE."""
        self._refused[reason] += 1
        self._send(connection, wire.Refused(reason=reason))
        if connection.stage is _Stage.WRITING:
            connection.stage = _Stage.REFUSED
        else:
            self._lose(connection)

    def _lose(self, connection: _Connection) -> None:
        """The socket is of no more use. A connection that may write stays, watched through its pidfd."""
        self._close_socket(connection)
        if not connection.may_write:
            self._forget(connection)

    def _send(self, connection: _Connection, message: wire.Message) -> None:
        """Best effort: what is lost costs time, never safety. The few messages that we send fit any socket buffer."""
        if connection.sock is not None:
            with contextlib.suppress(OSError):
                connection.sock.send(wire.encode(message))

    def _cancel_timer(self, connection: _Connection) -> None:
        if connection.handshake_timer is not None:
            connection.handshake_timer.cancel()
            connection.handshake_timer = None

    def _close_socket(self, connection: _Connection) -> None:
        self._cancel_timer(connection)
        if connection.sock is not None:
            self._loop.remove_reader(connection.sock)
            connection.sock.close()
            connection.sock = None

    def _forget(self, connection: _Connection) -> None:
        if connection.pidfd is not None:
            self._loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None
        self._connections.pop(connection.number, None)


def refusal_of(book: PairFence | None, hello: wire.Hello) -> RefusalReason | None:
    """Why a connection with this HELLO may not be opened now; None: it may. Compares secrets in constant time."""
    secret = book.secret(hello.epoch) if book is not None else None
    if secret is None:
        expected = book is not None and book.expected_epoch is not None
        return RefusalReason.EPOCH if expected else RefusalReason.NOT_EXPECTED
    return None if hmac.compare_digest(hello.secret, secret) else RefusalReason.SECRET
