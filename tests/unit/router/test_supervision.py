"""When workers are started, spared, killed and replaced."""

from __future__ import annotations

from router.supervision import (
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    SILENT_S,
    START_S_MAX,
    STEADY_S,
    STOPPED_S,
    Kill,
    Start,
    Supervision,
)


def one(now_s: float = 0.0) -> Supervision:
    """A worker that has been started and is ready."""
    workers = Supervision(1, now_s=now_s)
    assert workers.tick(now_s) == [Start(worker=0)]
    workers.heard(0, now_s)
    return workers


def ticked(workers: Supervision, begin_s: float, end_s: float) -> None:
    """Nothing is due from the begin until just before the end, and nobody stands still meanwhile."""
    for number in range(round((end_s - begin_s) * 10)):
        assert workers.tick(begin_s + number / 10) == []


def test_all_are_started_once_and_get_connections_when_ready() -> None:
    workers = Supervision(2, now_s=0.0)
    assert workers.tick(0.0) == [Start(worker=0), Start(worker=1)]
    assert workers.tick(1.0) == []
    workers.heard(1, 1.0)
    assert [workers.able(each, 1.0) for each in (0, 1)] == [False, True]


def test_a_silent_worker_gets_no_connection_until_it_reports_again() -> None:
    workers = one()
    assert workers.able(0, SILENT_S - 0.01)
    assert not workers.able(0, SILENT_S)
    assert workers.tick(SILENT_S) == []
    workers.heard(0, SILENT_S)
    assert workers.able(0, SILENT_S)


def test_a_stopped_worker_is_killed_once_and_replaced_at_once() -> None:
    workers = one()
    ticked(workers, 0.0, STOPPED_S)
    assert workers.tick(STOPPED_S) == [Kill(worker=0, why="it has stopped reporting")]
    workers.heard(0, STOPPED_S)  # it went on just before the signal came
    assert not workers.able(0, STOPPED_S)
    assert workers.tick(STOPPED_S + 1) == []
    workers.died(0, STOPPED_S + 1)
    assert workers.tick(STOPPED_S + 1) == [Start(worker=0)]


def test_a_worker_whose_process_is_not_there_in_time() -> None:
    """It is to be killed as soon as it is, and then another one is started."""
    workers = Supervision(1, now_s=0.0)
    workers.tick(0.0)
    ticked(workers, 0.0, START_S_MAX)
    assert not workers.killed(0)
    assert workers.tick(START_S_MAX) == [Kill(worker=0, why="it did not become ready")]
    assert workers.killed(0)
    workers.died(0, START_S_MAX + 1)
    assert workers.tick(START_S_MAX + 1) == [Start(worker=0)]
    assert not workers.killed(0)


def test_workers_are_not_killed_where_the_parent_itself_stood_still() -> None:
    """It was stopped for a minute, or its machine was. What they reported meanwhile is not read yet."""
    workers = one()
    assert workers.tick(60.0) == []
    assert workers.able(0, 60.1)
    ticked(workers, 60.0, 60.0 + STOPPED_S)
    assert workers.tick(60.0 + STOPPED_S) == [Kill(worker=0, why="it has stopped reporting")]


def test_a_worker_that_ends_its_reports_is_seen_where_the_parent_stood_still_before() -> None:
    """Its last report was read before the first look after the minute: it counts from then, not for a minute more."""
    workers = one()
    workers.heard(0, 60.0)
    assert workers.tick(60.0) == []
    assert not workers.able(0, 60.0 + SILENT_S)
    ticked(workers, 60.0, 60.0 + STOPPED_S)
    assert workers.tick(60.0 + STOPPED_S) == [Kill(worker=0, why="it has stopped reporting")]


def test_a_worker_that_never_becomes_ready_is_killed() -> None:
    workers = Supervision(1, now_s=0.0)
    workers.tick(0.0)
    ticked(workers, 0.0, START_S_MAX)
    assert workers.tick(START_S_MAX) == [Kill(worker=0, why="it did not become ready")]


def test_a_worker_that_dies_again_and_again_waits_longer_each_time_up_to_a_limit() -> None:
    workers, now_s, pauses = one(), 0.0, []
    for _ in range(9):
        workers.died(0, now_s)
        died_s = now_s
        while not workers.tick(now_s):
            now_s += PAUSE_S_MIN
        pauses.append(now_s - died_s)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, PAUSE_S_MAX, PAUSE_S_MAX]


def test_a_worker_that_served_for_long_is_replaced_at_once_whatever_was_before() -> None:
    workers = one()
    workers.died(0, 0.0)
    assert workers.tick(0.0) == [Start(worker=0)]
    workers.heard(0, 0.0)
    workers.heard(0, STEADY_S)
    workers.died(0, STEADY_S)
    assert workers.tick(STEADY_S) == [Start(worker=0)]


def test_none_is_replaced_in_a_router_that_stops() -> None:
    workers = one()
    workers.stop()
    workers.died(0, 1.0)
    assert workers.tick(1_000.0) == []
