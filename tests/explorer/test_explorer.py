"""Every state of the grant machines under a hostile network and crashes: safe, and alive once faults stop."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from kvtransfer.protocol.receiver import TRANSITIONS, GrantState
from kvtransfer.protocol.writer import WRITER_TRANSITIONS, WriterState
from tests.explorer.bounds import SAME_REQUEST, Bounds, Profile
from tests.explorer.calm import Calm, walk_all
from tests.explorer.mutants import MUTANTS
from tests.explorer.runs import DEFAULT, QUICK
from tests.explorer.search import Counterexample, Found, explore

CALM_STEPS_MAX = 16


@functools.cache
def _explored(name: str) -> tuple[Found, Calm]:
    found = explore(DEFAULT[name])
    calm = walk_all(found)
    print(f"{name}: {found.summary()}; {calm.summary()}")
    # What the second test asks for are the steps that the machines took, not the states.
    found.seen.clear()
    return found, calm


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in DEFAULT])
def test_every_reachable_state_is_safe_and_becomes_free(name: str) -> None:
    """Two handoffs over one block, at most two crashes, control messages lost, repeated and reordered without a bound:
    no state and no step breaks an invariant, and from each state a calm system frees everything."""
    _, calm = _explored(name)
    assert calm.starts > 1000
    assert calm.steps_max <= CALM_STEPS_MAX


@pytest.mark.slow
def test_every_transition_of_both_tables_is_taken() -> None:
    """The exploration is no stroll in a corner: each state is entered and each line of both tables is used."""
    explored = [_explored(name)[0] for name in DEFAULT]
    received = {step for found in explored for step in found.product.receivers.steps_seen}
    written = {step for found in explored for step in found.product.writers.steps_seen}
    receiver_lines = {(state, step, to) for (state, step), ends in TRANSITIONS.items() for to in ends}
    assert receiver_lines == received
    assert {(state, step, to) for (state, step), ends in WRITER_TRANSITIONS.items() for to in ends} == written
    assert {state for state, _, to in received} | {to for _, _, to in received} == set(GrantState)
    assert {state for state, _, to in written} | {to for _, _, to in written} == set(WriterState)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_machine_without_one_of_its_guards_is_found_out(name: str) -> None:
    """Take one guard out of a machine and the explorer shows the way to the damage."""
    mutant = MUTANTS[name]
    with pytest.raises(Counterexample) as caught:
        walk_all(explore(mutant.bounds))
    print(f"{name}: {caught.value}")
    assert mutant.says in caught.value.what
    assert len(caught.value.trace) > 3


@pytest.mark.parametrize("profile", Profile)
def test_leaving_out_dominated_states_loses_nothing(profile: Profile) -> None:
    """One handoff and a crash, with and without the shortcuts of the search: machines and data path go through the same
    states."""
    merged = Bounds(profile=profile, keys=SAME_REQUEST[:1], crashes_max=1)
    short, full = explore(merged), explore(replace(merged, merges=False))
    assert _without_network(short) == _without_network(full)
    assert len(short.seen) < len(full.seen)


def _without_network(found: Found) -> set[tuple[object, ...]]:
    product = found.product
    return {
        (
            product.receivers.by_id[receiver].state if receiver >= 0 else None,
            product.writers.by_id[writer].state,
            product.path.by_id[data],
            product.budgets[budget].asked,
        )
        for receiver, writer, data, budget, _ in found.seen
    }


def test_a_trace_tells_what_happened() -> None:
    """The shortest trace of a machine without seals: ask, grant, post, commit before anything has landed."""
    with pytest.raises(Counterexample) as caught:
        explore(MUTANTS["no seal, shm"].bounds)
    steps = [line.strip() for line in caught.value.trace if not line.strip().startswith(("->", "repeats"))]
    assert [step.split("(")[0] for step in steps] == [
        "writer: HandoffAsked",
        "to receiver: ReserveAsked",
        "to writer: ReserveGranted",
        "writer: WritesPosted",
        "writer: AllPosted",
        "receiver: CommitAsked",
        "!! grant 0000 commits, but of its writes only 0 landed",
    ]
