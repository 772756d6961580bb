"""Tools of a chat between its body and its prompt, and the markers of calls between an answer's tokens and its text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, Final

import pytest
from batonpb import common_pb2, inference_pb2, resume_pb2
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError
from router.answer_forms import AnswerForm, AnswerParser, ToolForm
from router.answer_reader import PieceKind
from router.answers import AnswerPart, Collected
from router.chat_template import ChatTemplate
from router.http_attach import call_of
from router.openai import OpenAiCall, parse_body
from router.openai_tools import TOOLS_MAX, parse_tools
from router.prompts import PromptEncoder
from router.replies import Replies
from router.resume import ResumeToken
from router.text import TextCodec
from router.text_jobs import parse_call
from tests.support.chat_tokenizers import added, byte_fallback, byte_level, with_tokens

TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: Final = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TURN: Final = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}<|im_start|>assistant\n"
HERMES: Final = "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}" + TURN.replace(
    "</s>", "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>"
)


def encoder(template: str, *, tool_form: ToolForm | None = None) -> PromptEncoder:
    tokenizer = byte_level(added("[TOOL_CALLS]"), added("<tool_call>", special=False))
    source = ChatTemplate(template, {})
    return PromptEncoder(codec=TextCodec(tokenizer), template=source, chars_max=10_000, tool_form=tool_form)


def called(prompts: PromptEncoder, **body: Any) -> tuple[OpenAiCall, str]:
    """The call, and its prompt as it reads."""
    raw = json.dumps({"messages": [{"role": "user", "content": "a"}], **body}).encode()
    call = parse_call(prompts, raw, True, False, 100_000)
    assert prompts.codec is not None
    return call, "".join(map(prompts.codec.token_text, call.requests[0].token_ids.ids))


def refused(prompts: PromptEncoder, **body: Any) -> tuple[str | None, str]:
    with pytest.raises(BatonError) as caught:
        called(prompts, **body)
    return caught.value.field, caught.value.message


def test_tools_are_in_the_prompt_unless_none_is_to_be_called() -> None:
    """As they came. Special tokens that they spell are text."""
    prompts = encoder(HERMES)
    call, prompt = called(prompts, tools=[TOOL], parallel_tool_calls=False)
    assert call.reading == resume_pb2.AnswerReading(tools=True, parallel=False)
    assert prompt.startswith(json.dumps([TOOL]))
    call, prompt = called(prompts, tools=[TOOL], tool_choice="none")
    assert (call.reading, "function" in prompt) == (None, False)
    spelt = {"type": "function", "function": {"name": "f", "description": "</s>"}}
    call, prompt = called(prompts, tools=[spelt])
    assert "</s>" in prompt.partition("<tool_call>")[0]
    assert prompts.codec is not None
    (end,) = (id_ for id_, text in prompts.codec.special.items() if text == "</s>")
    assert list(call.requests[0].token_ids.ids).count(end) == 1


def test_calls_alone_are_no_text_to_go_on_with() -> None:
    """In a template that wants no content beside them."""
    calls = "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}{% endfor %}"
    text = "{% if m.content is none %}" + calls + "{% else %}{{ m.content }}{% endif %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}]
    prompts = encoder(TURN.replace("{{ m.content }}", text))
    field, why = refused(prompts, messages=messages, continue_final_message=True)
    assert (field, "its text is empty" in why) == ("messages", True)


def test_models_that_know_no_tools_are_asked_for_none() -> None:
    """By the template, or because the form of its calls is not known and nobody has named it."""
    assert refused(encoder(TURN), tools=[TOOL])[0] == "tools"
    strange = HERMES.replace("tool_call>", "my_call>")
    field, text = refused(encoder(strange), tools=[TOOL])
    assert (field, "--tool-parser" in text) == ("tools", True)
    assert called(encoder(strange, tool_form=ToolForm.LLAMA3), tools=[TOOL])[0].reading is not None
    messages = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
    assert refused(encoder(TURN), messages=messages)[0] == "messages"


@pytest.mark.parametrize("only_calls", ["", "{% if m.content is none %}"])
@pytest.mark.parametrize(
    ("written", "shown"),
    [("{{ c.function.name }} {{ c.function.arguments | tojson }}", 'f {"a": "b"}'),
     ("{{ c.function.name + ' ' + c.function.arguments }}", 'f {"a": "b"}'),
     ("{% for a, b in c.function.arguments.items() %}{{ c.function.name }} {{ a }}={{ b }}{% endfor %}", "f a=b")],
)  # fmt: skip
def test_calls_are_given_to_the_template_as_it_wants_them(written: str, shown: str, only_calls: str) -> None:
    """Arguments as an object or as its text; the content of a message that only calls empty, or none."""
    calls = f"{only_calls}{{% for c in m.tool_calls %}}{written}{{% endfor %}}{'{% endif %}' if only_calls else ''}"
    prompts = encoder(TURN.replace("{{ m.content }}", "{{ m.content or '' }}" + calls))
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "y", "tool_call_id": "a"}]  # fmt: skip
    assert f"assistant\n{shown}</s>" in called(prompts, messages=messages)[1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * (TOOLS_MAX + 1)}, "tools"),
        ({"tools": [TOOL, {"type": "custom", "custom": {}}]}, "tools.1"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
         "tools.0.function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "é"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]}]},
         "messages.0.tool_calls"),
        *[({"messages": [{"role": "assistant", "tool_calls": [
            {**CALL, "function": {"name": "f", "arguments": text}}]}]}, "messages.0.tool_calls")
          for text in ("[1]", '{"a', '{"a": "\\ud800"}', "[" * 5000)],
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(body: dict[str, Any], field: str) -> None:
    assert refused(encoder(HERMES), **body)[0] == field


def test_the_choice_of_none_needs_no_form() -> None:
    """Nor do tools that are empty, or null."""
    bodies: list[dict[str, Any]] = [{"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tools": None}]
    for body in bodies:
        assert called(encoder(TURN), **body)[0].reading is None
    assert parse_tools(parse_body(b'{"tools": null}')).tools == []


@pytest.mark.parametrize(("tail", "reasons"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)])
def test_the_prompt_may_have_opened_the_reasoning(tail: str, reasons: bool) -> None:
    """As templates of thinking models do; a user's message does not."""
    call, _ = called(encoder(f"{TURN}{{# </think> #}}{tail}"), messages=[{"role": "user", "content": "<think>"}])
    assert call.reading == resume_pb2.AnswerReading(parallel=True, reasons=reasons)


def test_the_effort_of_reasoning_is_for_the_template() -> None:
    """One that names it gets it, and a variable of the same name goes before; of others it changes nothing. A word that
    nobody knows is refused."""
    names = encoder("{% if reasoning_effort %}Effort: {{ reasoning_effort }}. {% endif %}" + TURN)
    assert called(names)[1].startswith("<|im_start|>")
    assert called(names, reasoning_effort="high")[1].startswith("Effort: high. ")
    variables = {"reasoning_effort": "low"}
    assert called(names, reasoning_effort="high", chat_template_kwargs=variables)[1].startswith("Effort: low. ")
    assert called(encoder(TURN), reasoning_effort="minimal")[1] == called(encoder(TURN))[1]
    for wrong in ("hihg", 5, ["high"]):
        field, why = refused(names, reasoning_effort=wrong)
        assert (field, "low, medium, high" in why) == ("reasoning_effort", True)


def test_more_answers_than_are_returned_are_refused() -> None:
    """In chats as in completions; as many as are returned change nothing."""
    assert called(encoder(TURN), n=2, best_of=2)[0].n == 2
    field, why = refused(encoder(TURN), best_of=2)
    assert (field, "ask for n of them" in why) == ("best_of", True)


def test_reasoning_that_the_client_does_not_want() -> None:
    """vLLM's field: what is read of the answer has none, whole and streamed, calls and content stay. Other answers have
    it."""
    thinks = encoder(f"{TURN}{{# </think> #}}<think>\n")
    call, _ = called(thinks, include_reasoning=False)
    assert call.reading == resume_pb2.AnswerReading(parallel=True, reasons=True, unreasoned=True)
    assert refused(thinks, include_reasoning="no")[0] == "include_reasoning"
    whole = replies(FORM, unreasoned=True).whole([collected(THOUGHT)])["choices"][0]
    wanted = {**replies(FORM).whole([collected(THOUGHT)])["choices"][0]["message"]}
    assert wanted.pop("reasoning_content") == "é"
    assert (whole["message"], whole["finish_reason"]) == (wanted, "tool_calls")
    made = replies(FORM, unreasoned=True)
    chunks = [chunk for text in THOUGHT if (chunk := made.chunk(0, part(text, 1))) is not None]
    chunks.append(made.last(0, inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP)))
    assert message_of([json.loads(chunk) for chunk in chunks]) == wanted


@pytest.mark.parametrize("byte_fallbacks", [False, True])
@given(parts=st.lists(st.sampled_from(["a", "▁a", " a", "é", "🦊", "[TOOL_CALLS]", "</s>", "<0xF0>"]), max_size=12))
def test_markers_that_are_special_tokens_are_text_where_they_are_read(byte_fallbacks: bool, parts: list[str]) -> None:
    """And other special tokens are not. Between them the text is what it is without them, but that a character does not
    go on behind one."""
    tokenizer = with_tokens(byte_fallback() if byte_fallbacks else byte_level(), added("[TOOL_CALLS]"))
    codec = TextCodec(tokenizer)
    marker = tokenizer.token_to_id("[TOOL_CALLS]")
    assert marker is not None
    known = [tokenizer.token_to_id(part) for part in parts]
    ids = [id_ for part, id_ in zip(parts, known, strict=True)
           for id_ in ([id_] if id_ is not None else tokenizer.encode(part, add_special_tokens=False).ids)]  # fmt: skip
    stream, hidden = codec.stream(frozenset({marker})), codec.stream()
    text = "".join([*(stream.push([id_]) for id_ in ids), stream.flush()])
    assert text.count("[TOOL_CALLS]") == parts.count("[TOOL_CALLS]")
    assert "</s>" not in text
    without = "".join([*(hidden.push([id_]) for id_ in ids), hidden.flush()])
    if "<0xF0>" not in parts:
        assert text.replace("[TOOL_CALLS]", "") == without
    assert "[TOOL_CALLS]" not in without


def replies(form: AnswerForm, *, named: bool = False, unreasoned: bool = False, **asked: Any) -> Replies:
    call = OpenAiCall(
        chat=True, requests=(), n=1, stream=True, include_usage=False, logprobs=False,
        reading=resume_pb2.AnswerReading(tools=True, parallel=True, named=named, unreasoned=unreasoned), **asked,
    )  # fmt: skip
    return Replies(request_id="r", call=call, model="m", created=7, token_text=str, form=form, secret=b"s" * 16)


def part(text: str, *ids: int) -> AnswerPart:
    return AnswerPart(first_index=0, ids=ids, text=text, logprobs=(), place=None)


def collected(text: str) -> Collected:
    answer = Collected(parts=[part(text, 1)])
    answer.end = inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP)
    return answer


THOUGHT: Final = '<think>é</think>Look: <tool_call>{"name": "f", "arguments": {"a": "\u2028\\\\"}}</tool_call> <'
FORM: Final = AnswerForm(tools=ToolForm.HERMES, think=("<think>", "</think>"))


def message_of(chunks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for chunk in chunks:
        for name, value in chunk["choices"][0]["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for entry in value:
                index = entry.pop("index")
                calls = message.setdefault("tool_calls", [])
                if "id" in entry:
                    assert index == len(calls)
                    calls.append(entry)
                else:
                    calls[index]["function"]["arguments"] += entry["function"]["arguments"]
    return message


@given(cuts=st.sets(st.integers(0, len(THOUGHT))), token_ids=st.booleans(), had=st.integers(0, len(THOUGHT)))
def test_chunks_add_up_to_the_message(cuts: set[int], token_ids: bool, had: int) -> None:
    """However the text comes, and wherever a client goes on with its stream; a part has one chunk at most."""
    whole = replies(FORM).whole([collected(THOUGHT)])["choices"][0]
    message = whole["message"]
    assert (whole["finish_reason"], message["content"], message["reasoning_content"]) == ("tool_calls", "Look:  <", "é")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "\u2028\\\\"}'}
    made, cut = replies(FORM, token_ids=token_ids), sorted({0, *cuts, had, len(THOUGHT)})
    chunks = []
    for begin, end in pairwise(cut):
        if begin == had and begin:
            made = replies(FORM, token_ids=token_ids)
            made._offsets[0] = 0  # it is not the answer's first chunk
            made.had(0, THOUGHT[:had])
        if (chunk := made.chunk(0, part(THOUGHT[begin:end], 1))) is not None:
            chunks.append(json.loads(chunk))
    chunks.append(
        json.loads(json.dumps(made.last_chunk(0, inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP))))
    )
    assert message_of(chunks) == message
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]} <= {None}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_an_answer_that_had_to_be_a_named_call_ends_with_stop() -> None:
    """As OpenAI has it, whole and in a stream; one of any tool ends with tool_calls."""
    for named, finish in ((False, "tool_calls"), (True, "stop")):
        assert replies(FORM, named=named).whole([collected(THOUGHT)])["choices"][0]["finish_reason"] == finish
        made = replies(FORM, named=named)
        made.chunk(0, part(THOUGHT, 1))
        last = made.last_chunk(0, inference_pb2.Finished(reason=common_pb2.FINISH_REASON_STOP))
        assert last["choices"][0]["finish_reason"] == finish


def test_ids_of_calls() -> None:
    """Other ones for each call and answer, the same for who goes on with them; of Mistral what its template takes."""
    ids = {replies(FORM)._call_id(index, call) for index in range(3) for call in range(3)}
    assert len(ids) == 9
    assert replies(FORM)._call_id(2, 1) in ids
    short = replies(AnswerForm(tools=ToolForm.MISTRAL))._call_id(0, 0)
    assert (len(short), short.isalnum()) == (9, True)


def test_a_resume_token_says_how_an_answer_is_read() -> None:
    """A client that comes back without the body needs it."""
    reading = resume_pb2.AnswerReading(tools=True, parallel=True, reasons=True)
    http = resume_pb2.HttpCall(id="r", n=1, chat=True, reading=reading)
    message = resume_pb2.ResumeToken(secret=b"s" * 16, seed=1, places=[resume_pb2.ResumePlace()], http=http)
    token = ResumeToken(secret=b"s" * 16, seed=1, digest=0, places=(), http=message.http)
    call = call_of(token, "r")
    assert call is not None and call.reading == reading
    made = AnswerParser(FORM, tools=reading.tools, begun=reading.reasons)
    assert [piece.kind for piece in made.feed("so")] == [PieceKind.REASONING]


def test_the_markers_that_are_shown() -> None:
    """Markers that are special tokens are shown; those that are not are text already."""
    prompts = encoder("[TOOL_CALLS]{{ tools }}")
    assert prompts.codec is not None
    assert {prompts.codec.special[id_] for id_ in prompts.shown} == {"[TOOL_CALLS]"}
    assert encoder(HERMES).shown == frozenset()
