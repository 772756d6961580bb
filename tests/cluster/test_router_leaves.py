"""A router that is told to end lets its clients find another one first: no call of theirs fails."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
import pytest
from batonpb import common_pb2, inference_pb2_grpc, node_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import AsyncClient, Sampling
from baton.endpoint import split_endpoint
from baton.rpc import rpc_errors
from tests.support import docs_view
from tests.support import raw_http2 as http2
from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    assert_conserved,
    collect,
    http_call,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)
from tests.support.ports import free_ports

FIRST, SECOND = "router-0", "router-1"
NEVER_MS: Final = 600_000
CALLS, STREAMS, LEAVES_AT = 100, 20, 20


def service_config() -> str:
    """What the page tells clients to use."""
    (found,) = docs_view.blocks("docs/kubernetes.md", "json")
    return json.dumps(json.loads(found))


def http_of(cluster: RunningCluster, name: str) -> str:
    return cluster.cluster.others_of(name)["http"]


def state(status: node_pb2.NodeStatus) -> str:
    return common_pb2.Lifecycle.Name(status.record.lifecycle).removeprefix("LIFECYCLE_")


def completion(prompt: list[int], max_tokens: int) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}).encode()


async def health(channel: grpc.aio.Channel, service: str) -> str:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A router that is a lame duck for good, and one that never is."""
    flags = {FIRST: {"lame_duck_ms": NEVER_MS}, SECOND: {"lame_duck_ms": 0}}
    with running(replace(mock_spec(), routers=2, http="127.0.0.1:0", node_flags=flags)) as started:
        yield started


def test_a_lame_duck_serves_and_is_not_ready(cluster: RunningCluster) -> None:
    """Everybody who asks is told to go elsewhere, and everybody who comes is served. An undrain takes it back. SIGTERM
    is the same order, behind which SIGINT ends the process without waiting."""

    async def scene() -> None:
        place = http_of(cluster, FIRST)

        async def seen() -> tuple[str, list[str], int, int]:
            states = [await health(cluster.channel(FIRST), each) for each in ("ready", "")]
            status, _, _ = await asyncio.to_thread(http_call, place, "GET", "/health")
            live, _, _ = await asyncio.to_thread(http_call, place, "GET", "/live")
            return state(await cluster.status(FIRST)), states, status, live

        async def served() -> str:
            assert (await cluster.client.generate([5, 6], max_tokens=4)).ids == mock_tokens([5, 6], 4)
            call = completion([5, 6], 4)
            status, headers, body = await asyncio.to_thread(http_call, place, "POST", "/v1/completions", call)
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)
            return headers.get("connection", "")

        assert await served() == ""
        await cluster.order(FIRST, "Drain")
        assert await seen() == ("LAME_DUCK", ["NOT_SERVING", "SERVING"], 503, 200)
        assert await served() == "close"
        await cluster.order(FIRST, "Undrain")
        assert await seen() == ("READY", ["SERVING", "SERVING"], 200, 200)
        assert await served() == ""
        cluster.send_signal(FIRST, signal.SIGTERM)

        async def leaves() -> bool:
            return state(await cluster.status(FIRST)) == "LAME_DUCK"

        await wait_for(leaves, "the router to leave", story=cluster.story)
        assert await served() == "close"
        cluster.set_down(FIRST)
        cluster.send_signal(FIRST, signal.SIGINT)
        assert await cluster.wait_exit(FIRST) == 0

    cluster.run(scene())


def test_an_undrained_router_takes_calls_again(cluster: RunningCluster) -> None:
    """It is drained, nobody gets a connection; then it is undrained, and answers at the port that it had."""

    async def scene() -> None:
        place = split_endpoint(cluster.cluster.endpoints[SECOND])
        stub = inference_pb2_grpc.InferenceStub(cluster.channel(SECOND))
        call = make_request([5, 6], max_tokens=4)
        for _ in range(2):
            await cluster.order(SECOND, "Drain")
            assert state(await cluster.status(SECOND)) == "DRAINED"
            await wait_for(lambda: refuses(place), "the door to close", story=cluster.story)
            await cluster.order(SECOND, "Undrain")
            with rpc_errors(SECOND):
                response = await stub.GenerateUnary(call, timeout=CALL_S_MAX, wait_for_ready=True)
            assert response.ids == mock_tokens([5, 6], 4)

    cluster.run(scene())


async def refuses(place: tuple[str, int]) -> bool:
    try:
        _, writer = await asyncio.open_connection(*place)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


def test_calls_that_have_begun_to_come_are_answered(cluster: RunningCluster) -> None:
    """SIGTERM while half of a request has come over HTTP, and over gRPC the head of one: both are answered, and told to
    come no more (`Connection: close`, GOAWAY). Meanwhile nobody gets a connection for gRPC, calls over HTTP are
    refused, and the process is alive."""
    call = make_request([5, 6], max_tokens=4).SerializeToString()

    async def scene() -> None:
        place = http_of(cluster, SECOND)

        async def holds(what: str, requests: int) -> bool:
            status = await cluster.status(SECOND)
            return (state(status), status.requests) == (what, requests)

        over_http, to_http = await asyncio.open_connection(*split_endpoint(place))
        body = completion([5, 6], 4)
        to_http.write(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:9])
        over_grpc, to_grpc = await asyncio.open_connection(*split_endpoint(cluster.cluster.endpoints[SECOND]))
        head = http2.call_head("/baton.v1.Inference/GenerateUnary")
        to_grpc.write(http2.GREETING + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, head))
        await wait_for(lambda: holds("READY", 2), "both calls to come", story=cluster.story)
        cluster.send_signal(SECOND, signal.SIGTERM)
        await wait_for(lambda: holds("DRAINING", 2), "the drain", story=cluster.story)
        frames = await read_until(over_grpc, http2.GOAWAY)
        assert frames[-1][3].endswith(b"Server shutdown")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*split_endpoint(cluster.cluster.endpoints[SECOND]))
        answers = {}
        for method, path in (("GET", "/live"), ("GET", "/health"), ("POST", "/v1/completions")):
            answers[path], headers, _ = await asyncio.to_thread(http_call, place, method, path, body)
            assert headers["connection"] == "close"
        assert answers == {"/live": 200, "/health": 503, "/v1/completions": 503}
        assert await health(cluster.command_channel(SECOND), "") == "SERVING"
        cluster.set_down(SECOND)
        to_http.write(body[9:])
        answer = await over_http.read()
        assert answer.startswith(b"HTTP/1.1 200 ") and b"\r\nconnection: close\r\n" in answer
        to_grpc.write(http2.frame(http2.DATA, http2.END_STREAM, 1, http2.message(call)))
        frames = await read_until(over_grpc, http2.HEADERS, flags=http2.END_STREAM | http2.END_HEADERS)
        assert b"grpc-status\x010" in frames[-1][3]
        to_http.close()
        to_grpc.close()
        assert await cluster.wait_exit(SECOND) == 0
        assert "drain given up" not in cluster.log_text(SECOND)

    cluster.run(scene())


async def read_until(reader: asyncio.StreamReader, kind: int, *, flags: int = 0) -> list[tuple[int, int, int, bytes]]:
    frames: list[tuple[int, int, int, bytes]] = []
    while not frames or frames[-1][:2] != (kind, flags):
        frames.append(await http2.read_frame(reader))
    return frames


class Pool:
    """An HTTP client as there are many: it keeps its connection, makes another one when that has ended, and asks a load
    balancer where to: to a router that is ready, as /health says."""

    def __init__(self, places: list[str]) -> None:
        self._places = places
        self._kept: http.client.HTTPConnection | None = None
        self.made: list[str] = []

    def post(self, body: bytes) -> Any:
        """The answer. Raises AssertionError where it is none."""
        if self._kept is not None and self._kept.sock is not None:
            try:
                return self._post(self._kept, body)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                pass  # closed while it was idle
        place = next(each for each in self._places if self._is_ready(each))
        self.made.append(place)
        self._kept = http.client.HTTPConnection(place, timeout=CALL_S_MAX)
        return self._post(self._kept, body)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()

    def _post(self, connection: http.client.HTTPConnection, body: bytes) -> Any:
        connection.request("POST", "/v1/completions", body=body)
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    def _is_ready(self, place: str) -> bool:
        try:
            return http_call(place, "GET", "/health")[0] == 200
        except OSError:
            return False


@pytest.mark.slow
def test_nobody_notices_that_a_router_ends() -> None:
    """A hundred calls one after the other over gRPC, as many over HTTP, and twenty streams; a fifth into them one of
    the two routers gets SIGTERM. Each answer is right, and the router has nothing left to give up."""
    rng = random.Random(15)
    flags = {"lame_duck_ms": 500}
    slow = {"engine.mock_layer_delay_ms": 1}

    async def scene(cluster: RunningCluster) -> None:
        places = ",".join(cluster.cluster.routers)
        options = [("grpc.service_config", service_config()), ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"ipv4:{places}", options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            pool = Pool([http_of(cluster, FIRST), http_of(cluster, SECOND)])
            done = {"grpc": 0, "http": 0, "streams": 0}

            async def ask(max_tokens: int) -> None:
                prompt = random_prompt(rng, rng.choice([5, 33, 200]))
                with rpc_errors("a router"):
                    call = stub.Generate(make_request(prompt, max_tokens=max_tokens), timeout=CALL_S_MAX)
                    assert (await collect(call)).ids == mock_tokens(prompt, max_tokens)

            async def calls() -> None:
                for _ in range(CALLS):
                    await ask(8)
                    done["grpc"] += 1

            async def posts() -> None:
                for _ in range(CALLS):
                    answer = await asyncio.to_thread(pool.post, completion(random_prompt(rng, 33), 8))
                    assert answer["usage"]["completion_tokens"] == 8
                    done["http"] += 1

            async def streams() -> None:
                await ask(300)
                done["streams"] += 1

            async def a_fifth() -> bool:
                return min(done["grpc"], done["http"]) >= LEAVES_AT

            async with asyncio.TaskGroup() as group:
                group.create_task(calls())
                group.create_task(posts())
                for _ in range(STREAMS):
                    group.create_task(streams())
                await wait_for(a_fifth, "a fifth of the calls", story=cluster.story)
                cluster.send_signal(FIRST, signal.SIGTERM)
                assert await cluster.wait_exit(FIRST) == 0, cluster.story()
            pool.close()
            assert done == {"grpc": CALLS, "http": CALLS, "streams": STREAMS}
            assert set(pool.made) == {http_of(cluster, FIRST), http_of(cluster, SECOND)}
            assert "drain given up" not in cluster.log_text(FIRST)

    spec = mock_spec(prefill=2, decode=2, blocks=1_200, both=slow, router_flags=flags)
    with running(replace(spec, routers=2, http="127.0.0.1:0")) as cluster:
        cluster.run(scene(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_resumable_streams_outlive_a_router_that_ends(signum: signal.Signals) -> None:
    """SIGTERM, whose drain is given up before the answers are over, and SIGINT, which waits for nothing: the router
    leaves them, and the clients go on at the other one. Each token comes once."""
    rng = random.Random(16)
    slow, tokens, flags = {"engine.mock_layer_delay_ms": 2}, 200, {"drain_ms_max": 100, "stop_grace_ms": 100}

    async def scene(cluster: RunningCluster) -> None:
        arrived, attaches = dict.fromkeys(range(8), 0), 0

        async def stream(client: AsyncClient, number: int) -> None:
            nonlocal attaches
            prompt = random_prompt(rng, 20)
            ids: list[int] = []
            async with client.stream(prompt, sampling=Sampling(temperature=0, max_tokens=tokens)) as pieces:
                async for piece in pieces:
                    ids += piece.ids
                    arrived[number] = len(ids)
                attaches += pieces.answer.attaches
            assert ids == mock_tokens(prompt, tokens)

        async def all_run() -> bool:
            return min(arrived.values()) > 0

        async with AsyncClient(cluster.cluster.routers) as client, asyncio.TaskGroup() as group:
            for number in arrived:
                group.create_task(stream(client, number))
            await wait_for(all_run, "all answers to begin", story=cluster.story)
            assert max(arrived.values()) < tokens
            cluster.set_down(FIRST)
            cluster.send_signal(FIRST, signum)
            assert await cluster.wait_exit(FIRST) == 0, cluster.story()
            assert max(arrived.values()) < tokens, "some were over before the router was"
        assert attaches > 0

    with running(replace(mock_spec(decode=2, both=slow, router_flags=flags), routers=2)) as cluster:
        cluster.run(scene(cluster))
        cluster.run(assert_conserved(cluster))


@pytest.mark.slow
def test_a_router_starts_while_the_directory_is_away(tmp_path: Path) -> None:
    """Two routers and the directory are killed. The router that keeps the last known nodes serves from them, and says
    so; the other one waits and says that, until the directory is there."""
    names = ("directory", FIRST, SECOND)
    places = {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(3), strict=True)}
    flags: dict[str, dict[str, object]] = {name: {"http_listen": places[name]} for name in (FIRST, SECOND)}
    flags[FIRST] |= {"known_nodes_file": tmp_path / "nodes", "listen": f"127.0.0.1:{free_ports(1)[0]}"}

    async def healthy(name: str) -> tuple[int, str]:
        try:
            status, _, body = await asyncio.to_thread(http_call, places[name], "GET", "/health")
        except OSError:
            return 0, ""
        return status, body.decode()

    async def scene(cluster: RunningCluster) -> None:
        for name in names:
            cluster.send_signal(name, signal.SIGKILL)
            await cluster.wait_exit(name)
        await cluster.cluster.start_process(FIRST)
        assert (await cluster.client.generate([5, 6], max_tokens=4)).ids == mock_tokens([5, 6], 4)
        status, body = await healthy(FIRST)
        assert (status, "new requests go to the 2 last known nodes" in body) == (200, True), body

        async def says_why() -> bool:
            status, body = await healthy(SECOND)
            return status == 503 and "This process waits until it is registered. The directory at" in body

        async def serves() -> bool:
            return (await healthy(SECOND))[0] == 200

        starting = asyncio.create_task(cluster.cluster.start_process(SECOND))
        await wait_for(says_why, "the second router to say why it waits", story=cluster.story)
        assert not starting.done()
        await cluster.cluster.start_process("directory")
        await starting
        await wait_for(serves, "the second router to serve", story=cluster.story)

    with running(replace(mock_spec(), routers=2, node_flags=flags, directory_listen=places["directory"])) as cluster:
        cluster.run(scene(cluster))
