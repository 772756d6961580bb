"""Asks HTTP calls for their API key before anything of their body is read, and tells clients what is left of its
limits."""

from __future__ import annotations

import random
from functools import partial
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError
from baton.tracing import new_request_id, read_metadata
from router.http_attach import LAST_EVENT_ID, read_token
from router.http_reply import error_response
from router.http_server import KEY, KEYED_CALL, REQUESTS_PATH
from router.key_desk import KeyDesk, KeyedCall
from router.keys import ApiKey, authorization_of
from router.request_log import RequestLog

WITHOUT_KEY: Final = frozenset({"/health", "/live", "/ping", "/version", "/openapi.json", "/docs"})


class KeyedApp:
    """Lets those calls to `app` through that have a good key, and room under its limits. All but those of WITHOUT_KEY
    need one; only POST counts, and to attach, which takes what a POST took before. To end answers has a rate of its
    own."""

    def __init__(self, app: ASGIApp, desk: KeyDesk, *, rng: random.Random, request_log: RequestLog) -> None:
        self._app = app
        self._desk = desk
        self._rng = rng
        self._log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in WITHOUT_KEY:
            await self._app(scope, receive, send)
            return
        headers, key = Headers(scope=scope), None
        call: KeyedCall | None = None
        try:
            key = self._desk.find(authorization_of(headers.items()))
            method, of_request = scope["method"], scope["path"].startswith(REQUESTS_PATH)
            if method == "POST" or (method == "GET" and of_request):
                former = partial(read_token, headers.getlist(LAST_EVENT_ID)) if LAST_EVENT_ID in headers else None
                call = await self._desk.admit(key, former=former)
            elif method == "DELETE" and of_request:
                await self._desk.end_answers(key)
        except BatonError as error:
            await (await self._refuse(error, key, headers))(scope, receive, send)
            return
        try:
            scope.setdefault("state", {}).update({KEYED_CALL: call, KEY: key})
            await self._app(scope, receive, self._with_limits(key, send))
        finally:
            if call is not None:
                call.end()

    async def _refuse(self, error: BatonError, key: ApiKey | None, headers: Headers) -> ASGIApp:
        request_id = read_metadata(headers.items()).request_id or new_request_id(self._rng)
        self._log.refused(error, door="http", request_id=request_id)
        left = {} if key is None else await self._desk.headers(key)
        return error_response(error, headers={"x-request-id": request_id, **left})

    def _with_limits(self, key: ApiKey, send: Send) -> Send:
        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(await self._desk.headers(key))
            await send(message)

        return send_with
