"""Which failed attempts are placed again, which are resumed, and at what pace. Pure: no clock, no cluster."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import BatonError, InvalidField, Reason
from baton.ids import Attempt, RequestId, RequestKey
from baton.retry_time import RESUMED_PAUSE_MS_MAX, RESUMED_WAIT_MS_MIN
from router.job import Inbox
from router.retries import (
    DEATHS,
    FULL,
    LOST_WAITING,
    PLACE_AGAIN,
    RESUMABLE,
    ResumptionPace,
    Retries,
    RetryConfig,
    Verdict,
    pause_ms,
)

CLIENTS_OWN = frozenset(
    {
        Reason.EMPTY_PROMPT,
        Reason.PROMPT_TOO_LONG,
        Reason.TOKEN_OUT_OF_RANGE,
        Reason.SAMPLING_OUT_OF_RANGE,
        Reason.BAD_FIELD,
        Reason.UNKNOWN_MODEL,
        Reason.REQUEST_EXISTS,
        Reason.DEADLINE,
        Reason.CANCELLED,
    }
)


SEARCHED = PLACE_AGAIN - FULL
"""No node that is there has answered."""


def by_name(reasons: Iterable[Reason]) -> list[Reason]:
    return sorted(reasons, key=lambda reason: reason.value)


def failed(reason: Reason) -> BatonError:
    return BatonError(reason, "It failed.")


def pace_of(**config: Any) -> ResumptionPace:
    return ResumptionPace(RetryConfig(resume_jitter_ms_max=0, **config), now_s=0.0, rng=random.Random(0))


def retries(**config: Any) -> Retries:
    """Of a request whose first look for a node has failed at 0 s."""
    return Retries(config=RetryConfig(**config), search_ms_max=10_000, give_up_s=10.0)


@pytest.mark.parametrize("reason", by_name(SEARCHED))
def test_nobody_had_taken_it(reason: Reason) -> None:
    """It is placed again while there is time, however often, and no death is counted."""
    job = retries()
    for _ in range(50):
        assert job.judge(failed(reason), granted=False, now_s=9.9) is Verdict.PLACE_AGAIN
    assert (job.deaths, job.resumptions) == (0, 0)
    with pytest.raises(BatonError) as refused:
        job.judge(failed(reason), granted=False, now_s=10.0)
    assert refused.value.reason is reason


@pytest.mark.parametrize("reason", by_name(SEARCHED))
def test_the_wait_in_the_queue_of_a_lost_node_was_no_search(reason: Reason) -> None:
    """A request may look for a node until 10 s, has looked for 4 and waited for 20: it may look for 6 more where its
    node was lost, and no more where a node says that there is no room."""
    job = retries()
    if reason in LOST_WAITING:
        assert job.judge(failed(reason), granted=False, now_s=24.0, queued_s=4.0) is Verdict.PLACE_AGAIN
        assert job.judge(failed(reason), granted=False, now_s=29.9, queued_s=29.9) is Verdict.PLACE_AGAIN
        now_s, queued_s = 30.0, 30.0
    else:
        now_s, queued_s = 24.0, 4.0
    with pytest.raises(BatonError) as refused:
        job.judge(failed(reason), granted=False, now_s=now_s, queued_s=queued_s)
    assert refused.value.reason is reason
    assert job.give_up_s == (30.0 if reason in LOST_WAITING else 10.0)


@pytest.mark.parametrize("reason", by_name(SEARCHED))
def test_the_wait_for_a_node_that_was_never_reached_is_search(reason: Reason) -> None:
    """No node has said that it has the request, however long that took: its time to look runs out all the same."""
    job = retries()
    assert job.judge(failed(reason), granted=False, now_s=9.0) is Verdict.PLACE_AGAIN
    with pytest.raises(BatonError) as refused:
        job.judge(failed(reason), granted=False, now_s=10.0, queued_s=None)
    assert (refused.value.reason, job.give_up_s) == (reason, 10.0)


def test_a_node_that_has_restarted_had_nothing_in_its_queue() -> None:
    """INCARNATION_MISMATCH is answered at once, before the node takes the request in."""
    assert Reason.INCARNATION_MISMATCH not in LOST_WAITING


@pytest.mark.parametrize("reason", by_name(FULL))
def test_waiting_for_room_takes_nothing_from_the_search(reason: Reason) -> None:
    """All nodes are full for an hour. Then one dies with the request in its queue: it has all of its time to look for
    another one. And the other way round: where it has looked for nearly all of its time, it may wait for room."""
    job = Retries(config=RetryConfig(), search_ms_max=10_000)
    for now_s in range(0, 3600, 60):
        assert job.judge(failed(reason), granted=False, now_s=float(now_s)) is Verdict.WAIT
    gone = failed(Reason.PEER_UNREACHABLE)
    assert job.judge(gone, granted=False, now_s=3600.0) is Verdict.PLACE_AGAIN
    assert job.judge(gone, granted=False, now_s=3609.9) is Verdict.PLACE_AGAIN
    assert job.judge(failed(reason), granted=False, now_s=3700.0) is Verdict.WAIT
    assert job.judge(gone, granted=False, now_s=3800.0) is Verdict.PLACE_AGAIN
    assert job.judge(gone, granted=False, now_s=3809.9) is Verdict.PLACE_AGAIN
    with pytest.raises(BatonError) as lost:
        job.judge(gone, granted=False, now_s=3810.0)
    assert lost.value.reason is Reason.PEER_UNREACHABLE


@pytest.mark.parametrize("reason", by_name(FULL))
def test_an_answer_that_has_begun_does_not_wait_in_line(reason: Reason) -> None:
    """It goes before all others, for a time: until then it is placed again and again."""
    job = retries(resume_wait_ms_max=5_000)
    assert job.judge(failed(Reason.PEER_UNREACHABLE), granted=True, now_s=100.0) is Verdict.RESUME
    assert job.judge(failed(reason), granted=False, now_s=104.9, in_answer=True) is Verdict.PLACE_AGAIN
    with pytest.raises(BatonError) as full:
        job.judge(failed(reason), granted=False, now_s=105.0, in_answer=True)
    assert full.value.reason is reason


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("reason", by_name(CLIENTS_OWN))
def test_the_clients_own_error_is_never_tried_again(reason: Reason, granted: bool) -> None:
    with pytest.raises(BatonError) as refused:
        retries().judge(failed(reason), granted=granted, now_s=0.0)
    assert refused.value.reason is reason


@pytest.mark.parametrize("reason", by_name(DEATHS))
def test_the_second_death_is_the_last(reason: Reason) -> None:
    """A request that two nodes have died with may be what kills them."""
    job = retries()
    assert job.judge(failed(reason), granted=True, now_s=3.0) is Verdict.RESUME
    assert (job.deaths, job.resumptions, job.give_up_s) == (1, 1, 33.0)
    with pytest.raises(BatonError, match=r"2 of them with the death of a node.*It failed") as spent:
        job.judge(failed(reason), granted=True, now_s=4.0)
    assert spent.value.reason is Reason.ATTEMPTS_SPENT


@pytest.mark.parametrize("reason", by_name(DEATHS))
def test_a_grant_by_a_node_that_was_lost_before_is_no_death(reason: Reason) -> None:
    """Prefill nodes reach a decode node that this router has lost, and grant there again and again. The request has
    killed nothing; the limit of its resumptions is its end."""
    job = retries(resumptions_max=4)
    assert job.judge(failed(reason), granted=True, now_s=0.0) is Verdict.RESUME
    for _ in range(3):
        assert job.judge(failed(reason), granted=True, now_s=1.0, lost_before=True) is Verdict.RESUME
    assert (job.deaths, job.resumptions) == (1, 4)
    with pytest.raises(BatonError, match="5 attempts at this request have failed, 1 of them with the death"):
        job.judge(failed(reason), granted=True, now_s=2.0, lost_before=True)


@pytest.mark.parametrize("reason", by_name(RESUMABLE - DEATHS))
def test_handoffs_that_fail_on_living_nodes(reason: Reason) -> None:
    """They are no deaths, and have a limit of their own."""
    job = retries(resumptions_max=3)
    for _ in range(3):
        assert job.judge(failed(reason), granted=True, now_s=0.0) is Verdict.RESUME
    with pytest.raises(BatonError) as spent:
        job.judge(failed(reason), granted=True, now_s=0.0)
    assert (spent.value.reason, job.deaths) == (Reason.ATTEMPTS_SPENT, 0)


def test_a_resumption_may_look_for_nodes_for_a_time_of_its_own() -> None:
    """The time to place a new request is long over when its node dies."""
    job = retries(resume_wait_ms_max=5_000)
    assert job.judge(failed(Reason.PEER_UNREACHABLE), granted=True, now_s=100.0) is Verdict.RESUME
    assert job.judge(failed(Reason.NO_DECODE_NODE), granted=False, now_s=104.9) is Verdict.PLACE_AGAIN
    with pytest.raises(BatonError) as nobody:
        job.judge(failed(Reason.NO_DECODE_NODE), granted=False, now_s=105.0)
    assert nobody.value.reason is Reason.NO_DECODE_NODE


def test_tokens_may_come_before_the_word_of_the_grant() -> None:
    """They come from the decode node, the word from the prefill node: either shows that the attempt was taken."""
    attempt = Inbox(key=RequestKey(request=RequestId("a" * 32), attempt=Attempt(0)))
    before = attempt.taken
    attempt.put(0, [5])
    assert (before, attempt.taken, attempt.granted) == (False, True, False)


def test_a_burst_goes_at_once_and_the_rest_at_the_pace() -> None:
    pace = pace_of(resumptions_burst=4, resumptions_per_s=10)
    assert [pace.take_turn(0.0) for _ in range(6)] == [0, 0, 0, 0, 0.1, 0.2]
    assert pace.take_turn(1.2) == 0, "a second later it has filled up"


def test_two_routers_share_the_pace() -> None:
    pace = pace_of(resumptions_burst=4, resumptions_per_s=10)
    pace.routers = 2
    assert [pace.take_turn(0.0) for _ in range(4)] == [0, 0, 0.2, 0.4]


def test_too_many_wait_for_their_turn() -> None:
    """One more is refused, and told when to come back."""
    pace = pace_of(resumptions_burst=1, resumptions_per_s=10, resumptions_waiting_max=2)
    assert [pace.take_turn(0.0) for _ in range(3)] == [0, 0.1, 0.2]
    with pytest.raises(BatonError, match="resumptions_waiting_max") as full:
        pace.take_turn(0.0)
    assert (full.value.reason, full.value.retry_after_ms) == (Reason.ATTEMPTS_SPENT, 201)
    assert pace.take_turn(0.1) == pytest.approx(0.2), "the refused one has no turn"


def test_the_requests_of_one_lost_node_are_spread_out() -> None:
    """All fail in one instant, and their next attempts begin at random within the limit after their turns."""
    pace = ResumptionPace(RetryConfig(resume_jitter_ms_max=50), now_s=0.0, rng=random.Random(1))
    waits_s = [pace.take_turn(0.0) for _ in range(100)]
    assert len(set(waits_s)) == 100
    assert 0 <= min(waits_s) < 0.005 and 0.045 < max(waits_s) <= 0.05


@given(
    gaps_s=st.lists(st.floats(0, 2), min_size=1, max_size=60),
    burst=st.integers(1, 20),
    rate=st.integers(1, 50),
    routers=st.integers(1, 5),
)
def test_the_pace_is_kept_over_any_time(gaps_s: list[float], burst: int, rate: int, routers: int) -> None:
    """Whenever they ask: from any turn on, no more turns begin within a time than the burst and the rate allow."""
    pace = pace_of(resumptions_burst=burst, resumptions_per_s=rate)
    pace.routers = routers
    now_s, begins = 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        begins.append(now_s + pace.take_turn(now_s))
    for first, begin_s in enumerate(begins):
        for last in range(first, len(begins)):
            allowed = max(1.0, burst / routers) + (begins[last] - begin_s) * rate / routers
            assert last - first + 1 <= allowed + 1 + 1e-6


@given(retry_ms=st.integers(1, 100_000), rounds=st.integers(0, 40), spread=st.floats(0, 1))
def test_a_decode_node_keeps_room_for_longer_than_a_router_pauses(retry_ms: int, rounds: int, spread: float) -> None:
    """Whatever the settings of the two: the one in the middle of its answer is back while its room is kept."""
    pause = pause_ms(retry_ms, rounds, resumed=True, spread=spread)
    assert 0 < pause <= RESUMED_PAUSE_MS_MAX < RESUMED_WAIT_MS_MIN
    assert pause <= pause_ms(retry_ms, rounds, resumed=False, spread=spread)


def test_the_pause_doubles() -> None:
    """From the middle of its spread: four times for a new request, twice for one in the middle of its answer."""
    assert [pause_ms(50, rounds, resumed=False, spread=0.5) for rounds in range(6)] == [50, 100, 200, 400, 800, 800]
    assert [pause_ms(50, rounds, resumed=True, spread=0.5) for rounds in range(4)] == [50, 100, 200, 200]


@pytest.mark.parametrize("name", ["deaths_max", "resumptions_max", "resumptions_per_s", "resolve_ms_max"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(InvalidField, match=name):
        RetryConfig(**{name: 0})


def test_the_jitter_may_be_none_but_not_negative() -> None:
    assert RetryConfig(resume_jitter_ms_max=0).resume_jitter_ms_max == 0
    with pytest.raises(InvalidField, match="resume_jitter_ms_max"):
        RetryConfig(resume_jitter_ms_max=-1)
