"""Who may have how many connections. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

HOPS_MAX: Final = 16
"""Proxies that one call may have passed: further addresses are not looked at."""
IPV6_SITE_BITS: Final = 64
"""Who has one IPv6 address has all that differ in their last 64 bits."""

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def is_trusted(address: Address, proxies: Sequence[Network]) -> bool:
    return any(address in network for network in proxies)


def parse_address(text: str) -> Address | None:
    """Also with a port, and in brackets, as proxies write it. None: this is no address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


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
        self._taken: Counter[Address | int] = Counter()

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


def _owner(address: Address | None) -> Address | int | None:
    return int(address) >> IPV6_SITE_BITS if isinstance(address, IPv6Address) else address
