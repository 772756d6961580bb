"""The contract between the handoff and a transport. One writer side, one receiver side, the same for every transport.

Threads: `WriterLink.post` may be called from the engine thread and returns at once; everything else is called from the
node's control thread (its asyncio loop). Callbacks are delivered on the control thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from baton.ids import Epoch, GrantId, Pair


class TransportName(Enum):
    """Named best first: where both sides offer several, the first one that can work between them is used."""

    CUDA_IPC = "cuda_ipc"  # regions on GPUs of one machine
    SHM = "shm"
    RDMA = "rdma"
    UCX = "ucx"  # what UCX finds, through NIXL
    TCP = "tcp"


class RegionKind(Enum):
    """What memory a node's region lies in. Which transports serve it: `kvtransfer.negotiation.SERVED_BY`."""

    HOST = "host memory"
    DEVICE = "device memory"


class PairBeingFenced(Exception):
    """`ReceiverPort.expect` for an epoch whose right to write is being taken back: ask again once it has been."""


class ConnectError(Exception):
    """No link came to be; each transport has its own. `reason` is the receiver's, if it gave one."""

    def __init__(self, text: str, reason: Enum | None = None) -> None:
        super().__init__(text)
        self.reason = reason


class WriteRanges(Protocol):
    """The bytes of a receiver's region that one grant opens. Immutable; read from any thread."""

    def cover(self, dst_S: np.ndarray, nbytes_S: np.ndarray) -> bool:
        """True if every segment (`nbytes_S[i]` > 0 bytes from `dst_S[i]` >= 0 on, int64) lies wholly inside."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOps:
    """Copies from the writer's region to the receiver's: `nbytes[i]` bytes from `src[i]` to `dst[i]` (int64 arrays)."""

    src: np.ndarray
    dst: np.ndarray
    nbytes: np.ndarray

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum()) if len(self.nbytes) != 1 else int(self.nbytes[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The last thing a writer sends for a grant on a data channel: all its writes there have landed before."""

    grant: GrantId
    epoch: Epoch
    writes: int
    bytes_written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataEndpoint:
    """Where a receiver accepts data connections of a transport, and what a writer must show there.

    Travels over gRPC. `secret` proves the pair; `epoch` is the pair's epoch that the connection will carry.
    """

    transport: TransportName
    address: str
    secret: bytes
    epoch: Epoch


class TooManyPairs(Exception):
    """`expect` beyond the port's `pairs_max`: fence pairs that are gone, or raise the limit."""


class WriterLink(Protocol):
    """One writer's data connection to one receiver, within one epoch of the pair."""

    def post(self, grant: GrantId, ops: WriteOps) -> None:
        """Queue copies; returns at once. Completion arrives as `WriterEvents.writes_completed`.

        After `abandon(grant)` or `close` further posts for the grant complete without copying.
        """
        ...

    def seal(self, seal: Seal) -> None:
        """Send the seal. The caller has seen all completions of the grant."""
        ...

    def abandon(self, grant: GrantId) -> None:
        """Copy no more for this grant: queued ops complete uncopied, the one under way finishes and then completes."""
        ...

    def forget(self, grant: GrantId) -> None:
        """The caller promises to post nothing more for this grant: what `abandon` remembered may go."""
        ...

    @property
    def epoch(self) -> Epoch: ...

    @property
    def fenced(self) -> bool:
        """The receiver has ended this link by a fence: that tells nothing about how well the transport works."""
        ...

    async def close(self) -> None:
        """Stop the copying, complete what is queued uncopied, let go of the region or socket. Idempotent.

        Ends within the transport's named limits, whatever the receiver does.
        """
        ...


class WriterEvents(Protocol):
    """Called by a `WriterLink` on the control thread."""

    def writes_completed(self, grant: GrantId, writes: int, bytes_written: int, copied: bool) -> None:
        """The local transport has let go of the sources of one posted batch (I1). `copied` False: it was abandoned."""
        ...

    def writes_in_doubt(self, grant: GrantId) -> None:
        """The link ended with writes of this grant on their way: they complete next, uncopied, and may land as long as
        the receiver's end of the link is open, whatever has become of the grant. Only for transports that cannot know
        better: where the receiver looks at the grant before a byte lands (tcp), or the writer's own stores are over
        with their completion (shm, cuda_ipc), the writer's word is evidence and this is never called.
        """
        ...

    def link_lost(self, pair: Pair, reason: str) -> None:
        """The connection is gone (the receiver died, closed or fenced it). Queued ops still complete, uncopied."""
        ...


class ReceiverEvents(Protocol):
    """Called by a `ReceiverPort` on the control thread."""

    def seal_landed(self, pair: Pair, seal: Seal) -> None: ...

    def writer_gone(self, pair: Pair, epoch: Epoch, evidence: str) -> None:
        """Evidence that no connection of this pair up to and including `epoch` can write any more (I3)."""
        ...


class ReceiverPort(Protocol):
    """The receiving side of one transport for one region: accepts data connections of many writers."""

    @property
    def transport(self) -> TransportName: ...

    def expect(self, pair: Pair, epoch: Epoch) -> DataEndpoint:
        """Allow connections of this pair in this epoch (and no longer in an older one). Idempotent.

        Raises:
            PairBeingFenced: a fence that covers the epoch has not ended yet.
        """
        ...

    def allow(self, pair: Pair, epoch: Epoch, grant: GrantId, ranges: WriteRanges) -> None:
        """From now on bytes of this grant may land in `ranges`, on connections of this pair and epoch. Idempotent.

        A transport whose receiver takes no part in the writes (shm) does nothing here.
        """
        ...

    def forbid(self, grant: GrantId) -> bool:
        """When this returns no byte of the grant lands any more, where the receiver can refuse. Unknown ones are fine.

        It is never allowed again. Where the receiver takes no part in the writes this does nothing.

        False: bytes of the grant were handed to a device that has failed, and may still land. Then the writer's word
        is no evidence, and only a fence of the pair ends its right.
        """
        ...

    def fence(self, pair: Pair, epoch: Epoch) -> None:
        """Start taking the right to write back from all connections of the pair up to `epoch`.

        Ends in `ReceiverEvents.writer_gone`, at once if no such connection was ever made; for shm only when the writer
        process has closed with an acknowledgement or is proved dead, however long that takes; for tcp as soon as the
        receive threads of its connections have been joined, which end when a device is through with their copies.
        """
        ...

    def describe(self) -> dict[str, object]:
        """Counters and gauges for people and metrics."""
        ...

    async def close(self) -> None: ...
