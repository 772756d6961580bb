"""What processes have used so far, by /proc: nanoseconds on a core, of threads that compute and of the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

ENGINE: Final = "engine"
"""Name of the threads that compute; benchmarks/front_door_node.py gives it to them."""
OTHERS: Final = "others"
Spent = dict[str, dict[str, dict[str, int]]]
"""By name of the process that was started, by process (it and its children), by kind of thread."""


def name_own_thread(name: str) -> None:
    Path("/proc/thread-self/comm").write_text(name, encoding="ascii")


def tree(pid: int) -> Iterator[int]:
    """A process, and all below it."""
    yield pid
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            for child in Path(task.path, "children").read_text(encoding="ascii").split():
                yield from tree(int(child))


def spent(pid: int) -> dict[str, int]:
    """Of one process, that may have ended."""
    found = {ENGINE: 0, OTHERS: 0}
    with suppress(OSError):
        for task in os.scandir(f"/proc/{pid}/task"):
            with suppress(OSError):
                kind = ENGINE if Path(task.path, "comm").read_text().strip() == ENGINE else OTHERS
                found[kind] += int(Path(task.path, "schedstat").read_text(encoding="ascii").split()[0])
    return found


def spent_by_all(pids: Mapping[str, int]) -> Spent:
    return {name: {str(each): spent(each) for each in tree(pid)} for name, pid in pids.items()}


def difference(after: Spent, before: Spent) -> Spent:
    """A process that is new had used nothing; one that has ended is left out."""
    return {
        name: {
            pid: {kind: ns - before.get(name, {}).get(pid, {}).get(kind, 0) for kind, ns in kinds.items()}
            for pid, kinds in processes.items()
        }
        for name, processes in after.items()
    }


def add(total: Spent, more: Spent) -> None:
    for name, processes in more.items():
        for pid, kinds in processes.items():
            mine = total.setdefault(name, {}).setdefault(pid, {})
            for kind, ns in kinds.items():
                mine[kind] = mine.get(kind, 0) + ns


def memory_bytes(pid: int) -> int:
    """Resident, of a process and all below it."""
    pages = 0
    for each in tree(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{each}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def connections(pid: int, port: int) -> int:
    """TCP connections to `port` of this machine that the process holds."""
    held = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                held.add(os.readlink(entry.path))
    found = 0
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if fields[3] == "01" and int(fields[1].rpartition(":")[2], 16) == port:
            found += f"socket:[{fields[9]}]" in held
    return found
