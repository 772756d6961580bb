"""Two nodes that fetch from each other, each with a full region of one block, which is also what the other one wants.

The product of two explorations, one for each direction. What couples them is the block: a node holds it as a source
only while no grant has it, and has no room for a Reserve while it is a source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from kvtransfer.protocol.receiver import ReserveAsked
from kvtransfer.protocol.writer import HandoffAsked
from tests.explorer.bounds import TWO_REQUESTS, Bounds, Profile
from tests.explorer.product import Product, State

Both = tuple[State, State]
"""The first node receives and the second writes; and the other way round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BothWays:
    product: Product
    """Of one direction; the other one is alike."""
    waits: bool = False
    """A Reserve is not answered while there is no room."""

    @property
    def start(self) -> Both:
        return self.product.start, self.product.start

    def is_source(self, other: State) -> bool:
        """Whether the receiver of one direction holds its block as the writer of the other."""
        return not self.product.writers.by_id[other[1]].over

    def has_grant(self, state: State) -> bool:
        return not self.product.receivers.by_id[state[0]].all_over

    def is_free(self, both: Both) -> bool:
        return not any(self.is_source(state) or self.has_grant(state) for state in both)

    def steps(self, both: Both, *, faults: bool) -> Iterator[Both]:
        for state in self._steps(both[0], both[1], faults=faults):
            yield state, both[1]
        for state in self._steps(both[1], both[0], faults=faults):
            yield both[0], state

    def _steps(self, state: State, other: State, *, faults: bool) -> Iterator[State]:
        """`faults`: those of one direction too: give-ups, failed calls, timers, cancels, broken links."""
        product = self.product
        receiver, writer = product.receivers.by_id[state[0]], product.writers.by_id[state[1]]
        gives_up = {("writer", event) for event in writer.local} | {("receiver", event) for event in receiver.timers}
        for label, to in product.steps(state):
            if not faults and label in gives_up:
                continue
            if label[0] == "writer" and isinstance(product.messages.event(label[1]), HandoffAsked):
                if self.has_grant(other):
                    continue  # its block is not there to be sent
            elif label[0] == "to receiver" and self.is_source(other):
                event = product.messages.event(label[1])
                if isinstance(event, ReserveAsked):
                    if not self.waits:
                        refused = product.messages.intern(replace(event, room=False))
                        yield product.receiver_does(state, receiver, writer, refused)
                    continue
            yield to

    def walk(self, *, faults: bool) -> dict[Both, list[Both]]:
        """Every state that is reached, with those that it is reached from."""
        before: dict[Both, list[Both]] = {self.start: []}
        frontier = [self.start]
        while frontier:
            both = frontier.pop()
            for to in self.steps(both, faults=faults):
                if to not in before:
                    before[to] = []
                    frontier.append(to)
                before[to].append(both)
        return before

    def stuck(self, before: dict[Both, list[Both]]) -> set[Both]:
        """States from which no way leads to one where all is free."""
        leads = {both for both in before if self.is_free(both)}
        frontier = list(leads)
        while frontier:
            for both in before[frontier.pop()]:
                if both not in leads:
                    leads.add(both)
                    frontier.append(both)
        return set(before) - leads


def both_ways(profile: Profile, *, faults: bool, waits: bool = False) -> BothWays:
    bounds = Bounds(
        profile=profile,
        keys=TWO_REQUESTS[:1],
        crashes_max=0,
        fetches=True,
        links_break=faults,
        lets_go_of_requests=faults,
    )
    return BothWays(product=Product(bounds), waits=waits)


@pytest.mark.parametrize("profile", [Profile.SHM, Profile.CHANNEL])
def test_two_nodes_that_fetch_from_each_other_never_wait_for_each_other(profile: Profile) -> None:
    """Nobody gives up, no timer fires, and what is under way comes: from each state a way leads to one where all is
    free. There are states where both hold what the other wants. (By RDMA a link may fail to be made.)
    """
    both = both_ways(profile, faults=False)
    before = both.walk(faults=False)
    assert any(both.is_source(one) and both.is_source(other) for one, other in before)
    assert both.stuck(before) == set()


def test_a_reserve_that_waits_for_room_is_found_out() -> None:
    """A receiver answers only once it has room: both hold what the other waits for."""
    both = both_ways(Profile.SHM, faults=False, waits=True)
    stuck = both.stuck(both.walk(faults=False))
    assert any(both.is_source(one) and both.is_source(other) for one, other in stuck)


@pytest.mark.parametrize("profile", Profile)
def test_a_source_is_never_written_to(profile: Profile) -> None:
    """With give-ups, failed calls, timers, cancels and broken links too: no block is a source and somebody's grant."""
    both = both_ways(profile, faults=True)
    before = both.walk(faults=True)
    print(f"{profile.value}: {len(before):,} states, {sum(map(len, before.values())):,} transitions")
    for one, other in before:
        for state, opposite in ((one, other), (other, one)):
            owner = both.product.receivers.by_id[state[0]].owner
            assert owner is None or not both.is_source(opposite), (one, other)
    assert both.stuck(before) == set()
