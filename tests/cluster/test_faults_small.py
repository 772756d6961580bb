"""Processes stopped and killed in the middle of a handoff or an answer."""

from __future__ import annotations

import asyncio
import random
import signal

import pytest

from baton.errors import BatonError, Code, Reason
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)
from tests.support.fault_harness import (
    FAST_MEMBERSHIP,
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    SLOW_DECODE,
    SLOW_PREFILL,
    ask_exactly,
    ask_until_handoff,
    directory_lists,
    prefill_directly,
    until,
    with_tokens,
    writer_owns_blocks,
)


def was_stuck(call: asyncio.Task[Answer]) -> bool:
    """By a node that was stopped: it still is, or it was taken from there when that was noticed."""
    return not call.done() or call.exception() is not None or call.result().stats.resumptions > 0


@pytest.mark.slow
def test_a_stopped_decode_node_does_not_hold_up_the_other() -> None:
    """decode-1 is stopped while handoffs to it are under way and answers run on it. Twenty new requests are served by
    decode-0 meanwhile, exactly; continued, decode-1 finishes what it had, exactly."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(51)
        longs = [random_prompt(rng, 20) for _ in range(6)]
        calls = await asyncio.gather(*(with_tokens(cluster, prompt, 1000) for prompt in longs))
        handoffs = await ask_until_handoff(
            cluster, "decode-1", long=lambda: ask_exactly(cluster, random_prompt(rng, PROMPT_TOKENS), 20)
        )
        cluster.send_signal("decode-1", signal.SIGSTOP)
        cluster.set_down("decode-1")
        served = await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 100), 10) for _ in range(20)))
        assert {answer.stats.decode_node for answer in served} == {"decode-0"}
        assert any(map(was_stuck, handoffs)), "no handoff was under way to the stopped node"
        cluster.send_signal("decode-1", signal.SIGCONT)
        cluster.set_down("decode-1", False)
        answers = await asyncio.gather(*calls)
        assert [answer.ids for answer in answers] == [mock_tokens(prompt, 1000) for prompt in longs]
        for outcome in await asyncio.gather(*handoffs, return_exceptions=True):
            assert isinstance(outcome, Answer) or (
                isinstance(outcome, BatonError) and outcome.code in (Code.UNAVAILABLE, Code.ABORTED)
            ), outcome
        await assert_conserved(cluster)

    spec = mock_spec(decode=2, blocks=900, prefill_flags=SLOW_PREFILL, decode_flags=SLOW_DECODE)
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_stopped_prefill_node_keeps_its_blocks_until_it_has_let_go() -> None:
    """prefill-0 is stopped in the middle of a handoff. Its lease lapses, its revocation goes unanswered: the blocks
    are quarantined and never reused, while other requests fill the rest of the region again and again, exactly.
    Continued, it lets go and everything is free."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(52)
        stuck = asyncio.create_task(
            error_of(prefill_directly(cluster, "prefill-0", "stuck", random_prompt(rng, PROMPT_TOKENS)))
        )
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("prefill-0", signal.SIGSTOP)
        cluster.set_down("prefill-0")

        async def quarantined() -> bool:
            blocks = (await cluster.status("decode-0")).record.load.blocks
            assert blocks.writer_owned + blocks.quarantined == PROMPT_BLOCKS, blocks
            return blocks.quarantined == PROMPT_BLOCKS

        await until(cluster, "quarantine", quarantined)
        await directory_lists(cluster, "prefill-0", False)
        for _ in range(6):
            prompts = [random_prompt(rng, rng.randrange(150, 400)) for _ in range(4)]
            await asyncio.gather(*(ask_exactly(cluster, prompt, 30) for prompt in prompts))
            assert await quarantined(), "quarantined blocks were given away"
        cluster.send_signal("prefill-0", signal.SIGCONT)
        cluster.set_down("prefill-0", False)
        error = await stuck
        assert error.reason in (Reason.HANDOFF_FAILED, Reason.PEER_UNREACHABLE), error
        assert "decode-0" in error.message
        await assert_conserved(cluster)
        await directory_lists(cluster, "prefill-0", True)
        await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 500), 10) for _ in range(4)))
        await assert_conserved(cluster)

    spec = mock_spec(
        prefill=2,
        blocks=150,
        both=FAST_MEMBERSHIP,
        router_flags={**FAST_MEMBERSHIP, "placement_wait_ms_max": 30_000},
        decode_flags={"receiver.lease_ms": 400, "receiver.revoke_ms": 100},
        node_flags={"prefill-0": SLOW_PREFILL},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_killed_prefill_node_is_fenced_by_its_death() -> None:
    """prefill-0 is killed in the middle of a handoff: the decode node's proof is the pidfd, and its blocks are free.
    Its client's request waits for a node, and has its answer when prefill-0 is started again: a resumption, unless it
    was killed before the router heard of the grant."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(53)
        call = asyncio.create_task(ask_exactly(cluster, random_prompt(rng, PROMPT_TOKENS), 5))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("prefill-0", signal.SIGKILL)
        assert await cluster.wait_exit("prefill-0") == -signal.SIGKILL
        cluster.set_down("prefill-0")

        async def freed() -> bool:
            load = (await cluster.status("decode-0")).record.load
            return load.blocks.writer_owned + load.blocks.quarantined + load.running_requests == 0

        await until(cluster, "the dead writer's blocks to be free", freed)
        assert "dead" in cluster.log_text("decode-0"), "fenced without its proof"
        await cluster.cluster.start_process("prefill-0")
        cluster.set_down("prefill-0", False)
        await directory_lists(cluster, "prefill-0", True)
        resumptions = (await call).stats.resumptions
        assert resumptions <= 1
        assert resumptions == cluster.log_text("router-0").count(" resume "), cluster.story()

        async def served() -> bool:
            outcome = await asyncio.gather(ask_exactly(cluster, random_prompt(rng, 100), 5), return_exceptions=True)
            if isinstance(outcome[0], BatonError) and outcome[0].code is Code.UNAVAILABLE:
                return False
            assert isinstance(outcome[0], Answer), outcome
            return True

        await until(cluster, "the restarted node to serve", served)
        await assert_conserved(cluster)

    spec = mock_spec(
        both=FAST_MEMBERSHIP,
        # Where it is no resumption, it is as patient as one.
        router_flags={**FAST_MEMBERSHIP, "placement_wait_ms_max": 30_000},
        prefill_flags=SLOW_PREFILL,
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
def test_a_killed_decode_nodes_requests_are_taken_up_by_the_other() -> None:
    """decode-1 is killed with answers running on it and a handoff to it under way: every client has its answer,
    exactly, and the prefill node lets go of everything."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(54)
        calls = await ask_until_handoff(
            cluster,
            "decode-1",
            long=lambda: ask_exactly(cluster, random_prompt(rng, PROMPT_TOKENS), 20),
            short=lambda: ask_exactly(cluster, random_prompt(rng, 20), 800),
            requests_min=4,
        )
        cluster.send_signal("decode-1", signal.SIGKILL)
        await cluster.wait_exit("decode-1")
        cluster.set_down("decode-1")
        answers = await asyncio.gather(*calls)
        resumed = [answer for answer in answers if answer.stats.resumptions]
        assert resumed, "nothing ran on the killed node"
        assert len(resumed) < len(answers), "nothing ran on the other node"
        assert {answer.stats.decode_node for answer in resumed} == {"decode-0"}
        await assert_conserved(cluster)
        await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 100), 10) for _ in range(6)))
        await assert_conserved(cluster)

    spec = mock_spec(
        decode=2,
        blocks=800,
        both=FAST_MEMBERSHIP,
        router_flags={**FAST_MEMBERSHIP, "liveness.reconnect_ms_max": 400},
        prefill_flags={"engine.mock_layer_delay_ms": 10},
        decode_flags=SLOW_DECODE,
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


def test_a_killed_router_leaves_orphans_that_are_cancelled() -> None:
    """The router is killed with requests at every stage: prefill nodes see their calls end, decode nodes cancel what
    runs after orphan_ms."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(55)
        calls = await asyncio.gather(*(with_tokens(cluster, random_prompt(rng, 20), 3000) for _ in range(4)))
        for _ in range(2):
            prompt = random_prompt(rng, PROMPT_TOKENS)
            calls.append(asyncio.create_task(cluster.client.generate(prompt, max_tokens=3000)))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("router-0", signal.SIGKILL)
        cluster.set_down("router-0")
        errors = await asyncio.gather(*map(error_of, calls))
        assert {error.code for error in errors} == {Code.UNAVAILABLE}
        await assert_conserved(cluster)
        assert "orphan" in cluster.log_text("decode-0")

    spec = mock_spec(
        blocks=2000,
        prefill_flags={"engine.mock_layer_delay_ms": 10},
        decode_flags={"orphan_ms": 300, **SLOW_DECODE},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_node_that_is_asked_to_stop_leaves_nothing_on_its_peer(name: str) -> None:
    """SIGINT in the middle of handoffs and answers: status 0, errors that say so, and nothing left at the peer."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(56)
        calls = await asyncio.gather(*(with_tokens(cluster, random_prompt(rng, 20), 700) for _ in range(3)))
        for _ in range(2):
            prompt = random_prompt(rng, PROMPT_TOKENS)
            calls.append(asyncio.create_task(cluster.client.generate(prompt, max_tokens=100)))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal(name, signal.SIGINT)
        assert await cluster.wait_exit(name) == 0, cluster.story()
        cluster.set_down(name)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, (Answer, BatonError)), outcome
        await assert_conserved(cluster)

    spec = mock_spec(
        blocks=1200,
        both=FAST_MEMBERSHIP,
        router_flags={**FAST_MEMBERSHIP, "liveness.reconnect_ms_max": 400, "retries.resume_wait_ms_max": 1_000},
        prefill_flags={"engine.mock_layer_delay_ms": 10},
        decode_flags=SLOW_DECODE,
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
