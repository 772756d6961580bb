"""`langchain-openai`: messages, streams, tools, and the three ways to structured output."""

from __future__ import annotations

from typing import Any

from cases import ANSWERS, CONTEXT, MODEL, TIMEOUT_S, api_key, base_url, raised, run
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

OPTIONS: Any = {
    "model": MODEL,
    "base_url": base_url(),
    "api_key": api_key(),
    "temperature": 0,
    "timeout": TIMEOUT_S,
    "max_retries": 0,
}
model = ChatOpenAI(**OPTIONS)


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "[sunny]"


@tool
def get_time(city: str) -> str:
    """The time in a city."""
    assert city == "Oslo"
    return "[sunny]"


def case_invoke() -> None:
    """A message and its usage."""
    answer = model.invoke([("system", "Be brief."), ("user", "[hello]")])
    assert answer.content == ANSWERS["[hello]"]
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"


def case_stream() -> None:
    """Pieces that add up, with the usage at the end."""
    chunks = list(model.stream("[sea]", stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == ANSWERS["[sea]"]
    assert whole.usage_metadata["output_tokens"] > 2
    assert len(chunks) > 3


def case_completion() -> None:
    assert OpenAI(**OPTIONS).invoke("[hello]") == ANSWERS["[hello]"]


async def case_batch() -> None:
    """Several at a time."""
    answers = await model.abatch(["[hello]", "[sea]", "[hello]"])
    assert [answer.content for answer in answers] == [ANSWERS["[hello]"], ANSWERS["[sea]"], ANSWERS["[hello]"]]


def case_tools() -> None:
    """Two calls, whole and streamed; tools run; the answer to their results."""
    tools = {each.name: each for each in (get_weather, get_time)}
    bound = model.bind_tools(list(tools.values()))
    history: list[Any] = [HumanMessage("[both]")]
    answer = bound.invoke(history)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Rome"}),
        ("get_time", {"city": "Oslo"}),
    ]
    streamed = list(bound.stream(history))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [
        (call["name"], call["args"]) for call in answer.tool_calls
    ]
    results: list[ToolMessage] = [tools[call["name"]].invoke(call) for call in answer.tool_calls]
    assert bound.invoke([*history, answer, *results]).content == ANSWERS["[sunny]"]


def case_structured_json_schema() -> None:
    structured = model.with_structured_output(Person, method="json_schema")
    assert structured.invoke("[person]") == Person(name="Ada", age=36)
    *_, last = structured.stream("[person]")
    assert last == Person(name="Ada", age=36)


def case_structured_json_mode() -> None:
    structured = model.with_structured_output(Person, method="json_mode")
    assert structured.invoke("Answer in JSON. [person]") == Person(name="Ada", age=36)


def case_structured_function_calling() -> None:
    """A tool that must be called."""
    structured = model.with_structured_output(Person, method="function_calling")
    assert structured.invoke("[call person]") == Person(name="Ada", age=36)


def case_tool_choice_any() -> None:
    """`any` is OpenAI's `required`."""
    bound = model.bind_tools([get_weather, get_time], tool_choice="any", max_tokens=400)
    answer = bound.invoke("[weather]")
    assert answer.tool_calls or answer.response_metadata["finish_reason"] == "length", answer
    assert {call["name"] for call in answer.tool_calls} <= {"get_weather", "get_time"}, answer


def case_responses() -> None:
    """The same by /v1/responses: text, and a call."""
    model = ChatOpenAI(**OPTIONS, use_responses_api=True)
    assert model.invoke("[hello]").text == ANSWERS["[hello]"]
    (call,) = model.bind_tools([get_weather]).invoke("[weather]").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Rome"})


def case_context_exceeded() -> None:
    """The package has a class of its own for it, which it knows by the words of the error."""
    raised(ContextOverflowError, model.invoke, "sea " * 2 * CONTEXT)


if __name__ == "__main__":
    run(globals())
