"""What a grammar lets an answer's next token be, by llguidance.

A matcher keeps no state that tokens do not give: before each mask it follows the tokens of its sequence. So a grammar
goes over a handoff, and through a resumption, with the tokens alone.

Shape suffixes as in `engine.types`; R rows with a grammar, I words of 32 tokens, a bit for each token.

llguidance is imported with the first grammar: a node that sees none does not pay for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.wire import JSON_WHITESPACE
from engine.types import Grammar, GrammarKind, SequenceSlice

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits

MASK_THREADS: Final = 4
ERROR_CHARS_MAX: Final = 300


class GrammarError(Exception):
    """No grammar, one that asks for what is not supported, one beyond `limits`, or tokens that it does not allow."""


@cache
def limits() -> LLParserLimits:
    """Of one grammar: what it takes to compile (some 2 s), to compute one mask (some 50 ms), and its memory (some tens
    of MB)."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=300_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=250_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _in_one_line(error: str) -> str:
    return " ".join(error.replace("<non-verbose/>", "").split())[:ERROR_CHARS_MAX]


class Matcher:
    """Follows one answer. Not thread-safe: the engine's while it has the sequence."""

    __slots__ = ("_followed", "matcher", "words")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher = matcher
        self.words = words
        """Of a mask."""
        self._followed = 0

    def copy(self) -> Matcher:
        """At the beginning of an answer."""
        assert self._followed == 0, self._followed
        return Matcher(self.matcher.deep_copy(), self.words)

    def follow(self, tokens: Sequence[int], start: int, stop: int) -> None:
        """Up to `tokens[stop - 1]`; the answer begins at `start`. Never goes back."""
        assert self._followed <= stop - start, (self._followed, start, stop)
        new = tokens[start + self._followed : stop]
        self._followed = stop - start
        if new:
            self.matcher.consume_tokens(list(new))

    @property
    def problem(self) -> str:
        """See `GrammarMatcher.problem`."""
        return _in_one_line(self.matcher.get_error())

    @property
    def accepts(self) -> bool:
        """Whether the answer may end here."""
        accepting: bool = self.matcher.is_accepting()
        return accepting


class GrammarCompiler:
    """For one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Reads the file: takes a second for a large vocabulary.

        Raises GrammarError: the file is not there, or the tokens of such a tokenizer stand for no fixed bytes.
        """
        from llguidance import LLTokenizer

        if not eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token")
        try:
            text = tokenizer.read_text(encoding="utf-8")
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except (OSError, ValueError) as error:
            raise GrammarError(f"the model's tokenizer cannot be used for it: {error}") from error

    def compile(self, grammar: Grammar) -> Matcher:
        """Within `limits`; releases the interpreter's lock for most of the time. Raises GrammarError."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import GbnfToLarkError

        try:
            source = _source(grammar)
        except (GbnfToLarkError, ValueError, LookupError, RecursionError) as error:
            raise GrammarError(_in_one_line(str(error))) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits())
        compiled = Matcher(matcher, -(-self._tokenizer.vocab_size // 32))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first is the slowest, and shows what is beyond the limits
        if compiled.problem:
            raise GrammarError(compiled.problem)
        return compiled


def _source(grammar: Grammar) -> str:
    """In llguidance's own notation. Raises GbnfToLarkError, ValueError, LookupError, RecursionError."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    source: str
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        source = LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": JSON_WHITESPACE})
    elif grammar.kind is GrammarKind.REGEX:
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        source = LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    return source


def compute_masks(drawn: Sequence[SequenceSlice]) -> tuple[list[int], np.ndarray] | None:
    """The rows that have a grammar, and what it lets each of them be, int32 [R, I]; None: nobody has one.

    Releases the interpreter's lock. A row whose matcher cannot go on may be nothing (`Matcher.problem`).
    """
    rows: list[int] = []
    matchers: list[tuple[LLMatcher, int]] = []
    words = 0
    for row, piece in enumerate(drawn):
        # The tokens of a sequence that is being given up may be fewer: nobody wants what it draws.
        if piece.grammar is not None and piece.stop <= len(piece.tokens):
            assert isinstance(piece.grammar, Matcher)
            piece.grammar.follow(piece.tokens, piece.stop - piece.output_index, piece.stop)
            matchers.append((piece.grammar.matcher, len(rows)))
            rows.append(row)
            words = piece.grammar.words
    if not rows:
        return None
    allowed_RI = np.zeros((len(rows), words), dtype=np.int32)
    if len(rows) == 1:
        matchers[0][0].unsafe_compute_mask_ptr(allowed_RI.ctypes.data, allowed_RI.nbytes)
    else:
        _executor().unsafe_compute_mask_ptr(matchers, allowed_RI.ctypes.data, 4 * words, len(rows))
    for matcher, at in matchers:
        if matcher.is_error():  # llguidance lets the answer end then
            allowed_RI[at] = 0
    return rows, allowed_RI


@cache
def _executor() -> LLExecutor:
    """Its threads sleep between masks."""
    from llguidance import LLExecutor

    return LLExecutor(min(MASK_THREADS, len(os.sched_getaffinity(0))))
