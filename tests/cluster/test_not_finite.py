"""A model whose scores for one request are not numbers: its client gets a clear error, and the others their answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from unittest.mock import patch

import pytest

from baton.errors import BatonError, Code, Reason
from engine.mock import MockRunner
from engine.types import NO_TOKEN, Batch, KvSink, StepResult
from tests.support.cluster_harness import assert_conserved, mock_spec, random_prompt
from tests.support.inprocess_cluster import MARK, ask_exactly, inprocess

FACT = "requests ended by scores that are not numbers"


@pytest.mark.parametrize(("index", "node"), [(0, "prefill-0"), (3, "decode-0")])
def test_scores_that_are_not_numbers_end_one_request_with_an_error(index: int, node: str) -> None:
    """Of three requests at a time one has such scores, for its first token or its fourth. It fails once, nobody tries
    it again, the node that found it counts it, the others' answers are whole, and every block comes back."""
    run = MockRunner.run

    def run_broken(self: MockRunner, batch: Batch, sink: KvSink) -> StepResult:
        result = run(self, batch, sink)
        broken = [p.key for p in batch.slices if p.sample and p.tokens[0] == MARK and p.output_index == index]
        return replace(result, sampled={**result.sampled, **dict.fromkeys(broken, NO_TOKEN)})

    async def scenario() -> None:
        rng = random.Random(5)
        async with inprocess(mock_spec()) as cluster:
            others = [asyncio.create_task(ask_exactly(cluster, random_prompt(rng, 40))) for _ in range(2)]
            with pytest.raises(BatonError) as caught:
                await cluster.client.generate([MARK, *random_prompt(rng, 40)], max_tokens=8)
            await asyncio.gather(*others)
            assert (caught.value.reason, caught.value.code) == (Reason.SCORES_NOT_FINITE, Code.INTERNAL)
            statuses = await cluster.statuses()
            facts = {name: {fact.name: fact.text for fact in status.engine.facts} for name, status in statuses.items()}
            counts = {name: facts[name][FACT] for name in ("prefill-0", "decode-0")}
            assert counts == {"prefill-0": "0", "decode-0": "0", node: "1"}
            await assert_conserved(cluster)

    with patch.object(MockRunner, "run", run_broken):
        asyncio.run(scenario())
