"""Where checksums are read: a thread beside engine and control thread, and the sample of one handoff on its way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from baton.ids import GrantId
from baton.tasks import call_loop
from kvtransfer.checksums import (
    CHECKSUM_RECORDS_MAX,
    RecordChecksums,
    Uint32Array,
    crcs,
    in_sample,
    sample_fraction,
    segments,
)
from kvtransfer.device.region import DeviceRegion
from kvtransfer.plan import Int64Array
from kvtransfer.transport import WriteOps

INLINE_BYTES_MAX = 64 << 10
"""So much is read on the control thread at once: a hop to another thread and back would take as long."""


class _DeviceBytes:
    """A region on a device, as `crcs` reads it: each part is copied to the host."""

    def __init__(self, region: DeviceRegion) -> None:
        self._region = region

    def __getitem__(self, part: slice) -> bytes:
        return self._region.read(part.start, part.stop)


class ChecksumThread:
    """One thread that reads one region, started with the first work for it. `submit` may be called on any thread.

    What waits for it is bounded by what its callers hold: posted records of live handoffs, Commits of open grants.
    """

    def __init__(self, region: Any, *, name: str) -> None:
        """`region` is a buffer, or a region on a device, and outlives this object's `close`."""
        on_device = isinstance(region, DeviceRegion)
        self._region: memoryview | _DeviceBytes | None = _DeviceBytes(region) if on_device else memoryview(region)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"checksum-{name}")

    def submit(self, offsets_RS: Int64Array, nbytes_S: Int64Array) -> Future[Uint32Array]:
        """The CRCs of these records, later. In the order of the calls."""
        assert self._region is not None, "closed"
        return self._thread.submit(crcs, self._region, offsets_RS, nbytes_S)

    def now(self, offsets_RS: Int64Array, nbytes_S: Int64Array) -> Uint32Array:
        """The same on the caller's thread."""
        assert self._region is not None, "closed"
        return crcs(self._region, offsets_RS, nbytes_S)

    def close(self) -> None:
        """Returns when nothing reads the region any more. Idempotent."""
        self._thread.shutdown(wait=True)
        self._region = None


class SourceSample:
    """The sample of one handoff at its writer. Its source blocks stay held until `settled` has called back.

    `take` is called where records are posted (engine thread, or control thread before the engine has the request: never
    both at once); everything else on the control thread, after the last `take`.
    """

    def __init__(self, thread: ChecksumThread, grant: GrantId, *, fraction: float, records: int) -> None:
        """`records` is how many the whole handoff has, at most."""
        self._thread = thread
        self._grant = grant
        self._fraction = sample_fraction(fraction, records)
        self._left = CHECKSUM_RECORDS_MAX
        self._layers: list[Uint32Array] = []
        self._blocks: list[Uint32Array] = []
        self._jobs: list[Future[Uint32Array]] = []

    def take(self, layer: int, dst_blocks_B: Int64Array, ops: WriteOps) -> None:
        """These records of one layer have just been posted: their bytes are final. Returns at once."""
        drawn_B = np.flatnonzero(in_sample(self._grant, layer, dst_blocks_B, self._fraction))[: self._left]
        if not drawn_B.size:
            return
        self._left -= drawn_B.size
        src_BS, nbytes_BS = segments(ops.src, len(dst_blocks_B)), segments(ops.nbytes, len(dst_blocks_B))
        self._layers.append(np.full(drawn_B.shape, layer, dtype=np.uint32))
        self._blocks.append(dst_blocks_B[drawn_B].astype(np.uint32))
        self._jobs.append(self._thread.submit(src_BS[drawn_B], nbytes_BS[0]))

    @property
    def records(self) -> int:
        """In the sample so far."""
        return CHECKSUM_RECORDS_MAX - self._left

    async def checksums(self) -> RecordChecksums:
        """All of them, once they are read."""
        for job in self._jobs:
            if not job.done():
                await asyncio.wait([asyncio.wrap_future(job)])
        parts = [job.result() for job in self._jobs]
        return RecordChecksums(layers_R=_joined(self._layers), blocks_R=_joined(self._blocks), crcs_R=_joined(parts))

    def settled(self, loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
        """Call `then`, on the loop's thread, when no source block is read any more: at once where that is so."""
        if not self._jobs or self._jobs[-1].done():  # the thread takes them in order
            then()
        else:
            self._jobs[-1].add_done_callback(lambda _job: call_loop(loop, then))


def _joined(parts: list[Uint32Array]) -> Uint32Array:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)
