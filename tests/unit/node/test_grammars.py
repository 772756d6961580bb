"""A node's grammars: compiled once each, off the loop, and refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from baton.errors import BatonError, Reason
from engine.grammar import GrammarCompiler, Matcher
from engine.types import Grammar, GrammarKind
from node import grammars
from node.grammars import Grammars
from tests.support.schemas import write_byte_tokenizer

DIGITS = Grammar(kind=GrammarKind.REGEX, text="[0-9]+")
LATE = "The grammar was not compiled within 20 ms: make it smaller, or try again later."
BROKEN = Grammar(kind=GrammarKind.REGEX, text="(")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled, in order."""
    found: list[str] = []
    real = GrammarCompiler.compile

    def compile_one(self: GrammarCompiler, grammar: Grammar) -> Matcher:
        found.append(grammar.text)
        return real(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_one)
    return found


def make(tokenizer: Path | None) -> Grammars:
    vocab_size = 0 if tokenizer is None else Tokenizer.from_file(str(tokenizer)).get_vocab_size()
    return Grammars(tokenizer, vocab_size=vocab_size, eos_token_ids=frozenset({vocab_size - 1}))


async def refused(node: Grammars, grammar: Grammar, output: list[int] | None = None) -> BatonError:
    with pytest.raises(BatonError) as caught:
        await node.matcher(grammar, output or [])
    assert caught.value.reason is Reason.BAD_FIELD
    return caught.value


def test_each_grammar_is_compiled_once(tokenizer: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By requests that come together too, and what is wrong with one is remembered; the oldest makes room."""
    monkeypatch.setattr(grammars, "KEPT_MAX", 2)

    async def scenario() -> None:
        node = make(tokenizer)
        first, second = await asyncio.gather(node.matcher(DIGITS, []), node.matcher(DIGITS, []))
        assert first is not second and first.matcher is not second.matcher
        for _ in range(2):
            assert "unclosed group" in (await refused(node, BROKEN)).message
        assert compiled == [DIGITS.text, BROKEN.text]
        await node.matcher(Grammar(kind=GrammarKind.REGEX, text="a"), [])
        await node.matcher(DIGITS, [])
        assert compiled == [DIGITS.text, BROKEN.text, "a", DIGITS.text]

    asyncio.run(scenario())


def test_a_matcher_follows_what_there_is_of_the_answer(tokenizer: Path) -> None:
    """And an answer that the grammar does not allow, which only its client can have made up, is refused."""

    async def scenario() -> None:
        node, tokens = make(tokenizer), Tokenizer.from_file(str(tokenizer))
        assert not (await node.matcher(DIGITS, [])).accepts
        assert (await node.matcher(DIGITS, tokens.encode("12").ids)).accepts
        error = await refused(node, DIGITS, tokens.encode("1x").ids)
        assert error.field == "output"

    asyncio.run(scenario())


def test_a_grammar_that_takes_too_long_is_refused_and_the_loop_goes_on(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind it wait no longer than they may either; once it is compiled, it is there."""
    monkeypatch.setattr(grammars, "COMPILE_MS_MAX", 20)
    go_on = threading.Event()
    real = GrammarCompiler.compile

    def compile_late(self: GrammarCompiler, grammar: Grammar) -> Matcher:
        assert go_on.wait(60)
        return real(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)

    async def scenario() -> None:
        node = make(tokenizer)
        try:
            errors = await asyncio.gather(refused(node, DIGITS), refused(node, BROKEN))
            assert [error.message for error in errors] == [LATE, LATE]
        finally:
            go_on.set()
        monkeypatch.setattr(grammars, "COMPILE_MS_MAX", 60_000)
        assert not (await node.matcher(DIGITS, [])).accepts

    asyncio.run(scenario())


def test_what_nobody_waits_for_any_more_is_not_compiled(
    tokenizer: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind one that takes long: else whoever has sent many and left would keep others from theirs."""
    go_on = threading.Event()
    real = GrammarCompiler.compile

    def compile_late(self: GrammarCompiler, grammar: Grammar) -> Matcher:
        assert go_on.wait(60)
        return real(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
    monkeypatch.setattr(grammars, "COMPILE_MS_MAX", 60_000)

    async def scenario() -> None:
        node = make(tokenizer)
        try:
            waits = asyncio.create_task(node.matcher(DIGITS, []))
            await asyncio.sleep(0)
            left = [asyncio.create_task(node.matcher(BROKEN, [])) for _ in range(2)]
            await asyncio.sleep(0)
            for task in left:
                task.cancel()
            await asyncio.wait(left)
            back = asyncio.create_task(node.matcher(Grammar(kind=GrammarKind.REGEX, text="a"), []))
            await asyncio.sleep(0)
        finally:
            go_on.set()
        await asyncio.gather(waits, back)
        assert compiled == [DIGITS.text, "a"]
        assert "unclosed group" in (await refused(node, BROKEN)).message

    asyncio.run(scenario())


def test_a_node_without_a_tokenizer_refuses_grammars() -> None:
    """The mock engine's tokens spell nothing."""
    error = asyncio.run(refused(make(None), DIGITS))
    assert (error.field, error.message) == (
        "sampling.grammar", "The grammar cannot be used: this node's engine has no tokenizer."
    )  # fmt: skip
