"""How the tokens of an answer get to its client. The loop's turns are the test's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason
from baton.ids import Attempt, RequestId, RequestKey
from router.answers import AnswerPart, Collected
from router.config import RouterConfig
from router.job import TOKENS_AT_ONCE_MAX, Inbox, Job
from router.line import Place, Priority, Turns
from router.request import CheckedRequest
from router.retries import Retries, RetryConfig
from router.text import AnswerText
from tests.support.router_records import client_call


def make_job(sink: Collected, turns: Turns, now_s: Callable[[], float]) -> tuple[Job, Inbox]:
    checked = CheckedRequest(prompt=(1,), sampling=common_pb2.SamplingSpec(), stop=(), include_stop=False)
    inbox = Inbox(key=RequestKey(request=RequestId("r"), attempt=Attempt(0)))
    job = Job(
        id=inbox.key.request,
        call=client_call(60.0),
        checked=checked,
        sink=sink,
        text=AnswerText(None, checked),
        config=RouterConfig(),
        turns=turns,
        now_s=now_s,
        began_s=0.0,
        place=Place(priority=Priority.NORMAL, rank=(0.0, 1), size_bytes=1),
        retries=Retries(config=RetryConfig(), search_ms_max=10_000),
        stats=inference_pb2.RequestStats(),
        inbox=inbox,
    )
    inbox.on_put = job.came
    return job, inbox


def test_tokens_that_come_while_a_rest_waits_for_its_turn() -> None:
    """The rest waits once, however much comes: an answer has no more of a turn than others. All of it comes, in order,
    and the job hears of it."""
    soon: list[Callable[[], None]] = []
    turns, sink = Turns(soon.append, lambda: 0.0), Collected()
    _, inbox = make_job(sink, turns, lambda: 0.0)
    ids = list(range(3 * TOKENS_AT_ONCE_MAX))
    inbox.put(0, ids)
    for token in range(len(ids), len(ids) + 10):
        inbox.put_next(token, token)
        ids.append(token)
    assert [len(part.ids) for part in sink.parts] == [TOKENS_AT_ONCE_MAX]
    assert len(turns._waiting) == 1
    inbox.end(common_pb2.FINISH_REASON_LENGTH)
    inbox.news.clear()
    soon.pop()()
    assert [token for part in sink.parts for token in part.ids] == ids
    assert inbox.empty and inbox.news.is_set() and not turns._waiting


class Slow(Collected):
    """A client that has no room now and then."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.is_open = True
        self._rng = rng

    def tokens(self, part: AnswerPart) -> None:
        super().tokens(replace(part, ids=tuple(part.ids)))
        self.is_open = self._rng.random() > 0.2

    def token(self, index: int, token: int, text: str) -> None:
        super().token(index, token, text)
        self.is_open = self._rng.random() > 0.2


@pytest.mark.parametrize("seed", range(50))
def test_a_token_by_itself_goes_as_any_other(seed: int) -> None:
    """Tokens come by one, in numbers and again, while the client has room and while it has none. The short way of a
    plain token gives the same parts, books and times as the way of all others, and each token goes once, in order."""

    def play(*, may_stop: bool) -> tuple[object, ...]:
        rng, clock, soon = random.Random(seed), [0.0], list[Callable[[], None]]()
        sink = Slow(random.Random(seed))
        job, inbox = make_job(sink, Turns(soon.append, lambda: clock[0]), lambda: clock[0])
        job.text.may_stop = may_stop
        at = 0

        def let_go() -> None:
            if not sink.is_open:
                sink.is_open = True
                job._opened()
            turns, soon[:] = list(soon), []
            for turn in turns:
                turn()

        for _ in range(60):
            clock[0] += rng.random() * 0.004
            match rng.randrange(6):
                case 0 | 1 | 2:
                    inbox.put_next(at, at)
                    at += 1
                case 3:
                    count, again = rng.randrange(1, 400), min(at, rng.randrange(3))
                    inbox.put(at - again, list(range(at - again, at + count)))
                    at += count
                case _:
                    let_go()
        while not inbox.empty:
            let_go()
        assert [token for part in sink.parts for token in part.ids] == list(range(at))
        parts = [(part.first_index, part.ids, part.text, part.logprobs, part.place) for part in sink.parts]
        return parts, list(job.output), job.tokens_received, job.first_token_s, job.last_token_s, inbox.given

    assert play(may_stop=False) == play(may_stop=True)


def test_another_router_has_it_whatever_failed_before() -> None:
    """The prefill call fails, and then the decode node says that another router has the request: that counts. Any other
    word of the node's leaves the first failure, and a finished answer stays finished."""
    lost, other = BatonError(Reason.PEER_UNREACHABLE, "gone"), BatonError(Reason.TAKEN_OVER, "elsewhere")
    for later, expected in ((other, other), (BatonError(Reason.CANCELLED, "cancelled"), lost)):
        inbox = Inbox(key=RequestKey(request=RequestId("r"), attempt=Attempt(0)))
        inbox.fail(lost)
        inbox.give_up(later)
        assert (inbox.error, inbox.given_up) == (expected, True)
    inbox = Inbox(key=RequestKey(request=RequestId("r"), attempt=Attempt(0)))
    inbox.end(common_pb2.FINISH_REASON_STOP)
    inbox.give_up(other)
    assert inbox.error is None
