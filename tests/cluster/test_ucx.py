"""A whole cluster on the mock engine whose handoffs go over ucx alone: exact tokens; a writer stopped, then killed."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from kvtransfer.transports.ucx import installed
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)
from tests.support.fault_harness import (
    FAST_MEMBERSHIP,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    SLOW_PREFILL,
    ask_exactly,
    directory_lists,
    prefill_directly,
    until,
    writer_owns_blocks,
)

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


@pytest.mark.parametrize("tls", ["tcp", "all"])
def test_blocks_of_a_stopped_writer_are_free_with_evidence_alone(tls: str) -> None:
    """prefill-0 is stopped in the middle of a handoff and its lease lapses. Over UCX's tcp the decode node fences it by
    itself. With all that UCX has, the blocks are quarantined, while other requests fill the rest of the region, again
    and again and exactly; when it is killed, its pidfd is the evidence."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(52)
        stuck = asyncio.create_task(prefill_directly(cluster, "prefill-0", "stuck", random_prompt(rng, PROMPT_TOKENS)))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("prefill-0", signal.SIGSTOP)
        cluster.set_down("prefill-0")

        async def held() -> tuple[int, int]:
            blocks = (await cluster.status("decode-0")).record.load.blocks
            return blocks.writer_owned, blocks.quarantined

        async def taken_back() -> bool:
            return await held() == (0, PROMPT_BLOCKS if tls == "all" else 0)

        await until(cluster, "the grant to be taken back", taken_back)
        await directory_lists(cluster, "prefill-0", False)
        for _ in range(3):
            prompts = [random_prompt(rng, rng.randrange(150, 400)) for _ in range(4)]
            await asyncio.gather(*(ask_exactly(cluster, prompt, 30) for prompt in prompts))
            assert (await held())[1] == (PROMPT_BLOCKS if tls == "all" else 0), "quarantined blocks were given away"
        cluster.send_signal("prefill-0", signal.SIGKILL)
        assert await cluster.wait_exit("prefill-0") == -signal.SIGKILL
        await asyncio.wait([stuck])
        assert stuck.exception() is not None

        async def freed() -> bool:
            return await held() == (0, 0)

        await until(cluster, "the dead writer's blocks to be free", freed)
        reported = "dead, by pidfd" if tls == "all" else "its receiving worker destroyed"
        assert reported in cluster.log_text("decode-0"), "fenced without its proof"
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill=2,
        blocks=150,
        both={**FAST_MEMBERSHIP, "transports": "ucx", "ucx.tls": tls},
        router_flags={**FAST_MEMBERSHIP, "placement_wait_ms_max": 30_000},
        decode_flags={"receiver.lease_ms": 400, "receiver.revoke_ms": 100},
        node_flags={"prefill-0": SLOW_PREFILL},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
