"""Copies of records from one mapped memory to another: by `copy.c`, loaded at its first use, or by NumPy.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per record.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from baton.log import get_log
from baton.native import load
from kvtransfer.transport import WriteOps, check_ops

log = get_log("native")

LEVELS = ("plain", "sse2", "avx2", "avx512")
"""Instructions that copy.c can use, by their number there."""


class NativeCopy:
    """`baton_copy` at one level. May be called from any thread, several at once."""

    def __init__(self, handle: ctypes.CDLL, level: int | None = None) -> None:
        """`level` is an index of LEVELS; None: the best that this machine has."""
        self.level_max = int(ctypes.CFUNCTYPE(ctypes.c_int)(("baton_copy_level", handle))())
        self._level = self.level_max if level is None else level
        assert 0 <= self._level <= self.level_max, level
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int)
        self._copy = prototype(("baton_copy", handle))
        self.name = f"native, {LEVELS[self._level]}"

    def __call__(
        self, dst_U8: np.ndarray, src_U8: np.ndarray, dst_B: np.ndarray, src_B: np.ndarray, nbytes_B: np.ndarray
    ) -> None:
        """Copy every record and fence the stores; without the interpreter's lock.

        The caller has checked all of it against both regions, which do not overlap.
        """
        assert dst_U8.flags.writeable and dst_U8.flags.c_contiguous and src_U8.flags.c_contiguous
        assert dst_U8.itemsize == src_U8.itemsize == 1
        for array in (dst_B, src_B, nbytes_B):
            assert array.dtype == np.int64 and array.flags.c_contiguous and len(array) == len(dst_B)
        self._copy(
            dst_U8.ctypes.data,
            src_U8.ctypes.data,
            dst_B.ctypes.data,
            src_B.ctypes.data,
            nbytes_B.ctypes.data,
            len(dst_B),
            self._level,
        )


@cache
def native_copy() -> NativeCopy | None:
    """The machine's best; None: there is no library, which is logged once. The first call may take a second."""
    library = load(Path(__file__).with_name("copy.c"))
    if library.handle is None:
        log.warning("copies are slower than they could be: no native library", reason=library.status)
        return None
    return NativeCopy(library.handle)


def copies_by() -> str:
    """How records are copied in this process, for people."""
    copy = native_copy()
    return "NumPy: no native library" if copy is None else copy.name


def copy_records(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """Copy every op. Blocks until done; no byte is touched when an op is out of bounds. The regions do not overlap.

    Raises:
        WriteOutOfBounds: see `check_ops`.
    """
    check_ops(ops, len(src_U8), len(dst_U8))
    copy_checked(dst_U8, src_U8, contiguous(ops))


def contiguous(ops: WriteOps) -> WriteOps:
    """The same ops, in arrays that C can walk through."""
    src, dst, nbytes = map(np.ascontiguousarray, (ops.src, ops.dst, ops.nbytes))
    return WriteOps(src=src, dst=dst, nbytes=nbytes)


def copy_checked(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """Copy every op of contiguous arrays that `check_ops` has passed."""
    native = native_copy()
    if native is not None:
        native(dst_U8, src_U8, ops.dst, ops.src, ops.nbytes)
    else:
        copy_by_numpy(dst_U8, src_U8, ops)


def copy_by_numpy(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
    """What `copy_checked` does where there is no native library."""
    for src, dst, nbytes in zip(ops.src.tolist(), ops.dst.tolist(), ops.nbytes.tolist(), strict=True):
        dst_U8[dst : dst + nbytes] = src_U8[src : src + nbytes]
