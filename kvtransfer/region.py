"""The memory of a node's paged KV pool: one memfd, mapped once, that other processes can be given.

Shape suffix: U8 = one-dimensional array of bytes (uint8).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvtransfer.transport import RegionKind

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

PREFAULT_CHUNK_BYTES = 64 << 20
# linux/mman.h; the mmap module of Python 3.11 has no name for the second, which came with Linux 5.14.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_NO_ROOM = frozenset({errno.ENOMEM, errno.EFAULT, errno.ENOSPC})


class RegionTooLarge(Exception):
    """The machine, or the process's memory cgroup, has not the memory that the region asks for."""

    def __init__(self, nbytes: int, available_bytes: int) -> None:
        super().__init__(
            f"the KV region asks for {nbytes:,} bytes, {available_bytes:,} bytes are available here; "
            "ask for fewer blocks, or raise the memory limit"
        )
        self.nbytes = nbytes
        self.available_bytes = available_bytes


class RegionInUse(Exception):
    """`Region.close` while arrays or tensors still look into it: drop them first. The region stays open."""


class Region:
    """Shared memory of a fixed size, sealed: nobody who maps it can be hit by SIGBUS. Owns memfd and mapping until
    `close`. Not thread-safe; `array_U8` may be read and written from any thread."""

    kind: ClassVar[RegionKind] = RegionKind.HOST

    def __init__(self, fd: int, mapping: mmap.mmap, nbytes: int) -> None:
        """Takes ownership of both; the mapping is whole pages, the region its first `nbytes`. Use `create`."""
        self.nbytes = nbytes
        self._fd = fd
        self._mapping = mapping
        self.array_U8: np.ndarray = np.frombuffer(mapping, dtype=np.uint8, count=nbytes)
        """All bytes, writable. Views of it must be dropped before `close`, which takes it away."""
        self.huge_bytes = _huge_bytes(self.array_U8.ctypes.data)
        """How much of it lay in huge pages when it was made: they make copies faster where there are many records."""

    @classmethod
    def create(cls, nbytes: int, name: str, progress: Progress | None = None) -> Region:
        """Make a region of zeros. `name` shows in /proc/<pid>/maps.

        Every page exists when this returns, and `progress` is called after each chunk; it blocks, without the
        interpreter's lock. Pages are huge where the administrator has set enough of them apart (vm.nr_hugepages), or
        where the kernel makes some on demand. Raises RegionTooLarge.
        """
        assert nbytes > 0, nbytes
        page_bytes, free_pages = _reserved_huge_pages()
        if nbytes <= page_bytes * free_pages:
            try:
                return cls._make(-(-nbytes // page_bytes) * page_bytes, nbytes, name, os.MFD_HUGETLB, progress)
            except (OSError, RegionTooLarge):
                pass  # somebody else took them; ordinary pages are asked for below
        if nbytes > (available_bytes := memory_available_bytes()):
            raise RegionTooLarge(nbytes, available_bytes)
        return cls._make(nbytes, nbytes, name, 0, progress)

    @classmethod
    def _make(cls, file_bytes: int, nbytes: int, name: str, flags: int, progress: Progress | None) -> Region:
        """`file_bytes` is whole pages where they are huge: the kernel takes nothing else, and unmaps nothing else."""
        with ExitStack() as undo:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
            undo.callback(os.close, fd)
            os.ftruncate(fd, file_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = undo.enter_context(mmap.mmap(fd, file_bytes))
            _prefault(mapping, progress)
            region = cls(fd, mapping, nbytes)
            undo.pop_all()
            return region

    @property
    def memory(self) -> np.ndarray:
        """What a runner is bound to: `array_U8`."""
        return self.array_U8

    @property
    def fd(self) -> int:
        """The memfd; still owned by the region."""
        assert not self._mapping.closed, "the region is closed"
        return self._fd

    def close(self) -> None:
        """Unmap and close. Idempotent. The memory itself lives on while another process maps it. Raises RegionInUse."""
        if self._mapping.closed:
            return
        del self.array_U8
        try:
            self._mapping.close()
        except BufferError as error:
            self.array_U8 = np.frombuffer(self._mapping, dtype=np.uint8, count=self.nbytes)
            raise RegionInUse("arrays or tensors still look into the region; drop them before closing it") from error
        os.close(self._fd)


def memory_available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still allocate: the smaller of MemAvailable and the room in its memory cgroups (v1, v2)."""
    available = int(_meminfo(proc)["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_cgroup_rooms_bytes(proc / "self" / "cgroup", cgroups)]))


def _meminfo(proc: Path) -> dict[str, str]:
    return dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())


def _cgroup_rooms_bytes(membership: Path, cgroups: Path) -> list[int]:
    """Limit less use, of each memory cgroup above this process that can be read and has a limit.

    Files that were read, such as a model's weights, count as use; the kernel drops them before it refuses anything.
    """
    rooms = []
    for line in _read_or_empty(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, use_name, idle = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, idle = cgroups / "memory", "total_inactive_file"
            limit_name, use_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # Inside a container the path may be the host's, and only the root of the mount is ours.
        for directory in {root, group, *(p for p in group.parents if p.is_relative_to(root))}:
            limit, use = _read_or_empty(directory / limit_name), _read_or_empty(directory / use_name)
            if limit.isdigit() and use.isdigit():
                stat = dict(line.split() for line in _read_or_empty(directory / "memory.stat").splitlines())
                rooms.append(int(limit) - max(0, int(use) - int(stat.get(idle, 0))))
    return rooms


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def populate(mapping: mmap.mmap, *, in_use: bool) -> Iterator[int]:
    """Make every page, huge where the kernel can, and its entry in the page tables; yields the bytes done, by chunks.

    Lets go of the interpreter's lock, and of its hold on the mapping at each yield: close the iterator before the
    mapping, not while it runs. `in_use`: others may write to it meanwhile. A kernel that cannot make pages without a
    write (before Linux 5.14) then makes none. Raises OSError: ENOMEM, EFAULT or ENOSPC.
    """
    nbytes = len(mapping)
    _advise(mapping, 0, nbytes, _MADV_HUGEPAGE)  # if the kernel has none, ordinary ones do
    for start in range(0, nbytes, PREFAULT_CHUNK_BYTES):
        length = min(PREFAULT_CHUNK_BYTES, nbytes - start)
        code = _advise(mapping, start, length, _MADV_POPULATE_WRITE)
        if code == errno.EINVAL and in_use:
            return  # a byte read and written back could undo a write of somebody else's
        if code == errno.EINVAL:
            for offset in range(start, start + length, mmap.PAGESIZE):
                mapping[offset] = mapping[offset]
        elif code:
            raise OSError(code, os.strerror(code))
        yield start + length


def _prefault(mapping: mmap.mmap, progress: Progress | None) -> None:
    nbytes = len(mapping)
    try:
        for done in populate(mapping, in_use=False):
            if progress is not None:
                progress(done, nbytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise RegionTooLarge(nbytes, memory_available_bytes()) from error
        raise


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _advise(mapping: mmap.mmap, start: int, length: int, advice: int) -> int:
    """madvise without the interpreter's lock, which the mmap module's own would hold for as long as it takes."""
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    return ctypes.get_errno() if _libc.madvise(address + start, length, advice) else 0


def _reserved_huge_pages(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Size, and number of free ones, of the huge pages that the administrator has set apart."""
    fields = _meminfo(proc)
    if "HugePages_Free" not in fields:
        return 0, 0
    unreserved = int(fields["HugePages_Free"]) - int(fields["HugePages_Rsvd"])
    return int(fields["Hugepagesize"].split()[0]) * 1024, unreserved


def _huge_bytes(address: int, proc: Path = Path("/proc")) -> int:
    """Of the mapping at this address."""
    inside, total_bytes = False, 0
    for line in _read_or_empty(proc / "self" / "smaps").splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            inside = first.startswith(f"{address:x}-")
        elif inside and first in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
            total_bytes += int(rest.split()[0]) * 1024
    return total_bytes
