"""The OpenAI endpoints and health over HTTP. `docs/openai.md` describes them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import baton_version
from baton.clock import first_of
from baton.endpoint import Address, join_endpoint, split_endpoint
from baton.errors import BatonError, Reason, bad_field
from baton.ids import RequestId
from baton.log import get_log
from baton.retry_time import whole_seconds_ms
from baton.tracing import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    CallMetadata,
    Traceparent,
    new_request_id,
    read_metadata,
)
from router import http_tokens, openai, openapi, responses
from router.answers import AnswerSink
from router.byte_shares import TextOwner
from router.choices import run_choices
from router.config import RouterConfig
from router.doors import Door, Doors
from router.http_attach import LAST_EVENT_ID, call_of, new_token, read_token, repeated, resumes, set_seeds
from router.http_connection import SOURCE, STREAM, SURPLUS, HttpConnection, Served
from router.http_reply import CallReply, client_left, error_response, left
from router.http_slots import Slot, Slots
from router.http_tokens import detokenize, tokenize
from router.key_desk import KeyDesk, KeyedCall
from router.keys import ApiKey
from router.line import Turns
from router.local_taker import LocalTaker
from router.node import RouterNode
from router.openai import Json, OpenAiCall
from router.prompts import PromptEncoder
from router.replies import Replies
from router.request import ClientCall, check_model_name, with_priority
from router.responses import ResponseReplies
from router.resume import SECRET_BYTES, Places, ResumeToken
from router.text_jobs import parse_call, parse_response
from router.text_workers import INLINE_BYTES_MAX, SHORT_BYTES_MAX

log = get_log("http")
_P = ParamSpec("_P")
_T = TypeVar("_T")

KEYED_CALL: Final = "keyed call"
"""In the state of a call that came with an API key, where it counts for it."""
KEY: Final = "key"
"""In the state of every call that came with an API key."""
REQUEST_ID: Final = "request id"
"""In the state of a call that has got one."""
REQUESTS_PATH: Final = "/v1/requests/"
"""Of resumable requests."""

BODY_BYTES_PER_S = 1_024
"""What a body must bring once `http_body_ms_free` is over."""
FINGERPRINT_CHARS: Final = 12
"""Of the model's, that answers have as `system_fingerprint`."""
UPKEEP_MS = 500
"""Between two looks at how slow the connections are."""


class OpenAiApp:
    """The endpoints of one router. Lives on its loop."""

    def __init__(
        self, node: RouterNode, directory_trouble: Callable[[], str] = str, desk: KeyDesk | None = None
    ) -> None:
        """`directory_trouble` says what is the matter with the directory; empty for nothing. `desk` is None where
        everybody may ask."""
        self._node = node
        self._desk = desk
        self._directory_trouble = directory_trouble
        self._began = int(time.time())

    def asgi(self) -> ASGIApp:
        others = self._routed()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in _ANSWERED:
                await self._answer(scope, receive, send)
            else:
                await others(scope, receive, send)

        return app

    def _routed(self) -> Starlette:
        return Starlette(
            routes=[
                *(Route(path, self._complete, methods=["POST"]) for path in sorted(_ANSWERED)),
                Route(REQUESTS_PATH + "{call}/stream", self._attach, methods=["GET"]),
                Route(REQUESTS_PATH + "{call}", self._forget, methods=["DELETE"]),
                Route(responses.PATH + "/{id:path}", _not_stored, methods=["GET", "DELETE", "POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                *(Route(path, self._tokens, methods=["POST"]) for path in sorted(http_tokens.PATHS)),
                Route("/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                Route("/live", self._live),
                Route("/version", self._version),
                Route("/openapi.json", openapi.description),
                Route("/docs", openapi.page),
            ],
            exception_handlers={
                BatonError: self._on_baton_error,
                HTTPException: self._on_http_error,
                Exception: _on_bug,
            },
        )

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`_complete`, without the layers that each turn of the call would go through."""
        request = Request(scope, receive, send)
        try:
            response = await self._complete(request)
        except Exception:
            log.exception("a call failed", **_known(request))
            response = _internal_error(request)
        await response(scope, receive, send)

    async def _complete(self, request: Request) -> Response:
        """Completions, chats and responses. What is refused here is logged with the id that the client is given: there
        is no request yet."""
        chat, is_response = _is_chat(request), request.scope["path"] == responses.PATH
        state = request.scope["state"]
        request_id = state[REQUEST_ID] = new_request_id(self._node.rng)
        try:
            called = _read_metadata(request)
            request_id = state[REQUEST_ID] = called.request_id or request_id
            self._node.check_open()
            spells, most = _may_spell(request), self._node.context_len_max()
            if is_response:
                call = await self._read(request, parse_response, spells, most)
            else:
                call = await self._read(request, parse_call, chat, spells, most)
            token = None
            sent = [value for value in request.headers.getlist(LAST_EVENT_ID) if value] if call.resumable else []
            if sent:
                token = repeated(call, read_token(sent), request_id, int(time.time()))
            elif call.said:
                raise bad_field("resume_token_ids", f"resume_token_ids goes with the header {LAST_EVENT_ID}.")
            return await self._reply(request, call, called.traceparent, token)
        except BatonError as error:
            return self._refused(request, error, chat=chat)

    async def _read(
        self,
        request: Request,
        work: Callable[Concatenate[PromptEncoder, bytes | bytearray, _P], _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """What text workers make of the call's body. Raises BatonError, also where the client leaves."""
        direct = request.scope.get("extensions", {}).get(STREAM)
        whole = direct.take_body() if direct is not None else None
        if whole is not None and len(whole) <= min(INLINE_BYTES_MAX, self._node.config.http_body_bytes_max):
            return work(self._node.prompts, whole, *args, **kwargs)  # which is what becomes of it below
        keyed: KeyedCall | None = request.scope["state"].get(KEYED_CALL)
        owner = TextOwner(address=request.scope["state"][SOURCE], key=keyed.key.name if keyed is not None else None)
        with self._node.texts.holding(owner) as hold:
            raw = await self._read_body(request, hold, whole)
            parsed = self._node.texts.run_held(owner, work, raw, *args, **kwargs)
            return await parsed if len(raw) <= INLINE_BYTES_MAX else await first_of(parsed, left(request.receive))

    async def _tokens(self, request: Request) -> Response:
        """/tokenize and /detokenize."""
        node, names = self._node, self._node.model_names()
        if request.scope["path"] == "/tokenize":
            found = await self._read(request, tokenize, _may_spell(request), names, node.tokens_max())
        else:
            found = await self._read(request, detokenize, names, node.model().vocab_size)
        return Response(found, media_type="application/json")

    async def _attach(self, request: Request) -> Response:
        """The rest of a stream, without the body that asked for it."""
        if request.method == "HEAD":  # which would take the answer over and read nothing of it
            raise HTTPException(405, headers={"allow": "GET"})
        request.scope["state"][REQUEST_ID] = new_request_id(self._node.rng)
        try:
            self._node.check_open()
            called = _read_metadata(request)
            token, call = _shown(request)
            return await self._reply(request, call, called.traceparent, token)
        except BatonError as error:
            return self._refused(request, error)

    async def _forget(self, request: Request) -> Response:
        """The client has the whole answer, or wants no more of it."""
        request.scope["state"][REQUEST_ID] = new_request_id(self._node.rng)
        try:
            token, _ = _shown(request)
            key: ApiKey | None = request.scope["state"].get(KEY)
            if key is None or self._desk is None:
                await self._node.forget(token, None)
            else:
                await self._node.forget(token, key.name, partial(self._desk.ended, key))
        except BatonError as error:
            return self._refused(request, error)
        return Response(status_code=204, headers={"x-request-id": request.scope["state"][REQUEST_ID]})

    def _refused(self, request: Request, error: BatonError, *, chat: bool = False) -> Response:
        request_id = request.scope["state"][REQUEST_ID]
        if error.reason is not Reason.CANCELLED:
            self._node.request_log.refused(error, door="http", request_id=request_id)
        return error_response(error, chat=chat, headers={"x-request-id": request_id})

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_json(name) for name in self._node.model_names()]})

    async def _model(self, request: Request) -> Response:
        check_model_name(request.path_params["name"], self._node.model_names())
        return JSONResponse(self._model_json(request.path_params["name"]))

    def _model_json(self, name: str) -> Json:
        return openai.model_json(self._node.model(), name, created=self._began, tokens_max=self._node.tokens_max())

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

    def _id_of(self, request: Request) -> dict[str, str]:
        """The header of an answer to what is no request: the caller's id, or a new one."""
        called = read_metadata([(name.lower(), value) for name, value in request.headers.items()])
        return {"x-request-id": called.request_id or new_request_id(self._node.rng)}

    async def _on_baton_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, BatonError)
        return error_response(error, chat=_is_chat(request), headers=self._id_of(request))

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = f"{request.method} {request.scope['path']}: {error.detail}."
        code = _HTTP_CODES.get(error.status_code)
        body = {"message": text, "type": "invalid_request_error", "param": None, "code": code}
        headers = {**(error.headers or {}), **self._id_of(request)}
        return JSONResponse({"error": body}, error.status_code, headers)

    async def _reply(
        self, request: Request, call: OpenAiCall, parent: Traceparent | None, token: ResumeToken | None
    ) -> CallReply:
        """`token` is that of a client that attaches. Raises BatonError."""
        node, now_s, attaches = self._node, asyncio.get_running_loop().time, token is not None
        answers = len(token.places) if token is not None else len(call.requests) * call.n
        keyed: KeyedCall | None = request.scope["state"].get(KEYED_CALL)
        if keyed is not None:
            await keyed.widen(answers)
        request_id, created = request.scope["state"][REQUEST_ID], int(time.time())
        set_seeds(call.requests, node.rng.getrandbits(64) if token is None else token.seed, attaches=attaches)
        if call.resumable and token is None:
            token = new_token(call, request_id, created, secret=node.token_bytes(SECRET_BYTES))
        if token is not None and token.http is not None:
            request_id, created = RequestId(token.http.id), token.http.created_unix_s
            request.scope["state"][REQUEST_ID] = request_id
        each = resumes(call, token, attaches=attaches) if token is not None else [None] * answers
        trace = parent or Traceparent.new(node.rng, sampled=False)
        timeout_s = node.config.rpc.public_deadline_ms_default / 1000
        deadline_s = now_s() + timeout_s

        async def ask(prompt: int, choice: int, sink: AnswerSink) -> None:
            resume = each[prompt * call.n + choice]
            client = ClientCall(
                id=request_id,
                trace=trace.child(node.rng),
                deadline_s=deadline_s,
                choice=choice,
                whole=not call.stream and call.n == 1,  # of several, one waits for another's second token
                source=request.scope["state"][SOURCE],
                resume=resume,
                shown=node.prompts.shown(call.reading),
                had=partial(replies.had, prompt * call.n + choice) if call.reading is not None else None,
            )
            if keyed is not None:
                client = keyed.sign(client, prompt=prompt)
            client = with_priority(client, call.priority)
            if resume is None or resume.place is None or not resume.place.finished:
                await node.run(call.requests[prompt] if call.requests else None, client, sink)

        codec, model = node.prompts.codec, node.model_of(attaches=attaches)
        replies = (Replies if call.echo is None else ResponseReplies)(
            request_id=request_id,
            call=call,
            model=(call.requests[0].model if call.requests else "") or (*node.config.served_model_name, model.name)[0],
            created=created,
            fingerprint=f"fp_{model.fingerprint[:FINGERPRINT_CHARS]}",
            token_text=codec.token_text if codec is not None else str,
            form=node.prompts.form,
            secret=token.secret if token is not None else node.rng.randbytes(SECRET_BYTES),
        )
        places = None
        if token is not None:
            replies.go_on(token.places)
            places = Places(token)
        return CallReply(
            partial(run_choices, ask, range(answers // call.n), at_once=attaches),
            answers,
            replies,
            places=places,
            timeout_s=timeout_s,
        )

    async def _read_body(self, request: Request, hold: Callable[[int], None], whole: bytearray | None) -> bytearray:
        """The body, of which `whole` is all, or nothing. Raises BatonError where it is too long, or does not come."""
        config = self._node.config

        def look(body: bytearray) -> bytearray:
            if len(body) > config.http_body_bytes_max:
                raise bad_field("body", f"The body is longer than {config.http_body_bytes_max} bytes, the limit.")
            if len(body) > SHORT_BYTES_MAX:
                hold(len(body))
            return body

        if whole is not None:
            return look(whole)
        body = bytearray()
        began_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(config.http_body_ms_free / 1000) as limit:
                async for part in request.stream():
                    body += part
                    took_ms_max = config.http_body_ms_free + 1000 * len(body) // BODY_BYTES_PER_S
                    limit.reschedule(began_s + min(config.http_body_ms_max, took_ms_max) / 1000)
                    look(body)
            return body
        except TimeoutError as error:
            raise BatonError(Reason.DEADLINE, "The body of the request did not come in time.") from error
        except ClientDisconnect as error:
            raise client_left() from error


class HttpServer:
    """Serves an app on the running loop, to connections that it is given. Call `stop` at the end."""

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
            # Each worker has its share, rounded up: what an address has at the others is not known here.
            proxied=Slots(regular_max=-(-most // config.workers), surplus_max=most),
            trusted_proxies=config.trusted_networks(),
            head_ms_max=config.http_head_ms_max,
            turns=Turns(loop.call_soon, loop.time),
            refused=refused,
        )
        self._arriving: set[asyncio.Task[None]] = set()
        self._config = config
        self._doors: Doors | None = None
        """Its own, where it was started with a port."""
        self._upkeep: asyncio.TimerHandle
        self._keep_up()

    def start(self, listen: str, *, setting: str = "http_listen") -> str:
        """Listen at a port of its own; returns the endpoint. `setting` is the key to name in an error.

        Raises BatonError PORT_IN_USE, LISTEN_REFUSED or BAD_ENDPOINT.
        """
        self._doors = doors = Doors(self._config)
        taker = LocalTaker(doors.closed)
        taker.http = self.take
        doors.add(taker)
        return join_endpoint(split_endpoint(listen)[0], doors.open(Door.HTTP, listen, setting=setting))

    def take(self, sock: socket.socket, peer: Address | None, slot: Slot, closed: Callable[[], None]) -> None:
        """Serve this connection, and call `closed` when it is over."""
        task = self._loop.create_task(self._arrive(sock, HttpConnection(self._served, peer, slot, closed)))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _arrive(self, sock: socket.socket, connection: HttpConnection) -> None:
        await self._loop.connect_accepted_socket(lambda: connection, sock)

    @property
    def calls(self) -> int:
        """Under way."""
        return len(self._served.tasks)

    def keep_connections(self, keep: bool, *, idle: bool) -> None:
        """Whether connections stay open behind an answer that begins from now on; and whether idle ones do."""
        self._served.keep_alive, self._served.keep_idle = keep, idle
        for connection in () if idle else tuple(self._served.connections):
            if connection.idle:
                connection.stop()

    async def stop(self) -> None:
        """Take no new connection, give running answers the grace time, end the rest. Idempotent."""
        served = self._served
        if served.stopping:
            return
        served.stopping, served.keep_alive, served.keep_idle = True, False, False
        if self._doors is not None:
            self._doors.close()
        await asyncio.gather(*self._arriving)
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
        self._upkeep.cancel()

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


_METADATA: Final = frozenset(key.encode() for key in (REQUEST_ID_KEY, TRACEPARENT_KEY))
_HTTP_CODES: Final = {404: "not_found", 405: "method_not_allowed"}
_ANSWERED: Final = frozenset({"/v1/completions", "/v1/chat/completions", responses.PATH})
_FOR_PROBES: Final = frozenset({"/live", "/health", "/ping"})
"""Answered on every connection: a full router is not to be restarted."""


def _shown(request: Request) -> tuple[ResumeToken, OpenAiCall]:
    """By what the client shows that the call in the path is its own. Raises BatonError, or 404 where it is of another
    call."""
    token = read_token(request.headers.getlist(LAST_EVENT_ID))
    call = call_of(token, request.path_params["call"])
    if call is None:
        raise HTTPException(404, f"The {LAST_EVENT_ID} is of another request")
    return token, call


def _read_metadata(request: Request) -> CallMetadata:
    """Raises BatonError. Other headers are not looked at."""
    return read_metadata(
        [(name.decode(), value.decode("latin-1")) for name, value in request.scope["headers"] if name in _METADATA]
    )


def _is_chat(request: Request) -> bool:
    return "/chat/" in request.scope["path"]


def _may_spell(request: Request) -> bool:
    """Whether messages may spell special tokens."""
    keyed: KeyedCall | None = request.scope["state"].get(KEYED_CALL)
    return keyed is not None and keyed.key.special_tokens


async def _not_stored(_request: Request) -> Response:
    raise HTTPException(404, "Responses are not stored here")


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("a call failed", **_known(request), exc_info=error)
    return _internal_error(request)


def _known(request: Request) -> dict[str, Any]:
    request_id = request.scope["state"].get(REQUEST_ID)
    return {"path": request.scope["path"], **({"request": request_id} if request_id is not None else {})}


def _internal_error(request: Request) -> Response:
    request_id = request.scope["state"].get(REQUEST_ID)
    internal = BatonError(Reason.INTERNAL, "This router failed to answer the call; its log says why.")
    return error_response(internal, headers={"x-request-id": request_id} if request_id is not None else None)
