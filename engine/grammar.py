"""What a grammar lets an answer's next token be, by llguidance.

A matcher keeps no state that tokens do not give: before each mask it follows the tokens of its sequence. So a grammar
goes over a handoff, and through a resumption, with the tokens alone.

Shape suffixes as in `engine.types`; R rows with a grammar, I words of 32 tokens, a bit for each token.

llguidance is imported with the first grammar: a node that sees none does not pay for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from baton.wire import JSON_WHITESPACE
from engine.types import Grammar, GrammarKind, SequenceSlice

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits

MASK_MS_FREE: Final = 2
"""Of the processor's time for one mask. All rows of a step wait for the slowest."""
MASK_MS_OWED_MAX: Final = 200
"""What an answer's masks may take beyond that before it ends; a fast mask pays back what it leaves."""
ALONE_MS_MAX: Final = 2
"""Of a step's masks, by those before them: so much the engine's thread computes by itself, each mask by its own clock.
Threads that have to be woken may wait as long for a processor, as the model's threads spin on theirs."""
MASK_THREADS: Final = 4
MASK_MS_WATCHED: Final = 10
"""What a row owes to begin with, once masks that were computed together were slow and it is not known whose."""
ROW_MS_MAX: Final = 0.2
"""Of masks that are computed together, for each row. Those that take longer are looked at one by one."""
LETTERS: Final = "[a-z]{1,10}"
"""Words of the vocabulary whose tokens are looked at once, not in each mask: a regex that repeats a class of letters
takes a tenth of the time."""
ERROR_CHARS_MAX: Final = 300


class GrammarError(Exception):
    """No grammar, one that asks for what is not supported, one beyond `limits`, or tokens that it does not allow."""


@cache
def limits() -> LLParserLimits:
    """Of one grammar: what it takes to compile (some 1 s), to compute one mask (some 50 ms), and its memory (some tens
    of MB; of a long answer a few hundred)."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _in_one_line(error: str) -> str:
    if "NoExtensionBias" in error:
        return "no text follows it"
    shown = error.split("<backtrace>")[0].replace("<non-verbose/>", "")  # of a broken assertion of llguidance
    return " ".join(shown.split())[:ERROR_CHARS_MAX]


class Matcher:
    """Follows one answer. Not thread-safe: the engine's while it has the sequence."""

    __slots__ = ("_followed", "mask_ms", "matcher", "owed_ms", "words")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self.matcher = matcher
        self.words = words
        """Of a mask."""
        self.owed_ms = 0.0
        """Of the masks' time: see MASK_MS_OWED_MAX. More than zero: the row's masks are computed by themselves."""
        self.mask_ms = 0.0
        """Of a processor, for its last mask."""
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
        if self.owed_ms > MASK_MS_OWED_MAX:
            return f"it takes more than {MASK_MS_FREE} ms a token"
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
            slices = [*LLTokenizer.json_slices(), LETTERS]
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=sorted(eos_token_ids), slices=slices)
        except (OSError, ValueError) as error:
            raise GrammarError(f"the model's tokenizer cannot be used for it: {error}") from error

    def compile(self, grammar: Grammar) -> Matcher:
        """Within `limits`; releases the interpreter's lock for most of the time. Raises GrammarError."""
        from llguidance import LLMatcher

        try:
            source = _source(grammar)
        except Exception as error:  # the GBNF reader raises whatever it meets, bare Exception too
            raise GrammarError(_in_one_line(str(error))) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits())
        compiled = Matcher(matcher, -(-self._tokenizer.vocab_size // 32))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first is the slowest, and shows what is beyond the limits
        if compiled.problem:
            raise GrammarError(compiled.problem)
        return compiled


def _source(grammar: Grammar) -> str:
    """In llguidance's own notation."""
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
    # The tokens of a sequence that is being given up may be fewer: nobody wants what it draws.
    rows = [row for row, s in enumerate(drawn) if s.grammar is not None and s.stop <= len(s.tokens)]
    if not rows:
        return None
    matchers: list[Matcher] = []
    for row in rows:
        piece = drawn[row]
        assert isinstance(piece.grammar, Matcher)
        piece.grammar.follow(piece.tokens, piece.stop - piece.output_index, piece.stop)
        matchers.append(piece.grammar)
    allowed_RI = np.zeros((len(rows), matchers[0].words), dtype=np.int32)
    fill_masks(matchers, allowed_RI)
    for at, each in enumerate(matchers):
        if each.matcher.is_error():  # llguidance lets the answer end then
            allowed_RI[at] = 0
    return rows, allowed_RI


def fill_masks(matchers: Sequence[Matcher], allowed_RI: np.ndarray) -> None:
    """One mask for each. Where they take long all at a time, but for rows that owe something."""
    together = [(each, at) for at, each in enumerate(matchers) if not each.owed_ms]
    executor = _executor() if sum(each.mask_ms for each, _ in together) > ALONE_MS_MAX else None
    alone = [(each, at) for at, each in enumerate(matchers) if each.owed_ms or executor is None]
    if executor is not None:
        _fill_together(executor, together, allowed_RI)
    for each, at in alone:
        _fill_alone(each, allowed_RI[at])


def _fill_together(executor: LLExecutor, pairs: Sequence[tuple[Matcher, int]], allowed_RI: np.ndarray) -> None:
    """If that is slow, whose fault it is shows from the next mask on."""
    began_s, each_bytes = time.perf_counter(), allowed_RI[0].nbytes
    found = [(matcher.matcher, at) for matcher, at in pairs]
    executor.unsafe_compute_mask_ptr(found, allowed_RI.ctypes.data, each_bytes, len(allowed_RI))
    taken_ms = 1e3 * (time.perf_counter() - began_s)
    for matcher, _ in pairs:
        matcher.mask_ms = taken_ms * min(_mask_threads(), len(pairs)) / len(pairs)
        if taken_ms > MASK_MS_FREE + ROW_MS_MAX * len(pairs):
            matcher.owed_ms = MASK_MS_WATCHED


def _fill_alone(matcher: Matcher, allowed_I: np.ndarray) -> None:
    """Counts a thread's own time: a machine that is busy or stopped ends no answer."""
    if matcher.owed_ms > MASK_MS_OWED_MAX:
        return
    began_s = time.thread_time()
    matcher.matcher.unsafe_compute_mask_ptr(allowed_I.ctypes.data, allowed_I.nbytes)
    matcher.mask_ms = 1e3 * (time.thread_time() - began_s)
    matcher.owed_ms = max(0.0, matcher.owed_ms + matcher.mask_ms - MASK_MS_FREE)


@cache
def _mask_threads() -> int:
    return min(MASK_THREADS, len(os.sched_getaffinity(0)))


@cache
def _executor() -> LLExecutor | None:
    """Its threads sleep between masks. None: there is one processor."""
    from llguidance import LLExecutor

    return LLExecutor(_mask_threads()) if _mask_threads() > 1 else None
