"""Each attack against a real router that answers twenty others meanwhile: each of them gets exactly its tokens, and the
router's event loop is never kept from turning for HANG_MS."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import pytest

from tests.support.attack import HANG_MS, Front, front_door, nobody_notices
from tests.support.attacks import ATTACKS, AttackerProcess

QUICK = (
    "body: lists",
    "body: few_numbers",
    "body: escapes",
    "body: special_messages",
    "message: empty chat",
    "message: ids",
    "one byte chunks",
    "many headers",
    "pipelined calls",
    "internal methods",
    "cancelled calls",
)
IN_GRPC = frozenset(name for name in ATTACKS if name.startswith("frames: "))
"""Floods of HTTP/2 frames that gRPC takes in by itself, and calls that it makes of them: no bound of ours is on that.
Others wait, for seconds at worst, and get all of their tokens."""
TOGETHER = (
    ("body: few_lists", "one byte chunks", "health watches", "cancelled calls"),
    ("body: surrogates", "message: stops", "surplus connections", "slow readers"),
    ("body: words", "refused calls", "slow heads", "surplus grpc connections"),
)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with front_door(tokenizer=True) as front:
        yield front


@pytest.fixture(scope="module")
def attackers(front: Front) -> Iterator[list[AttackerProcess]]:
    """As many as play together at most. They have started by the first attack."""
    made = [front.run(AttackerProcess.start(front.target)) for _ in range(4)]
    yield made
    for each in made:
        front.run(each.close())


def play(front: Front, attackers: list[AttackerProcess], *names: str) -> list[list[str]]:
    """The answers to each."""

    async def attack() -> list[list[str]]:
        return await asyncio.gather(*(each.play(name) for each, name in zip(attackers, names, strict=False)))

    hold_ms_max = math.inf if IN_GRPC & set(names) else HANG_MS
    return front.run(nobody_notices(front, attack, hold_ms_max=hold_ms_max))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ATTACKS]
)
def test_others_are_answered_during(front: Front, attackers: list[AttackerProcess], name: str) -> None:
    """One attack."""
    (answers,) = play(front, attackers, name)
    assert answers == ["200"] or name != "metrics scrapes"


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_others_are_answered_during_several(
    front: Front, attackers: list[AttackerProcess], names: tuple[str, ...]
) -> None:
    """Four attacks at once, each by a process of its own."""
    play(front, attackers, *names)
