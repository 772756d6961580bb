"""`openai-agents`: agents with tools, over Responses, which is its default, and over chat completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import ANSWERS, MODEL, TIMEOUT_S, api_key, base_url, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
asked: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@function_tool(strict_mode=False)
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(f"weather {city}")
    return "[sunny]"


@function_tool(strict_mode=False)
def get_time(city: str) -> str:
    """The time in a city."""
    asked.append(f"time {city}")
    return "[sunny]"


def agent(api: type[OpenAIResponsesModel | OpenAIChatCompletionsModel], **more: object) -> Agent:
    client = AsyncOpenAI(base_url=base_url(), api_key=api_key(), timeout=TIMEOUT_S, max_retries=0)
    return Agent(
        name="Helper",
        instructions="Be brief.",
        model=api(model=MODEL, openai_client=client),
        **{"model_settings": ModelSettings(temperature=0), **more},
    )


async def text(api: type) -> None:
    result = await Runner.run(agent(api), "[hello]")
    assert result.final_output == ANSWERS["[hello]"]


async def tools(api: type) -> None:
    """Two calls in one turn, and the answer to their results."""
    asked.clear()
    result = await Runner.run(agent(api, tools=[get_weather, get_time]), "[both]")
    assert (sorted(asked), result.final_output) == (["time Oslo", "weather Rome"], ANSWERS["[sunny]"])


async def tools_in_a_stream(api: type) -> None:
    asked.clear()
    result = Runner.run_streamed(agent(api, tools=[get_weather, get_time]), "[both]")
    kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
    assert kinds.count("tool_call_output_item") == 2
    assert (sorted(asked), result.final_output) == (["time Oslo", "weather Rome"], ANSWERS["[sunny]"])


async def tool_choice(api: type) -> None:
    """A tool that must be called first."""
    asked.clear()
    settings = ModelSettings(temperature=0, tool_choice="get_weather")
    result = await Runner.run(agent(api, tools=[get_weather, get_time], model_settings=settings), "[weather]")
    assert {each.split()[0] for each in asked} == {"weather"}
    assert result.final_output == ANSWERS["[sunny]"]


async def structured(api: type) -> None:
    """The answer is an object of a class."""
    result = await Runner.run(agent(api, output_type=Person), "[person]")
    assert result.final_output == Person(name="Ada", age=36)


def cases() -> dict[str, Callable[[], Any]]:
    scenes = (text, tools, tools_in_a_stream, tool_choice, structured)
    ways = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}
    return {f"case_{way}_{scene.__name__}": partial(scene, api) for way, api in ways.items() for scene in scenes}


if __name__ == "__main__":
    run(cases())
