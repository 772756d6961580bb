"""The `openai` package, sync and async: what an application does with it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from cases import (
    ANSWERS,
    CONTEXT,
    MODEL,
    OSLO,
    PERSON,
    PERSON_SCHEMA,
    ROME,
    TIMEOUT_S,
    TOOLS,
    api_key,
    base_url,
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
    """The list has the model, with its context; it can be asked for by name."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).model_dump()["max_model_len"] == CONTEXT


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


def case_tool_choice_none_and_parallel() -> None:
    """`none` makes a call text; without parallel calls there is one."""
    (choice,) = chat("[both]", tools=TOOLS, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (ANSWERS["[both]"], None)
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
