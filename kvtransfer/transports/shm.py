"""Transport between processes of one machine: the receiver's region is a memfd, the writer maps it and copies into it.

The control channel is a Unix SOCK_SEQPACKET connection, with one message in each packet. The region's descriptor comes
with the WELCOME. BYE says that the writer has unmapped the region and takes no descriptor any more. If the socket
breaks before it, LATE_BYE follows, as the only message of a new connection.

The receiver gives the descriptor to writers that prove themselves, and watches them. Evidence (I3) is the writer's BYE,
or its readable pidfd. The kernel marks a pidfd readable only when every thread of the process has left user mode for
good, so it stores nothing more. A closed socket proves nothing: the writer may be alive with the region mapped.

Whoever has read the seal sees the copies: the copying thread hands its completion to the loop's thread through a lock,
and that thread passes the seal through the kernel's socket locks. Each is a release on one side and an acquire on the
other, on every architecture. This does not order non-temporal stores on x86: the native copy ends with a store fence
(`native/copy.c`), and so does memcpy where it uses them.

A batch is cut into chunks, which the link's threads take in turn. So all threads copy a large batch, and each checks
after a chunk whether to go on. Nothing is ever `writes_in_doubt` here: the copies are calls of this process's threads,
and are over when they complete, whatever becomes of the socket.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per record.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import hmac
import itertools
import mmap
import os
import secrets
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import length_hint
from typing import Any, ClassVar, Final, Protocol, Self

import numpy as np

from baton.ids import Pair
from baton.tasks import call_loop
from kvtransfer.device.region import DeviceRegion
from kvtransfer.native.copy import contiguous, copies_by, copy_checked
from kvtransfer.region import Region, populate
from kvtransfer.transport import ConnectError, DataEndpoint, ReceiverEvents, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import Codec, Refusal, RefusalReason, Signal, WriterChannel, connect_errors
from kvtransfer.transports.post_queue import Batch, Completed, OpsPart, PostQueue
from kvtransfer.transports.receiver_port import BasePort, Connection, Evidence, PortLimits
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.writer_link import ChannelLink, LinkLimits, LinkParts

MESSAGE_BYTES_MAX: Final = 64
# struct sockaddr_un has 108 bytes for the name; the abstract name's leading NUL is one of them.
ADDRESS_BYTES_MAX: Final = 107
ADDRESS_PREFIX: Final = "@baton-shm-"
CONNECT_RETRY_MS: Final = 20
"""Pause while the receiver's backlog is full."""
_UCRED: Final = struct.Struct("iII")
# A child of a later fork must not inherit the right to write; the mmap module of Python 3.11 may lack the name.
_MADV_DONTFORK: Final = getattr(mmap, "MADV_DONTFORK", 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmWelcome(wire.Packed):
    LAYOUT = struct.Struct("<Q")
    region_nbytes: int


def codec_of(transport: TransportName) -> Codec:
    """cuda_ipc has the same messages."""
    return Codec(transport, wire.LateBye, payload_bytes_max=ShmWelcome.LAYOUT.size, packets=True)


CODEC: Final = codec_of(TransportName.SHM)


def socket_address(address: str) -> str:
    """The name to bind or connect to, of a `DataEndpoint.address` such as "@baton-shm-0f...": abstract, leading NUL.

    Raises:
        ValueError: not an address of this transport, or too long for a socket address.
    """
    if not address.startswith(ADDRESS_PREFIX) or "\0" in address:
        raise ValueError(f"shm address {address!r} does not start with {ADDRESS_PREFIX!r}")
    if len(address.encode()) > ADDRESS_BYTES_MAX:
        raise ValueError(f"shm address has {len(address.encode())} bytes, the kernel takes {ADDRESS_BYTES_MAX}")
    return "\0" + address[1:]


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id (0: of another PID namespace) and user id of whoever connected, or listened, at the other end."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


async def connect_socket(sock: socket.socket, endpoint: DataEndpoint) -> None:
    """Connect, and make sure that the listener runs under our own user before it sees our proof."""
    address = socket_address(endpoint.address)
    while True:
        try:
            sock.connect(address)
            break
        except BlockingIOError:
            # The listener's backlog is full; a Unix socket does not signal when it has room again.
            await asyncio.sleep(CONNECT_RETRY_MS / 1000)
    _, uid = peer_credentials(sock)
    if uid != os.geteuid():
        raise ConnectError(f"{endpoint.address}: the listener runs as user {uid}, we as {os.geteuid()}")


class OpenRegion(Protocol):
    """A receiver's region, open in this process."""

    def close(self) -> None: ...


def map_region(fd: int, nbytes: int, address: str) -> mmap.mmap:
    """An `OpenByDescriptor`."""
    status = os.fstat(fd)
    whole_blocks = -(-nbytes // status.st_blksize) * status.st_blksize  # huge pages are never cut
    if not nbytes or status.st_size not in (nbytes, whole_blocks):
        raise ConnectError(f"{address}: a file of {status.st_size} bytes for a region of {nbytes}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ConnectError(f"{address}: the region could be truncated under us: it is not sealed")
    mapping = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapping.madvise(_MADV_DONTFORK)
    except OSError:
        mapping.close()
        raise
    return mapping


OpenByDescriptor = Callable[[int, int, str], OpenRegion]
"""From (descriptor, bytes of the region, address for people). The caller closes the descriptor. Raises ConnectError,
OSError."""


class ShmChannel(WriterChannel):
    """The handshake on a Unix socket, up to the opened region."""

    _fd: int | None = None
    """It came with the last packet."""

    async def connect(
        self, endpoint: DataEndpoint, pair: Pair, open_region: OpenByDescriptor
    ) -> tuple[OpenRegion, int]:
        """The opened region, the caller's, and how many bytes from its start on are the receiver's blocks.

        Raises ConnectError, OSError, MalformedMessage.
        """
        try:
            hello = wire.Hello(pair=pair, epoch=endpoint.epoch)
            region_nbytes = ShmWelcome.decode((await self.shake_hands(endpoint.secret, hello)).payload).region_nbytes
            if self._fd is None:
                raise ConnectError(f"{endpoint.address}: the receiver sent no file descriptor")
            return open_region(self._fd, region_nbytes, endpoint.address), region_nbytes
        finally:
            self._close_fd()

    async def send(self, message: wire.Message) -> None:
        self.sock.send(self.codec.encode(message))

    async def _receive_bytes(self) -> bytes:
        readable = self._loop.create_future()
        self._loop.add_reader(self.sock, lambda: None if readable.done() else readable.set_result(None))
        try:
            await readable
        finally:
            self._loop.remove_reader(self.sock)
        packet, ancillary, _, _ = self.sock.recvmsg(
            MESSAGE_BYTES_MAX + 1, socket.CMSG_LEN(struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
        )
        self._close_fd()
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fd = array.array("i", data)[0]
        return packet

    def _close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def give_up(channel: ShmChannel, endpoint: DataEndpoint) -> None:
    """Nothing is mapped, and a descriptor on its way dies with the socket: so BYE is true, and spares a wait."""
    with channel.sock as sock:
        try:
            sock.send(channel.codec.encode(wire.Bye(epoch=endpoint.epoch)))
            return
        except OSError:
            if not channel.nonce:
                return  # the receiver does not count us as a writer
    with contextlib.suppress(BlockingIOError):
        send_late_bye(endpoint.address, channel.nonce, channel.codec)


def send_late_bye(address: str, nonce: bytes, codec: Codec) -> bool:
    """Send BYE for a connection that has broken. False: the receiver is gone, and nobody waits for it.

    Raises:
        BlockingIOError: the receiver's backlog is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(socket_address(address))
            sock.send(codec.encode(wire.LateBye(nonce=nonce)))
        except BlockingIOError:
            raise
        except OSError:
            return False
    return True


LATE_BYES_MAX = 64
"""Connections beyond `connections_max`, open for a late BYE that makes room, and then closed."""
MESSAGES_PER_WAKE_MAX = 64
"""Messages read from one connection before others have a turn."""
SHM_PORT_LIMITS: Final = PortLimits(handshake_ms_max=2000)


@dataclass(slots=True, kw_only=True, eq=False)
class ShmConnection(Connection):
    pid: int = 0
    region_fd: int = -1
    pidfd: int | None = None

    def send(self, message: wire.Message) -> None:
        """Best effort: what is lost costs time, never safety. The region's descriptor goes with the WELCOME: a writer
        that is gone shows as EOF, and one that waits in vain sends BYE at its deadline."""
        if self.sock is None or not isinstance(message, wire.Welcome):
            Connection.send(self, message)
            return
        with contextlib.suppress(OSError):
            socket.send_fds(self.sock, [self.codec.encode(message)], [self.region_fd])


class ShmReceiverPort(BasePort[ShmConnection]):
    """Accepts writers of one region (see `kvtransfer.transport.ReceiverPort`).

    Listens in the abstract socket namespace: a killed process leaves no file behind, and no directory is needed. Such a
    name has no permissions; the peer's user id and the pair's secret take their place. Writer and receiver must share
    a network namespace (to meet) and a PID namespace (for the pidfd).

    A fenced writer that runs drains, unmaps and acknowledges; a stopped one keeps the fence waiting.
    """

    codec: ClassVar[wire.Codec] = CODEC

    def __init__(
        self, *, region: Region | DeviceRegion, events: ReceiverEvents, limits: PortLimits = SHM_PORT_LIMITS
    ) -> None:
        """Listens at once. `region` is the caller's and outlives the port."""
        address = ADDRESS_PREFIX + secrets.token_hex(16)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(socket_address(address))
            listener.listen(limits.connections_max)
        except BaseException:
            listener.close()
            raise
        super().__init__(ShmConnection, listener=listener, address=address, events=events, limits=limits)
        self._region = region

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "region_bytes": self._region.nbytes,
            "region_huge_bytes": self._region.huge_bytes,
            "connections_unproved": sum(c.channel.may_write and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "seals_refused")},
        }

    # What comes.

    def _admit(self, sock: socket.socket) -> None:
        pid, uid = peer_credentials(sock)
        surplus = len(self._connections) - self._limits.connections_max
        connection = self._connect(sock, surplus=surplus >= 0)
        connection.pid, connection.region_fd = pid, self._region.fd
        if uid != os.geteuid():
            self._handle(connection, Refusal(RefusalReason.USER))
        elif surplus >= LATE_BYES_MAX:
            self._handle(connection, Refusal(RefusalReason.CONNECTIONS_MAX))

    def _read(self, connection: ShmConnection) -> None:
        for _ in range(MESSAGES_PER_WAKE_MAX):
            if not self._read_one(connection):
                return

    def _read_one(self, connection: ShmConnection) -> bool:
        """Handle one packet; False when there is none, or the socket is closed."""
        if connection.sock is None:
            return False
        try:
            packet, _, flags, _ = connection.sock.recvmsg(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            # The peer closed with a message of ours unread. The kernel reports that once, and ahead of the packets
            # that the peer sent before: its BYE may be among them.
            return True
        except OSError:
            packet, flags = b"", 0
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._handle(connection, Refusal(RefusalReason.MALFORMED))
            return True
        self._take_in(connection, packet)
        return bool(packet)

    def _is_writing(self, connection: ShmConnection) -> bool:
        return connection.channel.may_write and connection.sock is not None

    def _identify(self, connection: ShmConnection) -> None:
        # The pid is that of the process that connected. Had it died before pidfd_open, another process could have the
        # pid by now. The answer to a nonce that is sent after pidfd_open shows that it was alive then, so the pidfd is
        # its own. Pid 0: the peer lives in another PID namespace.
        with contextlib.suppress(OSError):
            connection.pidfd = os.pidfd_open(connection.pid) if connection.pid > 0 else None
        if connection.pidfd is None:
            raise Refusal(RefusalReason.NO_PIDFD)

    def _prepare(self, connection: ShmConnection) -> None:
        self._handle(connection, wire.Prepared(payload=ShmWelcome(region_nbytes=self._region.nbytes).encode()))

    def _opened(self, connection: ShmConnection) -> None:
        """Before the descriptor leaves: whatever sending reports, the writer may have it from here on."""
        assert connection.pidfd is not None
        self._loop.add_reader(connection.pidfd, self._writer_died, connection)

    def _deliver(self, connection: ShmConnection, message: wire.SealSent | wire.LateBye) -> None:
        if isinstance(message, wire.LateBye):
            self._late_bye(message.nonce)
        elif message.seal.epoch != connection.epoch:
            self._counts["seals_refused"] += 1
        else:
            self._counts["seals"] += 1
            self._events.seal_landed(connection.pair, message.seal)

    def _late_bye(self, nonce: bytes) -> None:
        """About a connection that broke before its BYE. Only its writer knows the nonce."""
        for connection in list(self._connections.values()):
            if connection.channel.nonce and hmac.compare_digest(connection.channel.nonce, nonce):
                if connection.channel.may_write:
                    self._prove(connection, Evidence.ACKNOWLEDGED)
                else:
                    self._handle(connection, Signal.EOF)

    def _writer_died(self, connection: ShmConnection) -> None:
        # What the dead writer had still sent is delivered first, its seals and perhaps its BYE; it can add nothing.
        while self._read_one(connection):
            pass
        if connection.number not in self._connections:
            return
        self._prove(connection, Evidence.DEAD)
        self._fence_own(connection)

    # Ends.

    def _left(self, connection: ShmConnection, *, drained: bool) -> None:
        del drained  # it has unmapped the region
        self._prove(connection, Evidence.ACKNOWLEDGED)

    def _lost(self, connection: ShmConnection) -> None:
        """It stays, watched through its pidfd."""
        connection.close_sock(self._loop)

    def _broken(self, connection: ShmConnection, reason: RefusalReason) -> None:
        """It can still send BYE."""

    def _prove(self, connection: ShmConnection, evidence: Evidence) -> None:
        """The one place where a connection stops counting as a writer."""
        assert connection.channel.may_write
        self._proved(connection, evidence, connection.pid)
        self._drop(connection)

    def _drop(self, connection: ShmConnection) -> None:
        connection.close_sock(self._loop)
        if connection.pidfd is not None:
            self._loop.remove_reader(connection.pidfd)
            os.close(connection.pidfd)
            connection.pidfd = None
        self._connections.pop(connection.number, None)


CHUNK_BYTES_MIN = 1 << 18
"""A batch is not cut into smaller chunks to have one for each thread: waking a thread costs too much."""
LAST_CHUNK_BYTES = 1 << 20
"""Chunks shrink down to this towards the end of a large batch, or one thread would copy for a millisecond after another
has found none left. Taking a chunk costs some ten microseconds, copying a mebibyte a hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmLinkLimits(LinkLimits):
    copy_chunk_ops_max: int = 1024
    """Writes copied between two looks at whether the grant was abandoned."""
    copy_chunk_bytes_max: int = 16 << 20
    """Bytes of those writes, after which no further one begins."""


SHM_LINK_LIMITS: Final = ShmLinkLimits()


def chunk_borders(nbytes_B: np.ndarray, threads: int, limits: ShmLinkLimits) -> list[int]:
    """Where to cut a batch: chunk i is the ops from border i up to border i + 1. Always at least one chunk.

    A chunk ends with the op that fills it, so it may be larger than `copy_chunk_bytes_max` by less than one op.
    """
    count, total_bytes = len(nbytes_B), int(nbytes_B.sum())
    ends = _byte_borders(total_bytes, threads, limits.copy_chunk_bytes_max)
    if not ends and count <= limits.copy_chunk_ops_max:
        return [0, count]
    by_bytes = np.searchsorted(np.cumsum(nbytes_B), np.array(ends, np.int64)) + 1
    by_ops = np.arange(0, count, limits.copy_chunk_ops_max)
    borders: list[int] = np.unique(np.concatenate(([0, count], by_bytes, by_ops))).tolist()
    return borders


def _byte_borders(total_bytes: int, threads: int, chunk_bytes_max: int) -> list[int]:
    """Where chunks would end, but for the last, if ops could be cut. A small batch is cut into equal shares for the
    threads; a large one, again and again, into a thread's share of what is left."""
    if total_bytes <= threads * LAST_CHUNK_BYTES:
        chunk_bytes = min(max(CHUNK_BYTES_MIN, -(-total_bytes // threads)), chunk_bytes_max)
        return list(range(chunk_bytes, total_bytes, chunk_bytes))
    ends: list[int] = []
    end = 0
    while True:
        share_bytes = max(LAST_CHUNK_BYTES, -(-(total_bytes - end) // threads))
        end += min(share_bytes, chunk_bytes_max)
        if end >= total_bytes:
            return ends
        ends.append(end)


def cut_chunks(ops: WriteOps, threads: int, limits: ShmLinkLimits) -> list[OpsPart]:
    """All copies of a batch, in chunks: see `chunk_borders`."""
    ops = contiguous(ops)
    borders = chunk_borders(ops.nbytes, threads, limits)
    if len(borders) == 2:
        return [OpsPart(ops=ops, nbytes=ops.total_bytes)]
    chunks = []
    for start, end in itertools.pairwise(borders):
        chunk = WriteOps(src=ops.src[start:end], dst=ops.dst[start:end], nbytes=ops.nbytes[start:end])
        chunks.append(OpsPart(ops=chunk, nbytes=chunk.total_bytes))
    return chunks


def _step(work: Iterator[object]) -> bool:
    """False: that was the last."""
    try:
        next(work)
    except (StopIteration, OSError):
        return False
    return True


class CopyLanes:
    """Threads that copy from one mapped region into another, and the queue of what they copy.

    After a stop or a failed copy, when no thread will touch the regions again, `drained` is called on the loop's
    thread, once, after the last completion. If the loop is closed by then, neither is called.
    """

    def __init__(
        self,
        *,
        dst_U8: np.ndarray,
        src_U8: np.ndarray,
        loop: asyncio.AbstractEventLoop,
        completed: Completed,
        drained: Callable[[], None],
        threads: int,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
        name: str,
        idle_work: Iterator[object] | None = None,
    ) -> None:
        """Starts the threads, all or none. Each chunk is copied within `turns`, a semaphore that bounds the copying
        threads of a process. While there is nothing to copy, the threads do steps of `idle_work`; its OSError ends it.

        Raises RuntimeError: a thread cannot be started.
        """
        self.queue: PostQueue[OpsPart, None] = PostQueue(
            lambda ops: cut_chunks(ops, threads, limits),
            self,
            src_nbytes=len(src_U8),
            dst_nbytes=len(dst_U8),
            loop=loop,
            completed=completed,
        )
        self._loop = loop
        self._drained = drained
        self._dst_U8: np.ndarray | None = dst_U8
        self._src_U8: np.ndarray | None = src_U8
        self._turns = turns
        self._idle_work: Iterator[object] | None = idle_work
        self._threads_left = threads
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:
                self._threads = self._threads[:i]
                self.queue.stop()
                self.join()
                raise

    def offer(self, batch: Batch[OpsPart]) -> None:
        """See `Lanes.offer`: wakes as many threads as it has chunks."""
        self.queue.lock.notify(max(1, length_hint(batch.parts)))

    def stop(self) -> None:
        """See `Lanes.stop`."""
        self.queue.lock.notify_all()

    def join(self) -> None:
        """Let go of both regions and of the threads. Called after `drained`: the threads are at their very end."""
        assert self.queue.stopped
        for thread in self._threads:
            thread.join()
        self._dst_U8 = self._src_U8 = self._idle_work = None

    # Copying threads.

    def _run(self, lane: int) -> None:
        try:
            while self._wait():
                with self._turns:
                    self._copy_next(lane)
        finally:
            # Also on an unforeseen error: the error goes to threading.excepthook, and nobody waits for ever.
            self._leave()

    def _wait(self) -> bool:
        """Until there is a chunk to copy; False: stopped."""
        lock = self.queue.lock
        with lock:
            while not self.queue.waits and not self.queue.stopped:
                work, self._idle_work = self._idle_work, None  # one thread at a time
                if work is None:
                    lock.wait()
                    continue
                lock.release()
                try:
                    more = _step(work)
                finally:
                    lock.acquire()
                self._idle_work = work if more else None
            return not self.queue.stopped

    def _copy_next(self, lane: int) -> None:
        """Copy the next chunk, unless there is none any more."""
        with self.queue.lock:
            taken = self.queue.take(lane)
            if taken is None:
                return
            if self.queue.waits:
                self.queue.lock.notify()
        copied = False
        try:
            assert self._dst_U8 is not None
            assert self._src_U8 is not None
            copy_checked(self._dst_U8, self._src_U8, taken.part.ops)
            copied = True
        finally:
            self.queue.finished(taken, copied=copied)

    def _leave(self) -> None:
        self.queue.stop()
        with self.queue.lock:
            self._threads_left -= 1
            if self._threads_left == 0:
                call_loop(self._loop, self._drained)


def copy_turns(config: ShmConfig) -> threading.Semaphore:
    """Bounds the copying threads of all links of a process: made once, passed to each `connect`."""
    return threading.Semaphore(config.copy_threads)


class CopyingLanes(Protocol):
    """What copies into the opened region: threads, or a device (cuda_ipc)."""

    @property
    def queue(self) -> PostQueue[Any, None]: ...

    def join(self) -> None:
        """Release both regions. Called after `drained`: nothing touches them any more."""
        ...


class ShmWriterLink(ChannelLink):
    """One writer's connection to one receiver in one epoch (see `kvtransfer.transport.WriterLink`).

    Made by `connect`. `post` may be called from any thread, the rest from the loop's. The end comes once, from `close`,
    a FENCE, EOF or a failed copy: copying stops, what is queued completes uncopied, the receiver's region is unmapped,
    and only then BYE is sent, on a new connection if the old one broke. `link_lost` is called last, and not for an end
    that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.SHM
    codec: ClassVar[wire.Codec] = CODEC
    _queue: PostQueue[Any, None]

    def __init__(
        self,
        channel: ShmChannel,
        mapping: OpenRegion,
        region_nbytes: int,
        source: Any,
        parts: LinkParts,
        *,
        config: ShmConfig,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
    ) -> None:
        """Takes ownership of the channel's socket and the mapping. Use `connect`."""
        super().__init__(channel, parts, limits)
        self._mapping: OpenRegion | None = mapping
        self._nonce = channel.nonce
        self._config = config
        self._bye_timer: asyncio.TimerHandle | None = None
        self._bye_sent = False
        self._pages_ready_bytes = 0
        self._lanes = self._make_lanes(mapping, region_nbytes, source, limits, turns)
        self._queue = self._lanes.queue
        self._loop.add_reader(self._sock, self._read)

    @classmethod
    def _opener(cls, source: Any) -> OpenByDescriptor:
        """What opens the receiver's region. Raises ConnectError. cuda_ipc has its own, and its own lanes."""
        del source
        return map_region

    def _make_lanes(
        self,
        mapping: Any,
        region_nbytes: int,
        source: Any,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
    ) -> CopyingLanes:
        """What copies from `source` into the opened region."""
        assert isinstance(mapping, mmap.mmap)
        return CopyLanes(
            dst_U8=np.frombuffer(mapping, dtype=np.uint8, count=region_nbytes),
            src_U8=source,
            loop=self._loop,
            completed=self._events.writes_completed,
            drained=self._drained,
            threads=self._config.copy_threads,
            limits=limits,
            turns=turns,
            name=f"shm-copy-{self._pair.receiver:x}",
            idle_work=self._enter_pages(mapping),
        )

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source: Any,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmConfig | None = None,
        limits: ShmLinkLimits = SHM_LINK_LIMITS,
        turns: AbstractContextManager[object] | None = None,
    ) -> Self:
        """Connect, prove the pair's secret and map the receiver's region.

        `source` is the caller's region, a uint8 array. The link releases it at its end. `turns` is the semaphore of
        `copy_turns` that all links of a process share; without it this link has one of its own.

        Raises:
            ConnectError: refused, unreachable, not done within `connect_ms_max`, or the region cannot be opened here.
        """
        config, open_region = config or ShmConfig(), cls._opener(source)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        channel = ShmChannel(sock, loop, cls.codec, address=endpoint.address)
        with connect_errors(endpoint.address, limits.connect_ms_max):
            try:
                async with asyncio.timeout(limits.connect_ms_max / 1000):
                    await connect_socket(sock, endpoint)
                    mapping, region_nbytes = await channel.connect(endpoint, pair, open_region)
            except BaseException:
                give_up(channel, endpoint)
                raise
        try:
            return cls(
                channel,
                mapping,
                region_nbytes,
                source,
                LinkParts(endpoint=endpoint, pair=pair, events=events, loop=loop),
                config=config,
                limits=limits,
                turns=turns or copy_turns(config),
            )
        except BaseException as error:
            # No thread could be started. Only the frames that the error came through still see the region.
            traceback.clear_frames(error.__traceback__)
            try:
                mapping.close()
            except BaseException:
                sock.close()  # it is still mapped, so no BYE
                raise
            give_up(channel, endpoint)
            if isinstance(error, RuntimeError):
                raise ConnectError(f"{endpoint.address}: no thread to copy with: {error}") from error
            raise

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            **super().describe(),
            "copies_by": copies_by(),
            "copy_threads": self._config.copy_threads,
            "pages_ready_bytes": self._pages_ready_bytes,
            "bye_sent": self._bye_sent,
        }

    def _enter_pages(self, mapping: mmap.mmap) -> Iterator[object]:
        """The receiver's pages exist, but each would still cost a fault at its first copy. On a copying thread."""
        for self._pages_ready_bytes in populate(mapping, in_use=True):
            yield None

    def _send_seal(self, seal: Seal) -> None:
        self._queue.lanes_to_seal(seal.grant)
        self._send_message(wire.SealSent(number=self._seals, seal=seal))

    def _seals_waiting(self) -> int:
        return len(self._outbox)

    def _stopped(self) -> None:
        """Only our own copies are on their way, and they end by themselves: it goes on in `_drained`."""
        self._loop.remove_reader(self._sock)

    def _cut_off(self) -> None:
        self._stopped()

    def _drained(self) -> None:
        """No thread will copy any more: unmap, and only then acknowledge."""
        self._end("a copy thread failed")
        self._lanes.join()
        assert self._mapping is not None
        try:
            self._mapping.close()
        except BaseException:
            # Somebody still sees the region, a bug of ours, or the device refuses to close it. BYE would be a lie:
            # the receiver keeps waiting.
            self._finish()
            raise
        self._mapping = None
        self._bye_timer = self._loop.call_later(self._limits.bye_ms_max / 1000, self._finish)
        self._send_message(wire.Bye(epoch=self._epoch))

    def _all_sent(self) -> None:
        if self._bye_timer is not None:
            self._bye_sent = True
            self._finish()

    def _connection_lost(self, reason: str) -> None:
        super()._connection_lost(reason)
        if self._bye_timer is not None:
            self._send_late_bye()

    def _send_late_bye(self) -> None:
        """The socket broke before the BYE, and the receiver may live. Tried until `bye_ms_max`: see `_drained`."""
        if self._over.done():
            return
        try:
            self._bye_sent = send_late_bye(self._address, self._nonce, self.codec)
        except BlockingIOError:
            self._loop.call_later(CONNECT_RETRY_MS / 1000, self._send_late_bye)
            return
        self._finish()

    def _finish(self) -> None:
        if self._over.done():
            return
        if self._bye_timer is not None:
            self._bye_timer.cancel()
        self._drop_unsent()
        self._sock.close()
        super()._finish()
