"""Draws tokens from scores: the whole batch in one pass, each row by its own parameters and nothing else's.

Gumbel-max: argmax of (score / temperature + Gumbel noise) is a draw from the softmax. The noise of a token is a pure
function of (seed, choice, output index, token id), so a request that is resumed elsewhere meets the same noise
(DESIGN I6). The functions from the key to the noise are part of what nodes of different versions must agree on: do not
change them.

Shape suffixes: B rows   R some of them   V vocabulary   C candidates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from engine.filters import candidates, filtered_scores, filters_blind, has_filter
from engine.native.draw import draw_kernel
from engine.native.kernels import native_kernels
from engine.penalties import Adjusted, adjusted_scores, has_adjustment, has_penalty
from engine.staging import to_device
from engine.types import NO_TOKEN, SamplingParams

__all__ = ["draws_blind", "filtered_scores", "gumbel_noise", "gumbel_noise_of", "noise_bits", "row_key", "sample"]

_MASK64 = 2**64 - 1
# Constants of splitmix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators").
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def draws_blind(params: SamplingParams) -> bool:
    """Whether `sample` draws such a row without knowing its tokens and, when told to, without looking at its scores."""
    return not has_penalty(params) and (params.temperature == 0 or filters_blind(params))


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

    A row has none where a score is NaN, or the highest score is infinite: weights or KV are broken, or have overflowed.
    The other rows are drawn as ever.

    In this order: logit_bias, min_tokens, repetition, frequency and presence penalty; temperature; min_p, top_k, top_p;
    the draw. temperature 0 takes the highest score of the first group, the lowest id among equals. `tokens` are each
    row's prompt and output, `output_indices` how many of them are output; they and the end-of-sequence tokens are used
    by rows with penalties or min_tokens.

    `blind`: the device's work is queued and not waited for, as long as `draws_blind` holds for every row with a filter.
    The tokens are the same.
    """
    assert len(params) == len(output_indices) == logits_BV.shape[0], (len(params), len(output_indices), logits_BV.shape)
    tokens_B = _drawn(logits_BV, params, output_indices, tokens, eos_token_ids, blind)
    scores_B = logits_BV.gather(1, tokens_B.clamp(min=0)[:, None])[:, 0]
    return torch.where(scores_B.isfinite(), tokens_B, NO_TOKEN)


def _drawn(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    tokens: Sequence[Sequence[int]],
    eos_token_ids: Collection[int],
    blind: bool,
) -> torch.Tensor:
    """As `sample`, which finds a row without a token by the score of what is drawn here: it is not finite."""
    adjusted = [has_adjustment(p, index) for p, index in zip(params, output_indices, strict=True)]
    if not any(adjusted) and all(p.temperature == 0 for p in params):
        return _highest(logits_BV)
    changed = None
    if any(adjusted):
        assert len(tokens) == len(params), "penalties and min_tokens need the rows' tokens"
        changed = adjusted_scores(logits_BV, params, tokens, output_indices, eos_token_ids)
    kernel = None if blind else draw_kernel()
    if kernel is not None and kernel.takes(logits_BV):
        return kernel.draw(logits_BV, params, output_indices, changed)
    return _draw_each_kind(logits_BV, params, output_indices, changed, blind)


def _draw_each_kind(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    changed: Adjusted | None,
    blind: bool,
) -> torch.Tensor:
    """PyTorch's operations: any device. Also what the kernel is compared with."""
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
    """`scores_BV` are the caller's to lose."""
    device, vocab_size = scores_BV.device, scores_BV.shape[1]
    # Greedy rows go through unscaled, unfiltered and without noise: subtracting the maximum keeps their argmax.
    highest_B1 = scores_BV.amax(dim=-1, keepdim=True)  # NaN where any score of the row is
    scores_BV -= highest_B1
    scores_BV /= to_device(np.array([p.temperature or 1.0 for p in params]), device)[:, None]
    keys = [row_key(p.seed, p.choice, index) for p, index in zip(params, output_indices, strict=True)]
    filtered = [i for i, p in enumerate(params) if p.temperature > 0 and has_filter(p)]
    drawn = [i for i, p in enumerate(params) if p.temperature > 0 and not has_filter(p)]
    if drawn:
        scores_BV[_rows(drawn, device)] += gumbel_noise([keys[i] for i in drawn], vocab_size, device)
    tokens_B = torch.empty(len(params), dtype=torch.int64, device=device)
    whole = [i for i in range(len(params)) if not (params[i].temperature > 0 and has_filter(params[i]))]
    if whole:
        whole_R = _rows(whole, device)
        tokens_B[whole_R] = scores_BV[whole_R].argmax(dim=-1)
    if filtered:
        rows = _rows(filtered, device)
        keys_R = _on_device([keys[i] for i in filtered], device)
        for part in candidates(scores_BV[rows], [params[i] for i in filtered], blind=blind):
            noisy_RC = part.scores_RC + _gumbel(_noise_bits(keys_R[part.rows_R], part.ids_RC))
            best_R1 = noisy_RC.amax(dim=-1, keepdim=True)
            tokens_B[rows[part.rows_R]] = part.ids_RC.masked_fill(noisy_RC < best_R1, vocab_size).amin(dim=-1)
    return torch.where(highest_B1[:, 0].isfinite(), tokens_B, NO_TOKEN)


def _rows(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(rows, dtype=np.int64), device)


def row_key(seed: int, choice: int, output_index: int) -> int:
    """The 64-bit key of one draw: where its stream of noise over the vocabulary starts. All arguments modulo 2**64."""
    key = 0
    for part in (seed, choice, output_index):
        key = _mix((key ^ (part & _MASK64)) + _GOLDEN & _MASK64)
    return key


def gumbel_noise(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Standard Gumbel noise of every token for draws with the given `row_key`s -> float64 [B, V]."""
    return _gumbel(noise_bits(keys, vocab_size, device))


def gumbel_noise_of(keys: Sequence[int], ids_RC: torch.Tensor) -> torch.Tensor:
    """The same noise, of the given tokens of each row only -> float64 [R, C]."""
    return _gumbel(_noise_bits(_on_device(keys, ids_RC.device), ids_RC))


def noise_bits(keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """52 random bits of every token -> int64 [B, V]: the splitmix64 stream that starts at the row's key.

    52 and not 53: `(bits + 0.5) / 2**52` is then exact in float64 and strictly between 0 and 1.
    """
    device = torch.device(device)
    return _noise_bits(_on_device(keys, device), torch.arange(vocab_size, dtype=torch.int64, device=device)[None, :])


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-52).log_().neg_().log_().neg_()


def _on_device(keys: Sequence[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array([_signed(key) for key in keys], dtype=np.int64), device)


def _noise_bits(keys_R: torch.Tensor, ids_RC: torch.Tensor) -> torch.Tensor:
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
