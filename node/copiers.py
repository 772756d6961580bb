"""Copies of whole blocks (their records of every layer of their group) between a region and the host memory below it.

The caller makes sure that no step touches the blocks. The device copies; for a region in host memory
`kvtransfer.device.host_driver` does, on this copier's thread, outside of the interpreter's lock.

Shape suffix: B = one entry for each record, of every layer of each block's group.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from baton.errors import BatonError, Reason
from baton.ids import BlockId
from baton.log import get_log
from baton.runtime import Progress
from baton.tasks import call_loop
from cachestore.host_blocks import HostBlockId
from cachestore.layout import Layout
from cachestore.tier_books import TierSlot
from kvtransfer.device.driver import POLL_INTERVAL_S, DeviceEvent, DeviceStreams, PinnedMemory
from kvtransfer.device.host_driver import HostStreams
from kvtransfer.device.region import DeviceRegion
from kvtransfer.region import Region
from kvtransfer.transport import DeviceError, WriteOps, check_ops
from node.regions import PoolRegion, clear_frames_of, on_thread, open_host_memory

log = get_log("spill")

COPIES_IN_FLIGHT_MAX: Final = 2
"""On the device at a time: one that it carries out, and the next. What waits here can still be dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Blocks of one layer group to copy, pairwise: device to host when `out`, else host to device."""

    out: bool
    group: int = 0
    device: tuple[BlockId, ...]
    host: tuple[HostBlockId, ...]

    def __post_init__(self) -> None:
        assert len(self.device) == len(self.host) > 0, self


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlaces:
    """Where blocks lie on either side."""

    layout: Layout
    device_blocks: int
    host_blocks: int

    @property
    def host_nbytes(self) -> int:
        """Host memory is laid out as the region is."""
        return self.layout.region_bytes(self.host_blocks)

    @property
    def describe(self) -> str:
        return f"{self.host_blocks:,} blocks"

    @property
    def rehearsal(self) -> BlockCopy:
        """A copy out that may be made before there is anything to copy."""
        return BlockCopy(out=True, device=(BlockId(0),), host=(HostBlockId(0),))

    def ops(self, copy: BlockCopy) -> WriteOps:
        """The copy of each block's record of every layer of the group."""
        layout = self.layout
        device_B = layout.block_offsets(copy.group, copy.device, self.device_blocks)
        host_B = layout.block_offsets(copy.group, copy.host, self.host_blocks)
        src_B, dst_B = (device_B, host_B) if copy.out else (host_B, device_B)
        nbytes_B = np.full(len(src_B), layout.record_bytes_of(copy.group), dtype=np.int64)
        return WriteOps(src=src_B, dst=dst_B, nbytes=nbytes_B)


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionCopy:
    """Whole positions to copy: device to host when `out`, else host to device."""

    out: bool
    device: tuple[BlockId, ...]
    """A piece of a block table: of each position one block in each group."""
    host: tuple[TierSlot, ...]
    """One for each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionPlaces:
    """Where positions lie on either side. In host memory the records of one lie together, in the order of layers."""

    layout: Layout
    device_blocks: int
    slots: int
    slot_bytes: int
    """How far slots lie from each other."""

    @property
    def host_nbytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def describe(self) -> str:
        return f"{self.slots:,} blocks of {self.slot_bytes:,} bytes"

    @property
    def rehearsal(self) -> PositionCopy:
        """A copy out that may be made before there is anything to copy."""
        device = tuple(BlockId(0) for _ in self.layout.groups)
        return PositionCopy(out=True, device=device, host=(TierSlot(0),))

    def ops(self, copy: PositionCopy) -> WriteOps:
        """The copy of every layer's record of each position."""
        layout, groups = self.layout, self.layout.num_groups
        assert len(copy.device) == groups * len(copy.host) > 0, copy
        slots_P = np.asarray(copy.host, dtype=np.int64) * self.slot_bytes
        nbytes_L = np.asarray(layout.bytes_by_layer, dtype=np.int64)
        starts_L = np.cumsum(nbytes_L) - nbytes_L
        device_B, host_B, nbytes_B = [], [], []
        for group, part in enumerate(layout.groups):
            layers = np.asarray(part.layers, dtype=np.int64)
            device_B.append(layout.block_offsets(group, copy.device[group::groups], self.device_blocks))
            host_B.append((starts_L[layers][:, None] + slots_P).ravel())
            nbytes_B.append(np.repeat(nbytes_L[layers], len(copy.host)))
        src_B, dst_B = (device_B, host_B) if copy.out else (host_B, device_B)
        return WriteOps(src=np.concatenate(src_B), dst=np.concatenate(dst_B), nbytes=np.concatenate(nbytes_B))


Places = BlockPlaces | PositionPlaces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    copy: Any
    """As the places take it."""
    ready: DeviceEvent
    """What is to be copied has been computed, and what is to be written has been read."""
    report: Callable[[BaseException | None], None]
    """On any thread."""


class BlockCopier:
    """Carries copies out in the order of `start`, on a thread of its own. The rest is for the control thread only."""

    def __init__(
        self,
        *,
        streams: DeviceStreams,
        places: Places,
        device: DeviceRegion | Region,
        host: PinnedMemory | Region,
        name: str,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Starts the thread, called after `name`. Both memories are the caller's, and outlive this until `close`."""
        self._streams = streams
        self._places = places
        self._device: Any = device.memory
        self._host: Any = host.memory
        self._nbytes = (device.nbytes, host.array_U8.nbytes)
        self._poll_interval_s = poll_interval_s
        self._side = streams.side()
        self._wake = threading.Condition()
        self._waiting: deque[_Asked] = deque()
        self._flying: deque[tuple[DeviceEvent, _Asked]] = deque()
        """The thread's own."""
        self._closed = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def rehearse(self) -> None:
        """Copy the first block out and back, so that kernels are compiled now. Blocks; before the first `start`. Raises
        DeviceError."""
        out: Any = self._places.rehearsal
        for copy in (out, replace(out, out=False)):
            self._wait_for(self._queue(copy, self._streams.current().record()))

    def start(self, copy: BlockCopy | PositionCopy, done: Callable[[BaseException | None], None]) -> None:
        """Returns at once. The queue is bounded by the blocks of the tier: each is in one copy at most.

        `done` is called later, on the control thread, with None or what went wrong: a DeviceError when the device has
        failed, or refuses a copy. Every other copy's `done` that has not been called gets the same error: a device that
        fails at one copy is not trusted with another, and the node ends (`Spill.before_step`).
        """
        loop = asyncio.get_running_loop()

        def report(error: BaseException | None) -> None:
            if not self._closed:
                done(error)

        try:
            ready = self._streams.current().record()
        except DeviceError as error:
            loop.call_soon(report, error)
            return
        asked = _Asked(copy=copy, ready=ready, report=lambda error: call_loop(loop, report, error))
        with self._wake:
            broken = self._broken
            if broken is None:
                self._waiting.append(asked)
                self._wake.notify()
        if broken is not None:
            asked.report(broken)

    def close(self) -> None:
        """Wait for what is on the device, without a limit: it writes to both memories, and nothing else ends that.

        No `done` is called any more, and the memories may be given back. Idempotent.
        """
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()
        self._device = self._host = None

    # On the copier's thread.

    def _work(self) -> None:
        try:
            while (asked := self._next()) is not None or self._flying:
                if asked is None:
                    self._land()
                    continue
                ended = self._queue(asked.copy, asked.ready)
                with self._wake:
                    self._waiting.popleft()
                self._flying.append((ended, asked))
        except Exception as error:
            log.exception("blocks cannot be copied to host memory or back any more")
            with contextlib.suppress(
                Exception
            ):  # others may be on the device still; one that has failed writes no more
                self._wait_for(self._side.record())
            self._fail(error)

    def _next(self) -> _Asked | None:
        """What is to be queued on the device now, if there is anything; it stays in `_waiting`. Waits for work.

        None with nothing in flight: the copier is closed.
        """
        with self._wake:
            while not (self._waiting or self._flying or self._closed):
                self._wake.wait()
            if self._closed:
                self._waiting.clear()
            return self._waiting[0] if self._waiting and len(self._flying) < COPIES_IN_FLIGHT_MAX else None

    def _land(self) -> None:
        """Report the oldest copy on the device if it has ended; else wait for a moment."""
        ended, asked = self._flying[0]
        if ended.done():
            self._flying.popleft()
            asked.report(None)
            return
        with self._wake:
            self._wake.wait(self._poll_interval_s)

    def _queue(self, copy: Any, ready: DeviceEvent) -> DeviceEvent:
        """-> the point behind it. Raises DeviceError; WriteOutOfBounds for a bug of ours."""
        src, dst = (self._device, self._host) if copy.out else (self._host, self._device)
        src_nbytes, dst_nbytes = self._nbytes if copy.out else self._nbytes[::-1]
        ops = self._places.ops(copy)
        check_ops(ops, src_nbytes, dst_nbytes)
        self._side.wait(ready)
        self._streams.copy(self._side, dst, src, ops)
        return self._side.record()

    def _wait_for(self, event: DeviceEvent) -> None:
        while not event.done():
            time.sleep(self._poll_interval_s)

    def _fail(self, error: Exception) -> None:
        """Report the error to all whose copy has not been reported, also of those on the device: nobody can go on."""
        clear_frames_of(error)
        with self._wake:
            self._broken = error
            unreported = [*(asked for _, asked in self._flying), *self._waiting]
            self._flying.clear()
            self._waiting.clear()
        for asked in unreported:
            asked.report(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBelow:
    """Host memory below a region, and who moves blocks there and back."""

    region: Region
    pinned: bool
    """For the device, which the region above is on."""
    copier: BlockCopier
    opened: ExitStack

    def describe(self) -> str:
        """For people: how large it is."""
        return f"{self.region.nbytes:,} bytes of {'pinned' if self.pinned else 'host'} memory"

    def close(self) -> None:
        """Waits for the copies under way. Comes before the end of the region above."""
        self.opened.close()


async def open_memory_below(
    above: PoolRegion, places: Places, *, name: str, field: str, progress: Progress
) -> MemoryBelow:
    """Prefaulted, and pinned where `above` is on a device; with progress. `name` is that of memory and thread.

    Raises BatonError BAD_CONFIG for `field`: there is too little memory, or it cannot be pinned.
    """
    region = await open_host_memory(places.host_nbytes, f"baton-{name}", field, places.describe, progress)
    pinned = isinstance(above, DeviceRegion)
    with ExitStack() as stack:
        stack.callback(region.close)
        if isinstance(above, DeviceRegion):
            progress("pinning", 0, region.nbytes)
            try:
                copier = await on_thread(_pin, above, region, places, name, field, stack)
            except BaseException as error:
                clear_frames_of(error)
                raise
            progress("pinning", region.nbytes, region.nbytes)
        else:
            copier = BlockCopier(streams=HostStreams(), places=places, device=above, host=region, name=name)
            stack.callback(copier.close)
        opened = stack.pop_all()
    return MemoryBelow(region=region, pinned=pinned, copier=copier, opened=opened)


def _pin(above: DeviceRegion, region: Region, places: Places, name: str, field: str, opened: ExitStack) -> BlockCopier:
    """Blocks. `opened` closes what it makes, also where nobody waits for it any more."""
    try:
        pinned = above.driver.register(region.array_U8)
        opened.callback(pinned.close)
        copier = BlockCopier(streams=above.driver.streams, places=places, device=above, host=pinned, name=name)
        opened.callback(copier.close)
        copier.rehearse()
    except DeviceError as error:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"Cannot pin {region.nbytes:,} bytes of host memory to copy blocks to: {error}. Set a smaller {field}.",
            field=field,
        ) from error
    return copier
