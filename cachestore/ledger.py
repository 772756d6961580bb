"""Who owns each block of one region (I1, I4 of docs/invariants.md).

Pure and single-threaded: the node's control thread owns it. Every block is in exactly one class, the first that fits:
quarantined, writer-owned, held, cached, free.

Owners are of two kinds: *requests* hold a block by count, and one remote *writer* owns it through its grant. A block is
free when all have let go.

Promises are of two kinds: *device-backed* ones can be drawn from at any time, *host-backed* ones once blocks have been
moved to host memory (`can_draw`). Always: device-backed promises <= free + cached, and all promises <= free + cached +
host_room.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from operator import is_not

import numpy as np
import numpy.typing as npt

from baton.ids import BlockId, GrantId
from baton.wire import BlockLoad


class ConservationError(AssertionError):
    """The ledger contradicts itself: a bug of ours, reported by a metric and a log, never silently."""


class Ledger:
    """Ownership of the blocks `0 .. num_blocks-1`. All methods assert on misuse: misuse is our own bug."""

    def __init__(self, num_blocks: int, *, on_free: Callable[[BlockId], None] | None = None) -> None:
        """`on_free` is called with each block that becomes free (tests fill it with poison)."""
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self._on_free = on_free
        # By block, in memory that numpy reads as it is: a node recounts tens of thousands every second.
        self._holds = array("I", [0]) * num_blocks
        self._writer: list[GrantId | None] = [None] * num_blocks
        self._quarantined = bytearray(num_blocks)
        self._cached = bytearray(num_blocks)
        self._spoiled = bytearray(num_blocks)
        self._free = array("I", range(num_blocks - 1, -1, -1))
        self._promises: dict[Hashable, int] = {}
        self._promised = 0
        self._host_backed: set[Hashable] = set()
        self._promised_host_backed = 0
        self._cached_count = 0
        self._pinned = bytearray(num_blocks)
        self._pinned_idle = 0
        self.host_room = 0
        """Blocks that host memory could still take, set by its owner. Negative while it has lent its reserve."""

    @property
    def available(self) -> int:
        """Blocks that could be given to a new owner now: free ones, and cached ones that may be evicted first."""
        return min(self.growable, self.available_with_host)

    @property
    def available_with_host(self) -> int:
        """What new owners and host-backed promises together could get, host memory counted."""
        return self.reclaimable + self.host_room - self._promised

    @property
    def growable(self) -> int:
        """Blocks that host-backed promises could draw now: the reclaimable ones, less the device-backed promises."""
        return self.reclaimable - (self._promised - self._promised_host_backed)

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out without an eviction."""
        return len(self._free)

    @property
    def reclaimable(self) -> int:
        """Blocks that nobody owns: free now, or free after an eviction. Promises are not subtracted."""
        return len(self._free) + self._cached_count - self._pinned_idle

    def idle_cached(self, blocks: Iterable[BlockId]) -> int:
        """How many of these (distinct) blocks are cached only: holding them takes as many from `available`.

        Pinned ones are none of them: they are not in `available`.
        """
        return sum(self._is_plain_cached(block) and not self._pinned[block] for block in blocks)

    def promise_left(self, key: Hashable) -> int | None:
        """What can still be drawn from this promise; None when there is no such promise."""
        return self._promises.get(key)

    def can_draw(self, key: Hashable, count: int = 1) -> bool:
        """Whether so many blocks more can be drawn from this promise now. Always so for a device-backed one."""
        return key not in self._host_backed or self.growable >= count

    def can_give(self, count: int, promise: int, *, host_backed: bool) -> bool:
        """Whether `count` blocks and a promise could be given together; evictions may have to come first."""
        if count > self.available:
            return False
        return count + promise <= (self.available_with_host if host_backed else self.available)

    def take(self, count: int, *, promise: Hashable | None = None) -> list[BlockId]:
        """Hand out `count` free blocks, each held once. With `promise`, they are drawn from that promise.

        The caller has made sure of room: `count <= free`, and without a promise `count <= available`.
        """
        assert 0 <= count <= len(self._free), (count, len(self._free))
        if promise is None:
            assert count <= self.available, (count, self.available)
        else:
            left = self._promises[promise] - count
            assert left >= 0, (promise, count, left)
            if promise in self._host_backed:
                assert count <= self.growable, (promise, count, self.growable)
                self._promised_host_backed -= count
            self._promises[promise] = left
            self._promised -= count
        blocks = [BlockId(self._free.pop()) for _ in range(count)]
        for block in blocks:
            self._holds[block] = 1
        return blocks

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one request reference to each block, which is held or cached already."""
        for block in blocks:
            assert self._holds[block] > 0 or self._cached[block], (block, "hold of a block that nobody keeps")
            if self._is_plain_cached(block):
                self._cached_count -= 1
                self._pinned_idle -= self._pinned[block]
            self._holds[block] += 1

    def drop(self, blocks: Iterable[BlockId]) -> None:
        """Take one request reference back from each block."""
        for block in blocks:
            assert self._holds[block] > 0, (block, "drop of a block that is not held")
            self._holds[block] -= 1
            self._settle(block)

    def give_writer(self, blocks: Sequence[BlockId], grant: GrantId) -> None:
        """Make the writer of `grant` the second owner of blocks that are held and private."""
        for block in blocks:
            assert self._writer[block] is None, (block, "two writers")
            assert self._holds[block] == 1 and not self._cached[block], (block, "not private")
            self._writer[block] = grant

    def writer_gone(self, blocks: Iterable[BlockId], grant: GrantId) -> None:
        """There is evidence that the writer of `grant` can no longer write (I2)."""
        for block in blocks:
            assert self._writer[block] == grant, (block, self._writer[block], grant)
            self._writer[block] = None
            self._quarantined[block] = False
            self._settle(block)

    def quarantine(self, blocks: Iterable[BlockId], grant: GrantId) -> None:
        """No evidence in time: never reused until `writer_gone`."""
        for block in blocks:
            assert self._writer[block] == grant, (block, self._writer[block], grant)
            self._quarantined[block] = True

    def is_held(self, block: BlockId) -> bool:
        return self._holds[block] > 0

    def holders(self, block: BlockId) -> int:
        """How many request references this block has."""
        return self._holds[block]

    def mark_cached(self, block: BlockId) -> None:
        """The prefix index refers to this held block; when the last holder leaves it stays, evictable."""
        assert self._holds[block] > 0 and self._writer[block] is None and not self._cached[block], block
        assert not self._spoiled[block], block
        self._cached[block] = True

    def evict(self, block: BlockId) -> None:
        """The prefix index has forgotten this block, which is not pinned. Free at once when nobody holds it."""
        assert self._cached[block] and not self._pinned[block], block
        if self._is_plain_cached(block):
            self._cached_count -= 1
        self._cached[block] = False
        if self._holds[block] == 0:
            self._put_free(block)

    def spoil(self, block: BlockId) -> None:
        """The content of this block, which is not cached, may be broken: it is not cached before it has been free."""
        assert not self._cached[block], block
        self._spoiled[block] = self._holds[block] > 0

    def is_spoiled(self, block: BlockId) -> bool:
        return bool(self._spoiled[block])

    def pin(self, block: BlockId) -> None:
        """Keep this cached block from eviction. An idle one leaves `available`, which must have room for that."""
        assert self._cached[block] and not self._pinned[block], block
        if self._is_plain_cached(block):
            assert self.available > 0, (block, "promised to somebody")
            self._pinned_idle += 1
        self._pinned[block] = True

    def unpin(self, block: BlockId) -> None:
        """It may be evicted again."""
        assert self._pinned[block], block
        self._pinned[block] = False
        self._pinned_idle -= self._is_plain_cached(block)

    def is_pinned(self, block: BlockId) -> bool:
        return bool(self._pinned[block])

    def promise(self, key: Hashable, count: int, *, host_backed: bool = False) -> None:
        """Set `count` blocks aside for the growth of `key`; drawn by `take(..., promise=key)`."""
        available = self.available_with_host if host_backed else self.available
        assert key not in self._promises and 0 <= count <= available, (key, count, available)
        self._promises[key] = count
        self._promised += count
        if host_backed:
            self._host_backed.add(key)
            self._promised_host_backed += count

    def unpromise(self, key: Hashable) -> None:
        """Give back what is left of a promise. Idempotent."""
        left = self._promises.pop(key, 0)
        self._promised -= left
        if key in self._host_backed:
            self._host_backed.remove(key)
            self._promised_host_backed -= left

    def counts(self) -> BlockLoad:
        """Recount every block from its own state. O(num_blocks)."""
        return self._recount()[0]

    def _recount(self) -> tuple[BlockLoad, npt.NDArray[np.bool_]]:
        """With it which blocks are free -> [num_blocks]."""
        quarantined, cached, pinned = map(_flags, (self._quarantined, self._cached, self._pinned))
        held = np.frombuffer(self._holds, dtype=np.uint32) > 0
        if self._writer.count(None) == self.num_blocks:  # most of the time, and twenty times as fast
            written = np.zeros(self.num_blocks, np.bool_)
        else:
            written = np.fromiter(map(is_not, self._writer, repeat(None)), np.bool_, self.num_blocks) & ~quarantined
        owned = quarantined | written
        unowned = ~(owned | held)
        free = unowned & ~cached
        counts = BlockLoad(
            quarantined=int(quarantined.sum()),
            writer_owned=int(written.sum()),
            held=int((held & ~owned).sum()),
            cached=int((unowned & cached).sum()),
            free=int(free.sum()),
            promised=self._promised,
            pinned=int((pinned & cached & ~held).sum()),
        )
        return counts, free

    def books(self) -> BlockLoad:
        """The same figures from the running books: a hundred times cheaper than `counts`, for load reports."""
        quarantined = self._quarantined.count(1)
        writer_owned = self.num_blocks - self._writer.count(None) - quarantined
        free = len(self._free)
        return BlockLoad(
            quarantined=quarantined,
            writer_owned=writer_owned,
            held=self.num_blocks - quarantined - writer_owned - self._cached_count - free,
            cached=self._cached_count,
            free=free,
            promised=self._promised,
            pinned=self._pinned_idle,
        )

    def check(self) -> BlockLoad:
        """Compare the recount with the running books. Raises ConservationError naming the first contradiction."""
        (counts, free), books = self._recount(), self.books()
        listed = np.bincount(np.frombuffer(self._free, dtype=np.uint32), minlength=self.num_blocks)
        if len(listed) > self.num_blocks:
            raise ConservationError(f"the free list names block {len(listed) - 1} of {self.num_blocks}")
        if listed.max() > 1:
            raise ConservationError(f"the free list of {len(self._free)} entries names a block twice")
        if counts != books:
            raise ConservationError(f"the books say {books}, the recount {counts}")
        if (listed != free).any():
            raise ConservationError(f"block {np.flatnonzero(listed != free)[0]} is free or in the free list, not both")
        if self._promised != sum(self._promises.values()) or self._promised < 0:
            raise ConservationError(f"promised {self._promised}, promises sum to {sum(self._promises.values())}")
        self._check_promises(counts.free + counts.cached - counts.pinned)
        if (_flags(self._pinned) > _flags(self._cached)).any():
            raise ConservationError("a block is pinned that the prefix index does not know")
        return counts

    def _check_promises(self, reclaimable: int) -> None:
        host_backed = sum(self._promises[key] for key in self._host_backed)
        if self._promised_host_backed != host_backed:
            raise ConservationError(f"{self._promised_host_backed} promised against host memory, not {host_backed}")
        if self._promised - host_backed > reclaimable:
            raise ConservationError(f"promised {self._promised - host_backed} of {reclaimable} reclaimable blocks")
        if self._promised > reclaimable + self.host_room:
            raise ConservationError(
                f"promised {self._promised} of {reclaimable} reclaimable blocks and {self.host_room} of host memory"
            )

    def _is_plain_cached(self, block: BlockId) -> bool:
        return self._cached[block] != 0 and self._holds[block] == 0

    def _settle(self, block: BlockId) -> None:
        if self._holds[block] or self._writer[block] is not None:
            return
        assert not self._quarantined[block], block
        if self._cached[block]:
            self._cached_count += 1
            self._pinned_idle += self._pinned[block]
        else:
            self._put_free(block)

    def _put_free(self, block: BlockId) -> None:
        if self._on_free is not None:
            self._on_free(block)
        self._spoiled[block] = False
        self._free.append(block)


def _flags(flags: bytearray) -> npt.NDArray[np.bool_]:
    return np.frombuffer(flags, dtype=np.bool_)
