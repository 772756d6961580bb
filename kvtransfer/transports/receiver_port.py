"""What all receiving ports share: they listen, take writers through the handshake of the control channel, fence, and
count. The I/O is here, the decisions are in `control_channel.ReceiverChannel`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Final, Generic, TypeVar

from baton.endpoint import check_reachable, join_endpoint, source_of, split_endpoint
from baton.ids import Epoch, GrantId, Pair
from baton.shared_places import SharedPlaces
from kvtransfer.transport import (
    DataEndpoint,
    PairBeingFenced,
    ReceiverEvents,
    TooManyPairs,
    TransportName,
    WriteRanges,
)
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

ACCEPTS_PER_WAKE_MAX: Final = 32
"""Connections accepted in one go before others get their turn."""
_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OUR_FAULT: Final = frozenset({errno.EBADF, errno.EFAULT, errno.EINVAL, errno.ENOTSOCK})
"""Of the listener. All other errors of accept(2) concern the connection that was to be accepted."""
SECRET_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLimits:
    """Limits of one receiving port. A connection counts until there is evidence for its end, not until EOF."""

    connections_max: int = 256
    """Connections at a time that have proved themselves. The setting `receiver.connections_max`."""
    pairs_max: int = 1024
    """Writer processes expected, connected or being fenced. The setting `receiver.pairs_max`."""
    handshakes_max: int = 256
    """Connections at a time whose handshake is under way, of expected writers and of strangers each."""
    handshake_ms_max: int = 5000
    """How long a handshake may take."""
    backlog: int = 1024
    """Connections that wait for being accepted: many come in while a step holds the interpreter's lock."""
    accept_pause_ms: int = 100
    """How long no connection is accepted after the process ran out of file descriptors."""


PORT_LIMITS: Final = PortLimits()


class Evidence(Enum):
    """Why a connection can no longer write."""

    ACKNOWLEDGED = "acknowledged"
    DEAD = "dead, by pidfd"
    JOINED = "closed, its receive thread joined"
    DESTROYED = "reset, its queue pairs destroyed"
    WORKER = "closed, its receiving worker destroyed"


class PairFence:
    """Which connections of one pair may still write, and which fences wait for them. No I/O and no clock.

    A connection, named by an integer of the caller's choice, is *open* from the moment that it may write (shm: that the
    region's descriptor may have left for the writer), and stays so until there is evidence that it cannot any more.
    Nothing else closes it here (I2, I3).
    """

    def __init__(self) -> None:
        self._expected: tuple[Epoch, bytes] | None = None
        self._fenced_epoch = -1
        self._open: dict[int, Epoch] = {}
        self._waiting: set[Epoch] = set()
        self._closed: Counter[tuple[Epoch, str]] = Counter()
        """By epoch and evidence."""

    @property
    def is_idle(self) -> bool:
        """Nothing is expected, open or waiting: this may be forgotten."""
        return self._expected is None and not self._open and not self._waiting

    @property
    def fences_waiting(self) -> int:
        return len(self._waiting)

    def is_fencing(self, epoch: Epoch) -> bool:
        """A fence that covers `epoch` waits for its evidence."""
        return any(waiting >= epoch for waiting in self._waiting)

    def has_fenced(self, epoch: Epoch) -> bool:
        """`epoch` can be expected no more: a fence that covers it has begun."""
        return epoch <= self._fenced_epoch

    @property
    def expects(self) -> bool:
        """Connections of some epoch may be opened now."""
        return self._expected is not None

    def secret(self, epoch: Epoch) -> bytes | None:
        """The secret that `expect` set for this epoch, if it still holds."""
        return self._expected[1] if self._expected is not None and self._expected[0] == epoch else None

    def expect(self, epoch: Epoch, secret: bytes) -> None:
        """From now on connections must show this epoch and secret; connections already open are not touched."""
        assert epoch > self._fenced_epoch, (epoch, self._fenced_epoch, "this epoch is fenced")
        assert self._expected is None or epoch > self._expected[0], (epoch, "epochs only rise")
        self._expected = (epoch, secret)

    def opened(self, connection: int, epoch: Epoch) -> None:
        """From now on it may be able to write. The caller has just seen that it knows this epoch's secret."""
        assert connection not in self._open, connection
        assert epoch > self._fenced_epoch, (epoch, self._fenced_epoch)
        self._open[connection] = epoch

    def closed(self, connection: int, evidence: Evidence, pid: int = 0) -> None:
        """There is evidence that this connection can no longer write."""
        found = f"{evidence.value} (pid {pid})" if evidence is Evidence.DEAD else evidence.value
        self._closed[self._open.pop(connection), found] += 1

    def fence(self, epoch: Epoch) -> list[int]:
        """Open no connection of `epoch` or older any more; returns those still open. `settled` will name the epoch."""
        self._fenced_epoch = max(self._fenced_epoch, epoch)
        if self._expected is not None and self._expected[0] <= epoch:
            self._expected = None
        self._waiting.add(epoch)
        return [connection for connection, its_epoch in self._open.items() if its_epoch <= epoch]

    def settled(self) -> tuple[Epoch, str] | None:
        """The oldest fenced epoch up to which no connection is open, and the evidence; each once per fence."""
        if not self._waiting:
            return None
        epoch = min(self._waiting)
        if any(its_epoch <= epoch for its_epoch in self._open.values()):
            return None
        self._waiting.discard(epoch)
        return epoch, self._evidence(epoch)

    def _evidence(self, epoch: Epoch) -> str:
        counts: Counter[str] = Counter()
        for key in [key for key in self._closed if key[0] <= epoch]:
            counts[key[1]] += self._closed.pop(key)
        return ", ".join(f"{n} {found}" for found, n in sorted(counts.items())) or "no connection that could write"


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
    pid: int = 0
    pidfd: int | None = None
    """shm and ucx: the writer's process, where it is on this host."""

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

    def identify(self, pid: int) -> None:
        """Take hold of the writer's process, unless it is gone or of another PID namespace (pid 0). Before the
        CHALLENGE: its answer shows that the process was alive then, so that no other process can have the pid."""
        self.pid = pid
        with contextlib.suppress(OSError, OverflowError):
            self.pidfd = os.pidfd_open(pid)

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

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """The socket and the pidfd."""
        self.close_sock(loop)
        if self.pidfd is not None:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = None


ConnectionT = TypeVar("ConnectionT", bound=Connection)


class BasePort(ABC, Generic[ConnectionT]):
    """The part of `kvtransfer.transport.ReceiverPort` that all transports share. Made in, and used by, a running loop.

    A subclass decides what is evidence: it calls `_proved` when a connection can no longer write.
    """

    codec: ClassVar[wire.Codec]

    def __init__(
        self,
        make: Callable[..., ConnectionT],
        *,
        listener: socket.socket,
        address: str,
        events: ReceiverEvents,
        limits: PortLimits,
    ) -> None:
        """Takes the listening socket over, and accepts from the loop's next turn on. `make` is the type of its
        connections, whose own fields are set later."""
        self.address = address
        self._make = make
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._pairs: dict[Pair, PairFence] = {}
        """All that are expected, have connections, or are being fenced."""
        self._fences_ended = 0
        self._connections: dict[int, ConnectionT] = {}
        self._strangers = SharedPlaces(limits.handshakes_max)
        self._connections_made = 0
        self._counts: Counter[str] = Counter()
        self._refused: Counter[RefusalReason] = Counter()
        self._closed = False
        self._listener = listener
        self._accept_timer: asyncio.TimerHandle | None = None
        self._listen()

    @property
    def transport(self) -> TransportName:
        """See `ReceiverPort.transport`."""
        return self.codec.transport

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        """See `ReceiverPort.expect`."""
        assert not self._closed
        fence = self._pairs.get(pair)
        if fence is not None and fence.has_fenced(epoch):
            raise PairBeingFenced(f"epoch {epoch} of this pair is being fenced")
        if fence is None:
            if len(self._pairs) >= self._limits.pairs_max:
                raise TooManyPairs(
                    f"{len(self._pairs)} pairs use this region's {self.transport.value} port, pairs_max is reached"
                )
            fence = self._pairs[pair] = PairFence()
        secret = fence.secret(epoch)
        if secret is None:
            secret = secrets.token_bytes(SECRET_BYTES)
            fence.expect(epoch, secret)
        return DataEndpoint(transport=self.transport, address=self._endpoint_address(), secret=secret, epoch=epoch)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """Not enforced: a writer that has the region, or its key, is bounded only by its own library."""

    def forbid(self, grant: GrantId) -> bool:
        """Not enforced; see `allow`."""
        del grant
        return True

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`. A repeat before its `writer_gone` changes nothing; after it, it is answered again.
        How long it takes depends on the transport's evidence: see the top of its file."""
        assert not self._closed
        still_open = self._pairs.setdefault(pair, PairFence()).fence(epoch)
        self._loop.call_soon(self._settle, pair)
        for number in still_open:
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
        self._loop.remove_reader(self._listener)
        self._listener.close()
        if self._accept_timer is not None:
            self._accept_timer.cancel()
        self._pairs.clear()
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
            "fences_waiting": sum(fence.fences_waiting for fence in self._pairs.values()),
            "fences_ended": self._fences_ended,
            "refused": {reason.name: count for reason, count in self._refused.items()},
        }

    def _endpoint_address(self) -> str:
        """`DataEndpoint.address`."""
        return self.address

    # What comes.

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_WAKE_MAX):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUR_FAULT:
                    raise
                if error.errno not in _OUT_OF_DESCRIPTORS:
                    continue
                # The listener stays readable and accept keeps failing: without a pause that would be a busy loop.
                self._refused[RefusalReason.DESCRIPTORS] += 1
                self._loop.remove_reader(self._listener)
                self._accept_timer = self._loop.call_later(self._limits.accept_pause_ms / 1000, self._listen)
                return
            sock.setblocking(False)
            self._admit(sock, address)

    def _connect(self, sock: socket.socket, source: str, refusal: Refusal | None = None) -> None:
        """Enter a new connection, from now on the port's. What came with it is read at once: a writer's HELLO, for
        which it needs no place among the strangers, or the garbage of a flood, over which it is closed."""
        self._connections_made += 1
        channel = ReceiverChannel(self.codec, secret_of=self._secret)
        connection = self._make(number=self._connections_made, sock=sock, codec=self.codec, channel=channel)
        self._connections[connection.number] = connection
        if refusal is not None:
            self._handle(connection, refusal)
        else:
            self._read(connection)
        if connection.sock is None:
            return
        self._loop.add_reader(sock, self._read, connection)
        connection.handshake_timer = self._loop.call_later(
            self._limits.handshake_ms_max / 1000, self._handle, connection, Signal.DEADLINE
        )
        if not channel.expected:
            leaves = self._strangers.enter(connection.number, source)
            if leaves is not None:
                self._handle(self._connections[leaves], Refusal(RefusalReason.HANDSHAKES_MAX))

    def _read(self, connection: ConnectionT) -> bool:
        """Handle what has come; False: nothing, or the connection is over."""
        if connection.sock is None:
            return False
        try:
            data = connection.sock.recv(connection.inbox.read_bytes_max)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._take_in(connection, data)
        return bool(data)

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
            self._handle(connection, error)

    def _handle(self, connection: ConnectionT, event: wire.Event) -> None:
        """Carry out what follows from an event. One that refuses ends its instructions."""
        try:
            for instruction in connection.channel.handle(event):
                self._carry_out(connection, instruction)
        except Refusal as refusal:
            self._handle(connection, refusal)

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
                self._strangers.leave(connection.number)
                handshaking = sum(c.channel.expected and not c.channel.opened for c in self._connections.values())
                if handshaking > self._limits.handshakes_max:
                    raise Refusal(RefusalReason.HANDSHAKES_MAX)
                self._identify(connection)
            case Do.PREPARE:
                if sum(c.channel.proved for c in self._connections.values()) > self._limits.connections_max:
                    raise Refusal(RefusalReason.CONNECTIONS_MAX)
                self._prepare(connection)
            case Do.OPEN:
                self._pairs[connection.pair].opened(connection.number, connection.epoch)
                if connection.channel.state is not wire.ChannelState.PROBING:
                    connection.cancel_timer()
                self._opened(connection)
                if connection.pidfd is not None:
                    self._loop.add_reader(connection.pidfd, self._writer_died, connection)
            case Do.START:
                self._start(connection)
            case Do.COUNT_SEAL_REFUSED:
                self._counts["seals_refused"] += 1
            case Do.LOSE:
                self._lost(connection)
            case Do.DROP:
                self._strangers.leave(connection.number)
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
        if not self._closed and not self._pairs[connection.pair].is_fencing(connection.epoch):
            self.fence(connection.pair, connection.epoch)

    def _writer_died(self, connection: ConnectionT) -> None:
        """Its pidfd is readable. What it had still sent counts first, its seals and perhaps its BYE."""
        while self._read(connection):
            pass
        if connection.pidfd is not None:
            self._stopped_writing(connection, Evidence.DEAD)
            self._fence_own(connection)

    def _stopped_writing(self, connection: ConnectionT, evidence: Evidence) -> None:
        """The one place where a connection with a pidfd stops counting as one that may write."""
        self._proved(connection, evidence)
        self._drop(connection)

    # Pairs.

    def _secret(self, pair: Pair, epoch: Epoch) -> bytes:
        """What a connection of this pair and epoch has to prove. Raises Refusal: none is expected, or another epoch."""
        fence = self._pairs.get(pair)
        if fence is None or not fence.expects:
            raise Refusal(RefusalReason.NOT_EXPECTED)
        secret = fence.secret(epoch)
        if secret is None:
            raise Refusal(RefusalReason.EPOCH)
        return secret

    def _proved(self, connection: ConnectionT, evidence: Evidence) -> None:
        """It can no longer write. Fences that waited for it are reported soon."""
        self._pairs[connection.pair].closed(connection.number, evidence, connection.pid)
        self._loop.call_soon(self._settle, connection.pair)

    def _settle(self, pair: Pair) -> None:
        """Report every fence of the pair that has its evidence; the callback may call back into this port."""
        while not self._closed and (fence := self._pairs.get(pair)) is not None:
            settled = fence.settled()
            if settled is None:
                if fence.is_idle:
                    del self._pairs[pair]
                return
            self._fences_ended += 1
            self._events.writer_gone(pair, *settled)

    # The transport's own.

    @abstractmethod
    def _admit(self, sock: socket.socket, address: Any) -> None:
        """A new connection, which does not block; it is the port's. `address` is what accept(2) says of its peer."""

    def _is_writing(self, connection: ConnectionT) -> bool:
        """It may write, and is connected."""
        return connection.channel.opened and connection.sock is not None

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

    def _drop(self, connection: ConnectionT) -> None:
        """Close and forget a connection: one that cannot write, or any when the port itself closes."""
        connection.close(self._loop)
        self._connections.pop(connection.number, None)


class ListeningPort(BasePort[ConnectionT]):
    """A port on tcp: for tcp's streams themselves, or for the control channels of rdma and ucx."""

    def __init__(
        self,
        make: Callable[..., ConnectionT],
        *,
        listen: str,
        advertise_host: str | None,
        events: ReceiverEvents,
        limits: PortLimits,
    ) -> None:
        """Listens at once. Writers get `advertise_host` instead of the host in `listen`, which a wildcard needs.

        Raises:
            BatonError: BAD_ENDPOINT.
            OSError: the address cannot be listened on.
        """
        host, port = split_endpoint(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=limits.backlog)
        try:
            listener.setblocking(False)
            wire.tune(listener)  # what is accepted inherits it
            address = join_endpoint(advertise_host or host, listener.getsockname()[1])
            check_reachable(address)
        except BaseException:
            listener.close()
            raise
        super().__init__(make, listener=listener, address=address, events=events, limits=limits)

    def _admit(self, sock: socket.socket, address: Any) -> None:
        self._connect(sock, source_of(address[0]))
