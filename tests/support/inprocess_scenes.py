"""What tests of a cluster in one process share: marked requests, and waiting for where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.writer import WriterPeer
from tests.support.cluster_harness import (
    Answer,
    mock_tokens,
    wait_for,
)
from tests.support.inprocess_cluster import InProcessCluster

REACHED_S_MAX = 30.0


async def until(cluster: InProcessCluster, what: str, holds: Callable[[], bool]) -> None:
    async def now() -> bool:
        return holds()

    await wait_for(now, what, story=cluster.story)


async def ask_exactly(cluster: InProcessCluster, prompt: Sequence[int], count: int = 8) -> Answer:
    answer = await cluster.client.generate(prompt, max_tokens=count)
    assert answer.ids == mock_tokens(prompt, count)
    return answer


def peer_of(cluster: InProcessCluster, decode: str) -> WriterPeer:
    peer = cluster.peers["prefill-0"].find(cluster.runtimes[decode].incarnation)
    assert peer is not None
    return peer
