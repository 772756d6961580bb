"""What a node knows of the others while the directory is lost, and when it is found again."""

from __future__ import annotations

import pytest

from baton.errors import BatonError, Reason
from baton.ids import NodeName
from tests.support.membership_doubles import ManualClock, ScriptedDirectory, known, make, record, run


def test_a_lost_directory_takes_nobody_away() -> None:
    """The directory is lost: the nodes stay, marked stale. It comes back empty and hears of one of them: both stay.
    The other one is dropped when it has not been heard of for its time."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        membership = make(directory, clock, ttl_ms=3000, heartbeat_ms=1000, backoff_ms_max=1000)
        await membership.start()
        directory.show(record("a"), record("b"))
        await membership.wait_until(lambda: known(membership) == ["a", "b"])
        directory.lose()
        await membership.wait_until(lambda: membership.stale)
        assert known(membership) == ["a", "b"]
        await clock.asleep(2)
        directory.show()
        directory.show(record("a"), record("c"))
        clock.advance(1.0)
        await membership.wait_until(lambda: not membership.stale)
        await membership.wait_until(lambda: known(membership) == ["a", "b", "c"])
        await clock.asleep(1)
        clock.advance(2.9)
        await clock.asleep(1)
        assert known(membership) == ["a", "b", "c"]
        clock.advance(1.0)
        await membership.wait_until(lambda: known(membership) == ["a", "c"])
        directory.show(record("c"))
        await membership.wait_until(lambda: known(membership) == ["c"])
        await membership.stop()

    run(scene())


def test_what_is_known_is_good_for_a_time() -> None:
    """New work is given by the last known records for `stale_ms_max` after the loss, then not, until it is back."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        membership = make(directory, clock, stale_ms_max=60_000)
        await membership.start()
        directory.show(record("a"))
        await membership.wait_until(lambda: not membership.stale)
        clock.advance(100.0)
        membership.check_known()
        directory.lose()
        await membership.wait_until(lambda: membership.stale)
        clock.advance(60.0)
        membership.check_known()
        clock.advance(0.1)
        with pytest.raises(BatonError) as caught:
            membership.check_known()
        assert caught.value.reason is Reason.DIRECTORY_LOST
        assert known(membership) == ["a"]
        directory.show(record("a"))
        await membership.wait_until(lambda: not membership.stale)
        membership.check_known()
        await membership.stop()

    run(scene())


def test_a_node_that_left_a_directory_found_again_is_not_kept() -> None:
    """Two nodes are known when the directory is lost and comes back empty; one of them then says goodbye."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        membership = make(directory, clock)
        await membership.start()
        directory.show(record("a"), record("b"))
        directory.lose()
        await membership.wait_until(lambda: membership.stale and known(membership) == ["a", "b"])
        await clock.asleep(2)
        clock.advance(0.05)
        directory.show(left=frozenset({NodeName("b")}))
        await membership.wait_until(lambda: not membership.stale)
        assert known(membership) == ["a"]
        await membership.stop()

    run(scene())


def test_a_directory_that_is_lost_again_at_once() -> None:
    """It comes back empty, is lost again before it has heard of anybody, and comes back empty long after: the nodes
    have their time from then on."""

    async def scene() -> None:
        directory, clock = ScriptedDirectory(), ManualClock()
        membership = make(directory, clock, ttl_ms=3000, heartbeat_ms=1000, backoff_ms_max=1000)
        await membership.start()
        directory.show(record("a"), record("b"))
        await membership.wait_until(lambda: known(membership) == ["a", "b"])
        for _ in range(2):
            directory.lose()
            await membership.wait_until(lambda: membership.stale)
            await clock.asleep(2)
            directory.show()
            clock.advance(60.0)
            await membership.wait_until(lambda: not membership.stale)
        await clock.asleep(1)
        clock.advance(2.9)
        await clock.asleep(1)
        assert known(membership) == ["a", "b"]
        clock.advance(1.0)
        await membership.wait_until(lambda: known(membership) == [])
        await membership.stop()

    run(scene())


async def flapping(*, gone_s: float, there_s: float) -> list[list[str]]:
    """A directory that knows of two nodes is lost for so long and then there for so long, twelve times, and lists one
    of them from the first loss on. Who is known each time when it is back."""
    directory, clock = ScriptedDirectory(), ManualClock()
    membership = make(directory, clock, ttl_ms=3_000, heartbeat_ms=1_000, backoff_ms_max=1_000, stale_ms_max=10_000)
    await membership.start()
    directory.show(record("a"), record("b"))
    await membership.wait_until(lambda: known(membership) == ["a", "b"])
    seen = []
    for _ in range(12):
        directory.lose()
        await membership.wait_until(lambda: membership.stale)
        await clock.asleep(2)
        directory.show(record("a"))
        clock.advance(gone_s)
        await membership.wait_until(lambda: not membership.stale)
        seen.append(known(membership))
        if there_s:
            await clock.asleep(1)
            clock.advance(there_s)
            await clock.asleep(1)
    await membership.stop()
    return seen


def test_a_directory_that_flaps_does_not_keep_the_dead_for_ever() -> None:
    """It is lost and found again each second, faster than any node runs out, and lists one of two each time: the other
    one is kept for `stale_ms_max` from the first time on, not for as long as that goes on."""
    assert run(flapping(gone_s=1.0, there_s=0.0)) == [["a", "b"]] * 10 + [["a"]] * 2


def test_a_directory_that_is_gone_for_long_each_time_does_not_keep_the_dead_for_ever() -> None:
    """It is lost for longer than any node takes to run out, and found for too short a time for that, again and again:
    the dead one is kept until it has been there for `stale_ms_max`, its absences not counted."""
    assert run(flapping(gone_s=60.0, there_s=1.0)) == [["a", "b"]] * 10 + [["a"]] * 2
