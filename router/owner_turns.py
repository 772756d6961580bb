"""Whose turn it is, where many wait for a few. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


class OwnerTurns(Generic[_T]):
    """What waits. The turn of each owner comes once in a round, and takes the first that it has."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, dict[_T, None]] = {}
        """By owner, in order; the first owner's turn is next."""

    def add(self, owner: Hashable, what: _T) -> None:
        self._waiting.setdefault(owner, {})[what] = None

    def take(self) -> _T | None:
        """The next one, which waits no more."""
        if not self._waiting:
            return None
        owner = next(iter(self._waiting))
        mine = self._waiting.pop(owner)
        what = next(iter(mine))
        del mine[what]
        if mine:
            self._waiting[owner] = mine
        return what

    def leave(self, owner: Hashable, what: _T) -> None:
        """Idempotent."""
        mine = self._waiting.get(owner, {})
        mine.pop(what, None)
        if not mine:
            self._waiting.pop(owner, None)
