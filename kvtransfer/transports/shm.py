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
import mmap
import os
import secrets
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import length_hint
from typing import Any, ClassVar, Final, Self

import numpy as np

from baton.tasks import call_loop
from kvtransfer.device.region import DeviceRegion
from kvtransfer.native.copy import contiguous, copy_checked
from kvtransfer.region import Region, populate
from kvtransfer.transport import (
    ConnectError,
    DataEndpoint,
    DeviceError,
    ReceiverEvents,
    Seal,
    TransportName,
    WriteOps,
)
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


def map_region(fd: int, nbytes: int, address: str) -> mmap.mmap:
    """Map the region behind a descriptor, which stays the caller's. Raises ConnectError, OSError."""
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


class ShmChannel(WriterChannel):
    """On a Unix socket."""

    fd: int | None = None
    """It came with the last packet."""

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
        self.close_fd()
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fd = array.array("i", data)[0]
        return packet

    def close_fd(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


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


MESSAGES_PER_WAKE_MAX = 64
"""Messages read from one connection before others have a turn."""
SHM_PORT_LIMITS: Final = PortLimits(handshake_ms_max=2000)


class ShmReceiverPort(BasePort[Connection]):
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
            listener.listen(limits.backlog)
        except BaseException:
            listener.close()
            raise
        super().__init__(Connection, listener=listener, address=address, events=events, limits=limits)
        self._region = region

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        connections = self._connections.values()
        return {
            **super().describe(),
            "region_bytes": self._region.nbytes,
            "region_huge_bytes": self._region.huge_bytes,
            "connections_unproved": sum(c.channel.opened and c.sock is None for c in connections),
            **{name: self._counts[name] for name in ("seals", "seals_refused")},
        }

    # What comes.

    def _admit(self, sock: socket.socket, address: Any) -> None:
        del address  # writers have none
        pid, uid = peer_credentials(sock)
        self._connect(sock, f"pid {pid}", None if uid == os.geteuid() else Refusal(RefusalReason.USER))

    def _read(self, connection: Connection) -> bool:
        return all(self._read_one(connection) for _ in range(MESSAGES_PER_WAKE_MAX))

    def _read_one(self, connection: Connection) -> bool:
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

    def _identify(self, connection: Connection) -> None:
        assert connection.sock is not None
        pid, _ = peer_credentials(connection.sock)
        connection.identify(pid)
        if connection.pidfd is None:
            raise Refusal(RefusalReason.NO_PIDFD)

    def _prepare(self, connection: Connection) -> None:
        self._handle(connection, wire.Prepared(payload=ShmWelcome(region_nbytes=self._region.nbytes).encode()))

    def _carry_out(self, connection: Connection, instruction: wire.Instruction) -> None:
        """The region's descriptor goes with the WELCOME. Best effort: a writer that is gone shows as EOF, and one that
        waits in vain sends BYE at its deadline."""
        if connection.sock is None or not isinstance(instruction, wire.Welcome):
            super()._carry_out(connection, instruction)
            return
        with contextlib.suppress(OSError):
            socket.send_fds(connection.sock, [self.codec.encode(instruction)], [self._region.fd])

    def _deliver(self, connection: Connection, message: wire.SealSent | wire.LateBye) -> None:
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
                if connection.channel.opened:
                    self._stopped_writing(connection, Evidence.ACKNOWLEDGED)
                else:
                    self._handle(connection, Signal.EOF)

    # Ends.

    def _left(self, connection: Connection, *, drained: bool) -> None:
        del drained  # it has unmapped the region
        self._stopped_writing(connection, Evidence.ACKNOWLEDGED)

    def _lost(self, connection: Connection) -> None:
        """It stays, watched through its pidfd."""
        connection.close_sock(self._loop)

    def _broken(self, connection: Connection, reason: RefusalReason) -> None:
        """It can still send BYE."""


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


def cut_chunks(ops: WriteOps, threads: int, limits: ShmLinkLimits) -> Iterator[OpsPart]:
    """A batch in chunks, each of which ends with the op that fills it. A small batch is cut into equal shares for the
    threads; a large one, again and again, into a thread's share of what is left."""
    ops, bytes_max = contiguous(ops), limits.copy_chunk_bytes_max
    left_bytes, start = ops.total_bytes, 0
    bytes_min = min(max(CHUNK_BYTES_MIN, -(-left_bytes // threads)), LAST_CHUNK_BYTES, bytes_max)
    if left_bytes <= bytes_min and len(ops.src) <= limits.copy_chunk_ops_max:
        yield OpsPart(ops=ops, nbytes=left_bytes)
        return
    while start < len(ops.src):
        full_bytes = min(max(bytes_min, -(-left_bytes // threads)), bytes_max)
        ends_B = np.cumsum(ops.nbytes[start : start + limits.copy_chunk_ops_max])
        count = min(int(np.searchsorted(ends_B, full_bytes)) + 1, len(ends_B))
        end, nbytes = start + count, int(ends_B[count - 1])
        chunk = WriteOps(src=ops.src[start:end], dst=ops.dst[start:end], nbytes=ops.nbytes[start:end])
        yield OpsPart(ops=chunk, nbytes=nbytes)
        start, left_bytes = end, left_bytes - nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyParts:
    """Two open regions, and whom a link's lanes report to."""

    dst: Any
    src: Any
    dst_nbytes: int
    src_nbytes: int
    loop: asyncio.AbstractEventLoop
    completed: Completed
    drained: Callable[[], None]
    """See `CopyingLanes`."""
    name: str
    """Of the threads."""


class CopyingLanes(ABC):
    """Threads that have one open region copied into another, and the queue of what they copy.

    After a stop or a failed copy, when nothing will touch the regions again, `drained` is called on the loop's thread,
    once, after the last completion. If the loop is closed by then, neither is called.
    """

    def __init__(self, parts: CopyParts, cut: Callable[[WriteOps], Iterable[Any]], *, threads: int = 1) -> None:
        """Nothing is copied before `start`."""
        self.queue: PostQueue[Any, None] = PostQueue(
            cut,
            self,
            src_nbytes=parts.src_nbytes,
            dst_nbytes=parts.dst_nbytes,
            loop=parts.loop,
            completed=parts.completed,
        )
        self._dst, self._src = parts.dst, parts.src
        self._loop, self._drained = parts.loop, parts.drained
        self._threads_left = threads
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"{parts.name}-{i}", daemon=True) for i in range(threads)
        ]

    def start(self) -> None:
        """Raises RuntimeError: a thread cannot be started. Then all is stopped, up to `drained`."""
        for i, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError:
                for _ in self._threads[i:]:
                    self._leave()
                del self._threads[i:]
                raise

    @abstractmethod
    def offer(self, batch: Batch[Any]) -> None:
        """See `Lanes.offer`."""

    def stop(self) -> None:
        """See `Lanes.stop`."""
        self.queue.lock.notify_all()

    def join(self) -> None:
        """Let go of both regions and of the threads. Called after `drained`: the threads are at their very end."""
        assert self.queue.stopped
        for thread in self._threads:
            thread.join()
        self._dst = self._src = None

    @abstractmethod
    def _carry_all(self, lane: int) -> None:
        """On each thread: copy until the queue is stopped."""

    def _run(self, lane: int) -> None:
        try:
            self._carry_all(lane)
        finally:
            # Also on an unforeseen error: the error goes to threading.excepthook, and nobody waits for ever.
            self._leave()

    def _leave(self) -> None:
        self.queue.stop()
        with self.queue.lock:
            self._threads_left -= 1
            if self._threads_left == 0:
                call_loop(self._loop, self._drained)


class CopyLanes(CopyingLanes):
    """Threads that copy from one mapped region into another."""

    def __init__(
        self,
        parts: CopyParts,
        *,
        threads: int,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
        idle_work: Iterator[int] | None = None,
    ) -> None:
        """The regions are uint8 arrays. Each chunk is copied within `turns`, a semaphore that bounds the copying
        threads of a process. While there is nothing to copy, the threads do steps of `idle_work`."""
        super().__init__(parts, lambda ops: list(cut_chunks(ops, threads, limits)), threads=threads)
        self._turns = turns
        self._idle_work: Iterator[int] | None = idle_work

    def offer(self, batch: Batch[OpsPart]) -> None:
        """See `Lanes.offer`: wakes as many threads as it has chunks."""
        self.queue.lock.notify(max(1, length_hint(batch.parts)))

    def _carry_all(self, lane: int) -> None:
        while self._wait():
            with self._turns:
                self._copy_next(lane)

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
                    more = next(work, None) is not None
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
            copy_checked(self._dst, self._src, taken.part.ops)
            copied = True
        finally:
            self.queue.finished(taken, copied=copied)


def copy_turns(config: ShmConfig) -> threading.Semaphore:
    """Bounds the copying threads of all links of a process: made once, passed to each `connect`."""
    return threading.Semaphore(config.copy_threads)


class ShmWriterLink(ChannelLink):
    """One writer's connection to one receiver in one epoch (see `kvtransfer.transport.WriterLink`).

    Made by `connect`. At its end, also by a failed copy, copying stops, what is queued completes uncopied, the
    receiver's region is unmapped, and only then BYE is sent, on a new connection if the old one broke.
    """

    transport: ClassVar[TransportName] = TransportName.SHM
    codec: ClassVar[wire.Codec] = CODEC
    _limits: ShmLinkLimits

    def __init__(
        self,
        channel: ShmChannel,
        parts: LinkParts,
        limits: ShmLinkLimits,
        *,
        mapping: Any,
        region_nbytes: int,
        source: Any,
        config: ShmConfig,
        turns: AbstractContextManager[object],
    ) -> None:
        """Takes the channel's socket and the mapping over. Use `connect`."""
        super().__init__(channel, parts, limits)
        self._mapping = mapping
        self._nonce = channel.nonce
        self._config, self._turns = config, turns
        self._bye_timer: asyncio.TimerHandle | None = None
        self._bye_sent = False
        self._pages_ready_bytes = 0
        self._lanes = self._make_lanes(mapping, region_nbytes, source)
        self._queue = self._lanes.queue
        self._loop.add_reader(self._sock, self._read)

    @staticmethod
    def _check_source(source: Any) -> None:
        """Before a connection is tried. Raises ConnectError: from this region no other can be reached."""

    @staticmethod
    def _open_region(source: Any, fd: int, nbytes: int, address: str) -> Any:
        """The receiver's region, open, with a `close`. The descriptor stays the caller's. cuda_ipc has its own way, and
        its own lanes. Raises ConnectError, OSError."""
        del source
        return map_region(fd, nbytes, address)

    def _make_lanes(self, mapping: Any, region_nbytes: int, source: Any) -> CopyingLanes:
        """What copies from `source` into the opened region."""
        parts = CopyParts(
            dst=np.frombuffer(mapping, dtype=np.uint8, count=region_nbytes),
            src=source,
            dst_nbytes=region_nbytes,
            src_nbytes=len(source),
            loop=self._loop,
            completed=self._events.writes_completed,
            drained=self._drained,
            name=f"shm-copy-{self._pair.receiver:x}",
        )
        return CopyLanes(
            parts,
            threads=self._config.copy_threads,
            limits=self._limits,
            turns=self._turns,
            idle_work=self._enter_pages(mapping),
        )

    @classmethod
    async def connect(
        cls,
        parts: LinkParts,
        source: Any,
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
        cls._check_source(source)
        config = config or ShmConfig()
        endpoint = parts.endpoint
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        channel = ShmChannel(sock, parts.loop, cls.codec, address=endpoint.address)
        with connect_errors(endpoint.address, limits.connect_ms_max):
            try:
                async with asyncio.timeout(limits.connect_ms_max / 1000):
                    await connect_socket(sock, endpoint)
                    hello = wire.Hello(pair=parts.pair, epoch=endpoint.epoch)
                    welcome = await channel.shake_hands(endpoint.secret, hello)
                region_nbytes = ShmWelcome.decode(welcome.payload).region_nbytes
                if channel.fd is None:
                    raise ConnectError(f"{endpoint.address}: the receiver sent no file descriptor")
                mapping = cls._open_region(source, channel.fd, region_nbytes, endpoint.address)
            except BaseException:
                give_up(channel, endpoint)
                raise
            finally:
                channel.close_fd()
        link = cls(
            channel,
            parts,
            limits,
            mapping=mapping,
            region_nbytes=region_nbytes,
            source=source,
            config=config,
            turns=turns or copy_turns(config),
        )
        try:
            link._lanes.start()
        except (RuntimeError, DeviceError) as error:
            await link.close()
            raise ConnectError(f"{endpoint.address}: no thread to copy with: {error}") from error
        return link

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            **super().describe(),
            "copy_threads": self._config.copy_threads,
            "pages_ready_bytes": self._pages_ready_bytes,
            "bye_sent": self._bye_sent,
        }

    def _enter_pages(self, mapping: mmap.mmap) -> Iterator[int]:
        """The receiver's pages exist, but each would still cost a fault at its first copy. On a copying thread."""
        with contextlib.suppress(OSError):
            for self._pages_ready_bytes in populate(mapping, in_use=True):
                yield self._pages_ready_bytes

    def _send_seal(self, seal: Seal) -> None:
        self._queue.lanes_to_seal(seal.grant)
        self._send_message(wire.SealSent(number=self._seals, seal=seal))

    def _seals_waiting(self) -> int:
        return len(self._outbox)

    def _drained(self) -> None:
        """No thread will copy any more: unmap, and only then acknowledge. Every end comes here, by itself."""
        self._end("a copy thread failed")
        self._lanes.join()
        try:
            self._mapping.close()
        except BaseException:
            # A bug of ours, or the device refuses: BYE would be a lie. The receiver keeps waiting.
            self._finish()
            raise
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
        if self._bye_timer is not None:
            self._bye_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._drop_unsent()
        self._sock.close()
        super()._finish()
