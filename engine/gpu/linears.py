"""A model's matrices on a GPU: as they are, in 8-bit floats, or in tiles of 4-bit numbers.

On the CPU torch multiplies by the same rounded matrices, for tests. Some operations are private to torch (`_scaled_mm`,
`_weight_int4pack_mm`) and exist on some devices only. So one of each of the model's products is tried at start: a node
uses only roundings whose products agree with torch's plain ones.

Shape suffixes as in engine/types.py; X inputs and Y outputs of a matrix, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
import triton

from baton.log import get_log
from engine.gpu import kernels
from engine.gpu.attention import ERROR_MAX, BackendUnfit, processors
from engine.model_config import ModelConfig, Quantisation, UnsupportedModelError
from engine.models.matmul import Linear, Matmul, Packing, joined

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
FP8_MULTIPLE = 16
"""torch._scaled_mm takes inputs and outputs in multiples of this."""
INT4_GROUP = 64
"""Inputs of an output that share a scale and a zero point. The kernel takes 32, 64, 128 and 256."""
TORCH_TILE_ROWS_MAX = 16
"""torch's kernel for 4-bit tiles reads the matrix once for every 16 rows; ours, for more rows, once for every 64."""
TILE_ROWS_MAX = 256
"""For more rows it is expected to be faster to unpack the matrix and multiply by it as by any other."""
_TILE_OUTPUTS = 8
_KERNEL_ROWS = 64
_DOT_ROWS_MIN = 16
_KERNEL_INPUTS = 128
"""Our kernel takes multiples of this."""
_SCALE_TILE = 1024
_NIBBLES = (0, 4, 8, 12, 16, 20, 24, 28)


class GpuMatmul(Matmul, Protocol):
    """A rounded matrix [Y, X] without a bias. Immutable."""

    def reference(self, x_TX: torch.Tensor) -> torch.Tensor:
        """The same product of the same rounded numbers, by torch's own operations -> float32 [T, Y]."""
        ...


Pack = Callable[[torch.Tensor], GpuMatmul]
"""From a bfloat16 matrix [Y, X]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Matmul:
    """8-bit floats (e4m3: Micikevicius et al. 2022), a scale for each output; each row of the input is rounded too."""

    weight_YX: torch.Tensor
    scales_1Y: torch.Tensor
    outputs: int

    @classmethod
    def pack(cls, weight_YX: torch.Tensor) -> Fp8Matmul:
        padded_YX = _padded(weight_YX, FP8_MULTIPLE, FP8_MULTIPLE)
        rounded_YX, scales_Y1 = round_rows(padded_YX, padded_YX.shape[1])
        return cls(weight_YX=rounded_YX, scales_1Y=scales_Y1.view(1, -1), outputs=len(weight_YX))

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        if x_TX.device.type != "cuda":
            return self.reference(x_TX).to(x_TX.dtype)
        rounded_TX, scales_T1 = scale_rows(x_TX, self.weight_YX.shape[1], FP8)
        # Fast accumulation keeps 14 bits of a sum's mantissa: far more than the inputs have.
        out_TY = torch._scaled_mm(
            rounded_TX,
            self.weight_YX.t(),
            scale_a=scales_T1,
            scale_b=self.scales_1Y,
            out_dtype=x_TX.dtype,
            use_fast_accum=True,
        )
        return _cut(out_TY, self.outputs)

    def reference(self, x_TX: torch.Tensor) -> torch.Tensor:
        rounded_TX, scales_T1 = round_rows(x_TX, self.weight_YX.shape[1])
        out_TY = F.linear(rounded_TX.float(), self.weight_YX.float()) * scales_T1 * self.scales_1Y
        return _cut(out_TY, self.outputs)


def round_rows(x_TX: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (8-bit floats [T, width], zeros at the end, float32 scales [T, 1]), by torch's own operations.

    The furthest value of each row becomes the largest of the type; a row of zeros has scale 1.
    """
    wide_TX = x_TX.float()
    scales_T1 = wide_TX.abs().amax(dim=-1, keepdim=True) / FP8_LARGEST
    scales_T1 = torch.where(scales_T1 == 0, 1.0, scales_T1)
    rounded_TX = torch.zeros((len(x_TX), width), dtype=FP8, device=x_TX.device)
    rounded_TX[:, : x_TX.shape[1]] = (wide_TX / scales_T1).to(FP8)
    return rounded_TX, scales_T1


def scale_rows(x_TX: torch.Tensor, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As `round_rows`, by one kernel, to any type. The last dimension of `x_TX` must be contiguous."""
    rows, inputs = x_TX.shape
    assert x_TX.stride(1) == 1 and width >= inputs, (x_TX.shape, x_TX.stride(), width)
    out_TX = torch.empty((rows, width), dtype=dtype, device=x_TX.device)
    scales_T1 = torch.empty((rows, 1), dtype=torch.float32, device=x_TX.device)
    kernels.scale_rows_kernel[(rows,)](
        x_TX,
        out_TX,
        scales_T1,
        x_TX.stride(0),
        FP8_LARGEST,
        WIDTH=inputs,
        WIDTH_OUT=width,
        TILE=min(_SCALE_TILE, triton.next_power_of_2(width)),
    )
    return out_TX, scales_T1


@dataclass(frozen=True, slots=True, kw_only=True)
class Int4Matmul:
    """4-bit numbers in the order of the tensor cores, as torch's kernel takes them; torchao calls it tile-packed.

    A weight is (number - 8) * scale + zero; `scales_GY2` holds scale and zero side by side.
    """

    tiles: torch.Tensor
    scales_GY2: torch.Tensor
    outputs: int
    inputs: int

    @classmethod
    def pack(cls, weight_YX: torch.Tensor) -> Int4Matmul:
        outputs, inputs = weight_YX.shape
        numbers_YX, scales_GY2 = round_groups(_padded(weight_YX, _TILE_OUTPUTS, INT4_GROUP))
        return cls(tiles=pack_tiles(numbers_YX), scales_GY2=scales_GY2, outputs=outputs, inputs=inputs)

    def __call__(self, x_TX: torch.Tensor) -> torch.Tensor:
        rows = len(x_TX)
        if rows > TILE_ROWS_MAX or x_TX.device.type != "cuda":
            return self.unpacked(x_TX)
        return self.by_torch_tiles(x_TX) if rows <= TORCH_TILE_ROWS_MAX or not self.fits_kernel else self.by_tiles(x_TX)

    def by_torch_tiles(self, x_TX: torch.Tensor) -> torch.Tensor:
        """By torch's kernel. On a GPU only."""
        inputs_padded = self.tiles.shape[1] * self.tiles.shape[3] * 32
        if inputs_padded != self.inputs:
            x_TX = F.pad(x_TX, (0, inputs_padded - self.inputs))
        out_TY = torch._weight_int4pack_mm(x_TX.contiguous(), self.tiles, INT4_GROUP, self.scales_GY2)
        return _cut(out_TY, self.outputs)

    @property
    def fits_kernel(self) -> bool:
        """Whether `by_tiles` takes this matrix."""
        return self.inputs % _KERNEL_INPUTS == 0

    def by_tiles(self, x_TX: torch.Tensor) -> torch.Tensor:
        """By our kernel."""
        assert self.fits_kernel, self.inputs
        rows, outputs = len(x_TX), 8 * len(self.tiles)
        out_TY = torch.empty((rows, outputs), dtype=x_TX.dtype, device=x_TX.device)
        tile_rows = min(_KERNEL_ROWS, max(_DOT_ROWS_MIN, triton.next_power_of_2(rows)))
        # With few outputs, larger tiles would leave processors idle.
        tile_outputs = 64 if outputs >= 64 * processors(x_TX.device) else 32
        kernels.int4_rows_kernel[(triton.cdiv(outputs, tile_outputs), triton.cdiv(rows, tile_rows))](
            in_nibble_order(x_TX),
            self.tiles,
            self.scales_GY2,
            out_TY,
            rows,
            INPUTS=self.inputs,
            OUTPUTS=outputs,
            GROUP=INT4_GROUP,
            TILE_Y=tile_outputs,
            TILE_T=tile_rows,
            FACTOR_TYPE=kernels.factor_type(x_TX.dtype),
        )
        return _cut(out_TY, self.outputs)

    def unpacked(self, x_TX: torch.Tensor) -> torch.Tensor:
        """By a temporary bfloat16 matrix."""
        return F.linear(x_TX, self.weight())

    def reference(self, x_TX: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TX.float(), self.weight().float())

    def weight(self) -> torch.Tensor:
        """The weights that the kernel multiplies by, bfloat16 [Y, X]."""
        padded_YX = weights_of(unpack_tiles(self.tiles), self.scales_GY2)
        return padded_YX[: self.outputs, : self.inputs]


def round_groups(weight_YX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (uint8 [Y, X] of 0 to 15, bfloat16 [G, Y, 2] scales and zeros): the least of a group is 0, the greatest 15.

    The numbers fit scale and zero as stored, rounded.
    """
    outputs, inputs = weight_YX.shape
    parts_YGX = weight_YX.float().view(outputs, inputs // INT4_GROUP, INT4_GROUP)
    least_YG, most_YG = parts_YGX.aminmax(dim=-1)
    # Equal values need a scale too, small beside them; for a group of zeros any will do.
    smallest_YG = least_YG.abs().clamp_(min=1e-6) * 2.0**-10
    scales_YG = torch.maximum((most_YG - least_YG) / 15, smallest_YG).bfloat16()
    zeros_YG = (least_YG + 8 * scales_YG.float()).bfloat16()
    numbers_YGX = ((parts_YGX - zeros_YG.float()[..., None]) / scales_YG.float()[..., None]).round_() + 8
    scales_GY2 = torch.stack((scales_YG, zeros_YG), dim=-1).transpose(0, 1).contiguous()
    return numbers_YGX.clamp_(0, 15).to(torch.uint8).view(outputs, inputs), scales_GY2


def weights_of(numbers_YX: torch.Tensor, scales_GY2: torch.Tensor) -> torch.Tensor:
    """The inverse of `round_groups`: bfloat16 [Y, X], rounded once, as in the kernel."""
    outputs, inputs = numbers_YX.shape
    scales_YG, zeros_YG = scales_GY2.float().transpose(0, 1).unbind(dim=-1)
    parts_YGX = numbers_YX.view(outputs, -1, INT4_GROUP).float() - 8
    return (parts_YGX * scales_YG[..., None] + zeros_YG[..., None]).bfloat16().view(outputs, inputs)


def pack_tiles(numbers_YX: torch.Tensor) -> torch.Tensor:
    """uint8 [Y, X] of 0 to 15 -> int32 [Y / 8, X / 16 n, 32, n / 2], n = 8, 4 or 2, the largest that fits.

    The layout of `torch._convert_weight_to_int4pack`: entry [y, x, lane, j] is what a lane of a warp holds of two
    tiles, of 8 outputs and 16 inputs each, that lie side by side. Its output is y * 8 + lane / 4; its eight inputs are
    2 * (lane % 4) + 8 b + h past the first, in the order of (h, b), from the lowest four bits up.
    """
    outputs, inputs = numbers_YX.shape
    pairs = max(n for n in (1, 2, 4) if inputs % (32 * n) == 0)
    parts = numbers_YX.view(outputs // 8, 8, inputs // (32 * pairs), pairs, 4, 4, 2)
    nibbles = parts.permute(0, 2, 1, 5, 3, 6, 4).reshape(outputs // 8, -1, 32, pairs, 8).to(torch.int32)
    words = nibbles[..., 0].clone()
    for place, shift in enumerate(_NIBBLES[1:], start=1):
        words |= nibbles[..., place] << shift
    return words


def in_nibble_order(x_TX: torch.Tensor) -> torch.Tensor:
    """Each 128 inputs reordered to (h, b), (lane % 4, j): the factors of one nibble of all 16 words of an output."""
    rows, inputs = x_TX.shape
    parts = x_TX.reshape(rows, inputs // _KERNEL_INPUTS, 4, 4, 4, 2)
    return parts.permute(0, 1, 5, 3, 4, 2).reshape(rows, inputs)


def unpack_tiles(tiles: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_tiles` -> uint8 [Y, X]."""
    eights, columns, _, pairs = tiles.shape
    nibbles = torch.stack([(tiles >> shift & 15).to(torch.uint8) for shift in _NIBBLES], dim=-1)
    parts = nibbles.view(eights, columns, 8, 4, pairs, 2, 4)
    return parts.permute(0, 2, 1, 4, 6, 3, 5).reshape(eights * 8, columns * pairs * 32)


PACKS: dict[Quantisation, Pack] = {
    Quantisation.FP8: Fp8Matmul.pack,
    Quantisation.INT4: Int4Matmul.pack,
}
"""How a GPU can round."""


class GpuPacking(Packing):
    """How a model's matrices are kept on this device; they are moved to it one after another."""

    def __init__(
        self, pack: Callable[[torch.Tensor], Matmul], device: torch.device, *, registered: str, description: str
    ) -> None:
        """`registered` is for other nodes, empty if nothing is rounded; `description` is for people."""
        self._pack = pack
        self._device = device
        self.registered = registered
        self.description = description

    def matmul(self, name: str, *linears: Linear) -> Matmul:
        del name
        whole = joined([self._moved(linear) for linear in linears])
        product, bias_Y = self._pack(whole.weight), whole.bias
        return product if bias_Y is None else lambda x_TX: product(x_TX) + bias_Y

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _moved(self, linear: Linear) -> Linear:
        bias = None if linear.bias is None else self.placed(linear.bias)
        return Linear(weight=self.placed(linear.weight), bias=bias)


def _cut(out_TY: torch.Tensor, outputs: int) -> torch.Tensor:
    return out_TY if out_TY.shape[1] == outputs else out_TY[:, :outputs]


def _padded(weight_YX: torch.Tensor, outputs_multiple: int, inputs_multiple: int) -> torch.Tensor:
    outputs, inputs = weight_YX.shape
    return F.pad(weight_YX, (0, -inputs % inputs_multiple, 0, -outputs % outputs_multiple))


log = get_log("weights")

TRIAL_ROWS = (1, TORCH_TILE_ROWS_MAX + 1, 70, TILE_ROWS_MAX + 1)
CAPABILITY_MIN = {Quantisation.FP8: (8, 9), Quantisation.INT4: (8, 0)}
"""Of CUDA devices: Ada for 8-bit floats, Ampere for bfloat16 on tensor cores."""
REGISTERED = {Quantisation.FP8: "fp8", Quantisation.INT4: f"int4-groups-of-{INT4_GROUP}"}
"""Names for other nodes: a CPU's int4 is another rounding."""


def admit_weights(
    quantisation: Quantisation,
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> GpuPacking:
    """Try the products of this quantisation, if any. Runs kernels: takes seconds.

    Raises UnsupportedModelError: the device cannot compute them, or not correctly; the text says which.
    """
    if quantisation is Quantisation.NONE:
        numbers = str(dtype).removeprefix("torch.")
        return GpuPacking(lambda weight_YX: Linear(weight=weight_YX), device, registered="", description=numbers)
    pack, worst = PACKS.get(quantisation), 0.0
    try:
        if pack is None:
            raise BackendUnfit(f"a GPU takes {', '.join(each.value for each in PACKS)}")
        _check_device(quantisation, device, dtype)
        for outputs, inputs in sorted(product_shapes(config)):
            worst = max(worst, _try_out(pack, outputs, inputs, device))
    except BackendUnfit as unfit:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        raise UnsupportedModelError(
            f"weights cannot be {quantisation.value} on {name}: {unfit}; set quantisation to none"
        ) from unfit
    registered = REGISTERED[quantisation]
    description = f"{registered} (products off by {worst:.1e})"
    log.info("weights", quantisation=description)
    return GpuPacking(pack, device, registered=registered, description=description)


def product_shapes(config: ModelConfig) -> set[tuple[int, int]]:
    """(outputs, inputs) of each layer's products, joined as `Decoder` joins them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {(q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)}


def _check_device(quantisation: Quantisation, device: torch.device, dtype: torch.dtype) -> None:
    """Check type and device without running anything. Raises BackendUnfit."""
    if dtype is not torch.bfloat16:
        raise BackendUnfit(f"that needs dtype bfloat16, and this is {str(dtype).removeprefix('torch.')}")
    if device.type == "cuda":
        found, needed = torch.cuda.get_device_capability(device), CAPABILITY_MIN[quantisation]
        if found < needed:
            raise BackendUnfit(
                f"that needs compute capability {needed[0]}.{needed[1]}, and it has {found[0]}.{found[1]}"
            )


def _try_out(pack: Pack, outputs: int, inputs: int, device: torch.device) -> float:
    """-> the largest difference from the reference, of the largest reference value. Raises BackendUnfit."""
    generator = torch.Generator(device=device).manual_seed(0)
    # Rows of different scale, off centre, one of zeros: they expose a wrong scale or zero point.
    weight_YX = torch.randn(outputs, inputs, generator=generator, device=device) + 0.5
    weight_YX *= torch.rand(outputs, 1, generator=generator, device=device) + 0.5
    weight_YX[0] = 0.0
    worst, limit = 0.0, ERROR_MAX["bfloat16"]
    try:
        product = pack(weight_YX.bfloat16())
        for rows in TRIAL_ROWS:
            x_TX = torch.randn(rows, inputs, generator=generator, device=device).bfloat16()
            found_TY, wanted_TY = product(x_TX), product.reference(x_TX)
            if found_TY.shape != wanted_TY.shape:
                raise BackendUnfit(f"a product gives {tuple(found_TY.shape)} instead of {tuple(wanted_TY.shape)}")
            error = float((found_TY.float() - wanted_TY).abs().max() / wanted_TY.abs().max())
            if not error <= limit:
                shape = f"[{rows}, {inputs}] by [{inputs}, {outputs}]"
                raise BackendUnfit(f"a product of {shape} is wrong by {error:.1e}, {limit:.0e} is allowed")
            worst = max(worst, error)
    except (RuntimeError, AttributeError, NotImplementedError, ValueError, TypeError) as failure:
        # torch raises these for a missing or refused operation.
        log.exception("a rounding of the weights failed its trial", outputs=outputs, inputs=inputs)
        raise BackendUnfit(f"a product failed: {type(failure).__name__}: {str(failure)[:200]}") from failure
    return worst
