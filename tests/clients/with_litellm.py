"""`litellm`: its one function with Baton behind it, by the provider of OpenAI-compatible servers."""

from __future__ import annotations

import json
from typing import Any

import litellm
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

PROVIDERS = ("openai", "hosted_vllm")
CALLS = [("get_weather", json.loads(ROME)), ("get_time", json.loads(OSLO))]


def ask(word: str, provider: str = "openai", **more: Any) -> Any:
    return {
        "model": f"{provider}/{MODEL}",
        "api_base": base_url(),
        "api_key": api_key(),
        "messages": [{"role": "user", "content": word}],
        "temperature": 0,
        "timeout": TIMEOUT_S,
        "num_retries": 0,
        **more,
    }


def case_text() -> None:
    """Whole and streamed, by both providers that fit."""
    for provider in PROVIDERS:
        answer = litellm.completion(**ask("[hello]", provider))
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWERS["[hello]"], "stop")
        assert answer.usage.completion_tokens > 0
        chunks = litellm.completion(**ask("[sea]", provider, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWERS["[sea]"]


def case_completion() -> None:
    asked = {**ask(""), "model": f"text-completion-openai/{MODEL}", "prompt": "[hello]", "max_tokens": 50}
    del asked["messages"]
    assert litellm.text_completion(**asked).choices[0].text == ANSWERS["[hello]"]


def calls_of(message: Any) -> Any:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def case_tools() -> None:
    """Two calls, whole and put together from a stream; then the answer to their results."""
    answer = litellm.completion(**ask("[both]", tools=TOOLS))
    message = answer.choices[0].message
    assert (answer.choices[0].finish_reason, calls_of(message)) == ("tool_calls", CALLS)
    chunks = list(litellm.completion(**ask("[both]", tools=TOOLS, stream=True)))
    assert calls_of(litellm.stream_chunk_builder(chunks).choices[0].message) == CALLS
    results = [{"role": "tool", "tool_call_id": call.id, "content": "[sunny]"} for call in message.tool_calls]
    history = [{"role": "user", "content": "[both]"}, message.model_dump(), *results]
    answer = litellm.completion(**ask("", tools=TOOLS, messages=history))
    assert answer.choices[0].message.content == ANSWERS["[sunny]"]


def case_tool_choice() -> None:
    """One that must be called."""
    (choice,) = litellm.completion(**ask("[weather]", tools=TOOLS, tool_choice="required", max_tokens=400)).choices
    calls = choice.message.tool_calls or []
    assert calls or choice.finish_reason == "length", choice
    assert {call.function.name for call in calls} <= {"get_weather", "get_time"}, choice


def case_response_format() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON_SCHEMA}}
    for provider in PROVIDERS:
        answer = litellm.completion(**ask("[person]", provider, response_format=schema))
        assert answer.choices[0].message.content == PERSON


def case_reasoning() -> None:
    """What was thought has litellm's own place."""
    message = litellm.completion(**ask("[think]")).choices[0].message
    assert (message.content, message.reasoning_content) == ("It makes four.", "They ask of two and two.")


def case_errors() -> None:
    """It knows by the words that the context is exceeded."""
    raised(litellm.ContextWindowExceededError, litellm.completion, **ask("sea " * 2 * CONTEXT))
    raised(litellm.NotFoundError, litellm.completion, **ask("[hello]", model="openai/other"))
    raised(litellm.AuthenticationError, litellm.completion, **ask("[hello]", api_key="baton-none"))


async def case_async() -> None:
    answer = await litellm.acompletion(**ask("[hello]"))
    assert answer.choices[0].message.content == ANSWERS["[hello]"]


if __name__ == "__main__":
    run(globals())
