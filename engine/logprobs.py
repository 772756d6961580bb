"""Log-probabilities of drawn tokens and of the best alternatives: of the model's own scores, before any adjustment.

Shape suffixes: B rows   R rows that ask   V vocabulary   C alternatives   P int64 numbers, one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.filters import best_blind, best_ranked
from engine.staging import to_device
from engine.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Of the rows that ask. The tensors are on the scores' device."""

    rows: list[int]
    counts: list[int]
    """How many alternatives each wants to be told of."""
    drawn_R: torch.Tensor
    values_RC: torch.Tensor
    ids_RC: torch.Tensor

    @classmethod
    def of(
        cls, logits_BV: torch.Tensor, tokens_B: torch.Tensor, params: Sequence[SamplingParams], *, blind: bool = False
    ) -> ScoredRows | None:
        """None when no row asks. In float64; a row depends on no other. `blind`: by queued work alone."""
        rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        if not rows:
            return None
        rows_R = to_device(np.array(rows, dtype=np.int64), logits_BV.device)
        logits_RV = logits_BV[rows_R].to(torch.float64)
        total_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
        counts = [params[row].logprobs or 0 for row in rows]
        values_RC, ids_RC = (best_blind if blind else best_ranked)(logits_RV, max(counts))
        return cls(
            rows=rows,
            counts=counts,
            drawn_R=(logits_RV.gather(-1, tokens_B[rows_R, None].clamp(min=0)) - total_R1)[:, 0],
            values_RC=values_RC - total_R1,
            ids_RC=ids_RC,
        )

    def packed(self) -> torch.Tensor:
        """All numbers in one tensor, for one copy to the host -> int64 [P], floating ones as their bits."""
        floats = (self.drawn_R, self.values_RC.reshape(-1))
        return torch.cat([*(part.contiguous().view(torch.int64) for part in floats), self.ids_RC.reshape(-1)])

    def told(self, packed_P: np.ndarray) -> dict[int, TokenLogprobs]:
        """From what `packed` has become on the host: by row."""
        rows, width = self.values_RC.shape
        floats = packed_P[: rows * (width + 1)].view(np.float64)
        values, ids = floats[rows:].reshape(rows, width), packed_P[rows * (width + 1) :].reshape(rows, width)
        each = zip(self.rows, self.counts, floats[:rows].tolist(), ids.tolist(), values.tolist(), strict=True)
        return {
            row: TokenLogprobs(logprob=drawn, top=tuple(zip(best[:count], scores[:count], strict=True)))
            for row, count, drawn, best, scores in each
        }


def token_logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """By row, for the rows whose `params.logprobs` is set."""
    scored = ScoredRows.of(logits_BV, tokens_B, params)
    return {} if scored is None else scored.told(scored.packed().cpu().numpy())
