"""Clusters with regions on a device that hand over by tcp, through pinned memory: with each other, and with nodes whose
region is in host memory. Without a GPU and with one: see `test_cluster_gpu`.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Final

import pytest

from cli.reference import Reference
from kvtransfer.device.staging import STAGING_LIMITS, StagingLimits
from node import regions
from tests.support.cli_harness import run_baton
from tests.support.cluster_harness import assert_conserved, leftovers, running, wait_for
from tests.support.gpu_node import (
    GREEDY,
    NUM_BLOCKS,
    ON_GPU,
    TOKENS,
    AnyCluster,
    blocks_in_all,
    facts_of,
    play,
    random_prompts,
    spec_of,
    write_model,
)

LIMITS = STAGING_LIMITS if ON_GPU else StagingLimits(chunk_bytes=1 << 12, link_chunks=3, stream_chunks=2)
"""In this process a chunk has two records, so that a layer is cut into several."""
PINNED = f"{40 * LIMITS.chunk_bytes:,} bytes of pinned memory"
STAGING: Final[dict[str, object]] = {"staging.bytes_max": 40 * LIMITS.chunk_bytes}
IN_USE = {
    "prefill-0": f"{LIMITS.link_chunks * LIMITS.chunk_bytes:,} in use",
    "decode-0": f"{2 * LIMITS.stream_chunks * LIMITS.chunk_bytes:,} in use",
}
"""By one link, whose two connections the decode node has."""
TCP: Final = {**STAGING, "transports": "tcp"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "STAGING_LIMITS", LIMITS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpu-tcp"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, num_blocks=64, compute_threads=1)


async def answers(cluster: AnyCluster, prompts: list[list[int]], others: Collection[str] = ()) -> list[list[int]]:
    """All are handed over by tcp, but for some that may go one of the other ways."""
    calls = (cluster.client.generate(prompt, max_tokens=TOKENS) for prompt in prompts)
    found = await asyncio.gather(*calls)
    assert {"tcp"} <= {answer.stats.transport for answer in found} <= {"tcp", *others}
    return [answer.ids for answer in found]


@pytest.mark.parametrize(
    ("settings", "on_cpu", "offers"),
    [
        pytest.param(TCP, (), {"prefill-0": ["tcp"], "decode-0": ["tcp"]}, marks=pytest.mark.slow),
        (STAGING, ("decode-0",), {"prefill-0": ["cuda_ipc", "tcp"], "decode-0": ["shm", "tcp"]}),
        pytest.param(
            STAGING,
            ("prefill-0",),
            {"prefill-0": ["shm", "tcp"], "decode-0": ["cuda_ipc", "tcp"]},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["both on the device", "to a CPU", "from a CPU"],
)
def test_answers_are_those_of_one_engine_on_the_cpu(
    model: Path,
    reference: Reference,
    settings: dict[str, object],
    on_cpu: tuple[str, ...],
    offers: dict[str, list[str]],
) -> None:
    """Prompts at once, some with a common beginning that is not sent twice, chunks cut inside blocks, freed blocks
    poisoned and used again, and cached blocks posted by the control thread: exact, whichever of the two regions is on
    a device. Afterwards every block is free, cached or padding, and what a node tells of its pinned memory is what its
    one link or connection has."""
    first, second = random_prompts(8, 1, 7, 8, 21), random_prompts(9, 9, 30)
    prompts = [*first, *(first[3] + each for each in second)]
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]

    async def scene(cluster: AnyCluster) -> None:
        for _ in range(2):
            assert await answers(cluster, prompts) == expected
        await assert_conserved(cluster)
        statuses = await cluster.statuses()
        for name in offers:
            status = statuses[name]
            assert blocks_in_all(status) == NUM_BLOCKS
            assert [t for t in status.record.transports if t != "rdma"] == offers[name]
            assert facts_of(status).get("staging") == (None if name in on_cpu else f"{PINNED}, {IN_USE[name]}")
        padding = 0 if "decode-0" in on_cpu else 1
        assert statuses["decode-0"].record.load.blocks.held == padding

    play(spec_of(model, more=settings, on_cpu=on_cpu), scene)


@pytest.mark.slow
def test_mixed_nodes_write_and_receive_through_one_pinned_memory(model: Path, reference: Reference) -> None:
    """Two nodes of both halves, each a writer to the other. Exact, and every block is accounted for."""
    prompts = random_prompts(11, 26, 40, 33, 18)
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]

    async def scene(cluster: AnyCluster) -> None:
        assert await answers(cluster, prompts, others=["local"]) == expected
        await assert_conserved(cluster)
        for name, status in (await cluster.statuses()).items():
            if name.startswith("mixed"):
                assert blocks_in_all(status) == NUM_BLOCKS
                assert facts_of(status)["staging"].startswith(f"{PINNED}, ")

    play(spec_of(model, mixed=2, more=TCP), scene)


@pytest.mark.slow
def test_a_killed_writer_frees_the_blocks_it_wrote_to(model: Path, reference: Reference) -> None:
    """A prefill process is killed while a long prompt is being written. The receiver's fence is the evidence: its
    blocks are free again, all but the padding, and so are the connection's chunks of pinned memory; a new process hands
    the same prompt over, exactly."""
    (prompt,) = random_prompts(12, 120)
    expected = reference.answer(prompt, GREEDY)
    chunk = STAGING_LIMITS.chunk_bytes  # other processes cut their memory as they do for a user
    pinned = f"{40 * chunk:,} bytes of pinned memory"
    with running(spec_of(model, more={**TCP, "staging.bytes_max": 40 * chunk})) as cluster:

        async def writing() -> bool:
            return (await cluster.status("decode-0")).record.load.blocks.writer_owned > 0

        async def whole_again() -> bool:
            status = await cluster.status("decode-0")
            nothing_in_use = facts_of(status)["staging"] == f"{pinned}, 0 in use"
            return nothing_in_use and not leftovers({"decode-0": status})

        async def scene() -> None:
            call = asyncio.create_task(cluster.client.generate(prompt, max_tokens=TOKENS))
            await wait_for(writing, "the grant", story=cluster.story)
            cluster.send_signal("prefill-0", signal.SIGKILL)
            await cluster.wait_exit("prefill-0")
            cluster.set_down("prefill-0")
            await wait_for(whole_again, "the evidence", story=cluster.story)
            assert blocks_in_all(await cluster.status("decode-0")) == NUM_BLOCKS
            await cluster.cluster.start_process("prefill-0")
            cluster.set_down("prefill-0", False)
            # The router has kept the request: it goes to the new process.
            answer = await call
            assert (answer.ids, answer.stats.transport) == (expected, "tcp")
            await assert_conserved(cluster)

        cluster.run(scene())
        reported = run_baton("describe", "decode-0", "--directory", cluster.cluster.directory)
        assert reported.returncode == 0, reported.stderr
        in_use = f"{2 * STAGING_LIMITS.stream_chunks * chunk:,} in use"
        for row in ("transports +tcp", f"staging +{pinned}, {in_use}"):
            assert re.search(f"^{row}", reported.stdout, re.MULTILINE), (row, reported.stdout)
