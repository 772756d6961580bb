"""Shares of addresses and keys in the bytes of long texts, and whose turn it is."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest

from baton.errors import BatonError, Reason
from router.byte_shares import ByteShares, TextOwner
from router.owner_turns import OwnerTurns

MAX = 1_000


def address(name: str) -> TextOwner:
    return TextOwner(address=name)


class Holders:
    """Each of them holds what it asked for until the test ends."""

    def __init__(self, stack: ExitStack) -> None:
        self.shares = ByteShares(MAX, lambda: 0.0)
        self._stack = stack

    def most(self, owner: TextOwner) -> int:
        """Takes bytes one by one until it is refused; how many it got."""
        hold, got = self._stack.enter_context(self.shares.holding(owner)), 0
        with suppress(BatonError):
            for got in range(MAX + 1):
                hold(got + 1)
        return got


def test_nobody_holds_more_than_three_times_what_is_left() -> None:
    """One alone gets three quarters, the next three quarters of the rest, and each further one still something."""
    with ExitStack() as stack:
        holders = Holders(stack)
        assert [holders.most(address(name)) for name in "abcd"] == [750, 187, 47, 12]
        assert holders.most(address("a")) == 0
    assert [holders.shares._free, dict(holders.shares._held)] == [MAX, {}]


def test_a_key_has_a_share_whatever_its_addresses_and_an_address_whatever_its_keys() -> None:
    with ExitStack() as stack:
        holders = Holders(stack)
        assert holders.most(TextOwner(address="a", key="k")) == 750
        for name in ("b", "c"):
            assert holders.most(TextOwner(address=name, key="k")) == 0
        assert holders.most(TextOwner(address="a", key="other")) == 0
        assert holders.most(TextOwner(address="b", key="other")) == 187


def test_a_proxy_of_ours_without_a_key_has_no_share() -> None:
    """It may hold all."""
    with ExitStack() as stack:
        assert Holders(stack).most(TextOwner()) == MAX


def test_a_name_is_a_key_or_an_address() -> None:
    """A key may be called as an address."""
    with ExitStack() as stack:
        holders = Holders(stack)
        assert holders.most(address("10.0.0.1")) == 750
        assert holders.most(TextOwner(key="10.0.0.1")) == 187


def test_turns() -> None:
    """Each owner in turn, its own in order. One that comes back is behind those who wait."""
    turns: OwnerTurns[str] = OwnerTurns()
    for what in ("a1", "a2", "a3", "b1", "b2", "c1"):
        turns.add(what[0], what)
    taken = [turns.take() for _ in range(2)]
    turns.leave("a", "a2")
    turns.leave("a", "a2")
    turns.add("d", "d1")
    while (next_one := turns.take()) is not None:
        taken.append(next_one)
    assert taken == ["a1", "b1", "c1", "a3", "b2", "d1"]


def test_an_owner_whose_last_one_has_left_has_no_turn() -> None:
    turns: OwnerTurns[str] = OwnerTurns()
    turns.add("a", "a1")
    turns.leave("a", "a1")
    assert turns.take() is None


def test_a_text_that_grows_counts_once() -> None:
    """What it held before is not counted again, and a refusal changes nothing."""
    shares = ByteShares(MAX, lambda: 1.0)
    with shares.holding(address("a")) as hold:
        hold(400)
        hold(750)
        with pytest.raises(BatonError) as caught:
            hold(751)
        assert (caught.value.reason, caught.value.retry_after_ms) == (Reason.TOO_MANY_CALLS, 2_000)
        assert shares._free == 250
    assert shares._free == MAX
