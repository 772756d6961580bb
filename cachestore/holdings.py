"""What one node has cached, as a numbered log for those who follow it (docs/cluster.md, "Who has what").

Pure; owned by the node's control thread. `PrefixCache` says what comes into device memory and leaves it, tiers below
say what they have. A follower that knows all up to some change is given what has changed since; one that is too far
behind, or new, gets a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice, repeat
from typing import Final
from weakref import ReferenceType, ref

CHANGES_KEPT_MAX: Final = 16_384
"""A follower that is further behind gets a snapshot. Each takes about 150 bytes."""


class Tier(IntEnum):
    """Where a block's KV is, the fastest first. The numbers are those of baton.v1.HoldingsNews."""

    DEVICE = 1
    HOST = 2
    DISK = 3


BLOCKS_MAX: Final = 1 << 23
"""Of a node that says that it has more, routers know nothing: 64 MiB of an index for each of so many. Nodes refuse to
start with tiers that may hold more."""
GONE: Final = 0
"""In place of a tier: in none of them any more."""
_BEST: Final = (GONE, 1, 2, 1, 3, 1, 2, 1)
"""By the set of tiers, a bit for each, the fastest."""
_BIT: Final = (0, 1, 2, 4)
"""By tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldingsPart:
    """What a follower is told: digests one after the other, and a byte for each with its fastest tier, or GONE."""

    number: int
    """Of the last change that this knows of; it may tell of later ones, too."""
    digests: bytes
    tiers: bytes


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Snapshot:
    """All blocks that the node had at some change, by name; `Holdings.part` says where they are."""

    number: int
    digests: list[bytes]


class Holdings:
    """The blocks that a node has, by digest. A block may be in several tiers; the fastest is what others are told."""

    def __init__(self, *, changes_kept_max: int = CHANGES_KEPT_MAX) -> None:
        assert changes_kept_max > 0, changes_kept_max
        self._tiers: dict[bytes, int] = {}
        """A bit for each tier."""
        self._changes: deque[tuple[bytes, int]] = deque(maxlen=changes_kept_max)
        """The last ones: digest, and its fastest tier from then on."""
        self._snapshot: ReferenceType[Snapshot] | None = None
        """The last one made, as long as somebody is being sent it."""
        self.number = 0
        """Changes since the start."""
        self.on_change: Callable[[], None] | None = None
        """Called with each change."""
        self.on_gone: Callable[[bytes], None] | None = None
        """Called with each block that has left its last tier. Those behind it are to leave, too: who follows takes it
        that a node has the beginnings of chains."""

    def __len__(self) -> int:
        """Blocks, each once."""
        return len(self._tiers)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._tiers

    def added(self, digest: bytes, tier: Tier) -> None:
        """The block is in this tier now, and was not before."""
        before = self._tiers.get(digest, 0)
        after = before | _BIT[tier]
        assert before != after, (digest.hex(), tier)
        self._tiers[digest] = after
        if _BEST[before] != _BEST[after]:
            self._log(digest, _BEST[after])

    def added_all(self, digests: Collection[bytes], tier: Tier) -> None:
        """The same of several, each once."""
        if not self._tiers.keys().isdisjoint(digests):
            for digest in digests:
                self.added(digest, tier)
        elif digests:
            self._tiers.update(dict.fromkeys(digests, _BIT[tier]))
            self._changes.extend(zip(digests, repeat(_BEST[_BIT[tier]])))
            self.number += len(digests)
            if self.on_change is not None:
                self.on_change()

    def removed(self, digest: bytes, tier: Tier) -> None:
        """The block is not in this tier any more."""
        before = self._tiers[digest]
        after = before & ~_BIT[tier]
        assert before != after, (digest.hex(), tier)
        if after:
            self._tiers[digest] = after
        else:
            del self._tiers[digest]
        if _BEST[before] != _BEST[after]:
            self._log(digest, _BEST[after])
        if not after and self.on_gone is not None:
            self.on_gone(digest)

    def since(self, number: int) -> HoldingsPart | None:
        """What has changed since this change, each digest once. None: too much for the log, take a `snapshot`."""
        assert 0 <= number <= self.number, (number, self.number)
        count = self.number - number
        if count > len(self._changes):
            return None
        last = dict(reversed(list(islice(reversed(self._changes), count))))  # from the end: a walk to them takes longer
        return HoldingsPart(number=self.number, digests=b"".join(last), tiers=bytes(last.values()))

    def snapshot(self) -> Snapshot:
        """All that the node has; not always up to date, but the log goes on from there. Followers share one while it
        is sent to any of them. Of `BLOCKS_MAX` it takes a tenth of a second."""
        made = self._snapshot() if self._snapshot is not None else None
        if made is None or self.number - made.number > len(self._changes) // 2:
            made = Snapshot(number=self.number, digests=list(self._tiers))
            self._snapshot = ref(made)
        return made

    def part(self, snapshot: Snapshot, first: int, end: int) -> HoldingsPart:
        """Where these of its blocks are by now, so that no walk over all of them holds the control thread."""
        digests, get = snapshot.digests[first:end], self._tiers.get
        tiers = bytes(_BEST[get(digest, 0)] for digest in digests)
        return HoldingsPart(number=snapshot.number, digests=b"".join(digests), tiers=tiers)

    def _log(self, digest: bytes, tier: int) -> None:
        self._changes.append((digest, tier))
        self.number += 1
        if self.on_change is not None:
            self.on_change()
