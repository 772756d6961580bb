"""Which blocks a tier below the device holds, in which of its slots: the books of host memory and of the disk. Pure.

A slot has the KV of one position of a chain: the block of every group of layers. A block is named by its digest; what
it was made of (the digest before it, tokens, salt) is kept and compared, so a hash collision costs a miss and never a
wrong answer.

A slot is free, being stored (known, not to be read yet), stored, or doomed (forgotten, but a load still reads it).
Eviction takes the least recently used block first, the deepest of equals. A use of a block is one of all before it in
its chain. What is pinned, being stored or being loaded stays, and a chain never evicts its own beginning.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NewType

from cachestore.ledger import ConservationError
from cachestore.prefix_cache import DIGEST_BYTES, block_digest, pack_tokens, root_digest

TierSlot = NewType("TierSlot", int)

RECOUNTED_SLOTS_MAX: Final = 1 << 11
"""Slots that are looked at one by one by each check, which the node's control thread makes: about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKey:
    """What names one full block, and what is compared where the name is found."""

    digest: bytes
    parent: bytes
    """Digest of the block before; of the first block, the chain's root."""
    packed: bytes
    """Its tokens, as `pack_tokens` writes them."""
    salt: bytes
    """`salt_digest` of the tenant's salt."""
    depth: int
    """Blocks before it in its chain."""


def salt_digest(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=DIGEST_BYTES).digest()


def block_keys(kv_root: bytes, salt: bytes, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
    """One for each full block of `tokens`; `kv_root` as the node's PrefixCache has it."""
    keys: list[BlockKey] = []
    parent, salt_id = root_digest(kv_root, salt), salt_digest(salt)
    for depth in range(len(tokens) // block_size):
        packed = pack_tokens(tokens[depth * block_size : (depth + 1) * block_size])
        digest = block_digest(parent, packed)
        keys.append(BlockKey(digest=digest, parent=parent, packed=packed, salt=salt_id, depth=depth))
        parent = digest
    return keys


@dataclass(slots=True, eq=False, kw_only=True)
class _Entry:
    key: BlockKey
    slot: TierSlot
    serial: int
    """No two have the same."""
    stamp: int
    """Time of the last use, in uses."""
    stored: bool = False
    loads: int = 0
    """Under way."""
    used: bool = False
    """Loaded since it was stored."""
    alive: bool = True
    in_heap: bool = False


def _nobody(digest: bytes) -> None:
    """Listens where nobody else does."""


class TierBooks:
    """The books of one tier of `num_slots` slots of `block_bytes` each. Asserts on misuse: misuse is our own bug.

    `on_added` is called with the digest of each block that can be read from now on, `on_removed` of each that no longer
    can.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        *,
        on_added: Callable[[bytes], None] = _nobody,
        on_removed: Callable[[bytes], None] = _nobody,
    ) -> None:
        assert num_slots > 0 and block_bytes > 0, (num_slots, block_bytes)
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._on_added, self._on_removed = on_added, on_removed
        self._entries: dict[bytes, _Entry] = {}
        self._by_slot: dict[TierSlot, _Entry] = {}
        """Of every slot that is not free, doomed ones too."""
        self._freed: list[TierSlot] = []
        self._untouched = 0
        """Slots from here on were never used."""
        self._wanted: Counter[bytes] = Counter()
        """How many pins name each digest."""
        # Candidates for eviction, each entry at most once. Stamps in here may be old: `_coldest` corrects them.
        self._heap: list[tuple[int, int, int, _Entry]] = []
        self._now = self._serial = 0
        self._tip = b""
        """The end of the chain that was used last: all used now are of it, and what is stored behind it is too."""
        self.blocks = 0
        """Stored ones: those that `match` may find."""
        self.evicted = self.evicted_unused = 0
        """Totals since the start; unused: never loaded."""

    @property
    def free(self) -> int:
        return self.num_slots - len(self._by_slot)

    @property
    def nbytes(self) -> int:
        """Of the stored blocks."""
        return self.blocks * self.block_bytes

    @property
    def pinned_blocks(self) -> int:
        """Stored blocks that a pin names."""
        return sum(digest in self._entries and self._entries[digest].stored for digest in self._wanted)

    def known(self, digest: bytes) -> bool:
        """Whether the block is stored or being stored. Not counted as a use."""
        return digest in self._entries

    def stored_keys(self) -> Iterable[BlockKey]:
        """Of all stored blocks, in no order."""
        return (entry.key for entry in self._entries.values() if entry.stored)

    def key_of(self, slot: TierSlot) -> BlockKey:
        return self._by_slot[slot].key

    def find(self, digest: bytes) -> TierSlot | None:
        """The slot of a stored block. Not counted as a use."""
        entry = self._entries.get(digest)
        return entry.slot if entry is not None and entry.stored else None

    def pinned(self, digest: bytes) -> bool:
        """Whether a pin names it."""
        return self._wanted[digest] > 0

    def match(self, keys: Sequence[BlockKey]) -> list[TierSlot]:
        """Slots of the longest run of stored blocks at the start of `keys`, which are a piece of one chain.

        Counts as a use of them and of what is before them. Holds nothing: call `begin_load` before anything is stored.
        """
        assert all(before.digest == key.parent for before, key in pairwise(keys)), "not one chain"
        run: list[_Entry] = []
        for key in keys:
            entry = self._entries.get(key.digest)
            if entry is None or not entry.stored or entry.key != key:
                break
            run.append(entry)
        if run:
            self._now += 1
            for entry in run:
                entry.stamp = self._now
            self._touch_before(run[0].key)
            self._tip = run[-1].key.digest
        return [entry.slot for entry in run]

    def begin_store(self, key: BlockKey) -> TierSlot | None:
        """A slot to copy this block to, taken from the coldest block where none is free. Then `stored` or `dropped`.

        None: the block is known already (or another one by its digest), or every slot is kept.
        """
        if key.digest in self._entries:
            return None
        if key.parent != self._tip or key.parent not in self._entries:
            self._now += 1
            self._touch_before(key)
        self._tip = key.parent
        if not self.free and not self._evict():
            return None
        return self._enter(self._take_slot(), key)

    def stored(self, slot: TierSlot) -> None:
        """The copy into this slot has ended well."""
        entry = self._by_slot[slot]
        assert not entry.stored, slot
        if not entry.alive:
            self._release(slot)
            return
        entry.stored = True
        self.blocks += 1
        self._offer(entry)
        self._on_added(entry.key.digest)

    def restore(self, slot: TierSlot, key: BlockKey) -> bool:
        """Enter a block that an earlier process stored in this slot; later ones count as used later.

        Before the first `begin_store` only. False, with nothing changed: the digest or the slot is taken.
        """
        assert 0 <= slot < self.num_slots, slot
        if key.digest in self._entries or slot in self._by_slot:
            return False
        self._now += 1
        self.stored(self._enter(slot, key))
        return True

    def end_restore(self) -> None:
        """Every block has been restored. Blocks before a restored one are not colder than it."""
        self._freed = [TierSlot(s) for s in range(self.num_slots - 1, -1, -1) if TierSlot(s) not in self._by_slot]
        self._untouched = self.num_slots
        for entry in sorted(self._entries.values(), key=lambda each: -each.key.depth):
            before = self._entries.get(entry.key.parent)
            if before is not None:
                before.stamp = max(before.stamp, entry.stamp)

    def dropped(self, slot: TierSlot) -> None:
        """The copy into this slot has failed, or what it has is not to be trusted: forget the block.

        A load of it keeps the slot until its end.
        """
        entry = self._by_slot[slot]
        if entry.alive:
            self._forget(entry)
        if not entry.loads:
            self._release(slot)

    def begin_load(self, slots: Iterable[TierSlot], *, use: bool = True) -> None:
        """These stored blocks are being read: they stay until `end_load`. `use`: not just to copy them down."""
        for slot in slots:
            entry = self._by_slot[slot]
            assert entry.stored and entry.alive, slot
            entry.loads += 1
            entry.used |= use

    def end_load(self, slots: Iterable[TierSlot]) -> None:
        """Take one `begin_load` of each back."""
        for slot in slots:
            entry = self._by_slot[slot]
            assert entry.loads > 0, slot
            entry.loads -= 1
            if not entry.loads and not entry.alive:
                self._release(slot)
            elif not entry.loads:
                self._offer(entry)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these blocks, those that are here and those that will be, until `unpin` of the same."""
        self._wanted.update(digests)

    def unpin(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            assert self._wanted[digest] > 0, "unpin of what is not pinned"
            self._wanted[digest] -= 1
            if self._wanted[digest]:
                continue
            del self._wanted[digest]
            if digest in self._entries:
                self._offer(self._entries[digest])

    def forget_with_descendants(self, digests: Iterable[bytes]) -> list[TierSlot]:
        """The content of these blocks, and so of all behind them, may be broken -> the slots of those that were stored.

        One that is being stored keeps its slot until that has ended. O(n log n) in what is here, where one of them is.
        """
        doomed = {digest for digest in digests if digest in self._entries}
        if not doomed:
            return []
        lost: list[_Entry] = []
        for entry in sorted(self._entries.values(), key=lambda each: each.key.depth):
            if entry.key.digest in doomed or entry.key.parent in doomed:
                doomed.add(entry.key.digest)
                lost.append(entry)
        return self._drop(lost)

    def clear(self) -> list[TierSlot]:
        """Forget every block that is not pinned -> the slots of those that were stored. Those being stored or loaded
        keep their slots until the end."""
        return self._drop([e for e in self._entries.values() if not self._wanted[e.key.digest]])

    def _drop(self, doomed: Iterable[_Entry]) -> list[TierSlot]:
        stored = []
        for entry in doomed:
            if entry.stored:
                stored.append(entry.slot)
                self.dropped(entry.slot)
            else:
                self._forget(entry)
        return stored

    def check(self) -> None:
        """Compare the counts with each other, and look at each slot where there are few. Raises ConservationError."""
        slots = len(self._by_slot) + len(self._freed) + self.num_slots - self._untouched
        if slots != self.num_slots or not self.blocks <= len(self._entries) <= len(self._by_slot):
            counts = f"{len(self._by_slot)} taken, {len(self._freed)} freed, {self.blocks} stored"
            raise ConservationError(f"tier: of {self.num_slots} slots {counts}")
        if self.num_slots <= RECOUNTED_SLOTS_MAX:
            self._recount()

    def _recount(self) -> None:
        alive = {entry.slot for entry in self._entries.values()}
        doomed = {slot for slot, entry in self._by_slot.items() if not entry.alive}
        untouched = range(self._untouched, self.num_slots)
        known = sorted([*alive, *doomed, *self._freed, *untouched])
        stored = sum(entry.stored for entry in self._entries.values())
        if known != list(range(self.num_slots)) or stored != self.blocks:
            raise ConservationError(f"tier: of {self.num_slots} slots the books have {known}, {stored} stored")

    def _touch_before(self, key: BlockKey) -> None:
        before = self._entries.get(key.parent)
        while before is not None and before.stamp != self._now:
            before.stamp = self._now
            before = self._entries.get(before.key.parent)

    def _enter(self, slot: TierSlot, key: BlockKey) -> TierSlot:
        self._serial += 1
        entry = _Entry(key=key, slot=slot, serial=self._serial, stamp=self._now)
        self._entries[key.digest] = self._by_slot[slot] = entry
        self._tip = key.digest
        return slot

    def _take_slot(self) -> TierSlot:
        if self._freed:
            return self._freed.pop()
        self._untouched += 1
        return TierSlot(self._untouched - 1)

    def _release(self, slot: TierSlot) -> None:
        del self._by_slot[slot]
        self._freed.append(slot)

    def _forget(self, entry: _Entry) -> None:
        entry.alive = False
        del self._entries[entry.key.digest]
        if entry.stored:
            self.blocks -= 1
            self._on_removed(entry.key.digest)

    def _evict(self) -> bool:
        """Free the slot of the coldest block, unless that is of the chain which the room is for."""
        entry = self._coldest()
        if entry is None:
            return False
        if entry.stamp == self._now:
            self._offer(entry)
            return False
        self.evicted += 1
        self.evicted_unused += not entry.used
        self._forget(entry)
        self._release(entry.slot)
        return True

    def _is_evictable(self, entry: _Entry) -> bool:
        return entry.alive and entry.stored and not entry.loads and not self._wanted.get(entry.key.digest)

    def _offer(self, entry: _Entry) -> None:
        """Make it a candidate, if it may go."""
        if entry.in_heap or not self._is_evictable(entry):
            return
        if len(self._heap) > 2 * self.num_slots:  # most are of blocks that are gone
            self._heap = [each for each in self._heap if each[3].alive]
            heapq.heapify(self._heap)
        entry.in_heap = True
        heapq.heappush(self._heap, (entry.stamp, -entry.key.depth, entry.serial, entry))

    def _coldest(self) -> _Entry | None:
        """Taken out of the candidates."""
        while self._heap:
            stamp, _, _, entry = heapq.heappop(self._heap)
            entry.in_heap = False
            if not self._is_evictable(entry):
                continue  # a loaded one comes back through `end_load`, a pinned one through `unpin`
            if stamp == entry.stamp:
                return entry
            self._offer(entry)
        return None
