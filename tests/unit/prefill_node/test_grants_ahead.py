"""How far ahead of its engine a prefill node asks for grants, and who has to wait for an answer that does not come."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import patch

from baton.ids import RequestKey
from kvtransfer.writer import StepWrites
from prefill_node.job import Job
from prefill_node.node import PrefillNode
from tests.support.cluster_harness import assert_conserved, mock_spec, random_prompt
from tests.support.inprocess_cluster import MARK, Point, ask_exactly, inprocess, until
from tests.support.node_states import prefill_state

LONG = 200
"""Tokens of a prompt that is more than two steps of the engine."""
ENGINE = {"engine.tokens_per_step_max": 64, "engine.sequences_max": 8}
PATIENT = {"writer.reserve_ms_max": 60_000}


def test_grants_are_asked_one_step_ahead_and_no_further() -> None:
    """The engine is in the middle of a long prompt. Three more come: decode memory is not set aside for them yet, they
    wait in line. When the engine goes on all are answered."""

    async def scenario() -> None:
        rng = random.Random(1)
        async with inprocess(mock_spec(prefill_flags=ENGINE)) as cluster:
            node, layer = cluster.prefill["prefill-0"], cluster.gates[Point.LAYER]
            layer.close()
            prompts = [[MARK, *random_prompt(rng, LONG)], *(random_prompt(rng, LONG) for _ in range(3))]
            calls = [asyncio.create_task(ask_exactly(cluster, prompts[0]))]
            await layer.reached.wait()
            calls += [asyncio.create_task(ask_exactly(cluster, prompt)) for prompt in prompts[1:]]
            await until(cluster, "the others to wait", lambda: len(prefill_state(node).queue) == 3)
            assert cluster.decode["decode-0"].receiver.grants.unreleased == 1
            layer.open()
            await asyncio.gather(*calls)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_grant_of_the_next_prompt_is_asked_for_before_its_step() -> None:
    """The engine computes a prompt of which less than two steps are left, but more than one. Two more come: the first
    has its grant while the step is still under way, so that it can be in the next one; the second waits in line."""

    async def scenario() -> None:
        rng = random.Random(4)
        async with inprocess(mock_spec(prefill_flags=ENGINE)) as cluster:
            node, layer = cluster.prefill["prefill-0"], cluster.gates[Point.LAYER]
            grants = cluster.decode["decode-0"].receiver.grants
            cluster.layer_held = (2, 1)
            layer.close()
            calls = [asyncio.create_task(ask_exactly(cluster, [MARK, *random_prompt(rng, LONG)]))]
            await layer.reached.wait()
            (begun,) = prefill_state(node).admitted
            assert 64 < begun.tokens_ahead < 2 * 64
            calls += [asyncio.create_task(ask_exactly(cluster, random_prompt(rng, LONG))) for _ in range(2)]
            await until(
                cluster, "a second grant", lambda: (grants.unreleased, len(prefill_state(node).queue)) == (2, 1)
            )
            layer.open()
            await asyncio.gather(*calls)
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_reserve_without_an_answer_holds_up_nobody_else() -> None:
    """A decode node does not answer the Reserve of a long prompt, for as long as it may take. The engine has nothing to
    do, so those behind it in line go ahead, and are answered before it."""

    async def scenario() -> None:
        rng = random.Random(2)
        async with inprocess(mock_spec(prefill_flags={**ENGINE, **PATIENT})) as cluster:
            gate = cluster.gates[Point.RESERVE_ARRIVED]
            gate.close()
            stalled = asyncio.create_task(ask_exactly(cluster, [MARK, *random_prompt(rng, LONG)]))
            await gate.reached.wait()
            for _ in range(2):
                await ask_exactly(cluster, random_prompt(rng, LONG))
            assert not stalled.done()
            gate.open()
            await stalled
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_a_prompt_whose_writes_cannot_be_planned_leaves_nothing() -> None:
    """A bug of ours strikes when the prompt's blocks are held and pinned, and the engine does not have it yet. The
    request is taken up again, and every block of the first try is free."""
    real_plan = PrefillNode._plan_writes
    struck: list[RequestKey] = []

    def plan(self: PrefillNode, job: Job, *args: Any) -> StepWrites | None:
        if not struck:
            struck.append(job.key)
            raise RuntimeError("struck by the test")
        return real_plan(self, job, *args)

    async def scenario() -> None:
        async with inprocess(mock_spec()) as cluster:
            with patch.object(PrefillNode, "_plan_writes", plan):
                answer = await ask_exactly(cluster, random_prompt(random.Random(3), LONG))
            assert (len(struck), answer.stats.resumptions) == (1, 1)
            await assert_conserved(cluster)

    asyncio.run(scenario())
