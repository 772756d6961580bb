"""Names for the things that cross node boundaries. NewTypes: no cost at run time, no mixing up in review."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

NodeName = NewType("NodeName", str)
Incarnation = NewType("Incarnation", int)
"""Random non-zero 64-bit number of one process start; two starts of "decode-0" are two incarnations."""
RequestId = NewType("RequestId", str)
Attempt = NewType("Attempt", int)
GrantId = NewType("GrantId", bytes)
"""128-bit random id of one grant: the right of one writer to write into the blocks it names."""
Epoch = NewType("Epoch", int)
BlockId = NewType("BlockId", int)
ReserveNumber = NewType("ReserveNumber", int)
"""Position of a Reserve in its pair's numbering, from 0; never reused within a pair."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pair:
    """One receiver process and one writer process."""

    receiver: Incarnation
    writer: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class RequestKey:
    """One attempt at one request."""

    request: RequestId
    attempt: Attempt
