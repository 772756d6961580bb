"""Draws tokens from scores: the whole batch in one pass, each row by its own parameters and nothing else's.

Gumbel-max: argmax of (score / temperature + Gumbel noise) is a draw from the softmax. The noise of a token is a pure
function of (seed, choice, output index, token id), so a request that is resumed elsewhere gets the same noise (I6).
Nodes of different versions must agree on it: do not change it.

Biases and penalties are applied to the affected scores only, for all rows at once. A pair of row and token is one
number, row * vocabulary + token. The filters min_p, top_k and top_p each keep the first tokens of the ranking by score,
then token id. The ranking is only as long as needed, which does not change the result.

Shape suffixes: B rows   R some of them   V vocabulary   C candidates or alternatives   P pairs of a row and a token, or
packed int64 numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from baton.log import get_log
from baton.native import load
from engine.kv_pool import to_device
from engine.native.kernels import Pointer, native_kernels
from engine.types import NO_TOKEN, SamplingParams, TokenLogprobs


def has_penalty(params: SamplingParams) -> bool:
    """Whether the scores depend on earlier tokens."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def has_adjustment(params: SamplingParams, output_count: int) -> bool:
    return bool(params.logit_bias) or output_count < params.min_tokens or has_penalty(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """Scores that replace the model's own, sorted by row and token id, each pair once. `scores_P` is on the device of
    the model's scores, the ids are on the host."""

    rows_P: np.ndarray
    ids_P: np.ndarray
    scores_P: torch.Tensor

    def put(self, scores_RV: torch.Tensor) -> None:
        """Replace the scores."""
        device = scores_RV.device
        scores_RV[to_device(self.rows_P, device), to_device(self.ids_P, device)] = self.scores_P.to(scores_RV.dtype)


def adjusted_scores(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    output_counts: Sequence[int],
    eos_token_ids: Collection[int],
) -> Adjusted:
    """In float64; mutates nothing. Arguments and order as for `sample`. Only rows with penalties need `tokens`."""
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    biases = [(row * vocab_size + token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias]
    biased = np.array([pair for pair, _ in biases], dtype=np.int64)
    ends = [  # no token that would end the answer before min_tokens have been drawn
        row * vocab_size + token
        for row, (p, count) in enumerate(zip(params, output_counts, strict=True))
        if count < p.min_tokens
        for token in (p.stop_token_ids if p.ignore_eos else p.stop_token_ids.union(eos_token_ids))
        if token < vocab_size
    ]
    forbidden = np.array(ends, dtype=np.int64)
    repeated, _ = _count([(row, tokens[row]) for row, p in enumerate(params) if p.repetition_penalty != 1], vocab_size)
    answers = [
        (row, tokens[row][len(tokens[row]) - output_counts[row] :])
        for row, p in enumerate(params)
        if p.frequency_penalty != 0 or p.presence_penalty != 0
    ]
    counted, counts = _count(answers, vocab_size)
    pairs_P, _ = _distinct(np.concatenate([biased, forbidden, repeated, counted]))
    rows_P, ids_P = np.divmod(pairs_P, vocab_size)
    scores_P = logits_BV[to_device(rows_P, device), to_device(ids_P, device)].to(torch.float64)

    def of_rows(pairs: np.ndarray, name: str) -> torch.Tensor:
        values = np.array([getattr(p, name) for p in params], dtype=np.float64)
        return to_device(values[pairs // vocab_size], device)

    def places(pairs: np.ndarray) -> torch.Tensor:
        return to_device(np.searchsorted(pairs_P, pairs), device)

    if len(biased):  # added to the score, as OpenAI and vLLM document `logit_bias`
        scores_P[places(biased)] += to_device(np.array([bias for _, bias in biases], dtype=np.float64), device)
    if len(forbidden):
        scores_P.index_fill_(0, places(forbidden), float("-inf"))
    if len(repeated):  # positive scores divided, negative ones multiplied (Keskar et al. 2019, CTRL)
        at, penalty = places(repeated), of_rows(repeated, "repetition_penalty")
        scores_P[at] = torch.where(scores_P[at] > 0, scores_P[at] / penalty, scores_P[at] * penalty)
    if len(counted):  # as OpenAI documents them
        at = places(counted)
        scores_P[at] -= of_rows(counted, "frequency_penalty") * to_device(counts, device).to(torch.float64)
        scores_P[at] -= of_rows(counted, "presence_penalty")
    return Adjusted(rows_P=rows_P, ids_P=ids_P, scores_P=scores_P)


def _count(chosen: Sequence[tuple[int, Sequence[int]]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's distinct tokens, as row * vocab_size + token, ascending, and their counts."""
    if not chosen:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    flat = np.concatenate([row * vocab_size + np.asarray(ids, dtype=np.int64) for row, ids in chosen])
    return _distinct(flat)


def _distinct(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `np.unique` with counts, which is several times slower here. Overwrites `pairs`."""
    pairs.sort()
    is_first = np.ones(len(pairs), dtype=bool)
    np.not_equal(pairs[1:], pairs[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    return pairs[first], np.diff(first, append=len(pairs))


def allow_only(logits_BV: torch.Tensor, rows: Sequence[int], allowed_RI: np.ndarray, *, in_place: bool) -> torch.Tensor:
    """Minus infinity in these rows for the tokens whose bits are not set (`engine.grammar.compute_masks`)."""
    device, vocab_size = logits_BV.device, logits_BV.shape[1]
    if not in_place:
        logits_BV = logits_BV.clone()
    kernel = draw_kernel() if device.type == "cpu" else None
    if kernel is not None and kernel.takes(logits_BV):
        kernel.allow_only(logits_BV, rows, allowed_RI)
        return logits_BV
    bytes_RI = to_device(allowed_RI.view(np.uint8), device)
    bits = to_device(np.left_shift(1, np.arange(8)).astype(np.uint8), device)
    forbidden_RV = ((bytes_RI[:, :, None] & bits) == 0).view(len(rows), -1)[:, :vocab_size]
    if len(rows) == len(logits_BV):
        return logits_BV.masked_fill_(forbidden_RV, float("-inf"))
    rows_R = _rows(rows, device)
    logits_BV[rows_R] = logits_BV[rows_R].masked_fill_(forbidden_RV, float("-inf"))
    return logits_BV


CANDIDATES_FIRST = 256
CANDIDATES_GROWTH = 8
TOP_K_BLIND_MAX = 1024
"""Lists of up to so many candidates are made without a look at whether fewer would do."""


class Candidates(NamedTuple):
    """The best tokens of some rows, and which of them the filters keep."""

    rows_R: torch.Tensor
    ids_RC: torch.Tensor
    scores_RC: torch.Tensor
    kept_RC: torch.Tensor


def has_filter(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _length_known(params: SamplingParams) -> bool:
    """Whether the length of the list of candidates is known without a look at the scores."""
    return 0 < params.top_k <= TOP_K_BLIND_MAX


def _by_score_alone(params: SamplingParams) -> bool:
    """Whether no ranking is needed."""
    return params.top_k == 0 and params.top_p >= 1


def candidates(
    scores_RV: torch.Tensor, params: Sequence[SamplingParams], *, blind: bool = False
) -> Iterator[Candidates]:
    """The tokens that the filters keep; each row is in exactly one of the parts. Mutates nothing.

    `scores_RV` are already divided by the temperature. min_p is a fraction of the best token's probability. top_p is a
    share of what min_p and top_k leave, and includes the token that crosses it. `blind`: the host looks at no value for
    rows whose list has a known length or that need no list.
    """
    device, vocab_size = scores_RV.device, scores_RV.shape[1]
    limits = _Limits.of(scores_RV, params)
    listed = [row for row, p in enumerate(params) if blind and _length_known(p)]
    masked = [row for row, p in enumerate(params) if blind and _by_score_alone(p)]
    looked = sorted(set(range(len(params))) - set(listed) - set(masked))
    if listed:  # the largest top_k is long enough for all
        rows_R = _rows(listed, device)
        values_RC, ids_RC = best_blind(scores_RV[rows_R], max(params[row].top_k for row in listed))
        certain_R = torch.full(rows_R.shape, vocab_size, device=device)
        kept_RC, _ = limits.take(rows_R).keep(values_RC, certain_R, vocab_size)
        yield Candidates(rows_R, ids_RC, values_RC, kept_RC)
    if masked:  # min_p alone: each token's own score decides
        rows_R = _rows(masked, device)
        part, part_RV = limits.take(rows_R), scores_RV[rows_R]
        ids_RV = torch.arange(vocab_size, device=device).expand_as(part_RV)
        yield Candidates(rows_R, ids_RV, part_RV, _weights(part_RV, part.best) >= part.min_p[:, None])
    rows_R, width = _rows(looked, device) if looked else torch.empty(0, dtype=torch.int64), CANDIDATES_FIRST
    while len(rows_R):  # with longer lists for the rows that need them
        values_RC, ids_RC, certain_R = ranked(scores_RV[rows_R], width)
        kept_RC, done_R = limits.take(rows_R).keep(values_RC, certain_R, vocab_size)
        yield Candidates(rows_R[done_R], ids_RC[done_R], values_RC[done_R], kept_RC[done_R])
        rows_R = rows_R[~done_R]
        width *= CANDIDATES_GROWTH


def ranked(scores_RV: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` best tokens, by score, then id -> (scores [R, C], ids [R, C], certain [R]).

    Only the first `certain` of a row are sure to be its best: tokens outside may equal the last of the list.
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
    """The `count` best tokens of each row (or all), by score, then id -> scores and ids, [R, count] each."""
    count, width = min(count, scores_RV.shape[1]), count + 1
    while True:
        values_RC, ids_RC, certain_R = ranked(scores_RV, width)
        if bool((certain_R >= count).all()):
            return values_RC[:, :count], ids_RC[:, :count]
        width *= CANDIDATES_GROWTH


def best_blind(scores_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `best_ranked`, by queued work only: it counts equal scores off at the end of the list, instead of making the
    list longer."""
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


class _Limits(NamedTuple):
    """The filters of some rows as tensors [R]. A token's weight is its probability as a fraction of the best token's;
    `mass` is the sum of the vocabulary's weights after min_p, where top_p needs it.
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
            rows = _rows(summed, device)
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
        return _Limits(*[each[rows_R] for each in self])

    def keep(
        self, values_RC: torch.Tensor, certain_R: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the ranked candidates stay, bool [R, C]; for which rows the list is long enough, bool [R]."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRows:
    """Log-probabilities for the rows that request them. The tensors are on the scores' device."""

    rows: list[int]
    counts: list[int]
    """How many alternatives each requests."""
    drawn_R: torch.Tensor
    values_RC: torch.Tensor
    ids_RC: torch.Tensor

    @classmethod
    def of(
        cls, logits_BV: torch.Tensor, tokens_B: torch.Tensor, params: Sequence[SamplingParams], *, blind: bool = False
    ) -> ScoredRows | None:
        """None if no row requests any. In float64; rows are independent. `blind`: by queued work only."""
        rows = [row for row, p in enumerate(params) if p.logprobs is not None]
        if not rows:
            return None
        rows_R = _rows(rows, logits_BV.device)
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
        """All numbers in one tensor, for one copy to the host -> int64 [P]; floats as their bits."""
        floats = (self.drawn_R, self.values_RC.reshape(-1))
        return torch.cat([*(part.contiguous().view(torch.int64) for part in floats), self.ids_RC.reshape(-1)])

    def by_row(self, packed_P: np.ndarray) -> dict[int, TokenLogprobs]:
        """By row, from the host's copy of `packed`."""
        rows, width = self.values_RC.shape
        floats = packed_P[: rows * (width + 1)].view(np.float64)
        values, ids = floats[rows:].reshape(rows, width), packed_P[rows * (width + 1) :].reshape(rows, width)
        each = zip(self.rows, self.counts, floats[:rows].tolist(), ids.tolist(), values.tolist(), strict=True)
        return {
            row: TokenLogprobs(logprob=drawn, top=tuple(zip(best[:count], scores[:count], strict=True)))
            for row, count, drawn, best, scores in each
        }


_MASK64 = 2**64 - 1
# Constants of splitmix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def draws_blind(params: SamplingParams) -> bool:
    """Whether `sample` needs no tokens of such a row and, with `blind`, no look at its scores."""
    return not has_penalty(params) and (params.temperature == 0 or _length_known(params) or _by_score_alone(params))


def sample(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    *,
    tokens: Sequence[Sequence[int]] = (),
    eos_token_ids: Collection[int] = (),
    blind: bool = False,
) -> torch.Tensor:
    """Draw one token for each row -> int64 [B], NO_TOKEN for a row without one. Mutates nothing.

    A row has no token if a score is NaN or its highest score is infinite: weights or KV are broken or have overflowed.
    That does not affect other rows.

    In this order: logit_bias, min_tokens, repetition, frequency and presence penalty; temperature; min_p, top_k, top_p;
    the draw. temperature 0 takes the highest score after the penalties, the lowest id among equals. `tokens` are each
    row's prompt and output, `output_indices` the number of output tokens; rows with penalties or min_tokens need them
    and the end-of-sequence tokens.

    `blind`: does not wait for the device, if `draws_blind` holds for every row with a filter. The tokens are the same.
    """
    assert len(params) == len(output_indices) == logits_BV.shape[0], (len(params), len(output_indices), logits_BV.shape)
    adjusted = [has_adjustment(p, index) for p, index in zip(params, output_indices, strict=True)]
    if not any(adjusted) and all(p.temperature == 0 for p in params):
        tokens_B = _highest(logits_BV)
    else:
        assert len(tokens) == len(params) or not any(adjusted), "penalties and min_tokens need the rows' tokens"
        changed = adjusted_scores(logits_BV, params, tokens, output_indices, eos_token_ids) if any(adjusted) else None
        kernel = None if blind else draw_kernel()
        if kernel is not None and kernel.takes(logits_BV):
            tokens_B = kernel.draw(logits_BV, params, output_indices, changed)
        else:
            tokens_B = _draw_each_kind(logits_BV, params, output_indices, changed, blind)
    scores_B = logits_BV.gather(1, tokens_B.clamp(min=0)[:, None])[:, 0]
    return torch.where(scores_B.isfinite(), tokens_B, NO_TOKEN)


def _draw_each_kind(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    changed: Adjusted | None,
    blind: bool,
) -> torch.Tensor:
    """By PyTorch's operations: any device. The reference for the kernel."""
    device = logits_BV.device
    adjusted = set() if changed is None else set(changed.rows_P.tolist())
    hard = [i for i, p in enumerate(params) if p.temperature > 0 or i in adjusted]
    # Every other row is greedy, whose argmax needs no float64.
    easy = [i for i, p in enumerate(params) if p.temperature == 0 and i not in adjusted]
    tokens_B = torch.empty(len(params), dtype=torch.int64, device=device)
    if easy:
        easy_R = _rows(easy, device)
        tokens_B[easy_R] = _highest(logits_BV[easy_R])
    if changed is not None:
        logits_BV = logits_BV.to(torch.float64, copy=True)
        changed.put(logits_BV)
    if hard:
        hard_R = _rows(hard, device)
        scores_RV = logits_BV[hard_R].to(torch.float64)
        tokens_B[hard_R] = _draw(scores_RV, [params[i] for i in hard], [output_indices[i] for i in hard], blind)
    return tokens_B


def _highest(logits_BV: torch.Tensor) -> torch.Tensor:
    """The lowest id of the highest score of each row -> int64 [B]."""
    if logits_BV.dtype is torch.bfloat16 and logits_BV.device.type == "cpu" and logits_BV.is_contiguous():
        kernels = native_kernels()
        if kernels is not None:
            return kernels.highest(logits_BV)
    return logits_BV.argmax(dim=-1)


def _draw(
    scores_BV: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int], blind: bool
) -> torch.Tensor:
    """Overwrites `scores_BV`."""
    device, vocab_size = scores_BV.device, scores_BV.shape[1]
    # Greedy rows go through unscaled, unfiltered and without noise: subtracting the maximum keeps their argmax.
    highest_B1 = scores_BV.amax(dim=-1, keepdim=True)  # NaN where any score of the row is
    scores_BV -= highest_B1
    scores_BV /= to_device(np.array([p.temperature or 1.0 for p in params]), device)[:, None]
    keys = [row_key(p.seed, p.choice, index) for p, index in zip(params, output_indices, strict=True)]
    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and has_filter(p)]
    whole = [i for i, p in enumerate(params) if p.temperature == 0 or not has_filter(p)]
    drawn = [i for i in whole if params[i].temperature > 0]
    if drawn:
        scores_BV[_rows(drawn, device)] += gumbel_noise([keys[i] for i in drawn], vocab_size, device)
    tokens_B = torch.empty(len(params), dtype=torch.int64, device=device)
    if whole:
        whole_R = _rows(whole, device)
        tokens_B[whole_R] = scores_BV[whole_R].argmax(dim=-1)
    if filtered:
        rows = _rows(filtered, device)
        keys_R = _on_device([keys[i] for i in filtered], device)
        for part in candidates(scores_BV[rows], [params[i] for i in filtered], blind=blind):
            scores_RC = part.scores_RC.masked_fill(~part.kept_RC, float("-inf"))
            noisy_RC = scores_RC + _gumbel(noise_bits(keys_R[part.rows_R], part.ids_RC))
            best_R1 = noisy_RC.amax(dim=-1, keepdim=True)
            tokens_B[rows[part.rows_R]] = part.ids_RC.masked_fill(noisy_RC < best_R1, vocab_size).amin(dim=-1)
    return torch.where(highest_B1[:, 0].isfinite(), tokens_B, NO_TOKEN)


def _rows(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(rows, dtype=np.int64), device)


def row_key(seed: int, choice: int, output_index: int) -> int:
    """The 64-bit key of one draw, the start of its stream of noise. Arguments count modulo 2**64."""
    key = 0
    for part in (seed, choice, output_index):
        key = _mix((key ^ (part & _MASK64)) + _GOLDEN & _MASK64)
    return key


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard Gumbel noise of every token for draws with the given `row_key`s -> float64 [B, V]."""
    keys_B = _on_device(keys, torch.device(device))
    return _gumbel(noise_bits(keys_B, torch.arange(vocab_size, device=keys_B.device)[None, :]))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def _on_device(keys: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array([_signed(key) for key in keys], dtype=np.int64), device)


def noise_bits(keys_R: torch.Tensor, ids_RC: torch.Tensor) -> torch.Tensor:
    """52 random bits for each token -> int64 [R, C], from the splitmix64 stream that starts at the row's key.

    52 and not 53: `(bits + 0.5) / 2**52` is then exact in float64 and strictly between 0 and 1.
    """
    z_RC = keys_R[:, None] + (ids_RC + 1) * _signed(_GOLDEN)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z_RC.bitwise_xor_(_shift_right(z_RC, shift)).mul_(_signed(multiplier))
    z_RC.bitwise_xor_(_shift_right(z_RC, _SHIFTS[-1]))
    return _shift_right(z_RC, 12)


def _mix(z: int) -> int:
    """splitmix64's output function, on a Python integer."""
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z = (z ^ (z >> shift)) * multiplier & _MASK64
    return z ^ (z >> _SHIFTS[-1])


def _signed(value: int) -> int:
    """The int64 of the same 64 bits: torch has no unsigned arithmetic, but its int64 wraps as hardware does."""
    return value - 2**64 if value >= 2**63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts the sign in, so it is masked off."""
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


log = get_log("native")

SHARED_TOKENS_MIN = 1 << 15
"""From so many scores on several threads draw; for fewer, waking the threads takes longer."""

_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
_DRAW = np.dtype(
    [
        ("row", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("choice", np.uint64),
        ("index", np.uint64),
        ("changed_at", np.int64),
        ("changed_end", np.int64),
    ]
)


class DrawKernel:
    """Draws a batch's tokens as `sample` defines. Any thread may call it."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        integer = ctypes.c_int64
        self._draw = handle.baton_draw
        self._draw.restype = None
        self._draw.argtypes = [
            *[Pointer, integer, integer, integer, Pointer, integer],
            *[Pointer, Pointer, Pointer, Pointer, integer, ctypes.c_int],
        ]
        self._allow_only = handle.baton_allow_only
        self._allow_only.restype = None
        self._allow_only.argtypes = [*[Pointer, integer, integer, integer, Pointer, integer], *[Pointer, integer]]
        self._scratch = handle.baton_draw_scratch
        self._scratch.restype, self._scratch.argtypes = integer, [integer, integer]

    def takes(self, logits_BV: torch.Tensor) -> bool:
        return logits_BV.device.type == "cpu" and logits_BV.dtype in _TYPES and logits_BV.stride(1) == 1

    def draw(
        self,
        logits_BV: torch.Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        changed: Adjusted | None,
    ) -> torch.Tensor:
        """One token for each row -> int64 [B], NO_TOKEN for a row without one. Releases the interpreter's lock; mutates
        nothing."""
        assert self.takes(logits_BV), (logits_BV.device, logits_BV.dtype)
        rows, vocab_size = logits_BV.shape
        ends = np.zeros(rows + 1, dtype=np.int64)
        if changed is not None:
            ends = np.searchsorted(changed.rows_P, np.arange(rows + 1))
        draws_R = np.zeros(rows, dtype=_DRAW)
        draws_R["row"], draws_R["index"] = np.arange(rows), output_indices
        draws_R["changed_at"], draws_R["changed_end"] = ends[:-1], ends[1:]
        for name in ("temperature", "top_p", "min_p", "top_k"):
            draws_R[name] = [getattr(p, name) for p in params]
        for name in ("seed", "choice"):
            draws_R[name] = np.array([getattr(p, name) & _MASK64 for p in params], dtype=np.uint64)
        limits = draws_R["top_k"]
        k_max = int(limits[limits < vocab_size].max(initial=0))
        threads = torch.get_num_threads() if rows * vocab_size >= SHARED_TOKENS_MIN else 1
        scratch_bytes = self._scratch(vocab_size, k_max)
        scratch = np.empty(threads * scratch_bytes // 8, dtype=np.float64)
        tokens_B = torch.empty(rows, dtype=torch.int64)
        ids_P, scores_P = (None, None) if changed is None else (changed.ids_P, changed.scores_P)
        self._draw(
            *(logits_BV, _TYPES[logits_BV.dtype], logits_BV.stride(0), vocab_size, draws_R, rows),
            *(ids_P, scores_P, tokens_B, scratch, scratch_bytes, threads),
        )
        return tokens_B

    def allow_only(self, logits_BV: torch.Tensor, rows: Sequence[int], allowed_RI: np.ndarray) -> None:
        """Overwrites the scores of tokens that these rows may not be. Releases the interpreter's lock."""
        assert self.takes(logits_BV), (logits_BV.device, logits_BV.dtype)
        assert allowed_RI.shape[0] == len(rows) and allowed_RI.flags.c_contiguous, allowed_RI.shape
        assert max(rows) < len(logits_BV) and 32 * allowed_RI.shape[1] >= logits_BV.shape[1], allowed_RI.shape
        vocab_size, rows_R = logits_BV.shape[1], np.array(rows, dtype=np.int64)
        self._allow_only(
            *(logits_BV, _TYPES[logits_BV.dtype], logits_BV.stride(0), vocab_size, rows_R, len(rows)),
            *(allowed_RI, allowed_RI.shape[1]),
        )


@cache
def draw_kernel() -> DrawKernel | None:
    """None: no library; logged once. The first call may take seconds."""
    library = load(Path(__file__).parent / "native" / "draw.c", ("m",))
    if library.handle is None:
        log.warning(
            "the sampling kernel is missing: PyTorch's operations are used, which are slower", why=library.status
        )
        return None
    return DrawKernel(library.handle)
