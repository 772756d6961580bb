"""The writing side of tcp: sends straight from the source region over one or several connections.

A sending thread for each stream; acknowledgements are read on the control thread. A frame goes from the region to the
kernel by one native call. What is small is sent by whoever posts it, without waiting, while no thread sends on that
stream; what the socket does not take then is left to the stream's thread. A batch is complete when all its frames are
acknowledged, or when the link is over: then every socket is closed and every thread joined, so nothing reads the source
any more (I1).

Nothing is ever `writes_in_doubt` here, though the kernels and the network may still hold frames of a link that broke:
the receiver takes no byte of one before it has found the grant among those that it allows, which a Release ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from baton.ids import GrantId, Pair
from baton.tasks import call_loop
from kvtransfer.native.sockets import native_sockets
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import RECV_BYTES, close_politely
from kvtransfer.transports.limits import LINK_LIMITS, LinkLimits
from kvtransfer.transports.post_queue import Completed, PostQueue, Taken
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import (
    CODEC,
    MESSAGE_BYTES,
    Ack,
    Data,
    TcpHello,
    TcpWelcome,
    acknowledged_bytes,
    connect_stream,
    leave_stream,
    moved_by,
    of_one_call,
)
from kvtransfer.transports.tcp_lanes import Frame, StreamLanes, ToSend
from kvtransfer.transports.writer_link import BaseWriterLink, Mark

AT_ONCE_BYTES_MAX: Final = 1 << 16
"""The posting thread itself sends batches up to this size, as far as the socket takes them."""


def send_frame(
    sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray, sent_nbytes: int = 0
) -> None:
    """Send head, table and payload of a frame over a blocking socket, from byte `sent_nbytes` on. Raises OSError.

    Without a frame the head is all there is.
    """
    native = native_sockets()
    if native is None:
        send_by_python(sock, head, frame, source_U8, sent_nbytes)
    elif frame is None:
        sock.sendall(memoryview(head)[sent_nbytes:])
    else:
        native.send(sock.fileno(), head, frame.table_S2, source_U8, frame.src_S, frame.nbytes_S, sent_nbytes)


def send_by_python(
    sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray, sent_nbytes: int = 0
) -> None:
    """What `send_frame` does where there is no native library."""
    views = _views(head, frame, source_U8)
    first, sent = 0, sent_nbytes
    while True:
        while first < len(views) and sent >= views[first].nbytes:
            sent -= views[first].nbytes
            first += 1
        if first == len(views):
            return
        views[first] = views[first][sent:]
        sent = sock.sendmsg(of_one_call(views, first))


def send_at_once(sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray) -> int:
    """Send what one call takes without waiting; how many bytes that was. An error will come again: 0 for now."""
    try:
        return sock.sendmsg(of_one_call(_views(head, frame, source_U8)), (), socket.MSG_DONTWAIT)
    except OSError:
        return 0


def _views(head: bytes, frame: Frame | None, source_U8: np.ndarray) -> list[memoryview]:
    if frame is None:
        return [memoryview(head)]
    source = source_U8.data
    payload = [source[s : s + n] for s, n in zip(frame.src_S.tolist(), frame.nbytes_S.tolist(), strict=True)]
    return [memoryview(head + frame.table_S2.tobytes()), *payload]


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    index: int
    sock: socket.socket
    thread: threading.Thread | None = None
    received: bytes = b""
    """The beginning of a message."""
    sending: bool = False
    """Its thread has started and has not reported its end."""
    reading: bool = False
    """Its socket is watched: no EOF yet."""


class TcpWriterLink(BaseWriterLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    `post` may be called from any thread, the rest from the loop's. The end comes once: from `close`, which lets frames
    under way arrive, or from a FENCE, EOF or error on any stream, which closes all of them. `link_lost` is called last,
    after every completion, and not for an end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.TCP
    _queue: PostQueue[Frame, ToSend]

    def __init__(
        self,
        *,
        socks: list[socket.socket],
        welcome: TcpWelcome,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        limits: LinkLimits,
    ) -> None:
        """Takes ownership of the sockets; `_start` follows. Use `connect`."""
        super().__init__(endpoint=endpoint, pair=pair, events=events, loop=loop, limits=limits)
        self._source_U8: np.ndarray | None = source_region_U8
        self.region_nbytes = welcome.region_nbytes
        """Of the receiver's region."""
        frame_bytes_max, frame_segments_max = welcome.limits_here
        self._lanes = StreamLanes(
            streams=len(socks),
            src_nbytes=len(source_region_U8),
            dst_nbytes=welcome.region_nbytes,
            frame_bytes_max=frame_bytes_max,
            frame_segments_max=frame_segments_max,
            at_once_bytes_max=AT_ONCE_BYTES_MAX,
            abandoned_grants_max=limits.abandoned_grants_max,
            loop=loop,
            completed=events.writes_completed,
        )
        self._queue = self._lanes.queue
        self._streams = [_Stream(index=i, sock=sock) for i, sock in enumerate(socks)]
        self._joined = False

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: TcpConfig | None = None,
        limits: LinkLimits = LINK_LIMITS,
    ) -> TcpWriterLink:
        """Connect every stream and prove the pair's secret on each.

        `source_region_U8` is the caller's; the link releases it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, or not done within `connect_ms_max`.
        """
        config = config or TcpConfig()
        link = int.from_bytes(os.urandom(8))
        socks: list[socket.socket] = []
        try:
            async with asyncio.timeout(limits.connect_ms_max / 1000):
                for index in range(config.streams):
                    own = TcpHello(stream=index).encode()
                    hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link, payload=own)
                    sock, welcome = await connect_stream(endpoint, hello, loop)
                    socks.append(sock)
        except BaseException as error:
            for sock in socks:
                leave_stream(sock, endpoint.epoch)
            if isinstance(error, TimeoutError):
                raise ConnectError(f"{endpoint.address}: no link within {limits.connect_ms_max} ms") from error
            raise
        made = cls(
            socks=socks,
            welcome=welcome,
            endpoint=endpoint,
            pair=pair,
            source_region_U8=source_region_U8,
            events=events,
            loop=loop,
            limits=limits,
        )
        try:
            made._start(pair)
        except RuntimeError as error:
            await made.close()
            raise ConnectError(f"{endpoint.address}: no thread to send with: {error}") from error
        return made

    def post(self, grant: GrantId, ops: WriteOps, completed: Completed | None = None) -> None:
        """See `WriterLink.post`. Figures of a completion are those of the batch as posted, copied or not.

        `completed` is called in place of the link's events.

        Raises:
            WriteOutOfBounds: an op leaves one of the regions; the batch is not taken.
        """
        lent = self._queue.post(grant, ops, completed)
        if lent is not None:
            self._send_at_once(lent)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            **super().describe(),
            "streams": len(self._streams),
            "sent_by": moved_by(),
        }

    def _start(self, pair: Pair) -> None:
        """Raises RuntimeError where the process can have no more threads; `close` is then all that may follow."""
        for stream in self._streams:
            thread = threading.Thread(
                target=self._send_all, args=(stream,), name=f"tcp-send-{pair.receiver:x}-{stream.index}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                for unused in self._streams[stream.index :]:
                    leave_stream(unused.sock, self._epoch)
                raise
            stream.thread, stream.sending, stream.reading = thread, True, True
            self._loop.add_reader(stream.sock, self._read, stream)

    # Sending threads.

    def _send_all(self, stream: _Stream) -> None:
        failure = "a sending thread failed"
        try:
            while (to_send := self._lanes.take(stream.index)) is not None:
                assert self._source_U8 is not None
                head = self._head(to_send)
                send_frame(stream.sock, head, to_send.frame, self._source_U8, to_send.sent_nbytes)
            if not self._cut:
                bye = wire.Bye(sequence=self._lanes.bye_sequence(stream.index), epoch=self._epoch)
                stream.sock.sendall(CODEC.encode(bye))
            failure = ""
        except OSError as error:
            failure = f"connection lost: {error}"
        finally:
            call_loop(self._loop, self._sender_left, stream, failure)

    def _head(self, to_send: ToSend) -> bytes:
        item = to_send.item
        if not isinstance(item, Taken):
            seal = wire.SealSent(number=to_send.sequence, seal=item.seal, ways_mask=item.streams_mask)
            return CODEC.encode(seal)
        return CODEC.encode(
            Data(
                sequence=to_send.sequence,
                epoch=self._epoch,
                grant=item.batch.grant,
                segments=len(item.part.src_S),
                payload_nbytes=item.part.nbytes,
            )
        )

    # Any thread.

    def _send_at_once(self, lent: ToSend) -> None:
        """Never waits. The stream's thread, which does not end before `give_back`, meets an error of the socket too, or
        finds the memory that there was none of here."""
        rest: ToSend | None = lent
        try:
            assert self._source_U8 is not None
            head, sock = self._head(lent), self._streams[lent.index].sock
            sent_nbytes = 0
            with contextlib.suppress(MemoryError):
                sent_nbytes = send_at_once(sock, head, lent.frame, self._source_U8)
            rest = lent.after(len(head), sent_nbytes)
        finally:
            self._lanes.give_back(lent.index, rest)

    # Control thread.

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.sock.recv(RECV_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._stop_reading(stream)
            self._end(f"connection lost: {error}")
            self._finish_if_over()
            return
        if not data:
            self._stop_reading(stream)
            # At an orderly end this is the receiver's answer to BYE; a closing one that is cut off ends here too.
            self._end("the receiver closed the connection or died")
            self._finish_if_over()
            return
        if stream.received:
            data = stream.received + data
        whole = len(data) // MESSAGE_BYTES * MESSAGE_BYTES
        stream.received = data[whole:]
        with contextlib.ExitStack() as every:  # an error in one message, or in what it completes, loses none behind it
            for start in reversed(range(0, whole, MESSAGE_BYTES)):
                every.callback(self._handle, stream, data[start : start + MESSAGE_BYTES])

    def _handle(self, stream: _Stream, packet: bytes) -> None:
        try:
            message = CODEC.decode(packet)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")
            return
        match message:
            case Ack(sequence=sequence, landed=landed):
                self._lanes.acknowledged(stream.index, sequence, landed=landed)
            case wire.Fence(epoch=epoch):
                self._fenced_by_receiver(epoch)
            case wire.Refused(reason=reason):
                self._end(f"refused by the receiver: {reason.name}")
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _mark(self, grant: GrantId) -> Mark | None:
        """How far each stream has come that has something of the grant; None: none has. A frame may take a slow network
        longer than `drain_ms_max`, so bytes are counted, and not frames."""
        on = self._queue.lanes_with(grant)
        return [acknowledged_bytes(self._streams[index].sock) for index in on] if on else None

    def _send_seal(self, seal: Seal) -> None:
        with contextlib.ExitStack() as every:  # an error on one stream leaves none of the others lent
            for lent in reversed(self._lanes.seal(seal)):
                every.callback(self._send_at_once, lent)

    def _seals_waiting(self) -> int:
        return self._lanes.seals_waiting

    def _stopped(self) -> None:
        self._finish_if_over()

    def _cut_off(self) -> None:
        """See `BaseWriterLink`: this wakes every thread that is in the middle of a send."""
        super()._cut_off()
        for stream in self._streams:
            self._stop_reading(stream)
            try:
                stream.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # reset by the peer already, which wakes the thread as well
        self._finish_if_over()

    def _sender_left(self, stream: _Stream, failure: str) -> None:
        stream.sending = False
        if failure:
            # The receiver's last message, if there is one, explains more than the error of a send.
            while stream.reading and not self._ending and self._has_input(stream):
                self._read(stream)
            self._end(failure)
            if not self._cut:
                self._cut_off()
        self._finish_if_over()

    def _has_input(self, stream: _Stream) -> bool:
        try:
            stream.sock.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True  # `_read` meets it too, and deals with it
        return True

    def _stop_reading(self, stream: _Stream) -> None:
        if stream.reading:
            stream.reading = False
            self._loop.remove_reader(stream.sock)

    def _finish_if_over(self) -> None:
        if self._joined or any(stream.sending or stream.reading for stream in self._streams):
            return
        self._joined = True
        for stream in self._streams:
            if stream.thread is not None:
                stream.thread.join()
            close_politely(stream.sock)
        self._source_U8 = None
        self._queue.lose()
        self._finish_soon()
