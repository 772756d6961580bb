"""What all receiving ports share: they listen, take writers through the handshake of the control channel, fence, and
count. The I/O is here, the decisions are in `control_channel.ReceiverChannel`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Final, Generic, TypeVar

from baton.endpoint import check_reachable, join_endpoint, split_endpoint
from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import DataEndpoint, ReceiverEvents, TransportName, WriteRanges
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import (
    Do,
    Inbox,
    ReceiverChannel,
    Refusal,
    RefusalReason,
    SealGather,
    Signal,
)
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.pair_fence import PortFences

ACCEPTS_PER_WAKE_MAX: Final = 16
"""Connections accepted in one go before others get their turn."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_CONNECTION_GONE: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.EPROTO,
        errno.EPERM,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.ETIMEDOUT,
    }
)
"""These concern the connection that was to be accepted (accept(2)), not the listener."""


def listen_on(listen: str, advertise_host: str | None, *, backlog: int) -> tuple[socket.socket, str]:
    """A listening, non-blocking tcp socket, which is the caller's, and where peers reach it.

    Raises:
        BatonError: BAD_ENDPOINT.
        OSError: the address cannot be listened on.
    """
    host, port = split_endpoint(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=backlog)
    try:
        listener.setblocking(False)
        address = join_endpoint(advertise_host or host, listener.getsockname()[1])
        check_reachable(address)
    except BaseException:
        listener.close()
        raise
    return listener, address


class Acceptor:
    """Hands each accepted connection, non-blocking, to `admit`, which owns it. Runs on `loop`'s thread."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        loop: asyncio.AbstractEventLoop,
        admit: Callable[[socket.socket], None],
        paused: Callable[[], None],
        pause_ms: int,
    ) -> None:
        """Takes the listening, non-blocking socket over. `paused` is called each time that descriptors run out."""
        self._listener = listener
        self._loop = loop
        self._admit = admit
        self._paused = paused
        self._pause_ms = pause_ms
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening. Once."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._timer is not None:
            self._timer.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_WAKE_MAX):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _CONNECTION_GONE:
                    continue
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    raise
                self._pause()
                return
            sock.setblocking(False)
            self._admit(sock)

    def _pause(self) -> None:
        """Without descriptors the listener stays readable and accept keeps failing: that would be a busy loop."""
        self._paused()
        self._loop.remove_reader(self._listener)
        self._timer = self._loop.call_later(self._pause_ms / 1000, self._loop.add_reader, self._listener, self._accept)


@dataclass(slots=True, kw_only=True, eq=False)
class Connection:
    """One writer's, at the port. `sock` is None once it is closed or has another owner. Loop's thread."""

    number: int
    sock: socket.socket | None
    codec: wire.Codec
    channel: ReceiverChannel
    inbox: Inbox = field(init=False)
    handshake_timer: asyncio.TimerHandle | None = None
    fence_sent: bool = False
    seals: SealGather | None = None
    """rdma and ucx: once seals may come."""

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.codec)

    @property
    def hello(self) -> wire.Hello:
        """It has sent one."""
        assert self.channel.hello is not None
        return self.channel.hello

    @property
    def pair(self) -> Pair:
        return self.hello.pair

    @property
    def epoch(self) -> Epoch:
        return self.hello.epoch

    def send(self, message: wire.Message) -> None:
        """Best effort: the few bytes fit any socket buffer, and a writer has its own deadlines."""
        if self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.send(self.codec.encode(message))

    def cancel_timer(self) -> None:
        if self.handshake_timer is not None:
            self.handshake_timer.cancel()
            self.handshake_timer = None

    def close_sock(self, loop: asyncio.AbstractEventLoop) -> None:
        self.cancel_timer()
        if self.sock is not None:
            loop.remove_reader(self.sock)
            wire.close_politely(self.sock)
            self.sock = None


LimitsT = TypeVar("LimitsT", bound=PortLimits)
ConnectionT = TypeVar("ConnectionT", bound=Connection)


class BasePort(ABC, Generic[LimitsT, ConnectionT]):
    """The part of `kvtransfer.transport.ReceiverPort` that all transports share. Made in, and used by, a running loop.

    A subclass decides what is evidence: it calls `_fences.closed` when a connection can no longer write.
    """

    codec: ClassVar[wire.Codec]

    def __init__(
        self,
        make: Callable[..., ConnectionT],
        *,
        listener: socket.socket,
        address: str,
        events: ReceiverEvents,
        limits: LimitsT,
    ) -> None:
        """Takes the listening socket over, and accepts from the loop's next turn on. `make` is the type of its
        connections, whose own fields are set later."""
        self.address = address
        self._make = make
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._fences = PortFences(transport=self.transport, events=events, loop=self._loop, pairs_max=limits.pairs_max)
        self._connections: dict[int, ConnectionT] = {}
        self._connections_made = 0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[RefusalReason] = Counter()
        self._closed = False
        self._acceptor = Acceptor(
            listener,
            loop=self._loop,
            admit=self._admit,
            paused=lambda: self._refused.update([RefusalReason.DESCRIPTORS]),
            pause_ms=limits.accept_pause_ms,
        )

    @property
    def transport(self) -> TransportName:
        """See `ReceiverPort.transport`."""
        return self.codec.transport

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        """See `ReceiverPort.expect`.

        Raises:
            PairBeingFenced: a fence of this epoch has not ended yet.
            TooManyPairs: `pairs_max` pairs are expected, connected or being fenced.
        """
        secret = self._fences.expect(pair, epoch)
        return DataEndpoint(transport=self.transport, address=self._endpoint_address(), secret=secret, epoch=epoch)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Not enforced: a writer that has the region, or its key, is bounded only by its own library."""

    def forbid(self, grant: GrantId) -> bool:
        """Not enforced; see `allow`."""
        del grant
        return True

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`. A repeat before its `writer_gone` changes nothing; after it, it is answered again.
        How long it takes depends on the transport's evidence: see its receiver."""
        for number in self._fences.fence(pair, epoch):
            connection = self._connections[number]
            if not connection.fence_sent:
                connection.fence_sent = True
                connection.send(wire.Fence(epoch=epoch))
            self._fenced(connection)

    async def close(self) -> None:
        """Stop listening and drop all connections; no event is delivered any more. Writers see EOF. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        self._fences.close()
        for connection in list(self._connections.values()):
            self._drop(connection)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            "transport": self.transport.value,
            "address": self.address,
            "connections_made": self._connections_made,
            "connections_handshaking": sum(not c.channel.opened for c in connections),
            "connections_writing": sum(self._is_writing(c) for c in connections),
            "fences_waiting": self._fences.waiting,
            "fences_ended": self._fences.ended,
            "refused": {reason.name: count for reason, count in self._refused.items()},
        }

    def _endpoint_address(self) -> str:
        """`DataEndpoint.address`."""
        return self.address

    # What comes.

    def _connect(self, sock: socket.socket, *, surplus: bool = False) -> ConnectionT:
        """Enter a new connection, from now on the port's, and start its time."""
        self._connections_made += 1
        channel = ReceiverChannel(self.codec, secret_of=self._fences.secret, surplus=surplus)
        connection = self._make(number=self._connections_made, sock=sock, codec=self.codec, channel=channel)
        self._connections[connection.number] = connection
        self._loop.add_reader(sock, self._read, connection)
        connection.handshake_timer = self._loop.call_later(
            self._limits.handshake_ms_max / 1000, self._handle, connection, Signal.DEADLINE
        )
        return connection

    def _read(self, connection: ConnectionT) -> None:
        if connection.sock is None:
            return
        try:
            data = connection.sock.recv(connection.inbox.read_bytes_max)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._take_in(connection, data)

    def _take_in(self, connection: ConnectionT, data: bytes) -> None:
        """Handle what has come; nothing: the connection is over."""
        if not data:
            if not connection.inbox.empty:
                self._refused[RefusalReason.TRUNCATED] += 1
            self._handle(connection, Signal.EOF)
            return
        try:
            for message in connection.inbox.feed(data):
                self._handle(connection, message)
                if connection.sock is None:
                    return
        except wire.MalformedMessage as error:
            self._handle(connection, wire.Refuse(reason=error.reason))

    def _handle(self, connection: ConnectionT, event: wire.Event) -> None:
        """Carry out what follows from an event. One that refuses ends its instructions."""
        try:
            for instruction in connection.channel.handle(event):
                self._carry_out(connection, instruction)
        except Refusal as refusal:
            self._handle(connection, wire.Refuse(reason=refusal.reason))

    def _carry_out(self, connection: ConnectionT, instruction: wire.Instruction) -> None:
        match instruction:
            case wire.Message():
                if isinstance(instruction, wire.Refused):
                    self._refused[instruction.reason] += 1
                connection.send(instruction)
            case wire.Deliver(message=message):
                self._deliver(connection, message)
            case wire.Left(drained=drained):
                self._left(connection, drained=drained)
            case wire.Broken(reason=reason):
                self._broken(connection, reason)
            case Do.IDENTIFY:
                self._identify(connection)
            case Do.PREPARE:
                if sum(c.channel.proved for c in self._connections.values()) > self._limits.connections_max:
                    raise Refusal(RefusalReason.CONNECTIONS_MAX)
                self._prepare(connection)
            case Do.OPEN:
                self._fences.opened(connection.pair, connection.number, connection.epoch)
                if connection.channel.state is not wire.ChannelState.PROBING:
                    connection.cancel_timer()
                self._opened(connection)
            case Do.START:
                self._start(connection)
            case Do.COUNT_SEAL_REFUSED:
                self._counts["seals_refused"] += 1
            case Do.LOSE:
                self._lost(connection)
            case Do.DROP:
                self._drop(connection)

    def _deliver(self, connection: ConnectionT, message: wire.SealSent | wire.LateBye) -> None:
        """Raises Refusal."""
        assert connection.seals is not None and isinstance(message, wire.SealSent)
        self._report(connection, connection.seals.message_came(message))

    def _report(self, connection: ConnectionT, whole: wire.SealSent | None) -> None:
        """Report a seal of which all has come. Raises Refusal."""
        if whole is None:
            return
        self._flush_for(connection, whole)
        self._counts["seals"] += 1
        connection.send(wire.Sealed(number=whole.number))
        if not self._closed:
            self._events.seal_landed(connection.pair, whole.seal)

    def _fence_own(self, connection: ConnectionT) -> None:
        """The link cannot go on, and may have lost bytes: fence its pair."""
        if not self._closed and not self._fences.is_fencing(connection.pair, connection.epoch):
            self.fence(connection.pair, connection.epoch)

    # The transport's own.

    @abstractmethod
    def _admit(self, sock: socket.socket) -> None:
        """A new connection, which does not block; it is the port's."""

    @abstractmethod
    def _is_writing(self, connection: ConnectionT) -> bool:
        """It may write, and is connected."""

    @abstractmethod
    def _identify(self, connection: ConnectionT) -> None:
        """Look at the HELLO's payload. Raises Refusal."""

    @abstractmethod
    def _prepare(self, connection: ConnectionT) -> None:
        """Make what the writer's data needs, now or later, and handle `Prepared`. Raises Refusal."""

    def _opened(self, connection: ConnectionT) -> None:
        """From here on it counts as one that may write; its WELCOME comes next. Raises Refusal."""

    def _start(self, connection: ConnectionT) -> None:
        """The WELCOME has been sent."""

    def _flush_for(self, connection: ConnectionT, message: wire.SealSent) -> None:
        """Make visible what was written before this seal. Raises Refusal."""

    @abstractmethod
    def _left(self, connection: ConnectionT, *, drained: bool) -> None:
        """It may write, and sent BYE."""

    @abstractmethod
    def _lost(self, connection: ConnectionT) -> None:
        """It may write, and its connection is over without a BYE, or of no more use."""

    @abstractmethod
    def _broken(self, connection: ConnectionT, reason: RefusalReason) -> None:
        """It may write, and broke the protocol; REFUSED has been sent."""

    def _fenced(self, connection: ConnectionT) -> None:
        """A fence covers it; FENCE has been sent."""

    @abstractmethod
    def _drop(self, connection: ConnectionT) -> None:
        """Close and forget one that never could write, or at the end of the port any."""


class ListeningPort(BasePort[LimitsT, ConnectionT]):
    """A port on tcp: for tcp's streams themselves, or for the control channels of rdma and ucx."""

    def __init__(
        self,
        make: Callable[..., ConnectionT],
        *,
        listen: str,
        advertise_host: str | None,
        events: ReceiverEvents,
        limits: LimitsT,
    ) -> None:
        """Listens at once. Writers get `advertise_host` instead of the host in `listen`, where there is one.

        Raises:
            BatonError: BAD_ENDPOINT.
            OSError: the address cannot be listened on.
        """
        listener, address = listen_on(listen, advertise_host, backlog=limits.handshakes_max)
        super().__init__(make, listener=listener, address=address, events=events, limits=limits)

    def _admit(self, sock: socket.socket) -> None:
        handshaking = sum(not c.channel.opened for c in self._connections.values())
        connection = self._connect(sock)
        if handshaking >= self._limits.handshakes_max:
            self._handle(connection, wire.Refuse(reason=RefusalReason.HANDSHAKES_MAX))
            return
        try:
            wire.tune(sock)
        except OSError:
            self._drop(connection)  # reset before it was looked at
