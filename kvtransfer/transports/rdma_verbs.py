"""The verbs library through pyverbs: imported when first used, from where the distribution keeps it if need be.

pyverbs is part of rdma-core and is built for the distribution's own Python. A virtual environment of the same Python
does not see it; so it is looked for beside it, and that one package alone is taken from there.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

DISTRIBUTION_FOLDERS = (Path("/usr/lib/python3/dist-packages"), Path("/usr/lib64/python3/site-packages"))


class RdmaUnavailable(Exception):
    """RDMA does not work here, or not any more: what is missing, and what to do. `baton doctor` tells more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbs:
    """The modules of pyverbs that are used, and the base class of its errors."""

    addr: Any
    cq: Any
    device: Any
    enums: Any
    mr: Any
    pd: Any
    qp: Any
    wr: Any
    error: type[Exception]


def load_verbs(folders: tuple[Path, ...] = DISTRIBUTION_FOLDERS) -> Verbs:
    """Import pyverbs. Raises RdmaUnavailable."""
    if "pyverbs" not in sys.modules and importlib.util.find_spec("pyverbs") is None:
        _import_from(_find(folders))
    try:
        modules = {
            name: importlib.import_module(f"pyverbs.{name}")
            for name in ("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")
        }
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    except ImportError as failure:
        raise RdmaUnavailable(f"pyverbs cannot be imported: {failure}; install libibverbs1 as well") from failure
    return Verbs(**modules, error=error)


def suffix_wanted() -> str:
    """How the file of an extension module ends that this interpreter can load."""
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _find(folders: tuple[Path, ...]) -> Path:
    others = []
    for folder in folders:
        if (folder / "pyverbs" / f"device{suffix_wanted()}").exists():
            return folder
        others += [file.name for file in (folder / "pyverbs").glob("device.*.so")]
    if others:
        raise RdmaUnavailable(
            f"pyverbs is installed for another Python ({', '.join(others)}, this one wants {suffix_wanted()}); "
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


class LayoutUnknown(RdmaUnavailable):
    """This pyverbs keeps its structures elsewhere than where they were looked for. Nothing was taken from there."""


def _address_of(wrapper: Any) -> int:
    """Where the C structure is (struct ibv_qp, ibv_cq, ibv_comp_channel) that an object of pyverbs wraps, probably.

    pyverbs has no way to ask for it. Each of these classes declares the pointer as its first member, so it comes right
    after what the base class holds. What is there must agree with what the object tells of itself before it is used.
    """
    base = type(wrapper).__base__
    if base is None or type(wrapper).__basicsize__ < base.__basicsize__ + ctypes.sizeof(ctypes.c_void_p):
        raise LayoutUnknown(f"pyverbs' {type(wrapper).__name__} has no structure where one was expected")
    return ctypes.c_void_p.from_address(id(wrapper) + base.__basicsize__).value or 0


_Head = TypeVar("_Head", bound=ctypes.Structure)


def _peek(address: int, kind: type[_Head]) -> _Head:
    """A copy of what is at this address of our own memory, read by way of the kernel: a wrong address is an error
    there, and not the end of the process. Raises LayoutUnknown."""
    nbytes = ctypes.sizeof(kind)
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            found = os.pread(memory.fileno(), nbytes, address)
    except (OSError, OverflowError) as error:
        raise LayoutUnknown(f"pyverbs has no {kind.__name__} where one was expected: {error}") from error
    if len(found) < nbytes:
        raise LayoutUnknown(f"pyverbs has no {kind.__name__} where one was expected")
    return kind.from_buffer_copy(found)


class _CompChannelHead(ctypes.Structure):
    """The beginning of struct ibv_comp_channel."""

    _fields_ = (("context", ctypes.c_void_p), ("fd", ctypes.c_int), ("refcnt", ctypes.c_int))


class _QpHead(ctypes.Structure):
    """The beginning of struct ibv_qp."""

    _fields_ = (("pointers", ctypes.c_void_p * 6), ("handle", ctypes.c_uint32), ("qp_num", ctypes.c_uint32))


class _CqHead(ctypes.Structure):
    """The beginning of struct ibv_cq."""

    _fields_ = (("pointers", ctypes.c_void_p * 3), ("handle", ctypes.c_uint32), ("cqe", ctypes.c_int))


def channel_fd(channel: Any) -> int:
    """The descriptor of a completion channel, which stays the channel's. Raises LayoutUnknown."""
    fd = int(_peek(_address_of(channel), _CompChannelHead).fd)
    try:
        kind = os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        kind = "not open"
    if "infinibandevent" not in kind:
        raise LayoutUnknown(f"pyverbs' completion channel has no descriptor where one was expected, but {fd}: {kind}")
    return fd


def qp_address(qp: Any) -> int:
    """Where the struct ibv_qp is. Raises LayoutUnknown."""
    address = _address_of(qp)
    if _peek(address, _QpHead).qp_num != qp.qp_num:
        raise LayoutUnknown("pyverbs' queue pair is laid out in another way")
    return address


def cq_address(cq: Any) -> int:
    """Where the struct ibv_cq is. Raises LayoutUnknown."""
    address = _address_of(cq)
    if _peek(address, _CqHead).cqe != cq.cqe:
        raise LayoutUnknown("pyverbs' completion queue is laid out in another way")
    return address
