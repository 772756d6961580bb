"""Triton kernels over the rows of a batch. Sizes that are no multiples of a tile are masked.

Under TRITON_INTERPRET=1 (read by Triton when this module is imported) the kernels run on the CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_rows_kernel(
    x: tl.tensor,  # [T, WIDTH]
    out: tl.tensor,  # [T, WIDTH_OUT], contiguous
    scales: tl.tensor,  # float32 [T]
    x_stride: tl.tensor,
    largest: tl.tensor,
    WIDTH: tl.constexpr,
    WIDTH_OUT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Each row over a scale of its own, by which its furthest value becomes `largest`; zeros past its end. Grid (T,).

    A row of zeros has scale 1. An infinite value makes its row NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, TILE)
    furthest_C = tl.zeros([TILE], tl.float32)
    for start in range(0, WIDTH, TILE):
        x_C = tl.load(x + row * x_stride + start + c_C, mask=start + c_C < WIDTH, other=0.0).to(tl.float32)
        furthest_C = tl.maximum(furthest_C, tl.abs(x_C))
    scale = tl.max(furthest_C, axis=0) / largest
    scale = tl.where(scale == 0.0, 1.0, scale)
    tl.store(scales + row, scale)
    for start in range(0, WIDTH_OUT, TILE):
        x_C = tl.load(x + row * x_stride + start + c_C, mask=start + c_C < WIDTH, other=0.0).to(tl.float32)
        to_C = row * WIDTH_OUT + start + c_C
        tl.store(out + to_C, (x_C / scale).to(out.dtype.element_ty), mask=start + c_C < WIDTH_OUT)


@triton.jit(do_not_specialize=["num_rows"])  # see engine/gpu/kernels.py
def int4_rows_kernel(
    x: tl.tensor,  # [T, INPUTS], each 128 inputs in the order of the nibbles: see linears.in_nibble_order
    tiles: tl.tensor,  # int32 [OUTPUTS / 8, INPUTS / 128, 32, 4]: see linears.pack_tiles
    scales: tl.tensor,  # bfloat16 [INPUTS / GROUP, OUTPUTS, 2]: scale and zero
    out: tl.tensor,  # [T, OUTPUTS], contiguous
    num_rows: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_Y: tl.constexpr,
    TILE_T: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Rows by a matrix in 4-bit tiles, which is read once for every TILE_T rows. Grid (tiles of outputs, of rows).

    An output has 16 words for 128 inputs; the same nibble of each is a product of 16 inputs. The weights are the left
    operand, so that they go from registers to the tensor cores. Sums are float32; with WIDEN operands are as well.
    """
    COLUMNS: tl.constexpr = INPUTS // 128
    y_Y = tl.program_id(0) * TILE_Y + tl.arange(0, TILE_Y)
    t_T = tl.program_id(1).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    w_W = tl.arange(0, 16)
    in_Y1 = (y_Y < OUTPUTS)[:, None]
    in_1T = (t_T < num_rows)[None, :]
    word_YW = ((y_Y // 8).to(tl.int64) * (COLUMNS * 128) + y_Y % 8 * 16)[:, None] + w_W[None, :]
    sum_YT = tl.zeros([TILE_Y, TILE_T], tl.float32)
    for column in range(COLUMNS):
        words_YW = tl.load(tiles + word_YW + column * 128, mask=in_Y1, other=0)
        group_W = (column * 128 + w_W % 4 * 32) // GROUP
        from_YW = (group_W[None, :] * OUTPUTS + y_Y[:, None]) * 2
        scale_YW = tl.load(scales + from_YW, mask=in_Y1, other=0.0).to(tl.float32)
        zero_YW = tl.load(scales + from_YW + 1, mask=in_Y1, other=0.0).to(tl.float32)
        for place in tl.static_range(8):
            weight_YW = ((words_YW >> (4 * place)) & 15).to(tl.float32) - 8.0
            weight_YW = weight_YW * scale_YW + zero_YW
            x_WT = tl.load(x + t_T[None, :] * INPUTS + column * 128 + place * 16 + w_W[:, None], mask=in_1T, other=0.0)
            if WIDEN:
                x_WT = x_WT.to(tl.float32)
            sum_YT += tl.dot(weight_YW.to(x_WT.dtype), x_WT, input_precision="ieee")
    to_YT = t_T[None, :] * OUTPUTS + y_Y[:, None]
    tl.store(out + to_YT, sum_YT.to(out.dtype.element_ty), mask=in_Y1 & in_1T)
