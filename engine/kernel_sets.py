"""Which instructions the compute kernels use: `engine.kernels`, and what a node registers."""

from __future__ import annotations

from enum import Enum


class KernelSet(Enum):
    """Sets of compute kernels for bfloat16 weights. Two nodes of one set compute the same bits from the same tokens."""

    AUTO = "auto"  # the best one that this CPU has
    AVX2 = "avx2"  # AVX2, FMA and F16C
    AVX512 = "avx512"  # AVX-512 F, BW, DQ and VL, without BF16
    AVX512BF16 = "avx512bf16"  # with BF16 too
    AMX = "amx"  # the same, and products by tiles
    NEON = "neon"  # aarch64
    NEONBF16 = "neonbf16"  # aarch64 with BF16
    TORCH = "torch"  # PyTorch's operations, in float32
