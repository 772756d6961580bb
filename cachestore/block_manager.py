"""Blocks of the region, from the engine's side: prefix matching, admission, growth, eviction.

Owned by the node's control thread. Ownership itself is the ledger's (the node passes it in): every block is in exactly
one class there, and this module never keeps a second book of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from baton.ids import BlockId
from cachestore.ledger import Ledger
from cachestore.prefix_cache import PrefixCache


def prefix_blocks_max(prompt_len: int, block_size: int, groups: int = 1) -> int:
    """How many cached blocks a prompt may use where it is computed: its last token is always computed, to draw from."""
    assert prompt_len > 0, prompt_len
    return (prompt_len - 1) // block_size * groups


def growth_blocks(
    *,
    prompt_len: int,
    known_len: int,
    max_tokens: int,
    context_len_max: int,
    block_size: int,
    blocks_held: int,
    groups: int = 1,
) -> int:
    """Blocks to promise to a sequence that holds `blocks_held` blocks for its `known_len` tokens, for all it may draw.

    `known_len` is the prompt and the output so far, `max_tokens` the limit on the output. The KV of the last token
    drawn is never written.
    """
    end = max(known_len, min(prompt_len + max_tokens, context_len_max) - 1)
    return max(0, -(-end // block_size) * groups - blocks_held)


class BlockManager:
    """Hands out the blocks of one region, and keeps what is left behind as prefix cache.

    `kv_root` names what makes this KV (`prefix_cache.kv_root`); chains of different roots never match.

    `block_size` tokens take a block of each of `groups` layer groups. Counts and tables are of blocks, position after
    position (cachestore/layout.py).
    """

    def __init__(
        self, ledger: Ledger, block_size: int, kv_root: bytes, *, groups: int = 1, padding_blocks: int = 0
    ) -> None:
        """`padding_blocks` of the ledger's held blocks belong to the engine itself, for good."""
        self.ledger = ledger
        self.padding_blocks = padding_blocks
        self.block_size = block_size
        self.groups = groups
        self.prefix_cache = PrefixCache(ledger, block_size=block_size, kv_root=kv_root, groups=groups)

    def blocks_for(self, tokens_count: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens_count // self.block_size) * self.groups

    def full_blocks(self, tokens_count: int) -> int:
        """Those of them that are full."""
        return tokens_count // self.block_size * self.groups

    def tokens_in(self, blocks_count: int) -> int:
        """Tokens that so many blocks hold when they are full."""
        return blocks_count // self.groups * self.block_size

    @property
    def blocks_usable(self) -> int:
        """What one request may need at most: what pins keep, or will keep, is never its own, nor is padding."""
        return self.ledger.num_blocks - self.padding_blocks - self.prefix_cache.pinned_blocks_wanted

    @property
    def less_others(self) -> str:
        """For errors about `blocks_usable`, behind the size of the region."""
        counts = ((self.prefix_cache.pinned_blocks_wanted, "pinned prefixes"), (self.padding_blocks, "padding"))
        return "".join(f", {count} of them for {what}" for count, what in counts if count)

    def match_prompt(self, tokens: Sequence[int], salt: bytes) -> list[BlockId]:
        """The longest cached chain that a prompt may use where its next token is drawn. Not held: do so before anything
        else is allocated."""
        return self.prefix_cache.match(tokens, salt, prefix_blocks_max(len(tokens), self.block_size, self.groups))

    def can_admit(
        self, prefix_blocks: Sequence[BlockId], new_blocks: int, promise: int, *, host_backed: bool = False
    ) -> bool:
        """With `host_backed` the promise may be covered by host memory; the blocks themselves never are."""
        now = self.ledger.idle_cached(prefix_blocks) + new_blocks  # a prefix block may be held by somebody anyway
        return self.ledger.can_give(now, promise, host_backed=host_backed)

    def admit(
        self,
        prefix_blocks: Sequence[BlockId],
        new_blocks: int,
        *,
        promise_key: Hashable | None = None,
        promise: int = 0,
        host_backed: bool = False,
    ) -> list[BlockId]:
        """Hold the prefix, allocate the rest, set the promise aside (when there is a key): the whole block table.

        The caller has asked `can_admit` with the same numbers since the last change.
        """
        room = self.can_admit(prefix_blocks, new_blocks, promise, host_backed=host_backed)
        assert room, (len(prefix_blocks), new_blocks, promise)
        assert promise_key is not None or promise == 0, promise
        self.ledger.hold(prefix_blocks)
        table = [*prefix_blocks, *self.allocate(new_blocks)]
        if promise_key is not None:
            self.ledger.promise(promise_key, promise, host_backed=host_backed)
        return table

    def allocate(self, count: int, promise: Hashable | None = None) -> list[BlockId]:
        """`count` blocks, held once each, drawn from `promise` if given. The caller has made sure of room."""
        room = self.prefix_cache.evict_until(count)
        assert room, (count, self.ledger.reclaimable)
        return self.ledger.take(count, promise=promise)

    def release(self, blocks: Sequence[BlockId], *, used: bool = True) -> None:
        """Take one request reference back from each block. Indexed ones stay, evictable; others become free. `used` is
        as in `PrefixCache.released`."""
        self.ledger.drop(blocks)
        self.prefix_cache.released(blocks, used=used)
