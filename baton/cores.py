"""How many cores this process may use: its affinity, or less if a cgroup has a CPU quota (Linux).

A container's CPU limit is such a quota: its processes see all cores of the machine, and threads beyond the quota take
time from each other. A quota that cannot be read counts as none.

Both versions of cgroups: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max) and
https://docs.kernel.org/scheduler/sched-bwc.html (cpu.cfs_quota_us), where mountinfo says they are mounted.
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
    """The smallest quota of its cgroups, in cores; None: no limit."""

    @property
    def usable(self) -> int:
        """How many threads can run at the same time, at least 1. A part of a core counts as one."""
        return self.allowed if self.quota is None else max(1, min(self.allowed, math.ceil(self.quota)))

    def __str__(self) -> str:
        if self.usable == self.allowed:
            return f"{self.allowed} core{'' if self.allowed == 1 else 's'}"
        return f"{self.usable} of {self.allowed} cores, by a CPU quota of {self.quota:.3g}"


def own_cores(root: Path = Path("/")) -> Cores:
    """As they are now, by the files under `root`. Never raises."""
    return Cores(allowed=len(os.sched_getaffinity(0)), quota=min(_quotas(root), default=None))


def _quotas(root: Path) -> Iterator[float]:
    """Of the groups that this process is in and of those above them, as far as they are visible here."""
    groups = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup") if line.count(":") >= 2]
    for line in _lines(root / "proc/self/mountinfo"):
        # proc(5): ... root, mount point, options ..., "-", type, source, options of the type
        before, _, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if len(fields) < 6 or len(types) < 3:
            continue
        top, place = (_OCTAL.sub(lambda found: chr(int(found[1], 8)), field) for field in fields[3:5])
        for _, controllers, own in groups:
            if types[0] == "cgroup2" and not controllers:
                files = ["cpu.max"]
            elif types[0] == "cgroup" and all("cpu" in each.split(",") for each in (types[2], controllers)):
                files = ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
            else:
                continue
            yield from _quotas_at(root / place.lstrip("/"), PurePosixPath(top), PurePosixPath(own), files)


def _quotas_at(mounted: Path, top: PurePosixPath, own: PurePosixPath, files: list[str]) -> Iterator[float]:
    """Of the group `own` and those above it, where `mounted` shows the group `top`."""
    folder = mounted
    # A container without a cgroup mount of its own has its group outside of `top`: what is mounted counts.
    if ".." not in own.parts and own.is_relative_to(top):
        folder = mounted / own.relative_to(top)
    for each in (folder, *folder.parents):
        quota = _quota(" ".join(line for file in files for line in _lines(each / file)).split())
        if quota is not None:
            yield quota
        if each == mounted:
            return


def _quota(words: list[str]) -> float | None:
    """None: no limit ("max", -1), or not two numbers."""
    try:
        quota, period = (int(word) for word in words)
        return quota / period if quota > 0 and period > 0 else None
    except (ValueError, OverflowError):
        return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a path that none can have
        return []
