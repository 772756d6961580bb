"""A whole cluster on the mock engine whose handoffs go over ucx alone: exact tokens."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvtransfer.transports.ucx_nixl import installed
from tests.cluster_harness import assert_conserved, mock_spec, mock_tokens, random_prompt, running

BLOCK = 16
LENGTHS = [BLOCK - 1, BLOCK, 5 * BLOCK, 513, 1999]
PATIENT = {"liveness.answer_ms_max": 20_000, "liveness.reconnect_ms_max": 10_000, "membership.ttl_ms": 30_000}

pytestmark = pytest.mark.skipif(not installed(), reason="NIXL is not installed: `make test-ucx` runs these")


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_answers_over_ucx_are_exact(tls: str) -> None:
    """Prompts around block and chunk boundaries, at once: every token is the reference's, every block went over ucx."""
    rng = random.Random(21)
    prompts = [random_prompt(rng, length) for length in LENGTHS]
    with running(mock_spec(blocks=300, both={"transports": "ucx", "ucx.tls": tls, **PATIENT})) as cluster:

        async def ask(prompt: list[int]) -> int:
            answer = await cluster.client.generate(prompt, max_tokens=9)
            assert answer.ids == mock_tokens(prompt, 9)
            assert answer.stats.transport == "ucx"
            assert answer.stats.blocks_written + answer.stats.blocks_skipped == -(-len(prompt) // BLOCK)
            return int(answer.stats.bytes_written)

        async def ask_all() -> int:
            return sum(await asyncio.gather(*map(ask, prompts)))

        assert cluster.run(ask_all()) > 0
        cluster.run(assert_conserved(cluster))
