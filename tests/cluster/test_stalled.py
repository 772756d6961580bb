"""A decode node that stands still, and nothing else that would notice."""

from __future__ import annotations

import asyncio
import random
import signal

from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.fault_harness import PROMPT_TOKENS, SLOW_PREFILL, writer_owns_blocks

LONG_MS = 600_000


def test_a_handoff_that_makes_no_progress_is_given_up() -> None:
    """decode-0 is stopped in the middle of a handoff over tcp; nobody misses its answers and no lease ends. The prefill
    node gives the handoff up after `stall_ms_max` by itself, and has its blocks back while the other stands still.
    It goes on: the request has its answer, and nothing is left of the handoff."""

    async def scenario(cluster: RunningCluster) -> None:
        prompt = random_prompt(random.Random(81), PROMPT_TOKENS)
        call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=5))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("decode-0", signal.SIGSTOP)
        cluster.set_down("decode-0")

        async def given_up() -> bool:
            held = (await cluster.status("prefill-0")).record.load.blocks.held
            return "handoff stalled" in cluster.log_text("prefill-0") and held == 0

        await wait_for(given_up, "the prefill node to give the handoff up", story=cluster.story)
        cluster.send_signal("decode-0", signal.SIGCONT)
        cluster.set_down("decode-0", False)
        assert (await call).ids == mock_tokens(prompt, 5)
        await assert_conserved(cluster)

    spec = mock_spec(
        both={"transports": "tcp", "liveness.answer_ms_max": LONG_MS, "membership.ttl_ms": 60_000},
        router_flags={"liveness.answer_ms_max": LONG_MS, "placement_wait_ms_max": 30_000},
        prefill_flags={**SLOW_PREFILL, "writer.stall_ms_max": 500},
        decode_flags={"receiver.lease_ms": LONG_MS, "orphan_ms": LONG_MS},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
