"""Which blocks a tier below the device holds, in which of its slots: the books of host memory and of the disk. Pure.

A slot has the KV of one position of a chain: the block of every group of layers. A block is named by its digest; what
it was made of (the digest before it, tokens, salt) is kept and compared, so a hash collision costs a miss and never a
wrong answer.

A slot is free, being stored (known, not to be read yet), stored, or doomed (forgotten, but a load still reads it).
Eviction takes the least recently used block first, the deepest of equals. A use of a block is one of all before it in
its chain. What is pinned, being stored or being loaded stays, and a chain never evicts its own beginning.

What is known of a slot lies in arrays and lists by its number. An object for each block would take twice the memory,
and a garbage collection would look at millions of them, which holds the control thread.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Final, NamedTuple, NewType

from cachestore.ledger import ConservationError
from cachestore.prefix_cache import DIGEST_BYTES, block_digest, pack_tokens, root_digest

TierSlot = NewType("TierSlot", int)

RECOUNTED_SLOTS_MAX: Final = 1 << 11
"""Slots that are looked at one by one by each check, which the node's control thread makes: about a millisecond."""
SWEPT_MAX: Final = 1 << 11
"""Blocks that are forgotten in one go: some milliseconds."""

_TAKEN: Final = 1
"""Not free."""
_ALIVE: Final = 2
"""Known by its digest."""
_STORED: Final = 4
_USED: Final = 8
"""Loaded since it was stored."""
_READABLE: Final = _TAKEN | _ALIVE | _STORED
_NONE: Final = -1
"""No slot."""
_SLOT_BITS: Final = 32
_DEPTH_BITS: Final = 32
_DEPTH_MAX: Final = (1 << _DEPTH_BITS) - 1
_SLOT_MASK: Final = (1 << _SLOT_BITS) - 1


class BlockKey(NamedTuple):
    """What names one full block, and what is compared where the name is found. A tuple: one is made for each block that
    moves between tiers, and a frozen dataclass takes three times as long."""

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
        on_added: Callable[[bytes], object] = _nobody,
        on_removed: Callable[[bytes], object] = _nobody,
    ) -> None:
        assert 0 < num_slots <= _SLOT_MASK and block_bytes > 0, (num_slots, block_bytes)
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self._on_added, self._on_removed = on_added, on_removed
        self._slots: dict[bytes, TierSlot] = {}
        """By digest, of all that are known."""
        # By slot; what those of free slots have means nothing, but for `_flags`.
        self._flags = bytearray(num_slots)
        self._digest: list[bytes] = [b""] * num_slots
        self._parent: list[bytes] = [b""] * num_slots
        self._packed: list[bytes] = [b""] * num_slots
        self._salt: list[bytes] = [b""] * num_slots
        self._depth = array("I", [0]) * num_slots
        self._stamp = array("q", [0]) * num_slots
        """Time of the last use, in uses."""
        self._loads = array("I", [0]) * num_slots
        """Under way."""
        self._queued = [0] * num_slots
        """What `_heap` has of it, if anything."""
        # The tree of chains: each block's parent where that is here, its first child, and its siblings.
        self._up, self._child = (array("i", [_NONE]) * num_slots for _ in range(2))
        self._before, self._after = (array("i", [_NONE]) * num_slots for _ in range(2))
        self._orphans: dict[bytes, TierSlot] = {}
        """By the digest of a block that is not here, the first of its children that are. Not of roots."""
        self._doomed: list[bytes] = []
        """To be forgotten, each with all behind it."""
        self._broken = False
        """Some of those may be broken: until all are forgotten, nothing is found and nothing is stored."""
        self._taken = 0
        self._freed: list[TierSlot] = []
        self._untouched = 0
        """Slots from here on were never used."""
        self._wanted: Counter[bytes] = Counter()
        """How many pins name each digest."""
        # Candidates for eviction, each block at most once: one number of stamp, depth and slot, the first to go the
        # least. Stamps in here may be old: `_coldest` corrects them.
        self._heap: list[int] = []
        self._now = 0
        self._tip = b""
        """The end of the chain that was used last: all used now are of it, and what is stored behind it is too."""
        self.blocks = 0
        """Stored ones: those that `match` may find."""
        self.evicted = self.evicted_unused = 0
        """Totals since the start; unused: never loaded."""

    @property
    def free(self) -> int:
        return self.num_slots - self._taken

    @property
    def nbytes(self) -> int:
        """Of the stored blocks."""
        return self.blocks * self.block_bytes

    @property
    def pinned_blocks(self) -> int:
        """Stored blocks that a pin names."""
        return sum(digest in self._slots and self._flags[self._slots[digest]] & _STORED > 0 for digest in self._wanted)

    def known(self, digest: bytes) -> bool:
        """Whether the block is stored or being stored. Not counted as a use."""
        return digest in self._slots

    def stored_keys(self) -> Iterable[BlockKey]:
        """Of all stored blocks, in no order."""
        return (self.key_of(slot) for slot in self._slots.values() if self._flags[slot] & _STORED)

    def key_of(self, slot: TierSlot) -> BlockKey:
        """Of a slot that is not free."""
        assert self._flags[slot] & _TAKEN, slot
        return BlockKey(self._digest[slot], self._parent[slot], self._packed[slot], self._salt[slot], self._depth[slot])

    def find(self, digest: bytes) -> TierSlot | None:
        """The slot of a stored block. Not counted as a use."""
        slot = self._slots.get(digest)
        return slot if slot is not None and self._flags[slot] & _STORED and not self._broken else None

    def pinned(self, digest: bytes) -> bool:
        """Whether a pin names it."""
        return self._wanted[digest] > 0

    def count(self, digests: Iterable[bytes]) -> int:
        """How many leading ones of these blocks are stored, by their names alone. Not counted as a use."""
        if self._broken:
            return 0
        slots, flags, found = self._slots, self._flags, 0
        for digest in digests:
            slot = slots.get(digest)
            if slot is None or not flags[slot] & _STORED:
                break
            found += 1
        return found

    def match(self, keys: Sequence[BlockKey]) -> list[TierSlot]:
        """Slots of the longest run of stored blocks at the start of `keys`, which are a piece of one chain.

        Counts as a use of them and of what is before them. Holds nothing: call `begin_load` before anything is stored.
        """
        assert all(before.digest == key.parent for before, key in pairwise(keys)), "not one chain"
        run: list[TierSlot] = []
        for key in () if self._broken else keys:
            slot = self._slots.get(key.digest)
            if slot is None or not self._flags[slot] & _STORED or self.key_of(slot) != key:
                break
            run.append(slot)
        if run:
            self._now += 1
            for slot in run:
                self._stamp[slot] = self._now
            self._touch(self._up[run[0]])
            self._tip = self._digest[run[-1]]
        return run

    def begin_store(self, key: BlockKey) -> TierSlot | None:
        """A slot to copy this block to, taken from the coldest block where none is free. Then `stored` or `dropped`.

        None: the block is known already (or another one by its digest), or every slot is kept.
        """
        if key.digest in self._slots or self._broken:
            return None
        parent = self._slots.get(key.parent, _NONE)
        if key.parent != self._tip or parent == _NONE:
            self._now += 1
            self._touch(parent)
        self._tip = key.parent
        if self._taken == self.num_slots and not self._evict():
            return None
        return self._enter(self._take_slot(), key)

    def stored(self, slot: TierSlot) -> None:
        """The copy into this slot has ended well."""
        flags = self._flags[slot]
        assert flags & _TAKEN and not flags & _STORED, slot
        if not flags & _ALIVE:
            self._release(slot)
            return
        self._flags[slot] = _READABLE
        self.blocks += 1
        digest = self._digest[slot]
        if not self._wanted.get(digest):
            self._push(slot)
        self._on_added(digest)

    def restore(self, slot: TierSlot, key: BlockKey) -> bool:
        """Enter a block that an earlier process stored in this slot; later ones count as used later.

        Before the first `begin_store` only. False, with nothing changed: the digest or the slot is taken.
        """
        assert 0 <= slot < self.num_slots, slot
        if key.digest in self._slots or self._flags[slot]:
            return False
        self._now += 1
        self._taken += 1
        self.stored(self._enter(slot, key))
        return True

    def end_restore(self) -> None:
        """Every block has been restored. Blocks before a restored one are not colder than it; those behind one that is
        missing are forgotten."""
        self._untouched = self.num_slots
        self._freed = [TierSlot(s) for s in range(self.num_slots - 1, -1, -1) if not self._flags[s]]
        for digest in list(self._orphans):
            self.forget_behind(digest)
        while self.sweep_due:
            self.sweep()
        for slot in sorted(self._slots.values(), key=self._depth.__getitem__, reverse=True):
            parent = self._up[slot]
            if parent != _NONE:
                self._stamp[parent] = max(self._stamp[parent], self._stamp[slot])

    def dropped(self, slot: TierSlot) -> None:
        """The copy into this slot has failed, or what it has is not to be trusted: forget the block.

        A load of it keeps the slot until its end.
        """
        assert self._flags[slot] & _TAKEN, slot
        if self._flags[slot] & _ALIVE:
            self._forget(slot)
        if not self._loads[slot]:
            self._release(slot)

    def begin_load(self, slots: Iterable[TierSlot], *, use: bool = True) -> None:
        """These stored blocks are being read: they stay until `end_load`. `use`: not just to copy them down."""
        for slot in slots:
            assert self._flags[slot] & _READABLE == _READABLE, slot
            self._loads[slot] += 1
            if use:
                self._flags[slot] |= _USED

    def end_load(self, slots: Iterable[TierSlot]) -> None:
        """Take one `begin_load` of each back."""
        for slot in slots:
            assert self._loads[slot] > 0, slot
            self._loads[slot] -= 1
            if self._loads[slot]:
                continue
            if self._flags[slot] & _ALIVE:
                self._offer(slot)
            else:
                self._release(slot)

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
            if digest in self._slots:
                self._offer(self._slots[digest])

    def forget_with_descendants(self, digests: Iterable[bytes]) -> None:
        """The content of these blocks, and so of all behind them, may be broken: none is found from now on. `sweep`
        forgets them; until it has, nothing else is found either."""
        for digest in digests:
            if digest in self._slots:
                self._doomed.append(digest)
            else:
                self.forget_behind(digest)
        self._broken |= self.sweep_due

    def forget_behind(self, digest: bytes) -> bool:
        """`sweep` is to forget all that is behind a block that is not here -> whether there is anything."""
        first = self._orphans.get(digest, _NONE)
        self._doomed += [self._digest[slot] for slot in self._siblings(first)]
        return first != _NONE

    @property
    def sweep_due(self) -> bool:
        return bool(self._doomed)

    def sweep(self, count: int = SWEPT_MAX) -> list[TierSlot]:
        """Forget so many of the blocks that are to be forgotten -> the slots of those that were stored. One that is
        being stored keeps its slot until that has ended."""
        swept: list[TierSlot] = []
        while self._doomed and count:
            slot = self._slots.get(self._doomed.pop())
            if slot is None:
                continue  # it has gone by another way
            self._doomed += [self._digest[child] for child in self._siblings(self._child[slot])]
            self._drop(slot, swept)
            count -= 1
        self._broken &= self.sweep_due
        return swept

    def clear(self, count: int = SWEPT_MAX) -> Iterator[list[TierSlot]]:
        """Forget every block that is not pinned, a slice of slots at a time -> the slots of those that were stored.
        Those being stored or loaded keep their slots until the end."""
        for first in range(0, self.num_slots, count):
            gone: list[TierSlot] = []
            for slot in map(TierSlot, range(first, min(first + count, self._untouched))):
                if self._flags[slot] & _ALIVE and not self._wanted.get(self._digest[slot]):
                    self._drop(slot, gone)
            yield gone

    def check(self) -> None:
        """Compare the counts with each other, and look at each slot where there are few. Raises ConservationError."""
        slots = self._taken + len(self._freed) + self.num_slots - self._untouched
        if slots != self.num_slots or not self.blocks <= len(self._slots) <= self._taken:
            counts = f"{self._taken} taken, {len(self._freed)} freed, {self.blocks} stored"
            raise ConservationError(f"tier: of {self.num_slots} slots {counts}")
        if self.num_slots <= RECOUNTED_SLOTS_MAX:
            self._recount()

    def _recount(self) -> None:
        flags = self._flags
        alive = {slot for slot in self._slots.values() if flags[slot] & _ALIVE}
        doomed = {slot for slot in range(self.num_slots) if flags[slot] and not flags[slot] & _ALIVE}
        untouched = range(self._untouched, self.num_slots)
        known = sorted([*alive, *doomed, *self._freed, *untouched])
        stored = sum(flags[slot] & _STORED > 0 for slot in alive)
        if known != list(range(self.num_slots)) or stored != self.blocks:
            raise ConservationError(f"tier: of {self.num_slots} slots the books have {known}, {stored} stored")
        behind = sum(1 for slot in alive for child in self._siblings(self._child[slot]) if self._up[child] == slot)
        behind += sum(1 for first in self._orphans.values() for child in self._siblings(first) if self._up[child] < 0)
        if behind + sum(self._depth[slot] == 0 for slot in alive) != len(alive):
            raise ConservationError(f"tier: of {len(alive)} blocks {behind} are behind another")

    def _touch(self, slot: int) -> None:
        """This block, if it is one, and all before it are used now."""
        now, stamps, up = self._now, self._stamp, self._up
        while slot != _NONE and stamps[slot] != now:
            stamps[slot] = now
            slot = up[slot]

    def _enter(self, slot: TierSlot, key: BlockKey) -> TierSlot:
        digest, parent, self._packed[slot], self._salt[slot], depth = key
        self._digest[slot], self._parent[slot], self._depth[slot] = digest, parent, depth
        self._flags[slot] = _TAKEN | _ALIVE
        self._stamp[slot] = self._now
        self._queued[slot] = 0
        self._slots[digest] = slot
        self._tip = digest
        self._link(slot, digest, parent, depth)
        return slot

    def _link(self, slot: TierSlot, digest: bytes, parent: bytes, depth: int) -> None:
        """Put it into the tree of chains."""
        up, after = self._slots.get(parent, _NONE), _NONE
        if up != _NONE:
            after, self._child[up] = self._child[up], slot
        elif depth:
            after, self._orphans[parent] = self._orphans.get(parent, _NONE), slot
        self._up[slot], self._before[slot], self._after[slot] = up, _NONE, after
        if after != _NONE:
            self._before[after] = slot
        if self._orphans and digest in self._orphans:
            self._child[slot] = first = self._orphans.pop(digest)
            for child in self._siblings(first):
                self._up[child] = slot

    def _unlink(self, slot: TierSlot) -> None:
        before, after, up = self._before[slot], self._after[slot], self._up[slot]
        if after != _NONE:
            self._before[after] = before
        if before != _NONE:
            self._after[before] = after
        elif up != _NONE:
            self._child[up] = after
        elif after != _NONE and self._depth[slot]:
            self._orphans[self._parent[slot]] = TierSlot(after)
        elif self._depth[slot]:
            del self._orphans[self._parent[slot]]
        first = self._child[slot]
        if first != _NONE:
            self._child[slot] = _NONE
            self._orphans[self._digest[slot]] = TierSlot(first)
            for child in self._siblings(first):
                self._up[child] = _NONE

    def _siblings(self, first: int) -> list[TierSlot]:
        """This block, if it is one, and those after it."""
        found: list[TierSlot] = []
        while first != _NONE:
            found.append(TierSlot(first))
            first = self._after[first]
        return found

    def _take_slot(self) -> TierSlot:
        self._taken += 1
        if self._freed:
            return self._freed.pop()
        self._untouched += 1
        return TierSlot(self._untouched - 1)

    def _release(self, slot: TierSlot) -> None:
        self._flags[slot] = 0
        self._packed[slot] = b""
        self._taken -= 1
        self._freed.append(slot)

    def _drop(self, slot: TierSlot, stored: list[TierSlot]) -> None:
        """Forget it, and add it to these if it was stored."""
        if self._flags[slot] & _STORED:
            stored.append(slot)
            self.dropped(slot)
        else:
            self._forget(slot)

    def _forget(self, slot: TierSlot) -> None:
        flags, digest = self._flags[slot], self._digest[slot]
        self._flags[slot] = _TAKEN
        self._queued[slot] = 0
        del self._slots[digest]
        self._unlink(slot)
        if flags & _STORED:
            self.blocks -= 1
            self._on_removed(digest)

    def _evict(self) -> bool:
        """Free the slot of the coldest block, unless that is of the chain which the room is for."""
        slot = self._coldest()
        if slot is None:
            return False
        if self._stamp[slot] == self._now:
            self._push(slot)
            return False
        self.evicted += 1
        self.evicted_unused += not self._flags[slot] & _USED
        self._forget(slot)
        self._release(slot)
        return True

    def _is_evictable(self, slot: TierSlot) -> bool:
        stored = self._flags[slot] & _READABLE == _READABLE
        return stored and not self._loads[slot] and not self._wanted.get(self._digest[slot])

    def _offer(self, slot: TierSlot) -> None:
        """Make it a candidate, if it may go."""
        if not self._queued[slot] and self._is_evictable(slot):
            self._push(slot)

    def _push(self, slot: TierSlot) -> None:
        if len(self._heap) > 2 * self.num_slots:  # most are of blocks that are gone
            self._heap = [each for each in self._heap if self._queued[each & _SLOT_MASK] == each]
            heapq.heapify(self._heap)
        order = self._stamp[slot] << _DEPTH_BITS | _DEPTH_MAX - self._depth[slot]
        self._queued[slot] = each = order << _SLOT_BITS | slot
        heapq.heappush(self._heap, each)

    def _coldest(self) -> TierSlot | None:
        """Taken out of the candidates."""
        while self._heap:
            each = heapq.heappop(self._heap)
            slot = TierSlot(each & _SLOT_MASK)
            if self._queued[slot] != each:
                continue
            self._queued[slot] = 0
            if not self._is_evictable(slot):
                continue  # a loaded one comes back through `end_load`, a pinned one through `unpin`
            if each >> (_SLOT_BITS + _DEPTH_BITS) == self._stamp[slot]:
                return slot
            self._push(slot)
        return None
