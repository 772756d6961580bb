"""Many small decode nodes and a large one: a request that only the large one can hold is not refused by the others."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import patch

from decode_node.node import DecodeNode
from tests.support.cluster_harness import assert_conserved, mock_spec, random_prompt
from tests.support.inprocess_cluster import ask_exactly, inprocess

LARGE = "decode-4"
SPEC = mock_spec(
    decode=5,
    blocks=40,
    node_flags={LARGE: {"engine.num_blocks": 100}},
    prefill_flags={"engine.num_blocks": 300, "decode_tries_max": 1},
)


def test_the_large_node_is_asked_at_once() -> None:
    """One decode node is asked for each request. Prompts of 45 blocks go to the large one, and no small one hears of
    them; prompts of two blocks go to small ones too."""

    async def scenario() -> None:
        real, asked = DecodeNode.reserve, list[str]()

        def reserve(self: DecodeNode, *args: Any) -> Any:
            asked.append(self.config.name)
            return real(self, *args)

        with patch.object(DecodeNode, "reserve", reserve):
            async with inprocess(SPEC) as cluster:
                rng = random.Random(3)
                for _ in range(6):
                    await ask_exactly(cluster, random_prompt(rng, 700))
                assert asked == [LARGE] * 6
                for _ in range(20):
                    await ask_exactly(cluster, random_prompt(rng, 20))
                assert len(set(asked)) > 1
                await assert_conserved(cluster)

    asyncio.run(scenario())
