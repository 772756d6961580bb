"""Transport for any network: the writer sends records from its region, the receiver takes them into its own.

    writer                                        receiver
      DATA(sequence, epoch, grant) ...     ->
                                           <-       ACK(sequence, landed or dropped), cumulative
      SEAL(sequence, grant, counts) ...    ->
      BYE(sequence, epoch)                 ->       nothing follows; the receiver closes

These go over the data connection itself, behind its handshake: DATA, SEAL and BYE are numbered from 0 on in each
stream, and what orders them is evidence. Each message is exactly MESSAGE_BYTES long; DATA is followed by its table,
which has one (destination, length) pair of int64 for each segment, and its payload, the segments' bytes in that order.

The receiver has a thread for each connection, which checks each frame and scatters it into the region, or, where that
is on a device, receives it into pinned memory and has the device copy it from there.

Evidence (I3): a byte lands only in a receive thread, on a connection of the pair. The thread takes bytes from the
kernel only under its landing lock, by calls that do not wait, after it has looked whether the grant may still write. So
whoever holds the lock knows that no byte is landing, and what it changes under the lock holds for every later byte.
When the threads of all connections of a pair have been joined and no new one is admitted, nothing of it lands any
more, whatever the writer does. So a writer that is dead, stopped or cut off is fenced at once, and a connection that
ends without BYE is itself the reason for a fence: its writer may have lost bytes.

A copy to a device is queued under the lock too, after the same check. Its frame is acknowledged when the device has
finished it, a seal is reported when that holds for every frame before it, and the thread ends when nothing of it is
left on the device: neither a message nor evidence comes before the bytes. `forbid` waits for the copies of its grant.
After an error of the device nobody knows whether its copies are over. Then a joined thread is no evidence, and neither
is the writer's message: the blocks stay with their writer, `copies_unproved` counts the connections, and the device is
asked again every second.

The writer cuts a batch into frames. Each stream has a sending thread; acknowledgements are read on the control thread.
What is small is sent by whoever posts it, without waiting, while no thread sends on that stream; what the socket does
not take then is left to the stream's thread. A batch is complete when all its frames are acknowledged, or when the link
is over: then every socket is closed and every thread joined, so nothing reads the source any more (I1). Nothing is ever
`writes_in_doubt` here, though the network may still hold frames of a link that broke: the receiver takes no byte of one
before it has found the grant among those that it allows, which a Release ends.

Shape suffixes: U8 = one-dimensional array of bytes; W = write operations of a batch; S = segments of a frame, or of all
frames of a batch; S2 = (destination, length) of each; F = frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from baton.ids import Epoch, GrantId, Pair
from baton.log import get_log
from baton.repeats import RepeatLog
from baton.tasks import call_loop
from kvtransfer.device.driver import POLL_INTERVAL_S
from kvtransfer.device.staging import StagedRegion, StagingFull, StagingShare
from kvtransfer.native.sockets import Received, native_sockets
from kvtransfer.region import Region
from kvtransfer.transport import (
    ConnectError,
    DeviceError,
    ReceiverEvents,
    Seal,
    TransportName,
    WriteOps,
    WriteRanges,
)
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import GRANT_BYTES, Kind, Refusal, RefusalReason, at_most, close_politely
from kvtransfer.transports.post_queue import Batch, Completed, Part, PostQueue, Taken
from kvtransfer.transports.receiver_port import Connection, Evidence, ListeningPort, PortLimits
from kvtransfer.transports.settings import STREAMS_MAX, TcpConfig
from kvtransfer.transports.writer_link import LINK_LIMITS, BaseWriterLink, LinkLimits, LinkParts, Mark

log = get_log("tcp")

MESSAGE_BYTES: Final = 64
SEGMENT_BYTES: Final = 16
"""Of one entry of a DATA message's table."""
FRAME_BYTES_MAX: Final = 1 << 25
"""A frame's payload, which takes several system calls: what a frame costs beside them is to be little."""
FRAME_SEGMENTS_MAX: Final = 1024
"""Pieces of a region that one frame is gathered from and scattered to."""
CALL_BYTES_MAX: Final = 1 << 20
"""Received by one system call, in Python as in C: who wants the landing lock waits for one call."""
_I64_MAX: Final = (1 << 63) - 1
_TCP_INFO_BYTES: Final = 256
_BYTES_ACKED_AT: Final = 120
"""tcpi_bytes_acked in struct tcp_info (linux/tcp.h), 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Data(wire.Message):
    """Of one frame. `segments` entries of its table follow, then `payload_nbytes` bytes."""

    KIND = Kind.DATA
    LAYOUT = struct.Struct(f"<QQ{GRANT_BYTES}sQQ")
    sequence: int
    epoch: Epoch
    grant: GrantId
    segments: int
    payload_nbytes: int

    def encode(self) -> bytes:
        assert len(self.grant) == GRANT_BYTES, len(self.grant)
        return self.LAYOUT.pack(self.sequence, self.epoch, self.grant, self.segments, self.payload_nbytes)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Data:
        sequence, epoch, grant, segments, nbytes = values
        return cls(
            sequence=sequence, epoch=Epoch(epoch), grant=GrantId(grant), segments=segments, payload_nbytes=nbytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(wire.Message):
    """Everything up to `sequence` that was not acknowledged before has landed, or else was dropped."""

    KIND = Kind.ACK
    LAYOUT = struct.Struct("<QQ")
    sequence: int
    landed: bool

    def encode(self) -> bytes:
        return self.LAYOUT.pack(self.sequence, self.landed)

    @classmethod
    def of(cls, values: tuple[Any, ...]) -> Ack:
        return cls(sequence=values[0], landed=bool(at_most(values[1], 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpHello(wire.Packed):
    """`stream` is its number in the link, from 0."""

    LAYOUT = struct.Struct("<Q")
    stream: int

    def __post_init__(self) -> None:
        at_most(self.stream, STREAMS_MAX - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpWelcome(wire.Packed):
    """What a frame may hold at most comes from the receiver's limits, perhaps of a version that takes more."""

    LAYOUT = struct.Struct("<QQQ")
    region_nbytes: int
    frame_bytes_max: int
    frame_segments_max: int

    def __post_init__(self) -> None:
        at_most(self.region_nbytes, _I64_MAX)
        if not min(self.frame_bytes_max, self.frame_segments_max):
            raise wire.MalformedMessage("a frame limit of 0")

    @property
    def limits_here(self) -> tuple[int, int]:
        """Bytes and segments of a frame: what the receiver takes, and no more than this version makes."""
        return min(self.frame_bytes_max, FRAME_BYTES_MAX), min(self.frame_segments_max, FRAME_SEGMENTS_MAX)


CODEC: Final = wire.Codec(
    TransportName.TCP, Data, Ack, payload_bytes_max=TcpWelcome.LAYOUT.size, message_bytes=MESSAGE_BYTES
)


def acknowledged_bytes(sock: socket.socket) -> int:
    """What the peer's kernel has acknowledged. 0 where ours does not count it (Linux before 4.1)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    return int.from_bytes(info[_BYTES_ACKED_AT : _BYTES_ACKED_AT + 8], sys.byteorder)


def moved_by() -> str:
    """How payload is sent and received in this process, for people."""
    return "Python: no native library" if native_sockets() is None else "native"


SMALL_BYTES_MAX = 1 << 16
"""A single segment of at most so many bytes takes longer to prepare for a native call than to receive in Python."""
SCRATCH_BYTES = 1 << 16
"""Where dropped payload goes; each stream has its own."""
INTERRUPTED_PAUSE_S = 50e-6
"""After an interrupt: long enough for the one who did it to get the lock, which is not a fair one."""
_TABLE_DTYPE = np.dtype("<i8")
WAKE_BYTES_MAX = 1 << 18
"""In the middle of a payload the thread is woken for so many bytes, not for each segment that the network delivers."""
ACK_FRAMES_MAX: Final = 16
"""Frames received before an acknowledgement is sent even though more are waiting."""
OUTBOX_BYTES_MAX: Final = 1 << 16
"""Bytes of acknowledgements that a writer may leave unread."""
PROVE_RETRY_MS = 1000
"""Between two looks whether a device that failed has finished its copies."""
TCP_PORT_LIMITS: Final = PortLimits(handshake_ms_max=2000)
SEALS_PARTIAL_MAX: Final = 4096
"""Seals that have come on some of their streams and not yet on all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFrame:
    """A frame on its way to the device, from where it begins in pinned memory."""

    grant: GrantId
    sequence: int
    start: int


def scatter(
    sock: socket.socket,
    region_U8: np.ndarray,
    table_S2: np.ndarray,
    place: np.ndarray,
    interrupt: ctypes.c_int32,
) -> Received:
    """Receive the payload of one frame into the region until all has landed, nothing more has come, or somebody
    interrupts: no system call is begun while `interrupt` is not 0. The socket does not wait.

    The caller has checked the table against the region, and lets nobody else call at the same time. `place` is moved
    on: int64 (segment, bytes done of it). Raises OSError.
    """
    native = native_sockets()
    if native is not None and (len(table_S2) > 1 or table_S2[0, 1] > SMALL_BYTES_MAX):
        return native.receive(sock.fileno(), region_U8, table_S2, place, interrupt)
    segment, done = place.tolist()
    while segment < len(table_S2):
        if interrupt.value:
            return Received.INTERRUPTED
        dst, nbytes = table_S2[segment].tolist()
        try:
            count = sock.recv_into(region_U8.data[dst + done : dst + min(nbytes, done + CALL_BYTES_MAX)])
        except BlockingIOError:
            return Received.NOTHING_YET
        if count == 0:
            return Received.EOF
        done += count
        if done == nbytes:
            segment, done = segment + 1, 0
        place[:] = segment, done
    return Received.ALL


def left_nbytes(table_S2: np.ndarray, place: np.ndarray) -> int:
    """What of a frame has not landed yet."""
    segment, done = place.tolist()
    return int(table_S2[segment:, 1].sum() - done)


class ReceiveStream:
    """One welcomed connection. Owns its socket until `join`, and its thread.

    Call everything but the thread's own methods from the control thread. `sealed` is called there too, for each SEAL,
    and `ended` once, when the thread is at its very end; if the loop is closed by then, neither is.
    """

    def __init__(
        self,
        connection: TcpConnection,
        *,
        memory_U8: np.ndarray,
        region_nbytes: int,
        frame_bytes_max: int,
        loop: asyncio.AbstractEventLoop,
        sealed: Callable[[TcpConnection, wire.SealSent], None],
        ended: Callable[[TcpConnection], None],
    ) -> None:
        """Receives into `memory_U8`: the region, or with the connection's `share` the region's pinned memory."""
        assert connection.sock is not None
        self.connection = connection
        self.orderly = False
        """It has ended with a BYE."""
        self.refused: RefusalReason | None = None
        """The writer broke the protocol."""
        self.joined = False
        self.counts = Counter(frames_landed=0, frames_dropped=0, bytes_landed=0)
        self._sock = connection.sock
        self._epoch = connection.epoch
        self._memory_U8: np.ndarray | None = memory_U8
        self._region_nbytes = region_nbytes
        self._share = connection.share
        self._frame_bytes_max = frame_bytes_max
        self._loop = loop
        self._sealed = sealed
        self._ended = ended
        self._landing = threading.Lock()
        self._interrupt = ctypes.c_int32(0)
        self._allowed: dict[GrantId, WriteRanges] = {}
        self._stopped = False
        self._last_word: wire.Message | None = None
        # A head is read together with the first entry of its table, if it has one: one system call less.
        self._head = bytearray(MESSAGE_BYTES + SEGMENT_BYTES)
        self._head_have = 0
        self._table = bytearray(FRAME_SEGMENTS_MAX * SEGMENT_BYTES)
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._next_sequence = 0
        self._ack: Ack | None = None
        self._frames_unacked = 0
        self._outbox = bytearray()
        self._low_water_nbytes = 1
        self._polls_for = select.POLLIN
        self._poll = select.poll()
        name = f"tcp-receive-{connection.pair.writer:x}-{connection.index}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # Control thread.

    def start(self) -> None:
        self._sock.setblocking(False)
        self._poll.register(self._sock, select.POLLIN)
        self._thread.start()

    @contextlib.contextmanager
    def _barrier(self) -> Iterator[None]:
        """Hold the landing lock; a call that is under way ends after its present system call."""
        self._interrupt.value = 1
        with self._landing:
            self._interrupt.value = 0
            yield

    def allow(self, grant: GrantId, ranges: WriteRanges) -> None:
        with self._barrier():
            self._allowed[grant] = ranges

    def forbid(self, grant: GrantId) -> None:
        """When this returns, no byte of the grant lands any more. Waits for at most one system call, and copies.

        Raises DeviceError: a copy of it may still run.
        """
        with self._barrier():
            self._allowed.pop(grant, None)
        if self._share is not None:
            self._share.wait_for(lambda frame: frame.grant == grant)

    def stop(self, last_word: wire.Message | None = None) -> None:
        """When this returns no byte is taken any more; the thread ends soon, and says this. Idempotent."""
        with self._barrier():
            self._stopped = True
            self._last_word = last_word
            self._allowed.clear()
        # An error means that the writer is gone already, and the thread has been woken by that.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def join(self) -> None:
        """Let go of the thread, the socket and the memory, after `stop` or `ended`. A device may still copy."""
        self._thread.join()
        self.joined = True
        self._memory_U8 = None
        close_politely(self._sock)

    # The receive thread.

    def _run(self) -> None:
        try:
            while self._take_message():
                pass
            self.orderly = True
        except Refusal as refusal:
            self.refused = refusal.reason
        except (OSError, DeviceError):
            pass  # there was no BYE, so the pair is fenced
        finally:
            # After an unforeseen error too: it goes to threading.excepthook, and the pair is fenced.
            self._say_why()
            # A failed device reports nothing about the copies that it has: whoever joins this checks again.
            with contextlib.suppress(DeviceError):
                if self._share is not None:
                    self._share.settle()
            call_loop(self._loop, self._ended, self.connection)

    def _take_message(self) -> bool:
        """False: it was the BYE."""
        message = self._take_head()
        match message:
            case Data():
                self._check_order(message.sequence, message.epoch)
                landed = self._take_frame(message)
                if not (landed and self._share is not None):
                    self._settle()
                    self._acknowledge(Ack(sequence=message.sequence, landed=landed))
            case wire.SealSent():
                self._check_order(message.number, message.seal.epoch)
                if not message.ways_mask >> self.connection.index & 1:
                    raise Refusal(RefusalReason.MALFORMED, "a seal on a stream that it does not name")
                self._settle()
                call_loop(self._loop, self._sealed, self.connection, message)
                self._acknowledge(Ack(sequence=message.number, landed=True))
            case wire.Bye():
                self._check_order(message.sequence, message.epoch)
                self._settle()
                return False
            case _:
                raise Refusal(RefusalReason.OUT_OF_ORDER)
        return True

    def _take_head(self) -> wire.Message:
        """The next message. Up to one entry of a table, or the beginning of the message after it, has come with it."""
        into = memoryview(self._head)
        while self._head_have < MESSAGE_BYTES:
            self._head_have += self._read_some(into[self._head_have :], between_messages=not self._head_have)
        message = CODEC.decode(into[:MESSAGE_BYTES])
        self._head_have -= MESSAGE_BYTES
        if self._head_have:
            self._head[: self._head_have] = self._head[MESSAGE_BYTES : MESSAGE_BYTES + self._head_have]
        return message

    def _check_order(self, sequence: int, epoch: Epoch) -> None:
        if epoch != self._epoch:
            raise Refusal(RefusalReason.EPOCH)
        if sequence != self._next_sequence:
            raise Refusal(RefusalReason.REPLAYED if sequence < self._next_sequence else RefusalReason.SEQUENCE)
        self._next_sequence += 1

    def _take_frame(self, frame: Data) -> bool:
        """Take in table and payload. True if all of it has landed, or its copy is queued; False if some or all went to
        scratch."""
        table_S2 = self._take_table(frame)
        with self._landing:
            ranges = self._allowed.get(frame.grant)
        if ranges is not None and not ranges.cover(table_S2[:, 0], table_S2[:, 1]):
            raise Refusal(RefusalReason.OUT_OF_GRANT)
        left, landed = frame.payload_nbytes, False
        if ranges is not None:
            place_S2 = self._place(table_S2)
            left = self._scatter(frame.grant, place_S2)
            landed = not left
            if self._share is not None:
                landed = self._copy(frame, int(place_S2[0, 0]), table_S2, received=landed)
        while left:
            left -= self._read_some(self._scratch[:left])
        self.counts["frames_landed" if landed else "frames_dropped"] += 1
        self.counts["bytes_landed"] += frame.payload_nbytes if landed else 0
        return landed

    def _take_table(self, frame: Data) -> np.ndarray:
        """Destination and length of each segment, int64, found to agree with the head and the region."""
        if not (0 < frame.segments <= FRAME_SEGMENTS_MAX and 0 < frame.payload_nbytes <= self._frame_bytes_max):
            raise Refusal(RefusalReason.OVERSIZED)
        table = memoryview(self._table)[: frame.segments * SEGMENT_BYTES]
        have = self._head_have
        table[:have] = self._head[:have]
        self._head_have = 0
        while have < len(table):
            have += self._read_some(table[have:])
        table_S2 = np.frombuffer(table, dtype=_TABLE_DTYPE).reshape(-1, 2)
        if not self._holds(frame, table_S2):
            raise Refusal(RefusalReason.MALFORMED, "a frame whose table contradicts itself or the region")
        return table_S2

    def _holds(self, frame: Data, table_S2: np.ndarray) -> bool:
        """Whether the table agrees with the frame's head, and lies in the region. Compared so that no sum overflows."""
        if frame.segments == 1:
            dst, nbytes = table_S2[0].tolist()
            return bool(nbytes == frame.payload_nbytes and 0 <= dst <= self._region_nbytes - nbytes)
        dst_S, nbytes_S = table_S2[:, 0], table_S2[:, 1]
        bad_S = (nbytes_S <= 0) | (nbytes_S > frame.payload_nbytes)
        bad_S |= (dst_S < 0) | (dst_S > self._region_nbytes - nbytes_S)
        return not bool(bad_S.any()) and int(nbytes_S.sum()) == frame.payload_nbytes

    def _place(self, table_S2: np.ndarray) -> np.ndarray:
        """Where to receive a frame: at its place, or in one piece into a chunk, once the device has left one."""
        if self._share is None:
            return table_S2
        while True:
            self._reap()
            start = self._share.take()
            if start is not None:
                return np.array([[start, table_S2[:, 1].sum()]], table_S2.dtype)
            self._flush()
            self._check_stopped()
            time.sleep(POLL_INTERVAL_S)

    def _copy(self, frame: Data, start: int, table_S2: np.ndarray, *, received: bool) -> bool:
        """Queue the copy of a frame, if it is all there and the grant may still write. False: it is dropped."""
        assert self._share is not None
        with self._landing:
            if received and frame.grant in self._allowed:
                staged = StagedFrame(grant=frame.grant, sequence=frame.sequence, start=start)
                self._share.to_device(start, table_S2[:, 0], table_S2[:, 1], tag=staged)
                return True
        self._share.give(start)
        return False

    @property
    def _copying(self) -> bool:
        """There are frames whose copies are not over."""
        return self._share is not None and self._share.flying > 0

    def _reap(self) -> None:
        """Acknowledge what the device is through with."""
        while self._share is not None and (frame := self._share.finished()) is not None:
            self._share.give(frame.start)
            self._acknowledge(Ack(sequence=frame.sequence, landed=True))

    def _settle(self) -> None:
        """Wait until every frame so far is in the region, and acknowledge it."""
        while self._copying:
            self._reap()
            time.sleep(POLL_INTERVAL_S)

    def _scatter(self, grant: GrantId, table_S2: np.ndarray) -> int:
        """Receive straight to its place for as long as the grant may write. Returns the bytes that have not come."""
        assert self._memory_U8 is not None
        place = np.zeros(2, np.int64)
        while True:
            with self._landing:
                if grant not in self._allowed:
                    return left_nbytes(table_S2, place)
                received = scatter(self._sock, self._memory_U8, table_S2, place, self._interrupt)
            match received:
                case Received.ALL:
                    return 0
                case Received.NOTHING_YET:
                    self._wait(min(left_nbytes(table_S2, place), WAKE_BYTES_MAX))
                case Received.EOF:
                    return left_nbytes(table_S2, place)
                case Received.INTERRUPTED:
                    time.sleep(INTERRUPTED_PAUSE_S)

    def _read_some(self, into: memoryview, *, between_messages: bool = False) -> int:
        while True:
            self._check_stopped()
            try:
                count = self._sock.recv_into(into)
            except BlockingIOError:
                self._wait()
                continue
            if count:
                return count
            self._check_stopped()
            if between_messages:
                raise ConnectionResetError("closed without BYE")
            raise Refusal(RefusalReason.TRUNCATED)

    def _check_stopped(self) -> None:
        if self._stopped:
            raise ConnectionAbortedError("stopped by this receiver")

    def _wait(self, wanted_nbytes: int = 1) -> None:
        """Nothing to read: acknowledge what has landed, and wait for so many bytes, or `stop`. May come back sooner."""
        self._flush()
        if wanted_nbytes != self._low_water_nbytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_nbytes)
            self._low_water_nbytes = wanted_nbytes
        self._check_stopped()
        polls_for = select.POLLIN | (select.POLLOUT if self._outbox else 0)
        if polls_for != self._polls_for:
            self._poll.modify(self._sock, polls_for)
            self._polls_for = polls_for
        if not self._copying:
            self._poll.poll()
        elif not self._poll.poll(0):
            time.sleep(POLL_INTERVAL_S)
            self._reap()

    def _acknowledge(self, ack: Ack) -> None:
        """Cumulative: replaces an acknowledgement that has not left yet, unless they say different things."""
        if self._ack is not None and self._ack.landed != ack.landed:
            self._outbox += CODEC.encode(self._ack)
        self._ack = ack
        self._frames_unacked += 1
        if self._frames_unacked >= ACK_FRAMES_MAX:
            self._flush()

    def _flush(self) -> None:
        """Send what the socket takes without waiting."""
        if self._ack is not None:
            self._outbox += CODEC.encode(self._ack)
            self._ack = None
            self._frames_unacked = 0
        if not self._outbox:
            return
        try:
            sent = self._sock.send(self._outbox)
        except BlockingIOError:
            sent = 0
        del self._outbox[:sent]
        if len(self._outbox) > OUTBOX_BYTES_MAX:
            raise Refusal(RefusalReason.ACKS_UNREAD)

    def _say_why(self) -> None:
        """Best effort: what is lost costs the writer time, never safety."""
        last = self._last_word
        if last is None and self.refused is not None:
            last = wire.Refused(reason=self.refused)
        with contextlib.suppress(OSError, Refusal):
            self._flush()
            if last is not None:
                self._outbox += CODEC.encode(last)
                self._flush()


@dataclass(slots=True, kw_only=True, eq=False)
class TcpConnection(Connection):
    """`sock` is None once a stream owns it, and at the end."""

    index: int = 0
    """Of its stream in the link."""
    share: StagingShare[StagedFrame] | None = None
    """Of a region on a device."""
    stream: ReceiveStream | None = None
    unproved: bool = False
    """The device failed with copies of this connection queued."""


class TcpReceiverPort(ListeningPort[TcpConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`). Everything runs on `loop`'s thread."""

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self,
        *,
        region: Region | StagedRegion,
        events: ReceiverEvents,
        listen: str = "127.0.0.1:0",
        advertise_host: str | None = None,
        limits: PortLimits = TCP_PORT_LIMITS,
    ) -> None:
        """See `ListeningPort`. `region` is the caller's and outlives the port."""
        super().__init__(TcpConnection, listen=listen, advertise_host=advertise_host, events=events, limits=limits)
        self._region = region
        self._frame_bytes_max = FRAME_BYTES_MAX
        if isinstance(region, StagedRegion):
            self._frame_bytes_max = min(FRAME_BYTES_MAX, region.limits.chunk_bytes)
        self._allowed: dict[GrantId, tuple[Pair, Epoch, WriteRanges]] = {}
        self._unproved: dict[GrantId, Pair] = {}
        """Forbidden grants of which copies may still run on a device that has failed."""
        self._seals_partial: dict[tuple[Pair, int, GrantId], int] = {}
        self._repeats = RepeatLog(log, self._loop.time)

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """See `ReceiverPort.allow`."""
        self._allowed[grant] = (pair, epoch, ranges)
        for stream in self._streams(pair):
            if stream.connection.epoch == epoch:
                stream.allow(grant, ranges)

    def forbid(self, grant: GrantId) -> bool:
        """See `ReceiverPort.forbid`. Waits at most for one system call of each stream of the pair, and for those of the
        grant's copies that are queued on a device."""
        allowed = self._allowed.pop(grant, None)
        pair = allowed[0] if allowed is not None else self._unproved.pop(grant, None)
        for stream in self._streams(pair) if pair is not None else ():
            try:
                stream.forbid(grant)
            except DeviceError as error:
                log.error("copies of a grant may still run: the device failed", reason=str(error))
                self._unproved[grant] = stream.connection.pair
        return grant not in self._unproved

    async def close(self) -> None:
        """Stop listening and receiving; no event is delivered any more. Writers see EOF. Idempotent."""
        for stream in self._streams():
            stream.stop()
        for stream in self._streams():
            stream.join()
        await super().close()
        self._allowed.clear()
        self._repeats.close()

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        total = sum((stream.counts for stream in self._streams()), self._counts)
        return {
            **super().describe(),
            "copies_unproved": sum(c.unproved for c in self._connections.values()),
            "grants_allowed": len(self._allowed),
            **(self._region.describe() if isinstance(self._region, StagedRegion) else {}),
            **{name: total[name] for name in ("seals", "frames_landed", "frames_dropped", "bytes_landed")},
        }

    def _streams(self, pair: Pair | None = None) -> list[ReceiveStream]:
        """Of one pair, or of all."""
        connections = self._connections.values()
        return [c.stream for c in connections if c.stream is not None and pair in (None, c.pair)]

    # Handshake.

    def _is_writing(self, connection: TcpConnection) -> bool:
        return connection.stream is not None

    def _identify(self, connection: TcpConnection) -> None:
        connection.index = TcpHello.decode(connection.hello.payload).stream

    def _prepare(self, connection: TcpConnection) -> None:
        region = self._region
        if isinstance(region, StagedRegion):
            try:
                connection.share = region.share(region.limits.stream_chunks)
            except StagingFull as error:
                raise Refusal(RefusalReason.CONNECTIONS_MAX) from error
        welcome = TcpWelcome(
            region_nbytes=region.nbytes,
            frame_bytes_max=self._frame_bytes_max,
            frame_segments_max=FRAME_SEGMENTS_MAX,
        )
        self._handle(connection, wire.Prepared(payload=welcome.encode()))

    def _start(self, connection: TcpConnection) -> None:
        """From here on the socket is the stream's: no message but the stream's own is taken or sent any more."""
        assert connection.sock is not None
        self._loop.remove_reader(connection.sock)
        try:
            region = self._region
            stream = ReceiveStream(
                connection,
                memory_U8=region.host_U8 if isinstance(region, StagedRegion) else region.array_U8,
                region_nbytes=region.nbytes,
                frame_bytes_max=self._frame_bytes_max,
                loop=self._loop,
                sealed=self._seal,
                ended=self._ended,
            )
            for grant, (pair, epoch, ranges) in self._allowed.items():
                if (pair, epoch) == (connection.pair, connection.epoch):
                    stream.allow(grant, ranges)
            stream.start()
        except BaseException:
            # Nothing was received, so nothing is on a device.
            self._drop_proved(connection)
            raise
        connection.sock, connection.stream = None, stream

    # After the WELCOME a connection's messages go to its stream, and none to the port.

    def _unexpected(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError((args, kwargs))

    _left = _lost = _broken = _unexpected

    def _fenced(self, connection: TcpConnection) -> None:
        """No byte is taken any more when this returns; the thread is joined when it is at its end."""
        assert connection.stream is not None
        connection.stream.stop(wire.Fence(epoch=connection.epoch))

    # What streams report.

    def _seal(self, connection: TcpConnection, frame: wire.SealSent) -> None:
        """Report a seal when it has come down every stream that it names."""
        if self._closed:
            return
        hello = connection.hello
        key = (hello.pair, hello.link, frame.seal.grant)
        arrived = self._seals_partial.pop(key, 0) | 1 << connection.index
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
        if stream.refused is not None:
            self._refused[stream.refused] += 1
        # Not by its thread's end: a seal that it reported before may still be queued for this thread.
        hello = connection.hello
        if not any(s.connection.hello.link == hello.link and not s.joined for s in self._streams(hello.pair)):
            for key in [k for k in self._seals_partial if k[:2] == (hello.pair, hello.link)]:
                del self._seals_partial[key]
        if not stream.orderly:
            self._fence_own(connection)
        self._prove(connection)

    def _prove(self, connection: TcpConnection) -> None:
        """Its thread has been joined. Once the device, if any, has finished, the connection can no longer write."""
        if self._closed:
            return
        writer = f"{connection.pair.writer:x}"
        try:
            settled = connection.share is None or connection.share.try_settle()
        except DeviceError as error:
            connection.unproved, settled = True, False
            self._repeats.error("a fence has no evidence yet: the device failed", peer=writer, reason=str(error))
            self._repeats.upkeep()
        if not settled:
            self._loop.call_later(PROVE_RETRY_MS / 1000, self._prove, connection)
            return
        if connection.unproved:
            self._repeats.over(writer, "the device has finished its copies")
        assert connection.stream is not None
        self._counts.update(connection.stream.counts)
        self._drop_proved(connection)

    # Connections.

    def _drop_proved(self, connection: TcpConnection) -> None:
        self._drop(connection)
        self._proved(connection, Evidence.JOINED)

    def _drop(self, connection: TcpConnection) -> None:
        if connection.share is not None:
            connection.share.give_back()
            connection.share = None
        connection.close_sock(self._loop)
        self._connections.pop(connection.number, None)


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
    for view in _views(head, frame, source_U8):
        sock.sendall(view[sent_nbytes:])
        sent_nbytes = max(0, sent_nbytes - view.nbytes)


def send_at_once(sock: socket.socket, head: bytes, frame: Frame | None, source_U8: np.ndarray) -> int:
    """Send what one call takes without waiting; how many bytes that was. An error will come again: 0 for now.

    The frame has few segments: `AT_ONCE_OPS_MAX` at most.
    """
    try:
        return sock.sendmsg(_views(head, frame, source_U8), (), socket.MSG_DONTWAIT)
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
    """Once it has started, until it has reported its end."""
    received: bytes = b""
    """The beginning of a message."""
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
    parts: LinkParts, config: TcpConfig, limits: LinkLimits
) -> tuple[list[socket.socket], TcpWelcome]:
    """Connect every stream of a link and prove the pair's secret on each; the sockets are the caller's.

    Raises:
        ConnectError: refused, unreachable, not the receiver, or not done within `connect_ms_max`.
    """
    endpoint, link = parts.endpoint, int.from_bytes(os.urandom(8))
    socks: list[socket.socket] = []
    with wire.connect_errors(endpoint.address, limits.connect_ms_max):
        try:
            async with asyncio.timeout(limits.connect_ms_max / 1000):
                for index in range(config.streams):
                    own = TcpHello(stream=index).encode()
                    hello = wire.Hello(pair=parts.pair, epoch=endpoint.epoch, link=link, payload=own)
                    channel = await wire.WriterChannel.open(
                        endpoint.address, parts.loop, CODEC, address=endpoint.address
                    )
                    socks.append(channel.sock)
                    welcome = TcpWelcome.decode((await channel.shake_hands(endpoint.secret, hello)).payload)
                    channel.sock.setblocking(True)
        except BaseException:
            leave_streams(socks, endpoint.epoch)
            raise
    return socks, welcome


def leave_streams(socks: Iterable[socket.socket], epoch: Epoch) -> None:
    """Of streams that are not used after all: with a BYE the receiver need not fence the pair."""
    for sock in socks:
        wire.take_leave(sock, CODEC.encode(wire.Bye(epoch=epoch)))


class TcpWriterLink(BaseWriterLink):
    """One writer's link to one receiver in one epoch (see `kvtransfer.transport.WriterLink`). Made by `connect`.

    Its streams are the lanes of its queue. One that is idle is lent to whoever posts something small: they send it
    without waiting and give the stream back. A FENCE, EOF or error on any stream closes all of them.
    """

    transport: ClassVar[TransportName] = TransportName.TCP
    _queue: PostQueue[Frame, ToSend]

    def __init__(
        self,
        parts: LinkParts,
        limits: LinkLimits,
        *,
        socks: list[socket.socket],
        welcome: TcpWelcome,
        source_region_U8: np.ndarray,
    ) -> None:
        """Takes ownership of the sockets; `_start` follows. Use `connect`."""
        super().__init__(parts, limits)
        self._source_U8: np.ndarray | None = source_region_U8
        """None: nothing is sent any more."""
        self._streams = [_Stream(index=i, sock=sock) for i, sock in enumerate(socks)]
        bytes_max, segments_max = welcome.limits_here
        self._queue = PostQueue(
            lambda ops: cut_frames(ops, bytes_max, segments_max, len(socks)),
            self,
            src_nbytes=len(source_region_U8),
            dst_nbytes=welcome.region_nbytes,
            loop=self._loop,
            completed=self._events.writes_completed,
        )
        self._lock = self._queue.lock

    @classmethod
    async def connect(
        cls,
        parts: LinkParts,
        source_region_U8: np.ndarray,
        config: TcpConfig | None = None,
        limits: LinkLimits = LINK_LIMITS,
    ) -> TcpWriterLink:
        """`source_region_U8` is the caller's; the link releases it at its end.

        Raises:
            ConnectError: refused, unreachable, not the receiver, or not done within `connect_ms_max`.
        """
        socks, welcome = await connect_streams(parts, config or TcpConfig(), limits)
        made = cls(parts, limits, socks=socks, welcome=welcome, source_region_U8=source_region_U8)
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
                leave_streams((unused.sock for unused in self._streams[stream.index :]), self._epoch)
                await self.close()
                raise ConnectError(f"{self._address}: no thread to send with: {error}") from error
            stream.thread, stream.reading = thread, True
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
        return {**super().describe(), "streams": len(self._streams), "sent_by": moved_by()}

    # The lanes of the queue, with its lock held.

    def offer(self, batch: Batch[Frame]) -> ToSend | None:
        """See `Lanes.offer`: whoever posts sends it, if it is small and alone; else a thread is woken."""
        if (
            not batch.late
            and batch.total_bytes <= AT_ONCE_BYTES_MAX
            and len(batch.ops.src) <= AT_ONCE_OPS_MAX
            and self._queue.waits_alone(batch)
        ):
            idle = [stream for stream in self._streams if stream.idle]
            if idle:
                best = min(idle, key=lambda stream: len(stream.unacked))
                best.lent = True
                try:
                    return self._next_frame(best)
                except BaseException:
                    best.lent = False  # nobody gives it back, and its thread waits for that
                    raise
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
            data = stream.sock.recv(wire.RECV_BYTES, socket.MSG_DONTWAIT)
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
        assert stream.thread is not None
        stream.thread.join()
        stream.thread = None
        if failure:
            # The receiver's last message, if there is one, explains more than the error of a send.
            while stream.reading and not self._ending and self._read(stream):
                pass
            self._end(failure)
            self._cut_off()
        self._finish_if_over()

    def _stop_reading(self, stream: _Stream) -> None:
        if stream.reading:
            stream.reading = False
            self._loop.remove_reader(stream.sock)

    def _finish_if_over(self) -> None:
        if self._source_U8 is None or any(stream.thread or stream.reading for stream in self._streams):
            return
        for stream in self._streams:
            close_politely(stream.sock)
        self._source_U8 = None
        self._queue.lose()
        self._finish_soon()
