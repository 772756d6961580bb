"""Matrices in the layouts of kernels.c. Shape suffixes: Y outputs, X inputs, P panels of 32 outputs."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch

PANEL = 32
SCALED = 64
"""Inputs that share a scale, for each output."""
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A weight [Y, X] as kernels.c reads it. `scales` [P, ceil(X / 64), 32] where `bits` is not 16."""

    panels: torch.Tensor
    scales: torch.Tensor | None
    bits: int
    outputs: int
    inputs: int


def pack(weight_YX: torch.Tensor, bits: int = 16) -> PackedMatrix:
    """Copy a bfloat16 matrix into panels, rounding it to whole numbers of `bits` times a scale if that is 8 or 4."""
    assert bits in (16, 8, 4), bits
    outputs, inputs = weight_YX.shape
    if bits == 16:
        panels, scales = _huge_copy(_panels(_padded(weight_YX, 2))), None
    else:
        whole_YX, scales = quantise(_padded(weight_YX, SCALED), bits)
        panels = _huge_copy(_nibbles(whole_YX) if bits == 4 else _panels(whole_YX))
    return PackedMatrix(panels=panels, scales=scales, bits=bits, outputs=outputs, inputs=inputs)


def quantise(weight_YX: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (int8 [Y, X] of `bits` bits, float32 scales [Y / 32, X / 64, 32]).

    8 bits: the largest of 64 weights becomes 127. 4 bits: the one of largest magnitude becomes -8, of which there is
    one more than of +7.
    """
    outputs, inputs = weight_YX.shape
    parts = weight_YX.float().view(outputs, inputs // SCALED, SCALED)
    if bits == 8:
        scales, least, most = parts.abs().amax(dim=-1) / 127, -127, 127
    else:
        furthest = parts.gather(-1, parts.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
        scales, least, most = furthest / -8, -8, 7
    scales[scales == 0] = 1.0
    whole = (parts / scales[..., None]).round_().clamp_(least, most).to(torch.int8)
    return whole.view(outputs, inputs), scales.view(outputs // PANEL, PANEL, -1).transpose(1, 2).contiguous()


def huge_pages(num_bytes: int) -> torch.Tensor:
    """Zeroed memory, uint8 [num_bytes], in pages of 2 MiB where the system gives them: weights are read from end to end
    at every step, and small pages cost a table walk every 4 KiB."""
    block = mmap.mmap(-1, num_bytes + _HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    first = -whole.data_ptr() % _HUGE_PAGE
    return whole[first : first + num_bytes]


def _padded(weight_YX: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zeros up to whole panels and to a multiple of inputs."""
    outputs, inputs = weight_YX.shape
    shape = (-(-outputs // PANEL) * PANEL, -(-inputs // multiple) * multiple)
    if shape == (outputs, inputs):
        return weight_YX
    padded = weight_YX.new_zeros(shape)
    padded[:outputs, :inputs] = weight_YX
    return padded


def _panels(weight_YX: torch.Tensor) -> torch.Tensor:
    """-> [P, X / 2, 32, 2]."""
    outputs, inputs = weight_YX.shape
    return weight_YX.view(outputs // PANEL, PANEL, inputs // 2, 2).permute(0, 2, 1, 3)


def _nibbles(whole_YX: torch.Tensor) -> torch.Tensor:
    """-> int16 [P, X / 8, 2, 16, 2]: four pairs of inputs in each word, the first lowest."""
    outputs, inputs = whole_YX.shape
    parts = (whole_YX.to(torch.int32) + 8).view(outputs // PANEL, 2, 16, inputs // 8, 4, 2)
    words = sum(parts[..., pair, :] << (4 * pair) for pair in range(4))
    assert isinstance(words, torch.Tensor)
    return words.to(torch.int16).permute(0, 3, 1, 2, 4)


def _huge_copy(tensor: torch.Tensor) -> torch.Tensor:
    target = huge_pages(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
    return target.copy_(tensor)
