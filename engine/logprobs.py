"""Log-probabilities of drawn tokens and of the best alternatives: of the model's own scores, before any adjustment.

Shape suffixes: B rows   R rows that ask   V vocabulary   C alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.filters import best_ranked
from engine.types import SamplingParams, TokenLogprobs


def token_logprobs(
    logits_BV: torch.Tensor, tokens_B: torch.Tensor, params: Sequence[SamplingParams]
) -> dict[int, TokenLogprobs]:
    """By row, for the rows whose `params.logprobs` is set. Computed in float64; a row depends on no other."""
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    if not asking:
        return {}
    rows_R = torch.tensor(asking, device=logits_BV.device)
    logits_RV = logits_BV[rows_R].to(torch.float64)
    total_R1 = logits_RV.logsumexp(dim=-1, keepdim=True)
    drawn_R = (logits_RV.gather(-1, tokens_B[rows_R, None]) - total_R1)[:, 0].tolist()
    counts = [params[row].logprobs or 0 for row in asking]
    values_RC, ids_RC = best_ranked(logits_RV, max(counts))
    tops = zip(ids_RC.tolist(), (values_RC - total_R1).tolist(), strict=True)
    return {
        row: TokenLogprobs(logprob=drawn, top=tuple(zip(ids[:count], values[:count], strict=True)))
        for row, drawn, count, (ids, values) in zip(asking, drawn_R, counts, tops, strict=True)
    }
