"""Chat templates of the structure that models' have, through all that reads one: its form, its prompts, its calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from batonpb import resume_pb2

import tests.support
from baton.errors import BatonError
from router.answer_forms import AnswerForm, AnswerParser, ToolForm
from router.answer_reader import PieceKind
from router.chat_template import ChatTemplate
from router.openai import OpenAiCall
from router.prompts import PromptEncoder
from router.text import TextCodec
from router.text_jobs import parse_call
from tests.support.chat_tokenizers import added, byte_level

FOLDER: Final = Path(tests.support.__file__).parent / "chat_templates"
THINK: Final = ("<think>", "</think>")
DEEPSEEK: Final = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
CITY: Final = {"type": "string", "description": "Its name."}
TOOL: Final[Any] = {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": {
    "type": "object", "properties": {"city": CITY}, "required": ["city"]}}}  # fmt: skip
ARGUMENTS: Final = '{"city": "Rome \\"} <b>"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is to be read from a template. Its tokens are `special`, `plain` ones are tokens of their own and text."""

    form: AnswerForm
    turn: str
    """What an assistant's turn begins with, once there is a call in it."""
    end: str
    """What ends it."""
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    takes_tools: bool = True


MODELS: Final = {
    "qwen3": Model(
        form=AnswerForm(tools=ToolForm.HERMES, think=THINK), turn="<|im_start|>assistant\n", end="<|im_end|>",
        special=("<|im_end|>",), plain=("<tool_call>", "</tool_call>", *THINK),
    ),
    "llama3": Model(
        form=AnswerForm(tools=ToolForm.LLAMA3), turn="<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ),
    "mistral": Model(
        form=AnswerForm(tools=ToolForm.MISTRAL), turn="[/INST]", end="</s>",
        special=("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
                 "[/TOOL_RESULTS]"),
    ),
    "deepseek_r1": Model(  # its template does not tell the model of tools
        form=AnswerForm(tools=ToolForm.DEEPSEEK, think=THINK), turn="<｜Assistant｜>", end="<｜end▁of▁sentence｜>",
        special=DEEPSEEK[2:], plain=(*DEEPSEEK[:2], *THINK), takes_tools=False,
    ),
    "deepseek_v31": Model(
        form=AnswerForm(tools=ToolForm.DEEPSEEK, think=THINK), turn="<｜Assistant｜></think>",
        end="<｜end▁of▁sentence｜>", special=DEEPSEEK, plain=THINK,
    ),
    "gpt_oss": Model(
        form=AnswerForm(tools=ToolForm.HARMONY), turn="<|start|>assistant", end="<|call|>",
        special=("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|channel|>", "<|constrain|>"),
    ),
}  # fmt: skip


def encoder(name: str) -> PromptEncoder:
    model = MODELS[name]
    tokens = [*map(added, model.special), *(added(text, special=False) for text in model.plain), added("<s>")]
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    return PromptEncoder(codec=TextCodec(byte_level(*tokens)), template=template, chars_max=20_000)


def called(prompts: PromptEncoder, messages: list[Any], **body: Any) -> tuple[OpenAiCall, str]:
    """The call, and its prompt as it reads."""
    call = parse_call(prompts, json.dumps({"messages": messages, **body}).encode(), True, False, 100_000)
    assert prompts.codec is not None
    return call, "".join(map(prompts.codec.token_text, call.requests[0].token_ids.ids))


USER: Final = {"role": "user", "content": "Warm?"}
CALL: Final = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
TALK: Final[list[Any]] = [
    {"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "get_weather", "content": "Sunny."},
]  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_form_and_its_markers(name: str) -> None:
    """What the template writes says how answers are read; of its markers those that are special tokens are shown."""
    prompts, model = encoder(name), MODELS[name]
    assert prompts.form == model.form
    assert prompts.codec is not None
    assert {prompts.codec.special[id_] for id_ in prompts.shown} == model.form.markers & set(model.special)


@pytest.mark.parametrize("name", MODELS)
def test_a_call_that_the_template_writes_is_read_back(name: str) -> None:
    """An assistant's call of an earlier turn, as the template writes it for the model, is what the model was trained to
    write: the parser reads the same call from it. The result stands behind it, and the next turn."""
    prompts, model = encoder(name), MODELS[name]
    tools = {"tools": [TOOL]} if model.takes_tools else {}
    call, text = called(prompts, TALK, **tools)
    assert "Be brief." in text or name == "mistral"  # which writes it before the last message of a user only
    assert ("Of a city." in text) == model.takes_tools
    answer, _, rest = text.partition(model.turn)[2].partition(model.end)
    assert "Sunny." in rest
    assert call.reading is not None or not tools
    made = AnswerParser(prompts.form, tools=True)
    pieces = [piece for char in answer for piece in made.feed(char)] + list(made.end())
    assert [piece.text for piece in pieces if piece.kind is PieceKind.CALL] == ["get_weather"]
    written = "".join(piece.text for piece in pieces if piece.kind is PieceKind.ARGUMENTS)
    assert json.loads(written) == json.loads(ARGUMENTS)
    assert {piece.kind for piece in pieces} == {PieceKind.CALL, PieceKind.ARGUMENTS}


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_can_be_held_to_a_call(name: str) -> None:
    """There is a grammar of each form; a template that does not tell the model of tools refuses them."""
    prompts = encoder(name)
    if not MODELS[name].takes_tools:
        with pytest.raises(BatonError, match="knows no tools"):
            called(prompts, [USER], tools=[TOOL], tool_choice="required")
        return
    call, _ = called(prompts, [USER], tools=[TOOL], tool_choice="required")
    assert "get_weather" in call.requests[0].sampling.grammar.rules


@pytest.mark.parametrize(
    ("name", "variables", "begun"),
    [
        ("qwen3", {}, False),
        ("qwen3", {"enable_thinking": False}, False),
        ("deepseek_r1", {}, True),
        ("deepseek_v31", {"thinking": True}, True),
        ("deepseek_v31", {}, False),
    ],
)
def test_whether_the_prompt_opens_the_reasoning(name: str, variables: dict[str, Any], begun: bool) -> None:
    """R1's always, V3.1's on request; one that closes an empty thought leaves none to write."""
    call, _ = called(encoder(name), [USER], chat_template_kwargs=variables)
    assert call.reading == resume_pb2.AnswerReading(parallel=True, reasons=begun)


def test_the_forms_of_both_deepseeks_are_read_by_either() -> None:
    """Nothing in a template says whether the model writes types and fences: the parser takes both."""
    answers = []
    for name in ("deepseek_r1", "deepseek_v31"):
        model = MODELS[name]
        _, text = called(encoder(name), TALK)
        answers.append(text.partition(model.turn)[2].partition(model.end)[0])
    assert ("```json" in answers[0], "```json" in answers[1]) == (True, False)
    for name in ("deepseek_r1", "deepseek_v31"):
        for answer in answers:
            made = AnswerParser(encoder(name).form, tools=True)
            pieces = [*made.feed(answer), *made.end()]
            assert [(piece.kind, piece.text) for piece in pieces] == [
                (PieceKind.CALL, "get_weather"), (PieceKind.ARGUMENTS, ARGUMENTS)
            ]  # fmt: skip


def test_the_effort_of_gpt_oss() -> None:
    """A variable of its template, with a default."""
    prompts = encoder("gpt_oss")
    assert "Reasoning: medium" in called(prompts, [USER])[1]
    assert "Reasoning: high" in called(prompts, [USER], reasoning_effort="high")[1]
