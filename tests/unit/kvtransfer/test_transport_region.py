"""The region: one sealed memfd, as large as it says, or a clear error."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from kvtransfer import region as region_module
from kvtransfer.region import Region, RegionInUse, RegionTooLarge, memory_available_bytes
from kvtransfer.region import _reserved_huge_pages as reserved_huge_pages
from kvtransfer.transports.shm import ShmWriterLink

NBYTES = 10 * mmap.PAGESIZE + 3


HUGE_PAGE_BYTES = 2 << 20


@pytest.fixture(autouse=True)
def _no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has set apart."""
    monkeypatch.setattr(region_module, "_reserved_huge_pages", lambda: (HUGE_PAGE_BYTES, 0))


def resident_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.mark.parametrize("has_populate", [True, False])
def test_prefault_makes_every_page_and_reports(monkeypatch: pytest.MonkeyPatch, has_populate: bool) -> None:
    """With MADV_POPULATE_WRITE or, on an older kernel, by touching: all pages exist, all bytes are zero."""
    monkeypatch.setattr(region_module, "PREFAULT_CHUNK_BYTES", 4 * mmap.PAGESIZE)
    if not has_populate:
        monkeypatch.setattr(region_module, "_MADV_POPULATE_WRITE", 9999)
    calls: list[tuple[int, int]] = []
    region = Region.create(NBYTES, "test", progress=lambda done, total: calls.append((done, total)))
    try:
        assert calls == [(4 * mmap.PAGESIZE, NBYTES), (8 * mmap.PAGESIZE, NBYTES), (NBYTES, NBYTES)]
        assert resident_bytes(region.fd) == 11 * mmap.PAGESIZE
        assert region.nbytes == NBYTES
        assert region.array_U8.shape == (NBYTES,)
        assert not region.array_U8.any()
    finally:
        region.close()


class ReadOnly(mmap.mmap):
    """Refuses to be written to through Python."""

    def __setitem__(self, *_: object) -> None:
        raise AssertionError("a byte of a region in use was written back")


def test_a_region_in_use_is_never_written_to_for_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer's threads enter the pages of a receiver that is running. On a kernel without MADV_POPULATE_WRITE they
    leave it: between the reading of a byte and its writing back the receiver may have stored another."""
    monkeypatch.setattr(region_module, "_MADV_POPULATE_WRITE", 9999)
    region = Region.create(NBYTES, "test")
    try:
        with ReadOnly(region.fd, NBYTES) as mapping:
            assert list(object.__new__(ShmWriterLink)._enter_pages(mapping)) == []
    finally:
        region.close()


def test_another_mapping_sees_the_same_memory_of_a_fixed_size() -> None:
    """The descriptor is all that another process needs; it can neither grow nor shrink the region, nor unseal it."""
    region = Region.create(NBYTES, "test")
    try:
        with mmap.mmap(region.fd, NBYTES) as other:
            other[7] = 9
            assert region.array_U8[7] == 9
        for nbytes in (NBYTES - 1, NBYTES + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(region.fd)
    finally:
        region.close()


def test_a_region_beyond_the_memory_is_refused_with_both_figures() -> None:
    """Refused before any memory is taken."""
    with pytest.raises(RegionTooLarge, match=r"asks for 1,152,921,504,606,846,976 bytes, [\d,]+ bytes are") as error:
        Region.create(1 << 60, "test")
    assert error.value.nbytes == 1 << 60
    assert 0 < error.value.available_bytes < 1 << 60


def test_close_refuses_while_somebody_looks_and_can_be_repeated() -> None:
    """A live view keeps the region open and usable; without it close works, twice."""
    region = Region.create(NBYTES, "test")
    fd, view_U8 = region.fd, region.array_U8[3:9]
    with pytest.raises(RegionInUse):
        region.close()
    view_U8[0] = 4
    assert region.array_U8[3] == 4
    del view_U8
    region.close()
    region.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pytest.raises(AttributeError, match="array_U8"):
        _ = region.array_U8


@pytest.mark.parametrize(
    ("cgroup", "files", "available"),
    [
        ("0::/\n", {}, 8_192_000),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/b/memory.current": "7"}, 8_192_000),
        ("0::/a/b\n", {"a/b/memory.max": "5000", "a/b/memory.current": "1000"}, 4_000),
        ("0::/a/b\n", {"a/memory.max": "900", "a/memory.current": "100"}, 800),
        ("0::/host/path\n", {"memory.max": "700", "memory.current": "100"}, 600),
        ("0::/a\n", {"a/memory.max": "700", "a/memory.current": "900"}, 0),
        (
            "0::/a\n",
            {
                "a/memory.max": "700",
                "a/memory.current": "600",
                "a/memory.stat": "anon 200\nactive_file 100\ninactive_file 250",
            },
            350,
        ),
        (
            "0::/a\n",
            {"a/memory.max": "700", "a/memory.current": "600", "a/memory.stat": "inactive_file 601"},
            700,
        ),
        (
            "4:memory:/c\n",
            {
                "memory/c/memory.limit_in_bytes": "500",
                "memory/c/memory.usage_in_bytes": "300",
                "memory/c/memory.stat": "inactive_file 10\ntotal_inactive_file 200",
            },
            400,
        ),
        (
            "4:cpu,memory:/c\n0::/\n",
            {"memory/c/memory.limit_in_bytes": "500", "memory/c/memory.usage_in_bytes": "1"},
            499,
        ),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], available: int) -> None:
    """MemAvailable, or the room in any memory cgroup above the process, version 1 or 2. What the kernel keeps of files
    that nobody reads is room."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert memory_available_bytes(tmp_path / "proc", tmp_path / "cgroup") == available


def test_a_region_of_huge_pages_is_a_file_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where enough are set apart they are asked for; the file is whole pages, the region is as long as it was asked."""
    asked = []
    real_create = os.memfd_create

    def create(name: str, flags: int) -> int:
        asked.append(flags & os.MFD_HUGETLB)
        return real_create(name, flags & ~os.MFD_HUGETLB)  # this machine may have none

    monkeypatch.setattr(region_module, "_reserved_huge_pages", lambda: (HUGE_PAGE_BYTES, 2))
    monkeypatch.setattr(os, "memfd_create", create)
    region = Region.create(HUGE_PAGE_BYTES + 3, "test")
    try:
        assert asked == [os.MFD_HUGETLB]
        assert os.fstat(region.fd).st_size == 2 * HUGE_PAGE_BYTES
        assert (region.nbytes, len(region.array_U8)) == (HUGE_PAGE_BYTES + 3, HUGE_PAGE_BYTES + 3)
    finally:
        region.close()


def test_huge_pages_that_somebody_else_took_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count said that there were some, and then there are none: ordinary pages, the region no longer than asked."""
    real_create = os.memfd_create

    def create(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOMEM, "none left")
        return real_create(name, flags)

    monkeypatch.setattr(region_module, "_reserved_huge_pages", lambda: (HUGE_PAGE_BYTES, 2))
    monkeypatch.setattr(os, "memfd_create", create)
    region = Region.create(NBYTES, "test")
    try:
        assert os.fstat(region.fd).st_size == NBYTES
    finally:
        region.close()


def test_huge_pages_that_are_promised_to_others_do_not_count(tmp_path: Path) -> None:
    """Free ones less reserved ones; a kernel without huge pages has none."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("HugePages_Total: 9\nHugePages_Free: 7\nHugePages_Rsvd: 3\nHugepagesize: 2048 kB\n")
    assert reserved_huge_pages(tmp_path) == (HUGE_PAGE_BYTES, 4)
    meminfo.write_text("MemTotal: 9 kB\n")
    assert reserved_huge_pages(tmp_path) == (0, 0)
