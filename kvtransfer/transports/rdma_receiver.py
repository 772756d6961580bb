"""The receiving side of rdma: proves writers, connects queue pairs to theirs, and fences by destroying its own.

Evidence (I3): bytes of a pair land only through this side's queue pairs of it. Once these are RESET and destroyed, and
the calls have returned, the device drops whatever still comes for them, whatever the writer does. So a writer that is
dead, stopped or cut off is fenced at once. A link that ends without BYE, or with a failed queue pair, is itself the
reason for a fence: before that, no commit of what it carried is accepted. A link whose probes did not all come needs no
fence: its queue pairs have carried nothing else.

Visibility: `RdmaMemory.flush` comes before a seal is reported, before a fence has its evidence, and when a grant ends
without a seal. A seal whose flush fails is refused and never reported: its pair is fenced, and there is no evidence
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
from kvtransfer.transport import DeviceError, ReceiverEvents, WriteRanges
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import Refusal, RefusalReason, SealGather, Signal
from kvtransfer.transports.limits import PORT_LIMITS, PortLimits
from kvtransfer.transports.rdma import CODEC, Hold, LinkEnds, QueuePairs, RdmaMemory, RdmaWelcome, RegionAddress
from kvtransfer.transports.rdma_ports import counters_of
from kvtransfer.transports.rdma_verbs import QueuePairFailed, RdmaUnavailable
from kvtransfer.transports.receiver_port import Connection, Evidence, ListeningPort

log = get_log("rdma")

DESTROY_RETRY_MS = 1000
DESTROY_TRIES_MAX = 3
"""While the port closes. Before, there is no limit."""


@dataclass(slots=True, kw_only=True, eq=False)
class RdmaConnection(Connection):
    """Has `qps` from the moment that it may write until they are destroyed; then it is forgotten. Its link is made when
    all probes have come: from then on it has `seals`."""

    destroy_timer: asyncio.TimerHandle | None = None
    qps: QueuePairs | None = None
    hold: Hold | None = None
    probed: set[int] = field(default_factory=set)
    """Queue pairs whose probe has come."""

    @property
    def ends(self) -> LinkEnds:
        """The writer's."""
        return LinkEnds.decode(self.hello.payload)

    @property
    def writer(self) -> str:
        """For people."""
        return f"{self.pair.writer:x}"

    def cancel_destroy(self) -> None:
        if self.destroy_timer is not None:
            self.destroy_timer.cancel()
            self.destroy_timer = None


class RdmaReceiverPort(ListeningPort[RdmaConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). After `fence` nothing lands any more."""

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self,
        *,
        memory: RdmaMemory,
        events: ReceiverEvents,
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        offered: Callable[[bool], None] = lambda _: None,
        limits: PortLimits = PORT_LIMITS,
    ) -> None:
        """See `ListeningPort`. `memory` has the region, open to remote writes; the caller's, it outlives the port.

        `offered(False)` is called when the device is lost, `offered(True)` when it is back.
        """
        super().__init__(RdmaConnection, listen=listen, advertise_host=advertise_host, events=events, limits=limits)
        self._memory = memory
        self._offered = offered
        self._repeats = RepeatLog(log, self._loop.time, key="writer")
        self._hold: Hold | None = None
        self._unsealed: dict[GrantId, Pair] = {}
        """Grants that may be written to, and whose seal has not come."""
        memory.returned = self._device_back
        self._device_back()

    def _endpoint_address(self) -> str:
        # Without a device the address leads to a refusal, which says so.
        base, rkey = (self._hold.device.base, self._hold.device.rkey) if self._hold is not None else (0, 0)
        return RegionAddress(listens=self.address, base=base, rkey=rkey).encode()

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Not enforced: a writer that has the key is bounded only by its own library."""
        del epoch, ranges
        self._unsealed[grant] = pair

    def forbid(self, grant: GrantId) -> bool:
        """The writer has finished. If no seal of this grant has had the device flushed, flush it now.

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
                self._flush("a grant is over, and the device's memory cannot be flushed", connection)
            except Refusal as refusal:
                self._handle(connection, wire.Refuse(reason=refusal.reason))
                flushed = False
        if not flushed and pair is not None:
            self._unsealed[grant] = pair
        return flushed

    async def close(self) -> None:
        """See `BasePort.close`. Queue pairs that cannot be destroyed are tried again a few times, then logged and left
        to the process's end."""
        if self._closed:
            return
        await super().close()
        for _ in range(DESTROY_TRIES_MAX):
            if not self._connections:
                break
            await asyncio.sleep(DESTROY_RETRY_MS / 1000)
        self._repeats.close()
        for connection in self._connections.values():
            assert connection.hold is not None
            connection.cancel_destroy()
            connection.hold.leave_behind(connection.writer)
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics; the device's own among them."""
        port = self._hold.device.port if self._hold is not None else None
        return {
            **super().describe(),
            "device": port.device if port is not None else "none",
            "registered": self._memory.describe(),
            "queue_pairs": sum(len(c.qps.ends.qps) for c in self._connections.values() if c.qps is not None),
            "devices_lost": self._memory.devices_lost,
            "flushes": self._memory.flushes,
            **{name: self._counts[name] for name in ("seals", "links_unproved", "destroy_failed", "flush_failed")},
            "device_counters": counters_of(port.device, port.number) if port is not None else {},
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
        """Its queue pairs are of no use: destroy them, which fences their pairs, and release it."""
        self._offered(False)
        for connection in list(self._connections.values()):
            if connection.qps is not None and not self._closed:
                self.fence(connection.pair, connection.epoch)
        assert self._hold is not None
        self._hold.release()
        self._hold = None

    # Handshake.

    def _is_writing(self, connection: RdmaConnection) -> bool:
        return connection.qps is not None

    def _identify(self, connection: RdmaConnection) -> None:
        LinkEnds.decode(connection.hello.payload)

    def _prepare(self, connection: RdmaConnection) -> None:
        """Acquire the device and make as many queue pairs as the writer has. Where it refuses it keeps nothing."""
        try:
            hold = self._memory.acquire()
        except RdmaUnavailable as error:
            raise Refusal(RefusalReason.DEVICE) from error
        device, ends = hold.device, connection.ends
        if ends.ethernet != device.ethernet:
            hold.release()
            raise Refusal(RefusalReason.LINK_LAYER)
        try:
            qps = QueuePairs(device, len(ends.qps), sends=False)
        except QueuePairFailed as error:
            hold.release()
            raise self._no_queue_pairs(error) from error
        connection.qps, connection.hold = qps, hold
        welcome = RdmaWelcome(region_nbytes=device.nbytes, probes=device.probes, ends=qps.ends)
        self._handle(connection, wire.Prepared(payload=welcome.encode(), probes=True))

    def _opened(self, connection: RdmaConnection) -> None:
        """Its queue pairs can receive from here on, and only `_drop` ends that."""
        assert connection.qps is not None
        self._loop.add_reader(connection.qps.fd, self._completions, connection)
        try:
            connection.qps.connect(connection.ends)
        except QueuePairFailed as error:
            raise self._no_queue_pairs(error) from error

    def _no_queue_pairs(self, error: QueuePairFailed) -> Refusal:
        log.warning("no queue pairs for a writer", reason=str(error))
        return Refusal(RefusalReason.QUEUE_PAIR)

    # What writers send.

    def _left(self, connection: RdmaConnection, *, drained: bool) -> None:
        del drained  # the queue pairs are destroyed, whatever is on its way
        # The immediates of its seals came before the device reported their completion to it.
        self._completions(connection, awaited=False)
        self._drop(connection)

    def _lost(self, connection: RdmaConnection) -> None:
        """Whole seals are delivered first. Then the pair is fenced, for what the writer left unfinished."""
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
                    self._probe_came(connection, qps.ends, index, number)
        except QueuePairFailed as error:
            self._fail(connection, str(error))
        except Refusal as refusal:
            self._handle(connection, wire.Refuse(reason=refusal.reason))

    def _probe_came(self, connection: RdmaConnection, ends: LinkEnds, qp: int, number: int) -> None:
        """The first immediate on a queue pair is its index. The last of them makes the link."""
        if qp in connection.probed or number != qp:
            raise Refusal(RefusalReason.PROBE)
        connection.probed.add(qp)
        if len(connection.probed) == len(ends.qps):
            connection.cancel_timer()
            connection.seals = SealGather(epoch=connection.epoch, ways=len(ends.qps), seals_max=ends.seals_max)
            self._handle(connection, Signal.PROBES_CAME)

    def _flush_for(self, connection: RdmaConnection, message: wire.SealSent) -> None:
        self._flush("a seal is refused: the device's memory cannot be flushed", connection)
        self._unsealed.pop(message.seal.grant, None)

    def _flush(self, failed: str, connection: RdmaConnection) -> None:
        """Raises Refusal: bytes may become visible late, so the link ends. Each is logged."""
        try:
            self._memory.flush()
        except DeviceError as error:
            self._counts["flush_failed"] += 1
            log.error(failed, writer=connection.writer, reason=str(error))
            raise Refusal(RefusalReason.FLUSH) from error

    # Ends.

    def _fail(self, connection: RdmaConnection, reason: str) -> None:
        """The link cannot go on, and may have lost bytes: fence its pair, if the link was ever made."""
        log.info("rdma link ended", writer=connection.writer, reason=reason)
        if connection.seals is not None:
            self._fence_own(connection)
        if connection.number in self._connections:
            self._drop(connection)

    def _broken(self, connection: RdmaConnection, reason: RefusalReason) -> None:
        self._fail(connection, f"refused: {reason.name}")

    def _fenced(self, connection: RdmaConnection) -> None:
        self._drop(connection)

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
                self._counts["flush_failed" if isinstance(error, DeviceError) else "destroy_failed"] += 1
                # Tried every second, so that one line a minute is enough.
                self._repeats.error("a fence has no evidence yet", peer=connection.writer, reason=str(error))
                self._repeats.upkeep()
                connection.destroy_timer = self._loop.call_later(DESTROY_RETRY_MS / 1000, self._drop, connection)
                return
            assert connection.hold is not None
            self._repeats.over(connection.writer, "its queue pairs are destroyed, the device is flushed")
            connection.qps = None
            connection.hold.release()
            self._counts["links_unproved"] += connection.seals is None
            if not self._closed and connection.channel.opened:
                self._proved(connection, Evidence.DESTROYED)
        self._connections.pop(connection.number, None)
