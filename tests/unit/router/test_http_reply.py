"""The answer to one call, on a connection of its server: what becomes of it when the client leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

import pytest
from batonpb import common_pb2, inference_pb2
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError, Reason
from router.answers import AnswerPart, AnswerSink
from router.http_reply import LOGPROBS_INLINE_MAX, CallReply, _Choice
from router.openai import parse_completion
from router.replies import Replies
from tests.support.http_door import HANG_S, REQUEST, Door, answer, run

BIG = b"x" * (4 << 20)
"""More than the kernel keeps of an answer for both sides."""


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_while_it_is_told_an_error(begun: bool) -> None:
    """It has not read what came before: the answer, or the one of its former call. The error waits for it until it
    leaves, and no longer."""
    failing, ended, broken = asyncio.Event(), asyncio.Event(), list[str]()

    async def ask(sinks: Sequence[AnswerSink]) -> None:
        if begun:
            sinks[0].tokens(AnswerPart(first_index=0, ids=[7], text=BIG.decode(), logprobs=(), place=None))
            await asyncio.sleep(0.05)
        failing.set()
        raise BatonError(Reason.SLOW_CLIENT, "Too slow.")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/big":
            await Response(BIG)(scope, receive, send)
            return
        call = parse_completion({"prompt": [1, 2], "stream": begun})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        try:
            await CallReply(ask, 1, replies, timeout_s=30.0)(scope, receive, send)
        finally:
            ended.set()

    async def scene(door: Door) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: broken.append(context["message"]))
        _, writer = await door()
        writer.write(REQUEST if begun else REQUEST.replace(b"GET /", b"GET /big") + REQUEST)
        await failing.wait()
        await asyncio.sleep(0.05)
        assert not ended.is_set()
        writer.transport.abort()
        async with asyncio.timeout(HANG_S):
            await ended.wait()
        assert broken == []

    run(scene, app)


@pytest.mark.parametrize("fails", [False, True])
def test_an_answer_that_ends_before_its_head_is_out(fails: bool) -> None:
    """What the head says of a key's limits comes from another process. The answer has its head all the same, once, and
    all of its tokens."""

    async def ask(sinks: Sequence[AnswerSink]) -> None:
        sinks[0].started(inference_pb2.Started(prompt_tokens=2), None)
        sinks[0].tokens(AnswerPart(first_index=0, ids=[7], text="seven", logprobs=(), place=None))
        await asyncio.sleep(0.01)
        if fails:
            raise BatonError(Reason.INTERNAL, "It failed.")
        sinks[0].finished(inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH), None)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(0.03)
            await send(message)

        call = parse_completion({"prompt": [1, 2], "stream": True})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        await CallReply(ask, 1, replies, timeout_s=30.0)(scope, receive, send_with)

    async def scene(door: Door) -> None:
        reader, writer = await door()
        writer.write(REQUEST)
        async with asyncio.timeout(HANG_S):
            text = await reader.readuntil(b"data: [DONE]\n\n")
        assert text.startswith(b"HTTP/1.1 200 OK\r\n")
        assert [text.count(part) for part in (b"HTTP/1.1 200", b'"seven"', b"It failed.")] == [1, 1, fails]

    run(scene, app)


@pytest.mark.parametrize("asked", [{}, {"logprobs": 0}, {"return_token_ids": True}])
def test_a_token_by_itself_is_told_as_a_part_with_it(asked: dict[str, object]) -> None:
    """The same answer twice, with its tokens as parts and by themselves: one without text, one whose text JSON escapes,
    and one that comes while the client is not to be given more. The streams are the same, byte for byte."""

    async def ask(sinks: Sequence[AnswerSink], alone: bool) -> None:
        (sink,) = sinks
        assert isinstance(sink, _Choice)
        sink.started(inference_pb2.Started(prompt_tokens=2), None)
        for index, text in enumerate(["one", " two", "", '"\u00e9\n', " five", " six"]):
            if index == 4:
                sink.is_open = False
            if alone:
                sink.token(index, 7 + index, text)
            else:
                sink.tokens(AnswerPart(index, (7 + index,), text, (), None))
            while not sink.is_open:
                sink._reply.is_full()
                await asyncio.sleep(0)
        sink.finished(inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH), None)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = parse_completion({"prompt": [1, 2], "stream": True, **asked})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        asks = partial(ask, alone=scope["path"] == "/alone")
        await CallReply(asks, 1, replies, timeout_s=30.0)(scope, receive, send)

    async def scene(door: Door) -> None:
        told = []
        for path in (b"GET /parts", b"GET /alone"):
            reader, writer = await door()
            writer.write(REQUEST.replace(b"GET /", path))
            async with asyncio.timeout(HANG_S):
                text = await reader.readuntil(b"data: [DONE]\n\n")
            told.append([line for line in text.split(b"\r\n") if line.startswith(b"data: ")])
        assert told[0] == told[1]
        assert b"".join(told[0]).count(b" five") == 1

    run(scene, app)


def test_answers_of_one_call_have_their_turns_with_a_slow_client() -> None:
    """Three answers. Whatever goes on first fills what the client has read; then the next one is first. An answer that
    has had no turn is not told that the client reads."""
    call = parse_completion({"prompt": [1, 2], "stream": True, "n": 3})

    async def ask(_sinks: Sequence[AnswerSink]) -> None:
        raise AssertionError

    async def scene() -> None:
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        reply, had = CallReply(ask, 3, replies, timeout_s=30.0), list[int]()
        reply._sinks = [_Choice(reply, index) for index in range(3)]

        def go_on(index: int, *, fills: bool) -> None:
            had.append(index)
            if fills:
                reply._set_open(False)

        for index, sink in enumerate(reply._sinks):
            sink.on_open = partial(go_on, index, fills=True)
        for _ in range(4):
            reply._set_open(True)
            reply._go_on()
        assert had == [0, 1, 2, 0]
        reply._sinks[2].on_open = partial(go_on, 2, fills=False)
        reply._sinks[1].on_open = None
        reply._set_open(True)
        reply._go_on()
        assert had[4:] == [2, 0]

    asyncio.run(scene())


def test_a_whole_answer_that_cannot_be_written() -> None:
    """Its client gets an error with a status, and nothing else before it."""

    async def ask(sinks: Sequence[AnswerSink]) -> None:
        sinks[0].started(inference_pb2.Started(prompt_tokens=2), None)  # and no end: this has a bug

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = parse_completion({"prompt": [1, 2]})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        await CallReply(ask, 1, replies, timeout_s=30.0)(scope, receive, send)

    async def scene(door: Door) -> None:
        head, body = await answer(await door())
        assert head.startswith(b"HTTP/1.1 500 ") and b"INTERNAL" in body.upper()

    run(scene, app)


@pytest.mark.parametrize("count", [LOGPROBS_INLINE_MAX, LOGPROBS_INLINE_MAX + 1])
def test_many_log_probabilities_of_a_whole_answer_are_written_beside_the_loop(count: int) -> None:
    """Those of a long prompt take a second; a few are not worth a thread."""
    threads = set[threading.Thread]()

    def text_of(token: int) -> str:
        threads.add(threading.current_thread())
        return str(token)

    async def ask(sinks: Sequence[AnswerSink]) -> None:
        sinks[0].started(inference_pb2.Started(prompt_tokens=2), None)
        logprobs = [common_pb2.TokenLogprobs(logprob=-1.0)] * count
        sinks[0].tokens(AnswerPart(first_index=0, ids=[7] * count, text="7", logprobs=logprobs, place=None))
        sinks[0].finished(inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH), None)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = parse_completion({"prompt": [1, 2], "logprobs": 0})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=text_of)
        await CallReply(ask, 1, replies, timeout_s=30.0)(scope, receive, send)

    async def scene(door: Door) -> None:
        _, body = await answer(await door())
        assert body.count(b"-1.0") == 2 * count
        assert threads and (threading.current_thread() in threads) is (count <= LOGPROBS_INLINE_MAX)

    run(scene, app)
