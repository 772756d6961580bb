"""The driver of a device that is not there: memory that other processes open, copies that run late and in order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.device.host_driver import HostDriver, HostStream
from kvtransfer.device.region import DeviceRegion, OpenedRegion
from kvtransfer.region import RegionInUse
from kvtransfer.transport import DeviceError
from tests.support.shm_harness import ops_of

NBYTES = 3 * 64


def test_a_copy_runs_when_somebody_looks_a_second_time() -> None:
    """Until then nothing has moved, although the copy and the event behind it are queued: as late as on a device."""
    streams = HostDriver().streams
    src_U8, dst_U8 = np.arange(NBYTES, dtype=np.uint8), np.zeros(NBYTES, np.uint8)
    side = streams.side()
    ops = ops_of([0, 64], [128, 0], [64, 64])
    streams.copy(side, dst_U8, src_U8, ops)
    ops.src[:] = 0  # the caller's arrays are free at once
    done = side.record()
    assert not done.done()
    assert not dst_U8.any()
    assert done.done()
    assert done.done()
    assert dst_U8.tolist() == [*src_U8[64:128], *[0] * 64, *src_U8[:64]]


def test_a_stream_runs_in_order_and_behind_what_it_waits_for() -> None:
    """Looking at a later event runs all before it, the other stream's work first where it was waited for."""
    ran: list[str] = []
    first, second = HostStream(), HostStream()
    first.launch(lambda: ran.append("first"))
    second.launch(lambda: ran.append("second"))
    early = second.record()
    second.wait(first.record())
    second.launch(lambda: ran.append("third"))
    late = second.record()
    assert [late.done(), late.done()] == [False, True]
    assert ran == ["second", "first", "third"]
    assert [early.done(), early.done()] == [False, True]


def test_a_stream_stands_still_at_work_that_fails() -> None:
    """Each look behind it raises the same error, also after later work was queued; what was before it has passed."""
    ran: list[str] = []

    def broken() -> None:
        raise ValueError("a copy failed")

    stream = HostStream()
    stream.launch(lambda: ran.append("first"))
    early = stream.record()
    stream.launch(broken)
    stream.launch(lambda: ran.append("third"))
    assert [early.done(), early.done()] == [False, True]
    for _ in range(2):
        behind = stream.record()
        assert not behind.done()
        for _ in range(2):
            with pytest.raises(ValueError, match="a copy failed"):
                behind.done()
    assert ran == ["first"]


def test_another_process_opens_the_region_by_its_handle() -> None:
    """What a child writes is here; the handle of a process that has closed its region opens nothing."""
    region = DeviceRegion(HostDriver(), NBYTES, "region")
    script = (
        "import sys; from kvtransfer.device.host_driver import HostDriver\n"
        "driver = HostDriver(); address = driver.open(bytes.fromhex(sys.argv[1]))\n"
        f"memory = driver.memory(address, {NBYTES}); memory[5] = 77; del memory; driver.close(address)"
    )
    handle = os.pread(region.fd, 4096, 0)[12:]
    subprocess.run([sys.executable, "-c", script, handle.hex()], check=True, timeout=60, cwd=Path(__file__).parents[3])
    assert region.read(4, 7) == bytes([0, 77, 0])
    fd = os.dup(region.fd)
    region.close()
    with pytest.raises(DeviceError, match="cannot be opened"):
        OpenedRegion(HostDriver(), fd, NBYTES)
    os.close(fd)


def test_memory_that_somebody_looks_into_is_not_freed() -> None:
    """Neither the owner's nor what was opened: a bug of ours, told as such, after which it can be closed still."""
    region = DeviceRegion(HostDriver(), NBYTES, "region")
    opened = OpenedRegion(HostDriver(), region.fd, NBYTES)
    views = [region.memory, opened.memory]
    with pytest.raises(RegionInUse):
        region.close()
    with pytest.raises(BufferError):
        opened.driver.close(opened._address)
    views.clear()
    opened.close()
    region.close()
    region.close()


def test_the_rehearsal_copies_a_record_onto_the_next() -> None:
    """Whole and waited for; a region of one record has nowhere to copy to."""
    region = DeviceRegion(HostDriver(), NBYTES, "region", shared=False)
    region.memory[:64] = 9
    region.rehearse_copy(64)
    assert region.read(0, NBYTES) == bytes([9] * 128 + [0] * 64)
    region.rehearse_copy(NBYTES)
    assert region.read(128, NBYTES) == bytes(64)
    region.close()


def test_registered_memory_stays_its_owners() -> None:
    """What is pinned where it is, is neither copied nor given back."""
    memory_U8 = np.arange(16, dtype=np.uint8)
    pinned = HostDriver().register(memory_U8)
    assert pinned.memory is memory_U8
    assert pinned.array_U8 is memory_U8
    pinned.close()
    pinned.close()
    assert pinned.array_U8.size == 0
    assert memory_U8.tolist() == list(range(16))
