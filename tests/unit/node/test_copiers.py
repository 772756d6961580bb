"""Host memory: its books, its copies, its configuration."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId
from cachestore.host_blocks import HostBlockId, HostBlocks
from cachestore.layout import kv_layout
from cachestore.ledger import ConservationError
from engine.build import EngineConfig, EngineKind
from kvtransfer.device.host_driver import HostStreams
from kvtransfer.native.copy import copy_records
from kvtransfer.region import Region
from kvtransfer.transport import WriteOps
from node.copiers import BlockCopier, BlockCopy, BlockPlaces
from node.pool import open_device_pool
from node.spill import SpillConfig

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=2, dtype="uint8", dtype_bytes=1)
WAIT_S = 20


def region(num_blocks: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.region_bytes(num_blocks), np.uint8)


def records(memory_U8: np.ndarray, num_blocks: int) -> np.ndarray:
    return memory_U8.reshape(LAYOUT.num_layers, num_blocks, LAYOUT.record_bytes)


def copier(device_U8: np.ndarray, host_U8: np.ndarray) -> BlockCopier:
    """As that of a node whose region is host memory."""
    places = BlockPlaces(layout=LAYOUT, device_blocks=5, host_blocks=7)
    device, host = (
        cast(Region, SimpleNamespace(memory=each_U8, array_U8=each_U8, nbytes=each_U8.nbytes))
        for each_U8 in (device_U8, host_U8)
    )
    return BlockCopier(streams=HostStreams(), places=places, device=device, host=host, name="test")


async def carried_out(copier: BlockCopier, copy: BlockCopy) -> None:
    ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
    copier.start(copy, ended.put_nowait)
    async with asyncio.timeout(WAIT_S):
        assert await ended.get() is None


def out(device: tuple[int, ...], host: tuple[int, ...], *, back: bool = False) -> BlockCopy:
    return BlockCopy(out=not back, device=tuple(map(BlockId, device)), host=tuple(map(HostBlockId, host)))


def test_a_block_is_copied_in_every_layer_and_nothing_else_is_touched() -> None:
    """Two blocks go out to two places, and come back to others."""

    async def scenario() -> None:
        device, host = region(5, 1), region(7, 2)
        thread = copier(device, host)
        was_device, was_host = records(device, 5).copy(), records(host, 7).copy()
        await carried_out(thread, out((4, 1), (0, 6)))
        was_host[:, [0, 6]] = was_device[:, [4, 1]]
        assert (records(host, 7) == was_host).all()
        assert (records(device, 5) == was_device).all()
        await carried_out(thread, out((0, 3), (6, 0), back=True))
        was_device[:, [0, 3]] = was_device[:, [1, 4]]
        assert (records(device, 5) == was_device).all()
        assert (records(host, 7) == was_host).all()
        thread.close()

    asyncio.run(scenario())


def test_copies_run_on_a_thread_in_order_and_end_on_the_loop() -> None:
    """Out, and back elsewhere: each end is told on the loop's thread; an error is told, not swallowed."""
    device, host = region(5, 1), region(7, 2)

    async def scenario() -> list[tuple[str, int, BaseException | None]]:
        reported: list[tuple[str, int, BaseException | None]] = []
        changed = asyncio.Event()

        def start(name: str, copy: BlockCopy) -> None:
            def done(error: BaseException | None) -> None:
                reported.append((name, threading.get_ident(), error))
                changed.set()

            thread.start(copy, done)

        async def until_told(count: int) -> None:
            async with asyncio.timeout(WAIT_S):
                while len(reported) < count:
                    changed.clear()
                    await changed.wait()

        thread = copier(device, host)
        start("out", out((2,), (3,)))
        start("back", out((4,), (3,), back=True))
        await until_told(2)
        start("outside", out((5,), (3,)))
        await until_told(3)
        thread.close()
        return reported

    reported = asyncio.run(scenario())
    assert [(name, ident) for name, ident, _ in reported] == [
        (n, threading.get_ident()) for n in ("out", "back", "outside")
    ]
    assert [error is None for _, _, error in reported] == [True, True, False]
    assert (records(device, 5)[:, 4] == records(device, 5)[:, 2]).all()


def test_a_copy_that_fails_fails_all_that_are_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three copies within host memory raises: those behind it, and one that is asked for later, get its
    error. The copier's thread ends by itself, and `close` waits for nothing."""
    device, host = region(5, 1), region(7, 2)
    done_before = copy_records

    def fails(dst_U8: np.ndarray, src_U8: np.ndarray, ops: WriteOps) -> None:
        if ops.dst[0] == 4 * LAYOUT.record_bytes:
            raise OSError("the second copy failed")
        done_before(dst_U8, src_U8, ops)

    async def scenario() -> list[BaseException | None]:
        ended: asyncio.Queue[BaseException | None] = asyncio.Queue()
        monkeypatch.setattr("kvtransfer.device.host_driver.copy_records", fails)
        thread = copier(device, host)
        await carried_out(thread, out((2,), (3,)))
        for place in (4, 5):
            thread.start(out((2,), (place,)), ended.put_nowait)
        async with asyncio.timeout(WAIT_S):
            errors = [await ended.get(), await ended.get()]
            thread.start(out((2,), (6,)), ended.put_nowait)
            errors.append(await ended.get())
        thread.close()
        return errors

    assert [str(error) for error in asyncio.run(scenario())] == ["the second copy failed"] * 3


def test_nothing_is_told_after_close() -> None:
    """The node is being taken apart: its books are not to be touched by a copy that ends late."""
    reported: list[BaseException | None] = []

    async def scenario() -> None:
        thread = copier(region(5, 1), region(7, 2))
        for _ in range(20):
            thread.start(out((2,), (3,)), reported.append)
        thread.close()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert reported == []


def test_the_books_of_host_memory() -> None:
    """Free, copying out, filled, copying back, free: the sum is the tier at every step."""
    books = HostBlocks(3)
    first, second = books.begin_out(2)
    assert (books.free, books.copying, books.filled) == (1, 2, 0)
    books.fill(first)
    books.release(second)
    books.check()
    assert (books.free, books.copying, books.filled) == (2, 0, 1)
    books.begin_back(first)
    assert (books.free, books.copying, books.filled) == (2, 1, 0)
    books.release(first)
    books.check()
    assert (books.free, books.copying, books.filled) == (3, 0, 0)
    for misuse in (
        lambda: books.fill(first),
        lambda: books.begin_back(first),
        lambda: books.release(first),
        lambda: books.begin_out(4),
    ):
        with pytest.raises(AssertionError):
            misuse()
    books._filled.add(first)
    with pytest.raises(ConservationError, match="host memory"):
        books.check()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"host_blocks": -1}, "host_blocks"),
        ({"host_blocks": 1 << 25}, "host_blocks"),
        ({"host_blocks": 4, "headroom_blocks": 4}, "host_blocks"),
        ({"headroom_blocks": 0}, "headroom_blocks"),
        ({"copy_blocks_max": 0}, "copy_blocks_max"),
        ({"pinned_bytes_max": 0}, "pinned_bytes_max"),
    ],
)
def test_nonsense_is_refused(values: dict[str, int], field: str) -> None:
    """Each names its field. Host memory must be more than the reserve."""
    with pytest.raises(InvalidField) as caught:
        SpillConfig(**values)
    assert caught.value.field == field


def test_host_memory_that_the_machine_has_not_is_refused_by_its_own_field() -> None:
    """Terabytes: nothing is allocated, and the region that was is given back."""
    config = EngineConfig(kind=EngineKind.MOCK, block_size=4096, num_blocks=2)
    spill = SpillConfig(host_blocks=1 << 24)
    with pytest.raises(BatonError) as caught:
        asyncio.run(open_device_pool(config, name="large", progress=lambda *_: None, spill=spill))
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "spill.host_blocks")
    assert "baton-large" not in Path("/proc/self/maps").read_text()


def test_off_by_default() -> None:
    """And any size beyond the reserve is fine."""
    assert SpillConfig().host_blocks == 0
    assert SpillConfig(host_blocks=5, headroom_blocks=4).host_blocks == 5
