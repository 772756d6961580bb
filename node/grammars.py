"""The grammars of a node's requests: compiled on a thread, one at a time, and kept for the next request.

Each source of requests (an API key, or an address) has a line of its own, and the lines take turns: who sends grammars
that take long waits for them itself. What is kept is the source's own too: nobody learns from the time of a first token
what others ask for.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from baton.errors import bad_field
from engine.grammar import GrammarCompiler, GrammarError, Matcher
from engine.types import Grammar

KEPT_CHARS_MAX: Final = 1 << 20
"""Of compiled grammars, and of those that cannot be. Beyond it the source that has most loses the one that it has not
used for longest. What is compiled takes up to some 350 bytes for each."""
KEPT_CHARS_EACH: Final = 8_192
"""A shorter one counts as so many."""
COMPILE_MS_MAX: Final = 5_000
"""Of a request's wait for its grammar, once its turn has come. What takes longer by itself is ended by
`engine.grammar.limits`."""
REPLAY_TOKENS: Final = 1_024
"""Of an answer that goes on, followed at a time: then its request may be given up."""


class _Compile:
    """Waits for its turn as long as a request wants it, each of which counts as one in its node's queue."""

    __slots__ = ("begun", "task", "wanted")

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.task: asyncio.Task[Matcher] | None = None
        self.wanted = 0


class Grammars:
    """Of one node; control thread only."""

    def __init__(
        self, tokenizer: Path | None = None, *, vocab_size: int = 0, eos_token_ids: frozenset[int] = frozenset()
    ) -> None:
        """Reads the tokenizer when the first grammar comes. None: this node has none, and refuses grammars."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: GrammarCompiler | None = None
        self._begun: OrderedDict[Grammar, _Compile] = OrderedDict()
        self._lines: OrderedDict[int, OrderedDict[Grammar, _Compile]] = OrderedDict()
        """By source; the first has the next turn, but for the source that had the last. None is empty."""
        self._source = 0
        """Of the last turn."""
        self._compiling = False

    async def matcher(self, grammar: Grammar, output: Sequence[int]) -> Matcher:
        """For an answer that begins with `output`. Raises BatonError BAD_FIELD."""
        try:
            matcher = (await self._compiled(grammar)).copy()
        except TimeoutError:
            text = f"The grammar was not compiled within {COMPILE_MS_MAX:,} ms: make it smaller, or try again later."
            raise bad_field("sampling.grammar", text) from None
        except GrammarError as error:
            raise bad_field("sampling.grammar", f"The grammar cannot be used: {error}.") from None
        for stop in range(REPLAY_TOKENS, len(output) + REPLAY_TOKENS, REPLAY_TOKENS):
            await asyncio.to_thread(matcher.follow, output, 0, min(stop, len(output)))
        if matcher.problem:
            raise bad_field("output", f"The grammar does not allow what there is of the answer: {matcher.problem}.")
        return matcher

    async def _compiled(self, grammar: Grammar) -> Matcher:
        """Raises GrammarError, TimeoutError."""
        asked = self._begun.get(grammar)
        if asked is not None:
            self._begun.move_to_end(grammar)
        else:
            asked = self._lines.setdefault(grammar.source, OrderedDict()).setdefault(grammar, _Compile())
        asked.wanted += 1
        self._next()
        try:
            await asked.begun.wait()
        finally:
            asked.wanted -= 1
            if not asked.wanted and not asked.begun.is_set():
                self._take(grammar)
        assert asked.task is not None
        async with asyncio.timeout(COMPILE_MS_MAX / 1000):
            return await asyncio.shield(asked.task)

    def _take(self, grammar: Grammar) -> _Compile:
        """Out of its line."""
        line = self._lines[grammar.source]
        taken = line.pop(grammar)
        if not line:
            del self._lines[grammar.source]
        return taken

    def _next(self) -> None:
        if self._compiling or not self._lines:
            return
        last = self._source
        self._source = next((source for source in self._lines if source != last), last)
        self._lines.move_to_end(self._source)
        grammar = next(iter(self._lines[self._source]))
        begun = self._begun[grammar] = self._take(grammar)
        self._compiling = True
        begun.task = asyncio.create_task(self._compile(grammar))
        begun.task.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be nobody's by then
        begun.begun.set()
        self._forget()

    def _forget(self) -> None:
        """What is too much to keep."""
        while True:
            kept = Counter[int]()
            for each in self._begun:
                kept[each.source] += max(len(each.text), KEPT_CHARS_EACH)
            if kept.total() <= KEPT_CHARS_MAX:
                return
            ((most, _),) = kept.most_common(1)
            del self._begun[next(each for each in self._begun if each.source == most)]

    async def _compile(self, grammar: Grammar) -> Matcher:
        try:
            return await asyncio.to_thread(self._compile_now, grammar)
        finally:
            self._compiling = False
            self._next()

    def _compile_now(self, grammar: Grammar) -> Matcher:
        if self._compiler is None:
            if self._tokenizer is None:
                raise GrammarError("this node's engine has no tokenizer")
            self._compiler = GrammarCompiler(
                self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )
        return self._compiler.compile(grammar)
