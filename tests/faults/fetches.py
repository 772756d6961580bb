"""Both ends of a fetch killed, stopped or cut off from each other, at its own points."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from cli.services import Service
from cli.supervisor import ClusterSpec
from tests.faults.cluster import RECEIVER_FLAGS, FaultyCluster, faulty, faulty_spec
from tests.faults.links import DataCase, GrpcCase, Ill, LinkCluster, linked
from tests.faults.load import Asked, Load
from tests.faults.points import Failpoint, Side, Struck
from tests.faults.proxy import Spoil
from tests.faults.questions import FETCH_MARK, MockQuestions, Question, Questions
from tests.faults.signals import Blow, SignalCase

FETCHED_TOKENS: Final = 1_000
"""Of the prompt: 0.6 s of computing. So a fetch that brings nothing may cost a share of that (`LOST_SHARE_MAX`)."""
WARMING_TOKENS: Final = 20
"""Of the first answer. Meanwhile routers hear who has the prompt."""
ASKED_MAX: Final = 40
"""Prompts, one after the other, before a case counts as one that cannot be played: the first that names an owner has it
connect, and one that failed is left alone for a while."""


def fetch_spec(*, both: Mapping[str, object] | None = None) -> ClusterSpec:
    """As `faulty_spec`, with prompts that are worth fetching."""
    spec = faulty_spec(both={"engine.num_blocks": 800, **(both or {})})
    prefill = {**spec.flags[Service.PREFILL], "engine.mock_layer_delay_ms": 20}
    prefill |= {key: value for key, value in RECEIVER_FLAGS.items() if key.startswith("receiver.")}
    return replace(spec, flags={**spec.flags, Service.PREFILL: prefill})


@asynccontextmanager
async def fetch_cluster(
    transport: str, *, seed: int, mark: int = FETCH_MARK
) -> AsyncIterator[tuple[FaultyCluster, Questions]]:
    async with faulty(fetch_spec(both={"transports": transport})) as cluster:
        yield cluster, MockQuestions(seed=4 + seed, marked_tokens=FETCHED_TOKENS, mark=mark)


@asynccontextmanager
async def fetch_link_cluster(*, seed: int) -> AsyncIterator[tuple[LinkCluster, Questions]]:
    async with linked(fetch_spec, data=True) as stage:
        yield stage, MockQuestions(seed=5 + seed, marked_tokens=FETCHED_TOKENS, mark=FETCH_MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchCase(SignalCase):
    """A prompt is computed on one prefill node; asked for again it goes to the other one, which fetches it: from the
    first one, or from the decode node that wrote the answer."""

    async def ask(self, cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
        return await ask_fetched(cluster, load, questions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLinkCase(GrpcCase):
    """The calls between owner and receiver."""

    @property
    def name(self) -> str:
        return f"{self.kind}{self.ill.value}-owner-receiver-at-{self.point.value}"

    async def ask(self, cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
        return await ask_fetched(cluster, load, questions)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchDataCase(DataCase):
    """The tcp connection on which the owner writes."""

    async def ask(self, cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
        return await ask_fetched(cluster, load, questions)


async def ask_fetched(cluster: FaultyCluster, load: Load, questions: Questions) -> tuple[Asked, Struck]:
    """Have a prompt computed, and ask for it again; another one until a fetch comes to the point that is armed."""
    elsewhere = []
    for _ in range(ASKED_MAX):
        question = questions.marked()
        await load.ask(_begun(question)).task
        hit = load.ask(question)
        struck = await cluster.struck_unless(hit.task)
        if struck is not None:
            return hit, struck
        elsewhere.append(hit.course)
    raise AssertionError(f"no fetch came to the point; requests went {', '.join(elsewhere)}\n{cluster.story()}")


def _begun(question: Question) -> Question:
    """The same with a short answer: it is for its prompt only."""
    logprobs = None if question.logprobs is None else question.logprobs[:WARMING_TOKENS]
    expected = question.expected[:WARMING_TOKENS]
    return replace(question, max_tokens=WARMING_TOKENS, expected=expected, logprobs=logprobs)


def _case(blow: Blow, side: Side, point: Failpoint, kind: str = "fetch-") -> FetchCase:
    return FetchCase(blow=blow, side=side, point=point, kind=kind)


CASES: Final = (
    *(
        _case(Blow.KILL, Side.OWNER, point)
        for point in (
            Failpoint.FETCH_GRANTED,
            Failpoint.FETCH_LAYER,
            Failpoint.FETCH_COMMIT_SENT,
        )
    ),
    _case(Blow.STOP, Side.OWNER, Failpoint.FETCH_LAYER),
    _case(Blow.STOP_KILL, Side.OWNER, Failpoint.FETCH_SEAL),
    _case(Blow.KILL, Side.RECEIVER, Failpoint.FETCH_LAYER),
    _case(Blow.STOP, Side.RECEIVER, Failpoint.FETCH_LAYER),
)
"""Over shm."""
DECODE_CASES: Final = (
    _case(Blow.KILL, Side.OWNER, Failpoint.FETCH_LAYER, "fetch-decode-"),
    _case(Blow.STOP, Side.OWNER, Failpoint.FETCH_LAYER, "fetch-decode-"),
)
"""Over shm, from a decode node."""
TCP_CASES: Final = (
    _case(Blow.KILL, Side.OWNER, Failpoint.FETCH_LAYER, "fetch-tcp-"),
    _case(Blow.STOP, Side.OWNER, Failpoint.FETCH_LAYER, "fetch-tcp-"),
    _case(Blow.KILL, Side.RECEIVER, Failpoint.FETCH_COMMIT_SENT, "fetch-tcp-"),
)
LINK_CASES: Final = (
    FetchLinkCase(ends=(Side.PREFILL, Side.DECODE), ill=Ill.DARK, point=Failpoint.FETCH_LAYER, kind="fetch-"),
    FetchDataCase(spoil=Spoil.CUT, point=Failpoint.FETCH_LAYER, kind="fetch-"),
    FetchDataCase(spoil=Spoil.NOISE, point=Failpoint.FETCH_LAYER, kind="fetch-"),
)
"""The ends of a struck fetch are in the places of those of a handoff."""
