"""Attacks on the HTTP port of a real router: each costs the attacker more than others, whose answers go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
from batonpb import inference_pb2, inference_pb2_grpc

from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason
from baton.rpc import rpc_errors
from router.request_log import LIMITS
from router.text_workers import HELD_BYTES_MAX
from tests.support.attack import (
    Front,
    attacker_channel,
    attacker_connection,
    front_door,
    http_attack,
    nobody_notices,
    post,
)
from tests.support.attacks import AttackerProcess
from tests.support.cluster_harness import CALL_S_MAX, wait_for

LIVE: Final = b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n"
CONNECTIONS_MAX: Final = 400
TEXT_BYTES: Final = 2_800_000
TEXTS: Final = 30
"""At each door."""
TEXTS_HELD_MAX: Final = HELD_BYTES_MAX * 3 // 4 // TEXT_BYTES


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with front_door(router_flags={"http_connections_max": CONNECTIONS_MAX}) as front:
        yield front


@asynccontextmanager
async def attacker(front: Front) -> AsyncIterator[AttackerProcess]:
    process = await AttackerProcess.start(front.target)
    try:
        yield process
    finally:
        await process.close()


async def played(front: Front, name: str) -> list[str]:
    """The answers to one attack, beside which nobody notices anything."""
    async with attacker(front) as process:
        return await nobody_notices(front, lambda: process.play(name))


def test_a_body_in_chunks_of_a_byte(front: Front) -> None:
    """Four of 256 KiB: refused after a few thousand chunks, and not because of what all of them say. Who still sends
    may find its connection closed."""

    async def scenario() -> None:
        answers = await played(front, "one byte chunks")
        assert all(each.strip() == "0" or "parts of less than" in each for each in answers), answers

    front.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "slow heads",
        "surplus connections",
        "one byte pieces",
        "many headers",
        "pipelined calls",
        "bad paths",
        "endless lines",
        "slow readers",
        "unread answers",
    ],
)
def test_nobody_notices(front: Front, name: str) -> None:
    """Whatever an attacker sends, keeps open, or leaves unread."""
    front.run(played(front, name))


@pytest.mark.slow
def test_an_attacker_cannot_take_all_connections(front: Front) -> None:
    """It opens twice as many as there are and says half a head on each. It gets half of them, other addresses are
    served at once, and when the time for heads is over all of its connections are closed."""

    async def open_one() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        stream = await attacker_connection(front.http)
        stream[1].write(LIVE[:-2])
        return stream

    async def attack() -> None:
        taken = await asyncio.gather(*(open_one() for _ in range(2 * CONNECTIONS_MAX)))
        reader, writer = await asyncio.open_connection(*split_endpoint(front.http))
        writer.write(LIVE)
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        writer.close()
        await asyncio.gather(*(each[0].read() for each in taken), return_exceptions=True)
        for _, writer in taken:
            writer.transport.abort()

    front.run(nobody_notices(front, attack, streams=8))


def test_long_texts_of_one_address(front: Front) -> None:
    """The processes that read long texts stand still, and one address sends more of them than the router holds, over
    both doors. What is more than three quarters is refused. A text of another address that is as long waits, and is
    read when the processes go on."""
    text = "a" * TEXT_BYTES
    call = post("/v1/completions", json.dumps({"prompt": text}).encode())

    async def over_http() -> int:
        return (await http_attack(front, call))[0]

    async def over_grpc(stub: inference_pb2_grpc.InferenceStub) -> Reason | None:
        try:
            with rpc_errors("router"):
                await stub.GenerateUnary(inference_pb2.GenerateRequest(text=text), timeout=CALL_S_MAX)
        except BatonError as error:
            return error.reason
        return None

    async def attack() -> None:
        assert set(await asyncio.gather(over_http(), over_http())) == {400}
        async with attacker_channel(front, ("grpc.max_send_message_length", -1)) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with front.texts_stopped():
                asked: list[asyncio.Task[object]] = []
                for _ in range(TEXTS):
                    asked += [asyncio.create_task(over_http()), asyncio.create_task(over_grpc(stub))]
                    await asyncio.sleep(0)

                async def refused() -> bool:
                    return sum(not each.done() for each in asked) <= TEXTS_HELD_MAX

                await wait_for(refused, "all that is more than the share to be refused", story=front.story)
                reader, writer = await asyncio.open_connection(*split_endpoint(front.http))
                writer.write(call)
                await writer.drain()
            answers = await asyncio.gather(*asked)
        assert (await reader.readline()).split()[1] == b"400"
        writer.close()
        assert set(answers) <= {400, 429, Reason.TOO_MANY_CALLS, Reason.NO_TOKENIZER}

    front.run(nobody_notices(front, attack, streams=8))


def test_garbage_is_logged_once(front: Front) -> None:
    """Hundreds of connections bring no HTTP: each is told so, and the log has a few lines."""

    async def scenario() -> None:
        before = front.story().count("request refused")
        for _ in range(10):
            answers = await asyncio.gather(*(http_attack(front, b"\x16\x03\x01\r\n\r\n") for _ in range(30)))
            assert {status for status, _ in answers} == {400}
        assert front.story().count("request refused") - before <= 2 * LIMITS.full_max  # two intervals at most

        async def served() -> bool:
            return (await http_attack(front, post("/v1/completions", b"{}")))[0] == 400

        await wait_for(served, "an answer as ever", story=front.story)

    front.run(scenario())
