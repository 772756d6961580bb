"""A decode node is lost in a cluster that has no room to spare and is asked for more all the time."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.cluster.test_resume import FAST, SLOW_DECODE, Asked, kill
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)

TOKENS = 600
"""Far from its end when the last of four has its first tokens, however late that is seen."""
PROMPT_TOKENS = 20
BLOCKS = 2 * 39
"""Of a decode node: two answers."""
CLIENTS = 40


@pytest.mark.slow
def test_answers_that_lost_their_node_go_before_new_ones() -> None:
    """Each of two nodes writes two answers, and forty clients wait in line for more. One node is killed: its answers
    have the next room on the other, and no client that has a token loses its answer."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(93)
        prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(4)]
        asked = [Asked(cluster, prompt, max_tokens=TOKENS) for prompt in prompts]
        await asyncio.gather(*(each.tokens(2) for each in asked))
        more = [cluster.client.generate(random_prompt(rng, PROMPT_TOKENS), max_tokens=TOKENS) for _ in range(CLIENTS)]
        crowd = [asyncio.create_task(each) for each in more]
        await kill(cluster, "decode-1")
        answers = await asyncio.gather(*(each.answer for each in asked))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == mock_tokens(prompt, TOKENS)
        assert sorted(answer.stats.resumptions for answer in answers) == [0, 0, 1, 1]
        assert sum(each.done() for each in crowd) <= 4, "there was room to spare, or somebody was refused"
        for each in crowd:
            each.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        await assert_conserved(cluster)

    flags = {**FAST, "placement_wait_ms_max": 1_000, "retries.resume_wait_ms_max": 15_000}
    spec = mock_spec(decode=2, both=FAST, router_flags=flags, decode_flags={**SLOW_DECODE, "engine.num_blocks": BLOCKS})
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
