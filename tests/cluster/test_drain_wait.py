"""`baton drain --wait` of a node whose process ends meanwhile: by its own drain, by a stop, by a kill."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
from collections.abc import Sequence

import pytest

from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import (
    Answer,
    RunningCluster,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.drain_harness import order, state
from tests.support.fault_harness import with_tokens

NODE = "decode-0"
COUNTS = (150, 600, 2_400)
Answering = asyncio.Task[Answer]
Waiting = asyncio.Task[subprocess.CompletedProcess[str]]


async def waiting(cluster: RunningCluster, prompt: list[int], counts: Sequence[int]) -> tuple[Answering, Waiting]:
    """An answer, and the command, once the node is draining by its order in the middle of that answer. How long a
    process takes to start is the machine's matter: of `counts` tokens, the first that is long enough is taken."""
    arguments = ("drain", NODE, "--wait", "--timeout", "60", "--directory", cluster.cluster.directory)
    seen = ""

    async def ordered() -> bool:
        nonlocal seen
        seen = state(await cluster.status(NODE))
        return seen in ("DRAINING", "DRAINED")

    for count in counts:
        answering = await with_tokens(cluster, prompt, count)
        command = asyncio.create_task(asyncio.to_thread(run_baton, *arguments))
        await wait_for(ordered, "the order", story=cluster.story)
        if seen == "DRAINING":
            return answering, command
        await asyncio.gather(answering, command)
        await order(cluster, NODE, "Undrain")
        await serves(cluster)
    raise AssertionError(f"{counts} tokens were too few for this test")


async def ended(cluster: RunningCluster, signum: signal.Signals) -> int:
    cluster.set_down(NODE)
    cluster.send_signal(NODE, signum)
    return await cluster.wait_exit(NODE)


async def started_again(cluster: RunningCluster) -> None:
    await cluster.cluster.start_process(NODE)
    cluster.set_down(NODE, down=False)
    await serves(cluster)


async def serves(cluster: RunningCluster) -> None:
    async def answers() -> bool:
        outcome = await asyncio.gather(cluster.client.generate([1, 2, 3], max_tokens=2), return_exceptions=True)
        return not isinstance(outcome[0], BaseException)

    await wait_for(answers, "the node to serve", story=cluster.story)


@pytest.mark.slow
def test_a_node_that_ends_while_its_drain_is_waited_for() -> None:
    """One decode node, an answer on it, and its drain is waited for. Told to end, it finishes the answer and is gone at
    once: that is success, since it had said that it was empty. Stopped, it says what it has given up. Killed, it says
    nothing: so does the command, in words, with what the node held and what to do. Each is another status or text, and
    nothing that gRPC says of a connection is in it."""

    async def scenario(cluster: RunningCluster) -> None:
        rng = random.Random(81)
        prompt = random_prompt(rng, 30)
        answering, command = await waiting(cluster, prompt, COUNTS)
        assert await ended(cluster, signal.SIGTERM) == 0, cluster.story()
        done = await command
        assert done.returncode == 0, done.stderr
        # Its word that it is drained may come before its last.
        assert done.stdout in (
            f"{NODE} has ended in order; it was empty before.\n",
            f"{NODE} is drained and holds nothing: safe to delete.\n",
        )  # fmt: skip
        ids = (await answering).ids
        assert len(ids) in COUNTS
        assert ids == mock_tokens(prompt, len(ids))

        await started_again(cluster)
        answering, command = await waiting(cluster, prompt, (4_000,))
        assert await ended(cluster, signal.SIGINT) == 0, cluster.story()
        done = await command
        assert (done.returncode, done.stdout) == (1, f"{NODE} has ended in order; it was not empty.\n"), done.stderr
        assert done.stderr.startswith(f"{NODE} was stopped before it was empty; given up: 1 request")
        await asyncio.gather(answering, return_exceptions=True)

        await started_again(cluster)
        answering, command = await waiting(cluster, prompt, (4_000,))
        await ended(cluster, signal.SIGKILL)
        done = await command
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(
            f"error: {NODE} no longer answers (asked 20 times), and has not said that it was "
        )
        assert "it was draining and held 1 request" in done.stderr
        assert "`baton nodes` shows who is there" in done.stderr
        for word in ("ipv4", "onnect", "StatusCode", "Traceback"):
            assert word not in done.stderr
        await asyncio.gather(answering, return_exceptions=True)

    spec = mock_spec(
        router_flags={"placement_wait_ms_max": 500, "retries.resume_wait_ms_max": 500},
        decode_flags={"engine.mock_layer_delay_ms": 4},
    )
    with running(spec) as cluster:
        cluster.run(scenario(cluster))
