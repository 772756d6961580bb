"""The grammars of a node's requests: compiled on a thread, one at a time, and kept for the next request."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from baton.errors import bad_field
from engine.grammar import GrammarCompiler, GrammarError, Matcher
from engine.types import Grammar

KEPT_MAX: Final = 128
"""Compiled grammars, and what is wrong with those that cannot be. Beyond so many the one not used for longest goes."""
COMPILE_MS_MAX: Final = 5_000
"""Of a request's wait for its grammar, in which it counts as one in the queue. What takes longer by itself is ended by
`engine.grammar.limits`."""


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
        self._kept: OrderedDict[Grammar, asyncio.Task[Matcher]] = OrderedDict()
        self._wanted: Counter[Grammar] = Counter()
        """By how many requests that wait."""
        self._turn = asyncio.Lock()

    async def matcher(self, grammar: Grammar, output: Sequence[int]) -> Matcher:
        """For an answer that begins with `output`. Raises BatonError BAD_FIELD."""
        known = self._kept.get(grammar)
        if known is None:
            known = self._kept[grammar] = asyncio.create_task(self._compile(grammar))
            known.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may be nobody's by then
            if len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        self._wanted[grammar] += 1
        try:
            async with asyncio.timeout(COMPILE_MS_MAX / 1000):
                matcher = (await asyncio.shield(known)).copy()
                if output:
                    await asyncio.to_thread(matcher.follow, output, 0, len(output))
        except TimeoutError:
            text = f"The grammar was not compiled within {COMPILE_MS_MAX:,} ms: make it smaller, or try again later."
            raise bad_field("sampling.grammar", text) from None
        except GrammarError as error:
            raise bad_field("sampling.grammar", f"The grammar cannot be used: {error}.") from None
        finally:
            self._wanted[grammar] -= 1
            if not self._wanted[grammar]:
                del self._wanted[grammar]
        if matcher.problem:
            raise bad_field("output", f"The grammar does not allow what there is of the answer: {matcher.problem}.")
        return matcher

    async def _compile(self, grammar: Grammar) -> Matcher:
        async with self._turn:
            if grammar not in self._wanted:
                # Else those that nobody waits for any more would keep the others waiting.
                self._kept.pop(grammar, None)
                raise GrammarError("nobody waits for it")
            return await asyncio.to_thread(self._compile_now, grammar)

    def _compile_now(self, grammar: Grammar) -> Matcher:
        if self._compiler is None:
            if self._tokenizer is None:
                raise GrammarError("this node's engine has no tokenizer")
            self._compiler = GrammarCompiler(
                self._tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids
            )
        return self._compiler.compile(grammar)
