"""API keys at a router with two workers, with real processes: what a key may have it may have of both together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, Final

import pytest

from baton.errors import Reason
from cli.supervisor import ROUTER_NAME
from tests.cluster.test_attach import to_its_end
from tests.cluster.test_resume import FAST
from tests.cluster.test_workers import WORKERS
from tests.support.attaching import Reader
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Client,
    RunningCluster,
    error_of,
    http_endpoint,
    make_request,
    metrics_text,
    mock_spec,
    mock_tokens,
    running,
    wait_for,
)
from tests.support.key_file import Keys
from tests.support.worker_scenes import workers

CALLS: Final = 12
SEQUENCE: Final = 200
LONG: Final = 20_000
"""Tokens of an answer that does not end while a test looks at it."""
BLOCKS: Final = 8_000
"""So many that several of these run at once."""
STREAM: Final = {"max_tokens": LONG, "stream": True, "logprobs": 0}
TOKENS: Final = 300
"""Of one that is read to its end."""
PROMPT: Final = [5, 6, 7]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    made = Keys(tmp_path_factory.mktemp("keys") / "keys.toml")
    made.add("free")
    made.add("two", concurrency=2)
    made.add("one", concurrency=1)
    made.add("slow", requests_per_minute=5)
    made.add("few", tokens_per_minute=20)
    made.write()
    return made


@pytest.fixture(scope="module")
def cluster(keys: Keys) -> Iterator[RunningCluster]:
    flags = {"workers": WORKERS, "lame_duck_ms": 0, "api_keys_file": keys.path}
    spec = mock_spec(both=FAST, blocks=BLOCKS, decode_flags={"engine.mock_layer_delay_ms": 1})
    spec = replace(spec, http="127.0.0.1:0", metrics="127.0.0.1:0", node_flags={ROUTER_NAME: flags})
    with running(spec, warm_up=False) as started:

        async def serves() -> bool:
            return await statuses(started, keys.of["free"]) == [200] * CALLS

        started.run(wait_for(serves, "both workers to know the nodes", story=started.story))
        yield started


@contextlib.asynccontextmanager
async def held(cluster: RunningCluster, key: str) -> AsyncIterator[asyncio.StreamReader]:
    """A stream over HTTP that goes on, on a connection of its own."""
    async with asking(cluster, key, **STREAM) as reader:
        await reader.readuntil(b"data: {")
        yield reader


@contextlib.asynccontextmanager
async def asking(cluster: RunningCluster, key: str, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(*http_endpoint(cluster).rsplit(":", 1))
    try:
        writer.write(post(key, **fields))
        yield reader
    finally:
        writer.transport.abort()


def post(key: str, **fields: Any) -> bytes:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readuntil(b"\r\n\r\n")).split()[1])


async def statuses(cluster: RunningCluster, key: str, **fields: Any) -> list[int]:
    """Of CALLS calls that come at once, each on a connection of its own: both workers have some. None ends before all
    have been answered."""
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(CALL_S_MAX):
        readers = [await stack.enter_async_context(asking(cluster, key, **fields)) for _ in range(CALLS)]
        return sorted(await asyncio.gather(*map(status_of, readers)))


def counted(cluster: RunningCluster, name: str, **labels: str) -> float:
    wanted = ",".join(f'{label}="{value}"' for label, value in labels.items())
    (found,) = [line for line in metrics_text(cluster).splitlines() if line.startswith(f"{name}{{{wanted}}} ")]
    return float(found.split()[-1])


def test_limits_hold_for_both_workers_together(cluster: RunningCluster, keys: Keys) -> None:
    """Twelve calls come at once, to both workers. Two run at a time, five are taken in a minute, two prompts of eight
    are in twenty tokens: no more, and no fewer, with another key each. Metrics have what each has used."""

    async def scenario() -> None:
        assert await statuses(cluster, keys.of["two"], **STREAM) == [200] * 2 + [429] * (CALLS - 2)
        assert await statuses(cluster, keys.of["slow"]) == [200] * 5 + [429] * (CALLS - 5)
        assert await statuses(cluster, keys.of["few"], prompt=[5] * 8) == [200] * 2 + [429] * (CALLS - 2)

        async def over() -> bool:
            return counted(cluster, "baton_key_running", key="two") == 0

        await wait_for(over, "the answers to be over", story=cluster.story)
        assert counted(cluster, "baton_key_requests_total", key="slow") == 5
        assert counted(cluster, "baton_key_refused_total", key="slow", limit="requests") == CALLS - 5
        assert counted(cluster, "baton_key_tokens_total", key="few", kind="prompt") == 16
        assert counted(cluster, "baton_key_tokens_total", key="few", kind="output") == 2

    cluster.run(scenario())


@pytest.mark.slow
def test_calls_one_after_another_are_never_one_too_many(cluster: RunningCluster, keys: Keys) -> None:
    """A key may have one answer. Its client has a connection to each worker, and asks by turns, each time as soon as it
    has the end of the answer before."""

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(CALL_S_MAX):
            connections = []
            for _ in range(WORKERS):
                connections.append(await asyncio.open_connection(*http_endpoint(cluster).rsplit(":", 1)))
                stack.callback(connections[-1][1].transport.abort)
            for number in range(SEQUENCE):
                reader, writer = connections[number % WORKERS]
                writer.write(post(keys.of["one"]))
                assert await status_of(reader) == 200, number
                await reader.readuntil(b"}}")  # of its usage

    cluster.run(scenario())


@pytest.mark.slow
def test_what_a_killed_worker_had_is_free_again(cluster: RunningCluster, keys: Keys) -> None:
    """A key may have two answers, and has one at each worker. One of these is killed: the other answer goes on, and one
    more is let in, not two."""
    key = keys.of["two"]

    async def scenario() -> None:
        async with held(cluster, key) as first, held(cluster, key) as second:
            assert await statuses(cluster, key) == [429] * CALLS
            os.kill(workers(cluster)[0], signal.SIGKILL)

            async def one_has_ended() -> bool:
                return first.at_eof() != second.at_eof()

            async def one_is_free() -> bool:
                return counted(cluster, "baton_key_running", key="two") == 1

            reads = [asyncio.create_task(read_on(each)) for each in (first, second)]
            await wait_for(one_has_ended, "a stream to break", story=cluster.story)
            await wait_for(one_is_free, "its place", story=cluster.story)
            found = await statuses(cluster, key, **STREAM)
            assert found == [200] + [429] * (CALLS - 1)
            assert first.at_eof() != second.at_eof()
            for read in reads:
                read.cancel()

    cluster.run(scenario())


async def read_on(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass


@pytest.mark.slow
def test_a_changed_file_reaches_both_workers(cluster: RunningCluster, keys: Keys) -> None:
    """A new key is good at both within seconds, and after it is taken away at neither. A worker that starts later knows
    the keys of then."""

    async def scenario() -> None:
        keys.add("new")
        keys.write()

        async def known() -> bool:
            return await statuses(cluster, keys.of["new"]) == [200] * CALLS

        async def unknown() -> bool:
            return await statuses(cluster, keys.of["new"]) == [401] * CALLS

        await wait_for(known, "the new key to be taken", story=cluster.story)
        first = workers(cluster)
        os.kill(first[0], signal.SIGKILL)

        async def replaced() -> bool:
            return len(workers(cluster)) == WORKERS and first[0] not in workers(cluster)

        await wait_for(replaced, "the worker to be replaced", story=cluster.story)
        await wait_for(known, "the new worker to know it", story=cluster.story)
        del keys.entries["new"]
        keys.write()
        await wait_for(unknown, "the key to be gone", story=cluster.story)

    cluster.run(scenario())


@pytest.mark.slow
def test_a_client_comes_back_to_the_other_worker(cluster: RunningCluster, keys: Keys) -> None:
    """Its key may have one answer, and a worker serves that on a connection that is lost for the client only. The other
    worker ends it there and goes on with it; who comes with another request has no room."""

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            here, there = [Client(cluster.client.endpoint, api_key=keys.of["one"], own_connection=True) for _ in "ab"]
            for client in (here, there):
                stack.push_async_callback(client.close)
                await client.connect()
            read = Reader(make_request(PROMPT, max_tokens=TOKENS))
            read.generate(here)
            await read.read(10)
            former = read.call
            assert (await error_of(there.generate(PROMPT, max_tokens=1))).metadata == {"limit": "concurrency"}
            read.attach(there)
            await read.read()
            assert read.ids == mock_tokens(PROMPT, TOKENS)
            assert (await error_of(to_its_end(former))).reason is Reason.TAKEN_OVER
            await read.forget(here)
            await there.generate(PROMPT, max_tokens=1)

    cluster.run(scenario())
