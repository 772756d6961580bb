"""prefill_node.decode_nodes: what is told where several decode nodes have refused a request."""

from __future__ import annotations

import pytest

from baton.errors import BatonError, Reason
from prefill_node.decode_nodes import most_hopeful


def refusal(reason: Reason, retry_after_ms: int | None = None) -> BatonError:
    return BatonError(reason, "A test.", retry_after_ms=retry_after_ms)


TOO_LONG, OUT_OF_REACH = refusal(Reason.PROMPT_TOO_LONG), refusal(Reason.PEER_UNREACHABLE)
FENCING, INCOMPATIBLE = refusal(Reason.PAIR_FENCING), refusal(Reason.INCOMPATIBLE_NODE)
FULL_LONG, FULL_SHORT = refusal(Reason.DECODE_FULL, 900), refusal(Reason.DECODE_FULL, 200)


@pytest.mark.parametrize(
    ("refusals", "reported"),
    [
        ([OUT_OF_REACH, TOO_LONG], OUT_OF_REACH),
        ([TOO_LONG, OUT_OF_REACH], OUT_OF_REACH),
        ([FENCING, TOO_LONG, TOO_LONG], FENCING),
        ([OUT_OF_REACH, FENCING, TOO_LONG], FENCING),
        ([FULL_LONG, TOO_LONG], FULL_LONG),
        ([TOO_LONG, TOO_LONG], TOO_LONG),
        ([TOO_LONG], TOO_LONG),
    ],
)
def test_too_long_is_told_only_where_every_node_has_said_so(refusals: list[BatonError], reported: BatonError) -> None:
    """One that did not answer, or takes none now, may hold it: the router comes again instead of giving the client a
    final word."""
    assert most_hopeful(refusals) is reported


def test_of_full_nodes_the_one_that_expects_room_first() -> None:
    """Before everything else that was answered, whatever the order."""
    assert most_hopeful([OUT_OF_REACH, FULL_LONG, FULL_SHORT, INCOMPATIBLE]) is FULL_SHORT
    assert most_hopeful([FULL_SHORT, TOO_LONG, FULL_LONG, FENCING]) is FULL_SHORT


def test_without_a_full_node_the_last_answer() -> None:
    assert most_hopeful([OUT_OF_REACH, INCOMPATIBLE]) is INCOMPATIBLE
