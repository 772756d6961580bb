"""The Triton kernels as functions on tensors: shapes checked, grids and tile sizes chosen.

Works wherever the kernels do: on a CUDA device, and on the CPU under TRITON_INTERPRET=1. Shape suffixes as in
engine/gpu/kernels.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton

from engine.gpu import kernels
from engine.kv_pool import KvPool, to_device
from engine.types import Batch

STORE_TILE_TOKENS = 16
DECODE_TILE_TOKENS = 64
SPLIT_TOKENS_MIN = 128
"""A split of fewer tokens costs more in joining than its parallel reading saves."""
SPLITS_MAX = 32
_DOT_ROWS_MIN = 16
"""`tl.dot` takes no fewer rows."""


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return bool(triton.knobs.runtime.interpret)


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

    `angles` are the cosines and sines of `rotary_angles`. Tokens whose block is negative are not stored. Reads its
    inputs only; the last two dimensions of each must be contiguous.
    """
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    _store(pool, layer, q_THD, k_TKD, v_TKD, out_THD, angles, blocks_T, slots_T)
    return out_THD


def store(
    pool: KvPool,
    layer: int,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    blocks_T: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """Keys and values into their slots, as `KvPool.store`, in one kernel. Tokens whose block is negative are left."""
    _store(pool, layer, None, k_TKD, v_TKD, k_TKD, None, blocks_T, slots_T)


def _store(
    pool: KvPool,
    layer: int,
    q_THD: torch.Tensor | None,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    out_THD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    blocks_T: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    spec = pool.spec
    num_tokens = k_TKD.shape[0]
    assert k_TKD.shape == v_TKD.shape == (num_tokens, spec.num_kv_heads, spec.head_dim), (k_TKD.shape, v_TKD.shape)
    assert k_TKD.dtype == v_TKD.dtype == pool.dtype, (k_TKD.dtype, v_TKD.dtype, pool.dtype)
    assert blocks_T.dtype == slots_T.dtype == torch.int64, (blocks_T.dtype, slots_T.dtype)
    assert spec.head_dim % 2 == 0, spec.head_dim
    num_heads = 0
    if q_THD is not None:
        assert angles is not None
        num_heads = q_THD.shape[1]
        cos, sin = (angle.reshape(num_tokens, spec.head_dim // 2).contiguous() for angle in angles)
    else:
        q_THD, cos, sin = k_TKD, k_TKD, k_TKD
    for tensor in (q_THD, k_TKD, v_TKD):
        assert tensor.stride()[1:] == (spec.head_dim, 1), (tensor.shape, tensor.stride())
    if num_tokens == 0:
        return
    grid = (triton.cdiv(num_tokens, STORE_TILE_TOKENS), num_heads + spec.num_kv_heads)
    kernels.rotate_store_kernel[grid](
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
        ROTATE=angles is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """Which slots of the region make up the contexts of a step; int64 [n] each, on the pool's device."""

    blocks_n: torch.Tensor
    first_rows_n: torch.Tensor
    num_slots_n: torch.Tensor
    num_rows: int


def plan_gather(pool: KvPool, batch: Batch) -> GatherPlan:
    """The whole context of each slice, in batch order."""
    size = pool.spec.block_size
    blocks, rows, slots, first_row = [], [], [], 0
    for s in batch.slices:
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
    """K and V of the contexts, token after token -> two of [C, K, D], which the caller may change."""
    spec = pool.spec
    shape = (plan.num_rows, spec.num_kv_heads, spec.head_dim)
    k_CKD = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    v_CKD = torch.empty_like(k_CKD)
    kernels.gather_kernel[(len(plan.blocks_n), spec.num_kv_heads)](
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
    """How many parts each context is cut into: enough that two programs run on each processor, none of them tiny.

    `context_max` bounds all contexts that the launch will see: a captured graph is launched again with longer ones.
    Eight for long contexts in any case, or one long sequence among short ones would keep one processor busy alone.
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

    `tables_BM` are block ids, int32, at least as many of each row as its context needs; `contexts_B` int32, the query
    token counted (its K and V are stored already), 0 for a row of padding, whose output is zeros.
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
    kernels.decode_split_kernel[(rows, spec.num_kv_heads, num_splits)](
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
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        WIDEN=pool.dtype == torch.float32 or interpreted(),
    )
    out_BHD = torch.empty_like(q_BHD)
    kernels.decode_combine_kernel[(rows * num_heads,)](
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
