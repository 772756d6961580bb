"""More requests than the nodes take: they wait in the router's line, and all are answered."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
from batonpb import common_pb2

from baton.client.answer import Answer, AnswerBuilder
from baton.endpoint import split_endpoint
from cli.client import stats_text
from tests.support.cluster_harness import (
    CALL_S_MAX,
    RunningCluster,
    assert_conserved,
    http_endpoint,
    make_request,
    metrics_text,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
    wait_for,
)

PLACES: Final = 8
"""In each of two decode nodes."""
TOKENS: Final = 12


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    spec = mock_spec(
        prefill=2,
        decode=2,
        blocks=PLACES * 260,
        decode_flags={"requests_max": PLACES, "engine.mock_layer_delay_ms": 1},
        router_flags={"placement_wait_ms_max": 500},
    )
    with running(replace(spec, http="127.0.0.1:0", metrics="127.0.0.1:0")) as cluster:
        yield cluster


def metric(cluster: RunningCluster, name: str) -> float:
    return next(float(line.split()[1]) for line in metrics_text(cluster).splitlines() if line.startswith(name + " "))


async def in_line(cluster: RunningCluster, count: int) -> None:
    async def wait() -> bool:
        return await asyncio.to_thread(metric, cluster, "baton_requests_in_line") == count

    await wait_for(wait, f"{count} requests to wait in line", story=cluster.story)


async def ask_exactly(cluster: RunningCluster, prompt: list[int]) -> float:
    """How long it has waited in line, in ms."""
    answer = await cluster.client.generate(prompt, max_tokens=TOKENS)
    assert answer.ids == mock_tokens(prompt, TOKENS)
    return answer.stats.line_ms


async def take_all_places(cluster: RunningCluster) -> list[Any]:
    """Calls that have all places of the decode nodes, each with its first token, for as long as they are not
    cancelled."""

    async def hold(first: int) -> Any:
        call: Any = cluster.client.stub.Generate(make_request([first], max_tokens=4_000), timeout=CALL_S_MAX)
        async for event in call:
            if event.HasField("tokens"):
                return call
        raise AssertionError("it has ended")

    return list(await asyncio.gather(*(hold(1 + n) for n in range(2 * PLACES))))


class HttpStream:
    """One streamed completion on a connection of its own, as load generators ask for it."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._endpoint = http_endpoint(cluster)

    async def send(self, prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        raw = json.dumps({**body, "ignore_eos": True, "stream_options": {"include_usage": True}}).encode()
        self._reader, self._writer = await asyncio.open_connection(*split_endpoint(self._endpoint))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
        self._writer.write(head.encode() + raw)
        await self._writer.drain()

    async def answer(self) -> tuple[bytes, int]:
        """The status line, and how many tokens the usage says."""
        async with asyncio.timeout(CALL_S_MAX):
            raw = await self._reader.read()
        await self.leave()
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: {")]
        return raw.split(b"\r\n")[0], sum((event.get("usage") or {}).get("completion_tokens", 0) for event in events)

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def test_eighty_streams_at_once_over_http(cluster: RunningCluster) -> None:
    """As a load generator asks. There are places for sixteen; nobody is refused."""

    async def one(prompt: list[int]) -> tuple[bytes, int]:
        stream = HttpStream(cluster)
        await stream.send(prompt)
        return await stream.answer()

    async def scenario() -> None:
        rng = random.Random(80)
        answers = await asyncio.gather(*(one(random_prompt(rng, 40)) for _ in range(80)))
        assert set(answers) == {(b"HTTP/1.1 200 OK", TOKENS)}
        await assert_conserved(cluster)

    cluster.run(scenario())
    assert metric(cluster, "baton_requests_in_line") == 0
    assert metric(cluster, "baton_line_seconds_count") >= 1


def test_a_client_that_disconnects_leaves_the_line_at_once(cluster: RunningCluster) -> None:
    """All places are taken, by answers that go on. Three clients wait, two over HTTP and one over gRPC; two of them go
    away, and are not in line any more. The third is answered once there is room."""

    async def scenario() -> None:
        holders = await take_all_places(cluster)
        streams = [HttpStream(cluster) for _ in range(2)]
        for stream in streams:
            await stream.send([5, 6, 7])
        waiting: Any = cluster.client.stub.Generate(make_request([5, 6], max_tokens=TOKENS), timeout=CALL_S_MAX)
        await in_line(cluster, 3)
        await streams[0].leave()
        await in_line(cluster, 2)
        waiting.cancel()
        await in_line(cluster, 1)
        for holder in holders:
            holder.cancel()
        assert await streams[1].answer() == (b"HTTP/1.1 200 OK", TOKENS)
        await assert_conserved(cluster)

    cluster.run(scenario())


def test_a_higher_class_goes_first(cluster: RunningCluster) -> None:
    """All places are taken. Requests of a low, the usual and a high class come in this order and wait; then there is
    one place, which they have one after the other: the high one first, the low one last. Who has it keeps it until the
    others are seen to wait."""
    classes = (common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH)

    async def has_a_place(priority: common_pb2.Priority) -> Any:
        request = make_request([60 + priority, 7, 8], max_tokens=4_000, ignore_eos=True)
        request.priority = priority
        call: Any = cluster.client.stub.Generate(request, timeout=CALL_S_MAX)
        async for event in call:
            if event.HasField("tokens"):
                return call
        raise AssertionError("it has ended")

    async def scenario() -> None:
        holders = await take_all_places(cluster)
        waiting = []
        for number, priority in enumerate(classes, start=1):
            waiting.append(asyncio.create_task(has_a_place(priority)))
            await in_line(cluster, number)
        holder = holders.pop()
        while waiting:
            holder.cancel()
            holder = await waiting.pop()
            await in_line(cluster, len(waiting))
            assert [task.done() for task in waiting] == [False] * len(waiting)
        for call in [holder, *holders]:
            call.cancel()
        await assert_conserved(cluster)

    cluster.run(scenario())


def test_an_answer_says_its_class(cluster: RunningCluster) -> None:
    """Each is told its class, which `--stats` shows, and the answers are exact."""
    classes = {"low": common_pb2.PRIORITY_LOW, "normal": common_pb2.PRIORITY_NORMAL, "high": common_pb2.PRIORITY_HIGH}

    async def one(priority: common_pb2.Priority) -> Answer:
        prompt = [60 + priority, 7, 8]
        request, builder = make_request(prompt, max_tokens=TOKENS, ignore_eos=True), AnswerBuilder()
        request.priority = priority
        call: Any = cluster.client.stub.Generate(request, timeout=CALL_S_MAX)
        async for event in call:
            builder.push(event)
        assert builder.ids == mock_tokens(prompt, TOKENS)
        return builder.answer()

    async def scenario() -> None:
        for name, priority in classes.items():
            answer = await one(priority)
            assert re.findall(r"^priority +(\w+)$", stats_text(answer), re.MULTILINE) == [name]

    cluster.run(scenario())


@pytest.mark.slow
def test_a_prefill_node_dies_while_requests_wait(cluster: RunningCluster) -> None:
    """All places are taken for longer than a request may look for nodes, and one of the two prefill nodes is killed: no
    request ends because it is not reached."""

    async def scenario() -> None:
        holders = await take_all_places(cluster)
        rng = random.Random(7)
        asked = [asyncio.create_task(ask_exactly(cluster, random_prompt(rng, 40))) for _ in range(30)]
        await in_line(cluster, 30)
        cluster.send_signal("prefill-0", signal.SIGKILL)
        cluster.set_down("prefill-0")
        await cluster.wait_exit("prefill-0")
        more = [asyncio.create_task(ask_exactly(cluster, random_prompt(rng, 40))) for _ in range(10)]
        await in_line(cluster, 40)
        for holder in holders:
            holder.cancel()
        assert all(await asyncio.gather(*asked, *more))
        await assert_conserved(cluster)

    cluster.run(scenario())


@pytest.mark.slow
def test_five_hundred_and_twelve_at_a_time(cluster: RunningCluster) -> None:
    """On places for sixteen, again and again: none fails, and all are exact."""

    async def scenario() -> None:
        rng = random.Random(512)
        waits_ms = await asyncio.gather(*(ask_exactly(cluster, random_prompt(rng, 40)) for _ in range(512)))
        assert sum(wait_ms > 0 for wait_ms in waits_ms) >= 512 - 2 * 64
        await assert_conserved(cluster)

    cluster.run(scenario())
