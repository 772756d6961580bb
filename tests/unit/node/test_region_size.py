"""How many blocks a region has, by what its configuration says and by what memory is free."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.errors import BatonError, InvalidField, Reason
from cachestore.layout import Component, LayerGroup, Layout
from engine.build import BLOCKS_MAX, ComputeDevice, EngineConfig, EngineKind
from engine.demo_model import DemoModelParams, write_demo_model
from node import region_size as module
from node.pool import DevicePool, open_device_pool
from node.region_size import RegionSize, region_size
from node.spill import SpillConfig
from node.store import StoreConfig

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCK_BYTES = MIB
"""16 tokens of 4 layers."""
CONTEXT = 8_192


def layout(groups: int = 1, record_bytes: int = 256 * KIB) -> Layout:
    component = Component(name="kv", num_heads=1, slot_bytes=record_bytes // 16)
    layers = [tuple(range(4 * group, 4 * group + 4)) for group in range(groups)]
    return Layout(
        groups=tuple(LayerGroup(layers=each, components=(component,)) for each in layers),
        block_size=16,
        dtype="bfloat16",
    )


def size_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    free_bytes: int,
    on_device: tuple[int, int] | None = None,
    context_len_max: int = CONTEXT,
    weights_bytes: int = 0,
    of: Layout | None = None,
    spill: SpillConfig | None = None,
    store: StoreConfig | None = None,
    **settings: Any,
) -> RegionSize:
    """Where so much is free on the host, and so much of all on the device; None: nobody asks for it."""

    def device_memory_bytes() -> tuple[int, int]:
        assert on_device is not None, "there is no device"
        return on_device

    monkeypatch.setattr(module, "memory_available_bytes", lambda: free_bytes)
    monkeypatch.setattr(module, "device_memory_bytes", device_memory_bytes)
    return region_size(
        EngineConfig(**{"model": "m", **settings}),
        of or layout(),
        context_len_max=context_len_max,
        weights_bytes=weights_bytes,
        spill=spill,
        store=store,
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_blocks": 7}, "112 tokens in 7 blocks, 7.0 MiB: engine.num_blocks"),
        ({"num_blocks": 7, "memory_share": 0.9}, "112 tokens in 7 blocks, 7.0 MiB: engine.num_blocks"),
        ({"kind": EngineKind.MOCK}, "16,384 tokens in 1,024 blocks, 1.0 GiB: the mock engine's"),
        ({}, "32,768 tokens in 2,048 blocks, 2.0 GiB: 0.5 of 4.0 GiB free"),
        ({"memory_share": 0.75}, "49,152 tokens in 3,072 blocks, 3.0 GiB: 0.75 of 4.0 GiB free"),
        (
            {"sequences_max": 3},
            "24,576 tokens in 1,536 blocks, 1.5 GiB: what 3 sequences of 8,192 tokens fill; 4.0 GiB free",
        ),
        ({"sequences_max": 3, "memory_share": 0.75}, "49,152 tokens in 3,072 blocks, 3.0 GiB: 0.75 of 4.0 GiB free"),
        (
            {"free_bytes": 64 * GIB},
            "65,536 tokens in 4,096 blocks, 4.0 GiB: the most without engine.memory_share or engine.num_blocks; "
            "64.0 GiB free",
        ),
        (
            {"free_bytes": 64 * GIB, "memory_share": 0.5},
            "524,288 tokens in 32,768 blocks, 32.0 GiB: 0.5 of 64.0 GiB free",
        ),
        ({"weights_bytes": GIB}, "32,768 tokens in 2,048 blocks, 2.0 GiB: 0.5 of 4.0 GiB free"),
        (
            {"store": StoreConfig(host_bytes=GIB), "spill": SpillConfig(host_blocks=1_024)},
            "16,384 tokens in 1,024 blocks, 1.0 GiB: 0.5 of 2.0 GiB free",
        ),
        ({"of": layout(groups=2)}, "16,384 tokens in 2,048 blocks, 2.0 GiB: 0.5 of 4.0 GiB free"),
    ],
)
def test_a_region_in_host_memory(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], text: str) -> None:
    """A number that is given, or a share of what is free, which has bounds where nobody has given the share."""
    assert size_of(monkeypatch, **{"free_bytes": 4 * GIB, **given}).text == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"memory_nodes": 3, "memory_free_bytes": 12 * GIB, "weights_bytes": GIB},
            "24,576 tokens in 1,536 blocks, 1.5 GiB: 0.5 of 3.0 GiB free for each of 3 nodes",
        ),
        (
            {"memory_nodes": 2, "memory_free_bytes": 12 * GIB, "memory_share": 0.9},
            "88,464 tokens in 5,529 blocks, 5.4 GiB: 0.9 of 6.0 GiB free for each of 2 nodes",
        ),
        (
            {"memory_nodes": 1, "memory_free_bytes": 5 * GIB, "weights_bytes": GIB},
            "32,768 tokens in 2,048 blocks, 2.0 GiB: 0.5 of 4.0 GiB free",
        ),
    ],
)
def test_nodes_of_one_machine(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], text: str) -> None:
    """All reckon with an equal part of what was free before the first of them, less their weights: one that comes last
    has as much as the first, whatever that has taken by then."""
    assert {size_of(monkeypatch, free_bytes=now, **given).text for now in (12 * GIB, GIB)} == {text}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"sequences_max": 99}, "524,288 tokens in 32,768 blocks, 32.0 GiB: 0.8 of 40.0 GiB free"),
        (
            {"sequences_max": 3},
            "24,576 tokens in 1,536 blocks, 1.5 GiB: what 3 sequences of 8,192 tokens fill; 40.0 GiB free",
        ),
        ({"memory_share": 0.25}, "163,840 tokens in 10,240 blocks, 10.0 GiB: 0.25 of 40.0 GiB free"),
        (
            {"memory_nodes": 4, "memory_free_bytes": GIB, "weights_bytes": 10 * GIB},
            "131,072 tokens in 8,192 blocks, 8.0 GiB: 0.8 of 10.0 GiB free for each of 4 nodes",
        ),
        (
            {"device": ComputeDevice.CUDA_MIRRORED, "memory_share": 0.5},
            "131,072 tokens in 8,192 blocks, 8.0 GiB: 0.5 of 16.0 GiB free",
        ),
    ],
)
def test_a_region_on_a_gpu(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], text: str) -> None:
    """By the GPU's memory, and without the bound of 4 GiB; what is mirrored there is in both memories."""
    given = {"device": ComputeDevice.CUDA, **given}
    assert size_of(monkeypatch, free_bytes=16 * GIB, on_device=(40 * GIB, 80 * GIB), **given).text == text


def test_there_are_no_more_blocks_than_numbers_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in a large memory."""
    tiny = layout(record_bytes=16)
    found = size_of(monkeypatch, free_bytes=64 * GIB, of=tiny, memory_share=0.9, context_len_max=1 << 20)
    assert found.num_blocks == BLOCKS_MAX


@pytest.mark.parametrize(
    ("context_len_max", "tokens_min", "nbytes"), [(100_000, "4,096", "256.0 MiB"), (300, "300", "19.0 MiB")]
)
def test_too_little_for_one_sequence(
    monkeypatch: pytest.MonkeyPatch, context_len_max: int, tokens_min: str, nbytes: str
) -> None:
    """Said before anything is allocated, and what to do. A number of blocks that is given may be smaller."""
    given: dict[str, Any] = {"free_bytes": 37 * MIB, "context_len_max": context_len_max}
    with pytest.raises(BatonError) as caught:
        size_of(monkeypatch, **given)
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "engine.memory_share")
    assert caught.value.message == (
        "Too little memory for KV: 0.5 of 37.0 MiB free, which is room for 288 tokens. A node has room for "
        f"{tokens_min} at least ({nbytes}). Free some memory, raise the memory limit or engine.memory_share, start "
        "fewer nodes, or say in engine.num_blocks how few blocks are enough."
    )
    assert size_of(monkeypatch, **given, num_blocks=2).num_blocks == 2


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"memory_share": 0.0}, "memory_share"),
        ({"memory_share": 1.0}, "memory_share"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": BLOCKS_MAX + 1}, "num_blocks"),
    ],
)
def test_what_is_no_share_and_no_number_of_blocks(given: dict[str, Any], field: str) -> None:
    """Refused by the field that says it."""
    with pytest.raises(InvalidField) as caught:
        EngineConfig(model="m", **given)
    assert caught.value.field == field


def test_a_pool_is_as_large_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose region is sized at the start: ledger, layout and what is told agree."""
    params = DemoModelParams(num_layers=1, hidden_size=32, num_heads=1, num_kv_heads=1, head_dim=32, vocab_size=600)
    write_demo_model(tmp_path / "model", params)
    monkeypatch.setattr(module, "memory_available_bytes", lambda: 64 * MIB)

    async def opened() -> DevicePool:
        config = EngineConfig(model=str(tmp_path / "model"))
        return await open_device_pool(config, name="sized", progress=lambda *_: None)

    pool = asyncio.run(opened())
    try:
        blocks = pool.ledger.num_blocks
        assert pool.region.nbytes == pool.layout.region_bytes(blocks) <= 32 * MIB < pool.layout.region_bytes(blocks + 1)
        facts = pool.describe()
        assert facts["KV"] == f"{16 * blocks:,} tokens in {blocks:,} blocks, 32.0 MiB: 0.5 of 64.0 MiB free"
    finally:
        pool.close()
