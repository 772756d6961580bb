"""Who may have how many connections. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final

from baton.endpoint import Address, Network, is_trusted, parse_address, source_of

HOPS_MAX: Final = 16
"""Proxies that one call may have passed: further addresses are not looked at."""


def client_address(peer: Address, forwarded: Iterable[str], proxies: Sequence[Network]) -> Address:
    """The last address that no proxy of ours has. `forwarded` has the values of X-Forwarded-For, which everybody may
    send: only what a proxy of ours wrote counts, and that is at the end."""
    hops = ",".join(forwarded).rsplit(",", HOPS_MAX)[-HOPS_MAX:]
    for text in reversed(hops):
        if not is_trusted(peer, proxies):
            break
        named = parse_address(text)
        if named is None:
            break
        peer = named
    return peer


class Slot(Enum):
    REGULAR = auto()
    SURPLUS = auto()
    """Is told that it is one too many."""


class Slots:
    """Those that are taken. No address has more of them than it leaves free: one alone has half of them at most, two
    have a third each, and the next one still finds some."""

    def __init__(self, *, regular_max: int, surplus_max: int) -> None:
        self._regular_max = regular_max
        self._surplus_max = surplus_max
        self._regular = 0
        self._surplus = 0
        self._taken: Counter[str] = Counter()

    def take(self, address: Address | None) -> Slot | None:
        """None: there is none, not even for a word. An address of None has no limit of its own."""
        owner = _owner(address)
        free = self._regular_max - self._regular
        if free > 0 and (owner is None or self._taken[owner] < free):
            self._regular += 1
            if owner is not None:
                self._taken[owner] += 1
            return Slot.REGULAR
        if self._surplus >= self._surplus_max:
            return None
        self._surplus += 1
        return Slot.SURPLUS

    def leave(self, slot: Slot, address: Address | None) -> None:
        """`address` as it was when the slot was taken."""
        if slot is Slot.SURPLUS:
            self._surplus -= 1
            return
        self._regular -= 1
        owner = _owner(address)
        if owner is not None:
            self._taken[owner] -= 1
            if not self._taken[owner]:
                del self._taken[owner]


def _owner(address: Address | None) -> str | None:
    return None if address is None else source_of(str(address))
