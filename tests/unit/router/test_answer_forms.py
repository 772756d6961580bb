"""router.answer_forms: what of an answer is content, reasoning and calls; whole, broken, cut, and in any split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.answer_forms import AnswerForm, AnswerParser, ToolForm
from router.answer_reader import ARGUMENTS_CHARS_MAX, CALLS_MAX, HELD_SPACES_MAX, Piece, PieceKind

THINK: Final = ("<think>", "</think>")
Joined = list[tuple[str, str]]
"""Names of kinds, with the number of a call, and texts."""


def parser(form: ToolForm | None, *, think: bool = False, **how: bool) -> AnswerParser:
    return AnswerParser(AnswerForm(tools=form, think=THINK if think else None), **{"tools": True, **how})


def join(pieces: Sequence[Piece]) -> Joined:
    joined: Joined = []
    for piece in pieces:
        name = piece.kind.name.lower()
        if piece.kind in (PieceKind.CALL, PieceKind.ARGUMENTS):
            name += f" {piece.call}"
        if joined and joined[-1][0] == name and piece.kind is not PieceKind.CALL:
            name, text = joined.pop()
            joined.append((name, text + piece.text))
        else:
            joined.append((name, piece.text))
    return joined


def read(text: str, form: ToolForm | None, **how: bool) -> Joined:
    """Whole, and a character at a time: what has been said by each place is the same, however much came at once."""
    whole = parser(form, **how)
    pieces = [*whole.feed(text), *whole.end()]
    by_one, said = parser(form, **how), list[Piece]()
    for i, char in enumerate(text, start=1):
        said += by_one.feed(char)
        if i % max(1, len(text) // 40) == 0:
            assert join(said) == join(parser(form, **how).feed(text[:i])), text[:i]
    said += by_one.end()
    assert join(said) == join(pieces)
    return join(pieces)


def call(number: int, name: str, arguments: str) -> Joined:
    return [(f"call {number}", name), (f"arguments {number}", arguments)]


A: Final = '{"city": "Köln", "why": "a } in \\"it\\" {", "l": [1, {"x": []}]}'
HERMES: Final = f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>'
DEEPSEEK: Final = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{A}\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("tools", "text", "wanted"),
    [
        (ToolForm.HERMES, HERMES, call(0, "f", A)),
        (
            ToolForm.HERMES,
            f"Let me look.\n{HERMES}\n{HERMES}\nThat is all. ",
            [("content", "Let me look."), *call(0, "f", A), *call(1, "f", A), ("content", "\n\n\nThat is all.")],
        ),
        (ToolForm.HERMES, '<tool_call>{"arguments": {"a":1} , "name": "f"}</tool_call>', call(0, "f", '{"a":1}')),
        (ToolForm.HERMES, '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
        (ToolForm.HERMES, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', call(0, "f", '{"a": 1}')),
        (ToolForm.HERMES, '<tool_call>{"name":"f","arguments":null}</tool_call>', call(0, "f", "{}")),
        # One brace too many, one too few, an inner one too few.
        (ToolForm.HERMES, '<tool_call>{"name":"f","arguments":{}}}</tool_call>a',
         [*call(0, "f", "{}"), ("content", "a")]),
        (ToolForm.HERMES, '<tool_call>{"name":"f","arguments":{}</tool_call>a',
         [*call(0, "f", "{}"), ("content", "a")]),
        (ToolForm.HERMES, f'<tool_call>{{"name":"g","arguments":{{"a":1</tool_call>{HERMES}',
         [*call(0, "g", '{"a":1'), *call(1, "f", A)]),
        # None at all.
        (ToolForm.HERMES, "<tool_call>f(1)</tool_call>", [("content", "<tool_call>f(1)</tool_call>")]),
        (ToolForm.HERMES, '<tool_call>{"nam', [("content", '<tool_call>{"nam')]),
        (ToolForm.HERMES, "1 <2 <tool_ calls ", [("content", "1 <2 <tool_ calls ")]),
        (ToolForm.HERMES, '<tool_call>{"name":"f","arguments":{"a":"b', call(0, "f", '{"a":"b')),
        (ToolForm.LLAMA3, f'{{"name": "f", "parameters": {A}}}', call(0, "f", A)),
        (ToolForm.LLAMA3, f'<|python_tag|>{{"name": "f", "parameters": {A}}}; {{"name": "g", "parameters": {{}}}}\n',
         [*call(0, "f", A), *call(1, "g", "{}")]),
        (ToolForm.LLAMA3, f'I call: <|python_tag|>{{"type": "function", "name": "f", "parameters": {A}}}',
         [("content", "I call:"), *call(0, "f", A)]),
        (ToolForm.LLAMA3, '{"name": "Ann", "age": 3}', [("content", '{"name": "Ann", "age": 3}')]),
        (ToolForm.LLAMA3, ' {"a": 1}\n', [("content", ' {"a": 1}\n')]),
        (ToolForm.LLAMA3, 'As {"name": "f", "parameters": {}}', [("content", 'As {"name": "f", "parameters": {}}')]),
        (ToolForm.LLAMA3, "<|python_tag|>print(1)", [("content", "<|python_tag|>print(1)")]),
        (ToolForm.MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}, {{"name": "g", "arguments": {{}}}}]',
         [*call(0, "f", A), *call(1, "g", "{}")]),
        (ToolForm.MISTRAL, f'Well.[TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]g[CALL_ID]a1[ARGS]{{}}',
         [("content", "Well."), *call(0, "f", A), *call(1, "g", "{}")]),
        (ToolForm.MISTRAL, "[TOOL_CALLS][]", [("content", "[TOOL_CALLS][]")]),
        (ToolForm.MISTRAL, "[TOOL_CALLS] none", [("content", "[TOOL_CALLS] none")]),
        (ToolForm.DEEPSEEK, f"Look:<｜tool▁calls▁begin｜>{DEEPSEEK}\n{DEEPSEEK}<｜tool▁calls▁end｜>",
         [("content", "Look:"), *call(0, "f", A), *call(1, "f", A)]),
        (ToolForm.DEEPSEEK,
         f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{A}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
         call(0, "f", A)),
        (ToolForm.DEEPSEEK, "<｜tool▁call▁begin｜>f", [("content", "<｜tool▁call▁begin｜>f")]),
        (ToolForm.HARMONY,
         "<|channel|>analysis<|message|> Hm. <|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
         [("reasoning", "Hm."), ("content", "Yes.")]),
        (ToolForm.HARMONY, f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{A}<|call|>",
         call(0, "f", A)),
        (ToolForm.HARMONY,
         "<|channel|>commentary<|message|>I look.<|end|>"
         f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{A}",
         [("content", "I look."), *call(0, "f", A)]),
        (ToolForm.HARMONY, "No head", [("content", "No head")]),
    ],
)  # fmt: skip
def test_calls_in_their_forms(tools: ToolForm, text: str, wanted: Joined) -> None:
    """With text around them, strings that have braces, JSON that is broken or cut, and what only looks like a call."""
    assert read(text, tools) == wanted


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_stands_before_the_answer(begun: bool) -> None:
    """Opened by the answer or by the prompt; the white space around it is none of it, and calls within it are none."""
    text = f"{'' if begun else '<think>'}\n{HERMES} 1 < 2\n</think>\n\nYes.\n{HERMES}"
    wanted = [("reasoning", f"{HERMES} 1 < 2"), ("content", "Yes."), *call(0, "f", A)]
    assert read(text, ToolForm.HERMES, think=True, begun=begun) == wanted
    assert read(text, None, think=True, begun=begun, tools=False) == [wanted[0], ("content", f"Yes.\n{HERMES}")]
    cut = "<think>so" if not begun else "so"
    assert read(cut, None, think=True, begun=begun) == [("reasoning", "so")]


def test_an_answer_without_reasoning_is_content_as_it_was_written() -> None:
    assert read("\n Yes. <think> \n", ToolForm.HERMES, think=True) == [("content", "\n Yes. <think> \n")]
    assert read(" \n", None, think=True) == [("content", " \n")]


def test_one_call_where_clients_want_one() -> None:
    """The text of the others is dropped."""
    assert read(f"{HERMES}\n{HERMES}", ToolForm.HERMES, parallel=False) == call(0, "f", A)


def test_the_limits_of_calls() -> None:
    """One call too many is dropped; arguments that are too long are cut, and the answer goes on behind them."""
    text = '<tool_call>{"name":"f"}</tool_call>' * (CALLS_MAX + 1) + "end"
    made = parser(ToolForm.HERMES)
    pieces = join([*made.feed(text), *made.end()])
    assert (len(pieces), pieces[-2:]) == (2 * CALLS_MAX + 1, [(f"arguments {CALLS_MAX - 1}", "{}"), ("content", "end")])
    long = '{"a": "' + "x" * ARGUMENTS_CHARS_MAX + '"}'
    for size in (1 << 10, 1 << 30):
        made = parser(ToolForm.HERMES)
        text = f'<tool_call>{{"name": "f", "arguments": {long}}}</tool_call>end'
        parts = [piece for at in range(0, len(text), size) for piece in made.feed(text[at : at + size])]
        assert join([*parts, *made.end()]) == [*call(0, "f", long[:ARGUMENTS_CHARS_MAX]), ("content", "end")]


def test_white_space_is_held_no_longer_than_it_must_be() -> None:
    made = parser(ToolForm.HERMES)
    assert join(made.feed("a" + " " * 2 * HELD_SPACES_MAX)) == [("content", "a" + " " * HELD_SPACES_MAX)]
    assert join(made.end()) == [("content", " " * HELD_SPACES_MAX)]


_json: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
    | st.sampled_from(["</tool_call>", '{"', "}", "\\", '\\"', "[TOOL_CALLS]", "<think>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
_arguments: Final = st.builds(
    json.dumps, st.dictionaries(st.text(max_size=6), _json, max_size=3), ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 2]),
)  # fmt: skip
_calls: Final = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), _arguments), max_size=3)


def written(tools: ToolForm, calls: Sequence[tuple[str, str]]) -> str:
    """As models of this form write calls."""
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    if tools is ToolForm.HERMES:
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if tools is ToolForm.LLAMA3:
        return "; ".join(objects)
    if tools is ToolForm.MISTRAL:
        return f"[TOOL_CALLS][{', '.join(objects)}]" if calls else ""
    if tools is ToolForm.DEEPSEEK:
        return "".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            for name, arguments in calls
        )
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


@pytest.mark.parametrize("tools", list(ToolForm))
@given(calls=_calls, data=st.data())
@settings(max_examples=60, deadline=None)
def test_calls_come_out_as_they_went_in(tools: ToolForm, calls: list[tuple[str, str]], data: st.DataObject) -> None:
    """Any arguments, in any split."""
    text = written(tools, calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    made, pieces = parser(tools), list[Piece]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += made.feed(text[begin:end])
    pieces += made.end()
    assert join(pieces) == [each for i, (name, arguments) in enumerate(calls) for each in call(i, name, arguments)]


_tokens: Final = st.sampled_from([
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "function", "\n", " ",
    "```json", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "to=functions.f",
    '{"name": "f", "arguments": {', '{"name": "f"', '"parameters": ', "}", "}}", "{", "[", "]", '"', "\\", ",", ":",
    ";", "null", "1e5", "é", "漢", "\U0001f600", "text", "<", "<t", "[T",
])  # fmt: skip


@pytest.mark.parametrize("form", [None, *ToolForm])
@given(parts=st.lists(_tokens | st.text(max_size=3), max_size=14), how=st.tuples(*[st.booleans()] * 4))
@settings(max_examples=150, deadline=None)
def test_any_text_gives_the_same_in_every_split(
    form: ToolForm | None, parts: list[str], how: tuple[bool, bool, bool, bool]
) -> None:
    """Broken, cut and mixed up: nothing is raised, and each call has its name before its arguments. Without calls and
    reasoning nothing of the text is lost."""
    think, begun, asked, parallel = how
    text = "".join(parts)
    joined = read(text, form, think=think, begun=begun, tools=asked, parallel=parallel)
    begun_calls = [name for name, _ in joined if name.startswith("call")]
    assert begun_calls == [f"call {i}" for i in range(len(begun_calls))]
    for (before, _), (name, _) in zip([("", ""), *joined], joined, strict=False):
        assert not name.startswith("arguments") or before == name.replace("arguments", "call")
    if not think and (form is None or (not asked and form is not ToolForm.HARMONY)):
        assert "".join(text for _, text in joined) == text


@pytest.mark.parametrize(
    ("template", "tokens", "tools", "think"),
    [
        ("... <tool_call> ... </think>", (), ToolForm.HERMES, THINK),
        ("<tool_call><function=f>", (), None, None),
        ("<tool_call>{name}<arg_key>", ("</think>",), None, THINK),
        ("<|start_header_id|> <|python_tag|>", (), ToolForm.LLAMA3, None),
        ('<|start_header_id|> {"name": x, "parameters": y}', (), ToolForm.LLAMA3, None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", ("[/THINK]",), ToolForm.MISTRAL, ("[THINK]", "[/THINK]")),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", ("</think>",), ToolForm.DEEPSEEK, THINK),
        ("<|channel|>analysis<|message|>", ("</think>",), ToolForm.HARMONY, None),
        ("{% for message in messages %}", (), None, None),
    ],
)
def test_the_form_is_the_templates(
    template: str, tokens: Sequence[str], tools: ToolForm | None, think: tuple[str, str] | None
) -> None:
    """By the markers that it writes, unless somebody names another."""
    assert AnswerForm.of(template, tokens) == AnswerForm(tools=tools, think=think)
    named: Any = AnswerForm.of(template, tokens, tools=ToolForm.HERMES)
    assert named.tools is ToolForm.HERMES
