"""A sample of the cases on the real engine: a small model with random weights, in deterministic mode."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ModelFamily
from tests.faults.asking import Asker
from tests.faults.cluster import (
    CHUNK_TOKENS,
    MEMBERSHIP,
    RECEIVER_FLAGS,
    ROUTER_FLAGS,
    FaultyCluster,
    faulty,
    with_ports,
)
from tests.faults.load import Asked
from tests.faults.points import Failpoint, Side
from tests.faults.questions import Question
from tests.faults.signals import Blow, SignalCase
from tests.support.cluster_harness import assert_conserved

VOCAB: Final = 512
MODEL: Final = DemoModelParams(
    family=ModelFamily.LLAMA,
    num_layers=3,
    hidden_size=96,
    intermediate_size=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=24,
    vocab_size=VOCAB,
    context_len_max=1_024,
)


def real_spec(folder: Path) -> ClusterSpec:
    engine: dict[str, object] = {
        **MEMBERSHIP,
        "engine.deterministic": True,
        "engine.poison_freed": True,
        "engine.tokens_per_step_max": CHUNK_TOKENS,
    }
    return with_ports(
        ClusterSpec(
            prefill=2,
            decode=2,
            routers=2,
            model=str(folder),
            engine_kind=EngineKind.MODEL,
            threads=1,
            blocks=400,
            flags={
                Service.PREFILL: engine,
                Service.DECODE: {**engine, **RECEIVER_FLAGS},
                Service.ROUTER: ROUTER_FLAGS,
            },
        )
    )


class RealQuestions:
    """Questions whose answers are those of an undisturbed run. Each is asked under a cache salt of its own, so that no
    node has any of it cached."""

    mark = VOCAB - 1

    def __init__(self, *, seed: int) -> None:
        self._seed = seed
        self._salts = itertools.count()
        self._many: list[Question] = []
        self._marked: list[Question] = []
        self._short: list[Question] = []
        self._turn = 0

    async def prepare(self, client: Asker) -> None:
        """Ask each of them, while nothing is wrong."""
        rng = random.Random(self._seed)

        def prompt(length: int) -> list[int]:
            return [rng.randrange(2, self.mark) for _ in range(length)]

        self._many = [await self._answered(client, prompt(rng.choice((8, 40, 120))), 60, i) for i in range(8)]
        self._marked = [await self._answered(client, [self.mark, *prompt(299)], 80, i) for i in range(2)]
        self._short = [await self._answered(client, prompt(20), 4, i) for i in range(2)]

    def __call__(self) -> Question:
        return self._next(self._many)

    def marked(self) -> Question:
        return self._next(self._marked)

    def short(self) -> Question:
        return self._next(self._short)

    def _next(self, questions: list[Question]) -> Question:
        self._turn += 1
        return replace(questions[self._turn % len(questions)], salt=f"salt-{next(self._salts)}")

    async def _answered(self, client: Asker, prompt: list[int], count: int, number: int) -> Question:
        sampling: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
        if number % 2:
            sampling |= {"temperature": 0.9, "top_p": 0.95, "seed": number, "repetition_penalty": 1.2}
        salt = f"salt-{next(self._salts)}"
        question = Question(prompt=prompt, max_tokens=count, sampling=sampling, expected=[], salt=salt)
        asked = Asked(client, question)
        await asyncio.wait([asked.task])
        assert asked.answer is not None, asked.error
        return replace(question, expected=list(asked.answer.ids))


@asynccontextmanager
async def real_cluster(*, seed: int) -> AsyncIterator[tuple[FaultyCluster, RealQuestions]]:
    with tempfile.TemporaryDirectory(prefix="baton-faults-model-") as folder:
        write_demo_model(Path(folder), MODEL)
        async with faulty(real_spec(Path(folder))) as cluster:
            questions = RealQuestions(seed=5 + seed)
            await questions.prepare(cluster.asker())
            await assert_conserved(cluster)
            yield cluster, questions


CASES: Final = (
    *(
        SignalCase(side=side, point=point, blow=Blow.KILL, kind="real-")
        for side, point in (
            (Side.DECODE, Failpoint.LAYER),
            (Side.DECODE, Failpoint.COMMIT_SENT),
            (Side.DECODE, Failpoint.DECODING),
            (Side.PREFILL, Failpoint.LAYER),
            (Side.PREFILL, Failpoint.SEALED),
            (Side.ROUTER, Failpoint.DECODING),
        )
    ),
    SignalCase(side=Side.DECODE, point=Failpoint.DECODING, blow=Blow.STOP, kind="real-"),
    SignalCase(side=Side.PREFILL, point=Failpoint.LAYER, blow=Blow.STOP, kind="real-"),
)
