"""The receiving side of rdma: proves writers, connects queue pairs to theirs, and fences by destroying its own.

Evidence (I3): bytes of a pair land only through this side's queue pairs of it. When these have been RESET and
destroyed, and the calls have returned, the device drops whatever still comes for them, whatever the writer does. So a
writer that is dead, stopped or cut off is fenced at once; and a link that ends without BYE, or one of whose queue pairs
fails, is itself the reason for a fence: no commit of what it carried is accepted before that. Not so one that was never
made, because its probes did not come: nothing but these was ever asked of its queue pairs.

Visibility: before a seal is reported, before a fence has its evidence, and when a grant ends without a seal,
`RdmaMemory.flush`. A seal whose flush fails is refused and never reported: its pair is fenced, and there is no evidence
until a flush succeeds.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from baton.repeats import RepeatLog
from kvtransfer.device.driver import DeviceError
from kvtransfer.transport import ReceiverEvents, TransportName, WriteRanges
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import (
    Inbox,
    ReceiverChannel,
    Refusal,
    RefusalReason,
    SealGather,
    Signal,
)
from kvtransfer.transports.limits import PORT_LIMITS, PortLimits
from kvtransfer.transports.pair_fence import Evidence
from kvtransfer.transports.rdma import CODEC, LinkEnds, RdmaWelcome, RegionAddress
from kvtransfer.transports.rdma_device import Hold, QueuePairFailed, QueuePairs, RdmaMemory
from kvtransfer.transports.rdma_ports import counters_of
from kvtransfer.transports.rdma_verbs import RdmaUnavailable
from kvtransfer.transports.receiver_port import Connection, ListeningPort

log = get_log("rdma")

DESTROY_RETRY_MS = 1000
DESTROY_TRIES_MAX = 3
"""Once the port is closing; before, it is tried for as long as it takes."""


@dataclass(slots=True, kw_only=True, eq=False)
class RdmaConnection(Connection):
    """`qps` from the moment that it may write until they are destroyed; then it is forgotten."""

    destroy_timer: asyncio.TimerHandle | None = None
    qps: QueuePairs | None = None
    hold: Hold | None = None
    probed: set[int] = field(default_factory=set)
    """Queue pairs of which the probe has come."""
    seals: SealGather | None = None
    """From the moment that all have, and the link is made. Nothing of a grant comes down one that is not."""

    @property
    def ends(self) -> LinkEnds:
        """The writer's."""
        return LinkEnds.decode(self.hello.payload)

    @property
    def writer(self) -> str:
        """For people."""
        return f"{self.pair.writer:x}"

    def open_qps(self, memory: RdmaMemory, randomness: Callable[[int], bytes]) -> QueuePairs:
        """Acquire the device and make as many queue pairs as the writer has. Raises Refusal: nothing is kept."""
        try:
            hold = memory.acquire()
        except RdmaUnavailable as error:
            raise Refusal(RefusalReason.DEVICE) from error
        if self.ends.ethernet != hold.device.ethernet:
            hold.release()
            raise Refusal(RefusalReason.LINK_LAYER)
        try:
            self.qps = QueuePairs(hold.device, len(self.ends.qps), randomness, sends=False)
        except QueuePairFailed as error:
            hold.release()
            log.warning("no queue pairs for a writer", reason=str(error))
            raise Refusal(RefusalReason.QUEUE_PAIR) from error
        self.hold = hold
        return self.qps

    def leave_behind(self) -> None:
        """Its queue pairs cannot be destroyed, and nobody will try any more: they stay until the process ends."""
        assert self.hold is not None
        self.cancel_destroy()
        self.hold.leave_behind()
        log.error("queue pairs are left to the end of the process: they cannot be destroyed", writer=self.writer)

    def cancel_destroy(self) -> None:
        """Try no more, until somebody does again."""
        if self.destroy_timer is not None:
            self.destroy_timer.cancel()
            self.destroy_timer = None


class RdmaReceiverPort(ListeningPort[PortLimits, RdmaConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). Everything runs on `loop`'s thread."""

    transport: ClassVar[TransportName] = TransportName.RDMA
    codec: ClassVar[wire.Codec] = CODEC

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

        Writers get `advertise_host` instead of the host in `listen`, which it must be given for a wildcard.
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
        )
        self._memory = memory
        self._offered = offered
        self._repeats = RepeatLog(log, loop.time, key="writer")
        self._hold: Hold | None = None
        self._unsealed: dict[GrantId, Pair] = {}
        """Grants that may be written to, and no seal of theirs has come."""
        memory.when_returned(self._device_back)
        self._device_back()

    def _endpoint_address(self) -> str:
        device = self._hold.device if self._hold is not None else None
        # Without a device the address leads to a refusal, which says so.
        base, rkey = (device.base, device.rkey) if device is not None else (0, 0)
        return RegionAddress(listens=self.address, base=base, rkey=rkey).encode()

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Not enforced: a writer that has the key is bounded only by its own library."""
        super().allow(pair, epoch, grant, ranges)
        self._unsealed[grant] = pair

    def forbid(self, grant: GrantId) -> bool:
        """The writer has finished, and no seal of this grant has had the device flushed: flush it now.

        False: the flush failed, and the link ends.
        """
        flushed = True
        pair = self._unsealed.pop(grant, None)
        for connection in list(self._connections.values()):
            if connection.qps is None or connection.pair != pair:
                continue
            if connection.destroy_timer is not None:
                flushed = False  # it has ended, and its own flush is still to come
                continue
            try:
                self._memory.flush()
            except DeviceError as error:
                self._log_refused("a grant is over, and the device's memory cannot be flushed", connection, error)
                self._handle(connection, wire.Refuse(reason=RefusalReason.FLUSH))
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
            if connection.qps is not None:
                self.fence(connection.pair, connection.epoch)
        assert self._hold is not None
        self._hold.release()
        self._hold = None

    # Handshake.

    def _connection(self, number: int, sock: socket.socket, channel: ReceiverChannel) -> RdmaConnection:
        return RdmaConnection(number=number, sock=sock, codec=CODEC, channel=channel, inbox=Inbox(CODEC))

    def _is_writing(self, connection: RdmaConnection) -> bool:
        return connection.qps is not None

    def _identify(self, connection: RdmaConnection) -> None:
        LinkEnds.decode(connection.hello.payload)

    def _prepare(self, connection: RdmaConnection) -> None:
        qps = connection.open_qps(self._memory, self._randomness)
        assert connection.hold is not None
        device = connection.hold.device
        welcome = RdmaWelcome(region_nbytes=device.nbytes, probes=device.probes, ends=qps.ends)
        self._handle(connection, wire.Prepared(payload=welcome.encode(), probes=True))

    def _opened(self, connection: RdmaConnection) -> None:
        """Its queue pairs can receive from here on, and only `_drop` ends that."""
        assert connection.qps is not None
        self._loop.add_reader(connection.qps.fd, self._completions, connection)
        try:
            connection.qps.connect(connection.ends)
        except QueuePairFailed as error:
            log.warning("no queue pairs for a writer", reason=str(error))
            raise Refusal(RefusalReason.QUEUE_PAIR) from error

    # What writers send.

    def _deliver(self, connection: RdmaConnection, message: wire.SealSent | wire.LateBye) -> None:
        assert connection.seals is not None and isinstance(message, wire.SealSent)
        self._report(connection, connection.seals.message_came(message))

    def _left(self, connection: RdmaConnection, *, drained: bool) -> None:
        del drained  # the queue pairs are destroyed, whatever is on its way
        # The immediates of its seals came before the device reported their completion to it.
        self._completions(connection, awaited=False)
        self._drop(connection)

    def _lost(self, connection: RdmaConnection) -> None:
        """Without BYE. Seals of which all has come are delivered first; then what it left unfinished is fenced."""
        self._completions(connection, awaited=False)
        self._fail(connection, "the connection ended without BYE")

    def _completions(self, connection: RdmaConnection, *, awaited: bool = True) -> None:
        """Take in the immediates that have come. `awaited`: the device says that there are some."""
        qps = connection.qps
        if qps is None:
            return
        try:
            if awaited:
                qps.take_event()
            for index, immediate_be in qps.take_immediates():
                number = socket.ntohl(immediate_be)
                if connection.seals is not None:
                    self._report(connection, connection.seals.number_came(number, index))
                else:
                    self._probe_came(connection, index, number)
        except QueuePairFailed as error:
            self._fail(connection, str(error))
        except Refusal as refusal:
            self._handle(connection, wire.Refuse(reason=refusal.reason))

    def _probe_came(self, connection: RdmaConnection, qp: int, number: int) -> None:
        """The first immediate on a queue pair, which is its index. The link is made with the last of them."""
        qps = connection.qps
        assert qps is not None
        if qp in connection.probed or number != qp:
            raise Refusal(RefusalReason.PROBE)
        connection.probed.add(qp)
        if len(connection.probed) == len(qps.ends.qps):
            connection.cancel_timer()
            ways, seals_max = len(qps.ends.qps), qps.ends.seals_max
            connection.seals = SealGather(epoch=connection.epoch, ways=ways, seals_max=seals_max)
            self._handle(connection, Signal.PROBES_CAME)

    def _report(self, connection: RdmaConnection, whole: wire.SealSent | None) -> None:
        """Report a seal of which all has come, once what was written before it is seen. Raises Refusal: it may be seen
        late, so that the seal does not count, and the link ends."""
        if whole is None:
            return
        try:
            self._memory.flush()
        except DeviceError as error:
            self._log_refused("a seal is refused: the device's memory cannot be flushed", connection, error)
            raise Refusal(RefusalReason.FLUSH) from error
        self._unsealed.pop(whole.seal.grant, None)
        self._counts["seals"] += 1
        connection.send(wire.Sealed(number=whole.number))
        if not self._closed:
            self._events.seal_landed(connection.pair, whole.seal)

    # Ends.

    def _log_refused(self, what: str, connection: RdmaConnection, error: DeviceError) -> None:
        """The link ends with it: each is logged."""
        self._counts["flush_failed"] += 1
        log.error(what, writer=connection.writer, reason=str(error))

    def _log_failure(self, what: str, connection: RdmaConnection, error: QueuePairFailed | DeviceError) -> None:
        """Count it. Where it is for good it comes every second, and takes a line a minute."""
        self._counts["flush_failed" if isinstance(error, DeviceError) else "destroy_failed"] += 1
        self._repeats.error(what, peer=connection.writer, reason=str(error))
        self._repeats.upkeep()

    def _fail(self, connection: RdmaConnection, reason: str) -> None:
        """The link cannot go on, and may have lost bytes: fence its pair. Unless it was never made."""
        log.info("rdma link ended", writer=connection.writer, reason=reason)
        if connection.seals is not None:
            self._fence_own(connection)
        if connection.number in self._connections:
            self._drop(connection)

    def _broken(self, connection: RdmaConnection, reason: RefusalReason) -> None:
        self._fail(connection, f"refused: {reason.name}")

    def _drop(self, connection: RdmaConnection) -> None:
        """The one place where a connection stops counting as one that may write: its queue pairs are destroyed, and
        what has come through them is where it belongs."""
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
                self._log_failure("a fence has no evidence yet", connection, error)
                connection.destroy_timer = self._loop.call_later(DESTROY_RETRY_MS / 1000, self._drop, connection)
                return
            assert connection.hold is not None
            self._repeats.over(connection.writer, "its queue pairs are destroyed, the device is flushed")
            connection.qps = None
            connection.hold.release()
            self._counts["links_unproved"] += connection.seals is None
            if not self._closed and connection.channel.opened:
                self._fences.closed(connection.pair, connection.number, Evidence.DESTROYED)
        self._connections.pop(connection.number, None)
