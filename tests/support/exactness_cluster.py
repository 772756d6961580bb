"""A cluster that serves a random-weight model next to that model's reference, for the exactness tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from batonpb import common_pb2

from cli.services import Service
from cli.supervisor import ClusterSpec
from engine.build import EngineKind
from engine.demo_model import EOS_ID, DemoModelParams, write_demo_model
from engine.model_config import ModelFamily
from tests.support.cluster_harness import Answer, RunningCluster, assert_conserved, running
from tests.support.reference_model import ReferenceModel, Tie

VOCAB: Final = 512
LENGTH_MAX: Final = 2_000
NEW_TOKENS: Final = 24
AT_ONCE: Final = 16

Prompt = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One model and how the cluster is cut up."""

    model: DemoModelParams
    block_size: int
    num_blocks: int
    tokens_per_step_max: int
    block_edges_max: int

    def spec(self, folder: Path, **changes: Any) -> ClusterSpec:
        engine = {
            "engine.poison_freed": True,
            "engine.block_size": self.block_size,
            "engine.tokens_per_step_max": self.tokens_per_step_max,
        }
        fields: dict[str, Any] = {
            "prefill": 2,
            "decode": 2,
            "model": str(folder),
            "engine_kind": EngineKind.MODEL,
            "threads": 1,
            "blocks": self.num_blocks,
            "flags": {
                Service.PREFILL: engine,
                Service.DECODE: engine,
                Service.ROUTER: {"placement_wait_ms_max": 60_000},
            },
        }
        return ClusterSpec(**fields | changes)

    def lengths(self) -> list[int]:
        """Block boundaries up to `block_edges_max` and one to each side; the shortest and the longest."""
        edges = range(self.block_size, self.block_edges_max, self.block_size)
        near = [1, 2, *(edge + side for edge in edges for side in (-1, 0, 1)), LENGTH_MAX - 1, LENGTH_MAX]
        return sorted(set(near) - set(self.lengths_alone()))

    def lengths_alone(self) -> list[int]:
        """Every chunk boundary and one to each side. Only a prompt that runs alone is cut at these places for sure."""
        edges = range(self.tokens_per_step_max, LENGTH_MAX, self.tokens_per_step_max)
        return [edge + side for edge in edges for side in (-1, 0, 1)]


LLAMA: Final = Setup(
    model=DemoModelParams(
        family=ModelFamily.LLAMA,
        num_layers=3,
        hidden_size=96,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        vocab_size=VOCAB,
        context_len_max=2_304,
    ),
    block_size=16,
    num_blocks=3_000,
    tokens_per_step_max=128,
    block_edges_max=300,
)
QWEN3: Final = Setup(
    model=DemoModelParams(
        family=ModelFamily.QWEN3,
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=VOCAB,
        context_len_max=2_304,
    ),
    block_size=64,
    num_blocks=1_000,
    tokens_per_step_max=256,
    block_edges_max=LENGTH_MAX,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A cluster that serves a model, and the model's reference."""

    setup: Setup
    folder: Path
    cluster: RunningCluster
    reference: ReferenceModel

    def ask(self, prompts: Sequence[Prompt | str], *, at_once: int = AT_ONCE, **sampling: Any) -> list[Answer]:
        """Send prompts, at most `at_once` at a time; answers in the order of the prompts."""
        requests = [{"max_tokens": NEW_TOKENS, **sampling}] * len(prompts)
        return self.ask_each(list(zip(prompts, requests, strict=True)), at_once=at_once)

    def ask_each(self, requests: Sequence[tuple[Prompt | str, dict[str, Any]]], *, at_once: int) -> list[Answer]:
        async def one(prompt: Prompt | str, fields: dict[str, Any], places: asyncio.Semaphore) -> Answer:
            async with places:
                return await self.cluster.client.generate(prompt, **fields)

        async def everything() -> list[Answer]:
            places = asyncio.Semaphore(at_once)
            return await asyncio.gather(*(one(prompt, fields, places) for prompt, fields in requests))

        return self.cluster.run(everything())

    def check(self, prompts: Sequence[Prompt], answers: Sequence[Answer]) -> list[Tie]:
        """Compare greedy answers of NEW_TOKENS at most with the reference. Raises AssertionError."""
        expected = self.reference.generate(prompts, max_new=NEW_TOKENS)
        ties: list[Tie] = []
        for prompt, answer, right in zip(prompts, answers, expected, strict=True):
            found = self.reference.compare(prompt, answer.ids, right)
            ties += found
            if not found:
                assert answer.reason == _reason(right), (len(prompt), answer.ids)
            self._check_blocks(prompt, answer)
        return ties

    def _check_blocks(self, prompt: Prompt, answer: Answer) -> None:
        stats, size = answer.stats, self.setup.block_size
        assert stats.prompt_tokens == len(prompt)
        assert stats.prompt_tokens_cached % size == 0
        assert stats.prompt_tokens_cached < len(prompt)
        if stats.transport == "local":
            assert stats.decode_node == stats.prefill_node
            assert (stats.blocks_written, stats.blocks_skipped, stats.bytes_written) == (0, 0, 0)
        elif stats.decode_node:
            assert stats.transport == "shm"
            assert stats.blocks_written + stats.blocks_skipped == -(-len(prompt) // size), str(stats)
            assert (stats.bytes_written > 0) == (stats.blocks_written > 0)


def _reason(answer: Sequence[int]) -> common_pb2.FinishReason:
    return common_pb2.FINISH_REASON_STOP if answer[-1] == EOS_ID else common_pb2.FINISH_REASON_LENGTH


def random_prompt(rng: random.Random, length: int) -> Prompt:
    return [rng.randrange(2, VOCAB) for _ in range(length)]


@contextmanager
def serving(setup: Setup, folder: Path, **changes: Any) -> Iterator[Served]:
    """Write the model into `folder` and serve it; at the end every node holds nothing. Leaves torch on one thread."""
    write_demo_model(folder, setup.model)
    torch.set_num_threads(1)  # the reference shares the cores with the cluster
    with running(setup.spec(folder, **changes)) as cluster:
        yield Served(setup=setup, folder=folder, cluster=cluster, reference=ReferenceModel(folder))
        cluster.run(assert_conserved(cluster))
