"""router.choices: several answers with one fate, the first one ahead so that the others find its blocks."""

from __future__ import annotations

import asyncio

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason
from router.answers import AnswerPart, AnswerSink, Collected
from router.choices import run_choices

REQUESTS = [inference_pb2.GenerateRequest(text="a"), inference_pb2.GenerateRequest(text="b")]


class Answers:
    """Stands for a router: answers of some tokens. `fails` names the answer that ends with an error after one."""

    def __init__(self, fails: tuple[str, int] | None = None, *, tokens: int = 3) -> None:
        self.tokens = tokens
        self.fails = fails
        self.story: list[str] = []
        self.open = 0

    async def ask(self, request: inference_pb2.GenerateRequest, choice: int, sink: AnswerSink) -> None:
        name = f"{request.text}{choice}"
        self.story.append(f"{name} begins")
        self.open += 1
        try:
            sink.started(inference_pb2.Started(prompt_tokens=1), None)
            for index in range(self.tokens):
                await asyncio.sleep(0)
                self.story.append(f"{name} {index}")
                sink.tokens(AnswerPart(first_index=index, ids=[index], text="", logprobs=(), place=None))
                if self.fails == (request.text, choice):
                    raise BatonError(Reason.HANDOFF_FAILED, "Lost.")
            sink.finished(inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH), None)
        finally:
            self.open -= 1
            self.story.append(f"{name} ends")


def test_each_answer_comes_whole_and_in_order() -> None:
    """Two questions, three answers each: six sinks, each with its own answer in order."""
    sinks = [Collected() for _ in range(6)]
    asyncio.run(run_choices(Answers().ask, REQUESTS, sinks))
    for sink in sinks:
        assert [part.first_index for part in sink.parts] == [0, 1, 2]
        assert sink.start.prompt_tokens == 1
        assert sink.end.reason == common_pb2.FINISH_REASON_LENGTH


def test_the_first_answer_goes_ahead() -> None:
    """The others begin when its second token is there, for the prompt has been handed over by then, and no later."""
    answers = Answers()
    asyncio.run(run_choices(answers.ask, REQUESTS[:1], [Collected() for _ in range(3)]))
    story = answers.story
    for name in ("a1", "a2"):
        assert story.index("a0 1") < story.index(f"{name} begins") < story.index("a0 ends")


def test_all_begin_at_once_where_they_are_to() -> None:
    """Answers that nodes have already wait for no other, which may stand in line."""
    answers = Answers()
    asyncio.run(run_choices(answers.ask, REQUESTS[:1], [Collected() for _ in range(3)], at_once=True))
    assert answers.story[:3] == ["a0 begins", "a1 begins", "a2 begins"]


@pytest.mark.parametrize("fails", [("a", 0), ("a", 2), ("b", 1)])
def test_one_that_fails_fails_all(fails: tuple[str, int]) -> None:
    """The error is raised, and no answer goes on any more."""
    answers = Answers(fails)
    with pytest.raises(BatonError, match=r"Lost\."):
        asyncio.run(run_choices(answers.ask, REQUESTS, [Collected() for _ in range(6)]))
    assert answers.open == 0


@pytest.mark.parametrize(("requests", "n"), [(1, 1), (1, 3), (2, 1), (2, 2)])
def test_who_leaves_ends_all(requests: int, n: int) -> None:
    """The call is cancelled once one answer has begun: no answer goes on when that has come through."""

    async def leave() -> None:
        answers, begun = Answers(tokens=100), asyncio.Event()

        class First(Collected):
            def tokens(self, part: AnswerPart) -> None:
                begun.set()

        sinks: list[AnswerSink] = [First(), *(Collected() for _ in range(requests * n - 1))]
        running = asyncio.create_task(run_choices(answers.ask, REQUESTS[:requests], sinks))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert answers.open == 0
        assert "a0 99" not in answers.story

    asyncio.run(leave())
