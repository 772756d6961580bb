"""`pydantic-ai`: an agent with tools, and each way to structured output."""

from __future__ import annotations

from cases import ANSWERS, MODEL, api_key, base_url, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, Tool, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

asked: list[str] = []


class Person(BaseModel):
    name: str
    age: int


ADA = Person(name="Ada", age=36)


def agent(api: type = OpenAIChatModel, **more: object) -> Agent:
    model = api(MODEL, provider=OpenAIProvider(base_url=base_url(), api_key=api_key()))
    return Agent(model, model_settings={"temperature": 0}, **more)


def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(f"weather {city}")
    return "[sunny]"


def get_time(city: str) -> str:
    """The time in a city."""
    asked.append(f"time {city}")
    return "[sunny]"


TOOLS = [Tool(function, strict=False) for function in (get_weather, get_time)]


async def case_text() -> None:
    result = await agent(system_prompt="Be brief.").run("[hello]")
    assert result.output == ANSWERS["[hello]"]
    assert result.usage.output_tokens > 0


async def case_stream() -> None:
    async with agent().run_stream("[sea]") as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]
    assert "".join(pieces) == ANSWERS["[sea]"]


async def case_tools() -> None:
    """Two calls in one turn, and the answer to their results."""
    asked.clear()
    result = await agent(tools=TOOLS).run("[both]")
    assert (sorted(asked), result.output) == (["time Oslo", "weather Rome"], ANSWERS["[sunny]"])


async def case_tool_output() -> None:
    """A tool that must be called: pydantic-ai's default."""
    assert (await agent(output_type=ToolOutput(Person, name="Person")).run("[call person]")).output == ADA


async def case_native_output() -> None:
    """By response_format."""
    assert (await agent(output_type=NativeOutput(Person)).run("[person]")).output == ADA


async def case_prompted_output() -> None:
    """By a prompt that has the schema."""
    assert (await agent(output_type=PromptedOutput(Person)).run("[person]")).output == ADA


async def case_reasoning() -> None:
    """What the model thinks is a part of its own."""
    result = await agent().run("[think]")
    kinds = {part.part_kind: part.content for part in result.all_messages()[-1].parts}
    assert kinds == {"thinking": "They ask of two and two.", "text": "It makes four."}


async def case_responses() -> None:
    """The same by /v1/responses."""
    asked.clear()
    result = await agent(OpenAIResponsesModel, tools=TOOLS).run("[both]")
    assert (sorted(asked), result.output) == (["time Oslo", "weather Rome"], ANSWERS["[sunny]"])


if __name__ == "__main__":
    run(globals())
