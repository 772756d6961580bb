"""Streamed requests whose right answer is known, and what came of each."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Self

from baton.errors import BatonError
from baton.rpc import rpc_errors
from tests.support.cluster_harness import Answer, Client, collect, make_request, mock_tokens

ANSWER_S_MAX: Final = 150.0
"""Deadline of each request. One that meets it is lost."""
AT_ONCE: Final = 8
MARK: Final = 999
"""First token of the prompt that a fault strikes. No other prompt has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: list[int]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    expected: list[int]
    salt: str = ""
    """Whose prompts may share cached prefixes with this one."""


class Asked:
    """A request under way. `answer` and `error` are set when it is over."""

    def __init__(self, client: Client, question: Question) -> None:
        self.question = question
        self.token_times_s: list[float] = []
        """On the machine's monotonic clock."""
        self.answer: Answer | None = None
        self.error: BatonError | AssertionError | None = None
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._run(client))

    @property
    def wrong(self) -> bool:
        """The client was told something that is not so."""
        if isinstance(self.error, AssertionError):
            return True
        return self.answer is not None and self.answer.ids != self.question.expected

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

    async def _run(self, client: Client) -> None:
        question = self.question
        request = make_request(question.prompt, max_tokens=question.max_tokens, **question.sampling)
        if question.salt:
            request.cache_salt = question.salt
        try:
            with rpc_errors("router-0"):
                self.answer = await collect(self._timed(client.stub.Generate(request, timeout=ANSWER_S_MAX)))
        except (BatonError, AssertionError) as error:
            self.error = error
        finally:
            self.begun.set()

    async def _timed(self, call: Any) -> AsyncIterator[Any]:
        async for event in call:
            if event.WhichOneof("event") == "tokens":
                self.token_times_s.append(time.monotonic())
                self.begun.set()
            yield event


class Load:
    """Keeps `AT_ONCE` requests going in the block, each worker one after the other, until told to finish.

    Nothing of it runs on after the block.
    """

    def __init__(self, client: Client, questions: Callable[[], Question]) -> None:
        self.asked: list[Asked] = []
        self._client = client
        self._questions = questions
        self._finishing = False
        self._workers: list[asyncio.Task[None]] = []

    def ask(self, question: Question) -> Asked:
        asked = Asked(self._client, question)
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
        return Question(prompt=prompt, max_tokens=count, sampling=sampling, expected=expected)
