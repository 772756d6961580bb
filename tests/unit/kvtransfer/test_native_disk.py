"""Blocks to a file and back, by C and by Python: the same bytes in the file, the same sums, the same errors."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.native import COMPILERS
from kvtransfer.native.disk import (
    PAGE_BYTES,
    UNIT_BYTES,
    BlockIo,
    Blocks,
    NativeBlockIo,
    PlainBlockIo,
    native_block_io,
    page_buffer,
    pages,
    sum64,
)
from tests.support.disk_bench import DiskBench

WHOLE = 3 * PAGE_BYTES
"""Needs no bounce buffer."""
ODD = 4204
SIZES = (WHOLE, ODD)

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C compiler")


def native() -> NativeBlockIo:
    io = native_block_io()
    assert io is not None
    return io


@pytest.fixture(params=[pytest.param("native", marks=needs_compiler), "plain"])
def io(request: pytest.FixtureRequest) -> BlockIo:
    return native() if request.param == "native" else PlainBlockIo()


def blocks(bench: DiskBench, of: list[int], *, stopped: bool = False) -> Blocks:
    nbytes = bench.identity.block_bytes
    return Blocks(
        memory_U8=bench.memory_U8,
        at_B=bench.places(of),
        nbytes=nbytes,
        bounce_U8=page_buffer(pages(nbytes)),
        stop_1=np.array([stopped], dtype=np.int32),
    )


def written(
    bench: DiskBench, io: BlockIo, fd: int, of: list[int], *, stopped: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Into slots from the file's beginning on. -> headers, results, sums."""
    identity = bench.identity
    headers_U8 = page_buffer(len(of) * identity.header_nbytes)
    headers_U8[:] = np.random.default_rng(9).integers(0, 256, len(headers_U8), np.uint8)
    slot_at_B = np.arange(len(of), dtype=np.int64) * identity.slot_nbytes
    results, sums = io.write(fd, blocks(bench, of, stopped=stopped), slot_at_B, headers_U8)
    return headers_U8, results, sums


def read(
    bench: DiskBench, io: BlockIo, fd: int, of: list[int], sums: np.ndarray, *, stopped: bool = False
) -> list[int]:
    identity = bench.identity
    data_at_B = np.arange(len(of), dtype=np.int64) * identity.slot_nbytes + identity.header_nbytes
    found = io.read(fd, blocks(bench, of, stopped=stopped), data_at_B, sums)
    return [int(each) for each in found]


@needs_compiler
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.booleans())
def test_sums_are_the_same_everywhere(units: int, seed: int, flat: bool) -> None:
    """With and without the machine's own instructions, and by NumPy; of random bytes, and of equal ones."""
    rng = np.random.default_rng(seed)
    data_U8 = (
        np.full(units * UNIT_BYTES, seed % 256, np.uint8)
        if flat
        else rng.integers(0, 256, units * UNIT_BYTES, np.uint8)
    )
    assert native().sum64(data_U8) == native().sum64(data_U8, plain=True) == sum64(data_U8)


@given(st.integers(1, 4), st.data())
def test_a_sum_sees_every_small_change(units: int, data: st.DataObject) -> None:
    """One bit, a word of zeros, two KiB swapped, a KiB more: another sum."""
    data_U8 = np.random.default_rng(units).integers(0, 256, units * UNIT_BYTES, np.uint8)
    was = sum64(data_U8)
    other_U8 = data_U8.copy()
    at = data.draw(st.integers(0, len(data_U8) - 1))
    other_U8[at] ^= 1 << data.draw(st.integers(0, 7))
    assert sum64(other_U8) != was
    other_U8 = data_U8.copy()
    other_U8[at & ~7 : (at & ~7) + 8] = 0
    assert sum64(other_U8) != was
    assert sum64(np.concatenate([data_U8, np.zeros(UNIT_BYTES, np.uint8)])) != was
    if units > 1:
        assert sum64(np.roll(data_U8, UNIT_BYTES)) != was


def test_a_known_sum() -> None:
    """It is part of the file's format: another one would make every file of an earlier version useless."""
    assert sum64(np.arange(2 * UNIT_BYTES, dtype=np.uint16).view(np.uint8)) == 612988437604626825


@pytest.mark.parametrize("size", SIZES)
def test_blocks_come_back(io: BlockIo, size: int, tmp_path: Path) -> None:
    """Three blocks go to the file and come back to others; nothing else in memory is touched. Headers have their sums,
    and are read alone."""
    bench = DiskBench(size, blocks=8)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    headers_U8, results, sums = written(bench, io, fd, [5, 0, 3])
    assert results.tolist() == [0, 0, 0]
    expected = [bench.content(b) for b in (0, 1, 2, 3, 4, 5, 6, 7)]
    assert read(bench, io, fd, [1, 6, 7], sums) == [0, 0, 0]
    expected[1], expected[6], expected[7] = expected[5], expected[0], expected[3]
    assert [bench.content(b) for b in range(8)] == expected
    found_U8 = page_buffer(4 * bench.identity.header_nbytes)
    assert io.headers(fd, 0, bench.identity.slot_nbytes, found_U8, bench.identity.header_nbytes).tolist() == [
        0, 0, 0, errno.ENODATA,
    ]  # fmt: skip
    assert (found_U8[: len(headers_U8)] == headers_U8).all()
    os.close(fd)


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_both_ways_write_the_same_file(size: int, tmp_path: Path) -> None:
    """A node that has lost its compiler goes on with the file, and the other way round."""
    bench, files = DiskBench(size), []
    for name, way in (("native", native()), ("plain", PlainBlockIo())):
        fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        written(bench, way, fd, [5, 0, 3])
        os.close(fd)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert len(files[0]) == 3 * bench.identity.slot_nbytes


@pytest.mark.parametrize("size", SIZES)
def test_each_wrong_block_is_found(io: BlockIo, size: int, tmp_path: Path) -> None:
    """Of three blocks the second has a wrong bit in its data, and the header of the third in its tokens."""
    bench = DiskBench(size)
    path, shape = tmp_path / "file", bench.identity
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    _, _, sums = written(bench, io, fd, [0, 1, 2])
    flip(fd, shape.slot_nbytes + shape.header_nbytes + 70)
    flip(fd, 2 * shape.slot_nbytes + 200)
    was = bench.content(4)
    assert read(bench, io, fd, [3, 4, 5], sums) == [0, errno.EBADMSG, 0]
    assert bench.content(3) == bench.content(0) and bench.content(5) == bench.content(2)
    if size == ODD:
        assert bench.content(4) == was  # through a bounce buffer, which is looked at first
    found_U8 = page_buffer(3 * shape.header_nbytes)
    results = io.headers(fd, 0, shape.slot_nbytes, found_U8, shape.header_nbytes)
    assert results.tolist() == [0, 0, errno.EBADMSG]
    os.close(fd)


def flip(fd: int, at: int) -> None:
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 4]), at)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_that_ends_early(io: BlockIo, size: int, tmp_path: Path) -> None:
    """In the middle of the second block: that one is not there, the first one is."""
    bench = DiskBench(size)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    _, _, sums = written(bench, io, fd, [0, 1])
    os.ftruncate(fd, bench.identity.slot_nbytes + bench.identity.header_nbytes + 100)
    assert read(bench, io, fd, [3, 4], sums) == [0, errno.ENODATA]
    os.close(fd)


@pytest.mark.parametrize("size", SIZES)
def test_errors_of_the_drive(io: BlockIo, size: int) -> None:
    """A full drive, and one that cannot read: the kernel's own, as /dev/full and unmapped memory give them."""
    bench = DiskBench(size)
    fd = os.open("/dev/full", os.O_RDWR)
    _, results, _ = written(bench, io, fd, [0, 1])
    assert results.tolist() == [errno.ENOSPC, errno.ENOSPC]
    os.close(fd)
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    assert read(bench, io, fd, [0, 1], np.zeros(2, dtype=np.uint64)) == [errno.EIO, errno.EIO]
    page_U8 = page_buffer(PAGE_BYTES)
    assert io.headers(fd, 0, PAGE_BYTES, page_U8, PAGE_BYTES).tolist() == [errno.EIO]
    os.close(fd)


def test_records_outside_of_memory_are_a_bug(io: BlockIo, tmp_path: Path) -> None:
    """Nothing is read or written there."""
    bench = DiskBench(ODD, blocks=2)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(AssertionError):
        written(bench, io, fd, [2])
    assert os.fstat(fd).st_size == 0
    os.close(fd)


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_is_to_stop(io: BlockIo, size: int, tmp_path: Path) -> None:
    """No block is begun: neither the file nor the memory changes."""
    bench = DiskBench(size)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    _, results, _ = written(bench, io, fd, [0, 1], stopped=True)
    assert results.tolist() == [errno.ECANCELED] * 2 and os.fstat(fd).st_size == 0
    _, _, sums = written(bench, io, fd, [0, 1])
    was = bench.content(3)
    assert read(bench, io, fd, [3, 4], sums, stopped=True) == [errno.ECANCELED] * 2
    assert bench.content(3) == was
    os.close(fd)
