"""/v1/responses: its body as a chat's, and its events, by the types of the `openai` package."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, Final

import pytest
from batonpb import common_pb2, inference_pb2, resume_pb2
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.errors import BatonError, Reason, bad_field
from router.answer_forms import AnswerForm, ToolForm
from router.answers import AnswerPart, Collected
from router.chat_template import ChatTemplate
from router.openai import OpenAiCall, error_json
from router.prompts import PromptEncoder
from router.responses import ResponseReplies, chat_body, echo_of, renamed
from router.text import TextCodec
from router.text_jobs import parse_response
from tests.support.chat_tokenizers import byte_level

FORM: Final = AnswerForm(tools=ToolForm.HERMES, think=("<think>", "</think>"))
TEXT: Final = (
    '<think>Hm, "é".</think>Look: <tool_call>{"name": "f", "arguments": {"a": "\u2028"}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
CITY: Final = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_a_body_as_that_of_a_chat() -> None:
    """A conversation with reasoning, calls and results; tools and the format of the text."""
    body: dict[str, Any] = {
        "model": "m", "instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 9, "store": False,
        "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"],
        "input": [
            {"role": "user", "content": "Warm?"},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": "I look.", "annotations": []}, {"type": "refusal", "refusal": "No."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "Yes."},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "No."}]},
            {"role": "developer", "content": [{"type": "input_text", "text": each} for each in "ab"]},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": CITY, "strict": True}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": CITY}, "verbosity": "low"},
    }  # fmt: skip
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": "{}"}}
             for i, name in ((1, "f"), (2, "g"))]  # fmt: skip
    assert chat_body(body) == {
        "model": "m", "temperature": 0.5, "max_completion_tokens": 9,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Warm?"},
            {"role": "assistant", "content": "I look.\nNo.", "reasoning_content": "Hm.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "Yes."},
            {"role": "tool", "tool_call_id": "c2", "content": "No."},
            {"role": "developer", "content": "a\nb"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": CITY, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": body["text"]["format"]}, "reasoning_effort": "low",
    }  # fmt: skip
    assert chat_body({"input": "hi", "text": {"format": {"type": "text"}}, "top_k": 3}) == {
        "messages": [{"role": "user", "content": "hi"}], "response_format": {"type": "text"}, "top_k": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"text": 5}, "text.format"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"]}, "input.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": 5}]}, "input.0.output"),
        ({"metadata": 5}, "metadata"),
        ({"reasoning": {"effort": "hihg"}}, "reasoning.effort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"include": "reasoning.encrypted_content"}, "include"),
        ({"previous_input_messages": [{}]}, "previous_input_messages"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "owner", "content": "a"}]}, "input.1.role"),
        ({"input": [{"content": "a"}]}, "input.0"),
        ({"input": "a" * 10_000}, "input"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], field: str) -> None:
    """What needs something stored, what OpenAI would run itself, and what is no text."""
    tokenizer = byte_level()
    prompts = PromptEncoder(codec=TextCodec(tokenizer), template=ChatTemplate("{{ messages }}", {}), chars_max=10_000)
    with pytest.raises(BatonError) as caught:
        parse_response(prompts, json.dumps({"input": "hi", **body}).encode(), False, 10_000)
    assert error_json(caught.value)["error"]["param"] == field


@pytest.mark.parametrize(
    ("chat", "says", "param", "said"),
    [
        ("messages.3.tool_calls", "The messages are wrong.", "input", "The messages are wrong."),
        ("messages", "messages must be a list.", "input", "input must be a list."),
        ("messages.3.role", "messages[3] has none.", "input", "messages[3] has none."),
        ("token_ids", "No.", "input", "No."),
        ("response_format.json_schema.schema", "response_format.json_schema.schema must be a JSON schema.",
         "text.format.schema", "text.format.schema must be a JSON schema."),
        ("response_format", "Leave response_format out.", "text.format", "Leave text.format out."),
        ("max_completion_tokens", "max_completion_tokens must be 1.", "max_output_tokens",
         "max_output_tokens must be 1."),
        ("reasoning_effort", "reasoning_effort must be low.", "reasoning.effort", "reasoning.effort must be low."),
        ("sampling.max_tokens", "No.", "max_output_tokens", "No."),
        ("tools.1.function.name", "No.", "tools.1.name", "No."),
        ("sampling.top_p", "No.", "top_p", "No."),
        ("tool_choice", "No.", "tool_choice", "No."),
    ],
)  # fmt: skip
def test_errors_of_the_chat_name_the_fields_of_the_response(chat: str, says: str, param: str, said: str) -> None:
    """In what they say, too."""
    error = renamed(bad_field(chat, says))
    assert (error_json(error, chat=True)["error"]["param"], error.message) == (param, said)


def test_an_error_of_a_grammar_names_the_format_of_the_text() -> None:
    """It comes from a node, which knows neither a chat nor a response."""
    error = replies(grammar_field="response_format").renamed(bad_field("sampling.grammar", "No."))
    assert error_json(error)["error"]["param"] == "text.format"


def replies(*, reading: bool = True, grammar_field: str = "") -> ResponseReplies:
    call = OpenAiCall(
        chat=True, requests=(), n=1, stream=True, include_usage=False, logprobs=False,
        reading=resume_pb2.AnswerReading(tools=True, parallel=True) if reading else None,
        echo=echo_of({"input": "hi", "metadata": {"a": "b"}, "instructions": "Be brief."}), grammar_field=grammar_field,
    )  # fmt: skip
    made = ResponseReplies(request_id="r", call=call, model="m", created=7, token_text=str, form=FORM, secret=b"s" * 16)
    made.started(0, inference_pb2.Started(prompt_tokens=5))
    return made


def part(text: str) -> AnswerPart:
    return AnswerPart(first_index=0, ids=[1], text=text, logprobs=(), place=None)


def ended(*, cut: bool = False) -> inference_pb2.Finished:
    reason = common_pb2.FINISH_REASON_LENGTH if cut else common_pb2.FINISH_REASON_STOP
    finished = inference_pb2.Finished(reason=reason)
    finished.stats.output_tokens = 3
    return finished


def read(stream: str) -> list[Any]:
    """The events; each is what the package's type for its name takes."""
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = []
    for number, event in enumerate(stream.split("\n\n")[:-1]):
        name, data = event.split("\n")
        made = json.loads(data.removeprefix("data: "))
        assert (name, made["sequence_number"]) == (f"event: {made['type']}", number)
        events.append(adapter.validate_python(made))
    return events


def drawn(text: str, cuts: set[int], *, cut: bool = False, reading: bool = True) -> tuple[list[Any], ResponseReplies]:
    made, stream = replies(reading=reading), ""
    for begin, end in pairwise(sorted({0, *cuts, len(text)})):
        stream += made.chunk(0, part(text[begin:end])) or ""
    made.finished(0, ended(cut=cut))
    return read(stream + made.last(0, ended(cut=cut))), made


@given(cuts=st.sets(st.integers(0, len(TEXT))))
def test_events_add_up_to_the_response(cuts: set[int]) -> None:
    """However the text comes: in the order that OpenAI has, each item from its beginning to its end, and the last event
    has what a call without a stream gets."""
    events, made = drawn(TEXT, cuts)
    names = [event.type for event in events]
    steps = [name for name, before in zip(names, ["", *names], strict=False) if name != before or "delta" not in name]
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = [step.format("function_call_arguments") for step in text if "part" not in step]
    wanted = ["created", "in_progress", *(step.format("reasoning_text") for step in text),
              *(step.format("output_text") for step in text), *call, *call, "completed"]  # fmt: skip
    assert steps == [f"response.{name}" for name in wanted]
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places)
    deltas: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
        elif event.type.endswith(("text.done", "arguments.done")):
            assert deltas[event.item_id] == (event.arguments if "arguments" in event.type else event.text)
    answer = Collected(parts=[part(TEXT)])
    answer.start, answer.end = inference_pb2.Started(prompt_tokens=5), ended()
    whole = replies().whole([answer])
    last = events[-1].response
    assert last == Response.model_validate(whole)
    assert last.output_text == "Look:"
    assert [item.type for item in last.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [(item.name, item.arguments) for item in last.output[2:]] == [("f", '{"a": "\u2028"}'), ("g", "{}")]
    assert len({item.call_id for item in last.output[2:]}) == 2
    assert (last.status, last.usage.total_tokens, last.metadata) == ("completed", 8, {"a": "b"})
    assert made.done == ""


def test_an_answer_that_is_cut_or_empty_or_without_parts() -> None:
    """Cut, the response and its last item are incomplete. Empty, it has an empty message."""
    events, _ = drawn('<tool_call>{"name": "f", "arguments": {"a', {3}, cut=True)
    response = events[-1].response
    assert (events[-1].type, response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert [(item.status, item.arguments) for item in response.output] == [("incomplete", '{"a')]
    events, _ = drawn("", set())
    assert (events[-1].response.output_text, len(events[-1].response.output)) == ("", 1)
    events, _ = drawn("<think> so", {2}, reading=False)
    assert events[-1].response.output_text == "<think> so"


def test_a_stream_that_fails() -> None:
    """Its last event says why; the response has what came."""
    made = replies()
    stream = made.chunk(0, part("<think></think>Well")) or ""
    last = read(stream + made.failure(BatonError(Reason.INTERNAL, "It broke.")))[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "It broke.")
    assert last.response.output_text == "Well"
