"""The receiving side of tcp: proves writers, gives each connection a receive thread, and fences by joining threads.

Evidence (DESIGN I3): a byte lands only in a receive thread, under its landing lock, on a connection of the pair. When
the threads of all connections of a pair have been joined and no new one is admitted, nothing of it lands any more,
whatever the writer does. So a writer that is dead, stopped or cut off is fenced at once, and a connection that ends
without BYE is itself the reason for a fence: its writer may have lost bytes.

A region on a device needs one more thing: the device has finished the copies that the thread queued there. After an
error of the device nobody knows that. Then a joined thread is no evidence, and neither is the writer's word: the blocks
stay with their writer, `copies_unproved` counts the connections, and the device is asked again every second.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from baton.repeats import RepeatLog
from kvtransfer.device.driver import DeviceError
from kvtransfer.device.staging import StagedRegion, StagingFull
from kvtransfer.region import Region
from kvtransfer.transport import ReceiverEvents, TransportName, WriteRanges
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import Inbox, ReceiverChannel, Refusal, RefusalReason
from kvtransfer.transports.limits import PortLimits
from kvtransfer.transports.pair_fence import Evidence
from kvtransfer.transports.receiver_port import Connection, ListeningPort
from kvtransfer.transports.tcp import CODEC, TcpHello, TcpWelcome
from kvtransfer.transports.tcp_stream import STREAM_LIMITS, LandingMemory, ReceiveStream, StagedMemory, StreamLimits

log = get_log("tcp")

PROVE_RETRY_MS = 1000
"""Between two looks whether a device that failed has finished its copies."""
TCP_PORT_LIMITS: Final = PortLimits(handshake_ms_max=2000)
SEALS_PARTIAL_MAX: Final = 4096
"""Seals that have come on some of their streams and not yet on all."""


@dataclass(slots=True, kw_only=True, eq=False)
class TcpConnection(Connection):
    """`sock` is None once a stream owns it, and at the end."""

    index: int = 0
    """Of its stream in the link."""
    memory: LandingMemory | None = None
    """Until a stream owns it."""
    stream: ReceiveStream | None = None
    prove_timer: asyncio.TimerHandle | None = None
    unproved: bool = False
    """The device failed with copies of this connection queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    pair: Pair
    epoch: Epoch
    ranges: WriteRanges


class TcpReceiverPort(ListeningPort[PortLimits, TcpConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). Everything runs on `loop`'s thread."""

    transport: ClassVar[TransportName] = TransportName.TCP
    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self,
        *,
        region: Region | StagedRegion,
        events: ReceiverEvents,
        loop: asyncio.AbstractEventLoop,
        randomness: Callable[[int], bytes],
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        limits: PortLimits = TCP_PORT_LIMITS,
        stream: StreamLimits = STREAM_LIMITS,
    ) -> None:
        """Listens at once. `region` is the caller's and outlives the port; `randomness(n)` gives n secret bytes.

        Writers get `advertise_host` instead of the host in `listen`, which it must be given for a wildcard.

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
        self._region = region
        self._stream_limits = stream
        if isinstance(region, StagedRegion):
            frame_bytes_max = min(self._stream_limits.frame_bytes_max, region.limits.chunk_bytes)
            self._stream_limits = replace(self._stream_limits, frame_bytes_max=frame_bytes_max)
        self._allowed: dict[GrantId, _Allowed] = {}
        self._unproved: dict[GrantId, Pair] = {}
        """Forbidden grants of which copies may still run on a device that has failed."""
        self._seals_partial: dict[tuple[Pair, int, GrantId], int] = {}
        self._repeats = RepeatLog(log, loop.time)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """See `ReceiverPort.allow`."""
        self._allowed[grant] = _Allowed(pair=pair, epoch=epoch, ranges=ranges)
        for stream in self._streams(pair):
            if stream.hello.epoch == epoch:
                stream.allow(grant, ranges)

    def forbid(self, grant: GrantId) -> bool:
        """See `ReceiverPort.forbid`. Waits at most for one system call of each stream of the pair, and for those of the
        grant's copies that are queued on a device."""
        allowed = self._allowed.pop(grant, None)
        pair = allowed.pair if allowed is not None else self._unproved.pop(grant, None)
        for stream in self._streams(pair) if pair is not None else ():
            try:
                stream.forbid(grant)
            except DeviceError as error:
                log.error("copies of a grant may still run: the device failed", reason=str(error))
                self._unproved[grant] = stream.hello.pair
        return grant not in self._unproved

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """See `ReceiverPort.fence`. No byte is taken any more when this returns; the threads are joined soon after,
        once a device is through with what they had queued there."""
        for number in self._fences.fence(pair, epoch):
            stream = self._connections[number].stream
            assert stream is not None
            stream.stop(epoch)

    async def close(self) -> None:
        """Stop listening and receiving; no event is delivered any more. Writers see EOF. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        for connection in self._connections.values():
            if connection.stream is not None:
                connection.stream.stop(None)
        for connection in list(self._connections.values()):
            if connection.stream is not None:
                connection.stream.join()
                self._release_at_close(connection.stream)
            self._drop(connection)
        self._fences.close()
        self._allowed.clear()
        self._repeats.close()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        streams = [c.stream for c in self._connections.values() if c.stream is not None]
        total = sum((stream.counts() for stream in streams), self._counts)
        return {
            **super().describe(),
            "copies_unproved": sum(c.unproved for c in self._connections.values()),
            "grants_allowed": len(self._allowed),
            **(self._region.describe() if isinstance(self._region, StagedRegion) else {}),
            **{name: total[name] for name in ("seals", "frames_landed", "frames_dropped", "bytes_landed")},
        }

    def _streams(self, pair: Pair) -> list[ReceiveStream]:
        streams = (c.stream for c in self._connections.values())
        return [stream for stream in streams if stream is not None and stream.hello.pair == pair]

    # Handshake.

    def _connection(self, number: int, sock: socket.socket, channel: ReceiverChannel) -> TcpConnection:
        return TcpConnection(number=number, sock=sock, codec=CODEC, channel=channel, inbox=Inbox(CODEC))

    def _is_writing(self, connection: TcpConnection) -> bool:
        return connection.stream is not None

    def _identify(self, connection: TcpConnection) -> None:
        connection.index = TcpHello.decode(connection.hello.payload).stream

    def _prepare(self, connection: TcpConnection) -> None:
        try:
            connection.memory = self._memory()
        except StagingFull as error:
            raise Refusal(RefusalReason.CONNECTIONS_MAX) from error
        welcome = TcpWelcome(
            region_nbytes=self._region.nbytes,
            frame_bytes_max=self._stream_limits.frame_bytes_max,
            frame_segments_max=self._stream_limits.frame_segments_max,
        )
        self._handle(connection, wire.Prepared(payload=welcome.encode()))

    def _memory(self) -> LandingMemory:
        """What a connection receives into. Raises StagingFull."""
        region = self._region
        if isinstance(region, StagedRegion):
            return StagedMemory(region.host_U8, region.nbytes, region.share(region.limits.stream_chunks))
        return LandingMemory(region.array_U8, region.nbytes)

    def _start(self, connection: TcpConnection) -> None:
        """From here on the socket is the stream's: no message but the stream's own is taken or sent any more."""
        sock, memory = connection.sock, connection.memory
        assert sock is not None and memory is not None
        self._loop.remove_reader(sock)
        connection.sock = connection.memory = None
        stream = ReceiveStream(
            sock=sock,
            hello=connection.hello,
            index=connection.index,
            memory=memory,
            limits=self._stream_limits,
            loop=self._loop,
            sealed=self._seal,
            ended=lambda _: self._ended(connection),
        )
        for grant, allowed in self._allowed.items():
            if (allowed.pair, allowed.epoch) == (connection.pair, connection.epoch):
                stream.allow(grant, allowed.ranges)
        try:
            stream.start()
        except BaseException:
            # Nothing was received, so nothing is on a device.
            sock.close()
            memory.release()
            self._drop(connection)
            self._fences.closed(connection.pair, connection.number, Evidence.JOINED)
            raise
        connection.stream = stream

    # After the WELCOME a connection's messages go to its stream, and none to the port.

    def _deliver(self, connection: TcpConnection, message: wire.SealSent | wire.LateBye) -> None:
        raise AssertionError((connection, message))

    def _left(self, connection: TcpConnection, *, drained: bool) -> None:
        raise AssertionError((connection, drained))

    def _lost(self, connection: TcpConnection) -> None:
        raise AssertionError(connection)

    def _broken(self, connection: TcpConnection, reason: RefusalReason) -> None:
        raise AssertionError((connection, reason))

    # What streams report.

    def _seal(self, stream: ReceiveStream, frame: wire.SealSent) -> None:
        """Report a seal when it has come down every stream that it names."""
        if self._closed:
            return
        hello = stream.hello
        key = (hello.pair, hello.link, frame.seal.grant)
        arrived = self._seals_partial.pop(key, 0) | 1 << stream.index
        if arrived & frame.ways_mask == frame.ways_mask:
            self._counts["seals"] += 1
            self._events.seal_landed(hello.pair, frame.seal)
        elif len(self._seals_partial) < SEALS_PARTIAL_MAX:
            self._seals_partial[key] = arrived
        else:
            self._refused[RefusalReason.SEALS_MAX] += 1
            self.fence(hello.pair, hello.epoch)

    def _ended(self, connection: TcpConnection) -> None:
        """A receive thread is at its end: join it, which is the evidence for its connection."""
        if self._closed:
            return
        stream = connection.stream
        assert stream is not None
        stream.join()
        hello, end = stream.hello, stream.end
        if end is not None and end.refusal is not None:
            self._refused[end.refusal] += 1
        if not any(s.hello.link == hello.link and s.end is None for s in self._streams(hello.pair)):
            for key in [k for k in self._seals_partial if k[:2] == (hello.pair, hello.link)]:
                del self._seals_partial[key]
        orderly = end is not None and end.by_bye
        if not orderly:
            self._fence_own(connection)
        self._prove(connection, stream)

    def _prove(self, connection: TcpConnection, stream: ReceiveStream) -> None:
        """Its thread has been joined. With the device's word, if there is one, the connection can no longer write."""
        if self._closed:
            return
        hello = stream.hello
        writer = f"{hello.pair.writer:x}"
        try:
            released = stream.release()
        except DeviceError as error:
            connection.unproved, released = True, False
            self._repeats.error("a fence has no evidence yet: the device failed", peer=writer, reason=str(error))
            self._repeats.upkeep()
        if not released:
            connection.prove_timer = self._loop.call_later(PROVE_RETRY_MS / 1000, self._prove, connection, stream)
            return
        if connection.unproved:
            self._repeats.over(writer, "the device has finished its copies")
        self._counts.update(stream.counts())
        self._drop(connection)
        self._fences.closed(hello.pair, connection.number, Evidence.JOINED)

    def _release_at_close(self, stream: ReceiveStream) -> None:
        """Nobody asks the device again: what it may still copy from or to stays pinned until the process ends."""
        try:
            released = stream.release()
        except DeviceError:
            released = False
        if not released:
            stream.leave_behind()

    # Connections.

    def _drop(self, connection: TcpConnection) -> None:
        if connection.memory is not None:
            connection.memory.release()
            connection.memory = None
        if connection.prove_timer is not None:
            connection.prove_timer.cancel()
        connection.close_sock(self._loop)
        self._connections.pop(connection.number, None)
