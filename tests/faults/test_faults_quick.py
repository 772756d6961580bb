"""Some of the cases of `make faults`, so that `make test-all` plays them too."""

from __future__ import annotations

import asyncio
from typing import Final

import pytest

from tests.faults import links
from tests.faults.groups import GROUPS
from tests.faults.outcome import Outcome
from tests.faults.points import SIGNAL_POINTS, Side
from tests.faults.proxy import Spoil

QUICK: Final = (
    "kill-decode-at-decoding",
    "kill-prefill-at-layer",
    "data-noise-at-layer",
    "dark-router-decode-at-layer",
    "kill-router-at-decoding",
    "fetch-kill-owner-at-fetch-layer",
    "rolling-restart",
    "whole-kill-decode-at-decoding",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_lost_wrong_or_leaked(name: str) -> None:
    """A process or a link is struck at an exact point of one request's life while eight others run, or all processes
    are ended and started again, one after the other: all clients have their answers, and nothing is left anywhere."""
    ((group, case),) = [(group, case) for group in GROUPS for case in group.cases if case.name == name]
    outcomes: list[Outcome] = []
    asyncio.run(group.run([case], outcomes.append))
    (outcome,) = outcomes
    assert not outcome.bad, outcome.problems
    assert outcome.requests > 9, outcome


@pytest.mark.slow
def test_a_wrong_answer_is_seen() -> None:
    """The reckoning itself: one byte of a record is another one when it arrives, which nothing on the way notices (the
    proxy has made tcp's checksum). The client of that request has other tokens, and the case is a bad one."""
    (group,) = [group for group in GROUPS if group.cases == links.DATA_CASES]
    outcomes: list[Outcome] = []
    asyncio.run(group.run([links.DataCase(spoil=Spoil.FLIP)], outcomes.append))
    (outcome,) = outcomes
    assert outcome.bad
    assert (outcome.wrong > 0, outcome.lost, outcome.leaked) == (True, 0, 0), outcome


def test_names_are_unique_and_cover_all_roles_and_points() -> None:
    """A case can be named on the command line, and every role is killed and stopped at every point of a handoff."""
    names = [case.name for group in GROUPS for case in group.cases]
    assert len(set(names)) == len(names)
    roles, blows = set(Side) - {Side.CLIENT, Side.OWNER, Side.RECEIVER}, ("kill", "stop")
    wanted = {f"{blow}-{side.value}-at-{p.value}" for blow in blows for side in roles for p in SIGNAL_POINTS}
    assert wanted <= set(names)
