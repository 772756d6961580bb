"""Changes of the scores that come before temperature and filters: bias, min_tokens, penalties.

All rows of a batch at once, and only the scores of tokens that something is done to: the rest stay as the model gave
them, in its own type. A pair of a row and a token is held as one number, row * vocabulary + token.

Shape suffixes: B, R rows   V vocabulary   P pairs of a row and a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.staging import to_device
from engine.types import SamplingParams


def has_penalty(params: SamplingParams) -> bool:
    """Whether the scores hang on the tokens before."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def has_adjustment(params: SamplingParams, output_count: int) -> bool:
    return bool(params.logit_bias) or output_count < params.min_tokens or has_penalty(params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjusted:
    """Scores that take the place of the model's own, by row and then by token id, each pair once. The scores are on
    the device of the model's, the others on the host."""

    rows_P: np.ndarray
    ids_P: np.ndarray
    scores_P: torch.Tensor

    def put(self, scores_RV: torch.Tensor) -> None:
        """Into their places."""
        device = scores_RV.device
        rows_P, ids_P = to_device(self.rows_P, device), to_device(self.ids_P, device)
        scores_RV[rows_P, ids_P] = self.scores_P.to(scores_RV.dtype)


def adjusted_scores(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    output_counts: Sequence[int],
    eos_token_ids: Collection[int],
) -> Adjusted:
    """Apply, in this order: logit_bias, min_tokens, repetition, frequency, presence penalty. Mutates nothing.

    `tokens` are each row's prompt and output, `output_counts` how many of them (at the end) are output; `tokens` of
    rows without penalties are not looked at. In float64; only tokens that something is done to are here.
    """
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    biases = [(row * vocab_size + token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias]
    biased = np.array([pair for pair, _ in biases], dtype=np.int64)
    forbidden = _ends(params, output_counts, eos_token_ids, vocab_size)
    repeated, _ = _count([(row, tokens[row]) for row, p in enumerate(params) if p.repetition_penalty != 1], vocab_size)
    counted, counts = _count(
        [
            (row, tokens[row][len(tokens[row]) - output_counts[row] :])
            for row, p in enumerate(params)
            if p.frequency_penalty != 0 or p.presence_penalty != 0
        ],
        vocab_size,
    )
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


def _ends(
    params: Sequence[SamplingParams],
    output_counts: Sequence[int],
    eos_token_ids: Collection[int],
    vocab_size: int,
) -> np.ndarray:
    """Before min_tokens have been drawn, no token that would end the answer is -> pairs, in no order."""
    pairs = [
        row * vocab_size + token
        for row, (p, count) in enumerate(zip(params, output_counts, strict=True))
        if count < p.min_tokens
        for token in (p.stop_token_ids if p.ignore_eos else p.stop_token_ids.union(eos_token_ids))
        if token < vocab_size
    ]
    return np.array(pairs, dtype=np.int64)


def _count(chosen: Sequence[tuple[int, Sequence[int]]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Each row's distinct tokens, as row * vocab_size + token, ascending, and how often each is there."""
    if not chosen:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    flat = np.concatenate([row * vocab_size + np.asarray(ids, dtype=np.int64) for row, ids in chosen])
    return _distinct(flat)


def _distinct(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `np.unique` with counts, which is several times slower here. `pairs` are the caller's to lose."""
    pairs.sort()
    is_first = np.ones(len(pairs), dtype=bool)
    np.not_equal(pairs[1:], pairs[:-1], out=is_first[1:])
    first = np.flatnonzero(is_first)
    return pairs[first], np.diff(first, append=len(pairs))
