"""What a router believes of prefill nodes between two words of the directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.directory import DirectoryLimits, DirectoryState
from baton.errors import BatonError, Reason
from baton.ids import Attempt, Incarnation, NodeName, RequestKey
from baton.lifecycle import Lifecycle
from baton.wire import NodeRecord, Role, record_from_proto, record_to_proto
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
        choice, left = nodes.place(
            job,
            RequestKey(request=job.id, attempt=Attempt(0)),
            now_s=0.0,
            silent={Incarnation(number) for number in silent},
        )
        left()
        return choice.record.name

    assert [placed(), placed(1), placed(2), placed(1, 2)] == ["node-1", "node-2", "node-1", "node-1"]
    job.avoid.add(Incarnation(2))
    assert placed(1) == "node-1"


DIED = BatonError(Reason.PEER_UNREACHABLE, "node-1 does not answer: nothing listens there.")
TTL_MS = 2_500


class Scene:
    """A router and a directory with two prefill nodes, of which the first is idle and gets all requests."""

    def __init__(self) -> None:
        self.directory = DirectoryState(limits=DirectoryLimits())
        self.nodes = among()
        self.records = {1: node(1, 90, waiting_tokens=0), 2: node(2, 90, waiting_tokens=50_000)}
        self.known = -1
        for number in self.records:
            self.beats(number, now_s=0.0)

    def beats(self, number: int, *, now_s: float) -> None:
        """A node that has nothing new to report."""
        self.records[number] = replace(self.records[number], sequence=self.records[number].sequence + 1)
        self.directory.push(record_to_proto(self.records[number]), ttl_ms=TTL_MS, now_s=now_s)

    def asks(self, *, now_s: float, avoid: Sequence[int] = ()) -> str:
        """Where a new request goes. The router hears of the directory only what watchers must see."""
        self.directory.expire(now_s=now_s)
        if self.directory.version != self.known:
            self.known = self.directory.version
            self.nodes.follow([record_from_proto(record) for record in self.directory.list(now_s=now_s)])
        job = request(8)
        job.avoid.update(map(Incarnation, avoid))
        choice, left = self.nodes.place(job, RequestKey(request=job.id, attempt=Attempt(0)), now_s=now_s)
        left()
        return choice.record.name

    def fails(self, error: BatonError, *, now_s: float) -> None:
        self.nodes.failed(request(8), self.records[1], error, now_s=now_s)


def test_a_dead_node_is_lost_with_the_first_call_that_it_does_not_answer() -> None:
    """It is killed while it is idle, and the directory lists it for 2.5 s more: only a request that the other node has
    refused goes there. No request is sent there in vain."""
    scene = Scene()
    assert scene.asks(now_s=0.1) == "node-1"
    scene.fails(DIED, now_s=0.1)
    for tenths in range(1, 40):
        if tenths % 5 == 0:
            scene.beats(2, now_s=tenths / 10)
        assert scene.asks(now_s=tenths / 10) == "node-2"
    assert scene.asks(now_s=4.0, avoid=[2]) == "node-2", "the directory has dropped node-1 by now"


def test_where_all_others_have_refused_the_dead_node_is_asked_before_they_are_asked_again() -> None:
    """It may have come back."""
    scene = Scene()
    scene.asks(now_s=0.0)
    scene.fails(DIED, now_s=0.0)
    assert scene.asks(now_s=0.5, avoid=[2]) == "node-1"


def test_a_node_that_lives_is_asked_again_though_its_record_does_not_change() -> None:
    """A connection broke, and the node has nothing new to report: the directory tells no watcher of its heartbeats. It
    gets requests again after 2.5 s."""
    scene = Scene()
    scene.asks(now_s=0.0)
    scene.fails(DIED, now_s=0.0)
    version = scene.directory.version
    found = []
    for halves in range(1, 7):
        for number in (1, 2):
            scene.beats(number, now_s=halves / 2)
        found.append(scene.asks(now_s=halves / 2))
    assert scene.directory.version == version
    assert found == ["node-2"] * 4 + ["node-1"] * 2


def test_a_call_that_is_answered_ends_the_doubt() -> None:
    scene = Scene()
    scene.asks(now_s=0.0)
    scene.fails(DIED, now_s=0.0)
    assert scene.asks(now_s=0.1) == "node-2"
    scene.nodes.reached(scene.records[1])
    assert scene.asks(now_s=0.1) == "node-1"


def test_the_loss_of_a_decode_node_says_nothing_of_the_prefill_node_that_reports_it() -> None:
    scene = Scene()
    scene.asks(now_s=0.0)
    lost = BatonError(Reason.PEER_UNREACHABLE, "The handoff ended: the peer is gone.", metadata={"transport": "tcp"})
    scene.fails(lost, now_s=0.0)
    assert scene.asks(now_s=0.1) == "node-1"


def test_a_prefill_node_that_finds_all_decode_nodes_full_again_and_again_is_not_the_only_one_to_be_asked() -> None:
    """It may be the only one that they are full for: cut off from some, or behind with its writes. After four refusals
    in a row the request goes by way of the other prefill node."""
    nodes, job = among(node(1, 90, waiting_tokens=0), node(2, 90, waiting_tokens=50_000)), request(8)
    full = BatonError(Reason.DECODE_FULL, "All are full.")
    asked = []
    for _ in range(7):
        choice, left = nodes.place(job, RequestKey(request=job.id, attempt=Attempt(0)), now_s=0.0)
        left()
        asked.append(choice.record.name)
        nodes.failed(job, choice.record, full, now_s=0.0)
    assert asked == ["node-1"] * 4 + ["node-2"] * 3
