"""A mixed node is drained, told to end, or loses its decode node under load: nothing fails, all tokens are right."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)
from tests.support.drain_harness import SLOW, answers_come, drain_under_load, end_under_load, loaded
from tests.support.fault_harness import with_tokens


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Two mixed nodes and nothing else. Of the load's prompts half run where they come in, half are handed over."""
    spec = mock_spec(prefill=0, decode=0, mixed=2, blocks=600, both=SLOW, mixed_flags={"handoff_tokens_min": 64})
    with running(spec) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def test_a_mixed_node_is_drained_under_load(cluster: RunningCluster) -> None:
    """It is prefill and decode node of many requests at the moment, handed over from it and to it, and kept."""
    cluster.run(drain_under_load(cluster, "mixed-1"))


def test_sigterm_is_the_same_drain(cluster: RunningCluster) -> None:
    """The other one, in the same way; what it still hands over finds a node that is there."""
    cluster.run(end_under_load(cluster, "mixed-0"))


@pytest.mark.slow
def test_the_last_decode_node_is_killed() -> None:
    """Those asked for afterwards run on the mixed node, all of them, from the first on; those that it had are resumed
    there, exactly, and nothing is left of their first attempts."""
    spec = mock_spec(prefill=0, decode=1, mixed=1, blocks=600, both=SLOW, mixed_flags={"handoff_tokens_min": 64})
    with running(spec) as cluster:

        async def scenario() -> None:
            rng = random.Random(51)
            prompts = [random_prompt(rng, 300) for _ in range(8)]
            # With tokens: the router knows of the grant, so that losing the node is a resumption.
            calls = await asyncio.gather(*(with_tokens(cluster, prompt, 400) for prompt in prompts))
            assert not any(call.done() for call in calls), "the answers were too short for this test"
            cluster.set_down("decode-0")
            cluster.send_signal("decode-0", signal.SIGKILL)
            await cluster.wait_exit("decode-0")
            after = [random_prompt(rng, 300) for _ in range(12)]
            answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=20) for p in after))
            for prompt, answer in zip(after, answers, strict=True):
                assert answer.ids == mock_tokens(prompt, 20)
                assert (answer.stats.prefill_node, answer.stats.transport) == ("mixed-0", "local")
            for prompt, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
                assert answer.ids == mock_tokens(prompt, 400)
                assert (answer.stats.resumptions, answer.stats.transport) == (1, "local")
            await assert_conserved(cluster)
            async with loaded(cluster) as load:
                await answers_come(cluster, load, 20)
            await assert_conserved(cluster)

        cluster.run(scenario())
