"""Errors that the router passes on are freed by whoever drops them last, and do not wait for the collector.

An error keeps the frames that it passed through; one of these must not keep the error. What a whole request leaves
behind: `tests/cluster/test_garbage.py`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason
from router.answers import AnswerPart, AnswerSink, Collected
from router.choices import run_choices
from router.http_reply import CallReply
from router.openai import parse_completion
from router.replies import Replies
from router.retries import Retries, RetryConfig

Make = Callable[[], BatonError]


def nothing_left(scene: Callable[[Make], Coroutine[Any, Any, None]]) -> None:
    """Plays it, without the collector; none of the errors that it has made is in memory afterwards."""
    made: list[weakref.ref[BatonError]] = []

    def make() -> BatonError:
        error = BatonError(Reason.DECODE_FULL, "All are full.", retry_after_ms=10)
        made.append(weakref.ref(error))
        return error

    gc.collect()
    gc.disable()
    try:
        asyncio.run(scene(make))
        left = [error() for error in made]
    finally:
        gc.enable()
    assert made
    assert left == [None] * len(made)


@pytest.mark.parametrize("granted", [False, True])
def test_a_verdict(granted: bool) -> None:
    """The request has had its time, or its last death: it ends with the attempt's error, or with one about all."""

    async def scene(make: Make) -> None:
        retries = Retries(config=RetryConfig(deaths_max=1), search_ms_max=1, give_up_s=0.0)

        def attempt() -> None:
            try:
                raise make()
            except BatonError as error:
                retries.judge(error, granted=granted, now_s=1.0, in_answer=True)

        with pytest.raises(BatonError) as caught:
            attempt()
        del caught

    nothing_left(scene)


async def failing(make: Make, sink: AnswerSink, *, after: int = 0) -> None:
    for index in range(after):
        sink.tokens(AnswerPart(first_index=index, ids=[7], text="7", logprobs=(), place=None))
    raise make()


def test_several_answers_of_which_all_fail() -> None:
    """One error is told; those of the others are dropped with their tasks."""

    async def scene(make: Make) -> None:
        requests = [inference_pb2.GenerateRequest()] * 2
        try:
            sinks = [Collected() for _ in range(6)]
            await run_choices(lambda _request, _choice, sink: failing(make, sink, after=2), requests, sinks)
        except BatonError:
            return
        raise AssertionError("it has ended well")

    nothing_left(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_over_http(stream: bool) -> None:
    """It fails after a token: as the whole reply, or in the middle of a stream."""
    sent: list[Any] = []

    async def scene(make: Make) -> None:
        async def answer(sinks: Sequence[AnswerSink]) -> None:
            await failing(make, sinks[0], after=1)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        call = parse_completion({"prompt": [1, 2], "stream": stream})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        await CallReply(answer, 1, replies, timeout_s=30.0)({"type": "http"}, receive, send)

    nothing_left(scene)
    parts = [message["body"] for message in sent if message["type"] == "http.response.body"]
    events = b"".join(parts).split(b"\n\n")
    reported = events[1].removeprefix(b"data: ") if stream else parts[0]
    assert json.loads(reported)["error"]["message"] == "All are full."


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_over_http(stream: bool) -> None:
    """It ends well: neither the reply nor what it holds of the call waits for the collector. Of a thousand slow streams
    these would be many megabytes."""

    async def scene() -> weakref.ref[CallReply]:
        async def answer(sinks: Sequence[AnswerSink]) -> None:
            sinks[0].started(inference_pb2.Started(prompt_tokens=2), None)
            sinks[0].tokens(AnswerPart(first_index=0, ids=[7], text="7", logprobs=(), place=None))
            sinks[0].finished(inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH), None)

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(_message: Any) -> None:
            return

        call = parse_completion({"prompt": [1, 2], "stream": stream})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        reply = CallReply(answer, 1, replies, timeout_s=30.0)
        await reply({"type": "http"}, receive, send)
        return weakref.ref(reply)

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(scene())() is None
    finally:
        gc.enable()
