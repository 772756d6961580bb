"""Blocks between memory and a file, many by one call: by `disk.c`, loaded at its first use, or by Python and NumPy.

A block's slot in the file is its header, then its data, both whole pages. The header has two sums of 64 bits, over the
data and over itself; both ways write and expect the same ones.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per block; R = one per record of one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from baton.log import get_log
from baton.native import load

log = get_log("native")

PAGE_BYTES: Final = 4096
"""What O_DIRECT asks for everywhere: of places in the file, of addresses, of lengths."""
SEGMENTS_MAX: Final = 1024
IN_PLACE_BYTES_MIN: Final = 32 << 10
"""Records shorter than this are copied through a bounce buffer: a drive takes longer over many pieces of memory than
the copy takes."""
HEADER_SUM: Final = slice(8, 16)
"""Where headers have the sums; disk.c has the same."""
DATA_SUM: Final = slice(16, 24)

UNIT_BYTES: Final = 1024
_LANES, _STRIPES = 8, 16
_WORD = (1 << 64) - 1
_PRIME_SCRAMBLE = np.uint64(0x9E3779B1)
_PRIME_LENGTH = 0x9E3779B185EBCA87
_PRIME_END = 0x165667919E3779F9

Results = npt.NDArray[np.int32]
"""For each block 0, or an errno; EBADMSG: what was read is not what was written."""
Sums = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


def pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def page_buffer(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that begin on a page; given back with the last array that looks into them.

    In huge pages where the kernel makes some: a drive is told of each piece of memory that is not beside the last one.
    """
    memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


class BlockShape:
    """How large a block is: its records, which lie scattered in memory, and its header. Immutable."""

    def __init__(self, record_nbytes: Sequence[int], header_nbytes: int) -> None:
        assert record_nbytes and min(record_nbytes) > 0 and header_nbytes == pages(header_nbytes) > 0
        self.record_nbytes_R: Offsets = np.array(record_nbytes, dtype=np.int64)
        self.block_nbytes = int(self.record_nbytes_R.sum())
        self.data_nbytes = pages(self.block_nbytes)
        self.header_nbytes = header_nbytes
        whole_pages = len(record_nbytes) < SEGMENTS_MAX and not (self.record_nbytes_R % PAGE_BYTES).any()
        self._may_be_in_place = whole_pages and min(record_nbytes) >= IN_PLACE_BYTES_MIN

    @property
    def slot_nbytes(self) -> int:
        return self.header_nbytes + self.data_nbytes

    def check(self, memory_U8: npt.NDArray[np.uint8], record_at_BR: Offsets) -> None:
        """Asserts that every record lies in the memory: anything else is a bug of ours."""
        assert memory_U8.itemsize == 1 and memory_U8.flags.c_contiguous
        assert record_at_BR.dtype == np.int64 and record_at_BR.flags.c_contiguous
        assert record_at_BR.shape[1:] == self.record_nbytes_R.shape, record_at_BR.shape
        assert (record_at_BR >= 0).all() and (record_at_BR + self.record_nbytes_R <= len(memory_U8)).all()

    def in_place(self, memory_U8: npt.NDArray[np.uint8], record_at_BR: Offsets) -> bool:
        """Whether these records are whole pages of memory, and long enough to need no bounce buffer."""
        return self._may_be_in_place and not ((record_at_BR + memory_U8.ctypes.data) % PAGE_BYTES).any()


class BlockIo(Protocol):
    """Each call blocks. May be called from any thread, several at once, each with its own bounce buffer: `data_nbytes`
    from `page_buffer`, used for nothing else."""

    name: str

    def write(
        self,
        fd: int,
        slot_at_B: Offsets,
        headers_U8: npt.NDArray[np.uint8],
        memory_U8: npt.NDArray[np.uint8],
        record_at_BR: Offsets,
        shape: BlockShape,
        bounce_U8: npt.NDArray[np.uint8],
    ) -> tuple[Results, Sums]:
        """Headers, which get their sums, and records into the slots; the sums of the data."""

    def read(
        self,
        fd: int,
        data_at_B: Offsets,
        memory_U8: npt.NDArray[np.uint8],
        record_at_BR: Offsets,
        shape: BlockShape,
        bounce_U8: npt.NDArray[np.uint8],
        sums_B: Sums,
    ) -> Results:
        """Data into the records. Those of a block with an error may have anything."""

    def headers(self, fd: int, at: int, stride: int, headers_U8: npt.NDArray[np.uint8], header_nbytes: int) -> Results:
        """As many headers as there is room for, `stride` apart in the file from `at` on."""


class NativeBlockIo:
    """The calls of disk.c, without the interpreter's lock."""

    name = "native"

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, int64, fd = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        write = ctypes.CFUNCTYPE(
            None, fd, pointer, int64, pointer, int64, pointer, pointer, pointer, int64, int64, pointer, pointer, pointer
        )
        read = ctypes.CFUNCTYPE(
            None, fd, pointer, int64, pointer, pointer, pointer, int64, int64, pointer, pointer, pointer
        )
        headers = ctypes.CFUNCTYPE(None, fd, int64, int64, int64, pointer, int64, pointer)
        total = ctypes.CFUNCTYPE(ctypes.c_uint64, pointer, int64, ctypes.c_int)
        self._write = write(("baton_disk_write", handle))
        self._read = read(("baton_disk_read", handle))
        self._headers = headers(("baton_disk_headers", handle))
        self._sum = total(("baton_disk_sum", handle))

    def write(
        self,
        fd: int,
        slot_at_B: Offsets,
        headers_U8: npt.NDArray[np.uint8],
        memory_U8: npt.NDArray[np.uint8],
        record_at_BR: Offsets,
        shape: BlockShape,
        bounce_U8: npt.NDArray[np.uint8],
    ) -> tuple[Results, Sums]:
        shape.check(memory_U8, record_at_BR)
        count = len(slot_at_B)
        assert len(record_at_BR) == count and headers_U8.nbytes == count * shape.header_nbytes
        results_B, sums_B = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.uint64)
        self._write(
            fd,
            slot_at_B.ctypes.data,
            count,
            headers_U8.ctypes.data,
            shape.header_nbytes,
            memory_U8.ctypes.data,
            record_at_BR.ctypes.data,
            shape.record_nbytes_R.ctypes.data,
            len(shape.record_nbytes_R),
            shape.data_nbytes,
            None if shape.in_place(memory_U8, record_at_BR) else bounce_U8.ctypes.data,
            sums_B.ctypes.data,
            results_B.ctypes.data,
        )
        return -results_B, sums_B

    def read(
        self,
        fd: int,
        data_at_B: Offsets,
        memory_U8: npt.NDArray[np.uint8],
        record_at_BR: Offsets,
        shape: BlockShape,
        bounce_U8: npt.NDArray[np.uint8],
        sums_B: Sums,
    ) -> Results:
        shape.check(memory_U8, record_at_BR)
        count = len(data_at_B)
        assert len(record_at_BR) == len(sums_B) == count and memory_U8.flags.writeable
        results_B = np.empty(count, dtype=np.int32)
        self._read(
            fd,
            data_at_B.ctypes.data,
            count,
            memory_U8.ctypes.data,
            record_at_BR.ctypes.data,
            shape.record_nbytes_R.ctypes.data,
            len(shape.record_nbytes_R),
            shape.data_nbytes,
            None if shape.in_place(memory_U8, record_at_BR) else bounce_U8.ctypes.data,
            sums_B.ctypes.data,
            results_B.ctypes.data,
        )
        return -results_B

    def headers(self, fd: int, at: int, stride: int, headers_U8: npt.NDArray[np.uint8], header_nbytes: int) -> Results:
        results_B = np.empty(len(headers_U8) // header_nbytes, dtype=np.int32)
        self._headers(fd, at, stride, len(results_B), headers_U8.ctypes.data, header_nbytes, results_B.ctypes.data)
        return -results_B

    def sum64(self, data_U8: npt.NDArray[np.uint8], *, plain: bool = False) -> int:
        """`plain`: without the instructions that only some machines have."""
        assert len(data_U8) % UNIT_BYTES == 0 and data_U8.flags.c_contiguous
        return int(self._sum(data_U8.ctypes.data, len(data_U8), plain))


class PlainBlockIo:
    """The same in Python, block by block."""

    name = "Python: no native library"

    def write(
        self,
        fd: int,
        slot_at_B: Offsets,
        headers_U8: npt.NDArray[np.uint8],
        memory_U8: npt.NDArray[np.uint8],
        record_at_BR: Offsets,
        shape: BlockShape,
        bounce_U8: npt.NDArray[np.uint8],
    ) -> tuple[Results, Sums]:
        shape.check(memory_U8, record_at_BR)
        results_B = np.zeros(len(slot_at_B), dtype=np.int32)
        sums_B = np.zeros(len(slot_at_B), dtype=np.uint64)
        nbytes = shape.record_nbytes_R.tolist()
        for i, (slot_at, header_U8) in enumerate(
            zip(slot_at_B.tolist(), headers_U8.reshape(-1, shape.header_nbytes), strict=True)
        ):
            parts = [memory_U8[at : at + n] for at, n in zip(record_at_BR[i].tolist(), nbytes, strict=True)]
            np.concatenate(parts, out=bounce_U8[: shape.block_nbytes])
            sums_B[i] = total = sum64(bounce_U8)
            header_U8[DATA_SUM] = np.frombuffer(total.to_bytes(8, "little"), dtype=np.uint8)
            header_U8[HEADER_SUM] = 0
            header_U8[HEADER_SUM] = np.frombuffer(sum64(header_U8).to_bytes(8, "little"), dtype=np.uint8)
            try:
                _write_all(fd, [header_U8.data, bounce_U8.data], slot_at)
            except OSError as error:
                results_B[i] = error.errno or errno.EIO
        return results_B, sums_B

    def read(
        self,
        fd: int,
        data_at_B: Offsets,
        memory_U8: npt.NDArray[np.uint8],
        record_at_BR: Offsets,
        shape: BlockShape,
        bounce_U8: npt.NDArray[np.uint8],
        sums_B: Sums,
    ) -> Results:
        shape.check(memory_U8, record_at_BR)
        results_B = np.zeros(len(data_at_B), dtype=np.int32)
        nbytes = shape.record_nbytes_R.tolist()
        for i, data_at in enumerate(data_at_B.tolist()):
            results_B[i] = _read_all(fd, bounce_U8, data_at)
            if results_B[i]:
                continue
            if sum64(bounce_U8) != int(sums_B[i]):
                results_B[i] = errno.EBADMSG
                continue
            done = 0
            for at, n in zip(record_at_BR[i].tolist(), nbytes, strict=True):
                memory_U8[at : at + n] = bounce_U8[done : done + n]
                done += n
        return results_B

    def headers(self, fd: int, at: int, stride: int, headers_U8: npt.NDArray[np.uint8], header_nbytes: int) -> Results:
        results_B = np.zeros(len(headers_U8) // header_nbytes, dtype=np.int32)
        page_U8 = page_buffer(header_nbytes)
        for i, header_U8 in enumerate(headers_U8.reshape(-1, header_nbytes)):
            results_B[i] = _read_all(fd, page_U8, at + i * stride)
            header_U8[:] = page_U8
            written = int.from_bytes(page_U8[HEADER_SUM].tobytes(), "little")
            page_U8[HEADER_SUM] = 0
            if not results_B[i] and sum64(page_U8) != written:
                results_B[i] = errno.EBADMSG
        return results_B


def _write_all(fd: int, views: list[memoryview], at: int) -> None:
    """Raises OSError."""
    while views:
        done = os.pwritev(fd, views, at)
        at += done
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views:
            views[0] = views[0][done:]


def _read_all(fd: int, target_U8: npt.NDArray[np.uint8], at: int) -> int:
    """0 or an errno; ENODATA: the file ends before."""
    view = target_U8.data
    try:
        while view:
            done = os.preadv(fd, [view], at)
            if not done:
                return errno.ENODATA
            view, at = view[done:], at + done
    except OSError as error:
        return error.errno or errno.EIO
    return 0


@cache
def _keys() -> npt.NDArray[np.uint64]:
    keys, seed = [], 0
    for _ in range(_STRIPES + _LANES):  # splitmix64
        seed = (seed + 0x9E3779B97F4A7C15) & _WORD
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
        keys.append(z ^ (z >> 31))
    return np.array(keys, dtype=np.uint64)


def sum64(data_U8: npt.NDArray[np.uint8]) -> int:
    """Of whole KiB: the long-input loop of XXH3 (64 bits) with keys of its own; what disk.c computes, more slowly."""
    assert len(data_U8) % UNIT_BYTES == 0, len(data_U8)
    keys = _keys()
    words = data_U8.view("<u8").reshape(-1, _STRIPES, _LANES)
    mixed = words ^ np.stack([keys[s : s + _LANES] for s in range(_STRIPES)])
    products = (mixed & np.uint64(0xFFFFFFFF)) * (mixed >> np.uint64(32))
    swapped = words[:, :, [1, 0, 3, 2, 5, 4, 7, 6]]
    added = (products + swapped).sum(axis=1, dtype=np.uint64)
    lanes, last = keys[:_LANES].copy(), keys[_STRIPES:]
    for each in added:
        lanes += each
        lanes = (lanes ^ (lanes >> np.uint64(47)) ^ last) * _PRIME_SCRAMBLE
    end = len(data_U8) * _PRIME_LENGTH
    ends = [int(lane) for lane in lanes ^ last]
    for one, other in zip(ends[::2], ends[1::2], strict=True):
        product = one * other
        end += (product & _WORD) ^ (product >> 64)
    end &= _WORD
    end = ((end ^ (end >> 37)) * _PRIME_END) & _WORD
    return end ^ (end >> 32)


@cache
def native_block_io() -> NativeBlockIo | None:
    """None: there is no library, which is logged once. The first call may take a second."""
    library = load(Path(__file__).with_name("disk.c"))
    if library.handle is None:
        log.warning("the disk tier is slower than it could be: no native library", reason=library.status)
        return None
    return NativeBlockIo(library.handle)


def block_io() -> BlockIo:
    return native_block_io() or PlainBlockIo()
