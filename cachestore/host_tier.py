"""Host memory below the device pool: whole blocks (their records of every layer), copied out and back.

One allocation of a configured size, made at the start. `HostBlocks` is its ledger: every block of it is free, in a copy
that is under way, or filled; the sum is the tier. Copies run one after the other on a thread of their own, outside of
the interpreter's lock, beside the engine's steps: whoever asks for one has made sure that no step touches its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Protocol

import numpy as np

from baton.errors import InvalidField, check_positive
from baton.ids import BlockId
from kvtransfer.layout import Layout
from kvtransfer.ledger import ConservationError
from kvtransfer.transport import WriteOps
from kvtransfer.transports.shm_copy import copy_records

HostBlockId = NewType("HostBlockId", int)

HOST_BLOCKS_MAX = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillConfig:
    """Overcommit of the device pool, and the host memory behind it."""

    host_blocks: int = field(
        default=0, metadata={"help": "blocks of host memory that running sequences may spill to; 0: no overcommit"}
    )
    headroom_blocks: int = field(
        default=4,
        metadata={"help": "blocks that each running sequence should find free after a spill, and before a return"},
    )
    copy_blocks_max: int = field(default=64, metadata={"help": "blocks of one copy; a longer one is cut up"})

    def __post_init__(self) -> None:
        check_positive(self, "headroom_blocks", "copy_blocks_max")
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


class _Place(Enum):
    FREE = "free"
    COPYING = "copying"
    FILLED = "filled"


class HostBlocks:
    """Which blocks of the tier are in use. Pure; owned by the node's control thread; asserts on misuse."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._places = [_Place.FREE] * num_blocks
        self._free = [HostBlockId(b) for b in range(num_blocks - 1, -1, -1)]
        self._filled = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def filled(self) -> int:
        """Blocks whose content is nowhere else."""
        return self._filled

    @property
    def copying(self) -> int:
        """Blocks of copies under way: their content is, or will be, on the device as well."""
        return self.num_blocks - self._filled - len(self._free)

    def begin_out(self, count: int) -> list[HostBlockId]:
        """Free blocks to be copied to."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._places[block] = _Place.COPYING
        return blocks

    def fill(self, block: HostBlockId) -> None:
        """The copy out has ended, and the block on the device is given up."""
        assert self._places[block] is _Place.COPYING, (block, self._places[block])
        self._places[block] = _Place.FILLED
        self._filled += 1

    def begin_back(self, block: HostBlockId) -> None:
        """A filled block is being copied back."""
        assert self._places[block] is _Place.FILLED, (block, self._places[block])
        self._places[block] = _Place.COPYING
        self._filled -= 1

    def release(self, block: HostBlockId) -> None:
        """Its content is not needed here any more; no copy touches it."""
        assert self._places[block] is not _Place.FREE, block
        self._filled -= self._places[block] is _Place.FILLED
        self._places[block] = _Place.FREE
        self._free.append(block)

    def check(self) -> None:
        """Recount. Raises ConservationError."""
        counts = [sum(each is place for each in self._places) for place in _Place]
        books = [len(self._free), self.copying, self._filled]
        if counts != books or len(set(self._free)) != len(self._free):
            raise ConservationError(f"host memory: the books say {books} free, copying, filled, the recount {counts}")


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


class RegionCopier:
    """Copies between two regions of records, on the calling thread."""

    def __init__(self, *, layout: Layout, device: Memory, device_blocks: int, host: Memory, host_blocks: int) -> None:
        """The regions stay the caller's, who closes them after the last copy."""
        self._layout = layout
        self._device, self._device_blocks = device, device_blocks
        self._host, self._host_blocks = host, host_blocks

    def run(self, copy: BlockCopy) -> None:
        """Blocks until done. No view of a region is kept."""
        device_B = self._offsets(copy.device, self._device_blocks)
        host_B = self._offsets(copy.host, self._host_blocks)
        src_B, dst_B = (device_B, host_B) if copy.out else (host_B, device_B)
        ops = WriteOps(src=src_B, dst=dst_B, nbytes=np.full(len(src_B), self._layout.record_bytes, dtype=np.int64))
        src, dst = (self._device, self._host) if copy.out else (self._host, self._device)
        copy_records(dst.array_U8, src.array_U8, ops)

    def _offsets(self, blocks: Sequence[int], num_blocks: int) -> np.ndarray:
        """Byte offset of every layer's record of each block."""
        layers_L1 = np.arange(self._layout.num_layers, dtype=np.int64)[:, None]
        records_LN = layers_L1 * num_blocks + np.asarray(blocks, dtype=np.int64)
        return records_LN.ravel() * self._layout.record_bytes


class ThreadCopier:
    """Runs a `RegionCopier` on a thread of its own, first in, first out. Control thread only."""

    def __init__(self, copier: RegionCopier, *, name: str) -> None:
        self._copier = copier
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"spill-{name}")

    def start(self, copy: BlockCopy, done: Callable[[BaseException | None], None]) -> None:
        """See `BlockCopier.start`. The queue is bounded by the blocks of the tier: each is in one copy at most."""
        loop = asyncio.get_running_loop()

        def ended(future: Future[None]) -> None:
            error = future.exception()
            try:
                loop.call_soon_threadsafe(done, error)
            except RuntimeError:
                # At the end of the process the loop may be closed first; then there is nobody left to tell.
                if not loop.is_closed():
                    raise

        self._thread.submit(self._copier.run, copy).add_done_callback(ended)

    def close(self) -> None:
        """Wait for the copies under way; the regions may be closed afterwards."""
        self._thread.shutdown(wait=True, cancel_futures=True)
