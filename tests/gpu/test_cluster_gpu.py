"""Clusters of nodes that are made of the GPU parts: kernels over a region in the device's memory, decode graphs, and
handoffs over cuda_ipc. Without a GPU: Triton's interpreter, and a driver whose memory is the host's.

On a machine with one: `BATON_TEST_DEVICE=cuda python -m pytest tests/gpu/test_cluster_gpu.py`.
"""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import pytest

from cli.reference import Reference
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import assert_conserved, leftovers, running, wait_for
from tests.support.gpu_node import (
    DEVICE,
    GREEDY,
    MODEL,
    NUM_BLOCKS,
    TOKENS,
    AnyCluster,
    blocks_in_all,
    facts_of,
    play,
    random_prompts,
    spec_of,
    write_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, num_blocks=64, compute_threads=1)


async def answers(cluster: AnyCluster, prompts: list[list[int]]) -> list[list[int]]:
    calls = (cluster.client.generate(prompt, max_tokens=TOKENS) for prompt in prompts)
    found = await asyncio.gather(*calls)
    assert {answer.stats.transport for answer in found} <= {"cuda_ipc", "local"}
    return [answer.ids for answer in found]


@pytest.mark.slow
def test_answers_are_those_of_one_engine_on_the_cpu(model: Path, reference: Reference) -> None:
    """Prompts at once, some with a common beginning that is not sent twice, chunks cut inside blocks, freed blocks
    poisoned and used again: exact. Afterwards every block is free, cached or the decode node's padding."""
    first, second = random_prompts(8, 1, 7, 8, 21), random_prompts(9, 9, 30)
    prompts = [*first, *(first[3] + each for each in second)]
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]

    async def scene(cluster: AnyCluster) -> None:
        for _ in range(2):
            assert await answers(cluster, prompts) == expected
        await assert_conserved(cluster)
        statuses = await cluster.statuses()
        prefill, decode = statuses["prefill-0"], statuses["decode-0"]
        assert (prefill.engine.padding_blocks, decode.engine.padding_blocks) == (0, 1)
        assert (prefill.record.load.blocks.held, decode.record.load.blocks.held) == (0, 1)
        assert blocks_in_all(prefill) == blocks_in_all(decode) == NUM_BLOCKS
        assert list(prefill.record.transports) == list(decode.record.transports) == ["cuda_ipc", "tcp"]
        assert decode.prefixes.hit_tokens >= 2 * 16  # the common beginning's blocks
        facts = facts_of(decode)
        assert facts["device"] == DEVICE.value
        assert facts["region"].endswith(" bytes in device memory")
        assert facts["prefill attention"].split(";")[0]
        assert facts["decode attention"] == "triton"
        assert facts["decode graphs"] == f"of 1, 2, 4 rows, contexts up to {MODEL.context_len_max} tokens"
        assert not facts["decode graphs used"].startswith("0 steps")
        assert facts_of(prefill)["decode graphs"] == "none (not captured)"

    play(spec_of(model), scene)


@pytest.mark.slow
def test_mixed_nodes_keep_and_hand_over_on_one_region(model: Path, reference: Reference) -> None:
    """Two nodes of both halves: short prompts run where they came in, long ones at the other, in steps that read
    prompts and write answers together. Exact, and each node has its own padding."""
    prompts = random_prompts(11, 5, 26, 3, 40)
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]

    async def scene(cluster: AnyCluster) -> None:
        for _ in range(2):
            assert await answers(cluster, prompts) == expected
        await assert_conserved(cluster)
        for name, status in (await cluster.statuses()).items():
            if name.startswith("mixed"):
                assert (status.engine.padding_blocks, blocks_in_all(status)) == (1, NUM_BLOCKS)

    play(spec_of(model, mixed=2), scene)


@pytest.mark.slow
def test_a_killed_writer_frees_the_blocks_it_wrote_to(model: Path, reference: Reference) -> None:
    """A prefill process is killed between two layers of a long prompt. Its death is the evidence: the decode node's
    blocks are free again, all but the padding; a new process hands the same prompt over, exactly."""
    (prompt,) = random_prompts(12, 120)
    expected = reference.answer(prompt, GREEDY)
    moved = 0
    with running(spec_of(model)) as cluster:

        async def writing() -> bool:
            pairs = (await cluster.status("prefill-0")).pairs
            blocks = (await cluster.status("decode-0")).record.load.blocks
            return blocks.writer_owned > 0 and pairs[0].bytes_moved > moved

        async def whole_again() -> bool:
            return not leftovers({"decode-0": await cluster.status("decode-0")})

        async def scene() -> None:
            nonlocal moved
            moved = (await cluster.status("prefill-0")).pairs[0].bytes_moved
            call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=TOKENS))
            await wait_for(writing, "the first layers to land", story=cluster.story)
            cluster.send_signal("prefill-0", signal.SIGKILL)
            await cluster.wait_exit("prefill-0")
            cluster.set_down("prefill-0")
            await wait_for(whole_again, "the evidence", story=cluster.story)
            assert blocks_in_all(await cluster.status("decode-0")) == NUM_BLOCKS
            await cluster.cluster.start_process("prefill-0")
            cluster.set_down("prefill-0", False)
            # The router has kept the request: it goes to the new process.
            answer = await call
            assert (answer.ids, answer.stats.transport) == (expected, "cuda_ipc")
            await assert_conserved(cluster)

        cluster.run(scene())
        reported = run_baton("describe", "decode-0", "--directory", cluster.cluster.directory)
        assert reported.returncode == 0, reported.stderr
        for row in (
            "transports +cuda_ipc",
            rf"device +{DEVICE.value}",
            "region +[0-9,]+ bytes in device memory",
            "decode attention +triton",
            "decode graphs +of 1, 2, 4 rows, contexts up to 160 tokens",
            r"blocks +\d+ free, \d+ cached, 1 held \(1 for padding\), 0 owned by a writer",
        ):
            assert re.search(f"^{row}", reported.stdout, re.MULTILINE), (row, reported.stdout)
