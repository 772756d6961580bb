"""The harness of the attacks finds what it is to find: loops that are kept from turning, and wrong answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.event_loop import COLLECTED_AT
from tests.support.attack import HANG_MS, Front, bystanders, front_door


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with front_door() as front:
        yield front


def test_without_an_attack_nothing_is_held(front: Front) -> None:
    """Bystanders alone: exact answers over gRPC and HTTP, and no turn of the router's loop that
    only an attack makes so long."""

    async def scenario() -> None:
        async with bystanders(front) as others:
            await others.until_answers(1)
        others.check()
        assert {each.over_http for each in others.each} == {False, True}
        assert all(each.gaps_s and each.waits_s for each in others.each)
        assert others.longest_hold_ms() < HANG_MS, others.holds

    front.run(scenario())


def test_the_collector_leaves_alone_what_was_there_at_the_start(front: Front) -> None:
    """In every process, or each full collection would hold its loop for 60 ms. It looks at the rest rarely."""

    async def scenario() -> None:
        for name in front.cluster.names:
            holds = await front.holds(name)
            found = await holds.read()
            assert found.frozen > 10_000
            assert tuple(found.collected_at) == COLLECTED_AT
            await holds.close()

    front.run(scenario())


@pytest.mark.parametrize("in_thread", [False, True], ids=["by its own thread", "by another thread"])
def test_a_hold_is_seen(front: Front, in_thread: bool) -> None:
    """The router's own thread computes for HOLD_S in one turn, or another thread of it keeps the interpreter's lock
    as long: it is seen to be far longer than an attack may make it, and the answers are as exact as ever."""

    async def scenario() -> None:
        holds = await front.holds()
        async with bystanders(front, streams=4) as others:
            await holds.hold(in_thread=in_thread)
        await holds.close()
        others.check()
        assert others.longest_hold_ms() > HANG_MS, others.holds

    front.run(scenario())


def test_a_wrong_token_is_seen(front: Front) -> None:
    """A bystander that expects another answer than it gets fails the check."""

    async def scenario() -> None:
        async with bystanders(front, streams=4) as others:
            others.each[1].expected = others.each[2].expected
        with pytest.raises(AssertionError, match=r"bystander 1 over gRPC.*wrong tokens"):
            others.check()

    front.run(scenario())
