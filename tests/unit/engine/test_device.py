"""A runner whose device cannot be written to by a transport: its copy of the region, and where its tensors are made."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import BatonError, InvalidField, Reason
from baton.ids import Attempt, BlockId, RequestId, RequestKey
from engine.build import ComputeDevice, EngineConfig, EngineKind, build_runner
from engine.demo_model import DemoModelParams, write_demo_model
from engine.model_config import ComputeDtype, Quantisation
from engine.runner import TorchRunner
from engine.types import Batch, NullSink, SamplingParams, SequenceSlice

NUM_BLOCKS, BLOCK_SIZE, VOCAB = 40, 4, 300
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=0, max_tokens=64)
MODEL = DemoModelParams(num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or torch without CUDA")
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("device") / "model"
    write_demo_model(path, MODEL)
    return path


class Node:
    """A runner over a region of NaN, and the blocks given out from it in an odd order."""

    def __init__(self, folder: Path, device: str, *, mirrored: bool, deterministic: bool = False) -> None:
        self.runner = TorchRunner.load(
            folder,
            block_size=BLOCK_SIZE,
            dtype=ComputeDtype.FLOAT32,
            device=device,
            mirrored=mirrored,
            deterministic=deterministic,
        )
        nbytes = self.runner.layout.region_bytes(NUM_BLOCKS)
        self.region_U8 = np.full(nbytes, 0xFF, dtype=np.uint8)
        self.runner.bind(self.region_U8, NUM_BLOCKS)
        self.free = [BlockId(block) for block in random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)]

    @property
    def records_LNR(self) -> np.ndarray:
        return self.region_U8.reshape(self.runner.kv_spec.num_layers, NUM_BLOCKS, -1)

    def take(self, tokens: int) -> list[BlockId]:
        return [self.free.pop() for _ in range(-(-tokens // BLOCK_SIZE))]

    def give_back(self, table: list[BlockId]) -> None:
        """As a ledger frees blocks under `poison_freed`."""
        for block in table:
            self.records_LNR[:, block] = 0xFF
            if self.runner.mirror is not None:
                self.runner.mirror.forget(block)
        self.free = [*table, *self.free]

    def step(
        self, tokens: list[int], start: int, stop: int, table: list[BlockId], params: SamplingParams = GREEDY
    ) -> int | None:
        piece = SequenceSlice(
            key=RequestKey(request=RequestId("r"), attempt=Attempt(0)),
            tokens=tokens,
            start=start,
            stop=stop,
            block_table=table,
            sample=stop == len(tokens),
            output_index=0,
            params=params,
        )
        return self.runner.run(Batch(slices=(piece,)), NullSink()).sampled.get(piece.key)


def prompt_of(length: int, seed: int) -> list[int]:
    return [random.Random(seed + i).randrange(3, VOCAB) for i in range(length)]


def decode(node: Node, tokens: list[int], table: list[BlockId], count: int) -> list[int]:
    """Draw `count` tokens; all of `tokens` but the last are computed."""
    answer: list[int] = []
    tokens = list(tokens)
    for _ in range(count):
        if len(tokens) > len(table) * BLOCK_SIZE:
            table.append(node.free.pop())
        drawn = node.step(tokens, len(tokens) - 1, len(tokens), table)
        assert drawn is not None
        tokens.append(drawn)
        answer.append(drawn)
    return answer


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Node]:
    node = Node(folder, "cpu", mirrored=False)
    yield node
    node.runner.unbind()


def alone(plain: Node, prompt: list[int], count: int) -> list[int]:
    """What one node without a copy answers."""
    table = plain.take(len(prompt))
    first = plain.step(prompt, 0, len(prompt), table)
    assert first is not None
    answer = [first, *decode(plain, [*prompt, first], table, count - 1)]
    plain.give_back(table)
    return answer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_handoff_between_devices_gives_the_tokens_of_one_node(
    folder: Path, plain: Node, device: str, deterministic: bool
) -> None:
    """Chunks cut inside blocks, records carried by hand, other block ids, blocks used again: the same tokens."""
    writer, reader = (Node(folder, device, mirrored=True, deterministic=deterministic) for _ in range(2))
    for seed in range(4):
        prompt = prompt_of(21 + 7 * seed, seed * 1000)
        source, target = writer.take(len(prompt)), reader.take(len(prompt))
        cut = len(prompt) // 2 + seed
        assert writer.step(prompt, 0, cut, source) is None
        first = writer.step(prompt, cut, len(prompt), source)
        assert first is not None
        reader.records_LNR[:, target] = writer.records_LNR[:, source]
        writer.give_back(source)
        answer = [first, *decode(reader, [*prompt, first], target, 9)]
        assert answer == alone(plain, prompt, 10)
        reader.give_back(target)


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_has_every_record_when_the_layer_is_told_of(folder: Path, plain: Node, device: str) -> None:
    """At `layer_done` the layer's new records are in the region, those of later layers and other blocks untouched."""
    node, prompt = Node(folder, device, mirrored=True), prompt_of(10, 5)
    table, plain_table = node.take(10), plain.take(10)
    plain.step(prompt, 0, 10, plain_table)
    seen: list[int] = []

    class Sink:
        def layer_done(self, layer: int) -> None:
            filled = (node.records_LNR != 0xFF).any(axis=2)
            assert {int(block) for block in filled[layer].nonzero()[0]} == set(table)
            assert not filled[layer + 1 :].any()
            seen.append(layer)

    piece = SequenceSlice(
        key=RequestKey(request=RequestId("r"), attempt=Attempt(0)),
        tokens=prompt, start=0, stop=10, block_table=table, sample=False, output_index=0, params=GREEDY,
    )  # fmt: skip
    node.runner.run(Batch(slices=(piece,)), Sink())
    assert seen == [0, 1, 2]
    whole = BLOCK_SIZE * 2
    ours, expected = (
        n.records_LNR.view(np.float32).reshape(3, NUM_BLOCKS, 2, MODEL.num_kv_heads, BLOCK_SIZE, -1)[:, t[: whole // 4]]
        for n, t in ((node, table), (plain, plain_table))
    )
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
    plain.give_back(plain_table)


def test_only_what_the_device_lacks_is_brought(folder: Path) -> None:
    """A prompt's own blocks never; those a transport filled once; a freed block that was filled again, again."""
    node = Node(folder, "cpu", mirrored=True)
    mirror = node.runner.mirror
    assert mirror is not None
    prompt = prompt_of(10, 9)
    table = node.take(10)
    node.step(prompt, 0, 6, table)
    node.step(prompt, 6, 10, table)
    assert mirror.brought == 0
    copy = node.take(10)
    node.records_LNR[:, copy] = node.records_LNR[:, table]
    decode(node, prompt, copy, 3)
    assert mirror.brought == 3
    kept = node.records_LNR[:, copy].copy()
    node.give_back(copy)
    node.records_LNR[:, copy] = kept
    decode(node, prompt, copy, 1)
    assert mirror.brought == 6


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_tensor_is_made_on_a_device_that_nobody_named(folder: Path, plain: Node, deterministic: bool) -> None:
    """torch's default device is one that has no memory: a tensor made without naming another breaks the step."""
    prompt = prompt_of(13, 77)
    expected = alone(plain, prompt, 4)
    node = Node(folder, "cpu", mirrored=True, deterministic=deterministic)
    sampled = replace(GREEDY, temperature=0.9, top_p=0.9, frequency_penalty=0.1, seed=4)
    table = node.take(13)
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.sampler.draw_kernel", lambda: None)
        first = node.step(prompt, 0, 13, table)
        assert first is not None
        assert [first, *decode(node, [*prompt, first], table, 3)] == expected
        assert node.step(prompt, 12, 13, table, sampled) in range(VOCAB)


@pytest.mark.parametrize("device", [ComputeDevice.CUDA, ComputeDevice.CUDA_MIRRORED])
def test_cuda_without_cuda_is_a_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: ComputeDevice
) -> None:
    """The node does not start, and says which key to change."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BatonError, match=rf"is {device.value}, and .* set engine\.device to cpu") as caught:
        build_runner(EngineConfig(model=str(folder), device=device))
    assert (caught.value.reason, caught.value.field) == (Reason.BAD_CONFIG, "engine.device")


@pytest.mark.parametrize("changes", [{"kind": EngineKind.MOCK}, {"quantisation": Quantisation.INT8}])
def test_what_only_the_cpu_does(changes: dict[str, object]) -> None:
    """The mock engine and weights of 8-bit whole numbers with cuda: refused when the configuration is read."""
    with pytest.raises(InvalidField, match=r"must be cpu|cuda takes none or fp8 or int4"):
        EngineConfig(model="m", device=ComputeDevice.CUDA, **changes)  # type: ignore[arg-type]
