"""Token streams: broken ones resume, finished answers wait to be fetched, and a router that is away binds nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from batonpb import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

from decode_node.node import DecodeNode
from tests.support.cluster_harness import CALL_S_MAX, assert_conserved, mock_spec, mock_tokens, random_prompt, wait_for
from tests.support.inprocess_cluster import InProcessCluster, inprocess
from tests.support.node_states import decode_state
from tests.support.ports import free_ports

ROUTER = 0xFEED
"""Incarnation of the router that a test plays itself."""
SLOW_DECODE = {"engine.mock_layer_delay_ms": 0.5}


class PlayedRouter:
    """Speaks to the nodes as a router does, and leaves out what the test wants left out."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self._cluster = cluster
        self._prefill_channel = grpc.aio.insecure_channel(cluster.endpoints["prefill-0"])
        self._decode_channel = grpc.aio.insecure_channel(cluster.endpoints["decode-0"])
        self._prefill = prefill_pb2_grpc.PrefillStub(self._prefill_channel)
        self._decode = decode_pb2_grpc.DecodeStub(self._decode_channel)

    async def prefill(self, request: str, prompt: Sequence[int], max_tokens: int) -> list[str]:
        """One request up to its commit; the kinds of the events."""
        return [event.WhichOneof("event") for event in await self.events(request, prompt, max_tokens)]

    async def events(
        self, request: str, prompt: Sequence[int], max_tokens: int, *, whole: bool = False
    ) -> list[prefill_pb2.PrefillEvent]:
        """Of one request, up to its commit."""
        header = common_pb2.Header(sender=ROUTER, receiver=self._cluster.runtimes["prefill-0"].incarnation)
        sampling = common_pb2.SamplingSpec(temperature=0, top_p=1, max_tokens=max_tokens)
        key = common_pb2.RequestKey(request=request)
        call = self._prefill.Prefill(
            prefill_pb2.PrefillRequest(
                header=header, key=key, prompt=prompt, sampling=sampling, router=ROUTER, whole=whole
            ),
            timeout=CALL_S_MAX,
        )
        return [event async for event in call]

    async def subscribe(self, cursors: dict[str, int] | None = None) -> Any:
        """An open stream, whose first message is sent."""
        call = self._decode.Subscribe()
        header = common_pb2.Header(sender=ROUTER, receiver=self._cluster.runtimes["decode-0"].incarnation)
        opening = decode_pb2.SubscribeOpen(header=header)
        for request, index in (cursors or {}).items():
            opening.cursors.add(key=common_pb2.RequestKey(request=request), next_index=index)
        await call.write(decode_pb2.SubscribeRequest(open=opening))
        return call

    async def done(self, call: Any, *requests: str) -> None:
        keys = [common_pb2.RequestKey(request=request) for request in requests]
        await call.write(decode_pb2.SubscribeRequest(done=decode_pb2.SubscribeDone(keys=keys)))

    async def close(self) -> None:
        await self._prefill_channel.close()
        await self._decode_channel.close()


@asynccontextmanager
async def played(**decode_flags: object) -> AsyncIterator[tuple[InProcessCluster, PlayedRouter]]:
    async with inprocess(mock_spec(decode_flags=decode_flags)) as cluster:
        router = PlayedRouter(cluster)
        try:
            yield cluster, router
        finally:
            await router.close()


async def read_answers(call: Any, count: int) -> dict[str, tuple[int, list[int]]]:
    """Read until `count` requests have finished: the index where each began, and its tokens, without a gap."""
    found: dict[str, tuple[int, list[int]]] = {}
    ended = 0
    async for batch in call:
        for message in batch.requests:
            first, ids = found.setdefault(message.key.request, (message.first_index, []))
            assert message.first_index == first + len(ids), "a token lost or doubled"
            ids.extend(message.ids)
            assert not message.HasField("error"), message.error
            ended += message.HasField("finish")
        if ended == count:
            return found
    raise AssertionError(f"the stream ended after {ended} answers")


async def all_finished(cluster: InProcessCluster, count: int) -> None:
    """Wait until the decode node keeps `count` finished answers."""

    async def kept() -> bool:
        return len(cluster.decode["decode-0"].streams.finished) == count

    await wait_for(kept, f"{count} finished answers", story=cluster.story)


async def nothing_kept(cluster: InProcessCluster) -> None:
    """Wait until the decode node keeps no answer and no request's task."""
    node = cluster.decode["decode-0"]

    async def empty() -> bool:
        return not decode_state(node).outputs and not decode_state(node).lives and not decode_state(node).known

    await wait_for(empty, "answers to be forgotten", story=cluster.story)


class Cable:
    """A TCP proxy in front of the decode node, whose connections the test can cut."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        """The endpoint to call instead of the target."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Reset all connections; how many there were."""
        for writer in self._writers:
            writer.transport.abort()
        return len(self._writers)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await self._server.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        host, _, port = self._target.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ends = {writer, far_writer}
        self._writers |= ends
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        self._writers -= ends
        self._carrying.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # cut
    finally:
        writer.transport.abort()


def end_stream(cluster: InProcessCluster) -> int:
    """The decode node ends the routers' streams of its own accord."""
    streams = cluster.decode["decode-0"].streams
    streams.close_all()
    return len(streams._subscriptions)


@pytest.mark.parametrize("how", ["ended", "cut"])
def test_a_stream_broken_again_and_again_loses_and_doubles_nothing(how: str) -> None:
    """The stream from the decode node is ended by the node, or all TCP connections to it are reset, every few tokens
    while five requests run there: the client gets each index once, in order, and exact; afterwards the decode node
    keeps no answer."""

    async def scenario() -> None:
        rng = random.Random(41)
        listen = f"127.0.0.1:{free_ports(1)[0]}"
        cable = Cable(listen)
        spec = mock_spec(decode_flags={"listen": listen, "advertise": await cable.start(), **SLOW_DECODE})
        async with inprocess(spec) as cluster:
            node = cluster.decode["decode-0"]

            async def ask(length: int) -> None:
                prompt = random_prompt(rng, length)
                answer = await cluster.client.generate(prompt, max_tokens=200)
                assert answer.ids == mock_tokens(prompt, 200)

            async def drawn(count: int) -> None:
                async def enough() -> bool:
                    return asking.done() or node.pool.engine.counters.tokens_drawn >= count

                await wait_for(enough, "the next tokens", story=cluster.story)

            asking = asyncio.gather(*(ask(length) for length in (3, 16, 40, 100, 300)))
            await wait_for(lambda: all_decode(node, asking), "five running requests", story=cluster.story)
            breaks = 0
            while not asking.done():
                breaks += (end_stream(cluster) if how == "ended" else cable.cut()) > 0
                await drawn(node.pool.engine.counters.tokens_drawn + 50)
            await asking
            assert breaks >= 5, "the stream was hardly broken"
            await nothing_kept(cluster)
            await assert_conserved(cluster)
        await cable.close()

    asyncio.run(scenario())


async def all_decode(node: DecodeNode, asking: asyncio.Future[Any]) -> bool:
    """All five have been handed over: a handoff in progress may be given up when its calls are cut."""
    return asking.done() or node.pool.engine.scheduler.running == 5


def test_finished_answers_wait_and_are_fetched_again() -> None:
    """Two answers finish while their router has no stream. It fetches them, loses the stream before it acknowledged,
    resumes one from index 5 and the other from the beginning, and acknowledges: only then they are forgotten."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(42), 50)
        expected = mock_tokens(prompt, 20)
        async with played() as (cluster, router):
            for name in ("one", "two"):
                assert await router.prefill(name, prompt, 20) == ["granted", "first_token", "handed_off"]
            await all_finished(cluster, 2)
            await assert_conserved(cluster)
            first = await router.subscribe()
            assert await read_answers(first, 2) == {"one": (0, expected), "two": (0, expected)}
            first.cancel()
            second = await router.subscribe({"one": 5})
            assert await read_answers(second, 2) == {"one": (5, expected[5:]), "two": (0, expected)}
            await router.done(second, "one", "two")
            await nothing_kept(cluster)
            second.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_client_gets_its_answer_in_one_piece(max_tokens: int) -> None:
    """The first token comes with the word of the handoff, in one message. If it is the only one nothing is handed over,
    and it comes by itself."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(46), 50)
        expected = mock_tokens(prompt, max_tokens)
        async with played() as (cluster, router):
            granted, last = await router.events("one", prompt, max_tokens, whole=True)
            assert granted.WhichOneof("event") == "granted"
            if max_tokens == 1:
                assert last.first_token.token == expected[0]
                assert last.first_token.HasField("finish")
                return
            assert last.handed_off.first_token.token == expected[0]
            stream = await router.subscribe()
            assert await read_answers(stream, 1) == {"one": (0, expected)}
            await router.done(stream, "one")
            await nothing_kept(cluster)
            stream.cancel()

    asyncio.run(scenario())


def test_a_newer_stream_of_the_same_router_replaces_the_older() -> None:
    """The router has reconnected before the decode node has noticed the break: the old stream ends, the new one has
    everything from its cursors on."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(43), 20)
        async with played() as (cluster, router):
            older = await router.subscribe()
            await router.prefill("one", prompt, 30)
            await read_answers(older, 1)
            newer = await router.subscribe({"one": 29})
            assert await read_answers(newer, 1) == {"one": (29, mock_tokens(prompt, 30)[29:])}
            assert [batch async for batch in older] == []
            assert await older.code() is grpc.StatusCode.OK
            await router.done(newer, "one")
            await nothing_kept(cluster)
            newer.cancel()

    asyncio.run(scenario())


def test_requests_of_a_router_that_is_away_are_cancelled() -> None:
    """A long answer runs, its router never subscribes: after orphan_ms it is cancelled and its blocks are free."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(44), 50)
        async with played(orphan_ms=200, **SLOW_DECODE) as (cluster, router):
            assert await router.prefill("orphan", prompt, 3000) == ["granted", "first_token", "handed_off"]
            await nothing_kept(cluster)
            await assert_conserved(cluster)
            assert cluster.decode["decode-0"].pool.engine.counters.tokens_drawn < 2999, "it ran to its end"

    asyncio.run(scenario())


def test_a_router_that_comes_back_in_time_is_no_orphan() -> None:
    """The stream breaks and comes back before orphan_ms: the request goes on, exact, from its cursor."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(45), 50)
        async with played(orphan_ms=60_000, **SLOW_DECODE) as (cluster, router):
            first = await router.subscribe()
            await router.prefill("one", prompt, 200)
            batch = await first.read()
            have = list(batch.requests[0].ids)
            first.cancel()
            cluster.decode["decode-0"].reap()
            again = await router.subscribe({"one": len(have)})
            answers = await read_answers(again, 1)
            assert have + answers["one"][1] == mock_tokens(prompt, 200)
            await router.done(again, "one")
            await nothing_kept(cluster)
            again.cancel()

    asyncio.run(scenario())


def test_a_router_that_never_acknowledges_is_bounded_in_number() -> None:
    """Nine answers are read and never acknowledged: no more than finished_max are kept, the newest."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(46), 20)
        async with played(finished_max=3) as (cluster, router):
            call = await router.subscribe()
            for index in range(9):
                await router.prefill(f"r{index}", prompt, 4)
            await read_answers(call, 9)
            await all_finished(cluster, 3)
            kept = [output.key.request for output in cluster.decode["decode-0"].streams.finished]
            assert kept == ["r6", "r7", "r8"]
            await assert_conserved(cluster)
            await router.done(call, *kept)
            await nothing_kept(cluster)
            call.cancel()

    asyncio.run(scenario())


def test_a_router_that_never_acknowledges_is_bounded_in_time() -> None:
    """Answers that nobody fetches are forgotten after finished_ms_max."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(47), 20)
        async with played(finished_ms_max=200) as (cluster, router):
            for index in range(3):
                await router.prefill(f"r{index}", prompt, 4)
            await nothing_kept(cluster)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_router_that_wants_no_more_stops_a_running_request() -> None:
    """`done` for an answer that is still being written: the request lets go."""

    async def scenario() -> None:
        prompt = random_prompt(random.Random(48), 50)
        async with played(**SLOW_DECODE) as (cluster, router):
            call = await router.subscribe()
            await router.prefill("one", prompt, 3000)
            await call.read()
            await router.done(call, "one")
            await assert_conserved(cluster)
            await nothing_kept(cluster)
            call.cancel()

    asyncio.run(scenario())
