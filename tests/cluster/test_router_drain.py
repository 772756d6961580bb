"""Draining one of two routers under load: clients go to the other one, and no request fails."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from baton.errors import BatonError, Reason
from tests.support.cli_harness import Foreground, run_baton
from tests.support.cluster_harness import (
    Client,
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

AT_ONCE: Final = 8
FIRST, SECOND = "router-0", "router-1"
CLOSED: Final = (Reason.PEER_UNREACHABLE, Reason.CANCELLED)
"""Nobody gets a connection; the latter is what gRPC says to a call that is on its way just then."""
SLOW: Final = {"engine.mock_layer_delay_ms": 1}


@contextmanager
def second_router(cluster: RunningCluster, folder: Path) -> Iterator[str]:
    """Its endpoint."""
    arguments = ("router", "--name", SECOND, "--listen", "127.0.0.1:0", "--directory", cluster.cluster.directory)
    with Foreground(*arguments, "--lame-duck-ms", "0", folder=folder) as process:
        process.wait_for("ready")
        found = re.search(r"ready.* (127\.0\.0\.1:\d+)", process.out)
        assert found is not None, process.out
        yield found[1]
        assert process.stop(signal.SIGTERM) == 0, process.err


class Load:
    """AT_ONCE clients, each asking again when it has its answer. All begin at the first router; when it takes no calls
    because it is being drained, the same request goes to the second. Any other error, or token, fails the test."""

    def __init__(self, cluster: RunningCluster, first: Client, second: Client) -> None:
        self._cluster = cluster
        self._clients = {FIRST: first, SECOND: second}
        self._rng = random.Random(81)
        self.answers = {FIRST: 0, SECOND: 0}
        self.refused = 0

    async def client(self) -> None:
        router = FIRST
        while True:
            prompt = random_prompt(self._rng, self._rng.choice([5, 33, 200, 700]))
            try:
                answer = await self._clients[router].generate(prompt, max_tokens=40)
            except BatonError as error:
                if router != FIRST or error.reason not in CLOSED:
                    raise
                self.refused += 1
                router = SECOND
                answer = await self._clients[router].generate(prompt, max_tokens=40)
            assert answer.ids == mock_tokens(prompt, 40)
            self.answers[router] += 1

    async def until(self, router: str, count: int) -> None:
        async def holds() -> bool:
            return self.answers[router] >= count

        await wait_for(holds, f"{count} answers by {router}", story=self._cluster.story)

    async def until_all_are_refused(self) -> None:
        """Some have yet to read the end of their last answer by the first router when that one has none left."""

        async def holds() -> bool:
            return self.refused == AT_ONCE

        await wait_for(holds, "all clients to be refused", story=self._cluster.story)


def test_a_router_is_drained_under_load(tmp_path: Path) -> None:
    """`baton drain router-0 --wait` in the middle of eight answers: those are finished, what comes later is refused
    before its first token, and answered by router-1. The drain ends with status 0 and the proof; so does the
    process."""

    async def scenario(cluster: RunningCluster, endpoint: str) -> None:
        second = Client(endpoint)
        load = Load(cluster, cluster.client, second)
        try:
            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(load.client()) for _ in range(AT_ONCE)]
                await load.until(FIRST, 2 * AT_ONCE)
                before = load.answers[FIRST]
                arguments = ("drain", FIRST, "--wait", "--directory", cluster.cluster.directory, "-o", "json")
                done = await asyncio.to_thread(run_baton, *arguments)
                assert done.returncode == 0, done.stderr
                reported = json.loads(done.stdout)["status"]
                assert (reported["state"], reported["safe_to_delete"], reported["requests"]) == ("drained", True, 0)
                await load.until_all_are_refused()
                assert load.answers[FIRST] > before, "nothing was running when the drain began"
                await load.until(SECOND, 2 * AT_ONCE)
                cluster.set_down(FIRST)
                cluster.send_signal(FIRST, signal.SIGTERM)
                assert await cluster.wait_exit(FIRST) == 0, cluster.story()
                await load.until(SECOND, 4 * AT_ONCE)
                for client in clients:
                    client.cancel()
        finally:
            await second.close()
        await assert_conserved(cluster)

    spec = mock_spec(prefill=2, decode=2, blocks=600, both=SLOW, decode_flags={"orphan_ms": 1_000})
    with running(spec) as cluster, second_router(cluster, tmp_path) as endpoint:
        cluster.run(scenario(cluster, endpoint))
