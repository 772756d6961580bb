"""Which roundings of the weights a node may use: those whose products, run at start on this device, agree with torch.

The operations are torch's own, but private ones (`_scaled_mm`, `_weight_int4pack_mm`), made for some devices only, with
layouts that nothing but their result tells. So one of each of the model's products is run, with random numbers, for
row counts that take different ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from baton.log import get_log
from engine.gpu.admission import ERROR_MAX
from engine.gpu.linears import INT4_GROUP, PACKS, TILE_ROWS_MAX, TORCH_TILE_ROWS_MAX, GpuLinears, Pack
from engine.model_config import ModelConfig, Quantisation, UnsupportedModelError
from engine.models.weights import is_layer_matrix

log = get_log("weights")

TRIAL_ROWS = (1, TORCH_TILE_ROWS_MAX + 1, 70, TILE_ROWS_MAX + 1)
CAPABILITY_MIN = {Quantisation.FP8: (8, 9), Quantisation.INT4: (8, 0)}
"""Of CUDA devices: Ada for 8-bit floats, Ampere for bfloat16 on tensor cores."""
REGISTERED = {Quantisation.FP8: "fp8", Quantisation.INT4: f"int4-groups-of-{INT4_GROUP}"}
"""What other nodes are told: a CPU's int4 is another rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedWeights:
    """How a model's matrices are kept on this device."""

    linears: GpuLinears
    registered: str
    """For other nodes; empty: not rounded."""
    description: str
    """For people."""


def admit_weights(
    quantisation: Quantisation,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    pack: Pack | None = None,
) -> AdmittedWeights:
    """Try the products of this quantisation out, if there is any. Runs kernels: takes seconds. `pack` is for tests.

    Raises:
        UnsupportedModelError: the device cannot do it, or what it does is wrong; the text says which.
    """
    if quantisation is Quantisation.NONE:
        linears = GpuLinears(PACKS[Quantisation.NONE], device)
        return AdmittedWeights(linears=linears, registered="", description=str(dtype).removeprefix("torch."))
    problem = _unfit(quantisation, device, dtype)
    if problem is None:
        chosen = pack or PACKS[quantisation]
        worst = 0.0
        for outputs, inputs in sorted(product_shapes(config)):
            problem, error = _try_out(chosen, outputs, inputs, device)
            if problem is not None:
                break
            worst = max(worst, error)
    if problem is not None:
        raise UnsupportedModelError(
            f"weights cannot be {quantisation.value} on {_name(device)}: {problem}; set quantisation to none"
        )
    description = f"{REGISTERED[quantisation]} (products off by {worst:.1e})"
    log.info("weights", quantisation=description)
    return AdmittedWeights(
        linears=GpuLinears(chosen, device), registered=REGISTERED[quantisation], description=description
    )


class OnDevice(Mapping[str, torch.Tensor]):
    """A model's tensors, each moved to the device when it is asked for, which is once. The layers' matrices are left
    where they are: their products move them. Nothing is kept here: `tensors` may make each anew."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._tensors = tensors
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        return tensor if is_layer_matrix(name, tensor.dim()) else tensor.to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def product_shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """(outputs, inputs) of each layer's products, joined as `Decoder` joins them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)}


def _unfit(quantisation: Quantisation, device: torch.device, dtype: torch.dtype) -> str | None:
    """What can be said without running anything."""
    if quantisation not in PACKS:
        usable = ", ".join(each.value for each in PACKS if each is not Quantisation.NONE)
        return f"a GPU takes {usable}"
    if dtype is not torch.bfloat16:
        return f"that needs dtype bfloat16, and this is {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda":
        capability, needed = torch.cuda.get_device_capability(device), CAPABILITY_MIN[quantisation]
        if capability < needed:
            return f"that needs compute capability {needed[0]}.{needed[1]}, and it has {capability[0]}.{capability[1]}"
    return None


def _try_out(pack: Pack, outputs: int, inputs: int, device: torch.device) -> tuple[str | None, float]:
    """-> (what is wrong, or None; largest difference from the reference, of the largest reference value)."""
    generator = torch.Generator(device=device).manual_seed(0)
    # Rows of different size, off centre, one of zeros: a wrong scale or zero point shows.
    weight_YX = torch.randn(outputs, inputs, generator=generator, device=device) + 0.5
    weight_YX *= torch.rand(outputs, 1, generator=generator, device=device) + 0.5
    weight_YX[0] = 0.0
    worst = 0.0
    try:
        product = pack(weight_YX.bfloat16())
        for rows in TRIAL_ROWS:
            x_TX = torch.randn(rows, inputs, generator=generator, device=device).bfloat16()
            found_TY, wanted_TY = product(x_TX), product.reference(x_TX)
            if found_TY.shape != wanted_TY.shape:
                return f"a product gives {tuple(found_TY.shape)} instead of {tuple(wanted_TY.shape)}", float("nan")
            error = float((found_TY.float() - wanted_TY).abs().max() / wanted_TY.abs().max())
            limit = ERROR_MAX["bfloat16"]
            if not error <= limit:
                shape = f"[{rows}, {inputs}] by [{inputs}, {outputs}]"
                return f"a product of {shape} is wrong by {error:.1e}, {limit:.0e} is allowed", error
            worst = max(worst, error)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError, TypeError) as failure:
        # torch raises these for a missing or refused operation; an AttributeError means that it has none of the name.
        log.exception("a rounding of the weights failed its trial", outputs=outputs, inputs=inputs)
        return f"a product failed: {type(failure).__name__}: {str(failure)[:200]}", float("nan")
    return None, worst


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
