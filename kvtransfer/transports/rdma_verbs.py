"""The verbs library: set up by pyverbs, with work requests posted by C (`native/rdma_poster.c`).

pyverbs is part of rdma-core and is built for the distribution's Python. A virtual environment of the same Python does
not see it, so it is looked for in the distribution's folder, and only that package is taken from there. It is imported
when first used.

C posts on the structures of libibverbs that pyverbs' objects wrap (struct ibv_qp, ibv_cq, ibv_comp_channel). pyverbs
does not give them away. Each of these Cython classes declares the pointer as its first member, so it lies right after
what the base class holds. C reads it from there by a system call, for which a wrong address is an error and no crash,
and uses it only if the structure agrees with what the object says.

Shape suffix: W = one entry per write.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import socket
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from baton.native import load

SOURCE = Path(__file__).parents[1] / "native" / "rdma_poster.c"
IMMEDIATE_MASK = 0xFFFF_FFFF
_CHANNEL_READABLE = 1

DISTRIBUTION_FOLDERS = (Path("/usr/lib/python3/dist-packages"), Path("/usr/lib64/python3/site-packages"))


class RdmaUnavailable(Exception):
    """RDMA does not work here, or not any more. The text says what is missing and what to do."""


class QueuePairFailed(Exception):
    """A queue pair or the device met an error; the link cannot go on."""


_MODULES = ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")


def load_verbs(folders: tuple[Path, ...] = DISTRIBUTION_FOLDERS) -> Any:
    """Import pyverbs: those of its modules that are used, and `error`, the base class of its errors.

    Raises RdmaUnavailable.
    """
    if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
        _import_from(_find(folders))
    try:
        modules = {name: importlib.import_module(f"pyverbs.{name}") for name in _MODULES}
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    except ImportError as failure:
        raise RdmaUnavailable(f"pyverbs cannot be imported: {failure}; install libibverbs1 as well") from failure
    return SimpleNamespace(**modules, error=error)


def _find(folders: tuple[Path, ...]) -> Path:
    others = []
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    for folder in folders:
        if (folder / "pyverbs" / f"device{suffix}").exists():
            return folder
        others += [file.name for file in (folder / "pyverbs").glob("device.*.so")]
    if others:
        raise RdmaUnavailable(
            f"pyverbs is installed for another Python ({', '.join(others)}, this one wants {suffix}); "
            "run Baton with the distribution's Python"
        )
    raise RdmaUnavailable("pyverbs is not installed; on Debian and Ubuntu: apt-get install python3-pyverbs")


def _import_from(folder: Path) -> None:
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", [str(folder)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["pyverbs"]
        raise


class RdmaLibrary:
    """`rdma_poster.c`, with its types."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle
        function = self.function
        p, u32, u64, i32 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
        self.chain_wrs_max = int(function("chain_wrs_max", i32)())
        self.poll_max = int(function("poll_max", i32)())
        self.qp_behind = function("qp_behind", p, p, u32)
        self.cq_behind = function("cq_behind", p, p, i32)
        self.channel_fd_behind = function("channel_fd_behind", i32, p)
        self.post_writes = function("post_writes", i32, p, u64, u32, u64, u32, p, p, p, i32, u64)
        self.post_seal = function("post_seal", i32, p, u64, u32, u32, u64)
        self.wait = function("wait", i32, p, i32, i32, i32, i32, p, p, p, p)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *arguments)((f"baton_rdma_{name}", self._handle))


@cache
def rdma_library() -> RdmaLibrary | None:
    """None: it could not be built. The first call may take a second."""
    handle = load(SOURCE).handle
    return RdmaLibrary(handle) if handle is not None else None


def need_library() -> RdmaLibrary:
    """Raises RdmaUnavailable: there is none, nor a way to build it."""
    library = rdma_library()
    if library is None:
        raise RdmaUnavailable(
            f"its native library is {load(SOURCE).status}; install a C compiler and libibverbs-dev (rdma-core-devel)"
        )
    return library


def posts_by() -> str:
    """How work requests are posted in this process, for people."""
    return "nothing: no native library" if rdma_library() is None else "native"


def _pointer_in(wrapper: Any) -> int:
    """Where an object of pyverbs should keep its pointer. Raises RdmaUnavailable."""
    base = type(wrapper).__base__
    if base is None or type(wrapper).__basicsize__ < base.__basicsize__ + ctypes.sizeof(ctypes.c_void_p):
        raise RdmaUnavailable(f"pyverbs' {type(wrapper).__name__} has no structure where one was expected")
    return id(wrapper) + base.__basicsize__


def channel_fd(channel: Any) -> int:
    """The descriptor of a completion channel, which stays the channel's. Raises RdmaUnavailable."""
    fd = int(need_library().channel_fd_behind(_pointer_in(channel)))
    try:
        kind = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        kind = "not open"
    if "infinibandevent" not in kind:
        raise RdmaUnavailable(f"pyverbs' completion channel has no descriptor where one was expected, but {fd}: {kind}")
    return fd


def qp_address(qp: Any) -> int:
    """Where the struct ibv_qp is. Raises RdmaUnavailable."""
    address = need_library().qp_behind(_pointer_in(qp), qp.qp_num)
    if not address:
        raise RdmaUnavailable("pyverbs' queue pair is laid out in another way")
    return int(address)


def cq_address(cq: Any) -> int:
    """Where the struct ibv_cq is. Raises RdmaUnavailable."""
    address = need_library().cq_behind(_pointer_in(cq), cq.cqe)
    if not address:
        raise RdmaUnavailable("pyverbs' completion queue is laid out in another way")
    return int(address)


class Poster:
    """Posts on the queue pairs of one link, and takes their completions, without the interpreter's lock. One thread."""

    def __init__(
        self, *, qps: list[int], cq: int, channel_fd: int, src_base: int, lkey: int, dst_base: int, rkey: int,
        take_event: Callable[[], None],
    ) -> None:  # fmt: skip
        """`qps` and `cq` are addresses of libibverbs' structures, which outlive the poster. `src_base` and `dst_base`
        are where both regions are, as the device addresses them. `take_event` takes the event off the completion
        channel; it raises QueuePairFailed."""
        self._library = library = need_library()
        self._qps = qps
        self._cq = cq
        self._channel_fd = channel_fd
        self._src_base, self._lkey, self._dst_base, self._rkey = src_base, lkey, dst_base, rkey
        self._take_event = take_event
        self.chain_wrs_max = library.chain_wrs_max
        self._wr_ids = np.zeros(library.poll_max, np.int64)  # as signed as it was posted: seals have numbers below 0
        self._statuses = np.zeros(library.poll_max, np.uint32)
        self._events = ctypes.c_int(0)
        self._waited_us = ctypes.c_int64(0)

    def post_writes(self, qp: int, src_W: np.ndarray, dst_W: np.ndarray, nbytes_W: np.ndarray, wr_id: int) -> None:
        """Post 1 to `chain_wrs_max` writes as one chain; its last completes as `wr_id`. Raises QueuePairFailed."""
        assert src_W.flags.c_contiguous and dst_W.flags.c_contiguous and nbytes_W.flags.c_contiguous
        error = self._library.post_writes(
            self._qps[qp], self._src_base, self._lkey, self._dst_base, self._rkey,
            src_W.ctypes.data, dst_W.ctypes.data, nbytes_W.ctypes.data, len(src_W), wr_id,
        )  # fmt: skip
        if error:
            raise QueuePairFailed(f"posting failed with errno {error}")

    def post_seal(self, qp: int, number: int, wr_id: int) -> None:
        """Post an empty write with `number` as its immediate. Raises QueuePairFailed."""
        immediate_be = socket.htonl(number & IMMEDIATE_MASK)
        error = self._library.post_seal(self._qps[qp], self._dst_base, self._rkey, immediate_be, wr_id)
        if error:
            raise QueuePairFailed(f"posting failed with errno {error}")

    def wait(self, wake_fd: int, spin_us: int, timeout_ms: int) -> tuple[list[tuple[int, int]], int]:
        """(wr_id, status) of completions, and microseconds waited. Status 0 is success.

        Polls for `spin_us`, then sleeps until a completion comes or `wake_fd` is readable. May come back empty.
        Raises QueuePairFailed.
        """
        found = self._library.wait(
            self._cq, self._channel_fd, wake_fd, spin_us, timeout_ms,
            self._wr_ids.ctypes.data, self._statuses.ctypes.data,
            ctypes.addressof(self._events), ctypes.addressof(self._waited_us),
        )  # fmt: skip
        if found < 0:
            raise QueuePairFailed(f"polling failed with errno {-found}")
        pairs = list(zip(self._wr_ids[:found].tolist(), self._statuses[:found].tolist(), strict=True))
        if self._events.value & _CHANNEL_READABLE:
            self._take_event()
        return pairs, self._waited_us.value
