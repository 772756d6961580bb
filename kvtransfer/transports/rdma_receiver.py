"""The receiving side of rdma: proves writers, connects queue pairs to theirs, and fences by destroying its own.

Evidence (DESIGN I3): bytes of a pair land only through this side's queue pairs of it. When these have been RESET and
destroyed, and the calls have returned, the device drops whatever still comes for them, whatever the writer does. So a
writer that is dead, stopped or cut off is fenced at once; and a link that ends without BYE, or one of whose queue pairs
fails, is itself the reason for a fence: no commit of what it carried is accepted before that. Not so one that was never
made, because its probes did not come: nothing but these was ever asked of its queue pairs.

Visibility: before a seal is told, before a fence has its evidence, and when a grant ends without a seal,
`RdmaMemory.flush`. A seal whose flush fails is refused and never told: its pair is fenced, and there is no evidence
until a flush succeeds.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from typing import ClassVar

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from baton.repeats import RepeatLog
from kvtransfer.device.driver import DeviceError
from kvtransfer.transport import ReceiverEvents, TransportName, WriteRanges
from kvtransfer.transports import rdma_wire as wire
from kvtransfer.transports.base_port import ListeningPort
from kvtransfer.transports.limits import PORT_LIMITS, PortLimits
from kvtransfer.transports.pair_fence import Evidence
from kvtransfer.transports.rdma_connect import RegionAddress
from kvtransfer.transports.rdma_connection import Connection, NotWelcome
from kvtransfer.transports.rdma_device import QueuePairFailed
from kvtransfer.transports.rdma_memory import Hold, RdmaMemory
from kvtransfer.transports.rdma_ports import counters_of
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.rdma_wire import RefusalReason
from kvtransfer.transports.seal_gather import SealGather, SealRefused, WholeSeal
from kvtransfer.transports.tcp_socket import RECV_BYTES

log = get_log("rdma")

DESTROY_RETRY_MS = 1000
DESTROY_TRIES_MAX = 3
"""Once the port is closing; before, it is tried for as long as it takes."""


class RdmaReceiverPort(ListeningPort[PortLimits, RefusalReason, Connection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). Everything runs on `loop`'s thread."""

    transport: ClassVar[TransportName] = TransportName.RDMA

    def __init__(
        self,
        *,
        memory: RdmaMemory,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        offered: Callable[[bool], None] = lambda _: None,
        limits: PortLimits = PORT_LIMITS,
    ) -> None:
        """Listens at once. `memory` has the region, open to remote writes; it is the caller's and outlives the port.

        Writers are told `advertise_host` instead of the host in `listen`, which it must be given for a wildcard.
        `offered(False)` is called when the device is lost, `offered(True)` when it is back.

        Raises:
            BatonError: BAD_ENDPOINT.
            OSError: the address cannot be listened on.
        """
        super().__init__(
            listen=listen,
            advertise_host=advertise_host,
            events=events,
            loop=loop,
            randomness=randomness,
            limits=limits,
            reasons=RefusalReason,
        )
        self._memory = memory
        self._offered = offered
        self._repeats = RepeatLog(log, loop.time, key="writer")
        self._hold: Hold | None = None
        self._unsealed: dict[GrantId, Pair] = {}
        """Grants that may be written to, and no seal of theirs has come."""
        memory.when_returned(self._device_back)
        self._device_back()

    def _address_told(self) -> str:
        device = self._hold.device if self._hold is not None else None
        # Without a device the address leads to a refusal, which says so.
        base, rkey = (device.base, device.rkey) if device is not None else (0, 0)
        return RegionAddress(listens=self.address, base=base, rkey=rkey).encode()

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Forbids nobody anything: a writer that has the key is bounded by its own library alone."""
        super().allow(pair, epoch, grant, ranges)
        self._unsealed[grant] = pair

    def forbid(self, grant: GrantId) -> bool:
        """The writer has finished, and no seal of this grant has had the device flushed: flush it now.

        False: the flush failed, and the link ends.
        """
        flushed = True
        pair = self._unsealed.pop(grant, None)
        for connection in list(self._connections.values()):
            if connection.qps is None or connection.hello is None or connection.hello.pair != pair:
                continue
            if connection.destroy_timer is not None:
                flushed = False  # it has ended, and its own flush is still to come
                continue
            try:
                self._memory.flush()
            except DeviceError as error:
                self._tell_refused("a grant is over, and the device's memory cannot be flushed", connection, error)
                self._refuse(connection, RefusalReason.FLUSH)
                flushed = False
        if not flushed and pair is not None:
            self._unsealed[grant] = pair
        return flushed

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`. Nothing lands any more when this returns."""
        for number in self._fences.fence(pair, epoch):
            connection = self._connections[number]
            connection.send(wire.Fence(epoch=epoch))
            self._drop(connection)

    async def close(self) -> None:
        """Stop listening, destroy all queue pairs; no event is delivered any more. Writers see EOF. Idempotent.

        Queue pairs that cannot be destroyed are tried again a few times, then logged and left to the process's end.
        """
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        for connection in list(self._connections.values()):
            self._drop(connection)
        for _ in range(DESTROY_TRIES_MAX):
            if not self._connections:
                break
            await asyncio.sleep(DESTROY_RETRY_MS / 1000)
        self._repeats.close()
        for connection in self._connections.values():
            connection.leave_behind()
        if self._hold is not None:
            self._hold.release()
            self._hold = None
        self._fences.close()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics; the device's own among them."""
        writing = [c for c in self._connections.values() if c.qps is not None]
        device = self._hold.device if self._hold is not None else None
        return {
            **super().describe(),
            "device": device.port.device if device is not None else "none",
            "registered": self._memory.describe(),
            "connections_handshaking": len(self._connections) - len(writing),
            "connections_writing": len(writing),
            "queue_pairs": sum(len(c.qps.ends.qps) for c in writing if c.qps is not None),
            "devices_lost": self._memory.devices_lost,
            "flushes": self._memory.flushes,
            **{name: self._counts[name] for name in ("seals", "links_unproved", "destroy_failed", "flush_failed")},
            "device_counters": counters_of(device.port.device, device.port.number) if device is not None else {},
        }

    # The device.

    def _device_back(self) -> None:
        if self._closed or self._hold is not None:
            return
        try:
            self._hold = self._memory.acquire()
        except RdmaUnavailable:
            self._offered(False)
            return
        self._hold.on_lost(self._device_lost)
        self._offered(True)

    def _device_lost(self, _: str) -> None:
        """Its queue pairs are of no use: destroy them, which fences their pairs, and let it go."""
        self._offered(False)
        for connection in list(self._connections.values()):
            if (hello := connection.hello) is not None and connection.qps is not None:
                self.fence(hello.pair, hello.epoch)
        assert self._hold is not None
        self._hold.release()
        self._hold = None

    # Handshake.

    def _connection(self, number: int, sock: socket.socket) -> Connection:
        return Connection(number=number, sock=sock)

    def _handshaking(self, connection: Connection) -> bool:
        return connection.qps is None

    def _handshake_late(self, connection: Connection) -> None:
        self._refuse(connection, RefusalReason.DEADLINE if connection.qps is None else RefusalReason.PROBE)

    def _challenge(self, connection: Connection, hello: wire.Hello) -> None:
        if self._secret(connection, hello.pair, hello.epoch) is None:
            return
        connection.hello = hello
        connection.nonce = self._randomness(wire.NONCE_BYTES)
        connection.send(wire.Challenge(nonce=connection.nonce))

    def _welcome(self, connection: Connection, hello: wire.Hello, answer: wire.Answer) -> None:
        secret = self._secret(connection, hello.pair, hello.epoch)
        if secret is None:
            return
        if not hmac.compare_digest(answer.proof, wire.writer_proof(secret, hello, connection.nonce)):
            self._refuse(connection, RefusalReason.SECRET)
            return
        if sum(c.qps is not None for c in self._connections.values()) >= self._limits.connections_max:
            self._refuse(connection, RefusalReason.CONNECTIONS_MAX)
            return
        try:
            connection.open_qps(self._memory, hello, self._randomness)
        except NotWelcome as error:
            self._refuse(connection, error.reason)
            return
        qps = connection.qps
        assert qps is not None
        # Entered before the queue pairs can receive: from here on only `_drop` ends the connection.
        self._fences.opened(hello.pair, connection.number, hello.epoch)
        self._loop.add_reader(qps.fd, self._completions, connection)
        try:
            qps.connect(hello.ends)
        except QueuePairFailed as error:
            log.warning("no queue pairs for a writer", reason=str(error))
            self._refuse(connection, RefusalReason.QUEUE_PAIR)
            return
        connection.send(connection.welcome(secret))

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
                if connection.number not in self._connections:
                    return
        except wire.MalformedMessage as error:
            self._refuse(connection, error.reason)
        except (SealRefused, DeviceError) as error:
            self._refuse_seal(connection, error)

    def _handle(self, connection: Connection, message: wire.Message) -> None:
        hello = connection.hello
        match message:
            case wire.Hello() if hello is None:
                self._challenge(connection, message)
            case wire.Answer() if hello is not None and connection.qps is None:
                self._welcome(connection, hello, message)
            case wire.SealSent() if connection.seals is not None:
                self._tell(connection, connection.seals.told(message.number, message.seal, message.qps_mask))
            case wire.Bye() if connection.qps is None:
                self._drop(connection)
            case wire.Bye(epoch=epoch) if hello is not None and epoch == hello.epoch:
                # Its seals' immediates came before the device told it of their completion.
                self._completions(connection, told=False)
                self._drop(connection)
            case _:
                self._refuse(connection, RefusalReason.OUT_OF_ORDER)

    def _eof(self, connection: Connection) -> None:
        """Without BYE. Seals of which all has come are delivered first; then what it left unfinished is fenced."""
        hello = connection.hello
        if connection.qps is None or hello is None:
            self._drop(connection)
            return
        self._completions(connection, told=False)
        self._fail(connection, "the connection ended without BYE")

    def _completions(self, connection: Connection, *, told: bool = True) -> None:
        """Take in the immediates that have come. `told`: because the device says that there are some."""
        qps = connection.qps
        if qps is None:
            return
        try:
            if told:
                qps.take_event()
            for index, immediate_be in qps.take_immediates():
                if connection.seals is not None:
                    self._tell(connection, connection.seals.arrived(socket.ntohl(immediate_be), index))
                elif not self._probe_came(connection, index, socket.ntohl(immediate_be)):
                    return
        except QueuePairFailed as error:
            self._fail(connection, str(error))
        except (SealRefused, DeviceError) as error:
            self._refuse_seal(connection, error)

    def _probe_came(self, connection: Connection, qp: int, number: int) -> bool:
        """The link is made with the last of them. False: it was none, and the connection is refused."""
        qps, hello = connection.qps, connection.hello
        assert qps is not None and hello is not None
        if not connection.probe_came(qp, number):
            self._refuse(connection, RefusalReason.PROBE)
            return False
        if len(connection.probed) == len(qps.ends.qps):
            connection.cancel_timer()
            connection.seals = SealGather(epoch=hello.epoch, ways=len(qps.ends.qps), seals_max=qps.ends.seals_max)
            connection.send(wire.Ready())
        return True

    def _tell(self, connection: Connection, whole: WholeSeal | None) -> None:
        """Report a seal of which all has come, once what was written before it is seen. Raises DeviceError."""
        hello = connection.hello
        if whole is None or hello is None:
            return
        self._memory.flush()
        self._unsealed.pop(whole.seal.grant, None)
        self._counts["seals"] += 1
        connection.send(wire.Sealed(number=whole.number))
        if not self._closed:
            self._events.seal_landed(hello.pair, whole.seal)

    # Ends.

    def _refuse_seal(self, connection: Connection, error: SealRefused | DeviceError) -> None:
        """It breaks the protocol, or what it closes may be seen late: it does not count, and the link ends."""
        if isinstance(error, SealRefused):
            self._refuse(connection, RefusalReason[error.fault.name])
            return
        self._tell_refused("a seal is refused: the device's memory cannot be flushed", connection, error)
        self._refuse(connection, RefusalReason.FLUSH)

    def _tell_refused(self, what: str, connection: Connection, error: DeviceError) -> None:
        """The link ends with it: each is told."""
        self._counts["flush_failed"] += 1
        log.error(what, writer=connection.writer, reason=str(error))

    def _tell_failure(self, what: str, connection: Connection, error: QueuePairFailed | DeviceError) -> None:
        """Count it. Where it is for good it comes every second, and takes a line a minute."""
        self._counts["flush_failed" if isinstance(error, DeviceError) else "destroy_failed"] += 1
        self._repeats.error(what, peer=connection.writer, reason=str(error))
        self._repeats.upkeep()

    def _fail(self, connection: Connection, reason: str) -> None:
        """The link cannot go on, and may have lost bytes: fence its pair. Unless it was never made."""
        hello = connection.hello
        assert hello is not None
        log.info("rdma link ended", writer=connection.writer, reason=reason)
        if connection.seals is not None and not self._fences.is_fencing(hello.pair, hello.epoch) and not self._closed:
            self.fence(hello.pair, hello.epoch)
        if connection.number in self._connections:
            self._drop(connection)

    def _refuse(self, connection: Connection, reason: RefusalReason) -> None:
        """Count, tell the peer, close. The pair of a link that was made is fenced."""
        self._refused[reason] += 1
        connection.send(wire.Refused(reason=reason))
        if connection.qps is not None:
            self._fail(connection, f"refused: {reason.name}")
        else:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """The one place where a connection stops counting as one that may write: its queue pairs are destroyed, and
        what has come through them is where it belongs."""
        connection.cancel_timer()
        again = connection.destroy_timer is not None
        connection.cancel_destroy()
        if connection.qps is not None and not again:
            # Once: from then on its descriptor may be closed, and the number another's.
            self._loop.remove_reader(connection.qps.fd)
        connection.close_sock(self._loop)
        if connection.qps is not None:
            try:
                connection.qps.destroy()
                if not self._closed:
                    self._memory.flush()
            except (QueuePairFailed, DeviceError) as error:
                self._tell_failure("a fence has no evidence yet", connection, error)
                connection.destroy_timer = self._loop.call_later(DESTROY_RETRY_MS / 1000, self._drop, connection)
                return
            assert connection.hello is not None and connection.hold is not None
            self._repeats.over(connection.writer, "its queue pairs are destroyed, the device is flushed")
            connection.qps = None
            connection.hold.release()
            self._counts["links_unproved"] += connection.seals is None
            if not self._closed:
                self._fences.closed(connection.hello.pair, connection.number, Evidence.DESTROYED)
        self._connections.pop(connection.number, None)
