"""A node's grammars: compiled once each, off the loop, and refused with a reason."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
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


@pytest.fixture
def held(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is compiled until it is set."""
    go_on, real = threading.Event(), GrammarCompiler.compile

    def compile_late(self: GrammarCompiler, grammar: Grammar) -> Matcher:
        assert go_on.wait(60)
        return real(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
    yield go_on
    go_on.set()


def regex(text: str, *, source: int = 0) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text, source=source)


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
    monkeypatch.setattr(grammars, "KEPT_CHARS_MAX", 2 * grammars.KEPT_CHARS_EACH)

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
    tokenizer: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind it wait for their turn; once it is compiled, it is there."""
    monkeypatch.setattr(grammars, "COMPILE_MS_MAX", 20)

    async def scenario() -> None:
        node = make(tokenizer)
        try:
            behind = asyncio.create_task(node.matcher(BROKEN, []))
            assert [(await refused(node, DIGITS)).message for _ in range(2)] == [LATE, LATE]
            assert not behind.done()
        finally:
            monkeypatch.setattr(grammars, "COMPILE_MS_MAX", 60_000)
            held.set()
        with pytest.raises(BatonError, match="unclosed group"):
            await behind
        assert not (await node.matcher(DIGITS, [])).accepts

    asyncio.run(scenario())


def test_sources_take_turns(tokenizer: Path, compiled: list[str], held: threading.Event) -> None:
    """One that sends many grammars waits for them itself; a grammar that nobody waits for any more is not compiled."""

    async def scenario() -> None:
        node = make(tokenizer)
        flood = [asyncio.create_task(node.matcher(regex(f"a{i}", source=1), [])) for i in range(4)]
        await asyncio.sleep(0)
        others = [asyncio.create_task(node.matcher(regex("b", source=source), [])) for source in (2, 3)]
        await asyncio.sleep(0)
        flood[1].cancel()
        await asyncio.wait([flood[1]])
        held.set()
        await asyncio.gather(*others, flood[0], *flood[2:])
        assert compiled == ["a0", "b", "a2", "b", "a3"]

    asyncio.run(scenario())


def test_a_source_has_its_own_grammars(tokenizer: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has compiled tells another nothing, and many of one do not push out another's."""
    monkeypatch.setattr(grammars, "KEPT_CHARS_MAX", 3 * grammars.KEPT_CHARS_EACH)

    async def scenario() -> None:
        node = make(tokenizer)
        for text, source in (("a", 1), ("a", 2), ("b", 2), ("c", 2), ("d", 2), ("a", 1), ("d", 2), ("a", 2)):
            await node.matcher(regex(text, source=source), [])
        assert compiled == ["a", "a", "b", "c", "d", "a"]
        long = "a?" * grammars.KEPT_CHARS_EACH
        for text, source in ((long, 2), ("a", 1), (long, 2), ("d", 2)):  # it counts as two
            await node.matcher(regex(text, source=source), [])
        assert compiled[6:] == [long, "d"]

    asyncio.run(scenario())


def test_a_long_answer_is_followed_piece_by_piece(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token once."""
    monkeypatch.setattr(grammars, "REPLAY_TOKENS", 3)

    async def scenario() -> None:
        node, tokens = make(tokenizer), Tokenizer.from_file(str(tokenizer)).encode("7654321").ids
        for count in range(len(tokens) + 1):
            assert (await node.matcher(regex("7?6?5?4?3?2?1?"), tokens[:count])).accepts
            assert (await refused(node, regex("7?6?5?4?3?2?"), tokens)).field == "output"

    asyncio.run(scenario())


def test_a_node_without_a_tokenizer_refuses_grammars() -> None:
    """The mock engine's tokens spell nothing."""
    error = asyncio.run(refused(make(None), DIGITS))
    assert (error.field, error.message) == (
        "sampling.grammar", "The grammar cannot be used: this node's engine has no tokenizer."
    )  # fmt: skip
