"""How the tokens of an answer get to its client. The loop's turns are the test's."""

from __future__ import annotations

from collections.abc import Callable

from batonpb import common_pb2, inference_pb2

from baton.errors import BatonError, Reason
from baton.ids import Attempt, RequestId, RequestKey
from router.answers import Collected
from router.config import RouterConfig
from router.job import TOKENS_AT_ONCE_MAX, Inbox, Job
from router.line import Place, Priority, Turns
from router.request import CheckedRequest
from router.retries import Retries, RetryConfig
from router.text import AnswerText
from tests.support.router_records import client_call


def test_tokens_that_come_while_a_rest_waits_for_its_turn() -> None:
    """The rest waits once, however much comes: an answer has no more of a turn than others. All of it comes, in order,
    and the job hears of it."""
    checked = CheckedRequest(prompt=(1,), sampling=common_pb2.SamplingSpec(), stop=(), include_stop=False)
    soon: list[Callable[[], None]] = []
    turns, sink = Turns(soon.append, lambda: 0.0), Collected()
    inbox = Inbox(key=RequestKey(request=RequestId("r"), attempt=Attempt(0)))
    job = Job(
        id=inbox.key.request,
        call=client_call(60.0),
        checked=checked,
        sink=sink,
        text=AnswerText(None, checked),
        config=RouterConfig(),
        turns=turns,
        now_s=lambda: 0.0,
        began_s=0.0,
        place=Place(priority=Priority.NORMAL, rank=(0.0, 1), size_bytes=1),
        retries=Retries(config=RetryConfig(), search_ms_max=10_000),
        stats=inference_pb2.RequestStats(),
        inbox=inbox,
    )
    inbox.on_put = job.came
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
