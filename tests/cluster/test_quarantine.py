"""What an operator sees of a writer that is stopped, and of its peers' trouble with it: few lines, and all of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from typing import Any

import pytest

from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import RunningCluster, assert_conserved, mock_spec, random_prompt, running, wait_for
from tests.support.fault_harness import (
    PROMPT_BLOCKS,
    PROMPT_TOKENS,
    SLOW_PREFILL,
    until,
    writer_owns_blocks,
)

REVOKE_MS = 100
ROUNDS_S = 1.5
"""Of a quarantine: some fifteen rounds of a revocation."""


async def described(cluster: RunningCluster, name: str, *more: str) -> str:
    arguments = ("describe", name, "--timeout", "30", "--directory", cluster.cluster.directory, *more)
    done = await asyncio.to_thread(run_baton, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def writers(cluster: RunningCluster) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(await described(cluster, "decode-0", "-o", "json"))["status"]["writers"]
    return found


def lines(cluster: RunningCluster, name: str, text: str) -> list[str]:
    return [line for line in cluster.log_text(name).splitlines() if text in line]


@pytest.mark.slow
def test_who_holds_quarantined_blocks() -> None:
    """prefill-0 is stopped in the middle of a handoff. `baton describe` of the decode node names it, with the blocks
    that it holds, since when and why; the log has one line at the quarantine's beginning, one at its end, and few in
    between, though the blocks are asked back every tenth of a second."""

    async def scenario(cluster: RunningCluster) -> None:
        incarnation = (await cluster.status("prefill-0")).record.incarnation
        (idle,) = await writers(cluster)
        assert (idle["writer"], idle["writer_incarnation"]) == ("prefill-0", f"{incarnation:016x}")
        assert (idle["grants"], idle["blocks_granted"], idle["blocks_quarantined"]) == (0, 0, 0)
        assert (idle["quarantined_ms"], idle["taken_back_ms"], idle["why"]) == (None, None, None)
        prompt = random_prompt(random.Random(71), PROMPT_TOKENS)
        call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=5))
        await writer_owns_blocks(cluster, "decode-0")
        cluster.send_signal("prefill-0", signal.SIGSTOP)
        cluster.set_down("prefill-0")

        async def quarantined() -> bool:
            (writer,) = (await cluster.status("decode-0")).writers
            return writer.quarantined_ms > ROUNDS_S * 1000

        await until(cluster, "a quarantine of some time", quarantined)
        (held,) = await writers(cluster)
        assert (held["writer"], held["transport"], held["grants"]) == ("prefill-0", "shm", 1)
        assert (held["blocks_granted"], held["blocks_quarantined"]) == (0, PROMPT_BLOCKS)
        assert held["taken_back_ms"] > held["quarantined_ms"] > ROUNDS_S * 1000
        assert held["why"] in ("its lease ran out", "its writer was lost", "its request was cancelled"), held
        row = rf"^prefill-0 +{incarnation:016x} +\S+ +shm +1 +0 +{PROMPT_BLOCKS} +\S+ s ago +\S+ s ago"
        row += rf" +\d+ +\S+ +{held['why']}$"
        assert re.search(row, await described(cluster, "decode-0"), re.MULTILINE)
        (begins,) = lines(cluster, "decode-0", "quarantine begins")
        assert f"writer=prefill-0/{incarnation:016x}" in begins
        assert f"blocks={PROMPT_BLOCKS}" in begins
        assert held["why"] in begins
        for trouble in ("grant not given back", "revoke unanswered"):
            assert len(lines(cluster, "decode-0", trouble)) == 1, trouble

        cluster.send_signal("prefill-0", signal.SIGCONT)
        cluster.set_down("prefill-0", False)
        await asyncio.gather(call, return_exceptions=True)
        await assert_conserved(cluster)

        async def reported() -> bool:
            return bool(lines(cluster, "decode-0", "grant not given back: no more"))

        await until(cluster, "the last line", reported)
        (ends,) = lines(cluster, "decode-0", "quarantine ends")
        seconds = re.search(rf"writer=prefill-0/{incarnation:016x} blocks={PROMPT_BLOCKS} seconds=(\S+) ", ends)
        assert seconds is not None and float(seconds[1]) >= ROUNDS_S, ends
        again, over = lines(cluster, "decode-0", "grant not given back")
        assert " WARNING " in again
        counted = re.search(r"no more peer=prefill-0/\S+ times=(\d+) ", over)
        assert counted is not None and int(counted[1]) >= 5, over

    spec = mock_spec(
        blocks=400,
        prefill_flags=SLOW_PREFILL,
        decode_flags={"receiver.lease_ms": 1_000, "receiver.revoke_ms": REVOKE_MS},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))


@pytest.mark.slow
def test_calls_to_a_stopped_decode_node_are_not_told_one_by_one() -> None:
    """Three handoffs to decode-0 are under way when it is stopped. The prefill node warns once of each kind of call
    that is not answered, not once for each handoff; when the node goes on a line says how many there were."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(72)
        prompts = [random_prompt(rng, PROMPT_TOKENS) for _ in range(3)]
        calls = [asyncio.create_task(cluster.client.generate(prompt, max_tokens=5)) for prompt in prompts]

        async def all_under_way() -> bool:
            return (await cluster.status("decode-0")).grants_received == 3

        await wait_for(all_under_way, "three handoffs", story=cluster.story)
        cluster.send_signal("decode-0", signal.SIGSTOP)
        cluster.set_down("decode-0")

        async def noticed() -> bool:
            return bool(lines(cluster, "prefill-0", " call failed"))

        async def given_up() -> bool:
            return (await cluster.status("prefill-0")).record.load.blocks.held == 0

        await until(cluster, "a call to fail", noticed)
        await until(cluster, "the handoffs to be given up", given_up)
        cluster.send_signal("decode-0", signal.SIGCONT)
        cluster.set_down("decode-0", False)
        await asyncio.gather(*calls, return_exceptions=True)
        await assert_conserved(cluster)

        async def reported() -> bool:
            return bool(lines(cluster, "prefill-0", "call failed: no more peer=decode-0 times="))

        await until(cluster, "the line that sums up", reported)
        for kind in ("commit call failed", "release call failed"):
            assert len(lines(cluster, "prefill-0", f"{kind} peer=")) <= 1, kind

    spec = mock_spec(
        blocks=900,
        prefill_flags={
            "engine.mock_layer_delay_ms": 300,
            "engine.tokens_per_step_max": 6_000,
            "writer.call_ms_max": 500,
        },
        decode_flags={"receiver.lease_ms": 600_000, "orphan_ms": 600_000},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
