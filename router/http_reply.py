"""Sends the answer to one OpenAI call, whole or as a stream of events, and ends the call when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from batonpb import common_pb2, inference_pb2
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError, Reason
from baton.log import get_log
from router.openai_replies import Replies, Usage, error_headers, error_json, error_status
from router.openai_requests import OpenAiCall
from router.slow_client import ClientGuard

log = get_log("http")

ERROR_SEND_MS_MAX = 5_000

Events = AsyncGenerator[tuple[int, inference_pb2.GenerateEvent], None]
CutOff = Callable[[BatonError], None]


def error_response(error: BatonError, *, chat: bool = False) -> JSONResponse:
    return JSONResponse(error_json(error, chat=chat), error_status(error), error_headers(error))


class CallReply(Response):
    """The answer to one call; `events` begins when it is sent. Cancelling it, or a client that leaves, closes them."""

    def __init__(
        self,
        call: OpenAiCall,
        events: Callable[[CutOff], Events],
        replies: Replies,
        *,
        headers: dict[str, str],
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._call = call
        self._events = events
        self._replies = replies
        self._extra = headers
        self._timeout_s = timeout_s
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.wait({work, gone})

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                async with ClientGuard() as guard:
                    events = self._events(guard.cut_off)
                    await (
                        self._stream(events, send) if self._call.stream else self._whole(events, scope, receive, send)
                    )
        except TimeoutError:
            text = f"The answer took longer than {self._timeout_s:g} s, the limit."
            await self._fail(BatonError(Reason.DEADLINE, text), scope, receive, send)
        except BatonError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            log.exception("an answer failed", id=self._replies.id)
            text = "This router has failed at the answer; its log says why."
            await self._fail(BatonError(Reason.INTERNAL, text), scope, receive, send)

    async def _fail(self, error: BatonError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begun:
            with suppress(TimeoutError):  # a client that reads nothing: its connection is closed
                async with asyncio.timeout(ERROR_SEND_MS_MAX / 1000):
                    await self._send_data(send, json.dumps(error_json(error, chat=self._call.chat)))
                    await self._end(send)
        else:
            response = error_response(error, chat=self._call.chat)
            response.headers.update(self._extra)
            await response(scope, receive, send)

    async def _whole(self, source: Events, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        usage = Usage(n=call.n)
        tokens: list[list[inference_pb2.Tokens]] = [[] for _ in range(len(call.requests) * call.n)]
        reasons = [common_pb2.FINISH_REASON_UNSPECIFIED] * len(tokens)
        async with aclosing(source) as events:
            async for index, event in events:
                usage.take(index, event)
                if event.HasField("tokens"):
                    tokens[index].append(event.tokens)
                elif event.HasField("finished"):
                    reasons[index] = event.finished.reason
        answer = self._replies.whole(list(zip(tokens, reasons, strict=True)), usage)
        self._begun = True
        await JSONResponse(answer, headers=self._extra)(scope, receive, send)

    async def _stream(self, source: Events, send: Send) -> None:
        """Nothing is sent before the first token: until then an error still has a status of its own."""
        usage = Usage(n=self._call.n)
        async with aclosing(source) as events:
            async for index, event in events:
                usage.take(index, event)
                chunk = self._replies.chunk(index, event)
                if chunk is not None:
                    await self._send_data(send, json.dumps(chunk))
        if self._call.include_usage:
            await self._send_data(send, json.dumps(self._replies.usage_chunk(usage)))
        await self._end(send)

    async def _send_data(self, send: Send, data: str) -> None:
        if not self._begun:
            self._begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._extra}
            start: Message = {"type": "http.response.start", "status": 200, "headers": _raw(headers)}
            await send(start)
        await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    async def _end(self, send: Send) -> None:
        await self._send_data(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
