"""`instructor`: an object of a class, by each of its ways to ask for one."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from cases import MODEL, TIMEOUT_S, api_key, base_url, run
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


def check(found: Person) -> None:
    """It is of a class of instructor's, which has Person's fields."""
    assert (found.name, found.age) == ("Ada", 36)


def ask(mode: instructor.Mode, word: str, **more: Any) -> Any:
    client = openai.OpenAI(base_url=base_url(), api_key=api_key(), timeout=TIMEOUT_S, max_retries=0)
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": word}],
        response_model=more.pop("response_model", Person),
        temperature=0,
        max_retries=0,
        **more,
    )


def case_tools() -> None:
    """A tool that must be called; instructor names it after the class."""
    check(ask(instructor.Mode.TOOLS, "[call person]"))


def case_json() -> None:
    """A JSON object, with the schema in the prompt."""
    check(ask(instructor.Mode.JSON, "[person]"))


def case_json_schema() -> None:
    """The schema is enforced while the answer is drawn."""
    check(ask(instructor.Mode.JSON_SCHEMA, "[person]"))


def case_partial() -> None:
    """A stream of what there is of the object so far."""
    *_, last = ask(instructor.Mode.JSON_SCHEMA, "[person]", response_model=instructor.Partial[Person], stream=True)
    check(last)


async def case_async() -> None:
    client = openai.AsyncOpenAI(base_url=base_url(), api_key=api_key(), timeout=TIMEOUT_S, max_retries=0)
    found = await instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "[call person]"}],
        response_model=Person,
        temperature=0,
        max_retries=0,
    )
    check(found)


if __name__ == "__main__":
    run(globals())
