"""A pool whose region lies on the device: how it is opened, what its graphs keep for themselves, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.cores import own_cores
from baton.errors import BatonError, InvalidField, Reason
from baton.ids import BlockId
from cli.services import Service, load_config
from decode_node.config import DecodeConfig
from engine.build import ComputeDevice, EngineConfig, EngineKind
from engine.gpu.config import GpuConfig, GraphConfig
from engine.kernel_sets import KernelSet
from engine.model_config import ComputeDtype, Quantisation
from engine.native.kernels import choose_kernels, cpu_sets
from kvtransfer.checksums import crcs
from kvtransfer.device.region import DeviceRegion
from kvtransfer.device.staging import StagingConfig
from kvtransfer.link import DEFAULT_TRANSPORTS
from kvtransfer.transport import DeviceError, RegionKind, TransportName
from kvtransfer.writer import WriterConfig
from mixed_node.config import MixedConfig
from node.pool import DevicePool, open_device_pool
from node.regions import checksum_thread, offered
from node.spill import SpillConfig
from prefill_node.config import PrefillConfig
from tests.support.gpu_node import BLOCK_SIZE, MODEL, write_model

NUM_BLOCKS = 10
GRAPHS = GraphConfig(graph_rows_max=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(write_model(tmp_path_factory.mktemp("pool"))),
        dtype=ComputeDtype.FLOAT32,
        device=ComputeDevice.CPU_KERNELS,
        gpu=GpuConfig(graphs=GRAPHS),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        poison_freed=True,
    )


async def opened(
    config: EngineConfig, *, decodes: bool, look: Callable[[DevicePool, list[str]], None], **changes: Any
) -> None:
    doing: list[str] = []
    pool = await open_device_pool(
        config, name="device", progress=lambda what, *_: doing.append(what), decodes=decodes, **changes
    )
    try:
        look(pool, doing)
    finally:
        pool.close()


def problem_of(config: EngineConfig) -> BatonError:
    """What opening fails with; the region is given back, or its memory would show in the maps."""
    with pytest.raises(BatonError) as caught:
        asyncio.run(opened(config, decodes=True, look=lambda *_: None))
    assert "baton-host-device" not in Path("/proc/self/maps").read_text()
    return caught.value


def test_graphs_keep_one_block_and_no_request_is_promised_it(config: EngineConfig) -> None:
    """Held from the start, counted, and no part of what a request may need at most, nor of what pins may ask for. What
    has been run so far has written to its first slot and to nothing else."""

    def look(pool: DevicePool, doing: list[str]) -> None:
        counts = pool.ledger.check()
        assert (counts.held, counts.free, pool.blocks.padding_blocks) == (1, NUM_BLOCKS - 1, 1)
        assert pool.blocks.blocks_usable == NUM_BLOCKS - 1
        assert pool.blocks.less_others == ", 1 of them for padding"
        assert pool.pins.blocks_max == (NUM_BLOCKS - 1) // 2
        assert "capturing" in doing
        facts = pool.describe()
        assert facts["device"] == "cpu-kernels"
        assert facts["compute threads"] == f"1, on {own_cores()}"
        assert facts["region"] == f"{pool.region.nbytes:,} bytes in device memory"
        assert facts["decode graphs"] == f"of 1, 2 rows, contexts up to {MODEL.context_len_max} tokens"
        assert "arithmetic" not in facts
        assert facts["kernels"] == "cpu-kernels: the kernels of engine.device"
        assert facts["KV"].startswith(f"{NUM_BLOCKS * BLOCK_SIZE} tokens in {NUM_BLOCKS} blocks, ")
        assert facts["KV"].endswith(": engine.num_blocks")
        layout = pool.layout
        shape = (layout.num_layers, NUM_BLOCKS, 2, MODEL.num_kv_heads, BLOCK_SIZE, MODEL.head_dim)
        kv_LN2KSD = np.array(pool.region.memory).view(np.float32).reshape(shape)
        (held,) = (block for block in range(NUM_BLOCKS) if pool.ledger.is_held(BlockId(block)))
        # The block that was rehearsed in was freed, hence poisoned, and then taken for padding.
        assert np.isfinite(kv_LN2KSD[:, held, :, :, 0]).all() and np.isnan(kv_LN2KSD[:, held, :, :, 1:]).all()
        assert not np.delete(kv_LN2KSD, held, axis=1).any()

    asyncio.run(opened(config, decodes=True, look=look))


@pytest.mark.parametrize(
    ("changes", "plainly", "natively"),
    [
        ({}, "PyTorch's operations (float32)", None),
        ({"deterministic": True}, "PyTorch's operations, a token at a time (float32)", None),
        (
            {"dtype": ComputeDtype.BFLOAT16},
            "PyTorch's operations (float32, K and V bfloat16)",
            "compute kernels (bfloat16)",
        ),
        (
            {"dtype": ComputeDtype.BFLOAT16, "quantisation": Quantisation.INT8},
            None,
            "compute kernels (bfloat16, weights int8)",
        ),
    ],
)
def test_which_way_computes_is_told(
    config: EngineConfig, changes: dict[str, Any], plainly: str | None, natively: str | None
) -> None:
    """On a CPU, with compute kernels where it has the instructions, and plainly where it has not or for float32. Of a
    device of its own the runner says more, and a mock computes nothing."""
    choice = choose_kernels(KernelSet.AUTO)
    wanted = plainly if choice.kernels is None else natively or plainly
    if wanted is None:
        pytest.skip("no compute kernels, so no weights of 8 bits")

    def look(pool: DevicePool, _doing: list[str]) -> None:
        facts = pool.describe()
        assert (facts["device"], facts["arithmetic"]) == ("cpu", wanted)
        computed_by_torch = wanted.startswith("PyTorch")
        assert pool.model.kernel_set.startswith("torch ") == computed_by_torch
        assert facts["kernels"].startswith(f"{pool.model.kernel_set}: ")

    asyncio.run(opened(replace(config, device=ComputeDevice.CPU, **changes), decodes=True, look=look))


def test_a_kernel_set_that_is_asked_for_is_registered(config: EngineConfig) -> None:
    """With the instructions that PyTorch chooses, which decide about its bits."""
    capability = torch.backends.cpu.get_cpu_capability().lower()

    def look(pool: DevicePool, _doing: list[str]) -> None:
        assert pool.model.kernel_set == f"torch {capability}"
        assert pool.describe()["kernels"] == f"torch {capability}: engine.kernels names it"

    asked = replace(config, device=ComputeDevice.CPU, dtype=ComputeDtype.BFLOAT16, kernels=KernelSet.TORCH)
    asyncio.run(opened(asked, decodes=True, look=look))


def test_a_kernel_set_that_is_not_here_is_refused_before_anything_is_loaded(config: EngineConfig) -> None:
    """No CPU has both x86's and ARM's. The words say what this one has, and the model is not even looked for."""
    missing = KernelSet.AMX if KernelSet.NEON in cpu_sets() else KernelSet.NEON
    asked = replace(config, device=ComputeDevice.CPU, kernels=missing, model="/nowhere")
    problem = problem_of(asked)
    assert (problem.reason, problem.field) == (Reason.BAD_CONFIG, "engine.kernels")
    assert problem.message.startswith(f"engine.kernels is {missing.value}, which this CPU lacks: it has ")
    assert problem.message.endswith(". Set it to a set that is here, to torch, or to auto.")


@pytest.mark.parametrize(
    ("decodes", "gpu", "why"),
    [
        (False, GpuConfig(graphs=GRAPHS), "none (not captured)"),
        (True, GpuConfig(graphs=GraphConfig(graph_rows_max=0)), "none (graph_rows_max is 0)"),
        (
            True,
            GpuConfig(graphs=GRAPHS, attention_decode="torch"),
            "none (the attention of single tokens is not Triton's)",
        ),
    ],
    ids=["prefill node", "no graphs", "attention that is not captured"],
)
def test_without_graphs_no_block_is_kept(config: EngineConfig, decodes: bool, gpu: GpuConfig, why: str) -> None:
    """On a node that does not decode, where graphs are off, or with an attention that plans each step on the host."""

    def look(pool: DevicePool, doing: list[str]) -> None:
        counts = pool.ledger.check()
        assert (counts.held, pool.blocks.blocks_usable) == (0, NUM_BLOCKS)
        assert "capturing" not in doing
        assert pool.describe()["decode graphs"] == why

    asyncio.run(opened(replace(config, gpu=gpu), decodes=decodes, look=look))


def test_what_is_wrong_is_told_by_its_field_and_nothing_stays_open(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention that does not exist or does not run here, a region of one block, memory that is not there."""
    unknown = problem_of(replace(config, gpu=GpuConfig(attention_decode="fast")))
    assert (unknown.reason, unknown.field) == (Reason.BAD_CONFIG, "engine.gpu.attention_decode")
    assert "is 'fast'; must be auto, or one of triton" in unknown.message
    unfit = problem_of(replace(config, gpu=GpuConfig(attention_prefill="flashinfer")))
    assert unfit.field == "engine.gpu.attention_prefill"
    assert "Set it to auto" in unfit.message
    small = problem_of(replace(config, num_blocks=1))
    assert (small.field, "graphs keep 1 for padding" in small.message) == ("engine.num_blocks", True)

    def full(*_: Any, **__: Any) -> None:
        raise DeviceError("cudaMalloc: out of memory")

    monkeypatch.setattr("kvtransfer.device.host_driver.HostDriver.allocate", full)
    no_room = problem_of(config)
    assert no_room.field == "engine.num_blocks"
    assert "cannot hold a region of 10 blocks" in no_room.message and "cudaMalloc: out of memory" in no_room.message


def test_a_device_that_runs_out_of_memory_while_warming_up_says_so(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own error, from a kernel's workspace or a graph's pool: a smaller region is what helps."""

    class OutOfMemoryError(RuntimeError):
        pass

    def no_room(*_: Any, **__: Any) -> None:
        raise OutOfMemoryError("tried to allocate 20.00 GiB.")

    monkeypatch.setattr("engine.gpu.runner.GpuRunner.warm_up", no_room)
    problem = problem_of(config)
    assert (problem.reason, problem.field) == (Reason.BAD_CONFIG, "engine.num_blocks")
    assert "tried to allocate 20.00 GiB. Set a smaller" in problem.message


def test_under_mps_the_others_serve_the_region(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda_ipc is left out for what the driver says; where nothing else was to serve, the node does not start."""
    monkeypatch.setattr("kvtransfer.device.host_driver.HostDriver.refusal", lambda _: "the Multi-Process Service runs")

    def look(pool: DevicePool, doing: list[str]) -> None:
        assert isinstance(pool.region, DeviceRegion)
        assert not pool.region.shared
        assert offered(DEFAULT_TRANSPORTS, pool.region) == (TransportName.RDMA, TransportName.TCP)
        with pytest.raises(InvalidField, match="here; cuda_ipc: the Multi-Process Service runs"):
            offered((TransportName.CUDA_IPC,), pool.region)

    asyncio.run(opened(config, decodes=False, look=look))


@pytest.mark.parametrize(
    ("transports", "shared", "pinned"),
    [
        (DEFAULT_TRANSPORTS, True, True),
        ((TransportName.CUDA_IPC,), True, False),
        ((TransportName.TCP,), False, True),
    ],
)
def test_a_region_on_the_device_has_what_its_transports_need(
    config: EngineConfig, transports: tuple[TransportName, ...], shared: bool, pinned: bool
) -> None:
    """A handle for other processes where cuda_ipc is offered, pinned memory where tcp is, and neither without: memory
    that was exported is freed with its process only, and pinned memory is scarce."""
    staging = StagingConfig(bytes_max=9 << 20)

    def look(pool: DevicePool, doing: list[str]) -> None:
        assert isinstance(pool.region, DeviceRegion)
        assert pool.region.shared is shared
        assert offered(transports, pool.region) == tuple(t for t in transports if t.value != "shm")
        reported = pool.describe().get("staging")
        assert (pool.staged is not None, reported is not None) == (pinned, pinned)
        if pool.staged is not None:
            assert pool.tcp_region is pool.staged
            share = pool.staged.share(3)
            assert reported == "9,437,184 bytes of pinned memory, 0 in use"
            assert pool.describe()["staging"] == "9,437,184 bytes of pinned memory, 3,145,728 in use"
            share.give_back()

    asyncio.run(opened(config, decodes=False, look=look, transports=transports, staging=staging))


def test_memory_that_cannot_be_pinned_is_told_by_its_field(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the region is given back."""

    def full(*_: Any) -> None:
        raise DeviceError("268435456 bytes of host memory cannot be pinned")

    monkeypatch.setattr("kvtransfer.device.host_driver.HostDriver.pin", full)
    problem = problem_of(config)
    assert (problem.reason, problem.field) == (Reason.BAD_CONFIG, "staging.bytes_max")
    assert "cannot be pinned. Set a smaller staging.bytes_max, or leave tcp out" in problem.message


def test_pinned_memory_that_links_still_use_is_a_bug_of_ours(config: EngineConfig) -> None:
    """Ports and links are closed before the pool: the device may still copy into what they have."""

    async def scene() -> None:
        pool = await open_device_pool(config, name="device", progress=lambda *_: None, decodes=False)
        assert pool.staged is not None
        share = pool.staged.share(1)
        with pytest.raises(AssertionError, match="still use it"):
            pool.close()
        share.give_back()
        pool.close()

    asyncio.run(scene())


def test_records_on_the_device_are_read_for_their_checksums(config: EngineConfig) -> None:
    """A receiver compares what a writer sampled, wherever its own region lies."""

    def look(pool: DevicePool, doing: list[str]) -> None:
        pool.region.memory[:] = np.arange(pool.region.nbytes, dtype=np.uint8)
        offsets_R, nbytes_R = np.array([0, 96, 32, 7], dtype=np.int64), np.full(4, 32, dtype=np.int64)
        thread = checksum_thread(pool.region, name="device")
        expected = crcs(memoryview(bytes(pool.region.memory)), offsets_R, nbytes_R)
        assert crcs(thread.region, offsets_R, nbytes_R).tolist() == expected.tolist()
        assert thread.submit(offsets_R, nbytes_R).result(30).tolist() == expected.tolist()
        thread.close()

    asyncio.run(opened(config, decodes=False, look=look))


def test_the_keys_of_the_gpu_are_those_of_the_engine() -> None:
    """From flags as from a file, on each kind of node."""
    flags = {
        "name": "n",
        "engine.model": "m",
        "engine.device": "cuda",
        "engine.gpu.attention_prefill": "torch",
        "engine.gpu.attention_decode": "triton",
        "engine.gpu.graphs.graph_rows_max": "5",
        "engine.gpu.graphs.graph_context_max": "77",
        "staging.bytes_max": "99000000",
    }
    for service in (Service.PREFILL, Service.DECODE, Service.MIXED):
        config = load_config(service, toml_path=None, env={}, flags=flags)
        assert config.engine.gpu == GpuConfig(
            attention_prefill="torch",
            attention_decode="triton",
            graphs=GraphConfig(graph_rows_max=5, graph_context_max=77),
        )
        assert config.transports == DEFAULT_TRANSPORTS
        assert config.staging == StagingConfig(bytes_max=99_000_000)
        if isinstance(config, MixedConfig):
            assert config.prefill_half().staging is config.staging


ON_DEVICE = EngineConfig(model="m", device=ComputeDevice.CUDA)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: EngineConfig(model="m", device=ComputeDevice.CUDA, deterministic=True), "deterministic"),
        (
            lambda: EngineConfig(model="m", device=ComputeDevice.CPU_KERNELS, quantisation=Quantisation.INT8),
            "quantisation",
        ),
        (lambda: EngineConfig(kind=EngineKind.MOCK, device=ComputeDevice.CPU_KERNELS), "device"),
        (lambda: EngineConfig(model="m", device=ComputeDevice.CUDA, kernels=KernelSet.AVX2), "kernels"),
        (lambda: MixedConfig(name="n", engine=ON_DEVICE, spill=SpillConfig(host_blocks=9)), "spill.host_blocks"),
        (
            lambda: PrefillConfig(name="n", engine=ON_DEVICE, writer=WriterConfig(checksum_fraction=0.1)),
            "writer.checksum_fraction",
        ),
        (lambda: DecodeConfig(name="n", engine=ON_DEVICE, transports=(TransportName.SHM,)), "transports"),
    ],
)
def test_what_a_region_on_a_device_cannot_have_is_refused_at_once(make: Callable[[], object], field: str) -> None:
    """Before a model is loaded, by the field that says otherwise."""
    with pytest.raises(InvalidField) as caught:
        make()
    assert caught.value.field == field


def test_only_the_kernels_devices_have_a_region_of_their_own() -> None:
    """The mirrored ones compute on a copy of one in host memory."""
    own = {device for device in ComputeDevice if device.has_region}
    assert own == {ComputeDevice.CUDA, ComputeDevice.CPU_KERNELS}
    assert {device for device in ComputeDevice if device.on_gpu} == {ComputeDevice.CUDA, ComputeDevice.CUDA_MIRRORED}
    assert RegionKind.DEVICE.value == "device memory"
