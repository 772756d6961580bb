"""The directory dies under load, Redis or the embedded one: what runs goes on, new requests are placed for a bounded
time from what is known, then refused with the reason; when it comes back, empty, everything heals by itself."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from baton.errors import BatonError, Code, Reason
from cli.supervisor import DIRECTORY_NAME
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    error_of,
    http_call,
    http_endpoint,
    metrics_text,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.ports import free_ports
from tests.support.redis_harness import redis_server

STALE_MS = 1_500
MEMBERSHIP = {"membership.heartbeat_ms": 100, "membership.ttl_ms": 600}
LONG_TOKENS = 600
"""At 8 ms a token: far longer than `STALE_MS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    cluster: RunningCluster
    kill: Callable[[], Awaitable[None]]
    bring_back: Callable[[], Awaitable[None]]


@pytest.fixture(params=["redis", "embedded"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    spec = mock_spec(
        decode=2,
        both=MEMBERSHIP,
        router_flags={**MEMBERSHIP, "membership.stale_ms_max": STALE_MS},
        decode_flags={"engine.mock_layer_delay_ms": 2},
    )
    spec = replace(spec, http="127.0.0.1:0", metrics="127.0.0.1:0")
    with ExitStack() as stack:
        if request.param == "redis":
            redis = stack.enter_context(redis_server())
            cluster = stack.enter_context(running(replace(spec, directory=redis.url)))

            async def kill() -> None:
                redis.kill()

            async def bring_back() -> None:
                redis.start()
        else:
            listen = f"127.0.0.1:{free_ports(1)[0]}"
            cluster = stack.enter_context(running(replace(spec, directory_listen=listen)))

            async def kill() -> None:
                cluster.send_signal(DIRECTORY_NAME, signal.SIGKILL)
                await cluster.wait_exit(DIRECTORY_NAME)

            async def bring_back() -> None:
                await cluster.cluster.start_process(DIRECTORY_NAME)

        yield Scene(cluster=cluster, kill=kill, bring_back=bring_back)


@pytest.mark.slow
def test_a_lost_directory_stops_new_work_only_after_its_time(scene: Scene) -> None:
    """Answers run when it dies. New requests are answered, exactly, until `stale_ms_max` is over; then each is told
    DIRECTORY_LOST and when to come back, and so is a load balancer. The running answers end whole meanwhile. Back, it
    serves all again."""
    cluster = scene.cluster
    rng = random.Random(81)
    endpoint = http_endpoint(cluster)

    def get(path: str) -> tuple[int, str]:
        status, _, body = http_call(endpoint, "GET", path)
        return status, body.decode()

    def health() -> tuple[int, str]:
        status, body = get("/health")
        reported = json.loads(body)
        return status, reported["error"]["code"] if "error" in reported else reported["status"]

    async def ask(count: int) -> None:
        prompt = random_prompt(rng, 40)
        answer = await cluster.client.generate(prompt, max_tokens=count)
        assert answer.ids == mock_tokens(prompt, count)

    async def healthy() -> bool:
        return health() == (200, "ok")

    async def story() -> None:
        long_ones = [asyncio.create_task(ask(LONG_TOKENS)) for _ in range(3)]
        await ask(2)
        await wait_for(healthy, "the router to know all of them", story=cluster.story)
        await scene.kill()
        served = 0

        async def refused() -> bool:
            nonlocal served
            (outcome,) = await asyncio.gather(ask(2), return_exceptions=True)
            if outcome is None:
                served += 1
                return False
            assert isinstance(outcome, BatonError), outcome
            assert (outcome.reason, outcome.code) == (Reason.DIRECTORY_LOST, Code.UNAVAILABLE), outcome
            assert outcome.retry_after_ms is not None
            return True

        await wait_for(refused, "new requests to be refused", story=cluster.story)
        assert served > 0, "nothing was placed from what is known"
        assert health() == (503, "directory_lost")
        assert "baton_directory_reached 0.0\n" in metrics_text(cluster)
        assert not any(task.done() for task in long_ones), "the answers were too short for this test"
        assert (await error_of(ask(2))).reason is Reason.DIRECTORY_LOST
        await asyncio.gather(*long_ones)
        await assert_conserved(cluster)
        await scene.bring_back()

        async def healed() -> bool:
            return not await refused()

        await wait_for(healed, "new requests to be taken", story=cluster.story)
        await wait_for(healthy, "the router to know all of them again", story=cluster.story)
        assert "baton_directory_reached 1.0\n" in metrics_text(cluster)
        await asyncio.gather(*(ask(5) for _ in range(4)))
        await assert_conserved(cluster)

    cluster.run(story())
