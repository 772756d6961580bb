"""A decode node whose region lies on a device and is too small for the answers that it has promised: real processes,
blocks that go to pinned memory and come back. Without a GPU and with one: see `test_cluster_gpu`.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from batonpb import node_pb2

from cli.reference import Reference
from engine.types import SamplingParams
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import RunningCluster, assert_conserved, leftovers, running, wait_for
from tests.support.gpu_node import (
    BLOCK_SIZE,
    GREEDY,
    MODEL,
    blocks_in_all,
    facts_of,
    random_prompts,
    spec_of,
    write_model,
)

DECODE: Final = "decode-0"
PREFILL: Final = "prefill-0"
BLOCKS: Final = 20
"""One of them is padding. The five answers of the first test come to 24, the three short ones of the second to 23."""
HOST_BLOCKS: Final = 24
HOST_BYTES: Final = HOST_BLOCKS * MODEL.num_layers * 2 * MODEL.num_kv_heads * BLOCK_SIZE * MODEL.head_dim * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpu-spill-cluster"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, num_blocks=64, compute_threads=1)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[RunningCluster]:
    """One that ends with every block accounted for, whatever the tests have done to it."""
    spill = {
        "engine.num_blocks": BLOCKS,
        "spill.host_blocks": HOST_BLOCKS,
        "spill.headroom_blocks": 1,
    }
    with running(replace(spec_of(model), node_flags={DECODE: spill})) as cluster:
        yield cluster
        cluster.run(assert_conserved(cluster))


def spill_counters(status: node_pb2.NodeStatus) -> dict[str, int]:
    own = "spill: "
    return {c.name.removeprefix(own): int(c.value) for c in status.counters if c.name.startswith(own)}


def assert_all_accounted_for(status: node_pb2.NodeStatus) -> None:
    load, facts = status.record.load, spill_counters(status)
    assert blocks_in_all(status) == BLOCKS
    assert (load.blocks.held, status.engine.padding_blocks) == (1, 1)
    assert (load.swapped_out_requests, load.host_blocks_filled, load.host_blocks_free) == (0, 0, HOST_BLOCKS)
    assert (facts["sequences swapped out"], facts["host blocks filled"]) == (0, 0)
    assert facts["host blocks in a copy"] == 0


def params(count: int) -> SamplingParams:
    return replace(GREEDY, max_tokens=count, ignore_eos=True)


async def ask(cluster: RunningCluster, prompt: list[int], count: int) -> list[int]:
    answer = await cluster.client.generate(prompt, max_tokens=count, ignore_eos=True)
    assert answer.stats.transport == "cuda_ipc"
    return answer.ids


@pytest.mark.slow
def test_device_memory_runs_out_and_every_answer_is_right(cluster: RunningCluster, reference: Reference) -> None:
    """Five answers at once, freed blocks poisoned: each is that of one engine on the CPU, blocks have gone to pinned
    memory and come back, steps overlapped and were held back. `baton describe` shows how much is pinned."""
    prompts = random_prompts(21, 5, 8, 9, 11, 13)
    count = 28
    expected = [reference.answer(prompt, params(count)) for prompt in prompts]

    async def scene() -> node_pb2.NodeStatus:
        assert await asyncio.gather(*(ask(cluster, prompt, count) for prompt in prompts)) == expected
        await assert_conserved(cluster)
        return await cluster.status(DECODE)

    status = cluster.run(scene())
    assert_all_accounted_for(status)
    counted, facts = spill_counters(status), facts_of(status)
    assert counted["sequences swapped out since start"] > 0
    assert counted["bytes copied out"] > 0
    assert facts["below the region"] == f"{HOST_BYTES:,} bytes of pinned memory"
    steps = re.fullmatch(r"(\d+) of \d+, (\d+) held back, \d+ surplus tokens", facts["steps overlapped"])
    assert steps is not None, facts
    assert min(int(steps[1]), int(steps[2])) > 0
    shown = run_baton("describe", DECODE, "--directory", cluster.cluster.directory)
    assert shown.returncode == 0, shown.stderr
    assert re.search(f"^below the region +{HOST_BYTES:,} bytes of pinned memory$", shown.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_killed_writer_disturbs_nobody_who_spills(cluster: RunningCluster, reference: Reference) -> None:
    """Three answers grow while a prefill process writes a long prompt, and is killed in the middle of it: its death
    frees the blocks that it wrote to, the three outgrow the device, and are right. A new process hands the long prompt
    over, exactly, and nothing is left anywhere."""
    short = random_prompts(31, 9, 11, 13)
    (long,) = random_prompts(32, 40)
    counts = (48, 48, 48, 8)
    expected = [reference.answer(p, params(n)) for p, n in zip((*short, long), counts, strict=True)]
    before = spill_counters(cluster.run(cluster.status(DECODE)))["sequences swapped out since start"]

    async def three_run() -> bool:
        status = await cluster.status(DECODE)
        return status.requests == 3 and status.record.load.blocks.writer_owned == 0

    async def writing() -> bool:
        return (await cluster.status(DECODE)).record.load.blocks.writer_owned > 0

    async def evidence() -> bool:
        found = leftovers({DECODE: await cluster.status(DECODE)}).get(DECODE, {})
        return not found.keys() & {"writer_owned", "quarantined"}

    async def scene() -> None:
        calls = [asyncio.create_task(ask(cluster, p, n)) for p, n in zip(short, counts, strict=False)]
        await wait_for(three_run, "three to run", story=cluster.story)
        calls.append(asyncio.create_task(ask(cluster, long, counts[-1])))
        await wait_for(writing, "the long prompt to be written", story=cluster.story)
        cluster.send_signal(PREFILL, signal.SIGKILL)
        await cluster.wait_exit(PREFILL)
        cluster.set_down(PREFILL)
        await wait_for(evidence, "the evidence", story=cluster.story)
        await cluster.cluster.start_process(PREFILL)
        cluster.set_down(PREFILL, False)
        assert await asyncio.gather(*calls) == expected
        await assert_conserved(cluster)

    cluster.run(scene())
    status = cluster.run(cluster.status(DECODE))
    assert_all_accounted_for(status)
    assert spill_counters(status)["sequences swapped out since start"] > before
