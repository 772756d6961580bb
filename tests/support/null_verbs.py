"""The device of `native/rdma_poster.c` that does nothing but keep what it is handed."""

from __future__ import annotations

import ctypes

import numpy as np

from kvtransfer.transports.rdma_verbs import RdmaLibrary


class NullVerbs:
    """A queue pair and a completion queue. The first `len(log)` requests are kept in `log`, an array of struct posted;
    more are refused as a full queue refuses them. Without a log all are taken."""

    def __init__(self, library: RdmaLibrary, log: np.ndarray | None = None) -> None:
        p, i32 = ctypes.c_void_p, ctypes.c_int
        nbytes = library.function("null_bytes", ctypes.c_size_t)()
        self._memory = ctypes.create_string_buffer(nbytes)
        self._at = ctypes.addressof(self._memory)
        at, log_max = (log.ctypes.data, len(log)) if log is not None else (None, 0)
        library.function("null_init", None, p, p, i32, ctypes.c_uint32)(self._at, at, log_max, 77)
        self.qp: int = library.function("null_qp", p, p)(self._at)
        self.cq: int = library.function("null_cq", p, p)(self._at)
        self._logged = library.function("null_logged", i32, p)

    @property
    def logged(self) -> int:
        """Requests kept."""
        return int(self._logged(self._at))
