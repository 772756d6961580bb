"""`sockets.c`, with its types. Loaded once in a process, at its first use.

Shape suffixes: U8 = one-dimensional array of bytes; S = one entry per segment of a frame; S2 = (start, length) of each.
"""

from __future__ import annotations

import ctypes
import errno
import os
from enum import Enum
from functools import cache
from pathlib import Path

import numpy as np

from baton.log import get_log
from baton.native import load

log = get_log("native")


class Received(Enum):
    """How a `receive` ended, if not by an error of the socket."""

    ALL = 0
    NOTHING_YET = -errno.EAGAIN
    INTERRUPTED = -errno.ECANCELED
    EOF = -errno.ENODATA


class NativeSockets:
    """The calls of sockets.c. May be used from any thread."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        send = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_int, ctypes.c_char_p, int64, pointer, int64, pointer, pointer, pointer, int64, int64
        )
        receive = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, pointer, pointer, int64, pointer, pointer)
        self._send = send(("baton_send", handle))
        self._receive = receive(("baton_receive", handle))

    def send(
        self,
        fd: int,
        prefix: bytes,
        table_S2: np.ndarray,
        source_U8: np.ndarray,
        src_S: np.ndarray,
        nbytes_S: np.ndarray,
        done_nbytes: int = 0,
    ) -> None:
        """Send prefix, table and segments over a blocking socket, but for the first `done_nbytes` of it all.

        All arrays but the source are int64. The caller has checked the segments against the source. Raises OSError.
        """
        for array in (table_S2, src_S, nbytes_S):
            assert array.dtype == np.int64 and array.flags.c_contiguous and len(array) == len(src_S)
        code = self._send(
            fd,
            prefix,
            len(prefix),
            table_S2.ctypes.data,
            table_S2.nbytes,
            source_U8.ctypes.data,
            src_S.ctypes.data,
            nbytes_S.ctypes.data,
            len(src_S),
            done_nbytes,
        )
        if code:
            raise OSError(-code, os.strerror(-code))

    def receive(
        self, fd: int, region_U8: np.ndarray, table_S2: np.ndarray, place: np.ndarray, interrupt: ctypes.c_int32
    ) -> Received:
        """Receive what there is, without waiting, and move `place` on: int64 (segment, bytes done of it).

        The caller has checked the table against the region. Stops before a system call once `interrupt` is not 0.
        Raises OSError.
        """
        assert region_U8.flags.writeable
        assert table_S2.dtype == place.dtype == np.int64 and table_S2.flags.c_contiguous and place.shape == (2,)
        code = self._receive(
            fd,
            region_U8.ctypes.data,
            table_S2.ctypes.data,
            len(table_S2),
            place.ctypes.data,
            ctypes.addressof(interrupt),
        )
        try:
            return Received(code)
        except ValueError:
            raise OSError(-code, os.strerror(-code)) from None


@cache
def native_sockets() -> NativeSockets | None:
    """None: there is no library, which is logged once. The first call may take a second."""
    library = load(Path(__file__).with_name("sockets.c"))
    if library.handle is None:
        log.warning("tcp is slower than it could be: no native library", reason=library.status)
        return None
    return NativeSockets(library.handle)
