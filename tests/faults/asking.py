"""Who asks: a client that goes on at another router where it loses the one that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from baton.client import Answer, AsyncClient, Sampling
from tests.faults.questions import Question

ANSWER_S_MAX: Final = 150.0
"""For each answer, over all tries. One that takes longer is lost."""


class Asker(Protocol):
    async def ask(self, question: Question, *, came: Callable[[], None]) -> Answer:
        """Calls `came` with each part that has tokens.

        Raises BatonError where there is no answer, AssertionError where an index is missing or repeated.
        """
        ...

    async def close(self) -> None: ...


class GrpcAsker:
    """By our own client."""

    def __init__(self, routers: Sequence[str]) -> None:
        self._client = AsyncClient(routers, timeout_s=ANSWER_S_MAX)

    async def ask(self, question: Question, *, came: Callable[[], None]) -> Answer:
        sampling = Sampling(max_tokens=question.max_tokens, **question.sampling)
        async with self._client.stream(question.prompt, sampling=sampling, cache_salt=question.salt or None) as stream:
            async for _ in stream:
                came()
        return stream.answer

    async def close(self) -> None:
        await self._client.close()
