"""Floods of a decode node's data port by strangers, from the very address of the prefill nodes, while these make their
links and hand requests over."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.cluster_harness import (
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.flood import Flood, flood
from tests.support.ports import free_ports

REQUESTS = 60


@pytest.mark.slow
@pytest.mark.parametrize("kind", Flood)
def test_handoffs_go_on_beside_a_flood_of_the_data_port(kind: Flood) -> None:
    """Hundreds of connections, each replaced as soon as the port closes it, before the first link is made. Two prefill
    nodes link to the decode node and hand all requests over, at the first try."""
    (port,) = free_ports(1)
    data = f"127.0.0.1:{port}"
    spec = mock_spec(
        prefill=2, both={"transports": "tcp"}, prefill_flags={"tcp.streams": 4}, decode_flags={"data_listen": data}
    )
    rng = random.Random(41)
    prompts = [random_prompt(rng, rng.randint(1, 300)) for _ in range(REQUESTS)]

    async def ask(prompt: list[int]) -> None:
        answer = await cluster.client.generate(prompt, max_tokens=5)
        assert answer.ids == mock_tokens(prompt, 5)
        assert (answer.stats.transport, answer.stats.resumptions) == ("tcp", 0)

    async def scene() -> None:
        await wait_for(cluster._warm, "the nodes to know of each other", story=cluster.story)
        for start in range(0, REQUESTS, 10):
            await asyncio.gather(*map(ask, prompts[start : start + 10]))
        await assert_conserved(cluster)

    with running(spec, warm_up=False) as cluster:
        with flood(data, kind, source="127.0.0.1") as flooding:
            cluster.run(scene())
        assert flooding.opened > 1_000
        for name in ("prefill-0", "prefill-1"):
            assert "data link" in cluster.log_text(name)
            assert "link lost" not in cluster.log_text(name)
