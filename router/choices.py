"""Several answers to one question, or to several: one request each, run together, with one fate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from batonpb import inference_pb2

from router.answers import AnswerPart, AnswerSink
from router.resume import Place

_T = TypeVar("_T")
Ask = Callable[[_T, int, AnswerSink], Coroutine[Any, Any, None]]
"""`RouterNode.run` for one request, the number of the choice, and where it goes."""


async def run_choices(
    ask: Ask[_T], requests: Sequence[_T], sinks: Sequence[AnswerSink], *, at_once: bool = False
) -> None:
    """Equally many answers to each request; answer j of n to request i goes to sink i * n + j.

    Unless all are to begin `at_once`, the first answer to a request goes ahead until it has its second token: its
    prompt's blocks are then in the caches of both nodes for the others. Cancelling it ends all answers and waits for
    them. Raises the first BatonError.
    """
    n = len(sinks) // len(requests)
    assert n > 0
    assert n * len(requests) == len(sinks)
    if len(sinks) == 1:
        await ask(requests[0], 0, sinks[0])
        return
    tasks: list[asyncio.Task[None]] = []
    for i, request in enumerate(requests):
        own = sinks[i * n : i * n + n]
        if n == 1 or at_once:
            tasks += [asyncio.create_task(ask(request, j, sink)) for j, sink in enumerate(own)]
        else:
            tasks.append(asyncio.create_task(_one_ahead(ask, request, own)))
    await _all(tasks)


async def _one_ahead(ask: Ask[_T], request: _T, sinks: Sequence[AnswerSink]) -> None:
    ahead = _Ahead(sinks[0])
    tasks = [asyncio.create_task(ask(request, 0, ahead))]
    tasks[0].add_done_callback(lambda _: ahead.far.set())

    async def behind(choice: int) -> None:
        await ahead.far.wait()
        await ask(request, choice, sinks[choice])

    tasks += [asyncio.create_task(behind(choice)) for choice in range(1, len(sinks))]
    await _all(tasks)


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all, or for the first that fails. None of them runs any more when this ends."""
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        del task
        ended = set()
        tasks.clear()  # their errors lead back to this frame


class _Ahead:
    """The sink of an answer that others wait for, until it has come `far` enough."""

    def __init__(self, sink: AnswerSink) -> None:
        self.far = asyncio.Event()
        self._sink = sink
        self.started = sink.started

    @property
    def is_open(self) -> bool:
        return self._sink.is_open

    @property
    def on_open(self) -> Callable[[], None] | None:
        return self._sink.on_open

    @on_open.setter
    def on_open(self, on_open: Callable[[], None] | None) -> None:
        self._sink.on_open = on_open

    def tokens(self, part: AnswerPart) -> None:
        self._sink.tokens(part)
        if part.first_index + len(part.ids) > 1:
            self.far.set()

    def token(self, index: int, token: int, text: str) -> None:
        self._sink.token(index, token, text)
        if index:
            self.far.set()

    def finished(self, finished: inference_pb2.Finished, place: Place | None) -> None:
        self._sink.finished(finished, place)
        self.far.set()
