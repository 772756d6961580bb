"""What a router believes of prefill nodes between two words of the directory."""

from __future__ import annotations

import pytest

from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, NodeName, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import NodeRecord, Role
from tests.support.router_records import MODEL
from tests.unit.router.test_regions import among, node, request

RECORD = NodeRecord(
    name=NodeName("prefill-1"), role=Role.PREFILL, incarnation=Incarnation(1), sequence=1,
    endpoint="127.0.0.1:1", lifecycle=Lifecycle.READY, model=MODEL,
)  # fmt: skip


def test_the_last_node_that_has_left_is_not_ready_any_more() -> None:
    """There was one, and the directory has dropped it: requests are told that there is none, and when to ask again."""
    nodes = among(RECORD)
    assert nodes.ready == [RECORD]
    nodes.follow(())
    assert nodes.ready == []
    with pytest.raises(BatonError) as refused:
        nodes.model()
    assert (refused.value.reason, refused.value.retry_after_ms) == (Reason.NO_PREFILL_NODE, 1_000)


def test_a_process_that_does_not_answer_is_asked_only_where_no_other_is_left() -> None:
    """A mixed node whose stream of tokens has fallen silent is idle by its last report. It gets nothing while another
    one is left to ask, and that one nothing that it has refused already: then the silent one is asked. Where all are
    silent they are asked as ever."""
    nodes, job = among(node(1, 90, waiting_tokens=0), node(2, 90, waiting_tokens=500)), request(8)

    def placed(*silent: int) -> str:
        record, left = nodes.place(
            job, RequestKey(request=job.id, attempt=Attempt(0)), silent={Incarnation(number) for number in silent}
        )
        left()
        return record.name

    assert [placed(), placed(1), placed(2), placed(1, 2)] == ["node-1", "node-2", "node-1", "node-1"]
    job.avoid.add(Incarnation(2))
    assert placed(1) == "node-1"
