"""Callers that wait for the answer to what they have asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
AnswerT = TypeVar("AnswerT")


class Waiters(Generic[KeyT, AnswerT]):
    """All that wait under one key get the same answer, once. Control thread only; whoever asks bounds the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[KeyT, list[asyncio.Future[AnswerT]]] = {}

    def __contains__(self, key: KeyT) -> bool:
        return key in self._waiting

    async def ask(self, key: KeyT, ask: Callable[[], object]) -> AnswerT:
        """Wait from before `ask` is called, during which the answer may come. Raises what `fail` is given."""
        waiter: asyncio.Future[AnswerT] = self._loop.create_future()
        self._waiting.setdefault(key, []).append(waiter)
        try:
            ask()
            return await waiter
        finally:
            others = self._waiting.get(key, [])
            if waiter in others:
                others.remove(waiter)
                if not others:
                    del self._waiting[key]

    def answer(self, key: KeyT, answer: AnswerT) -> None:
        for waiter in self._pop(key):
            waiter.set_result(answer)

    def fail(self, key: KeyT, error: Callable[[], Exception]) -> None:
        """Each gets an error of its own."""
        for waiter in self._pop(key):
            waiter.set_exception(error())

    def fail_all(self, error: Callable[[], Exception]) -> None:
        for key in list(self._waiting):
            self.fail(key, error)

    def _pop(self, key: KeyT) -> list[asyncio.Future[AnswerT]]:
        """Without those that were cancelled."""
        return [waiter for waiter in self._waiting.pop(key, []) if not waiter.done()]
