"""A bounded number of places, taken without asking: by connections and calls that have not shown yet what they are for,
or by names that somebody claims."""

from __future__ import annotations

from collections.abc import Hashable


class SharedPlaces:
    """Beyond the limit a new one takes the place of the oldest one of the source that has most: a flood pushes out
    itself. One that has shown what it is for leaves at once. Pure."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sources: dict[int, Hashable] = {}
        self._crowds: dict[Hashable, dict[int, None]] = {}
        """By source, in the order in which they came."""

    def enter(self, number: int, source: Hashable) -> int | None:
        """The number of the one that has to go, which has left; None: there is room."""
        self._sources[number] = source
        self._crowds.setdefault(source, {})[number] = None
        if len(self._sources) <= self._limit:
            return None
        crowded = max(self._crowds, key=lambda each: len(self._crowds[each]))
        oldest = next(iter(self._crowds[crowded]))
        self.leave(oldest)
        return oldest

    def leave(self, number: int) -> None:
        """Idempotent."""
        source = self._sources.pop(number, None)
        if source is not None:
            crowd = self._crowds[source]
            del crowd[number]
            if not crowd:
                del self._crowds[source]
