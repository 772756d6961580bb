"""Copying of records: by C with every kind of instructions that this machine has, and by NumPy, as by a plain loop."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton import native as native_module
from baton.native import COMPILERS, FLAGS, NotBuilt, build, library_name, load
from kvtransfer.native import copy as native_copies
from kvtransfer.native.copy import LEVELS, NativeCopy, copies_by, copy_by_numpy, copy_records, native_copy
from kvtransfer.transport import WriteOps, WriteOutOfBounds
from kvtransfer.transports import shm
from kvtransfer.transports.shm import CopyLanes, CopyParts, ShmLinkLimits, cut_chunks
from tests.support.shm_harness import DEADLINE_S, grant_of, ops_of

SRC_NBYTES, DST_NBYTES = 300, 200
SOURCE = Path(shm.__file__).parents[1] / "native" / "copy.c"
GUARD = 0xA5
USER = "someone"

Copy = Callable[[np.ndarray, np.ndarray, WriteOps], None]


def native_at(level: int) -> Copy:
    library = load(SOURCE)
    assert library.handle is not None, library.status
    native = NativeCopy(library.handle, level)
    return lambda dst_U8, src_U8, ops: native(dst_U8, src_U8, ops.dst, ops.src, ops.nbytes)


def every_copy() -> dict[str, Copy]:
    best = native_copy()
    assert best is not None, "the tests need a C compiler (gcc or clang)"
    return {"numpy": copy_by_numpy, **{LEVELS[level]: native_at(level) for level in range(best.level_max + 1)}}


def test_the_native_copy_is_the_one_in_use() -> None:
    """On a machine with a compiler the library is built and used, at the best level that the machine has."""
    assert copies_by() == f"native, {list(every_copy())[-1]}"


@given(st.data())
def test_every_copy_does_what_a_plain_loop_does(data: st.DataObject) -> None:
    """Any offsets, lengths (0, odd, many lines) and alignments: the same bytes, and none beside them is touched."""
    lengths = st.one_of(st.integers(0, 130), st.integers(480, 1100), st.integers(4_000, 9_000))
    count = data.draw(st.integers(0, 6))
    nbytes = [data.draw(lengths) for _ in range(count)]
    gaps = [data.draw(st.integers(0, 130)) for _ in range(count + 1)]
    srcs = [data.draw(st.integers(0, 60_000 - n)) for n in nbytes]
    dsts = [gaps[0] + sum(nbytes[:i]) + sum(gaps[1 : i + 1]) for i in range(count)]
    shift = data.draw(st.integers(0, 63))
    order = data.draw(st.permutations(range(count)))
    ops = ops_of([srcs[i] for i in order], [dsts[i] for i in order], [nbytes[i] for i in order])
    src_U8 = np.random.default_rng(0).integers(0, 256, 60_000 + shift, dtype=np.uint8)[shift:]
    wanted_U8 = np.full(sum(nbytes) + sum(gaps), GUARD, np.uint8)
    for src, dst, n in zip(ops.src, ops.dst, ops.nbytes, strict=True):
        wanted_U8[dst : dst + n] = src_U8[src : src + n]
    for name, copy in every_copy().items():
        dst_U8 = np.full(len(wanted_U8) + 64, GUARD, np.uint8)[shift : shift + len(wanted_U8)]
        copy(dst_U8, src_U8, ops)
        assert np.array_equal(dst_U8, wanted_U8), name


@pytest.mark.parametrize("has_native", [True, False])
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, SRC_NBYTES), st.integers(0, DST_NBYTES), st.integers(0, 40)), max_size=12),
    st.booleans(),
)
def test_records_are_copied_as_one_by_one(
    has_native: bool, size: int, raw: list[tuple[int, int, int]], on_grid: bool
) -> None:
    """Equal records on their grid, or any mixture: as after a plain loop, or nothing at all when one op is bad."""
    if on_grid:
        # Destinations are not repeated: of two copies to one place either may be the last.
        by_row = {dst // size: src // size * size for src, dst, _ in raw}
        triples = [(src, row * size, size) for row, src in by_row.items()]
    else:
        triples = raw
    ops = ops_of([t[0] for t in triples], [t[1] for t in triples], [t[2] for t in triples])
    src_U8 = np.random.default_rng(0).integers(1, 256, SRC_NBYTES, dtype=np.uint8)
    dst_U8, wanted_U8 = np.zeros(DST_NBYTES, np.uint8), np.zeros(DST_NBYTES, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        if not has_native:
            patch.setattr(native_copies, "native_copy", lambda: None)
        if any(src + n > SRC_NBYTES or dst + n > DST_NBYTES for src, dst, n in triples):
            with pytest.raises(WriteOutOfBounds):
                copy_records(dst_U8, src_U8, ops)
        else:
            copy_records(dst_U8, src_U8, ops)
            for src, dst, n in triples:
                wanted_U8[dst : dst + n] = src_U8[src : src + n]
    assert np.array_equal(dst_U8, wanted_U8)


def test_arrays_with_gaps_are_copied_too() -> None:
    """Every second entry of a plan: the C code walks through contiguous arrays, so they are made so."""
    every = ops_of([0, 9, 2, 9, 4, 9], [5, 9, 3, 9, 1, 9], [1, 9, 1, 9, 1, 9])
    ops = WriteOps(src=every.src[::2], dst=every.dst[::2], nbytes=every.nbytes[::2])
    dst_U8 = np.zeros(8, np.uint8)
    copy_records(dst_U8, np.arange(1, 20, dtype=np.uint8), ops)
    assert dst_U8.tolist() == [0, 5, 0, 3, 0, 1, 0, 0]


@given(st.lists(st.integers(0, 900_000), max_size=40), st.integers(1, 4), st.integers(1, 20), st.integers(1, 3_000_000))
def test_chunks_take_every_op_once_and_keep_their_limits(
    lengths: list[int], threads: int, ops_max: int, bytes_max: int
) -> None:
    """In order; no chunk is empty, has too many ops, or goes on once it is full."""
    limits = ShmLinkLimits(copy_chunk_ops_max=ops_max, copy_chunk_bytes_max=bytes_max)
    at = list(range(len(lengths)))
    chunks = list(cut_chunks(ops_of(at, at, lengths), threads, limits))
    assert [src for chunk in chunks for src in chunk.ops.src] == at
    for chunk in chunks:
        assert chunk.ops.src.tolist() == chunk.ops.dst.tolist()
        of_chunk = [lengths[i] for i in chunk.ops.src]
        assert (chunk.ops.nbytes.tolist(), chunk.nbytes) == (of_chunk, sum(of_chunk))
        assert of_chunk or not lengths
        assert len(of_chunk) <= ops_max
        assert sum(of_chunk[:-1]) <= bytes_max


def test_a_large_batch_is_cut_for_all_threads_and_a_small_one_is_not() -> None:
    """64 records of 16 KiB in two halves for two threads; 8 of them at once; 1,024 of them in pieces of 4 MiB, and at
    the end of half of what is left."""
    limits = ShmLinkLimits(copy_chunk_ops_max=1024, copy_chunk_bytes_max=4 << 20)

    def lengths(count: int) -> list[int]:
        at = [i << 14 for i in range(count)]
        return [len(chunk.ops.src) for chunk in cut_chunks(ops_of(at, at, [1 << 14] * count), 2, limits)]

    assert lengths(64) == [32, 32]
    assert lengths(8) == [8]
    assert lengths(1024) == [256, 256, 256, 128, 64, 64]


def test_threads_of_all_pools_take_turns() -> None:
    """Two pools of two threads with one turn between them: never do two copy at a time, and every batch completes,
    its bytes in place."""
    busy = busiest = 0
    lock = threading.Lock()
    real_copy = native_copies.copy_checked

    def copy(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
        nonlocal busy, busiest
        with lock:
            busy += 1
            busiest = max(busiest, busy)
        real_copy(dst_U8, src_U8, ops)
        with lock:
            busy -= 1

    async def scenario() -> None:
        loop, turns = asyncio.get_running_loop(), threading.Semaphore(1)
        limits = ShmLinkLimits(copy_chunk_ops_max=1, copy_chunk_bytes_max=1 << 20)
        src_U8 = np.arange(1, 65, dtype=np.uint8)
        left, drained = 40, [loop.create_future() for _ in range(2)]
        all_done = loop.create_future()

        def completed(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                all_done.set_result(None)

        def pool_of(i: int) -> CopyLanes:
            parts = CopyParts(
                dst=np.zeros(64, np.uint8),
                src=src_U8,
                dst_nbytes=64,
                src_nbytes=64,
                loop=loop,
                completed=completed,
                drained=lambda: drained[i].set_result(None),
                name=f"pool-{i}",
            )
            pool = CopyLanes(parts, threads=2, limits=limits, turns=turns)
            pool.start()
            return pool

        pools = [pool_of(0), pool_of(1)]
        places = list(range(0, 64, 8))
        for _ in range(20):
            for pool in pools:
                pool.queue.post(grant_of(1), ops_of(places, places, [8] * 8))
        async with asyncio.timeout(DEADLINE_S):
            await all_done
            for pool, future in zip(pools, drained, strict=True):
                assert np.array_equal(pool._dst, src_U8)
                pool.queue.stop()
                await future
                pool.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shm, "copy_checked", copy)
        asyncio.run(scenario())
    assert busiest == 1


def test_a_pool_whose_second_thread_cannot_start_leaves_none() -> None:
    """The machine has no more threads: the first one of the pool ends too, and the pool is drained."""
    before = set(threading.enumerate())
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.endswith("-1"):
            raise RuntimeError("can't start new thread")
        start(thread)

    async def scenario() -> None:
        drained = asyncio.Event()
        parts = CopyParts(
            dst=np.zeros(8, np.uint8),
            src=np.zeros(8, np.uint8),
            dst_nbytes=8,
            src_nbytes=8,
            loop=asyncio.get_running_loop(),
            completed=lambda *_: None,
            drained=drained.set,
            name="copies",
        )
        pool = CopyLanes(
            parts, threads=2, limits=ShmLinkLimits(copy_chunk_ops_max=8), turns=threading.BoundedSemaphore(2)
        )
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.start()
        async with asyncio.timeout(DEADLINE_S):
            await drained.wait()
        pool.join()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        asyncio.run(scenario())
    assert set(threading.enumerate()) == before


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is built and nothing raised; what was built before needs no compiler."""
    source = tmp_path / "a" / "copy.c"
    source.parent.mkdir()
    source.write_bytes(SOURCE.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as without:
        without.setattr(native_module, "COMPILERS", ())
        library = load(source)
        assert (library.handle, library.status) == (None, "not built: no C compiler () was found")
    built = build(source, source.parent)
    assert built.name == library_name(source)
    monkeypatch.setattr(native_module, "COMPILERS", ())
    assert load(source).status == f"loaded from {built}"


def test_the_compilers_error_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    """A source that does not compile: its first error, no file beside it."""
    source = tmp_path / "broken.c"
    source.write_text("int f(void) { return g; }\n")
    with pytest.raises(NotBuilt, match=r"error: .*g"):
        build(source, tmp_path)
    assert list(tmp_path.iterdir()) == [source]


def test_what_a_killed_build_has_left_is_removed(tmp_path: Path) -> None:
    """By the next one, once no compiler can be at it any more."""
    source, abandoned, under_way = (tmp_path / name for name in ("copy.c", "copy-1.part", "copy-2.part"))
    source.write_bytes(SOURCE.read_bytes())
    for part in (abandoned, under_way):
        part.touch()
    long_ago_s = time.time() - 2 * native_module.COMPILE_S_MAX
    os.utime(abandoned, (long_ago_s, long_ago_s))
    built = build(source, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([source, under_way, built])


@pytest.mark.parametrize("damage", ["cut short", "overwritten", "empty"])
def test_a_damaged_library_is_built_anew(tmp_path: Path, damage: str) -> None:
    """A copy that broke off has left part of one, or none of one, under its name."""
    source = tmp_path / "copy.c"
    source.write_bytes(SOURCE.read_bytes())
    built = build(source, tmp_path)
    whole = built.read_bytes()
    built.write_bytes({"cut short": whole[: len(whole) // 2], "overwritten": bytes(len(whole)), "empty": b""}[damage])
    assert load(source).status == f"loaded from {built}"
    assert len(built.read_bytes()) == len(whole)


def set_group(monkeypatch: pytest.MonkeyPatch, *, name: str, members: list[str]) -> None:
    """What the accounts say of the group of every file here, which is the user's first one."""
    account = pwd.struct_passwd((USER, "x", os.geteuid(), os.getegid(), "", "/", ""))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: account)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))


def test_a_folder_that_the_owners_private_group_may_write_to_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """umask 002 and a group for each user: so the package was installed with its library, and nothing can be built."""
    source = tmp_path / "copy.c"
    source.write_bytes(SOURCE.read_bytes())
    built = build(source, tmp_path)
    tmp_path.chmod(0o775)
    built.chmod(0o775)
    monkeypatch.setattr(native_module, "COMPILERS", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    set_group(monkeypatch, name=USER, members=[])
    assert load(source).status == f"loaded from {built}"
    set_group(monkeypatch, name="staff", members=[])
    assert load(source).handle is None


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_library_that_another_user_may_change_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """In a folder that everybody or a group may write to it is not loaded; the one in the user's own cache is."""
    set_group(monkeypatch, name=USER, members=["another"])
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    source = shared / "copy.c"
    source.write_bytes(SOURCE.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert load(source).status == f"loaded from {tmp_path / 'cache' / 'baton' / library_name(source)}"


def test_a_user_without_a_home_has_the_library_beside_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container runs under an id that has no account, and the package belongs to another one: what was built with
    the package is loaded all the same; where nothing was and nothing can be, the reason is told."""
    source = tmp_path / "copy.c"
    source.write_bytes(SOURCE.read_bytes())
    built = build(source, tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "~")  # what it looks like when neither HOME nor an account gives one
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert load(source).status == f"loaded from {built}"
    built.unlink()
    monkeypatch.setattr(native_module, "COMPILERS", ())
    library = load(source)
    assert library.handle is None
    assert library.status.endswith("; this user has no home, and XDG_CACHE_HOME is not set")


def test_the_source_has_no_warnings(tmp_path: Path) -> None:
    """Warnings are errors here, though not at a user's."""
    compiler = next(found for name in COMPILERS if (found := shutil.which(name)))
    for source in SOURCE.parent.glob("*.c"):
        target = tmp_path / "out.so"
        done = subprocess.run(
            [compiler, *FLAGS, "-Werror", "-Wconversion", "-o", str(target), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if "infiniband/verbs.h: No such file" in done.stderr:
            continue  # this machine has not what the poster is built with
        assert (done.returncode, done.stderr) == (0, "")
