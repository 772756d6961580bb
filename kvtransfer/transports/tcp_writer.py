"""The writing side of tcp: sends straight from the source region over one or several connections.

A batch is cut into frames. Each stream has a sending thread; acknowledgements are read on the control thread. What is
small is sent by whoever posts it, without waiting, while no thread sends on that stream; what the socket does not take
then is left to the stream's thread. A batch is complete when all its frames are acknowledged, or when the link is over:
then every socket is closed and every thread joined, so nothing reads the source any more (I1).

Nothing is ever `writes_in_doubt` here, though the network may still hold frames of a link that broke: the receiver
takes no byte of one before it has found the grant among those that it allows, which a Release ends.

Shape suffixes: W = write operations of a batch; S = segments of its frames; S2 = (destination, length) of each; F =
frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from baton.ids import GrantId, Pair
from baton.tasks import call_loop
from kvtransfer.native.sockets import native_sockets
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import RECV_BYTES, close_politely
from kvtransfer.transports.limits import LINK_LIMITS, LinkLimits
from kvtransfer.transports.post_queue import Batch, Completed, Part, PostQueue, Taken
from kvtransfer.transports.settings import TcpConfig
from kvtransfer.transports.tcp import (
    CODEC,
    MESSAGE_BYTES,
    Ack,
    Data,
    TcpWelcome,
    acknowledged_bytes,
    connect_stream,
    hello_payload,
    leave_stream,
    moved_by,
    of_one_call,
)
from kvtransfer.transports.writer_link import BaseWriterLink, Mark

AT_ONCE_BYTES_MAX: Final = 1 << 16
"""The posting thread itself sends batches up to this size, as far as the socket takes them."""
AT_ONCE_OPS_MAX: Final = 64
"""A batch of more copies is left to a sending thread: cutting it costs more than waking the thread."""
SHARED_BYTES_MIN = 1 << 20
"""A batch of more is shared between the streams: no frame of less is cut for that."""
SHARES_OF_A_STREAM = 1.25
"""Frames are cut so that at least so many for each stream are left, for the streams to end at about the same time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Frame(Part):
    """`nbytes` of payload. `table_S2` has (destination, length) of each segment, as it travels; all arrays are
    contiguous."""

    src_S: np.ndarray
    nbytes_S: np.ndarray
    table_S2: np.ndarray


def merge_runs(ops: WriteOps) -> WriteOps:
    """The same copies with neighbours joined where both source and destination run on; empty ones left out."""
    if len(ops.src) == 1 and ops.nbytes[0] > 0:
        return ops
    some_W = ops.nbytes > 0
    src_W, dst_W, nbytes_W = ops.src[some_W], ops.dst[some_W], ops.nbytes[some_W]
    if len(src_W) == 0:
        return WriteOps(src=src_W, dst=dst_W, nbytes=nbytes_W)
    runs_on = (src_W[1:] == src_W[:-1] + nbytes_W[:-1]) & (dst_W[1:] == dst_W[:-1] + nbytes_W[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~runs_on)))
    return WriteOps(src=src_W[starts], dst=dst_W[starts], nbytes=np.add.reduceat(nbytes_W, starts))


def frame_starts(total_bytes: int, bytes_max: int, streams: int) -> list[int]:
    """At which byte of a batch each frame begins: large ones first, smaller ones towards the end.

    After the guided self-scheduling of loops (Polychronopoulos and Kuck, 1987).
    """
    starts, at = [], 0
    shared_bytes_min = min(SHARED_BYTES_MIN, bytes_max)
    while at < total_bytes:
        starts.append(at)
        at += min(bytes_max, max(shared_bytes_min, int((total_bytes - at) / (SHARES_OF_A_STREAM * streams))))
    return starts


def cut_frames(ops: WriteOps, bytes_max: int, segments_max: int, streams: int = 1) -> Iterator[Frame]:
    """All copies of a batch, in frames of at most `bytes_max` bytes and `segments_max` segments; long ones split."""
    merged = merge_runs(ops)
    if len(merged.src) == 0:
        return
    if len(merged.src) == 1 and merged.nbytes[0] <= min(bytes_max, SHARED_BYTES_MIN):
        # What follows costs as much as sending a single record takes.
        table_S2 = np.array([[merged.dst[0], merged.nbytes[0]]], dtype="<i8")
        nbytes = int(merged.nbytes[0])
        yield Frame(src_S=merged.src, nbytes_S=merged.nbytes, table_S2=table_S2, nbytes=nbytes)
        return
    ends_W = np.cumsum(merged.nbytes)
    total_bytes = int(ends_W[-1])
    starts_F = np.array(frame_starts(total_bytes, bytes_max, streams), np.int64)
    # Segments that run across the border of two frames are split there.
    begins_W = ends_W - merged.nbytes
    whole_F = np.searchsorted(ends_W, starts_F, side="right")
    splits = starts_F > begins_W[whole_F]
    whole_X, at_X = whole_F[splits], starts_F[splits]
    within_X = at_X - begins_W[whole_X]
    at_S = np.insert(begins_W, whole_X + 1, at_X)
    src_S = np.insert(merged.src, whole_X + 1, merged.src[whole_X] + within_X)
    dst_S = np.insert(merged.dst, whole_X + 1, merged.dst[whole_X] + within_X)
    nbytes_S = np.diff(at_S, append=total_bytes)
    table_S2 = np.stack([dst_S, nbytes_S], axis=1).astype("<i8")
    borders = [*np.searchsorted(at_S, starts_F).tolist(), len(at_S)]
    for first, end in itertools.pairwise(borders):
        for start in range(first, end, segments_max):
            part = slice(start, min(start + segments_max, end))
            yield Frame(
                src_S=src_S[part],
                nbytes_S=nbytes_S[part],
                table_S2=table_S2[part],
                nbytes=int(nbytes_S[part].sum()),
            )


def send_frame(
    sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray, sent_nbytes: int = 0
) -> None:
    """Send head, table and payload of a frame over a blocking socket, from byte `sent_nbytes` on. Raises OSError.

    Without a frame the head is all there is.
    """
    native = native_sockets()
    if native is not None and frame is not None:
        native.send(sock.fileno(), head, frame.table_S2, source_U8, frame.src_S, frame.nbytes_S, sent_nbytes)
        return
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
    """From `next_sequence` on with the queue's lock held, but for `unacked`, from which the loop's thread removes."""

    index: int
    sock: socket.socket
    thread: threading.Thread | None = None
    received: bytes = b""
    """The beginning of a message."""
    sending: bool = False
    """Its thread has started and has not reported its end."""
    reading: bool = False
    """Its socket is watched: no EOF yet."""
    next_sequence: int = 0
    unacked: deque[tuple[int, Taken[Frame] | None]] = field(default_factory=deque)
    """Sequence and frame, or None for a seal."""
    seals: deque[tuple[Seal, int]] = field(default_factory=deque)
    """That wait, each with the mask of its streams."""
    waits: bool = False
    """Its thread waits for something to send."""
    lent: bool = False
    """Somebody else sends on it."""
    rest: ToSend | None = None
    """What they have left to its thread."""

    @property
    def idle(self) -> bool:
        return self.waits and not self.lent and self.rest is None and not self.seals


@dataclass(slots=True, kw_only=True, eq=False)
class ToSend:
    """What is sent next on a stream, from its byte `sent_nbytes` on. Nobody else sends there meanwhile."""

    stream: _Stream
    head: bytes
    frame: Frame | None
    """None: it is a seal."""
    sent_nbytes: int = 0

    @property
    def left_nbytes(self) -> int:
        """Of head, table and payload."""
        nbytes = self.frame.table_S2.nbytes + self.frame.nbytes if self.frame is not None else 0
        return len(self.head) + nbytes - self.sent_nbytes


async def connect_streams(
    endpoint: DataEndpoint, pair: Pair, loop: asyncio.AbstractEventLoop, config: TcpConfig, limits: LinkLimits
) -> tuple[list[socket.socket], TcpWelcome]:
    """Connect every stream of a link and prove the pair's secret on each; the sockets are the caller's.

    Raises:
        ConnectError: refused, unreachable, not the receiver, or not done within `connect_ms_max`.
    """
    link = int.from_bytes(os.urandom(8))
    socks: list[socket.socket] = []
    try:
        async with asyncio.timeout(limits.connect_ms_max / 1000):
            for index in range(config.streams):
                own = hello_payload(index)
                hello = wire.Hello(pair=pair, epoch=endpoint.epoch, link=link, payload=own)
                sock, welcome = await connect_stream(endpoint, hello, loop)
                socks.append(sock)
    except BaseException as error:
        for sock in socks:
            leave_stream(sock, endpoint.epoch)
        if isinstance(error, TimeoutError):
            raise ConnectError(f"{endpoint.address}: no link within {limits.connect_ms_max} ms") from error
        raise
    return socks, welcome


class TcpWriterLink(BaseWriterLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    Its streams are the lanes of its queue. What is small, and finds an idle stream, is lent to whoever posts it: they
    send it without waiting and give the stream back, so that no thread has to be woken.

    `post` may be called from any thread, the rest from the loop's. The end comes once: from `close`, which lets frames
    under way arrive, or from a FENCE, EOF or error on any stream, which closes all of them.
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
        self._streams = [_Stream(index=i, sock=sock) for i, sock in enumerate(socks)]
        bytes_max, segments_max = welcome.limits_here
        self._queue = PostQueue(
            lambda ops: cut_frames(ops, bytes_max, segments_max, len(socks)),
            self,
            src_nbytes=len(source_region_U8),
            dst_nbytes=welcome.region_nbytes,
            loop=loop,
            completed=events.writes_completed,
        )
        self._lock = self._queue.lock
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
        """`source_region_U8` is the caller's; the link releases it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, or not done within `connect_ms_max`.
        """
        socks, welcome = await connect_streams(endpoint, pair, loop, config or TcpConfig(), limits)
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
        await made._start()
        return made

    async def _start(self) -> None:
        """Start the threads. Raises ConnectError, with everything closed: the process can have no more of them."""
        for stream in self._streams:
            name = f"tcp-send-{self._pair.receiver:x}-{stream.index}"
            thread = threading.Thread(target=self._send_all, args=(stream,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                for unused in self._streams[stream.index :]:
                    leave_stream(unused.sock, self._epoch)
                await self.close()
                raise ConnectError(f"{self._address}: no thread to send with: {error}") from error
            stream.thread, stream.sending, stream.reading = thread, True, True
            self._loop.add_reader(stream.sock, self._read, stream)

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

    # The lanes of the queue, with its lock held.

    def offer(self, batch: Batch[Frame]) -> ToSend | None:
        """See `Lanes.offer`: whoever posts sends it, if it is small and alone; else a thread is woken."""
        if (
            not batch.late
            and batch.total_bytes <= AT_ONCE_BYTES_MAX
            and len(batch.ops.src) <= AT_ONCE_OPS_MAX
            and self._queue.waits_alone(batch)
        ):
            best: _Stream | None = None
            for stream in self._streams:
                if stream.idle and (best is None or len(stream.unacked) < len(best.unacked)):
                    best = stream
            if best is not None:
                to_send = self._next_frame(best)
                best.lent = to_send is not None
                return to_send
        self._notify()
        return None

    def stop(self) -> None:
        """See `Lanes.stop`: seals are sent no more either."""
        for stream in self._streams:
            stream.seals.clear()
        self._lock.notify_all()

    def _notify(self) -> None:
        """Something can be taken by any thread. One whose stream is lent cannot, and might be the one that is woken."""
        if any(stream.lent for stream in self._streams):
            self._lock.notify_all()
        else:
            self._lock.notify()

    def _next_frame(self, stream: _Stream) -> ToSend | None:
        taken = self._queue.take(stream.index)
        if taken is None:
            return None
        if self._queue.waits:
            self._notify()
        data = Data(
            sequence=stream.next_sequence,
            epoch=self._epoch,
            grant=taken.batch.grant,
            segments=len(taken.part.src_S),
            payload_nbytes=taken.part.nbytes,
        )
        return self._numbered(stream, data, taken)

    def _next_seal(self, stream: _Stream, seal: Seal, streams_mask: int) -> ToSend:
        message = wire.SealSent(number=stream.next_sequence, seal=seal, ways_mask=streams_mask)
        return self._numbered(stream, message)

    def _numbered(self, stream: _Stream, message: wire.Message, taken: Taken[Frame] | None = None) -> ToSend:
        """The message has the stream's next sequence."""
        stream.unacked.append((stream.next_sequence, taken))
        stream.next_sequence += 1
        return ToSend(stream=stream, head=CODEC.encode(message), frame=taken.part if taken is not None else None)

    # Sending threads.

    def _send_all(self, stream: _Stream) -> None:
        failure = "a sending thread failed"
        try:
            while (to_send := self._take(stream)) is not None:
                assert self._source_U8 is not None
                send_frame(stream.sock, to_send.head, to_send.frame, self._source_U8, to_send.sent_nbytes)
            if not self._cut:
                stream.sock.sendall(CODEC.encode(wire.Bye(sequence=stream.next_sequence, epoch=self._epoch)))
            failure = ""
        except OSError as error:
            failure = f"connection lost: {error}"
        finally:
            call_loop(self._loop, self._sender_left, stream, failure)

    def _take(self, stream: _Stream) -> ToSend | None:
        """Wait for the next thing to send on a stream; None: stopped, and nobody else sends there any more."""
        with self._lock:
            while True:
                if not stream.lent:
                    if stream.rest is not None:
                        rest, stream.rest = stream.rest, None
                        return rest
                    if self._queue.stopped:
                        return None
                    if stream.seals:
                        return self._next_seal(stream, *stream.seals.popleft())
                    if (to_send := self._next_frame(stream)) is not None:
                        return to_send
                stream.waits = True
                self._lock.wait()
                stream.waits = False

    # Any thread.

    def _send_at_once(self, lent: ToSend) -> None:
        """Never waits. The stream's thread, which does not end before `_give_back`, meets an error of the socket too,
        or finds the memory that there was none of here."""
        try:
            assert self._source_U8 is not None
            with contextlib.suppress(MemoryError):
                lent.sent_nbytes = send_at_once(lent.stream.sock, lent.head, lent.frame, self._source_U8)
        finally:
            self._give_back(lent)

    def _give_back(self, lent: ToSend) -> None:
        """The stream that was lent is free again; what has not been sent is left to the stream's thread."""
        stream = lent.stream
        with self._lock:
            assert stream.lent
            stream.lent = False
            stream.rest = lent if lent.left_nbytes else None
            if self._queue.stopped or self._queue.waits or not stream.idle:
                self._lock.notify_all()

    # Control thread.

    def _read(self, stream: _Stream) -> bool:
        """Handle what has come. False: nothing has."""
        try:
            data = stream.sock.recv(RECV_BYTES, socket.MSG_DONTWAIT)
            reason = "the receiver closed the connection or died"
        except BlockingIOError:
            return False
        except OSError as error:
            data, reason = b"", f"connection lost: {error}"
        if not data:
            self._stop_reading(stream)
            # At an orderly end EOF is the receiver's answer to BYE; a closing one that is cut off ends here too.
            self._end(reason)
            self._finish_if_over()
            return True
        if stream.received:
            data = stream.received + data
        whole = len(data) // MESSAGE_BYTES * MESSAGE_BYTES
        stream.received = data[whole:]
        with contextlib.ExitStack() as every:  # an error in one message, or in what it completes, loses none behind it
            for start in reversed(range(0, whole, MESSAGE_BYTES)):
                every.callback(self._take_in, stream, data[start : start + MESSAGE_BYTES])
        return True

    def _take_in(self, stream: _Stream, packet: bytes) -> None:
        try:
            message = CODEC.decode(packet)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")
            return
        if isinstance(message, Ack):
            self._acknowledged(stream, message.sequence, landed=message.landed)
        else:
            self._handle(message)

    def _acknowledged(self, stream: _Stream, sequence: int, *, landed: bool) -> None:
        """The receiver has taken in all up to `sequence` on this stream. Reports batches that this completes."""
        unacked, arrived = stream.unacked, []
        # Without the lock: nobody else removes anything here.
        while unacked and unacked[0][0] <= sequence:
            _, taken = unacked.popleft()
            if taken is not None:
                arrived.append(taken)
        self._queue.finished_here(arrived, copied=landed)

    def _mark(self, grant: GrantId) -> Mark | None:
        """How far each stream has come that has something of the grant; None: none has. A frame may take a slow network
        longer than `drain_ms_max`, so bytes are counted, and not frames."""
        on = self._queue.lanes_with(grant)
        return [acknowledged_bytes(self._streams[index].sock) for index in on] if on else None

    def _send_seal(self, seal: Seal) -> None:
        """On every stream that the grant's data took, or on the first."""
        with contextlib.ExitStack() as every:  # an error on one stream leaves none of the others lent
            for lent in reversed(self._take_seal(seal)):
                every.callback(self._send_at_once, lent)

    def _take_seal(self, seal: Seal) -> list[ToSend]:
        """What the caller sends at once; on streams that are not idle it waits for their threads."""
        lent = []
        with self._lock:
            mask = self._queue.lanes_to_seal(seal.grant)
            for stream in self._streams:
                if not mask >> stream.index & 1:
                    continue
                if stream.idle and not self._queue.stopped:
                    stream.lent = True
                    lent.append(self._next_seal(stream, seal, mask))
                else:
                    stream.seals.append((seal, mask))
            if len(lent) < mask.bit_count():
                self._lock.notify_all()
        return lent

    def _seals_waiting(self) -> int:
        with self._lock:
            return max(len(stream.seals) for stream in self._streams)

    def _stopped(self) -> None:
        self._finish_if_over()

    def _cut_off(self) -> None:
        """See `BaseWriterLink`: this wakes every thread that is in the middle of a send."""
        super()._cut_off()
        for stream in self._streams:
            self._stop_reading(stream)
            with contextlib.suppress(OSError):  # reset by the peer already, which wakes the thread as well
                stream.sock.shutdown(socket.SHUT_RDWR)
        self._finish_if_over()

    def _sender_left(self, stream: _Stream, failure: str) -> None:
        stream.sending = False
        if failure:
            # The receiver's last message, if there is one, explains more than the error of a send.
            while stream.reading and not self._ending and self._read(stream):
                pass
            self._end(failure)
            if not self._cut:
                self._cut_off()
        self._finish_if_over()

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
