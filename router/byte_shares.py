"""Who may hold how many bytes of long texts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from baton.errors import BatonError, Reason
from baton.retry_time import whole_seconds_ms

SHARE: Final = 3
"""How many times what is left free one may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOwner:
    """Whose text it is. None: no address, as of a proxy of ours; no API key."""

    address: str | None = None
    key: str | None = None

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Whom its bytes count for."""
        both = (("address", self.address), ("key", self.key))
        return tuple((kind, name) for kind, name in both if name is not None)


class ByteShares:
    """No address and no key holds more than three times what it leaves free: one alone has three quarters at most, two
    have three sevenths each, and the next one still finds some."""

    def __init__(self, bytes_max: int, spread: Callable[[], float]) -> None:
        """`spread` gives places from 0 to 1, for retry times."""
        self._free = bytes_max
        self._spread = spread
        self._held: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def holding(self, owner: TextOwner) -> Iterator[Callable[[int], None]]:
        """What is yielded takes as many bytes as it is told, instead of those before, until the block ends. It raises
        BatonError TOO_MANY_CALLS."""
        taken = 0

        def hold(count: int) -> None:
            nonlocal taken
            self._take(owner, count - taken)
            taken = count

        try:
            yield hold
        finally:
            if taken:
                self._add(owner, -taken)

    def _take(self, owner: TextOwner, count: int) -> None:
        left = self._free - count
        most = max((self._held[name] for name in owner.names), default=0) + count
        if left < 0 or (owner.names and most > SHARE * left):
            text = "This router holds as many bytes of long texts as it can, or as may be of one address or key."
            raise BatonError(
                Reason.TOO_MANY_CALLS,
                f"{text} Send the request again later.",
                retry_after_ms=whole_seconds_ms(self._spread()),
            )
        self._add(owner, count)

    def _add(self, owner: TextOwner, count: int) -> None:
        self._free -= count
        for name in owner.names:
            self._held[name] += count
            if not self._held[name]:
                del self._held[name]
