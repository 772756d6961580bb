"""Requests in the queue of a prefill node that ends: they go to another one, however long they have waited."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from tests.cluster.test_resume import FAST
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

PLACEMENT_WAIT_MS = 1_000
PROMPT_TOKENS = 1_500
REQUESTS = 24
SLOW_PREFILL = {"engine.mock_layer_delay_ms": 40, "stop_grace_ms": 100}
"""Half a second for each prompt, so that three answers take longer than a new request may look for a node."""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_prefill_node_ends_with_a_long_queue(how: signal.Signals) -> None:
    """Killed, or stopped at once: what waited there is answered by the other node, exactly, though the time in which a
    new request may look for a node is over for all of it. Its wait in a queue was no search."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(97)
        prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(REQUESTS)]
        began_s = asyncio.get_running_loop().time()
        asked = [asyncio.create_task(cluster.client.generate(prompt, max_tokens=4)) for prompt in prompts]

        async def the_search_is_over() -> bool:
            waited_ms = (asyncio.get_running_loop().time() - began_s) * 1e3
            return waited_ms > 1.5 * PLACEMENT_WAIT_MS and sum(task.done() for task in asked) >= 2

        await wait_for(the_search_is_over, "time to pass", story=cluster.story)
        waiting = {
            name: (await cluster.status(name)).record.load.waiting_requests for name in ("prefill-0", "prefill-1")
        }
        lost = max(waiting, key=waiting.__getitem__)
        assert waiting[lost] >= 1, "nothing waits any more: the test shows nothing"
        cluster.send_signal(lost, how)
        await cluster.wait_exit(lost)
        cluster.set_down(lost)
        answers: list[Answer] = await asyncio.gather(*asked)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids == mock_tokens(prompt, 4)
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill=2,
        decode=1,
        blocks=2_000,
        both=FAST,
        prefill_flags=SLOW_PREFILL,
        router_flags={**FAST, "placement_wait_ms_max": PLACEMENT_WAIT_MS},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
