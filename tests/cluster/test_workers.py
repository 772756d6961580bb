"""A router with two workers: both serve both ports; one that dies or stands still takes no other's clients with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.cluster_harness import (
    RunningCluster,
    http_call,
    http_endpoint,
    metrics_text,
    mock_spec,
    mock_tokens,
    running,
    wait_for,
)

ROUTER: Final = "router-0"
WORKERS: Final = 2


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    spec = replace(
        mock_spec(),
        http="127.0.0.1:0",
        metrics="127.0.0.1:0",
        node_flags={ROUTER: {"workers": WORKERS, "lame_duck_ms": 0}},
    )
    with running(spec) as started:
        yield started


def workers(cluster: RunningCluster) -> list[int]:
    """Their process ids."""
    children = Path(f"/proc/{cluster.cluster.pids[ROUTER]}/task")
    pids = [int(pid) for thread in children.iterdir() for pid in (thread / "children").read_text().split()]
    return [pid for pid in pids if b"router.worker " in Path(f"/proc/{pid}/cmdline").read_bytes()]


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def http_answer(cluster: RunningCluster) -> dict[str, Any]:
    body = json.dumps({"prompt": [5, 6], "max_tokens": 4, "temperature": 0}).encode()
    status, _, text = await asyncio.to_thread(http_call, http_endpoint(cluster), "POST", "/v1/completions", body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


async def served(cluster: RunningCluster) -> None:
    """Over both ports, by new connections."""
    assert (await http_answer(cluster))["usage"]["completion_tokens"] == 4
    assert (await cluster.client.generate([5, 6], max_tokens=4)).ids == mock_tokens([5, 6], 4)


def test_two_workers_serve_and_one_is_killed(cluster: RunningCluster) -> None:
    """Answers come over gRPC and HTTP. A worker is killed: another one takes its place, and the port has never gone."""

    async def scene() -> None:
        first = workers(cluster)
        assert len(first) == WORKERS
        for _ in range(4):
            await served(cluster)
        os.kill(first[0], signal.SIGKILL)
        for _ in range(4):
            assert (await http_answer(cluster))["usage"]["completion_tokens"] == 4

        async def replaced() -> bool:
            return len(workers(cluster)) == WORKERS and first[0] not in workers(cluster)

        await wait_for(replaced, "the worker to be replaced", story=cluster.story)
        await served(cluster)

    cluster.run(scene())


@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_replaced(cluster: RunningCluster) -> None:
    """A worker stands still. New connections go to the other one, within half a second; after five it is replaced."""

    async def scene() -> None:
        first = workers(cluster)
        os.kill(first[1], signal.SIGSTOP)
        for _ in range(4):
            assert (await http_answer(cluster))["usage"]["completion_tokens"] == 4

        async def replaced() -> bool:
            return len(workers(cluster)) == WORKERS and first[1] not in workers(cluster)

        await wait_for(replaced, "the worker to be replaced", story=cluster.story)
        await served(cluster)

    cluster.run(scene())


@pytest.mark.slow
def test_a_router_with_workers_is_drained_and_undrained(cluster: RunningCluster) -> None:
    """It is drained with its workers, takes calls again at the same port, and leaves no process behind."""

    async def scene() -> None:
        await served(cluster)
        await cluster.order(ROUTER, "Drain")

        async def drained() -> bool:
            return (await cluster.status(ROUTER)).safe_to_delete

        await wait_for(drained, "the router to be drained", story=cluster.story)
        await cluster.order(ROUTER, "Undrain")

        async def serves() -> bool:
            return (await http_health(cluster)) == 200

        await wait_for(serves, "the router to serve again", story=cluster.story)
        await served(cluster)
        assert "baton_requests_total" in metrics_text(cluster)
        pids = workers(cluster)
        cluster.set_down(ROUTER)
        cluster.send_signal(ROUTER, signal.SIGTERM)
        assert await cluster.wait_exit(ROUTER) == 0
        assert not any(map(lives, pids))

    cluster.run(scene())


async def http_health(cluster: RunningCluster) -> int:
    status, _, _ = await asyncio.to_thread(http_call, http_endpoint(cluster), "GET", "/health")
    return status
