"""The forms in which models write calls of tools and reasoning: which one a model has, and their parsers. Pure.

A call that is none after all, as its JSON is broken before it has a name and arguments, is content, as it was written.
One that breaks later has the arguments that came until then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from router.answer_reader import ARGUMENTS_CHARS_MAX, CALLS_MAX, HEAD_CHARS_MAX, Piece, PieceKind, Reader, Steps


class ToolForm(Enum):
    """How a model writes calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`: Hermes, Qwen 2.5 and 3."""
    LLAMA3 = "llama3"
    """`{"name": ..., "parameters": ...}` as the answer's beginning, or behind `<|python_tag|>`."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": ...}]`, or `[TOOL_CALLS]NAME[ARGS]{...}`."""
    DEEPSEEK = "deepseek"
    """DeepSeek V3, R1 and V3.1: markers around type, name and arguments."""
    HARMONY = "harmony"
    """gpt-oss: messages to recipients, in channels. Reasoning is a channel too."""


MARKERS: Final[Mapping[ToolForm, tuple[str, ...]]] = {
    ToolForm.HERMES: ("<tool_call>", "</tool_call>"),
    ToolForm.LLAMA3: ("<|python_tag|>",),
    ToolForm.MISTRAL: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ToolForm.DEEPSEEK: (
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    ),
    ToolForm.HARMONY: (
        "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|constrain|>"
    ),
}  # fmt: skip
_THINK: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Qwen 3, DeepSeek R1 and V3.1; Magistral."""
_ARGUMENTS: Final = frozenset({'"arguments"', '"parameters"'})
_SPACES: Final = " \t\r\n"
_BETWEEN: Final = " \t\r\n;,"
_NAME_LETTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./")


def _object(reader: Reader, *, marked: bool = True) -> Steps[str]:
    """An object with a name and arguments, which begins with the next character. Returns "" where it was a call, whole
    or broken, else what was read. Without `marked` a name alone is no call."""
    held, name, arguments, called = reader.next(), "", "", False
    while len(held) < ARGUMENTS_CHARS_MAX:
        held += yield from reader.space()
        char = yield from reader.peek()
        if char == "}":
            held += reader.next()
            break
        if char != '"':
            return "" if called else held
        key, whole = yield from reader.value()
        held += key + (yield from reader.space())
        if not whole or (yield from reader.peek()) != ":":
            return "" if called else held
        held += reader.next() + (yield from reader.space())
        if key in _ARGUMENTS and name and not called and (yield from reader.peek()) == "{":
            called = True
            reader.call(name)
            whole = yield from reader.json(reader.arguments)
        else:
            value, whole = yield from reader.value()
            held += value
            name = _string(value) if key == '"name"' else name
            arguments = value if key in _ARGUMENTS else arguments
        if not whole:
            return "" if called else held
        held += yield from reader.space()
        if (yield from reader.peek()) == ",":
            held += reader.next()
    if called or not 0 < len(name) <= HEAD_CHARS_MAX or not (arguments or marked):
        return "" if called else held
    reader.call(name)
    reader.arguments("{}" if arguments in ("", "null") else _string(arguments) or arguments)
    return ""


def _string(value: str) -> str:
    """Of JSON; "" where it is none."""
    try:
        text = json.loads(value) if value.startswith('"') else ""
        text.encode()  # JSON can spell halves of characters
    except ValueError:
        return ""
    return str(text)


def _hermes(reader: Reader) -> Steps[None]:
    begin, end = MARKERS[ToolForm.HERMES]
    while marker := (yield from reader.until(begin)):
        held = marker + (yield from reader.space())
        if (yield from reader.peek()) == "{":
            if not (raw := (yield from _object(reader))):
                yield from reader.skip(begin, end)  # some models close one brace too many
                yield from reader.optional(end)
                continue
            held += raw
        reader.say(held)


def _llama3(reader: Reader) -> Steps[None]:
    (tag,) = MARKERS[ToolForm.LLAMA3]
    marker = ""
    while True:
        yield from _objects(reader, marker, marked=bool(marker))
        if not (marker := (yield from reader.until(tag))):
            return


def _objects(reader: Reader, before: str, *, marked: bool) -> Steps[None]:
    """Calls, one behind the other. What is none of them is content, with what was read `before`."""
    held, called = before + (yield from reader.run(_BETWEEN)), False
    while (yield from reader.peek()) == "{":
        if raw := (yield from _object(reader, marked=marked)):
            reader.say(held + raw)
            return
        called, held = True, (yield from reader.run(_BETWEEN))
    if not called or (yield from reader.peek()) not in ("", "]"):
        reader.say(held)


def _mistral(reader: Reader) -> Steps[None]:
    begin, arguments, call_id = MARKERS[ToolForm.MISTRAL]
    while marker := (yield from reader.until(begin)):
        held = marker + (yield from reader.space())
        char = yield from reader.peek()
        if char == "[":
            calls = reader.calls
            yield from _objects(reader, held + reader.next(), marked=True)
            if reader.calls > calls and (yield from reader.peek()) == "]":
                reader.next()
            continue
        if char == "{":
            yield from _objects(reader, held, marked=True)
            continue
        name = yield from reader.run(_NAME_LETTERS)
        held += name
        if (yield from reader.optional(call_id)):
            held += call_id + (yield from reader.run(_NAME_LETTERS))
        if (yield from reader.optional(arguments)):
            held += arguments
        held += yield from reader.space()
        if name and (yield from reader.peek()) == "{":
            reader.call(name)
            yield from reader.json(reader.arguments)
        else:
            reader.say(held)


def _deepseek(reader: Reader) -> Steps[None]:
    begin, separator, *others = MARKERS[ToolForm.DEEPSEEK]
    while marker := (yield from reader.until(begin, *others)):
        if marker != begin:
            continue
        name, found = yield from reader.head(separator)
        held = marker + name + (separator if found else "")
        if found and name.strip() == "function":
            name, found = yield from reader.head("\n")
            held += name + ("\n" if found else "")
        fence = "" if not found else (yield from reader.run(f"`json{_SPACES}"))
        if found and name.strip() and (yield from reader.peek()) == "{":
            reader.call(name.strip())
            yield from reader.json(reader.arguments)
            yield from reader.skip(begin, *others)
        else:
            reader.say(held + fence)


_RECIPIENT: Final = re.compile(r"to=functions\.([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")


def _harmony(reader: Reader) -> Steps[None]:
    """A message is a head, `<|message|>`, and a text that ends with a token. The first head began in the prompt."""
    message, *ends = MARKERS[ToolForm.HARMONY][:5]
    reader.turn(PieceKind.CONTENT)
    while True:
        head, found = yield from reader.head(message)
        if not found:
            reader.say(head)
            return (yield from reader.rest())
        channel = _CHANNEL.search(head)
        if recipient := _RECIPIENT.search(head):
            reader.call(recipient[1])
            yield from reader.space()
            yield from reader.json(reader.arguments)
            yield from reader.skip(*ends)
        else:
            thinks = channel is not None and channel[1] == "analysis"
            reader.turn(PieceKind.REASONING if thinks else PieceKind.CONTENT)
        end = yield from reader.until(*ends)
        if end != ends[0] and not (yield from reader.optional(ends[0])):
            if (yield from reader.peek()):
                continue
            return None


def _think(reader: Reader, open_tag: str, close_tag: str, *, begun: bool) -> Steps[None]:
    """Reasoning in front of the answer. `begun`: the prompt has opened it."""
    space = yield from reader.space()
    if not (yield from reader.optional(open_tag)) and not begun:
        reader.say(space)
        return
    reader.turn(PieceKind.REASONING)
    yield from reader.until(close_tag)
    reader.turn(PieceKind.CONTENT)


_FORMS: Final[Mapping[ToolForm, Callable[[Reader], Steps[None]]]] = {
    ToolForm.HERMES: _hermes,
    ToolForm.LLAMA3: _llama3,
    ToolForm.MISTRAL: _mistral,
    ToolForm.DEEPSEEK: _deepseek,
    ToolForm.HARMONY: _harmony,
}


class AnswerParser:
    """Of one answer. Its state is a function of the text so far: made anew, and fed the same text, it goes on."""

    def __init__(
        self, form: AnswerForm, *, tools: bool, parallel: bool = True, begun: bool = False, reasoning: bool = True
    ) -> None:
        """Without `tools` only reasoning is read, without `parallel` one call. `begun`: the prompt has opened the
        reasoning. Without `reasoning` it is read and dropped."""
        self._reader = Reader(calls_max=0 if not tools else CALLS_MAX if parallel else 1, reasoning=reasoning)
        self._steps = self._read(form, tools=tools, begun=begun)

    def _read(self, form: AnswerForm, *, tools: bool, begun: bool) -> Steps[None]:
        reader = self._reader
        if form.think is not None:
            yield from _think(reader, *form.think, begun=begun)
        if form.tools is not None and (tools or form.tools is ToolForm.HARMONY):
            yield from _FORMS[form.tools](reader)
        yield from reader.rest()
        reader.over()

    @property
    def calls(self) -> int:
        """That have begun."""
        return self._reader.calls

    def feed(self, text: str) -> list[Piece]:
        """What the next part of the answer adds."""
        if not text:
            return []
        self._reader.feed(text)
        next(self._steps)
        return self._reader.take_pieces()

    def end(self) -> list[Piece]:
        """What was held back, when nothing more comes. Called once."""
        self._reader.end()
        for _ in self._steps:
            raise AssertionError("an ended answer needs no more text")
        return self._reader.take_pieces()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How a model writes what is not content."""

    tools: ToolForm | None = None
    """None: it is not known, or the model knows no calls."""
    think: tuple[str, str] | None = None
    """What opens and closes reasoning."""

    @classmethod
    def of(cls, template: str, tokens: Collection[str], *, tools: ToolForm | None = None) -> AnswerForm:
        """That of a chat template's source and the texts of a tokenizer's tokens of their own, unless `tools` names
        it."""
        if tools is None:
            tools = _form_of(template)
        if tools is ToolForm.HARMONY:
            return cls(tools=tools)
        think = next((tags for tags in _THINK if tags[1] in tokens or tags[1] in template), None)
        return cls(tools=tools, think=think)

    @property
    def markers(self) -> frozenset[str]:
        """A parser must see them, even where they are special tokens, which answers leave out."""
        return frozenset((*(MARKERS[self.tools] if self.tools is not None else ()), *(self.think or ())))

    @property
    def splits(self) -> bool:
        """Whether an answer may have parts that are not content without calls."""
        return self.think is not None or self.tools is ToolForm.HARMONY


def _form_of(template: str) -> ToolForm | None:
    if "<|channel|>" in template and "<|message|>" in template:
        return ToolForm.HARMONY
    if "<｜tool▁call▁begin｜>" in template:
        return ToolForm.DEEPSEEK
    if "[TOOL_CALLS]" in template:
        return ToolForm.MISTRAL
    if "<tool_call>" in template:
        # Qwen 3 Coder and GLM write something else than JSON between the same tags.
        return None if "<function=" in template or "<arg_key>" in template else ToolForm.HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return ToolForm.LLAMA3
    return None
