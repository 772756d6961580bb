"""Attention of libraries that may be installed, as `PagedAttention`. Each maker raises ImportError or BackendUnfit.

None of them can run on a CPU: what the tests run is the choice among them, and our side of each call with a stand-in
for the library. That a library really computes what we think is seen at each start by `engine.gpu.admission`.

Shape suffixes as in engine/gpu/attention.py.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.gpu.attention import BackendUnfit, GatherVarlen, VarlenPlan, starts_of
from engine.kv_pool import KvPool
from engine.staging import to_device
from engine.types import SequenceSlice

FLASH2_PAGE_MULTIPLE = 256
FLASHINFER_WORKSPACE_BYTES = 256 << 20


def _need_half(pool: KvPool, name: str) -> None:
    if pool.device.type != "cuda":
        raise BackendUnfit(f"{name} needs a CUDA device, not {pool.device}")
    if pool.dtype not in (torch.float16, torch.bfloat16):
        raise BackendUnfit(f"{name} computes in float16 and bfloat16, not in {pool.spec.dtype}")


def torch_varlen(pool: KvPool, num_heads: int) -> GatherVarlen:
    """torch's own flash attention for uneven lengths (torch.nn.attention.varlen, torch 2.10 and later)."""
    _need_half(pool, "torch's varlen attention")
    from torch.nn.attention.varlen import varlen_attn

    group = num_heads // pool.spec.num_kv_heads
    names = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    repeats = 1
    if group > 1 and "enable_gqa" in names:
        options["enable_gqa"] = True
    elif group > 1:
        # This version of torch wants as many KV heads as query heads.
        repeats = group

    def attend(q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        if repeats > 1:
            k_CKD, v_CKD = k_CKD.repeat_interleave(repeats, dim=1), v_CKD.repeat_interleave(repeats, dim=1)
        out = varlen_attn(
            q_RHD,
            k_CKD,
            v_CKD,
            plan.query_starts,
            plan.context_starts,
            plan.queries_max,
            plan.context_max,
            **options,
        )
        assert isinstance(out, torch.Tensor), "the log-sum-exp was not asked for"
        return out

    return GatherVarlen(pool, attend)


def flash_varlen(module: str) -> Callable[[KvPool, int], GatherVarlen]:
    """`flash_attn_varlen_func` of a flash-attention package: 2 in `flash_attn`, 3 in `flash_attn_interface`, or
    `fa3_fwd_interface`, the build of 3 on PyPI, which has no general paged mode."""

    def make(pool: KvPool, num_heads: int) -> GatherVarlen:
        del num_heads
        _need_half(pool, module)
        function = importlib.import_module(module).flash_attn_varlen_func
        names = inspect.signature(function).parameters

        def attend(q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
            arguments: dict[str, Any] = {
                "cu_seqlens_q": plan.query_starts,
                "cu_seqlens_k": plan.context_starts,
                "max_seqlen_q": plan.queries_max,
                "max_seqlen_k": plan.context_max,
                "causal": True,
            }
            assert arguments.keys() <= names.keys(), (module, sorted(arguments.keys() - names.keys()))
            out = function(q_RHD, k_CKD, v_CKD, **arguments)
            # Some versions of 3 give the log-sum-exp as well.
            first: torch.Tensor = out[0] if isinstance(out, tuple) else out
            return first

        return GatherVarlen(pool, attend)

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlan:
    tables_BM: torch.Tensor
    contexts_B: torch.Tensor
    query_starts: torch.Tensor
    context_starts: torch.Tensor
    queries_max: int
    context_max: int


class FlashPaged:
    """flash-attention over the region's own pages, which it sees as [N, S, K, D] with strides."""

    def __init__(self, pool: KvPool, call: Callable[..., torch.Tensor]) -> None:
        self._pool = pool
        self._call = call

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> PagedPlan:
        size, device = self._pool.spec.block_size, self._pool.device
        tables_BM = np.zeros((len(slices), max(-(-s.stop // size) for s in slices)), dtype=np.int32)
        for row, s in enumerate(slices):
            needed = -(-s.stop // size)
            tables_BM[row, :needed] = s.block_table[:needed]
        return PagedPlan(
            tables_BM=to_device(tables_BM, device),
            contexts_B=to_device(np.array([s.stop for s in slices], dtype=np.int32), device),
            query_starts=starts_of([s.stop - s.start for s in slices], device),
            context_starts=starts_of([s.stop for s in slices], device),
            queries_max=max(s.stop - s.start for s in slices),
            context_max=max(s.stop for s in slices),
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        kv_N2KSD = self._pool.kv_LN2KSD[layer]
        k_NSKD, v_NSKD = kv_N2KSD[:, 0].transpose(1, 2), kv_N2KSD[:, 1].transpose(1, 2)
        return self._call(q_RHD, k_NSKD, v_NSKD, plan)


def flash2_paged(pool: KvPool, num_heads: int) -> FlashPaged:
    """flash-attn 2 with block tables."""
    del num_heads
    _need_half(pool, "flash_attn")
    if pool.spec.block_size % FLASH2_PAGE_MULTIPLE:
        raise BackendUnfit(
            f"flash-attention 2 takes pages of a multiple of {FLASH2_PAGE_MULTIPLE} tokens, "
            f"not {pool.spec.block_size}: set engine.block_size, or use another backend"
        )
    function = importlib.import_module("flash_attn").flash_attn_varlen_func

    def call(q_RHD: torch.Tensor, k_NSKD: torch.Tensor, v_NSKD: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        out: torch.Tensor = function(
            q_RHD,
            k_NSKD,
            v_NSKD,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.context_starts,
            max_seqlen_q=plan.queries_max,
            max_seqlen_k=plan.context_max,
            causal=True,
            block_table=plan.tables_BM,
        )
        return out

    return FlashPaged(pool, call)


def flash3_paged(pool: KvPool, num_heads: int) -> FlashPaged:
    """flash-attn 3 (`flash_attn_interface`) with a page table."""
    del num_heads
    _need_half(pool, "flash_attn_interface")
    function = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache

    def call(q_RHD: torch.Tensor, k_NSKD: torch.Tensor, v_NSKD: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        out = function(
            q_RHD,
            k_NSKD,
            v_NSKD,
            cache_seqlens=plan.contexts_B,
            page_table=plan.tables_BM,
            cu_seqlens_q=plan.query_starts,
            max_seqlen_q=plan.queries_max,
            causal=True,
        )
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return FlashPaged(pool, call)


class FlashInferPaged:
    """FlashInfer's paged prefill over head-major pages [N, 2, K, S, D]: the region as it lies."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        """Raises ImportError or BackendUnfit."""
        _need_half(pool, "FlashInfer")
        flashinfer = importlib.import_module("flashinfer")
        workspace_U8 = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._pool = pool
        self._num_heads = num_heads
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_U8, kv_layout="HND")

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> None:
        """The plan is kept in the wrapper: one step at a time."""
        spec, device = self._pool.spec, self._pool.device
        used = [-(-s.stop // spec.block_size) for s in slices]
        blocks = np.concatenate([np.asarray(s.block_table[:n], np.int32) for s, n in zip(slices, used, strict=True)])
        self._wrapper.plan(
            starts_of([s.stop - s.start for s in slices], device),
            starts_of(used, device),
            to_device(blocks, device),
            to_device(np.array([(s.stop - 1) % spec.block_size + 1 for s in slices], dtype=np.int32), device),
            self._num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            q_data_type=self._pool.dtype,
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: None) -> torch.Tensor:
        del plan
        out: torch.Tensor = self._wrapper.run(q_RHD, self._pool.kv_LN2KSD[layer])
        return out
