"""The writing side of shm: maps the receiver's region and copies into it until the link ends.

Whoever has read the seal sees the copies: the copying thread hands its completion to the loop's thread through a lock,
and that thread passes the seal through the kernel's socket locks. Each is a release on one side and an acquire on the
other, on every architecture. This does not order non-temporal stores on x86: the native copy ends with a store fence
(`native/copy.c`), and so does memcpy where it uses them.

A batch is cut into chunks, which the link's threads take in turn. So all threads copy a large batch, and each checks
after a chunk whether to go on.

Nothing is ever `writes_in_doubt` here: the copies are calls of this process's threads, and are over when they complete,
whatever becomes of the socket.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per record.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import socket
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
from kvtransfer.native.copy import contiguous, copies_by, copy_checked
from kvtransfer.region import populate
from kvtransfer.transport import ConnectError, DataEndpoint, Seal, TransportName, WriteOps, WriterEvents
from kvtransfer.transports import control_channel as wire
from kvtransfer.transports.control_channel import connect_errors
from kvtransfer.transports.limits import LinkLimits
from kvtransfer.transports.post_queue import Batch, Completed, OpsPart, PostQueue
from kvtransfer.transports.settings import ShmConfig
from kvtransfer.transports.shm import (
    CODEC,
    CONNECT_RETRY_MS,
    OpenByDescriptor,
    OpenRegion,
    ShmChannel,
    connect_socket,
    give_up,
    map_region,
    send_late_bye,
)
from kvtransfer.transports.writer_link import ChannelLink

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
        *,
        endpoint: DataEndpoint,
        pair: Pair,
        events: WriterEvents,
        loop: asyncio.AbstractEventLoop,
        config: ShmConfig,
        limits: ShmLinkLimits,
        turns: AbstractContextManager[object],
    ) -> None:
        """Takes ownership of the channel's socket and the mapping. Use `connect`."""
        super().__init__(channel, endpoint=endpoint, pair=pair, events=events, loop=loop, limits=limits)
        self._mapping: OpenRegion | None = mapping
        self._nonce = channel.nonce
        self._config = config
        self._bye_timer: asyncio.TimerHandle | None = None
        self._bye_sent = False
        self._pages_ready_bytes = 0
        self._lanes = self._make_lanes(mapping, region_nbytes, source, limits, turns)
        self._queue = self._lanes.queue
        loop.add_reader(self._sock, self._read)

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
                endpoint=endpoint,
                pair=pair,
                events=events,
                loop=loop,
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
