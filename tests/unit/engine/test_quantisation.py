"""Weights of 8 and 4 bits: the kernels against the rounded weights, the model against the unrounded one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.errors import InvalidField
from engine.build import ComputeDevice, EngineConfig
from engine.checkpoint import load_tensors
from engine.demo_model import DemoModelParams, write_demo_model
from engine.kernel_sets import KernelSet
from engine.model_config import (
    LM_HEAD,
    ComputeDtype,
    Quantisation,
    UnsupportedModelError,
    load_model_config,
    weight_shapes,
)
from engine.native.kernels import PANEL, SCALED, Epilogue, Workspace, choose_kernels, native_kernels, pack, quantise
from engine.runner import TorchRunner
from engine.types import Batch
from tests.support.every_row import score
from tests.unit.engine.test_native import piece

needs_kernels = pytest.mark.skipif(native_kernels() is None, reason="no compiler, or a CPU without kernels")


def rounded(weight_YX: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights that the quantised matrix stands for, float64."""
    whole_YX, scales = quantise(weight_YX, bits)
    scales_YG = scales.transpose(1, 2).reshape(weight_YX.shape[0], -1)
    return whole_YX.double() * scales_YG.double().repeat_interleave(SCALED, dim=1)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_to_the_nearest(bits: int) -> None:
    """No weight is off by more than half a step, but for 4 bits the one end that has a step less."""
    weight = torch.randn(2 * PANEL, 3 * SCALED, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[0, :SCALED] = 0.0
    parts = (weight.double() - rounded(weight, bits)).view(-1, SCALED).abs()
    most = weight.double().view(-1, SCALED).abs().amax(dim=-1)
    step = most / (127 if bits == 8 else 8)
    assert (parts.amax(dim=-1) <= step * (0.5001 if bits == 8 else 1.0001)).all()
    assert (rounded(weight, bits)[0, :SCALED] == 0).all()


@needs_kernels
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (97, 51), (200, 330)])
def test_the_kernel_multiplies_by_the_rounded_weights(rows: int, outputs: int, inputs: int, bits: int) -> None:
    """Sizes that end within a panel, within a scale's inputs and within a pair; a bias; added to what was there."""
    kernels = choose_kernels(KernelSet.AUTO, rounded=True).kernels
    assert kernels is not None
    generator = torch.Generator().manual_seed(rows)
    x, w, b = (torch.randn(s, generator=generator).bfloat16() for s in ((rows, inputs), (outputs, inputs), (outputs,)))
    padded = torch.zeros(-(-outputs // PANEL) * PANEL, -(-inputs // SCALED) * SCALED, dtype=torch.bfloat16)
    padded[:outputs, :inputs] = w
    exact = x.double() @ rounded(padded, bits)[:outputs, :inputs].T + b.double()
    out = torch.ones(rows, outputs, dtype=torch.bfloat16)
    kernels.linear(x, pack(w, bits, bias_Y=b), out, epilogue=Epilogue.ADD, workspace=Workspace())
    assert (out.double() - exact - 1).abs().max() < 2.0**-7 * exact.abs().max()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantisation") / "model"
    write_demo_model(path, DemoModelParams())
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return path


def scores(folder: Path, dtype: ComputeDtype, quantisation: Quantisation = Quantisation.NONE) -> torch.Tensor:
    """Of 480 random tokens, each given those before it."""
    return scores_of(TorchRunner.load(folder, block_size=16, dtype=dtype, quantisation=quantisation))


def scores_of(runner: TorchRunner) -> torch.Tensor:
    spec = runner.kv_spec
    record = 2 * spec.num_kv_heads * spec.block_size * spec.head_dim * 4
    runner.bind(np.full(spec.num_layers * 96 * record, 0xFF, dtype=np.uint8), 96)
    tokens = random.Random(3).choices(range(2, runner.vocab_size), k=480)
    found = score(runner, Batch(slices=(piece(0, tokens, 0, 480),))).float()
    runner.unbind()
    return found


def rounded_beforehand(folder: Path, bits: int) -> TorchRunner:
    """In float32, with the weights that a model of so many bits stands for. 16: as they are in bfloat16."""
    config = load_model_config(folder)
    tensors = load_tensors(folder, weight_shapes(config), dtype=torch.bfloat16)
    values = {name: tensor.float() for name, tensor in tensors.items()}
    if bits < 16:
        matrices = {name: tensor for name, tensor in tensors.items() if tensor.dim() == 2 and "layers" in name}
        values |= {name: rounded(tensor, bits).float() for name, tensor in matrices.items()}
        values[LM_HEAD] = rounded(tensors[LM_HEAD], 8).float()
    return TorchRunner(config=config, tensors=values, block_size=16)


@needs_kernels
def test_the_model_computes_with_the_rounded_weights(folder: Path) -> None:
    """Every matrix of every layer: beside float32 arithmetic on the weights that the rounded ones stand for, the scores
    are off by no more than bfloat16 arithmetic makes of weights that are not rounded."""

    def error(quantisation: Quantisation, bits: int) -> float:
        exact = scores_of(rounded_beforehand(folder, bits))
        found = scores(folder, ComputeDtype.BFLOAT16, quantisation)
        return float((found - exact).square().mean().sqrt() / exact.std())

    unrounded = error(Quantisation.NONE, 16)
    assert error(Quantisation.INT8, 8) < 1.1 * unrounded
    assert error(Quantisation.INT4, 4) < 1.1 * unrounded


@needs_kernels
def test_quality(folder: Path) -> None:
    """Error of the scores, in standard deviations of a score, and how often the best token is that of float32.

    Measured beside what bfloat16 itself costs: 8 bits add as much again. This model makes of an error in its weights
    one about ten times as large in its scores, and random weights are harder on 4 bits than trained ones are: no weight
    matters less than another.
    """
    exact = scores(folder, ComputeDtype.FLOAT32)
    kinds = (Quantisation.NONE, Quantisation.INT8, Quantisation.INT4)
    found = {quantisation: scores(folder, ComputeDtype.BFLOAT16, quantisation) for quantisation in kinds}
    errors = {q: float((s - exact).square().mean().sqrt() / exact.std()) for q, s in found.items()}
    agreements = {q: float((s.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()) for q, s in found.items()}
    assert errors[Quantisation.INT8] < 2 * errors[Quantisation.NONE]
    assert agreements[Quantisation.INT8] > agreements[Quantisation.NONE] - 0.06
    assert errors[Quantisation.INT4] < 0.74
    assert agreements[Quantisation.INT4] > 0.12


def test_what_cannot_be_quantised_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and deterministic nodes and other devices by their configuration; a machine without the kernels when it
    loads, and one that is asked for what only a GPU has."""
    for wrong in ({"dtype": ComputeDtype.FLOAT32}, {"deterministic": True}):
        with pytest.raises(InvalidField, match="quantisation"):
            EngineConfig(model="m", quantisation=Quantisation.INT4, **wrong)
    for device, quantisation in (
        (ComputeDevice.CPU, Quantisation.FP8),
        (ComputeDevice.CUDA, Quantisation.INT8),
        (ComputeDevice.CPU_MIRRORED, Quantisation.INT4),
    ):
        with pytest.raises(InvalidField, match=f"quantisation is {quantisation.value}; {device.value} takes none"):
            EngineConfig(model="m", device=device, quantisation=quantisation)
    with pytest.raises(UnsupportedModelError, match="fp8 on a GPU only"):
        TorchRunner.load(folder, block_size=16, quantisation=Quantisation.FP8)
    with pytest.raises(UnsupportedModelError, match="needs bfloat16 and the engine's compute kernels"):
        TorchRunner.load(folder, block_size=16, quantisation=Quantisation.INT8, kernels=KernelSet.TORCH)
