"""Sampled checksums of records: which are in the sample, their CRCs, and what a receiver does about a difference.

CRC-32 by zlib finds every burst of up to 32 wrong bits, and releases the interpreter lock while it reads.

Shape suffixes: B blocks of one post   R records
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from batonpb import transfer_pb2

from baton.errors import BatonError, Reason, bad_field
from baton.ids import BlockId, GrantId
from baton.log import get_log
from baton.tasks import call_loop
from cachestore.layout import Int64Array, Layout
from kvtransfer.device.region import DeviceRegion
from kvtransfer.protocol.receiver import RecordsChecked, ReportCorrupt
from kvtransfer.status import WriterPlace
from kvtransfer.transport import WriteOps

log = get_log("receiver")

CHECKSUM_RECORDS_MAX: Final = 65_536
"""Checksums in one Commit (ten bytes each at most)."""
SAMPLE_MARGIN: Final = 0.95
"""Of that limit, what a sample aims at where the fraction would give more: its size is only expected, not certain."""
CORRUPT_NAMED_MAX: Final = 8
"""Corrupt records that an error or a log line names; all are counted."""
INLINE_BYTES_MAX: Final = 64 << 10
"""So much is read on the control thread at once: a hop to another thread and back would take as long."""

Uint32Array = npt.NDArray[np.uint32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordChecksums:
    """The sample of one handoff, as its writer read it from the source. `blocks_R` are ids in the receiver's region."""

    layers_R: Uint32Array
    blocks_R: Uint32Array
    crcs_R: Uint32Array

    def __len__(self) -> int:
        return len(self.crcs_R)

    def problem(self, layout: Layout, blocks: Collection[BlockId]) -> str | None:
        """Why these cannot be checksums of records in `blocks`; None when they can."""
        if not len(self.layers_R) == len(self.blocks_R) == len(self.crcs_R):
            return f"{len(self.layers_R)} layers, {len(self.blocks_R)} blocks, {len(self.crcs_R)} checksums"
        if len(self) > CHECKSUM_RECORDS_MAX:
            return f"{len(self)} checksums, at most {CHECKSUM_RECORDS_MAX} are taken"
        if len(self) and int(self.layers_R.max()) >= layout.num_layers:
            return f"layer {int(self.layers_R.max())} of {layout.num_layers}"
        strange = set(self.blocks_R.tolist()).difference(blocks)
        return f"block {min(strange)}, which the grant does not have" if strange else None

    def offsets(self, layout: Layout, num_blocks: int) -> Int64Array:
        """Where these records begin in the receiver's region -> [R]."""
        rows_R = np.array([row for _, row in layout.places], dtype=np.int64)[self.layers_R]
        return (rows_R * num_blocks + self.blocks_R) * layout.page_bytes

    def nbytes(self, layout: Layout) -> Int64Array:
        """Their lengths -> [R]."""
        return np.array(layout.bytes_by_layer, dtype=np.int64)[self.layers_R]


def sample_fraction(fraction: float, records: int) -> float:
    """The fraction to draw of so many records: `fraction`, or less where that would be too many for one Commit."""
    most = CHECKSUM_RECORDS_MAX if records <= CHECKSUM_RECORDS_MAX else CHECKSUM_RECORDS_MAX * SAMPLE_MARGIN
    return min(fraction, most / max(records, 1))


def in_sample(grant: GrantId, layer: int, blocks_B: Int64Array, fraction: float) -> BoolArray:
    """Which of these records (by their ids at the receiver) are in the sample -> [B].

    It depends on grant, layer and block alone, so each grant has its own sample.
    The mixing is splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    seed = np.uint64(int.from_bytes(grant[:8].ljust(8, b"\0"), "little") ^ int.from_bytes(grant[8:16], "little"))
    x_B = ((np.uint64(layer) << np.uint64(32)) | blocks_B.astype(np.uint64)) ^ seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x_B = (x_B ^ (x_B >> np.uint64(shift))) * np.uint64(factor)
    x_B ^= x_B >> np.uint64(31)
    drawn_B: BoolArray = (x_B >> np.uint64(11)).astype(np.float64) < fraction * 2.0**53
    return drawn_B


def crcs(region: memoryview | DeviceRegion, offsets_R: Int64Array, nbytes_R: Int64Array) -> Uint32Array:
    """CRC-32 of each of these records -> [R]. Reads the region, from a device by way of the host; from any thread."""
    found_R = np.empty(len(offsets_R), dtype=np.uint32)
    for row, (start, nbytes) in enumerate(zip(offsets_R.tolist(), nbytes_R.tolist(), strict=True)):
        end = start + nbytes
        found_R[row] = zlib.crc32(region.read(start, end) if isinstance(region, DeviceRegion) else region[start:end])
    return found_R


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptRecords:
    """What a receiver found: never empty. `named` are the first, as layer/block, at most `CORRUPT_NAMED_MAX`."""

    checked: int
    count: int
    named: str


UNREADABLE: Final = CorruptRecords(checked=0, count=0, named="")
"""Records that could not be read to be compared."""


def differing(sent: RecordChecksums, found_R: Uint32Array) -> CorruptRecords | None:
    """The records whose bytes at the receiver are not what the writer read at the source; None if there are none."""
    at_R = np.flatnonzero(sent.crcs_R != found_R)
    if not at_R.size:
        return None
    first = [f"{sent.layers_R[at]}/{sent.blocks_R[at]}" for at in at_R[:CORRUPT_NAMED_MAX]]
    return CorruptRecords(checked=len(sent), count=int(at_R.size), named=" ".join(first))


class ChecksumThread:
    """One thread that reads one region, started with the first work for it. `submit` may be called on any thread."""

    def __init__(self, region: Any, *, name: str) -> None:
        """`region` is a buffer, or a region on a device, and outlives this object's `close`."""
        self.region: Any = region if isinstance(region, DeviceRegion) else memoryview(region)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"checksum-{name}")

    def submit(self, offsets_R: Int64Array, nbytes_R: Int64Array) -> Future[Uint32Array]:
        """The CRCs of these records, later. In the order of the calls."""
        return self._thread.submit(crcs, self.region, offsets_R, nbytes_R)

    def close(self) -> None:
        """Returns when nothing reads the region any more. Idempotent."""
        self._thread.shutdown(wait=True)
        self.region = None


class SourceSample:
    """The sample of one handoff at its writer. Its source blocks stay held until `settled` has called back.

    `take` is called where records are posted, never on two threads at once; the rest on the control thread, after it.
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
        """These records of one layer have just been posted, whole: their bytes are final. Returns at once."""
        drawn_B = np.flatnonzero(in_sample(self._grant, layer, dst_blocks_B, self._fraction))[: self._left]
        if not drawn_B.size:
            return
        self._left -= drawn_B.size
        self._layers.append(np.full(drawn_B.shape, layer, dtype=np.uint32))
        self._blocks.append(dst_blocks_B[drawn_B].astype(np.uint32))
        self._jobs.append(self._thread.submit(ops.src[drawn_B], ops.nbytes[drawn_B]))

    @property
    def records(self) -> int:
        """In the sample so far."""
        return CHECKSUM_RECORDS_MAX - self._left

    async def checksums(self) -> RecordChecksums:
        """All of them, once they are read. Raises what reading them raised."""
        if self._jobs and not self._jobs[-1].done():  # the thread takes them in order
            # A caller that is cancelled must not cancel the reading: see `settled`.
            await asyncio.shield(asyncio.wrap_future(self._jobs[-1]))
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


def checksums_from_proto(request: transfer_pb2.CommitRequest) -> RecordChecksums:
    """Not checked yet: `RecordChecks.keep` does that."""
    return RecordChecksums(
        layers_R=np.array(request.checksum_layers, dtype=np.uint32),
        blocks_R=np.array(request.checksum_blocks, dtype=np.uint32),
        crcs_R=np.array(request.checksums, dtype=np.uint32),
    )


class RecordChecks:
    """A receiver's comparison of sampled records with what their writers read at the source. Control thread only."""

    def __init__(self, thread: ChecksumThread, layout: Layout, *, num_blocks: int) -> None:
        """Takes the thread over: `close` closes it."""
        self.records = 0
        """Compared so far, for grants that were known to the end."""
        self.corrupt: Counter[tuple[str, str]] = Counter()
        """Refused handoffs by (writer's name, transport)."""
        self._thread = thread
        self._layout = layout
        self._num_blocks = num_blocks
        self._sent: dict[GrantId, RecordChecksums] = {}
        self._found: dict[GrantId, CorruptRecords] = {}

    def keep(self, grant: GrantId, sent: RecordChecksums, blocks: Collection[BlockId]) -> None:
        """Keep what the Commit says of an uncommitted grant with these blocks until it is compared. Ignores a repeat.

        Raises BatonError BAD_FIELD for checksums that cannot be of this grant.
        """
        problem = sent.problem(self._layout, blocks)
        if problem is not None:
            raise bad_field("checksums", f"These are no checksums of this grant's records: {problem}.")
        self._sent.setdefault(grant, sent)

    def forget(self, grant: GrantId) -> None:
        """Nobody asks about it any more."""
        self._sent.pop(grant, None)
        self._found.pop(grant, None)

    async def run(self, grant: GrantId, then: Callable[[RecordsChecked], object]) -> None:
        """Compare, then call `then`. Nothing is called, or kept, for a grant that is forgotten before or meanwhile.

        Records that cannot be read are not intact.
        """
        sent = self._sent.get(grant)
        if sent is None:
            return
        offsets_R, nbytes_R = sent.offsets(self._layout, self._num_blocks), sent.nbytes(self._layout)
        try:
            if nbytes_R.sum() <= INLINE_BYTES_MAX:
                found_R = crcs(self._thread.region, offsets_R, nbytes_R)
            else:
                found_R = await asyncio.wrap_future(self._thread.submit(offsets_R, nbytes_R))
            corrupt = differing(sent, found_R)
        except Exception as error:
            log.error("comparing records failed", grant=grant.hex(), exc_info=error)
            corrupt = UNREADABLE
        if self._sent.pop(grant, None) is None:
            return
        if corrupt is not UNREADABLE:
            self.records += len(sent)
        if corrupt is not None:
            self._found[grant] = corrupt
        then(RecordsChecked(grant=grant, intact=corrupt is None))

    def report(self, instruction: ReportCorrupt, writer: WriterPlace) -> None:
        """Loud: memory, a network card or a bus between the two is not to be trusted."""
        found = self._found[instruction.grant]
        if found is UNREADABLE:
            return  # logged already
        self.corrupt[writer.name, writer.transport.value] += 1
        log.error(
            "CORRUPT RECORDS",
            request=instruction.key.request,
            attempt=instruction.key.attempt,
            writer=writer.name,
            writer_host=writer.host,
            host=socket.gethostname(),
            pair=f"{instruction.pair.writer:x}>{instruction.pair.receiver:x}",
            transport=writer.transport.value,
            corrupt=found.count,
            checked=found.checked,
            layer_block=found.named,
        )

    def error(self, grant: GrantId) -> BatonError:
        """What the Commit is answered with, and each repeat of it."""
        found = self._found[grant]
        if found is UNREADABLE:
            text = "The sampled records could not be read here to be compared. Nothing of this handoff is used."
            return BatonError(Reason.HANDOFF_FAILED, text)
        return BatonError(
            Reason.DATA_CORRUPT,
            f"{found.count} of {found.checked} sampled records are not here as they were read at the source: memory, a "
            "network card or a bus of one of the two machines is failing. Nothing of this handoff is used.",
            metadata={"layer_block": found.named, "host": socket.gethostname(), "corrupt": str(found.count)},
        )

    def close(self) -> None:
        """Returns when nothing reads the region any more."""
        self._thread.close()
