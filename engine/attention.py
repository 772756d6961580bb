"""Attention of a batch over the paged pool. Shape suffixes as in engine/types.py.

G query heads that share one KV head (H = K * G)   C tokens of one sequence's context   n blocks of one sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.kv_pool import KvPool, to_device
from engine.types import Batch, SequenceSlice


class PagedAttention(Protocol):
    """Attention of slices over one pool. A layer's new K and V are stored before `attend`. Engine thread only."""

    def prepare(self, slices: Sequence[SequenceSlice]) -> Any:
        """The plan for `attend` in all layers, once per step."""
        ...

    def attend(self, layer: int, q_THD: torch.Tensor, plan: Any) -> torch.Tensor:
        """Each query over its sequence up to its own token -> [T, H, D]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The rows that tokens are drawn from, if not all. Only they are computed to the end of the last layer; for the
    others it stores K and V."""

    rows_W: torch.Tensor
    """int64, on the pool's device."""
    slices: list[SequenceSlice]
    """Those that draw, each cut to its last token."""

    def attend(self, attention: PagedAttention, layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        """Of the last layer -> [W, H, D]. Prepares its plan here, because a backend may keep one at a time."""
        q_WHD = q_THD[self.rows_W]
        return attention.attend(layer, q_WHD, attention.prepare(self.slices)) if len(q_WHD) else q_WHD


def ends_of(batch: Batch, device: torch.device) -> Ends | None:
    """None: tokens are drawn from all rows."""
    rows = batch.drawing_rows
    if len(rows) == batch.num_tokens:
        return None
    rows_W = (
        to_device(np.array(rows, dtype=np.int64), device) if rows else torch.empty(0, dtype=torch.int64, device=device)
    )
    return Ends(rows_W=rows_W, slices=[replace(s, start=s.stop - 1) for s in batch.slices if s.sample])


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequencePlan:
    first_row: int
    num_rows: int
    context_len: int
    runs_2Kn: torch.Tensor
    """The context's runs of S*D elements in the layer, numbered `(block * 2 + k_or_v) * K + head`; K before V."""
    is_causal: bool
    """The whole context is new: row i sees columns 0..i, without a mask in memory."""
    mask_TC: torch.Tensor | None
    """Added to the scores: 0 where row i (position start + i) may look, -inf elsewhere. None: not needed."""


class TorchAttention:
    """The reference, on any device: copies each sequence's blocks together, in the queries' type, and runs torch's own
    attention over them. Slots past the end of a context do not affect the result: they may hold anything, even NaN."""

    def __init__(self, pool: KvPool, num_heads: int | None = None) -> None:
        """`num_heads` is for other attentions."""
        del num_heads
        self.pool = pool

    def prepare(self, slices: Sequence[SequenceSlice]) -> list[_SequencePlan]:
        plans, first_row = [], 0
        for s in slices:
            plans.append(self._plan(s, first_row))
            first_row += s.stop - s.start
        return plans

    def attend(self, layer: int, q_THD: torch.Tensor, plan: list[_SequencePlan]) -> torch.Tensor:
        runs = self.pool.kv_LN2KSD[layer].flatten(0, 2).flatten(1)
        return torch.cat([self._attend_one(runs, q_THD, each) for each in plan])

    def _plan(self, s: SequenceSlice, first_row: int) -> _SequencePlan:
        spec, device, num_rows = self.pool.spec, self.pool.device, s.stop - s.start
        num_blocks = -(-s.stop // spec.block_size)
        blocks_n = np.asarray(s.block_table[:num_blocks], dtype=np.int64)
        k_or_v = np.arange(2)[:, None, None]
        heads = np.arange(spec.num_kv_heads)[None, :, None]
        runs_2Kn = (blocks_n * 2 + k_or_v) * spec.num_kv_heads + heads
        mask_TC = None
        if s.start > 0 and num_rows > 1:
            hidden_TC = torch.full((num_rows, s.stop), float("-inf"), device=device, dtype=self.pool.dtype)
            mask_TC = hidden_TC.triu_(diagonal=s.start + 1)
        return _SequencePlan(
            first_row=first_row,
            num_rows=num_rows,
            context_len=s.stop,
            runs_2Kn=to_device(runs_2Kn.reshape(-1), device),
            is_causal=s.start == 0 and num_rows > 1,
            mask_TC=mask_TC,
        )

    def _attend_one(self, runs: torch.Tensor, q_THD: torch.Tensor, plan: _SequencePlan) -> torch.Tensor:
        spec = self.pool.spec
        kv_2KCD = runs.index_select(0, plan.runs_2Kn).to(q_THD.dtype).view(2, spec.num_kv_heads, -1, spec.head_dim)
        k_KCD, v_KCD = kv_2KCD[:, :, : plan.context_len]
        q_THD = q_THD[plan.first_row : plan.first_row + plan.num_rows]
        num_rows, num_heads, head_dim = q_THD.shape
        # KV heads take the batch dimension, so that the query heads of a group share K and V without a copy.
        q_KGTD = q_THD.view(num_rows, spec.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        group = q_KGTD.shape[1]
        out_KGTD = F.scaled_dot_product_attention(
            q_KGTD,
            k_KCD[:, None].expand(-1, group, -1, -1),
            v_KCD[:, None].expand(-1, group, -1, -1),
            attn_mask=None if plan.mask_TC is None else plan.mask_TC.to(q_THD.dtype),
            is_causal=plan.is_causal,
        )
        return out_KGTD.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
