"""A region on a device as sockets can reach it: through pinned memory of the host, cut into chunks.

Each link that writes and each connection that receives has a share of its own, some chunks and a side stream of the
device, for as long as it lives: a peer that stands still holds up its own share alone.

Shape suffixes: U8 = one-dimensional array of bytes; S = one entry per segment of a chunk.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from baton.config import setting
from baton.errors import InvalidField, check_positive
from baton.log import get_log
from kvtransfer.device.driver import POLL_INTERVAL_S, DeviceDriver, DeviceEvent, wait_for
from kvtransfer.device.region import DeviceRegion
from kvtransfer.transport import DeviceError, WriteOps

log = get_log("device")

WORD_BYTES = 8
"""Copies whose offsets and lengths are multiples of it are the fast ones."""

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingConfig:
    """Pinned memory of one node."""

    bytes_max: int = setting(
        256 << 20,
        "pinned host memory of a node, through which tcp moves data of a GPU",
        "The node has a GPU and more tcp links than fit (8 MiB each, 4 MiB for each incoming stream).",
    )

    def __post_init__(self) -> None:
        check_positive(self, "bytes_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingLimits:
    """How pinned memory is cut and shared."""

    chunk_bytes: int = 1 << 20
    """Bytes of one copy between the device and pinned memory, and of a tcp frame: a multiple of `WORD_BYTES`."""
    link_chunks: int = 8
    """Chunks for each link that writes."""
    stream_chunks: int = 4
    """Chunks for each connection that receives: it receives into one while the others are copied."""


STAGING_LIMITS: Final = StagingLimits()


class StagingFull(Exception):
    """No share is left: fewer peers, smaller shares, or more pinned memory (`bytes_max`)."""


class StagedRegion:
    """One node's region on a device, with its pinned memory. Control thread, but for `here`."""

    def __init__(
        self,
        *,
        driver: DeviceDriver,
        region: DeviceRegion,
        config: StagingConfig | None = None,
        limits: StagingLimits = STAGING_LIMITS,
    ) -> None:
        """Pins at once, and has the device copy a few bytes, so that nothing is compiled later. `region` is the
        caller's and outlives this.

        Raises InvalidField: `config.bytes_max` is too little for one link or connection; DeviceError.
        """
        self.limits = limits
        bytes_max = (config or StagingConfig()).bytes_max
        least = max(limits.link_chunks, limits.stream_chunks) * limits.chunk_bytes
        if least > bytes_max:
            raise InvalidField("staging.bytes_max", f"is {bytes_max:,}; one link or connection needs {least:,}")
        self.nbytes = region.nbytes
        """Of the region."""
        self.streams = driver.streams
        self.region = region
        self.chunks_left_behind = 0
        chunk_bytes = limits.chunk_bytes
        self._chunks = bytes_max // chunk_bytes
        self.pinned_bytes = self._chunks * chunk_bytes
        self.pinned = driver.pin(self.pinned_bytes)
        self.free = deque(range(0, self.pinned_bytes, chunk_bytes))
        """Where each chunk begins that is in no share."""
        try:
            self._try_out()
        except BaseException:
            self.pinned.close()
            raise

    @property
    def host_U8(self) -> np.ndarray:
        """All of the pinned memory."""
        return self.pinned.array_U8

    def here(self) -> DeviceEvent:
        """The point behind all that the calling thread's stream has queued. Any thread."""
        return self.streams.current().record()

    def share(self, chunks: int) -> StagingShare[Any]:
        """Chunks of the caller's own, until it gives them back. Raises StagingFull."""
        if len(self.free) < chunks:
            raise StagingFull(
                f"{len(self.free)} of {self._chunks} chunks of pinned memory are free, {chunks} are needed: "
                "raise staging.bytes_max"
            )
        return StagingShare(self, [self.free.popleft() for _ in range(chunks)])

    @property
    def used_bytes(self) -> int:
        """What links and connections have now."""
        return (self._chunks - len(self.free)) * self.limits.chunk_bytes

    def describe(self) -> dict[str, object]:
        """Gauges for people and metrics."""
        return {"staging_bytes": self.pinned_bytes, "staging_bytes_used": self.used_bytes}

    def close(self) -> None:
        """Release the pinned memory, unless a share was left behind: the device may still copy there. The others have
        been given back. Idempotent."""
        assert len(self.free) + self.chunks_left_behind == self._chunks, "links or connections still use it"
        if self.chunks_left_behind:
            log.error("pinned memory is left to the end of the process: the device failed with copies queued")
        else:
            self.pinned.close()

    def _try_out(self) -> None:
        side = self.streams.side()
        for nbytes in (WORD_BYTES, 1):  # copied by words, and byte by byte
            zero, length = np.zeros(1, np.int64), np.array([min(nbytes, self.nbytes)])
            ops = WriteOps(src=zero, dst=zero, nbytes=length)
            self.streams.copy(side, self.pinned.memory, self.region.memory, ops)
        wait_for(side.record())


class StagingShare(Generic[Tag]):
    """Chunks of one user, and its copies between them and the region, which end in the order in which they began.

    A chunk is named by where it begins. Copies are the user's own thread's; `take`, `give`, `wait_for` any thread's.
    """

    def __init__(self, of: StagedRegion, starts: list[int]) -> None:
        """Use `StagedRegion.share`."""
        self._of = of
        self._starts = starts
        self._pinned_memory, self._region_memory = of.pinned.memory, of.region.memory
        self._settling: DeviceEvent | None = None
        self._settled = True
        """The device has finished all that was queued."""
        self._side = of.streams.side()
        self._lock = threading.Lock()
        self._free = list(starts)
        self._flying: deque[tuple[DeviceEvent, Tag]] = deque()

    @property
    def has_room(self) -> bool:
        """`take` would find a chunk."""
        with self._lock:
            return bool(self._free)

    @property
    def flying(self) -> int:
        """Copies that `finished` has not returned yet."""
        with self._lock:
            return len(self._flying)

    def take(self) -> int | None:
        """A chunk that nobody uses; None: there is none now."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, start: int) -> None:
        """Neither the device nor the host uses this chunk any more."""
        with self._lock:
            assert start in self._starts and start not in self._free, start
            self._free.append(start)

    def to_host(self, start: int, src_S: np.ndarray, nbytes_S: np.ndarray, *, behind: DeviceEvent, tag: Tag) -> None:
        """Queue a copy of these segments of the region, one after the other, into a chunk, behind an event.

        The segments stay as they are until `finished` has returned the tag. Raises DeviceError.
        """
        self._side.wait(behind)
        ops = WriteOps(src=src_S, dst=places(start, nbytes_S), nbytes=nbytes_S)
        self._copy(self._pinned_memory, self._region_memory, ops, tag)

    def to_device(self, start: int, dst_S: np.ndarray, nbytes_S: np.ndarray, *, tag: Tag) -> None:
        """Queue a copy of what lies in a chunk, one segment after the other, into the region. Raises DeviceError."""
        ops = WriteOps(src=places(start, nbytes_S), dst=dst_S, nbytes=nbytes_S)
        self._copy(self._region_memory, self._pinned_memory, ops, tag)

    def finished(self) -> Tag | None:
        """The oldest copy, if the device has finished it; each is returned once. Raises DeviceError."""
        with self._lock:
            if not self._flying:
                return None
            done, tag = self._flying[0]
        if not done.done():
            return None
        with self._lock:
            self._flying.popleft()
        return tag

    def wait_for(self, which: Callable[[Tag], bool]) -> None:
        """Wait until the device has finished the copies, queued by now, for which this holds. Without a limit: there is
        no other evidence. Raises DeviceError: nobody knows whether one of these copies still runs."""
        with self._lock:
            events = [done for done, tag in self._flying if which(tag)]
        for done in events:
            wait_for(done)

    def settle(self) -> None:
        """Wait until the device has finished all that was queued, and forget it. The last call of the user's thread.
        Raises DeviceError: nothing is forgotten, and `try_settle` may be called."""
        while not self.try_settle():
            time.sleep(POLL_INTERVAL_S)

    def try_settle(self) -> bool:
        """`settle` without waiting, once the user's thread queues no more. False: call it again later."""
        if not self._settled:
            if self._settling is None:
                self._settling = self._side.record()
            if not self._settling.done():
                return False
            with self._lock:
                self._flying.clear()
            self._settled = True
        return True

    def give_back(self) -> None:
        """The chunks are free for others, once; the user's thread is over. If the device has failed with copies queued,
        it may still copy there: the chunks stay in use, and pinned, until the process ends. Control thread."""
        with contextlib.suppress(DeviceError):
            self.try_settle()
        if self._settled:
            self._pinned_memory = self._region_memory = None
            self._of.free.extend(self._starts)
        else:
            self._of.chunks_left_behind += len(self._starts)

    def _copy(self, dst: Any, src: Any, ops: WriteOps, tag: Tag) -> None:
        self._settled = False
        self._of.streams.copy(self._side, dst, src, ops)
        done = self._side.record()
        with self._lock:
            self._flying.append((done, tag))


def places(start: int, nbytes_S: np.ndarray) -> np.ndarray:
    """Where the segments lie in a chunk that begins at `start`."""
    places_S: np.ndarray = np.cumsum(nbytes_S, dtype=np.int64) - nbytes_S + start
    return places_S
