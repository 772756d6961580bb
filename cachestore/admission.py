"""Which blocks are worth a place on disk: while it has room, those that were computed here; then those that have been
used before, and as many others as that pays for. Pure.

Most prompts are seen once, and a drive wears out by writing. Filling it costs one writing of the whole drive; from then
on a block goes there after its second use: computed once, found or computed again. Each such block lets
`ONCE_PER_REUSE` others go there after their first use: where prompts come again, those would be evicted everywhere
before they do; where none does, nothing is written. What another node brought needs one use more, as that node has it
too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

USES_MIN: Final = 2
ONCE_PER_REUSE: Final = 8
"""Blocks used once that each block used again lets a full disk take."""
CREDIT_MAX: Final = 1 << 12
"""Of these, at any time."""
REMEMBERED_MAX: Final = 1 << 18
"""Digests that uses are counted of, about 150 bytes each."""


class Admission:
    """Counts uses of blocks by digest. What was not used for the longest time is forgotten: of the last
    `remembered_max` different ones between half and all are known. Control thread only."""

    def __init__(self, *, uses_min: int = USES_MIN, remembered_max: int = REMEMBERED_MAX) -> None:
        assert uses_min > 0 and remembered_max > 1, (uses_min, remembered_max)
        self._uses_min = uses_min
        self._young_max = remembered_max // 2
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self.credit = 0
        """Blocks used once that may be written now though each evicts another. The caller takes off what it writes."""

    def __len__(self) -> int:
        """Digests remembered; one that was used lately may count twice."""
        return len(self._young) + len(self._old)

    def use(self, digests: Iterable[bytes]) -> None:
        """A prompt has these blocks: computed now, or found in any tier."""
        for digest in digests:
            uses = self.uses(digest) + 1
            if uses == self._uses_min > 1:
                self.credit = min(CREDIT_MAX, self.credit + ONCE_PER_REUSE)
            self._count(digest, uses)

    def brought(self, digests: Iterable[bytes]) -> None:
        """They came from elsewhere, and a prompt is going to use them."""
        for digest in digests:
            if digest not in self._young and digest not in self._old:
                self._count(digest, -1)

    def admits(self, digest: bytes, *, room: bool) -> bool:
        """Whether it may be written to disk now, which has `room` or would evict another. Not a use."""
        return self.uses(digest) >= (1 if room else self._uses_min)

    def _count(self, digest: bytes, uses: int) -> None:
        if digest not in self._young and len(self._young) == self._young_max:
            self._young, self._old = {}, self._young
        self._young[digest] = min(uses, self._uses_min)

    def uses(self, digest: bytes) -> int:
        """Of those that are remembered, at most `uses_min`."""
        uses = self._young.get(digest)
        return self._old.get(digest, 0) if uses is None else uses
