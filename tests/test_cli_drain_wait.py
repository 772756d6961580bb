"""How `baton drain --wait` looks at a node that does not always answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from batonpb import node_pb2

from baton.errors import BatonError, Reason
from cli.drain import LOOKS_UNANSWERED_MAX, wait_empty

BUSY = node_pb2.NodeStatus(requests=2)
EMPTY = node_pb2.NodeStatus(safe_to_delete=True)


def waited(
    looks: Iterable[node_pb2.NodeStatus | Reason], *, wait_s_max: float = 60.0
) -> tuple[node_pb2.NodeStatus, int]:
    """What was seen last, of these looks in turn, and how many were left."""
    left = list(looks)

    async def look() -> node_pb2.NodeStatus:
        seen = left.pop(0)
        if isinstance(seen, Reason):
            raise BatonError(seen, "The node says nothing.")
        return seen

    return asyncio.run(wait_empty(BUSY, look, wait_s_max=wait_s_max, poll_ms=0)), len(left)


def test_looks_may_fail_now_and_then() -> None:
    """Nearly as often as is allowed, an answer between them, and so again: the node is empty in the end."""
    some = [Reason.PEER_UNREACHABLE, Reason.DEADLINE, Reason.TOO_MANY_CALLS] * (LOOKS_UNANSWERED_MAX // 3)
    assert waited([*some, BUSY, *some, BUSY, EMPTY]) == (EMPTY, 0)


def test_a_node_that_never_answers_is_an_error() -> None:
    """After so many looks in a row, no more."""
    with pytest.raises(BatonError) as caught:
        waited([BUSY, *[Reason.PEER_UNREACHABLE] * LOOKS_UNANSWERED_MAX])
    assert caught.value.reason is Reason.PEER_UNREACHABLE


@pytest.mark.parametrize("reason", [Reason.INCARNATION_MISMATCH, Reason.BAD_LIFECYCLE])
def test_another_process_or_an_undrain_is_an_error_at_once(reason: Reason) -> None:
    """It would be waited for in vain."""
    with pytest.raises(BatonError) as caught:
        waited([reason])
    assert caught.value.reason is reason


def test_what_is_still_there_when_the_time_is_over() -> None:
    """The last look that was answered is told."""
    status, _ = waited([Reason.PEER_UNREACHABLE] * 3, wait_s_max=0.0)
    assert status == BUSY
