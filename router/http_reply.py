"""The answer to one call over HTTP: whole, or as server-sent events. The call ends when its client goes away.

Each event of a resumable call has a resume token as its id, which clients send back as Last-Event-ID. A client that
goes away leaves such a call: the generator is closed as for any other, and the router decides what stays.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, NoReturn

from batonpb import common_pb2, inference_pb2
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from baton.clock import first_of
from baton.errors import BatonError, Reason
from baton.log import get_log
from router import openai
from router.node import CutOff, client_guard
from router.replies import Replies
from router.resume import Places

log = get_log("http")

ERROR_SEND_MS_MAX = 5_000
RECONNECT_MS: Final = 500
"""What clients of a resumable stream are told to wait for before they attach: EventSource's own is some seconds."""

DONE: Final = "[DONE]"

Events = AsyncGenerator[tuple[int, inference_pb2.GenerateEvent], None]


def error_response(error: BatonError, *, chat: bool = False, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """`headers` are added to those that the error has."""
    body, status = openai.error_json(error, chat=chat), openai.error_status(error)
    return JSONResponse(body, status, {**openai.error_headers(error), **(headers or {})})


class CallReply(Response):
    """The answer to one call; `events` begins when it is sent. Cancelling it, or a client that leaves, closes them."""

    def __init__(
        self, events: Callable[[CutOff], Events], replies: Replies, *, places: Places | None = None, timeout_s: float
    ) -> None:
        """`places` are those of a resumable call."""
        super().__init__()
        self._call = replies.call
        self._events = events
        self._replies = replies
        self._extra = {"x-request-id": replies.request_id}
        self._timeout_s = timeout_s
        self._places = places
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi, self._send = (scope, receive, send), send
        await first_of(self._run(), disconnected(receive))

    async def _run(self) -> None:
        answer = self._stream if self._call.stream else self._whole
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client_guard() as cut_off,
                aclosing(self._events(cut_off)) as events,
            ):
                await answer(events)
            return
        except TimeoutError:
            error = BatonError(Reason.DEADLINE, f"The answer took longer than {self._timeout_s:g} s, the limit.")
        except BatonError as raised:
            error = raised
        except Exception:
            log.exception("an answer failed", id=self._replies.id)
            error = BatonError(Reason.INTERNAL, "This router failed to answer; its log says why.")
        try:
            await self._fail(error)
        finally:
            del error  # or it would refer to itself, by this frame in its traceback

    async def _fail(self, error: BatonError) -> None:
        if self._begun:
            with suppress(TimeoutError):  # a client that reads nothing: its connection is closed
                async with asyncio.timeout(ERROR_SEND_MS_MAX / 1000):
                    await self._send_data(json.dumps(openai.error_json(error, chat=self._call.chat)))
                    await self._send_data(DONE, more=False)
        else:
            await error_response(error, chat=self._call.chat, headers=self._extra)(*self._asgi)

    async def _whole(self, events: Events) -> None:
        call = self._call
        tokens: list[list[inference_pb2.Tokens]] = [[] for _ in range(len(call.requests) * call.n)]
        reasons = [common_pb2.FINISH_REASON_UNSPECIFIED] * len(tokens)
        async for index, event in events:
            self._replies.count(index, event)
            if event.HasField("tokens"):
                tokens[index].append(event.tokens)
            elif event.HasField("finished"):
                reasons[index] = event.finished.reason
        answer = self._replies.whole(list(zip(tokens, reasons, strict=True)))
        self._begun = True
        await JSONResponse(answer, headers=self._extra)(*self._asgi)

    async def _stream(self, events: Events) -> None:
        """Nothing is sent before the first token: until then an error still has a status of its own."""
        replies = self._replies
        async for index, event in events:
            replies.count(index, event)
            chunk = replies.chunk(index, event)
            if self._places is not None:
                offset, prompt_tokens = replies.offset(index), replies.prompt_of(index)
                self._places.follow(index, event.resume_token, text_offset=offset, prompt_tokens=prompt_tokens)
            if chunk is not None:
                await self._send_data(json.dumps(chunk))
        if self._call.include_usage:
            await self._send_data(json.dumps(replies.usage_chunk()))
        await self._send_data(DONE, more=False)

    async def _send_data(self, data: str, *, more: bool = True) -> None:
        lines = f"data: {data}\n\n"
        if self._places is not None:
            lines = f"id: {self._places.token()}\n{lines}"
        if not self._begun:
            self._begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._extra}
            await self._send({"type": "http.response.start", "status": 200, "headers": Headers(headers).raw})
            lines = lines if self._places is None else f"retry: {RECONNECT_MS}\n{lines}"
        await self._send({"type": "http.response.body", "body": lines.encode(), "more_body": more})


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def left(receive: Callable[[], Awaitable[Any]]) -> NoReturn:
    await disconnected(receive)
    raise client_left()


def client_left() -> BatonError:
    return BatonError(Reason.CANCELLED, "The client has left.")
