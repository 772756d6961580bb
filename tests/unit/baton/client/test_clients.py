"""Both clients against routers that break off, refuse and hold, as gRPC brings it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import grpc
import pytest
from batonpb import inference_pb2

from baton.client import Answer, AsyncClient, BatonError, Client, Message, Piece, Prompt, Reason, Sampling
from baton.client.answer import request_message
from tests.support.cli_harness import free_endpoint
from tests.support.router_double import WAIT_S_MAX, Play, RouterDouble, router_doubles

GONE = grpc.StatusCode.UNAVAILABLE
Read = Callable[..., tuple[list[Piece], Answer]]


def read_async(routers: str, prompt: Prompt = "hello", *, client: Any = None, **request: Any) -> Any:
    async def read() -> tuple[list[Piece], Answer]:
        async with AsyncClient(routers, **(client or {})) as asked, asked.stream(prompt, **request) as stream:
            return [piece async for piece in stream], stream.answer

    return asyncio.run(read())


def read_sync(routers: str, prompt: Prompt = "hello", *, client: Any = None, **request: Any) -> Any:
    with Client(routers, **(client or {})) as asked, asked.stream(prompt, **request) as stream:
        return list(stream), stream.answer


both = pytest.mark.parametrize("read", [read_async, read_sync])


@both
def test_an_answer_that_is_cut_off_twice(read: Read) -> None:
    """Each index comes once; each attach says what there is, to the other router; at the end one is told that all has
    come."""
    one = RouterDouble(plays=deque([Play(tokens=2, end=GONE), Play(tokens=4, end="cut")]))
    two = RouterDouble(plays=deque([Play(tokens=2, end=GONE), Play(tokens=4, end="cut")]))
    with router_doubles(one, two) as routers:
        pieces, answer = read(routers)
    assert [piece.first_index for piece in pieces] == [0, 1, 2, 3, 4]
    assert "".join(piece.text for piece in pieces) == answer.text == "0 1 2 3 4 "
    assert (answer.ids, answer.finish, answer.request_id) == ([10, 11, 12, 13, 14], "length", "call")
    assert answer.stats.output_tokens == 5
    assert sorted(one.methods + two.methods) == ["Attach"] * 4 + ["Generate"]
    assert abs(len(one.seen) - len(two.seen)) == 1
    assert answer.attaches == 4
    assert one.forgotten + two.forgotten == ["behind 5"]


@both
def test_the_only_router_is_cut_off(read: Read) -> None:
    """It is asked again, with what there is."""
    router = RouterDouble(plays=deque([Play(tokens=2, end=GONE), Play(tokens=2, end=GONE)]))
    with router_doubles(router) as address:
        _, answer = read(address)
    assert answer.ids == [10, 11, 12, 13, 14]
    assert router.methods == ["Generate", "Attach", "Attach"]
    request = router.seen[0].message
    assert [(seen.message.request, list(seen.message.output.ids)) for seen in router.seen[1:]] == [
        (request, [10, 11]), (request, [10, 11]),
    ]  # fmt: skip


@both
def test_a_full_cluster_is_asked_again(read: Read) -> None:
    """Before the first token the request is sent anew, or attached to where it has a token; an answer comes of it."""
    full = BatonError(Reason.TOO_MANY_CALLS, "Full.", retry_after_ms=1)
    router = RouterDouble(plays=deque([Play(end=full), Play(end=full)]))
    with router_doubles(router) as address:
        assert read(address)[1].finish == "length"
        assert router.methods == ["Generate", "Attach", "Attach"]
        router.plays, router.seen = deque([Play(end=full)]), []
        assert read(address, resumable=False)[1].finish == "length"
        assert router.methods == ["Generate", "Generate"]
        router.plays, router.seen = deque([Play(end=full)]), []
        with pytest.raises(BatonError) as caught:
            read(address, client={"retries_max": 0})
    assert (caught.value.reason, caught.value.retry_after_ms) == (Reason.TOO_MANY_CALLS, 1)
    assert router.methods == ["Generate"]


@both
def test_errors_of_the_request(read: Read) -> None:
    """Once, with its field; the router has forgotten it by itself."""
    wrong = BatonError(Reason.SAMPLING_OUT_OF_RANGE, "top_p must not be above 1.", field="sampling.top_p")
    router = RouterDouble(plays=deque([Play(end=wrong)]))
    with router_doubles(router) as address, pytest.raises(BatonError, match=r"^top_p must not") as caught:
        read(address, sampling=Sampling(top_p=2))
    assert (caught.value.reason, caught.value.field) == (Reason.SAMPLING_OUT_OF_RANGE, "sampling.top_p")
    assert (router.methods, router.forgotten) == (["Generate"], [])


@both
def test_without_a_resume_token_an_answer_is_over(read: Read) -> None:
    """What has begun is not asked anew: the error says what became of the connection."""
    router = RouterDouble(plays=deque([Play(tokens=2, end=GONE)]))
    with router_doubles(router) as address, pytest.raises(BatonError) as caught:
        read(address, resumable=False)
    assert caught.value.message == f"The router at {address} has closed the connection in the middle of the call."
    assert (router.methods, router.forgotten) == (["Generate"], [])


@both
def test_the_deadline(read: Read) -> None:
    """A router that holds the answer: the time of the whole request ends it, and the router is told."""
    router = RouterDouble(plays=deque([Play(tokens=1, end="hold")]))
    with router_doubles(router) as address, pytest.raises(BatonError) as caught:
        read(address, timeout_s=0.5)
    assert caught.value.reason is Reason.DEADLINE
    assert router.forgotten == ["behind 1"]


@both
def test_nobody_listens(read: Read) -> None:
    """With a time to find a router each is tried; without one, until there is no time left."""
    routers = [free_endpoint(), free_endpoint()]
    with pytest.raises(BatonError) as caught:
        read(",".join(routers), client={"connect_timeout_s": 0})
    assert caught.value.reason is Reason.PEER_UNREACHABLE
    assert caught.value.message in {f"The router at {each} does not answer: nothing listens there." for each in routers}
    with pytest.raises(BatonError, match=r"^There was no whole answer within 0.3 s. The last try: The router") as late:
        read(routers[0], timeout_s=0.3)
    assert late.value.reason is Reason.DEADLINE


def test_a_stream_that_is_left() -> None:
    """In the middle of it, by either client: the call ends and the router is told."""
    router = RouterDouble()
    with router_doubles(router) as address:

        async def leave() -> None:
            async with AsyncClient(address) as client, client.stream("hello") as stream:
                assert (await anext(stream)).ids == [10]

        router.plays.append(Play(tokens=1, end="hold"))
        asyncio.run(leave())
        assert router.left.wait(WAIT_S_MAX)
        assert router.forgotten == ["behind 1"]
        router.left.clear()
        router.plays.append(Play(tokens=1, end="hold"))
        with Client(address) as client, client.stream("hello") as stream:
            assert next(stream).ids == [10]
        assert router.left.wait(WAIT_S_MAX)
    assert router.forgotten == ["behind 1"] * 2


def test_a_task_that_is_cancelled() -> None:
    """While the answer is awaited: the same."""
    router = RouterDouble(plays=deque([Play(tokens=1, end="hold")]))

    async def cancelled(address: str) -> None:
        async with AsyncClient(address) as client:
            asking = asyncio.create_task(client.generate("hello"))
            await asyncio.to_thread(router.holds.wait, WAIT_S_MAX)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    with router_doubles(router) as address:
        asyncio.run(cancelled(address))
        assert router.left.wait(WAIT_S_MAX)


def test_a_stream_that_is_dropped() -> None:
    """Nobody closes it, as where a loop is left by `break`: the garbage collector does."""
    router = RouterDouble(plays=deque([Play(tokens=1, end="hold")]))
    with router_doubles(router) as address, Client(address) as client:
        for piece in client.stream("hello"):
            assert piece.ids == [10]
            break
        assert router.forgot.wait(WAIT_S_MAX)
        assert router.left.wait(WAIT_S_MAX)


def test_an_answer_in_one_message() -> None:
    """Without a resume token there is nothing to go on with, so a whole answer takes one message. Key and request id go
    with each call."""
    router = RouterDouble(plays=deque([Play(end=GONE)]))
    with router_doubles(router) as address, Client(address, api_key="secret") as client:
        answer = client.generate([1, 2], resumable=False, request_id="mine")
    assert (answer.text, answer.finish, answer.attaches) == ("0 1 2 3 4 ", "length", 0)
    assert router.methods == ["GenerateUnary"] * 2
    assert {seen.metadata["authorization"] for seen in router.seen} == {"Bearer secret"}
    assert {seen.metadata["x-request-id"] for seen in router.seen} == {"mine"}


def test_a_name_for_all_routers() -> None:
    """As of a headless Service; of one address here."""
    router = RouterDouble(plays=deque([Play(tokens=2, end=GONE)]))
    with router_doubles(router) as address:
        _, answer = read_sync(f"dns:///localhost:{address.partition(':')[2]}")
    assert (answer.ids, answer.attaches) == ([10, 11, 12, 13, 14], 1)


@both
def test_options_that_are_none(read: Read) -> None:
    """A name that is mistyped, or belongs to the sampling, is not passed over; values that gRPC would never send, or
    take for a time in the past, are refused before anything is sent."""
    key, request_id = "one\ntwo", "schl\xfcssel"
    with pytest.raises(TypeError, match=r"no option 'max_tokens'.*It goes into sampling=Sampling"):
        read("127.0.0.1:1", max_tokens=3)
    with pytest.raises(TypeError, match=r"no option 'timeout'"):
        read("127.0.0.1:1", client={"timeout": 3})
    with pytest.raises(TypeError, match="decode it"):
        read("127.0.0.1:1", prompt=b"bytes")
    for timeout_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            read("127.0.0.1:1", timeout_s=timeout_s)
    for wrong, reason in (
        ({"client": {"api_key": key}}, Reason.INVALID_API_KEY),
        ({"request_id": request_id}, Reason.BAD_REQUEST_ID),
    ):
        with pytest.raises(BatonError) as caught:
            read("127.0.0.1:1", **wrong)
        assert caught.value.reason is reason
        assert key not in str(caught.value)
    router = RouterDouble()
    with router_doubles(router) as address:
        assert read(address, timeout_s=float("inf"))[1].finish == "length"


def test_a_client_that_is_closed_under_way() -> None:
    """Threads that wait are not left waiting, the router is told, and nothing more can be asked."""
    router = RouterDouble(plays=deque([Play(tokens=1, end="hold"), Play(tokens=2, end="hold")]))
    with router_doubles(router) as address, ThreadPoolExecutor(5) as threads:
        client = Client(address)
        stream, other = client.stream("hello"), client.stream("hello")
        assert [next(each).ids for each in (stream, other)] == [[10], [10]]
        assert next(other).ids == [11]
        waiting = threads.submit(next, other)
        for closing in [threads.submit(client.close) for _ in range(4)]:
            closing.result(WAIT_S_MAX)
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(WAIT_S_MAX)
        with pytest.raises(RuntimeError, match="closed"):
            next(stream)
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("hello")
        stream.close()
        client.close()
    assert sorted(router.forgotten) == ["behind 1", "behind 2"]


def test_an_asyncio_client_that_is_closed_under_way() -> None:
    """A stream that was left just before by `break`, one that is held, and a task that waits: the router hears of
    each."""
    router = RouterDouble(plays=deque([Play(tokens=1, end="hold") for _ in range(4)]))

    async def close(address: str) -> None:
        client = AsyncClient(address)
        async for _ in client.stream("hello"):
            break
        held, other = client.stream("hello"), client.stream("hello")
        assert [(await anext(each)).ids for each in (held, other)] == [[10], [10]]
        waiting = asyncio.ensure_future(client.generate("hello"))
        asking = asyncio.ensure_future(anext(other))
        await asyncio.sleep(0)
        await client.close()
        for late in (asking, waiting, client.generate("hello")):
            with pytest.raises(RuntimeError, match="closed"):
                await late

    with router_doubles(router) as address:
        asyncio.run(close(address))
    assert router.forgotten == ["behind 1"] * 3


def test_a_client_after_a_fork() -> None:
    """Its thread is not there: the child is told so, and does not wait for ever."""
    router = RouterDouble()
    code = """
import os, sys
from baton.client import Client
with Client(sys.argv[1]) as client:
    client.generate("hello")
    if os.fork() == 0:
        try:
            client.generate("hello")
        except RuntimeError as error:
            client.close()
            os._exit("after the fork" in str(error))
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    with router_doubles(router) as address:
        forked = subprocess.run(
            [sys.executable, "-c", code, address], capture_output=True, text=True, timeout=WAIT_S_MAX, check=True
        )
    assert forked.stdout == "1\n"


class Forgetful(RouterDouble):
    """Begins anew with each attach."""

    def Attach(self, request: inference_pb2.AttachRequest, context: Any) -> Iterator[inference_pb2.GenerateEvent]:
        return self._events(0, context, resumable=True)


def test_a_token_that_comes_twice() -> None:
    """A router that does not keep its word is a bug of ours, and no answer."""
    router = Forgetful(plays=deque([Play(tokens=2, end=GONE)]))
    with router_doubles(router) as address, pytest.raises(AssertionError):
        read_sync(address)


def test_prompts_and_sampling() -> None:
    """Text, ids and messages; every field of the interface's Sampling has one here, by its name."""

    def made(prompt: Prompt, sampling: Sampling | None = None) -> inference_pb2.GenerateRequest:
        return request_message(prompt, sampling, "m", None, resumable=True)

    assert made("hi") == inference_pb2.GenerateRequest(text="hi", model="m", resumable=True)
    assert list(made((1, 2)).token_ids.ids) == [1, 2]
    assert made([]).WhichOneof("prompt") == "token_ids"
    chat = made([Message(role="system", content="Be brief."), Message(role="user", content="hi")]).chat.messages
    assert [(message.role, message.content) for message in chat] == [("system", "Be brief."), ("user", "hi")]
    assert {field.name for field in fields(Sampling)} == set(inference_pb2.Sampling.DESCRIPTOR.fields_by_name)
    assert made("hi", Sampling()) == inference_pb2.GenerateRequest(
        text="hi", model="m", resumable=True, sampling=inference_pb2.Sampling()
    )
    drawn = Sampling(
        temperature=0, seed=0, logit_bias={7: -1.5}, stop=["end"], stop_token_ids=(3,), logprobs=0
    ).message()
    assert all(drawn.HasField(name) for name in ("temperature", "seed", "logprobs"))
    assert not drawn.HasField("top_p")
    assert (dict(drawn.logit_bias), list(drawn.stop), list(drawn.stop_token_ids)) == ({7: -1.5}, ["end"], [3])


@pytest.mark.parametrize("routers", ["", "http://127.0.0.1:8000", "127.0.0.1", "a:1,,0.0.0.0:7000", []])
def test_addresses_that_are_none(routers: Any) -> None:
    with pytest.raises(BatonError) as caught:
        AsyncClient(routers)
    assert caught.value.reason is Reason.BAD_ENDPOINT


def test_the_client_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'pydantic', 'router', 'starlette', 'click'}"
    code = f"import baton.client, sys; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S_MAX, check=True
    )
    assert loaded.stdout == "[]\n"
