"""Questions whose right answer is known."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from baton.client import Answer
from tests.support.cluster_harness import mock_tokens

MARK: Final = 999
"""First token of the prompt that a fault strikes. No other prompt has it."""
FETCH_MARK: Final = 0
"""First token of the prompt whose fetch from a prefill node a fault strikes. No other prompt has it."""
FETCH_DECODE_MARK: Final = MARK - 1
"""The same of a fetch from a decode node."""
LOGPROBS_EVERY: Final = 3
"""One question in so many asks for log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    prompt: list[int]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    expected: list[int]
    logprobs: list[Any] | None = None
    """See `logprobs_of`. None: they are not compared."""
    salt: str = ""
    """Whose prompts may share cached prefixes with this one."""

    def answered_by(self, answer: Answer) -> bool:
        """Rightly."""
        if self.logprobs is not None and logprobs_of(answer) != self.logprobs:
            return False
        return answer.ids == self.expected


class Questions(Protocol):
    """Where the requests of a case come from."""

    @property
    def mark(self) -> int: ...

    def __call__(self) -> Question: ...

    def marked(self) -> Question: ...

    def short(self) -> Question:
        """Of few tokens; its prompt is long enough that a mixed node hands it over."""
        ...


def logprobs_of(answer: Answer) -> list[Any]:
    return [(each.logprob, list(each.top_ids), list(each.top_logprobs)) for each in answer.logprobs]


class MockQuestions:
    """To the mock engine, greedy and seeded in turn."""

    def __init__(self, seed: int, *, marked_tokens: int = 400, mark: int = MARK) -> None:
        self.mark = mark
        self._rng = random.Random(seed)
        self._marked_tokens = marked_tokens
        self._count = 0

    def __call__(self) -> Question:
        rng = self._rng
        prompt = [rng.randrange(1, FETCH_DECODE_MARK) for _ in range(rng.choice((8, 40, 150, 300)))]
        return self._question(prompt, rng.randrange(40, 120))

    def marked(self) -> Question:
        """400 tokens of prompt are four chunks."""
        rest = [self._rng.randrange(1, FETCH_DECODE_MARK) for _ in range(self._marked_tokens - 1)]
        return self._question([self.mark, *rest], 90)

    def short(self) -> Question:
        return self._question([self._rng.randrange(1, FETCH_DECODE_MARK) for _ in range(100)], 4)

    def _question(self, prompt: list[int], count: int) -> Question:
        self._count += 1
        sampling: dict[str, Any] = {"temperature": 0.0}
        if self._count % 2:
            sampling = {"temperature": 0.8, "top_p": 0.9, "seed": self._count}
        expected = mock_tokens(prompt, count, **sampling)
        logprobs = None
        if self._count % LOGPROBS_EVERY == 0:
            sampling["logprobs"] = 1
            logprobs = [(0.0, [token], [0.0]) for token in expected]
        return Question(prompt=prompt, max_tokens=count, sampling=sampling, expected=expected, logprobs=logprobs)
