"""Blocks between memory and a file, many by one call: by `disk.c`, loaded at its first use, or by Python and NumPy.

A block's slot in the file is its header, then its data, both whole pages. The header has two sums of 64 bits, over the
data and over itself; both ways write and expect the same ones.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from baton.log import get_log
from baton.native import load

log = get_log("native")

PAGE_BYTES: Final = 4096
"""What O_DIRECT asks for everywhere: of places in the file, of addresses, of lengths."""
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
"""For each block 0, or an errno; EBADMSG: what was read is not what was written; ECANCELED: it was not begun."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Blocks in memory, to be moved by one call."""

    memory_U8: npt.NDArray[np.uint8]
    at_B: Offsets
    """Where in the memory each begins."""
    nbytes: int
    """Of each."""
    bounce_U8: npt.NDArray[np.uint8]
    """From `page_buffer`, of `nbytes` in whole pages, used for blocks of one size by one call at a time."""
    stop_1: npt.NDArray[np.int32]
    """Once it is not 0, no further block is begun."""

    def __post_init__(self) -> None:
        """Asserts that every block lies in the memory: anything else is a bug of ours."""
        assert self.memory_U8.itemsize == 1 and self.memory_U8.flags.c_contiguous
        assert self.at_B.dtype == np.int64 and self.at_B.flags.c_contiguous and self.at_B.ndim == 1
        assert (self.at_B >= 0).all() and (self.at_B + self.nbytes <= len(self.memory_U8)).all()
        assert self.bounce_U8.nbytes == pages(self.nbytes) and self.stop_1.dtype == np.int32

    @property
    def in_place(self) -> bool:
        """Whether each is whole pages of memory, and so needs no bounce buffer."""
        whole = self.nbytes % PAGE_BYTES == 0
        return whole and not ((self.at_B + self.memory_U8.ctypes.data) % PAGE_BYTES).any()


class BlockIo(Protocol):
    """Each call blocks. May be called from any thread, several at once, each with a bounce buffer of its own."""

    name: str

    def write(
        self, fd: int, blocks: Blocks, slot_at_B: Offsets, headers_U8: npt.NDArray[np.uint8]
    ) -> tuple[Results, Sums]:
        """Headers, which get their sums, and blocks into the slots; the sums of the data."""

    def read(self, fd: int, blocks: Blocks, data_at_B: Offsets, sums_B: Sums) -> Results:
        """Data into the blocks. Those with an error may have anything."""

    def headers(self, fd: int, at: int, stride: int, headers_U8: npt.NDArray[np.uint8], header_nbytes: int) -> Results:
        """As many headers as there is room for, `stride` apart in the file from `at` on."""


class _Blocks(ctypes.Structure):
    """`struct blocks` of disk.c."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("at", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("nbytes", ctypes.c_int64),
        ("data_nbytes", ctypes.c_int64),
        ("bounce", ctypes.c_void_p),
        ("stop", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, blocks: Blocks) -> Self:
        return cls(
            memory=blocks.memory_U8.ctypes.data,
            at=blocks.at_B.ctypes.data,
            count=len(blocks.at_B),
            nbytes=blocks.nbytes,
            data_nbytes=pages(blocks.nbytes),
            bounce=None if blocks.in_place else blocks.bounce_U8.ctypes.data,
            stop=blocks.stop_1.ctypes.data,
        )


class NativeBlockIo:
    """The calls of disk.c, without the interpreter's lock."""

    name = "native"

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, int64, fd, blocks = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.POINTER(_Blocks)
        write = ctypes.CFUNCTYPE(None, fd, blocks, pointer, pointer, int64, pointer, pointer)
        read = ctypes.CFUNCTYPE(None, fd, blocks, pointer, pointer, pointer)
        headers = ctypes.CFUNCTYPE(None, fd, int64, int64, int64, pointer, int64, pointer)
        total = ctypes.CFUNCTYPE(ctypes.c_uint64, pointer, int64, ctypes.c_int)
        self._write = write(("baton_disk_write", handle))
        self._read = read(("baton_disk_read", handle))
        self._headers = headers(("baton_disk_headers", handle))
        self._sum = total(("baton_disk_sum", handle))

    def write(
        self, fd: int, blocks: Blocks, slot_at_B: Offsets, headers_U8: npt.NDArray[np.uint8]
    ) -> tuple[Results, Sums]:
        count = len(slot_at_B)
        assert len(blocks.at_B) == count and headers_U8.nbytes % count == 0
        results_B, sums_B = np.empty(count, dtype=np.int32), np.empty(count, dtype=np.uint64)
        self._write(
            fd,
            _Blocks.of(blocks),
            slot_at_B.ctypes.data,
            headers_U8.ctypes.data,
            headers_U8.nbytes // count,
            sums_B.ctypes.data,
            results_B.ctypes.data,
        )
        return -results_B, sums_B

    def read(self, fd: int, blocks: Blocks, data_at_B: Offsets, sums_B: Sums) -> Results:
        assert len(blocks.at_B) == len(sums_B) == len(data_at_B) and blocks.memory_U8.flags.writeable
        results_B = np.empty(len(data_at_B), dtype=np.int32)
        self._read(fd, _Blocks.of(blocks), data_at_B.ctypes.data, sums_B.ctypes.data, results_B.ctypes.data)
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
        self, fd: int, blocks: Blocks, slot_at_B: Offsets, headers_U8: npt.NDArray[np.uint8]
    ) -> tuple[Results, Sums]:
        results_B = np.zeros(len(slot_at_B), dtype=np.int32)
        sums_B = np.zeros(len(slot_at_B), dtype=np.uint64)
        bounce_U8 = blocks.bounce_U8
        for i, header_U8 in enumerate(headers_U8.reshape(len(slot_at_B), -1)):
            if blocks.stop_1[0]:
                results_B[i] = errno.ECANCELED
                continue
            bounce_U8[: blocks.nbytes] = blocks.memory_U8[blocks.at_B[i] :][: blocks.nbytes]
            sums_B[i] = total = sum64(bounce_U8)
            header_U8[DATA_SUM] = np.frombuffer(total.to_bytes(8, "little"), dtype=np.uint8)
            header_U8[HEADER_SUM] = 0
            header_U8[HEADER_SUM] = np.frombuffer(sum64(header_U8).to_bytes(8, "little"), dtype=np.uint8)
            try:
                _write_all(fd, [header_U8.data, bounce_U8.data], int(slot_at_B[i]))
            except OSError as error:
                results_B[i] = error.errno or errno.EIO
        return results_B, sums_B

    def read(self, fd: int, blocks: Blocks, data_at_B: Offsets, sums_B: Sums) -> Results:
        results_B = np.zeros(len(data_at_B), dtype=np.int32)
        for i, data_at in enumerate(data_at_B.tolist()):
            results_B[i] = errno.ECANCELED if blocks.stop_1[0] else _read_all(fd, blocks.bounce_U8, data_at)
            if results_B[i]:
                continue
            if sum64(blocks.bounce_U8) != int(sums_B[i]):
                results_B[i] = errno.EBADMSG
                continue
            blocks.memory_U8[blocks.at_B[i] :][: blocks.nbytes] = blocks.bounce_U8[: blocks.nbytes]
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
