"""The answer to one call over HTTP: whole, or as server-sent events. The call ends when its client goes away.

Each event of a resumable call has a resume token as its id, which clients send back as Last-Event-ID. A client that
goes away leaves such a call: it is cancelled as any other, and the router decides what stays.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any, Final, NoReturn

from batonpb import inference_pb2
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from baton.clock import first_of
from baton.errors import BatonError, Reason
from baton.log import get_log
from router import openai
from router.answers import AnswerPart, AnswerSink, Collected
from router.http_connection import STREAM, HttpCall
from router.replies import Replies
from router.resume import Place, Places

log = get_log("http")

ERROR_SEND_MS_MAX = 5_000
LOGPROBS_INLINE_MAX: Final = 256
"""Of a whole answer that is written at once. Those of a long prompt take a second, in a thread, while streams go on."""
RECONNECT_MS: Final = 500
"""What clients of a resumable stream are told to wait for before they attach: EventSource's own is some seconds."""

_THREADS: Final = ThreadPoolExecutor(2, thread_name_prefix="answers")

Answer = Callable[[Sequence[AnswerSink]], Coroutine[Any, Any, None]]
"""Runs a call, with a sink for each of its answers. Raises BatonError."""


def error_response(error: BatonError, *, chat: bool = False, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """`headers` are added to those that the error has."""
    body, status = openai.error_json(error, chat=chat), openai.error_status(error)
    return JSONResponse(body, status, {**openai.error_headers(error), **(headers or {})})


class CallReply(Response):
    """The answer to one call, which begins when this is sent. Cancelling it, or a client that leaves, ends it."""

    def __init__(
        self, answer: Answer, answers: int, replies: Replies, *, places: Places | None = None, timeout_s: float
    ) -> None:
        """`places` are those of a resumable call."""
        # Not the Response's own, whose headers and body are not used.
        self.background = None
        self._call = replies.call
        self._answer = answer
        self._answers = answers
        self.replies = replies
        self._extra = {"x-request-id": replies.request_id}
        self._timeout_s = timeout_s
        self.places = places
        self._begun = False
        self._direct: HttpCall | None = None
        """Where the stream is written without a task: with other servers, all of it is sent by one."""
        self._sinks: list[_Choice] = []
        self._turn = 0
        """The sink that goes on first when the client takes more."""
        self._lines: list[str] = []
        """To be sent."""
        self._is_open = True
        """The client takes what comes, and nothing waits for it."""
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi, self._send = (scope, receive, send), send
        self._direct = direct = scope.get("extensions", {}).get(STREAM)
        if direct is None:
            await first_of(self._run(), disconnected(receive))
        elif not direct.gone:
            await self._run()

    async def _run(self) -> None:
        answer, direct = self._stream if self._call.stream else self._whole, self._direct
        try:
            async with asyncio.timeout(self._timeout_s) as scope:
                if direct is None:
                    await answer()
                    return
                direct.on_leave = partial(_end_now, scope)
                try:
                    await answer()
                finally:
                    direct.on_leave = None  # what follows waits for a client that is there only
            return
        except TimeoutError:
            if direct is not None and direct.gone:
                return
            error = BatonError(Reason.DEADLINE, f"The answer took longer than {self._timeout_s:g} s, the limit.")
        except BatonError as raised:
            error = raised
        except Exception:
            log.exception("an answer failed", id=self.replies.id)
            error = BatonError(Reason.INTERNAL, "This router failed to answer; its log says why.")
        try:
            await self._fail(error)
        finally:
            del error  # or it would refer to itself, by this frame in its traceback

    async def _fail(self, error: BatonError) -> None:
        if self._begun or self._lines:
            self.put(self.replies.failure(error))
            self._put_done()
            with suppress(TimeoutError):  # a client that reads nothing: its connection is closed
                async with asyncio.timeout(ERROR_SEND_MS_MAX / 1000):
                    await self._flush(more=False)
        else:
            error = self.replies.renamed(error)
            await error_response(error, chat=self._call.chat, headers=self._extra)(*self._asgi)

    async def _whole(self) -> None:
        answers = [Collected() for _ in range(self._answers)]
        await self._answer(answers)
        if sum(answer.logprobs for answer in answers) <= LOGPROBS_INLINE_MAX:
            response = self._response(answers)
        else:
            response = await asyncio.get_running_loop().run_in_executor(_THREADS, self._response, answers)
        await response(*self._asgi)

    def _response(self, answers: Sequence[Collected]) -> Response:
        return JSONResponse(self.replies.whole(answers), headers=self._extra)

    async def _stream(self) -> None:
        """Nothing is sent before the first token: until then an error still has a status of its own."""
        self._sinks += [_Choice(self, index) for index in range(self._answers)]
        try:
            await first_of(self._answer(self._sinks), self._write())
        finally:
            self._sinks.clear()  # they refer to this
        if self._call.include_usage:
            self.put(json.dumps(self.replies.usage_chunk()))
        self._put_done()
        await self._flush(more=False)

    def _put_done(self) -> None:
        if self.replies.done:
            self.put(self.replies.done)

    def put(self, data: str) -> None:
        lines = self.replies.framed(data)
        if self.places is not None:
            lines = f"id: {self.places.token()}\n{lines}"
        if self._is_open and self._begun and self._direct is not None:
            if self._direct.put(lines.encode()):
                return
        else:
            self._lines.append(lines)
        self.is_full()

    def plain(self, index: int) -> tuple[HttpCall, bytes, bytes] | None:
        """Where the text of an answer goes from now on, and what stands before and behind it, where its chunks have
        nothing else to say."""
        if self._direct is None or not self._begun or self.places is not None:
            return None
        frame = self.replies.plain(index)
        return None if frame is None else (self._direct, *frame)

    def is_full(self) -> None:
        """The client does not take what it has been given."""
        self._set_open(False)
        self._news.set()

    def _set_open(self, is_open: bool) -> None:
        self._is_open = is_open
        for sink in self._sinks:
            sink.is_open = is_open

    async def _write(self) -> None:
        while True:
            await self._flush()
            if self._begun and self._direct is not None:
                await self._direct.opened()
            if self._lines:  # the end of an answer does not wait until it may come
                continue
            self._set_open(True)
            self._go_on()
            if self._is_open:
                self._news.clear()
                await self._news.wait()

    def _go_on(self) -> None:
        """What waits in the answers comes, until the client has enough: the next time behind the answer that was last.
        Those that have not had their turn wait still, and are cut off if they wait for too long."""
        for _ in range(self._answers):
            sink = self._sinks[self._turn]
            self._turn = (self._turn + 1) % self._answers
            if sink.on_open is not None:
                sink.on_open()
            if not self._is_open:
                return

    async def _flush(self, *, more: bool = True) -> None:
        if not self._begun and self._lines:
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._extra}
            # Who is cancelled here has sent nothing: the limits of a key, which the head has too, may be waited for.
            await self._send({"type": "http.response.start", "status": 200, "headers": Headers(headers).raw})
            self._begun = True
            if self.places is not None:
                self._lines.insert(0, f"retry: {RECONNECT_MS}\n")
        if self._lines or not more:
            count = len(self._lines)
            await self._send({"type": "http.response.body", "body": "".join(self._lines).encode(), "more_body": more})
            del self._lines[:count]


class _Choice:
    """The sink of one answer of a stream."""

    def __init__(self, reply: CallReply, index: int) -> None:
        self.on_open: Callable[[], None] | None = None
        self.is_open = True
        self._reply = reply
        self._index = index
        self._plain: tuple[HttpCall, bytes, bytes] | None = None
        """As `CallReply.plain`, once it is known."""

    def started(self, started: inference_pb2.Started, place: Place | None) -> None:
        self._reply.replies.started(self._index, started)
        self._follow(place)

    def tokens(self, part: AnswerPart) -> None:
        reply = self._reply
        chunk = reply.replies.chunk(self._index, part)
        if part.place is not None:
            self._follow(part.place)
        if chunk is not None:
            reply.put(chunk)
        if self._plain is None:
            self._plain = reply.plain(self._index)

    def token(self, index: int, token: int, text: str) -> None:
        if self._plain is None or not self.is_open:
            self.tokens(AnswerPart(index, (token,), text, (), None))
        elif text:
            direct, before, behind = self._plain
            if not direct.put_text(before, encode_basestring_ascii(text).encode(), behind):
                self._reply.is_full()

    def finished(self, finished: inference_pb2.Finished, place: Place | None) -> None:
        replies = self._reply.replies
        replies.finished(self._index, finished)
        chunk = replies.last(self._index, finished)
        self._follow(place)
        self._reply.put(chunk)

    def _follow(self, place: Place | None) -> None:
        replies, places = self._reply.replies, self._reply.places
        if places is not None and place is not None:
            offset, prompt_tokens = replies.offset(self._index), replies.prompt_of(self._index)
            places.follow(self._index, place, text_offset=offset, prompt_tokens=prompt_tokens)


def _end_now(scope: asyncio.Timeout) -> None:
    if not scope.expired():
        scope.reschedule(asyncio.get_running_loop().time())


async def disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def left(receive: Callable[[], Awaitable[Any]]) -> NoReturn:
    await disconnected(receive)
    raise client_left()


def client_left() -> BatonError:
    return BatonError(Reason.CANCELLED, "The client has left.")
