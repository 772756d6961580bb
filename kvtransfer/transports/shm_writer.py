"""The writing side of shm: maps the receiver's region and copies into it, until told to stop.

Visibility of the copies to whoever has read the seal: the copying thread hands its completion to the loop's thread
through a lock, and that thread passes the seal through the kernel's socket locks; each is a release on one side and an
acquire on the other, on every architecture. On x86 stores are also seen in order anyway, and memcpy ends its
non-temporal stores with a fence of its own. So no explicit fence is issued here.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from baton.ids import Epoch, GrantId, Pair
from kvtransfer.transport import DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import shm_wire as wire
from kvtransfer.transports.shm_copy import CopyPool, TooManyAbandonedGrants

# A child of a later fork must not inherit the right to write; the mmap module of Python 3.11 may lack the name.
_MADV_DONTFORK = getattr(mmap, "MADV_DONTFORK", 10)


class ShmConnectError(Exception):
    """No link came to be; nothing is mapped. `reason` is the receiver's, if it gave one."""

    def __init__(self, text: str, reason: wire.RefusalReason | None = None) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmWriterConfig:
    """Limits of one link. `outbox_messages_max`: seals that wait for a receiver that does not read its socket."""

    connect_ms_max: int = 5000
    connect_retry_ms: int = 20
    copy_threads: int = 1
    copy_chunk_ops_max: int = 256
    abandoned_grants_max: int = 1 << 20
    outbox_messages_max: int = 4096
    bye_ms_max: int = 2000
    """How long the end waits until its BYE could be sent; without BYE the receiver waits for our death."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class ShmWriterLink:
    """One writer's connection to one receiver in one epoch (see `kvtransfer.transport.WriterLink`).

    Made by `connect`. `post` may be called from any thread, the rest from the loop's. The end comes once, from `close`,
    a FENCE, EOF or a failed copy: copying stops, what is queued completes uncopied, the receiver's region is unmapped,
    and only then BYE is sent, on a new connection where the old one has broken. `link_lost` is called last, and not for
    an end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.SHM

    def __init__(
        self,
        *,
        sock: socket.socket,
        mapping: mmap.mmap,
        nonce: bytes,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmWriterConfig,
    ) -> None:
        """Takes ownership of socket and mapping. Use `connect`."""
        self._sock = sock
        self._mapping: mmap.mmap | None = mapping
        self._nonce = nonce
        self._address = endpoint.address
        self._epoch = endpoint.epoch
        self._pair = pair
        self._events = events
        self._loop = loop
        self._config = config
        self._outbox: deque[bytes] = deque()
        self._end_reason: str | None = None
        self._end_asked_by_caller = False
        self._fenced = False
        self._ended = loop.create_future()
        self._bye_timer: asyncio.TimerHandle | None = None
        self._bye_sent = False
        self._seals = 0
        self._pool = CopyPool(
            dst_U8=np.frombuffer(mapping, dtype=np.uint8),
            src_U8=source_region_U8,
            loop=loop,
            completed=events.writes_completed,
            drained=self._drained,
            threads=config.copy_threads,
            chunk_ops_max=config.copy_chunk_ops_max,
            abandoned_grants_max=config.abandoned_grants_max,
            name=f"shm-copy-{pair.receiver:x}",
        )
        loop.add_reader(sock, self._read)

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: np.ndarray,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmWriterConfig | None = None,
    ) -> ShmWriterLink:
        """Connect, prove the pair's secret and map the receiver's region.

        `source_region_U8` is the caller's; the link lets go of it at its end.

        Raises:
            ShmConnectError: refused, unreachable, or not done within `connect_ms_max`.
        """
        config = config or ShmWriterConfig()
        handshake = _Handshake()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(config.connect_ms_max / 1000):
                await _connect_socket(sock, endpoint, config)
                mapping = await handshake.run(sock, endpoint, pair, loop)
        except BaseException as error:
            _give_up(sock, endpoint, handshake.nonce)
            if isinstance(error, TimeoutError):
                raise ShmConnectError(f"{endpoint.address}: no link within {config.connect_ms_max} ms") from error
            if isinstance(error, (OSError, ValueError, wire.MalformedMessage)):
                raise ShmConnectError(f"{endpoint.address}: {error}") from error
            raise
        try:
            return cls(
                sock=sock,
                mapping=mapping,
                nonce=handshake.nonce,
                endpoint=endpoint,
                pair=pair,
                source_region_U8=source_region_U8,
                events=events,
                loop=loop,
                config=config,
            )
        except BaseException:
            # No thread could be started. The region may still be mapped, so no BYE.
            sock.close()
            raise

    @property
    def epoch(self) -> Epoch:
        return self._epoch

    @property
    def fenced(self) -> bool:
        return self._fenced

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """See `WriterLink.post`. Figures of a completion are those of the batch as posted, copied or not.

        Raises:
            WriteOutOfBounds: an op leaves one of the regions; the batch is not taken.
        """
        self._pool.post(grant, ops)

    def seal(self, seal: Seal) -> None:
        """See `WriterLink.seal`. Dropped when the link is ending: `link_lost` tells."""
        assert seal.epoch == self._epoch, (seal.epoch, self._epoch)
        assert self._pool.uncompleted(seal.grant) == 0, "a seal before the grant's copies have completed"
        if self._end_reason is not None:
            return
        if len(self._outbox) >= self._config.outbox_messages_max:
            self._end(f"the receiver does not read: {len(self._outbox)} seals wait")
            return
        self._seals += 1
        self._send(seal)

    def abandon(self, grant: GrantId) -> None:
        """See `WriterLink.abandon`. Remembered until `forget(grant)` or the end of the link."""
        try:
            self._pool.abandon(grant)
        except TooManyAbandonedGrants as error:
            self._end(str(error))

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this abandoned grant."""
        self._pool.forget(grant)

    async def close(self) -> None:
        """See `WriterLink.close`. Returns when the region is unmapped, the threads have ended, the socket is closed."""
        if self._end_reason is None:
            self._end_asked_by_caller = True
            self._end("closed")
        await asyncio.shield(self._ended)

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        return {
            "transport": self.transport.value,
            "address": self._address,
            "epoch": self._epoch,
            "state": "open" if self._end_reason is None else self._end_reason,
            "writes": self._pool.writes_copied,
            "bytes": self._pool.bytes_copied,
            "batches_abandoned": self._pool.batches_abandoned,
            "seals": self._seals,
            "seals_waiting": len(self._outbox),
            "bye_sent": self._bye_sent,
        }

    def _read(self) -> None:
        try:
            packet = self._sock.recv(wire.MESSAGE_BYTES_MAX + 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"connection lost: {error}")
            return
        if not packet:
            self._end("the receiver closed the connection or died")
            return
        try:
            message = wire.decode(packet)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")
            return
        match message:
            case wire.Fence(epoch=epoch) if epoch >= self._epoch:
                self._fenced = True
                self._end(f"fenced by the receiver up to epoch {epoch}")
            case wire.Fence():
                return
            case wire.Refused(reason=reason):
                self._end(f"refused by the receiver: {reason.name}")
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _end(self, reason: str) -> None:
        """Begin the end, once. It goes on in `_drained`."""
        if self._end_reason is not None:
            return
        self._end_reason = reason
        self._loop.remove_reader(self._sock)
        self._pool.stop()

    def _drained(self) -> None:
        """No thread will copy any more: unmap, and only then acknowledge."""
        self._end("a copy thread failed")
        self._pool.join()
        assert self._mapping is not None
        try:
            self._mapping.close()
        except BufferError:
            # Somebody still sees the region: a bug of ours. Saying BYE would be a lie, so the receiver keeps waiting.
            self._finish()
            raise
        self._mapping = None
        self._bye_timer = self._loop.call_later(self._config.bye_ms_max / 1000, self._finish)
        self._send(wire.Bye(epoch=self._epoch))

    def _send(self, message: wire.Message) -> None:
        self._outbox.append(wire.encode(message))
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        """Send what the socket takes, in order; come back when it takes more."""
        while self._outbox:
            try:
                self._sock.send(self._outbox[0])
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._flush)
                return
            except OSError as error:
                self._outbox.clear()
                self._end(f"connection lost: {error}")
                self._loop.remove_writer(self._sock)
                if self._bye_timer is not None:
                    self._say_late_bye()
                return
            self._outbox.popleft()
        self._loop.remove_writer(self._sock)
        if self._bye_timer is not None:
            self._bye_sent = True
            self._finish()

    def _say_late_bye(self) -> None:
        """The socket broke before the BYE, and the receiver may live. Tried until `bye_ms_max`: see `_drained`."""
        if self._ended.done():
            return
        try:
            self._bye_sent = _late_bye(self._address, self._nonce)
        except BlockingIOError:
            self._loop.call_later(self._config.connect_retry_ms / 1000, self._say_late_bye)
            return
        self._finish()

    def _finish(self) -> None:
        if self._ended.done():
            return
        if self._bye_timer is not None:
            self._bye_timer.cancel()
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._ended.set_result(None)
        if not self._end_asked_by_caller:
            assert self._end_reason is not None
            self._events.link_lost(self._pair, self._end_reason)


async def _connect_socket(sock: socket.socket, endpoint: DataEndpoint, config: ShmWriterConfig) -> None:
    """Connect, and make sure that the listener runs under our own user before it sees our secret."""
    address = wire.socket_address(endpoint.address)
    while True:
        try:
            sock.connect(address)
            break
        except BlockingIOError:
            # The listener's backlog is full; a Unix socket does not tell when it has room again.
            await asyncio.sleep(config.connect_retry_ms / 1000)
    _, uid = wire.peer_credentials(sock)
    if uid != os.geteuid():
        raise ShmConnectError(f"{endpoint.address}: the listener runs as user {uid}, we as {os.geteuid()}")


@dataclass(slots=True)
class _Handshake:
    nonce: bytes = b""
    """Of the receiver's challenge; from the answer to it on, the receiver may count us as a writer."""

    async def run(
        self, sock: socket.socket, endpoint: DataEndpoint, pair: Pair, loop: asyncio.AbstractEventLoop
    ) -> mmap.mmap:
        """HELLO, CHALLENGE, ANSWER, WELCOME; returns the mapped region."""
        sock.send(wire.encode(wire.Hello(pair=pair, epoch=endpoint.epoch, secret=endpoint.secret)))
        challenge, fd = await _receive(sock, loop)
        if fd is not None:
            os.close(fd)
        if not isinstance(challenge, wire.Challenge):
            raise ShmConnectError(f"{endpoint.address}: {type(challenge).__name__} instead of a challenge")
        self.nonce = challenge.nonce
        sock.send(wire.encode(wire.Answer(nonce=challenge.nonce)))
        welcome, fd = await _receive(sock, loop)
        if fd is None:
            raise ShmConnectError(f"{endpoint.address}: the receiver sent no file descriptor")
        try:
            if not isinstance(welcome, wire.Welcome):
                raise ShmConnectError(f"{endpoint.address}: {type(welcome).__name__} instead of a welcome")
            return _map_region(fd, welcome.region_nbytes, endpoint.address)
        finally:
            os.close(fd)


def _map_region(fd: int, nbytes: int, address: str) -> mmap.mmap:
    if os.fstat(fd).st_size != nbytes or nbytes == 0:
        raise ShmConnectError(f"{address}: a file of {os.fstat(fd).st_size} bytes for a region of {nbytes}")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ShmConnectError(f"{address}: the region could be truncated under us: it is not sealed")
    mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        mapping.madvise(_MADV_DONTFORK)
    except OSError:
        mapping.close()
        raise
    return mapping


async def _receive(sock: socket.socket, loop: asyncio.AbstractEventLoop) -> tuple[wire.Message, int | None]:
    """The next message, and the descriptor that came with it: the caller's to close.

    Raises:
        ShmConnectError: EOF, or the receiver refused us.
    """
    readable = loop.create_future()
    loop.add_reader(sock, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(sock)
    packet, ancillary, _, _ = sock.recvmsg(
        wire.MESSAGE_BYTES_MAX + 1, socket.CMSG_LEN(struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC
    )
    fd = None
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fd = array.array("i", data)[0]
    try:
        if not packet:
            raise ShmConnectError("the receiver closed the connection")
        message = wire.decode(packet)
        if isinstance(message, wire.Refused):
            raise ShmConnectError(f"refused by the receiver: {message.reason.name}", message.reason)
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    return message, fd


def _give_up(sock: socket.socket, endpoint: DataEndpoint, nonce: bytes) -> None:
    """Nothing is mapped, and a descriptor still under way dies with the socket: so BYE is true, and spares a wait."""
    try:
        sock.send(wire.encode(wire.Bye(epoch=endpoint.epoch)))
        said = True
    except OSError:
        said = not nonce  # not connected, or the receiver is gone: nobody waits for it
    finally:
        sock.close()
    if not said:
        with contextlib.suppress(BlockingIOError):
            _late_bye(endpoint.address, nonce)


def _late_bye(address: str, nonce: bytes) -> bool:
    """Say BYE for a connection that has broken. False: the receiver is gone, and nobody waits for it.

    Raises:
        BlockingIOError: the receiver's backlog is full.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as sock:
        try:
            sock.connect(wire.socket_address(address))
            sock.send(wire.encode(wire.LateBye(nonce=nonce)))
        except BlockingIOError:
            raise
        except OSError:
            return False
    return True
