"""Clients: they ask, read, sometimes go away, and check every answer against the definition of the mock engine.

Every token says which attempt drew it (`engine.ATTEMPTS`), and its log-probability, where asked, says so again:
attempts may only rise along an answer. Outside the code under test but for the router's own gRPC service, which is all
that a client sees.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import grpc.aio
from batonpb import common_pb2, inference_pb2, inference_pb2_grpc

from baton.errors import BatonError, Reason
from baton.rpc import ChannelLimits
from baton.status import from_rpc_error
from tests.sim.cluster import Kind, Process, SimCluster
from tests.sim.engine import ATTEMPTS, VOCAB, reference
from tests.sim.excuses import CLOCK_SHARE, Excuses
from tests.sim.profiles import (
    BLOCK_SIZE,
    OUTPUT_TOKENS_MAX,
    OUTPUT_TOKENS_MIN,
    PROMPT_TOKENS_MAX,
    PROMPT_TOKENS_MIN,
)
from tests.sim.rpc import SimChannels

DEADLINE_S = 60.0
RETRY_S = 0.02
RETRY_DOUBLINGS_MAX = 5
"""A client waits the longer the more of its requests have failed: else most of the requests of a run would be those
that are turned away while a router is gone, of which nothing is to be learnt."""
SEEDS = 2
"""Sampling seeds in use: each question has so many answers."""

OVERLOAD = frozenset({Reason.TOO_MANY_CALLS})
"""What a healthy cluster may answer too: its router's line is full."""
WRONG_AT_ALL_TIMES = frozenset(
    {
        Reason.INTERNAL,
        Reason.UNRECOGNISED,
        Reason.BAD_FIELD,
        Reason.REQUEST_EXISTS,
        Reason.PROMPT_TOO_LONG,
        Reason.EMPTY_PROMPT,
        Reason.NO_DEADLINE,
        Reason.UNIMPLEMENTED,
        Reason.SAMPLING_OUT_OF_RANGE,
    }
)
"""No fault explains these."""


@dataclass(slots=True, kw_only=True)
class LoadFigures:
    """What came of the requests."""

    asked: int = 0
    ended: int = 0
    complete: int = 0
    left: int = 0
    """Given up by the client itself."""
    tokens: int = 0
    mixed: int = 0
    """Answers, complete or not, that more than one attempt has drawn."""
    lost: Counter[str] = field(default_factory=Counter)
    """By reason, those that a fault is the excuse of."""
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Question:
    prompt: tuple[int, ...]
    salt: int
    output_tokens: int
    seed: int
    logprobs: bool
    leaves_after: int
    """The client goes away after so many tokens; 0: it stays."""
    reads_slowly_s: float


class Load:
    """`requests` requests, `profile.concurrency` at a time."""

    def __init__(
        self, cluster: SimCluster, *, requests: int, rng: Random, excuses: Excuses, lost_allowed: bool
    ) -> None:
        self.cluster = cluster
        self.excuses = excuses
        self.figures = LoadFigures()
        self.disturbed_s = -1.0
        """When the last fault was at work; `faults` keeps it."""
        self.disturbed = False
        self.lost_allowed = lost_allowed
        self._requests = requests
        self._rng = rng
        self._begun = 0
        self._prompts = self._make_prompts(cluster.profile.prompts)
        self._answers: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
        """By prompt, seed and attempt: those that one attempt alone has drawn."""
        self._clients: list[tuple[Process, SimChannels]] = []
        self._workers = 0

    @property
    def over(self) -> bool:
        return self._workers == 0 and self._begun >= self._requests

    def ask_more(self, requests: int) -> None:
        """More of them, by the same clients, after all others have ended."""
        assert self.over
        self._requests += requests
        self._spawn_workers()

    def begin(self) -> None:
        profile = self.cluster.profile
        for index in range(profile.clients):
            process = self.cluster.new_process(f"client-{index}", Kind.CLIENT)
            self.cluster.processes[process.name] = process
            self._clients.append((process, SimChannels(limits=ChannelLimits(), process=process)))
        self._spawn_workers()

    def _spawn_workers(self) -> None:
        profile = self.cluster.profile
        for process, channels in self._clients:
            asyncio.events._set_running_loop(process.loop)
            try:
                for _ in range(max(1, profile.concurrency // profile.clients)):
                    self._workers += 1
                    process.loop.create_task(self._work(process, channels), name="client")
            finally:
                asyncio.events._set_running_loop(None)

    def _make_prompts(self, count: int) -> list[tuple[int, ...]]:
        """Of a few shared beginnings (whole blocks, for the prefix caches) and endings of their own."""
        rng = self._rng
        beginnings = [
            tuple(rng.randrange(1, VOCAB) for _ in range(BLOCK_SIZE * rng.randrange(1, 4)))
            for _ in range(max(1, count // 8))
        ]
        prompts = []
        for _ in range(count):
            length = rng.randrange(PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX)
            start = rng.choice(beginnings) if rng.random() < 0.5 else ()
            prompts.append((*start[:length], *(rng.randrange(1, VOCAB) for _ in range(length - len(start)))))
        return prompts

    def _question(self) -> Question:
        rng = self._rng
        dice = rng.random()
        return Question(
            prompt=self._prompts[rng.randrange(len(self._prompts))],
            salt=0,
            output_tokens=rng.randrange(OUTPUT_TOKENS_MIN, OUTPUT_TOKENS_MAX + 1),
            seed=rng.randrange(SEEDS),
            logprobs=dice < 0.1,
            leaves_after=rng.randrange(1, OUTPUT_TOKENS_MIN) if dice > 1 - self.cluster.profile.leavers else 0,
            reads_slowly_s=0.01 if 0.1 < dice < 0.12 else 0.0,
        )

    def answer(self, question: Question, attempts: list[int], attempt: int) -> list[int]:
        """What is right where `attempts` have drawn the first tokens and `attempt` all others."""
        key = question.prompt, question.seed, attempt
        answer = self._answers.get(key) if not attempts else None
        if answer is None:
            drawn_by = attempts + [attempt] * (OUTPUT_TOKENS_MAX - len(attempts))
            answer = reference(question.prompt, question.seed, drawn_by, BLOCK_SIZE)
            if not attempts:
                self._answers[key] = answer
        return answer

    async def _work(self, process: Process, channels: SimChannels) -> None:
        rng, pause_s = self._rng, self.cluster.profile.pause_s
        stubs: dict[str, inference_pb2_grpc.InferenceStub] = {}
        await asyncio.sleep(rng.random() * 0.05)
        failed = 0
        while self._begun < self._requests:
            name = rng.choice(self.cluster.names(Kind.ROUTER))
            router = self.cluster.processes[name]
            endpoint = router.runtime.endpoint if router.runtime is not None else ""
            if not (router.ready and router.alive):
                await asyncio.sleep(RETRY_S)
                continue
            if endpoint not in stubs:
                stubs[endpoint] = inference_pb2_grpc.InferenceStub(channels.get(endpoint))
            self._begun += 1
            if await self._ask(process, router, stubs[endpoint], self._question()):
                await asyncio.sleep(RETRY_S * 2 ** min(failed, RETRY_DOUBLINGS_MAX) * (1 + rng.random()))
                failed += 1
            else:
                failed = 0
            if pause_s > 0:
                await asyncio.sleep(pause_s * rng.choice((0.01, 1.0, 3.0)) * rng.random())
        self._workers -= 1

    async def _ask(self, process: Process, router: Process, stub: Any, question: Question) -> bool:
        """Whether the client had better wait before it asks again."""
        figures = self.figures
        figures.asked += 1
        hearing = _Hearing(router.name, self.cluster.world.now_s, self.excuses.leaps_s(router.name))
        call = stub.Generate(_message(question), timeout=DEADLINE_S)
        reader = _Reader(question, self.answer)
        refused = False
        try:
            async for event in call:
                reader.take(event)
                if event.WhichOneof("event") == "tokens":
                    hearing.heard(self.cluster.world.now_s, self.excuses.leaps_s(router.name))
                if reader.wrong:
                    break
                if question.leaves_after and len(reader.tokens) >= question.leaves_after:
                    call.cancel()
                    figures.left += 1
                    return False
                if question.reads_slowly_s:
                    await asyncio.sleep(question.reads_slowly_s)
            if not reader.wrong and not reader.finished:
                reader.wrong = "the stream ended without `finished` or an error"
            if not reader.wrong:
                figures.complete += 1
        except grpc.aio.AioRpcError as error:
            refused = True
            self._judge(error, reader, hearing)
        finally:
            figures.ended += 1
            figures.tokens += len(reader.tokens)
            figures.mixed += reader.attempts > 1
            if reader.wrong:
                self.cluster.violation(f"wrong answer from {router.name}: {reader.wrong}")
        return refused

    def _judge(self, error: grpc.aio.AioRpcError, reader: _Reader, hearing: _Hearing) -> None:
        """Is there an excuse for this error?"""
        failure, router = from_rpc_error(error), hearing.router
        reason, wire = failure.reason, not error.trailing_metadata()
        if reader.finished and wire and self._excused(failure, reader, hearing, wire=True):
            self.figures.complete += 1  # the whole answer is here; the connection broke under its status
        elif reader.finished:
            reader.wrong = f"an error after `finished`: {failure!r}"
        elif reason in WRONG_AT_ALL_TIMES:
            reader.wrong = f"an error that nothing explains: {failure!r}"
        elif reason in OVERLOAD and not reader.tokens:
            self.figures.refused[reason.value] += 1
        elif self._excused(failure, reader, hearing, wire=wire):
            self.figures.lost[f"{reason.value} of the way to {router}" if wire else reason.value] += 1
        else:
            now_s = self.cluster.world.now_s
            reader.wrong = (
                f"an error without an excuse: {failure!r} after {len(reader.tokens)} tokens and "
                f"{now_s - hearing.began_s:.3f} s, {now_s - hearing.heard_s:.3f} s after the last of them"
            )

    def _excused(self, failure: BatonError, reader: _Reader, hearing: _Hearing, *, wire: bool) -> bool:
        if self.lost_allowed:
            return self.disturbed or self.disturbed_s >= hearing.began_s
        excuses, now_s = self.excuses, self.cluster.world.now_s
        leapt_s = excuses.leaps_s(hearing.router)
        if excuses.ends(hearing.router, hearing.began_s):
            return True
        if wire and excuses.way_lost(hearing.router, hearing.began_s):
            return True
        if failure.reason is Reason.DEADLINE:
            return now_s - hearing.began_s >= DEADLINE_S * CLOCK_SHARE - (leapt_s - hearing.began_leapt_s)
        if wire:
            return False
        if failure.reason is Reason.ATTEMPTS_SPENT:
            return excuses.spent(hearing.router, hearing.began_s)
        return excuses.nowhere(
            failure,
            hearing.router,
            since_s=hearing.heard_s,
            leapt_s=leapt_s - hearing.heard_leapt_s,
            tokens=len(reader.tokens),
        )


class _Hearing:
    """When a request began and was last heard of, by the world's clock, and how far its router's had leapt by then."""

    def __init__(self, router: str, now_s: float, leapt_s: float) -> None:
        self.router = router
        self.began_s = self.heard_s = now_s
        self.began_leapt_s = self.heard_leapt_s = leapt_s

    def heard(self, now_s: float, leapt_s: float) -> None:
        self.heard_s, self.heard_leapt_s = now_s, leapt_s


class _Reader:
    """One answer as it comes in."""

    def __init__(self, question: Question, answer: Callable[[Question, list[int], int], list[int]]) -> None:
        self.question = question
        self.tokens: list[int] = []
        self.wrong = ""
        self.finished = False
        self._right = answer
        self._started = False
        self.attempts = 0
        """How many have drawn tokens of it."""
        self._attempt = -1
        self._answer: list[int] = []
        """What is right from here on, if this attempt draws it."""

    def take(self, event: inference_pb2.GenerateEvent) -> None:
        kind = event.WhichOneof("event")
        if self.finished:
            self.wrong = f"{kind} after `finished`"
        elif kind == "tokens":
            self._take_tokens(event.tokens)
        elif kind == "finished":
            self.finished = True
            self._check_whole(event.finished)
        elif self._started:
            self.wrong = "`started` twice"
        else:
            self._started = True

    def _take_tokens(self, message: inference_pb2.Tokens) -> None:
        at, ids = len(self.tokens), list(message.ids)
        if message.first_index != at:
            self.wrong = f"token index {message.first_index} where {at} is next"
        elif ids != self._answer[at : at + len(ids)]:
            for token in ids:
                self._take_token(token)
        else:
            self.tokens += ids
        if self.question.logprobs and not self.wrong:
            reported = [round(-1 - logprob.logprob) for logprob in message.logprobs]
            if reported != [token % ATTEMPTS for token in ids]:
                self.wrong = f"log-probabilities by the attempts {reported} for tokens {ids}"

    def _take_token(self, token: int) -> None:
        """A token that is not the next one of the attempt so far."""
        at, attempt = len(self.tokens), token % ATTEMPTS
        if attempt < self._attempt:
            self.wrong = f"token {at} is of attempt {attempt}, the one before it of attempt {self._attempt}"
        elif attempt > self._attempt:
            self._attempt = attempt
            self.attempts += 1
            self._answer = self._right(self.question, [token % ATTEMPTS for token in self.tokens], attempt)
        self.tokens.append(token)
        if self._answer[at : at + 1] != [token]:
            self.wrong = self.wrong or f"token {token} at index {at}, by definition {self._answer[at : at + 1]}"

    def _check_whole(self, finished: inference_pb2.Finished) -> None:
        if len(self.tokens) != self.question.output_tokens:
            self.wrong = f"{len(self.tokens)} tokens of {self.question.output_tokens}"
        elif finished.reason != common_pb2.FINISH_REASON_LENGTH:
            self.wrong = f"finished with reason {finished.reason}"
        elif finished.stats.output_tokens != len(self.tokens):
            self.wrong = f"the statistics count {finished.stats.output_tokens} tokens of {len(self.tokens)}"


def _message(question: Question) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.Sampling(temperature=0.0, seed=question.seed, max_tokens=question.output_tokens)
    if question.logprobs:
        sampling.logprobs = 0
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=question.prompt), sampling=sampling)
