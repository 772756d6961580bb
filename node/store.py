"""The store of one node: tiers below its region, which keep the blocks that the prefix cache gives up.

Blocks go down before they are evicted: what nobody holds any more is copied to host memory by and by, and from there
to the disk when it has been used twice; eviction itself stays instant. They come up, into spare blocks of the region,
when a prompt that begins with them is gathered for (`PrefixSource`); from the disk they come by way of host memory. The
engine never waits for a tier.

A copy down holds nothing: indexed blocks are not written to, so a copy whose block is in the index still when it ends
has the right bytes, and any other is dropped.

A tier's block is one position: of a layout with several groups, a block of the region in each.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from baton.config import setting
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId
from baton.log import get_log
from baton.runtime import Progress
from baton.tasks import Tasks, end_task, log_failure
from baton.wire import TierLoad, Times
from cachestore.admission import Admission
from cachestore.block_manager import BlockManager
from cachestore.holdings import BLOCKS_MAX, Holdings, Tier
from cachestore.layout import Layout
from cachestore.prefix_cache import Entry, IndexCursor, pack_blocks, root_digest
from cachestore.tier_books import BlockKey, TierBooks, TierSlot, salt_digest
from node.copiers import BlockCopier, MemoryBelow, PositionCopy, PositionPlaces, open_memory_below
from node.disk_file import DiskFile, Outcome
from node.disk_format import FileIdentity
from node.regions import PoolRegion, on_thread
from node.sources import ROUNDS_MAX, LinearCost, Offer, Prefix, SourceKind, Wait

log = get_log("store")

_T = TypeVar("_T")

PIECE_BYTES_MAX: Final = 4 << 20
"""Of one copy down: a copy up waits for one at most."""
PIECE_BLOCKS_MAX: Final = 64
"""Of one copy."""
REST_SHARE: Final = 3
"""How long copying down pauses after each piece, in times of what the piece took; less where much waits."""
HURRY_SHARE: Final = 0.5
"""Where as much of what may be evicted still waits to be copied down, there are no pauses."""
TOGETHER_S: Final = 0.1
"""Blocks that come to be idle within this time are copied together."""
ONCE_MAX: Final = 3
"""For each free block of host memory, so many others that were used once stay there alone; of more, the oldest go to
the disk."""
LOOKS_MAX: Final = 512
"""Idle blocks looked at for one piece."""
WAITING_BLOCKS_MAX: Final = 1 << 17
"""Blocks that wait to be copied down to a tier; of more, those that wait for longest are not."""
PROMOTIONS_MAX: Final = 16
"""Prompts that blocks come up for at the same time."""
OFFERED_BLOCKS_MAX: Final = 1 << 11
"""Of a prompt, at a time: they are looked up on the control thread."""
LATE_S: Final = 1.0
LATE_SHARE: Final = 4
"""What comes up for another node is waited for so long and as many times as long as expected. A disk that takes longer
is asked for nothing else meanwhile."""
HOST_FIXED_S: Final = 5e-4
HOST_BYTES_PER_S: Final = 1e11
DISK_FIXED_S: Final = 2e-3
BOOKED_BYTES: Final = 650
"""What the books of a tier take of the node's memory for each block of 16 tokens, about (docs/memory.md)."""
DISK_BYTES_PER_S: Final = 1e10
"""What coming up is believed to cost before the first time: less than anywhere, as what is believed to cost too much is
never tried, and so never measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Tiers below the region, which keep what it has no room for."""

    host_bytes: int = setting(
        0,
        "bytes of host memory that keep blocks beyond the region, pinned where that is on a GPU; 0: none",
        "Prompts begin as earlier ones did, whose blocks have been evicted since.",
    )
    disk_path: Path | None = setting(
        None,
        "file, folder (the file in it is called after the node) or raw block device that keeps blocks beyond host "
        "memory, and through a restart; none: no disk",
        "As host_bytes, where memory is too small, or a restarted node should begin warm.",
    )
    disk_bytes: int = setting(
        0, "bytes of the file at disk_path, which are taken at the start", "Always with disk_path: it is the disk tier."
    )

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise InvalidField(name, f"is {getattr(self, name)}; must be 0 (off) or more")
        if (self.disk_path is None) != (self.disk_bytes == 0):
            raise InvalidField("disk_bytes", "goes with disk_path: set both, or neither")
        if self.disk_bytes and not self.host_bytes:
            raise InvalidField("host_bytes", "must not be 0 with disk_path: blocks go to the disk and back through it")


@dataclass(slots=True, kw_only=True)
class TierCounters:
    """Totals of one tier since the start."""

    hit_blocks: int = 0
    """Blocks that came up from it."""
    promotion_times: Times = field(default_factory=Times)
    """How long each time took that blocks came up, for one prompt each."""
    stored_blocks: int = 0
    lost_blocks: int = 0
    """Evicted above before they were copied, or while they were."""
    refused_blocks: int = 0
    """Not copied, as no slot could be had, or copying failed."""


@dataclass(slots=True, kw_only=True)
class HostTier:
    """Host memory, and the books of what is in it."""

    memory: MemoryBelow
    books: TierBooks
    cost: LinearCost
    """Of bringing so many blocks up."""
    counters: TierCounters = field(default_factory=TierCounters)
    kind: SourceKind = SourceKind.HOST


@dataclass(slots=True, kw_only=True)
class DiskTier:
    """A file, and the books of what is in it."""

    file: DiskFile
    books: TierBooks
    cost: LinearCost
    admission: Admission = field(default_factory=Admission)
    counters: TierCounters = field(default_factory=TierCounters)
    kind: SourceKind = SourceKind.DISK
    due_s: list[float] = field(default_factory=list)
    """When what is being read for a prompt is late, for each."""
    emptying: int = 0
    """Orders to empty it that are being carried out: nothing is written."""


class Store:
    """Implements `node.sources.PrefixSource`. Control thread only."""

    def __init__(self, *, blocks: BlockManager, groups: int, host: HostTier, disk: DiskTier | None = None) -> None:
        """`groups` blocks of the region make a position."""
        self.host = host
        self.disk = disk
        self.tiers: tuple[HostTier | DiskTier, ...] = (host,) if disk is None else (host, disk)
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
        self._to_disk: OrderedDict[bytes, None] = OrderedDict()
        """Blocks in host memory that are to be written."""
        self._once: OrderedDict[bytes, None] = OrderedDict()
        """Blocks in host memory alone that are worth a place where there is room, the first first."""
        self._admitted = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._coming: dict[bytes, asyncio.Future[int]] = {}
        """By the digest of the first block that is coming up, how many come: prompts of one beginning share it."""
        self._promotions = Tasks(self._loop, log, broken="blocks did not come up")
        self._tasks: list[asyncio.Task[None]] = []
        self._sweeping: asyncio.Handle | None = None
        """When more is forgotten of what is to be."""
        self._broken = False
        """A copy has failed: nothing is copied any more."""

    def start(self) -> None:
        """From now on idle blocks are copied down, and pins hold in every tier."""
        assert not self._tasks
        self._cache.on_idle, self._cache.on_pin, self._cache.on_forget = self._on_idle, self._on_pin, self._on_forget
        self._cache.holdings.on_gone = self._on_gone
        for work in (self._copy_down(), *(() if self.disk is None else (self._write_down(self.disk),))):
            task = self._loop.create_task(work, name="store")
            task.add_done_callback(log_failure)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Nothing is asked of it any more. Copies under way end with `close`."""
        self._cache.on_idle = self._cache.on_pin = self._cache.on_forget = self._cache.holdings.on_gone = None
        while self._sweeping is not None:  # what may be broken must not be there after a restart
            self._sweeping.cancel()
            self._sweep()
        for task in self._tasks:
            await end_task(task)
        await self._promotions.cancel()

    def close(self) -> None:
        """Waits for the copies under way. Comes before the end of the region above."""
        if self.disk is not None:
            self.disk.file.close()
        self.host.memory.close()

    async def empty(self, tier: Tier) -> int:
        """Forget what a tier has, or is about to have, but for what is pinned -> how many blocks it had. When this
        returns a later process does not find them either.

        Raises BatonError BAD_FIELD: there is no such tier; INTERNAL: the disk could not be written.
        """
        found = {Tier.HOST: self.host, Tier.DISK: self.disk}.get(tier)
        if found is None:
            raise BatonError(Reason.BAD_FIELD, f"This node has no {tier.name.lower()} tier.", field="tier")
        if isinstance(found, HostTier):
            self._idle.clear()
            return len(await self._clear(found))
        found.emptying += 1
        try:
            self._to_disk.clear()
            self._once.clear()
            gone = await self._clear(found)
            emptied = await (found.file.erase(gone) if found.books.blocks else found.file.empty())
        finally:
            found.emptying -= 1
        if not emptied:
            text = "The disk could not be written: a restart may bring these blocks back. Delete its file before."
            raise BatonError(Reason.INTERNAL, text, field="tier")
        return len(gone)

    async def _clear(self, tier: HostTier | DiskTier) -> list[TierSlot]:
        """In slices, so that the control thread does other work between them -> the slots of those that were stored."""
        gone: list[TierSlot] = []
        for slots in tier.books.clear():
            gone += slots
            await asyncio.sleep(0)
        return gone

    # Down to host memory.

    def _on_pin(self, chain: Sequence[bytes], pinned: bool) -> None:
        for tier in self.tiers:
            (tier.books.pin if pinned else tier.books.unpin)(chain)
        if pinned:
            self._admit(chain)

    def _on_forget(self, digests: Sequence[bytes]) -> None:
        """Their content may be broken, and so may copies, and what was computed behind them: no tier keeps these."""
        for tier in self.tiers:
            tier.books.forget_with_descendants(digests)
        self._sweep()

    def _on_gone(self, digest: bytes) -> None:
        """No tier has it any more: blocks behind it, which no prompt finds before it is computed again, go too. So
        what a node publishes are beginnings of chains, as routers take it to be."""
        for tier in self.tiers:
            if tier.books.forget_behind(digest) and self._sweeping is None:
                self._sweeping = self._loop.call_soon(self._sweep)

    def _sweep(self) -> None:
        """Forget a slice of what is to be forgotten, and go on when the loop has done other work."""
        self._sweeping = None
        for tier in self.tiers:
            gone = tier.books.sweep()
            if gone and isinstance(tier, DiskTier):
                tier.file.erase(gone)
        if self._sweeping is None and any(tier.books.sweep_due for tier in self.tiers):
            self._sweeping = self._loop.call_soon(self._sweep)

    def _on_idle(self, entries: Sequence[Entry], used: bool) -> None:
        if self.disk is not None:
            admission = self.disk.admission
            (admission.use if used else admission.brought)([entry.digest for entry in entries])
        if not used:
            return  # they will be, or somebody else has them
        for entry in entries:
            self._idle[entry.digest] = entry
        while len(self._idle) > WAITING_BLOCKS_MAX:
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
                share = _rest_share(len(self._idle) * self._groups, self._ledger.available)
                await asyncio.sleep(share * (self._loop.time() - began_s) if copied else 0)

    async def _copy_piece_down(self) -> bool:
        """Whether anything was copied."""
        pairs = self._next_piece()
        if not pairs:
            return False
        books, counters = self.host.books, self.host.counters
        device = [block for entry, _ in pairs for block in entry.blocks]
        slots = [slot for _, slot in pairs]
        ended = await self._copy(out=True, device=device, slots=slots)
        for entry, slot in pairs:
            if ended and entry.alive:
                books.stored(slot)
                counters.stored_blocks += 1
            else:
                books.dropped(slot)
                counters.lost_blocks += 1
        self._admit([entry.digest for entry, _ in pairs])
        return True

    def _next_piece(self) -> list[tuple[Entry, TierSlot]]:
        books, counters, idle = self.host.books, self.host.counters, self._idle
        found: list[tuple[Entry, TierSlot]] = []
        here: list[bytes] = []
        piece_max = max(1, min(PIECE_BLOCKS_MAX, PIECE_BYTES_MAX // books.block_bytes))
        for _ in range(min(LOOKS_MAX, len(idle))):
            digest, entry = idle.popitem(last=False)
            if not entry.alive:
                counters.lost_blocks += not books.known(digest)
                continue
            slot = books.begin_store(self._key_of(entry))
            if slot is not None:
                found.append((entry, slot))
                if len(found) == piece_max:
                    break
            elif books.known(digest):
                here.append(digest)
            else:
                counters.refused_blocks += 1
        self._admit(here)
        return found

    def _key_of(self, entry: Entry) -> BlockKey:
        root, salt = _salted(self._cache.kv_root, entry.salt)
        parent = root if entry.parent is None else entry.parent.digest
        return BlockKey(entry.digest, parent, entry.packed, salt, entry.depth - 1)

    # Down to the disk.

    def _admit(self, digests: Sequence[bytes]) -> None:
        """To be written, now or before host memory evicts them: those that are there, not on disk, and worth it."""
        disk = self.disk
        if disk is None or not disk.file.writable:
            return
        known, there, admits = disk.books.known, self.host.books.known, disk.admission.admits
        for digest in digests:
            if known(digest) or not there(digest):
                continue
            if admits(digest, room=False) or disk.books.pinned(digest):
                self._once.pop(digest, None)
                self._to_disk[digest] = None
            elif admits(digest, room=True):
                self._once[digest] = None
        for waiting, most in ((self._to_disk, WAITING_BLOCKS_MAX), (self._once, self.host.books.num_slots)):
            while len(waiting) > most:
                waiting.popitem(last=False)
        if self._wait_for_disk(disk):
            self._admitted.set()

    def _wait_for_disk(self, disk: DiskTier) -> int:
        """How many blocks are to be written now."""
        if disk.emptying:
            return 0
        once = len(self._once) - ONCE_MAX * self.host.books.free
        return len(self._to_disk) + max(0, min(once, disk.books.free + disk.admission.credit))

    async def _write_down(self, disk: DiskTier) -> None:
        while True:
            await self._admitted.wait()
            await asyncio.sleep(TOGETHER_S)
            self._admitted.clear()
            while self._wait_for_disk(disk):
                began_s = self._loop.time()
                if not disk.file.room:  # taken by what comes up
                    await asyncio.sleep(TOGETHER_S)
                    continue
                await self._write_piece_down(disk)
                share = _rest_share(self._wait_for_disk(disk), self.host.books.num_slots)
                await asyncio.sleep(share * (self._loop.time() - began_s))

    async def _write_piece_down(self, disk: DiskTier) -> None:
        books = self.host.books
        found: list[tuple[BlockKey, TierSlot, TierSlot]] = []
        piece_max = max(1, min(PIECE_BLOCKS_MAX, PIECE_BYTES_MAX // books.block_bytes, disk.file.room))
        for _ in range(min(piece_max, self._wait_for_disk(disk))):
            once = not self._to_disk
            paid = once and not disk.books.free  # nor missed where it does not come
            if paid and not disk.admission.credit:
                break  # others of this piece have taken the last free places
            digest, _ = (self._once if once else self._to_disk).popitem(last=False)
            source = books.find(digest)
            if source is None:
                disk.counters.lost_blocks += not paid
                continue
            key = books.key_of(source)
            slot = disk.books.begin_store(key)
            if slot is None:
                disk.counters.refused_blocks += not disk.books.known(digest)
                continue
            disk.admission.credit -= paid
            found.append((key, source, slot))
        if not found:
            return
        sources = [source for _, source, _ in found]
        books.begin_load(sources, use=False)
        ended: asyncio.Future[Sequence[Outcome]] = self._loop.create_future()
        disk.file.start_store(
            self.host.memory.region.array_U8,
            [slot for _, _, slot in found],
            [key for key, _, _ in found],
            self._at(sources),
            partial(_set_result, ended),
        )
        outcomes = await ended
        books.end_load(sources)
        for (key, _, slot), outcome in zip(found, outcomes, strict=True):
            if outcome is Outcome.DONE:
                disk.books.stored(slot)
                if disk.books.find(key.digest) != slot:  # it was forgotten meanwhile
                    disk.file.erase([slot])
                    continue
                disk.counters.stored_blocks += 1
            else:
                disk.books.dropped(slot)
                disk.counters.refused_blocks += 1

    def _at(self, slots: Sequence[TierSlot]) -> np.ndarray:
        """Where a block begins in host memory, for the file."""
        return np.asarray(slots, dtype=np.int64) * self.host.books.block_bytes

    # Up: PrefixSource.

    def offer(self, prompt: Prefix, have_blocks: int) -> Offer | None:
        """See `PrefixSource.offer`. The blocks of one tier, up to the first that it has not, by their names: only what
        is brought counts as used, and has its tokens compared."""
        if self._broken or len(self._promotions) >= PROMOTIONS_MAX:
            return None
        for tier in self.tiers:
            if isinstance(tier, DiskTier) and not self._answers(tier):
                continue
            most = min(self.spare() // self._groups, OFFERED_BLOCKS_MAX)
            count = tier.books.count(prompt.chain[have_blocks : have_blocks + max(0, most)])
            if count > 0:
                return Offer(
                    source=self,
                    kind=tier.kind,
                    prompt=prompt,
                    have_blocks=have_blocks,
                    blocks=count,
                    fixed_s=tier.cost.fixed_s,
                    block_s=tier.cost.unit_s,
                    block_bytes=tier.books.block_bytes,
                )
        return None

    def _answers(self, disk: DiskTier) -> bool:
        return disk.file.readable and self._loop.time() <= min(disk.due_s, default=math.inf)

    async def bring(self, offer: Offer, wait: Wait | None = None) -> int:
        """See `PrefixSource.bring`. A cancelled one goes on by itself: its copies own their blocks until they end."""
        del wait
        digest = offer.prompt.chain[offer.have_blocks]
        brought = self._coming.get(digest)
        if brought is None:
            brought = self._coming[digest] = self._loop.create_future()
            self._promotions.spawn(self._bring(offer, digest, brought))
        return min(offer.blocks, await asyncio.shield(brought))

    async def _bring(self, offer: Offer, digest: bytes, brought: asyncio.Future[int]) -> None:
        came = 0
        try:
            came = await self._bring_up(offer)
        finally:
            del self._coming[digest]
            brought.set_result(came)

    async def bring_all(self, tokens: Sequence[int], salt: bytes) -> None:
        """Bring up what the tiers have of these tokens behind what the region has: for another node that fetches it.

        A tier that is much slower than expected is not waited for: the other node gets what there is.
        """
        chain = self._cache.chain(tokens, salt)
        prompt = Prefix(tokens=tokens, salt=salt, chain=chain)
        for _ in range(ROUNDS_MAX):
            have = bisect_left(chain, True, key=lambda digest: not self._cache.indexed(digest))
            offer = self.offer(prompt, have) if have < len(chain) else None
            if offer is None:
                return
            try:
                async with asyncio.timeout(_late_s(offer.expected_s)):
                    if not await self.bring(offer):
                        return
            except TimeoutError:
                return

    async def _bring_up(self, offer: Offer) -> int:
        """-> how many came. What is on disk is read into host memory first: a disk that hangs keeps nothing of the
        region from those who compute."""
        began_s = self._loop.time()
        tier = next(tier for tier in self.tiers if tier.kind is offer.kind)
        slots = tier.books.match(self._keys(offer))
        if isinstance(tier, DiskTier):
            slots = await self._read_up(tier, slots)
        else:
            tier.books.begin_load(slots)
        came = await self._copy_up(offer, slots)
        self.host.books.end_load(slots)
        if came:
            took_s = self._loop.time() - began_s
            tier.cost.measured(came, took_s)
            tier.counters.hit_blocks += came
            tier.counters.promotion_times.add(took_s)
        return came

    async def _copy_up(self, offer: Offer, slots: Sequence[TierSlot]) -> int:
        """From host memory: hold what is before, copy into blocks of the region, index, let go -> how many came."""
        prompt, groups = offer.prompt, self._groups
        before = self._cache.match(prompt.tokens, prompt.salt, offer.have_blocks * groups)
        self._ledger.hold(before)
        room = max(0, min(self.spare(), self._ledger.available)) // groups
        slots = slots[: room if len(before) == offer.have_blocks * groups else 0]
        if not slots:
            self._release(before)
            return 0
        new = self._blocks.allocate(len(slots) * groups)
        pieces = []
        for first in range(0, len(slots), PIECE_BLOCKS_MAX):
            end = first + PIECE_BLOCKS_MAX
            pieces.append(self._copy(out=False, device=new[first * groups : end * groups], slots=slots[first:end]))
        came = 0
        if all(await asyncio.gather(*pieces)):
            digests = prompt.chain[offer.have_blocks :]
            find = self.host.books.find  # what was forgotten meanwhile, and what is behind it, is not to be used
            lost = (i for i, slot in enumerate(slots) if find(digests[i]) != slot)
            came = next(lost, len(slots))
        table = [*before, *new]
        tokens = (offer.have_blocks + came) * self._cache.block_size
        cursor = IndexCursor()  # it stops at a block whose content may be broken
        self._cache.index(prompt.tokens, table, tokens, prompt.salt, cursor, chain=prompt.chain)
        self._release(table)
        return max(0, cursor.positions - offer.have_blocks)

    async def _read_up(self, disk: DiskTier, slots: Sequence[TierSlot]) -> list[TierSlot]:
        """From the disk into host memory, where they stay -> the slots of the leading ones that came, as after
        `begin_load`."""
        books = self.host.books
        disk.books.begin_load(slots)
        due_s = self._loop.time() + _late_s(disk.cost.of(len(slots)))
        disk.due_s.append(due_s)
        keys = [disk.books.key_of(slot) for slot in slots]
        places, held = self._places_for(keys, disk.file.room)
        read = [i for i, place in enumerate(places) if place not in held]
        outcomes = await self._read(disk, [slots[i] for i in read], [places[i] for i in read])
        disk.due_s.remove(due_s)
        disk.books.end_load(slots)
        for i, outcome in zip(read, outcomes, strict=True):
            if outcome is Outcome.DONE:
                books.stored(places[i])
                continue
            books.dropped(places[i])
            if disk.books.find(keys[i].digest) == slots[i]:
                self._lost_on_disk(disk, slots[i], erase=outcome is Outcome.CORRUPT)
        # One that was forgotten meanwhile is not there either.
        lost = (i for i, place in enumerate(places) if books.find(keys[i].digest) != place)
        came = places[: next(lost, len(places))]
        books.begin_load(came)
        books.end_load(held)
        return came

    def _places_for(self, keys: Sequence[BlockKey], reads_max: int) -> tuple[list[TierSlot], set[TierSlot]]:
        """In host memory, for the leading ones of these blocks that may come; and those of them that have come already,
        as after `begin_load`. The others are to be read into."""
        books = self.host.books
        places: list[TierSlot] = []
        held: set[TierSlot] = set()
        for key in keys:
            place = books.find(key.digest)
            if place is not None and books.key_of(place) == key:
                books.begin_load((place,))
                held.add(place)
            else:
                place = books.begin_store(key) if len(places) - len(held) < reads_max else None
            if place is None:
                break
            places.append(place)
        return places, held

    async def _read(self, disk: DiskTier, slots: Sequence[TierSlot], places: Sequence[TierSlot]) -> list[Outcome]:
        region_U8 = self.host.memory.region.array_U8
        pieces: list[asyncio.Future[Sequence[Outcome]]] = []
        for first in range(0, len(slots), PIECE_BLOCKS_MAX):
            end = first + PIECE_BLOCKS_MAX
            pieces.append(self._loop.create_future())
            done = partial(_set_result, pieces[-1])
            disk.file.start_load(region_U8, slots[first:end], self._at(places[first:end]), done)
        return [outcome for piece in await asyncio.gather(*pieces) for outcome in piece]

    def _lost_on_disk(self, disk: DiskTier, slot: TierSlot, *, erase: bool) -> None:
        """It cannot be read: it is not asked for again, as a bad place costs a drive seconds each time."""
        disk.books.dropped(slot)
        if erase:
            disk.file.erase([slot])

    def _release(self, table: Sequence[BlockId]) -> None:
        self._blocks.release(table, used=False)
        self.room_changed()

    def _keys(self, offer: Offer) -> list[BlockKey]:
        """Of the offer's blocks."""
        prompt, first, end = offer.prompt, offer.have_blocks, offer.have_blocks + offer.blocks
        root, salt = _salted(self._cache.kv_root, prompt.salt)
        digests = prompt.chain[first:end]
        parents = (prompt.chain[first - 1] if first else root, *digests)
        packed = pack_blocks(prompt.tokens, self._cache.block_size, first, end, count=end - first)
        return [
            BlockKey(*names, salt, first + i) for i, names in enumerate(zip(digests, parents, packed, strict=False))
        ]

    # Copies.

    async def _copy(self, *, out: bool, device: Sequence[BlockId], slots: Sequence[TierSlot]) -> bool:
        """`device` is a piece of a block table. False: a copy has failed, and nothing is copied from now on."""
        ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        copy = PositionCopy(out=out, device=tuple(device), host=tuple(slots))
        self._copier.start(copy, partial(_set_result, ended))
        error = await ended
        if error is not None and not self._broken:
            self._broken = True
            log.error("the store is off: blocks cannot be copied", exc_info=error)
        return error is None

    # For people.

    def describe(self) -> str:
        """In a line."""
        books = self.host.books
        text = f"{self.host.memory.describe()} for {books.num_slots:,} blocks"
        if self.disk is not None:
            text += f"; {self.disk.file.describe()}"
        nbytes = BOOKED_BYTES * sum(tier.books.num_slots for tier in self.tiers)
        return f"{text}; books of about {nbytes:,} bytes once these are full"

    def loads(self) -> list[TierLoad]:
        """Of its tiers, the upper one first."""
        return [
            TierLoad(
                tier=tier.kind.value,
                blocks=tier.books.blocks,
                blocks_max=tier.books.num_slots,
                block_bytes=tier.books.block_bytes,
                blocks_pinned=tier.books.pinned_blocks,
                blocks_hit=tier.counters.hit_blocks,
                blocks_stored=tier.counters.stored_blocks,
                blocks_evicted=tier.books.evicted,
                blocks_evicted_unused=tier.books.evicted_unused,
                blocks_lost=tier.counters.lost_blocks,
                blocks_refused=tier.counters.refused_blocks,
                promotions=tier.counters.promotion_times.count,
                promotion_s=tier.counters.promotion_times.total_s,
                promotion_counts=tuple(tier.counters.promotion_times.counts),
            )
            for tier in self.tiers
        ]

    def check(self) -> None:
        """Raises ConservationError."""
        for tier in self.tiers:
            tier.books.check()


def _late_s(expected_s: float) -> float:
    return LATE_S + LATE_SHARE * expected_s


def _rest_share(waiting: int, evictable: int) -> float:
    """How long to pause, in times of what a piece took, while so many blocks of those that may go wait to be copied."""
    return REST_SHARE * max(0.0, 1 - waiting / max(1.0, HURRY_SHARE * evictable))


def _set_result(ended: asyncio.Future[_T], result: _T) -> None:
    if not ended.done():  # whoever waits may have been cancelled
        ended.set_result(result)


@lru_cache(maxsize=1024)
def _salted(kv_root: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Where the chains of this salt begin, and its digest."""
    return root_digest(kv_root, salt), salt_digest(salt)


def make_books(num_slots: int, block_bytes: int, holdings: Holdings, tier: Tier) -> TierBooks:
    return TierBooks(
        num_slots,
        block_bytes,
        on_added=lambda digest: holdings.added(digest, tier),
        on_removed=lambda digest: holdings.removed(digest, tier),
    )


async def open_store(
    config: StoreConfig,
    *,
    below: PoolRegion,
    layout: Layout,
    blocks: BlockManager,
    name: str,
    progress: Progress,
) -> Store:
    """Make the tiers, and find out what an earlier process has left on disk. `below` is the pool's region.

    Raises BatonError BAD_CONFIG: there is too little memory, or it cannot be pinned, or the disk cannot be used.
    """
    block_bytes, holdings = layout.position_bytes, blocks.prefix_cache.holdings
    num_slots = config.host_bytes // block_bytes
    _check_count(config, layout, region_blocks=blocks.ledger.num_blocks // layout.num_groups)
    if num_slots == 0:
        raise BatonError(
            Reason.BAD_CONFIG,
            f"store.host_bytes is {config.host_bytes:,}; a block has {block_bytes:,} bytes. Set more, or 0 (off).",
            field="store.host_bytes",
        )
    places = PositionPlaces(
        layout=layout, device_blocks=blocks.ledger.num_blocks, slots=num_slots, slot_bytes=block_bytes
    )
    with ExitStack() as opened:
        disk = None
        if config.disk_path is not None:
            disk = await _open_disk(config, layout=layout, blocks=blocks, name=name, progress=progress)
            opened.callback(disk.file.close)
        memory = await open_memory_below(
            below, places, name=f"{name}-store", field="store.host_bytes", progress=progress
        )
        opened.pop_all()
    host = HostTier(
        memory=memory,
        books=make_books(num_slots, block_bytes, holdings, Tier.HOST),
        cost=LinearCost(fixed_s=HOST_FIXED_S, unit_s=block_bytes / HOST_BYTES_PER_S, units=PIECE_BLOCKS_MAX),
    )
    return Store(blocks=blocks, groups=layout.num_groups, host=host, disk=disk)


def _check_count(config: StoreConfig, layout: Layout, *, region_blocks: int) -> None:
    """Raises BatonError BAD_CONFIG: there may be more blocks than routers know of one node."""
    below = config.host_bytes // layout.position_bytes
    if config.disk_path is not None:
        below += _identity(b"", layout).slots_in(config.disk_bytes)
    if below + region_blocks <= BLOCKS_MAX:
        return
    larger = layout.block_size * -(-below // max(1, BLOCKS_MAX - region_blocks))
    text = (
        f"The tiers hold {below:,} blocks of {layout.block_size} tokens ({layout.position_bytes:,} bytes) below "
        f"{region_blocks:,} of the region; routers know {BLOCKS_MAX:,} of a node, and each takes the node about "
        f"{BOOKED_BYTES} bytes of memory. Set engine.block_size to {larger} on all nodes, or fewer bytes."
    )
    raise BatonError(Reason.BAD_CONFIG, text, field="store.disk_bytes" if config.disk_bytes else "store.host_bytes")


def _identity(kv_root: bytes, layout: Layout) -> FileIdentity:
    return FileIdentity(
        kv_root=kv_root,
        layout_hash=layout.compatibility_hash(),
        block_bytes=layout.position_bytes,
        block_tokens=layout.block_size,
    )


async def _open_disk(
    config: StoreConfig, *, layout: Layout, blocks: BlockManager, name: str, progress: Progress
) -> DiskTier:
    path = config.disk_path
    assert path is not None
    identity = _identity(blocks.prefix_cache.kv_root, layout)
    progress("reading the disk tier", 0, config.disk_bytes)
    file = await on_thread(
        partial(
            DiskFile.open,
            path / f"{name}.kv" if path.is_dir() else path,
            bytes_max=config.disk_bytes,
            identity=identity,
        )
    )
    books = make_books(file.num_slots, layout.position_bytes, blocks.prefix_cache.holdings, Tier.DISK)
    await on_thread(partial(file.restore, books))
    progress("reading the disk tier", config.disk_bytes, config.disk_bytes)
    cost = LinearCost(fixed_s=DISK_FIXED_S, unit_s=layout.position_bytes / DISK_BYTES_PER_S, units=PIECE_BLOCKS_MAX)
    return DiskTier(file=file, books=books, cost=cost)
