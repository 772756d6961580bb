"""What the drain tests share: orders to a node, its health, and load on the cluster that must not notice."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from batonpb import common_pb2, node_pb2, node_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc import rpc_errors
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import CALL_S_MAX, Answer, RunningCluster, mock_tokens, random_prompt, wait_for
from tests.support.operators import as_operator

AT_ONCE: Final = 8
SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
PROOF: Final = (
    "requests",
    "answers_unacknowledged",
    "grants_received",
    "grants_written",
    "unacknowledged_writes",
)
SLOW: Final = {"engine.mock_layer_delay_ms": 1}


async def order(cluster: RunningCluster, name: str, what: str, *, incarnation: int = 0) -> node_pb2.NodeStatus:
    """Raises BatonError."""
    stub = node_pb2_grpc.NodeStub(cluster.command_channel(name))
    with rpc_errors(name):
        request = node_pb2.LifecycleOrder(incarnation=incarnation, why="a test")
        status: node_pb2.NodeStatus = await getattr(stub, what)(request, timeout=CALL_S_MAX, metadata=as_operator())
    return status


async def health(cluster: RunningCluster, name: str) -> tuple[int, int]:
    """Readiness and liveness."""
    stub = health_pb2_grpc.HealthStub(cluster.channel(name))
    checks = [await stub.Check(health_pb2.HealthCheckRequest(service=service)) for service in ("ready", "")]
    return checks[0].status, checks[1].status


def state(status: node_pb2.NodeStatus) -> str:
    return common_pb2.Lifecycle.Name(status.record.lifecycle).removeprefix("LIFECYCLE_")


def used(answer: Answer, name: str) -> bool:
    return name in (answer.stats.prefill_node, answer.stats.decode_node)


class Load:
    """AT_ONCE clients, each asking again when it has its answer, which must be exact. Any error fails the test."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._rng = random.Random(31)
        self.answers: list[tuple[float, Answer]] = []
        """Each with the time at which it was asked for."""

    async def client(self) -> None:
        while True:
            asked_s = asyncio.get_running_loop().time()
            prompt = random_prompt(self._rng, self._rng.choice([5, 33, 200, 700]))
            answer = await self._cluster.client.generate(prompt, max_tokens=40)
            assert answer.ids == mock_tokens(prompt, 40)
            self.answers.append((asked_s, answer))

    def asked_after(self, time_s: float) -> list[Answer]:
        return [answer for asked_s, answer in self.answers if asked_s > time_s]


@asynccontextmanager
async def loaded(cluster: RunningCluster) -> AsyncIterator[Load]:
    """Load for the length of the block; what fails in it fails here, at once."""
    load = Load(cluster)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(load.client()) for _ in range(AT_ONCE)]
        yield load
        for client in clients:
            client.cancel()


async def answers_come(cluster: RunningCluster, load: Load, count: int) -> list[Answer]:
    """`count` answers that are asked for from now on."""
    now_s = asyncio.get_running_loop().time()

    async def holds() -> bool:
        return len(load.asked_after(now_s)) >= count

    await wait_for(holds, f"{count} answers", story=cluster.story)
    return load.asked_after(now_s)


async def node_is_used(cluster: RunningCluster, load: Load, name: str) -> None:
    now_s = asyncio.get_running_loop().time()

    async def holds() -> bool:
        return any(used(answer, name) for answer in load.asked_after(now_s))

    await wait_for(holds, f"an answer by {name}", story=cluster.story)


async def node_is_busy(cluster: RunningCluster, name: str) -> None:
    async def holds() -> bool:
        return (await cluster.status(name)).requests > 0

    await wait_for(holds, f"a request at {name}", story=cluster.story)


async def node_is_empty(cluster: RunningCluster, name: str) -> node_pb2.NodeStatus:
    async def holds() -> bool:
        return (await cluster.status(name)).safe_to_delete

    await wait_for(holds, f"{name} to be drained", story=cluster.story)
    return await cluster.status(name)


async def drain_under_load(cluster: RunningCluster, name: str) -> None:
    """In the middle of its work the node takes nothing new from the order on, proves that it is empty, takes work again
    after undrain, and ends with status 0 when it is told to after a second drain. No request fails, no token is wrong.
    """
    async with loaded(cluster) as load:
        await node_is_used(cluster, load, name)
        await node_is_busy(cluster, name)
        assert await health(cluster, name) == (SERVING, SERVING)
        first = await order(cluster, name, "Drain")
        drained_s = asyncio.get_running_loop().time()
        assert state(first) == ("DRAINED" if first.safe_to_delete else "DRAINING")
        assert await health(cluster, name) == (NOT_SERVING, SERVING)
        again = await order(cluster, name, "Drain", incarnation=first.record.incarnation)
        assert again.story.count("DRAINING") == 1

        proof = await node_is_empty(cluster, name)
        assert state(proof) == "DRAINED"
        assert {what: getattr(proof, what) for what in PROOF} == dict.fromkeys(PROOF, 0)
        assert state(await order(cluster, name, "Drain")) == "DRAINED"
        assert await health(cluster, name) == (NOT_SERVING, SERVING)
        await answers_come(cluster, load, 2 * AT_ONCE)
        assert [answer.stats for answer in load.asked_after(drained_s) if used(answer, name)] == []

        assert state(await order(cluster, name, "Undrain")) == "READY"
        assert await health(cluster, name) == (SERVING, SERVING)
        await node_is_used(cluster, load, name)

        arguments = ("drain", name, "--wait", "--directory", cluster.cluster.directory)
        done = await asyncio.to_thread(run_baton, *arguments)
        assert (done.returncode, done.stdout) == (
            0, f"{name} is drained and holds nothing: safe to delete.\n",
        ), done.stderr  # fmt: skip
        cluster.set_down(name)
        cluster.send_signal(name, signal.SIGTERM)
        assert await cluster.wait_exit(name) == 0, cluster.story()
        await answers_come(cluster, load, AT_ONCE)
        await cluster.cluster.start_process(name)
        cluster.set_down(name, down=False)
        await node_is_used(cluster, load, name)


async def end_under_load(cluster: RunningCluster, name: str) -> None:
    """SIGTERM in the middle of the node's work, with nobody asking it to drain before: nothing fails, status 0."""
    async with loaded(cluster) as load:
        await node_is_used(cluster, load, name)
        await node_is_busy(cluster, name)
        cluster.set_down(name)
        cluster.send_signal(name, signal.SIGTERM)
        assert await cluster.wait_exit(name) == 0, cluster.story()
        assert "drain given up" not in cluster.log_text(name)
        await answers_come(cluster, load, AT_ONCE)
        await cluster.cluster.start_process(name)
        cluster.set_down(name, down=False)
        await node_is_used(cluster, load, name)
