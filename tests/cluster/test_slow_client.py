"""A client that does not read its answer: it is cut off, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from batonpb import inference_pb2_grpc

from baton.endpoint import split_endpoint
from baton.errors import Reason
from baton.rpc import rpc_errors
from tests.support.cluster_harness import (
    RunningCluster,
    assert_conserved,
    error_of,
    http_endpoint,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

UNREAD_MAX = 100
LONG = 4_000
LOGPROBS = 5
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4_096))
"""The answer must be longer than what gRPC and the kernel keep of it on its way."""
SHORT = 40


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    spec = mock_spec(
        blocks=3000,
        decode_flags={"engine.mock_layer_delay_ms": 0.5},
        router_flags={"client_tokens_unread_max": UNREAD_MAX, "client_stall_ms": 100, "http_listen": "127.0.0.1:0"},
    )
    with running(spec) as cluster:
        yield cluster


async def others_go_on(cluster: RunningCluster, rng: random.Random, enough: asyncio.Event) -> int:
    """One exact answer after the other, until `enough`; how many."""
    count = 0
    while not (enough.is_set() and count):
        prompt = random_prompt(rng, 30)
        answer = await cluster.client.generate(prompt, max_tokens=SHORT)
        assert answer.ids == mock_tokens(prompt, SHORT)
        count += 1
    return count


@pytest.mark.slow
def test_a_grpc_client_that_does_not_read_is_cut_off(cluster: RunningCluster) -> None:
    """Its request is cancelled on every node while others' answers go on, each exact. When it reads at last, it gets
    what was on its way, in order, and then the reason."""

    async def scenario() -> None:
        rng = random.Random(71)
        prompt = random_prompt(rng, 20)
        channel = grpc.aio.insecure_channel(cluster.client.endpoint, options=SMALL_WINDOW)
        stub = inference_pb2_grpc.InferenceStub(channel)
        call: Any = stub.Generate(make_request(prompt, max_tokens=LONG, logprobs=LOGPROBS), timeout=60)
        stream = aiter(call)
        ids: list[int] = []
        while not ids:
            ids += (await anext(stream)).tokens.ids
        enough = asyncio.Event()
        others = [asyncio.create_task(others_go_on(cluster, rng, enough)) for _ in range(3)]

        async def cut_off() -> bool:
            return "client cut off" in cluster.log_text("router-0")

        await wait_for(cut_off, "the client to be cut off", story=cluster.story)
        enough.set()
        assert all(count >= 1 for count in await asyncio.gather(*others))
        await assert_conserved(cluster)

        async def rest() -> None:
            with rpc_errors("router-0"):
                async for event in stream:
                    assert event.tokens.first_index == len(ids)
                    ids.extend(event.tokens.ids)

        error = await error_of(rest())
        assert error.reason is Reason.SLOW_CLIENT, error
        assert UNREAD_MAX < int(error.metadata["unread"]) < LONG
        assert ids == mock_tokens(prompt, len(ids))
        assert len(ids) < LONG
        await channel.close()

    cluster.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3])
def test_an_http_client_that_does_not_read_is_cut_off(cluster: RunningCluster, n: int) -> None:
    """A stream of events, of one answer or several, that stays in the socket: nothing of it is left on any node, and
    the connection is closed behind what was on its way."""
    endpoint = http_endpoint(cluster)
    body = {
        "model": cluster_model(cluster),
        "prompt": [1, 2, 3],
        "max_tokens": LONG,
        "stream": True,
        "n": n,
        "logprobs": 5,
    }
    raw = json.dumps({**body, "ignore_eos": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
    head = "\r\n".join([*lines, f"content-length: {len(raw)}", "", ""])

    async def scenario() -> None:
        cut_before = cut_offs(cluster)
        rng = random.Random(72)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, split_endpoint(endpoint))
            await loop.sock_sendall(client, head.encode() + raw)
            enough = asyncio.Event()
            others = [asyncio.create_task(others_go_on(cluster, rng, enough)) for _ in range(2)]

            async def cut_off() -> bool:
                return cut_offs(cluster) > cut_before

            await wait_for(cut_off, "the client to be cut off", story=cluster.story)
            enough.set()
            await asyncio.gather(*others)
            await assert_conserved(cluster)
            text = b""
            async with asyncio.timeout(30):
                while part := await loop.sock_recv(client, 1 << 16):
                    text += part
        assert text.startswith(b"HTTP/1.1 200"), text[:200]
        assert b"data: " in text

    cluster.run(scenario())


def cut_offs(cluster: RunningCluster) -> int:
    return cluster.log_text("router-0").count("client cut off")


def cluster_model(cluster: RunningCluster) -> str:
    return cluster.run(cluster.status("prefill-0")).record.model.name
