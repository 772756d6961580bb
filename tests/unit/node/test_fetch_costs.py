"""What fetches are believed to cost: of owners that were measured, lately and long ago, and of others."""

from __future__ import annotations

import pytest

from baton.ids import Incarnation
from baton.wire import FetchLoad, Owner, PairLoad
from node.fetch_costs import (
    BYTE_S,
    CONNECT_S,
    COST_AGE_MS_MAX,
    COST_HALF_LIFE_MS,
    FIXED_S,
    OWNERS_MAX,
    PAIRS_TOLD_MAX,
    SIGN_S,
    FetchCosts,
)

AGE_S = COST_AGE_MS_MAX / 1000
NBYTES = 100_000_000
SLOW_S = 10.0
"""For so many bytes: 10 MB/s."""


def owner(number: int) -> Owner:
    return Owner(name=f"prefill-{number}", endpoint="127.0.0.1:1", incarnation=Incarnation(number), blocks=1)


def measured(*numbers: int, seconds: float = SLOW_S, now_s: float = 0.0) -> FetchCosts:
    costs = FetchCosts()
    for number in numbers:
        costs.measured(owner(number), NBYTES, seconds, now_s)
    return costs


def test_before_the_first_fetch_all_are_believed_to_be_fast() -> None:
    costs = FetchCosts()
    assert costs.cost(owner(1), 5.0).of(NBYTES) == pytest.approx(FIXED_S + BYTE_S * NBYTES, rel=0.1)
    assert costs.load(5.0, 1.0) == FetchLoad()


def test_an_owner_that_was_never_measured_is_as_the_others_are() -> None:
    """The network is slow. Nobody is tried again for each owner in turn."""
    costs = measured(1, 2, 3)
    assert costs.cost(owner(4), 1.0).of(NBYTES) == pytest.approx(SLOW_S, rel=0.1)


def test_an_owner_that_was_slow_once_is_as_the_others_after_a_while() -> None:
    """One of many owners took long. It is not asked for a while, and then believed to be as fast as the rest."""
    costs = measured(*[1] * 50, seconds=0.1)
    costs.measured(owner(2), NBYTES, SLOW_S, 0.0)
    assert costs.cost(owner(2), AGE_S / 2).of(NBYTES) == pytest.approx(SLOW_S, rel=0.1)
    for _ in range(50):
        costs.measured(owner(1), NBYTES, 0.1, AGE_S)
    assert costs.cost(owner(2), AGE_S + 1).of(NBYTES) < 0.2


def test_a_network_that_is_slow_stays_so_for_long() -> None:
    """Nothing was measured since: what is believed of all halves every ten minutes, and no sooner."""
    costs, half_s = measured(1), COST_HALF_LIFE_MS / 1000
    asked = ((1, 0.0), (2, AGE_S), (1, AGE_S), (3, AGE_S + half_s))
    found = [costs.cost(owner(n), at_s).of(NBYTES) for n, at_s in asked]
    assert found == pytest.approx([SLOW_S, SLOW_S, SLOW_S, SLOW_S / 2], rel=0.1)
    assert costs.cost(owner(4), AGE_S + 20 * half_s).of(NBYTES) == pytest.approx(FIXED_S + BYTE_S * NBYTES, rel=0.1)


def test_one_measurement_after_a_long_time_counts_for_all() -> None:
    """It has become a hundred times as fast since."""
    costs = measured(*[1] * 20)
    later_s = AGE_S + COST_HALF_LIFE_MS / 1000
    costs.measured(owner(2), NBYTES, 0.1, later_s)
    assert all(costs.cost(owner(n), later_s).of(NBYTES) < SLOW_S / 20 for n in (1, 2, 3))


def test_what_a_report_says() -> None:
    """The cost of all, and of those owners that were measured lately, the last used first, a few of them."""
    costs = measured(1)
    later_s = AGE_S
    for number in range(2, 2 + PAIRS_TOLD_MAX + 3):
        costs.measured(owner(number), NBYTES, 0.1 * number, later_s)
    told = costs.load(later_s, 1_000.0)
    assert [pair.owner for pair in told.pairs] == list(range(1 + PAIRS_TOLD_MAX + 3, 4, -1))
    first = costs.cost(owner(told.pairs[0].owner), later_s)
    assert told.pairs[0] == PairLoad(owner=12, fixed_s=first.fixed_s, token_s=first.unit_s * 1_000.0)
    assert costs.load(later_s + AGE_S, 1_000.0).pairs == ()
    assert costs.load(later_s + AGE_S, 1_000.0) == costs.load(later_s + 1.9 * AGE_S, 1_000.0)


def test_connecting_is_learned_apart() -> None:
    costs = FetchCosts()
    assert costs.connect_s == CONNECT_S
    for _ in range(50):
        costs.connected(0.2)
    assert costs.connect_s == pytest.approx(0.2, rel=0.01)
    assert costs.total.cost is None


def test_the_first_sign_is_learned_and_forgotten() -> None:
    """Of each owner at work; another one is believed to be as they are together. What was measured more than a minute
    ago says nothing."""
    costs = FetchCosts()
    assert costs.sign_s(owner(1), 0.0) == SIGN_S
    for _ in range(50):
        costs.signed(owner(1), 0.004, 1.0)
    assert costs.sign_s(owner(1), 1.0 + AGE_S / 2) == pytest.approx(0.004, rel=0.05)
    assert costs.sign_s(owner(2), 1.0) == pytest.approx(0.004, rel=0.05)
    for _ in range(50):
        costs.signed(owner(2), 0.1, 1.0)
    assert costs.sign_s(owner(1), 1.0) == pytest.approx(0.004, rel=0.05)
    assert costs.sign_s(owner(2), 1.0) == pytest.approx(0.1, rel=0.05)
    assert [costs.sign_s(owner(n), 1.0 + AGE_S) for n in (1, 2)] == [SIGN_S, SIGN_S]


def test_an_owner_that_is_always_silent_is_not_asked_any_more() -> None:
    """Each time it is given up after 30 ms, which is what a prompt may lose: it is expected to take longer than that
    after some, until that is forgotten."""
    costs, limit_s, asked = FetchCosts(), 0.03, 0
    while costs.sign_s(owner(1), 1.0) < limit_s:
        costs.silent(owner(1), limit_s, 1.0)
        asked += 1
        assert asked < 10
    assert costs.sign_s(owner(1), 1.0 + AGE_S) == SIGN_S


def test_an_owner_that_is_silent_says_nothing_of_others() -> None:
    costs = FetchCosts()
    costs.signed(owner(1), SIGN_S, 1.0)
    costs.silent(owner(2), SIGN_S / 2 + 0.4, 1.0)
    assert [costs.sign_s(owner(n), 1.0) for n in (1, 2, 3)] == pytest.approx([SIGN_S, SIGN_S + 0.1, SIGN_S])


def test_figures_of_so_many_owners_are_kept() -> None:
    costs = measured(*range(OWNERS_MAX + 5))
    assert len(costs.owners) == OWNERS_MAX and 4 not in costs.owners
