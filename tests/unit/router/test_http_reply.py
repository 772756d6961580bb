"""The answer to one call over HTTP, by what of it is on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from batonpb import common_pb2, inference_pb2
from starlette.types import Message, Receive, Scope, Send

from router.answers import AnswerPart, AnswerSink
from router.http_reply import CallReply
from router.openai import parse_completion
from router.replies import Replies
from tests.support.http_door import REQUEST, Door, run


async def short(sinks: Sequence[AnswerSink]) -> None:
    """It has all its tokens at once."""
    sinks[0].started(inference_pb2.Started(prompt_tokens=2), None)
    sinks[0].tokens(AnswerPart(first_index=0, ids=[7], text="7", logprobs=(), place=None))
    sinks[0].finished(inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH), None)


def test_a_stream_that_ends_while_its_head_waits() -> None:
    """The head is to say what is left of the key's limits, and a worker asks its parent for that. The answer is over
    before the parent has answered. Its client gets the head, each chunk and the end once."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(0.01)
                message["headers"] = [*message["headers"], (b"left", b"1")]
            await send(message)

        call = parse_completion({"prompt": [1, 2], "stream": True})
        replies = Replies(request_id="r", call=call, model="m", created=0, token_text=str)
        await CallReply(short, 1, replies, timeout_s=30.0)(scope, receive, send_with)

    async def scene(door: Door) -> None:
        reader, writer = await door()
        writer.write(REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nleft: 1" in head
        assert [body.count(each) for each in (b'"text": "7"', b'"length"', b"data: [DONE]")] == [1, 1, 1]

    run(scene, app)
