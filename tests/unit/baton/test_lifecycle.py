"""The life of a node as a table, and the signals that end it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, Reason
from baton.lifecycle import HISTORY_MAX, TRANSITIONS, Lifecycle, LifecycleEvent, NodeLifecycle

HANG_S = 30.0


def test_a_whole_life_is_told() -> None:
    """Start, cordon, uncordon, drain, empty, stop; then the story, and readiness only where requests may come."""
    node = NodeLifecycle(now_s=100.0)
    seen = [(node.state, node.takes_requests)]
    for at_s, event, why in (
        (102.1, LifecycleEvent.STARTED, "weights loaded"),
        (103.0, LifecycleEvent.CORDON, "operator"),
        (104.0, LifecycleEvent.UNCORDON, ""),
        (105.0, LifecycleEvent.DRAIN, "SIGTERM"),
        (109.5, LifecycleEvent.EMPTY, ""),
        (110.0, LifecycleEvent.STOP, ""),
    ):
        seen.append((node.handle(event, now_s=at_s, why=why), node.takes_requests))
    assert seen == [
        (Lifecycle.STARTING, False),
        (Lifecycle.READY, True),
        (Lifecycle.CORDONED, False),
        (Lifecycle.READY, True),
        (Lifecycle.DRAINING, False),
        (Lifecycle.DRAINED, False),
        (Lifecycle.STOPPED, False),
    ]
    assert node.story() == (
        "STARTING, READY after 2.1 s (weights loaded), CORDONED after 3.0 s (operator), READY after 4.0 s, "
        "DRAINING after 5.0 s (SIGTERM), DRAINED after 9.5 s, STOPPED after 10.0 s"
    )


def test_a_router_leaves_in_two_steps() -> None:
    """First it is not ready and takes requests, then it takes none; an undrain leads back from either."""
    node = NodeLifecycle(now_s=0.0)
    seen = []
    for event in (
        LifecycleEvent.STARTED,
        LifecycleEvent.LEAVE,
        LifecycleEvent.LEAVE,
        LifecycleEvent.UNDRAIN,
        LifecycleEvent.LEAVE,
        LifecycleEvent.DRAIN,
        LifecycleEvent.UNDRAIN,
    ):
        node.handle(event, now_s=0.0)
        seen.append((node.state, node.ready, node.takes_requests))
    ready, lame_duck = (Lifecycle.READY, True, True), (Lifecycle.LAME_DUCK, False, True)
    draining = (Lifecycle.DRAINING, False, False)
    assert seen == [ready, lame_duck, lame_duck, ready, lame_duck, draining, ready]


def test_what_cannot_happen_is_refused_with_the_story() -> None:
    """A draining node cannot be uncordoned: nothing changes, and the error says where it is and how it got there."""
    node = NodeLifecycle(now_s=0.0)
    node.handle(LifecycleEvent.STARTED, now_s=1.0)
    node.handle(LifecycleEvent.DRAIN, now_s=2.0, why="SIGTERM")
    with pytest.raises(BatonError) as caught:
        node.handle(LifecycleEvent.UNCORDON, now_s=3.0)
    assert caught.value.reason is Reason.BAD_LIFECYCLE
    assert caught.value.message == (
        "Cannot uncordon: the node is DRAINING, where only drain, undrain, empty, stop can follow. "
        "So far: STARTING, READY after 1.0 s, DRAINING after 2.0 s (SIGTERM)."
    )
    assert node.state is Lifecycle.DRAINING


def test_a_repeated_order_changes_nothing() -> None:
    """`drain` twice, from two operators: one entry in the story."""
    node = NodeLifecycle(now_s=0.0)
    node.handle(LifecycleEvent.STARTED, now_s=0.0)
    node.handle(LifecycleEvent.DRAIN, now_s=1.0, why="first")
    assert node.handle(LifecycleEvent.DRAIN, now_s=2.0, why="second") is Lifecycle.DRAINING
    assert node.story().endswith("DRAINING after 1.0 s (first)")


@settings(deadline=None)
@given(st.lists(st.sampled_from(LifecycleEvent), max_size=60))
def test_no_order_of_events_leaves_the_table(events: list[LifecycleEvent]) -> None:
    """Whatever comes: from LAME_DUCK only undrain leads back to being ready, and from DRAINING to taking requests;
    STOPPED is final, the history stays bounded."""
    node = NodeLifecycle(now_s=0.0)
    leaving = refusing = False
    for event in events:
        before = node.state
        try:
            after = node.handle(event, now_s=0.0)
        except BatonError:
            assert (before, event) not in TRANSITIONS
            assert node.state is before
        else:
            assert after is node.state is TRANSITIONS[before, event]
            assert before is not Lifecycle.STOPPED or after is Lifecycle.STOPPED
            if event is LifecycleEvent.UNDRAIN:
                leaving = refusing = False
        refusing = refusing or node.state in (Lifecycle.DRAINING, Lifecycle.DRAINED, Lifecycle.STOPPED)
        leaving = leaving or refusing or node.state is Lifecycle.LAME_DUCK
        assert not (leaving and node.ready)
        assert not (refusing and node.takes_requests)
    assert len(re.findall("|".join(Lifecycle.__members__), node.story())) <= HISTORY_MAX


def test_every_state_can_end() -> None:
    """From each state there is a way to STOPPED."""
    reaches = {Lifecycle.STOPPED}
    for _ in Lifecycle:
        reaches |= {state for (state, _), after in TRANSITIONS.items() if after in reaches}
    assert reaches == set(Lifecycle)


CHILD = """
import asyncio, sys, time
from baton.lifecycle import install_signal_handlers

async def main():
    asked = asyncio.Event()
    restore = install_signal_handlers(asyncio.get_running_loop(), lambda s: (print(s.name, flush=True), asked.set()))
    print("installed", flush=True)
    await asked.wait()
    if sys.argv[1] == "obey":
        restore()
        return
    if sys.argv[1] == "busy":
        while True:  # the loop never runs again
            pass
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("behavior", "signals", "code"),
    [
        ("obey", [signal.SIGINT], 0),
        ("obey", [signal.SIGTERM], 0),
        ("hang", [signal.SIGINT, signal.SIGINT], 130),
        ("hang", [signal.SIGINT, signal.SIGTERM], 143),
        ("busy", [signal.SIGTERM, signal.SIGTERM], 143),
    ],
)
def test_the_first_signal_asks_and_the_second_ends(behavior: str, signals: list[signal.Signals], code: int) -> None:
    """A child that stops when asked, one that hangs in its loop, one that keeps its loop from running."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, behavior], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "installed\n"
        child.send_signal(signals[0])
        assert child.stdout.readline() == signals[0].name + "\n"
        for each in signals[1:]:
            child.send_signal(each)
        assert child.wait(timeout=HANG_S) == code
    finally:
        child.kill()
        child.communicate()
