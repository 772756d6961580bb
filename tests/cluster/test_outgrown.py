"""Answers that grow in a decode node beyond what some or all prefill nodes could read again, when that node is lost."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from baton.errors import Code, Reason
from tests.cluster.test_resume import FAST, ROUTER_FLAGS, SLOW_DECODE, Asked, kill, runner_of
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)

SIZE = 16
SMALL, LARGE = 8, 100
"""Blocks of a prefill node's region; decode nodes have more."""
TOKENS = 1_000
"""So many that none has ended when the last one is seen to have outgrown a small region, however late that is seen."""


async def busiest(cluster: RunningCluster) -> str:
    """The decode node with the most requests."""
    statuses = await cluster.statuses()
    return max((name for name in statuses if name.startswith("decode")), key=lambda name: statuses[name].requests)


@pytest.mark.slow
def test_an_answer_is_taken_up_by_the_node_that_can_hold_it() -> None:
    """One prefill node has a small region, and is idle. Prompts that only the other one holds go there, and so do the
    answers that have outgrown the small one when their decode node dies: all are complete and exact."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(31)
        long = [random_prompt(rng, (SMALL + 1) * SIZE) for _ in range(4)]
        for prompt in long:
            answer = await cluster.client.generate(prompt, max_tokens=3)
            assert (answer.ids, answer.stats.prefill_node) == (mock_tokens(prompt, 3), "prefill-1")
        prompts = [random_prompt(rng, 3 * SIZE) for _ in range(6)]
        asked = [Asked(cluster, prompt, max_tokens=TOKENS) for prompt in prompts]
        await asyncio.gather(*(each.tokens(SMALL * SIZE) for each in asked))
        await kill(cluster, await busiest(cluster))
        answers = await asyncio.gather(*(each.answer for each in asked))
        assert [answer.ids for answer in answers] == [mock_tokens(prompt, TOKENS) for prompt in prompts]
        resumed = [answer.stats for answer in answers if answer.stats.resumptions]
        assert resumed
        assert {stats.prefill_node for stats in resumed} == {"prefill-1"}
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill=2,
        decode=2,
        blocks=600,
        both=FAST,
        router_flags=ROUTER_FLAGS,
        decode_flags=SLOW_DECODE,
        node_flags={"prefill-0": {"engine.num_blocks": SMALL}, "prefill-1": {"engine.num_blocks": LARGE}},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
        assert "an answer may become too long to be resumed" in cluster.log_text("router-0")


def test_an_answer_that_has_outgrown_all_of_them_ends_at_once() -> None:
    """Both prefill nodes are small. Whoever asks is served while no node is lost. When one is, the client of the long
    answer is told what has happened and what to do, without another try; a short answer goes on."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(32)
        prompt, short = random_prompt(rng, 3 * SIZE), random_prompt(rng, SIZE)
        enough = 2 * SMALL * SIZE
        assert (await cluster.client.generate(prompt, max_tokens=enough)).ids == mock_tokens(prompt, enough)
        asked = Asked(cluster, prompt, max_tokens=TOKENS)
        await asked.tokens(SMALL * SIZE)
        victim = await runner_of(cluster)
        little = [Asked(cluster, short, max_tokens=4 * SIZE, seed=i, temperature=0.5) for i in range(4)]
        await asyncio.gather(*(each.tokens(1) for each in little))
        await kill(cluster, victim)
        error = await error_of(asked.answer)
        assert (error.reason, error.code) == (Reason.NOT_RESUMABLE, Code.ABORTED), error
        assert f"the largest region of a prefill node has {SMALL}." in error.message
        for i, each in enumerate(little):
            assert (await each.answer).ids == mock_tokens(short, 4 * SIZE, seed=i, temperature=0.5)
        log = cluster.log_text("router-0")
        resumed = re.findall(r" resume reason=\S+ request=(\S+) attempt=0 tokens=(\d+)", log)
        outgrown, _ = max(resumed, key=lambda found: int(found[1]))
        assert not re.search(rf" place_again reason=\S+ request={outgrown} ", log)
        await assert_conserved(cluster)

    flags = {**SLOW_DECODE, "engine.num_blocks": 600}
    spec = mock_spec(prefill=2, decode=2, blocks=SMALL, both=FAST, router_flags=ROUTER_FLAGS, decode_flags=flags)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
