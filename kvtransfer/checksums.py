"""Sampled checksums of records: which records of a handoff are in the sample, their CRCs, and what differs. Pure.

The checksum is CRC-32 by zlib: it finds every burst of up to 32 wrong bits, and lets go of the interpreter lock while
it reads. A record is read as its written segments, one after the other, in the order of its write operations.

Shape suffixes: B blocks of one post   R records   S segments of one record   W write operations
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.ids import BlockId, GrantId
from cachestore.layout import Layout
from kvtransfer.plan import Int64Array

CHECKSUM_RECORDS_MAX = 65_536
"""Checksums in one Commit (ten bytes each at most)."""
SAMPLE_MARGIN = 0.95
"""Of that limit, what a sample aims at where the fraction would give more: its size is only expected, not certain."""
CORRUPT_TOLD_MAX = 8
"""Corrupt records that an error or a log line names; all are counted."""

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
        """Where these records lie in the receiver's region -> [R, 1]: whole records are of one segment."""
        offsets_R = (self.layers_R.astype(np.int64) * num_blocks + self.blocks_R) * layout.record_bytes
        return offsets_R[:, None]


def sample_fraction(fraction: float, records: int) -> float:
    """The fraction to draw of so many records: `fraction`, or less where that would be too many for one Commit."""
    most = CHECKSUM_RECORDS_MAX if records <= CHECKSUM_RECORDS_MAX else CHECKSUM_RECORDS_MAX * SAMPLE_MARGIN
    return min(fraction, most / max(records, 1))


def in_sample(grant: GrantId, layer: int, blocks_B: Int64Array, fraction: float) -> BoolArray:
    """Which of these records (by their ids at the receiver) are in the sample -> [B].

    By grant, layer and block alone: whoever knows the grant id knows the sample, and another grant has another one.
    The mixing is splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    seed = np.uint64(int.from_bytes(grant[:8].ljust(8, b"\0"), "little") ^ int.from_bytes(grant[8:16], "little"))
    x_B = ((np.uint64(layer) << np.uint64(32)) | blocks_B.astype(np.uint64)) ^ seed
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x_B = (x_B ^ (x_B >> np.uint64(shift))) * np.uint64(factor)
    x_B ^= x_B >> np.uint64(31)
    drawn_B: BoolArray = (x_B >> np.uint64(11)).astype(np.float64) < fraction * 2.0**53
    return drawn_B


def segments(offsets_W: Int64Array, records: int) -> Int64Array:
    """The write operations of `records` blocks (`plan`: segment by segment, block by block) as [R, S]."""
    assert records > 0 and offsets_W.size % records == 0, (offsets_W.shape, records)
    return offsets_W.reshape(-1, records).T


class Readable(Protocol):
    """Bytes that may lie anywhere, read part by part."""

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


def crcs(region: Readable, offsets_RS: Int64Array, nbytes_S: Int64Array) -> Uint32Array:
    """CRC-32 of each record -> [R]. Reads the region; from any thread."""
    lengths = [int(nbytes) for nbytes in nbytes_S]
    found = np.empty(len(offsets_RS), dtype=np.uint32)
    for row, starts in enumerate(offsets_RS.tolist()):
        crc = 0
        for start, nbytes in zip(starts, lengths, strict=True):
            crc = zlib.crc32(region[start : start + nbytes], crc)
        found[row] = crc
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptRecords:
    """What a receiver found: never empty. `records` are the first (layer, block), at most `CORRUPT_TOLD_MAX`."""

    checked: int
    count: int
    records: tuple[tuple[int, BlockId], ...]

    def told(self) -> str:
        return " ".join(f"{layer}/{block}" for layer, block in self.records)


def differing(sent: RecordChecksums, found_R: Uint32Array) -> CorruptRecords | None:
    """The records whose bytes at the receiver are not what the writer read at the source; None if there are none."""
    at_R = np.flatnonzero(sent.crcs_R != found_R)
    if not at_R.size:
        return None
    first = at_R[:CORRUPT_TOLD_MAX]
    pairs = zip(sent.layers_R[first].tolist(), sent.blocks_R[first].tolist(), strict=True)
    return CorruptRecords(
        checked=len(sent), count=int(at_R.size), records=tuple((layer, BlockId(block)) for layer, block in pairs)
    )
