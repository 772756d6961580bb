"""A router with two workers: both serve both ports; one that dies or stands still takes no other's clients with it, and
streams of its own go on at another one."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from baton.client import AsyncClient, Sampling
from cli.ca import make_ca
from cli.supervisor import DIRECTORY_NAME, ROUTER_NAME
from tests.support.attaching import Reader
from tests.support.certificates import change_ca
from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    assert_conserved,
    http_call,
    http_endpoint,
    make_request,
    metrics_text,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.sse import Stream
from tests.support.worker_scenes import OwnClient, Streams, connections, count, in_session_of, lives, owner, workers

WORKERS: Final = 2
PAIRS: Final = 4
"""Streams over each door."""
TOKENS: Final = 900
SLOW: Final = {"engine.mock_layer_delay_ms": 2}
"""A step of decode takes some milliseconds: nothing is over before the test has done something to it."""


def spec_of(*, workers: int = WORKERS, tls: bool = False) -> Any:
    flags = {ROUTER_NAME: {"workers": workers, "lame_duck_ms": 0}}
    spec = mock_spec(blocks=1_200, decode_flags=SLOW, node_flags=flags, tls=tls)
    return replace(spec, http="127.0.0.1:0", metrics="127.0.0.1:0")


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with running(spec_of()) as started:
        yield started


def streams_of(cluster: RunningCluster, tokens: int = TOKENS) -> Streams:
    rng = random.Random(3)
    return Streams(cluster, [random_prompt(rng, 20) for _ in range(PAIRS)], tokens)


async def http_answer(cluster: RunningCluster) -> dict[str, Any]:
    body = json.dumps({"prompt": [5, 6], "max_tokens": 4, "temperature": 0}).encode()
    status, _, text = await asyncio.to_thread(http_call, http_endpoint(cluster), "POST", "/v1/completions", body)
    assert status == 200, text
    answer: dict[str, Any] = json.loads(text)
    return answer


async def served(cluster: RunningCluster) -> None:
    """Over both ports, by new connections."""
    assert (await http_answer(cluster))["usage"]["completion_tokens"] == 4
    client = OwnClient(cluster.cluster.router)
    try:
        assert (await client.generate([5, 6], max_tokens=4)).ids == mock_tokens([5, 6], 4)
    finally:
        await client.close()


async def replaced(cluster: RunningCluster, *gone: int) -> None:
    async def all_there() -> bool:
        now = workers(cluster)
        return len(now) == WORKERS and not set(gone) & set(now)

    await wait_for(all_there, "workers to be replaced", story=cluster.story)


async def counters(cluster: RunningCluster) -> dict[str, float]:
    return {counter.name: counter.value for counter in (await cluster.status(ROUTER_NAME)).counters}


@pytest.mark.slow
def test_streams_outlive_each_worker_that_is_killed(cluster: RunningCluster) -> None:
    """Clients read resumable streams over HTTP and gRPC. One worker is killed, then the other one: each stream loses
    its own. The clients come back, over Last-Event-ID or Attach, and have each token once."""

    async def scene() -> None:
        streams = streams_of(cluster, 2 * TOKENS)  # outlives two starts of a worker on a busy machine
        await streams.start()
        first = workers(cluster)
        assert len(first) == WORKERS
        for pid in first:
            os.kill(pid, signal.SIGKILL)
            await streams.go_on()
        await streams.end()
        assert all(stream.calls > 1 for stream in streams.all)  # some had tokens to read still when theirs was killed
        await replaced(cluster, *first)
        await served(cluster)
        assert (await counters(cluster)).items() >= {("workers", WORKERS), ("workers that have ended", WORKERS)}
        await streams.forget()
        await assert_conserved(cluster)

    cluster.run(scene())


@pytest.mark.slow
def test_the_client_library_goes_on_at_another_worker(cluster: RunningCluster) -> None:
    """It knows one address only. Each worker is killed in its turn, so the one that it is connected to as well."""
    arrived = dict.fromkeys(range(4), 0)
    prompt = random_prompt(random.Random(6), 20)

    async def stream(client: AsyncClient, number: int) -> int:
        ids: list[int] = []
        async with client.stream(prompt, sampling=Sampling(temperature=0, max_tokens=TOKENS)) as pieces:
            async for piece in pieces:
                ids += piece.ids
                arrived[number] = len(ids)
        assert ids == mock_tokens(prompt, TOKENS)
        return pieces.answer.attaches

    async def go_on() -> None:
        had = dict(arrived)

        async def more() -> bool:
            return all(arrived[number] > before for number, before in had.items())

        await wait_for(more, "more tokens of each", story=cluster.story, timeout_s=CALL_S_MAX)
        assert max(arrived.values()) < TOKENS, "one is over already"

    async def scene() -> None:
        async with AsyncClient(cluster.cluster.router) as client:
            reading = [asyncio.create_task(stream(client, number)) for number in arrived]
            await go_on()
            for pid in workers(cluster):
                os.kill(pid, signal.SIGKILL)
                await go_on()
            assert min(await asyncio.gather(*reading)) > 0
        await assert_conserved(cluster)

    cluster.run(scene())


@pytest.mark.slow
def test_streams_outlive_a_worker_that_stands_still(cluster: RunningCluster) -> None:
    """A worker is stopped. Its clients hear nothing, leave, and go on at the other one; new clients are served there.
    After five seconds it is killed and replaced."""

    async def scene() -> None:
        streams = streams_of(cluster, 2 * TOKENS)  # outlives the silence that a client bears
        await streams.start()
        stopped = workers(cluster)[1]
        assert count(cluster)[stopped] >= PAIRS
        os.kill(stopped, signal.SIGSTOP)

        async def have_left() -> bool:
            return sum(stream.calls > 1 for stream in streams.all) >= PAIRS

        # Not by their tokens: a client has some that came before the stop.
        await wait_for(have_left, "clients to leave the worker that stands still", story=cluster.story)
        await streams.go_on()
        await served(cluster)
        await replaced(cluster, stopped)
        await streams.end()
        await served(cluster)
        await streams.forget()
        await assert_conserved(cluster)

    cluster.run(scene())


@pytest.mark.slow
def test_clients_attach_at_the_other_worker_again_and_again(cluster: RunningCluster) -> None:
    """Over both doors, while the connection that they have had is open still: the later call has the answer."""
    prompt = random_prompt(random.Random(5), 20)
    body = {"prompt": prompt, "max_tokens": 200, "temperature": 0, "stream": True, "resumable": True}
    text = json.dumps({**body, "return_token_ids": True}).encode()

    def http_connection(stack: ExitStack, had: int | None) -> tuple[http.client.HTTPConnection, int]:
        """At a worker that is not the one that was had."""
        for _ in range(2 * WORKERS):
            connection = http.client.HTTPConnection(http_endpoint(cluster), timeout=CALL_S_MAX)
            stack.enter_context(closing(connection))
            connection.request("GET", "/live")
            assert connection.getresponse().read() is not None
            found = owner(cluster, http_endpoint(cluster), connection.sock.getsockname()[1])
            assert found is not None
            if found != had:
                return connection, found
        raise AssertionError("all connections are at one worker")

    def over_http() -> None:
        stream, worker, hops = Stream(), None, 0
        with ExitStack() as stack:
            while not stream.done:
                connection, worker = http_connection(stack, worker)
                connection.request("POST", "/v1/completions", text, stream.headers() if hops else {})
                response = connection.getresponse()
                assert response.status == 200, response.read()
                stream.read(iter(response.readline, b""), events=20 if hops < 5 else None)
                hops += 1
        assert (hops, stream.ids[0]) == (6, mock_tokens(prompt, 200))

    async def grpc_client(had: int | None) -> tuple[OwnClient, int]:
        for _ in range(2 * WORKERS):
            before = connections(cluster, cluster.cluster.router)
            client = OwnClient(cluster.cluster.router)
            await client.connect()
            now = connections(cluster, cluster.cluster.router)
            ((found, _),) = [(pid, ports) for pid, ports in now.items() if ports - before[pid]]
            if found != had:
                return client, found
        raise AssertionError("all connections are at one worker")

    async def over_grpc() -> None:
        read, worker, clients = Reader(make_request(prompt, max_tokens=200)), None, []
        for tokens in range(20, 140, 20):
            client, worker = await grpc_client(worker)
            clients.append(client)
            if read.token:
                read.attach(client, repeats=bool(len(clients) % 2))
            else:
                read.generate(client)
            await read.read(tokens if tokens < 120 else None)
        assert read.ids == mock_tokens(prompt, 200)
        for client in clients:
            await client.close()
        await read.forget(cluster.client)

    async def scene() -> None:
        await asyncio.to_thread(over_http)
        await over_grpc()

    cluster.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, WORKERS])
def test_all_certificates_change_under_streams(processes: int, tmp_path: Path) -> None:
    """To those of another CA, while clients read over both doors, with workers and without. Then each client leaves and
    comes back, and with workers one of these is killed: all tokens have come, once."""
    make_ca(tmp_path / "new")
    with running(spec_of(workers=processes, tls=True)) as cluster:
        names = cluster.cluster.names
        readers = [name for name in names if name != DIRECTORY_NAME]
        if processes > 1:
            readers += [f"{ROUTER_NAME}/{number}" for number in range(processes)]

        async def all_read(times: int) -> None:
            async def read() -> bool:
                # A process looks when it makes a call.
                await asyncio.gather(*(served(cluster) for _ in range(2 * processes)))
                text = "\n".join(cluster.log_text(name) for name in names)
                return all(
                    len(re.findall(rf"^.* {re.escape(name)} .*were read anew", text, re.M)) >= times for name in readers
                )

            await wait_for(read, "all processes to read the files", story=cluster.story)

        async def scene() -> None:
            streams = streams_of(cluster)
            await streams.start()
            await change_ca(cluster, tmp_path / "new", all_read)
            await streams.go_on()
            assert {stream.calls for stream in streams.all} == {1}, "a stream has ended with the old certificates"
            for stream in streams.all:
                stream.leave = True
            await streams.go_on()
            if processes > 1:
                killed = workers(cluster)[0]
                os.kill(killed, signal.SIGKILL)
                await streams.go_on()
                await replaced(cluster, killed)
            await streams.end()
            await served(cluster)

        cluster.run(scene())


@pytest.mark.slow
def test_the_parent_is_killed(cluster: RunningCluster) -> None:
    """Under streams. Its workers end with it, and nobody listens any more."""

    async def scene() -> None:
        streams = streams_of(cluster)
        streams.http = []
        await streams.start()
        pids = workers(cluster)
        parent = cluster.cluster.pids[ROUTER_NAME]
        assert set(pids) < set(in_session_of(parent))
        cluster.set_down(ROUTER_NAME)
        cluster.send_signal(ROUTER_NAME, signal.SIGKILL)
        await cluster.wait_exit(ROUTER_NAME)

        async def all_gone() -> bool:
            return not in_session_of(parent) and not any(map(lives, pids))

        await wait_for(all_gone, "the workers to end", story=cluster.story)
        with pytest.raises(OSError, match="refused"):
            await http_answer(cluster)
        await streams.give_up()

    cluster.run(scene())


@pytest.mark.slow
def test_metrics_add_up(cluster: RunningCluster) -> None:
    """Exactly, over workers that live, one that has been killed, and the one in its place."""

    def sums() -> tuple[int, int, int]:
        text = metrics_text(cluster)
        found = []
        for name in (
            'baton_requests_total{outcome="length"}', "baton_output_tokens_total", "baton_e2e_seconds_count"
        ):  # fmt: skip
            (value,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.M)
            found.append(int(float(value)))
        return found[0], found[1], found[2]

    async def more(calls: int) -> tuple[int, int, int]:
        before = await asyncio.to_thread(sums)
        await asyncio.gather(*(served(cluster) for _ in range(calls)))
        after = await asyncio.to_thread(sums)
        return after[0] - before[0], after[1] - before[1], after[2] - before[2]

    async def scene() -> None:
        assert await more(6) == (12, 48, 12)
        before = await asyncio.to_thread(sums)
        (killed, _) = workers(cluster)
        os.kill(killed, signal.SIGKILL)
        await replaced(cluster, killed)
        assert await asyncio.to_thread(sums) == before
        assert await more(6) == (12, 48, 12)

    cluster.run(scene())


@pytest.mark.slow
def test_connections_are_balanced(cluster: RunningCluster) -> None:
    """Twenty over HTTP and ten over gRPC. Half of one worker's leave: those that come have it."""

    async def has(*counts: int) -> None:
        async def so() -> bool:
            return sorted(count(cluster).values()) == sorted(counts)

        await wait_for(so, f"{counts} connections", story=lambda: str(count(cluster)))

    async def scene() -> None:
        endpoint, (_, other) = http_endpoint(cluster), workers(cluster)
        before = count(cluster)
        held = [await asyncio.open_connection(*endpoint.rsplit(":", 1)) for _ in range(20)]
        clients = [OwnClient(cluster.cluster.router) for _ in range(10)]
        for client in clients:
            await client.connect()
        total = sum(before.values()) + 30
        await has(total // 2, total - total // 2)
        theirs = connections(cluster, endpoint)[other]
        for _, writer in held:
            if writer.get_extra_info("sockname")[1] in theirs:
                writer.close()
        await has(*(n - len(theirs) * (pid == other) for pid, n in count(cluster).items()))
        held += [await asyncio.open_connection(*endpoint.rsplit(":", 1)) for _ in theirs]
        await has(total // 2, total - total // 2)
        for _, writer in held:
            writer.close()
        for client in clients:
            await client.close()

    cluster.run(scene())


@pytest.mark.slow
def test_a_router_with_workers_is_drained_and_undrained(cluster: RunningCluster) -> None:
    """It is drained with its workers, takes calls again at the same port, and leaves no process behind."""

    async def scene() -> None:
        await served(cluster)
        await cluster.order(ROUTER_NAME, "Drain")

        async def drained() -> bool:
            return (await cluster.status(ROUTER_NAME)).safe_to_delete

        await wait_for(drained, "the router to be drained", story=cluster.story)
        await cluster.order(ROUTER_NAME, "Undrain")

        async def serves() -> bool:
            return (await http_health(cluster)) == 200

        await wait_for(serves, "the router to serve again", story=cluster.story)
        await served(cluster)
        pids = workers(cluster)
        cluster.set_down(ROUTER_NAME)
        cluster.send_signal(ROUTER_NAME, signal.SIGTERM)
        assert await cluster.wait_exit(ROUTER_NAME) == 0
        assert not any(map(lives, pids))

    cluster.run(scene())


async def http_health(cluster: RunningCluster) -> int:
    status, _, _ = await asyncio.to_thread(http_call, http_endpoint(cluster), "GET", "/health")
    return status
