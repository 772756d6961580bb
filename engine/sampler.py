"""Draws tokens from scores: the whole batch in one pass, each row by its own parameters and nothing else's.

Gumbel-max: argmax of (score / temperature + Gumbel noise) is a draw from the softmax. The noise of a token is a pure
function of (seed, choice, output index, token id), so a request that is resumed elsewhere meets the same noise
(DESIGN I6). The functions from the key to the noise are part of what nodes of different versions must agree on: do not
change them.

Shape suffixes: B rows   R rows with a filter   V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.types import SamplingParams

_MASK64 = 2**64 - 1
# Constants of splitmix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def sample(logits_BV: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]) -> torch.Tensor:
    """Draw one token for each row -> int64 [B]. Mutates nothing.

    temperature 0 takes the highest score, the lowest id among equals. Otherwise the order is temperature, top_k, top_p;
    the nucleus includes the token that crosses top_p, and equal scores rank by token id.
    """
    assert len(params) == len(output_indices) == logits_BV.shape[0], (len(params), len(output_indices), logits_BV.shape)
    if all(p.temperature == 0 for p in params):
        return logits_BV.argmax(dim=-1)
    device = logits_BV.device
    # Greedy rows go through unscaled, unfiltered and without noise: subtracting the maximum keeps their argmax.
    scores_BV = logits_BV.to(torch.float64)
    scores_BV = scores_BV - scores_BV.amax(dim=-1, keepdim=True)
    scores_BV /= torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float64, device=device)[:, None]

    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1)]
    if filtered:
        rows_R = torch.tensor(filtered, device=device)
        scores_BV[rows_R] = filtered_scores(scores_BV[rows_R], [params[i] for i in filtered])

    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    keys = [row_key(params[i].seed, params[i].choice, output_indices[i]) for i in drawn]
    scores_BV[torch.tensor(drawn, device=device)] += gumbel_noise(keys, logits_BV.shape[1], device)
    return scores_BV.argmax(dim=-1)


def filtered_scores(scores_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """-inf where top_k or top_p excludes a token. top_p is of the probability that top_k has left."""
    device, vocab_size = scores_RV.device, scores_RV.shape[1]
    top_k_R = torch.tensor([min(p.top_k, vocab_size) or vocab_size for p in params], device=device)
    top_p_R = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)
    ranked_RV, ids_RV = torch.sort(scores_RV, dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(vocab_size, device=device)
    ranked_RV = ranked_RV.masked_fill(ranks_V >= top_k_R[:, None], float("-inf"))
    probabilities_RV = ranked_RV.softmax(dim=-1)
    before_RV = probabilities_RV.cumsum(dim=-1) - probabilities_RV
    # top_p 1 is off, whatever the sum rounds to; the first token is always kept.
    outside_RV = (before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1) & (ranks_V > 0)
    ranked_RV = ranked_RV.masked_fill(outside_RV, float("-inf"))
    return torch.empty_like(scores_RV).scatter_(-1, ids_RV, ranked_RV)


def row_key(seed: int, choice: int, output_index: int) -> int:
    """The 64-bit key of one draw: where its stream of noise over the vocabulary starts. All arguments modulo 2**64."""
    key = 0
    for part in (seed, choice, output_index):
        key = _mix((key ^ (part & _MASK64)) + _GOLDEN & _MASK64)
    return key


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard Gumbel noise of every token for draws with the given `row_key`s -> float64 [B, V]."""
    uniform_BV = noise_bits(keys, vocab_size, device).to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform_BV.log_().neg_().log_().neg_()


def noise_bits(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """52 random bits of every token -> int64 [B, V]: the splitmix64 stream that starts at the row's key.

    52 and not 53: `(bits + 0.5) / 2**52` is then exact in float64 and strictly between 0 and 1.
    """
    keys_B1 = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)[:, None]
    counters_V = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device)
    z_BV = keys_B1 + counters_V * _signed(_GOLDEN)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        z_BV.bitwise_xor_(_shift_right(z_BV, shift)).mul_(_signed(multiplier))
    z_BV.bitwise_xor_(_shift_right(z_BV, _SHIFTS[-1]))
    return _shift_right(z_BV, 12)


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
