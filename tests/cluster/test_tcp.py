"""The whole path on the mock engine with tcp between the nodes: the same tokens as ever, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import pytest

from baton.errors import BatonError, Reason
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.fault_harness import (
    FAST_MEMBERSHIP,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    SLOW_DECODE,
    SLOW_PREFILL,
    ask_exactly,
    directory_lists,
    prefill_directly,
    until,
    with_tokens,
    writer_owns_blocks,
)

BLOCK = 16
FENCED = "joined"
"""Of the decode node's log: what the evidence of a tcp fence is."""
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 511, 512, 513, 1024, 1025, 1999]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """Two by two, prefill nodes with two streams to each decode node; every node offers tcp only."""
    spec = mock_spec(
        prefill=2,
        decode=2,
        blocks=300,
        both={"transports": "tcp"},
        prefill_flags={"tcp.streams": 2},
        # Answers whose client left before the router knew of the decode node are kept this long.
        decode_flags={"finished_ms_max": 1_000, "orphan_ms": 1_000},
    )
    with running(spec) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def test_answers_over_tcp_are_exact(cluster: RunningCluster) -> None:
    """Prompts around block and chunk boundaries, twice each, eight at once: every token is the reference's."""
    rng = random.Random(21)
    prompts = [random_prompt(rng, length) for length in LENGTHS] * 2
    slots = asyncio.Semaphore(8)

    async def ask(prompt: list[int], count: int) -> None:
        async with slots:
            answer = await cluster.client.generate(prompt, max_tokens=count)
        assert answer.ids == mock_tokens(prompt, count)
        assert answer.stats.transport == "tcp"
        assert answer.stats.blocks_written + answer.stats.blocks_skipped == -(-len(prompt) // BLOCK)

    async def ask_all() -> None:
        await asyncio.gather(*(ask(prompt, rng.choice([2, 17, 40])) for prompt in prompts))

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))

    async def counters() -> dict[str, float]:
        statuses = await cluster.statuses()
        return {c.name: c.value for name in ("decode-0", "decode-1") for c in statuses[name].counters}

    counted = cluster.run(counters())
    assert counted["tcp: frames_landed"] > 0
    assert not [name for name in counted if name.startswith("tcp: refused")]


def test_clients_that_go_away_in_mid_handoff_leave_nothing(cluster: RunningCluster) -> None:
    """Forty requests with deadlines of a few milliseconds: whatever point they end at, all blocks become free."""
    rng = random.Random(22)

    async def ask(prompt: list[int], timeout_s: float) -> bool:
        try:
            answer = await cluster.client.generate(prompt, max_tokens=8, timeout_s=timeout_s)
        except BatonError as error:
            return error.reason is Reason.DEADLINE
        return bool(answer.ids == mock_tokens(prompt, 8))

    async def ask_all() -> None:
        assert all(await asyncio.gather(*(ask(random_prompt(rng, 700), 0.01 + 0.01 * i) for i in range(40))))

    cluster.run(ask_all())
    cluster.run(assert_conserved(cluster))
    prompt = random_prompt(rng, 100)
    assert cluster.run(cluster.client.generate(prompt, max_tokens=5)).ids == mock_tokens(prompt, 5)


@pytest.mark.slow
def test_a_killed_prefill_node_is_fenced_at_once() -> None:
    """SIGKILL in mid-handoff: the receiver closes its connections, its blocks become free without any time running
    out, and the other prefill node goes on."""
    spec = mock_spec(
        prefill=2,
        decode=1,
        both={"transports": "tcp"},
        prefill_flags={"engine.mock_layer_delay_ms": 40},
        decode_flags={"receiver.lease_ms": 600_000},
    )
    rng = random.Random(23)
    with running(spec) as cluster:

        async def kill_in_mid_handoff() -> None:
            asks = [
                asyncio.create_task(cluster.client.generate(random_prompt(rng, 1900), max_tokens=4)) for _ in range(6)
            ]

            async def written() -> bool:
                return bool((await cluster.status("prefill-0")).grants_written)

            await wait_for(written, "a handoff of prefill-0", story=cluster.story)
            cluster.send_signal("prefill-0", signal.SIGKILL)
            cluster.set_down("prefill-0")
            await asyncio.gather(*asks, return_exceptions=True)
            await assert_conserved(cluster)

        cluster.run(kill_in_mid_handoff())
        prompt = random_prompt(rng, 300)

        async def answered() -> bool:
            try:
                answer = await cluster.client.generate(prompt, max_tokens=6)
            except BatonError:
                return False  # the router may still place requests on the dead node
            assert answer.ids == mock_tokens(prompt, 6)
            return True

        cluster.run(wait_for(answered, "an answer without prefill-0", story=cluster.story))
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_a_stopped_prefill_node_is_fenced_without_its_help() -> None:
    """prefill-0 is stopped in the middle of a handoff. Its blocks are given to nobody before the fence, which closes
    its connections and joins their threads while it stands still; then one long answer takes most of the region, those
    blocks with it. Continued in the middle of that, prefill-0 sends what it still had: the answer is exact, prefill-0
    lets go, connects again and serves."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(24)
        stuck = asyncio.create_task(
            error_of(prefill_directly(cluster, "prefill-0", "stuck", random_prompt(rng, PROMPT_TOKENS)))
        )
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("prefill-0", signal.SIGSTOP)
        cluster.set_down("prefill-0")

        async def taken_back() -> bool:
            blocks = (await cluster.status("decode-0")).record.load.blocks
            if blocks.writer_owned + blocks.quarantined == PROMPT_BLOCKS:
                return False
            assert FENCED in cluster.log_text("decode-0"), "taken back without evidence"
            return blocks.writer_owned + blocks.quarantined == 0

        await until(cluster, "the fence of a stopped writer", taken_back)
        await directory_lists(cluster, "prefill-0", False)
        prompt = random_prompt(rng, PROMPT_TOKENS)
        running_answer = await with_tokens(cluster, prompt, 600)
        cluster.send_signal("prefill-0", signal.SIGCONT)
        cluster.set_down("prefill-0", False)
        error = await stuck
        assert error.reason in (Reason.HANDOFF_FAILED, Reason.PEER_UNREACHABLE), error
        assert not running_answer.done(), "the answer was over before prefill-0 went on"
        assert (await running_answer).ids == mock_tokens(prompt, 600)
        await assert_conserved(cluster)
        await directory_lists(cluster, "prefill-0", True)

        cordon = ("cordon", "prefill-1", "--directory", cluster.cluster.directory)
        assert (await asyncio.to_thread(run_baton, *cordon)).returncode == 0
        answers = await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 300), 10) for _ in range(4)))
        assert {answer.stats.prefill_node for answer in answers} == {"prefill-0"}
        (pair,) = (await cluster.status("prefill-0")).pairs
        assert (pair.transport, pair.link_failures) == ("tcp", 0)
        assert cluster.log_text("prefill-0").count("data link peer=decode-0 transport=tcp") == 2
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill=2,
        blocks=150,
        both={"transports": "tcp", **FAST_MEMBERSHIP},
        router_flags={**FAST_MEMBERSHIP, "placement_wait_ms_max": 30_000},
        decode_flags={"receiver.lease_ms": 1_000, "receiver.revoke_ms": 100, **SLOW_DECODE},
        node_flags={"prefill-0": SLOW_PREFILL},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_nodes_without_a_transport_in_common_say_so() -> None:
    """One offers shm only, the other tcp only: a clear error, and nothing is left behind."""
    spec = mock_spec(prefill_flags={"transports": "shm"}, decode_flags={"transports": "tcp"})
    with running(spec, warm_up=False) as cluster:

        async def refused() -> bool:
            error = await error_of(cluster.client.generate([1, 2, 3], max_tokens=4))
            if error.reason is not Reason.INCOMPATIBLE_NODE:
                return False
            assert "Add tcp to the transports of both" in error.message
            return True

        cluster.run(wait_for(refused, "the refusal", story=cluster.story))
        cluster.run(assert_conserved(cluster))
