"""router.choices: several answers with one fate, the first one ahead so that the others find its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from batonpb import inference_pb2

from baton.errors import BatonError, Reason
from router.choices import run_choices

Event = inference_pb2.GenerateEvent
REQUESTS = [inference_pb2.GenerateRequest(text="a"), inference_pb2.GenerateRequest(text="b")]


class Answers:
    """Stands for a router: answers of three tokens. `fails` names the answer that ends with an error after one."""

    def __init__(self, fails: tuple[str, int] | None = None) -> None:
        self.fails = fails
        self.story: list[str] = []
        self.open = 0

    async def ask(self, request: inference_pb2.GenerateRequest, choice: int) -> AsyncGenerator[Event, None]:
        name = f"{request.text}{choice}"
        self.story.append(f"{name} begins")
        self.open += 1
        try:
            yield Event(started=inference_pb2.Started(prompt_tokens=1))
            for index in range(3):
                await asyncio.sleep(0)
                self.story.append(f"{name} {index}")
                yield Event(tokens=inference_pb2.Tokens(first_index=index, ids=[index]))
                if self.fails == (request.text, choice):
                    raise BatonError(Reason.HANDOFF_FAILED, "Lost.")
            yield Event(finished=inference_pb2.Finished())
        finally:
            self.open -= 1
            self.story.append(f"{name} ends")


def test_each_answer_comes_whole_and_in_order() -> None:
    """Two questions, three answers each: six indices, each with its own events in order."""

    async def read() -> dict[int, list[str | None]]:
        found: dict[int, list[str | None]] = {}
        async with aclosing(run_choices(Answers().ask, REQUESTS, 3)) as events:
            async for index, event in events:
                found.setdefault(index, []).append(event.WhichOneof("event"))
        return found

    found = asyncio.run(read())
    assert found == {index: ["started", "tokens", "tokens", "tokens", "finished"] for index in range(6)}


def test_the_first_answer_goes_ahead() -> None:
    """The others begin when its second token is there, for the prompt has been handed over by then, and no later."""

    async def read() -> list[str]:
        answers = Answers()
        async with aclosing(run_choices(answers.ask, REQUESTS[:1], 3)) as events:
            async for _ in events:
                pass
        return answers.story

    story = asyncio.run(read())
    for name in ("a1", "a2"):
        assert story.index("a0 1") < story.index(f"{name} begins") < story.index("a0 ends")


def test_all_begin_at_once_where_they_are_to() -> None:
    """Answers that nodes have already wait for no other, which may stand in line."""

    async def read() -> list[str]:
        answers = Answers()
        async with aclosing(run_choices(answers.ask, REQUESTS[:1], 3, at_once=True)) as events:
            async for _ in events:
                pass
        return answers.story

    assert asyncio.run(read())[:3] == ["a0 begins", "a1 begins", "a2 begins"]


@pytest.mark.parametrize("fails", [("a", 0), ("a", 2), ("b", 1)])
def test_one_that_fails_fails_all(fails: tuple[str, int]) -> None:
    """The error is raised, and no answer is open any more."""

    async def read() -> None:
        answers = Answers(fails)
        async with aclosing(run_choices(answers.ask, REQUESTS, 3)) as events:
            with pytest.raises(BatonError, match=r"Lost\."):
                _ = [event async for event in events]
        assert answers.open == 0

    asyncio.run(read())


@pytest.mark.parametrize(("requests", "n"), [(1, 1), (1, 3), (2, 2)])
def test_who_stops_reading_ends_all(requests: int, n: int) -> None:
    """After the first token the reader closes: every answer is closed when that returns."""

    async def read() -> None:
        answers = Answers()
        async with aclosing(run_choices(answers.ask, REQUESTS[:requests], n)) as events:
            async for _, event in events:
                if event.HasField("tokens"):
                    break
        assert answers.open == 0
        assert answers.story

    asyncio.run(read())
