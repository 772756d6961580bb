"""Weights in 8 and 4 bits for a GPU: the rounding, the layouts, the trial at start, the runner. On the CPU."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.gpu_models import BLOCK_SIZE, GREEDY, NUM_BLOCKS, FakeCapture, Sequence, random_tensors, tiny_config

# isort: split
from baton.ids import BlockId
from engine.checkpoint import load_tensors
from engine.demo_model import DemoModelParams, write_demo_model
from engine.gpu import linears
from engine.gpu.config import GpuConfig, GraphConfig
from engine.gpu.linears import (
    FP8,
    INT4_GROUP,
    PACKS,
    TILE_ROWS_MAX,
    Fp8Matmul,
    Int4Matmul,
    admit_weights,
    product_shapes,
)
from engine.gpu.runner import GpuRunner
from engine.kv_pool import KvPool
from engine.model_config import Quantisation, UnsupportedModelError, load_model_config, weight_shapes
from engine.models.decoder import Decoder, fused_rms_norm, rms_norm
from engine.models.matmul import Linear
from engine.runner import TorchForward
from engine.types import Batch, KvSpec, NullSink
from tests.unit.engine.test_native import piece

CONFIG = tiny_config()
TENSORS = {name: tensor.bfloat16() for name, tensor in random_tensors(CONFIG, 1).items()}
CPU = torch.device("cpu")
ROUNDED = (Quantisation.FP8, Quantisation.INT4)


def random_matrix(outputs: int, inputs: int, seed: int = 1) -> torch.Tensor:
    """Rows of different size, off centre, one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(outputs, inputs, generator=generator) + 0.5) * torch.rand(outputs, 1, generator=generator)
    weight[outputs // 2] = 0.0
    return weight.bfloat16()


@pytest.mark.parametrize(("outputs", "inputs", "pairs"), [(8, 32, 1), (16, 64, 2), (24, 128, 4), (8, 192, 2)])
def test_tiles_hold_each_number_where_the_kernel_looks_for_it(outputs: int, inputs: int, pairs: int) -> None:
    """Place by place, as the tensor cores' fragments are defined; and back again."""
    numbers = torch.randint(0, 16, (outputs, inputs), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    tiles = linears.pack_tiles(numbers)
    assert tiles.dtype is torch.int32
    assert tiles.shape == (outputs // 8, inputs // (32 * pairs), 32, pairs)
    for row in range(outputs):
        for column in range(inputs):
            # A lane holds 2 neighbours, those 8 further on, and the same of the next tile of 16 inputs.
            lane = row % 8 * 4 + column % 8 // 2
            word = int(tiles[row // 8, column // (32 * pairs), lane, column // 32 % pairs])
            place = column % 2 * 4 + column % 32 // 8
            assert word >> (4 * place) & 15 == numbers[row, column], (row, column)
    assert torch.equal(linears.unpack_tiles(tiles), numbers)


def test_four_bits_round_to_the_nearest() -> None:
    """No weight is off by more than half a step, but for what bfloat16 costs; zeros stay zeros."""
    weight = random_matrix(16, 4 * INT4_GROUP)
    weight[3, :INT4_GROUP] = 0.75
    product = Int4Matmul.pack(weight)
    found = product.weight()
    parts = weight.float().view(-1, INT4_GROUP)
    step = (parts.amax(dim=-1) - parts.amin(dim=-1)) / 15
    off = (found.float().view(-1, INT4_GROUP) - parts).abs().amax(dim=-1)
    assert (off <= 0.52 * step + 2.0**-7 * parts.abs().amax(dim=-1)).all()
    assert (found[8] == 0).all()
    assert found.shape == weight.shape


def test_eight_bits_round_to_the_nearest() -> None:
    """Three bits of mantissa: half a step is a sixteenth of a value. The furthest of each row is kept; zeros too."""
    weight = random_matrix(16, 48)
    product = Fp8Matmul.pack(weight)
    found = product.weight_YX.float() * product.scales_1Y.T
    assert (product.weight_YX.float().abs().amax(dim=-1) == 448).sum() == 15
    assert (found[8] == 0).all()
    assert product.scales_1Y[0, 8] == 1
    smallest = product.scales_1Y.T * 2.0**-9
    assert ((found - weight.float()).abs() <= weight.float().abs() / 15.9 + smallest / 2).all()


@pytest.mark.parametrize(("inputs", "width"), [(48, 48), (50, 64), (1500, 1504)])
def test_the_kernel_scales_rows_as_torch_does(inputs: int, width: int) -> None:
    """Rows that lie apart, longer than a tile, one of zeros, zeros past the end. The last cast is the hardware's: the
    interpreter's is wrong, so it is left out here."""
    joined = torch.randn(7, 2 * inputs, generator=torch.Generator().manual_seed(3))
    x_TX = joined[:, inputs:]
    x_TX[2] = 0.0
    found, scales = linears.scale_rows(x_TX, width, torch.float32)
    rounded, wanted_scales = linears.round_rows(x_TX, width)
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(found.to(FP8).view(torch.uint8), rounded.view(torch.uint8))


@pytest.mark.parametrize("quantisation", ROUNDED, ids=lambda q: q.value)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (30, 50)])
@pytest.mark.parametrize("rows", [1, 5, TILE_ROWS_MAX + 1])
def test_products_are_close_to_the_unrounded(quantisation: Quantisation, outputs: int, inputs: int, rows: int) -> None:
    """Sizes that fill tiles and ones that do not; and the reference agrees."""
    weight = random_matrix(outputs, inputs)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
    product = PACKS[quantisation](weight)
    found, reference, exact = product(x), product.reference(x), x.float() @ weight.float().T
    assert found.dtype is torch.bfloat16
    assert found.shape == reference.shape == exact.shape
    assert (found.float() - reference).abs().max() < 2.0**-7 * reference.abs().max()
    deviation = (found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert deviation < {Quantisation.FP8: 0.05, Quantisation.INT4: 0.1}[quantisation]


@pytest.mark.parametrize("quantisation", [Quantisation.NONE, *ROUNDED], ids=lambda q: q.value)
@pytest.mark.parametrize("bias", [False, True])
def test_joined_products_are_those_of_each_matrix(quantisation: Quantisation, bias: bool) -> None:
    """Query, key and value in one product: the same numbers, since nothing of a row's rounding hangs on the others."""
    makers = admit_weights(quantisation, CONFIG, device=CPU, dtype=torch.bfloat16)
    parts = [
        Linear(weight=random_matrix(width, 64, seed), bias=torch.randn(width).bfloat16() if bias else None)
        for seed, width in enumerate((32, 16, 8))
    ]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    together = torch.split(makers.matmul("qkv", *parts)(x), [32, 16, 8], dim=-1)
    for out, part in zip(together, parts, strict=True):
        alone = makers.matmul("one", part)(x)
        assert torch.allclose(out.float(), alone.float(), rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 17, 70])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (30, 384)])
def test_our_kernel_multiplies_by_the_rounded_weights(rows: int, outputs: int, inputs: int) -> None:
    """Outputs that end within a tile, rows that end within one or take two, several columns of tiles."""
    product = Int4Matmul.pack(random_matrix(outputs, inputs))
    assert product.fits_kernel
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).bfloat16()
    found, reference = product.by_tiles(x), product.reference(x)
    assert found.shape == (rows, outputs)
    assert (found.float() - reference).abs().max() < 2.0**-6 * reference.abs().max()


class Wrong(Int4Matmul):
    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_TX) * 1.1


class NotANumber(Int4Matmul):
    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_TX) * float("nan")


class Misshapen(Int4Matmul):
    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        return super().__call__(x_TX)[:, :-1]


class Missing(Int4Matmul):
    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("_weight_int4pack_mm_cuda is not available for build.")


class WrongWhenUnpacked(Int4Matmul):
    def unpacked(self, x_TX: torch.Tensor) -> torch.Tensor:
        return super().unpacked(x_TX) * (1.1 if len(x_TX) > TILE_ROWS_MAX else 1.0)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Wrong, r"is wrong by \d\.\de-0[12], 3e-02 is allowed"),
        (NotANumber, "is wrong by nan"),
        (Misshapen, "instead of"),
        (Missing, "not available for build"),
        (WrongWhenUnpacked, rf"\[{TILE_ROWS_MAX + 1}, \d+\] by"),
    ],
)
def test_what_fails_its_trial_is_refused(broken: type[Int4Matmul], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that multiplies wrongly, gives no number or another shape, is missing, is wrong for some rows only."""
    monkeypatch.setitem(PACKS, Quantisation.INT4, broken.pack)
    with pytest.raises(UnsupportedModelError, match=rf"weights cannot be int4 on cpu: a product .*{why}"):
        admit_weights(Quantisation.INT4, CONFIG, device=CPU, dtype=torch.bfloat16)


def test_what_is_admitted_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of a layer was tried; other nodes are told of the rounding, which is not that of a CPU's int4."""
    tried: set[tuple[int, ...]] = set()

    def pack(weight_YX: torch.Tensor) -> Int4Matmul:
        tried.add(tuple(weight_YX.shape))
        return Int4Matmul.pack(weight_YX)

    monkeypatch.setitem(PACKS, Quantisation.INT4, pack)
    admitted = admit_weights(Quantisation.INT4, CONFIG, device=CPU, dtype=torch.bfloat16)
    assert tried == product_shapes(CONFIG) == {(128, 32), (32, 64), (96, 32), (32, 48)}
    assert admitted.registered == "int4-groups-of-64"
    assert admitted.description.startswith("int4-groups-of-64 (products off by ")
    plain = admit_weights(Quantisation.NONE, CONFIG, device=CPU, dtype=torch.float32)
    assert (plain.registered, plain.description) == ("", "float32")


def test_what_a_device_cannot_do_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole numbers of 8 bits; another type than bfloat16; a GPU from before 8-bit floats."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Some GPU")
    gpu = torch.device("cuda")
    for quantisation, dtype, why in (
        (Quantisation.INT8, torch.bfloat16, "int8 on Some GPU: a GPU takes fp8, int4; set quantisation to none"),
        (Quantisation.INT4, torch.float32, "needs dtype bfloat16, and this is float32"),
        (Quantisation.FP8, torch.bfloat16, r"needs compute capability 8\.9, and it has 8\.6"),
    ):
        with pytest.raises(UnsupportedModelError, match=why):
            admit_weights(quantisation, CONFIG, device=gpu, dtype=dtype)


def gpu_runner(quantisation: Quantisation, graphs: GraphConfig) -> GpuRunner:
    runner = GpuRunner(
        config=CONFIG,
        tensors=TENSORS,
        block_size=BLOCK_SIZE,
        device="cpu",
        quantisation=quantisation,
        gpu=GpuConfig(graphs=graphs),
        capture=FakeCapture(),
    )
    spec = runner.kv_spec
    per_block = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * 2
    runner.bind(np.full(spec.num_layers * NUM_BLOCKS * per_block, 0xFF, dtype=np.uint8), NUM_BLOCKS)
    runner.warm_up(BlockId(NUM_BLOCKS - 1))
    return runner


def play(runner: GpuRunner) -> list[int]:
    seq = Sequence(0, [5, 17, 40, 3, 3, 22, 9], [BlockId(3), BlockId(9), BlockId(1), BlockId(20)], GREEDY)
    for _ in range(4):
        s = seq.slice()
        result = runner.run(Batch(slices=(s,)), NullSink())
        seq.computed = s.stop
        seq.tokens.append(result.sampled[seq.key])
    return seq.tokens


@pytest.mark.parametrize("quantisation", ROUNDED, ids=lambda q: q.value)
def test_a_runner_with_rounded_weights(quantisation: Quantisation) -> None:
    """The same tokens with graphs and without; it says what its weights are, to people and to other nodes."""
    graphs = gpu_runner(quantisation, GraphConfig(graph_rows_max=1, graph_context_max=64))
    eager = gpu_runner(quantisation, GraphConfig(graph_rows_max=0))
    assert play(graphs) == play(eager)
    assert graphs.describe()["decode graphs used"] == "3 steps, 0 rows of padding"
    assert graphs.quantisation == graphs.describe()["weights"].split(" ")[0]
    assert graphs.quantisation.startswith(quantisation.value)


def test_the_checkpoints_tensors_are_left_as_they_are() -> None:
    """Rounding makes copies: the tensors that a runner was given are the caller's."""
    before = {name: tensor.clone() for name, tensor in TENSORS.items()}
    gpu_runner(Quantisation.INT4, GraphConfig(graph_rows_max=0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in TENSORS.items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpu-weights") / "model"
    write_demo_model(path, DemoModelParams())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return path


@torch.inference_mode()
def scores(folder: Path, dtype: torch.dtype, quantisation: Quantisation = Quantisation.NONE) -> torch.Tensor:
    """Of 480 random tokens, each given those before it; by torch's operations over the rounded matrices."""
    config = load_model_config(folder)
    weights = admit_weights(quantisation, config, device=CPU, dtype=dtype)
    tensors = load_tensors(folder, weight_shapes(config), dtype=dtype)
    spec = KvSpec(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=str(dtype).removeprefix("torch."),
    )
    record = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * dtype.itemsize
    pool = KvPool(torch.full((spec.num_layers * 96 * record,), 0xFF, dtype=torch.uint8), 96, spec)
    forward = TorchForward(Decoder(config, tensors, weights, fused_rms_norm), pool)
    tokens = random.Random(3).choices(range(2, config.vocab_size), k=480)
    x_TE = forward.forward(Batch(slices=(piece(0, tokens, 0, 480),), every_row=True), NullSink())
    return forward.logits(x_TE).float()


def test_quality(folder: Path) -> None:
    """As of the CPU's roundings: error of the scores, in standard deviations of a score, and how often the best token
    is that of float32. Inputs in 8-bit floats cost more than weights in whole numbers do."""
    exact = scores(folder, torch.float32)
    found = {q: scores(folder, torch.bfloat16, q) for q in (Quantisation.NONE, *ROUNDED)}
    errors = {q: float((s - exact).square().mean().sqrt() / exact.std()) for q, s in found.items()}
    agreements = {q: float((s.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()) for q, s in found.items()}
    assert errors[Quantisation.FP8] < 0.4
    assert agreements[Quantisation.FP8] > 0.4
    assert errors[Quantisation.INT4] < 0.8
    assert agreements[Quantisation.INT4] > 0.1


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)])
def test_the_norm_in_one_kernel_is_the_norm(dtype: torch.dtype, limit: float) -> None:
    """Heads that are columns of a wider tensor, as a joined product gives them."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 6, 16, generator=generator).to(dtype)[:, 2:4]
    weight = torch.randn(16, generator=generator).to(dtype)
    found, wanted = fused_rms_norm(x, weight, 1e-6), rms_norm(x, weight, 1e-6)
    assert (found.dtype, found.shape) == (dtype, wanted.shape)
    assert ((found - wanted).abs() <= limit * wanted.abs()).all()


def test_the_calls_on_a_gpu_fit_the_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, types and strides that torch's own descriptions of the two operations accept, without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def scaled(x: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return x.new_empty((len(x), width), dtype=dtype), x.new_empty((len(x), 1), dtype=torch.float32)

    monkeypatch.setattr(linears, "scale_rows", scaled)
    weight: Any = random_matrix(32, 128)
    for product in (Fp8Matmul.pack(weight), Int4Matmul.pack(weight)):
        tensors = {name: getattr(product, name) for name in type(product).__slots__}
        with FakeTensorMode():
            near = {
                name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
                for name, value in tensors.items()
                if isinstance(value, torch.Tensor)
            }
            on_device = replace(product, **near)  # type: ignore[arg-type]  # mypy counts in the other fields
            for rows in (1, 16):
                out = on_device(torch.empty(rows, 128, dtype=torch.bfloat16, device="cuda"))
                assert (out.shape, out.dtype, out.device.type) == ((rows, 32), torch.bfloat16, "cuda")
