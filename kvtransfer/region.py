"""The memory of a node's paged KV pool: one memfd, mapped once, that other processes can be given.

Shape suffix: U8 = one-dimensional array of bytes (uint8).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""

PREFAULT_CHUNK_BYTES = 64 << 20
# linux/mman.h, since Linux 5.14; the mmap module of Python 3.11 has no name for it.
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
    """Shared memory of a fixed size. Owns the memfd and the mapping until `close`.

    The file is sealed against growing and shrinking, so that nobody who maps it can be hit by SIGBUS.
    Not thread-safe; `array_U8` may be read and written from any thread.
    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        """Takes ownership of both. Use `create`."""
        self.nbytes = len(mapping)
        self._fd = fd
        self._mapping = mapping
        self._array_U8: np.ndarray | None = np.frombuffer(mapping, dtype=np.uint8)

    @classmethod
    def create(cls, nbytes: int, name: str, progress: Progress | None = None, prefault: bool = True) -> Region:
        """Make a region of zeros. `name` shows in /proc/<pid>/maps.

        With `prefault` every page exists when this returns, and `progress` is called after each chunk; it blocks for as
        long as that takes.

        Raises:
            RegionTooLarge: there is not the memory for it (with `prefault`; without, the pages come when touched).
        """
        assert nbytes > 0, nbytes
        if prefault and nbytes > (available_bytes := memory_available_bytes()):
            raise RegionTooLarge(nbytes, available_bytes)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            try:
                if prefault:
                    _prefault(mapping, progress)
                return cls(fd, mapping)
            except BaseException:
                mapping.close()
                raise
        except BaseException:
            os.close(fd)
            raise

    @property
    def array_U8(self) -> np.ndarray:
        """All bytes, writable. Views of it must be dropped before `close`."""
        assert self._array_U8 is not None, "the region is closed"
        return self._array_U8

    @property
    def fd(self) -> int:
        """The memfd; still owned by the region."""
        assert self._array_U8 is not None, "the region is closed"
        return self._fd

    def close(self) -> None:
        """Unmap and close. Idempotent. The memory itself lives on while another process maps it.

        Raises:
            RegionInUse: a view of `array_U8` is still alive; the region stays open.
        """
        if self._array_U8 is None:
            return
        self._array_U8 = None
        try:
            self._mapping.close()
        except BufferError as error:
            self._array_U8 = np.frombuffer(self._mapping, dtype=np.uint8)
            raise RegionInUse("arrays or tensors still look into the region; drop them before closing it") from error
        os.close(self._fd)


def memory_available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What this process may still allocate: the smaller of MemAvailable and the room in its memory cgroups (v1, v2)."""
    available = _meminfo_available_bytes(proc / "meminfo")
    return max(0, min([available, *_cgroup_rooms_bytes(proc / "self" / "cgroup", cgroups)]))


def _meminfo_available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{meminfo} has no MemAvailable line")


def _cgroup_rooms_bytes(membership: Path, cgroups: Path) -> list[int]:
    """Limit less use, of each memory cgroup above this process that can be read and has a limit."""
    rooms = []
    for line in _read_or_empty(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_name, use_name = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, use_name = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        # Inside a container the path may be the host's, and only the root of the mount is ours.
        for directory in {root, group, *(p for p in group.parents if p.is_relative_to(root))}:
            limit, use = _read_or_empty(directory / limit_name), _read_or_empty(directory / use_name)
            if limit.isdigit() and use.isdigit():
                rooms.append(int(limit) - int(use))
    return rooms


def _read_or_empty(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _prefault(mapping: mmap.mmap, progress: Progress | None) -> None:
    nbytes = len(mapping)
    for start in range(0, nbytes, PREFAULT_CHUNK_BYTES):
        length = min(PREFAULT_CHUNK_BYTES, nbytes - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise RegionTooLarge(nbytes, memory_available_bytes()) from error
            if error.errno != errno.EINVAL:
                raise
            _touch(mapping, start, length)
        if progress is not None:
            progress(start + length, nbytes)


def _touch(mapping: mmap.mmap, start: int, length: int) -> None:
    """For kernels without MADV_POPULATE_WRITE. The pages are fresh: writing zero changes nothing."""
    for offset in range(start, start + length, mmap.PAGESIZE):
        mapping[offset] = 0
