"""How many cores this process may use: those that it may run on, or fewer where a cgroup gives it less time (Linux).

A container's CPU limit is such a quota: its processes see all cores of the machine, and threads beyond the quota take
the time from each other. Of a quota that cannot be read nothing is known, and nothing is taken off.

Both layouts of cgroups, https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max) and
https://docs.kernel.org/scheduler/sched-bwc.html (cpu.cfs_quota_us), each at the place that mountinfo names.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What this process may use of the machine."""

    allowed: int
    """Cores that it may run on."""
    quota: float | None
    """Cores' worth of time that its cgroups allow, the least of all; None: no limit."""

    @property
    def usable(self) -> int:
        """How many threads can run at the same time; a part of a core counts as one. At least 1."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, math.ceil(self.quota)))

    def __str__(self) -> str:
        if self.usable == self.allowed:
            return f"{self.allowed} core{'' if self.allowed == 1 else 's'}"
        return f"{self.usable} of {self.allowed} cores, by a CPU quota of {self.quota:.3g}"


def own_cores(root: Path = Path("/")) -> Cores:
    """As they are now, by the files under `root`. Never raises."""
    return Cores(allowed=len(os.sched_getaffinity(0)), quota=min(_quotas(root), default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    """A place where cgroups that limit CPU time show."""

    place: str
    top: PurePosixPath
    """The group that is seen there."""
    is_v2: bool


def _quotas(root: Path) -> Iterator[float]:
    """Of the groups that this process is in and of those above them, as far as they are seen from here."""
    mounts = [mount for line in _lines(root / "proc/self/mountinfo") if (mount := _mount(line)) is not None]
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        for mount in mounts:
            if controllers == "" if mount.is_v2 else "cpu" in controllers.split(","):
                yield from _quotas_at(root, mount, PurePosixPath(own))


def _mount(line: str) -> _Mount | None:
    """Of a line of mountinfo (proc(5)): ... root, mount point, options ..., "-", type, source, options of the type."""
    before, _, after = line.partition(" - ")
    fields, types = before.split(" "), after.split(" ")
    if len(fields) < 6 or len(types) < 3 or types[0] not in ("cgroup", "cgroup2"):
        return None
    is_v2 = types[0] == "cgroup2"
    if not is_v2 and "cpu" not in types[2].split(","):
        return None
    top, place = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
    return _Mount(place=place, top=PurePosixPath(top), is_v2=is_v2)


def _quotas_at(root: Path, mount: _Mount, own: PurePosixPath) -> Iterator[float]:
    folder = top = root / mount.place.lstrip("/")
    # A group outside of what is mounted here, as from within a container that has none of its own: what is seen is its.
    if ".." not in own.parts and own.is_relative_to(mount.top):
        folder = top / own.relative_to(mount.top)
    for each in (folder, *folder.parents):
        quota = _quota_v2(each) if mount.is_v2 else _quota_v1(each)
        if quota is not None:
            yield quota
        if each == top:
            return


def _quota_v2(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    return _share(words[0], words[1]) if len(words) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.cfs_quota_us") + _lines(folder / "cpu.cfs_period_us")).split()
    return _share(words[0], words[1]) if len(words) == 2 else None


def _share(quota_us: str, period_us: str) -> float | None:
    """None: no limit ("max", -1), or no numbers."""
    try:
        quota, period = int(quota_us), int(period_us)
        return quota / period if quota > 0 and period > 0 else None
    except (ValueError, OverflowError):
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a path that none can have
        return []
