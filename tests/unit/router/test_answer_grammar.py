"""Answers that have to be calls: whatever is drawn by the grammar of a form is read as calls that the schemas allow."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from batonpb import common_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from baton.errors import BatonError
from engine.grammar import GrammarCompiler, Matcher
from engine.types import Grammar, GrammarKind
from router.answer_forms import AnswerForm, AnswerParser, ToolForm
from router.answer_grammar import answer_rules, own_tokens
from router.answer_reader import PieceKind
from router.chat_template import ChatTemplate
from router.openai_tools import AskedTools
from router.prompts import PromptEncoder
from router.text import TextCodec
from router.text_jobs import parse_call
from tests.support.chat_tokenizers import END, added, byte_level
from tests.support.schemas import TOKENS_MAX, draw_schema

TAGS: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
DEEPSEEK: Final = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                   "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")  # fmt: skip
SPECIAL: Final = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>",
                  "<|return|>", "<|channel|>", "<|constrain|>")  # fmt: skip
TAGGED: Final = ("<think>", "</think>")
FORMS: Final = [
    (AnswerForm(tools=ToolForm.HERMES), "tags"),
    (AnswerForm(tools=ToolForm.HERMES, think=TAGGED), "tags"),
    (AnswerForm(tools=ToolForm.HERMES, think=TAGGED), "letters"),
    (AnswerForm(tools=ToolForm.LLAMA3), "special"),
    (AnswerForm(tools=ToolForm.MISTRAL), "special"),
    (AnswerForm(tools=ToolForm.MISTRAL), "letters"),
    (AnswerForm(tools=ToolForm.DEEPSEEK, think=TAGGED), "tags"),
    (AnswerForm(tools=ToolForm.HARMONY), "special"),
]
NAMES: Final = [f"{form.tools.value} {kind}" for form, kind in FORMS if form.tools is not None]
CITY: Final = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}, "required": ["city"],
               "additionalProperties": False}  # fmt: skip


class Model:
    """A tokenizer whose markers are special tokens, tags or letters."""

    def __init__(self, folder: Path, kind: str) -> None:
        special = [added(text) for text in SPECIAL] if kind == "special" else []
        tags = [added(text, special=False) for text in (*TAGS, *DEEPSEEK)] if kind == "tags" else []
        tokenizer = byte_level(*special, *tags)
        path = folder / f"{kind}.json"
        tokenizer.save(str(path))
        self.tokenizer = Tokenizer.from_file(str(path))
        eos = self.tokenizer.token_to_id(END)
        assert eos is not None
        self.eos: int = eos
        self.compiler = GrammarCompiler(
            path, vocab_size=self.tokenizer.get_vocab_size(), eos_token_ids=frozenset({self.eos})
        )
        codec = TextCodec(self.tokenizer)
        self.tokens = own_tokens(codec.special, codec.added)
        self.markers = {*self.tokens.values(), self.eos}

    def matcher(self, rules: str | None) -> Matcher:
        assert rules is not None
        return self.compiler.compile(Grammar(kind=GrammarKind.RULES, text=rules))

    def draw(self, rules: str | None, chance: random.Random, *, begins: str) -> str:
        """A random answer that the grammar allows; markers are likelier than letters, or free text would not end."""
        matcher, ids = self.matcher(rules), list(self.tokenizer.encode(begins, add_special_tokens=False).ids)
        matcher.follow(ids, 0, len(ids))
        while len(ids) < 2 * TOKENS_MAX:
            mask = np.frombuffer(matcher.matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            marks = [token for token in allowed if token in self.markers]
            token = int(chance.choice(marks if marks and chance.random() < 0.2 else list(allowed)))
            if token == self.eos:
                return self.text(ids)
            ids.append(token)
            matcher.follow(ids, 0, len(ids))
        raise AssertionError(f"no end: {self.text(ids)[-300:]}")

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def allows(self, rules: str | None, text: str) -> str:
        """How much of the text, and whether it may end there."""
        matcher, ids = self.matcher(rules).matcher, self.tokenizer.encode(text, add_special_tokens=False).ids
        for i, token in enumerate(ids):
            if not matcher.try_consume_tokens([token]):
                return self.text(ids[:i])
        return "all" if matcher.is_accepting() else text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda kind: Model(tmp_path_factory.mktemp("tokenizers"), kind))


def tool(name: str, schema: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **({"parameters": schema} if schema is not None else {}), **more}
    return {"type": "function", "function": function}


def calls_of(text: str, form: AnswerForm, *, begun: bool = False) -> tuple[list[list[str]], str]:
    """Names and arguments, and the content."""
    parser = AnswerParser(form, tools=True, begun=begun)
    found, content = list[list[str]](), ""
    for piece in (*parser.feed(text), *parser.end()):
        if piece.kind is PieceKind.CALL:
            found.append([piece.text, ""])
        elif piece.kind is PieceKind.ARGUMENTS:
            found[piece.call][1] += piece.text
        elif piece.kind is PieceKind.CONTENT:
            content += piece.text
    return found, content


@pytest.mark.parametrize(("form", "kind"), FORMS, ids=NAMES)
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 32), named=st.booleans(), parallel=st.booleans(), begun=st.booleans())
def test_whatever_is_drawn_is_calls(
    models: Any, form: AnswerForm, kind: str, seed: int, named: bool, parallel: bool, begun: bool
) -> None:
    """At least one call, no content, arguments by the schema of their function; one where one is asked for."""
    chance, model = random.Random(seed), models(kind)
    schemas = {name: object_schema(chance) for name in ("get_time", "f", "a.b-c")}
    asked = AskedTools(
        tools=[tool(*each) for each in schemas.items()], parallel=parallel, must=True, named="f" if named else ""
    )
    begun = begun and form.think is not None
    rules = answer_rules(form, model.tokens, asked, begun=begun)
    begins = "" if form.think is None else "So.</think>" if begun else "<think>So.</think>"
    text = model.draw(rules, chance, begins=begins if kind == "letters" or chance.random() < 0.5 else "")
    found, content = calls_of(text, form, begun=begun)
    assert (bool(found), content) == (True, ""), text
    assert len(found) == 1 or asked.several, text
    for name, arguments in found:
        assert not named or name == "f"
        jsonschema.validate(json.loads(arguments), schemas[name])


def object_schema(chance: random.Random) -> dict[str, Any]:
    while True:
        schema = draw_schema(chance, depth=2)
        if schema["type"] == "object":
            return schema


@pytest.mark.parametrize(("form", "kind"), FORMS, ids=NAMES)
def test_a_strict_function_among_others(models: Any, form: AnswerForm, kind: str) -> None:
    """Without a tool that must be called, any text is allowed, and behind it calls: the strict function's arguments are
    its schema's, others' any object. Llama's calls begin like any JSON: nothing is said of them."""
    asked = AskedTools(tools=[tool("f", CITY, strict=True), tool("g", {"required": ["x"]})])
    model = models(kind)
    rules = answer_rules(form, model.tokens, asked)
    if form.tools is ToolForm.LLAMA3:
        assert rules is None
        return
    before, call = WRITTEN[form.tools]
    if kind == "letters" and form.tools is ToolForm.MISTRAL:
        call = '[TOOL_CALLS][{"name": "%s", "arguments": %s}]'
    assert model.allows(rules, f"{before}Well: 1 < 2 [TOOL") == "all"
    said = "" if form.tools is ToolForm.HARMONY else "Well.\n"
    for name, arguments in (("f", '{"city": "Rome"}'), ("g", '{ "x": [1, {"y": null}]}')):
        assert model.allows(rules, said + call % (name, arguments)) == "all"
    good = said + call % ("f", '{"city": "Rome"}')
    for bad in (good.replace('"Rome"', "5"), good.replace("city", "town"), good.replace("f", "h", 1)):
        shared = next(i for i, (one, other) in enumerate(zip(good, bad, strict=False)) if one != other)
        assert good.startswith(model.allows(rules, bad)) and model.allows(rules, bad) != "all", bad
        assert len(model.allows(rules, bad)) <= shared
    if form.think is not None:
        assert model.allows(rules, f"<think>\nSo <\n</think>\n\n{good}") == "all"


WRITTEN: Final[Any] = {
    ToolForm.HERMES: ("", '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'),
    ToolForm.MISTRAL: ("", "[TOOL_CALLS]%s[ARGS]%s"),
    ToolForm.DEEPSEEK: (
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ToolForm.HARMONY: (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>%s",
    ),
}


@pytest.mark.parametrize(("form", "kind"), FORMS, ids=NAMES)
def test_an_answer_with_a_schema_may_be_a_call_instead(models: Any, form: AnswerForm, kind: str) -> None:
    """With tools that may be called, and the content's schema; reasoning goes before both."""
    model, schema = models(kind), {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = AskedTools(tools=[tool("f", CITY)])
    for tools in (asked, AskedTools()):
        rules = answer_rules(form, model.tokens, tools, content=schema)
        final = "<|channel|>final<|message|>" if form.tools is ToolForm.HARMONY else ""
        assert model.allows(rules, final + '{"n": 12}') == "all"
        assert model.allows(rules, final + '{"n": "x') == final + '{"n": '
        if form.think is not None:
            assert model.allows(rules, '<think>n<</think>\n\n{"n": 12}') == "all"
            begun = answer_rules(form, model.tokens, tools, content=schema, begun=True)
            assert model.allows(begun, 'So.</think>{"n": 12}') == "all"
    if form.tools is ToolForm.LLAMA3:  # there is no telling such calls from other JSON
        return
    written = WRITTEN[form.tools][1]
    if (form.tools, kind) == (ToolForm.MISTRAL, "letters"):
        written = '[TOOL_CALLS][{"name": "%s", "arguments": %s}]'
    rules = answer_rules(form, model.tokens, asked, content=schema)
    assert model.allows(rules, written % ("f", '{"city": "Rome"}')) == "all"


def test_tokens_that_are_no_text_for_the_library(models: Any) -> None:
    """Those that are called special, and those that look like tags: as `own_tokens` has it."""
    from llguidance import LLTokenizer

    tokenizer = byte_level(added("[X]"), *[added(text, special=False) for text in ("<a>", "[Y]", "<b", "c>", "<|d|>")])
    codec, library = TextCodec(tokenizer), LLTokenizer(tokenizer.to_str())
    texts = {**codec.special, **codec.added}
    assert {texts[id_] for id_ in texts if library.is_special_token(id_)} == {*own_tokens(codec.special, codec.added)}


def test_functions_without_parameters_and_schemas_with_more_than_can_be_held_to(models: Any) -> None:
    """No parameters are none. A keyword that the library does not know is refused where the function is strict."""
    form, model = AnswerForm(tools=ToolForm.HERMES), models("tags")
    odd = {"properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    asked = AskedTools(tools=[tool("f"), tool("g", odd)], must=True)
    rules = answer_rules(form, model.tokens, asked)
    call = WRITTEN[ToolForm.HERMES][1]
    assert model.allows(rules, call % ("f", "{}")) == "all"
    assert model.allows(rules, call % ("f", '{"a')).endswith("{")
    assert model.allows(rules, call % ("g", '{"a": [1, 1]}')) == "all"
    from engine.grammar import GrammarError

    with pytest.raises(GrammarError, match="uniqueItems"):
        model.matcher(answer_rules(form, model.tokens, AskedTools(tools=[tool("g", odd, strict=True)], must=True)))


TEMPLATE: Final = (
    "{{ tools }}<tool_call></think>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:\n"
)


def parsed(template: str = TEMPLATE, **body: Any) -> common_pb2.Grammar | None:
    tokenizer = byte_level(*[added(text, special=False) for text in TAGS])
    prompts = PromptEncoder(codec=TextCodec(tokenizer), template=ChatTemplate(template, {}), chars_max=10_000)
    raw = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    (request,) = parse_call(prompts, raw, True, False, 100_000).requests
    return request.sampling.grammar if request.sampling.HasField("grammar") else None


def test_what_a_body_asks_for() -> None:
    """A grammar where a call is asked for, where a function is strict, and around a schema; else the client's."""
    tools = [tool("f", CITY), tool("g")]
    named = {"type": "function", "function": {"name": "g"}}
    answer: Any = {"type": "json_schema", "json_schema": {"schema": CITY}}
    assert parsed(tools=tools) is None
    assert parsed(tools=tools, tool_choice="none") is None
    assert parsed(tools=tools, guided_regex="a") == common_pb2.Grammar(regex="a")
    both = parsed(tools=tools, tool_choice="required")
    one = parsed(tools=tools, tool_choice=named)
    assert both is not None and one is not None
    assert ('\\"f' in both.rules or 'f\\"' in both.rules, "city" in both.rules, "city" in one.rules) == (
        True,
        True,
        False,
    )
    strict = parsed(tools=[tool("f", CITY, strict=True)])
    assert strict is not None and "TEXT" in strict.rules
    shaped = parsed(response_format=answer)
    assert shaped is not None and "content: %json" in shaped.rules and "</think>" not in shaped.rules
    assert parsed(json_schema="{") == common_pb2.Grammar(json_schema="{")
    plain = TEMPLATE.replace("</think>", "").replace("<tool_call>", "")
    assert parsed(plain + "{# [TOOL_CALLS] #}", response_format=answer) is not None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [tool("f"), tool("g", strict="yes")]}, "tools.1.function.strict"),
        ({"tools": [tool("f")], "tool_choice": "required", "guided_choice": ["a"]}, "guided_choice"),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "f"}},
          "response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(BatonError) as caught:
        parsed(**body)
    assert caught.value.field == field
