"""Streamed requests whose right answer is known, and what came of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

from baton.errors import BatonError
from tests.faults.asking import Asker
from tests.support.cluster_harness import Answer, collect, make_request, mock_tokens

AT_ONCE: Final = 8
MARK: Final = 999
"""First token of the prompt that a fault strikes. No other prompt has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: list[int]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    expected: list[int]
    logprobs: list[Any] | None = None
    """Of each token, where the request asks for them: see `logprobs_of`."""
    salt: str = ""
    """Whose prompts may share cached prefixes with this one."""


def logprobs_of(answer: Answer) -> list[Any]:
    return [(each.logprob, list(each.top_ids), list(each.top_logprobs)) for each in answer.logprobs]


class Asked:
    """A request under way. `answer` and `error` are set when it is over."""

    def __init__(self, asker: Asker, question: Question) -> None:
        self.question = question
        self.attached = 0
        """How often its client lost the connection and went on elsewhere, or there."""
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
        if self.answer is None:
            return False
        logprobs = self.question.logprobs
        return self.answer.ids != self.question.expected or (
            logprobs is not None and logprobs_of(self.answer) != logprobs
        )

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
        times = [since_s, *(at_s for at_s in self.token_times_s if at_s > since_s)]
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)

    async def _run(self, asker: Asker) -> None:
        question = self.question
        request = make_request(question.prompt, max_tokens=question.max_tokens, **question.sampling)
        if question.salt:
            request.cache_salt = question.salt
        try:
            self.answer = await collect(asker.ask(request, self._came, self._attached))
        except (BatonError, AssertionError) as error:
            self.error = error
        finally:
            self.begun.set()

    def _came(self) -> None:
        self.token_times_s.append(time.monotonic())
        self.begun.set()

    def _attached(self) -> None:
        self.attached += 1


class Load:
    """Keeps `AT_ONCE` requests going in the block, each worker one after the other, until told to finish.

    Nothing of it runs on after the block.
    """

    def __init__(self, asker: Callable[[], Asker], questions: Callable[[], Question]) -> None:
        """`asker` is asked for one for each question."""
        self.asked: list[Asked] = []
        self._asker = asker
        self._questions = questions
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
        self._workers = [asyncio.create_task(self._work()) for _ in range(AT_ONCE)]
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


class MockQuestions:
    """Questions to the mock engine, greedy and seeded in turn."""

    mark = MARK

    def __init__(self, seed: int, *, marked_tokens: int = 400) -> None:
        self._rng = random.Random(seed)
        self._marked_tokens = marked_tokens
        self._count = 0

    def __call__(self) -> Question:
        rng = self._rng
        prompt = [rng.randrange(1, MARK) for _ in range(rng.choice((8, 40, 150, 300)))]
        return self._question(prompt, rng.randrange(60, 160))

    def marked(self) -> Question:
        """400 tokens of prompt are four chunks."""
        rest = [self._rng.randrange(1, MARK) for _ in range(self._marked_tokens - 1)]
        return self._question([MARK, *rest], 120)

    def short(self) -> Question:
        return self._question([self._rng.randrange(1, MARK) for _ in range(100)], 4)

    def _question(self, prompt: list[int], count: int) -> Question:
        self._count += 1
        seeded = {"temperature": 0.8, "top_p": 0.9, "seed": self._count}
        sampling: dict[str, Any] = seeded if self._count % 2 else {}
        expected = mock_tokens(prompt, count, **sampling)
        logprobs = None
        if self._count % 3 == 0:
            sampling = {**sampling, "logprobs": 1}
            logprobs = [(0.0, [token], [0.0]) for token in expected]
        return Question(prompt=prompt, max_tokens=count, sampling=sampling, expected=expected, logprobs=logprobs)
