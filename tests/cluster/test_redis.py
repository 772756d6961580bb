"""A cluster of processes whose directory is a Redis server: the server is killed and comes back empty."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.clock import Clock
from baton.directory_setting import open_directory
from baton.errors import BatonError
from baton.rpc import ChannelLimits, Channels
from cli.child import stop_children
from cli.services import Service
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.redis_harness import RedisServer, redis_server

TTL_MS = 1_000
MEMBERSHIP = {"membership.heartbeat_ms": 100, "membership.ttl_ms": TTL_MS}
SLOW_LAYER_MS = 10
LONG_TOKENS = 60


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def cluster(redis: RedisServer) -> Iterator[RunningCluster]:
    """One prefill and two decode nodes, slow enough that a long answer outlives several records' time to live."""
    spec = mock_spec(
        prefill=1,
        decode=2,
        both=MEMBERSHIP,
        router_flags=MEMBERSHIP,
        decode_flags={"engine.mock_layer_delay_ms": SLOW_LAYER_MS},
    )
    with running(replace(spec, directory=redis.url)) as cluster:
        yield cluster


async def listed(cluster: RunningCluster) -> list[str]:
    """Whom Redis knows; nobody where it does not answer."""
    channels = Channels(limits=ChannelLimits())
    directory = open_directory(cluster.cluster.directory, channels=channels, clock=Clock())
    try:
        return [record.name for record in (await directory.list()).records]
    except BatonError:
        return []
    finally:
        await directory.close()
        await channels.close()


def test_no_request_notices_that_redis_is_lost(cluster: RunningCluster, redis: RedisServer) -> None:
    """Killed while answers run: they go on, and new ones are placed from what is known, for longer than any record
    lives. Back, empty: everybody is there again, and a node that leaves and one that comes are noticed."""
    rng = random.Random(21)
    everybody = ["decode-0", "decode-1", "prefill-0", "router-0"]
    assert cluster.cluster.names == ("router-0", "prefill-0", "decode-0", "decode-1")

    async def ask(count: int) -> str:
        prompt = random_prompt(rng, 50)
        answer = await cluster.client.generate(prompt, max_tokens=count)
        assert answer.ids == mock_tokens(prompt, count)
        return str(answer.stats.decode_node)

    async def lost() -> bool:
        return all("directory lost" in cluster.log_text(name) for name in everybody)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert await listed(cluster) == everybody
        running_ones = [asyncio.create_task(ask(LONG_TOKENS)) for _ in range(4)]
        await ask(2)
        redis.kill()
        assert not any(task.done() for task in running_ones)
        await wait_for(lost, "everybody to notice", story=cluster.story)
        outlived_s = loop.time() + 2 * TTL_MS / 1e3
        while loop.time() < outlived_s:
            await ask(3)
        await asyncio.gather(*running_ones)

        redis.start()

        async def healed() -> bool:
            return await listed(cluster) == everybody

        await wait_for(healed, "everybody to register again", story=cluster.story)
        await stop_children([cluster.cluster._children["decode-0"]], grace_ms=cluster.cluster.spec.stop_grace_ms)
        cluster.set_down("decode-0")
        assert await listed(cluster) == everybody[1:]
        assert {await ask(3) for _ in range(6)} == {"decode-1"}
        await cluster.cluster.start_process("decode-0")
        cluster.set_down("decode-0", False)

        async def used_again() -> bool:
            return await ask(3) == "decode-0"

        await wait_for(used_again, "the new node to get work", story=cluster.story)
        await assert_conserved(cluster)

    cluster.run(scene())


def test_a_cluster_starts_before_its_redis(redis: RedisServer) -> None:
    """Redis is away when the processes start and comes while they wait for it."""
    redis.kill()
    spec = mock_spec(both={"membership.directory_wait_ms_max": 60_000}, router_flags=MEMBERSHIP)
    with asyncio.Runner() as runner:
        cluster = RunningCluster(replace(spec, directory=redis.url), runner)

        async def scene() -> None:
            starting = asyncio.create_task(cluster.start())

            async def waiting() -> bool:
                pids = cluster.cluster.pids
                assert not starting.done(), starting.result()
                return len(pids) == 3 and all("not registered yet" in cluster.log_text(name) for name in pids)

            await wait_for(waiting, "all processes to look for the directory", story=cluster.story)
            redis.start()
            await starting
            await assert_conserved(cluster)

        try:
            cluster.run(scene())
        finally:
            cluster.run(cluster.stop())


def test_a_directory_of_its_own_or_a_given_one() -> None:
    """With a given directory none is started, and every process is pointed at the given one."""
    spec = replace(mock_spec(), directory="redis://redis:6379/1")
    assert [name for name, _ in spec.processes()] == ["router-0", "prefill-0", "decode-0"]
    assert spec.flags_of("decode-0", Service.DECODE, spec.directory or "")["directory"] == "redis://redis:6379/1"
    assert next(name for name, _ in mock_spec().processes()) == "directory"
