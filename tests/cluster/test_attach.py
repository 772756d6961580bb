"""Clients that go on with an answer after their connection, their router, or its decode node too is lost: each token
once, nothing left behind. Over gRPC, with real processes, and in one process where a test looks inside."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from batonpb import common_pb2, decode_pb2, inference_pb2
from tokenizers import Tokenizer, models

from baton.endpoint import split_endpoint
from baton.errors import BatonError, Reason
from baton.rpc import rpc_errors
from cli.services import Service
from cli.supervisor import ROUTER_NAME, ClusterSpec
from decode_node.service import DecodeService, ReceiverService
from router.decode_streams import DecodeSubscription
from router.job import Parting
from router.keys import new_key
from tests.cluster.test_resume import FAST, ROUTER_FLAGS, kill, runner_of
from tests.faults.proxy import Dark, Proxy
from tests.support.attaching import Reader
from tests.support.cluster_harness import (
    CALL_S_MAX,
    Client,
    RunningCluster,
    assert_conserved,
    error_of,
    make_request,
    mock_spec,
    mock_tokens,
    random_prompt,
    running,
)
from tests.support.inprocess_cluster import MARK, InProcessCluster, Point, inprocess, until
from tests.support.node_states import decode_state

OTHER = "router-1"
TOKENS = 300
PROMPT = random_prompt(random.Random(15), 40)
SLOW = {"engine.mock_layer_delay_ms": 1}
"""A step of decode takes some milliseconds: an answer of TOKENS is not over before a test has done something to it."""


def spec_of(*, decode: int = 1, **changes: Any) -> ClusterSpec:
    flags = {"both": FAST, "router_flags": ROUTER_FLAGS, "decode_flags": SLOW, **changes}
    return replace(mock_spec(decode=decode, **flags), routers=2)


def reader(tokens: int = TOKENS, **sampling: Any) -> Reader:
    return Reader(make_request(PROMPT, max_tokens=tokens, **sampling))


async def has_all(read: Reader, tokens: int = TOKENS) -> None:
    """It reads to the end, and has the answer of a client without trouble."""
    await read.read()
    assert read.ids == mock_tokens(PROMPT, tokens)
    assert read.finished is not None
    assert read.finished.stats.output_tokens == tokens
    assert {started.prompt_tokens for started in read.started} == {len(PROMPT)}


async def to_its_end(call: Any) -> None:
    """Raises BatonError."""
    with rpc_errors("router"):
        while await call.read() is not grpc.aio.EOF:
            pass


# In one process.


@asynccontextmanager
async def two_routers(**changes: Any) -> AsyncIterator[tuple[InProcessCluster, Client]]:
    async with inprocess(spec_of(**changes)) as cluster:
        other = Client(cluster.endpoints[OTHER])
        try:
            yield cluster, other
        finally:
            await other.close()


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The request of each Reserve."""
    requests: list[str] = []
    real = ReceiverService.Reserve

    async def reserve(self: ReceiverService, request: Any, context: Any) -> Any:
        requests.append(request.key.request)
        return await real(self, request, context)

    monkeypatch.setattr(ReceiverService, "Reserve", reserve)
    return requests


def test_a_client_goes_on_at_either_router_again_and_again(reserved: list[str]) -> None:
    """It leaves every so many tokens and asks the other router: one attempt computes the whole answer, and it gets the
    log-probabilities of each token once. Then it forgets the request, and nothing of it is left."""

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            whole = reader(60, logprobs=1, seed=5, temperature=1.0)
            whole.request.ClearField("resumable")
            straight = await cluster.client.send(whole.request)
            reserved.clear()
            read = reader(60, logprobs=1, seed=5, temperature=1.0)
            read.generate(cluster.client)
            for router, tokens in enumerate(range(10, 60, 10)):
                await read.read(tokens)
                read.call.cancel()
                read.attach(cluster.client if router % 2 else other, repeats=bool(router % 3))
            await read.read()
            assert read.ids == straight.ids
            assert read.logprobs == [each.logprob for each in straight.logprobs]
            assert len(set(reserved)) == 1
            assert len({started.request_id for started in read.started}) == 1
            await read.forget(other)
            await read.forget(cluster.client)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("end", ["in the middle", "behind the end"])
def test_what_is_forgotten_stays_forgotten(end: str) -> None:
    """The client cancels its request by Forget, or says that it has all. Who attaches then is told so, and nothing is
    computed."""

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            read = reader()
            read.generate(cluster.client)
            await (read.read(20) if end == "in the middle" else has_all(read))
            await read.forget(other)
            if end == "in the middle":
                assert (await error_of(read.read())).reason in (Reason.TAKEN_OVER, Reason.CANCELLED)
            for client in (cluster.client, other):
                read.attach(client)
                assert (await error_of(read.read())).reason is Reason.CANCELLED
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_answer_that_was_finished_and_not_read(reserved: list[str]) -> None:
    """The client leaves, the answer is computed to its end, and waits."""

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            read = reader()
            read.generate(cluster.client)
            await read.read(20)
            read.call.cancel()
            (node,) = cluster.decode.values()
            await until(cluster, "the end of the answer", lambda: not decode_state(node).jobs)
            before = len(read.tokens)
            read.attach(other, repeats=False)
            await has_all(read)
            assert len(reserved) == 1
            assert len(read.tokens) - before == 4, (
                "that it has started, tokens up to TOKENS_AT_ONCE_MAX, others, the end"
            )
            read.attach(other)
            with pytest.raises(AssertionError, match="after finished"):
                await read.read()
            await read.forget(cluster.client)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_an_answer_that_a_stop_string_has_not_ended_for_its_node(reserved: list[str], tmp_path: Path) -> None:
    """It is left with its end known to the router only: who attaches gets the end once more, from the text."""

    async def scenario() -> None:
        async with inprocess(spec_of(router_flags={**ROUTER_FLAGS, "model": str(tmp_path)})) as cluster:
            whole = await cluster.client.generate(PROMPT, max_tokens=TOKENS)
            stop = whole.text[400:410]
            expected = whole.text[: whole.text.index(stop)]
            read = reader(stop=[stop])
            read.generate(cluster.client)
            await read.read(10)
            read.call.cancel()
            read.attach(cluster.client, repeats=False)
            await read.read()
            assert read.text == expected
            assert len(reserved) == 2
            assert read.finished is not None
            assert read.finished.reason == common_pb2.FINISH_REASON_STOP
            first_token = read.tokens[1]
            read.text, read.ids, read.finished = "", read.ids[:1], None
            read.attach(cluster.client, repeats=False, token=first_token)
            await read.read()
            assert read.text
            assert expected.endswith(read.text)
            await read.forget(cluster.client)
            await assert_conserved(cluster)

    Tokenizer(models.WordLevel({f"<{i}>": i for i in range(1_024)}, unk_token="<0>")).save(
        str(tmp_path / "tokenizer.json")
    )
    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("says", [False, True], ids=["does-not-say", "says"])
def test_its_decode_node_ends_and_the_request_is_computed_elsewhere(says: bool, reserved: list[str]) -> None:
    """No node has the answer any more. The router goes on behind the ids that the client says it has, or computes them
    again and leaves them out; it cannot without the request."""

    async def scenario() -> None:
        async with two_routers(decode=2) as (cluster, other):
            read = reader(seed=7, temperature=1.0)
            read.generate(cluster.client)
            await read.read(30)
            read.call.cancel()
            has = len(read.ids)
            (runs,) = [name for name, node in cluster.decode.items() if decode_state(node).known]
            await cluster.stop_node(runs)
            read.attach(other, repeats=False)
            error = await error_of(read.read())
            assert error.reason is Reason.NOT_RESUMABLE, error
            read.attach(other, says=says)
            await read.read()
            assert read.ids == mock_tokens(PROMPT, TOKENS, seed=7, temperature=1.0)
            assert len(set(reserved)) == 2
            assert has < TOKENS
            await read.forget(other)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False], ids=["repeats", "does-not-repeat"])
def test_an_attempt_that_was_taken_over_is_lost(repeats: bool, reserved: list[str]) -> None:
    """Its decode node ends behind the attach. The router goes on elsewhere by itself, under an id of its own, where the
    client has repeated the request; else it says that the client is to."""

    async def scenario() -> None:
        async with two_routers(decode=2) as (cluster, other):
            read = reader()
            read.generate(cluster.client)
            await read.read(20)
            read.call.cancel()
            (runs,) = [name for name, node in cluster.decode.items() if decode_state(node).known]
            read.attach(other, repeats=repeats)
            await read.read(40)
            await cluster.stop_node(runs)
            if not repeats:
                assert (await error_of(read.read())).reason is Reason.NOT_RESUMABLE
                read.attach(other)
            await has_all(read)
            assert read.finished is not None
            assert read.finished.stats.resumptions == repeats
            assert len(set(reserved)) == 2
            await read.forget(other)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_client_leaves_before_the_commit(reserved: list[str]) -> None:
    """It has the first token, and no decode node has the request yet: the attempt is cancelled, and its client's attach
    runs it anew."""

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            prompt = [MARK, *PROMPT]
            read = Reader(make_request(prompt, max_tokens=30))
            cluster.gates[Point.COMMIT_ARRIVED].close()
            read.generate(cluster.client)
            await read.read(1)
            read.call.cancel()
            await until(cluster, "the attempt to be over", lambda: not cluster.router.requests)
            cluster.gates[Point.COMMIT_ARRIVED].open()
            read.attach(other)
            await read.read()
            assert read.ids == mock_tokens(prompt, 30)
            assert len(set(reserved)) == 2
            await read.forget(other)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_what_a_client_says_must_be_right() -> None:
    """Another request, other ids, a token of nobody: refused, by the field."""

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            read = reader()
            read.generate(cluster.client)
            await read.read(20)
            read.call.cancel()
            ids, read.ids = read.ids, [*read.ids[:-1], 1]
            read.attach(other, says=True)
            assert field_of(await error_of(read.read())) == "output"
            read.ids = ids
            read.attach(other, token=read.token[:-4])
            assert field_of(await error_of(read.read())) == "resume_token"
            changed = inference_pb2.GenerateRequest()
            changed.CopyFrom(read.request)
            changed.token_ids.ids[3] += 1
            kept, read.request = read.request, changed
            read.attach(other)
            assert field_of(await error_of(read.read())) == "resume_token"
            read.request = kept
            assert field_of(await error_of(unary(cluster.client, read.request))) == "resumable"
            read.attach(other, says=True)
            await has_all(read)
            await read.forget(other)
            await assert_conserved(cluster)

    async def unary(client: Client, request: inference_pb2.GenerateRequest) -> None:
        with rpc_errors("router"):
            await client.stub.GenerateUnary(request, timeout=CALL_S_MAX)

    def field_of(error: BatonError) -> str | None:
        assert error.reason is Reason.BAD_FIELD, error
        return error.field

    asyncio.run(scenario())


@pytest.mark.slow
def test_another_keys_token_opens_nothing(tmp_path: Path) -> None:
    """The token of one key in the hand of another: it neither gets the answer nor ends it, at the router that serves it
    and at another one."""
    made = {name: new_key(os.urandom(32).hex()[:43], {"name": name}) for name in ("mine", "yours")}
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(entry for _, entry in made.values()))

    async def scenario() -> None:
        async with inprocess(spec_of(router_flags={**ROUTER_FLAGS, "api_keys_file": str(path)})) as cluster:
            routers = [cluster.endpoints[name] for name in (ROUTER_NAME, OTHER)]
            mine, yours = ([Client(at, api_key=made[name][0]) for at in routers] for name in ("mine", "yours"))
            read, thief = reader(), reader()
            read.generate(mine[0])
            await read.read(20)
            for client in yours:
                thief.attach(client, token=read.token)
                thief.token = read.token
                assert (await error_of(thief.read())).reason is Reason.PERMISSION_DENIED
                assert (await error_of(thief.forget(client))).reason is Reason.PERMISSION_DENIED
            read.call.cancel()
            read.attach(mine[1])
            await has_all(read)
            await read.forget(mine[0])
            for client in (*mine, *yours):
                await client.close()
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_only_router_restarts(reserved: list[str]) -> None:
    """It stops in the middle of the answer, leaves it with its node, and another process takes its place. That one has
    hardly heard of the nodes when the client comes."""

    async def scenario() -> None:
        flags = {**ROUTER_FLAGS, "lame_duck_ms": 1, "stop_grace_ms": 20}
        async with two_routers(router_flags=flags) as (cluster, other):
            read = reader()
            read.generate(other)
            await read.read(20)
            await cluster.stop_node(OTHER)
            (node,) = cluster.decode.values()
            assert [job.output.left for job in decode_state(node).jobs] == [True]
            assert (await error_of(read.read())).reason is Reason.PEER_UNREACHABLE
            await cluster.start_node(OTHER, Service.ROUTER)
            again = Client(cluster.endpoints[OTHER])
            read.attach(again, repeats=False)
            await has_all(read)
            assert len(reserved) == 1
            await read.forget(again)
            await again.close()
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_last_words_of_a_router_reach_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream is slow, and closes in the moment in which it leaves the request: the node hears of it."""
    real = DecodeSubscription._requests

    async def slow(self: DecodeSubscription, wake: asyncio.Event) -> AsyncIterator[decode_pb2.SubscribeRequest]:
        async for message in real(self, wake):
            await asyncio.sleep(0.05)
            yield message

    monkeypatch.setattr(DecodeSubscription, "_requests", slow)

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            read = reader()
            read.generate(other)
            await read.read(20)
            streams = cluster.routers[OTHER].streams
            (inbox,) = streams.inboxes.values()
            stream = streams.find(inbox.decode)
            assert stream is not None
            monkeypatch.setattr(stream, "_open", lambda: None)  # news of the directory would
            stream.let_go(inbox, Parting.LEAVE)
            await stream.close()
            (node,) = cluster.decode.values()
            (job,) = decode_state(node).jobs
            await until(cluster, "the node to hear of it", lambda: job.output.left)
            read.call.cancel()
            read.attach(cluster.client)
            await has_all(read)
            await read.forget(cluster.client)
            await assert_conserved(cluster)

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_reply_to_the_take_over_is_lost(monkeypatch: pytest.MonkeyPatch, reserved: list[str]) -> None:
    """The decode node has changed hands, and the router that asked does not hear of it: it asks again, and gets each
    token once."""
    lost: list[str] = []
    real = DecodeService.TakeOver

    async def take_over(self: DecodeService, request: Any, context: Any) -> Any:
        reply = await real(self, request, context)
        if not lost:
            lost.append(request.key.request)
            await asyncio.sleep(2)  # longer than the router waits
        return reply

    monkeypatch.setattr(DecodeService, "TakeOver", take_over)

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            read = reader()
            read.generate(cluster.client)
            await read.read(20)
            read.call.cancel()
            read.attach(other)
            await has_all(read)
            assert len(lost) == len(reserved) == 1
            await read.forget(other)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_client_comes_back_whose_key_may_have_one_answer(tmp_path: Path, reserved: list[str]) -> None:
    """Its router has not seen that the former connection is gone, and serves it still. That one ends, and counts no
    more; a further answer is refused as before, and another key's token makes no room."""
    made = {name: new_key(os.urandom(32).hex()[:43], {"name": name, "concurrency": 1}) for name in ("mine", "yours")}
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(entry for _, entry in made.values()))

    async def scenario() -> None:
        async with inprocess(spec_of(router_flags={**ROUTER_FLAGS, "api_keys_file": str(path)})) as cluster:
            at = cluster.endpoints[ROUTER_NAME]
            mine, again, yours = (Client(at, api_key=made[name][0]) for name in ("mine", "mine", "yours"))
            read, other, thief = reader(), reader(), reader()
            read.generate(mine)
            await read.read(20)
            other.generate(again)
            assert (await error_of(other.read())).reason is Reason.RATE_LIMIT_EXCEEDED
            thief.generate(yours)
            await thief.read(20)
            other.attach(again, token=thief.token)
            assert (await error_of(other.read())).reason is Reason.RATE_LIMIT_EXCEEDED
            former = read.call
            read.attach(again)
            await has_all(read)
            assert (await error_of(to_its_end(former))).reason is Reason.TAKEN_OVER
            await has_all(thief)
            for who, client in ((read, mine), (thief, yours)):
                await who.forget(client)
            for client in (mine, again, yours):
                await client.close()
            await assert_conserved(cluster)

    asyncio.run(scenario())
    assert len(reserved) == 2


@pytest.mark.slow
def test_one_router_is_asked_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call comes while the first one's take-over is under way. It has the answer in the end, and the first
    one is told so."""
    asked = asyncio.Event()
    go_on = asyncio.Event()
    real = DecodeService.TakeOver

    async def take_over(self: DecodeService, request: Any, context: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await real(self, request, context)

    monkeypatch.setattr(DecodeService, "TakeOver", take_over)

    async def scenario() -> None:
        async with two_routers() as (cluster, other):
            read = reader()
            read.generate(cluster.client)
            await read.read(20)
            read.call.cancel()
            twins = [reader(), reader()]
            for twin in twins:
                twin.ids, twin.token = list(read.ids), read.token
            twins[0].attach(other)
            first = asyncio.create_task(error_of(twins[0].read()))
            await asked.wait()
            twins[1].attach(other)
            await until(cluster, "both calls", lambda: cluster.routers[OTHER].requests == 2)
            go_on.set()
            await has_all(twins[1])
            assert (await first).reason is Reason.TAKEN_OVER
            await twins[1].forget(other)
            await assert_conserved(cluster)

    asyncio.run(scenario())


# With processes.


@pytest.fixture
def cluster() -> Iterator[RunningCluster]:
    with running(spec_of(decode=2)) as made:
        yield made


@asynccontextmanager
async def client_of(cluster: RunningCluster, name: str) -> AsyncIterator[Client]:
    client = Client(cluster.cluster.endpoints[name])
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.slow
def test_its_router_is_killed(cluster: RunningCluster) -> None:
    """In the middle of many answers: each client goes on at the other router, and no attempt is lost."""

    async def scenario() -> None:
        async with client_of(cluster, OTHER) as other:
            readers = [reader() for _ in range(20)]
            for read in readers:
                read.generate(other)
            await asyncio.gather(*(read.read(20) for read in readers))
            await kill(cluster, OTHER)
            for read in readers:
                with pytest.raises(BatonError):
                    await read.read()
                read.attach(cluster.client, repeats=False)
            await asyncio.gather(*map(has_all, readers))
            await asyncio.gather(*(read.forget(cluster.client) for read in readers))
            await assert_conserved(cluster)

    cluster.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("says", [False, True], ids=["does-not-say", "says"])
def test_its_router_and_its_decode_node_are_killed(cluster: RunningCluster, says: bool) -> None:
    """Nobody has the answer but the client: what it has is said or computed again."""

    async def scenario() -> None:
        async with client_of(cluster, OTHER) as other:
            read = reader()
            read.generate(other)
            await read.read(20)
            runs = await runner_of(cluster)
            await kill(cluster, OTHER)
            await kill(cluster, runs)
            with pytest.raises(BatonError):
                await read.read()
            read.attach(cluster.client, says=says)
            await has_all(read)
            await read.forget(cluster.client)
            await assert_conserved(cluster)

    cluster.run(scenario())


@pytest.mark.slow
def test_its_router_stops_and_comes_back(cluster: RunningCluster) -> None:
    """It stands still while its client goes on elsewhere. When it runs again it neither cancels nor retries, and says
    to whoever still listens that the request was taken over."""

    async def scenario() -> None:
        async with client_of(cluster, OTHER) as other:
            read = reader()
            read.generate(other)
            await read.read(20)
            cluster.send_signal(OTHER, signal.SIGSTOP)
            before = read.call
            read.attach(cluster.client)
            await has_all(read)
            cluster.send_signal(OTHER, signal.SIGCONT)
            with suppress(grpc.aio.AioRpcError):  # its end comes behind what it had not read
                while await before.read() is not grpc.aio.EOF:
                    pass
            assert await before.code() == grpc.StatusCode.ABORTED
            await read.forget(cluster.client)
            await assert_conserved(cluster)

    cluster.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "dark"])
def test_the_client_alone_is_cut_off_from_its_router(cluster: RunningCluster, how: str) -> None:
    """Its connection ends; or nothing passes on it and it does not end, so that the router serves on into it. The
    client goes on at the same router by another connection."""

    async def scenario() -> None:
        target = split_endpoint(cluster.cluster.endpoints[ROUTER_NAME])
        proxy = Proxy(("127.0.0.1", 0), target, pids=lambda: {"client": os.getpid()})
        await proxy.start()
        through = Client(f"127.0.0.1:{proxy.port}")
        read = reader()
        read.generate(through)
        await read.read(20)
        if how == "cut":
            proxy.cut_all()
        else:
            proxy.darken("client", Dark.BOTH)
        read.attach(cluster.client)
        await has_all(read)
        await read.forget(cluster.client)
        await assert_conserved(cluster)
        await proxy.close()
        await through.close()

    cluster.run(scenario())


@pytest.mark.slow
def test_both_routers_are_asked_at_once(cluster: RunningCluster) -> None:
    """The later one has the answer, whole; the other one's call ends with TAKEN_OVER and what it had by then."""

    async def scenario() -> None:
        async with client_of(cluster, OTHER) as other:
            read = reader()
            read.generate(other)
            await read.read(20)
            read.call.cancel()
            twins = [reader(), reader()]
            for twin, client in zip(twins, (other, cluster.client), strict=True):
                twin.ids, twin.token = list(read.ids), read.token
                twin.attach(client)
            ends = await asyncio.gather(*(twin.read() for twin in twins), return_exceptions=True)
            (whole,) = [twin for twin, end in zip(twins, ends, strict=True) if end is None]
            (error,) = [end for end in ends if end is not None]
            assert isinstance(error, BatonError)
            assert error.reason is Reason.TAKEN_OVER, error
            assert whole.ids == mock_tokens(PROMPT, TOKENS)
            await whole.forget(other)
            await assert_conserved(cluster)

    cluster.run(scenario())
