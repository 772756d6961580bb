"""Mixed nodes in a cluster: what they keep, what they hand over, to whom, and that the tokens are the same each way."""

from __future__ import annotations

import asyncio
import random
from typing import Any, Final
from unittest.mock import patch

import pytest

from baton.errors import Reason
from baton.wire import Role
from cli.services import Service
from cli.supervisor import ROUTER_NAME
from engine.types import Batch, KvSink
from mixed_node.node import MixedNode
from tests.support.cluster_harness import (
    Answer,
    assert_conserved,
    error_of,
    mock_spec,
    mock_tokens,
    random_prompt,
    wait_for,
)
from tests.support.inprocess_cluster import InProcessCluster, inprocess, until

MIN: Final = 64
TOKENS: Final = 20
PATIENT: Final = {"handoff_tokens_min": MIN, "writer.reserve_ms_max": 30_000}
"""On a slow machine too, a node that takes its time to grant is not taken for one that is not reached."""


def check(answer: Answer, prompt: list[int], *, transport: str, count: int = TOKENS) -> None:
    assert answer.ids == mock_tokens(prompt, count)
    stats = answer.stats
    assert stats.transport == transport
    if transport == "local":
        assert stats.decode_node == stats.prefill_node
        assert (stats.blocks_written, stats.blocks_skipped, stats.bytes_written) == (0, 0, 0)
    else:
        assert stats.decode_node != stats.prefill_node
        assert stats.blocks_written + stats.blocks_skipped == -(-len(prompt) // 16)


async def moved(cluster: InProcessCluster) -> int:
    """Bytes written between nodes, ever."""
    return sum(pair.bytes_moved for status in (await cluster.statuses()).values() for pair in status.pairs)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_only_mixed_nodes(transport: str) -> None:
    """Two of them and nothing else: prompts around the minimum, one at a time and many at once. The short ones stay,
    the long ones go to the other node, and every answer is exact."""

    async def scenario() -> None:
        rng = random.Random(41)
        spec = mock_spec(prefill=0, decode=0, mixed=2, mixed_flags={**PATIENT, "transports": transport})
        async with inprocess(spec) as cluster:
            lengths = (1, 15, 16, 17, MIN - 1, MIN, MIN + 1, 700)
            for length in lengths:
                prompt = random_prompt(rng, length)
                answer = await cluster.client.generate(prompt, max_tokens=TOKENS)
                check(answer, prompt, transport="local" if length < MIN else transport)
            prompts = [random_prompt(rng, rng.choice(lengths)) for _ in range(60)]
            answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=TOKENS) for p in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                check(answer, prompt, transport="local" if len(prompt) < MIN else transport)
            assert {a.stats.prefill_node for a in answers} == {"mixed-0", "mixed-1"}
            assert {a.stats.decode_node for a in answers if a.stats.transport == transport} == {"mixed-0", "mixed-1"}
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_beside_prefill_and_decode_nodes() -> None:
    """One of each: the prefill node hands to the decode node and to the mixed one, the mixed one to the decode node."""

    async def scenario() -> None:
        rng = random.Random(42)
        spec = mock_spec(prefill=1, decode=1, mixed=1, mixed_flags=PATIENT)
        async with inprocess(spec) as cluster:
            pairs: set[tuple[str, str]] = set()
            while len(pairs) < 3:
                prompts = [random_prompt(rng, 200) for _ in range(16)]
                for prompt, answer in zip(
                    prompts,
                    await asyncio.gather(*(cluster.client.generate(p, max_tokens=TOKENS) for p in prompts)),
                    strict=True,
                ):
                    check(answer, prompt, transport="shm")
                    pairs.add((answer.stats.prefill_node, answer.stats.decode_node))
            assert pairs == {("prefill-0", "decode-0"), ("prefill-0", "mixed-0"), ("mixed-0", "decode-0")}
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_the_second_turn_needs_no_handoff() -> None:
    """A conversation whose every turn adds less than the minimum: the first turn is handed over if it is long; what
    follows runs where its beginning is cached, as it is on both nodes then, and nothing is written for it."""

    async def scenario() -> None:
        rng = random.Random(43)
        flags = {**PATIENT, "membership.heartbeat_ms": 50}
        spec = mock_spec(prefill=0, decode=0, mixed=2, mixed_flags=flags)
        async with inprocess(spec) as cluster:
            router = cluster.runtimes[ROUTER_NAME].membership

            def reported() -> bool:
                loads = [(cluster.runtimes[r.name].record().load, r.load) for r in router.nodes(Role.MIXED)]
                return all((now.requests_taken, 0) == (r.requests_taken, r.waiting_tokens) for now, r in loads)

            talk = random_prompt(rng, 400)
            first = await cluster.client.generate(talk, max_tokens=TOKENS)
            check(first, talk, transport="shm")
            bytes_first = await moved(cluster)
            for _ in range(4):
                talk += [*mock_tokens(talk, TOKENS), *random_prompt(rng, 10)]
                await until(cluster, "the router to know that nobody waits there", reported)
                answer = await cluster.client.generate(talk, max_tokens=TOKENS)
                check(answer, talk, transport="local")
                assert answer.stats.prefill_node in (first.stats.prefill_node, first.stats.decode_node)
                assert len(talk) - answer.stats.prompt_tokens_cached < MIN
            assert await moved(cluster) == bytes_first > 0
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_decode_nodes_come_and_go() -> None:
    """The only decode node stops: long prompts run on the mixed node from then on, without an error in between. It
    comes back: they are handed over again."""

    async def scenario() -> None:
        rng = random.Random(44)
        spec = mock_spec(prefill=0, decode=1, mixed=1, mixed_flags=PATIENT)
        async with inprocess(spec) as cluster:

            async def ask(transport: str) -> None:
                prompt = random_prompt(rng, 300)
                check(await cluster.client.generate(prompt, max_tokens=TOKENS), prompt, transport=transport)

            await ask("shm")
            await cluster.stop_node("decode-0")
            for _ in range(3):
                await ask("local")
            await cluster.start_node("decode-0", Service.DECODE)

            async def known() -> bool:
                return cluster.prefill["mixed-0"].decode_nodes.ready == 1

            await wait_for(known, "the mixed node to know of it", story=cluster.story)
            await ask("shm")
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_never_means_never() -> None:
    """Without a decode node, and with the policy that forbids it: a long prompt is refused, a short one runs here."""

    async def scenario() -> None:
        flags = {"handoff_tokens_min": MIN, "local_fallback": "never"}
        spec = mock_spec(prefill=0, decode=0, mixed=1, mixed_flags=flags, router_flags={"placement_wait_ms_max": 200})
        async with inprocess(spec) as cluster:
            error = await error_of(cluster.client.generate([5] * MIN, max_tokens=TOKENS))
            assert error.reason is Reason.NO_DECODE_NODE
            prompt = [5] * (MIN - 1)
            check(await cluster.client.generate(prompt, max_tokens=TOKENS), prompt, transport="local")
            await assert_conserved(cluster)

    asyncio.run(scenario())


def test_running_sequences_go_first() -> None:
    """While two answers are being written, a long prompt comes, and one to hand over beside it: in every step that has
    both, the running sequences are first, with one token each, and all of them are there."""

    async def scenario() -> None:
        batches: list[Batch] = []
        real = MixedNode.step_begins

        def step_begins(self: MixedNode, batch: Batch) -> KvSink:
            batches.append(batch)
            return real(self, batch)

        flags = {"handoff_tokens_min": 512, "engine.tokens_per_step_max": 64, "engine.mock_layer_delay_ms": 0.1}
        spec = mock_spec(prefill=0, decode=1, mixed=1, mixed_flags=flags)
        with patch.object(MixedNode, "step_begins", step_begins):
            async with inprocess(spec) as cluster:
                rng = random.Random(46)
                running = [random_prompt(rng, 20) for _ in range(2)]
                answers = [asyncio.create_task(cluster.client.generate(p, max_tokens=400)) for p in running]

                async def both_run() -> bool:
                    return bool(batches) and len([p for p in batches[-1].slices if p.output_index > 0]) == 2

                await wait_for(both_run, "two answers", story=cluster.story)
                kept, long = random_prompt(rng, 500), random_prompt(rng, 600)
                check(await cluster.client.generate(kept, max_tokens=5), kept, transport="local", count=5)
                check(await cluster.client.generate(long, max_tokens=5), long, transport="shm", count=5)
                for prompt, answer in zip(running, await asyncio.gather(*answers), strict=True):
                    check(answer, prompt, transport="local", count=400)
                await assert_conserved(cluster)
        mixed = 0
        for batch in batches:
            kinds = ["prompt" if piece.output_index == 0 else "running" for piece in batch.slices]
            assert kinds == sorted(kinds, reverse=True), "a prompt before a running sequence"
            assert all(p.stop - p.start == 1 for p in batch.slices if p.output_index > 0)
            assert batch.num_tokens <= 64
            mixed += kinds.count("running") >= 2 and "prompt" in kinds
        assert mixed >= (500 + 600) // 64

    asyncio.run(scenario())


def test_a_running_sequence_is_in_every_step() -> None:
    """Decode never rolls back: from its first token to its last a kept sequence is in each step of the engine, while
    prompts come one after the other; and its growth was promised before it began."""

    async def scenario() -> None:
        batches: list[Batch] = []
        real = MixedNode.step_begins

        def step_begins(self: MixedNode, batch: Batch) -> KvSink:
            batches.append(batch)
            return real(self, batch)

        spec = mock_spec(prefill=0, decode=0, mixed=1, blocks=40, mixed_flags={"engine.tokens_per_step_max": 64})
        with patch.object(MixedNode, "step_begins", step_begins):
            async with inprocess(spec) as cluster:
                rng = random.Random(47)
                prompts = [random_prompt(rng, rng.randrange(1, 300)) for _ in range(40)]
                answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=90) for p in prompts))
                for prompt, answer in zip(prompts, answers, strict=True):
                    check(answer, prompt, transport="local", count=90)
                await assert_conserved(cluster)
        steps: dict[Any, list[int]] = {}
        for number, batch in enumerate(batches):
            for piece in batch.slices:
                if piece.sample:
                    steps.setdefault(piece.key, []).append(number)
        assert len(steps) == 40
        for numbers in steps.values():
            assert numbers == list(range(numbers[0], numbers[0] + 90))

    asyncio.run(scenario())


def test_room_for_the_answer_is_waited_for_not_borrowed() -> None:
    """A region of 40 blocks and requests of 30 (10 of prompt, 20 of growth): they run one after the other. One that can
    never fit is told so at once, by the numbers."""

    async def scenario() -> None:
        rng = random.Random(48)
        async with inprocess(
            mock_spec(prefill=0, decode=0, mixed=1, blocks=40, router_flags={"placement_wait_ms_max": 1})
        ) as cluster:
            most = 0
            real = MixedNode.step_begins

            def step_begins(self: MixedNode, batch: Batch) -> KvSink:
                nonlocal most
                most = max(most, len(batch.slices))
                return real(self, batch)

            with patch.object(MixedNode, "step_begins", step_begins):
                prompts = [random_prompt(rng, 160) for _ in range(6)]
                answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=320) for p in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                check(answer, prompt, transport="local", count=320)
            assert most == 1
            error = await error_of(cluster.client.generate(prompts[0], max_tokens=600))
            assert error.reason is Reason.PROMPT_TOO_LONG
            assert "prompt and answer need 48 blocks, the region has 40" in error.message
            await assert_conserved(cluster)

    asyncio.run(scenario())
