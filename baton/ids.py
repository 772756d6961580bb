"""Names for the things that cross node boundaries. NewTypes: no cost at run time, no mixing up in review.

What several of them name together is a tuple: hashed and compared without Python code, since every book of a node is
keyed by these, and looked into for each token.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

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


class Pair(NamedTuple):
    """One receiver process and one writer process."""

    receiver: Incarnation
    writer: Incarnation


class RequestKey(NamedTuple):
    """One attempt at one request."""

    request: RequestId
    attempt: Attempt
