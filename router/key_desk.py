"""Where a router's doors ask what a caller's API key may do: the book of keys is in this process, or in the parent of
this worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Final, Protocol

from baton.errors import BatonError
from baton.ids import RequestId
from router.keys import ENDED_EPOCH, Admission, ApiKey, KeyBook, KeyUse
from router.request import ClientCall
from router.resume import ResumeToken

FORMER_LOOKS_MAX: Final = 50
FORMER_LOOK_MS: Final = 10


class KeyDesk(Protocol):
    """Lives on one loop."""

    def find(self, authorization: str | bytes | None) -> ApiKey:
        """Whose call it is, by the header that it came with. Raises BatonError INVALID_API_KEY."""

    async def admit(self, key: ApiKey, *, former: Callable[[], ResumeToken] | None = None) -> KeyedCall:
        """Take one call in. Raises BatonError RATE_LIMIT_EXCEEDED, or INVALID_API_KEY where the key has just gone.

        `former` is for a call that attaches: what its client shows of the answer. If the router still serves that over
        another connection, and the key has no room beside it, that one is ended first. A BatonError of it counts as
        nothing shown.
        """

    async def end_answers(self, key: ApiKey) -> None:
        """Take in a call that only ends answers. Raises BatonError as `admit`."""

    def ended(self, key: ApiKey, request: RequestId) -> None:
        """A client has ended an answer, which it may have left before."""

    async def headers(self, key: ApiKey) -> dict[str, str]:
        """What is left of its limits, for a client over HTTP."""


class KeyedCall(Protocol):
    """One call that a key was good for. Its owner calls `end`."""

    @property
    def key(self) -> ApiKey:
        """As it was when the call came."""

    async def widen(self, answers: int) -> None:
        """As `Admission.widen`."""

    def sign(self, call: ClientCall, *, prompt: int = 0) -> ClientCall:
        """The call of this key's, with what it may and what it has to report. `prompt` numbers those of one call: each
        counts with the first answer to it that is computed."""

    def end(self) -> None:
        """Idempotent."""


def signed(
    call: ClientCall,
    key: ApiKey,
    *,
    take_prompt: Callable[[int], Awaitable[None]],
    take_output: Callable[[int], None],
    left: Callable[[RequestId, int], None],
    came_back: Callable[[RequestId, int], None],
) -> ClientCall:
    return replace(
        call,
        key_name=key.name,
        key_salt=key.cache_salt or "",
        priority=key.priority_class,
        special_tokens=key.special_tokens,
        take_prompt=take_prompt,
        take_output=take_output,
        left=left,
        came_back=came_back,
    )


async def wait_for_room(use: KeyUse, looks_max: int) -> None:
    for _ in range(looks_max):
        if not use.full:
            return
        await asyncio.sleep(FORMER_LOOK_MS / 1000)


class LocalDesk:
    """The book is here: nothing is waited for but the end of a former connection."""

    def __init__(self, book: KeyBook, *, rng: Random, cut_former: Callable[[ResumeToken, str], bool]) -> None:
        """`cut_former` ends what this router serves of the token's answers, for the key with that name; whether there
        was anything."""
        self._book = book
        self._rng = rng
        self._cut_former = cut_former
        self._now_s = asyncio.get_running_loop().time

    def find(self, authorization: str | bytes | None) -> ApiKey:
        return self._book.find(authorization).key

    async def admit(self, key: ApiKey, *, former: Callable[[], ResumeToken] | None = None) -> LocalCall:
        use = self._book.use_of(key.name)
        if former is not None and use.full:
            with suppress(BatonError):
                if self._cut_former(former(), key.name):
                    await wait_for_room(use, FORMER_LOOKS_MAX)
        admission = use.admit(self._now_s(), spread=self._rng.random(), attaches=former is not None)
        return LocalCall(admission, self._now_s)

    async def end_answers(self, key: ApiKey) -> None:
        self._book.use_of(key.name).end_answers(self._now_s())

    def ended(self, key: ApiKey, request: RequestId) -> None:
        with suppress(BatonError):
            self._book.use_of(key.name).come_back(request, ENDED_EPOCH, self._now_s())

    async def headers(self, key: ApiKey) -> dict[str, str]:
        with suppress(BatonError):
            return self._book.use_of(key.name).headers(self._now_s())
        return {}


class LocalCall:
    def __init__(self, admission: Admission, now_s: Callable[[], float]) -> None:
        self._admission = admission
        self._now_s = now_s
        self.key = admission.key
        self.end = admission.end

    async def widen(self, answers: int) -> None:
        self._admission.widen(answers)

    def sign(self, call: ClientCall, *, prompt: int = 0) -> ClientCall:
        admission, use, now_s = self._admission, self._admission.use, self._now_s

        async def take_prompt(tokens: int) -> None:
            admission.take_prompt(prompt, tokens, now_s())

        return signed(
            call,
            admission.key,
            take_prompt=take_prompt,
            take_output=lambda n: use.take_output(n, now_s()),
            left=lambda request, epoch: use.leave(request, epoch, now_s()),
            came_back=lambda request, epoch: use.come_back(request, epoch, now_s()),
        )
