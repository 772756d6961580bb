"""`copy.c`, with its types. Loaded once in a process, at its first use.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per record.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from baton.log import get_log
from baton.native import load

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
        """Copy every record and fence the stores; the interpreter's lock is let go of meanwhile.

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
