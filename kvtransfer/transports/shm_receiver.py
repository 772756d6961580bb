"""The receiving side of shm: gives the region's descriptor to writers that prove themselves, and watches them.

Evidence (I3) is the writer's BYE, or its readable pidfd. The kernel marks a pidfd readable only when every thread of
the process has left user mode for good, so it stores nothing more. A closed socket proves nothing: the writer may be
alive with the region mapped.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
from dataclasses import dataclass
from typing import ClassVar, Final

from kvtransfer.device.region import DeviceRegion
from kvtransfer.region import Region
from kvtransfer.transport import ReceiverEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import Refusal, RefusalReason, Signal
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.receiver_port import BasePort, Connection, Evidence
from kvtransfer.transports.shm import (
    ADDRESS_PREFIX,
    CODEC,
    MESSAGE_BYTES_MAX,
    encode_welcome,
    peer_credentials,
    socket_address,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmPortLimits(PortLimits):
    handshake_ms_max: int = 2000
    late_byes_max: int = 64
    """Connections beyond `connections_max`, open for a late BYE that makes room, and then closed."""
    messages_per_wake_max: int = 64
    """Messages read from one connection before others have a turn."""


SHM_PORT_LIMITS: Final = ShmPortLimits()


@dataclass(slots=True, kw_only=True, eq=False)
class ShmConnection(Connection):
    pid: int = 0
    region_fd: int = -1
    pidfd: int | None = None

    def send(self, message: wire.Message) -> None:
        """Best effort: what is lost costs time, never safety. The region's descriptor goes with the WELCOME: a writer
        that is gone shows as EOF, and one that waits in vain sends BYE at its deadline."""
        if self.sock is None or not isinstance(message, wire.Welcome):
            Connection.send(self, message)
            return
        with contextlib.suppress(OSError):
            socket.send_fds(self.sock, [self.codec.encode(message)], [self.region_fd])


class ShmReceiverPort(BasePort[ShmPortLimits, ShmConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`).

    Listens in the abstract socket namespace: a killed process leaves no file behind, and no directory is needed. Such a
    name has no permissions; the peer's user id and the pair's secret take their place. Writer and receiver must share
    a network namespace (to meet) and a PID namespace (for the pidfd).

    A fenced writer that runs drains, unmaps and acknowledges; a stopped one keeps the fence waiting.
    """

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self, *, region: Region | DeviceRegion, events: ReceiverEvents, limits: ShmPortLimits = SHM_PORT_LIMITS
    ) -> None:
        """Listens at once. `region` is the caller's and outlives the port."""
        address = ADDRESS_PREFIX + secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(socket_address(address))
            listener.listen(limits.connections_max)
        except BaseException:
            listener.close()
            raise
        super().__init__(ShmConnection, listener=listener, address=address, events=events, limits=limits)
        self._region = region

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "region_bytes": self._region.nbytes,
            "region_huge_bytes": self._region.huge_bytes,
            "connections_unproved": sum(c.channel.may_write and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "seals_refused")},
        }

    # What comes.

    def _admit(self, sock: socket.socket) -> None:
        pid, uid = peer_credentials(sock)
        surplus = len(self._connections) - self._limits.connections_max
        connection = self._connect(sock, surplus=surplus >= 0)
        connection.pid, connection.region_fd = pid, self._region.fd
        if uid != os.geteuid():
            self._handle(connection, wire.Refuse(reason=RefusalReason.USER))
        elif surplus >= self._limits.late_byes_max:
            self._handle(connection, wire.Refuse(reason=RefusalReason.CONNECTIONS_MAX))

    def _read(self, connection: ShmConnection) -> None:
        for _ in range(self._limits.messages_per_wake_max):
            if not self._read_one(connection):
                return

    def _read_one(self, connection: ShmConnection) -> bool:
        """Handle one packet; False when there is none, or the socket is closed."""
        if connection.sock is None:
            return False
        try:
            packet, _, flags, _ = connection.sock.recvmsg(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer closed with a message of ours unread. The kernel reports that once, and ahead of the packets
            # that the peer sent before: its BYE may be among them.
            return True
        except OSError:
            packet, flags = b"", 0
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._handle(connection, wire.Refuse(reason=RefusalReason.MALFORMED))
            return True
        self._take_in(connection, packet)
        return bool(packet)

    def _is_writing(self, connection: ShmConnection) -> bool:
        return connection.channel.may_write and connection.sock is not None

    def _identify(self, connection: ShmConnection) -> None:
        # The pid is that of the process that connected. Had it died before pidfd_open, another process could have the
        # pid by now. The answer to a nonce that is sent after pidfd_open shows that it was alive then, so the pidfd is
        # its own. Pid 0: the peer lives in another PID namespace.
        with contextlib.suppress(OSError):
            connection.pidfd = os.pidfd_open(connection.pid) if connection.pid > 0 else None
        if connection.pidfd is None:
            raise Refusal(RefusalReason.NO_PIDFD)

    def _prepare(self, connection: ShmConnection) -> None:
        self._handle(connection, wire.Prepared(payload=encode_welcome(self._region.nbytes)))

    def _opened(self, connection: ShmConnection) -> None:
        """Before the descriptor leaves: whatever sending reports, the writer may have it from here on."""
        assert connection.pidfd is not None
        self._loop.add_reader(connection.pidfd, self._writer_died, connection)

    def _deliver(self, connection: ShmConnection, message: wire.SealSent | wire.LateBye) -> None:
        if isinstance(message, wire.LateBye):
            self._late_bye(message.nonce)
        elif message.seal.epoch != connection.epoch:
            self._counts["seals_refused"] += 1
        else:
            self._counts["seals"] += 1
            self._events.seal_landed(connection.pair, message.seal)

    def _late_bye(self, nonce: bytes) -> None:
        """About a connection that broke before its BYE. Only its writer knows the nonce."""
        for connection in list(self._connections.values()):
            if connection.channel.nonce and hmac.compare_digest(connection.channel.nonce, nonce):
                if connection.channel.may_write:
                    self._prove(connection, Evidence.ACKNOWLEDGED)
                else:
                    self._handle(connection, Signal.EOF)

    def _writer_died(self, connection: ShmConnection) -> None:
        # What the dead writer had still sent is delivered first, its seals and perhaps its BYE; it can add nothing.
        while self._read_one(connection):
            pass
        if connection.number not in self._connections:
            return
        self._prove(connection, Evidence.DEAD)
        self._fence_own(connection)

    # Ends.

    def _left(self, connection: ShmConnection, *, drained: bool) -> None:
        del drained  # it has unmapped the region
        self._prove(connection, Evidence.ACKNOWLEDGED)

    def _lost(self, connection: ShmConnection) -> None:
        """It stays, watched through its pidfd."""
        connection.close_sock(self._loop)

    def _broken(self, connection: ShmConnection, reason: RefusalReason) -> None:
        """It can still send BYE."""

    def _prove(self, connection: ShmConnection, evidence: Evidence) -> None:
        """The one place where a connection stops counting as a writer."""
        assert connection.channel.may_write
        self._proved(connection, evidence, connection.pid)
        self._drop(connection)

    def _drop(self, connection: ShmConnection) -> None:
        connection.close_sock(self._loop)
        if connection.pidfd is not None:
            self._loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None
        self._connections.pop(connection.number, None)
