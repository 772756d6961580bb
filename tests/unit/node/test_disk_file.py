"""The disk tier's file: what comes back, what a restart finds, and everything that may go wrong with a drive."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from cachestore.tier_books import BlockKey, TierSlot
from kvtransfer.native.disk import (
    PAGE_BYTES,
    BlockIo,
    Blocks,
    Offsets,
    PlainBlockIo,
    Results,
    Sums,
    block_io,
    pages,
)
from node import disk_file
from node.disk_file import BLOCKS_IN_FLIGHT_MAX, ERRORS_MAX, DiskFile, Outcome
from node.disk_format import SLOTS_AT
from tests.support.disk_bench import WAIT_S, DiskBench, keys, load, restored, store

DONE, CORRUPT, FAILED = Outcome.DONE, Outcome.CORRUPT, Outcome.FAILED
SIZES = (3 * PAGE_BYTES, 4204)


@pytest.fixture(params=SIZES, ids=["whole pages", "odd size"])
def bench(request: pytest.FixtureRequest) -> DiskBench:
    return DiskBench(request.param)


@pytest.fixture(params=["direct", "page cache"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """On the second kind of file system O_DIRECT is refused at the first read, as some do."""
    if request.param == "page cache":
        monkeypatch.setattr(DiskFile, "_set_direct", lambda self: False)
    return tmp_path / "kv"


def filled(path: Path, bench: DiskBench, of: list[BlockKey], slots: int = 8) -> None:
    """Block n of the bench under the n-th key, in slot n."""

    async def scenario() -> None:
        file = bench.open(path, slots)
        assert await store(file, bench, range(len(of)), of, range(len(of))) == [DONE] * len(of)
        file.close()

    asyncio.run(scenario())


def data_at(bench: DiskBench, slot: int) -> int:
    return bench.identity.slot_at(slot) + bench.identity.header_nbytes


def overwrite(path: Path, at: int, change: Callable[[bytes], bytes], nbytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        was = file.read(nbytes)
        file.seek(at)
        file.write(change(was))


def flip(byte: bytes) -> bytes:
    return bytes([byte[0] ^ 16])


def test_blocks_come_back(bench: DiskBench, path: Path) -> None:
    """Stored from some blocks, loaded to others, in one process; room and counts are those of what is under way."""

    async def scenario() -> None:
        file = bench.open(path, 8)
        assert file.room == BLOCKS_IN_FLIGHT_MAX
        assert await store(file, bench, [0, 7, 3], keys(0, 3), [1, 2, 3]) == [DONE] * 3
        assert await load(file, bench, [7, 3, 0], [10, 11, 12]) == [DONE] * 3
        assert [bench.content(b) for b in (10, 11, 12)] == [bench.content(b) for b in (2, 3, 1)]
        assert file.room == BLOCKS_IN_FLIGHT_MAX
        assert (file.counts.blocks_written, file.counts.blocks_read, file.counts.corrupt) == (3, 3, 0)
        file.close()

    asyncio.run(scenario())


def test_a_restarted_node_begins_warm(bench: DiskBench, path: Path) -> None:
    """All that was stored is found, under its tokens and its tenant's salt only, and comes back."""
    chain, other = keys(0, 3), keys(0, 1, b"tenant")
    filled(path, bench, [*chain, *other])

    async def scenario() -> None:
        expected = [bench.content(b) for b in range(4)]
        bench.memory_U8[:] = 0
        file = bench.open(path, 8)
        books = restored(file)
        assert books.blocks == 4
        assert books.match(chain) == [0, 1, 2] and books.match(other) == [3]
        assert books.match(keys(0, 1, b"stranger")) == [] and books.match(keys(1, 1)) == []
        assert await load(file, bench, [0, 1, 2, 3], [4, 5, 6, 7]) == [DONE] * 4
        assert [bench.content(b) for b in (4, 5, 6, 7)] == expected
        file.close()

    asyncio.run(scenario())


def test_of_two_copies_the_later_one_counts(bench: DiskBench, path: Path) -> None:
    """A block was evicted, then stored again elsewhere: its old slot was never overwritten."""
    (key,) = keys(0, 1)

    async def scenario() -> None:
        file = bench.open(path, 8)
        await store(file, bench, [5], [key], [0])
        file.close()
        file = bench.open(path, 8)
        await store(file, bench, [2], [key], [0])
        file.close()
        file = bench.open(path, 8)
        assert restored(file).match([key]) == [2]
        file.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("slots", [3, 20])
def test_a_file_of_another_size(bench: DiskBench, path: Path, slots: int) -> None:
    """Fewer slots: what was behind them is gone. More: all is there."""
    filled(path, bench, keys(0, 6))
    file = bench.open(path, slots)
    assert restored(file).blocks == min(6, slots)
    assert path.stat().st_size == bench.identity.file_nbytes(slots)
    file.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kv_root": b"x" * 16}, "another model"),
        ({"layout_hash": "other"}, "another layout"),
        ({"block_tokens": 600}, "another size"),
    ],
)
def test_a_file_of_another_model_begins_empty(
    bench: DiskBench, path: Path, change: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line that says why; and the first model finds nothing afterwards either."""
    filled(path, bench, keys(0, 3))
    file = bench.open(path, 3, identity=replace(bench.identity, **change))  # type: ignore[arg-type]
    assert restored(file).blocks == 0
    file.close()
    assert sum(said in str(fields_of(record)) for record in caplog.records) == 1
    file = bench.open(path, 8)
    assert restored(file).blocks == 0
    file.close()


@pytest.mark.parametrize(("at", "said"), [(8, "of format"), (100, "damaged")], ids=["version", "bit"])
def test_a_first_page_that_is_damaged_or_of_another_format(
    bench: DiskBench, path: Path, at: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins empty."""
    filled(path, bench, keys(0, 3))
    overwrite(path, at, flip)
    if said == "of format":
        resum_first_page(path)
    file = bench.open(path, 8)
    assert restored(file).blocks == 0
    file.close()
    assert [said in str(fields_of(record)) for record in caplog.records if record.levelname == "WARNING"] == [True]


def fields_of(record: logging.LogRecord) -> object:
    return getattr(record, "baton_fields", None)


def resum_first_page(path: Path) -> None:
    whole = path.read_bytes()[: PAGE_BYTES - 16]
    overwrite(path, PAGE_BYTES - 16, lambda _: blake2b(whole, digest_size=16).digest(), 16)


@settings(max_examples=40)
@given(data=st.data())
def test_a_flipped_bit_is_a_miss(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Anywhere in a slot, between two processes: the block is not found, nor is the one behind it, which no prompt
    could use; or it is found to be corrupt, and others are whole."""
    bench = DiskBench(data.draw(st.sampled_from(SIZES)), blocks=8)
    path = tmp_path_factory.mktemp("disk") / "kv"
    of = keys(0, 3)
    filled(path, bench, of)
    in_slot = data.draw(st.integers(0, bench.identity.slot_nbytes - 1))
    overwrite(path, bench.identity.slot_at(1) + in_slot, flip)

    async def scenario() -> None:
        file = bench.open(path, 8)
        books = restored(file)
        if in_slot < bench.identity.header_nbytes:
            assert books.match(of) == [0] and books.blocks == 1
        else:
            assert books.match(of) == [0, 1, 2]
            assert await load(file, bench, [0, 1, 2], [4, 5, 6]) == [DONE, CORRUPT, DONE]
            assert file.counts.corrupt == 1
        file.close()

    asyncio.run(scenario())


def test_a_torn_write(bench: DiskBench, path: Path) -> None:
    """Of a block that was to replace another one only the header reached the drive, of a second one only the data, of a
    third one header and half of the data."""
    old, new = ([key for first in range(start, start + 30, 10) for key in keys(first, 1)] for start in (0, 100))
    filled(path, bench, old)
    before = path.read_bytes()
    bench.memory_U8[:] = bench.memory_U8[::-1].copy()
    filled(path, bench, new)
    after = path.read_bytes()
    torn = bytearray(before)
    for slot, (first, last) in enumerate(((0, 0), (-1, 1), (0, 0.5))):
        head, body = bench.identity.slot_at(slot), data_at(bench, slot)
        end = body + int(pages(bench.identity.block_bytes) * last)
        start = body if first else head
        torn[start:body] = after[start:body]
        torn[body:end] = after[body:end]
    path.write_bytes(torn)

    async def scenario() -> None:
        file = bench.open(path, 8)
        books = restored(file)
        assert books.match(new[:1]) == [0] and books.match(old[1:2]) == [1] and books.match(new[2:]) == [2]
        assert await load(file, bench, [0, 1, 2], [4, 5, 6]) == [CORRUPT] * 3
        file.close()

    asyncio.run(scenario())


def test_a_truncated_file(bench: DiskBench, path: Path) -> None:
    """While it is used: what is behind the end fails, the rest comes back. At the next start it has its size again, and
    what was before the end."""
    of = keys(0, 4)

    async def scenario() -> None:
        file = bench.open(path, 8)
        await store(file, bench, range(4), of, range(4))
        os.truncate(path, data_at(bench, 2) + 50)
        assert await load(file, bench, range(4), range(4, 8)) == [DONE, DONE, FAILED, FAILED]
        assert file.counts.read_errors == 2
        file.close()
        file = bench.open(path, 8)
        books = restored(file)
        assert books.match(of) == [0, 1, 2]
        assert await load(file, bench, [0, 1, 2], [4, 5, 6]) == [DONE, DONE, CORRUPT]
        file.close()

    asyncio.run(scenario())
    assert path.stat().st_size == bench.identity.file_nbytes(8)


class Failing:
    """A drive with an error: half of each block is written; or nothing is read."""

    name = "of the test"

    def __init__(self) -> None:
        self.write_error = self.read_error = 0
        self._io: BlockIo = block_io()

    def write(self, fd: int, blocks: Blocks, slot_at_B: Offsets, headers_U8: np.ndarray) -> tuple[Results, Sums]:
        slot_nbytes = headers_U8.nbytes // len(slot_at_B) + pages(blocks.nbytes)
        spans = [(int(at), slot_nbytes // 2 // PAGE_BYTES * PAGE_BYTES) for at in slot_at_B]
        was = [os.pread(fd, slot_nbytes, at)[half:] for at, half in spans] if self.write_error else []
        results, sums = self._io.write(fd, blocks, slot_at_B, headers_U8)
        for (at, half), second in zip(spans, was, strict=False):
            os.pwrite(fd, second, at + half)
        return (np.full_like(results, self.write_error) if self.write_error else results), sums

    def read(self, fd: int, blocks: Blocks, data_at_B: Offsets, sums_B: Sums) -> Results:
        if self.read_error:
            return np.full(len(data_at_B), self.read_error, dtype=np.int32)
        return self._io.read(fd, blocks, data_at_B, sums_B)

    def headers(self, fd: int, at: int, stride: int, headers_U8: np.ndarray, header_nbytes: int) -> Results:
        return self._io.headers(fd, at, stride, headers_U8, header_nbytes)


def on_failing_drive(bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DiskFile, Failing]:
    monkeypatch.setattr(DiskFile, "_set_direct", lambda self: False)
    drive = Failing()
    return bench.open(tmp_path / "kv", 32, io=drive), drive


def test_a_full_drive(
    bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes end half way with ENOSPC: they fail, and what was in their slots is not taken for a block by anybody. What
    was stored before is still read. After some failures in a row nothing is written any more, with one line each."""

    async def scenario() -> None:
        file, drive = on_failing_drive(bench, tmp_path, monkeypatch)
        old, new = keys(0, 2), keys(100, 2)
        assert await store(file, bench, [0, 1], old, [0, 1]) == [DONE, DONE]
        drive.write_error = errno.ENOSPC
        assert await store(file, bench, [1], new[:1], [2]) == [FAILED]
        assert await load(file, bench, [0], [5]) == [DONE] and bench.content(5) == bench.content(0)
        more = keys(1_000, ERRORS_MAX)
        assert await store(file, bench, range(4, 4 + ERRORS_MAX), more, range(ERRORS_MAX)) == [FAILED] * ERRORS_MAX
        assert not file.writable and file.readable
        drive.write_error = 0
        assert await store(file, bench, [20], keys(2_000, 1), [0]) == [FAILED]
        assert await load(file, bench, [0], [6]) == [DONE]
        assert file.counts.write_errors == 1 + ERRORS_MAX
        file.close()
        file = bench.open(tmp_path / "kv", 32)
        books = restored(file)
        assert books.match(old[:1]) == [0]
        for each in (old[1], *new, *more):
            slots = books.match([each])
            assert not slots or await load(file, bench, slots, [7]) == [CORRUPT]
        file.close()

    asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert sum("writing blocks fails" in line for line in lines) == 1
    assert sum("nothing is written any more" in line for line in lines) == 1


def test_a_drive_that_cannot_read(bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO fails the blocks that were asked for; once it has passed they come back; too many in a row end reading."""

    async def scenario() -> None:
        file, drive = on_failing_drive(bench, tmp_path, monkeypatch)
        await store(file, bench, [0, 1], keys(0, 2), [0, 1])
        drive.read_error = errno.EIO
        assert await load(file, bench, [0, 1], [5, 6]) == [FAILED, FAILED]
        drive.read_error = 0
        assert await load(file, bench, [0], [5]) == [DONE]
        assert await load(file, bench, [0] * ERRORS_MAX, range(ERRORS_MAX)) == [DONE] * ERRORS_MAX
        drive.read_error = errno.EIO
        assert await load(file, bench, [0] * ERRORS_MAX, range(ERRORS_MAX)) == [FAILED] * ERRORS_MAX
        drive.read_error = 0
        assert not file.readable and file.writable
        assert await load(file, bench, [0], [5]) == [FAILED]
        file.close()

    asyncio.run(scenario())


def test_a_call_that_raises_fails_its_blocks(
    bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug does not end the thread: the next blocks come back."""

    class Raising(PlainBlockIo):
        broken = True

        def read(self, *args: object) -> Results:
            if self.broken:
                raise ValueError("a bug")
            return super().read(*args)  # type: ignore[arg-type]

    async def scenario() -> None:
        io = Raising()
        file = bench.open(tmp_path / "kv", 8, io=io)
        await store(file, bench, [0], keys(0, 1), [0])
        assert await load(file, bench, [0], [1]) == [FAILED]
        io.broken = False
        assert await load(file, bench, [0], [1]) == [DONE]
        file.close()

    asyncio.run(scenario())
    assert "a call of the disk tier failed" in caplog.text


def test_no_room_at_the_start(bench: DiskBench, tmp_path: Path) -> None:
    """More than the file system has: an error that names the setting, and the file is as it was."""
    filled(tmp_path / "kv", bench, keys(0, 2))
    was = (tmp_path / "kv").stat().st_size
    with pytest.raises(BatonError) as refused:
        bench.open(tmp_path / "kv", (1 << 43) // bench.identity.slot_nbytes)
    assert (refused.value.reason, refused.value.field) == (Reason.BAD_CONFIG, "store.disk_bytes")
    assert (tmp_path / "kv").stat().st_size == was
    file = bench.open(tmp_path / "kv", 8)
    assert restored(file).blocks == 2
    file.close()


def test_less_than_a_block(bench: DiskBench, tmp_path: Path) -> None:
    with pytest.raises(BatonError) as refused:
        bench.open(tmp_path / "kv", 0)
    assert refused.value.field == "store.disk_bytes"
    assert not (tmp_path / "kv").exists()


def test_two_processes_on_one_file(bench: DiskBench, path: Path) -> None:
    """The second one is refused, and changes nothing; when the first one has gone it gets the file."""
    of = keys(0, 1)

    async def scenario() -> None:
        file = bench.open(path, 8)
        with pytest.raises(BatonError, match="in use by another process") as refused:
            bench.open(path, 4, identity=replace(bench.identity, kv_root=b"other"))
        assert refused.value.field == "store.disk_path"
        assert await store(file, bench, [0], of, [0]) == [DONE]
        file.close()
        file = bench.open(path, 8)
        assert restored(file).match(of) == [0]
        file.close()

    asyncio.run(scenario())


def test_what_is_not_ours_is_left_alone(bench: DiskBench, tmp_path: Path) -> None:
    """A path that names somebody else's file, a folder, a device without memory, or nothing that can be made."""
    mine = tmp_path / "letters"
    mine.write_bytes(b"Dear reader" * 1_000)
    with pytest.raises(BatonError, match="not this program's"):
        bench.open(mine, 8)
    assert mine.read_bytes() == b"Dear reader" * 1_000
    for other in (tmp_path, Path("/dev/null"), tmp_path / "no" / "kv"):
        with pytest.raises(BatonError) as refused:
            bench.open(other, 8)
        assert refused.value.field == "store.disk_path"


def test_only_its_owner_reads_it(bench: DiskBench, path: Path) -> None:
    """Prompts can be told from KV. A file that others could read can be read by its owner only from now on."""
    filled(path, bench, keys(0, 1))
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    filled(path, bench, keys(0, 1))
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_is_erased_stays_away(bench: DiskBench, path: Path) -> None:
    """A block that turned out to be broken is not found after a restart, nor one behind it; the others are."""
    of = keys(0, 3)

    async def scenario() -> None:
        file = bench.open(path, 8)
        await store(file, bench, range(3), of, range(3))
        assert await file.erase([TierSlot(1)])
        assert await store(file, bench, [5], keys(50, 1), [5]) == [DONE]
        file.close()

    asyncio.run(scenario())
    file = bench.open(path, 8)
    books = restored(file)
    assert books.match(of) == [0] and books.match(keys(50, 1)) == [5] and books.blocks == 2
    file.close()


def test_an_emptied_file(bench: DiskBench, path: Path) -> None:
    """A restart finds only what was stored after it was emptied."""
    of, later = keys(0, 3), keys(50, 1)

    async def scenario() -> None:
        file = bench.open(path, 8)
        await store(file, bench, range(3), of, range(3))
        assert await file.empty()
        await store(file, bench, [5], later, [5])
        assert await load(file, bench, [0], [6]) == [DONE]
        file.close()
        assert not await file.empty()

    asyncio.run(scenario())
    file = bench.open(path, 8)
    books = restored(file)
    assert books.blocks == 1 and books.match(later) == [5]
    file.close()


def test_a_file_that_says_that_it_is_empty_is_empty_for_whoever_reads_it(bench: DiskBench, path: Path) -> None:
    """Two other blocks are being written when the file is emptied. As soon as that is said, and before these have
    landed, the file on the drive has none of them: what a killed process leaves behind. Nor has it later."""
    of = keys(0, 3)
    begun, may_go = threading.Event(), threading.Event()

    async def scenario() -> None:
        file = bench.open(path, 8)
        await store(file, bench, [0], of[:1], [0])
        real = file._io

        def write(*arguments: Any) -> Any:
            begun.set()
            assert may_go.wait(WAIT_S)
            return real.write(*arguments)

        with patch.object(file, "_io", SimpleNamespace(write=write, read=real.read)):
            writing = [asyncio.ensure_future(store(file, bench, [n], of[n : n + 1], [n])) for n in (1, 2)]
            await asyncio.to_thread(begun.wait)
            assert await file.empty()
            left = path.with_name("left")
            await asyncio.to_thread(shutil.copyfile, path, left)
            may_go.set()
            await asyncio.gather(*writing)
        file.close()
        for name in (left, path):
            later = bench.open(name, 8)
            assert restored(later).blocks == 0
            later.close()

    asyncio.run(scenario())


def test_a_drive_that_cannot_be_emptied_says_so(bench: DiskBench, path: Path) -> None:
    """The page cannot be written."""

    async def scenario() -> None:
        file = bench.open(path, 8)
        with patch.object(file, "_write_page", side_effect=OSError(errno.EIO, "bad drive")):
            assert not await file.empty()
        file.close()

    asyncio.run(scenario())


def test_nothing_is_reported_after_close(bench: DiskBench, tmp_path: Path) -> None:
    """Blocks that are under way when the node ends: the file is given back, and nobody is called."""

    async def scenario() -> None:
        file = bench.open(tmp_path / "kv", 16)
        called: list[object] = []
        slots = [TierSlot(s) for s in range(16)]
        file.start_store(bench.memory_U8, slots, keys(0, 16), bench.places(range(16)), called.append)
        assert file.room == BLOCKS_IN_FLIGHT_MAX - 16
        file.close()
        file.close()
        for _ in range(3):
            await asyncio.sleep(0)
        assert called == []
        bench.open(tmp_path / "kv", 16).close()

    asyncio.run(scenario())


def test_what_it_says_of_itself(bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many blocks, and how they are written."""
    file = bench.open(tmp_path / "kv", 8)
    assert file.describe().startswith(f"{tmp_path / 'kv'}: 8 blocks of {bench.identity.block_bytes:,} bytes, ")
    assert ("direct" in file.describe()) == file.direct
    file.close()
    monkeypatch.setattr(DiskFile, "_set_direct", lambda self: False)
    file = bench.open(tmp_path / "kv", 8)
    assert "through the page cache (no O_DIRECT here)" in file.describe()
    file.close()


def test_a_file_system_without_o_direct(bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the flag and refuses the first read: the page cache is used, and blocks come back."""
    preadv = os.preadv
    refused: list[int] = []

    def refusing(fd: int, buffers: list[memoryview], at: int) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", refusing)

    async def scenario() -> None:
        file = bench.open(tmp_path / "kv", 8)
        assert not file.direct
        assert await store(file, bench, [0], keys(0, 1), [0]) == [DONE]
        assert await load(file, bench, [0], [1]) == [DONE]
        file.close()

    asyncio.run(scenario())


WRITER = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from tests.support.disk_bench import DiskBench, keys, store

async def main():
    bench = DiskBench(12288)
    file = bench.open(Path(sys.argv[1]), 16)
    for turn in range(10**6):
        for block in range(16):
            bench.memory_U8.reshape(16, -1)[block] = (turn * 16 + block) % 251
        await store(file, bench, range(16), [keys(turn * 1000 + b * 10, 1)[0] for b in range(16)], range(16))
        print(turn, flush=True)

asyncio.run(main())
"""


def test_a_killed_process(tmp_path: Path) -> None:
    """Killed while it overwrites every slot again and again: a restart finds blocks, and each is the one that its
    tokens say, or is found to be corrupt."""
    path = tmp_path / "kv"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        for line in writer.stdout:
            if int(line) == 20:
                break
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()
    bench = DiskBench(12288)
    outcomes: list[Outcome] = []

    async def scenario() -> None:
        file = bench.open(path, 16)
        books = restored(file)
        assert books.blocks > 0
        for key in list(books.stored_keys()):
            (slot,) = books.match([key])
            (outcome,) = await load(file, bench, [slot], [0])
            outcomes.append(outcome)
            first = np.frombuffer(key.packed, dtype="<i8")[0]
            if outcome is DONE:
                value = (first // 1000 * 16 + first % 1000 // 10) % 251
                assert bench.content(0) == bytes([value]) * bench.identity.block_bytes
            else:
                assert outcome is CORRUPT
        file.close()

    asyncio.run(scenario())
    assert DONE in outcomes


def test_slots_begin_on_pages(bench: DiskBench) -> None:
    """And so does their data; nothing overlaps."""
    identity = bench.identity
    places = [identity.slot_at(slot) for slot in range(5)]
    assert places[0] == SLOTS_AT and not any(at % PAGE_BYTES for at in places)
    assert identity.header_nbytes % PAGE_BYTES == 0
    assert {b - a for a, b in pairwise(places)} == {bench.identity.slot_nbytes}
    assert identity.slots_in(identity.file_nbytes(5)) == 5
    assert identity.slots_in(identity.file_nbytes(5) - 1) == 4


class Stopping(PlainBlockIo):
    """A drive on which the file is closed while a block is being moved."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def write(self, fd: int, blocks: Blocks, slot_at_B: Offsets, headers_U8: np.ndarray) -> tuple[Results, Sums]:
        self.begun.set()
        until_s = time.monotonic() + WAIT_S
        while not blocks.stop_1[0]:
            assert time.monotonic() < until_s
            os.sched_yield()
        return super().write(fd, blocks, slot_at_B, headers_U8)


def test_a_stop_does_not_begin_another_block(
    bench: DiskBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Many blocks are being written when the file is closed: the rest of them is not, nobody is told, and that is no
    error of the drive."""

    async def scenario() -> None:
        io = Stopping()
        told: list[Sequence[Outcome]] = []
        file = bench.open(tmp_path / "kv", 8, io=io)
        file.start_store(
            bench.memory_U8, [TierSlot(s) for s in range(8)], keys(0, 8), bench.places(range(8)), told.append
        )
        assert await asyncio.to_thread(io.begun.wait, WAIT_S)
        await asyncio.to_thread(file.close)
        assert told == []
        file = bench.open(tmp_path / "kv", 8)
        assert restored(file).blocks == 0
        file.close()

    asyncio.run(scenario())
    assert "fails on the disk tier" not in caplog.text


def test_a_stop_that_has_no_time_to_erase_empties_the_file(
    bench: DiskBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its blocks are not to be found any more, and the drive takes too long over each: none is found."""
    filled(tmp_path / "kv", bench, keys(0, 4))
    monkeypatch.setattr(disk_file, "ERASE_S_MAX", -1.0)

    async def scenario() -> None:
        with patch.object(
            DiskFile, "_queue", lambda self, queue, part, first: queue.append(part) or first
        ):  # wakes nobody
            file = bench.open(tmp_path / "kv", 8)
            file.erase([TierSlot(1)])
            file.close()

    asyncio.run(scenario())
    file = bench.open(tmp_path / "kv", 8)
    assert restored(file).blocks == 0
    file.close()


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """A raw device of 4 MiB, all zeros."""
    below = tmp_path / "below"
    below.write_bytes(bytes(4 << 20))
    try:
        made = subprocess.run(["losetup", "--show", "-f", str(below)], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no loop devices here")
    path = Path(made.stdout.strip())
    yield path
    subprocess.run(["losetup", "-d", str(path)], check=True)


def test_a_raw_device(bench: DiskBench, device: Path) -> None:
    """Blocks come back after a restart. It is not taken by two processes, nor for more bytes than it has."""
    filled(device, bench, keys(0, 3))

    async def scenario() -> None:
        file = bench.open(device, 8)
        with pytest.raises(BatonError, match="another process"):
            bench.open(device, 8)
        assert restored(file).match(keys(0, 3)) == [0, 1, 2]
        assert await load(file, bench, [0, 1, 2], [5, 6, 7]) == [DONE] * 3
        assert [bench.content(b) for b in (5, 6, 7)] == [bench.content(b) for b in (0, 1, 2)]
        file.close()
        with pytest.raises(BatonError, match="fewer than"):
            bench.open(device, 1000)

    asyncio.run(scenario())


@pytest.mark.parametrize("at", [0, 1024, 4096, 64 << 10], ids=["first byte", "ext4", "RAID", "btrfs"])
def test_a_raw_device_with_something_else(bench: DiskBench, device: Path, at: int) -> None:
    """Its beginning is a file system's, wherever that begins: it is left as it is."""
    with device.open("r+b") as raw:
        raw.seek(at)
        raw.write(b"other")
    with pytest.raises(BatonError, match="left as it is"):
        bench.open(device, 8)
    with device.open("rb") as raw:
        raw.seek(at)
        assert raw.read(5) == b"other"
