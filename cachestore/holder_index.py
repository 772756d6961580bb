"""Which nodes have which blocks: what a router knows of all of them, 8 bytes for each block of each node.

Pure; owned by one thread. An entry is one number: 48 bits of the block's digest, 14 of its holder, 2 of the tier.
Sorted, the holders of a block are neighbours. A change goes into a small sorted array, which is merged into the next
larger one when it is full; a later entry of the same block and holder hides an earlier one (a log-structured merge
tree). A large merge is done a slice with each change, so that no change takes long; meanwhile both arrays are read.

Two blocks may share 48 bits of their digests: where ten million are known, less than one in ten million look-ups of a
block that nobody has finds somebody. What is found here is a hint: holders compare tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from baton.ids import Incarnation

_TIER_BITS: Final = 2
_LOW_BITS: Final = 16
"""Holder and tier."""
HOLDERS_MAX: Final = (1 << (_LOW_BITS - _TIER_BITS)) - 1
"""Nodes that are known at a time, and those that were and whose entries are still to be swept. One number stays free:
it is the end of a block's entries."""
_GONE: Final = 0
_TIER_MASK: Final = np.uint64(3)
_LOW_MASK: Final = np.uint64((1 << _LOW_BITS) - 1)
_LEVEL_MIN: Final = 4_096
_LEVEL_RATIO: Final = 16
"""The first array has up to `_LEVEL_MIN` entries, each other one so many times as many."""
_SLICE: Final = 32_768
"""Entries of either array that are merged at a time; half a millisecond."""
_MERGED_OF_PUT: Final = 2 * (_LEVEL_RATIO + 2)
"""Entries that are merged into each level for one that is put: a merge is over before the next one begins."""
SAVED: Final = np.array([0, 8, 7, 6], dtype=np.uint8)
"""By tier, what a block there saves of what its computing takes, in eighths: loading it takes the rest, about."""
SAVED_WHOLE: Final = 8

_Entries = npt.NDArray[np.uint64]
_Part = tuple[_Entries, list[int], list[int]]
"""A level, and where the entries of each block of a chain start and end in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one prompt, by holder number; the last element, which -1 names too, is of no holder and 0."""

    blocks: npt.NDArray[np.uint32]
    """Leading blocks that it has, in whatever tier."""
    saved: npt.NDArray[np.uint32]
    """What these save, in `SAVED_WHOLE` parts of a block. A block counts no more than one before it."""


class _Merge:
    """Of a newer array into the one of a level, in slices; with no newer one, of what is retired out of it."""

    def __init__(self, old: _Entries, new: _Entries, *, last: bool, retired: npt.NDArray[np.bool_] | None) -> None:
        """`retired`: of holders by number, whose entries are left out."""
        self.old, self.new = old, new
        self._last, self._retired = last, retired
        self._old_at = self._new_at = self._size = 0
        self._out = np.empty(old.size + new.size, dtype=np.uint64)

    @property
    def nbytes(self) -> int:
        return self.old.nbytes + self.new.nbytes + self._out.nbytes

    def step(self, count: int) -> _Entries | None:
        """Merge up to so many entries of either; the result, once it is whole."""
        old = self.old[self._old_at : self._old_at + count]
        new = self.new[self._new_at : self._new_at + count]
        # Up to where the shorter of them ends, with all that there is of a block and holder.
        old_goes_on, new_goes_on = self._old_at + old.size < self.old.size, self._new_at + new.size < self.new.size
        if old_goes_on and not (new_goes_on and new[-1] < old[-1]):
            new = new[: new.searchsorted(old[-1] | _TIER_MASK, side="right")]
        elif new_goes_on:
            old = old[: old.searchsorted(new[-1] | _TIER_MASK, side="right")]
        self._old_at, self._new_at = self._old_at + old.size, self._new_at + new.size
        if self._retired is not None:
            old, new = (part[~self._retired[(part & _LOW_MASK) >> np.uint64(_TIER_BITS)]] for part in (old, new))
        merged = _merged(old, new, last=self._last)
        self._out[self._size : self._size + merged.size] = merged
        self._size += merged.size
        if self._old_at < self.old.size or self._new_at < self.new.size:
            return None
        self._out.resize(self._size, refcheck=False)
        return self._out


@dataclass(slots=True, eq=False)
class _Level:
    entries: _Entries = field(default_factory=lambda: np.empty(0, dtype=np.uint64))
    """While there is a merge, what it has as `old`."""
    merge: _Merge | None = None
    clean: int = 0
    """Whose entries are not in here: those of holders that were retired up to this count."""
    merging_clean: int = 0
    """What `clean` will be after the merge."""


class HolderIndex:
    """Holders have numbers. A new holder is filled under a number of its own and then published, in place of what was
    known of it before; one that is forgotten is forgotten at once, and its entries are swept later."""

    def __init__(self) -> None:
        self._levels: list[_Level] = []
        """The newest and smallest first. Entries of one block and holder are in one array once."""
        self.holders: dict[Incarnation, int] = {}
        """Those published."""
        self._by_number: dict[int, Incarnation] = {}
        self._live = np.zeros(HOLDERS_MAX + 1, dtype=np.uint8)
        """By number, all bits of one that is published."""
        self._retired: deque[int] = deque()
        """Numbers that are not free yet, as of some there may be entries; the oldest first."""
        self._retirements = 0
        """Ever."""
        self._free: list[int] = []
        self._numbers = 0
        """Ever given out at a time: what `Found` is as long as."""
        self.version = 0
        """Rises with each change of `holders`."""

    @property
    def entries(self) -> int:
        """With those that are hidden or retired."""
        return sum(part.size for part in self._parts())

    @property
    def nbytes(self) -> int:
        return sum(level.merge.nbytes if level.merge is not None else level.entries.nbytes for level in self._levels)

    def _parts(self) -> Iterator[_Entries]:
        """The newest first."""
        for level in self._levels:
            if level.merge is not None:
                yield level.merge.new
            yield level.entries

    def incarnation(self, number: int) -> Incarnation | None:
        """The holder published under this number."""
        return self._by_number.get(number)

    def begin(self) -> int | None:
        """A number for a holder that is to be filled and published, or discarded. None: there are too many."""
        if not self._free and self._numbers == HOLDERS_MAX:
            while self.sweep():  # as many as that are not retired within a second
                pass
            if not self._free:
                return None
        if self._free:
            return self._free.pop()
        self._numbers += 1
        return self._numbers - 1

    def publish(self, incarnation: Incarnation, number: int) -> None:
        """What is known under this number is what the holder has."""
        self.forget(incarnation)
        self.holders[incarnation] = number
        self._by_number[number] = incarnation
        self._live[number] = 0xFF
        self.version += 1

    def discard(self, number: int) -> None:
        """A number that was not published."""
        assert number not in self._by_number, number
        self._retire(number)

    def forget(self, incarnation: Incarnation) -> None:
        """Idempotent."""
        number = self.holders.pop(incarnation, None)
        if number is not None:
            del self._by_number[number]
            self._live[number] = 0
            self._retire(number)
            self.version += 1

    def _retire(self, number: int) -> None:
        self._retired.append(number)
        self._retirements += 1

    def put(self, number: int, digests: bytes, tiers: bytes) -> None:
        """What has changed at a holder: 16 bytes for each block, and a byte with its tier; 0: gone. Of blocks
        whose entries are the same but for the tier, as one that is named twice, one is kept."""
        assert len(digests) == 16 * len(tiers), (len(digests), len(tiers))
        if not tiers:
            return
        assert max(tiers) < len(SAVED), max(tiers)
        new = _keys(digests) | np.uint64(number << _TIER_BITS) | np.frombuffer(tiers, dtype=np.uint8)
        new.sort()
        twice = (new[1:] ^ new[:-1]) <= _TIER_MASK
        if twice.any():
            new = new[np.append(~twice, True)]
        for i in range(len(self._levels)):
            self._go_on(i, _MERGED_OF_PUT * new.size)
        self._push(0, new, clean=self._retirements)

    def count(self, number: int) -> int:
        """Entries under this number, with those that are hidden. It reads all there are."""
        of = np.uint64(number)
        return sum(int(((part & _LOW_MASK) >> np.uint64(_TIER_BITS) == of).sum()) for part in self._parts())

    def sweep(self) -> bool:
        """Drop entries of those forgotten, a slice of them -> whether there is more to do. Call it every second."""
        if not self._retired:
            return False
        dirty = [i for i, level in enumerate(self._levels) if level.clean < self._retirements]
        if dirty:
            if self._levels[dirty[0]].merge is None:
                self._merge(dirty[0], np.empty(0, dtype=np.uint64))
            self._go_on(dirty[0], _SLICE)
        clean = min((level.clean for level in self._levels), default=self._retirements)
        while len(self._retired) > self._retirements - clean:
            self._free.append(self._retired.popleft())
        return bool(self._retired)

    def nothing(self) -> Found:
        """What nobody has any of."""
        none = np.zeros(self._numbers + 1, dtype=np.uint32)
        return Found(blocks=none, saved=none)

    def lookup(self, digests: Sequence[bytes]) -> Found | None:
        """Who has how many leading blocks of a chain; None: nobody has any."""
        least = blocks = saved = None
        for row, count in self._rows(digests):
            if least is None or blocks is None or saved is None:
                least = row & self._live[: row.size]
                blocks = np.multiply(least != 0, count, dtype=np.uint32)
                saved = np.multiply(least, count, dtype=np.uint32)
            else:
                np.minimum(least, row, out=least)
                if not least.any():
                    break
                blocks += np.multiply(least != 0, count, dtype=np.uint32)
                saved += np.multiply(least, count, dtype=np.uint32)
        return None if blocks is None or saved is None or not blocks.any() else Found(blocks=blocks, saved=saved)

    def _rows(self, digests: Sequence[bytes]) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
        """What each holder saves of a block, and of how many blocks in a row that is so. Who has a block has those
        before it, in no slower tier: where two blocks have the same holders, so have those between them."""
        if not digests:
            return
        keys = _keys(b"".join(digests))
        count = len(keys)
        if not self._is_known(keys[0]):
            return  # as of most prompts
        ends = self._find(keys[[0, -1]])
        if all(stops[0] - starts[0] == stops[1] - starts[1] for _, starts, stops in ends):
            holders = _holders(ends, 0)
            if all(map(np.array_equal, holders, _holders(ends, 1))):
                yield self._row(holders), count
                return
        parts = self._find(keys)
        # How many entries each block has, by level.
        sizes = list(zip(*(map(int.__sub__, ends, starts) for _, starts, ends in parts), strict=True))
        first = 0
        for size, alike in groupby(sizes):
            if not any(size):
                return
            end = first + sum(1 for _ in alike)
            yield from self._alike(parts, first, end)
            first = end

    def _is_known(self, key: np.uint64) -> bool:
        """Whether there is an entry of this block."""
        end = key | _LOW_MASK
        for part in self._parts():
            at = part.searchsorted(key)
            if at < part.size and part[at] < end:
                return True
        return False

    def _find(self, keys: _Entries) -> list[_Part]:
        """Where the entries of these blocks are, the oldest part first; only parts that have any."""
        count = len(keys)
        bounds = np.concatenate((keys, keys | _LOW_MASK))
        found: list[_Part] = []
        for part in reversed(list(self._parts())):
            places = part.searchsorted(bounds).tolist()
            starts, stops = places[:count], places[count:]
            if starts != stops:
                found.append((part, starts, stops))
        return found

    def _alike(self, parts: Sequence[_Part], first: int, end: int) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
        """The same of blocks that have as many entries each."""
        holders = _holders(parts, first)
        if end - first == 1 or all(map(np.array_equal, holders, _holders(parts, end - 1))):
            yield self._row(holders), end - first
        else:
            yield from ((self._row(_holders(parts, depth)), 1) for depth in range(first, end))

    def _row(self, holders: Sequence[npt.NDArray[np.uint16]]) -> npt.NDArray[np.uint8]:
        """Holders and tiers of one block, the oldest level first."""
        row = np.zeros(self._numbers + 1, dtype=np.uint8)
        for part in holders:
            row[part >> _TIER_BITS] = SAVED.take(part & 3)
        return row

    def _push(self, i: int, new: _Entries, clean: int) -> None:
        """Have these merged into a level, at once if they are few."""
        if i == len(self._levels):
            self._levels.append(_Level(clean=self._retirements))
        level = self._levels[i]
        while level.merge is not None and level.merge.new.size:  # not with such changes as nodes send
            self._go_on(i, _SLICE)
        level.clean = min(level.clean, clean)
        self._merge(i, new)  # in place of a sweep, which it does, too
        if level.entries.size + new.size <= 2 * _SLICE:
            self._go_on(i, 2 * _SLICE)

    def _merge(self, i: int, new: _Entries) -> None:
        level, retired = self._levels[i], None
        if self._retired:
            retired = np.zeros(HOLDERS_MAX + 1, dtype=np.bool_)
            retired[list(self._retired)] = True
        level.merge = _Merge(level.entries, new, last=i == len(self._levels) - 1, retired=retired)
        level.merging_clean = self._retirements

    def _go_on(self, i: int, count: int) -> None:
        """With a level's merge, by so many entries of either array. If it is too large then, into the next."""
        level = self._levels[i]
        if level.merge is None:
            return
        merged = level.merge.step(count)
        if merged is None:
            return
        level.entries, level.merge, level.clean = merged, None, level.merging_clean
        if merged.size > _LEVEL_MIN * _LEVEL_RATIO**i:
            level.entries, level.clean = np.empty(0, dtype=np.uint64), self._retirements
            self._push(i + 1, merged, level.merging_clean)


def _holders(parts: Sequence[_Part], depth: int) -> list[npt.NDArray[np.uint16]]:
    """Holders and tiers of one block, by level."""
    return [level[starts[depth] : ends[depth]].astype(np.uint16) for level, starts, ends in parts]


def _keys(digests: bytes) -> _Entries:
    """Entries of these digests, without holder and tier."""
    keys: _Entries = np.frombuffer(digests, dtype="<u8")[::2] & ~_LOW_MASK
    return keys


def _merged(old: _Entries, new: _Entries, *, last: bool) -> _Entries:
    """`new` hides what is the same but for the tier. In the last level nothing is left to be hidden."""
    if old.size:
        at = np.minimum(old.searchsorted(new & ~_TIER_MASK), old.size - 1)
        same = (old[at] ^ new) <= _TIER_MASK
        if same.any():
            old = np.delete(old, at[same])
    if last:
        new = new[(new & _TIER_MASK) != _GONE]
    merged = np.concatenate((old, new))
    merged.sort(kind="stable")  # of two sorted runs: one pass
    return merged
