"""The writing side of shm: maps the receiver's region and copies into it, until told to stop.

Visibility of the copies to whoever has read the seal: the copying thread hands its completion to the loop's thread
through a lock, and that thread passes the seal through the kernel's socket locks; each is a release on one side and an
acquire on the other, on every architecture. Non-temporal stores are not ordered by that on x86: the native copy ends
with a store fence of its own (`native/copy.c`), and so does memcpy where it uses them.

Nothing is ever `writes_in_doubt` here: the copies are calls of this process's threads, over when they complete, and
what has become of the socket does not matter to them.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np

from baton.ids import Pair
from kvtransfer.native.copy import copies_by
from kvtransfer.region import populate
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.post_queue import PostQueue
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm import (
    CODEC,
    CONNECT_RETRY_MS,
    MESSAGE_BYTES_MAX,
    OpenByDescriptor,
    OpenRegion,
    ShmChannel,
    connect_socket,
    give_up,
    map_region,
    say_late_bye,
)
from kvtransfer.transports.shm_copy import CopyLanes, CopyLimits
from kvtransfer.transports.writer_link import BaseWriterLink


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmLinkLimits(LinkLimits):
    copy_chunk_ops_max: int = 1024
    """Writes copied between two looks at whether the grant was abandoned."""
    copy_chunk_bytes_max: int = 16 << 20
    """Bytes of those writes, after which no further one begins."""


SHM_LINK_LIMITS: Final = ShmLinkLimits()


def copy_turns(config: ShmConfig) -> threading.Semaphore:
    """Bounds the copying threads of all links of a process: made once, passed to each `connect`."""
    return threading.Semaphore(config.copy_threads)


class CopyingLanes(Protocol):
    """What copies into the opened region: threads, or a device (cuda_ipc)."""

    @property
    def queue(self) -> PostQueue[Any, None]: ...

    def join(self) -> None:
        """Let go of both regions. Called after `drained`, which says that nothing will touch them any more."""
        ...


class ShmWriterLink(BaseWriterLink):
    """One writer's connection to one receiver in one epoch (see `kvtransfer.transport.WriterLink`).

    Made by `connect`. `post` may be called from any thread, the rest from the loop's. The end comes once, from `close`,
    a FENCE, EOF or a failed copy: copying stops, what is queued completes uncopied, the receiver's region is unmapped,
    and only then BYE is sent, on a new connection where the old one has broken. `link_lost` is called last, and not for
    an end that `close` began.
    """

    transport: ClassVar[TransportName] = TransportName.SHM
    codec: ClassVar[wire.Codec] = CODEC
    _queue: PostQueue[Any, None]

    def __init__(
        self,
        *,
        sock: socket.socket,
        mapping: OpenRegion,
        region_nbytes: int,
        nonce: bytes,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: Any,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmConfig,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
    ) -> None:
        """Takes ownership of socket and mapping. Use `connect`."""
        super().__init__(endpoint=endpoint, pair=pair, events=events, loop=loop, limits=limits)
        self._sock = sock
        self._mapping: OpenRegion | None = mapping
        self._nonce = nonce
        self._config = config
        self._outbox: deque[bytes] = deque()
        self._bye_timer: asyncio.TimerHandle | None = None
        self._bye_sent = False
        self._pages_ready_bytes = 0
        self._lanes = self._make_lanes(
            mapping,
            region_nbytes,
            source_region_U8,
            pair=pair,
            events=events,
            loop=loop,
            config=config,
            limits=limits,
            turns=turns,
        )
        self._queue = self._lanes.queue
        loop.add_reader(sock, self._read)

    def _make_lanes(
        self,
        mapping: Any,
        region_nbytes: int,
        source: Any,
        *,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmConfig,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
    ) -> CopyingLanes:
        """What copies from `source` into the opened region. cuda_ipc has its own."""
        assert isinstance(mapping, mmap.mmap)
        return CopyLanes(
            dst_U8=np.frombuffer(mapping, dtype=np.uint8, count=region_nbytes),
            src_U8=source,
            loop=loop,
            completed=events.writes_completed,
            drained=self._drained,
            limits=CopyLimits(
                threads=config.copy_threads,
                chunk_ops_max=limits.copy_chunk_ops_max,
                chunk_bytes_max=limits.copy_chunk_bytes_max,
                abandoned_grants_max=limits.abandoned_grants_max,
            ),
            turns=turns,
            name=f"shm-copy-{pair.receiver:x}",
            idle_work=self._enter_pages(mapping),
        )

    @classmethod
    async def connect(
        cls,
        endpoint: DataEndpoint,
        pair: Pair,
        source_region_U8: Any,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmConfig | None = None,
        limits: ShmLinkLimits = SHM_LINK_LIMITS,
        turns: AbstractContextManager[object] | None = None,
        open_region: OpenByDescriptor | None = None,
    ) -> ShmWriterLink:
        """Connect, prove the pair's secret and map the receiver's region.

        `source_region_U8` is the caller's: a uint8 array, unless `open_region` opens something else than host memory.
        The link lets go of it at its end. `turns` is the semaphore of `copy_turns` that all links of a process share;
        without it this link has one of its own.

        Raises:
            ConnectError: refused, unreachable, or not done within `connect_ms_max`.
        """
        config = config or ShmConfig()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        channel = ShmChannel(sock, loop, cls.codec, address=endpoint.address)
        try:
            async with asyncio.timeout(limits.connect_ms_max / 1000):
                await connect_socket(sock, endpoint)
                mapping, region_nbytes = await channel.connect(endpoint, pair, open_region or map_region)
        except BaseException as error:
            give_up(channel, endpoint)
            failed = wire.connect_error(error, address=endpoint.address, connect_ms_max=limits.connect_ms_max)
            if failed is not None:
                raise failed from error
            raise
        try:
            return cls(
                sock=sock,
                mapping=mapping,
                region_nbytes=region_nbytes,
                nonce=channel.nonce,
                endpoint=endpoint,
                pair=pair,
                source_region_U8=source_region_U8,
                events=events,
                loop=loop,
                config=config,
                limits=limits,
                turns=turns or copy_turns(config),
            )
        except BaseException as error:
            # No thread could be started. What still sees the region are the frames that the error has come through.
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

    def _read(self) -> None:
        try:
            packet = self._sock.recv(MESSAGE_BYTES_MAX + 1)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"connection lost: {error}")
            return
        if not packet:
            self._end("the receiver closed the connection or died")
            return
        try:
            message = self.codec.decode(packet)
        except wire.MalformedMessage as error:
            self._end(f"the receiver sent no message of ours: {error}")
            return
        match message:
            case wire.Fence(epoch=epoch) if epoch >= self._epoch:
                self._fenced_by_receiver(epoch)
            case wire.Fence():
                return
            case wire.Refused(reason=reason):
                self._end(f"refused by the receiver: {reason.name}")
            case _:
                self._end(f"the receiver sent {type(message).__name__} out of order")

    def _send_seal(self, seal: Seal) -> None:
        self._queue.lanes_to_seal(seal.grant)
        self._send(wire.SealSent(number=self._seals, seal=seal))

    def _seals_waiting(self) -> int:
        return len(self._outbox)

    def _stopped(self) -> None:
        """On their way are copies of ours alone, which end by themselves: it goes on in `_drained`."""
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
            # Somebody still sees the region, a bug of ours, or the device refuses to let go of it. BYE would be a lie:
            # the receiver keeps waiting.
            self._finish()
            raise
        self._mapping = None
        self._bye_timer = self._loop.call_later(self._limits.bye_ms_max / 1000, self._finish)
        self._send(wire.Bye(epoch=self._epoch))

    def _send(self, message: wire.Message) -> None:
        self._outbox.append(self.codec.encode(message))
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
        if self._over.done():
            return
        try:
            self._bye_sent = say_late_bye(self._address, self._nonce, self.codec)
        except BlockingIOError:
            self._loop.call_later(CONNECT_RETRY_MS / 1000, self._say_late_bye)
            return
        self._finish()

    def _finish(self) -> None:
        if self._over.done():
            return
        if self._bye_timer is not None:
            self._bye_timer.cancel()
        self._loop.remove_writer(self._sock)
        self._sock.close()
        super()._finish()
