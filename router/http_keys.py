"""Asks HTTP calls for their API key before anything of their body is read, and tells clients what is left of its
limits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError
from baton.tracing import new_request_id, read_metadata
from router.http_attach import LAST_EVENT_ID, read_token
from router.http_reply import error_response
from router.http_server import ADMISSION, KEY_USE, REQUESTS_PATH
from router.keys import Admission, KeyBook, KeyUse, authorization_of
from router.request_log import RequestLog
from router.resume import ResumeToken

WITHOUT_KEY: Final = frozenset({"/health", "/live", "/version"})


class KeyedApp:
    """Lets those calls to `app` through that have a good key, and room under its limits. All but those of WITHOUT_KEY
    need one; only POST counts, and to attach, which takes what a POST took before."""

    def __init__(
        self,
        app: ASGIApp,
        book: KeyBook,
        *,
        rng: random.Random,
        request_log: RequestLog,
        end_former: Callable[[ResumeToken, KeyUse], Awaitable[None]],
    ) -> None:
        """`end_former` ends what this router still serves of a client that comes back."""
        self._app = app
        self._book = book
        self._rng = rng
        self._log = request_log
        self._end_former = end_former

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in WITHOUT_KEY:
            await self._app(scope, receive, send)
            return
        headers, use, now_s = Headers(scope=scope), None, asyncio.get_running_loop().time
        admission: Admission | None = None
        try:
            use = self._book.find(authorization_of(headers.items()))
            if scope["method"] == "POST" or (scope["method"] == "GET" and scope["path"].startswith(REQUESTS_PATH)):
                if use.full and LAST_EVENT_ID in headers:
                    await self._end_former(read_token(headers.getlist(LAST_EVENT_ID)), use)
                admission = use.admit(now_s(), spread=self._rng.random(), attaches=LAST_EVENT_ID in headers)
        except BatonError as error:
            await self._refuse(error, use, headers)(scope, receive, send)
            return
        scope.setdefault("state", {}).update({ADMISSION: admission, KEY_USE: use})
        try:
            await self._app(scope, receive, _with_limits(use, now_s, send))
        finally:
            if admission is not None:
                admission.end()

    def _refuse(self, error: BatonError, use: KeyUse | None, headers: Headers) -> ASGIApp:
        request_id = new_request_id(self._rng)
        with suppress(BatonError):
            request_id = read_metadata(headers.items()).request_id or request_id
        self._log.refused(error, door="http", request_id=request_id)
        left = {} if use is None else use.headers(asyncio.get_running_loop().time())
        return error_response(error, headers={"x-request-id": request_id, **left})


def _with_limits(use: KeyUse, now_s: Callable[[], float], send: Send) -> Send:
    async def send_with(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(use.headers(now_s()))
        await send(message)

    return send_with
