"""Which tokens a row may draw: min_p, top_k, top_p, in that order, over the ranking by score, ties by token id.

Each of the three keeps a beginning of the ranking, so the ranking is only made as far as it is needed: a list of the
best candidates, and a longer one for the rows that it is too short for. What is kept does not depend on how long the
list was.

Shape suffixes: R rows   V vocabulary   C candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.staging import to_device
from engine.types import SamplingParams

CANDIDATES_FIRST = 256
CANDIDATES_GROWTH = 8
TOP_K_BLIND_MAX = 1024
"""A list of so many candidates is made without asking whether a shorter one would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The best tokens of some rows. Tokens that are not kept have -inf."""

    rows_R: torch.Tensor
    ids_RC: torch.Tensor
    scores_RC: torch.Tensor


def has_filter(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def filters_blind(params: SamplingParams) -> bool:
    """Whether `candidates` can do without a look: the length of the list is known, or the whole vocabulary's order is
    not needed."""
    return 0 < params.top_k <= TOP_K_BLIND_MAX or _by_score_alone(params)


def _by_score_alone(params: SamplingParams) -> bool:
    return params.top_k == 0 and params.top_p >= 1


def candidates(
    scores_RV: torch.Tensor, params: Sequence[SamplingParams], *, blind: bool = False
) -> Iterator[Candidates]:
    """The tokens that the filters keep, each row in exactly one of the parts. Mutates nothing.

    `scores_RV` are divided by the temperature already. min_p is a fraction of the best token's probability; top_p is of
    the probability that min_p and top_k have left, and includes the token that crosses it.

    `blind`: rows whose `filters_blind` holds are done by queued work alone, without a look at any value.
    """
    device = scores_RV.device
    limits = _Limits.of(scores_RV, params)
    listed = [row for row, p in enumerate(params) if blind and 0 < p.top_k <= TOP_K_BLIND_MAX]
    masked = [row for row, p in enumerate(params) if blind and _by_score_alone(p)]
    looked = sorted(set(range(len(params))) - set(listed) - set(masked))
    if listed:
        rows_R = to_device(np.array(listed, dtype=np.int64), device)
        yield _listed(scores_RV, limits, rows_R, max(params[row].top_k for row in listed))
    if masked:
        rows_R = to_device(np.array(masked, dtype=np.int64), device)
        yield _masked(scores_RV, limits, rows_R)
    if looked:
        yield from _looked(scores_RV, limits, to_device(np.array(looked, dtype=np.int64), device))


def _listed(scores_RV: torch.Tensor, limits: _Limits, rows_R: torch.Tensor, top_k_max: int) -> Candidates:
    """Rows with a top_k: their lists have as many candidates as the largest one, and are sure."""
    vocab_size = scores_RV.shape[1]
    values_RC, ids_RC = best_blind(scores_RV[rows_R], top_k_max)
    certain_R = torch.full(rows_R.shape, vocab_size, device=scores_RV.device)
    kept_RC, _ = limits.take(rows_R).keep(values_RC, certain_R, vocab_size)
    return Candidates(rows_R=rows_R, ids_RC=ids_RC, scores_RC=values_RC.masked_fill(~kept_RC, float("-inf")))


def _masked(scores_RV: torch.Tensor, limits: _Limits, rows_R: torch.Tensor) -> Candidates:
    """Rows with min_p alone: each token's own score decides."""
    scores_RV, part = scores_RV[rows_R], limits.take(rows_R)
    kept_RV = _weights(scores_RV, part.best) >= part.min_p[:, None]
    ids_V = torch.arange(scores_RV.shape[1], device=scores_RV.device)
    return Candidates(
        rows_R=rows_R, ids_RC=ids_V.expand_as(scores_RV), scores_RC=scores_RV.masked_fill(~kept_RV, float("-inf"))
    )


def _looked(scores_RV: torch.Tensor, limits: _Limits, rows_R: torch.Tensor) -> Iterator[Candidates]:
    """Any rows, in parts by how long a list each one needs."""
    vocab_size = scores_RV.shape[1]
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


def best_blind(scores_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `best_ranked`, by queued work alone: which of several equal scores are the last on the list is settled by
    counting them off, and not by a longer list."""
    rows, vocab_size = scores_RV.shape
    count = min(count, vocab_size)
    if count == 0:
        return scores_RV[:, :0], torch.empty((rows, 0), dtype=torch.int64, device=scores_RV.device)
    last_R1 = scores_RV.topk(count, dim=-1).values[:, -1:]
    above_RV, equal_RV = scores_RV > last_R1, scores_RV == last_R1
    room_R1 = count - above_RV.sum(dim=-1, keepdim=True)
    listed_RV = above_RV | (equal_RV & (equal_RV.cumsum(dim=-1) <= room_R1))
    # Ids go to their places in ascending order; what is not listed goes to a place behind the last.
    places_RV = torch.where(listed_RV, listed_RV.cumsum(dim=-1) - 1, count)
    ids_RC = torch.zeros((rows, count + 1), dtype=torch.int64, device=scores_RV.device)
    ids_RC.scatter_(1, places_RV, torch.arange(vocab_size, device=scores_RV.device).expand_as(places_RV))
    ids_RC = ids_RC[:, :count]
    values_RC, by_value_RC = scores_RV.gather(-1, ids_RC).sort(dim=-1, descending=True, stable=True)
    return values_RC, ids_RC.gather(-1, by_value_RC)


def _weights(scores_RC: torch.Tensor, best_R: torch.Tensor) -> torch.Tensor:
    """Probabilities as fractions of the best token's."""
    return (scores_RC - best_R[:, None]).to(torch.float64).exp()


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
        min_p = to_device(np.array([p.min_p for p in params], dtype=np.float64), device)
        mass = torch.zeros(len(params), dtype=torch.float64, device=device)
        summed = [i for i, p in enumerate(params) if p.top_p < 1 and not 0 < p.top_k < vocab_size]
        if summed:
            rows = to_device(np.array(summed, dtype=np.int64), device)
            weights_RV = (scores_RV[rows] - best[rows, None]).to(torch.float64).exp_()
            if any(params[i].min_p > 0 for i in summed):
                weights_RV.masked_fill_(weights_RV < min_p[rows, None], 0.0)
            mass[rows] = weights_RV.sum(dim=-1)
        return cls(
            best=best,
            min_p=min_p,
            top_k=to_device(np.array([min(p.top_k, vocab_size) or vocab_size for p in params], dtype=np.int64), device),
            top_p=to_device(np.array([p.top_p for p in params], dtype=np.float64), device),
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
        weights_RC = _weights(values_RC, self.best)
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
