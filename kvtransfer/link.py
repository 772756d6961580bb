"""A writer's connections to one receiver process.

The data connection is made when needed, over the best transport that still works. By the liveness stream the two watch
each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from batonpb import transfer_pb2, transfer_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, Reason
from baton.ids import Epoch, Pair
from baton.liveness import LivenessConfig, Reach
from baton.log import get_log
from baton.rpc import rpc_errors
from kvtransfer.negotiation import Offers, RejectedTransport
from kvtransfer.status import Moved, PairSpeed
from kvtransfer.transport import DataEndpoint, TransportName, WriterEvents, WriterLink

log = get_log("writer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A receiver process, from the directory."""

    name: str
    endpoint: str
    pair: Pair


class DataDoesNotPass(BatonError):
    """The receiver answers calls, but data sent to it does not arrive: trying again does not help."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PEER_UNREACHABLE, message)


LinkMaker = Callable[[DataEndpoint, Pair, WriterEvents], Awaitable[WriterLink]]
"""Opens a data connection of the transport that the endpoint names. Raises BatonError, DataDoesNotPass."""


class PairLink:
    """At most one connection at a time, opened by one task however many callers wait for it.

    Control thread only, except `posting` and `not_posted`, which the engine thread calls.
    """

    def __init__(
        self,
        *,
        address: PeerAddress,
        stub: transfer_pb2_grpc.TransferStub,
        call_ms_max: int,
        request: transfer_pb2.ConnectRequest,
        make_link: LinkMaker,
        offers: Offers,
        events: WriterEvents,
        replaced: Callable[[], None],
        idle: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """`request` is filled in with what is offered. `replaced` is called when another process answers. While `idle`
        says that no handoff uses the connection, it may be closed for a better one."""
        self.offers = offers
        self.now: WriterLink | None = None
        self.transport: TransportName | None = None
        """Of the current or the last connection; so is `epoch`."""
        self.epoch = Epoch(0)
        self.num_blocks = 0
        """Of the receiver's region."""
        self.failures = 0
        """Connections that broke or could not be made."""
        self.rejected_transports: tuple[RejectedTransport, ...] = ()
        """Better transports than the connection's, when it was made; not those that this side has given up."""
        self._address = address
        self._stub = stub
        self._call_s_max = call_ms_max / 1000
        self._request = request
        self._make_link = make_link
        self._events = events
        self._replaced = replaced
        self._idle = idle
        self._outgoing: WriterLink | None = None
        self._loop = loop
        self._connecting: asyncio.Task[None] | None = None
        self._landed = self._lost_writes = False
        self._speed = PairSpeed()
        self._speed_lock = threading.Lock()

    async def ensure(self) -> None:
        """Connect if there is no connection, or if a better transport can be tried again and no handoff uses this one.

        All who wait share one try. Raises BatonError.
        """
        if self.now is not None:
            assert self.transport is not None
            if not (self._idle() and self.offers.better_restorable(self.transport, self._loop.time())):
                return
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(self._connect_over)
        connecting = self._connecting
        await asyncio.wait([connecting])  # a cancelled caller must not end the others' try
        if not connecting.cancelled():
            connecting.result()

    def posting(self, nbytes: int) -> None:
        """A batch is about to be posted on the connection. On the engine thread."""
        with self._speed_lock:
            self._speed.posted(nbytes, self._loop.time())

    def not_posted(self, nbytes: int) -> None:
        """Posting it failed. On the engine thread."""
        with self._speed_lock:
            self._speed.completed(nbytes, self._loop.time(), copied=False)

    def completed(self, nbytes: int, *, copied: bool) -> None:
        """A batch that was posted on the connection, or on one before it, has completed."""
        with self._speed_lock:
            self._speed.completed(nbytes, self._loop.time(), copied=copied)
        if copied:
            self._landed = True
        else:
            self._lost_writes = True

    def moved(self) -> tuple[Moved, Moved]:
        """What `transport` has moved, in all and recently."""
        with self._speed_lock:
            now_s = self._loop.time()
            return self._speed.in_all(now_s), self._speed.recent(now_s)

    def lost(self, reason: str) -> Epoch | None:
        """The connection has ended by itself: its epoch. None: it was no longer in use."""
        link, self.now = self.now, None
        if link is None:
            return None
        if not link.fenced:
            assert self.transport is not None
            self._count_failure(self.transport, reason, worked=self._landed or not self._lost_writes)
        return link.epoch

    def stop_connecting(self) -> None:
        """End the try that is under way; those who wait for it are woken. `close` waits for its end."""
        if self._connecting is not None:
            self._connecting.cancel()

    async def close(self) -> None:
        """Close the connection, also one that is still being made."""
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait([connecting])
        for link in (self._outgoing, self.now):
            if link is not None:
                await link.close()

    def _connect_over(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # retrieved here too: those who waited may have gone away

    async def _connect(self) -> None:
        """Where a transport's data does not pass, the next best one is tried at once. Raises BatonError."""
        while True:
            try:
                await self._connect_once()
                return
            except DataDoesNotPass:
                if self.offers.names == list(self._request.transports):
                    raise

    async def _connect_once(self) -> None:
        if self.now is not None:
            self._outgoing, self.now = self.now, None
            await self._outgoing.close()
        restored = self.offers.restore(self._loop.time())
        if restored:
            log.info(
                "transport offered again",
                peer=self._address.name,
                transports=",".join(transport.value for transport in restored),
            )
        del self._request.transports[:]
        self._request.transports.extend(self.offers.names)
        try:
            with rpc_errors(self._address.endpoint):
                reply: transfer_pb2.ConnectReply = await self._stub.Connect(self._request, timeout=self._call_s_max)
        except BatonError as error:
            if error.reason is Reason.INCARNATION_MISMATCH:
                self._replaced()
            raise
        endpoint = DataEndpoint(
            transport=TransportName(reply.transport),
            address=reply.address,
            secret=reply.secret,
            epoch=Epoch(reply.epoch),
        )
        self.num_blocks = reply.num_blocks
        try:
            self.now = await self._make_link(endpoint, self._address.pair, self._events)
        except BatonError as error:
            self._count_failure(endpoint.transport, error.message, worked=not isinstance(error, DataDoesNotPass))
            raise
        if endpoint.transport is not self.transport:
            with self._speed_lock:
                self._speed.restart(self._loop.time())
        self.transport, self.epoch = endpoint.transport, endpoint.epoch
        self._landed = self._lost_writes = False
        self._note_rejected(reply)
        log.info("data link", peer=self._address.name, transport=reply.transport, epoch=reply.epoch)

    def _note_rejected(self, reply: transfer_pb2.ConnectReply) -> None:
        """Log a fall back once, and again when it, or its reason, changes."""
        before, given_up = self.rejected_transports, {transport.value for transport in self.offers.given_up}
        self.rejected_transports = tuple(
            RejectedTransport(transport=better.transport, why=better.why)
            for better in reply.rejected_transports
            if better.transport not in given_up
        )
        if self.rejected_transports and self.rejected_transports != before:
            write = log.info if all(better.expected for better in self.rejected_transports) else log.warning
            write(
                "a better transport is not used",
                peer=self._address.name,
                transport=reply.transport,
                instead_of="; ".join(map(str, self.rejected_transports)),
            )

    def _count_failure(self, transport: TransportName, reason: str, *, worked: bool = True) -> None:
        """At some point the next best transport is used instead."""
        self.failures += 1
        if not worked:
            log.warning(
                "link lost before anything arrived",
                peer=self._address.name,
                transport=transport.value,
                reason=reason,
            )
        if self.offers.failed(transport, self._loop.time(), worked=worked):
            log.warning(
                "transport given up",
                peer=self._address.name,
                transport=transport.value,
                reason=reason,
                left=",".join(self.offers.names),
            )


class LivenessStream:
    """One long call from writer to receiver, open while both live and reach each other: each watches the other by it.

    This is the writer's end, for one receiver process: made on a running loop, ended by `close`. A receiver that is
    believed lost may come back: handoffs are given up, and drain as usual.

    `lost` is called each time the receiver is believed lost, `gone` when another process is at its address.
    """

    def __init__(
        self,
        *,
        name: str,
        endpoint: str,
        stub: transfer_pb2_grpc.TransferStub,
        request: transfer_pb2.LivenessRequest,
        lost: Callable[[], None],
        gone: Callable[[], None],
        liveness: LivenessConfig,
        clock: Clock,
    ) -> None:
        self.out_of_reach = False
        """Believed lost, and not reached again since."""
        self._name = name
        self._stub = stub
        self._request = request
        self._lost = lost
        self._gone = gone
        self._reach = Reach(endpoint, liveness, clock)
        self._clock = clock
        self._pause_s = liveness.reconnect_ms_max / 1000
        self._stays_s = liveness.failed_stream_ms_max / 1000
        self._task = asyncio.create_task(self._run(), name=f"liveness-{name}")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                if await self._replaced():
                    self._gone()
                    return
                lost = await self._reach.lost()
                why = self._reach.why
            except Exception as error:
                log.error("watching a receiver failed", peer=self._name, exc_info=error)
                lost, why = True, "watching it failed"
            if lost:
                if not self.out_of_reach:
                    self.out_of_reach = True
                    log.warning("receiver lost", peer=self._name, why=why)
                    try:
                        self._lost()
                    except Exception as error:
                        log.error("giving up the handoffs to a receiver failed", peer=self._name, exc_info=error)
                await self._clock.sleep_s(max(self._pause_s, self._reach.doubt_pause_s))

    async def _replaced(self) -> bool:
        """One call, to its end. True: another process is at the receiver's address.

        The receiver's one answer says no more than that it has taken the call: what counts is whether that stays.
        """
        staying: asyncio.TimerHandle | None = None
        try:
            with rpc_errors(self._name):
                call = self._stub.Liveness(self._request)
                await self._reach.connected(call)
                if self._reach.doubted:
                    staying = asyncio.get_running_loop().call_later(self._stays_s, self._stayed)
                async for _ in call:
                    if not self._reach.doubted:
                        self._reached()
        except BatonError as error:
            return error.reason is Reason.INCARNATION_MISMATCH
        finally:
            if staying is not None:
                staying.cancel()
        return False

    def _stayed(self) -> None:
        """The call that a doubted receiver has taken is still there."""
        self._reach.heard()
        self._reached()

    def _reached(self) -> None:
        if self.out_of_reach:
            self.out_of_reach = False
            log.info("receiver reached again", peer=self._name)
