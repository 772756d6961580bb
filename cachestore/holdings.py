"""What one node has cached, as a numbered log for those who follow it (docs/cluster.md, "Who has what").

Pure; owned by the node's control thread. `PrefixCache` says what comes into device memory and leaves it, tiers below
say what they have. A follower that knows all up to some change is given what has changed since; one that is too far
behind, or new, gets a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Final
from weakref import ReferenceType, ref

CHANGES_KEPT_MAX: Final = 16_384
"""A follower that is further behind gets a snapshot. Each takes about 150 bytes."""


class Tier(IntEnum):
    """Where a block's KV is, the fastest first. The numbers are those of baton.v1.HoldingsNews."""

    DEVICE = 1
    HOST = 2
    DISK = 3


GONE: Final = 0
"""In place of a tier: in none of them any more."""
_BEST: Final = (GONE, 1, 2, 1, 3, 1, 2, 1)
"""By the set of tiers, a bit for each, the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class HoldingsPart:
    """What a follower is told: digests one after the other, and a byte for each with its fastest tier, or GONE."""

    number: int
    """Of the last change that this knows of."""
    digests: bytes
    tiers: bytes


class Holdings:
    """The blocks that a node has, by digest. A block may be in several tiers; the fastest is what others are told."""

    def __init__(self, *, changes_kept_max: int = CHANGES_KEPT_MAX) -> None:
        assert changes_kept_max > 0, changes_kept_max
        self._tiers: dict[bytes, int] = {}
        """A bit for each tier."""
        self._changes: deque[tuple[bytes, int]] = deque(maxlen=changes_kept_max)
        """The last ones: digest, and its fastest tier from then on."""
        self._snapshot: ReferenceType[HoldingsPart] | None = None
        """The last one made, as long as somebody is being sent it."""
        self.number = 0
        """Changes since the start."""
        self.on_change: Callable[[], None] | None = None
        """Called with each change."""

    def __len__(self) -> int:
        """Blocks, each once."""
        return len(self._tiers)

    def added(self, digest: bytes, tier: Tier) -> None:
        """The block is in this tier now, and was not before."""
        before = self._tiers.get(digest, 0)
        bit = 1 << (tier - 1)
        assert not before & bit, (digest.hex(), tier)
        self._tiers[digest] = before | bit
        self._log(digest, before, before | bit)

    def removed(self, digest: bytes, tier: Tier) -> None:
        """The block is not in this tier any more."""
        before = self._tiers[digest]
        bit = 1 << (tier - 1)
        assert before & bit, (digest.hex(), tier)
        if before == bit:
            del self._tiers[digest]
        else:
            self._tiers[digest] = before ^ bit
        self._log(digest, before, before ^ bit)

    def since(self, number: int) -> HoldingsPart | None:
        """What has changed since this change, each digest once. None: too much for the log, take a `snapshot`."""
        assert 0 <= number <= self.number, (number, self.number)
        count = self.number - number
        if count > len(self._changes):
            return None
        last = dict(reversed(list(islice(reversed(self._changes), count))))  # from the end: a walk to them takes longer
        return HoldingsPart(number=self.number, digests=b"".join(last), tiers=bytes(last.values()))

    def snapshot(self) -> HoldingsPart:
        """All that the node has; not always up to date, but the log goes on from there. Followers share one while it
        is sent to any of them."""
        made = self._snapshot() if self._snapshot is not None else None
        if made is None or self.number - made.number > len(self._changes) // 2:
            tiers = bytes(map(_BEST.__getitem__, self._tiers.values()))
            made = HoldingsPart(number=self.number, digests=b"".join(self._tiers), tiers=tiers)
            self._snapshot = ref(made)
        return made

    def _log(self, digest: bytes, before: int, after: int) -> None:
        if _BEST[before] == _BEST[after]:
            return
        self._changes.append((digest, _BEST[after]))
        self.number += 1
        if self.on_change is not None:
            self.on_change()
