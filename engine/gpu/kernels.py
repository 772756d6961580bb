"""Triton kernels over one layer of the paged region, whose records are [K|V][kv_head][slot][head_dim].

Kernels count elements from the start of the layer in 64 bits: a region may hold more than 2**31 elements. Sizes that
are no powers of two are padded to the next one and masked. A block id below 0 means "no block": nothing is read or
written there. Slots past the end of a context are never read, so they may hold anything, even NaN.

Counts that differ from step to step are not specialised: the compiler would make variants for 1 and for multiples of 16
while a request waits. Under TRITON_INTERPRET=1 (read by Triton when this module is imported) the kernels run on the
CPU. The functions that launch the kernels follow below them.

Shape suffixes as in engine/types.py; P splits of one context, G query heads that share one KV head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kv_pool import KvPool, to_device
from engine.types import SequenceSlice


@triton.jit(do_not_specialize=["num_tokens"])
def rotate_store_kernel(
    q: tl.tensor,  # [T, H, D]
    k: tl.tensor,  # [T, K, D]
    v: tl.tensor,  # [T, K, D]
    q_out: tl.tensor,  # [T, H, D], contiguous
    cos: tl.tensor,  # [T, D/2], contiguous
    sin: tl.tensor,  # [T, D/2], contiguous
    layer: tl.tensor,  # the layer's first element
    blocks: tl.tensor,  # int64 [T]
    slots: tl.tensor,  # int64 [T]
    num_tokens: tl.tensor,
    q_stride: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TILE_T: tl.constexpr,
) -> None:
    """Turn queries and keys by their rotary angles, and store keys and values in their slots, in one pass.

    Grid (tiles of tokens, H + K). Angles are applied in float32 whatever the type of the tensors.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.program_id(1)
    t_T = tl.program_id(0).to(tl.int64) * TILE_T + tl.arange(0, TILE_T)
    d_D = tl.arange(0, HALF_PADDED)
    in_T = t_T < num_tokens
    in_TD = in_T[:, None] & (d_D < HALF)[None, :]
    angle_TD = t_T[:, None] * HALF + d_D[None, :]
    cos_TD = tl.load(cos + angle_TD, mask=in_TD, other=0.0).to(tl.float32)
    sin_TD = tl.load(sin + angle_TD, mask=in_TD, other=0.0).to(tl.float32)
    if head < NUM_HEADS:
        from_TD = t_T[:, None] * q_stride + head * HEAD_DIM + d_D[None, :]
        first_TD = tl.load(q + from_TD, mask=in_TD, other=0.0).to(tl.float32)
        second_TD = tl.load(q + from_TD + HALF, mask=in_TD, other=0.0).to(tl.float32)
        to_TD = (t_T[:, None] * NUM_HEADS + head) * HEAD_DIM + d_D[None, :]
        tl.store(q_out + to_TD, (first_TD * cos_TD - second_TD * sin_TD).to(q_out.dtype.element_ty), mask=in_TD)
        tl.store(q_out + to_TD + HALF, (second_TD * cos_TD + first_TD * sin_TD).to(q_out.dtype.element_ty), mask=in_TD)
        return
    head -= NUM_HEADS

    block_T = tl.load(blocks + t_T, mask=in_T, other=-1)
    slot_T = tl.load(slots + t_T, mask=in_T, other=0)
    in_TD &= (block_T >= 0)[:, None]
    row_T = block_T * (2 * NUM_KV_HEADS * BLOCK_SIZE) + head * BLOCK_SIZE + slot_T
    to_TD = row_T[:, None] * HEAD_DIM + d_D[None, :]

    from_TD = t_T[:, None] * k_stride + head * HEAD_DIM + d_D[None, :]
    first_TD = tl.load(k + from_TD, mask=in_TD, other=0.0)
    second_TD = tl.load(k + from_TD + HALF, mask=in_TD, other=0.0)
    x_TD = first_TD.to(tl.float32)
    y_TD = second_TD.to(tl.float32)
    first_TD = (x_TD * cos_TD - y_TD * sin_TD).to(layer.dtype.element_ty)
    second_TD = (y_TD * cos_TD + x_TD * sin_TD).to(layer.dtype.element_ty)
    tl.store(layer + to_TD, first_TD, mask=in_TD)
    tl.store(layer + to_TD + HALF, second_TD, mask=in_TD)

    to_TD += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    from_TD = t_T[:, None] * v_stride + head * HEAD_DIM + d_D[None, :]
    tl.store(layer + to_TD, tl.load(v + from_TD, mask=in_TD, other=0.0), mask=in_TD)
    tl.store(layer + to_TD + HALF, tl.load(v + from_TD + HALF, mask=in_TD, other=0.0), mask=in_TD)


@triton.jit
def gather_kernel(
    layer: tl.tensor,  # the layer's first element
    blocks: tl.tensor,  # int64 [n]: the blocks of all contexts, one after another
    first_rows: tl.tensor,  # int64 [n]: which row of the outputs the block's first slot goes to
    num_slots: tl.tensor,  # int64 [n]: how many of its slots belong to the context
    k_out: tl.tensor,  # [C, K, D], contiguous
    v_out: tl.tensor,  # [C, K, D], contiguous
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """Copy the contexts of a step out of the region, token-major. Grid (n, K)."""
    at = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    block = tl.load(blocks + at)
    s_S = tl.arange(0, SLOTS_PADDED)
    d_D = tl.arange(0, DIM_PADDED)
    in_SD = (s_S < tl.load(num_slots + at))[:, None] & (d_D < HEAD_DIM)[None, :]
    from_S = block * (2 * NUM_KV_HEADS * BLOCK_SIZE) + head * BLOCK_SIZE + s_S
    from_SD = from_S[:, None] * HEAD_DIM + d_D[None, :]
    to_S = (tl.load(first_rows + at) + s_S) * NUM_KV_HEADS + head
    to_SD = to_S[:, None] * HEAD_DIM + d_D[None, :]
    tl.store(k_out + to_SD, tl.load(layer + from_SD, mask=in_SD), mask=in_SD)
    from_SD += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(v_out + to_SD, tl.load(layer + from_SD, mask=in_SD), mask=in_SD)


@triton.jit(do_not_specialize=["table_columns", "num_splits", "split_tokens_min"])
def decode_split_kernel(
    q: tl.tensor,  # [B, H, D], contiguous
    layer: tl.tensor,  # the layer's first element
    tables: tl.tensor,  # int32 [B, columns]: block ids
    contexts: tl.tensor,  # int32 [B]: tokens of each context, 0 for a row of padding
    out_part: tl.tensor,  # float32 [B, H, P, D]: each split's weighted sum of values, over its own weights' sum
    max_part: tl.tensor,  # float32 [B, H, P]: the split's largest score, times log2(e)
    sum_part: tl.tensor,  # float32 [B, H, P]: the sum of the split's weights; 0 where the split is empty
    scale_log2: tl.tensor,  # head_dim**-0.5 * log2(e)
    table_columns: tl.tensor,
    num_splits: tl.tensor,
    split_tokens_min: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    TILE_C: tl.constexpr,
    FACTOR_TYPE: tl.constexpr,
) -> None:
    """One query token of each sequence over one part of its context: flash-decoding (Dao et al. 2023). Grid (B, K, P).

    The query heads of a group are one matrix, so that each K and V is read once. Scores and sums are float32, softmax
    is online (Milakov & Gimelshein 2018). The factors of products are of FACTOR_TYPE.
    """
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + row)
    split_tokens = tl.cdiv(tl.maximum(tl.cdiv(context, num_splits), split_tokens_min), TILE_C) * TILE_C
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, context)

    g_G = tl.arange(0, GROUP_PADDED)
    d_D = tl.arange(0, DIM_PADDED)
    in_G = g_G < GROUP
    in_GD = in_G[:, None] & (d_D < HEAD_DIM)[None, :]
    head_G = row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + g_G
    part_G = head_G * num_splits + split
    if first >= last:
        tl.store(sum_part + part_G, tl.zeros([GROUP_PADDED], tl.float32), mask=in_G)
        return

    q_GD = tl.load(q + head_G[:, None] * HEAD_DIM + d_D[None, :], mask=in_GD, other=0.0).to(FACTOR_TYPE)
    max_G = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    sum_G = tl.zeros([GROUP_PADDED], tl.float32)
    out_GD = tl.zeros([GROUP_PADDED, DIM_PADDED], tl.float32)
    for start in range(first, last, TILE_C):
        c_C = start + tl.arange(0, TILE_C)
        in_C = c_C < last
        block_C = tl.load(tables + row * table_columns + c_C // BLOCK_SIZE, mask=in_C, other=0).to(tl.int64)
        from_C = block_C * (2 * NUM_KV_HEADS * BLOCK_SIZE) + kv_head * BLOCK_SIZE + c_C % BLOCK_SIZE
        from_CD = from_C[:, None] * HEAD_DIM + d_D[None, :]
        in_CD = in_C[:, None] & (d_D < HEAD_DIM)[None, :]
        k_CD = tl.load(layer + from_CD, mask=in_CD, other=0.0).to(FACTOR_TYPE)
        v_CD = tl.load(layer + from_CD + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=in_CD, other=0.0).to(FACTOR_TYPE)
        score_GC = tl.dot(q_GD, tl.trans(k_CD), input_precision="ieee") * scale_log2
        score_GC = tl.where(in_C[None, :], score_GC, float("-inf"))
        new_max_G = tl.maximum(max_G, tl.max(score_GC, axis=1))
        weight_GC = tl.exp2(score_GC - new_max_G[:, None])
        shrink_G = tl.exp2(max_G - new_max_G)
        sum_G = sum_G * shrink_G + tl.sum(weight_GC, axis=1)
        out_GD = out_GD * shrink_G[:, None] + tl.dot(weight_GC.to(FACTOR_TYPE), v_CD, input_precision="ieee")
        max_G = new_max_G
    tl.store(max_part + part_G, max_G, mask=in_G)
    tl.store(sum_part + part_G, sum_G, mask=in_G)
    tl.store(out_part + part_G[:, None] * HEAD_DIM + d_D[None, :], out_GD / sum_G[:, None], mask=in_GD)


@triton.jit(do_not_specialize=["num_splits"])
def decode_combine_kernel(
    out_part: tl.tensor,  # see decode_split_kernel
    max_part: tl.tensor,
    sum_part: tl.tensor,
    out: tl.tensor,  # [B, H, D], contiguous
    num_splits: tl.tensor,
    SPLITS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
) -> None:
    """Join the splits of one head of one sequence. Grid (B * H,). A row without a context becomes zeros."""
    head = tl.program_id(0).to(tl.int64)
    p_P = tl.arange(0, SPLITS_PADDED)
    d_D = tl.arange(0, DIM_PADDED)
    part_P = head * num_splits + p_P
    sum_P = tl.load(sum_part + part_P, mask=p_P < num_splits, other=0.0)
    # An empty split has written its sum alone.
    used_P = sum_P > 0.0
    max_P = tl.load(max_part + part_P, mask=used_P, other=float("-inf"))
    highest = tl.max(max_P, axis=0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight_P = sum_P * tl.exp2(max_P - highest)
    in_PD = used_P[:, None] & (d_D < HEAD_DIM)[None, :]
    out_PD = tl.load(out_part + part_P[:, None] * HEAD_DIM + d_D[None, :], mask=in_PD, other=0.0)
    total = tl.sum(weight_P, axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    out_D = tl.sum(out_PD * weight_P[:, None], axis=0) / total
    tl.store(out + head * HEAD_DIM + d_D, out_D.to(out.dtype.element_ty), mask=d_D < HEAD_DIM)


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
    """Each row over its own scale, so that its largest magnitude becomes `largest`; zeros past its end. Grid (T,).

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
    FACTOR_TYPE: tl.constexpr,
) -> None:
    """Rows times a matrix in 4-bit tiles, which is read once for every TILE_T rows. Grid (tiles of outputs, of rows).

    An output has 16 words for 128 inputs; one nibble of each makes a product of 16 inputs. The weights are the left
    operand, so that they go from registers to the tensor cores. Sums are float32, the factors of FACTOR_TYPE.
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
            sum_YT += tl.dot(weight_YW.to(FACTOR_TYPE), x_WT.to(FACTOR_TYPE), input_precision="ieee")
    to_YT = t_T[None, :] * OUTPUTS + y_Y[:, None]
    tl.store(out + to_YT, sum_YT.to(out.dtype.element_ty), mask=in_Y1 & in_1T)


STORE_TILE_TOKENS = 16
DECODE_TILE_TOKENS = 64
SPLIT_TOKENS_MIN = 128
"""A split of fewer tokens costs more to join than parallel reading saves."""
SPLITS_MAX = 32
_DOT_ROWS_MIN = 16
"""The least rows that `tl.dot` takes."""


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


def factor_type(dtype: torch.dtype) -> tl.dtype:
    """The type in which kernels multiply numbers of `dtype`. The interpreter cannot multiply bfloat16."""
    return tl.float32 if interpreted() else getattr(tl, str(dtype).removeprefix("torch."))


def rotate_and_store(
    pool: KvPool,
    layer: int,
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    blocks_T: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """Rotary embedding of queries and keys, keys and values into the pool -> the queries turned, [T, H, D].

    `angles` are the cosines and sines of `rotary_angles`. Tokens whose block is negative are not stored. Inputs are
    only read; the last two dimensions of each must be contiguous.
    """
    spec = pool.spec
    num_tokens, num_heads = q_THD.shape[:2]
    assert k_TKD.shape == v_TKD.shape == (num_tokens, spec.num_kv_heads, spec.head_dim), (k_TKD.shape, v_TKD.shape)
    assert k_TKD.dtype == v_TKD.dtype == pool.dtype, (k_TKD.dtype, v_TKD.dtype, pool.dtype)
    assert blocks_T.dtype == slots_T.dtype == torch.int64, (blocks_T.dtype, slots_T.dtype)
    assert spec.head_dim % 2 == 0, spec.head_dim
    cos, sin = (angle.reshape(num_tokens, spec.head_dim // 2).contiguous() for angle in angles)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    for tensor in (q_THD, k_TKD, v_TKD):
        assert tensor.stride()[1:] == (spec.head_dim, 1), (tensor.shape, tensor.stride())
    if num_tokens == 0:
        return out_THD
    grid = (triton.cdiv(num_tokens, STORE_TILE_TOKENS), num_heads + spec.num_kv_heads)
    rotate_store_kernel[grid](
        q_THD,
        k_TKD,
        v_TKD,
        out_THD,
        cos,
        sin,
        pool.kv_LN2KSD[layer],
        blocks_T,
        slots_T,
        num_tokens,
        q_THD.stride(0),
        k_TKD.stride(0),
        v_TKD.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=spec.num_kv_heads,
        BLOCK_SIZE=spec.block_size,
        HEAD_DIM=spec.head_dim,
        HALF_PADDED=triton.next_power_of_2(spec.head_dim // 2),
        TILE_T=STORE_TILE_TOKENS,
    )
    return out_THD


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """The slots of the region with the contexts of a step; int64 [n] each, on the pool's device."""

    blocks_n: torch.Tensor
    first_rows_n: torch.Tensor
    num_slots_n: torch.Tensor
    num_rows: int


def plan_gather(pool: KvPool, slices: Sequence[SequenceSlice]) -> GatherPlan:
    """The whole context of each slice, in order."""
    size = pool.spec.block_size
    blocks, rows, slots, first_row = [], [], [], 0
    for s in slices:
        starts_n = np.arange(0, s.stop, size, dtype=np.int64)
        blocks.append(np.asarray(s.block_table[: len(starts_n)], dtype=np.int64))
        rows.append(first_row + starts_n)
        slots.append(np.minimum(s.stop - starts_n, size))
        first_row += s.stop
    return GatherPlan(
        blocks_n=to_device(np.concatenate(blocks), pool.device),
        first_rows_n=to_device(np.concatenate(rows), pool.device),
        num_slots_n=to_device(np.concatenate(slots), pool.device),
        num_rows=first_row,
    )


def gather(pool: KvPool, layer: int, plan: GatherPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the contexts, token after token -> two new tensors [C, K, D]."""
    spec = pool.spec
    shape = (plan.num_rows, spec.num_kv_heads, spec.head_dim)
    k_CKD = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    v_CKD = torch.empty_like(k_CKD)
    gather_kernel[(len(plan.blocks_n), spec.num_kv_heads)](
        pool.kv_LN2KSD[layer],
        plan.blocks_n,
        plan.first_rows_n,
        plan.num_slots_n,
        k_CKD,
        v_CKD,
        NUM_KV_HEADS=spec.num_kv_heads,
        BLOCK_SIZE=spec.block_size,
        SLOTS_PADDED=triton.next_power_of_2(spec.block_size),
        HEAD_DIM=spec.head_dim,
        DIM_PADDED=triton.next_power_of_2(spec.head_dim),
    )
    return k_CKD, v_CKD


def choose_splits(rows: int, kv_heads: int, context_max: int, processors: int) -> int:
    """How many parts each context is cut into: enough for two programs on each processor, but none tiny.

    `context_max` bounds all contexts of the launch: a captured graph is launched again with longer ones. Long contexts
    get at least eight, so that one long sequence among short ones does not keep a single processor busy.
    """
    assert min(rows, kv_heads, context_max, processors) > 0, (rows, kv_heads, context_max, processors)
    wanted = max(math.ceil(2 * processors / (rows * kv_heads)), 8)
    return max(1, min(wanted, math.ceil(context_max / SPLIT_TOKENS_MIN), SPLITS_MAX))


def decode(
    pool: KvPool,
    layer: int,
    q_BHD: torch.Tensor,
    tables_BM: torch.Tensor,
    contexts_B: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """Attention of one query token of each sequence over its own context -> [B, H, D].

    `tables_BM`: int32 block ids, enough for each row's context. `contexts_B`: int32 lengths including the query token,
    whose K and V are already stored; 0 for a row of padding, whose output is zeros.
    """
    spec = pool.spec
    rows, num_heads, head_dim = q_BHD.shape
    assert head_dim == spec.head_dim and num_heads % spec.num_kv_heads == 0, (q_BHD.shape, spec)
    assert q_BHD.dtype == pool.dtype, (q_BHD.dtype, pool.dtype)
    assert tables_BM.dtype == contexts_B.dtype == torch.int32, (tables_BM.dtype, contexts_B.dtype)
    assert tables_BM.is_contiguous() and tables_BM.shape[0] == len(contexts_B) == rows, (tables_BM.shape, rows)
    assert 1 <= num_splits <= SPLITS_MAX, num_splits
    q_BHD = q_BHD.contiguous()
    group = num_heads // spec.num_kv_heads
    device = q_BHD.device
    out_part = torch.empty((rows, num_heads, num_splits, head_dim), dtype=torch.float32, device=device)
    max_part = torch.empty((rows, num_heads, num_splits), dtype=torch.float32, device=device)
    sum_part = torch.empty_like(max_part)
    dim_padded = triton.next_power_of_2(head_dim)
    decode_split_kernel[(rows, spec.num_kv_heads, num_splits)](
        q_BHD,
        pool.kv_LN2KSD[layer],
        tables_BM,
        contexts_B,
        out_part,
        max_part,
        sum_part,
        head_dim**-0.5 * math.log2(math.e),
        tables_BM.shape[1],
        num_splits,
        SPLIT_TOKENS_MIN,
        GROUP=group,
        GROUP_PADDED=max(_DOT_ROWS_MIN, triton.next_power_of_2(group)),
        NUM_KV_HEADS=spec.num_kv_heads,
        BLOCK_SIZE=spec.block_size,
        HEAD_DIM=head_dim,
        DIM_PADDED=max(_DOT_ROWS_MIN, dim_padded),
        TILE_C=DECODE_TILE_TOKENS,
        FACTOR_TYPE=factor_type(pool.dtype),
    )
    out_BHD = torch.empty_like(q_BHD)
    decode_combine_kernel[(rows * num_heads,)](
        out_part,
        max_part,
        sum_part,
        out_BHD,
        num_splits,
        SPLITS_PADDED=triton.next_power_of_2(num_splits),
        HEAD_DIM=head_dim,
        DIM_PADDED=dim_padded,
    )
    return out_BHD
