"""Changes of the scores that come before temperature and filters: bias, min_tokens, penalties.

All rows of a batch at once: what each row's tokens were is held as sparse (row, token, count) triples.

Shape suffixes: R rows   V vocabulary   P pairs of a row and a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from engine.types import SamplingParams


def has_adjustment(params: SamplingParams, output_count: int) -> bool:
    return (
        bool(params.logit_bias)
        or output_count < params.min_tokens
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def adjust(
    scores_RV: torch.Tensor,
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    output_counts: Sequence[int],
    eos_token_ids: Collection[int],
) -> None:
    """Apply, in place and in this order: logit_bias, min_tokens, repetition, frequency, presence penalty.

    `tokens` are each row's prompt and output, `output_counts` how many of them (at the end) are output.
    """
    _bias(scores_RV, params)
    _forbid_ends(scores_RV, params, output_counts, eos_token_ids)
    _repetition(scores_RV, params, tokens)
    _frequency_and_presence(scores_RV, params, tokens, output_counts)


def _bias(scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Added to the token's score (as OpenAI and vLLM document `logit_bias`)."""
    triples = [(row, token, bias) for row, p in enumerate(params) for token, bias in p.logit_bias]
    if triples:
        rows, ids, biases = zip(*triples, strict=True)
        device = scores_RV.device
        scores_RV[torch.tensor(rows, device=device), torch.tensor(ids, device=device)] += torch.tensor(
            biases, dtype=scores_RV.dtype, device=device
        )


def _forbid_ends(
    scores_RV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_counts: Sequence[int],
    eos_token_ids: Collection[int],
) -> None:
    """Before min_tokens have been drawn, no token that would end the answer is."""
    pairs = [
        (row, token)
        for row, (p, count) in enumerate(zip(params, output_counts, strict=True))
        if count < p.min_tokens
        for token in (p.stop_token_ids if p.ignore_eos else p.stop_token_ids.union(eos_token_ids))
        if token < scores_RV.shape[1]
    ]
    if pairs:
        rows, ids = torch.tensor(pairs, device=scores_RV.device).unbind(dim=-1)
        scores_RV[rows, ids] = float("-inf")


def _repetition(scores_RV: torch.Tensor, params: Sequence[SamplingParams], tokens: Sequence[Sequence[int]]) -> None:
    """Tokens of prompt and output: positive scores divided, negative ones multiplied (Keskar et al. 2019, CTRL)."""
    chosen = [(row, tokens[row]) for row, p in enumerate(params) if p.repetition_penalty != 1]
    if not chosen:
        return
    rows_P, ids_P, _ = _count(chosen, scores_RV)
    penalties_P = _of_rows([p.repetition_penalty for p in params], rows_P, scores_RV)
    old_P = scores_RV[rows_P, ids_P]
    scores_RV[rows_P, ids_P] = torch.where(old_P > 0, old_P / penalties_P, old_P * penalties_P)


def _frequency_and_presence(
    scores_RV: torch.Tensor,
    params: Sequence[SamplingParams],
    tokens: Sequence[Sequence[int]],
    output_counts: Sequence[int],
) -> None:
    """Tokens of the output alone: minus frequency_penalty times their count, minus presence_penalty (OpenAI)."""
    chosen = [
        (row, tokens[row][len(tokens[row]) - output_counts[row] :])
        for row, p in enumerate(params)
        if (p.frequency_penalty != 0 or p.presence_penalty != 0) and output_counts[row] > 0
    ]
    if not chosen:
        return
    rows_P, ids_P, counts_P = _count(chosen, scores_RV)
    frequency_P = _of_rows([p.frequency_penalty for p in params], rows_P, scores_RV)
    presence_P = _of_rows([p.presence_penalty for p in params], rows_P, scores_RV)
    scores_RV[rows_P, ids_P] -= frequency_P * counts_P
    scores_RV[rows_P, ids_P] -= presence_P


def _count(
    chosen: Sequence[tuple[int, Sequence[int]]], scores_RV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each row's distinct tokens -> (rows, ids, counts), [P] each."""
    vocab_size, device = scores_RV.shape[1], scores_RV.device
    flat = np.concatenate([row * vocab_size + np.asarray(ids, dtype=np.int64) for row, ids in chosen])
    pairs_P, counts_P = np.unique(flat, return_counts=True)
    rows_P, ids_P = np.divmod(pairs_P, vocab_size)
    return (
        torch.from_numpy(rows_P).to(device),
        torch.from_numpy(ids_P).to(device),
        torch.from_numpy(counts_P).to(device, scores_RV.dtype),
    )


def _of_rows(values: Sequence[float], rows_P: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[rows_P]
