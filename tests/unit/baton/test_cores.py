"""How many cores a process may use, by made-up cgroup files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.cores import Cores, own_cores

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
OTHER_V1 = "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset"
DISK = "23 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw"


def quota_of(root: Path, mounts: list[str], groups: str, files: dict[str, str]) -> float | None:
    """What is found under `root` when these files are there; each path is one below /sys/fs/cgroup."""
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    written |= {"proc/self/mountinfo": "".join(f"{line}\n" for line in mounts), "proc/self/cgroup": groups}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    cores = own_cores(root)
    assert cores.allowed == len(os.sched_getaffinity(0))
    return cores.quota


def test_a_quota_above_the_own_group_counts(tmp_path: Path) -> None:
    """v2, nested: the process's group says "max", a group above has 1.5 cores, the one above that more."""
    files = {
        "a/cpu.max": "400000 100000\n",
        "a/b/cpu.max": "150000 100000\n",
        "a/b/c/cpu.max": "max 100000\n",
        "a/other/cpu.max": "10000 100000\n",
    }
    assert quota_of(tmp_path, [DISK, V2], "0::/a/b/c\n", files) == 1.5


def test_only_max_is_no_limit(tmp_path: Path) -> None:
    """v2, from the group up to the first one, which has no such file."""
    assert quota_of(tmp_path, [V2], "0::/a\n", {"a/cpu.max": "max 100000\n"}) is None


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    """v2: as "/" with a namespace of its own, else under the name that the host has for it, or for one beside it."""
    named = V2.replace("0:26 /", "0:26 /kubepods/pod1")
    for at, (mount, own) in enumerate(
        [(V2, "/"), (named, "/kubepods/pod1"), (named, "/../pod2"), (named, "/kubepods")]
    ):
        root = tmp_path / str(at)
        assert quota_of(root, [mount], f"0::{own}\n", {"cpu.max": "50000 200000\n"}) == 0.25


def test_the_older_layout(tmp_path: Path) -> None:
    """v1: two files, and -1 for no limit; other controllers' groups are no matter."""
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n",
        "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
        "cpuset/job/cpu.cfs_quota_us": "1000\n",
        "cpuset/job/cpu.cfs_period_us": "100000\n",
    }
    groups = "5:cpuset:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/\n0::/\n"
    assert quota_of(tmp_path, [OTHER_V1, V1], groups, files) == 3.0
    assert quota_of(tmp_path, [OTHER_V1, V1], "4:cpu,cpuacct:/\n", files) is None


def test_a_place_with_a_space(tmp_path: Path) -> None:
    """mountinfo writes it as an octal number."""
    mount = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups")
    assert quota_of(tmp_path, [mount], "0::/\n", {"my groups/cpu.max": "200000 100000\n"}) == 2.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "200000",
        "200000 0",
        "0 100000",
        "-5 100000",
        "a b",
        "1 2 3",
        "max",
        f"{'9' * 400} 1",
        "\x00 1",
        "1.5 1",
    ],
)
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    """A quota that is none takes nothing off, and nothing is raised."""
    assert quota_of(tmp_path, [V2], "0::/\n", {"cpu.max": text}) is None
    files = {"cpu,cpuacct/cpu.cfs_quota_us": text, "cpu,cpuacct/cpu.cfs_period_us": "1"}
    share = {"200000": 200_000.0}.get(text)  # beside a period, that is one
    assert quota_of(tmp_path, [V1], "4:cpu,cpuacct:/\n", files) == share


@pytest.mark.parametrize(
    ("mounts", "groups"),
    [
        ([], ""),
        ([V2], ""),
        ([V2], "nonsense\n\n::\n0::\n"),
        (["cgroup2", "- cgroup2", V2[:30], ""], "0::/\n"),
        ([V2.replace("/sys/fs/cgroup", "/sys\\000")], "0::/\n"),
        ([V1], "0::/\n"),
        ([V2], "4:cpu:/\n"),
    ],
)
def test_lists_that_name_no_group(tmp_path: Path, mounts: list[str], groups: str) -> None:
    """Cut off, empty, or of the other layout: no limit."""
    assert quota_of(tmp_path, mounts, groups, {"a/cpu.max": "1 1"}) is None


def test_no_files_at_all(tmp_path: Path) -> None:
    """As on a system without /proc."""
    assert own_cores(tmp_path).quota is None


@pytest.mark.parametrize(
    ("allowed", "quota", "usable", "text"),
    [
        (1, None, 1, "1 core"),
        (8, None, 8, "8 cores"),
        (8, 0.1, 1, "1 of 8 cores, by a CPU quota of 0.1"),
        (8, 2.0, 2, "2 of 8 cores, by a CPU quota of 2"),
        (8, 2.01, 3, "3 of 8 cores, by a CPU quota of 2.01"),
        (2, 1.5, 2, "2 cores"),
        (2, 16.0, 2, "2 cores"),
    ],
)
def test_a_part_of_a_core_is_one(allowed: int, quota: float | None, usable: int, text: str) -> None:
    """Rounded up, at least one, and never more than the process may run on."""
    cores = Cores(allowed=allowed, quota=quota)
    assert (cores.usable, str(cores)) == (usable, text)


def test_this_process_has_a_core() -> None:
    """By the machine's own files."""
    assert 1 <= own_cores().usable <= len(os.sched_getaffinity(0))
