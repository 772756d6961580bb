"""Clusters with regions on a device that hand over by rdma, with each other and with nodes whose region is in host
memory. The card is made of arrays (`rdma_double`), and the device is the stand-in: its memory is host memory, which
such a card can be given by its address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from cli.reference import Reference
from kvtransfer.device.host_driver import HostDriver
from kvtransfer.transport import DeviceError, TransportName
from kvtransfer.transports import rdma
from tests.support.cluster_harness import assert_conserved
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
from tests.support.inprocess_cluster import InProcessCluster, peer_of
from tests.support.rdma_double import DoubleQueuePairs, install

RDMA: Final[dict[str, object]] = {"transports": "rdma"}
ON_DEVICE: Final = "double0:1, device memory as peer memory (no dma-buf: the device's driver makes none)"
ON_HOST: Final = "double0:1, host memory"

pytestmark = pytest.mark.skipif(ON_GPU, reason="a card made of arrays reaches no GPU's memory")


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(monkeypatch)
    yield
    assert not DoubleQueuePairs.alive


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpu-rdma"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model, num_blocks=64, compute_threads=1)


@pytest.mark.parametrize(
    "on_cpu",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("decode-0",),
        pytest.param(("prefill-0",), marks=pytest.mark.slow),
    ],
    ids=["both on the device", "to a CPU", "from"],
)
def test_answers_are_those_of_one_engine_on_the_cpu(model: Path, reference: Reference, on_cpu: tuple[str, ...]) -> None:
    """Prompts at once, some with a common beginning, chunks cut inside blocks, freed blocks poisoned and used again,
    cached blocks posted by the control thread: exact. Every block is accounted for, each node tells how its region is
    registered, and a receiver on a device has flushed it for each seal."""
    first, second = random_prompts(8, 1, 7, 8, 21), random_prompts(9, 9, 30)
    prompts = [*first, *(first[3] + each for each in second)]
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]

    async def scene(cluster: AnyCluster) -> None:
        assert isinstance(cluster, InProcessCluster)
        for _ in range(2):
            calls = (cluster.client.generate(prompt, max_tokens=TOKENS) for prompt in prompts)
            found = await asyncio.gather(*calls)
            assert [answer.ids for answer in found] == expected
            assert {answer.stats.transport for answer in found} == {"rdma"}
        await assert_conserved(cluster)
        statuses = await cluster.statuses()
        for name in ("prefill-0", "decode-0"):
            assert blocks_in_all(statuses[name]) == NUM_BLOCKS
            assert facts_of(statuses[name])["rdma"] == (ON_HOST if name in on_cpu else ON_DEVICE)
        port = cluster.decode["decode-0"].receiver.ports.describe()[TransportName.RDMA]
        assert isinstance(port["seals"], int) and port["seals"] >= len(prompts)
        assert port["flush_failed"] == 0
        assert port["flushes"] == (0 if "decode-0" in on_cpu else port["seals"])
        link = peer_of(cluster, "decode-0").link.now
        assert link is not None
        reported = link.describe()  # type: ignore[attr-defined]
        assert reported.get("batches_uncomputed") == (None if "prefill-0" in on_cpu else 0)

    play(spec_of(model, more=RDMA, on_cpu=on_cpu), scene)


def test_what_cannot_be_flushed_is_not_committed(
    model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device refuses the flush of one seal, and of the fence that follows: that handoff comes to nothing, its
    blocks are free only when a flush has succeeded, and the answer, from another attempt, is exact."""
    (prompt,) = random_prompts(13, 40)
    refuses = 2

    def flush(_: HostDriver) -> None:
        nonlocal refuses
        if refuses:
            refuses -= 1
            raise DeviceError("the device cannot be flushed now")

    monkeypatch.setattr(HostDriver, "flush_remote_writes", flush)
    monkeypatch.setattr(rdma, "DESTROY_RETRY_MS", 50)

    async def scene(cluster: AnyCluster) -> None:
        assert isinstance(cluster, InProcessCluster)
        answer = await cluster.client.generate(prompt, max_tokens=TOKENS)
        assert (answer.ids, answer.stats.transport) == (reference.answer(prompt, GREEDY), "rdma")
        port = cluster.decode["decode-0"].receiver.ports.describe()[TransportName.RDMA]
        assert (port["refused"], port["flush_failed"]) == ({"FLUSH": 1}, 2)
        # Told once: of the attempt that counted. Its fence waited for a flush as well.
        assert (port["seals"], port["fences_ended"], port["flushes"]) == (1, 1, 2)
        await assert_conserved(cluster)

    play(spec_of(model, more=RDMA), scene)


@pytest.mark.slow
def test_mixed_nodes_write_and_receive_through_one_registration(model: Path, reference: Reference) -> None:
    """Two nodes of both halves, each a writer to the other: exact, and the registration is told once."""
    prompts = random_prompts(11, 26, 40, 33, 18)
    expected = [reference.answer(prompt, GREEDY) for prompt in prompts]

    async def scene(cluster: AnyCluster) -> None:
        calls = (cluster.client.generate(prompt, max_tokens=TOKENS) for prompt in prompts)
        found = await asyncio.gather(*calls)
        assert [answer.ids for answer in found] == expected
        assert {"rdma"} <= {answer.stats.transport for answer in found} <= {"rdma", "local"}
        await assert_conserved(cluster)
        for name, status in (await cluster.statuses()).items():
            if name.startswith("mixed"):
                assert blocks_in_all(status) == NUM_BLOCKS
                assert [fact.text for fact in status.engine.facts if fact.name == "rdma"] == [ON_DEVICE]

    play(spec_of(model, mixed=2, more=RDMA), scene)
