"""The first layers' bytes are in the decode node's region before the last layer is computed."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest

from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.mock import MockConfig, MockRunner
from engine.types import Batch, NullSink, SequenceSlice
from tests.support.cluster_harness import assert_conserved, mock_params, mock_spec, mock_tokens, random_prompt, wait_for
from tests.support.inprocess_cluster import MARK, InProcessCluster, inprocess
from tests.support.node_states import decode_state

BLOCK = 16
CHUNK = 512
HELD_S_MAX = 60.0
LAYERS = MockConfig().num_layers


def expected_records_LN2SD(prompt: list[int]) -> np.ndarray:
    """The prompt's records, block by block, computed in one go over memory of our own."""
    config = MockConfig()
    blocks = -(-len(prompt) // BLOCK)
    runner = MockRunner(config)
    region_U8 = np.zeros(LAYERS * blocks * 2 * BLOCK * config.head_dim, dtype=np.uint8)
    runner.bind(region_U8, blocks)
    piece = SequenceSlice(
        key=RequestKey(request=RequestId("alone"), attempt=Attempt(0)),
        tokens=tuple(prompt),
        start=0,
        stop=len(prompt),
        block_table=tuple(BlockId(b) for b in range(blocks)),
        sample=False,
        output_index=0,
        params=mock_params(),
    )
    runner.run(Batch(slices=(piece,)), NullSink())
    return region_U8.reshape(LAYERS, blocks, 2, BLOCK, config.head_dim)


class LastLayerHeld:
    """Stands in for the prefill runner's pause before each layer: waits before the last layer of step `step`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, step: int) -> None:
        self.waiting = asyncio.Event()
        self.go = threading.Event()
        self._loop = loop
        self._held_at = step * LAYERS + LAYERS - 1
        self._calls = 0

    def __call__(self, _seconds: float) -> None:
        call, self._calls = self._calls, self._calls + 1
        if call == self._held_at:
            self._loop.call_soon_threadsafe(self.waiting.set)
            assert self.go.wait(HELD_S_MAX), "the test never let the last layer be computed"


def landed_layers(cluster: InProcessCluster, expected_LN2SD: np.ndarray, first: int, last: int) -> list[bool]:
    """For each layer: are the records of the prompt's blocks `first` to `last` in the decode node's region?"""
    (job,) = decode_state(cluster.decode["decode-0"]).jobs
    runner = cluster.decode["decode-0"].pool.runner
    assert isinstance(runner, MockRunner)
    records_LN2SD = [records_N2SD[list(job.blocks[first:last])] for records_N2SD in runner._layers]
    size = BLOCK * (last - first)
    return [
        records.transpose(0, 2, 1, 3).reshape(size, -1).tobytes()
        == expected.transpose(0, 2, 1, 3).reshape(size, -1).tobytes()
        for records, expected in zip(records_LN2SD, expected_LN2SD[:, first:last], strict=True)
    ]


@pytest.mark.parametrize(
    ("length", "step"), [(320, 0), (1200, 1), (1200, 2)], ids=["only-chunk", "middle-chunk", "last-chunk"]
)
def test_layers_land_while_the_last_one_waits(length: int, step: int) -> None:
    """The engine waits before the last layer of one chunk until the test has seen, in the decode node's region, this
    chunk's full blocks in every layer before. Were records sent after the step, this would wait in vain."""

    async def scenario() -> None:
        prompt = [MARK, *random_prompt(random.Random(31), length - 1)]
        expected_LN2SD = expected_records_LN2SD(prompt)
        spec = mock_spec(blocks=200, prefill_flags={"engine.mock_layer_delay_ms": 0.001})
        async with inprocess(spec) as cluster:
            held = LastLayerHeld(cluster.loop, step)
            runner = cluster.prefill["prefill-0"].pool.runner
            assert isinstance(runner, MockRunner)
            runner._pause = held
            answer = asyncio.create_task(cluster.client.generate(prompt, max_tokens=6))
            try:
                await asyncio.wait_for(held.waiting.wait(), HELD_S_MAX)
                first, last = step * CHUNK // BLOCK, min(length, (step + 1) * CHUNK) // BLOCK

                async def all_but_one_landed() -> bool:
                    landed = landed_layers(cluster, expected_LN2SD, first, last)
                    assert not landed[-1], "the last layer is there before it was computed"
                    return all(landed[:-1])

                await wait_for(all_but_one_landed, "the first layers' bytes", story=cluster.story)
                assert not answer.done()
            finally:
                held.go.set()
            assert (await answer).ids == mock_tokens(prompt, 6)
            await assert_conserved(cluster)

    asyncio.run(scenario())
