"""What a router believes of prefill nodes between two words of the directory."""

from __future__ import annotations

import pytest

from baton.errors import BatonError, Reason
from baton.ids import Incarnation, NodeName
from baton.lifecycle import Lifecycle
from baton.wire import NodeRecord, Role
from router.prefill_nodes import PrefillNodes
from tests.router_records import MODEL

RECORD = NodeRecord(
    name=NodeName("prefill-1"), role=Role.PREFILL, incarnation=Incarnation(1), sequence=1,
    endpoint="127.0.0.1:1", lifecycle=Lifecycle.READY, model=MODEL,
)  # fmt: skip


def test_the_last_node_that_has_left_is_not_ready_any_more() -> None:
    """There was one, and the directory has dropped it: requests are told that there is none, and when to ask again."""
    records: tuple[NodeRecord, ...] = (RECORD,)
    nodes = PrefillNodes(lambda: records, blocks_max=10)
    assert nodes.ready() == [RECORD]
    records = ()
    nodes.follow()
    assert nodes.ready() == []
    with pytest.raises(BatonError) as refused:
        nodes.model()
    assert (refused.value.reason, refused.value.retry_after_ms) == (Reason.NO_PREFILL_NODE, 1_000)
