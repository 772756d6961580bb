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

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from pydantic import BaseModel, Field, ValidationError

LENGTH_MAX: Final = 1 << 20
LENGTHS_HELP: Final = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA or exponential:MEAN"
BLOCK_TOKENS: Final = 512
_LINE_CHARS_MAX: Final = 1 << 20
_SHARED_SEED: Final = 0
"""Whose content the prefix is that all prompts share."""
_OWN_SEEDS: Final = 1 << 40
"""Contents from here on belong to one request each; those of traces are below."""
_Length = Annotated[int, Field(ge=1, le=LENGTH_MAX)]
_HashId = Annotated[int, Field(ge=0, lt=_OWN_SEEDS - 1)]


class TraceError(ValueError):
    """The file is no trace; the message names file and line."""


class _Line(BaseModel, strict=True):
    timestamp: Annotated[float, Field(ge=0, lt=1e15)]
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_HashId, ...] = ()


def check_trace(path: Path) -> int:
    """Read all of it, so that nothing is wrong later in mid-run; how many requests there are. Raises TraceError."""
    requests = sum(1 for _ in _lines(path))
    if not requests:
        raise TraceError(f"{path} has no request in it")
    return requests


def trace_requests(
    path: Path,
    *,
    speed: float = 1.0,
    length_scale: float = 1.0,
    block_tokens: int = BLOCK_TOKENS,
    prompt_tokens_max: int = LENGTH_MAX,
    output_tokens_max: int = LENGTH_MAX,
) -> Iterator[Planned]:
    """The requests in the order of the file; the first one is due at 0. Raises TraceError where the file has changed
    since `check_trace`.

    `speed` is how many recorded seconds pass in one second, `length_scale` the factor of prompts, answers and blocks,
    `block_tokens` how many tokens a hash id stands for; the last two cut lengths off.
    """

    def scaled(recorded: int) -> int:
        return _clipped(recorded * length_scale)

    first_ms: float | None = None
    for index, line in enumerate(_lines(path)):
        first_ms = line.timestamp if first_ms is None else first_ms
        length = min(scaled(line.input_length), prompt_tokens_max)
        yield Planned(
            index=index,
            due_s=(line.timestamp - first_ms) / 1000 / speed,
            pieces=_pieces(line.hash_ids, length, scaled(block_tokens), index),
            output_tokens=min(scaled(line.output_length), output_tokens_max),
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
        pieces.append(Piece(_OWN_SEEDS + index, left))
    return tuple(pieces)


def _lines(path: Path) -> Iterator[_Line]:
    before_ms = 0.0
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            while text := file.readline(_LINE_CHARS_MAX):
                number += 1
                if text.strip():
                    line = _Line.model_validate_json(text)
                    if line.timestamp < before_ms:
                        raise TraceError(f"{path}:{number}: timestamp {line.timestamp:g} is before the line above's")
                    before_ms = line.timestamp
                    yield line
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f" {part}" for part in first["loc"][:1])
        raise TraceError(f"{path}:{number}:{where} {first['msg'].lower()}") from error
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8") from error


_NUMBERS: Final = {
    "fixed": ((int, 1, LENGTH_MAX),),
    "uniform": ((int, 1, LENGTH_MAX), (int, 1, LENGTH_MAX)),
    "lognormal": ((float, 1, LENGTH_MAX), (float, 0, 10)),
    "exponential": ((float, 1, LENGTH_MAX),),
}
"""What each distribution is given: type, least, most."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1 to LENGTH_MAX.

    A uniform one includes both ends. The sigma of a lognormal one is the standard deviation of the logarithm: 0 is
    fixed, 1 is a long tail.
    """

    kind: str
    numbers: tuple[float, ...]

    def __str__(self) -> str:
        shown = [f"{number:.7g}" for number in self.numbers]
        return shown[0] if self.kind == "fixed" else ":".join([self.kind, *shown])

    def draw(self, rng: random.Random) -> int:
        first, last = self.numbers[0], self.numbers[-1]
        match self.kind:
            case "uniform":
                return rng.randint(int(first), int(last))
            case "lognormal":
                return _clipped(math.exp(min(rng.gauss(math.log(first), last), math.log(LENGTH_MAX))))
            case "exponential":
                return _clipped(rng.expovariate(1 / first))
        return int(first)


def parse_lengths(text: str) -> Lengths:
    """A distribution as LENGTHS_HELP writes it. Raises ValueError with a sentence for the user."""
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    limits = _NUMBERS.get(kind, ())
    if len(limits) != len(rest):
        raise ValueError(f"'{text}' is no distribution of lengths; write it as {LENGTHS_HELP}")
    try:
        numbers = tuple(_number(part, *limit) for part, limit in zip(rest, limits, strict=True))
        if kind == "uniform" and numbers[0] > numbers[1]:
            raise ValueError(f"{numbers[0]} is above {numbers[1]}")
    except ValueError as error:
        raise ValueError(f"'{text}' is no distribution of lengths: {error}") from None
    return Lengths(kind, numbers)


def _number(text: str, kind: type[int | float], low: int, high: int) -> float:
    try:
        number = kind(text)
    except ValueError:
        raise ValueError(f"'{text}' is no number") from None
    if not low <= number <= high:
        raise ValueError(f"{text} is not from {low} to {high}")
    return number


def _clipped(length: float) -> int:
    return max(1, min(LENGTH_MAX, round(length)))


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
    conversation: int | None = None
    """Its number, of a turn: what was said before comes ahead of `pieces`."""

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


def drawn_requests(
    *,
    prompt: Lengths,
    output: Lengths,
    seed: int,
    shared_prefix_tokens: int = 0,
    prompt_tokens_max: int = LENGTH_MAX,
    output_tokens_max: int = LENGTH_MAX,
) -> Iterator[Planned]:
    """Requests of drawn lengths, without end and without times. The shared prefix is part of the prompt's length,
    whose last token at least is its own. The last two cut lengths off."""
    rng = random.Random(f"lengths {seed}")
    for index in count():
        length = min(prompt.draw(rng), prompt_tokens_max)
        shared = min(shared_prefix_tokens, length - 1)
        pieces = (Piece(_SHARED_SEED, shared), Piece(_OWN_SEEDS + index, length - shared))
        yield Planned(
            index=index,
            due_s=None,
            pieces=pieces if shared else pieces[1:],
            output_tokens=min(output.draw(rng), output_tokens_max),
        )


def turns(conversations: int, turns_each: int, *, question: Lengths, answer: Lengths, seed: int) -> Iterator[Planned]:
    """The turns of conversations: the first turn of each one, then the second of each. So a conversation's KV lies
    unused while all others have their turn."""
    rng = random.Random(f"lengths {seed}")
    for index in range(conversations * turns_each):
        yield Planned(
            index=index,
            due_s=None,
            pieces=(Piece(_OWN_SEEDS + index, question.draw(rng)),),
            output_tokens=answer.draw(rng),
            conversation=index % conversations,
        )


def at_times(requests: Iterable[Planned], times_s: Iterable[float | None]) -> Iterator[Planned]:
    """The same requests at other times; ends with the shorter of the two."""
    for request, due_s in zip(requests, times_s, strict=False):
        yield replace(request, due_s=due_s)


def prompt_ids(planned: Planned, *, ids_from: int, ids_to: int, seed: int) -> list[int]:
    """The prompt's token ids, each in `ids_from <= id < ids_to`. The seed is that of the run: another seed's prompts
    share nothing with these, so that a second run does not find the first one's in the caches."""
    assert ids_from < ids_to, (ids_from, ids_to)
    ids: list[int] = []
    for piece in planned.pieces:
        draws = np.random.Generator(np.random.Philox(key=[seed % (1 << 64), piece.content]))
        ids += draws.integers(ids_from, ids_to, piece.tokens).tolist()
    return ids
