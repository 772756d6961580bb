"""What a batch is cut into to travel over a tcp link.

Shape suffixes: W = write operations of a batch; S = segments of its frames; S2 = (destination, length) of each; F =
frames.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvtransfer.transport import Seal, WriteOps

SHARED_BYTES_MIN = 1 << 20
"""A batch of more is shared between the streams: no frame of less is cut for that."""
SHARES_OF_A_STREAM = 1.25
"""Frames are cut so that at least so many for each stream are left, for the streams to end at about the same time."""


@dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """`nbytes` of payload. `table_S2` has (destination, length) of each segment, as it travels; all arrays are
    contiguous."""

    src_S: np.ndarray
    nbytes_S: np.ndarray
    table_S2: np.ndarray
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealToSend:
    seal: Seal
    streams_mask: int


def merge_runs(ops: WriteOps) -> WriteOps:
    """The same copies with neighbours joined where both source and destination run on; empty ones left out."""
    if len(ops.src) == 1 and ops.nbytes[0] > 0:
        return ops
    some_W = ops.nbytes > 0
    src_W, dst_W, nbytes_W = ops.src[some_W], ops.dst[some_W], ops.nbytes[some_W]
    if len(src_W) == 0:
        return WriteOps(src=src_W, dst=dst_W, nbytes=nbytes_W)
    runs_on = (src_W[1:] == src_W[:-1] + nbytes_W[:-1]) & (dst_W[1:] == dst_W[:-1] + nbytes_W[:-1])
    starts = np.flatnonzero(np.concatenate(([True], ~runs_on)))
    return WriteOps(src=src_W[starts], dst=dst_W[starts], nbytes=np.add.reduceat(nbytes_W, starts))


def frame_starts(total_bytes: int, bytes_max: int, streams: int) -> list[int]:
    """At which byte of a batch each frame begins: large ones first, smaller ones towards the end.

    After the guided self-scheduling of loops (Polychronopoulos and Kuck, 1987).
    """
    starts, at = [], 0
    shared_bytes_min = min(SHARED_BYTES_MIN, bytes_max)
    while at < total_bytes:
        starts.append(at)
        at += min(bytes_max, max(shared_bytes_min, int((total_bytes - at) / (SHARES_OF_A_STREAM * streams))))
    return starts


def cut_frames(ops: WriteOps, bytes_max: int, segments_max: int, streams: int = 1) -> Iterator[Frame]:
    """All copies of a batch, in frames of at most `bytes_max` bytes and `segments_max` segments; long ones split."""
    merged = merge_runs(ops)
    if len(merged.src) == 0:
        return
    if len(merged.src) == 1 and merged.nbytes[0] <= min(bytes_max, SHARED_BYTES_MIN):
        # What follows costs as much as sending a single record takes.
        table_S2 = np.array([[merged.dst[0], merged.nbytes[0]]], dtype="<i8")
        nbytes = int(merged.nbytes[0])
        yield Frame(src_S=merged.src, nbytes_S=merged.nbytes, table_S2=table_S2, nbytes=nbytes)
        return
    ends_W = np.cumsum(merged.nbytes)
    total_bytes = int(ends_W[-1])
    starts_F = np.array(frame_starts(total_bytes, bytes_max, streams), np.int64)
    # Segments that run across the border of two frames are split there.
    begins_W = ends_W - merged.nbytes
    whole_F = np.searchsorted(ends_W, starts_F, side="right")
    splits = starts_F > begins_W[whole_F]
    whole_X, at_X = whole_F[splits], starts_F[splits]
    within_X = at_X - begins_W[whole_X]
    at_S = np.insert(begins_W, whole_X + 1, at_X)
    src_S = np.insert(merged.src, whole_X + 1, merged.src[whole_X] + within_X)
    dst_S = np.insert(merged.dst, whole_X + 1, merged.dst[whole_X] + within_X)
    nbytes_S = np.diff(at_S, append=total_bytes)
    table_S2 = np.stack([dst_S, nbytes_S], axis=1).astype("<i8")
    borders = [*np.searchsorted(at_S, starts_F).tolist(), len(at_S)]
    for first, end in itertools.pairwise(borders):
        for start in range(first, end, segments_max):
            part = slice(start, min(start + segments_max, end))
            yield Frame(
                src_S=src_S[part],
                nbytes_S=nbytes_S[part],
                table_S2=table_S2[part],
                nbytes=int(nbytes_S[part].sum()),
            )
