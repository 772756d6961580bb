"""Attention on a GPU: one backend for slices of one token (decode), one for longer ones (prefill), chosen apart.

Shape suffixes as in engine/attention.py; R query rows of the slices of one part, M columns of the block tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention import AttentionMetadata, TorchAttention
from engine.gpu import paged
from engine.kv_pool import KvPool
from engine.staging import to_device
from engine.types import Batch, SequenceSlice


class BackendUnfit(Exception):
    """A backend cannot serve this shape, type or device; the text says what it would need."""


class PagedAttention(Protocol):
    """Attention of some slices over the pool. Made for one pool; used by the engine thread only."""

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> Any:
        """Once per step: what `attend` needs in every layer."""
        ...

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: Any) -> torch.Tensor:
        """Each query over its sequence up to and including itself -> [R, H, D]. K and V of the step are stored."""
        ...


class TorchPaged:
    """The reference, whatever the device: gathers each sequence and calls torch's own attention."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        del num_heads
        self._attention = TorchAttention(pool)

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> AttentionMetadata:
        return self._attention.prepare(Batch(slices=slices))

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: AttentionMetadata) -> torch.Tensor:
        return self._attention.attend(layer, q_RHD, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Block tables and context lengths of slices of one token, int32, on the pool's device."""

    tables_BM: torch.Tensor
    contexts_B: torch.Tensor
    num_splits: int


class TritonDecode:
    """Our split-KV kernel over the region as it lies: `paged.decode`. Any block size, head dimension and type."""

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        """Raises BackendUnfit."""
        if num_heads % pool.spec.num_kv_heads:
            raise BackendUnfit(f"{num_heads} query heads do not share {pool.spec.num_kv_heads} KV heads evenly")
        if pool.device.type != "cuda" and not paged.interpreted():
            raise BackendUnfit(f"Triton has no kernels for {pool.device}: it needs a CUDA device")
        self._pool = pool
        self._processors = processors(pool.device)

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> DecodePlan:
        assert all(s.stop - s.start == 1 for s in slices), "decode takes one token of each sequence"
        size = self._pool.spec.block_size
        columns = max(-(-s.stop // size) for s in slices)
        tables_BM = np.zeros((len(slices), columns), dtype=np.int32)
        for row, s in enumerate(slices):
            needed = -(-s.stop // size)
            tables_BM[row, :needed] = s.block_table[:needed]
        contexts_B = np.array([s.stop for s in slices], dtype=np.int32)
        device = self._pool.device
        return DecodePlan(
            tables_BM=to_device(tables_BM, device),
            contexts_B=to_device(contexts_B, device),
            num_splits=self.num_splits(len(slices), int(contexts_B.max())),
        )

    def num_splits(self, rows: int, context_max: int) -> int:
        """For launches with so many rows, none of which has a longer context."""
        return paged.choose_splits(rows, self._pool.spec.num_kv_heads, context_max, self._processors)

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
        return paged.decode(self._pool, layer, q_RHD, plan.tables_BM, plan.contexts_B, plan.num_splits)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors; 1 where there are none."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenPlan:
    """Contexts to gather, and where each sequence's queries and keys begin (int32 [sequences + 1])."""

    contexts: paged.GatherPlan
    query_starts: torch.Tensor
    context_starts: torch.Tensor
    queries_max: int
    context_max: int


class Varlen(Protocol):
    """Causal attention of sequences one after another; the last query of each sees its last key."""

    def __call__(
        self, q_RHD: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor, plan: VarlenPlan
    ) -> torch.Tensor: ...


class GatherVarlen:
    """Copies the contexts of the chunk together, once in each layer, and gives them to a kernel for uneven lengths.

    The copy moves each K and V twice where the attention of a chunk of some hundred tokens reads them that often from
    caches: it is small beside it, and free of any rule about pages.
    """

    def __init__(self, pool: KvPool, varlen: Varlen) -> None:
        self._pool = pool
        self._varlen = varlen

    def prepare(self, slices: tuple[SequenceSlice, ...]) -> VarlenPlan:
        return VarlenPlan(
            contexts=paged.plan_gather(self._pool, Batch(slices=slices)),
            query_starts=starts_of([s.stop - s.start for s in slices], self._pool.device),
            context_starts=starts_of([s.stop for s in slices], self._pool.device),
            queries_max=max(s.stop - s.start for s in slices),
            context_max=max(s.stop for s in slices),
        )

    def attend(self, layer: int, q_RHD: torch.Tensor, plan: VarlenPlan) -> torch.Tensor:
        k_CKD, v_CKD = paged.gather(self._pool, layer, plan.contexts)
        return self._varlen(q_RHD, k_CKD, v_CKD, plan)


def starts_of(lengths: list[int], device: torch.device) -> torch.Tensor:
    """0 and the running sums -> int32 [sequences + 1]."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    return to_device(starts, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepPlan:
    decode: Any
    prefill: Any
    decode_rows_R: torch.Tensor | None
    """Where the decode queries are in the batch; None where they are the first ones, in order."""
    prefill_rows_R: torch.Tensor | None
    num_decode: int
    num_prefill: int
    """Slices of either part."""


class GpuAttention:
    """An `AttentionBackend` made of two: slices of one token go to `decode`, the others to `prefill`."""

    def __init__(self, pool: KvPool, *, prefill: PagedAttention, decode: PagedAttention) -> None:
        self._pool = pool
        self.prefill = prefill
        self.decode = decode

    def prepare(self, batch: Batch) -> AttentionMetadata:
        device = self._pool.device
        short = tuple(s for s in batch.slices if s.stop - s.start == 1)
        long = tuple(s for s in batch.slices if s.stop - s.start > 1)
        # The scheduler puts running sequences first, so rows seldom have to be picked apart.
        in_order = batch.slices == short + long
        decode_rows: list[int] = []
        prefill_rows: list[int] = []
        row = 0
        for s in () if in_order else batch.slices:
            rows = range(row, row + s.stop - s.start)
            (decode_rows if len(rows) == 1 else prefill_rows).extend(rows)
            row += len(rows)
        positions_T = np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in batch.slices])
        return AttentionMetadata(
            slots=self._pool.map_slots(batch),
            positions_T=to_device(positions_T, device),
            plan=_StepPlan(
                decode=self.decode.prepare(short) if short else None,
                prefill=self.prefill.prepare(long) if long else None,
                decode_rows_R=None if in_order else to_device(np.array(decode_rows, dtype=np.int64), device),
                prefill_rows_R=None if in_order else to_device(np.array(prefill_rows, dtype=np.int64), device),
                num_decode=len(short),
                num_prefill=len(long),
            ),
        )

    def attend(self, layer: int, q_THD: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        plan: _StepPlan = metadata.plan
        if not plan.num_prefill:
            return self.decode.attend(layer, q_THD, plan.decode)
        if not plan.num_decode:
            return self.prefill.attend(layer, q_THD, plan.prefill)
        out_THD = torch.empty_like(q_THD)
        decode_rows = slice(None, plan.num_decode) if plan.decode_rows_R is None else plan.decode_rows_R
        prefill_rows = slice(plan.num_decode, None) if plan.prefill_rows_R is None else plan.prefill_rows_R
        out_THD[decode_rows] = self.decode.attend(layer, q_THD[decode_rows], plan.decode)
        out_THD[prefill_rows] = self.prefill.attend(layer, q_THD[prefill_rows], plan.prefill)
        return out_THD
