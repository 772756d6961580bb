"""What `baton bench` sends and when: lengths, arrivals, the tokens of prompts. Pure, and the same for the same seed.

An open loop's arrival times are fixed before anything is sent, so that a slow server cannot put its own load off
(coordinated omission: G. Tene, "How NOT to Measure Latency").

A trace is read as Mooncake publishes them: JSON lines, one request each.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds; a hash id stands for one block of the prompt and all before it (512 tokens there), so
equal ids are a prefix that can be reused. `hash_ids` may be missing: then prompts share nothing. Format and files:
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces. Nothing but the current line is kept.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

BLOCK_TOKENS: Final = 512
_LINE_CHARS_MAX: Final = 1 << 20
_HASH_MAX: Final = 1 << 39


class TraceError(ValueError):
    """The file is no trace; the message names file and line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScale:
    """How a trace is made to fit a cluster of another size."""

    speed: float = 1.0
    """Recorded seconds that pass in one second."""
    length: float = 1.0
    """Factor of prompts, answers and shared blocks."""
    block_tokens: int = BLOCK_TOKENS

    def tokens(self, recorded: int) -> int:
        return max(1, min(LENGTH_MAX, round(recorded * self.length)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def check_trace(path: Path) -> int:
    """Read all of it, so that nothing is wrong later in mid-run; how many requests there are. Raises TraceError."""
    requests = sum(1 for _ in _lines(path))
    if not requests:
        raise TraceError(f"{path} has no request in it")
    return requests


def trace_requests(path: Path, *, scale: TraceScale, caps: Caps) -> Iterator[Planned]:
    """The requests in the order of the file; the first one is due at 0. Raises TraceError where the file has changed
    since `check_trace`."""
    first_ms: float | None = None
    for index, line in enumerate(_lines(path)):
        first_ms = line.timestamp_ms if first_ms is None else first_ms
        length = min(scale.tokens(line.input_length), caps.prompt_tokens_max)
        yield Planned(
            index=index,
            due_s=(line.timestamp_ms - first_ms) / 1000 / scale.speed,
            pieces=_pieces(line.hash_ids, length, scale.tokens(scale.block_tokens), index),
            output_tokens=min(scale.tokens(line.output_length), caps.output_tokens_max),
        )


def _pieces(hash_ids: tuple[int, ...], length: int, block: int, index: int) -> tuple[Piece, ...]:
    """One for each block that the prompt has room for, and what is left of it."""
    pieces, left = [], length
    for hash_id in hash_ids:
        if left == 0:
            break
        pieces.append(Piece(1 + hash_id, min(block, left)))
        left -= pieces[-1].tokens
    if left:
        pieces.append(Piece(own_content(index), left))
    return tuple(pieces)


def _lines(path: Path) -> Iterator[_Line]:
    before_ms = 0.0
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while text := file.readline(_LINE_CHARS_MAX):
                number += 1
                if text.strip():
                    line = _parsed(text, f"{path}:{number}")
                    if line.timestamp_ms < before_ms:
                        raise TraceError(f"{path}:{number}: timestamp {line.timestamp_ms:g} is before the line above's")
                    before_ms = line.timestamp_ms
                    yield line
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8") from error


def _parsed(text: str, place: str) -> _Line:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise TraceError(f"{place}: no JSON object on one line of at most {_LINE_CHARS_MAX} characters") from error
    if not isinstance(found, dict):
        raise TraceError(f"{place}: no JSON object")
    timestamp = found.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise TraceError(f"{place}: timestamp must be milliseconds, not {json.dumps(timestamp)}")
    hashes = found.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(_is_whole(each, 0, _HASH_MAX) for each in hashes):
        raise TraceError(f"{place}: hash_ids must be a list of whole numbers under {_HASH_MAX}")
    return _Line(
        timestamp_ms=timestamp,
        input_length=_count(found, "input_length", place),
        output_length=_count(found, "output_length", place),
        hash_ids=tuple(hashes),
    )


def _count(found: dict[str, Any], name: str, place: str) -> int:
    value = found.get(name)
    if not _is_whole(value, 1, LENGTH_MAX):
        raise TraceError(f"{place}: {name} must be a whole number from 1 to {LENGTH_MAX}, not {json.dumps(value)}")
    assert isinstance(value, int)
    return value


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


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
