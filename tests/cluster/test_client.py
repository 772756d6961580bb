"""`baton.client` and the commands that use it, while routers die, stop, restart and refuse: each token once, nothing
left behind. Only a Forget frees what is left: nodes keep it longer than any test takes."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

from baton.client import Answer, AsyncClient, Client, Reason, Sampling
from cli.supervisor import ROUTER_NAME, ClusterSpec
from tests.cluster.test_resume import FAST, ROUTER_FLAGS, kill
from tests.support.cli_harness import BATON, RUN_S_MAX, clean_env, free_endpoint
from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

OTHER = "router-1"
TOKENS = 200
PROMPT = random_prompt(random.Random(15), 40)
GREEDY = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
EXPECTED = mock_tokens(PROMPT, TOKENS)
KEPT = {"orphan_ms": 600_000, "resume_ms": 600_000}
SLOW = {**KEPT, "engine.mock_layer_delay_ms": 1}
"""A step of decode takes some milliseconds: an answer of TOKENS is not over before a test has done something to it."""


def spec_of(routers: int = 1, **changes: Any) -> ClusterSpec:
    flags = {"both": FAST, "router_flags": ROUTER_FLAGS, "decode_flags": SLOW, **changes}
    return replace(mock_spec(**flags), routers=routers)


async def answer_through(cluster: RunningCluster, what: Coroutine[Any, Any, None]) -> Answer:
    """The answer of a client of all routers to whose first one `what` is done behind the tenth token."""
    async with AsyncClient(cluster.cluster.routers, timeout_s=CALL_S_MAX) as client:
        # The first call of a client goes to any of its routers.
        client._book._next = 0
        async with client.stream(PROMPT, sampling=GREEDY) as stream:
            done = False
            async for piece in stream:
                if piece.first_index >= 10 and not done:
                    done = True
                    await what
        return stream.answer


def test_a_router_is_killed() -> None:
    """In the middle of an answer: the client goes on at the other one by itself. When it is closed the nodes know that
    it has all."""
    with running(spec_of(2)) as cluster:
        answer = cluster.run(answer_through(cluster, kill(cluster, ROUTER_NAME)))
        assert (list(answer.ids), answer.finish, answer.attaches) == (EXPECTED, "length", 1)
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_router_ends(signum: signal.Signals) -> None:
    """Told to, with no time for what runs: it leaves the answer to the other one."""

    async def end(cluster: RunningCluster) -> None:
        cluster.send_signal(ROUTER_NAME, signum)
        assert await cluster.wait_exit(ROUTER_NAME) == 0
        cluster.set_down(ROUTER_NAME)

    hasty = {**ROUTER_FLAGS, "lame_duck_ms": 0, "drain_ms_max": 100, "stop_grace_ms": 100}
    with running(spec_of(2, router_flags=hasty)) as cluster:
        answer = cluster.run(answer_through(cluster, end(cluster)))
        assert (list(answer.ids), answer.attaches) == (EXPECTED, 1)
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_a_router_is_killed_under_a_client_without_a_loop() -> None:
    """The same from a program without asyncio."""
    with running(spec_of(2)) as cluster, Client(cluster.cluster.routers, timeout_s=CALL_S_MAX) as client:
        client._client._book._next = 0
        with client.stream(PROMPT, sampling=GREEDY) as stream:
            for piece in stream:
                if piece.first_index == 10:
                    cluster.run(kill(cluster, ROUTER_NAME))
        assert (list(stream.answer.ids), stream.answer.attaches) == (EXPECTED, 1)
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_the_only_router_starts_again() -> None:
    """Killed in the middle of an answer; another process takes its port some time later. The client waits for it. So
    does a request that is made while there is none."""
    listen = {ROUTER_NAME: {"listen": free_endpoint()}}

    async def scenario(cluster: RunningCluster) -> None:
        killed = asyncio.Event()

        async def first() -> Answer:
            async def strike() -> None:
                await kill(cluster, ROUTER_NAME)
                killed.set()

            return await answer_through(cluster, strike())

        asked = asyncio.create_task(first())
        await killed.wait()
        async with AsyncClient(cluster.cluster.routers) as client:
            second = asyncio.create_task(client.generate([1, 2, 3], sampling=replace(GREEDY, max_tokens=5)))
            await cluster.cluster.start_process(ROUTER_NAME)
            answer = await asked
            assert (list(answer.ids), answer.attaches) == (EXPECTED, answer.attaches)
            assert answer.attaches >= 1
            assert list((await second).ids) == mock_tokens([1, 2, 3], 5)
        cluster.set_down(ROUTER_NAME, False)
        cluster._channels.clear()

    with running(spec_of(node_flags=listen)) as cluster:
        cluster.run(scenario(cluster))
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_a_router_is_stopped() -> None:
    """SIGSTOP: its connection stays, and says nothing. The client notices, and goes on at the other one. Later the
    stopped one goes on, and changes nothing."""

    async def stop(cluster: RunningCluster) -> None:
        cluster.send_signal(ROUTER_NAME, signal.SIGSTOP)

    with running(spec_of(2)) as cluster:
        answer = cluster.run(answer_through(cluster, stop(cluster)))
        cluster.send_signal(ROUTER_NAME, signal.SIGCONT)
        assert (list(answer.ids), answer.attaches) == (EXPECTED, 1)
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_a_full_cluster() -> None:
    """A line of two: of twelve requests at a time most are refused with a time to come back. All are answered in the
    end, for none of the clients gives up before its deadline."""
    narrow = spec_of(router_flags={**ROUTER_FLAGS, "requests_max": 1, "line_requests_max": 2})
    prompts = [[i + 1, 2, 3] for i in range(12)]

    async def scenario(cluster: RunningCluster) -> list[Answer]:
        async with AsyncClient(cluster.cluster.router) as client:
            sampling = replace(GREEDY, max_tokens=20)
            return await asyncio.gather(*(client.generate(prompt, sampling=sampling) for prompt in prompts))

    with running(narrow, warm_up=False) as cluster:
        answers = cluster.run(scenario(cluster))
        assert [list(answer.ids) for answer in answers] == [mock_tokens(prompt, 20) for prompt in prompts]
        assert "TOO_MANY_CALLS" in cluster.log_text(ROUTER_NAME)
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_deadlines_and_clients_that_leave() -> None:
    """An answer that is too slow ends with DEADLINE; one whose stream is closed, or whose task is cancelled, ends too.
    The decode node is free of all three."""

    async def scenario(cluster: RunningCluster) -> None:
        async with AsyncClient(cluster.cluster.router) as client:
            error = await error_of(client.generate(PROMPT, sampling=GREEDY, timeout_s=0.3))
            assert error.reason is Reason.DEADLINE
            await assert_conserved(cluster)
            async with client.stream(PROMPT, sampling=GREEDY) as stream:
                await anext(stream)
            await assert_conserved(cluster)
            asked = asyncio.create_task(client.generate(PROMPT, sampling=GREEDY))
            await wait_for(lambda: runs(cluster), "the answer to begin", story=cluster.story)
            asked.cancel()
            await asyncio.wait({asked})
            assert asked.cancelled()
            await assert_conserved(cluster)

    with running(spec_of()) as cluster:
        cluster.run(scenario(cluster))


async def runs(cluster: RunningCluster) -> bool:
    return bool((await cluster.status("decode-0")).record.load.running_requests)


@pytest.mark.slow
def test_ctrl_c_of_a_command() -> None:
    """`baton generate` is interrupted in the middle of its answer: it tells the router before it ends, and the decode
    node is free. With two routers named, one of them dead."""
    with running(spec_of()) as cluster:
        command = [*BATON, "generate", "--token-ids", "1,2", "--router", f"{free_endpoint()},{cluster.cluster.router}"]
        command += ["--max-tokens", "2000", "--ignore-eos"]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=clean_env(), **pipes) as asked:
            try:
                first = asked.stdout.read(1)  # type: ignore[union-attr]
                asked.send_signal(signal.SIGINT)
                out, err = asked.communicate(timeout=RUN_S_MAX)
            finally:
                asked.kill()
        assert (asked.returncode, err, len(first + out) > 1) == (130, b"Cancelled.\n", True)
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_many_threads_of_one_client() -> None:
    """A client without a loop is for all threads of a program; its router dies under all of them."""
    answers: dict[int, Answer] = {}
    sampling = replace(GREEDY, max_tokens=100)

    def ask(client: Client, number: int) -> None:
        with client.stream([number, 2, 3], sampling=sampling) as stream:
            for piece in stream:
                if piece.first_index >= 10:
                    begun[number].set()
        answers[number] = stream.answer

    begun = {number: threading.Event() for number in range(1, 9)}
    with running(spec_of(2)) as cluster:
        with Client(cluster.cluster.routers, timeout_s=CALL_S_MAX) as client:
            threads = [threading.Thread(target=ask, args=(client, number)) for number in begun]
            for thread in threads:
                thread.start()
            assert all(event.wait(CALL_S_MAX) for event in begun.values())
            cluster.run(kill(cluster, ROUTER_NAME))
            for thread in threads:
                thread.join()
        assert {number: list(answer.ids) for number, answer in answers.items()} == {
            number: mock_tokens([number, 2, 3], 100) for number in begun
        }
        assert sum(answer.attaches for answer in answers.values()) >= 4
        cluster.run(assert_conserved(cluster))
