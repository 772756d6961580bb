"""What nodes are told of each other's load, and when."""

from __future__ import annotations

import asyncio
from unittest.mock import PropertyMock, patch

import pytest

from baton.loop_lag import LoopLag
from baton.wire import NodeRecord
from prefill_node.decode_nodes import room
from tests.support.cluster_harness import assert_conserved, mock_spec, mock_tokens
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until

ONLY_WHEN_TOLD = {"membership.heartbeat_ms": 30_000, "membership.ttl_ms": 60_000}
"""A node reports when the test says so."""
PROMPT = [7, 8]
"""Too short to leave a block in a prefix cache: once the request is over, nothing tells that it was there."""


def seen(cluster: InProcessCluster, name: str, by: str) -> NodeRecord:
    (record,) = [r for r in cluster.runtimes[by].membership.nodes() if r.name == name]
    return record


async def report(cluster: InProcessCluster, name: str, to: str) -> None:
    """The one node reports, and the other is told of it."""
    before = seen(cluster, name, to).sequence
    cluster.runtimes[name].membership.announce()
    await until(cluster, f"the report of {name}", lambda: seen(cluster, name, to).sequence > before)


@pytest.mark.parametrize("requests", [1, 3])
def test_requests_that_came_and_went_between_two_reports_are_told(requests: int) -> None:
    """A decode node has its requests behind it when it reports, and says of its blocks what it said before. The prefill
    node, which counts what it was granted since the last report, must hear of this one: it would count those blocks for
    ever, and take the node for fuller with each request. The router hears of the prefill node's in the same way."""

    async def scenario() -> None:
        with patch.object(LoopLag, "max_ms", PropertyMock(return_value=1.0)):
            async with inprocess(mock_spec(both=ONLY_WHEN_TOLD, router_flags=ONLY_WHEN_TOLD)) as cluster:
                affinity = cluster.prefill["prefill-0"].decode_nodes.affinity
                before = seen(cluster, "decode-0", by="prefill-0")
                assert affinity.room(before) == room(before)
                for _ in range(requests):
                    assert (await cluster.client.generate(PROMPT, max_tokens=3)).ids == mock_tokens(PROMPT, 3)
                await assert_conserved(cluster)
                assert seen(cluster, "decode-0", by="prefill-0") == before
                assert affinity.room(before) == room(before) - requests
                for name, by in (("decode-0", "prefill-0"), ("prefill-0", "router-0")):
                    await report(cluster, name, by)
                    assert seen(cluster, name, by).load.requests_taken == requests
                now = seen(cluster, "decode-0", by="prefill-0")
                assert now.load.blocks == before.load.blocks
                assert affinity.room(now) == room(before)

    asyncio.run(scenario())
