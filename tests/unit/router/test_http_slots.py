"""Who may have a connection, and whom a call comes from. No I/O."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest

from baton.endpoint import parse_address
from baton.errors import InvalidField
from router.config import RouterConfig
from router.http_slots import HOPS_MAX, Slot, Slots, client_address

ONE, TWO, THREE = (IPv4Address(f"127.0.0.{last}") for last in (1, 2, 3))
PROXIES = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def test_nobody_has_more_than_he_leaves_free() -> None:
    """One address gets half of eight, the next one half of the rest, and a third one still finds a place. Who leaves
    makes room."""
    slots = Slots(regular_max=8, surplus_max=9)
    took = [[slots.take(address) for _ in range(5)] for address in (ONE, TWO, THREE)]
    assert [each.count(Slot.REGULAR) for each in took] == [4, 2, 1]
    assert [each.count(Slot.SURPLUS) for each in took] == [1, 3, 4]
    assert slots.take(THREE) is Slot.SURPLUS
    assert slots.take(THREE) is None
    slots.leave(Slot.REGULAR, ONE)
    slots.leave(Slot.SURPLUS, TWO)
    assert slots.take(THREE) is Slot.REGULAR
    assert (slots.take(THREE), slots.take(THREE)) == (Slot.SURPLUS, None)


def test_a_proxy_has_no_share_of_its_own() -> None:
    """It may have all there are, and no more."""
    slots = Slots(regular_max=3, surplus_max=0)
    assert [slots.take(None) for _ in range(4)] == [Slot.REGULAR, Slot.REGULAR, Slot.REGULAR, None]
    slots.leave(Slot.REGULAR, None)
    assert slots.take(ONE) is Slot.REGULAR


def test_who_has_one_ipv6_address_has_many() -> None:
    """Those of one /64 are one owner; the next network is another."""
    slots = Slots(regular_max=4, surplus_max=9)
    inside = [slots.take(IPv6Address(f"2001:db8::{last}")) for last in range(3)]
    assert inside == [Slot.REGULAR, Slot.REGULAR, Slot.SURPLUS]
    assert slots.take(IPv6Address("2001:db8:0:1::1")) is Slot.REGULAR


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        (" 1.2.3.4:80 ", "1.2.3.4"),
        ("[2001:db8::1]:80", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1"),
        ("::ffff:1.2.3.4", "1.2.3.4"),
    ],
)
def test_addresses_as_sockets_and_proxies_write_them(text: str, address: str) -> None:
    """With ports, brackets, a zone, or IPv4 inside IPv6."""
    assert parse_address(text) == ip_address(address)


@pytest.mark.parametrize("text", ["", "unknown", "_hidden", "1.2.3", "1.2.3.4.5", "[", "1.2.3.4/8"])
def test_what_is_no_address(text: str) -> None:
    """As some proxies write in place of one."""
    assert parse_address(text) is None


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("1.2.3.4", ["5.6.7.8"], "1.2.3.4"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["5.6.7.8"], "5.6.7.8"),
        ("10.0.0.1", ["9.9.9.9, 5.6.7.8"], "5.6.7.8"),
        ("10.0.0.1", ["9.9.9.9", "5.6.7.8, 10.0.0.2"], "5.6.7.8"),
        ("10.0.0.1", ["5.6.7.8, unknown"], "10.0.0.1"),
        ("fd00::1", ["5.6.7.8, unknown, 10.0.0.2"], "10.0.0.2"),
        ("10.0.0.1", ["5.6.7.8" + ", 10.0.0.2" * HOPS_MAX], "10.0.0.2"),
    ],
)
def test_whom_a_call_comes_from(peer: str, forwarded: list[str], client: str) -> None:
    """The last address that is not a proxy of ours. What a client claims stands before what proxies wrote, and counts
    for nothing; so does everything where the peer is no proxy."""
    assert client_address(ip_address(peer), forwarded, PROXIES) == ip_address(client)


def test_a_network_that_is_none() -> None:
    """A setting that names an address within a network, or no network at all, is refused when the router starts."""
    with pytest.raises(InvalidField, match="trusted_proxies"):
        RouterConfig(trusted_proxies=("10.0.0.1/8",))
    assert RouterConfig(trusted_proxies=("10.0.0.1",)).trusted_networks() == (ip_network("10.0.0.1/32"),)
