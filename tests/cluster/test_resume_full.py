"""A decode node is lost in a cluster that has no room to spare and is asked for more all the time."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.errors import BatonError, Code
from tests.cluster.test_resume import FAST, SLOW_DECODE, Asked, kill
from tests.support.cluster_harness import (
    Answer,
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
    """Each of two nodes writes two answers, and forty clients ask for more whenever they are refused. One node is
    killed: its answers have the next room on the other, and no client that has a token loses its answer."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(93)
        prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(4)]
        asked = [Asked(cluster, prompt, max_tokens=TOKENS) for prompt in prompts]
        await asyncio.gather(*(each.tokens(2) for each in asked))
        enough = asyncio.Event()
        crowd = [asyncio.create_task(ask_for_more(cluster, rng, enough)) for _ in range(CLIENTS)]
        await kill(cluster, "decode-1")
        answers = await asyncio.gather(*(each.answer for each in asked))
        enough.set()
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == mock_tokens(prompt, TOKENS)
        assert sorted(answer.stats.resumptions for answer in answers) == [0, 0, 1, 1]
        assert sum(await asyncio.gather(*crowd)) > 0, "nobody was refused: there was room to spare"
        await assert_conserved(cluster)

    async def ask_for_more(cluster: RunningCluster, rng: random.Random, enough: asyncio.Event) -> int:
        """How often it was refused; it asks again at once."""
        refused = 0
        while not enough.is_set():
            prompt = random_prompt(rng, PROMPT_TOKENS)
            (outcome,) = await asyncio.gather(
                cluster.client.generate(prompt, max_tokens=TOKENS), return_exceptions=True
            )
            if isinstance(outcome, Answer):
                assert outcome.ids == mock_tokens(prompt, TOKENS)
            else:
                assert isinstance(outcome, BatonError), outcome
                assert outcome.code is Code.RESOURCE_EXHAUSTED, outcome
                refused += 1
        return refused

    flags = {**FAST, "placement_wait_ms_max": 1_000, "retries.resume_wait_ms_max": 15_000}
    spec = mock_spec(decode=2, both=FAST, router_flags=flags, decode_flags={**SLOW_DECODE, "engine.num_blocks": BLOCKS})
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
