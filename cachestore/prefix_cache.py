"""Which blocks hold the KV of which tokens: an index of full blocks by the chained hash of everything up to their end.

An entry is a position with a block in each layer group (cachestore/layout.py). Blocks are counted and listed position
after position, as in a block table.

Pure; owned by the node's control thread. Chained block hashes are the scheme of vLLM's prefix cache; here tokens are
compared too, so a hash collision costs a miss and never a wrong answer.

Eviction takes the least recently used block first, the deepest of equals. A use of a block is one of all before it in
its chain, so children go before their parents. Pinned blocks are not evicted. A pin names a chain by its digests and
may come before the blocks; those pinned are always a chain's beginning.
"""

from __future__ import annotations

import heapq
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from baton.ids import BlockId
from cachestore.holdings import Holdings, Tier
from cachestore.ledger import Ledger

DIGEST_BYTES = 16
TOKEN_BYTES = 8
"""In `pack_tokens`."""


def _blake2b(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int64."""
    return struct.pack(f"<{len(tokens)}q", *tokens)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """What `pack_tokens` has packed."""
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}q", packed)


def pack_blocks(tokens: Sequence[int], block_size: int, first: int, end: int, count: int = 1) -> Iterator[bytes]:
    """`pack_tokens` of each of these blocks, `count` at a time and then ever more: of a chain that is not known one is
    asked for."""
    nbytes = TOKEN_BYTES * block_size
    while first < end:
        count = min(count, end - first)
        packed = pack_tokens(tokens[first * block_size : (first + count) * block_size])
        for start in range(0, len(packed), nbytes):
            yield packed[start : start + nbytes]
        first, count = first + count, 4 * count


def kv_root(*, fingerprint: str, quantisation: str, layout_hash: str) -> bytes:
    """Names what makes a node's KV: the checkpoint, the rounding of the weights it computes with, the record layout.

    KV of different roots is never mixed: not in a cache, and not between nodes.
    """
    parts = [part.encode() for part in (fingerprint, quantisation, layout_hash)]
    return _blake2b(b"".join(struct.pack("<q", len(part)) + part for part in parts))


def root_digest(kv_root: bytes, salt: bytes) -> bytes:
    """Where the chain of one kind of KV (`kv_root`) and one tenant (`salt`) starts."""
    return _blake2b(struct.pack("<q", len(kv_root)) + kv_root + salt)


def block_digest(parent: bytes, packed_tokens: bytes) -> bytes:
    """The chain's next link: `parent` is the digest before this block, `packed_tokens` its tokens."""
    return blake2b(parent + packed_tokens, digest_size=DIGEST_BYTES).digest()  # a call less: it runs for each block


def chain_digests(
    root: bytes, tokens: Sequence[int], block_size: int, digest: Callable[[bytes, bytes], bytes] = block_digest
) -> list[bytes]:
    """One digest for each full block of `tokens`, each over the root and everything up to the block's end."""
    digests = []
    end = len(tokens) // block_size
    for packed in pack_blocks(tokens, block_size, 0, end, count=end):
        root = digest(root, packed)
        digests.append(root)
    return digests


@dataclass(slots=True, eq=False)  # not by keywords: that takes more than twice as long, and there is one for each block
class Entry:
    """One indexed position. For cursors its identity counts; the node's store reads it, and changes nothing."""

    digest: bytes
    blocks: tuple[BlockId, ...]
    """One of each layer group."""
    packed: bytes
    salt: bytes
    parent: Entry | None
    depth: int
    serial: int
    """Order of entry into the index; breaks ties."""
    stamp: int
    """Time of the last use, in touches."""
    children: dict[bytes, Entry] = field(default_factory=dict)
    in_heap: bool = False
    alive: bool = True
    spoiled: bool = False
    """Its content may be broken: no sequence that has it is indexed any further."""
    pinned: bool = False
    found: bool = False
    """By a prompt that began with it."""


@dataclass(slots=True, kw_only=True)
class IndexCursor:
    """How far the blocks of one sequence have been indexed. Mutated by `PrefixCache.index` only."""

    positions: int = 0
    entry: Entry | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Draft:
    """Entries of one sequence, made while its blocks are still being filled, so that entering them takes little time
    then. Mutated by `PrefixCache.draft` and `enter` only."""

    parent: Entry | None
    """What they go on from."""
    entries: dict[bytes, Entry] = field(default_factory=dict)
    """By digest, in order."""
    by_block: dict[BlockId, Entry] = field(default_factory=dict)


class PrefixCache:
    """The index. Refers to blocks that the ledger calls cached, and gives up those that nobody holds when asked to.

    Whoever drops request references of indexed blocks calls `released` afterwards. References dropped behind its back
    (directly in the ledger) are found too, but at the price of a walk over the index.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        block_size: int,
        kv_root: bytes,
        groups: int = 1,
        digest: Callable[[bytes, bytes], bytes] = block_digest,
    ) -> None:
        assert block_size > 0 and groups > 0, (block_size, groups)
        self.groups = groups
        """Blocks of one position."""
        self._ledger = ledger
        self.block_size = block_size
        self.kv_root = kv_root
        self._digest = digest
        self._entries: dict[bytes, Entry] = {}
        self._by_block: dict[BlockId, Entry] = {}
        self._wanted: Counter[bytes] = Counter()
        """How many pins name each digest."""
        # Candidates for eviction, each entry at most once. Stamps in here may be old: `_oldest_idle` corrects them.
        self._heap: list[tuple[int, int, int, Entry]] = []
        self.may_pin: Callable[[], bool] = lambda: True
        """Asked before each position that is pinned: whether whoever has been admitted can do without its blocks."""
        self.on_idle: Callable[[Sequence[Entry], bool], None] | None = None
        """Called with the indexed positions that nobody holds any more since a `released`, those at the beginning of a
        chain first, and with its `used`."""
        self.on_pin: Callable[[Sequence[bytes], bool], None] | None = None
        """Called with each chain that is pinned (True) or unpinned."""
        self.on_forget: Callable[[Sequence[bytes]], None] | None = None
        """Called with the positions that `forget` removes."""
        self._now = 0
        self._serial = 0
        self.prompt_tokens = self.hit_tokens = 0
        """Totals since the start."""
        self.evicted = self.evicted_unused = 0
        """Positions since the start; unused: found by no prompt."""
        self.holdings = Holdings()
        """What is here, for other processes. Tiers below add what they have."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._by_block

    def count_prompt(self, prompt_tokens: int, hit_tokens: int) -> None:
        """Add one admitted prompt to the statistics. `match` does not: a waiting prompt is matched many times."""
        assert 0 <= hit_tokens <= prompt_tokens, (hit_tokens, prompt_tokens)
        self.prompt_tokens += prompt_tokens
        self.hit_tokens += hit_tokens

    def match(self, tokens: Sequence[int], salt: bytes, blocks_max: int) -> list[BlockId]:
        """The blocks of the longest indexed chain of full positions at the start of `tokens`, at most `blocks_max`.

        Counts as a use of them. Holds nothing: until the caller does, the next eviction may take them.
        """
        end = min(blocks_max // self.groups, len(tokens) // self.block_size)
        return self._match(self._chained(pack_blocks(tokens, self.block_size, 0, end), salt), salt)

    def match_known(self, packed: bytes, digests: bytes, salt: bytes) -> list[BlockId]:
        """As `match`, of all full positions of tokens as `pack_tokens` has them, where somebody says their digests, one
        behind the other."""
        nbytes = TOKEN_BYTES * self.block_size
        count = min(len(packed) // nbytes, len(digests) // DIGEST_BYTES)
        chain = (
            (digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES], packed[i * nbytes : (i + 1) * nbytes])
            for i in range(count)
        )
        return self._match(chain, salt)

    def _chained(self, packed_blocks: Iterable[bytes], salt: bytes) -> Iterator[tuple[bytes, bytes]]:
        """With the digest of each, which is made when it is asked for."""
        digest = root_digest(self.kv_root, salt)
        for packed in packed_blocks:
            digest = self._digest(digest, packed)
            yield digest, packed

    def _match(self, chain: Iterable[tuple[bytes, bytes]], salt: bytes) -> list[BlockId]:
        """`chain` has digests and packed tokens."""
        self._now += 1
        found: list[BlockId] = []
        entry: Entry | None = None
        for digest, packed in chain:
            child = self._entries.get(digest)
            if child is None or not _is_same(child, entry, salt, packed):
                break
            entry = child
            entry.found = True
            found += entry.blocks
        self._touch(entry)
        return found

    def index(
        self,
        tokens: Sequence[int],
        block_table: Sequence[BlockId],
        computed: int,
        salt: bytes,
        cursor: IndexCursor,
        chain: Sequence[bytes] = (),
    ) -> None:
        """Enter the full positions of `tokens[:computed]` that are not in yet. The caller holds all of `block_table`.
        `chain` has the digests of all of them where the caller knows them.

        A position whose content is indexed already under other blocks is left out, and the chain goes on behind the
        others. On a hash collision, or from a spoiled block on, the rest of the sequence stays out.
        """
        if cursor.entry is not None and cursor.entry.spoiled:
            return
        if cursor.entry is not None and not cursor.entry.alive:
            # A duplicate of ours that the chain went through has been evicted, and what was behind it with it.
            cursor.positions, cursor.entry = 0, None
        groups, first, end = self.groups, cursor.positions, computed // self.block_size
        for index, packed in enumerate(pack_blocks(tokens, self.block_size, first, end), first):
            blocks = tuple(block_table[index * groups : (index + 1) * groups])
            for block in blocks:
                if self._ledger.is_spoiled(block):
                    return
            digest = chain[index] if chain else self._link(cursor.entry, salt, packed)
            entry = self._entries.get(digest)
            if entry is None:
                entry = self._insert(digest, blocks, packed, salt, cursor.entry)
            elif not _is_same(entry, cursor.entry, salt, packed):
                return
            if self._wanted:
                self._pin_if_wanted(entry)
            cursor.positions, cursor.entry = index + 1, entry

    def begin_draft(self, after: bytes | None) -> Draft | None:
        """For positions behind the one of this digest, or from the beginning. None: that one is not here."""
        parent = None if after is None else self._entries.get(after)
        return None if parent is None and after is not None else Draft(parent=parent)

    def draft(
        self,
        draft: Draft,
        tokens: Sequence[int],
        block_table: Sequence[BlockId],
        positions: range,
        salt: bytes,
        chain: Sequence[bytes],
    ) -> None:
        """Make the entries of these positions, the next ones of the draft. Nothing refers to them before `enter`."""
        groups, by_block = self.groups, draft.by_block
        parent = next(reversed(draft.entries.values())) if draft.entries else draft.parent
        assert (parent is None) == (positions.start == 0), positions
        packed_blocks = pack_blocks(tokens, self.block_size, positions.start, positions.stop, count=len(positions))
        for index, packed in zip(positions, packed_blocks, strict=True):
            entry = self._new(
                chain[index], tuple(block_table[index * groups : (index + 1) * groups]), packed, salt, parent
            )
            draft.entries[entry.digest] = entry
            for block in entry.blocks:
                by_block[block] = entry
            parent = entry

    def enter(self, draft: Draft) -> bool:
        """Put all of it in, at once: as `index` would, and the caller holds the same. False, with nothing entered,
        where only `index` can tell what is to be done: a part is here by now, is pinned, or may be broken."""
        parent, entries, by_block = draft.parent, draft.entries, draft.by_block
        if parent is not None and (not parent.alive or parent.spoiled):
            return False
        if not all(known.keys().isdisjoint(entries) for known in (self._entries, self._wanted)):
            return False
        if any(map(self._ledger.is_spoiled, by_block)):
            return False
        assert self._by_block.keys().isdisjoint(by_block), "indexed with other tokens"
        for block in by_block:
            self._ledger.mark_cached(block)
        self._entries.update(entries)
        self._by_block.update(by_block)
        self.holdings.added_all(entries, Tier.DEVICE)
        for digest, entry in entries.items():
            if entry.parent is not None:
                entry.parent.children[digest] = entry
        return True

    def released(self, blocks: Iterable[BlockId], *, used: bool = True) -> None:
        """Request references of these blocks have been dropped. Those nobody holds may now be evicted, the least
        recently released first. `used`: by a request, and not only brought here for one."""
        self._now += 1
        before, idle, is_held = None, [], self._ledger.is_held
        for block in blocks:
            entry = self._by_block.get(block)
            if entry is None or entry is before:  # another group's block of the same position
                continue
            before = entry
            self._touch(entry)
            held = 0
            for each in entry.blocks:
                held += is_held(each)
            if held < self.groups and not entry.in_heap and not entry.pinned:
                self._push(entry)
            if not held:
                idle.append(entry)
        if idle and self.on_idle is not None:
            self.on_idle(idle, used)

    def evict_until(self, free: int) -> bool:
        """Evict until the ledger has `free` free blocks. False, with nothing evicted, when that cannot be reached.

        Amortised O(log n) for each eviction. A position with an idle block goes although one of its others, or one
        behind it, is held (which is possible when a sequence is swapped out, or two computed the same prefix): those
        are forgotten with it, but stay with their holders.
        """
        if free > self._ledger.reclaimable:
            return False
        while self._ledger.free < free:
            entry = self._oldest_idle()
            if entry is None:
                self._find_idle()
                entry = self._oldest_idle()
            assert entry is not None, "the ledger counts an idle cached block that the index does not know"
            for gone in self._remove(entry):
                self.evicted += 1
                self.evicted_unused += not gone.found
        return True

    @property
    def pinned_blocks_wanted(self) -> int:
        """Blocks that pins keep, or will keep once they are here."""
        return len(self._wanted) * self.groups

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are here and pinned, held ones too."""
        return self.pinned_of(tuple(self._wanted))

    def pinned_blocks_with(self, chain: Sequence[bytes]) -> int:
        """What `pinned_blocks_wanted` would be with this chain pinned too."""
        return self.pinned_blocks_wanted + self.groups * sum(digest not in self._wanted for digest in chain)

    def chain(self, tokens: Sequence[int], salt: bytes) -> tuple[bytes, ...]:
        """The digests of the full positions of `tokens`, indexed or not: what `pin` takes."""
        return tuple(chain_digests(root_digest(self.kv_root, salt), tokens, self.block_size, self._digest))

    def indexed(self, digest: bytes) -> bool:
        """Whether the position of this digest is here, and so all before it in its chain. Not counted as a use."""
        return digest in self._entries

    def pin(self, chain: Sequence[bytes]) -> None:
        """Keep these blocks from eviction, those that are here and those that will be, until `unpin` of the same chain.

        A chain may be pinned several times. How much may be pinned is the caller's to limit.
        """
        self._wanted.update(chain)
        self.settle(chain)
        if self.on_pin is not None:
            self.on_pin(chain, True)

    def settle(self, chain: Sequence[bytes]) -> None:
        """Pin what of a pinned chain is here and could not be pinned before, as it was promised to somebody."""
        for digest in chain:
            entry = self._entries.get(digest)
            if entry is None or not self._pin_if_wanted(entry):
                break

    def unpin(self, chain: Sequence[bytes]) -> None:
        """Take one `pin` of this chain back."""
        for digest in chain:
            assert self._wanted[digest] > 0, "unpin of what is not pinned"
            self._wanted[digest] -= 1
            if self._wanted[digest] > 0:
                continue
            del self._wanted[digest]
            entry = self._entries.get(digest)
            if entry is not None and entry.pinned:
                self._unpin(entry)
        if self.on_pin is not None:
            self.on_pin(chain, False)

    def pinned_of(self, chain: Sequence[bytes]) -> int:
        """How many blocks of this chain are here and pinned."""
        return self.groups * sum(digest in self._entries and self._entries[digest].pinned for digest in chain)

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Remove these blocks and all behind them from the index: their content may be broken, and is not used again.

        Held ones stay with their holders, who do not bring them back into the index. Pins stay, for the blocks to come.
        """
        spoiled, digests = set(blocks), []
        for entry in [self._by_block[block] for block in spoiled if block in self._by_block]:
            if entry.alive:
                for each in _with_descendants(entry):
                    if each.pinned:
                        self._unpin(each)
                    each.spoiled = True
                    spoiled.update(each.blocks)
                    digests.append(each.digest)
                self._remove(entry)
        for block in spoiled:
            self._ledger.spoil(block)
        if self.on_forget is not None and digests:
            self.on_forget(digests)

    def _link(self, parent: Entry | None, salt: bytes, packed: bytes) -> bytes:
        if parent is not None:
            return self._digest(parent.digest, packed)
        return self._digest(root_digest(self.kv_root, salt), packed)

    def _insert(
        self, digest: bytes, blocks: tuple[BlockId, ...], packed: bytes, salt: bytes, parent: Entry | None
    ) -> Entry:
        entry = self._new(digest, blocks, packed, salt, parent)
        for block in blocks:
            assert block not in self._by_block, (block, "indexed with other tokens")
            self._ledger.mark_cached(block)
            self._by_block[block] = entry
        self._entries[digest] = entry
        self.holdings.added(digest, Tier.DEVICE)
        if parent is not None:
            parent.children[digest] = entry
        return entry

    def _new(
        self, digest: bytes, blocks: tuple[BlockId, ...], packed: bytes, salt: bytes, parent: Entry | None
    ) -> Entry:
        if parent is None:
            self._now += 1
        self._serial += 1
        depth = 1 if parent is None else parent.depth + 1
        # Not younger than its parent, without a walk up the chain; `released` brings both up to date.
        stamp = self._now if parent is None else parent.stamp
        return Entry(digest, blocks, packed, salt, parent, depth, self._serial, stamp)

    def _touch(self, entry: Entry | None) -> None:
        while entry is not None and entry.stamp != self._now:
            entry.stamp = self._now
            entry = entry.parent

    def _push(self, entry: Entry) -> None:
        entry.in_heap = True
        heapq.heappush(self._heap, (entry.stamp, -entry.depth, entry.serial, entry))

    def _oldest_idle(self) -> Entry | None:
        while self._heap:
            stamp, _, _, entry = heapq.heappop(self._heap)
            entry.in_heap = False
            if not entry.alive or not self._is_evictable(entry):
                continue  # a held one comes back through `released`, a pinned one through `unpin`
            if stamp == entry.stamp:
                return entry
            self._push(entry)
        return None

    def _find_idle(self) -> None:
        for entry in self._entries.values():
            if not entry.in_heap and self._is_evictable(entry):
                self._push(entry)

    def _is_evictable(self, entry: Entry) -> bool:
        if not entry.pinned:
            for block in entry.blocks:  # a loop: `any` costs more than what it asks
                if not self._ledger.is_held(block):
                    return True
        return False

    def _pin_if_wanted(self, entry: Entry) -> bool:
        """Whether it is pinned now. Blocks that others were admitted on wait for their next use, or a renewal."""
        if entry.pinned:
            return True
        if self._wanted[entry.digest] == 0 or (entry.parent is not None and not entry.parent.pinned):
            return False
        idle = self.groups - sum(map(self._ledger.is_held, entry.blocks))
        if idle and self._ledger.available < idle:
            return False
        if not self.may_pin():
            return False
        for block in entry.blocks:
            self._ledger.pin(block)
        entry.pinned = True
        return True

    def _unpin(self, entry: Entry) -> None:
        for block in entry.blocks:
            self._ledger.unpin(block)
        entry.pinned = False
        if not entry.in_heap and self._is_evictable(entry):
            self._push(entry)

    def _remove(self, entry: Entry) -> list[Entry]:
        """With all behind it -> these."""
        if entry.parent is not None:
            del entry.parent.children[entry.digest]
        removed = _with_descendants(entry)
        for gone in reversed(removed):
            assert not gone.pinned, (gone.blocks, "evicted, though it is pinned")
            gone.alive = False
            gone.children.clear()
            del self._entries[gone.digest]
            self.holdings.removed(gone.digest, Tier.DEVICE)
            for block in gone.blocks:
                del self._by_block[block]
                self._ledger.evict(block)
        return removed


def _with_descendants(entry: Entry) -> list[Entry]:
    """Parents before children."""
    chain = [entry]
    for each in chain:  # grows while it is walked
        chain.extend(each.children.values())
    return chain


def _is_same(entry: Entry, parent: Entry | None, salt: bytes, packed: bytes) -> bool:
    return entry.parent is parent and entry.salt == salt and entry.packed == packed
