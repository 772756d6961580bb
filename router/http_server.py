"""The OpenAI endpoints and health over HTTP. `docs/openai.md` describes them.

An answer is sent whole or as a stream of events. The call ends when its client goes away.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from random import Random
from typing import Any, Final, NoReturn

from batonpb import common_pb2, inference_pb2
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import baton_version
from baton.clock import first_of
from baton.config import flag_name
from baton.endpoint import join_endpoint, split_endpoint
from baton.errors import BatonError, Reason, bad_field
from baton.ids import RequestId
from baton.log import get_log
from baton.retry_time import whole_seconds_ms
from baton.tracing import CallMetadata, Traceparent, new_request_id, read_metadata
from router import openai
from router.byte_shares import TextOwner
from router.choices import Answer, run_choices
from router.config import RouterConfig
from router.http_connection import SOURCE, SURPLUS, HttpConnection, Served
from router.http_slots import Slots
from router.keys import Admission
from router.node import CutOff, RouterNode, client_guard
from router.openai import Json, OpenAiCall, Replies
from router.request import ClientCall
from router.text_jobs import parse_call
from router.text_workers import SHORT_BYTES_MAX
from router.turns import Turns

log = get_log("http")

ERROR_SEND_MS_MAX = 5_000
ADMISSION: Final = "admission"
"""In the state of a call that came with an API key."""

Events = AsyncGenerator[tuple[int, inference_pb2.GenerateEvent], None]


def error_response(error: BatonError, *, chat: bool = False, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """`headers` are added to those that the error has."""
    body, status = openai.error_json(error, chat=chat), openai.error_status(error)
    return JSONResponse(body, status, {**openai.error_headers(error), **(headers or {})})


class CallReply(Response):
    """The answer to one call; `events` begins when it is sent. Cancelling it, or a client that leaves, closes them."""

    def __init__(
        self, events: Callable[[CutOff], Events], replies: Replies, *, headers: dict[str, str], timeout_s: float
    ) -> None:
        super().__init__()
        self._call = replies.call
        self._events = events
        self._replies = replies
        self._extra = headers
        self._timeout_s = timeout_s
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._asgi, self._send = (scope, receive, send), send
        await first_of(self._run(), _disconnected(receive))

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
                    await self._send_data(openai.error_json(error, chat=self._call.chat))
                    await self._end()
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
        async for index, event in events:
            self._replies.count(index, event)
            chunk = self._replies.chunk(index, event)
            if chunk is not None:
                await self._send_data(chunk)
        if self._call.include_usage:
            await self._send_data(self._replies.usage_chunk())
        await self._end()

    async def _send_data(self, data: Json) -> None:
        if not self._begun:
            self._begun = True
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", **self._extra}
            await self._send({"type": "http.response.start", "status": 200, "headers": Headers(headers).raw})
        body = f"data: {json.dumps(data)}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _left(receive: Callable[[], Awaitable[Any]]) -> NoReturn:
    await _disconnected(receive)
    raise _client_left()


def _client_left() -> BatonError:
    return BatonError(Reason.CANCELLED, "The client has left.")


BODY_BYTES_PER_S = 1_024
"""What a body must bring once `http_body_ms_free` is over."""
SURPLUS_CONNECTIONS_MAX = 64
"""Connections beyond the limit that are answered with 429 and closed. Further ones are closed without a word."""
SEND_BUFFER_BYTES = 131_072
"""Bytes that the kernel may keep of what an HTTP client has not read."""
BACKLOG_MAX = 2_048
"""Connections that wait in the kernel to be accepted."""
ACCEPTS_MAX = 32
"""In one turn of the loop."""
UPKEEP_MS = 500
"""Between two looks at how slow the connections are."""


class OpenAiApp:
    """The endpoints of one router. Lives on its loop."""

    def __init__(self, node: RouterNode, directory_trouble: Callable[[], str] = str) -> None:
        """`directory_trouble` says what is the matter with the directory; empty for nothing."""
        self._node = node
        self._directory_trouble = directory_trouble
        self._began = int(time.time())

    def asgi(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/live", self._live),
                Route("/version", self._version),
            ],
            exception_handlers={BatonError: _on_baton_error, HTTPException: _on_http_error, Exception: _on_bug},
        )

    async def _complete(self, request: Request) -> Response:
        """Both endpoints. What is refused here is logged with the id that the client is given: there is no request
        yet."""
        chat, admission = _is_chat(request), getattr(request.state, ADMISSION, None)
        request_id = request.state.request_id = new_request_id(self._node.rng)
        try:
            called = read_metadata([(name.lower(), value) for name, value in request.headers.items()])
            request_id = request.state.request_id = called.request_id or request_id
            self._node.check_open()
            source = request.scope["state"][SOURCE]
            owner = TextOwner(address=source, key=admission.key.name if admission is not None else None)
            with self._node.texts.holding(owner) as hold:
                raw = await self._read_body(request, hold)
                special_tokens = admission is not None and admission.key.special_tokens
                context_len_max = self._node.context_len_max()
                parsed = self._node.texts.run_held(owner, parse_call, raw, chat, special_tokens, context_len_max)
                call = await first_of(parsed, _left(request.receive))
            if admission is not None:
                admission.widen(len(call.requests) * call.n)
            return self._reply(call, called, request_id, source, admission)
        except BatonError as error:
            if error.reason is not Reason.CANCELLED:
                self._node.request_log.refused(error, door="http", request_id=request_id)
            return error_response(error, chat=chat, headers={"x-request-id": request_id})

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_json()]})

    async def _model(self, request: Request) -> Response:
        model, name = self._node.model(), request.path_params["name"]
        if name != model.name:
            text = f"This cluster serves '{model.name}', not '{name}'."
            raise BatonError(Reason.UNKNOWN_MODEL, text, field="model")
        return JSONResponse(self._model_json())

    def _model_json(self) -> Json:
        return openai.model_json(self._node.model(), created=self._began, tokens_max=self._node.tokens_max())

    async def _health(self, _request: Request) -> Response:
        """Ready for requests: this router takes them, and there are nodes to serve them."""
        self._node.check_ready()
        trouble = self._directory_trouble()
        try:
            self._node.check_cluster()
        except BatonError as error:
            raise error.reworded(f"{error.message} {trouble}".rstrip()) from error
        return JSONResponse({"status": "ok", **({"directory": trouble} if trouble else {})})

    async def _live(self, _request: Request) -> Response:
        """Whether this process is to be restarted is another question than whether there is a cluster behind it."""
        return JSONResponse({"status": "ok"})

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": baton_version()})

    def _reply(
        self,
        call: OpenAiCall,
        called: CallMetadata,
        request_id: RequestId,
        source: str | None,
        admission: Admission | None,
    ) -> CallReply:
        node, now_s = self._node, asyncio.get_running_loop().time
        trace = called.traceparent or Traceparent.new(node.rng, sampled=False)
        timeout_s = node.config.rpc.public_deadline_ms_default / 1000
        deadline_s = now_s() + timeout_s
        if not call.requests[0].sampling.HasField("seed"):
            for each in call.requests:  # one for all answers to a prompt, which differ by their choice
                each.sampling.seed = node.rng.getrandbits(64)

        def events(cut_off: CutOff) -> Events:
            def ask(message: inference_pb2.GenerateRequest, choice: int) -> Answer:
                child = trace.child(node.rng)
                client = ClientCall(
                    id=request_id,
                    trace=child,
                    deadline_s=deadline_s,
                    choice=choice,
                    source=source,
                    cut_off=cut_off,
                )
                if admission is not None:
                    client = admission.sign(client, now_s, repeats_prompt=choice > 0)
                return node.generate(message, client)

            return run_choices(ask, call.requests, call.n)

        codec = node.prompts.codec
        replies = Replies(
            id=f"{'chatcmpl' if call.chat else 'cmpl'}-{request_id}",
            call=call,
            model=call.requests[0].model or node.model().name,
            created=int(time.time()),
            token_text=codec.token_text if codec is not None else str,
        )
        return CallReply(events, replies, headers={"x-request-id": request_id}, timeout_s=timeout_s)

    async def _read_body(self, request: Request, hold: Callable[[int], None]) -> bytearray:
        """The whole body. Raises BatonError where it is too long, or does not come."""
        body = bytearray()
        config, bytes_max = self._node.config, self._node.config.http_body_bytes_max
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(config.http_body_ms_free / 1000) as limit:
                async for part in request.stream():
                    body += part
                    took_ms_max = config.http_body_ms_free + 1000 * len(body) // BODY_BYTES_PER_S
                    limit.reschedule(began_s + min(config.http_body_ms_max, took_ms_max) / 1000)
                    if len(body) > bytes_max:
                        raise bad_field("body", f"The body is longer than {bytes_max} bytes, the limit.")
                    if len(body) > SHORT_BYTES_MAX:
                        hold(len(body))
            return body
        except TimeoutError as error:
            raise BatonError(Reason.DEADLINE, "The body of the request did not come in time.") from error
        except ClientDisconnect as error:
            raise _client_left() from error


class HttpServer:
    """Serves an app on the running loop. `start` once, then `stop`."""

    def __init__(
        self,
        app: ASGIApp,
        config: RouterConfig,
        *,
        rng: Random,
        refused: Callable[[BatonError], None] = lambda _error: None,
    ) -> None:
        """`refused` is called for each connection that is one too many, and for each that brings no HTTP."""
        self._app = app
        self._rng = rng
        self._refused = refused
        self._connections_max = most = config.http_connections_max
        self._grace_s = config.stop_grace_ms / 1000
        self._loop = loop = asyncio.get_running_loop()
        self._served = Served(
            app=self._answer,
            slots=Slots(regular_max=most, surplus_max=SURPLUS_CONNECTIONS_MAX),
            proxied=Slots(regular_max=most, surplus_max=most),
            trusted_proxies=config.trusted_networks(),
            head_ms_max=config.http_head_ms_max,
            turns=Turns(loop.call_soon, loop.time),
            refused=refused,
        )
        self._opening: asyncio.Task[asyncio.Server] | None = None
        self._upkeep: asyncio.TimerHandle | None = None

    def start(self, listen: str, *, setting: str = "http_listen") -> str:
        """Listen, and serve from now on; returns the endpoint. `setting` is the key to name in an error.

        Raises BatonError PORT_IN_USE or BAD_ENDPOINT.
        """
        host, port = split_endpoint(listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG_MAX)
        except OSError as error:
            text = f"Cannot listen on {listen} for HTTP: {error.strerror}. Name another one with {flag_name(setting)}."
            raise BatonError(Reason.PORT_IN_USE, text, field=setting) from error
        # Connections take it over. Left to itself the kernel keeps megabytes of an answer that nobody reads.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setblocking(False)
        endpoint = join_endpoint(host, listener.getsockname()[1])
        self._opening = self._loop.create_task(self._open(listener), name="http")
        self._keep_up()
        return endpoint

    @property
    def calls(self) -> int:
        """Under way."""
        return len(self._served.tasks)

    def keep_connections(self, keep: bool, *, idle: bool) -> None:
        """Whether connections stay open behind an answer, and whether those that are open without a call do."""
        self._served.keep_alive = keep
        for connection in () if idle else tuple(self._served.connections):
            if connection.idle:
                connection.stop()

    async def stop(self) -> None:
        """Take no new connection, give running answers the grace time, end the rest. Idempotent."""
        served = self._served
        if served.stopping or self._opening is None:
            return
        served.stopping, served.keep_alive = True, False
        (await self._opening).close()
        for connection in tuple(served.connections):
            connection.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                await self._all_closed()
        for task in served.tasks:
            task.cancel()
        for connection in tuple(served.connections):
            connection.transport.abort()
        await self._all_closed()
        await asyncio.gather(*served.tasks, return_exceptions=True)
        assert self._upkeep is not None
        self._upkeep.cancel()

    async def _open(self, listener: socket.socket) -> asyncio.Server:
        """asyncio accepts as many connections in one turn of the loop as may wait in the kernel, unless it is told
        afterwards how many may."""
        server = await self._loop.create_server(
            lambda: HttpConnection(self._served), sock=listener, backlog=ACCEPTS_MAX
        )
        listener.listen(BACKLOG_MAX)
        return server

    async def _all_closed(self) -> None:
        while self._served.connections:
            self._served.closed.clear()
            await self._served.closed.wait()

    def _keep_up(self) -> None:
        self._upkeep = self._loop.call_later(UPKEEP_MS / 1000, self._keep_up)
        self._served.upkeep(self._loop.time())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["state"][SURPLUS] or scope["path"] in _FOR_PROBES:
            await self._app(scope, receive, send)
            return
        text = (
            f"This router has {self._connections_max} HTTP connections, the limit, or your address its share of them."
        )
        error = BatonError(Reason.TOO_MANY_CALLS, text, retry_after_ms=whole_seconds_ms(self._rng.random()))
        self._refused(error)
        await error_response(error)(scope, receive, send)


_FOR_PROBES: Final = frozenset({"/live", "/health"})
"""Answered on every connection: a full router is not to be restarted."""


def _is_chat(request: Request) -> bool:
    return "/chat/" in request.scope["path"]


async def _on_baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return error_response(error, chat=_is_chat(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.scope['path']}: {error.detail}."
    body = {"message": text, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    request_id = getattr(request.state, "request_id", None)
    known = {"request": request_id} if request_id is not None else {}
    log.error("a call failed", path=request.scope["path"], **known, exc_info=error)
    internal = BatonError(Reason.INTERNAL, "This router failed to answer the call; its log says why.")
    return error_response(internal, headers={"x-request-id": request_id} if request_id is not None else None)
