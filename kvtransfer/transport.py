"""The contract between the handoff and a transport: what is written, where, and by whom. The same for every transport.

Shape suffixes: B blocks of one handoff step, or of a grant, rising; or write operations
S segments of a write   R those that run over several pages

Threads: `WriterLink.post` may be called from the engine thread and returns at once; everything else is called from the
node's control thread (its asyncio loop). Callbacks are delivered on the control thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

import numpy as np

from baton.ids import BlockId, Epoch, GrantId, Pair
from cachestore.layout import Int64Array, Layout

LOOPED_SEGMENTS_MAX: Final = 32
"""Up to this many are checked one by one: that costs less than the array operations do for any number."""


class TransportName(Enum):
    """Named best first: where both sides offer several, the first one that can work between them is used."""

    CUDA_IPC = "cuda_ipc"  # regions on GPUs of one machine
    SHM = "shm"
    RDMA = "rdma"
    UCX = "ucx"  # what UCX finds, through NIXL
    TCP = "tcp"


class RegionKind(Enum):
    """What memory a node's region lies in. Which transports serve it: `kvtransfer.link.SERVED_BY`."""

    HOST = "host memory"
    DEVICE = "device memory"


class PairBeingFenced(Exception):
    """`ReceiverPort.expect` for an epoch whose right to write is being taken back: ask again once it has been."""


class ConnectError(Exception):
    """No link came to be; each transport has its own. `reason` is the receiver's, if it gave one."""

    def __init__(self, text: str, reason: Enum | None = None) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOps:
    """Copies from the writer's region to the receiver's: `nbytes[i]` bytes from `src[i]` to `dst[i]` (int64 arrays)."""

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum()) if len(self.nbytes) != 1 else int(self.nbytes[0])


class DeviceError(Exception):
    """The device that holds a region, or its driver, has refused; the text says what was asked and what to do."""


class WriteOutOfBounds(Exception):
    """A write reaches outside the source region, the destination or its grant. Nothing of its batch is copied."""


def check_granted(dst_blocks_B: np.ndarray, granted: Sequence[BlockId]) -> None:
    """Make sure that every block is one of the grant's. Where the receiver takes no part in the writes, only this does.
    Raises WriteOutOfBounds."""
    if not set(granted).issuperset(asked := dst_blocks_B.tolist()):
        outside = next(block for block in asked if block not in granted)
        raise WriteOutOfBounds(f"block {outside} is not among the {len(granted)} blocks of the grant")


def check_ops(ops: WriteOps, src_nbytes: int, dst_nbytes: int) -> None:
    """Make sure that every op stays inside both regions. Raises WriteOutOfBounds, naming the first that does not."""
    src_B, dst_B, nbytes_B = ops.src, ops.dst, ops.nbytes
    for array in (src_B, dst_B, nbytes_B):
        assert array.dtype == np.int64, array.dtype
        assert array.shape == src_B.shape == (len(src_B),), (array.shape, src_B.shape)
    if len(src_B) == 1:
        # What follows costs as much as sending a single record takes.
        src, dst, nbytes = int(src_B[0]), int(dst_B[0]), int(nbytes_B[0])
        if nbytes >= 0 and 0 <= src <= src_nbytes - nbytes and 0 <= dst <= dst_nbytes - nbytes:
            return
    # Compared so that no sum can overflow.
    bad_B = (nbytes_B < 0) | (nbytes_B > min(src_nbytes, dst_nbytes))
    bad_B |= (src_B < 0) | (src_B > src_nbytes - nbytes_B) | (dst_B < 0) | (dst_B > dst_nbytes - nbytes_B)
    if bad_B.any():
        i = int(bad_B.argmax())
        raise WriteOutOfBounds(
            f"write {i} of {len(src_B)}: {nbytes_B[i]} bytes from {src_B[i]} of {src_nbytes} "
            f"to {dst_B[i]} of {dst_nbytes}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupPlan:
    """One group's blocks. Offsets are those in the region's first row."""

    dst_blocks_B: Int64Array
    src_B: Int64Array
    dst_B: Int64Array
    nbytes_B: Int64Array


class RecordPlan:
    """All records of some positions, layer by layer. Both regions have the same layout. Immutable."""

    def __init__(
        self,
        layout: Layout,
        src_blocks_B: Int64Array,
        dst_blocks_B: Int64Array,
        *,
        src_num_blocks: int,
        dst_num_blocks: int,
    ) -> None:
        """The blocks are listed position after position, as in a block table (cachestore/layout.py)."""
        groups = layout.num_groups
        assert src_blocks_B.shape == dst_blocks_B.shape, (src_blocks_B.shape, dst_blocks_B.shape)
        assert len(src_blocks_B) % groups == 0, (len(src_blocks_B), groups)
        # As unsigned numbers, negative ones are large.
        assert (src_blocks_B.astype(np.uint64) < src_num_blocks).all(), (src_blocks_B, src_num_blocks)
        assert (dst_blocks_B.astype(np.uint64) < dst_num_blocks).all(), (dst_blocks_B, dst_num_blocks)
        self._layout = layout
        self._src_row_bytes = src_num_blocks * layout.page_bytes
        self._dst_row_bytes = dst_num_blocks * layout.page_bytes
        self.writes_per_layer = len(src_blocks_B) // groups
        """One for each position."""
        self._groups = [
            self._of_group(group, src_blocks_B[group::groups], dst_blocks_B[group::groups]) for group in range(groups)
        ]

    def _of_group(self, group: int, src_blocks_B: Int64Array, dst_blocks_B: Int64Array) -> _GroupPlan:
        page_bytes = self._layout.page_bytes
        return _GroupPlan(
            dst_blocks_B=dst_blocks_B,
            src_B=src_blocks_B.astype(np.int64) * page_bytes,
            dst_B=dst_blocks_B.astype(np.int64) * page_bytes,
            nbytes_B=np.full(src_blocks_B.shape, self._layout.record_bytes_of(group), dtype=np.int64),
        )

    @property
    def num_layers(self) -> int:
        return self._layout.num_layers

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return self.writes_per_layer * self._layout.position_bytes

    def layer_nbytes(self, layer: int) -> int:
        """What `of_layer` writes."""
        return self.writes_per_layer * self._layout.bytes_by_layer[layer]

    def dst_blocks(self, layer: int) -> Int64Array:
        """The receiver's blocks that have this layer's records -> [B]."""
        return self._groups[self._layout.places[layer][0]].dst_blocks_B

    def of_layer(self, layer: int) -> WriteOps:
        """One operation for each position: its whole record of this layer."""
        assert layer >= 0, layer
        group, row = self._layout.places[layer]
        plan = self._groups[group]
        return WriteOps(
            src=plan.src_B + row * self._src_row_bytes,
            dst=plan.dst_B + row * self._dst_row_bytes,
            nbytes=plan.nbytes_B,
        )

    def of_layers(self, first: int, end: int) -> WriteOps:
        """The same of several layers, one after another."""
        if end == first + 1:
            return self.of_layer(first)
        layers = [self.of_layer(layer) for layer in range(first, end)]
        return WriteOps(
            src=np.concatenate([ops.src for ops in layers]),
            dst=np.concatenate([ops.dst for ops in layers]),
            nbytes=np.concatenate([ops.nbytes for ops in layers]),
        )


class WriteRanges:
    """The bytes of a receiver's region that one grant opens: all pages of its blocks. Immutable."""

    def __init__(self, layout: Layout, num_blocks: int, blocks: Iterable[BlockId]) -> None:
        """`num_blocks` is the region's; `blocks` are distinct."""
        self._page_bytes = layout.page_bytes
        self._num_pages = layout.num_rows * num_blocks
        self._num_blocks = num_blocks
        named = sorted(blocks)
        assert not named or (named[0] >= 0 and named[-1] < num_blocks), num_blocks
        assert len(set(named)) == len(named), "a block was named twice"
        self._blocks = named
        self._blocks_B = np.array(named, np.int64)

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        """True if every segment (`nbytes_S[i]` > 0 bytes from `dst_S[i]` >= 0 on, int64) lies wholly inside. A segment
        may run through neighbouring pages, if all of them are open."""
        total_bytes = self._num_pages * self._page_bytes
        if len(dst_S) <= LOOPED_SEGMENTS_MAX:
            return all(map(self._covers, dst_S.tolist(), nbytes_S.tolist()))
        if ((nbytes_S <= 0) | (nbytes_S > total_bytes) | (dst_S < 0) | (dst_S > total_bytes - nbytes_S)).any():
            return False
        first_S, last_S = dst_S // self._page_bytes, (dst_S + nbytes_S - 1) // self._page_bytes
        block_S = first_S % self._num_blocks
        at_S = np.searchsorted(self._blocks_B, block_S)
        if len(self._blocks_B) == 0 or (self._blocks_B.take(at_S, mode="clip") != block_S).any():
            return False
        run_S = last_S > first_S
        end_R, first_R = last_S[run_S] + 1, first_S[run_S]
        return bool((self._open_below(end_R) - self._open_below(first_R) == end_R - first_R).all())

    def _covers(self, dst: int, nbytes: int) -> bool:
        if nbytes <= 0 or dst < 0 or dst + nbytes > self._num_pages * self._page_bytes:
            return False
        first, end = dst // self._page_bytes, (dst + nbytes - 1) // self._page_bytes + 1
        return self._open_below_one(end) - self._open_below_one(first) == end - first

    def _open_below_one(self, page: int) -> int:
        row, block = divmod(page, self._num_blocks)
        return row * len(self._blocks) + bisect.bisect_left(self._blocks, block)

    def _open_below(self, page_S: np.ndarray) -> np.ndarray:
        """How many open pages have a smaller index."""
        row_S, block_S = page_S // self._num_blocks, page_S % self._num_blocks
        counts: np.ndarray = row_S * len(self._blocks_B) + np.searchsorted(self._blocks_B, block_S)
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The last thing a writer sends for a grant on a data channel: all its writes there have landed before."""

    grant: GrantId
    epoch: Epoch
    writes: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEndpoint:
    """Where a receiver accepts data connections of a transport. `secret`, shown there, proves the pair; `epoch` is the
    pair's that the connection will carry."""

    transport: TransportName
    address: str
    secret: bytes
    epoch: Epoch


class TooManyPairs(Exception):
    """`expect` beyond the port's `pairs_max`: fence pairs that are gone, or raise the limit."""


class WriterLink(Protocol):
    """One writer's data connection to one receiver, within one epoch of the pair."""

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue copies; returns at once. Completion arrives as `WriterEvents.writes_completed`. After `abandon(grant)`
        or `close` they complete without copying."""

    def seal(self, seal: Seal) -> None:
        """Send the seal. The caller has seen all completions of the grant."""

    def abandon(self, grant: GrantId) -> None:
        """Copy no more for this grant: queued ops complete uncopied, the one under way finishes and then completes."""

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this grant: what `abandon` remembered may go."""

    @property
    def epoch(self) -> Epoch: ...

    @property
    def fenced(self) -> bool:
        """The receiver has ended this link by a fence: it says nothing about how well the transport works."""

    async def close(self) -> None:
        """Stop the copying, complete what is queued uncopied, let go of the region or socket, within the transport's
        named limits. Idempotent."""


class WriterEvents(Protocol):
    """Called by a `WriterLink` on the control thread."""

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        """The local transport has let go of the sources of one posted batch (I1). `copied` False: it was abandoned."""

    def writes_in_doubt(self, grant: GrantId) -> None:
        """The link ended with writes of this grant on their way: they complete next, uncopied, and may land as long as
        the receiver's end of the link is open, whatever has become of the grant. Only for transports that cannot know
        better: where the receiver looks at the grant before a byte lands (tcp), or the writer's own stores are over
        with their completion (shm, cuda_ipc), the writer's release is evidence and this is never called.
        """

    def link_lost(self, pair: Pair, reason: str) -> None:
        """The connection is gone (the receiver died, closed or fenced it). Queued ops still complete, uncopied."""


class ReceiverEvents(Protocol):
    """Called by a `ReceiverPort` on the control thread."""

    def seal_landed(self, pair: Pair, seal: Seal) -> None: ...

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        """Evidence that no connection of this pair up to and including `epoch` can write any more (I3)."""


class ReceiverPort(Protocol):
    """The receiving side of one transport for one region: accepts data connections of many writers."""

    @property
    def transport(self) -> TransportName: ...

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        """Allow connections of this pair in this epoch (and no longer in an older one). Idempotent.

        Raises PairBeingFenced: a fence that covers the epoch has not ended yet; TooManyPairs.
        """

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """From now on bytes of this grant may land in `ranges`, on connections of this pair and epoch. Idempotent. A
        transport whose receiver takes no part in the writes (shm) does nothing here, nor in `forbid`."""

    def forbid(self, grant: GrantId) -> bool:
        """When this returns no byte of the grant lands any more, where the receiver can refuse. Unknown ones are fine.

        False: bytes of the grant were handed to a device that has failed, and may still land. Then the writer's word
        is no evidence, and only a fence of the pair ends its right.
        """

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """Start taking the right to write back from all connections of the pair up to `epoch`.

        Ends in `ReceiverEvents.writer_gone`, at once if no such connection was ever made; for shm only when the writer
        process has closed with an acknowledgement or is proved dead, however long that takes; for tcp as soon as the
        receive threads of its connections have been joined, which end when a device is through with their copies.
        """

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""

    async def close(self) -> None: ...
