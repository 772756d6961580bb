"""Which tokens a row may draw: min_p, top_k, top_p, in that order, over the ranking by score, ties by token id.

Each of the three keeps a beginning of the ranking, so the ranking is only made as far as it is needed: a list of the
best candidates, and a longer one for the rows that it is too short for. What is kept does not depend on how long the
list was.

Shape suffixes: R rows   V vocabulary   C candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.types import SamplingParams

CANDIDATES_FIRST = 256
CANDIDATES_GROWTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The best tokens of some rows. Tokens that are not kept have -inf."""

    rows_R: torch.Tensor
    ids_RC: torch.Tensor
    scores_RC: torch.Tensor


def has_filter(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def candidates(scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> Iterator[Candidates]:
    """The tokens that the filters keep, each row in exactly one of the parts. Mutates nothing.

    `scores_RV` are divided by the temperature already. min_p is a fraction of the best token's probability; top_p is of
    the probability that min_p and top_k have left, and includes the token that crosses it.
    """
    vocab_size, device = scores_RV.shape[1], scores_RV.device
    limits = _Limits.of(scores_RV, params)
    rows_R = torch.arange(len(params), device=device)
    width = CANDIDATES_FIRST
    while len(rows_R):
        part = limits.take(rows_R)
        values_RC, ids_RC, certain_R = ranked(scores_RV[rows_R], width)
        kept_RC, done_R = part.keep(values_RC, certain_R, vocab_size)
        yield Candidates(
            rows_R=rows_R[done_R],
            ids_RC=ids_RC[done_R],
            scores_RC=values_RC[done_R].masked_fill(~kept_RC[done_R], float("-inf")),
        )
        rows_R = rows_R[~done_R]
        width *= CANDIDATES_GROWTH


def filtered_scores(scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The scores, -inf where a filter excludes the token."""
    result_RV = torch.full_like(scores_RV, float("-inf"))
    for part in candidates(scores_RV, params):
        result_RV[part.rows_R[:, None], part.ids_RC] = part.scores_RC
    return result_RV


def ranked(scores_RV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` best tokens, by score, equal ones by id -> (scores [R, C], ids [R, C], certain [R]).

    Only the first `certain` of a row are sure to be its best: more tokens may be as good as the last of the list.
    """
    if width >= scores_RV.shape[1]:
        values_RC, ids_RC = scores_RV.sort(dim=-1, descending=True, stable=True)
        return values_RC, ids_RC, torch.full(scores_RV.shape[:1], scores_RV.shape[1], device=scores_RV.device)
    values_RC, ids_RC = scores_RV.topk(width, dim=-1)
    by_id_RC = ids_RC.argsort(dim=-1)
    values_RC, ids_RC = values_RC.gather(-1, by_id_RC), ids_RC.gather(-1, by_id_RC)
    values_RC, by_value_RC = values_RC.sort(dim=-1, descending=True, stable=True)
    return values_RC, ids_RC.gather(-1, by_value_RC), (values_RC > values_RC[:, -1:]).sum(dim=-1)


def best_ranked(scores_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` best tokens of each row (or all), by score, equal ones by id -> scores and ids, [R, count] each."""
    count, width = min(count, scores_RV.shape[1]), count + 1
    while True:
        values_RC, ids_RC, certain_R = ranked(scores_RV, width)
        if bool((certain_R >= count).all()):
            return values_RC[:, :count], ids_RC[:, :count]
        width *= CANDIDATES_GROWTH


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The filters of some rows as tensors [R]. `mass` is the weight that min_p leaves of the whole vocabulary, where
    top_p needs it; a token's weight is its probability as a fraction of the best one's.
    """

    best: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    mass: torch.Tensor

    @classmethod
    def of(cls, scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> _Limits:
        vocab_size, device = scores_RV.shape[1], scores_RV.device
        best = scores_RV.amax(dim=-1)
        min_p = torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device)
        mass = torch.zeros(len(params), dtype=torch.float64, device=device)
        summed = [i for i, p in enumerate(params) if p.top_p < 1 and not 0 < p.top_k < vocab_size]
        if summed:
            rows = torch.tensor(summed, device=device)
            weights_RV = (scores_RV[rows] - best[rows, None]).to(torch.float64).exp_()
            if any(params[i].min_p > 0 for i in summed):
                weights_RV.masked_fill_(weights_RV < min_p[rows, None], 0.0)
            mass[rows] = weights_RV.sum(dim=-1)
        return cls(
            best=best,
            min_p=min_p,
            top_k=torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            mass=mass,
        )

    def take(self, rows_R: torch.Tensor) -> _Limits:
        return _Limits(
            best=self.best[rows_R],
            min_p=self.min_p[rows_R],
            top_k=self.top_k[rows_R],
            top_p=self.top_p[rows_R],
            mass=self.mass[rows_R],
        )

    def keep(
        self, values_RC: torch.Tensor, certain_R: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the ranked candidates stay -> bool [R, C]; for which rows the list was long enough -> bool [R]."""
        ranks_C = torch.arange(values_RC.shape[1], device=values_RC.device)
        is_certain_RC = ranks_C < certain_R[:, None]
        weights_RC = (values_RC - self.best[:, None]).to(torch.float64).exp()
        above_RC = weights_RC >= self.min_p[:, None]
        left_RC = above_RC & (ranks_C < self.top_k[:, None])
        weights_RC = weights_RC.masked_fill(~left_RC, 0.0)
        up_to_RC = weights_RC.cumsum(dim=-1)
        is_whole_R = self.top_k >= vocab_size
        mass_R = torch.where(is_whole_R, self.mass, up_to_RC[:, -1])
        # top_p 1 is off, whatever the sum rounds to; the first token is always kept.
        inside_RC = up_to_RC - weights_RC < (self.top_p * mass_R)[:, None]
        kept_RC = left_RC & is_certain_RC & (inside_RC | (self.top_p[:, None] >= 1) | (ranks_C == 0))
        # A whole vocabulary's list is long enough when it has a token that is out; top_k's when it has all of the k.
        ends_R = kept_RC.sum(dim=-1) < certain_R
        covered_R = (certain_R >= self.top_k) | (is_certain_RC & ~above_RC).any(dim=-1)
        return kept_RC, torch.where(is_whole_R, ends_R, covered_R) | (certain_R == vocab_size)
