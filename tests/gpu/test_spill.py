"""The GPU's runner, in Triton's interpreter on the CPU, with a region that is too small for its answers: a node's whole
pool, blocks that go to pinned memory and come back by copies that come late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.errors import BatonError, Reason
from decode_node.config import DecodeConfig
from engine.build import ComputeDevice, EngineConfig
from engine.gpu.config import GpuConfig, GraphConfig
from engine.model_config import ComputeDtype
from engine.types import SamplingParams
from kvtransfer.device.host_driver import HostDriver
from kvtransfer.transport import DeviceError
from node.copiers import BlockCopier, BlockCopy
from node.pool import DevicePool, open_device_pool
from node.spill import SpillConfig
from tests.support.gpu_node import BLOCK_SIZE, random_prompts, write_model
from tests.support.pool_bench import answers_of

T = TypeVar("T")

NUM_BLOCKS = 11
"""One of them is padding; the answers below come to three to five each, 20 in all."""
HOST_BLOCKS = 24
TOKENS = 20
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=TOKENS, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_k=20, seed=5)
SPILL = SpillConfig(host_blocks=HOST_BLOCKS, headroom_blocks=1, copy_blocks_max=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(
        model=str(write_model(tmp_path_factory.mktemp("gpu-spill"))),
        dtype=ComputeDtype.FLOAT32,
        device=ComputeDevice.CPU_KERNELS,
        gpu=GpuConfig(graphs=GraphConfig(graph_rows_max=4)),
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        tokens_per_step_max=16,
        sequences_max=5,
        poison_freed=True,
    )


async def with_pool(config: EngineConfig, spill: SpillConfig, scene: Callable[[DevicePool], Awaitable[T]]) -> T:
    pool = await open_device_pool(config, name="device", progress=lambda *_: None, spill=spill)
    try:
        return await scene(pool)
    finally:
        pool.close()


def assert_given_back() -> None:
    """Neither a region on the device nor host memory below one is mapped."""
    maps = Path("/proc/self/maps").read_text()
    assert "baton-host-device" not in maps
    assert "baton-device-host" not in maps


def asked() -> list[tuple[list[int], SamplingParams]]:
    prompts = random_prompts(3, 5, 7, 9, 11, 14)
    return list(zip(prompts, (GREEDY, DRAWN, GREEDY, DRAWN, GREEDY), strict=True))


@pytest.fixture(scope="module")
def wanted(config: EngineConfig) -> list[list[int]]:
    """The answers of the same runner where there is room for all."""

    async def roomy(pool: DevicePool) -> list[list[int]]:
        assert pool.host is None
        return await answers_of(pool, asked())

    found = asyncio.run(with_pool(replace(config, num_blocks=60), SpillConfig(), roomy))
    assert [len(answer) for answer in found] == [TOKENS] * 5
    return found


@pytest.mark.slow
def test_answers_are_those_of_a_region_with_room(config: EngineConfig, wanted: list[list[int]]) -> None:
    """Five at once that outgrow the region twice over, freed blocks poisoned: token for token those of the same runner
    with room for all, each computed once; steps overlapped, and were held back where room had to be made. Afterwards
    every block is free, cached or padding, and host memory is empty."""

    async def tight(pool: DevicePool) -> list[list[int]]:
        host = pool.host
        assert host is not None
        assert host.memory.pinned
        assert pool.describe()["below the region"] == f"{host.memory.region.nbytes:,} bytes of pinned memory"
        found = await answers_of(pool, asked())
        spill, counters = host.spill, pool.engine.counters
        assert spill.counters.swapped_out > 0
        assert spill.counters.copied_out == spill.counters.copied_back + spill.counters.merged > 0
        assert (spill.busy, spill.host.free) == (False, HOST_BLOCKS)
        assert counters.tokens_computed == sum(len(prompt) + TOKENS - 1 for prompt, _ in asked())
        assert counters.steps_overlapped > 0
        assert counters.steps_held_back > 0
        host.spill.check()
        counts = pool.ledger.check()
        assert (counts.held, counts.free + counts.cached, counts.promised) == (1, NUM_BLOCKS - 1, 0)
        return found

    assert asyncio.run(with_pool(config, SPILL, tight)) == wanted
    assert_given_back()


@pytest.mark.slow
def test_bytes_that_come_back_wrong_are_seen(
    config: EngineConfig, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above is able to fail: of two blocks that come back, both are the first, and tokens differ."""
    real = BlockCopier._queue

    def twice(copier: BlockCopier, copy: BlockCopy, ready: Any) -> Any:
        return real(copier, copy if copy.out else replace(copy, host=copy.host[:1] * len(copy.host)), ready)

    monkeypatch.setattr(BlockCopier, "_queue", twice)
    assert asyncio.run(with_pool(config, SPILL, lambda pool: answers_of(pool, asked()))) != wanted


def test_a_device_that_fails_in_a_copy_ends_the_engine_by_its_name(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows where the blocks' content is then: the node cannot go on, and says so. Its memory is given back."""

    def refused(*_: Any) -> Any:
        raise DeviceError("an illegal memory access was encountered")

    async def scene(pool: DevicePool) -> BatonError:
        monkeypatch.setattr(BlockCopier, "_queue", refused)
        with pytest.raises(BatonError) as caught:
            await answers_of(pool, asked())
        return caught.value

    error = asyncio.run(with_pool(config, SPILL, scene))
    assert error.reason is Reason.INTERNAL
    assert isinstance(error.__cause__, DeviceError)
    assert_given_back()


def problem_of(config: EngineConfig, spill: SpillConfig) -> BatonError:
    async def unexpected(pool: DevicePool) -> None:
        raise AssertionError("it has opened")

    with pytest.raises(BatonError) as caught:
        asyncio.run(with_pool(config, spill, unexpected))
    assert_given_back()
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "spill.host_blocks")
    return caught.value


def test_more_than_may_be_pinned_is_refused(config: EngineConfig) -> None:
    """By the blocks that were asked for, with both numbers of bytes; one byte more would do."""
    nbytes = 2 * HOST_BLOCKS * 2 * 2 * BLOCK_SIZE * 16 * 4
    error = problem_of(config, replace(SPILL, pinned_bytes_max=nbytes - 1))
    assert f"{nbytes:,} bytes, all of them pinned" in error.message
    assert f"at most {nbytes - 1:,} may be" in error.message

    async def opens(pool: DevicePool) -> int:
        assert pool.host is not None
        return pool.host.memory.region.nbytes

    assert asyncio.run(with_pool(config, replace(SPILL, pinned_bytes_max=nbytes), opens)) == nbytes


def test_memory_that_cannot_be_pinned_or_reached_is_told_by_its_field(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver refuses it; or the rehearsed copy fails. What was opened by then is given back."""

    def full(*_: Any) -> Any:
        raise DeviceError("cudaHostRegister: out of memory")

    for owner, name in ((HostDriver, "register"), (BlockCopier, "rehearse")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            error = problem_of(config, SPILL)
        assert "bytes of host memory to copy blocks to: cudaHostRegister: out of memory." in error.message
        assert "Set a smaller spill.host_blocks" in error.message


def test_a_decode_node_on_a_device_may_spill() -> None:
    """By its settings; what it needs of the machine is seen when it starts."""
    engine = EngineConfig(model="m", device=ComputeDevice.CUDA)
    assert DecodeConfig(name="n", engine=engine, spill=SPILL).spill.host_blocks == HOST_BLOCKS
