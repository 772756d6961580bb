"""Several answers to one question, or to several: one request each, run together, with one fate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from batonpb import inference_pb2

from baton.errors import BatonError

EVENTS_HELD_MAX = 64
"""Events that wait for a slow client; the answers wait then, too."""

Answer = AsyncGenerator[inference_pb2.GenerateEvent, None]
_T = TypeVar("_T")
Ask = Callable[[_T, int], Answer]
"""`RouterNode.generate` for one request and the number of the choice."""
News = tuple[int, inference_pb2.GenerateEvent] | BaseException | None
"""An event and its answer's index, the error that ends all, or None where one answer has ended."""


async def run_choices(
    ask: Ask[_T], requests: Sequence[_T], n: int, *, at_once: bool = False
) -> AsyncGenerator[tuple[int, inference_pb2.GenerateEvent], None]:
    """`n` answers to each request, as (index, event); answer j to request i has the index i * n + j.

    Unless all are to begin `at_once`, the first answer to a request goes ahead until it has its second token: its
    prompt's blocks are then in the caches of both nodes for the others. Closing the iterator ends all answers and waits
    for them. Raises the first BatonError.
    """
    assert requests
    assert n > 0
    if len(requests) == n == 1:
        async with aclosing(ask(requests[0], 0)) as events:
            async for event in events:
                yield 0, event
        return
    news: asyncio.Queue[News] = asyncio.Queue(EVENTS_HELD_MAX)
    tasks: list[asyncio.Task[None]] = []
    for i, request in enumerate(requests):
        ahead = asyncio.Event()
        if at_once:
            ahead.set()
        answers = (_answer(ask, request, j, i * n + j, ahead, news) for j in range(n))
        tasks += [asyncio.create_task(answer) for answer in answers]
    try:
        running = len(tasks)
        while running:
            new = await news.get()
            if isinstance(new, BaseException):
                try:
                    raise new
                finally:
                    del new  # or it would refer to itself, by this frame in its traceback
            if new is None:
                running -= 1
            else:
                yield new
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not news.empty():
            news.get_nowait()  # errors of the others, whose tracebacks lead back to the queue


async def _answer(
    ask: Ask[_T],
    request: _T,
    choice: int,
    index: int,
    ahead: asyncio.Event,
    news: asyncio.Queue[News],
) -> None:
    """One answer into the queue; at its end None, or the error."""
    try:
        if choice > 0:
            await ahead.wait()
        async with aclosing(ask(request, choice)) as events:
            async for event in events:
                if event.HasField("finished") or event.tokens.first_index > 0:
                    ahead.set()
                await news.put((index, event))
        ahead.set()
        await news.put(None)
    except Exception as error:  # a bug too: it is raised where the events are read, not lost in this task
        await news.put(error)
        if not isinstance(error, BatonError):
            raise
