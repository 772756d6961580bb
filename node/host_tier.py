"""Host memory below the device pool: whole blocks (their records of every layer), copied out and back.

One allocation of a configured size, made at the start; `host_blocks.HostBlocks` is its ledger. Copies run one after the
other beside the engine's steps: whoever asks for one has made sure that no step touches its blocks. Where the region is
host memory too, a thread copies, outside of the interpreter's lock (`ThreadCopier`); a region on a device has
`stream_copier.StreamCopier`.

Shape suffix: B = one entry for each record, of every layer of each block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from baton.config import fixed
from baton.errors import InvalidField, check_positive
from baton.ids import BlockId
from cachestore.host_blocks import HostBlockId
from cachestore.layout import Layout
from kvtransfer.transport import WriteOps
from kvtransfer.transports.shm_copy import copy_records

HOST_BLOCKS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillConfig:
    """Overcommit of the device pool, and the host memory behind it."""

    host_blocks: int = field(
        default=0,
        metadata={
            "help": "blocks of host memory that sequences of a decode node may be swapped out to; 0: no overcommit",
            "when": "Answers are shorter than their limits, and more of them should run than fit in the worst case.",
        },
    )
    headroom_blocks: int = field(
        default=4,
        metadata={
            "help": "blocks that each running sequence should find free after one is swapped out, and before "
            "one comes back",
            "when": "Sequences are swapped out and in again all the time (raise it).",
        },
    )
    pinned_bytes_max: int = field(
        default=64 << 30,
        metadata={
            "help": "bytes that host_blocks may take where the region is on a GPU: all of them are pinned, "
            "for no other use",
            "when": "host_blocks is refused although the machine has the memory.",
        },
    )
    copy_blocks_max: int = fixed(64)
    """Blocks of one copy; a longer one is cut."""

    def __post_init__(self) -> None:
        check_positive(self, "headroom_blocks", "copy_blocks_max", "pinned_bytes_max")
        if not 0 <= self.host_blocks <= HOST_BLOCKS_MAX:
            raise InvalidField("host_blocks", f"is {self.host_blocks}; must be 0 (off) to {HOST_BLOCKS_MAX}")
        if self.host_blocks and self.host_blocks <= self.reserve_blocks:
            raise InvalidField(
                "host_blocks",
                f"is {self.host_blocks}; must be 0 (off) or more than headroom_blocks ({self.headroom_blocks}), which "
                "are kept as a reserve to swap through",
            )

    @property
    def reserve_blocks(self) -> int:
        """Not admitted against: without it a full device and full host memory could not trade places."""
        return self.headroom_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Blocks to copy, pairwise: device to host when `out`, else host to device."""

    out: bool
    device: tuple[BlockId, ...]
    host: tuple[HostBlockId, ...]

    def __post_init__(self) -> None:
        assert len(self.device) == len(self.host) > 0, self


class BlockCopier(Protocol):
    """Carries copies out, in the order of `start`."""

    def start(self, copy: BlockCopy, done: Callable[[BaseException | None], None]) -> None:
        """Returns at once. `done` is called later, on the control thread, with what went wrong or None."""
        ...


class Memory(Protocol):
    """A region: `kvtransfer.region.Region`, or an array in tests."""

    @property
    def array_U8(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlaces:
    """Where blocks lie on either side."""

    layout: Layout
    device_blocks: int
    host_blocks: int

    def ops(self, copy: BlockCopy) -> WriteOps:
        """The copy of every layer's record of each block."""
        device_B = self._offsets(copy.device, self.device_blocks)
        host_B = self._offsets(copy.host, self.host_blocks)
        src_B, dst_B = (device_B, host_B) if copy.out else (host_B, device_B)
        return WriteOps(src=src_B, dst=dst_B, nbytes=np.full(len(src_B), self.layout.record_bytes, dtype=np.int64))

    def _offsets(self, blocks: Sequence[int], num_blocks: int) -> np.ndarray:
        layers_L1 = np.arange(self.layout.num_layers, dtype=np.int64)[:, None]
        records_LN = layers_L1 * num_blocks + np.asarray(blocks, dtype=np.int64)
        return records_LN.ravel() * self.layout.record_bytes


class RegionCopier:
    """Copies between two regions of records in host memory, on the calling thread."""

    def __init__(self, places: BlockPlaces, *, device: Memory, host: Memory) -> None:
        """The regions stay the caller's, who closes them after the last copy."""
        self._places = places
        self._device, self._host = device, host

    def run(self, copy: BlockCopy) -> None:
        """Blocks until done. No view of a region is kept."""
        src, dst = (self._device, self._host) if copy.out else (self._host, self._device)
        copy_records(dst.array_U8, src.array_U8, self._places.ops(copy))


class ThreadCopier:
    """Runs a `RegionCopier` on a thread of its own, first in, first out. Control thread only."""

    def __init__(self, copier: RegionCopier, *, name: str) -> None:
        self._copier = copier
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"spill-{name}")
        self._closed = False

    def start(self, copy: BlockCopy, done: Callable[[BaseException | None], None]) -> None:
        """See `BlockCopier.start`. The queue is bounded by the blocks of the tier: each is in one copy at most."""
        loop = asyncio.get_running_loop()

        def tell(error: BaseException | None) -> None:
            if not self._closed:
                done(error)

        def ended(future: Future[None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            try:
                loop.call_soon_threadsafe(tell, error)
            except RuntimeError:
                # At the end of the process the loop may be closed first; then there is nobody left to tell.
                if not loop.is_closed():
                    raise

        self._thread.submit(self._copier.run, copy).add_done_callback(ended)

    def close(self) -> None:
        """Wait for the copy under way; no `done` is called any more, and the regions may be closed."""
        self._closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)
