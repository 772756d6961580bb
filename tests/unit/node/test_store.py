"""The tiers below a region: copies down and up that end when told to, over real bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.ids import BlockId
from cachestore.block_manager import BlockManager, prefix_blocks_max
from cachestore.layout import kv_layout
from cachestore.ledger import Ledger
from cachestore.prefix_cache import IndexCursor
from cachestore.tier_books import TierBooks
from kvtransfer.native.copy import copy_records
from node import store as store_module
from node.copiers import PositionCopy, PositionPlaces
from node.sources import LinearCost, Offer, Prefix
from node.store import HostTier, Store

LAYOUT = kv_layout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=2, dtype="uint8", dtype_bytes=1)
SIZE = LAYOUT.block_size
POISON = 0xFF


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

    def __init__(self, device: int, host: int, *, prompt: bool = False) -> None:
        stride = LAYOUT.position_bytes + 8
        self.ledger = Ledger(device, on_free=self._poison)
        self.blocks = BlockManager(self.ledger, SIZE, b"root")
        self.places = PositionPlaces(layout=LAYOUT, device_blocks=device, slots=host, slot_bytes=stride)
        self.device_U8 = np.full(LAYOUT.region_bytes(device), POISON, np.uint8)
        host_U8 = np.full(self.places.host_nbytes, POISON, np.uint8)
        self.copier = HandCopier(self.places, self.device_U8, host_U8, prompt)
        memory: Any = SimpleNamespace(copier=self.copier)
        cost = LinearCost(fixed_s=1e-4, unit_s=1e-5, units=8)
        self.store = Store(
            blocks=self.blocks,
            groups=LAYOUT.num_groups,
            host=HostTier(memory=memory, books=TierBooks(host, stride), cost=cost),
        )

    def _poison(self, block: BlockId) -> None:
        self._records(block)[:] = POISON

    def _records(self, block: BlockId) -> np.ndarray:
        return self.device_U8.reshape(LAYOUT.num_layers, -1, LAYOUT.record_bytes)[:, block]

    def prefix(self, tokens: list[int], salt: bytes = b"") -> Prefix:
        whole = tokens[: prefix_blocks_max(len(tokens), SIZE) * SIZE]
        return Prefix(tokens=whole, salt=salt, chain=self.blocks.prefix_cache.chain(whole, salt))

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


async def turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def play(device: int, host: int, story: Callable[[Scene], Awaitable[None]], *, prompt: bool = True) -> None:
    async def scenario() -> None:
        scene = Scene(device, host, prompt=prompt)
        scene.store.start()
        await story(scene)
        await scene.store.stop()
        scene.check()

    with_no_pauses = {"TOGETHER_S": 0, "REST_SHARE": 0}
    before = {name: getattr(store_module, name) for name in with_no_pauses}
    for name, value in with_no_pauses.items():
        setattr(store_module, name, value)
    try:
        asyncio.run(scenario())
    finally:
        for name, value in before.items():
            setattr(store_module, name, value)


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
        assert (counters.stored_blocks, counters.hit_blocks, counters.promotions) == (4, 4, 1)

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
        while scene.copier.waiting:
            scene.copier.finish()
            await turns()
        await asyncio.gather(*bringing)
        assert scene.ledger.books().held == 0

    play(9, 7, story, prompt=False)
