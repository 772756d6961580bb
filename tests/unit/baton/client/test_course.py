"""Which router a request calls next, how and when: the pure part of the client."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.client.course import (
    PAUSE_MS_MAX,
    PAUSE_MS_MIN,
    REFUSALS_MAX,
    REST_MS_MIN,
    Call,
    Course,
    GiveUp,
    RouterBook,
    Verdict,
    judge,
)
from baton.errors import BatonError, Code, Reason

GONE = BatonError(Reason.PEER_UNREACHABLE, "The router does not answer.")


def refusal(reason: Reason = Reason.QUEUE_FULL, *, retry_after_ms: int | None = None) -> BatonError:
    return BatonError(reason, "Not now.", retry_after_ms=retry_after_ms)


def course(routers: int = 1, *, timeout_s: float = 60.0, changing: bool = False, **limits: float | int) -> Course:
    book = RouterBook(routers, changing=changing)
    return Course(book, began_s=0.0, timeout_s=timeout_s, rng=random.Random(1), **limits)  # type: ignore[arg-type]


def next_call(asked: Course, error: BatonError, *, by_router: bool = False, now_s: float = 0.0) -> Call:
    found = asked.failed(error, by_router=by_router, now_s=now_s)
    assert isinstance(found, Call), found
    return found


def end(asked: Course, error: BatonError, *, by_router: bool = False, now_s: float = 0.0) -> GiveUp:
    found = asked.failed(error, by_router=by_router, now_s=now_s)
    assert isinstance(found, GiveUp), found
    return found


AGAIN = {
    Reason.RATE_LIMIT_EXCEEDED, Reason.QUEUE_FULL, Reason.DECODE_FULL, Reason.DIRECTORY_FULL, Reason.PINS_FULL,
    Reason.TOO_MANY_CALLS, Reason.TOO_MANY_PEERS, Reason.NO_PREFILL_NODE, Reason.NO_DECODE_NODE,
    Reason.DIRECTORY_LOST, Reason.PEER_UNREACHABLE, Reason.PAIR_FENCING, Reason.GRANT_REVOKED, Reason.HANDOFF_FAILED,
}  # fmt: skip


@pytest.mark.parametrize("reason", list(Reason))
def test_what_a_router_says(reason: Reason) -> None:
    """The errors that docs/errors.md gives another chance are tried again, the request's own never. A router that takes
    no new requests is not the cluster's word."""
    expected = Verdict.REFUSED if reason in AGAIN else Verdict.FINAL
    assert judge(BatonError(reason, "Why."), by_router=True) is (
        Verdict.LOST if reason is Reason.NODE_DRAINING else expected
    )


@pytest.mark.parametrize("code", list(Code))
def test_what_grpc_says(code: Code) -> None:
    """A connection that ends has many statuses. Too many calls are a refusal; the deadline, a key that a proxy refuses
    or a call that is not known there are the end."""
    lost = {Code.UNAVAILABLE, Code.CANCELLED, Code.INTERNAL, Code.UNKNOWN}
    refused = {Code.RESOURCE_EXHAUSTED, Code.ABORTED}
    expected = Verdict.LOST if code in lost else Verdict.REFUSED if code in refused else Verdict.FINAL
    assert judge(BatonError(Reason.UNRECOGNISED, "Why.", code=code), by_router=False) is expected


def test_a_lost_router_leads_to_the_others_at_once() -> None:
    """Three routers: the second and the third are asked without a pause, the first again after one."""
    asked = course(3)
    assert asked.call == Call(router=0)
    assert [next_call(asked, GONE) for _ in range(2)] == [Call(router=1), Call(router=2)]
    again = next_call(asked, GONE)
    assert again.router == 0
    assert PAUSE_MS_MIN / 2e3 <= again.after_s <= PAUSE_MS_MIN / 1e3


def test_an_answer_is_gone_on_with() -> None:
    """Before the first token of a request without a resume token it is asked anew; with one it is attached to; without
    one an answer that has begun is over."""
    asked = course(2)
    asked.heard(attachable=False, new=False)
    assert next_call(asked, GONE) == Call(router=1)
    asked.heard(attachable=True, new=False)
    assert next_call(asked, GONE) == Call(router=0, attach=True, after_s=asked.call.after_s)
    asked.heard(attachable=True, new=True)
    assert next_call(asked, GONE) == Call(router=1, attach=True)
    plain = course(2)
    plain.heard(attachable=False, new=True)
    assert end(plain, GONE) == GiveUp(error=GONE, over=False)


def test_the_only_router_is_gone_for_a_while() -> None:
    """It is tried until there is no time left, with pauses that grow; the error says how long, and what the last try
    met."""
    asked, now_s, pauses = course(timeout_s=30), 0.0, []
    while isinstance(found := asked.failed(GONE, by_router=False, now_s=now_s), Call):
        pauses.append(found.after_s)
        now_s += found.after_s
    assert len(pauses) < 60
    assert max(pauses) <= PAUSE_MS_MAX / 1e3
    assert 29 < now_s < 30
    assert found.error.reason is Reason.DEADLINE
    assert found.error.message == "There was no whole answer within 30 s. The last try: The router does not answer."


def test_no_router_answers_a_new_request() -> None:
    """With a time for that, each router is tried, and then the request is given up with what the last one met. Once one
    has answered, that time is no matter."""
    asked = course(2, connect_timeout_s=0)
    next_call(asked, GONE)
    assert end(asked, GONE) == GiveUp(error=GONE, over=False)
    asked = course(2, connect_timeout_s=0)
    asked.heard(attachable=True, new=True)
    for _ in range(10):
        next_call(asked, GONE)


def test_the_servers_time_is_kept() -> None:
    """A full cluster says when to come back: no sooner, at any router. A time behind the deadline ends the request with
    what the server has said; no time means growing pauses."""
    asked = course(3, timeout_s=10)
    assert next_call(asked, refusal(retry_after_ms=1500), by_router=True).after_s == 1.5
    assert next_call(asked, refusal(), by_router=True).after_s <= PAUSE_MS_MIN / 1e3
    late = refusal(retry_after_ms=9000)
    assert end(asked, late, by_router=True, now_s=2.0) == GiveUp(error=late, over=False)


def test_refusals_are_counted() -> None:
    """In a row; a token in between begins the count anew."""
    asked = course(timeout_s=1e6)
    for _ in range(REFUSALS_MAX):
        next_call(asked, refusal(), by_router=True)
    asked.heard(attachable=True, new=False)
    assert isinstance(asked.failed(refusal(), by_router=True, now_s=0.0), GiveUp)
    asked.heard(attachable=True, new=True)
    for _ in range(REFUSALS_MAX):
        next_call(asked, refusal(), by_router=True)
    never = course(retries_max=0)
    assert end(never, GONE) == GiveUp(error=GONE, over=False)


def test_a_draining_router() -> None:
    """It says that another one takes the request at once: its time to come back counts only where there is no other."""
    draining = refusal(Reason.NODE_DRAINING, retry_after_ms=1000)
    assert next_call(course(2), draining, by_router=True) == Call(router=1)
    assert next_call(course(1), draining, by_router=True).after_s == 1.0
    assert next_call(course(1, changing=True), draining, by_router=True).after_s <= PAUSE_MS_MIN / 1e3


def test_what_is_over_for_every_router() -> None:
    """Nothing is asked again, and nothing is left to forget. Our own deadline leaves the request where it is."""
    for reason in (Reason.BAD_FIELD, Reason.TAKEN_OVER, Reason.CANCELLED, Reason.NOT_RESUMABLE, Reason.INTERNAL):
        error = BatonError(reason, "Over.")
        assert end(course(3), error, by_router=True) == GiveUp(error=error, over=True)
    late = BatonError(Reason.DEADLINE, "The router did not answer in time.")
    ended = end(course(3), late)
    assert isinstance(ended, GiveUp)
    assert (str(ended.error.message), ended.over) == ("There was no whole answer within 60 s.", False)


def test_the_refusal_says_more_than_the_cancel_that_it_left() -> None:
    """A router ends an answer since no node has room, and cancels it. The attach finds it cancelled."""
    asked, full = course(), refusal(Reason.DECODE_FULL)
    asked.heard(attachable=True, new=True)
    next_call(asked, full, by_router=True)
    asked.heard(attachable=True, new=False)
    assert end(asked, refusal(Reason.CANCELLED), by_router=True) == GiveUp(error=full, over=True)


def test_one_loss_of_many_calls_counts_once() -> None:
    """A hundred streams of a router end at once: it rests for the shortest time, not for the longest. What is heard of
    it ends its rest."""
    book = RouterBook(2)
    for _ in range(100):
        book.lost(0, 5.0)
    rested_s = 5.0 + REST_MS_MIN / 1e3
    assert {book.pick(5.0) for _ in range(4)} == {1}
    assert {book.pick(rested_s) for _ in range(4)} == {0, 1}
    book.heard(0)
    assert {book.pick(rested_s) for _ in range(4)} == {0, 1}


def test_an_attach_of_our_own_that_was_lost() -> None:
    """A router is stopped with our attach in its buffers, and carries it out when it goes on: it takes the answer from
    the router that we have attached to since. We attach again, as often as attaches were lost; then it was somebody
    else."""
    asked, taken = course(2), BatonError(Reason.TAKEN_OVER, "Another one has it.")
    asked.heard(attachable=True, new=True)
    assert next_call(asked, GONE).attach
    assert next_call(asked, GONE).attach
    asked.heard(attachable=True, new=True)
    assert next_call(asked, taken, by_router=True).attach
    asked.heard(attachable=True, new=True)
    assert end(asked, taken, by_router=True) == GiveUp(error=taken, over=True)


def test_one_request_tries_a_lost_router() -> None:
    """When its rest is over one request finds out whether it is back; the others do not wait for that. If it is not, it
    rests for longer."""
    book = RouterBook(2)
    book.lost(0, 0.0)
    picked = [book.pick(1.0) for _ in range(6)]
    assert sorted(picked) == [0, 1, 1, 1, 1, 1]
    book.lost(0, 2.0)
    assert {book.pick(2.0 + 1.9 * REST_MS_MIN / 1e3) for _ in range(4)} == {1}


ERRORS = st.sampled_from(
    [
        (GONE, False),
        (BatonError(Reason.CANCELLED, "gRPC is stopping."), False),
        (refusal(), True),
        (refusal(retry_after_ms=700), True),
        (refusal(Reason.NODE_DRAINING, retry_after_ms=1000), True),
        (refusal(Reason.NO_DECODE_NODE, retry_after_ms=400), True),
    ]
)
STEPS = st.lists(st.one_of(ERRORS, st.sampled_from(["started", "tokens"])), max_size=80)


@given(routers=st.integers(1, 4), resumable=st.booleans(), steps=STEPS)
def test_whatever_happens(routers: int, resumable: bool, steps: list[tuple[BatonError, bool] | str]) -> None:
    """An answer that has begun is never asked anew; only what has a token is attached to; no call begins behind the
    deadline; no pause is shorter than what a full cluster asks for; nobody who was just lost is asked at once while
    there is another router; and a request never goes round without a pause."""
    asked = course(routers, timeout_s=40)
    now_s, has_token, begun, without_pause = 0.0, False, False, 0
    for step in steps:
        if isinstance(step, str):
            has_token, begun = resumable, begun or step == "tokens"
            asked.heard(attachable=has_token, new=step == "tokens")
            without_pause = 0 if step == "tokens" else without_pause
            continue
        before, (error, by_router) = asked.call.router, step
        found = asked.failed(error, by_router=by_router, now_s=now_s)
        if isinstance(found, GiveUp):
            assert error.reason is not Reason.BAD_FIELD
            assert (begun and not resumable) or found.error is error or found.error.reason is Reason.DEADLINE
            return
        assert found.attach is has_token
        assert found.attach or not begun
        assert found.router != before or routers == 1
        assert now_s + found.after_s < asked.deadline_s
        if error.retry_after_ms is not None and error.reason is not Reason.NODE_DRAINING:
            assert found.after_s >= error.retry_after_ms / 1e3
        without_pause = 0 if found.after_s else without_pause + 1
        assert without_pause < routers
        now_s += found.after_s
