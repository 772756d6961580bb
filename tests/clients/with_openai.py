"""The `openai` package, sync and async: what an application does with it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
from cases import (
    ANSWERS,
    CONTEXT,
    MODEL,
    OSLO,
    OTHER_NAME,
    PERSON,
    PERSON_SCHEMA,
    ROME,
    TIMEOUT_S,
    TOOLS,
    api_key,
    base_url,
    each,
    raised,
    run,
)
from pydantic import BaseModel

OPTIONS: Any = {"base_url": base_url(), "api_key": api_key(), "timeout": TIMEOUT_S, "max_retries": 0}
client = openai.OpenAI(**OPTIONS)
CALLS = [("get_weather", ROME), ("get_time", OSLO)]


class Person(BaseModel):
    name: str
    age: int


def ask(word: str, **more: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": word}], "temperature": 0, **more}


def chat(word: str, **more: Any) -> Any:
    return client.chat.completions.create(**ask(word, **more))


def case_models() -> None:
    """The list has the model by both of its names, with its context; it can be asked for by either, and answers say by
    which."""
    assert [model.id for model in client.models.list()] == [MODEL, OTHER_NAME]
    for name in (MODEL, OTHER_NAME):
        assert client.models.retrieve(name).model_dump()["max_model_len"] == CONTEXT
        assert chat("[hello]", model=name).model == name


def case_text() -> None:
    """A chat: message, end, usage, and what stands for the weights."""
    answer = chat("[hello]")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWERS["[hello]"])
    assert (choice.finish_reason, answer.model, answer.object) == ("stop", MODEL, "chat.completion")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.system_fingerprint


def case_completion() -> None:
    """Text goes on; several prompts are answered in their order, and so are token ids."""
    answer = client.completions.create(model=MODEL, prompt=["[hello]", "of [sea]"], temperature=0, max_tokens=99)
    assert [choice.text for choice in answer.choices] == [ANSWERS["[hello]"], ANSWERS["[sea]"]]
    assert [choice.index for choice in answer.choices] == [0, 1]
    extra = {"return_token_ids": True}
    answer = client.completions.create(model=MODEL, prompt="[hello]", temperature=0, max_tokens=99, extra_body=extra)
    ids = answer.choices[0].model_dump()["prompt_token_ids"]
    answer = client.completions.create(model=MODEL, prompt=ids, temperature=0, max_tokens=99)
    assert answer.choices[0].text == ANSWERS["[hello]"]


def case_echo() -> None:
    """A prompt's own log-probabilities, without an answer: the first token has none."""
    prompt = "[sky] blue"
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, "".join(choice.logprobs.tokens)) == (prompt, prompt)
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[-1] > -0.01


def case_stream() -> None:
    """The role first, then pieces, the end, and the usage when it is asked for."""
    chunks = list(chat("[sea]", stream=True, stream_options={"include_usage": True}))
    *texts, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == ANSWERS["[sea]"]
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * (len(texts) - 1) + ["stop"]
    assert (usage.choices, usage.usage.completion_tokens) == ([], chat("[sea]").usage.completion_tokens)
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(texts) > 2


def case_logprobs() -> None:
    """One entry a token, with as many others as asked for; their texts are the answer's."""
    (choice,) = chat("[hello]", logprobs=True, top_logprobs=2).choices
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries).startswith(ANSWERS["[hello]"])
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    assert all(entry.top_logprobs[0].token == entry.token and entry.logprob > -0.01 for entry in entries)


def case_n_and_seed() -> None:
    """Several answers to one prompt; the same seed draws the same."""
    first, second = (chat("[hello]", n=3, seed=5, temperature=1.5).choices for _ in range(2))
    assert [choice.index for choice in first] == [0, 1, 2]
    assert [choice.message.content for choice in first] == [choice.message.content for choice in second]


def case_stop() -> None:
    """The answer ends before the stop string, whole and streamed; max_tokens cuts it."""
    before = ANSWERS["[sea]"].partition("STOP")[0]
    (choice,) = chat("[sea]", stop=["STOP"]).choices
    assert (choice.message.content, choice.finish_reason) == (before, "stop")
    chunks = list(chat("[sea]", stop="STOP", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before
    answer = chat("[sea]", max_completion_tokens=2)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 2)


def case_tools() -> None:
    """Two calls; with their results the next answer is text."""
    (choice,) = chat("[both]", tools=TOOLS).choices
    calls = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look."), choice
    assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    results = [{"role": "tool", "tool_call_id": call.id, "content": "[sunny]"} for call in calls]
    messages = [*ask("[both]")["messages"], choice.message, *results]
    (choice,) = chat("", tools=TOOLS, messages=messages).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWERS["[sunny]"])
    assert choice.message.tool_calls is None


def case_tools_in_a_stream() -> None:
    """Each call begins with its id and name, and goes on with pieces of its arguments; the package's own helper joins
    them."""
    deltas = [chunk.choices[0].delta for chunk in chat("[both]", tools=TOOLS, stream=True)]
    made: dict[int, list[str]] = {}
    for entry in (entry for delta in deltas for entry in delta.tool_calls or []):
        if entry.index not in made:
            assert entry.id and entry.type == "function"
            made[entry.index] = [entry.function.name, ""]
        made[entry.index][1] += entry.function.arguments or ""
    assert [tuple(call) for call in made.values()] == CALLS
    with client.chat.completions.stream(**ask("[both]", tools=TOOLS)) as stream:
        final = stream.get_final_completion().choices[0]
    assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == CALLS


NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
CHOICES: dict[str, tuple[Any, list[str] | None, str]] = {
    "left out": (None, ["get_weather", "get_time"], "tool_calls"),
    "auto": ("auto", ["get_weather", "get_time"], "tool_calls"),
    "none": ("none", [], "stop"),
    "required": ("required", None, "tool_calls"),
    "named": (NAMED, ["get_weather"], "stop"),
}
"""`tool_choice`, the functions that are called (None: any), and how the answer ends."""


@each({f"{name}, {way}": (*CHOICES[name], way == "streamed") for name in CHOICES for way in ("whole", "streamed")})
def case_tool_choice(tool_choice: Any, names: list[str] | None, finish: str, streamed: bool) -> None:
    """What is called, and that arguments are JSON; `none` makes a call text."""
    asked = ask("[both]", tools=TOOLS, max_tokens=600)
    if tool_choice is not None:
        asked["tool_choice"] = tool_choice
    if streamed:
        with client.chat.completions.stream(**asked) as stream:
            choice: Any = stream.get_final_completion().choices[0]
    else:
        (choice,) = client.chat.completions.create(**asked).choices
    calls = choice.message.tool_calls or []
    if choice.finish_reason == "length" and names is None:
        return  # the random part of a forced answer has not come to its end
    assert choice.finish_reason == finish, choice
    called = [call.function.name for call in calls]
    assert called == names if names is not None else set(called) <= {"get_weather", "get_time"} and called, choice
    assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)
    if tool_choice == "none":
        assert choice.message.content == ANSWERS["[both]"]


def case_tools_without_parallel_calls() -> None:
    """There is one call."""
    (choice,) = chat("[both]", tools=TOOLS, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


def case_tool_choice_required_and_named() -> None:
    """The answer is a call, though the model would have said something else; the arguments are of the schema."""
    (choice,) = chat("[hello]", tools=TOOLS, tool_choice="required", max_tokens=400).choices
    for call in choice.message.tool_calls or []:
        assert call.function.name in ("get_weather", "get_time")
    assert choice.message.tool_calls or choice.finish_reason == "length", choice
    named = {"type": "function", "function": {"name": "get_weather"}}
    (choice,) = chat("[weather]", tools=TOOLS, tool_choice=named, max_tokens=400).choices
    assert {call.function.name for call in choice.message.tool_calls} == {"get_weather"}, choice


def case_reasoning() -> None:
    """What the model thinks is beside its content."""
    (choice,) = chat("[think]").choices
    assert choice.message.content == "It makes four."
    assert choice.message.model_dump()["reasoning_content"] == "They ask of two and two."


def case_response_format() -> None:
    """JSON of a schema, as the package's `parse` asks for it; and any JSON object."""
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA}}
    assert chat("[person]", response_format=schema).choices[0].message.content == PERSON
    parsed = client.chat.completions.parse(**ask("[person]", response_format=Person))
    assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)
    assert chat("[person]", response_format={"type": "json_object"}).choices[0].message.content == PERSON
    drawn = chat("[hello]", response_format=schema, temperature=1, max_tokens=600).choices[0]
    if drawn.finish_reason == "stop":  # what the model would not have said by itself
        Person.model_validate_json(drawn.message.content)


def case_errors() -> None:
    """Each has the package's own class, and says which field is wrong. A prompt beyond the context says so in the words
    that frameworks look for."""
    error = raised(openai.BadRequestError, chat, "sea " * 2 * CONTEXT)
    assert error.code == "context_length_exceeded"
    assert error.message.startswith(f"Error code: 400 - This model's maximum context length is {CONTEXT} tokens")
    assert raised(openai.BadRequestError, chat, "[hello]", temperature=-1).param == "temperature"
    asked = {"extra_body": {"use_beam_search": True}}
    assert raised(openai.BadRequestError, chat, "[hello]", **asked).param == "use_beam_search"
    error = raised(openai.NotFoundError, chat, "[hello]", model="other")
    assert error.code == "model_not_found"
    assert error.request_id
    stranger = openai.OpenAI(**{**OPTIONS, "api_key": "baton-none"})
    error = raised(openai.AuthenticationError, stranger.chat.completions.create, **ask("[hello]"))
    assert error.code == "invalid_api_key"


def case_responses() -> None:
    """Text whole and streamed, a call and the answer to its result, an object of a class; nothing is stored."""
    asked: Any = {"model": MODEL, "temperature": 0}
    answer = client.responses.create(input="[hello]", instructions="Be brief.", **asked)
    assert (answer.output_text, answer.status) == (ANSWERS["[hello]"], "completed")
    with client.responses.stream(input="[sea]", **asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == ANSWERS["[sea]"]
    assert len(pieces) > 2
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    begun: list[Any] = [{"role": "user", "content": "[weather]"}]
    (call,) = client.responses.create(input=begun, tools=tools, **asked).output
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ROME)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "[sunny]"}
    answer = client.responses.create(input=[*begun, call, result], tools=tools, **asked)
    assert answer.output_text == ANSWERS["[sunny]"]
    parsed = client.responses.parse(input="[person]", text_format=Person, **asked)
    assert parsed.output_parsed == Person(name="Ada", age=36)
    raised(openai.BadRequestError, client.responses.create, input="[hello]", store=True, **asked)


CHAT_REFUSALS: dict[str, Any] = {
    "temperature": -1, "top_p": 2, "presence_penalty": 3, "frequency_penalty": -3, "seed": "x", "n": 0, "max_tokens": 0,
    "max_completion_tokens": -1, "stop": ["x"] * 17, "logit_bias": {"x": 1}, "top_logprobs": 5, "min_p": 2, "top_k": -5,
    "repetition_penalty": 0, "priority": "urgent", "reasoning_effort": "hihg", "include_reasoning": "no", "best_of": 2,
    "use_beam_search": True, "length_penalty": 2, "early_stopping": True, "typical_p": 0.5, "no_repeat_ngram_size": 2,
    "logits_processors": ["x"], "allowed_token_ids": [1], "bad_words": ["x"], "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "prompt_logprobs": 1, "prompt_embeds": ["x"], "thinking_token_budget": 5,
    "structural_tag": "x", "guided_whitespace_pattern": "x", "functions": [{"name": "f"}], "function_call": "f",
    "modalities": ["audio"], "audio": {"voice": "x"}, "echo": True, "web_search_options": {}, "chat_template": "x",
    "add_special_tokens": True, "documents": [{"text": "x"}], "tool_choice": "sometimes", "tools": "x",
    "response_format": {"type": "xml"}, "guided_regex": 5, "truncate_prompt_tokens": 0, "messages": [],
    "guided_json": {"type": "person"}, "logprob_token_ids": [5], "return_prompt_text": True, "vllm_xargs": {"a": 1},
    "kv_transfer_params": {"a": 1}, "watermarking": True, "stream_options": {"include_usage": "yes"},
}  # fmt: skip
COMPLETION_REFUSALS: dict[str, Any] = {
    "suffix": "x", "best_of": 3, "logprobs": 21, "prompt": [], "echo": "yes", "max_tokens": 0, "n": 200,
    "stop_token_ids": ["x"], "min_tokens": -1, "cache_salt": 5,
}  # fmt: skip
RESPONSE_REFUSALS: dict[str, Any] = {
    "store": True, "background": True, "previous_response_id": "resp_1", "conversation": "c", "truncation": "auto",
    "prompt": {"id": "p"}, "top_logprobs": 2, "max_output_tokens": 0, "input": [], "include": "all",
    "previous_input_messages": [{}], "enable_response_messages": True,
}  # fmt: skip


def refused(call: Any, field: str, asked: Any, value: Any) -> None:
    """With a 400 that names the field, in words."""
    beside = {name: it for name, it in asked.items() if name != field}
    error = raised(openai.BadRequestError, call, **beside, extra_body={field: value})
    assert (error.param or "").split(".")[0] == field, error
    assert error.request_id and error.message


@each({name: (name, value) for name, value in CHAT_REFUSALS.items()})
def case_a_chat_is_refused(field: str, value: Any) -> None:
    asked = {**ask("[hello]"), "messages": ask("[hello]")["messages"]}
    if field == "messages":
        error = raised(openai.BadRequestError, client.chat.completions.create, **{**asked, "messages": []})
        assert error.param == "messages"
    else:
        refused(client.chat.completions.create, field, asked, value)


@each({name: (name, value) for name, value in COMPLETION_REFUSALS.items()})
def case_a_completion_is_refused(field: str, value: Any) -> None:
    asked: Any = {"model": MODEL, "prompt": "[hello]"}
    if field == "prompt":
        error = raised(openai.BadRequestError, client.completions.create, **{**asked, "prompt": []})
        assert error.param == "prompt"
    else:
        refused(client.completions.create, field, asked, value)


@each({name: (name, value) for name, value in RESPONSE_REFUSALS.items()})
def case_a_response_is_refused(field: str, value: Any) -> None:
    refused(client.responses.create, field, {"model": MODEL, "input": "[hello]"}, value)


@each({"n": (3, {}), "n, usage": (2, {"stream_options": {"include_usage": True}})})
def case_several_answers_in_a_stream(n: int, options: Any) -> None:
    """Each is told apart by its index, and ends once."""
    texts, ends, usages = [""] * n, [""] * n, 0
    for chunk in chat("[sea]", n=n, stream=True, **options):
        usages += chunk.usage is not None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason or ""
    assert (texts, ends) == ([ANSWERS["[sea]"]] * n, ["stop"] * n)
    assert usages == ("stream_options" in options)


def case_raw_responses() -> None:
    """Headers beside the answer: the id of the request, the client's own where it sends one."""
    raw = client.chat.completions.with_raw_response.create(**ask("[hello]", extra_headers={"x-request-id": "mine-1"}))
    assert (raw.status_code, raw.headers["x-request-id"]) == (200, "mine-1")
    assert raw.parse().choices[0].message.content == ANSWERS["[hello]"]
    with client.chat.completions.with_streaming_response.create(**ask("[hello]", stream=True)) as streamed:
        lines = [line for line in streamed.iter_lines() if line]
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"


@each({"path": ("GET", "/nothing", 404, "not_found"), "method": ("GET", "/chat/completions", 405, "method_not_allowed"),
       "model": ("GET", "/models/other", 404, "model_not_found")})  # fmt: skip
def case_no_such_place(method: str, path: str, status: int, code: str) -> None:
    """With the package's classes, a code, and the id of the request."""
    error = raised(openai.APIStatusError, client.get, path, cast_to=object)
    assert (error.status_code, error.code, bool(error.request_id)) == (status, code, True), (method, error)
    assert isinstance(error, openai.NotFoundError) == (status == 404)


@each({str(each): (each,) for each in ("high", "normal", "low", -5, 0, 3)})
def case_a_priority(priority: Any) -> None:
    assert chat("[hello]", extra_body={"priority": priority}).choices[0].message.content == ANSWERS["[hello]"]


@each({"string": ({"stop": "STOP"}, "STOP"), "none": ({}, None)})
def case_what_has_stopped_the_answer(fields: Any, reason: Any) -> None:
    """Whole and streamed."""
    (choice,) = chat("[sea]", **fields).choices
    *_, last = chat("[sea]", stream=True, **fields)
    assert choice.model_dump()["stop_reason"] == last.choices[0].model_dump()["stop_reason"] == reason


def case_a_stop_token() -> None:
    """The third token of an answer ends another one like it."""
    extra = {"return_token_ids": True}
    ids = chat("[sea]", extra_body=extra).choices[0].model_dump()["token_ids"]
    (choice,) = chat("[sea]", extra_body={**extra, "stop_token_ids": [ids[2]]}).choices
    assert (choice.model_dump()["stop_reason"], choice.finish_reason) == (ids[2], "stop")
    assert choice.model_dump()["token_ids"] == ids[:3]


@each({"text": ({}, False), "text, streamed": ({}, True), "log-probabilities": ({"logprobs": 1}, False),
       "prompt alone": ({"logprobs": 0, "max_tokens": 0}, False)})  # fmt: skip
def case_an_echo(fields: Any, streamed: bool) -> None:
    """The prompt goes before the answer, with its log-probabilities where they are asked for."""
    asked = {"model": MODEL, "prompt": "[sky]", "echo": True, "temperature": 0, "max_tokens": 9, **fields}
    wanted = "[sky]" + (ANSWERS["[sky]"] if asked["max_tokens"] else "")
    if streamed:
        chunks = client.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == wanted
        return
    (choice,) = client.completions.create(**asked).choices
    assert choice.text == wanted
    if "logprobs" in fields:
        assert "".join(choice.logprobs.tokens).startswith(wanted)
        assert choice.logprobs.token_logprobs[0] is None


@each({str(top): (top,) for top in (0, 1, 5, 20)})
def case_log_probabilities_of_a_chat(top: int) -> None:
    """Whole and streamed, the same, with as many others as asked for."""
    asked = {"logprobs": True, "top_logprobs": top}
    whole = chat("[hello]", **asked).choices[0].logprobs.content
    chunks = chat("[hello]", stream=True, **asked)
    streamed = [entry for chunk in chunks for it in chunk.choices if it.logprobs for entry in it.logprobs.content]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(entry.token, entry.logprob) for entry in whole]
    assert {len(entry.top_logprobs) for entry in whole} == {top}


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "guided_regex": ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)),
    "regex": ({"regex": "[x-z]{2,4}"}, lambda text: re.fullmatch("[x-z]{2,4}", text)),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    "guided_grammar": ({"guided_grammar": 'root ::= "a" | "b" root'}, lambda text: re.fullmatch("b*a", text)),
    "structured_outputs, choice": ({"structured_outputs": {"choice": ["red", "blue"]}}, ["red", "blue"].__contains__),
    "structured_outputs, regex": ({"structured_outputs": {"regex": "[0-9]{4}"}}, str.isdigit),
    "guided_json": ({"guided_json": {"enum": [1, "two", [3]]}}, lambda text: json.loads(text) in (1, "two", [3])),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["a", "b"]}}}},
        lambda text: json.loads(text) in ("a", "b"),
    ),
}


@each(FORMS)
def case_the_text_has_a_form(fields: dict[str, Any], holds: Any) -> None:
    """What the model would not have said by itself; four answers, and a stream."""
    for choice in chat("[hello]", n=4, temperature=1, max_tokens=400, extra_body=fields).choices:
        assert choice.finish_reason == "length" or holds(choice.message.content), choice
    chunks = list(chat("[hello]", temperature=1, seed=3, max_tokens=400, stream=True, extra_body=fields))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length" or holds(text), text


def case_parse_in_a_stream() -> None:
    """The package's helper takes a class, and gives an object of it at the end."""
    with client.chat.completions.stream(**ask("[person]", response_format=Person)) as stream:
        final: Any = stream.get_final_completion().choices[0].message
    assert final.parsed == Person(name="Ada", age=36)


@each({"no reasoning": ({"include_reasoning": False},), "effort": ({"reasoning_effort": "low"},)})
def case_reasoning_as_it_is_wanted(fields: Any) -> None:
    """Left out of the answer, whole and streamed; an effort that the template does not know changes nothing."""
    whole = chat("[think]", extra_body=fields).choices[0].message.model_dump()
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chat("[think]", stream=True, extra_body=fields)]
    wanted = "" if "include_reasoning" in fields else "They ask of two and two."
    assert (whole["content"], whole.get("reasoning_content") or "") == ("It makes four.", wanted)
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == wanted
    assert "".join(delta.get("content") or "" for delta in deltas) == "It makes four."


def case_vllms_fields_that_are_taken() -> None:
    """The prompt is cut at its beginning, the last message is gone on with."""
    assert chat("[sea] [hello]", extra_body={"truncate_prompt_tokens": -1}).choices[0].message.content
    cut = client.completions.create(
        model=MODEL,
        prompt="much before it [hello]",
        max_tokens=99,
        temperature=0,
        extra_body={"truncate_prompt_tokens": 1},
    )
    assert (cut.choices[0].text, cut.usage.prompt_tokens) == (ANSWERS["[hello]"], 1)
    begun = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "I say: [hello]"}]
    extra = {"continue_final_message": True}
    assert chat("", messages=begun, extra_body=extra).choices[0].message.content == ANSWERS["[hello]"]


def case_usage_so_far() -> None:
    """In each chunk, rising to that of the answer."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat("[sea]", stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 2


def case_tokens_as_ids() -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat("[hello]", logprobs=True, extra_body=extra).choices[0].model_dump()
    assert [it["token"] for it in choice["logprobs"]["content"]] == [f"token_id:{id_}" for id_ in choice["token_ids"]]


def case_roles() -> None:
    """A developer speaks as the system; a role that nobody knows is refused."""
    developer, user = {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "[hello]"}
    assert chat("", messages=[developer, user]).choices[0].message.content == ANSWERS["[hello]"]
    error = raised(openai.BadRequestError, chat, "", messages=[{"role": "owner", "content": "[hello]"}])
    assert error.param == "messages.0.role"


async def case_responses_of_the_async_client() -> None:
    """Text whole and streamed, a call, an object of a class, all at a time."""
    asked: Any = {"model": MODEL, "temperature": 0}
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with openai.AsyncOpenAI(**OPTIONS) as client:

        async def streamed() -> tuple[str, list[str]]:
            async with client.responses.stream(input="[sea]", **asked) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            return final.output_text, kinds

        whole, (text, kinds), called, parsed = await asyncio.gather(
            client.responses.create(input="[hello]", **asked),
            streamed(),
            client.responses.create(input="[weather]", tools=tools, **asked),
            client.responses.parse(input="[person]", text_format=Person, **asked),
        )
    assert (whole.output_text, text) == (ANSWERS["[hello]"], ANSWERS["[sea]"])
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    (call,) = called.output
    assert (call.name, call.arguments) == ("get_weather", ROME)
    assert parsed.output_parsed == Person(name="Ada", age=36)


@each({"cut": ({"max_output_tokens": 2}, "incomplete"), "effort": ({"reasoning": {"effort": "low"}}, "completed"),
       "messages": ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "[hello]"}]}]}, "completed"),
       "metadata": ({"metadata": {"a": "b"}, "user": "u"}, "completed")})  # fmt: skip
def case_a_response(fields: Any, status: str) -> None:
    """Its status, its text, and what it repeats of the call."""
    answer = client.responses.create(**{"model": MODEL, "input": "[hello]", "temperature": 0, **fields})
    assert answer.status == status
    assert ANSWERS["[hello]"].startswith(answer.output_text) and answer.output_text
    assert answer.metadata == fields.get("metadata", {})


def case_left() -> None:
    """A stream that is closed early, and one call after it on the same connections."""
    with chat("[sea]", stream=True) as stream:
        next(iter(stream))
    assert chat("[hello]").choices[0].message.content == ANSWERS["[hello]"]


async def case_async() -> None:
    """Many at a time: whole, streamed and with tools."""
    async with openai.AsyncOpenAI(**OPTIONS) as client:

        async def streamed() -> str:
            stream = await client.chat.completions.create(**ask("[sea]", stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def called() -> Any:
            async with client.chat.completions.stream(**ask("[both]", tools=TOOLS)) as stream:
                final = await stream.get_final_completion()
            return [(call.function.name, call.function.arguments) for call in final.choices[0].message.tool_calls]

        whole = [client.chat.completions.create(**ask("[hello]")) for _ in range(8)]
        texts = [streamed() for _ in range(8)]
        calls = [called() for _ in range(4)]
        answers = await asyncio.gather(*whole, *texts, *calls)
    assert [answer.choices[0].message.content for answer in answers[:8]] == [ANSWERS["[hello]"]] * 8
    assert answers[8:16] == [ANSWERS["[sea]"]] * 8
    assert answers[16:] == [CALLS] * 4


if __name__ == "__main__":
    run(globals())
