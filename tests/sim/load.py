"""The requests of a run: who asks what, when, and what came of it.

Outside the code under test but for the router's own gRPC service, which is all that a client sees.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import grpc
import grpc.aio

from baton.errors import BatonError
from baton.status import from_rpc_error
from tests.sim.clients import RETRY_DOUBLINGS_MAX, RETRY_S, Client, Resumed
from tests.sim.cluster import Process, SimCluster
from tests.sim.engine import SEED_PLAIN, VOCAB, reference
from tests.sim.excuses import Excuses
from tests.sim.judge import DEADLINE_S, OVERLOAD, WRONG_AT_ALL_TIMES, Hearing, Judge
from tests.sim.profiles import (
    BLOCK_SIZE,
    OUTPUT_TOKENS_MAX,
    OUTPUT_TOKENS_MIN,
    PROMPT_TOKENS_MAX,
    PROMPT_TOKENS_MIN,
)
from tests.sim.reader import Question, Reader, events_of

SEEDS = 2
"""Sampling seeds in use: each question has so many answers."""
LEAVE_TOKEN_S = 0.002
"""A client that leaves before its whole answer comes waits for so long for each token after which others leave."""
PLAIN = 0.4
"""Share of the resumable requests whose answer is the same whichever attempt draws it."""


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
    resumable: int = 0
    whole: int = 0
    """Asked for in one piece."""
    attached: int = 0
    """Times that a client has asked to go on."""
    moved: int = 0
    """Answers, complete or not, that a client has had over several calls."""
    lost: Counter[str] = field(default_factory=Counter)
    """By reason, those that a fault is the excuse of."""
    lost_resumable: int = 0
    """Of them."""
    refused: Counter[str] = field(default_factory=Counter)


class Load:
    """`requests` requests, `profile.concurrency` at a time."""

    def __init__(
        self, cluster: SimCluster, *, requests: int, rng: Random, excuses: Excuses, lost_allowed: bool
    ) -> None:
        self.cluster = cluster
        self.figures = LoadFigures()
        self.judge = Judge(excuses, lambda: cluster.world.now_s, lost_allowed=lost_allowed)
        self._requests = requests
        self._rng = rng
        self._begun = 0
        self._prompts = self._make_prompts(cluster.profile.prompts)
        self._answers: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
        """By prompt, seed and attempt: those that one attempt alone has drawn."""
        self._clients: list[Client] = []
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
        for index in range(self.cluster.profile.clients):
            self._clients.append(Client(self.cluster, f"client-{index}", self._rng))
        self._spawn_workers()

    def _spawn_workers(self) -> None:
        profile = self.cluster.profile
        for client in self._clients:
            loop = client.process.loop
            asyncio.events._set_running_loop(loop)
            try:
                for _ in range(max(1, profile.concurrency // profile.clients)):
                    self._workers += 1
                    loop.create_task(self._work(client), name="client")
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
        rng, profile = self._rng, self.cluster.profile
        dice = rng.random()
        resumable = rng.random() < profile.resumable
        plain = resumable and rng.random() < PLAIN
        leaves = not resumable and dice > 1 - profile.leavers
        slow = 0.1 < dice < 0.12
        return Question(
            prompt=self._prompts[rng.randrange(len(self._prompts))],
            output_tokens=rng.randrange(OUTPUT_TOKENS_MIN, OUTPUT_TOKENS_MAX + 1),
            seed=rng.randrange(SEEDS) + SEED_PLAIN * plain,
            logprobs=dice < 0.1 and not plain,
            resumable=resumable,
            whole=not resumable and not slow and int(dice * 1000) % 2 == 0,
            leaves_after=rng.randrange(1, OUTPUT_TOKENS_MIN) if leaves else 0,
            reads_slowly_s=0.01 if slow else 0.0,
        )

    def answer(self, question: Question, attempts: list[int], attempt: int) -> list[int]:
        """What is right where `attempts` have drawn the first tokens and `attempt` all others."""
        if question.plain:
            attempts, attempt = [], 0
        key = question.prompt, question.seed, attempt
        answer = self._answers.get(key) if not attempts else None
        if answer is None:
            drawn_by = attempts + [attempt] * (OUTPUT_TOKENS_MAX - len(attempts))
            answer = reference(question.prompt, question.seed, drawn_by, BLOCK_SIZE)
            if not attempts:
                self._answers[key] = answer
        return answer

    async def _work(self, client: Client) -> None:
        rng, pause_s = self._rng, self.cluster.profile.pause_s
        await asyncio.sleep(rng.random() * 0.05)
        failed = 0
        while self._begun < self._requests:
            router = client.router()
            if router is None:
                await asyncio.sleep(RETRY_S)
                continue
            self._begun += 1
            self.figures.asked += 1
            question = self._question()
            ask = self._go_through if question.resumable else self._ask_whole if question.whole else self._ask
            if await ask(client, router, question):
                await asyncio.sleep(RETRY_S * 2 ** min(failed, RETRY_DOUBLINGS_MAX) * (1 + rng.random()))
                failed += 1
            else:
                failed = 0
            if pause_s > 0:
                await asyncio.sleep(pause_s * rng.choice((0.01, 1.0, 3.0)) * rng.random())
        self._workers -= 1

    async def _go_through(self, client: Client, _router: Process, question: Question) -> bool:
        """A resumable request, over all its calls."""
        figures, reader = self.figures, Reader(question=question, right=self.answer)
        asked = Resumed(client, reader, self.judge, self._rng, leavers=self.cluster.profile.leavers)
        await asked.run()
        figures.resumable += 1
        figures.attached += asked.attaches
        figures.moved += asked.attaches > 0
        self._end(asked.reader, "of some routers")
        if asked.left:
            figures.left += 1
        elif asked.lost:
            figures.lost[asked.lost] += 1
            figures.lost_resumable += 1
        elif not asked.reader.wrong:
            figures.complete += 1
        return bool(asked.lost)

    def _end(self, reader: Reader, source: str) -> None:
        figures = self.figures
        figures.ended += 1
        figures.tokens += len(reader.tokens)
        figures.mixed += reader.attempts > 1
        if reader.wrong:
            self.cluster.violation(f"wrong answer {source}: {reader.wrong}")

    async def _ask(self, client: Client, router: Process, question: Question) -> bool:
        """Whether the client had better wait before it asks again."""
        figures, judge = self.figures, self.judge
        hearing = judge.hearing(router.name)
        call = client.stub(router).Generate(question.message(), timeout=DEADLINE_S)
        reader = Reader(question=question, right=self.answer)
        refused = False
        try:
            async for event in call:
                reader.take(event)
                if event.WhichOneof("event") == "tokens":
                    judge.heard(hearing)
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
            self._take_error(from_rpc_error(error), reader, hearing, wire=not error.trailing_metadata())
        finally:
            self._end(reader, f"from {router.name}")
        return refused

    async def _ask_whole(self, client: Client, router: Process, question: Question) -> bool:
        """The same, for an answer in one piece."""
        figures, hearing = self.figures, self.judge.hearing(router.name)
        reader = Reader(question=question, right=self.answer)
        leaves_after_s = question.leaves_after * LEAVE_TOKEN_S or None
        figures.whole += 1
        try:
            async with asyncio.timeout(leaves_after_s):
                response = await client.stub(router).GenerateUnary(question.message(), timeout=DEADLINE_S)
            for event in events_of(response):
                if not reader.wrong:
                    reader.take(event)
            figures.complete += not reader.wrong
        except TimeoutError:
            figures.left += 1
        except grpc.aio.AioRpcError as error:
            self._take_error(from_rpc_error(error), reader, hearing, wire=not error.trailing_metadata())
            return True
        finally:
            self._end(reader, f"from {router.name}")
        return False

    def _take_error(self, failure: BatonError, reader: Reader, hearing: Hearing, *, wire: bool) -> None:
        reason, router, tokens = failure.reason, hearing.router, len(reader.tokens)
        if reader.finished and wire and self.judge.excused(failure, hearing, tokens=tokens, wire=True):
            self.figures.complete += 1  # the whole answer is here; the connection broke under its status
        elif reader.finished:
            reader.wrong = f"an error after `finished`: {failure!r}"
        elif reason in WRONG_AT_ALL_TIMES:
            reader.wrong = f"an error that nothing explains: {failure!r}"
        elif reason in OVERLOAD and not reader.tokens:
            self.figures.refused[reason.value] += 1
        elif any(
            # How far an answer in one piece had come nobody knows.
            self.judge.excused(failure, hearing, tokens=count, wire=wire)
            for count in ((0, 1) if reader.question.whole else (tokens,))
        ):
            self.figures.lost[f"{reason.value} of the way to {router}" if wire else reason.value] += 1
        else:
            reader.wrong = self.judge.unexplained(failure, hearing, tokens=tokens)
