"""What `baton bench` sends and when: lengths, arrivals, the tokens of prompts. Pure, and the same for the same seed.

An open loop's arrival times are fixed before anything is sent, so that a slow server cannot put its own load off
(coordinated omission: G. Tene, "How NOT to Measure Latency").
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import Final

import numpy as np

LENGTH_MAX: Final = 1 << 20
LENGTHS_HELP: Final = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or exponential:MEAN"
_SHARED_SEED: Final = 0
"""Whose content the prefix is that all prompts share."""
_OWN_SEEDS: Final = 1 << 40
"""Contents from here on belong to one request each; those of traces are below."""


def _clipped(length: float) -> int:
    return max(1, min(LENGTH_MAX, round(length)))


@dataclass(frozen=True, slots=True)
class Fixed:
    length: int

    def draw(self, rng: random.Random) -> int:
        del rng
        return self.length


@dataclass(frozen=True, slots=True)
class Uniform:
    """Both ends included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """`sigma` is the standard deviation of the logarithm: 0 is fixed, 1 is a long tail."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> int:
        return _clipped(math.exp(min(rng.gauss(math.log(self.median), self.sigma), math.log(LENGTH_MAX))))


@dataclass(frozen=True, slots=True)
class Exponential:
    mean: float

    def draw(self, rng: random.Random) -> int:
        return _clipped(rng.expovariate(1 / self.mean))


Lengths = Fixed | Uniform | Lognormal | Exponential
"""A distribution of whole numbers from 1 to LENGTH_MAX."""


def parse_lengths(text: str) -> Lengths:
    """A distribution as LENGTHS_HELP writes it. Raises ValueError with a sentence for the user."""
    kind, *rest = text.split(":")
    if not rest:
        return Fixed(_length(kind))
    try:
        if kind == "uniform" and len(rest) == 2:
            low, high = map(_length, rest)
            if low > high:
                raise ValueError(f"{low} is above {high}")
            return Uniform(low, high)
        if kind == "lognormal" and len(rest) == 2:
            return Lognormal(_number(rest[0], low=1.0), _number(rest[1], low=0.0, high=10.0))
        if kind == "exponential" and len(rest) == 1:
            return Exponential(_number(rest[0], low=1.0))
    except ValueError as error:
        raise ValueError(f"'{text}' is no distribution of lengths: {error}") from None
    raise ValueError(f"'{text}' is no distribution of lengths; write it as {LENGTHS_HELP}")


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= LENGTH_MAX):
        raise ValueError(f"'{text}' is no number from 1 to {LENGTH_MAX}")
    return int(text)


def _number(text: str, *, low: float, high: float = LENGTH_MAX) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"'{text}' is no number") from None
    if not low <= number <= high:
        raise ValueError(f"{text} is not from {low:g} to {high:g}")
    return number


class Arrivals(Enum):
    POISSON = "poisson"  # gaps from an exponential distribution: many clients that know nothing of each other
    EVEN = "even"  # the same gap every time


def arrival_times(arrivals: Arrivals, rate_per_s: float, rng: random.Random) -> Iterator[float]:
    """Seconds after the beginning, ascending, without end. Raises nothing; `rate_per_s` is above 0."""
    assert rate_per_s > 0, rate_per_s
    at_s = 0.0
    for n in count(1):
        # Even times are not summed up: a sum drifts.
        at_s = n / rate_per_s if arrivals is Arrivals.EVEN else at_s + rng.expovariate(rate_per_s)
        yield at_s


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: the first `tokens` tokens of the endless text `content`. Equal contents begin alike."""

    content: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request that is going to be sent."""

    index: int
    due_s: float | None
    """Seconds after the beginning of the run. None: as soon as a worker of the closed loop is free."""
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Where drawn or recorded lengths are cut off."""

    prompt_tokens_max: int = LENGTH_MAX
    output_tokens_max: int = LENGTH_MAX


def drawn_requests(
    *, prompt: Lengths, output: Lengths, shared_prefix_tokens: int, caps: Caps, seed: int
) -> Iterator[Planned]:
    """Requests of drawn lengths, without end and without times. The shared prefix is part of the prompt's length,
    whose last token at least is its own."""
    rng = random.Random(f"lengths {seed}")
    for index in count():
        length = min(prompt.draw(rng), caps.prompt_tokens_max)
        shared = min(shared_prefix_tokens, length - 1)
        pieces = (Piece(_SHARED_SEED, shared), Piece(own_content(index), length - shared))
        yield Planned(
            index=index,
            due_s=None,
            pieces=pieces if shared else pieces[1:],
            output_tokens=min(output.draw(rng), caps.output_tokens_max),
        )


def own_content(index: int) -> int:
    """A content that no other request has."""
    return _OWN_SEEDS + index


def at_times(requests: Iterable[Planned], times_s: Iterable[float]) -> Iterator[Planned]:
    """The same requests at other times; ends with the shorter of the two."""
    for request, due_s in zip(requests, times_s, strict=False):
        yield replace(request, due_s=due_s)


def without_times(requests: Iterable[Planned]) -> Iterator[Planned]:
    """For a closed loop, in which a request comes when the one before it is over."""
    for request in requests:
        yield replace(request, due_s=None)


def prompt_ids(planned: Planned, *, ids_from: int, ids_to: int, seed: int) -> list[int]:
    """The prompt's token ids, each in `ids_from <= id < ids_to`. The seed is that of the run: another seed's prompts
    share nothing with these, so that a second run does not find the first one's in the caches."""
    assert ids_from < ids_to, (ids_from, ids_to)
    ids: list[int] = []
    for piece in planned.pieces:
        draws = np.random.Generator(np.random.Philox(key=[seed % (1 << 64), piece.content]))
        ids += draws.integers(ids_from, ids_to, piece.tokens).tolist()
    return ids
