"""Which blocks are worth a place on disk: those that have been used before. Pure.

Most prompts are seen once, and a drive wears out by writing. So a block goes there after its second use: computed once,
found once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

USES_MIN: Final = 2
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

    def __len__(self) -> int:
        """Digests remembered; one that was used lately may count twice."""
        return len(self._young) + len(self._old)

    def use(self, digests: Iterable[bytes]) -> None:
        """A prompt has these blocks: computed now, or found in any tier."""
        for digest in digests:
            uses = self._uses(digest)
            if digest not in self._young and len(self._young) == self._young_max:
                self._young, self._old = {}, self._young
            self._young[digest] = min(uses + 1, self._uses_min)

    def admits(self, digest: bytes) -> bool:
        """Whether it may be written to disk now. Not a use."""
        return self._uses(digest) >= self._uses_min

    def _uses(self, digest: bytes) -> int:
        return self._young.get(digest) or self._old.get(digest, 0)
