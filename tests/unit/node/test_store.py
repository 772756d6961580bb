"""The tiers below a region: copies down and up that end when told to, over real bytes."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.ids import BlockId
from cachestore import admission as admission_module
from cachestore.block_manager import BlockManager, prefix_blocks_max
from cachestore.holdings import Tier
from cachestore.layout import kv_layout
from cachestore.ledger import Ledger
from cachestore.prefix_cache import IndexCursor
from cachestore.tier_books import BlockKey, TierBooks, block_keys
from kvtransfer.native.copy import copy_records
from node import store as store_module
from node.copiers import PositionCopy, PositionPlaces
from node.disk_file import BLOCKS_IN_FLIGHT_MAX, DiskFile
from node.disk_format import FileIdentity
from node.sources import LinearCost, Offer, Prefix, SourceKind
from node.store import DiskTier, HostTier, Store, StoreConfig, make_books
from tests.support.tcp_harness import wait_until

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=2, dtype="uint8", dtype_bytes=1)
SIZE = LAYOUT.block_size
POISON = 0xFF
HELD_S_MAX = 60.0
"""How long a call of the disk is held when the test has died."""


@dataclass
class HandCopier:
    """Copies nothing until `finish`; or at once, where it is `prompt`."""

    places: PositionPlaces
    device_U8: np.ndarray
    host_U8: np.ndarray
    prompt: bool = False
    error: BaseException | None = None
    waiting: list[tuple[PositionCopy, Callable[[BaseException | None], None]]] = field(default_factory=list)

    def start(self, copy: PositionCopy, done: Callable[[BaseException | None], None]) -> None:
        self.waiting.append((copy, done))
        if self.prompt:
            asyncio.get_running_loop().call_soon(self.finish)

    def finish(self) -> None:
        copy, done = self.waiting.pop(0)
        src_U8, dst_U8 = (self.device_U8, self.host_U8) if copy.out else (self.host_U8, self.device_U8)
        if self.error is None:
            copy_records(dst_U8, src_U8, self.places.ops(copy))
        done(self.error)


class Scene:
    """A region of `device` blocks over `host` blocks. A block's bytes are made of its digest, so a wrong one shows."""

    def __init__(self, device: int, host: int, *, prompt: bool = False, disk: DiskFile | None = None) -> None:
        stride = LAYOUT.position_bytes
        self.ledger = Ledger(device, on_free=self._poison)
        self.blocks = BlockManager(self.ledger, SIZE, b"root")
        self.places = PositionPlaces(layout=LAYOUT, device_blocks=device, slots=host, slot_bytes=stride)
        self.device_U8 = np.full(LAYOUT.region_bytes(device), POISON, np.uint8)
        host_U8 = np.full(self.places.host_nbytes, POISON, np.uint8)
        self.copier = HandCopier(self.places, self.device_U8, host_U8, prompt)
        region = SimpleNamespace(array_U8=host_U8)
        memory: Any = SimpleNamespace(copier=self.copier, region=region, close=lambda: None)
        cost = LinearCost(fixed_s=1e-4, unit_s=1e-5, units=8)
        self.holdings = self.blocks.prefix_cache.holdings
        below = None
        if disk is not None:
            below = DiskTier(file=disk, books=make_books(disk.num_slots, stride, self.holdings, Tier.DISK), cost=cost)
            disk.restore(below.books)
        self.store = Store(
            blocks=self.blocks,
            groups=LAYOUT.num_groups,
            host=HostTier(memory=memory, books=make_books(host, stride, self.holdings, Tier.HOST), cost=cost),
            disk=below,
        )

    def _poison(self, block: BlockId) -> None:
        self._records(block)[:] = POISON

    def _records(self, block: BlockId) -> np.ndarray:
        return self.device_U8.reshape(LAYOUT.num_layers, -1, LAYOUT.record_bytes)[:, block]

    def prefix(self, tokens: list[int], salt: bytes = b"") -> Prefix:
        whole = tokens[: prefix_blocks_max(len(tokens), SIZE) * SIZE]
        return Prefix(tokens=whole, salt=salt, chain=self.blocks.prefix_cache.chain(whole, salt))

    def keys(self, tokens: list[int], salt: bytes = b"") -> list[BlockKey]:
        return block_keys(b"root", salt, tokens, SIZE)

    def have(self, tokens: list[int], salt: bytes = b"") -> int:
        """How many blocks of the prompt are on the device; every byte of them is looked at."""
        found = self.blocks.match_prompt(tokens, salt)
        for block, digest in zip(found, self.prefix(tokens, salt).chain, strict=False):
            assert (self._records(block) == digest[0]).all()
        return len(found)

    def compute(self, tokens: list[int], salt: bytes = b"") -> None:
        """A request that is over when this returns. Its full blocks stay in the cache."""
        cache, chain = self.blocks.prefix_cache, self.blocks.prefix_cache.chain(tokens, salt)
        prefix = self.blocks.match_prompt(tokens, salt)
        table = self.blocks.admit(prefix, self.blocks.blocks_for(len(tokens)) - len(prefix))
        for block, digest in list(zip(table, chain, strict=False))[len(prefix) :]:
            self._records(block)[:] = digest[0]
        cache.index(tokens, table, len(tokens), salt, IndexCursor())
        self.blocks.release(table)

    def evict_all(self) -> None:
        assert self.blocks.prefix_cache.evict_until(self.ledger.num_blocks)

    def offer(self, tokens: list[int], salt: bytes = b"") -> Offer | None:
        return self.store.offer(self.prefix(tokens, salt), self.have(tokens, salt))

    async def bring(self, tokens: list[int], salt: bytes = b"") -> int:
        offer = self.offer(tokens, salt)
        return 0 if offer is None else await self.store.bring(offer)

    async def idle(self) -> None:
        """Everything that is idle has been copied down."""
        await turns()
        while self.store._idle or self.copier.waiting:
            await turns()

    def check(self) -> None:
        self.ledger.check()
        self.store.check()

    def check_chain(self, tokens: list[int], salt: bytes = b"") -> None:
        """What the node says that it has of a prompt is a beginning of it."""
        known = [digest in self.holdings for digest in self.blocks.prefix_cache.chain(tokens, salt)]
        assert known == sorted(known, reverse=True), known


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@contextmanager
def no_pauses() -> Iterator[None]:
    with patch.object(store_module, "TOGETHER_S", 0), patch.object(store_module, "REST_SHARE", 0):
        yield


def play(device: int, host: int, story: Callable[[Scene], Awaitable[None]], *, prompt: bool = True) -> None:
    async def scenario() -> None:
        scene = Scene(device, host, prompt=prompt)
        scene.store.start()
        await story(scene)
        await scene.store.stop()
        scene.check()

    with no_pauses():
        asyncio.run(scenario())


def play_on_disk(path: Path, story: Callable[[Scene], Awaitable[None]], *, slots: int = 20, host: int = 20) -> None:
    """Over a real file, whose blocks an earlier story may have left."""
    identity = FileIdentity(
        kv_root=b"root",
        layout_hash=LAYOUT.compatibility_hash(),
        block_bytes=LAYOUT.position_bytes,
        block_tokens=SIZE,
    )

    async def scenario() -> None:
        disk = DiskFile.open(
            path,
            bytes_max=identity.file_nbytes(slots),
            identity=identity,
            threads=2,
        )
        scene = Scene(8, host, prompt=True, disk=disk)
        scene.store.start()
        await story(scene)
        await scene.store.stop()
        scene.store.close()
        scene.check()

    with no_pauses():
        asyncio.run(scenario())


ONE = list(range(1, 10))
"""Four full blocks and a token."""


def test_what_was_evicted_comes_back_with_its_bytes() -> None:
    """A prompt is computed, goes down, is evicted, and comes up again, cached and held by nobody."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await scene.idle()
        assert scene.offer(ONE) is None  # all of it is here
        scene.evict_all()
        assert scene.have(ONE) == 0
        assert await scene.bring(ONE) == 4
        assert scene.have(ONE) == 4
        assert scene.ledger.books().held == 0
        counters = scene.store.host.counters
        assert (counters.stored_blocks, counters.hit_blocks, counters.promotion_times.count) == (4, 4, 1)

    play(8, 20, story)


def test_what_the_device_has_still_is_not_brought() -> None:
    """The first two blocks are here: the other two come, behind them."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await scene.idle()
        scene.evict_all()
        scene.compute(ONE[:5])
        offer = scene.offer(ONE)
        assert offer is not None
        assert (offer.have_blocks, offer.blocks) == (2, 2)
        assert await scene.store.bring(offer) == 2
        assert scene.have(ONE) == 4

    play(8, 20, story)


def test_tenants_never_share() -> None:
    """The same prompt under another salt, and under none: nothing is offered."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE, b"a")
        await scene.idle()
        scene.evict_all()
        assert scene.offer(ONE, b"b") is None
        assert scene.offer(ONE) is None
        assert await scene.bring(ONE, b"a") == 4

    play(8, 20, story)


def test_a_block_that_is_evicted_while_it_is_copied_is_not_kept() -> None:
    """Its block of the region has other bytes by then."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await turns()
        assert len(scene.copier.waiting) == 1
        scene.evict_all()
        scene.copier.finish()
        await turns()
        assert scene.offer(ONE) is None
        assert (scene.store.host.books.blocks, scene.store.host.counters.lost_blocks) == (0, 4)

    play(8, 20, story, prompt=False)


def test_a_block_is_not_brought_before_its_copy_down_has_ended() -> None:
    """Of a prompt whose first blocks are down and whose last ones are on their way, the first ones are offered."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE[:5])
        await turns()
        scene.copier.finish()
        await turns()
        scene.compute(ONE)
        await turns()
        offer = scene.store.offer(scene.prefix(ONE), 0)
        assert offer is not None
        assert offer.blocks == 2
        scene.copier.finish()
        await turns()
        offer = scene.store.offer(scene.prefix(ONE), 0)
        assert offer is not None
        assert offer.blocks == 4

    play(8, 20, story, prompt=False)


def test_whoever_waits_may_leave_and_the_blocks_come_all_the_same() -> None:
    """The copy up owns its blocks until it ends; then they are cached."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await turns()
        scene.copier.finish()
        await turns()
        scene.evict_all()
        bringing = asyncio.create_task(scene.bring(ONE))
        await turns()
        assert scene.ledger.books().held == 4
        bringing.cancel()
        await asyncio.wait([bringing])
        assert bringing.cancelled()
        assert scene.ledger.books().held == 4
        scene.copier.finish()
        await turns()
        assert scene.ledger.books().held == 0
        assert scene.have(ONE) == 4

    play(8, 20, story, prompt=False)


def test_prompts_of_one_beginning_share_what_comes() -> None:
    """Two ask for the same blocks: one copy brings them for both."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await turns()
        scene.copier.finish()
        await turns()
        scene.evict_all()
        bringing = [asyncio.create_task(scene.bring(tokens)) for tokens in (ONE, [*ONE, 5, 6])]
        await turns()
        assert len(scene.copier.waiting) == 1
        scene.copier.finish()
        assert await asyncio.gather(*bringing) == [4, 4]
        assert scene.store.host.counters.hit_blocks == 4

    play(8, 20, story, prompt=False)


def test_only_spare_blocks_are_taken() -> None:
    """All but two blocks of the region are promised: two blocks come. When nothing is spare, none is offered."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await scene.idle()
        scene.evict_all()
        scene.ledger.promise("somebody", 6)
        assert await scene.bring(ONE) == 2
        assert scene.have(ONE) == 2
        scene.ledger.promise("somebody else", 2)
        assert scene.offer(ONE) is None

    play(8, 20, story)


def test_the_coldest_prompt_goes_when_host_memory_is_full() -> None:
    """Two prompts of four blocks on a tier of six: the first one's end goes, its beginning stays."""

    async def story(scene: Scene) -> None:
        other = [100 + token for token in ONE]
        scene.compute(ONE)
        await scene.idle()
        scene.compute(other)
        await scene.idle()
        scene.evict_all()
        assert await scene.bring(other) == 4
        scene.evict_all()
        assert await scene.bring(ONE) == 2
        books = scene.store.host.books
        assert (books.evicted, books.evicted_unused) == (2, 2)

    play(8, 6, story)


def test_after_a_copy_that_failed_nothing_is_copied() -> None:
    """The store is off, and the node goes on without it."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await scene.idle()
        scene.evict_all()
        scene.copier.error = OSError("no such memory")
        assert await scene.bring(ONE) == 0
        assert scene.ledger.books().held == 0
        assert scene.offer(ONE) is None

    play(8, 20, story)


async def on_disk(scene: Scene, blocks: int) -> None:
    disk = scene.store.disk
    assert disk is not None
    await wait_until(lambda: disk.books.blocks >= blocks and not scene.store._to_disk)


async def used_twice(scene: Scene, tokens: list[int], salt: bytes = b"") -> None:
    """Computed, and found on the device: worth a place on disk."""
    for _ in range(2):
        scene.compute(tokens, salt)
        await scene.idle()


def test_what_was_used_twice_is_there_after_a_restart(tmp_path: Path) -> None:
    """The disk is full. One prompt is used twice, another once. The next process has the first one's blocks, byte for
    byte, and no other tenant gets them. They come by way of host memory, and stay there."""
    other = [100 + token for token in ONE]

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE, b"a")
        scene.compute(other, b"a")
        await scene.idle()
        await on_disk(scene, 4)

    async def after(scene: Scene) -> None:
        assert scene.offer(other, b"a") is None
        assert scene.offer(ONE, b"b") is None
        offer = scene.offer(ONE, b"a")
        assert offer is not None
        assert (offer.kind, offer.blocks) == (SourceKind.DISK, 4)
        assert await scene.store.bring(offer) == 4
        assert scene.have(ONE, b"a") == 4
        scene.evict_all()
        again = scene.offer(ONE, b"a")
        assert again is not None
        assert (again.kind, again.blocks) == (SourceKind.HOST, 4)
        assert scene.store.disk is not None
        assert (scene.store.disk.counters.promotion_times.count, scene.store.disk.counters.hit_blocks) == (1, 4)

    play_on_disk(tmp_path / "blocks", before, slots=4)
    play_on_disk(tmp_path / "blocks", after, slots=4)


def test_what_was_used_once_goes_to_the_disk_before_host_memory_evicts_it(tmp_path: Path) -> None:
    """Host memory has four blocks. Of six prompts of a block each, three stay there alone; once it is full, they go
    down, and later ones at once, while the disk has room. What was brought from elsewhere stays away before it is used
    twice."""
    prompts = [[first, first + 1, 0] for first in range(0, 60, 10)]

    async def story(scene: Scene) -> None:
        assert scene.store.disk is not None
        books, cache = scene.store.disk.books, scene.blocks.prefix_cache

        def there() -> list[bool]:
            return [books.known(digest) for prompt in prompts for digest in cache.chain(prompt, b"")]

        cache.on_idle = None
        scene.compute(prompts[0])
        cache.on_idle = scene.store._on_idle
        cache.released(cache.match(prompts[0], b"", 1), used=False)
        for prompt in prompts[:3]:
            scene.compute(prompt)
            await scene.idle()
        await turns()
        assert not any(there())
        for count, prompt in enumerate(prompts[3:], 3):
            scene.compute(prompt)
            await scene.idle()
            await on_disk(scene, count)
        assert there() == [False, True, True, True, True, True]
        scene.compute(prompts[0])
        await scene.idle()
        await on_disk(scene, 6)
        for first in range(100, 150, 10):
            scene.compute([first, first + 1, 0])
            await scene.idle()
        assert (books.blocks, books.evicted) == (6, 0)

    play_on_disk(tmp_path / "blocks", story, slots=6, host=4)


def test_where_a_block_is_used_again_a_full_disk_takes_others_used_once(tmp_path: Path) -> None:
    """Host memory and the disk have four blocks each. Of eight prompts of a block the first four go down; the others
    wait, as they would evict those. One of them comes again: it goes down, and so do the two that wait for longest."""
    prompts = [[first, first + 1, 0] for first in range(0, 80, 10)]

    async def story(scene: Scene) -> None:
        assert scene.store.disk is not None
        books, cache = scene.store.disk.books, scene.blocks.prefix_cache
        for four in (prompts[:4], prompts[4:]):
            for prompt in four:
                scene.compute(prompt)
                await scene.idle()
            await on_disk(scene, 4)
        await turns()
        assert books.evicted == 0
        scene.compute(prompts[-1])
        await wait_until(lambda: books.evicted == 3 and books.blocks == 4)
        await turns()
        there = [books.known(digest) for prompt in prompts for digest in cache.chain(prompt, b"")]
        assert there == [False, False, False, True, True, True, False, True]
        assert (books.evicted, scene.store.disk.admission.credit) == (3, 0)

    with patch.object(admission_module, "ONCE_PER_REUSE", 2):
        play_on_disk(tmp_path / "blocks", story, slots=4, host=4)


def test_a_block_that_the_disk_has_lost_is_forgotten(tmp_path: Path) -> None:
    """A flipped bit in the third block: two come, the third is not asked for again. The fourth, which no prompt finds
    any more, goes too, so that others are told of the first two only; it is not there after a restart either."""

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)

    async def after(scene: Scene) -> None:
        books = scene.store.disk.books if scene.store.disk is not None else None
        assert books is not None
        slot = books.find(scene.prefix(ONE).chain[2])
        assert slot is not None and scene.store.disk is not None
        identity = scene.store.disk.file.identity
        with (tmp_path / "blocks").open("r+b") as file:
            file.seek(identity.slot_at(slot) + identity.header_nbytes)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        assert await scene.bring(ONE) == 2
        assert scene.have(ONE) == 2
        assert books.blocks == 2
        assert scene.offer(ONE) is None
        assert [digest in scene.holdings for digest in scene.prefix(ONE).chain] == [True, True, False, False]

    async def last(scene: Scene) -> None:
        assert scene.store.disk is not None
        assert scene.store.disk.books.blocks == 2

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)
    play_on_disk(tmp_path / "blocks", last)


def test_a_block_that_the_disk_has_lost_and_the_region_has_is_no_hole(tmp_path: Path) -> None:
    """The disk has four blocks, and so has the region, where the third turns out to be unreadable on disk: what is
    behind it stays on disk."""

    async def story(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)
        assert scene.store.disk is not None
        books = scene.store.disk.books
        slot = books.find(scene.prefix(ONE).chain[2])
        assert slot is not None
        scene.store._lost_on_disk(scene.store.disk, slot, erase=True)
        await turns()
        assert [books.known(digest) for digest in scene.prefix(ONE).chain] == [True, True, False, True]

    play_on_disk(tmp_path / "blocks", story)


def test_a_block_that_the_disk_cannot_read_is_not_asked_for_again(tmp_path: Path) -> None:
    """The third block is in a bad place of the drive: two come, and the file is read on."""

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        file, books = scene.store.disk.file, scene.store.disk.books
        slot = books.find(scene.prefix(ONE).chain[2])
        assert slot is not None
        bad, real = file.identity.slot_at(slot) + file.identity.header_nbytes, file._io

        def read(fd: int, blocks: Any, data_at_B: Any, sums_B: Any) -> Any:
            return np.where(data_at_B == bad, np.int32(errno.EIO), real.read(fd, blocks, data_at_B, sums_B))

        with patch.object(file, "_io", SimpleNamespace(read=read, write=real.write)):
            assert await scene.bring(ONE) == 2
            await turns()
            assert (scene.have(ONE), books.blocks, file.counts.read_errors) == (2, 2, 1)
            assert scene.offer(ONE) is None
        assert file.readable

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)


def test_a_pinned_prefix_goes_to_the_disk_at_once_and_stays_in_every_tier(tmp_path: Path) -> None:
    """Tiers of five blocks, and a pin of two: other prompts that are used twice take turns in the other three."""

    async def story(scene: Scene) -> None:
        scene.blocks.prefix_cache.pin(scene.prefix(ONE[:5]).chain)
        scene.compute(ONE[:5])
        await scene.idle()
        await on_disk(scene, 2)
        for first in (100, 200, 300):
            await used_twice(scene, [first + token for token in ONE[:7]])
            await on_disk(scene, 5)
        for tier in scene.store.tiers:
            assert [tier.books.find(digest) is not None for digest in scene.prefix(ONE[:5]).chain] == [True, True]
            assert tier.books.pinned_blocks == 2

    play_on_disk(tmp_path / "blocks", story, slots=5, host=5)


def test_each_tier_is_emptied_by_itself(tmp_path: Path) -> None:
    """What is pinned stays. What the disk had is not there after a restart either."""

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)
        scene.blocks.prefix_cache.pin(scene.prefix(ONE[:5]).chain)
        assert await scene.store.empty(Tier.HOST) == 2
        assert scene.blocks.prefix_cache.evict_until(6)
        assert scene.have(ONE) == 2
        offer = scene.store.offer(scene.prefix(ONE), 2)
        assert offer is not None
        assert (offer.kind, offer.blocks) == (SourceKind.DISK, 2)
        assert await scene.store.empty(Tier.DISK) == 2
        assert scene.store.offer(scene.prefix(ONE), 2) is None
        with pytest.raises(BatonError, match="no device tier"):
            await scene.store.empty(Tier.DEVICE)

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        assert scene.store.disk.books.blocks == 2
        assert await scene.store.empty(Tier.DISK) == 2

    async def last(scene: Scene) -> None:
        assert scene.store.disk is not None
        assert scene.store.disk.books.blocks == 0

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)
    play_on_disk(tmp_path / "blocks", last)


def test_what_is_on_its_way_down_is_emptied_too(tmp_path: Path) -> None:
    """Blocks are being copied to host memory while that is emptied, and later written to the disk while that is: no
    tier has them when the copies have ended, nor does the next process."""

    async def story(scene: Scene) -> None:
        scene.copier.prompt = False
        scene.compute(ONE)
        await turns()
        assert await scene.store.empty(Tier.HOST) == 0
        scene.copier.finish()
        await turns()
        assert scene.store.host.books.blocks == 0
        scene.copier.prompt = True
        assert scene.store.disk is not None
        file = scene.store.disk.file
        late = held_calls(file, "write")
        with patch.object(file, "_io", late):
            await used_twice(scene, ONE)
            await asyncio.to_thread(late.begun.wait)
            assert await scene.store.empty(Tier.DISK) == 0
            late.may_go.set()
            await wait_until(lambda: file.room == BLOCKS_IN_FLIGHT_MAX)
        assert scene.store.disk.books.blocks == 0

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        assert scene.store.disk.books.blocks == 0

    play_on_disk(tmp_path / "blocks", story)
    play_on_disk(tmp_path / "blocks", after)


def test_under_pressure_blocks_go_down_without_a_pause() -> None:
    """All blocks of the region wait to be copied, one at a time. There is no pause until fewer than half of them wait;
    then there is a long one."""

    async def story(scene: Scene) -> None:
        for first in (0, 100):
            scene.compute([first + token for token in ONE[:8]])
        counters = scene.store.host.counters
        await wait_until(lambda: counters.stored_blocks == 5)
        await turns()
        assert (counters.stored_blocks, len(scene.store._idle)) == (5, 3)

    async def scenario() -> None:
        scene = Scene(8, 20, prompt=True)
        scene.store.start()
        await story(scene)
        await scene.store.stop()

    with patch.multiple(store_module, TOGETHER_S=0, PIECE_BLOCKS_MAX=1, REST_SHARE=1e9):
        asyncio.run(scenario())


def test_a_disk_that_is_full_keeps_what_it_can(tmp_path: Path) -> None:
    """Every write fails: host memory goes on without it, and after some errors nothing is written any more."""

    async def story(scene: Scene) -> None:
        disk = scene.store.disk
        assert disk is not None

        def full(*arguments: Any) -> tuple[Any, Any]:
            count = len(arguments[1])
            return np.full(count, errno.ENOSPC, np.int32), np.zeros(count, np.uint64)

        with patch.object(type(disk.file._io), "write", lambda _self, *arguments: full(*arguments)):
            for first in (0, 100, 200):
                await used_twice(scene, [first + token for token in ONE])
                await wait_until(lambda: not scene.store._to_disk and disk.file.room == BLOCKS_IN_FLIGHT_MAX)
                await turns()
        assert (disk.books.blocks, disk.books.free) == (0, 20)
        assert not disk.file.writable
        scene.evict_all()
        offer = scene.offer(ONE)
        assert offer is not None
        assert offer.kind is SourceKind.HOST
        assert await scene.store.bring(offer) == 4

    play_on_disk(tmp_path / "blocks", story)


def test_what_may_be_broken_is_forgotten_by_every_tier(tmp_path: Path) -> None:
    """The scores of a sequence were not numbers: neither its blocks nor their copies below are used again, also not
    those of a longer prompt that begins with them, nor after a restart. Another prompt stays."""
    other = [100 + token for token in ONE]

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await used_twice(scene, other)
        await on_disk(scene, 8)
        scene.blocks.prefix_cache.forget(scene.blocks.match_prompt(ONE[:5], b""))
        assert [tier.books.blocks for tier in scene.store.tiers] == [4, 4]
        scene.evict_all()
        assert scene.offer(ONE) is None
        assert await scene.bring(other) == 4

    async def after(scene: Scene) -> None:
        assert scene.offer(ONE) is None
        assert await scene.bring(other) == 4

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)


def test_what_turns_out_to_be_broken_while_it_comes_up_is_not_used() -> None:
    """The last two blocks of a prompt are on their way when the first two are forgotten."""

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await turns()
        scene.copier.finish()
        await turns()
        scene.evict_all()
        scene.compute(ONE[:6])
        bringing = asyncio.create_task(scene.bring(ONE))
        await turns()
        scene.blocks.prefix_cache.forget(scene.blocks.match_prompt(ONE[:5], b""))
        scene.copier.finish()
        assert await bringing == 0
        assert (scene.have(ONE), scene.ledger.books().free) == (0, 8)
        assert (scene.store.host.books.blocks, scene.store.host.books.free) == (0, 20)

    play(8, 20, story, prompt=False)


def test_what_turns_out_to_be_broken_while_it_is_written_is_not_there_after_a_restart(tmp_path: Path) -> None:
    """It is on its way from host memory to the disk when it is forgotten."""

    async def before(scene: Scene) -> None:
        assert scene.store.disk is not None
        file = scene.store.disk.file
        late = held_calls(file, "write")
        with patch.object(file, "_io", late):
            await used_twice(scene, ONE)
            await asyncio.to_thread(late.begun.wait)
            scene.blocks.prefix_cache.forget(scene.blocks.match_prompt(ONE, b""))
            late.may_go.set()
            await wait_until(lambda: file.room == BLOCKS_IN_FLIGHT_MAX)
            await turns()
        assert [(tier.books.blocks, tier.books.free) for tier in scene.store.tiers] == [(0, 20), (0, 20)]
        await used_twice(scene, [100 + token for token in ONE])
        await on_disk(scene, 4)

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        assert scene.store.disk.books.blocks == 4
        assert scene.offer(ONE) is None

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)


def held_calls(file: DiskFile, what: str) -> Any:
    """The file's calls, of which those of one name wait for `may_go`."""
    begun, may_go, real = threading.Event(), threading.Event(), file._io

    def call(*arguments: Any) -> Any:
        begun.set()
        assert may_go.wait(HELD_S_MAX), "the test let nothing go"
        return getattr(real, what)(*arguments)

    names = ("write", "read", "headers")
    return SimpleNamespace(**{n: getattr(real, n) for n in names} | {what: call}, begun=begun, may_go=may_go)


def test_a_disk_that_hangs_keeps_nothing_of_the_region(tmp_path: Path) -> None:
    """While blocks are being read, however long that takes, all of the region is there for those who compute. They come
    when the disk has read them."""

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        file = scene.store.disk.file
        late = held_calls(file, "read")
        with patch.object(file, "_io", late):
            bringing = asyncio.create_task(scene.bring(ONE))
            await asyncio.sleep(0)
            await asyncio.to_thread(late.begun.wait)
            assert (scene.ledger.books().free, scene.ledger.available) == (8, 8)
            late.may_go.set()
            assert await bringing == 4
        assert scene.have(ONE) == 4

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)


def test_another_node_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """What it asks for is in the region and on disk. It gets what is in the region, and the disk is asked for nothing
    else until it has answered."""
    other = [100 + token for token in ONE]

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await used_twice(scene, other)
        await on_disk(scene, 8)

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        scene.compute(ONE[:5])
        file = scene.store.disk.file
        late = held_calls(file, "read")
        with patch.object(file, "_io", late):
            await scene.store.bring_all(ONE[:8], b"")
            await asyncio.to_thread(late.begun.wait)
            assert scene.have(ONE) == 2
            assert scene.offer(other) is None
            late.may_go.set()
            await wait_until(lambda: scene.have(ONE) == 4)
        found = scene.offer(other)
        assert found is not None and found.kind is SourceKind.DISK

    play_on_disk(tmp_path / "blocks", before)
    with patch.multiple(store_module, LATE_S=0, LATE_SHARE=0):
        play_on_disk(tmp_path / "blocks", after)


def test_what_is_to_be_written_waits_for_what_comes_up(tmp_path: Path) -> None:
    """So much is being read that nothing more may be asked of the file: blocks are written afterwards."""

    async def story(scene: Scene) -> None:
        assert scene.store.disk is not None
        file = scene.store.disk.file
        file._in_flight = BLOCKS_IN_FLIGHT_MAX
        await used_twice(scene, ONE)
        await turns()
        assert len(scene.store._to_disk) == 4
        file._in_flight = 0
        await on_disk(scene, 4)

    play_on_disk(tmp_path / "blocks", story)


def test_an_offer_is_no_use_and_is_bounded() -> None:
    """Of four blocks two are offered at a time. Offers alone leave the prompt the coldest: its end goes when there is
    no room for another one. What is brought counts as used."""
    other = [100 + token for token in ONE]

    async def story(scene: Scene) -> None:
        scene.compute(ONE)
        await scene.idle()
        scene.compute(other[:5])
        await scene.idle()
        scene.evict_all()
        for _ in range(3):
            offer = scene.store.offer(scene.prefix(ONE), 0)
            assert offer is not None and offer.blocks == 2
        scene.compute([200, 201, 0])
        await scene.idle()
        known = scene.store.host.books.known
        assert [known(digest) for digest in scene.prefix(ONE).chain] == [True, True, True, False]
        scene.evict_all()
        assert await scene.bring(ONE) == 2
        scene.compute([300, 301, 0])
        await scene.idle()
        assert [known(digest) for digest in scene.prefix(other[:5]).chain] == [True, True]
        assert [known(digest) for digest in scene.prefix(ONE).chain] == [True, True, False, False]

    with patch.object(store_module, "OFFERED_BLOCKS_MAX", 2):
        play(8, 6, story)


def test_what_host_memory_has_already_is_not_read_again(tmp_path: Path) -> None:
    """The second of four blocks on disk is in host memory too, and the region has none: three are read, four come."""

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)

    async def after(scene: Scene) -> None:
        disk, books = scene.store.disk, scene.store.host.books
        assert disk is not None
        assert await scene.bring(ONE[:5]) == 2
        scene.evict_all()
        books.dropped(books.match([disk.books.key_of(disk.books.match(scene.keys(ONE))[0])])[0])
        assert disk.file.counts.blocks_read == 2
        assert await scene.bring(ONE) == 4
        assert scene.have(ONE) == 4
        assert disk.file.counts.blocks_read == 5

    play_on_disk(tmp_path / "blocks", before)
    play_on_disk(tmp_path / "blocks", after)


def test_the_last_free_place_of_a_disk_is_given_once(tmp_path: Path) -> None:
    """The disk has one free place. A block that was used twice takes it; one that was used once, and waits beside it,
    finds no room and nothing that pays for it."""

    async def story(scene: Scene) -> None:
        disk, books = scene.store.disk, scene.store.host.books
        assert disk is not None
        for first in (0, 10):
            scene.compute([first, first + 1, 0])
            await scene.idle()
        once, twice = (scene.prefix([first, first + 1, 0]).chain[0] for first in (0, 10))
        assert books.known(once) and books.known(twice)
        scene.store._to_disk[twice] = scene.store._once[once] = None
        with patch.object(store_module, "ONCE_MAX", 0):
            await scene.store._write_piece_down(disk)
        assert (disk.books.known(twice), disk.books.known(once)) == (True, False)
        assert (disk.books.evicted, disk.admission.credit, once in scene.store._once) == (0, 0, True)

    play_on_disk(tmp_path / "blocks", story, slots=1)


def test_much_is_forgotten_in_slices_and_nothing_is_found_meanwhile() -> None:
    """Of six blocks two are forgotten at a time, as their scores were not numbers. Until all are, no block is found,
    not even one of another prompt; then that one is."""
    other, long = [100, 101, 0], list(range(1, 13))

    async def story(scene: Scene) -> None:
        scene.compute(long)
        await scene.idle()
        scene.compute(other)
        await scene.idle()
        books = scene.store.host.books
        assert books.blocks == 7
        scene.blocks.prefix_cache.forget(scene.blocks.match_prompt(long, b""))
        assert books.blocks == 5
        assert scene.store.offer(scene.prefix(other), 0) is None
        await asyncio.sleep(0)
        assert books.blocks == 3
        await turns()
        assert books.blocks == 1
        found = scene.store.offer(scene.prefix(other), 0)
        assert found is not None and found.blocks == 1

    sweep = TierBooks.sweep
    with patch.object(TierBooks, "sweep", lambda books: sweep(books, 2)):
        play(8, 20, story)


def test_a_stop_forgets_all_that_is_to_be_forgotten(tmp_path: Path) -> None:
    """The scores of a prompt on disk were not numbers, and the node stops when the first block has been forgotten: the
    next process has none of them."""
    sweep = TierBooks.sweep

    async def before(scene: Scene) -> None:
        await used_twice(scene, ONE)
        await on_disk(scene, 4)
        assert scene.store.disk is not None
        scene.blocks.prefix_cache.forget(scene.blocks.match_prompt(ONE, b""))
        assert scene.store.disk.books.blocks == 3
        await scene.store.stop()
        assert scene.store.disk.books.blocks == 0

    async def after(scene: Scene) -> None:
        assert scene.store.disk is not None
        assert scene.store.disk.books.blocks == 0

    with patch.object(TierBooks, "sweep", lambda books: sweep(books, 1)):
        play_on_disk(tmp_path / "blocks", before)
        play_on_disk(tmp_path / "blocks", after)


def test_more_blocks_than_routers_know_are_refused() -> None:
    """A region of eight blocks and tiers of so many bytes: at most as many blocks as routers know of a node. The
    message names a block size with which it starts."""
    nbytes = LAYOUT.position_bytes
    with patch.object(store_module, "BLOCKS_MAX", 20):
        fits = StoreConfig(host_bytes=12 * nbytes)
        store_module._check_count(fits, LAYOUT, region_blocks=8)
        with pytest.raises(BatonError, match=f"hold 13 blocks.*engine.block_size to {2 * SIZE} ") as caught:
            store_module._check_count(StoreConfig(host_bytes=13 * nbytes), LAYOUT, region_blocks=8)
        assert caught.value.reason is Reason.BAD_CONFIG


PROMPTS = st.lists(st.integers(1, 2), min_size=3, max_size=13)
SALTS = st.sampled_from([b"", b"x"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["compute", "bring", "finish", "evict"]), PROMPTS, SALTS), max_size=40))
def test_whatever_happens_every_cached_block_has_its_own_bytes(steps: list[tuple[str, list[int], bytes]]) -> None:
    """Prompts that share beginnings, two tenants, copies that end at any time, evictions between them."""

    async def story(scene: Scene) -> None:
        bringing = []
        for what, tokens, salt in steps:
            if what == "compute" and scene.blocks.blocks_for(len(tokens)) <= scene.ledger.available:
                scene.compute(tokens, salt)
            elif what == "bring":
                bringing.append(asyncio.create_task(scene.bring(tokens, salt)))
            elif what == "finish" and scene.copier.waiting:
                scene.copier.finish()
            elif what == "evict":
                scene.blocks.prefix_cache.evict_until(scene.ledger.reclaimable)
            await turns()
            scene.have(tokens, salt)
            scene.check()
            for _, each, of in steps:
                scene.check_chain(each, of)
        while scene.copier.waiting:
            scene.copier.finish()
            await turns()
        await asyncio.gather(*bringing)
        assert scene.ledger.books().held == 0

    play(9, 7, story, prompt=False)
