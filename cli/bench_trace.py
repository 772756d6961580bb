"""Trace files of requests for `baton bench`, as Mooncake publishes them: JSON lines, one request each.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

`timestamp` is in milliseconds; a hash id stands for one block of the prompt and all before it (512 tokens there), so
equal ids are a prefix that can be reused. `hash_ids` may be missing: then prompts share nothing. Format and files:
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces. Nothing but the current line is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cli.bench_plan import LENGTH_MAX, Caps, Piece, Planned, own_content

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
