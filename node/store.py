"""The store of one node: tiers below its region, which keep the blocks that the prefix cache gives up.

Blocks go down before they are evicted: what nobody holds any more is copied to host memory by and by, and eviction
itself stays instant. They come up, into spare blocks of the region, when a prompt that begins with them is gathered for
(`PrefixSource`). The engine never waits for a tier.

A copy down holds nothing: indexed blocks are not written to, so a copy whose block is in the index still when it ends
has the right bytes, and any other is dropped.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final

from baton.config import setting
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId
from baton.log import get_log
from baton.runtime import Progress
from baton.tasks import Tasks, end_task, log_failure
from cachestore.block_manager import BlockManager
from cachestore.holdings import Tier
from cachestore.layout import Layout
from cachestore.prefix_cache import Entry, IndexCursor, pack_tokens, root_digest
from cachestore.tier_books import BlockKey, TierBooks, TierSlot, salt_digest
from node.copiers import BlockCopier, MemoryBelow, PositionCopy, PositionPlaces, open_memory_below
from node.regions import PoolRegion
from node.sources import LinearCost, Offer, Prefix, SourceKind

log = get_log("store")

PIECE_BYTES_MAX: Final = 4 << 20
"""Of one copy down: a copy up waits for one at most."""
PIECE_BLOCKS_MAX: Final = 64
"""Of one copy."""
REST_SHARE: Final = 3
"""How long copying down pauses after each piece, in times of what the piece took."""
TOGETHER_S: Final = 0.02
"""Blocks that come to be idle within this time are copied together."""
LOOKS_MAX: Final = 512
"""Idle blocks looked at for one piece."""
IDLE_BLOCKS_MAX: Final = 1 << 17
"""Idle blocks that wait to be copied down; of more, those idle for longest are not."""
PROMOTIONS_MAX: Final = 16
"""Prompts that blocks come up for at the same time."""
HOST_FIXED_S: Final = 5e-4
HOST_BYTES_PER_S: Final = 2e9
"""What a copy up is believed to cost before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Tiers below the region, which keep what it has no room for."""

    host_bytes: int = setting(
        0,
        "bytes of host memory that keep blocks beyond the region; 0: none",
        "Prompts begin as earlier ones did, whose blocks have been evicted since.",
    )

    def __post_init__(self) -> None:
        if self.host_bytes < 0:
            raise InvalidField("host_bytes", f"is {self.host_bytes}; must be 0 (off) or more")


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Totals of one tier since the start."""

    hit_blocks: int = 0
    """Blocks that came up from it."""
    promotions: int = 0
    """Times that blocks came up, for one prompt each."""
    promotion_s: float = 0.0
    """How long all of these took."""
    stored_blocks: int = 0
    lost_blocks: int = 0
    """Evicted above before they were copied, or while they were."""
    refused_blocks: int = 0
    """Not copied: no slot could be had."""


@dataclass(slots=True, kw_only=True)
class HostTier:
    """Host memory, and the books of what is in it. A slot is a block of the memory below the region."""

    memory: MemoryBelow
    books: TierBooks
    cost: LinearCost
    """Of bringing so many blocks up."""
    counters: TierCounters = field(default_factory=TierCounters)


class Store:
    """Implements `node.sources.PrefixSource`. Control thread only."""

    def __init__(self, *, blocks: BlockManager, groups: int, host: HostTier) -> None:
        """`groups` blocks of the region make a position, which is what a tier calls a block."""
        self.host = host
        self.spare: Callable[[], int] = lambda: self._ledger.available
        """How many blocks of the region may be taken for what comes up."""
        self.room_changed: Callable[[], None] = lambda: None
        """Called when blocks of the region have been let go of."""
        self._blocks = blocks
        self._ledger = blocks.ledger
        self._cache = blocks.prefix_cache
        self._groups = groups
        self._copier: BlockCopier = host.memory.copier
        self._idle: OrderedDict[bytes, Entry] = OrderedDict()
        """Indexed blocks that nobody held when they came here, the first first."""
        self._idled = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._promotions = Tasks(self._loop, log, broken="blocks did not come up")
        self._down: asyncio.Task[None] | None = None
        self._broken = False
        """A copy has failed: nothing is copied any more."""

    def start(self) -> None:
        """From now on idle blocks are copied down."""
        assert self._down is None
        self._cache.on_idle = self._on_idle
        self._down = self._loop.create_task(self._copy_down(), name="store")
        self._down.add_done_callback(log_failure)

    async def stop(self) -> None:
        """Nothing is asked of it any more. Copies under way end with `close`."""
        self._cache.on_idle = None
        await end_task(self._down)
        await self._promotions.cancel()

    def close(self) -> None:
        """Waits for the copies under way. Comes before the end of the region above."""
        self.host.memory.close()

    # Down.

    def _on_idle(self, entry: Entry) -> None:
        self._idle[entry.digest] = entry
        if len(self._idle) > IDLE_BLOCKS_MAX:
            self._idle.popitem(last=False)
        self._idled.set()

    async def _copy_down(self) -> None:
        while not self._broken:
            await self._idled.wait()
            await asyncio.sleep(TOGETHER_S)
            self._idled.clear()
            while self._idle and not self._broken:
                began_s = self._loop.time()
                copied = await self._copy_piece_down()
                await asyncio.sleep(REST_SHARE * (self._loop.time() - began_s) if copied else 0)

    async def _copy_piece_down(self) -> bool:
        """Whether anything was copied."""
        pairs = self._next_piece()
        if not pairs:
            return False
        device, slots = [block for entry, _ in pairs for block in entry.blocks], [slot for _, slot in pairs]
        ended = await self._copy(out=True, device=device, slots=slots)
        for entry, slot in pairs:
            if ended and entry.alive:
                self.host.books.stored(slot)
                self.host.counters.stored_blocks += 1
            else:
                self.host.books.dropped(slot)
                self.host.counters.lost_blocks += 1
        return True

    def _next_piece(self) -> list[tuple[Entry, TierSlot]]:
        books, found = self.host.books, []
        piece_max = max(1, min(PIECE_BLOCKS_MAX, PIECE_BYTES_MAX // books.block_bytes))
        for _ in range(min(LOOKS_MAX, len(self._idle))):
            _, entry = self._idle.popitem(last=False)
            if books.known(entry.digest):
                continue
            if not entry.alive:
                self.host.counters.lost_blocks += 1
                continue
            slot = books.begin_store(self._key_of(entry))
            if slot is None:
                self.host.counters.refused_blocks += 1
                continue
            found.append((entry, slot))
            if len(found) == piece_max:
                break
        return found

    def _key_of(self, entry: Entry) -> BlockKey:
        root, salt = _salted(self._cache.kv_root, entry.salt)
        return BlockKey(
            digest=entry.digest,
            parent=root if entry.parent is None else entry.parent.digest,
            packed=entry.packed,
            salt=salt,
            depth=entry.depth - 1,
        )

    # Up: PrefixSource.

    def offer(self, prompt: Prefix, have_blocks: int) -> Offer | None:
        """See `PrefixSource.offer`."""
        if self._broken or len(self._promotions) >= PROMOTIONS_MAX:
            return None
        host = self.host
        found = host.books.match(list(self._known_keys(host.books, prompt, have_blocks)))
        count = min(len(found), self.spare() // self._groups)
        if count <= 0:
            return None
        return Offer(
            source=self,
            kind=SourceKind.HOST,
            prompt=prompt,
            have_blocks=have_blocks,
            blocks=count,
            fixed_s=host.cost.fixed_s,
            block_s=host.cost.unit_s,
            block_bytes=host.books.block_bytes,
        )

    async def bring(self, offer: Offer) -> int:
        """See `PrefixSource.bring`. A cancelled one goes on by itself: its copies own their blocks until they end."""
        brought: asyncio.Future[int] = self._loop.create_future()
        self._promotions.spawn(self._bring(offer, brought))
        return await asyncio.shield(brought)

    async def _bring(self, offer: Offer, brought: asyncio.Future[int]) -> None:
        try:
            brought.set_result(await self._bring_from_host(offer))
        finally:
            if not brought.done():
                brought.set_result(0)

    async def _bring_from_host(self, offer: Offer) -> int:
        prompt, tier, began_s = offer.prompt, self.host, self._loop.time()
        groups = self._groups
        before = self._cache.match(prompt.tokens, prompt.salt, offer.have_blocks * groups)
        slots = tier.books.match(list(self._known_keys(tier.books, prompt, offer.have_blocks)))[: offer.blocks]
        self._ledger.hold(before)
        room = max(0, min(self.spare(), self._ledger.available)) // groups
        del slots[room if len(before) == offer.have_blocks * groups else 0 :]
        if not slots:
            self._release(before)
            return 0
        new = self._blocks.allocate(len(slots) * groups)
        tier.books.begin_load(slots)
        ended = False
        try:
            ended = await self._copy(out=False, device=new, slots=slots)
        finally:
            # Where this is cancelled the node ends, and nobody needs the blocks.
            tier.books.end_load(slots)
        table = [*before, *new]
        if ended:
            self._cache.index(prompt.tokens, table, self._blocks.tokens_in(len(table)), prompt.salt, IndexCursor())
            took_s = self._loop.time() - began_s
            tier.cost.measured(len(slots), took_s)
            tier.counters.hit_blocks += len(slots)
            tier.counters.promotions += 1
            tier.counters.promotion_s += took_s
        self._release(table)
        return len(slots) if ended else 0

    def _release(self, table: Sequence[BlockId]) -> None:
        self._blocks.release(table)
        self.room_changed()

    def _known_keys(self, books: TierBooks, prompt: Prefix, first: int) -> Iterator[BlockKey]:
        """Of the prompt's blocks from `first` on, as far as the books know their digests."""
        root, salt = _salted(self._cache.kv_root, prompt.salt)
        size = self._cache.block_size
        for depth in range(first, len(prompt.chain)):
            if not books.known(prompt.chain[depth]):
                return
            yield BlockKey(
                digest=prompt.chain[depth],
                parent=prompt.chain[depth - 1] if depth else root,
                packed=pack_tokens(prompt.tokens[depth * size : (depth + 1) * size]),
                salt=salt,
                depth=depth,
            )

    # Copies.

    async def _copy(self, *, out: bool, device: Sequence[BlockId], slots: Sequence[TierSlot]) -> bool:
        """`device` is a piece of a block table. False: a copy has failed, and nothing is copied from now on."""
        pieces, groups = [], self._groups
        for first in range(0, len(slots), PIECE_BLOCKS_MAX):
            end = first + PIECE_BLOCKS_MAX
            copy = PositionCopy(
                out=out, device=tuple(device[first * groups : end * groups]), host=tuple(slots[first:end])
            )
            ended: asyncio.Future[BaseException | None] = self._loop.create_future()
            self._copier.start(copy, partial(_set_result, ended))
            pieces.append(ended)
        errors = [error for error in [await ended for ended in pieces] if error is not None]
        if errors and not self._broken:
            self._broken = True
            log.error("the store is off: blocks cannot be copied", exc_info=errors[0])
        return not errors

    # For people.

    def describe(self) -> str:
        books = self.host.books
        return f"{self.host.memory.describe()} for {books.num_slots:,} blocks"

    def check(self) -> None:
        """Raises ConservationError."""
        self.host.books.check()


def _set_result(ended: asyncio.Future[BaseException | None], error: BaseException | None) -> None:
    if not ended.done():  # whoever waits may have been cancelled
        ended.set_result(error)


@lru_cache(maxsize=1024)
def _salted(kv_root: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Where the chains of this salt begin, and its digest."""
    return root_digest(kv_root, salt), salt_digest(salt)


async def open_store(
    config: StoreConfig,
    *,
    below: PoolRegion,
    layout: Layout,
    blocks: BlockManager,
    name: str,
    progress: Progress,
) -> Store:
    """Make the tiers. `below` is the pool's region.

    Raises BatonError BAD_CONFIG: there is too little memory, or it cannot be pinned.
    """
    block_bytes = layout.position_bytes
    num_slots = config.host_bytes // block_bytes
    if num_slots == 0:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"store.host_bytes is {config.host_bytes:,}; a block has {block_bytes:,} bytes. Set more, or 0 (off).",
            field="store.host_bytes",
        )
    places = PositionPlaces(
        layout=layout, device_blocks=blocks.ledger.num_blocks, slots=num_slots, slot_bytes=block_bytes
    )
    memory = await open_memory_below(below, places, name=f"{name}-store", field="store.host_bytes", progress=progress)
    cost = LinearCost(fixed_s=HOST_FIXED_S, unit_s=block_bytes / HOST_BYTES_PER_S, units=PIECE_BLOCKS_MAX)
    holdings = blocks.prefix_cache.holdings
    books = TierBooks(
        num_slots,
        block_bytes,
        on_added=lambda digest: holdings.added(digest, Tier.HOST),
        on_removed=lambda digest: holdings.removed(digest, Tier.HOST),
    )
    return Store(blocks=blocks, groups=layout.num_groups, host=HostTier(memory=memory, books=books, cost=cost))
