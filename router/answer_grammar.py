"""The grammar of an answer with parts: reasoning, and calls of tools in the form in which its model writes them. Pure.

In llguidance's variant of Lark. A marker that is a token of its own is that token, never its letters: llguidance takes
such tokens for no text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.wire import JSON_WHITESPACE
from router.answer_forms import MARKERS, AnswerForm, ToolForm
from router.answer_reader import CALLS_MAX
from router.openai_tools import AskedTools

Json = Any
_ANY: Final = "(?s:.*)"
_EMPTY: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""What OpenAI takes a function without parameters for."""
_SPACE: Final = r"/[ \r\n]{1,8}/?"
_LINE: Final = r'"\n"'
_FENCE: Final = ("\n```json\n", "\n```")


def own_tokens(special: Mapping[int, str], added: Mapping[int, str]) -> dict[str, int]:
    """Of a tokenizer's added tokens those that llguidance takes for no text: they are called special, or look like
    tags."""
    tags = {id_: text for id_, text in added.items() if text.startswith("<") and text.endswith(">")}
    return {text: id_ for id_, text in {**tags, **special}.items()}


def answer_rules(
    form: AnswerForm, tokens: Mapping[str, int], asked: AskedTools, *, begun: bool = False, content: Json = None
) -> str | None:
    """What an answer to a chat may be, or None where the model's form leaves no way to say it.

    `tokens` as `own_tokens` has them; `begun`: the prompt has opened the reasoning; `content`, a schema, is what the
    answer is where it calls nothing, None: any text.
    """
    rules = _Rules(tokens)
    names = {tool["function"]["name"]: rules.arguments(tool["function"]) for tool in asked.callable}
    start: str | None
    if form.tools is ToolForm.HARMONY:
        start = _harmony(rules, names, asked, content)
    else:
        start = _calls(rules, form, names, asked, content)
        if start is not None and form.think is not None:
            start = f"{rules.reasoning(*form.think, begun=begun)} {start}"
    return None if start is None else "\n".join(["%llguidance {}", f"start: {start}", *rules.lines])


def _calls(rules: _Rules, form: AnswerForm, names: Mapping[str, str], asked: AskedTools, content: Json) -> str | None:
    said = None if content is None else rules.json("content", content)
    if not names:
        return None if said is None else f"{_SPACE} {said}"
    assert form.tools is not None
    begin, after = _FORMS[form.tools](rules, names, asked.several)
    calls = f"{rules.marker(begin)} {after}" if begin else after
    if asked.must:
        return f"{_SPACE} {calls}"
    if said is not None:  # llguidance cannot tell a call without a marker from other JSON
        return f"{_SPACE} ({calls} | {said})" if begin else f"{_SPACE} {said}"
    return f"({rules.up_to(begin)} {after} | {rules.without(begin)})" if begin else None


def _repeated(one: str, between: str, *, several: bool) -> str:
    return f"{one} ({between} {one}){{0,{CALLS_MAX - 1}}}" if several else one


def _objects(rules: _Rules, names: Mapping[str, str], key: str) -> str:
    each = [f"""{_text(f'{name}", "{key}": ')} {arguments}""" for name, arguments in names.items()]
    return rules.rule("object", f"""{_text('{"name": "')} ({" | ".join(each)}) {_text("}")}""")


def _hermes(rules: _Rules, names: Mapping[str, str], several: bool) -> tuple[str, str]:
    begin, end = MARKERS[ToolForm.HERMES]
    one = rules.rule("one", f"{_LINE} {_objects(rules, names, 'arguments')} {_LINE} {rules.marker(end)}")
    return begin, _repeated(one, f"{_LINE} {rules.marker(begin)}", several=several)


def _llama3(rules: _Rules, names: Mapping[str, str], several: bool) -> tuple[str, str]:
    return "", _repeated(_objects(rules, names, "parameters"), _text("; "), several=several)


def _mistral(rules: _Rules, names: Mapping[str, str], several: bool) -> tuple[str, str]:
    """Newer models have a token that stands before arguments: those may take either form."""
    begin, arguments_begin, _ = MARKERS[ToolForm.MISTRAL]
    objects = _repeated(_objects(rules, names, "arguments"), _text(", "), several=several)
    listed = f"{_text(' ')}? {_text('[')} {objects} {_text(']')}"
    if arguments_begin not in rules.tokens:
        return begin, listed
    marker = rules.marker(arguments_begin)
    one = rules.rule("one", " | ".join(f"{_text(name)} {marker} {arguments}" for name, arguments in names.items()))
    return begin, f"({listed} | {_repeated(one, rules.marker(begin), several=several)})"


def _deepseek(rules: _Rules, names: Mapping[str, str], several: bool) -> tuple[str, str]:
    """V3 and R1 write a type and a fence, V3.1 neither: a model takes the form that it knows."""
    begin, separator, end, calls_begin, calls_end = MARKERS[ToolForm.DEEPSEEK]
    between = rules.marker(separator)
    fenced = [f"{_text(name + _FENCE[0])} {arguments} {_text(_FENCE[1])}" for name, arguments in names.items()]
    bare = [f"{_text(name)} {between} {arguments}" for name, arguments in names.items()]
    each = f"{_text('function')} {between} ({' | '.join(fenced)}) | {' | '.join(bare)}"
    one = rules.rule("one", f"{rules.marker(begin)} ({each}) {rules.marker(end)}")
    return calls_begin, f"{_repeated(one, _LINE + '?', several=several)} {rules.marker(calls_end)}"


_Form = Callable[["_Rules", Mapping[str, str], bool], tuple[str, str]]
_FORMS: Final[Mapping[ToolForm, _Form]] = {
    ToolForm.HERMES: _hermes,
    ToolForm.LLAMA3: _llama3,
    ToolForm.MISTRAL: _mistral,
    ToolForm.DEEPSEEK: _deepseek,
}
"""The marker that calls begin with, if any, and what follows it."""


def _harmony(rules: _Rules, names: Mapping[str, str], asked: AskedTools, content: Json) -> str:
    """Messages in channels. A call is the last of them: the token behind it ends the answer."""
    message, start, end, _, _, channel, constrain = map(rules.marker, MARKERS[ToolForm.HARMONY])
    free = not asked.must and content is None
    kind = "/analysis|commentary|final/" if free else _text("analysis")
    said = f"{channel} {kind} {message} {rules.without('')}"
    last = []
    if names:
        head = f"{constrain} {_text('json')} {message}"
        each = " | ".join(f"{_text(name + ' ')} {head} {arguments}" for name, arguments in names.items())
        last.append(f"{channel} {_text('commentary to=functions.')} ({each})")
    if free:
        last.append(said)
    elif not asked.must:
        last.append(f"{channel} {_text('final')} {message} {rules.json('content', content)}")
    return f"({said} {end} {start} {_text('assistant')}){'*' if free else '?'} ({' | '.join(last)})"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    return re.sub(r"([\[\](){}.*+?^$|\\/])", r"\\\1", text)


@dataclass(slots=True)
class _Rules:
    """Rules so far, beside the one to start with."""

    tokens: Mapping[str, int]
    lines: list[str] = field(default_factory=list)

    def rule(self, name: str, body: str) -> str:
        """Returns its name."""
        self.lines.append(f"{name}: {body}")
        return name.partition("[")[0]

    def json(self, name: str, schema: Mapping[str, Json], *, lenient: bool = False) -> str:
        how = {"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient}
        text = json.dumps({**schema, "x-guidance": how}, ensure_ascii=False, separators=(",", ":"))
        return self.rule(name, f"%json {text}")

    def arguments(self, function: Mapping[str, Json]) -> str:
        """What a schema says that cannot be enforced is only refused where it is to be."""
        schema = {**(function.get("parameters") or _EMPTY), "type": "object"}
        return self.json(f"arguments_{len(self.lines)}", schema, lenient=function.get("strict") is not True)

    def marker(self, text: str) -> str:
        return f"<[{self.tokens[text]}]>" if text in self.tokens else _text(text)

    def up_to(self, text: str) -> str:
        """Any text, and the first such marker."""
        if text in self.tokens:
            return f"{self.without(text)} {self.marker(text)}"
        return self.rule("before[lazy]", f"/{_ANY}{_regex(text)}/")

    def without(self, text: str) -> str:
        """Any text that spells no such marker."""
        but = f" & ~/{_ANY}{_regex(text)}{_ANY}/" if text else ""
        line = f"TEXT: /{_ANY}/{but}"
        if line not in self.lines:
            self.lines.append(line)
        return "TEXT"

    def reasoning(self, opens: str, closes: str, *, begun: bool) -> str:
        if closes in self.tokens:
            text = f"{self.rule('REASONS', f'/{_ANY}/')} {self.marker(closes)}"
        else:
            text = self.rule("reasons[lazy]", f"/{_ANY}{_regex(closes)}/")
        return text if begun else f"({self.marker(opens)} {text})?"
