"""Streamed requests, and what came of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Final, Self

from baton.client import Answer
from baton.errors import BatonError
from tests.faults.asking import Asker
from tests.faults.questions import Question

AT_ONCE: Final = 8


class Asked:
    """A request under way. `answer` and `error` are set when it is over."""

    def __init__(self, asker: Asker, question: Question) -> None:
        self.question = question
        self._asked_s = time.monotonic()
        self.token_times_s: list[float] = []
        """On the machine's monotonic clock."""
        self.answer: Answer | None = None
        self.error: BatonError | AssertionError | None = None
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(asker))

    @property
    def wrong(self) -> bool:
        """The client was told something that is not so."""
        if isinstance(self.error, AssertionError):
            return True
        return self.answer is not None and not self.question.answered_by(self.answer)

    @property
    def failed(self) -> bool:
        """The client has no answer."""
        return isinstance(self.error, BatonError)

    @property
    def course(self) -> str:
        """Where it has gone, when it is over."""
        if self.answer is None:
            return str(self.error)
        stats = self.answer.stats
        return f"{stats.prefill_node} > {stats.decode_node} ({stats.transport}, {stats.resumptions} resumptions)"

    def longest_wait_s(self, since_s: float) -> float:
        """The longest time without a token from then on. Tokens that were on their way to the client at the time of a
        fault do not hide it."""
        since_s = max(since_s, self._asked_s)
        times = [since_s, *(at_s for at_s in self.token_times_s if at_s > since_s)]
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)

    async def _run(self, asker: Asker) -> None:
        try:
            self.answer = await asker.ask(self.question, came=self._came)
        except (BatonError, AssertionError) as error:
            self.error = error
        finally:
            self.begun.set()

    def _came(self) -> None:
        self.token_times_s.append(time.monotonic())
        self.begun.set()


class Load:
    """Keeps `at_once` requests going in the block, each worker one after the other, until told to finish. Each request
    is asked by what `asker` gives then.

    Nothing of it runs on after the block.
    """

    def __init__(
        self, asker: Callable[[], Asker], questions: Callable[[], Question], *, at_once: int = AT_ONCE
    ) -> None:
        self.asked: list[Asked] = []
        self._asker = asker
        self._questions = questions
        self._at_once = at_once
        self._finishing = False
        self._workers: list[asyncio.Task[None]] = []

    def ask(self, question: Question) -> Asked:
        asked = Asked(self._asker(), question)
        self.asked.append(asked)
        return asked

    async def finish(self) -> None:
        """Ask no more, and wait for the answers to all that was asked."""
        self._finishing = True
        await asyncio.gather(*self._workers, *(asked.task for asked in self.asked))

    async def __aenter__(self) -> Self:
        """Returns when every worker's first answer has begun."""
        self._workers = [asyncio.create_task(self._work()) for _ in range(self._at_once)]
        await asyncio.sleep(0)
        await asyncio.gather(*(asked.begun.wait() for asked in self.asked))
        return self

    async def __aexit__(self, *_error: object) -> None:
        tasks = [*self._workers, *(asked.task for asked in self.asked)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _work(self) -> None:
        while not self._finishing:
            asked = self.ask(self._questions())
            await asked.task
            if asked.failed:
                return
