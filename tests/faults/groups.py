"""The cases, in groups that share a cluster one after the other."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from baton.errors import BatonError
from cli.supervisor import ClusterSpec
from tests.faults import doubles, fetches, links, real, redis_away, rolling, signals
from tests.faults.cluster import FaultyCluster, faulty, faulty_spec, mixed_spec, only_router_spec
from tests.faults.outcome import Outcome
from tests.faults.questions import MockQuestions, Questions

HANDED_OVER: Final = 400
KEPT: Final = 40
"""Tokens of the prompt that is struck; on mixed nodes the one is handed over, the other kept."""


class Case(Protocol):
    @property
    def name(self) -> str: ...

    async def run(self, cluster: Any, questions: Questions) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Cases of one kind of cluster. After a bad one the next gets a new cluster."""

    cases: Sequence[Case]
    opened: Callable[..., Any]
    """An async context manager that gives (cluster, questions); `seed` is for other ones."""

    async def run(self, cases: Sequence[Case], show: Callable[[Outcome], None], *, seed: int = 0) -> None:
        todo = list(cases)
        while todo:
            first = todo[0].name
            try:
                async with self.opened(seed=seed) as (cluster, questions):
                    bad = False
                    while todo and not bad:
                        outcome = await played(todo.pop(0), cluster, questions)
                        show(outcome)
                        bad = outcome.bad
            except (AssertionError, BatonError) as error:
                show(Outcome(case=f"cluster of {first}", lost=1, problems=[str(error)]))
                if todo and todo[0].name == first:
                    todo.pop(0)  # it did not even start


async def played(case: Case, cluster: Any, questions: Questions) -> Outcome:
    """Play one case. One that cannot be played counts as lost."""
    began_s = time.monotonic()
    try:
        outcome = await case.run(cluster, questions)
    except (AssertionError, BatonError) as error:
        outcome = Outcome(case=case.name, lost=1, problems=[f"could not be played: {error}"])
    cluster.trigger.disarm()
    outcome.took_s = time.monotonic() - began_s
    return outcome


@asynccontextmanager
async def mock_cluster(
    make_spec: Callable[..., ClusterSpec], *, seed: int, marked_tokens: int = HANDED_OVER
) -> AsyncIterator[tuple[FaultyCluster, Questions]]:
    async with faulty(make_spec()) as cluster:
        yield cluster, MockQuestions(seed=1 + seed, marked_tokens=marked_tokens)


@asynccontextmanager
async def web_cluster(*, seed: int, whole: bool = False) -> AsyncIterator[tuple[FaultyCluster, Questions]]:
    async with mock_cluster(partial(faulty_spec, web=True), seed=seed) as (cluster, questions):
        cluster.over_http, cluster.whole = True, whole
        yield cluster, questions


@asynccontextmanager
async def link_cluster(
    make_spec: Callable[..., ClusterSpec], *, seed: int, data: bool, marked_tokens: int = HANDED_OVER
) -> AsyncIterator[tuple[links.LinkCluster, Questions]]:
    async with links.linked(make_spec, data=data) as linked:
        yield linked, MockQuestions(seed=2 + seed, marked_tokens=marked_tokens)


@asynccontextmanager
async def redis_cluster(*, seed: int) -> AsyncIterator[tuple[redis_away.RedisStage, Questions]]:
    async with redis_away.redis_stage() as stage:
        yield stage, MockQuestions(seed=3 + seed)


GROUPS: Final[tuple[Group, ...]] = (
    Group(cases=signals.CASES, opened=partial(mock_cluster, faulty_spec)),
    Group(cases=doubles.CASES, opened=partial(mock_cluster, faulty_spec)),
    Group(
        cases=(*signals.ONLY_ROUTER_CASES, *doubles.ONLY_ROUTER_CASES),
        opened=partial(mock_cluster, only_router_spec),
    ),
    Group(cases=(*signals.MIXED_CASES, *doubles.MIXED_CASES), opened=partial(mock_cluster, mixed_spec)),
    Group(cases=signals.KEPT_CASES, opened=partial(mock_cluster, mixed_spec, marked_tokens=KEPT)),
    Group(cases=(*links.CASES, *doubles.LINK_CASES), opened=partial(link_cluster, faulty_spec, data=False)),
    Group(cases=links.DATA_CASES, opened=partial(link_cluster, faulty_spec, data=True)),
    Group(cases=(*links.MIXED_CASES, *doubles.MIXED_LINK_CASES), opened=partial(link_cluster, mixed_spec, data=True)),
    Group(
        cases=(*links.KEPT_CASES, *doubles.KEPT_LINK_CASES),
        opened=partial(link_cluster, mixed_spec, data=True, marked_tokens=KEPT),
    ),
    Group(cases=(*signals.WEB_CASES, *doubles.WEB_CASES), opened=web_cluster),
    Group(cases=signals.WHOLE_CASES, opened=partial(web_cluster, whole=True)),
    Group(cases=fetches.CASES, opened=partial(fetches.fetch_cluster, "shm")),
    Group(cases=fetches.TCP_CASES, opened=partial(fetches.fetch_cluster, "tcp")),
    Group(cases=fetches.LINK_CASES, opened=fetches.fetch_link_cluster),
    Group(cases=rolling.CASES, opened=rolling.rolling_cluster),
    Group(cases=redis_away.CASES, opened=redis_cluster),
    Group(cases=real.CASES, opened=real.real_cluster),
)
