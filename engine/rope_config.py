"""Rotary position embedding as configs describe it, in both spellings: `rope_theta` with `rope_scaling` (transformers
before 5), and `rope_parameters` (transformers 5). Imports no torch.

Nothing here goes beyond the model's stated context (`max_position_embeddings`), so the `dynamic` scaling, which begins
there, is the plain embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config_keys import Keys
from engine.model_errors import ConfigFileError, UnsupportedRopeError

ROPE_THETA_DEFAULT = 10_000.0
"""Base of the rotary frequencies where a config is silent: checkpoints from before the key existed mean this."""
YARN_BETA_FAST_DEFAULT = 32.0
YARN_BETA_SLOW_DEFAULT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Stretching of the low rotary frequencies as in Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_len: int

    def __post_init__(self) -> None:
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_context_len > 0):
            raise ConfigFileError(
                "rope scaling llama3 needs factor > 0, 0 < low_freq_factor < high_freq_factor and "
                f"original_max_position_embeddings > 0; found {self}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """All frequencies divided by `factor` (`rope_type: linear`; Chen et al. 2023, position interpolation)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Slow frequencies divided by `factor`, fast ones kept, a ramp over the dimensions between (`rope_type: yarn`;
    Peng et al. 2023).
    """

    factor: float
    original_context_len: int
    beta_fast: float
    """Turns within the original context above which a frequency is kept."""
    beta_slow: float
    """Turns below which it is divided."""
    truncate: bool
    """The ends of the ramp are whole dimensions."""
    attention_factor: float
    """Queries and keys are both scaled by this."""

    def __post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ConfigFileError(f"rope scaling yarn needs beta_fast >= beta_slow; found {self}")


Scaling = Llama3Scaling | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding over the whole head dimension."""

    theta: float
    scaling: Scaling | None = None


def parse_rope(keys: Keys, context_len_max: int) -> RopeConfig:
    """Both spellings come down to one object of settings, with `rope_theta` inside it or beside it.

    Raises ConfigFileError, UnsupportedRopeError.
    """
    settings = keys.section("rope_parameters") or keys.section("rope_scaling")
    where = f"{keys.source}: rope_parameters" if keys.section("rope_parameters") else f"{keys.source}: rope_scaling"
    rope = Keys(settings, where)
    theta_outside = keys.positive_float("rope_theta", default=ROPE_THETA_DEFAULT)
    theta = rope.positive_float("rope_theta", default=theta_outside)
    _refuse_parts(settings, keys, where)
    return RopeConfig(theta=theta, scaling=_scaling(rope, keys, context_len_max))


def _refuse_parts(settings: Mapping[str, Any], keys: Keys, where: str) -> None:
    nested = [key for key, value in settings.items() if isinstance(value, dict)]
    partial = settings.get("partial_rotary_factor", keys.values.get("partial_rotary_factor"))
    if nested or partial not in (None, 1, 1.0):
        what = f"a setting per layer type ({', '.join(nested)})" if nested else f"partial_rotary_factor {partial}"
        raise UnsupportedRopeError(f"{where}: {what} is not supported; one setting over the whole head is")


def _scaling(rope: Keys, keys: Keys, context_len_max: int) -> Scaling | None:
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type == "dynamic":
        rope.positive_float("factor")
        return None
    if rope_type == "linear":
        return LinearScaling(factor=rope.positive_float("factor"))
    # Where both are there, transformers takes the one outside.
    inner = rope.positive_int("original_max_position_embeddings", default=context_len_max)
    original_context_len = keys.positive_int("original_max_position_embeddings", default=inner)
    if rope_type == "llama3":
        return Llama3Scaling(
            factor=rope.positive_float("factor"),
            low_freq_factor=rope.positive_float("low_freq_factor"),
            high_freq_factor=rope.positive_float("high_freq_factor"),
            original_context_len=original_context_len,
        )
    if rope_type == "yarn":
        factor = rope.positive_float("factor", default=context_len_max / original_context_len)
        return YarnScaling(
            factor=factor,
            original_context_len=original_context_len,
            beta_fast=rope.optional_float("beta_fast") or YARN_BETA_FAST_DEFAULT,
            beta_slow=rope.optional_float("beta_slow") or YARN_BETA_SLOW_DEFAULT,
            truncate=rope.flag("truncate", default=True),
            attention_factor=_yarn_attention_factor(rope, factor),
        )
    raise UnsupportedRopeError(
        f"{rope.source}: rope type {rope_type!r} is not supported; supported are default, linear, dynamic, llama3, yarn"
    )


def _yarn_attention_factor(rope: Keys, factor: float) -> float:
    if rope.values.get("attention_factor") is not None:
        return rope.positive_float("attention_factor")
    mscale, mscale_all_dim = rope.optional_float("mscale"), rope.optional_float("mscale_all_dim")
    if mscale is not None and mscale_all_dim is not None:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
