"""The disk tier's file: blocks are written to its slots and read back by threads; which block is where, others know.

`cachestore.tier_books` keeps those books, `node/disk_format.py` says what the file looks like. What is read is compared
with a sum of 64 bits that was taken as it was written, so a torn write, a flipped bit or a lost page is a miss and
never a wrong byte. Nothing is synced: what a crash of the machine takes away is such a miss too.

Shape suffixes: U8 = one-dimensional array of bytes; B = one entry per block.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import secrets
import stat
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from baton.errors import BatonError, Reason
from baton.log import get_log
from baton.tasks import call_loop
from cachestore.tier_books import BlockKey, TierBooks, TierSlot
from kvtransfer.native.disk import (
    PAGE_BYTES,
    BlockIo,
    Blocks,
    Offsets,
    Results,
    Sums,
    block_io,
    page_buffer,
    pages,
)
from node.disk_format import (
    FILE_ID_BYTES,
    SLOTS_AT,
    FileIdentity,
    FirstPage,
    FoundBlock,
    NotOurs,
    pack_block_header,
    pack_first_page,
    read_block_header,
    read_first_page,
)

log = get_log("disk")

PATH_FIELD: Final = "store.disk_path"
BYTES_FIELD: Final = "store.disk_bytes"

THREADS: Final = 4
"""Reads and writes at a time: what keeps an NVMe drive busy with blocks of 64 KiB and more, and so few threads."""
BLOCKS_IN_FLIGHT_MAX: Final = 1024
"""Asked for and not reported yet. The caller looks at `room` first."""
PART_BLOCKS_MAX: Final = 64
PART_BYTES_MAX: Final = 4 << 20
"""Of one call of a thread, which no other work can come before: some milliseconds of a drive."""
ERRORS_MAX: Final = 8
"""Failed blocks in a row, after which nothing is written any more; likewise reading."""
NEW_DEVICE_BYTES: Final = 1 << 20
"""Zeros at the beginning of a raw device, before it is taken."""
ERASE_S_MAX: Final = 5.0
"""Of `close`."""
SCAN_BYTES: Final = 1 << 20
"""Headers that a thread reads at a time when the file is opened."""


class Outcome(Enum):
    """What became of one block."""

    DONE = "done"
    CORRUPT = "corrupt"
    """Read, and not what was written: forget the block."""
    FAILED = "failed"
    """An error of the drive, or none was asked: the file is closed, or its errors were too many."""


Bytes = npt.NDArray[np.uint8]
Done = Callable[[Sequence[Outcome]], None]
"""One for each block, in the order that they were asked for in."""


@dataclass(slots=True, kw_only=True)
class DiskCounts:
    """Totals since the start. Control thread only."""

    blocks_written: int = 0
    blocks_read: int = 0
    corrupt: int = 0
    write_errors: int = 0
    read_errors: int = 0


class _Scratch:
    """Memory of one thread, used again and again: for a block that cannot be moved in place, and for headers."""

    def __init__(self, identity: FileIdentity) -> None:
        self.bounce_U8 = page_buffer(pages(identity.block_bytes))
        self.headers_U8 = page_buffer(PART_BLOCKS_MAX * identity.header_nbytes)


Work = Callable[[_Scratch], tuple[Results, Sums | None]]
"""One call of a thread, with what is its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    work: Work
    report: Callable[[Results, Sums | None], object]
    """On any thread."""
    count: int
    """Blocks."""
    empties: bool = False
    """It makes blocks unfindable, and is done even while the file is closed."""


class _Batch:
    """Blocks that were asked for together, done in parts. Control thread only."""

    def __init__(self, count: int, done: Done) -> None:
        self.outcomes = [Outcome.FAILED] * count
        self.left = count
        self.done = done


class DiskFile:
    """One open file, locked. `start_store` and `start_load` are for the control thread, whose loop calls `done`.

    The memory that blocks are copied from and to is the caller's, and stays as it is until `done`, or `close`, returns.
    """

    def __init__(self, fd: int, path: Path, *, identity: FileIdentity, num_slots: int) -> None:
        """Use `open`."""
        self.path = path
        self.identity = identity
        self.num_slots = num_slots
        self.counts = DiskCounts()
        self.direct = False
        self.preallocated = True
        self._fd = fd
        self._io: BlockIo = block_io()
        self._file_id = secrets.token_bytes(FILE_ID_BYTES)
        self._found: list[FoundBlock] = []
        self._sums = array("Q")
        """Of each slot's data, as they were written last."""
        self._sequence = 0
        self._in_flight = 0
        self._errors = {True: 0, False: 0}
        """In a row, of writing and of reading."""
        self._wake = threading.Condition()
        self._loads: deque[_Part] = deque()
        self._stores: deque[_Part] = deque()
        self._closed = False
        self._stop_1 = np.zeros(1, dtype=np.int32)
        """Set with `_closed`: calls under way end with the block that each is at."""
        self._erase_until_s = math.inf
        self._threads: list[threading.Thread] = []

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        bytes_max: int,
        identity: FileIdentity,
        threads: int = THREADS,
        io: BlockIo | None = None,
    ) -> DiskFile:
        """Open or make the file, or take a raw device, and read all headers. Blocks: call it on a thread.

        A file of another identity, or one that is damaged, begins empty, with one line in the log. Raises BatonError
        BAD_CONFIG: another process has it, it has something that is not ours, there is no room for `bytes_max`, or no
        access.
        """
        num_slots = identity.slots_in(bytes_max)
        if not num_slots:
            raise _bad(f"{bytes_max:,} bytes hold no block, which takes {identity.file_nbytes(1):,}.", BYTES_FIELD)
        with ExitStack() as undo:
            try:
                # A device that is mounted, or a part of something else, is not opened.
                how = os.O_EXCL if path.is_block_device() else os.O_CREAT
                fd = os.open(path, os.O_RDWR | how | os.O_CLOEXEC, 0o600)
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file = cls(fd, path, identity=identity, num_slots=num_slots)
                if io is not None:
                    file._io = io
                file._begin(threads)
            except BlockingIOError as error:
                raise _bad(f"{path} is in use by another process. Give each node a file of its own.") from error
            except NotOurs as error:
                raise _bad(f"{path} has something that is not this program's. It is left as it is.") from error
            except OSError as error:
                used = ": another process has it, or it is mounted" if error.errno == errno.EBUSY else ""
                raise _bad(f"{path} cannot be used: {error.strerror}{used}.") from error
            undo.pop_all()
        for number in range(threads):
            thread = threading.Thread(target=file._work, name=f"disk-{number}", daemon=True)
            file._threads.append(thread)
            thread.start()
        return file

    @property
    def room(self) -> int:
        """Blocks that may be asked for now."""
        return BLOCKS_IN_FLIGHT_MAX - self._in_flight

    @property
    def block_bytes(self) -> int:
        return self.identity.block_bytes

    @property
    def writable(self) -> bool:
        """False: too many writes have failed."""
        return self._errors[True] < ERRORS_MAX

    @property
    def readable(self) -> bool:
        return self._errors[False] < ERRORS_MAX

    def describe(self) -> str:
        """For people."""
        how = "direct" if self.direct else "through the page cache (no O_DIRECT here)"
        whole = "" if self.preallocated else ", not preallocated"
        return f"{self.path}: {self.num_slots:,} blocks of {self.block_bytes:,} bytes, {how}{whole}, {self._io.name}"

    def restore(self, books: TierBooks) -> int:
        """Enter what an earlier process has left, into books of `num_slots` slots that are empty; how many blocks were
        found. Once, on any thread: millions take a while.

        Of two blocks by one digest the later one stays. What is behind a block that is missing is left out.
        """
        assert books.num_slots == self.num_slots, (books.num_slots, self.num_slots)
        latest = {block.key.digest: block for block in self._found}
        self._found = []
        for block in latest.values():
            self._sums[block.slot] = block.data_sum
            entered = books.restore(block.slot, block.key)
            assert entered, block.slot
        books.end_restore()
        return len(latest)

    def start_store(
        self, memory_U8: Bytes, slots: Sequence[TierSlot], keys: Sequence[BlockKey], at_B: Offsets, done: Done
    ) -> None:
        """Write blocks, which begin at `at_B` in the memory, to slots that nothing reads. Returns at once.

        `done` is called later, on the control thread, and not after `close`. At most `room` blocks.
        """
        assert len(slots) == len(keys) == len(at_B), (len(slots), len(keys), len(at_B))
        first, file_id, identity = self._sequence, self._file_id, self.identity
        self._sequence += len(slots)
        slot_at_B = self._slot_at(slots)

        def part(start: int, stop: int) -> Work:
            def work(scratch: _Scratch) -> tuple[Results, Sums | None]:
                nbytes = identity.header_nbytes
                headers_U8 = scratch.headers_U8[: (stop - start) * nbytes]
                room = headers_U8.data
                for i in range(start, stop):  # all headers are of one length: what was in a page before is overwritten
                    packed = pack_block_header(file_id, slots[i], first + i, identity, keys[i])
                    at = (i - start) * nbytes
                    room[at : at + len(packed)] = packed
                blocks = self._blocks(memory_U8, at_B[start:stop], scratch)
                return self._io.write(self._fd, blocks, slot_at_B[start:stop], headers_U8)

            return work

        self._start(slots, part, done, writing=True)

    def start_load(self, memory_U8: Bytes, slots: Sequence[TierSlot], at_B: Offsets, done: Done) -> None:
        """Read the blocks of these slots, stored or restored before, into the memory. Before what is to be written.

        Memory of a block that is not DONE may have anything. `done` and the limit are those of `start_store`.
        """
        assert len(slots) == len(at_B), (len(slots), len(at_B))
        sums_B = np.array([self._sums[slot] for slot in slots], dtype=np.uint64)
        data_at_B = self._slot_at(slots) + self.identity.header_nbytes

        def part(start: int, stop: int) -> Work:
            def work(scratch: _Scratch) -> tuple[Results, Sums | None]:
                blocks = self._blocks(memory_U8, at_B[start:stop], scratch)
                return self._io.read(self._fd, blocks, data_at_B[start:stop], sums_B[start:stop]), None

            return work

        self._start(slots, part, done, writing=False)

    def _slot_at(self, slots: Sequence[TierSlot]) -> Offsets:
        return SLOTS_AT + np.array(slots, dtype=np.int64) * self.identity.slot_nbytes

    def _blocks(self, memory_U8: Bytes, at_B: Offsets, scratch: _Scratch) -> Blocks:
        return Blocks(
            memory_U8=memory_U8, at_B=at_B, nbytes=self.block_bytes, bounce_U8=scratch.bounce_U8, stop_1=self._stop_1
        )

    def erase(self, slots: Sequence[TierSlot]) -> asyncio.Future[bool]:
        """No later process finds what these slots have now, once this says so: False: it has failed. It comes before
        what waits to be written."""
        places = [self.identity.slot_at(slot) for slot in slots]

        def work(_: _Scratch) -> tuple[Results, Sums | None]:
            zeros_U8 = page_buffer(self.identity.header_nbytes)
            for at in places:
                if time.monotonic() > self._erase_until_s:
                    self._write_page(self._new_page(secrets.token_bytes(FILE_ID_BYTES)))
                    with self._wake:
                        self._stores.clear()
                    break
                os.pwrite(self._fd, zeros_U8.data, at)
            os.fdatasync(self._fd)
            return np.zeros(1, dtype=np.int32), None

        return self._start_emptying(work)

    def empty(self) -> asyncio.Future[bool]:
        """As `erase`, of anything that was stored before, or that is being stored. This process's blocks stay
        readable."""
        self._file_id = secrets.token_bytes(FILE_ID_BYTES)
        page = self._new_page(self._file_id)

        def work(_: _Scratch) -> tuple[Results, Sums | None]:
            self._write_page(page)
            os.fdatasync(self._fd)
            return np.zeros(1, dtype=np.int32), None

        return self._start_emptying(work)

    def _start_emptying(self, work: Work) -> asyncio.Future[bool]:
        loop = asyncio.get_running_loop()
        emptied: asyncio.Future[bool] = loop.create_future()

        def tell(done: bool) -> None:
            if not emptied.done():  # whoever waits may have been cancelled
                emptied.set_result(done)

        def report(results: Results, _: Sums | None) -> None:
            call_loop(loop, tell, not results.any())

        part = _Part(work=work, report=report, count=1, empties=True)
        if not self._queue(self._stores, part, first=True):
            tell(False)
        return emptied

    def _new_page(self, file_id: bytes) -> bytes:
        return pack_first_page(FirstPage(identity=self.identity, file_id=file_id))

    def close(self) -> None:
        """Wait for the block that each thread is at, and for what empties slots, for `ERASE_S_MAX` at most: then the
        whole file is emptied instead. Else what waits is dropped. No `done` is called any more. Idempotent.

        A drive that never answers is waited for: it may write to the caller's memory.
        """
        with self._wake:
            closed, self._closed = self._closed, True
            self._stop_1[0] = 1
            self._erase_until_s = time.monotonic() + ERASE_S_MAX
            self._loads.clear()
            self._stores = deque(part for part in self._stores if part.empties)
            self._wake.notify_all()
        for thread in self._threads:
            thread.join()
        if not closed:
            os.close(self._fd)

    def _start(
        self,
        slots: Sequence[TierSlot],
        part: Callable[[int, int], Work],
        done: Done,
        *,
        writing: bool,
    ) -> None:
        count, loop = len(slots), asyncio.get_running_loop()
        assert 0 < count <= self.room, (count, self.room)
        batch = _Batch(count, done)
        self._in_flight += count
        if self._closed or not (self.writable if writing else self.readable):
            failed = np.full(count, errno.EIO, dtype=np.int32)
            loop.call_soon(self._land, batch, slots, 0, failed, None, writing, False)
            return
        shared = count if writing else -(-count // len(self._threads))  # whoever reads waits: all threads do a part
        most = max(1, min(PART_BLOCKS_MAX, PART_BYTES_MAX // self.block_bytes, shared))
        for start in range(0, count, most):
            stop = min(count, start + most)

            def report(results: Results, sums: Sums | None, start: int = start) -> None:
                call_loop(loop, self._land, batch, slots, start, results, sums, writing, True)

            queue = self._stores if writing else self._loads
            self._queue(queue, _Part(work=part(start, stop), report=report, count=stop - start))

    def _land(
        self,
        batch: _Batch,
        slots: Sequence[TierSlot],
        start: int,
        results: Results,
        sums: Sums | None,
        writing: bool,
        tried: bool,
    ) -> None:
        """Results of one part, on the control thread."""
        self._in_flight -= len(results)
        if self._closed:
            return
        if tried:
            self._count(results, writing=writing)
        for i, result in enumerate(results.tolist()):
            if result == 0:
                batch.outcomes[start + i] = Outcome.DONE
                if sums is not None:
                    self._sums[slots[start + i]] = int(sums[i])
            elif result == errno.EBADMSG:
                batch.outcomes[start + i] = Outcome.CORRUPT
        batch.left -= len(results)
        if not batch.left:
            batch.done(batch.outcomes)

    def _count(self, results: Results, *, writing: bool) -> None:
        corrupt = int((results == errno.EBADMSG).sum())
        failed = [result for result in results.tolist() if result not in (0, errno.EBADMSG)]
        done = len(results) - corrupt - len(failed)
        self.counts.corrupt += corrupt
        if corrupt:
            log.error("CORRUPT BLOCKS on the disk tier: they are not used", path=self.path, blocks=corrupt)
        if writing:
            self.counts.blocks_written += done
            self.counts.write_errors += len(failed)
        else:
            self.counts.blocks_read += done
            self.counts.read_errors += len(failed)
        before = self._errors[writing]
        if before >= ERRORS_MAX:
            return  # as it was
        self._errors[writing] = before + len(failed) if failed and not done else len(failed)
        if failed and before == 0:
            what = "writing" if writing else "reading"
            log.error(f"{what} blocks fails on the disk tier", path=self.path, reason=os.strerror(failed[0]))
        if self._errors[writing] >= ERRORS_MAX:
            what = "written" if writing else "read"
            log.error(f"nothing is {what} any more on the disk tier", path=self.path, errors=self._errors[writing])

    # While it is opened.

    def _begin(self, threads: int) -> None:
        """Raises OSError, NotOurs, BatonError."""
        status = os.fstat(self._fd)
        regular = stat.S_ISREG(status.st_mode)
        if not regular and not stat.S_ISBLK(status.st_mode):
            raise _bad(f"{self.path} is neither a file nor a block device.")
        nbytes = os.lseek(self._fd, 0, os.SEEK_END)
        wanted = self.identity.file_nbytes(self.num_slots)
        self.direct = self._set_direct()
        first = self._read_page() if nbytes else b""
        page = read_first_page(first, self.identity)
        if not regular and not any(first):
            self._look_for_others()
        if regular:
            os.fchmod(self._fd, 0o600)
            self._allocate(nbytes, wanted)
        elif nbytes < wanted:
            raise _bad(f"{self.path} has {nbytes:,} bytes, fewer than {wanted:,}.", BYTES_FIELD)
        self._sums.frombytes(bytes(8 * self.num_slots))
        if isinstance(page, FirstPage):
            self._file_id = page.file_id
            self._scan(threads)
            log.info("the disk tier is warm", path=self.path, blocks=len(self._found), slots=self.num_slots)
            return
        report = log.warning if any(first) else log.info
        report("the disk tier starts empty", path=self.path, reason=page, slots=self.num_slots)
        self._write_page(self._new_page(self._file_id))

    def _look_for_others(self) -> None:
        """On a device that seems to be new: some file systems begin behind its first page. Raises NotOurs."""
        begin_U8 = page_buffer(NEW_DEVICE_BYTES)
        done = os.preadv(self._fd, [begin_U8.data], 0)
        if begin_U8[:done].any():
            raise NotOurs

    def _set_direct(self) -> bool:
        """Bypass the page cache from here on, where the file system can."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [page_buffer(PAGE_BYTES).data], 0)  # some refuse only here
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True

    def _allocate(self, nbytes: int, wanted: int) -> None:
        """Make the file `wanted` bytes long. Raises BatonError where there is not the room; then it is as it was."""
        room, missing = os.fstatvfs(self._fd), wanted - os.fstat(self._fd).st_blocks * 512
        if missing > (available := room.f_bavail * room.f_frsize):  # asked first: trying would fill the file system
            raise _bad(f"{self.path} has room for {available:,} bytes more, not for {missing:,}.", BYTES_FIELD)
        os.ftruncate(self._fd, wanted)
        try:
            os.posix_fallocate(self._fd, 0, wanted)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                self.preallocated = False
                return
            os.ftruncate(self._fd, min(nbytes, wanted))
            raise _bad(
                f"There is no room for {wanted:,} bytes at {self.path}: {error.strerror}.", BYTES_FIELD
            ) from error

    def _read_page(self) -> bytes:
        page_U8 = page_buffer(PAGE_BYTES)
        done = os.preadv(self._fd, [page_U8.data], 0)
        return page_U8[:done].tobytes()

    def _write_page(self, page: bytes) -> None:
        page_U8 = page_buffer(PAGE_BYTES)
        page_U8[:] = np.frombuffer(page, dtype=np.uint8)
        os.pwrite(self._fd, page_U8.data, 0)

    def _scan(self, threads: int) -> None:
        """Find all whole headers of this file, the one stored first at the beginning."""
        nbytes = self.identity.header_nbytes
        most = max(1, SCAN_BYTES // nbytes)

        def look(first: int) -> list[FoundBlock]:
            count = min(most, self.num_slots - first)
            headers_U8 = page_buffer(count * nbytes)
            at = self.identity.slot_at(first)
            results_B = self._io.headers(self._fd, at, self.identity.slot_nbytes, headers_U8, nbytes)
            view, found = headers_U8.data, []
            for i in np.flatnonzero(results_B == 0).tolist():
                header = view[i * nbytes : (i + 1) * nbytes]
                found.append(read_block_header(header, self._file_id, TierSlot(first + i)))
            return [block for block in found if block is not None]

        with ThreadPoolExecutor(threads, thread_name_prefix="disk-scan") as pool:
            for found in pool.map(look, range(0, self.num_slots, most)):
                self._found += found
        self._found.sort(key=lambda block: block.sequence)
        if self._found:
            self._sequence = self._found[-1].sequence + 1

    # On the threads.

    def _queue(self, queue: deque[_Part], part: _Part, *, first: bool = False) -> bool:
        """False: it is closed."""
        with self._wake:
            if self._closed:
                return False
            (queue.appendleft if first else queue.append)(part)
            self._wake.notify()
            return True

    def _work(self) -> None:
        scratch = _Scratch(self.identity)
        while (part := self._next()) is not None:
            try:
                results, sums = part.work(scratch)
            except Exception as error:
                log.error("a call of the disk tier failed", path=self.path, exc_info=error)
                results, sums = np.full(part.count, errno.EIO, dtype=np.int32), None
            part.report(results, sums)

    def _next(self) -> _Part | None:
        """What waits for reading comes first. None: it is closed."""
        with self._wake:
            while not (self._loads or self._stores or self._closed):
                self._wake.wait()
            if not (self._loads or self._stores):
                return None
            return self._loads.popleft() if self._loads else self._stores.popleft()


def _bad(text: str, field: str = PATH_FIELD) -> BatonError:
    return BatonError(Reason.BAD_CONFIG, f"The disk tier: {text}", field=field)
