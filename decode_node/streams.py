"""Token streams: one for each router, with a cursor for each request over its tokens. Control thread only.

There is no queue: the next message to a router that reads slowly or was away has all tokens behind its cursors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from batonpb import common_pb2, decode_pb2

from baton.errors import Reason
from baton.ids import Incarnation, RequestKey
from baton.log import get_log

log = get_log("streams")


@dataclass(slots=True, eq=False, kw_only=True)
class RequestOutput:
    """The answer of a request so far. `tokens` only grows; `finish` or `error` is set once and ends it."""

    key: RequestKey
    router: Incarnation
    first_index: int = 0
    """Index of `tokens[0]` in the answer: before it is what the client had from earlier attempts."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    """One for each token where the request asks for them, else empty."""
    finish: common_pb2.FinishReason | None = None
    error: str | None = None
    error_reason: Reason | None = None
    """Of an error that is for the client; None where the router may try elsewhere."""
    opened: bool = False
    """The router's stream carries it (or did)."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    forgotten: asyncio.Event = field(default_factory=asyncio.Event)
    """The router has it all, or wants no more of it."""

    def append(self, token: int, logprobs: common_pb2.TokenLogprobs | None) -> None:
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            assert len(self.logprobs) == len(self.tokens), self.key

    def end(
        self,
        *,
        finish: common_pb2.FinishReason | None = None,
        error: str | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Idempotent: the first end counts."""
        if not self.ended.is_set():
            self.finish, self.error, self.error_reason = finish, error, reason
            self.ended.set()


@dataclass(slots=True, eq=False, kw_only=True)
class _Subscription:
    cursors: dict[RequestKey, int]
    ends_sent: set[RequestKey] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


class TokenStreams:
    """All outputs of this node by router, and the subscription that each router has open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outputs: dict[Incarnation, dict[RequestKey, RequestOutput]] = {}
        self._subscriptions: dict[Incarnation, _Subscription] = {}
        self._away_since_s: dict[Incarnation, float] = {}

    def open(self, output: RequestOutput) -> None:
        """From now on the router's stream carries this output."""
        of_router = self._outputs.setdefault(output.router, {})
        assert output.key not in of_router, output.key
        of_router[output.key] = output
        output.opened = True
        if output.router not in self._subscriptions:
            self._away_since_s.setdefault(output.router, self._loop.time())
        self.notify(output.router)

    def close(self, output: RequestOutput) -> None:
        of_router = self._outputs.get(output.router, {})
        of_router.pop(output.key, None)
        if not of_router:
            self._outputs.pop(output.router, None)
            self._away_since_s.pop(output.router, None)
        subscription = self._subscriptions.get(output.router)
        if subscription is not None:
            subscription.cursors.pop(output.key, None)
            subscription.ends_sent.discard(output.key)

    def close_all(self) -> None:
        """End every subscription: the node is stopping."""
        for subscription in self._subscriptions.values():
            subscription.closed = True
            subscription.news.set()

    def find(self, key: RequestKey) -> RequestOutput | None:
        return next((of_router[key] for of_router in self._outputs.values() if key in of_router), None)

    def notify(self, router: Incarnation) -> None:
        """New tokens or an end for this router: once per engine step is enough."""
        subscription = self._subscriptions.get(router)
        if subscription is not None:
            subscription.news.set()

    def done(self, router: Incarnation, key: RequestKey) -> RequestOutput | None:
        """The router needs no more of a request, finished or not. Returns the output if it is still here."""
        output = self._outputs.get(router, {}).get(key)
        if output is not None:
            output.forgotten.set()
        return output

    def orphans(self, orphan_ms: int) -> list[RequestOutput]:
        """Outputs that have not ended and whose router has had no stream here for `orphan_ms`."""
        before_s = self._loop.time() - orphan_ms / 1000
        away = [router for router, since_s in self._away_since_s.items() if since_s <= before_s]
        return [o for router in away for o in self._outputs.get(router, {}).values() if not o.ended.is_set()]

    @property
    def finished(self) -> list[RequestOutput]:
        """Ended outputs that their router has not acknowledged, oldest first."""
        return [o for of_router in self._outputs.values() for o in of_router.values() if o.ended.is_set()]

    async def subscribe(
        self, router: Incarnation, cursors: Mapping[RequestKey, int], reading: Coroutine[Any, Any, None]
    ) -> AsyncGenerator[decode_pb2.TokenBatch, None]:
        """Messages for one router from its cursors on (0 where it names none), until a newer stream replaces it.

        `reading` takes in what the router sends on the same stream, and runs as long as this does.
        """
        older = self._subscriptions.get(router)
        if older is not None:
            older.closed = True
            older.news.set()
        mine = _Subscription(cursors=dict(cursors))
        self._subscriptions[router] = mine
        self._away_since_s.pop(router, None)
        mine.news.set()
        reader = self._loop.create_task(reading)
        try:
            while True:
                await mine.news.wait()
                mine.news.clear()
                if mine.closed:
                    return
                batch = self._collect(router, mine)
                if batch.requests:
                    yield batch
        finally:
            reader.cancel()
            for failure in await asyncio.gather(reader, return_exceptions=True):
                if isinstance(failure, Exception):
                    log.warning("a router's side of its stream broke off", router=f"{router:x}", error=str(failure))
            if self._subscriptions.get(router) is mine:
                del self._subscriptions[router]
                if router in self._outputs:
                    self._away_since_s[router] = self._loop.time()

    def _collect(self, router: Incarnation, subscription: _Subscription) -> decode_pb2.TokenBatch:
        """Everything behind the cursors, and move them."""
        batch = decode_pb2.TokenBatch()
        for key, output in self._outputs.get(router, {}).items():
            cursor = max(output.first_index, subscription.cursors.get(key, 0))
            new = output.tokens[cursor - output.first_index :]
            ended = output.ended.is_set() and key not in subscription.ends_sent
            if not new and not ended:
                continue
            message = batch.requests.add(
                first_index=cursor, ids=new, logprobs=output.logprobs[cursor - output.first_index :]
            )
            message.key.request, message.key.attempt = key.request, key.attempt
            subscription.cursors[key] = cursor + len(new)
            if ended:
                subscription.ends_sent.add(key)
                if output.finish is not None:
                    message.finish = output.finish
                else:
                    message.error = output.error or "unknown"
                    if output.error_reason is not None:
                        message.error_reason = output.error_reason.value
        return batch
